"""What a comparison looks like: in the terminal, in files, as a page, and the command that makes them."""

import csv
import html
import io
import json
import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import Mock

import pytest
from made_runs import COLOURS, LARGE, RTX_5000_ADA, START, make_run
from support import REPO_ROOT, STRATEGIES

from t5bench.__main__ import main
from t5bench.compare.comparison import Comparison, build
from t5bench.compare.statistics import Estimate
from t5bench.record import records
from t5bench.record.records import write_list
from t5bench.record.status import RUNNING
from t5bench.report import drawing, tables
from t5bench.report.compare import find_runs
from t5bench.report.drawing import drawings
from t5bench.report.figures import Figure, Panel, Series
from t5bench.report.page import render

GPU = {"gpu": RTX_5000_ADA, "nodes": 2, "padded_vocab_size": 32128, "sent_per_iteration": 1e6}
STRANGE, NASTY = "a<b>$x^2$", "<script>alert('x')</script> & $x^2$ | `a_b`"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The eight strategies at two sizes, one failed, two that differ only in a long label, and two that are new."""
    place = tmp_path_factory.mktemp("runs")
    times = [500.0 + (i * 7919 % 13) for i in range(60)]
    made = []
    for name in STRATEGIES:
        failed = {"status": "crashed", "reason": NASTY} if name == "zero3" else {}
        made.append(make_run(place / name, name, elapsed_ms=times, settings=LARGE, **GPU, **failed))
    made.append(make_run(place / "ddp-4", elapsed_ms=times, world_size=4, settings=LARGE, **GPU))
    made.append(
        make_run(place / "flash", "zero1", elapsed_ms=times, settings=LARGE | {"FLASH_ATTENTION": "off"}, **GPU)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COLOURS, STRANGE, "no colour")
        made += [make_run(place / n, n, elapsed_ms=times, settings=LARGE, **GPU) for n in ("fsdp", STRANGE)]
    return made


@pytest.fixture(scope="module")
def comparison(runs: list[Path]) -> Comparison:
    return build([records.load(run) for run in runs])


def test_the_bubble_is_predicted_and_measured(tmp_path: Path):
    """Without a profile the cost model's alone."""
    run = make_run(tmp_path / "pipeline", "pipeline", settings=LARGE, **GPU)
    (row,) = build([records.load(run)]).rows
    predicted, measured = tables.bubble_of(row)
    assert 1 / 17 <= predicted < 0.9 and measured is None  # two equal stages and 16 micro-batches: 1 / 17
    assert tables._bubble_text(tables.Bubble(0.25, 0.5)) == "25% (50%)"


def test_bytes_of_a_shared_loopback_are_no_error_of_the_prediction(tmp_path: Path):
    """Other programs' traffic is in them; a link between nodes is the run's own."""
    times = [500.0 + (i * 7919 % 13) for i in range(60)]
    known = {"elapsed_ms": times, "padded_vocab_size": 32128, "sent_per_iteration": 1e6}
    on_loopback = make_run(tmp_path / "ddp", **known)
    (row,) = build([records.load(on_loopback)]).rows
    assert tables.is_on_loopback(row) and tables.predicted_bytes(row).error is None
    on_link = make_run(tmp_path / "two", settings=LARGE, **GPU | known)
    (row,) = build([records.load(on_link)]).rows
    assert not tables.is_on_loopback(row) and tables.predicted_bytes(row).error


@pytest.mark.parametrize(
    ("milliseconds", "text"), [(0.5, "0.500 ms"), (999.4, "999 ms"), (999.7, "1.000 s"), (1234.0, "1.23 s")]
)
def test_a_time_in_a_sentence(milliseconds: float, text: str):
    """Never in powers of ten."""
    assert tables.duration_text(milliseconds) == text


