"""The comparison of runs: its figures, rows and labels, how it judges the loss, and what it refuses."""

import json
import math
from pathlib import Path

import pytest
from made_runs import LARGE, RTX_5000_ADA, make_run, seal

from t5bench import Problem
from t5bench.compare.comparison import build
from t5bench.compare.limits import limits
from t5bench.compare.rows import reduction_of
from t5bench.record import records

GPU = {"gpu": RTX_5000_ADA, "nodes": 2, "padded_vocab_size": 32128}
ON_GPU = {"settings": LARGE, **GPU}
BF16 = {"settings": {"PRECISION_FLAG": "--bf16"}}
FP16 = {"settings": {"PRECISION_FLAG": "--fp16"}}
BETA = ["--adam-beta2", "0.95"]


def compare(*runs: Path, **options):
    return build([records.load(run) for run in runs], **options)


def row_of(comparison, label: str):
    (row,) = [row for row in comparison.rows if row.label == label]
    return row


def test_figures_by_hand(tmp_path: Path):
    ddp = make_run(tmp_path / "ddp", elapsed_ms=[100.0] * 40, **ON_GPU)
    zero = make_run(tmp_path / "zero1", "zero1", elapsed_ms=[80.0] * 40, memory_mib=[900, 1000.5], **ON_GPU)
    row = row_of(compare(ddp, zero), "zero1")
    assert row.milliseconds.median == row.milliseconds.low == row.milliseconds.high == 80.0
    assert row.samples_per_second.median == 200.0  # 16 in 80 ms
    assert row.tokens_per_second.median == 200.0 * (512 + 128)
    assert row.ratio.median == 1.25
    assert row.tflops == pytest.approx(19.809 / 0.080 / 2, rel=1e-4)
    assert row.mfu == pytest.approx(row.tflops / 261.1)
    assert row.peak_memory == {0: 900, 1: 1000.5}


def test_a_gpt_has_one_length_and_is_not_compared_with_a_t5_unasked(tmp_path: Path):
    full = ["--recompute-granularity", "full"]
    made = {"family": "gpt", "extra_arguments": full}
    gpt = make_run(tmp_path / "gpt", elapsed_ms=[80.0] * 40, **ON_GPU | made)
    row = row_of(compare(gpt), "ddp")
    assert row.tokens_per_second.median == 200.0 * 512
    assert row.hardware_tflops / row.tflops == pytest.approx(4 / 3, rel=0.05)  # but for the head
    assert "with recomputation" in limits(row)
    with pytest.raises(Problem, match="MODEL_FAMILY"):
        compare(make_run(tmp_path / "ddp", **ON_GPU), gpt, allowed=["engine_arguments"])


def test_unmeasured_quantities_have_no_figure(tmp_path: Path):
    row = row_of(compare(make_run(tmp_path / "ddp", padded_vocab_size=None)), "ddp")
    assert row.tflops is None and row.mfu is None and row.sent_per_iteration is None
    assert "padded_vocab_size" in row.mfu_missing
    assert "Network: not measured" in limits(row) and "there is no GPU" in limits(row)


def test_peaks_given_by_hand_or_setting_win_and_a_cpu_has_none(tmp_path: Path):
    unknown = make_run(tmp_path / "a", **ON_GPU | {"gpu": "NVIDIA Something"})
    assert row_of(compare(unknown), "ddp").mfu is None
    row = row_of(compare(unknown, peak_tflops=200.0), "ddp")
    assert row.mfu == pytest.approx(row.tflops / 200)
    stated = make_run(tmp_path / "b", **ON_GPU | {"settings": LARGE | {"PEAK_TFLOPS": "100"}})
    row = row_of(compare(stated), "ddp")
    assert row.mfu == pytest.approx(row.tflops / 100)
    assert row_of(compare(make_run(tmp_path / "c"), peak_tflops=200.0), "ddp").mfu is None


