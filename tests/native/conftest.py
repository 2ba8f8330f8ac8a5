"""Fixtures of the native engine's tests: data, real runs under torchrun, and a Megatron-DeepSpeed to compare with."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import REPO_ROOT
from native_runs import LAYOUTS, TOKENIZER, Trained, command_line, torchrun

Train = Callable[..., Trained]


@pytest.fixture(scope="session")
def native_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of the bundled sample's .bin and .idx."""
    prefix = tmp_path_factory.mktemp("native data") / "xsum_text_document"
    text = prefix.with_name("text.jsonl")
    articles = (REPO_ROOT / "megatron_data" / "sample" / "articles.jsonl").read_text().splitlines()
    text.write_text("".join(json.dumps({"text": json.loads(line)["document"]}) + "\n" for line in articles))
    build = [sys.executable, "-m", "t5bench.corpus.build", "--input", str(text), "--output-prefix", str(prefix)]
    subprocess.run([*build, "--tokenizer", str(TOKENIZER)], cwd=REPO_ROOT, check=True, timeout=120)
    return prefix


@pytest.fixture(scope="session")
def train(native_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """train(layout, *flags, iterations=20, precision="", **environment): a run of the native engine to its end."""

    def run(layout: str, *flags: str, iterations: int = 20, precision: str = "", **environment: str) -> Trained:
        directory = tmp_path_factory.mktemp(layout)
        line = [*command_line(layout, native_data, directory, iterations, precision), *flags]
        result = torchrun(LAYOUTS[layout][0], REPO_ROOT / "native" / "pretrain_t5.py", line, **environment)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
        return Trained(directory, result.stdout)

    return run


@pytest.fixture(scope="session")
def trained(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """trained(layout): its one run of 20 iterations, with an evaluation and a checkpoint at 10 and 20."""
    runs: dict[str, Trained] = {}

    def get(layout: str) -> Trained:
        if layout not in runs:
            saved = tmp_path_factory.mktemp("checkpoints") / layout
            flags = ["--save", str(saved), "--save-interval", "10", "--eval-interval", "10", "--eval-iters", "1"]
            runs[layout] = train(layout, *flags)
            runs[layout].directory = saved
        return runs[layout]

    return get


@pytest.fixture(scope="session")
def ask_megatron(megatron_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """ask_megatron(question, *arguments): runs megatron_answers.py inside the engine; the file of its answer."""

    def ask(question: str, *questions: str) -> Path:
        answer = tmp_path_factory.mktemp("answer") / f"{question}.pt"
        script = Path(__file__).with_name("megatron_answers.py")
        environment = {"PYTHONPATH": str(megatron_dir), "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        result = torchrun(1, script, [question, str(answer), *questions], **environment)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
        return answer

    return ask