# ---- the terminal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "at_least"), [(80, 5), (100, 5), (120, 7), (200, 12), (None, 15)])
def test_a_table_fits_the_terminal(comparison: Comparison, width: int | None, at_least: int):
    """No line is wider, no row is wrapped or cut, and what is left out is less important than what is shown."""
    text = tables.terminal(comparison, width)
    assert max(map(len, text.splitlines())) <= (width or 999)
    every = tables.columns(comparison)
    said = re.search(r"left out for lack of room: (.*); --wide prints", " ".join(text.split()))
    left_out = [column for column in every if said and column.title in said[1].split(", ")]
    shown = [column for column in every if column not in left_out]
    assert len(left_out) == len(said[1].split(", ") if said else []) and len(shown) >= at_least
    assert not left_out or max(c.importance for c in left_out) < min(c.importance for c in shown)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for row in comparison.rows:
        cells = [column.text(row) for column in shown]
        assert any(line.endswith(" ".join(cells[bool(width) :])) for line in lines), row.label
        assert row.label in " ".join(text.split())


# ---- files -----------------------------------------------------------------------------------------------------------


def test_caption_and_page_name_the_models(tmp_path: Path):
    """Each has its own parameters and lengths, and a run that does not know them has none."""
    others = [{"family": "gpt"}, {"strategy": "zero1", "padded_vocab_size": None}]
    runs = [records.load(make_run(tmp_path / str(number), **own)) for number, own in enumerate([{}, *others])]
    caption = tables.caption(both := build(runs, allowed=["MODEL_FAMILY"]))
    assert re.match(r"T5 tiny \(0\.\d+M parameters\) / GPT tiny \(0\.\d+M parameters\), batch 16", caption), caption
    assert "lengths 128/64 / 128," in caption
    assert "<title>One T5 / GPT pretraining job, 2 parallelisation strategies<" in render(both)


def test_csv_has_every_figure_and_leaves_out_what_was_not_measured(comparison: Comparison):
    found = {row["name"]: row for row in csv.DictReader(io.StringIO(tables.as_csv(comparison)))}
    row = next(row for row in comparison.rows if row.strategy == "zero2")
    expected = {
        "ms_per_iteration": row.milliseconds.median, "ratio_high": row.ratio.high, "ms_lowest_run": row.run_medians[0],
        "peak_memory_mib": row.peak_memory[1], "interval_of": "this run alone", "gpu": RTX_5000_ADA,
        "largest_loss_difference": row.parity.difference, "gradient_overlap": False, "dp": row.run.layout.dp,
        "reason": "", "differs_from_baseline": "", "hardware_tflops_per_gpu": "",
    }  # fmt: skip
    assert {name: found["zero2"][name] for name in expected} == {name: str(value) for name, value in expected.items()}
    failed = found["zero3"]
    assert NASTY in failed["reason"] and (failed["ms_per_iteration"], failed["ratio_low"]) == ("", "")


def test_markdown_survives_what_a_reason_holds(comparison: Comparison):
    text = tables.markdown(comparison)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == len(comparison.rows) + 2 * len(comparison.groups)
    assert len({line.replace(r"\|", "").count("|") for line in lines}) == 1
    assert "<script" not in text and r"\| 'a\_b'" in text


# ---- the page --------------------------------------------------------------------------------------------------------


