"""The comparison of runs: its figures, rows and labels, how it judges the loss, and what it refuses."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import LARGE, RTX_5000_ADA, START, change, make_run, seal

from t5bench import Problem
from t5bench.compare.comparison import Comparison, build
from t5bench.compare.rows import Row, limits, reduction_of
from t5bench.record import records
from t5bench.report.figures import all_figures, rows_of

ON_GPU = {"settings": LARGE, "gpu": RTX_5000_ADA, "nodes": 2, "padded_vocab_size": 32128}
BF16 = {"settings": {"PRECISION_FLAG": "--bf16"}}
FP16 = {"settings": {"PRECISION_FLAG": "--fp16"}}
BETA = {"extra_arguments": ["--adam-beta2", "0.95"]}
OTHER_SPELLING = {"extra_arguments": ["--adam-beta2=95e-2"], "settings": {"LR": "1e-4", "DROPOUT": "0.0"}}
GROWING = {"settings": {"RAMPUP_BATCH_SIZE": "8 8 239", "TRAIN_ITERS": "15"}}  # until the end
HIDDEN_DROPOUT = {"extra_arguments": ["--hidden-dropout", "0.0"]}
OLD_PATCHES = {"engine_patches": "megatron_t5_fixes"}
NORMS = [1.25, 0.75] * 15
OTHER_DATA = {"idx_sha256": "b" * 64}


def compare(*runs: Path, **options: Any) -> Comparison:
    return build([records.load(run) for run in runs], **options)


def row_of(comparison: Comparison, label: str = "ddp") -> Row:
    (row,) = [row for row in comparison.rows if row.label == label]
    return row


def resample(run: Path, change: Callable[[dict], None]) -> None:
    """Changes every sample of the first node."""
    samples = records.load(run).samples[0]
    for sample in samples:
        change(sample)
    (run / "node0.samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    seal(run)


def resume(run: Path, after: int, iteration: int) -> None:
    """Writes below so many lines that the run was resumed from this iteration."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    resumed = f'{{"resumed_from": {iteration}}}\n'
    (run / "metrics.jsonl").write_text("".join([*lines[:after], resumed, *lines[after:]]))
    seal(run)


def test_figures_by_hand(tmp_path: Path):
    ddp = make_run(tmp_path / "ddp", elapsed_ms=[100.0] * 40, **ON_GPU)
    zero = make_run(tmp_path / "zero1", "zero1", elapsed_ms=[80.0] * 40, memory_mib=[900, 1000.5], **ON_GPU)
    row = row_of(compare(ddp, zero), "zero1")
    assert row.milliseconds.median == row.milliseconds.low == row.milliseconds.high == 80.0
    assert row.samples_per_second.median == 200.0  # 16 in 80 ms
    assert (row.tokens_per_second.median, row.ratio.median) == (200.0 * (512 + 128), 1.25)
    assert row.tflops == pytest.approx(19.809 / 0.080 / 2, rel=1e-4)
    assert row.mfu == pytest.approx(row.tflops / 261.1)
    assert row.peak_memory == {0: 900, 1: 1000.5} and row.final_loss == pytest.approx(6 + 2 / 1.4)


@pytest.mark.parametrize(("other", "loss"), [({"SEED": "7"}, 7.0), ({"LR": "0.01"}, None)])
def test_repeats_are_one_row_whose_loss_is_of_one_recipe(tmp_path: Path, other: dict[str, str], loss: float | None):
    """The spread of the repeats decides how wide the interval is, not that of the iterations within."""
    runs = []
    for number, (ms, last) in enumerate([(100, 8.0), (104, 7.0), (102, 6.0)]):
        times = [ms * (1 + 0.01 * (each % 3 - 1)) for each in range(40)]
        settings = other if number else {}
        runs.append(make_run(tmp_path / str(number), elapsed_ms=times, losses=[last] * 40, settings=settings))
    (row,) = compare(*runs).rows
    found = row.milliseconds
    assert [found.low, found.median, found.high] == pytest.approx([97.14, 102, 107.08], abs=0.01)
    assert (row.alone, row.final_loss, sorted(row.run_medians)) == (False, loss, [100, 102, 104])


