"""Verdicts over made curves: the gate's, as `t5bench parity` prints them."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import made_runs
import pytest

from t5bench import Problem
from t5bench.__main__ import main
from t5bench.compare.parity import (
    EXIT_NOT_SHOWN,
    draws_alike,
    outside_verdict,
)
from t5bench.compare.sensitivity import Sensitivity
from t5bench.record.records import load
from training_comparison.curves import TOLERANCE, difference, relative_difference

LOSSES = (8.0, 7.9, 7.6, 7.5)
NORMS = (2.0, 1.5, 1.0, 0.8)


def make_run(
    directory: Path,
    losses: Sequence[float | None] = LOSSES,
    norms: Sequence[float | None] = NORMS,
    settings: dict[str, str] | None = None,
    **options: object,
) -> Path:
    """A run of the strategy that the directory's name says."""
    options = {"strategy": directory.name, "elapsed_ms": [100.0] * len(losses)} | options
    settings = {"TRAIN_ITERS": "4", "CLIP_GRAD": "1.1"} | (settings or {})
    return made_runs.make_run(directory, losses=losses, norms=norms, settings=settings, **options)


@pytest.fixture
def ddp(tmp_path: Path) -> Path:
    return make_run(tmp_path / "ddp")


class Answer:
    """What ``python -m t5bench parity`` printed about these directories."""

    def __init__(self, capsys: pytest.CaptureFixture, *words: object) -> None:
        self.status = main(["parity", *map(str, words)])
        self.output, self.errors = capsys.readouterr()

    def line(self, begin: str) -> str:
        (line,) = (line for line in self.output.splitlines() if line.startswith(f"{begin} "))
        return line

    def passed(self, name: str) -> bool:
        assert self.line(name).endswith(("PASS", "FAIL"))
        return self.line(name).endswith("PASS")


Parity = Callable[..., Answer]


@pytest.fixture
def parity(capsys: pytest.CaptureFixture) -> Parity:
    return lambda *words: Answer(capsys, *words)


def scaled(values: Sequence[float], index: int, factor: float) -> list[float]:
    return [value * (factor if at == index else 1) for at, value in enumerate(values)]


def test_differences_by_hand():
    assert relative_difference(8.2, 8.0) == pytest.approx(0.025)
    assert relative_difference(0.0, 0.0) == 0
    assert relative_difference(1e-9, 0.0) == math.inf
    found = difference("loss", {1: 8.0, 2: 7.91, 3: 7.0, 9: 1.0}, {1: 8.0, 2: 7.9, 3: 7.5, 4: 7.0}, 1e-4)
    assert (found.largest, found.largest_step, found.step) == (pytest.approx(0.5 / 7.5), 3, 2)
    assert math.isnan(difference("loss", {1: 9.0, 2: math.nan}, {1: 8.0, 2: 7.9}, 1.0).largest)
    assert difference("loss", {1: 8.0}, {2: 8.0}, 1e-4) is None


