"""The page "Is my release right?", which answers offline from data/releases.json alone."""

import json
from pathlib import Path

import msgspec

from t5bench.record.files import write_whole
from t5bench_ledger.judge import NOTED
from t5bench_ledger.modes import LIBRARY, NAMES
from t5bench_ledger.releases import ReleaseVerdicts
from t5bench_ledger.spans import published
from t5bench_ledger.words import size_in_words

TEMPLATE = Path(__file__).with_suffix(".html")
# What is left of a long error: a page is no log.
LONGEST_SENTENCE = 160


def page(verdicts: ReleaseVerdicts) -> str:
    """One self-contained HTML page."""
    content = msgspec.to_builtins(verdicts)
    for fault in content["faults"]:
        if fault["verdict"] in ("wrong", *NOTED):
            fault["size"] = size_in_words(fault.pop("off_by", None))
        fault.pop("torch", None)
        if "sentence" in fault:
            fault["sentence"] = fault["sentence"][:LONGEST_SENTENCE]
    data = {
        "published": published(),
        "libraries": LIBRARY,
        "strategies": NAMES,
        "noted": NOTED,
        "modes": {mode["name"]: mode["meaning"] for mode in content["modes"]},
        "measured": [{"software": each["software"], "right": each["right"]} for each in content["measured"]],
        "faults": content["faults"],
        "upstream": content["upstream"],
    }
    in_script = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text().replace("@DATA@", in_script)


def write(path: Path, verdicts: ReleaseVerdicts) -> None:
    """Raises OSError."""
    write_whole(path, page(verdicts))