def test_a_gpt_has_one_length_and_is_not_compared_with_a_t5_unasked(tmp_path: Path):
    made = {"family": "gpt", "settings": ON_GPU["settings"] | {"RECOMPUTE": "full"}}
    gpt = make_run(tmp_path / "gpt", elapsed_ms=[80.0] * 40, **ON_GPU | made)
    row = row_of(compare(gpt))
    assert row.tokens_per_second.median == 200.0 * 512
    assert row.hardware_tflops / row.tflops == pytest.approx(4 / 3, rel=0.05)  # but for the head
    assert "with recomputation" in limits(row)
    with pytest.raises(Problem, match="MODEL_FAMILY"):
        compare(make_run(tmp_path / "ddp", **ON_GPU), gpt, allowed=["engine_arguments"])


UNKNOWN_GPU = {"gpu": "NVIDIA Something"}
GIVEN_PEAK = {"settings": LARGE | {"PEAK_TFLOPS": "100"}}


@pytest.mark.parametrize(
    ("made", "given", "peak", "missing"),
    [
        (ON_GPU | UNKNOWN_GPU, None, None, "the peak of NVIDIA Something in bf16 is unknown"),
        (ON_GPU | UNKNOWN_GPU, 200.0, 200, ""),
        (ON_GPU | GIVEN_PEAK, None, 100, ""),
        ({}, 200.0, None, "it ran on a CPU"),
        ({"padded_vocab_size": None}, None, None, "the record has no padded_vocab_size"),
    ],
)
def test_the_peak_of_a_gpu(tmp_path: Path, made: dict, given: float | None, peak: float | None, missing: str):
    row = row_of(compare(make_run(tmp_path / "ddp", **made), peak_tflops=given))
    assert row.mfu == (pytest.approx(row.tflops / peak) if peak else None)
    assert row.mfu_missing.startswith(missing) and missing in limits(row) and "Network: not measured" in limits(row)
    assert row.sent_per_iteration is None and (row.tflops is None) == ("padded" in missing)


def test_traffic_of_two_nodes_against_their_link(tmp_path: Path):
    # 50 MB every 100 ms are 4 Gbit/s, 40 % of the link.
    run = make_run(tmp_path / "ddp", elapsed_ms=[100.0] * 300, sent_per_iteration=50e6, **ON_GPU)
    row = row_of(compare(run))
    assert row.sent_per_iteration == pytest.approx(50e6, rel=1e-9)
    (first, second) = row.measured[0].observed.traffic
    assert (first.interface, first.share, second.node) == ("eth0", pytest.approx(0.4), 1)
    assert "needs 40% of the time" in limits(row) and "drew 200 W" in limits(row)
    # Virtual interfaces do not count, and a counter that runs backwards gives no figure.
    resample(run, lambda s: s["network"].update((name, {"sent": 1e9 * s["time"]}) for name in ("docker0", "lo")))
    assert row_of(compare(run)).sent_per_iteration == pytest.approx(50e6)
    resample(run, lambda s: s["network"].update(eth0={"sent": 2e10 - s["network"]["eth0"]["sent"]}))
    assert row_of(compare(run)).sent_per_iteration is None