def test_curves_that_differ_only_by_rounding_pass(ddp: Path, tmp_path: Path, parity: Parity):
    near = make_run(tmp_path / "zero1", scaled(LOSSES, 2, 1 + 2e-7), scaled(NORMS, 1, 1 + 2e-6))
    alone = make_run(tmp_path / "zero2", world_size=1)
    answer = parity(ddp, near, alone, make_run(tmp_path / "tensor"))
    assert answer.status == 0 and "tensor (megatron) ran with one replica" in answer.output
    assert answer.passed("ddp") and answer.passed("zero1")
    assert "2.0e-07 (it. 3)" in answer.line("zero1") and "2.0e-06 (it. 2)" in answer.line("zero1")
    assert "zero2 (megatron) ran in one process" in answer.output and "ddp (megatron) ran" not in answer.output


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"losses": scaled(LOSSES, 0, 1 + 3e-5)}, "begins at iteration 1: check the weights, the data"),
        (
            {"norms": scaled(NORMS, 0, 1 - 3e-5)},
            "begins at iteration 1: check the gradients, their accumulation and their norm first",
        ),
        ({"losses": scaled(LOSSES, 2, 1 - 3e-5)}, "begins at iteration 3: check clipping and the optimizer step first"),
        (
            {"norms": [2 * norm for norm in NORMS]},
            "likely: the gradient norm is 2 times the second's at the first step, and the losses agree, as Adam makes",
        ),
        ({"losses": [8.0, float("nan"), 7.6, 7.5]}, "the loss is not a number at iteration 2"),
        ({"norms": [2.0, 1.5, float("inf"), 0.8]}, "the gradient norm is not a number at iteration 3"),
        ({"skipped": {3: 1}}, "updates were skipped at iteration 3"),
        ({"losses": [], "norms": []}, "logged no iteration"),
        ({"log_interval": 5, "settings": {"TRAIN_ITERS": "20"}}, "it shares no log interval with the baseline"),
        ({"status": "out-of-memory", "reason": "the GPU's memory is full"}, "out-of-memory: the GPU's memory is full"),
        ({"status": "running"}, "has not ended"),
        ({"settings": {"SEED": "7"}}, "SEED is 7, but 1234 in the baseline"),
        ({"settings": {"PRECISION_FLAG": "--bf16"}}, "PRECISION_FLAG is --bf16, but (empty) in the baseline"),
        ({"extra_arguments": ["--adam-beta2", "0.95"]}, "--adam-beta2 is 0.95, but not given in the baseline"),
        (
            {"own_arguments": ["--adam-beta2", "0.95"], "extra_arguments": ["--adam-beta2", "0.9"]},
            "--adam-beta2, which an argument after -- replaces here, is 0.95 in this launcher, but not given in",
        ),
        (
            {"losses": scaled(LOSSES, 2, 1 - 3e-5), "strategy_flags": ["--lr-decay-style", "linear"]},
            "check its launcher's own STRATEGY_FLAGS=(--lr-decay-style linear) first",
        ),
        ({"idx_sha256": "beef"}, "idx_sha256 is beef, but 5a5a"),
        ({"engine_patches": "megatron_t5_fixes"}, "engine_patches is megatron_t5_fixes, but series in the baseline"),
    ],
)
def test_what_differs_or_cannot_be_compared_fails_and_says_why(
    ddp: Path, tmp_path: Path, parity: Parity, made: dict, says: str
):
    answer = parity(ddp, make_run(tmp_path / "zero1", **made))
    assert answer.status == 1
    assert answer.passed("ddp") and not answer.passed("zero1")
    assert says in answer.line("FAIL zero1")


def test_a_name_that_all_runs_are_given_is_no_difference(tmp_path: Path, parity: Parity):
    given = {"extra_arguments": ["--wandb-exp-name", "x"]}
    runs = [make_run(tmp_path / name, own_arguments=["--wandb-exp-name", name], **given) for name in ("ddp", "zero1")]
    assert parity(*runs).status == 0


def test_only_a_missing_run_or_a_different_reference_fails(ddp: Path, tmp_path: Path, parity: Parity):
    """Only another engine shows what all strategies of an engine have in common."""
    native = make_run(tmp_path / "native" / "reference", scaled(LOSSES, 0, 1.001), strategy="ddp", engine="native")
    answer = parity(ddp, make_run(tmp_path / "zero1"), tmp_path / "tensor", "--reference", native)
    assert answer.status == 1
    assert answer.passed("ddp") and answer.passed("zero1") and not answer.passed("reference")
    assert answer.line("FAIL reference").startswith("FAIL reference [ddp] (native): ")
    assert f"there is no run directory {tmp_path / 'tensor'}" in answer.line("FAIL tensor")


