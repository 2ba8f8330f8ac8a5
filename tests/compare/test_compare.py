"""The comparison of runs: what it says, what it refuses, and the files that it writes."""

import csv
import io
import json
import math
import re
import resource
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from harness import REPO_ROOT
from made_runs import LARGE, RTX_5000_ADA, make_run

from t5bench.__main__ import main
from t5bench.compare.comparable import NotComparableError
from t5bench.compare.comparison import build, limits
from t5bench.compare.reduction import reduction_of
from t5bench.record import records
from t5bench.report import tables
from t5bench.report.command import find_runs
from t5bench.report.page import render

GPU = {"gpu": RTX_5000_ADA, "nodes": 2, "padded_vocab_size": 32128}


def steady(milliseconds: float, count: int = 40) -> list[float]:
    """Times whose median is this, 1 % around it."""
    return [milliseconds * (1 + 0.01 * (number % 3 - 1)) for number in range(count)]


def compare(*runs: Path, **options):
    return build([records.load(run) for run in runs], **options)


def row_of(comparison, label: str):
    (row,) = [row for row in comparison.rows if row.label == label]
    return row


# ---- figures -----------------------------------------------------------------------------------------------------


def test_figures_by_hand(tmp_path: Path):
    ddp = make_run(tmp_path / "ddp", elapsed_ms=[100.0] * 40, settings=LARGE, **GPU)
    zero = make_run(
        tmp_path / "zero1", "zero1", elapsed_ms=[80.0] * 40, settings=LARGE, memory_mib=[900, 1000.5], **GPU
    )
    row = row_of(compare(ddp, zero), "zero1")
    assert row.milliseconds.median == row.milliseconds.low == row.milliseconds.high == 80.0
    assert row.samples_per_second.median == 200.0  # 16 in 80 ms
    assert row.tokens_per_second.median == 200.0 * (512 + 128)
    assert row.ratio.median == 1.25
    assert row.tflops == pytest.approx(19.809 / 0.080 / 2, rel=1e-4)
    assert row.mfu == pytest.approx(row.tflops / 261.1)
    assert row.peak_memory == {0: 900, 1: 1000.5}


def test_what_was_not_measured_has_no_figure(tmp_path: Path):
    run = make_run(tmp_path / "ddp", padded_vocab_size=None)
    row = row_of(compare(run), "ddp")
    assert row.tflops is None and row.mfu is None and row.sent_per_iteration is None
    assert "padded_vocab_size" in row.mfu_missing
    text = limits(row)
    assert "Network: not measured" in text and "there is no GPU" in text


def test_peaks_given_by_hand_or_setting_win_and_a_cpu_has_none(tmp_path: Path):
    unknown = make_run(tmp_path / "a", settings=LARGE, **GPU | {"gpu": "NVIDIA Something"})
    assert row_of(compare(unknown), "ddp").mfu is None
    row = row_of(compare(unknown, peak_tflops=200.0), "ddp")
    assert row.mfu == pytest.approx(row.tflops / 200)
    stated = make_run(tmp_path / "b", settings=LARGE | {"PEAK_TFLOPS": "100"}, **GPU)
    row = row_of(compare(stated), "ddp")
    assert row.mfu == pytest.approx(row.tflops / 100)
    assert row_of(compare(make_run(tmp_path / "c"), peak_tflops=200.0), "ddp").mfu is None


def test_traffic_of_two_nodes_against_their_link(tmp_path: Path):
    # 50 MB every 100 ms are 4 Gbit/s, 40 % of the link.
    run = make_run(tmp_path / "ddp", elapsed_ms=[100.0] * 300, sent_per_iteration=50e6, settings=LARGE, **GPU)
    row = row_of(compare(run), "ddp")
    assert row.sent_per_iteration == pytest.approx(50e6, rel=1e-9)
    (first, second) = row.measured[0].observed.traffic
    assert (first.interface, first.share, second.node) == ("eth0", pytest.approx(0.4), 1)
    assert "takes 40% of the time" in limits(row)
    assert "drew 200 W" in limits(row)


def test_traffic_of_one_node_is_the_loopbacks(tmp_path: Path):
    row = row_of(compare(make_run(tmp_path / "ddp", elapsed_ms=[100.0] * 300, sent_per_iteration=1e6)), "ddp")
    assert row.sent_per_iteration == pytest.approx(1e6)
    assert "loopback" in limits(row)