@pytest.mark.parametrize("when", ["profile", "resume"])
def test_what_a_node_sends_for_no_iteration_does_not_count(tmp_path: Path, when: str):
    """To measure the link after a profile, and while a resumed run starts; on one node the loopback counts."""
    settings = {"PROFILE_ITERATION": "150"} if when == "profile" else {}
    made = {"sent_per_iteration": 1e6, "sample_seconds": 0.05, "settings": settings}
    run = make_run(tmp_path / "a", elapsed_ms=[100.0] * 300, **made)
    moment = records.load(run).iterations[149].time
    if when == "resume":
        resume(run, 150, 150)
    resample(run, lambda s: s["network"]["lo"].update(sent=s["network"]["lo"]["sent"] + 1e9 * (s["time"] >= moment)))
    row = row_of(compare(run))
    assert row.sent_per_iteration == pytest.approx(1e6) and "loopback" in limits(row)
    short = make_run(tmp_path / "b", elapsed_ms=[100.0] * 100, sent_per_iteration=1e6, sample_seconds=4)  # 8 s count
    row = row_of(compare(short))
    assert row.sent_per_iteration == pytest.approx(1e6), "every iteration counts"
    few = make_run(tmp_path / "c", elapsed_ms=[100.0] * 12, sent_per_iteration=1e6, sample_seconds=0.44)
    row = row_of(compare(few))
    assert row.sent_per_iteration is None
    assert "4.4 iteration(s) between the first and the last sample of node 0, 40 are needed" in limits(row)


def test_a_sample_at_an_iterations_line_needs_no_twenty_iterations(tmp_path: Path):
    """And the sentence for a row has the number of its cell: the median over the runs that have samples."""
    made = {"elapsed_ms": [100.0] * 12}
    exact = make_run(tmp_path / "a", **made, sent_per_iteration=3.6e6, sample_seconds=0.1)
    make_run(tmp_path / "b", **made, sent_per_iteration=3.26e6, sample_seconds=0.44, start=START + 60)
    row = row_of(compare(exact, tmp_path / "b"))
    assert row.sent_per_iteration == pytest.approx(3.6e6) and row.runs_with_samples == 1
    assert "3.6 MB per iteration (the median of 1 of 2 runs; the others have too few samples)" in limits(row)


def test_an_uneven_iteration_shows_in_the_error(tmp_path: Path):
    run = make_run(tmp_path / "a", elapsed_ms=[100.0] * 200, sent_per_iteration=1e6, sample_seconds=1.03)
    (traffic,) = row_of(compare(run)).measured[0].observed.traffic
    assert 0 < traffic.error <= 0.011 and traffic.iterations > 180


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ([(100, 80), (110, 87), (100, 80.5)], "zero1 is the fastest: 198.8 samples/s, 1.24x [1.22, 1.28] that of ddp"),
        ([(100, 98), (100, 99), (98, 99)], "there is no clear difference between zero1 (161.6 samples/s) and ddp"),
        ([(100, 50), (100, 51)], "zero1 was fastest in this run (316.8 samples/s). Run with REPEATS=3 to know whether"),
    ],
)
def test_the_fastest_is_named_if_interleaved_repeats_show_it(tmp_path: Path, times: list, verdict: str):
    runs = []
    for number, pair in enumerate(times):
        for position, (strategy, ms) in enumerate(zip(("ddp", "zero1"), pair, strict=True)):
            start = 1e9 + 100 * (2 * number + position)
            runs.append(make_run(tmp_path / f"{strategy}/{number}", strategy, elapsed_ms=[ms] * 30, start=start))
    comparison = compare(*runs)
    assert comparison.verdicts[0].startswith(f"2 processes: {verdict}")
    alone = len(times) < 3
    assert any("describe these runs only" in note for note in comparison.notes) == alone
    assert [row["these_runs_alone"] for row in comparison.to_json()["groups"][0]["rows"]] == [alone] * 2


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        (BETA, ["ddp (--adam-beta2 not given)", "ddp (--adam-beta2 0.95)"]),
        # One of the two arguments that DROPOUT stands for, which is the larger of both and so the same.
        (HIDDEN_DROPOUT, ["ddp (--hidden-dropout not given)", "ddp (--hidden-dropout 0)"]),
        ({"settings": {"FLASH_ATTENTION": "off"}}, ["ddp (FLASH_ATTENTION auto)", "ddp (FLASH_ATTENTION off)"]),
        ({"nodes": 2}, ["ddp (nodes 1)", "ddp (nodes 2)"]),
        ({"settings": {"EVAL_ONLY": "1"}}, ["ddp (EVAL_ONLY 0)", "ddp (EVAL_ONLY 1)"]),
        (GROWING, ["ddp (batch full)", "ddp (batch 8)"]),
        ({"settings": {"SEED": "7", "LR": "0.01"}}, ["ddp"]),
        ({"status": "crashed"}, ["ddp (run 0/ddp)", "ddp (run 1/ddp)"]),
    ],
)
def test_runs_that_compute_differently_are_not_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, labels: list[str]
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # so that every process has one thread
    runs = make_run(tmp_path / "0" / "ddp"), make_run(tmp_path / "1" / "ddp", elapsed_ms=[10.0] * 30, **changes)
    comparison = compare(*runs, allowed=["engine_arguments"])
    assert [row.label for row in comparison.rows] == labels
    if len(labels) > 1:
        assert row_of(comparison, labels[0]).milliseconds.median == 100.0
    if changes is GROWING:
        assert row_of(comparison, labels[1]).samples_per_second.median == 800.0  # 8 in 10 ms


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ({"losses": [math.nan] * 30}, "ddp has a loss that is not a number: NO (not a number at 1)"),
        (
            {"losses": [None] * 30} | FP16,
            "no interval of ddp can be timed: each skipped iterations (fp16), or has no time",
        ),
        ({"status": "out-of-memory", "reason": "it is full"}, "ddp is out-of-memory: it is full"),
    ],
)
def test_a_run_that_failed_or_diverged_is_a_problem(tmp_path: Path, made: dict, problem: str):
    comparison = compare(make_run(tmp_path / "run", **made))
    assert comparison.problems[0] == problem and not comparison.sound
    if "status" in made:
        (row,) = json.loads(json.dumps(comparison.to_json()))["groups"][0]["rows"]
        figures = ("milliseconds_per_iteration", "throughput_ratio", "final_loss", "mfu")
        assert [row[name] for name in figures] == [None] * 4 and row["reason"] == "it is full"