def test_traffic_of_two_nodes_against_their_link(tmp_path: Path):
    # 50 MB every 100 ms are 4 Gbit/s, 40 % of the link.
    run = make_run(tmp_path / "ddp", elapsed_ms=[100.0] * 300, sent_per_iteration=50e6, **ON_GPU)
    row = row_of(compare(run), "ddp")
    assert row.sent_per_iteration == pytest.approx(50e6, rel=1e-9)
    (first, second) = row.measured[0].observed.traffic
    assert (first.interface, first.share, second.node) == ("eth0", pytest.approx(0.4), 1)
    assert "takes 40% of the time" in limits(row) and "drew 200 W" in limits(row)
    # Virtual interfaces and what was cut off do not count, and a counter that runs backwards gives no figure.
    path = run / "node0.samples.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    for sample in samples:
        sample["network"] |= {"docker0": {"sent": sample["time"] * 1e9}, "lo": {"sent": sample["time"] * 1e9}}
    path.write_text("\n".join(map(json.dumps, samples)) + '\n{"time": 17637')
    seal(run)
    assert row_of(compare(run), "ddp").sent_per_iteration == pytest.approx(50e6)
    samples[4]["network"]["eth0"]["sent"] = 0
    path.write_text("\n".join(map(json.dumps, samples)))
    seal(run)
    assert row_of(compare(run), "ddp").sent_per_iteration is None


def test_traffic_of_one_node_is_the_loopbacks_from_three_samples_on(tmp_path: Path):
    row = row_of(compare(make_run(tmp_path / "a", elapsed_ms=[100.0] * 300, sent_per_iteration=1e6)), "ddp")
    assert row.sent_per_iteration == pytest.approx(1e6) and "loopback" in limits(row)
    short = make_run(tmp_path / "b", elapsed_ms=[100.0] * 100, sent_per_iteration=1e6, sample_seconds=4)  # 8 s count
    row = row_of(compare(short), "ddp")
    assert row.sent_per_iteration is None and "3 are needed" in limits(row)


def test_what_a_profile_sends_to_measure_the_link_is_no_traffic_of_the_strategy(tmp_path: Path):
    settings = {"PROFILE_ITERATION": "150"}
    run = make_run(tmp_path / "a", elapsed_ms=[100.0] * 300, sent_per_iteration=1e6, settings=settings)
    path, profiled = run / "node0.samples.jsonl", records.load(run).iterations[149].time
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    for sample in samples:
        sample["network"]["lo"]["sent"] += 1e9 * (sample["time"] >= profiled)
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    seal(run)
    assert row_of(compare(run), "ddp").sent_per_iteration == pytest.approx(1e6)


def test_repeats_are_one_row(tmp_path: Path):
    """Their spread decides how wide the interval is, not that of the iterations within."""
    times = [[ms * (1 + 0.01 * (number % 3 - 1)) for number in range(40)] for ms in (100, 104, 102)]
    (row,) = compare(*(make_run(tmp_path / str(i), elapsed_ms=ms) for i, ms in enumerate(times))).rows
    found = row.milliseconds
    assert [found.low, found.median, found.high] == pytest.approx([97.14, 102, 107.08], abs=0.01)
    assert not row.alone
    assert sorted(row.run_medians) == [100, 102, 104]


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ([(100, 80), (110, 87), (100, 80.5)], "zero1 is the fastest: 198.8 samples/s, 1.24x [1.22, 1.28] that of ddp"),
        ([(100, 98), (100, 99), (98, 99)], "there is no clear difference between zero1 (161.6 samples/s) and ddp: "),
        (
            [(100, 50), (100, 51)],
            "zero1 had the highest throughput, 316.8 samples/s, but these runs cannot rank it against ddp",
        ),
    ],
)
@pytest.mark.parametrize("timed", [True, False])
def test_the_fastest_is_named_if_interleaved_repeats_show_it(tmp_path: Path, times: list, verdict: str, timed: bool):
    """Whether their records say when they ran, or only their directories."""
    runs = []
    for number, pair in enumerate(times):
        for position, (strategy, ms) in enumerate(zip(("ddp", "zero1"), pair, strict=True)):
            start = {"start": 1e9 + 100 * (2 * number + position)} if timed else {}
            place = tmp_path / (f"{strategy}/{number}" if timed else f"repeat{number}/{strategy}")
            runs.append(make_run(place, strategy, elapsed_ms=[ms] * 30, **start))
    comparison = compare(*runs)
    assert comparison.verdicts[0].startswith(f"With 2 processes {verdict}")
    alone = len(times) < 3
    assert any("describe these runs only" in note for note in comparison.notes) == alone
    assert [row["these_runs_alone"] for row in comparison.to_json()["groups"][0]["rows"]] == [alone] * 2


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({"extra_arguments": BETA}, ["ddp (--adam-beta2 not given)", "ddp (--adam-beta2 0.95)"]),
        ({"extra_arguments": ["--swiglu"]}, ["ddp (--swiglu not given)", "ddp (--swiglu given)"]),
        # One of the two arguments that DROPOUT stands for, which is the larger of both and so the same.
        (
            {"extra_arguments": ["--hidden-dropout", "0.0"]},
            ["ddp (--hidden-dropout not given)", "ddp (--hidden-dropout 0.0)"],
        ),
        ({"settings": {"FLASH_ATTENTION": "off"}}, ["ddp (FLASH_ATTENTION auto)", "ddp (FLASH_ATTENTION off)"]),
        ({"nodes": 2}, ["ddp (nodes 1)", "ddp (nodes 2)"]),
        ({"settings": {"SEED": "7", "LR": "0.01"}}, ["ddp"]),
        ({"status": "crashed"}, ["ddp (run 0/ddp)", "ddp (run 1/ddp)"]),
    ],
)
def test_runs_that_compute_differently_are_not_repeats(tmp_path: Path, changes: dict, labels: list[str]):
    runs = make_run(tmp_path / "0" / "ddp"), make_run(tmp_path / "1" / "ddp", elapsed_ms=[10.0] * 30, **changes)
    comparison = compare(*runs, allowed=["engine_arguments"])
    assert [row.label for row in comparison.rows] == labels
    if len(labels) > 1:
        assert row_of(comparison, labels[0]).milliseconds.median == 100.0


