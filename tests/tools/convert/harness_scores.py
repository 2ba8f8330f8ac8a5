"""Scores the last words of texts with lm-evaluation-harness and with this project's evaluate, on the same GPT.

python tests/tools/convert/harness_scores.py EMPTY_DIRECTORY LM_EVAL; the last line of its output is a JSON object.
LM_EVAL is
the harness's program, which has an environment of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.convert.gpt_scores import command, make_gpt

TEXTS = ["The man walks in the park", "She said that the house was on fire", "A dog runs along the river"]
TASK = """\
task: last_word
dataset_path: json
dataset_kwargs:
  data_files:
    test: {texts}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' ' + text.split(' ')[-1]}}}}"
metric_list:
  - metric: perplexity
  - metric: acc
"""


def of_the_harness(directory: Path, program: str) -> dict[str, Any]:
    tasks = directory / "tasks"
    tasks.mkdir()
    (tasks / "last_word.yaml").write_text(TASK.format(texts=directory / "texts.jsonl"))
    words = ["--model", "hf", "--model_args", f"pretrained={directory / 'gpt'}", "--tasks", "last_word"]
    words += ["--include_path", str(tasks), "--device", "cpu", "--output_path", str(directory / "results")]
    own = {"PATH": os.environ["PATH"], "HOME": str(directory), "HF_HUB_OFFLINE": "1"}
    subprocess.run([program, *words], env=own, check=True, timeout=400, capture_output=True)
    (results,) = (directory / "results").rglob("results_*.json")
    return json.loads(results.read_text())["results"]["last_word"]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    (target / "gpt").mkdir()
    make_gpt(target / "gpt")
    (target / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    harness = of_the_harness(target, sys.argv[2])
    ours = json.loads(command("evaluate", str(target / "gpt"), "--lambada", str(target / "texts.jsonl"), "--json"))
    print(json.dumps({"harness": [harness["perplexity,none"], harness["acc,none"]]} | ours))