def test_runs_without_ddp_among_them_are_compared_with_each_other(tmp_path: Path):
    """Nothing was asked that could not be answered; with one that failed, the answer is missing."""
    others = [make_run(tmp_path / "t", "tensor"), make_run(tmp_path / "b", "zero1")]
    comparison = compare(*others)
    assert comparison.sound and "There is no ddp run here" in comparison.verdicts[-1]
    failed = compare(*others, make_run(tmp_path / "a", "ddp", status="crashed", reason="it fell"))
    assert failed.problems == ["ddp is crashed: it fell", "there is no complete ddp run to compare with"]


def test_groups_have_their_own_baselines_and_rows_come_in_the_order_of_ports(tmp_path: Path):
    comparison = compare(
        make_run(tmp_path / "c", "ddp", elapsed_ms=[60.0] * 30, world_size=4),
        make_run(tmp_path / "d", "hybrid", elapsed_ms=[30.0] * 30),
        make_run(tmp_path / "t", "tensor"),
        make_run(tmp_path / "b", "zero1", elapsed_ms=[50.0] * 30),
        make_run(tmp_path / "a", "ddp", elapsed_ms=[100.0] * 30, engine="native", **OTHER_DATA),
        allowed=["idx_sha256", "engine"],
    )
    rows = [(group.world_size, [row.strategy for row in group.rows]) for group in comparison.groups]
    assert rows == [(2, ["ddp", "zero1", "tensor"]), (4, ["ddp", "hybrid"])]
    assert row_of(comparison, "zero1").ratio.median == row_of(comparison, "hybrid").ratio.median == 2
    assert comparison.sound


def curve(*changes: tuple[int, float]) -> list[float]:
    return [dict(changes).get(iteration, 8.0) for iteration in range(1, 31)]