def test_fewer_than_three_samples_are_no_measurement(tmp_path: Path):
    run = make_run(tmp_path / "ddp", elapsed_ms=[100.0] * 100, sent_per_iteration=1e6, sample_seconds=4)
    row = row_of(compare(run), "ddp")  # 8 s count
    assert row.sent_per_iteration is None
    assert "3 are needed" in limits(row)


def test_a_counter_that_runs_backwards_or_virtual_interfaces_are_not_counted(tmp_path: Path):
    run = make_run(tmp_path / "ddp", elapsed_ms=[100.0] * 300, sent_per_iteration=50e6, settings=LARGE, **GPU)
    path = run / "node0.samples.jsonl"
    original = path.read_text()
    with_bridge = [json.loads(line) for line in original.splitlines()]
    for sample in with_bridge:
        sample["network"] |= {"docker0": {"sent": sample["time"] * 1e9}, "lo": {"sent": sample["time"] * 1e9}}
    path.write_text("\n".join(map(json.dumps, with_bridge)) + '\n{"time": 17637')
    assert row_of(compare(run), "ddp").sent_per_iteration == pytest.approx(50e6)
    with_bridge[4]["network"]["eth0"]["sent"] = 0
    path.write_text("\n".join(map(json.dumps, with_bridge)))
    assert row_of(compare(run), "ddp").sent_per_iteration is None


# ---- rows --------------------------------------------------------------------------------------------------------


def test_repeats_are_one_row(tmp_path: Path):
    runs = [make_run(tmp_path / str(i) / "ddp", elapsed_ms=steady(ms)) for i, ms in enumerate((100, 104, 102))]
    comparison = compare(*runs)
    (row,) = comparison.rows
    assert row.milliseconds.median == 102
    assert (row.milliseconds.low, row.milliseconds.high) == (99, 105.04)
    assert sorted(row.run_medians) == [100, 102, 104]
    assert "3: 100.0 to 104.0" in tables.terminal(comparison)


def test_a_failed_run_stays_with_its_reason_and_without_figures(tmp_path: Path):
    ddp = make_run(tmp_path / "ddp")
    reason = "the GPU's memory is full"
    failed = make_run(tmp_path / "zero3", "zero3", status="out-of-memory", reason=reason)
    comparison = compare(ddp, failed)
    row = row_of(comparison, "zero3")
    assert (row.milliseconds, row.ratio, row.final_loss, row.peak_memory) == (None, None, None, {})
    assert comparison.problems == [f"zero3 is not complete but out-of-memory: {reason}"]
    assert reason in tables.terminal(comparison) and reason in tables.markdown(comparison)
    assert json.loads(json.dumps(comparison.to_json()))["groups"][0]["rows"][1]["reason"] == reason


def test_a_failed_repeat_is_not_averaged_in(tmp_path: Path):
    good = make_run(tmp_path / "0" / "ddp", elapsed_ms=[100.0] * 30)
    bad = make_run(tmp_path / "1" / "ddp", elapsed_ms=[10.0] * 30, status="crashed", reason="segmentation fault")
    comparison = compare(good, bad)
    assert [row.complete for row in comparison.rows] == [True, False]
    assert row_of(comparison, "ddp (run 0/ddp)").milliseconds.median == 100.0
    assert not comparison.sound


def test_groups_have_their_own_baselines(tmp_path: Path):
    runs = [
        make_run(tmp_path / "a", "ddp", elapsed_ms=[100.0] * 30),
        make_run(tmp_path / "b", "zero1", elapsed_ms=[50.0] * 30),
        make_run(tmp_path / "c", "ddp", elapsed_ms=[60.0] * 30, world_size=4),
        make_run(tmp_path / "d", "hybrid", elapsed_ms=[30.0] * 30),
    ]
    comparison = compare(*runs)
    assert [(group.world_size, len(group.rows)) for group in comparison.groups] == [(2, 2), (4, 2)]
    assert row_of(comparison, "zero1").ratio.median == 2
    assert row_of(comparison, "hybrid").ratio.median == 2
    assert comparison.sound


def test_rows_come_in_the_order_of_the_launchers(tmp_path: Path):
    names = ["hybrid", "tensor", "zero3_offload", "zero1", "ddp"]
    runs = [make_run(tmp_path / name, name, world_size=4) for name in names]
    assert [row.strategy for row in compare(*runs).rows] == ["ddp", "zero1", "zero3_offload", "tensor", "hybrid"]


