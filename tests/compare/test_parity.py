"""The parity gate: verdicts over made curves, and the gate itself over real trainings of the native engine."""

import json
import math
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import REPO_ROOT, STRATEGIES, processes_with, wait_for
from hypothesis import given
from hypothesis import strategies as st
from parity_gate import copy_project, gate_environment, verdicts

from t5bench.__main__ import main
from t5bench.compare.parity import LOSS_TOLERANCE, NORM_TOLERANCE, difference, relative_difference
from t5bench.record.log import Iteration
from t5bench.record.records import metrics_line

LOSSES = (8.0, 7.9, 7.6, 7.5)
NORMS = (2.0, 1.5, 1.0, 0.8)
SETTINGS = {
    "ENCODER_NUM_LAYERS": "2", "DROPOUT": "0", "PRECISION_FLAG": "", "CLIP_GRAD": "1.1", "SEED": "1234", "LR": "0.001",
    "TRAIN_ITERS": "4", "LOG_INTERVAL": "1",
}  # fmt: skip


def make_run(
    directory: Path,
    losses: Sequence[float | None] = LOSSES,
    norms: Sequence[float | None] = NORMS,
    first: int = 1,
    engine: str = "megatron",
    micro_batches: int = 4,
    world_size: int = 2,
    data: str = "0f1e",
    settings: dict[str, str] | None = None,
    **part: object,
) -> Path:
    """A run directory of the strategy that its name says, as far as the gate reads it."""
    directory.mkdir(parents=True)
    lines = [
        Iteration(first + n, len(losses), 100.0, loss, 1e-3, 160.0, 0.1, norm, skipped=int(loss is None))
        for n, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    ]
    (directory / "metrics.jsonl").write_text("".join(metrics_line(line) + "\n" for line in lines))
    layout = {"nnodes": 1, "nproc_per_node": world_size, "world_size": world_size, "tp": 1, "pp": 1, "dp": world_size}
    record = {
        "format": 1, "node": 0, "host": "node0", "status": "complete", "reason": "", "remedy": "", "cause": None,
        "started": "2026-11-21T04:43:36.123Z", "ended": "2026-11-21T04:44:36.123Z", "strategy": directory.name,
        "title": "", "engine": engine, "engine_patches": "series", "settings": SETTINGS | (settings or {}),
        "layout": layout | {"micro_batches": micro_batches}, "data": {"idx_sha256": data}, "ds_config": None,
        "versions": {}, "commits": {}, "patches": {}, "peak_memory": [],
    }  # fmt: skip
    (directory / "node0.json").write_text(json.dumps(record | part))
    return directory


@pytest.fixture
def ddp(tmp_path: Path) -> Path:
    return make_run(tmp_path / "ddp")


class Answer:
    """What ``python -m t5bench parity`` said of these directories."""

    def __init__(self, capsys: pytest.CaptureFixture, *words: object) -> None:
        self.status = main(["parity", *map(str, words)])
        self.output, self.errors = capsys.readouterr()

    def row(self, name: str) -> str:
        (row,) = (line for line in self.output.splitlines() if line.startswith(f"{name} "))
        return row

    def passed(self, name: str) -> bool:
        assert self.row(name).endswith(("PASS", "FAIL"))
        return self.row(name).endswith("PASS")

    def reason(self, name: str) -> str:
        (line,) = (line for line in self.output.splitlines() if line.startswith(f"FAIL {name} "))
        return line


def scaled(values: Sequence[float], index: int, factor: float) -> list[float]:
    return [value * (factor if at == index else 1) for at, value in enumerate(values)]


# ---- the arithmetic ------------------------------------------------------------------------------------------------


def test_relative_difference():
    assert relative_difference(8.2, 8.0) == pytest.approx(0.025)
    assert relative_difference(0.0, 0.0) == 0
    assert relative_difference(1e-9, 0.0) == math.inf