@pytest.mark.parametrize(
    ("strategy", "both", "changes", "losses", "expected"),
    [
        ("zero1", {}, {}, [(7, 8.00001), (9, 7.99998), (11, 8.00003)], "yes (4e-06 at 11)"),
        ("zero1", {}, {}, [(7, 8.0004), (11, 8.0007)], "NO (9e-05 at 11)"),
        ("zero1", {}, {"norms": [0.7 * norm for norm in NORMS]}, [], "NO (norm 3e-01 at 2)"),
        ("zero1", {}, {"norms": [*NORMS[:-1], math.inf]}, [], "NO (not a number at 30)"),
        ("zero1", {"settings": {"CLIP_GRAD": "2"}}, {}, [], "not shown (CLIP_GRAD) (0)"),
        ("zero1", {"settings": {"CLIP_GRAD": "0.5"}}, {}, [(5, 8.1)], "NO (1e-02 at 5)"),
        ("zero1", {"settings": {"MICRO_BATCH_SIZE": "8"}}, {}, [], "not shown (one micro-batch) (0)"),
        ("zero1", FP16, {}, [(5, 8.1)], "not shown (fp16)"),
        # Rounding grows, and the bounds were measured in short trainings.
        ("zero1", {}, {}, [(n, 8 + 1e-6 * 1.2**n) for n in range(1, 31)], "not shown (rounding grows) (3e-05 at 30)"),
        ("zero1", {}, {}, [(5, 8.1)], "NO (1e-02 at 5)"),
        ("zero1", {}, {}, [(3, math.nan)], "NO (not a number at 3)"),
        ("zero1", BF16, {}, [(4, 8.2)], "NO (2e-02 at 4)"),
        ("tensor", {"settings": {"DROPOUT": "0.1"}}, {}, [(4, 8.1)], "not shown (dropout)"),
        ("tensor", OLD_PATCHES, {}, [(4, 8.1)], "not shown (initial weights)"),
        ("zero1", BETA, OTHER_SPELLING, [], "yes (0)"),
        # Another training is not judged, another way to the same loss is.
        ("zero1", {}, {"settings": {"LR": "0.1", "SEED": "7"}}, [(4, 8.1)], "not shown (LR, SEED)"),
        ("zero1", {}, BETA, [(4, 8.1)], "not shown (--adam-beta2)"),
        ("zero1", {}, OTHER_DATA, [(4, 8.1)], "not shown (idx_sha256)"),
        ("zero1", {}, {"settings": {"RECOMPUTE": "full"}, "engine": "native"}, [(4, 8.1)], "NO (1e-02 at 4)"),
    ],
)
def test_the_largest_difference_and_its_verdict(
    tmp_path: Path, strategy: str, both: dict, changes: dict, losses: list, expected: str
):
    ddp = make_run(tmp_path / "ddp", losses=curve(), **both)
    other = make_run(tmp_path / "other", strategy, losses=curve(*losses), **both | changes)
    comparison = compare(ddp, other, allowed=["engine_arguments", "idx_sha256", "engine"])
    assert str(row_of(comparison, strategy).parity) == expected
    failed = expected.startswith("NO")
    said = f"{strategy} does not train as ddp does: {expected}"
    assert [problem.startswith(said) for problem in comparison.problems] == ([True] if failed else [])
    assert any("check_parity.sh" in verdict for verdict in comparison.verdicts) == expected.startswith("not shown")
    json.dumps(comparison.to_json(), allow_nan=False)


def test_all_is_said_only_where_every_row_was_checked(tmp_path: Path):
    runs = {name: make_run(tmp_path / name, name) for name in ("ddp", "zero1", "zero2", "zero3")}
    runs["tensor"] = make_run(tmp_path / "tensor", "tensor", **BETA)

    def sentence(*strategies: str) -> str:
        verdicts = compare(*(runs[name] for name in strategies), allowed=["engine_arguments"]).verdicts
        return next(verdict for verdict in verdicts if " as ddp does" in verdict).partition(" as ddp does")[0]

    assert sentence("ddp", "zero1") == "zero1 trains"
    assert sentence("ddp", "zero1", "zero2") == "Both rows train"
    assert sentence("ddp", "zero1", "zero2", "zero3") == "All 3 rows train"
    assert sentence("ddp", "zero1", "zero2", "tensor") == "2 of 3 rows train", "tensor has another Adam"


