"""The page that answers offline: what it says of every release is what was measured."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from t5bench_ledger import tables
from t5bench_ledger.changes import standing
from t5bench_ledger.modes import library_of
from t5bench_ledger.spans import public, published

PAGE = tables.PAGES / "is_my_release_right.html"
NEEDS_NODE = pytest.mark.skipif(not shutil.which("node"), reason="no Node.js is here to run the page's script")


def printed(*words: str) -> list[list[str]]:
    command = ["node", str(Path(__file__).with_name("page_answers.js")), str(PAGE), *words]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_it_is_small_and_loads_nothing():
    text = PAGE.read_text()
    assert len(text.encode()) <= 100_000
    assert "src=" not in text and "@import" not in text and "fetch(" not in text and "<link" not in text


@NEEDS_NODE
def test_it_says_of_every_release_what_was_measured_and_nothing_of_others():
    measured = set()
    for cell in standing(tables.read(tables.CELLS)):
        library = library_of(cell["strategy"])
        release = public(cell["torch"]) if library == "torch" else cell["release"]
        assert release in published()[library]
        measured.add((library, release, cell["strategy"], cell["mode"], cell["verdict"]))
    assert set(map(tuple, printed())) == measured


@NEEDS_NODE
@pytest.mark.parametrize(
    ("address", "kind", "said"),
    [
        (
            "#transformers/5.2.0/trainer%7Cequal%20targets",
            "no",
            "The gradient norm is off by 75 % from iteration 1 on.",
        ),
        ("#transformers/5.5.4/trainer%7Cequal%20targets", "yes", "Yes."),
        ("#torch/2.4.0/fsdp2%7Cbf16", "", "Not tried."),
        ("#torch/2.13.0/fsdp2%20tensor%7Cbf16", "noted", "It rounds more than asked."),
    ],
)
def test_an_address_is_an_answer(address, kind, said):
    ((found, *lines),) = printed(address)
    assert found == kind and said in lines