def test_a_failed_run_has_a_reason_and_no_figures(tmp_path: Path):
    reason = "the GPU's memory is full"
    failed = make_run(tmp_path / "zero3", "zero3", status="out-of-memory", reason=reason)
    comparison = compare(make_run(tmp_path / "ddp"), failed)
    row = row_of(comparison, "zero3")
    assert (row.milliseconds, row.ratio, row.final_loss, row.peak_memory) == (None, None, None, {})
    assert comparison.problems == [f"zero3 is out-of-memory: {reason}"]
    assert json.loads(json.dumps(comparison.to_json()))["groups"][0]["rows"][1]["reason"] == reason


def test_groups_have_their_own_baselines(tmp_path: Path):
    comparison = compare(
        make_run(tmp_path / "a", "ddp", elapsed_ms=[100.0] * 30, idx_sha256="b" * 64, engine="native"),
        make_run(tmp_path / "b", "zero1", elapsed_ms=[50.0] * 30),
        make_run(tmp_path / "c", "ddp", elapsed_ms=[60.0] * 30, world_size=4),
        make_run(tmp_path / "d", "hybrid", elapsed_ms=[30.0] * 30),
        allowed=["idx_sha256", "engine"],
    )
    assert [(group.world_size, len(group.rows)) for group in comparison.groups] == [(2, 2), (4, 2)]
    assert row_of(comparison, "zero1").ratio.median == row_of(comparison, "hybrid").ratio.median == 2
    assert comparison.sound
    assert comparison.verdicts[0].startswith("With 2 processes zero1 had the highest throughput, 320 samples/s, but")


def test_rows_come_in_the_order_of_the_launchers_ports(tmp_path: Path):
    names = ["a ninth", "hybrid", "tensor", "zero3_offload", "zero1", "ddp"]
    runs = [make_run(tmp_path / name, name, world_size=4) for name in names]
    expected = ["ddp", "zero1", "zero3_offload", "tensor", "hybrid", "a ninth"]
    assert [row.strategy for row in compare(*runs).rows] == expected
    assert [row.strategy for row in compare(*runs, baseline="tensor").rows][:2] == ["tensor", "ddp"]


def curve(*changes: tuple[int, float]) -> list[float]:
    losses = [8.0] * 30
    for iteration, loss in changes:
        losses[iteration - 1] = loss
    return losses