def test_largest_difference_and_where_it_begins():
    found = difference({1: 8.0, 2: 7.91, 3: 7.0, 9: 1.0}, {1: 8.0, 2: 7.9, 3: 7.5, 4: 7.0}, 1e-4)
    assert (found.largest, found.iteration, found.first_beyond) == (pytest.approx(0.5 / 7.5), 3, 2)
    assert difference({1: 8.0}, {2: 8.0}, 1e-4) is None


curves = st.dictionaries(st.integers(1, 50), st.floats(0.01, 100), min_size=1)


@given(curves, curves)
def test_no_shared_iteration_differs_more_than_the_largest(curve: dict[int, float], reference: dict[int, float]):
    found = difference(curve, reference, LOSS_TOLERANCE)
    shared = curve.keys() & reference.keys()
    assert (found is None) == (not shared)
    if found:
        assert all(abs(curve[n] - reference[n]) <= found.largest * abs(reference[n]) * (1 + 1e-9) for n in shared)
        assert (found.first_beyond is None) == (found.largest <= LOSS_TOLERANCE)


@given(curves)
def test_a_curve_equals_itself(curve: dict[int, float]):
    assert difference(curve, dict(curve), 0.0).largest == 0


# ---- verdicts ------------------------------------------------------------------------------------------------------