# ---- parity ------------------------------------------------------------------------------------------------------


def curve(*changes: tuple[int, float]) -> list[float]:
    losses = [8.0] * 30
    for iteration, loss in changes:
        losses[iteration - 1] = loss
    return losses


def test_the_largest_difference_and_its_iteration(tmp_path: Path):
    ddp = make_run(tmp_path / "ddp", losses=curve())
    near = make_run(tmp_path / "zero1", "zero1", losses=curve((7, 8.0004), (9, 7.9996), (11, 8.0007)))
    far = make_run(tmp_path / "zero2", "zero2", losses=curve((5, 8.1)))
    comparison = compare(ddp, near, far)
    parity = row_of(comparison, "zero1").parity
    assert (parity.verdict, parity.iteration) == ("yes", 11)
    assert parity.difference == pytest.approx(0.0007 / 8)
    assert str(row_of(comparison, "zero2").parity) == "NO (1e-02 at 5)"
    assert comparison.problems == ["zero2 does not train as ddp does: NO (1e-02 at 5)"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_never_equal(tmp_path: Path, value: float):
    ddp = make_run(tmp_path / "ddp", losses=curve())
    settings = {"DROPOUT": "0.1"}
    broken = make_run(tmp_path / "zero1", "zero1", losses=curve((3, value)))
    assert str(row_of(compare(ddp, broken), "zero1").parity) == "NO (not a number at 3)"
    ddp = make_run(tmp_path / "ddp2", losses=curve((3, value)), settings=settings)
    comparison = compare(ddp)
    assert not comparison.sound
    json.dumps(comparison.to_json(), allow_nan=False)


def test_dropout_is_not_judged_but_shown(tmp_path: Path):
    settings = {"DROPOUT": "0.1"}
    ddp = make_run(tmp_path / "ddp", losses=curve(), settings=settings)
    tensor = make_run(tmp_path / "tensor", "tensor", losses=curve((4, 8.1)), settings=settings)
    comparison = compare(ddp, tensor)
    assert str(row_of(comparison, "tensor").parity) == "n/a (dropout) (1e-02 at 4)"
    assert comparison.sound
    assert any("check_parity.sh" in verdict for verdict in comparison.verdicts)


def test_other_training_settings_are_not_judged(tmp_path: Path):
    ddp = make_run(tmp_path / "ddp", losses=curve())
    other = make_run(tmp_path / "zero1", "zero1", losses=curve((4, 8.1)), settings={"LR": "0.1", "SEED": "7"})
    comparison = compare(ddp, other)
    assert str(row_of(comparison, "zero1").parity) == "n/a (SEED, LR)"
    assert "LR: 0.0001 (ddp); 0.1 (zero1)" in comparison.notes


def test_bf16_has_room_for_its_rounding(tmp_path: Path):
    settings = {"PRECISION_FLAG": "--bf16"}
    ddp = make_run(tmp_path / "ddp", losses=curve(), settings=settings)
    near = make_run(tmp_path / "zero1", "zero1", losses=curve((4, 8.02)), settings=settings)
    far = make_run(tmp_path / "zero2", "zero2", losses=curve((4, 8.2)), settings=settings)
    comparison = compare(ddp, near, far)
    assert [row.parity.verdict for row in comparison.rows] == ["baseline", "yes", "NO"]


def test_without_a_baseline_the_answer_is_no(tmp_path: Path):
    comparison = compare(make_run(tmp_path / "zero1", "zero1"))
    assert comparison.problems == ["there is no complete ddp run to compare with"]
    assert compare(make_run(tmp_path / "zero2", "zero2"), baseline="zero2").sound


# ---- refusals ----------------------------------------------------------------------------------------------------

REFUSED = [
    ({"settings": {"GLOBAL_BATCH_SIZE": "32"}}, "GLOBAL_BATCH_SIZE: 16 (ddp); 32 (zero1)"),
    ({"settings": {"MICRO_BATCH_SIZE": "2"}}, "MICRO_BATCH_SIZE: 1 (ddp); 2 (zero1)"),
    ({"settings": {"PRECISION_FLAG": "--bf16"}}, "PRECISION_FLAG: (empty) (ddp); --bf16 (zero1)"),
    ({"settings": {"DROPOUT": "0.1"}}, "DROPOUT: 0 (ddp); 0.1 (zero1)"),
    ({"settings": {"HIDDEN_SIZE": "128"}}, "HIDDEN_SIZE: 64 (ddp); 128 (zero1)"),
    ({"settings": {"ENCODER_SEQ_LENGTH": "64"}}, "ENCODER_SEQ_LENGTH: 128 (ddp); 64 (zero1)"),
    ({"padded_vocab_size": 4352}, "padded_vocab_size: 4224 (ddp); 4352 (zero1)"),
    ({"idx_sha256": "b" * 64}, "idx_sha256: "),
    ({"engine": "native"}, "engine: megatron (ddp); native (zero1)"),
    ({"engine_patches": "megatron_t5_fixes"}, "engine_patches: series (ddp); megatron_t5_fixes (zero1)"),
    ({"gpu": RTX_5000_ADA}, "device: cpu (ddp); cuda (zero1)"),
    ({"world_size": 4}, "world_size: 2 (ddp); 4 (zero1): there is no ddp run at 4 processes"),
]


@pytest.mark.parametrize(("changes", "expected"), REFUSED)
def test_what_differs_is_refused_and_named(tmp_path: Path, changes: dict, expected: str):
    ddp, zero = make_run(tmp_path / "ddp"), make_run(tmp_path / "zero1", "zero1", **changes)
    with pytest.raises(NotComparableError, match=re.escape(expected)) as refusal:
        compare(ddp, zero)
    assert f"--allow {expected.split(':')[0]}" in str(refusal.value)


@pytest.mark.parametrize(("changes", "expected"), REFUSED)
def test_what_is_allowed_is_marked(tmp_path: Path, changes: dict, expected: str):
    ddp, zero = make_run(tmp_path / "ddp"), make_run(tmp_path / "zero1", "zero1", **changes)
    comparison = compare(ddp, zero, allowed=[expected.split(":")[0]])
    text = tables.terminal(comparison)
    assert "zero1 *" in text and f"* zero1: {expected.split(':')[0]} " in text
    assert "ddp *" not in text


def test_two_gpus_are_two_devices(tmp_path: Path):
    ddp = make_run(tmp_path / "ddp", settings=LARGE, **GPU)
    other = make_run(tmp_path / "zero1", "zero1", settings=LARGE, **GPU | {"gpu": "NVIDIA A40"})
    with pytest.raises(NotComparableError, match=r"gpu: NVIDIA RTX 5000 Ada Generation \(ddp\); NVIDIA A40 \(zero1\)"):
        compare(ddp, other)


def test_what_a_strategy_makes_different_is_no_difference(tmp_path: Path):
    ddp = make_run(tmp_path / "ddp", settings={"MASTER_PORT": "29800"})
    tensor = make_run(tmp_path / "tensor", "tensor", settings={"MASTER_PORT": "29811"})
    zero = make_run(tmp_path / "zero1", "zero1", padded_vocab_size=None)  # not known is not different
    comparison = compare(ddp, tensor, zero)
    assert comparison.sound
    assert [note for note in comparison.notes if "gradients" not in note] == []


def test_versions_and_commits_are_notes(tmp_path: Path):
    ddp = make_run(tmp_path / "ddp", versions={"torch": "2.4.0"}, settings={"FLASH_ATTENTION": "off"})
    zero = make_run(
        tmp_path / "zero1",
        "zero1",
        versions={"torch": "2.13.0"},
        commits={"repository": "3", "repository_changed": True},
    )
    notes = compare(ddp, zero).notes
    assert "version of torch: 2.4.0 (ddp); 2.13.0 (zero1)" in notes
    assert "FLASH_ATTENTION: off (ddp); auto (zero1)" in notes
    assert "the repository had changes that are not committed: zero1" in notes


# ---- gradient reduction ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("ddp", {}, "fp32, after backward, one flat buffer"),
        ("ddp", {"settings": {"PRECISION_FLAG": "--fp16"}}, "fp16, after backward, one flat buffer"),
        ("ddp", {"engine": "native"}, "fp32, during backward, buckets of 25 MiB"),
        ("zero2", {}, "bf16, after backward, buckets of 500M elements"),
        ("tensor", {}, "none (one replica)"),
        ("pipeline", {}, "none but the tied embedding's (one replica)"),
        ("pipeline", {"world_size": 4}, "fp32, after backward, one flat buffer"),
        (
            "zero1",
            {
                "ds_config": {
                    "communication_data_type": "fp32",
                    "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 2e8},
                }
            },
            "fp32, during backward, buckets of 200M elements",
        ),
    ],
)
def test_gradient_reduction(tmp_path: Path, strategy: str, options: dict, expected: str):
    options = {"settings": {"PRECISION_FLAG": "--bf16"}} | options
    assert str(reduction_of(records.load(make_run(tmp_path / "run", strategy, **options)))) == expected