@pytest.mark.parametrize(
    ("strategy", "both", "losses", "expected"),
    [
        ("zero1", {}, curve((7, 8.0004), (9, 7.9996), (11, 8.0007)), "yes (9e-05 at 11)"),
        ("zero1", {}, curve((5, 8.1)), "NO (1e-02 at 5)"),
        ("zero1", {}, curve((3, math.nan)), "NO (not a number at 3)"),
        ("zero1", {}, curve((3, math.inf)), "NO (not a number at 3)"),
        ("zero1", BF16, curve((4, 8.02)), "yes (2e-03 at 4)"),
        ("zero1", BF16, curve((4, 8.2)), "NO (2e-02 at 4)"),
        ("tensor", {"settings": {"DROPOUT": "0.1"}}, curve((4, 8.1)), "n/a (dropout) (1e-02 at 4)"),
        ("tensor", {"engine_patches": "megatron_t5_fixes"}, curve((4, 8.1)), "n/a (initial weights)"),
        ("zero1", {"engine_patches": "megatron_t5_fixes"}, curve(), "yes (0)"),
    ],
)
def test_the_largest_difference_and_its_verdict(tmp_path: Path, strategy: str, both: dict, losses: list, expected: str):
    ddp = make_run(tmp_path / "ddp", losses=curve(), **both)
    comparison = compare(ddp, make_run(tmp_path / "other", strategy, losses=losses, **both))
    assert str(row_of(comparison, strategy).parity) == expected
    failed = expected.startswith("NO")
    assert comparison.problems == ([f"{strategy} does not train as ddp does: {expected}"] if failed else [])
    assert any("check_parity.sh" in verdict for verdict in comparison.verdicts) == expected.startswith("n/a")
    json.dumps(comparison.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"settings": {"LR": "0.1", "SEED": "7"}}, "n/a (LR, SEED)"),
        ({"extra_arguments": BETA}, "n/a (--adam-beta2)"),
        ({"idx_sha256": "b" * 64}, "n/a (idx_sha256)"),
        ({"settings": {"MICRO_BATCH_SIZE": "2"}}, "NO (1e-02 at 4)"),
        ({"engine": "native"}, "NO (1e-02 at 4)"),
    ],
)
def test_another_training_is_not_judged(tmp_path: Path, changes: dict, expected: str):
    ddp = make_run(tmp_path / "ddp", losses=curve())
    other = make_run(tmp_path / "zero1", "zero1", losses=curve((4, 8.1)), **changes)
    comparison = compare(ddp, other, allowed=["engine_arguments", "idx_sha256", "MICRO_BATCH_SIZE", "engine"])
    assert str(row_of(comparison, "zero1").parity) == expected


def test_each_repeat_is_judged_by_the_same_training_of_the_baseline(tmp_path: Path):
    seeds = {"1": curve(), "2": curve((3, 9.0)), "3": curve((4, 9.9))}
    for strategy in ("ddp", "zero1"):
        for seed, losses in seeds.items():
            make_run(tmp_path / strategy / seed, strategy, losses=losses, settings={"SEED": seed})
    runs = sorted(tmp_path.glob("*/*"))
    assert str(row_of(compare(*runs), "zero1").parity) == "yes (0)"
    make_run(runs[-2], "zero1", losses=curve((3, 8.8)), settings={"SEED": "2"})
    assert str(row_of(compare(*runs), "zero1").parity) == "NO (2e-02 at 3)"


def test_a_baseline_that_diverged_or_is_missing_is_a_problem(tmp_path: Path):
    diverged = compare(make_run(tmp_path / "ddp", losses=curve((3, math.nan))))
    assert diverged.problems == ["ddp has a loss that is not a number: NO (not a number at 3)"]
    comparison = compare(make_run(tmp_path / "zero1", "zero1"))
    assert comparison.problems == ["there is no complete ddp run to compare with"]
    assert compare(make_run(tmp_path / "zero2", "zero2"), baseline="zero2").sound


REFUSED = [
    ({"settings": {"GLOBAL_BATCH_SIZE": "32"}}, "GLOBAL_BATCH_SIZE: 16 (ddp); 32 (zero1)"),
    ({"settings": {"MICRO_BATCH_SIZE": "2"}}, "MICRO_BATCH_SIZE: 1 (ddp); 2 (zero1)"),
    ({"settings": {"PRECISION_FLAG": "--bf16"}}, "PRECISION_FLAG: (empty) (ddp); --bf16 (zero1)"),
    ({"settings": {"HIDDEN_SIZE": "128"}}, "HIDDEN_SIZE: 64 (ddp); 128 (zero1)"),
    ({"settings": {"ENCODER_SEQ_LENGTH": "64"}}, "ENCODER_SEQ_LENGTH: 128 (ddp); 64 (zero1)"),
    ({"padded_vocab_size": 4352}, "padded_vocab_size: 4224 (ddp); 4352 (zero1)"),
    ({"idx_sha256": "b" * 64}, "idx_sha256: "),
    ({"engine": "native"}, "engine: megatron (ddp); native (zero1)"),
    ({"engine_patches": "megatron_t5_fixes"}, "engine_patches: series (ddp); megatron_t5_fixes (zero1)"),
    ({"gpu": RTX_5000_ADA}, "device: cpu (ddp); cuda (zero1)"),
    ({"world_size": 4}, "world_size: 2 (ddp); 4 (zero1): there is no ddp run at 4 processes"),
    ({"extra_arguments": BETA}, "--adam-beta2: not given (ddp); 0.95 (zero1)"),
]