def test_a_baseline_that_failed_fails_all(tmp_path: Path, parity: Parity):
    answer = parity(make_run(tmp_path / "ddp", scaled(LOSSES, 3, math.nan)), make_run(tmp_path / "zero2"))
    assert (answer.status, answer.passed("ddp"), answer.passed("zero2")) == (1, False, False)
    said = "the baseline cannot be used: the loss is not a number at iteration 4"
    assert said in answer.line("FAIL zero2")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"CLIP_GRAD": "0.8"}, "the gradients of every iteration"),
        ({"CLIP_GRAD": "5"}, "the gradients of no iteration"),
        ({"CLIP_GRAD": "0"}, "between 0.8 and 2, for example 1.26"),  # sqrt(0.8 * 2)
        ({"GLOBAL_BATCH_SIZE": "2"}, "one micro-batch"),
    ],
)
def test_a_setting_that_could_hide_a_mistake_shows_nothing(tmp_path: Path, parity: Parity, settings: dict, says: str):
    answer = parity(*(make_run(tmp_path / name, settings=settings) for name in ("ddp", "zero1")))
    assert answer.status == EXIT_NOT_SHOWN
    assert answer.passed("zero1") and says in answer.output and "NOT SHOWN: the curves agree" in answer.output


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"settings": {"PRECISION_FLAG": "--fp16"}}, "the runs are in fp16"),
        ({"engine_patches": "megatron_t5_fixes"}, "only megatron_t5_fixes.patch is applied"),
        ({"strategy": "zero1"}, "none of these directories holds a run of ddp"),
        ({}, "there is no other run"),  # nothing was compared, and that is no pass
    ],
)
def test_runs_without_a_measured_bound_are_refused(tmp_path: Path, parity: Parity, made: dict, says: str):
    answer = parity(make_run(tmp_path / "ddp", **made))
    assert answer.status == 2
    assert answer.errors.startswith("error: ") and says in answer.errors
    assert len(answer.errors.splitlines()) == 2, "what to do is missing"


def test_numbers_that_the_recipe_hides_are_not_shown(ddp: Path, tmp_path: Path, parity: Parity):
    """Where a change of a number moves the gradient norm too little, and the loss not at all."""
    path = tmp_path / "sensitivity.jsonl"
    runs = [ddp, make_run(tmp_path / "zero1")]
    curves = {"recipe": NORMS, "clipping": scaled(NORMS, 3, 1 + 2e-4), "epsilon": scaled(NORMS, 3, 1 + 2e-5)}
    lines = [{"number": name, "change": "1 %", "losses": LOSSES, "norms": norms} for name, norms in curves.items()]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines[:2]))
    assert parity(*runs, "--sensitivity", path).status == parity("--sensitivity", path).status == 0
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    answer = parity(*runs, "--sensitivity", path)
    assert answer.status == EXIT_NOT_SHOWN and answer.passed("zero1")
    assert "a mistake of 1 % in the epsilon moves" in answer.output and "clipping" not in answer.output
    answer = parity("--sensitivity", path)
    assert answer.status == 1 and "FAIL: not seen: epsilon" in answer.output
    assert answer.line("epsilon").split()[-4:] == ["0.0e+00", "2.0e-05", "4", "NO"]
    path.write_text("not json")
    assert "holds no sensitivities" in parity(*runs, "--sensitivity", path).errors
    assert not Sensitivity("a", "b", math.nan, 0.0).is_seen(TOLERANCE["fp32"])


DROPS = {"PRECISION_FLAG": "--bf16", "DROPOUT": "0.1"}


def runs_with_dropout(directory: Path, above: int, seeds: int = 8) -> list[Path]:
    """DDP's, a ZeRO run of the first seed, and a tensor-parallel run of each seed: in so many with a larger loss."""
    made = [make_run(directory / "zero1", scaled(LOSSES, 2, 1 + 2e-4), settings=DROPS)]
    for seed in range(1234, 1234 + seeds):
        settings = DROPS | {"SEED": str(seed)}
        factor = 1.01 if seed < 1234 + above else 0.99
        losses, norms = [[value * factor for value in values] for values in (LOSSES, NORMS[::-1])]
        norms = [norm * (2 - factor) / factor if seed % 2 else norm for norm in norms]
        made.append(make_run(directory / f"seed{seed}" / "ddp", norms=NORMS[::-1], settings=settings))
        made.append(make_run(directory / f"seed{seed}" / "tensor", losses, norms, settings=settings))
    return made