def test_each_repeat_is_judged_by_the_same_training_of_the_baseline(tmp_path: Path):
    for strategy in ("ddp", "zero1"):
        for seed, losses in {"1": curve(), "2": curve((3, 9.0)), "3": curve((4, 9.9))}.items():
            make_run(tmp_path / strategy / seed, strategy, losses=losses, settings={"SEED": seed})
    runs = sorted(tmp_path.glob("*/*"))
    assert str(row_of(compare(*runs), "zero1").parity) == "yes (0)"
    make_run(runs[-2], "zero1", losses=curve((3, 8.8)), settings={"SEED": "2"})
    assert str(row_of(compare(*runs), "zero1").parity) == "NO (2e-02 at 3)"


def test_the_mean_over_fewer_iterations_after_a_resume_is_no_other_loss(tmp_path: Path):
    runs = [make_run(tmp_path / name, name, losses=curve((3, loss)), log_interval=10, settings={"CLIP_GRAD": "1"})
            for name, loss in (("ddp", 8.0), ("zero1", 7.9))]  # fmt: skip
    assert str(row_of(compare(*runs), "zero1").parity) == "NO (1e-02 at 30)"
    resume(runs[1], 2, 25)
    comparison = compare(*runs)
    drawn = {figure.title: figure for figure in all_figures(comparison, rows_of(comparison), 2)}
    assert str(row_of(comparison, "zero1").parity) == "yes (0)" and len(drawn["Loss"].panels) == 1


REFUSED = [
    ({"settings": {"GLOBAL_BATCH_SIZE": "32"}}, "GLOBAL_BATCH_SIZE: 16 (ddp); 32 (zero1)"),
    (BF16, "PRECISION_FLAG: (empty) (ddp); --bf16 (zero1)"),
    ({"settings": {"HIDDEN_SIZE": "128"}}, "HIDDEN_SIZE: 64 (ddp); 128 (zero1)"),
    ({"padded_vocab_size": 4352}, "padded_vocab_size: 4224 (ddp); 4352 (zero1)"),
    (OTHER_DATA, "idx_sha256: "),
    ({"engine": "native"}, "engine: megatron (ddp); native (zero1)"),
    (OLD_PATCHES, "engine_patches: series (ddp); megatron_t5_fixes (zero1)"),
    ({"gpu": RTX_5000_ADA}, "device: cpu (ddp); cuda (zero1)"),
    ({"world_size": 4}, "world_size: 2 (ddp); 4 (zero1): there is no ddp run at 4 processes"),
    (BETA, "--adam-beta2: not given (ddp); 0.95 (zero1)"),
]


@pytest.mark.parametrize(("changes", "expected"), REFUSED)
def test_what_differs_is_refused_and_named_or_marked_where_allowed(tmp_path: Path, changes: dict, expected: str):
    ddp = make_run(tmp_path / "ddp")
    zero = make_run(tmp_path / "zero1", "zero1", **changes)
    name = expected.split(":")[0]
    allowed = "engine_arguments" if name.startswith("--") else name
    with pytest.raises(Problem, match=f"differ in {allowed}") as refusal:
        compare(ddp, zero)
    assert expected in refusal.value.remedy and f"--allow {allowed}" in refusal.value.remedy
    comparison = compare(ddp, zero, allowed=[allowed])
    base, row = comparison.rows
    assert "zero1 *" in " ".join(comparison.verdicts[: len(comparison.groups)])
    assert base.marks == [] and [mark.split(" ")[0] for mark in row.marks] == [name]


def test_all_gpus_of_a_run_are_compared(tmp_path: Path):
    runs = [make_run(tmp_path / str(number), **ON_GPU) for number in (1, 2)]
    for number, run in enumerate(runs, 1):
        change(run, devices=[{"name": "NVIDIA A40"}] * number, node=0)
    with pytest.raises(Problem) as refusal:
        compare(*runs)
    both = (f"{number} x NVIDIA A40 + 1 x {RTX_5000_ADA} (ddp)" for number in (1, 2))
    assert f"gpu: {'; '.join(both)}" in refusal.value.remedy