class Balance(HTMLParser):
    """Every tag is closed by its own; collects what a browser would fetch or jump to, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.references, self.ids, self.text = [], [], [], ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        self.open += [tag] * (tag not in {"meta", "br", "use", "input"})

    def handle_startendtag(self, tag, attrs):
        self.references += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "action", "xlink:href")]
        self.ids += [v for k, v in attrs if k == "id"]

    def handle_endtag(self, tag):
        assert tag == "use" or self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page(comparison: Comparison) -> str:
    return render(comparison)


def test_the_page_is_well_formed_and_needs_no_network(page: str):
    parsed = Balance(page)
    assert {reference[0] for reference in parsed.references} == {"#"}
    assert not re.search(r"url\(\s*['\"]?(?!#)|@import|<script [^t>]|<link|<iframe|<object|<embed|mathdefault", page)
    assert len(parsed.ids) == len(set(parsed.ids)) and {r[1:] for r in parsed.references} <= set(parsed.ids)
    for title in ("Throughput", "Memory", "Loss", "Time per iteration", "What limits each", "How it was measured"):
        assert title in parsed.text
    assert page.count('<div class="drawn"') == 7
    assert page.count('<div class="of-bar"') == page.count("<svg height") == 11, "a bar for each complete row"
    assert NASTY in parsed.text and STRANGE in parsed.text  # as text
    said = "".join(page.split("<script")[0])
    assert "None" not in Balance(said + "</body></html>").text and " nan" not in parsed.text


def test_a_drawing_keeps_the_digits_of_its_texts_and_is_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch):
    """The layout's last digits depend on a process's addresses, and nothing in the drawing may."""
    parts = [Series("ddp", "bar", [((0, 1), "ddp")], "0.123456", "#123456")]
    figure = Figure("title", "x", "", [Panel(parts, height=1.0)])
    drawn = set()
    for beyond in (0.0, 1e-12):
        monkeypatch.setattr(drawing, "WIDTH", 7.0 + beyond)
        drawn.update(drawings({"ddp": drawing.Look("currentColor", ())}, [figure]))
    (svg,) = drawn
    assert ">0.123456<" in svg and "url(#" in svg and not re.search(r'="[^"]*\d\.\d\d', svg)


def test_table_page_and_files_give_the_same_verdict(comparison: Comparison, page: str):
    """And mark the rows that were run once, and say what that means."""
    alone = next(note for note in comparison.notes if "describe these runs only" in note)
    assert alone.startswith("\N{DAGGER} ") and "ddp" in alone and "zero3," not in alone
    for text in (tables.terminal(comparison), tables.markdown(comparison), page, json.dumps(comparison.to_json())):
        text = html.unescape(text).replace("\\_", "_").replace("\\u2020", "\N{DAGGER}")
        assert all(sentence in text for sentence in comparison.verdicts[:2]) and "describe these runs only" in text
        assert "zero2\N{DAGGER}" in text or '"these_runs_alone": true' in text


@pytest.mark.parametrize(("status", "expected"), [("crashed", "no reason"), ("complete", "logged no interval")])
def test_a_native_cpu_run_without_iteration_lines(tmp_path: Path, comparison, page, status: str, expected: str):
    run = make_run(tmp_path / "ddp", elapsed_ms=[], status=status, reason="no reason", engine="native")
    cpu = build([records.load(run)])
    assert expected in Balance(render(cpu)).text
    for text in (render(cpu), tables.terminal(cpu, 80), tables.markdown(cpu)):
        assert "CPU / native engine: not a measurement" in text
    assert "not a measurement" not in page + tables.terminal(comparison, 80)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_all_files(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture):
    place, written = tmp_path / "my outputs", tmp_path / "my outputs" / "comparison"
    make_run(place / "0" / "ddp")
    make_run(place / "0" / "zero1", "zero1", elapsed_ms=[50.0] * 30)
    make_run(place / "1" / "ddp", elapsed_ms=[101.0] * 30)
    monkeypatch.setenv("COLUMNS", "90")
    assert main(["compare", str(place)]) == 0
    output = capsys.readouterr().out
    assert str(written / "index.html") in output and "zero1 was fastest in this run" in output
    assert max(map(len, output.partition("\npage: ")[0].splitlines())) <= 90
    names = {"comparison.md", "comparison.csv", "comparison.json", "index.html"}
    assert {path.name for path in written.iterdir()} == names
    for form, name in (("markdown", "md"), ("csv", "csv"), ("json", "json")):
        # Its own files are among the runs and must not be mistaken for one.
        assert main(["compare", str(place), "--output", str(tmp_path / "elsewhere"), "--format", form]) == 0
        assert capsys.readouterr().out == (written / f"comparison.{name}").read_text()
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == names
    make_run(place / "0" / "zero2", "zero2", status="crashed", reason="r", versions={"torch": "\x1b[2J"})
    assert main(["compare", str(place), "--wide"]) == 1
    output = capsys.readouterr().out
    assert "problem: zero2 is crashed" in output and r"\x1b[2J (zero2)" in output
    assert max(map(len, output.splitlines())) > 120


def test_a_locale_without_the_dagger(tmp_path: Path):
    """The files are UTF-8 nevertheless, as the page says that it is."""
    make_run(tmp_path / "ddp")
    command = [sys.executable, "-m", "t5bench", "compare", str(tmp_path)]
    ascii_only = os.environ | {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run(command, cwd=REPO_ROOT, env=ascii_only, capture_output=True)
    assert (result.returncode, result.stderr) == (0, b"") and b"\nddp?  " in result.stdout
    for name in ("comparison.md", "index.html"):
        assert "ddp\u2020" in (tmp_path / "comparison" / name).read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], "there is no directory nowhere"),
        (["empty"], "holds no run"),
        (["damaged"], "node0.json cannot be read"),
        (["runs", "--allow", "COLOUR"], "--allow COLOUR is not known"),
        (["runs", "--peak-tflops", "-3"], "--peak-tflops: must be at least"),
        (["runs", "--output", "damaged/node0.json"], "cannot be written"),
        (["runs", "other"], "GLOBAL_BATCH_SIZE: 16 (ddp); 32 (zero1)"),
    ],
)
def test_wrong_use_gets_a_remedy(tmp_path: Path, monkeypatch, capsys, arguments: list[str], expected: str):
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/ddp"))
    make_run(Path("other/zero1"), "zero1", settings={"GLOBAL_BATCH_SIZE": "32"})
    for name in ("empty", "damaged"):
        Path(name).mkdir()
    Path("damaged/node0.json").write_text("{")
    assert main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and expected in error and "\n       " in error
    assert not list(tmp_path.rglob("comparison"))


def test_watch_draws_the_table_until_the_sweep_has_ended(tmp_path: Path, monkeypatch, capsys):
    make_run(tmp_path / "ddp")  # takes 3 seconds
    growing = {"TRAIN_ITERS": "30", "RAMPUP_BATCH_SIZE": "8 8 16"}
    make_run(tmp_path / "zero1", "zero1", status=RUNNING, elapsed_ms=[100.0] * 7, settings=growing)
    write_list(tmp_path, ["ddp", "zero1", "zero2"])

    def later(seconds: float) -> None:
        for name in ("zero1", "zero2") if seconds == 2.5 else ():
            make_run(tmp_path / name, name)

    monkeypatch.setattr(time, "sleep", later)
    monkeypatch.setattr(time, "time", lambda: START + 1)
    assert main(["compare", str(tmp_path), "--watch", "2.5"]) == 0
    first, second, last = re.split(r"(?m)^2 processes: ", capsys.readouterr().out)[1:]
    assert first.endswith("1 of 3 runs have ended; zero1 is at iteration 7 of 31; about 0:00:05 left\n")
    assert second.endswith("3 of 3 runs have ended\n") and "page: " in last


def test_runs_are_found_up_to_four_levels_down(tmp_path: Path):
    near, far = make_run(tmp_path / "a/b/c/d"), make_run(tmp_path / "a/b/c/x/e")
    make_run(near / "inside")
    assert list(find_runs(tmp_path)) == [near]
    assert list(find_runs(tmp_path / "a")) == [near, far]


@pytest.mark.parametrize(
    ("stopped", "status", "said"),
    [(KeyboardInterrupt(), 130, ""), (OSError(28, "No space left"), 2, "error: [Errno 28]")],
)
def test_a_command_that_is_stopped_prints_no_traceback(
    stopped: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("t5bench.plan.launchers.declarations", Mock(side_effect=stopped))
    monkeypatch.setattr("t5bench.__main__.discard", Mock())  # it would close pytest's own stream
    assert main(["strategies"]) == status
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Estimate(104.5512), "104.6"),
        (Estimate(104.5512, 104.5498, 104.5531), "104.6 [104.5, 104.6]"),
        (Estimate(104.5512, 103.2049, 105.9127), "104.6 [103.2, 105.9]"),
        (Estimate(104.5512, 60.123, 150.987), "105 [60, 151]"),
        (Estimate(1.04551, 0.99, 1.11), "1.046 [0.990, 1.110]"),
        (Estimate(0.9, 0.2, 3.4), "0.90 [0.20, 3.40]"),
    ],
)
def test_an_interval_has_the_digits_that_are_known(value: Estimate, text: str):
    """Two of half the interval, at most four."""
    assert tables.estimate_text(value) == text
