"""The files that show a fault alone: what they hold, what they printed, and that nothing is accused without one."""

import ast
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest

from t5bench.__main__ import main
from t5bench_ledger import accuse, answer, show, tables, verdicts
from t5bench_ledger.changes import is_withdrawn
from t5bench_ledger.judge import RIGHT, WRONG
from t5bench_ledger.modes import MODES, STRATEGIES
from t5bench_ledger.pairs.page import SUMMARY
from t5bench_ledger.pairs.settings import Case
from t5bench_ledger.spans import public, releases_in

FILES = list(show.accusations())
OF_CELLS = [each for each in FILES if any(each.modes)]
MOST_LINES = 40


def wrong_rows() -> list[tuple[str, str, str, str]]:
    """Library, strategy, mode and release of each accusation in releases.json."""
    return [
        (fault["software"], fault["strategy"], mode, release)
        for fault in answer.read()["faults"]
        if fault["verdict"] == WRONG
        for mode in fault["modes"]
        for release in releases_in(fault["releases"], fault["software"])
    ]


def test_nothing_is_called_wrong_in_a_release_in_which_no_file_of_its_own_showed_it():
    rows = wrong_rows()
    assert rows
    for library, strategy, mode, release in rows:
        files = [each for each in OF_CELLS if each.is_of(library, strategy, mode)]
        said = [line for each in files for line in each.outputs.get((release, public(version("torch"))), ())]
        if library == "torch":
            said = [line for each in files for line in each.outputs.get((release, release), ())]
        assert any(line.endswith("NOT as promised") for line in said), (library, strategy, mode, release)


def test_a_wrong_cell_without_an_output_is_left_out_whoever_asks(monkeypatch):
    """And stands in the page, as what was measured and not shown."""
    cells = tables.read(tables.CELLS)
    assert wrong_rows()
    none = [replace(each, path=each.path.with_name("none.py")) for each in FILES]
    monkeypatch.setattr(show, "accusations", lambda: none)
    assert not [fault for fault in verdicts.shorten(cells).faults if fault.verdict == WRONG]
    assert len(list(tables.not_shown(cells))) > 50
    text = tables.markdown(tables.in_order(cells))
    assert "gradient norm off by 75 %" in text.partition("## Measured as different")[2]
    assert "gradient norm off by 75 %" not in text.partition("## Measured as different")[0]


def test_each_fault_that_a_file_names_is_one_of_the_ledger_or_of_the_pairs():
    forms = {
        (entry["library"], Case(**found["case"]).words)
        for entry in tables.json.loads(SUMMARY.read_text())
        for found in entry["findings"]
    }
    cells = {(cell["strategy"], cell["mode"]) for cell in tables.read(tables.CELLS) if cell["verdict"] == WRONG}
    for each in FILES:
        # PyTorch's faults are its users', too.
        named = [
            any(words == pair and each.library in (library, "torch") for library, words in forms)
            for pair in each.pairs
            if pair
        ]
        if each in OF_CELLS:
            assert each.modes <= {mode.name for mode in MODES} and each.strategies <= set(STRATEGIES), each.path
            named += [any((strategy, mode) in cells for strategy in each.strategies for mode in each.modes)]
        assert any(named), each.path


@pytest.mark.parametrize("accusation", FILES, ids=lambda each: each.path.stem)
def test_a_file_stands_alone_and_says_what_it_must(accusation):
    text = accusation.path.read_text()
    code = text.split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= MOST_LINES
    for field in ("Promised", "Not by design", "Today"):
        assert f"\n{field}: " in text
    if any(accusation.pairs):
        assert accusation.reported.endswith(".")
    imported = {
        (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else node.names[0].name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported <= {"torch", accusation.library, *sys.stdlib_module_names}


@pytest.mark.parametrize("accusation", OF_CELLS, ids=lambda each: each.path.stem)
def test_a_file_finds_nothing_where_every_way_that_it_speaks_for_is_right(accusation):
    verdicts_at: dict[tuple[str, str], set[str]] = {}
    for cell in tables.read(tables.CELLS):
        if accuse.speaks_for(accusation, cell) and not is_withdrawn(cell):
            verdicts_at.setdefault(accuse.release_and_torch(cell), set()).add(cell["verdict"])
    for place, lines in accusation.outputs.items():
        if verdicts_at.get(place) == {RIGHT}:
            assert not any(line.endswith("NOT as promised") for line in lines), (accusation.path.stem, place)


def test_few_files_are_wanted_where_one_speaks_for_much(monkeypatch):
    """Those that ran in vain are not wanted again, the next one is."""
    cells = [cell for cell in tables.read(tables.CELLS) if cell["release"] == "5.3.0"]
    monkeypatch.setattr(show, "is_shown", lambda *_: False)
    fresh = [replace(each, path=each.path.with_name(f"no {each.path.name}")) for each in FILES]
    wrong = [cell for cell in cells if cell["verdict"] == WRONG and cell["strategy"] == "trainer"]
    first = accuse.fewest(wrong, fresh, ("5.3.0", "2.13.0"))
    assert "no accumulated_twice" in [each.path.stem for each in first]
    assert "no mean_of_means" not in [each.path.stem for each in first]
    rest = [each for each in fresh if each not in first]
    assert accuse.fewest(wrong, rest, ("5.3.0", "2.13.0"))


def test_a_file_is_shown_and_run(capfd, monkeypatch):
    """Under the installed DeepSpeed, which does not have the fault."""
    release = version("deepspeed")
    assert main(["ledger", "--show", "deepspeed", release, "zero2/fp32"]) == 0
    said = capfd.readouterr().out
    assert "ZeRO-2 trains on the last micro-batch" in said and "deepspeed 0.17.6" in said
    now = said.partition(f"# Now, under deepspeed {release}:")[2]
    ((_, *lines),) = show.statements(now).values()
    assert len(lines) == 2 and all(": as promised" in line for line in lines)
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
    ((_, *lines),) = show.statements(run.stdout).values()
    assert lines and all(line.endswith(": as promised") for line in lines)


def test_the_page_says_of_trl_what_its_file_printed():
    """Beside which releases of transformers TRL's trainers applied the whole gradient."""
    folder = show.FOLDER.with_name("inherited")
    code = (folder / "trl_trainers.py").read_text().split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= MOST_LINES
    said = {
        release: lines[1:] for (release, _), lines in show.statements((folder / "trl_trainers.txt").read_text()).items()
    }
    is_right = {release: not any(line.endswith("NOT as promised") for line in lines) for release, lines in said.items()}
    assert is_right == {"5.24.0": True, "5.23.0": True, "5.2.0": False, "5.3.0": False}
    page = (tables.PAGES / "ledger.md").read_text().replace("\n", " ")
    assert "right beside 5.23.0 and 5.24.0, a quarter of the gradient beside 5.2.0 and 5.3.0" in page