def test_curves_that_differ_by_rounding_pass(ddp: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    near = make_run(tmp_path / "zero1", scaled(LOSSES, 2, 1 + 2e-7), scaled(NORMS, 1, 1 + 2e-6))
    answer = Answer(capsys, ddp, near)
    assert answer.status == 0
    assert answer.passed("ddp") and answer.passed("zero1")
    assert "2.0e-07 (it. 3)" in answer.row("zero1") and "2.0e-06 (it. 2)" in answer.row("zero1")


@pytest.mark.parametrize(
    ("losses", "norms", "says"),
    [
        (scaled(LOSSES, 0, 1 + 3 * LOSS_TOLERANCE), NORMS, "iteration 1's loss differs already"),
        (LOSSES, scaled(NORMS, 0, 1 - 3 * NORM_TOLERANCE), "iteration 1's loss agrees, its gradient norm does not"),
        (scaled(LOSSES, 2, 1 - 3 * LOSS_TOLERANCE), NORMS, "it begins at iteration 3"),
    ],
    ids=["forward", "gradients", "step"],
)
def test_what_differs_fails_with_where(
    ddp: Path, tmp_path: Path, capsys: pytest.CaptureFixture, losses: list, norms: list, says: str
):
    answer = Answer(capsys, make_run(tmp_path / "zero2", losses, norms), make_run(tmp_path / "zero3"), ddp)
    assert answer.status == 1
    assert not answer.passed("zero2") and answer.passed("zero3")
    assert says in answer.reason("zero2")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"losses": [8.0, float("nan"), 7.6, 7.5]}, "the loss is not a number at iteration 2"),
        ({"norms": [2.0, 1.5, float("inf"), 0.8]}, "the gradient norm is not a number at iteration 3"),
        ({"norms": [2.0, 1.5, 1.0, None]}, "no gradient norm was logged at iteration 4"),
        ({"losses": [8.0, None, 7.6, 7.5]}, "updates were skipped at iteration 2"),
        ({"losses": [], "norms": []}, "logged no iteration"),
        ({"losses": LOSSES[:3], "norms": NORMS[:3]}, "only one of the two logged iteration 4"),
        ({"first": 5}, "shares no iteration with the baseline"),
        ({"status": "out-of-memory", "reason": "the GPU's memory is full"}, "out-of-memory: the GPU's memory is full"),
        ({"status": "running", "ended": None}, "has not ended"),
        ({"settings": {"SEED": "7"}}, "SEED is '7', and '1234' in the baseline"),
        ({"data": "beef"}, "other data than the baseline"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_what_cannot_be_compared_fails(ddp: Path, tmp_path: Path, capsys: pytest.CaptureFixture, made: dict, says: str):
    answer = Answer(capsys, ddp, make_run(tmp_path / "zero1", **made))
    assert answer.status == 1
    assert answer.passed("ddp") and not answer.passed("zero1")
    assert says in answer.reason("zero1")


def test_a_missing_run_fails(ddp: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    answer = Answer(capsys, ddp, tmp_path / "tensor")
    assert answer.status == 1
    assert f"there is no run directory {tmp_path / 'tensor'}" in answer.reason("tensor")


def test_a_baseline_that_failed_fails_all(tmp_path: Path, capsys: pytest.CaptureFixture):
    ddp = make_run(tmp_path / "ddp", scaled(LOSSES, 3, math.nan))
    answer = Answer(capsys, ddp, make_run(tmp_path / "zero1", scaled(LOSSES, 3, math.nan)))
    assert answer.status == 1
    assert not answer.passed("ddp") and not answer.passed("zero1")
    assert "for the baseline: the loss is not a number at iteration 4" in answer.reason("zero1")


def test_a_reference_that_differs_fails_alone(ddp: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """What all strategies of an engine have in common shows in another engine alone."""
    native = make_run(tmp_path / "native" / "reference", scaled(LOSSES, 0, 1.001), strategy="ddp", engine="native")
    answer = Answer(capsys, ddp, make_run(tmp_path / "zero1"), "--reference", native)
    assert answer.status == 1
    assert answer.passed("ddp") and answer.passed("zero1") and not answer.passed("reference")
    assert "(native)" in answer.reason("reference")
    assert Answer(capsys, ddp, "--reference", make_run(tmp_path / "same", engine="native")).status == 0


@pytest.mark.parametrize(("clip", "where"), [("0.8", "every"), ("5", "no"), ("0", "no")])
def test_clipping_that_hides_a_scale_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture, clip: str, where: str
):
    runs = [make_run(tmp_path / name, settings={"CLIP_GRAD": clip}) for name in ("ddp", "zero1")]
    answer = Answer(capsys, *runs)
    assert answer.status == 1
    assert answer.passed("zero1")
    assert f"the gradients of {where} iteration" in answer.output
    # sqrt(0.8 * 2) = 1.26
    assert "CLIP_GRAD between 0.8 and 2, for example 1.26" in answer.output


def test_one_micro_batch_hides_accumulation(tmp_path: Path, capsys: pytest.CaptureFixture):
    answer = Answer(capsys, *(make_run(tmp_path / name, micro_batches=1) for name in ("ddp", "zero1")))
    assert answer.status == 1
    assert "one micro-batch" in answer.output


def test_one_process_divides_nothing(ddp: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    answer = Answer(capsys, ddp, make_run(tmp_path / "zero2", world_size=1))
    assert answer.status == 0
    assert "zero2 (megatron) ran in one process" in answer.output


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"settings": {"PRECISION_FLAG": "--bf16"}}, "the runs are in bf16"),
        ({"settings": {"DROPOUT": "0.1"}}, "DROPOUT=0.1"),
        ({"engine_patches": "megatron_t5_fixes"}, "only megatron_t5_fixes.patch is applied"),
        ({"strategy": "zero1"}, "none of these directories holds a run of ddp"),
    ],
    ids=["precision", "dropout", "patches", "baseline"],
)
def test_runs_that_the_gate_does_not_hold_for_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture, made: dict, says: str
):
    answer = Answer(capsys, make_run(tmp_path / "ddp", **made))
    assert answer.status == 2
    assert answer.errors.startswith("error: ") and says in answer.errors
    assert len(answer.errors.splitlines()) == 2, "what to do is missing"


def test_a_baseline_alone_is_refused(ddp: Path, capsys: pytest.CaptureFixture):
    """Nothing was compared, and that is no pass."""
    answer = Answer(capsys, ddp)
    assert answer.status == 2
    assert "there is no other run" in answer.errors