@pytest.mark.parametrize(
    ("above", "seeds", "says"),
    [
        (5, 8, None),
        (8, 8, "the loss is larger in 8 of 8 seeds, by 1.0e-02 on average; chance does this once in 128 checks"),
        (0, 8, "the loss is larger in 0 of 8 seeds, by -1.0e-02"),
        (3, 7, "8 seeds each are needed, but there are 7"),
    ],
)
def test_layouts_that_drop_other_masks_are_judged_over_seeds(
    tmp_path: Path, parity: Parity, above: int, seeds: int, says: str | None
):
    runs = runs_with_dropout(tmp_path, above, seeds)
    answer = parity(*runs, "--baseline", runs[1])
    assert "2.0e-04" in answer.line("zero1")
    assert answer.passed("tensor") == (says is None)
    assert says is None or says in answer.line("FAIL tensor")


@pytest.mark.parametrize(("engine", "directly"), [("native", True), ("megatron", False)])
def test_the_native_engine_drops_the_same_in_an_equal_layout(
    tmp_path: Path, parity: Parity, engine: str, directly: bool
):
    """A method such as sequence parallelism is compared with the same layout without it, in one run each."""
    alone = make_run(tmp_path / "tensor", settings=DROPS, engine=engine)
    near, far = (
        make_run(tmp_path / name / "tensor", scaled(LOSSES, 2, factor), settings=DROPS, engine=engine)
        for name, factor in (("near", 1 + 1e-4), ("far", 1.1))
    )
    assert parity(near, "--baseline", alone).passed("tensor") == directly
    answer = parity(far, "--baseline", alone)
    assert not answer.passed("tensor") and ("seeds each are needed" in answer.output) != directly


def test_interleaved_stages_draw_other_masks(tmp_path: Path):
    """They have other layers, in a layout of the same sizes."""
    schedules = {
        "1f1b": (),
        "gpipe": ("--pipeline-schedule", "gpipe"),
        "interleaved": ("--pipeline-schedule", "interleaved", "--virtual-pipeline-stages", "2"),
    }
    made = {
        name: made_runs.make_run(tmp_path / name, "pipeline", settings=DROPS, engine="native", own_arguments=words)
        for name, words in schedules.items()
    }
    alone, gpipe, interleaved = (load(directory) for directory in made.values())
    assert draws_alike(gpipe, alone) and not draws_alike(interleaved, alone)


def test_the_baseline_is_judged_by_curves_from_outside(tmp_path: Path):
    """Of native/reference.py: what all strategies share shows nowhere else."""
    losses = [8.0, 7.5, 7.0]
    norms = [3.0, 2.0, 1.0]
    baseline = load(made_runs.make_run(tmp_path / "ddp", elapsed_ms=[100.0] * 3, losses=losses, norms=norms))
    curves = tmp_path / "curves.json"
    curves.write_text(json.dumps({"losses": losses, "norms": norms}))
    assert outside_verdict(curves, baseline).passed
    curves.write_text(json.dumps({"losses": losses, "norms": [3.0, 2.0001, 1.0]}))
    differs = outside_verdict(curves, baseline)
    assert (
        not differs.passed and "norm of ddp differs from Hugging Face's by 5.0e-05 at iteration 2" in differs.reasons[0]
    )
    assert differs.reasons[-1] == "all strategies may share this mistake"
    curves.write_text(json.dumps({"losses": losses[:2], "norms": norms[:2]}))
    assert "it trained 2 iterations, the baseline logged 3" in outside_verdict(curves, baseline).reasons
    curves.write_text("")
    with pytest.raises(Problem, match="is empty"):
        outside_verdict(curves, baseline)


def test_a_trace_of_an_older_release_is_not_read(parity: Parity, ddp: Path, tmp_path: Path):
    """The runs are judged by their curves, and the answer says so; --locate has nothing else to read."""
    run = make_run(tmp_path / "zero1")
    for directory in (ddp, run):
        (directory / "trace").mkdir()
        (directory / "trace" / "rank0.jsonl").write_text('{"phase": "layout", "tp": 0, "dp": 0, "pp": 0}\n')
    answer = parity(run, ddp)
    assert answer.passed("zero1")
    assert "zero1 (megatron): an older release wrote its trace, so it is judged by its curves alone" in answer.output
    assert parity(run, ddp, "--locate").status == 2
    assert "an older release wrote the trace in" in parity(run, ddp, "--locate").errors