@pytest.mark.parametrize(("changes", "expected"), REFUSED)
def test_what_differs_is_refused_and_named_or_marked_where_allowed(tmp_path: Path, changes: dict, expected: str):
    ddp, zero = make_run(tmp_path / "ddp"), make_run(tmp_path / "zero1", "zero1", **changes)
    name = expected.split(":")[0]
    allowed = "engine_arguments" if name.startswith("--") else name
    with pytest.raises(Problem, match=f"differ in {allowed}") as refusal:
        compare(ddp, zero)
    assert expected in refusal.value.remedy and f"--allow {allowed}" in refusal.value.remedy
    base, row = compare(ddp, zero, allowed=[allowed]).rows
    assert base.marks == [] and [mark.split(" ")[0] for mark in row.marks] == [name]


def test_two_gpus_are_two_devices(tmp_path: Path):
    other = make_run(tmp_path / "zero1", "zero1", **ON_GPU | {"gpu": "NVIDIA A40"})
    with pytest.raises(Problem) as refusal:
        compare(make_run(tmp_path / "ddp", **ON_GPU), other)
    assert "gpu: NVIDIA RTX 5000 Ada Generation (ddp); NVIDIA A40 (zero1)" in refusal.value.remedy


def test_engine_arguments_that_all_runs_share_are_no_difference(tmp_path: Path):
    """Nor is what a strategy itself makes different, or what a record does not know."""
    shared = {"extra_arguments": BETA}
    tensor = make_run(tmp_path / "tensor", "tensor", **shared)
    unknown = make_run(tmp_path / "zero1", "zero1", padded_vocab_size=None, **shared)
    comparison = compare(make_run(tmp_path / "ddp", **shared), tensor, unknown)
    assert comparison.sound
    assert [note for note in comparison.notes if "gradients" not in note and "runs only" not in note] == []


def test_other_differences_are_notes(tmp_path: Path):
    ddp = make_run(tmp_path / "ddp", versions={"torch": "2.4.0"}, settings={"FLASH_ATTENTION": "off"})
    commits = {"repository": "3", "repository_changed": True}
    zero = make_run(tmp_path / "zero1", "zero1", versions={"torch": "2.13.0"}, commits=commits, settings={"LR": "0.1"})
    alone, *others = compare(ddp, zero).notes
    assert "these runs only" in alone and others == [
        "FLASH_ATTENTION: off (ddp); auto (zero1)",
        "LR: 0.0001 (ddp); 0.1 (zero1)",
        "version of torch: 2.4.0 (ddp); 2.13.0 (zero1)",
        f"commit of repository: {'1' * 40} (ddp); 3 (zero1)",
        "the repository had uncommitted changes: zero1",
    ]


IN_FP32 = "--accumulate-allreduce-grads-in-fp32"
STAGE_3 = {"zero_optimization": {"stage": 3}}
ALIGNED = {
    "communication_data_type": "fp32",
    "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 2e8},
}


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("ddp", {}, "fp32, after backward, one flat buffer"),
        ("ddp", FP16, "fp16, after backward, one flat buffer"),
        ("ddp", {"engine": "native"}, "fp32, during backward, buckets of 25 MiB"),
        ("ddp", FP16 | {"extra_arguments": [IN_FP32]}, "fp32, after backward, one flat buffer"),
        ("zero2", {}, "bf16, after backward, buckets of 500M elements"),
        (
            "zero3",
            {"ds_config": {"zero_optimization": {"stage": 3}}},
            "bf16, during backward, buckets of 500M elements",
        ),
        ("tensor", {}, "none (one replica)"),
        ("pipeline", {}, "none but the tied embedding's (one replica)"),
        ("pipeline", {"world_size": 4}, "fp32, after backward, one flat buffer"),
        ("zero1", {"ds_config": ALIGNED}, "fp32, during backward, buckets of 200M elements"),
    ],
)
def test_gradient_reduction(tmp_path: Path, strategy: str, options: dict, expected: str):
    assert str(reduction_of(records.load(make_run(tmp_path / "run", strategy, **BF16 | options)))) == expected


def test_a_ratio_over_two_precisions_has_a_note(tmp_path: Path):
    ddp, zero = make_run(tmp_path / "ddp", **BF16), make_run(tmp_path / "zero1", "zero1", **BF16)
    assert any("GRADIENT_REDUCTION=fp32" in note and "(zero1)" in note for note in compare(ddp, zero).notes)
    zero = make_run(tmp_path / "other", "zero1", ds_config=ALIGNED, **BF16)
    assert not any("GRADIENT_REDUCTION=fp32" in note for note in compare(ddp, zero).notes)