def test_a_ratio_over_two_precisions_has_a_note(tmp_path: Path):
    settings = {"PRECISION_FLAG": "--bf16"}
    ddp, zero = make_run(tmp_path / "ddp", settings=settings), make_run(tmp_path / "zero1", "zero1", settings=settings)
    assert any("GRADIENT_REDUCTION=fp32" in note for note in compare(ddp, zero).notes)
    aligned = {"communication_data_type": "fp32", "zero_optimization": {"stage": 1}}
    zero = make_run(tmp_path / "other", "zero1", settings=settings, ds_config=aligned)
    assert not any("GRADIENT_REDUCTION=fp32" in note for note in compare(ddp, zero).notes)


# ---- the command -------------------------------------------------------------------------------------------------


def test_the_command_writes_all_files(tmp_path: Path, capsys: pytest.CaptureFixture):
    runs = tmp_path / "my outputs"
    make_run(runs / "0" / "ddp", elapsed_ms=steady(100))
    make_run(runs / "0" / "zero1", "zero1", elapsed_ms=steady(50))
    make_run(runs / "1" / "ddp", elapsed_ms=steady(102))
    assert main(["compare", str(runs)]) == 0
    output = capsys.readouterr().out
    page = runs / "comparison" / "index.html"
    assert str(page) in output and "zero1 is the fastest" in output
    assert {path.name for path in page.parent.iterdir()} == {
        "comparison.md", "comparison.csv", "comparison.json", "index.html",
    }  # fmt: skip
    # The output lies among the runs and is not taken for one.
    assert main(["compare", str(runs), "--output", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere" / "index.html").stat().st_size > 10_000


def test_csv_and_json_come_back(tmp_path: Path, capsys: pytest.CaptureFixture):
    ddp = make_run(tmp_path / "ddp", elapsed_ms=[100.0] * 30)
    bad = make_run(tmp_path / "zero1", "zero1", status="crashed", reason='a "quoted", broken\nreason')
    assert main(["compare", str(ddp), str(bad), "--format", "csv"]) == 1
    first, second = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (float(first["ms_per_iteration"]), float(first["samples_per_second"])) == (100.0, 160.0)
    assert (second["status"], second["ms_per_iteration"], second["ratio_low"]) == ("crashed", "", "")
    assert second["reason"] == 'a "quoted", broken\nreason'
    assert main(["compare", str(ddp), str(bad), "--format", "json"]) == 1
    content = json.loads(capsys.readouterr().out)
    row = content["groups"][0]["rows"][0]
    assert row["milliseconds_per_iteration"] == {"median": 100.0, "low": 100.0, "high": 100.0}
    assert row["runs"][0]["intervals_dropped"] == {"warm-up": 20}
    assert content["sound"] is False


def test_markdown_survives_what_a_reason_holds(tmp_path: Path):
    ddp = make_run(tmp_path / "ddp")
    bad = make_run(tmp_path / "zero1", "zero1", status="crashed", reason="a | b <img src=x>\nc")
    text = tables.markdown(compare(ddp, bad))
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace(r"\|", "").count("|") for line in table}) == 1
    assert "<img" not in text and r"a \| b" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], "there is no directory nowhere"),
        (["."], "holds no run"),
        ([".", "--allow", "COLOUR"], "--allow COLOUR is not known"),
        ([".", "--peak-tflops", "-3"], "--peak-tflops must be a positive number"),
    ],
)
def test_wrong_use(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture, arguments: list[str], expected: str):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and expected in error and error.count("\n") >= 1


