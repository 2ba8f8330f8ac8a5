"""The files that show a fault alone: what they hold, what they printed, and that they tell a fault from none."""

import ast
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from t5bench.__main__ import main
from t5bench_ledger import answer, show
from t5bench_ledger.judge import WRONG
from t5bench_ledger.modes import MODES, STRATEGIES
from t5bench_ledger.spans import releases_in

FILES = list(show.accusations())
VERSION = re.compile(r"^(transformers|deepspeed) (\S+) .*torch", re.MULTILINE)
# The share of the gradient that was applied, and by how much it differs.
MEASURED = re.compile(r"(\d+\.\d+) of (?:PyTorch's|the mean gradient)[^%]*?(\d+(?:\.\d+)?) %")


def printed_by(text: str) -> dict[str, list[tuple[float, float]]]:
    """By release what a file printed: shares and differences in percent."""
    found = {}
    parts = VERSION.split(text)
    for release, lines in zip(parts[2::3], parts[3::3], strict=True):
        found[release] = [(float(share), float(error)) for share, error in MEASURED.findall(lines)]
    return found


def test_there_are_ten_and_each_fault_they_name_is_one_of_the_ledger():
    assert len(FILES) >= 10
    for each in FILES:
        assert each.modes <= {mode.name for mode in MODES} and each.strategies <= set(STRATEGIES), each.path
        wrong = {
            (fault["strategy"], mode)
            for fault in answer.read()["faults"]
            if fault["software"] == each.library and fault["verdict"] == WRONG
            for mode in fault["modes"]
        }
        assert any((strategy, mode) in wrong for strategy in each.strategies for mode in each.modes), each.path


@pytest.mark.parametrize("accusation", FILES, ids=lambda each: each.path.stem)
def test_a_file_stands_alone_and_says_what_it_must(accusation):
    text = accusation.path.read_text()
    assert len(text.splitlines()) <= 55
    for field in ("Promised", "Not by design", "Today"):
        assert f"\n{field}: " in text
    imported = {
        (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else node.names[0].name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported <= {"torch", accusation.library, *sys.stdlib_module_names}


@pytest.mark.parametrize("accusation", FILES, ids=lambda each: each.path.stem)
def test_what_a_file_printed_is_a_fault_where_the_ledger_has_one_and_none_elsewhere(accusation):
    accused = {
        release
        for fault in answer.read()["faults"]
        if fault["software"] == accusation.library
        and fault["verdict"] == WRONG
        and fault["strategy"] in accusation.strategies
        and accusation.modes & set(fault["modes"])
        for release in releases_in(fault["releases"], accusation.library)
    }
    printed = printed_by(accusation.printed)
    assert printed.keys() & accused, "it shows no release that the ledger accuses"
    for release, measured in printed.items():
        assert measured, release
        is_off = max(error for _, error in measured) > 1 or "norm 65" in accusation.printed.partition(release)[2][:200]
        assert is_off == (release in accused), release


def test_a_file_is_shown_and_run(capfd, monkeypatch):
    """Under the installed DeepSpeed, which does not have the fault."""
    release = version("deepspeed")
    assert main(["ledger", "--show", "deepspeed", release, "zero2/fp32"]) == 0
    said = capfd.readouterr().out
    assert "ZeRO-2 trains on the last micro-batch" in said and "deepspeed 0.17.6" in said
    now = said.partition(f"# Now, under deepspeed {release}:")[2]
    assert printed_by(f"deepspeed {release} torch" + now)[release] == [(1.0, 0.0)] * 2
    monkeypatch.setattr(show, "environment_of", lambda library, release: None)
    assert main(["ledger", "--show", "transformers", "5.2.0", "equal targets"]) == 0
    assert (
        "pip install torch transformers==5.2.0 accelerate==1.15.0; python accumulated_twice.py"
        in capfd.readouterr().out
    )
    assert main(["ledger", "--show", "deepspeed", release, "four"]) == 2
    assert "no file shows 'four' of deepspeed" in capfd.readouterr().err


def test_nothing_of_this_project_is_on_the_path_of_a_file(tmp_path):
    """A copy elsewhere does the same."""
    (found,) = (each for each in FILES if each.path.stem == "zero2_last_micro_batch")
    copy = tmp_path / "alone.py"
    copy.write_text(found.path.read_text())
    run = subprocess.run([sys.executable, str(copy)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert printed_by(run.stdout)[version("deepspeed")] == [(1.0, 0.0)] * 2