def test_other_differences_are_notes(tmp_path: Path):
    """What a strategy itself makes different, what all runs share or a record does not know is none."""
    tensor = make_run(tmp_path / "tensor", "tensor", padded_vocab_size=None, **BETA)
    assert len(compare(make_run(tmp_path / "ddp", **BETA), tensor).notes) == 1  # so few repeats
    flags = [["--fsdp2"], ["--fsdp2"], ["--fsdp2", "--odd"]]
    fsdp2 = [make_run(tmp_path / f"f{n}", "fsdp", strategy_flags=own, **BETA) for n, own in enumerate(flags)]
    assert len(compare(make_run(tmp_path / "ddp", **BETA), *fsdp2[:2]).notes) == 1
    assert "flags of fsdp: --fsdp2 (fsdp); --fsdp2 --odd (fsdp)" in compare(*fsdp2).notes
    ddp = make_run(tmp_path / "ddp", versions={"torch": "2.4.0"}, settings={"FLASH_ATTENTION": "off"})
    commits = {"repository": "3", "repository_changed": True}
    zero = make_run(tmp_path / "zero1", "zero1", versions={"torch": "2.13.0"}, commits=commits, settings={"LR": "0.1"})
    change(zero, cpu={"model": "another", "cores": 2})
    change(zero, environment={"NCCL_P2P_DISABLE": "1", "SLURM_JOB_ID": "7", "MICRO_BATCH_SIZE": "9"})
    alone, *others = compare(ddp, zero).notes
    assert "these runs only" in alone and others == [
        "FLASH_ATTENTION: off (ddp); auto (zero1)",
        "LR: 0.0001 (ddp); 0.1 (zero1)",
        "CPU: a CPU (ddp); another (zero1)",
        "version of torch: 2.4.0 (ddp); 2.13.0 (zero1)",
        f"commit of repository: {'1' * 40} (ddp); 3 (zero1)",
        "variable NCCL_P2P_DISABLE: not set (ddp); 1 (zero1)",
        "the repository had uncommitted changes: zero1",
    ]


IN_FP32 = {"extra_arguments": ["--accumulate-allreduce-grads-in-fp32"]}
ZERO = {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 2e8}
ALIGNED = {"ds_config": {"communication_data_type": "fp32", "zero_optimization": ZERO}}
AFTER = "after backward, one flat buffer"
DURING = "during backward, buckets of"


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("ddp", {}, f"fp32, {AFTER}"),
        ("ddp", FP16, f"fp16, {AFTER}"),
        ("ddp", {"engine": "native"}, f"fp32, {DURING} 25 MiB"),
        ("ddp", FP16 | IN_FP32, f"fp32, {AFTER}"),
        ("zero2", {}, "bf16, after backward, buckets of 500M elements"),
        ("zero3", {"ds_config": {"zero_optimization": {"stage": 3}}}, f"bf16, {DURING} 500M elements"),
        ("pipeline", {}, "none but the tied embedding's (one replica)"),
        ("pipeline", {"world_size": 4}, f"fp32, {AFTER}"),
        ("zero1", ALIGNED, f"fp32, {DURING} 200M elements"),
    ],
)
def test_gradient_reduction(tmp_path: Path, strategy: str, options: dict, expected: str):
    assert str(reduction_of(records.load(make_run(tmp_path / "run", strategy, **BF16 | options)))) == expected


@pytest.mark.parametrize(("options", "noted"), [({}, True), (ALIGNED, False)])
def test_a_ratio_over_two_precisions_has_a_note(tmp_path: Path, options: dict, noted: bool):
    runs = make_run(tmp_path / "ddp", **BF16), make_run(tmp_path / "zero1", "zero1", **BF16, **options)
    assert any("GRADIENT_REDUCTION=fp32" in note for note in compare(*runs).notes) == noted