def test_a_refusal_exits_with_2_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture):
    make_run(tmp_path / "ddp")
    make_run(tmp_path / "zero1", "zero1", settings={"GLOBAL_BATCH_SIZE": "32"})
    assert main(["compare", str(tmp_path)]) == 2
    assert "GLOBAL_BATCH_SIZE: 16 (ddp); 32 (zero1)" in capsys.readouterr().err
    assert not (tmp_path / "comparison").exists()
    assert main(["compare", str(tmp_path), "--allow", "GLOBAL_BATCH_SIZE"]) == 0


def test_a_damaged_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture):
    run = make_run(tmp_path / "ddp")
    (run / "node0.json").write_text("{")
    assert main(["compare", str(tmp_path)]) == 2
    assert "node0.json cannot be read" in capsys.readouterr().err


def test_runs_are_found_up_to_four_levels_down(tmp_path: Path):
    near, far = make_run(tmp_path / "a/b/c/d"), make_run(tmp_path / "a/b/c/x/e")
    make_run(near / "inside")
    assert list(find_runs(tmp_path)) == [near]
    assert list(find_runs(tmp_path / "a")) == [near, far]


# ---- the page ----------------------------------------------------------------------------------------------------

VOID = {"meta", "br", "link", "img", "hr", "input", "use"}