def test_a_baseline_without_a_record_is_refused(ddp: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    answer = Answer(capsys, ddp, "--baseline", tmp_path / "nowhere")
    assert answer.status == 2
    assert "there is no run directory" in answer.errors


# ---- the script ----------------------------------------------------------------------------------------------------


def gate(*strategies: str, root: Path = REPO_ROOT, **settings: str) -> subprocess.Popen:
    """scripts/check_parity.sh with the native engine, from a directory that is not the project's."""
    return subprocess.Popen(
        ["bash", str(root / "scripts" / "check_parity.sh"), *strategies],
        env=gate_environment() | {"ENGINE": "native"} | settings,
        cwd=root.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the project whose engine a test may change, in a path with a space."""
    return copy_project(tmp_path / "a copy")


def test_help_names_all_strategies():
    process = gate("--help", PYTHON="python9")
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert set(STRATEGIES) <= set(re.findall(r"\w+", output))


@pytest.mark.parametrize(
    ("strategies", "settings", "says"),
    [
        (["zero4"], {}, "there is no strategy 'zero4'"),
        (["ddp"], {}, "ddp alone has nothing to be compared with"),
        (["--fast"], {}, "unknown option '--fast'"),
        ([], {"ENGINE": "jax"}, "ENGINE is 'jax'"),
        ([], {"TRAIN_ITERS": "1"}, "TRAIN_ITERS must be a whole number of at least 2"),
        ([], {"RUNS_DIR": "."}, "a check is made of new runs alone"),
        ([], {"PYTHON": "python9"}, "there is no 'python9' on PATH"),
    ],
    ids=["strategy", "alone", "option", "engine", "iterations", "runs", "python"],
)
def test_wrong_use(strategies: list[str], settings: dict[str, str], says: str):
    process = gate(*strategies, **settings)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert says in errors and errors.count("error: ") == 1


def test_an_engine_that_is_not_there(copy: Path, tmp_path: Path):
    process = gate("zero1", root=copy, ENGINE="megatron", MEGATRON_DIR=str(tmp_path / "nowhere"))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"there is no Megatron-DeepSpeed checkout at {tmp_path / 'nowhere'}" in errors
    assert "none of the strategies can run here" in errors


def finish(process: subprocess.Popen) -> tuple[dict[tuple[str, str], str], str]:
    """verdicts() of the gate's output, and all that it said."""
    output, errors = process.communicate(timeout=300)
    return verdicts(output), output + errors


@pytest.mark.slow
def test_the_native_engines_strategies_pass(copy: Path):
    process = gate("pipeline", root=copy, RUNS_DIR="relative runs", TRAIN_ITERS="8")
    found, said = finish(process)
    assert process.returncode == 0, said
    assert found == {("ddp", "native"): "PASS", ("pipeline", "native"): "PASS"}
    assert (copy.parent / "relative runs" / "native" / "pipeline" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_wrong_gradients_of_some_strategies_fail(copy: Path):
    """ZeRO that forgets all micro-batches but the last, and a tensor-parallel norm that counts replicas twice."""
    for name, right, wrong in (
        (
            "trainers.py",
            "self.model.backward(loss)",
            "self.model.backward(loss * (x.data_ptr() == batch[0][-len(x) :].data_ptr()))",
        ),
        ("parallel.py", 'if p not in tied and (hasattr(p, "tp_slice") or layout.tp.rank == 0)', "if p not in tied"),
    ):
        path = copy / "native" / name
        text = path.read_text()
        assert text.count(right) == 1
        path.write_text(text.replace(right, wrong))
    process = gate("zero2", "tensor", root=copy, TRAIN_ITERS="8")
    found, said = finish(process)
    assert process.returncode == 1, said
    assert {name: verdict for (name, _), verdict in found.items()} == {
        "ddp": "PASS", "zero2": "FAIL", "tensor": "FAIL",
    }  # fmt: skip
    assert said.count("iteration 1's loss agrees, its gradient norm does not") == 2


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_running(copy: Path, tmp_path: Path):
    """The shell gets the signal alone, as from `kill`; a terminal gives it to the launcher too."""
    mark = f"PARITY_TEST={tmp_path}"
    process = gate("zero1", root=copy, RUNS_DIR=str(tmp_path / "runs"), PARITY_TEST=str(tmp_path))
    log = tmp_path / "runs" / "native" / "ddp" / "node0.log"
    wait_for(lambda: log.exists() and "iteration" in log.read_text(), 120)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert "INT received: stopped" in errors
    assert not (tmp_path / "runs" / "native" / "zero1").exists()
    assert processes_with(mark) == []