class Balance(HTMLParser):
    """Every tag is closed by its own; collects what a browser would fetch or jump to, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action", "poster", "xlink:href", "background"):
                self.references.append(value)
            if name == "id":
                self.ids.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.text += data


def parse(page: str) -> Balance:
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture
def page_runs(tmp_path: Path) -> list[Path]:
    nasty = "<script>alert('x')</script> & $x^2$"
    return [
        make_run(tmp_path / "ddp", elapsed_ms=steady(100), settings=LARGE, sent_per_iteration=1e6, **GPU),
        make_run(tmp_path / "zero1", "zero1", elapsed_ms=steady(90), settings=LARGE, **GPU),
        make_run(tmp_path / "<b>", "a<b>$x^2$", elapsed_ms=steady(80), settings=LARGE, **GPU),
        make_run(tmp_path / "zero3", "zero3", settings=LARGE, status="crashed", reason=nasty, **GPU),
    ]


def test_the_page_is_well_formed_and_asks_nothing_of_a_network(page_runs: list[Path]):
    page = render(compare(*page_runs))
    parsed = parse(page)
    assert all(reference.startswith("#") for reference in parsed.references)
    assert not re.search(r"url\(\s*['\"]?(?!#)|@import|<script|<link|<iframe|<object|<embed", page)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert all(reference[1:] in parsed.ids for reference in parsed.references)
    assert parsed.tags.count("svg") == 4
    for title in ("Throughput", "Memory", "Loss", "Time per iteration", "What limits each", "How it was measured"):
        assert title in parsed.text
    assert "<script>alert('x')</script> & $x^2$" in parsed.text  # as text
    assert "a<b>$x^2$" in parsed.text
    assert "mathdefault" not in page and "font-family: 'DejaVu" not in page
    assert "None" not in parsed.text and "nan" not in parsed.text


def test_the_page_says_what_is_no_measurement_of_gpus(tmp_path: Path, page_runs: list[Path]):
    assert "not a measurement of GPUs" not in render(compare(*page_runs))
    cpu = make_run(tmp_path / "cpu", engine="native")
    page = render(compare(cpu))
    assert "toy / CPU / native engine: not a measurement of GPUs" in page


def test_the_page_of_runs_that_all_failed(tmp_path: Path):
    failed = make_run(tmp_path / "ddp", elapsed_ms=[], status="crashed", reason="no reason")
    parsed = parse(render(compare(failed)))
    assert parsed.tags.count("svg") == 0 and "no reason" in parsed.text


def test_a_run_without_a_line_is_a_problem(tmp_path: Path):
    comparison = compare(make_run(tmp_path / "ddp", elapsed_ms=[]))
    assert "logged no interval" in comparison.problems[0]
    parse(render(comparison))


def test_a_hundred_runs_in_five_seconds(tmp_path: Path, capsys: pytest.CaptureFixture):
    strategies = ("ddp", "zero1", "zero2", "zero3", "zero3_offload", "pipeline", "tensor", "hybrid")
    for number in range(100):
        strategy = strategies[number % 8]
        times = [100.0 + number % 8 + (i * 7919 % 13) / 13 for i in range(1000)]
        make_run(tmp_path / str(number // 8) / strategy, strategy, elapsed_ms=times, world_size=4)
    command = [sys.executable, "-m", "t5bench", "compare", str(tmp_path)]
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    with capsys.disabled():
        print(f"\n100 runs of 1,000 log lines compared, page included, in {seconds:.1f} s ({busy:.1f} s of one core)")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("13: ") == 4  # of 100 runs four strategies have 13
    assert busy < 5  # its own work: what else the machine does is not its fault
