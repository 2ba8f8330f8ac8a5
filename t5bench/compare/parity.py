"""Whether runs train the same model: their loss and gradient-norm curves against DDP's, pass or fail for each.

It holds for runs in fp32 without dropout from the same initial weights on the same data: then only rounding may differ.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tabulate import tabulate

from t5bench.record.records import RecordError, Run, load
from t5bench.record.status import COMPLETE, RUNNING

BASELINE = "ddp"

# Relative. Measured on a CPU: rounding moves the loss by up to 3e-7 in 20 to 100 iterations, and the norm, which both
# engines add up in float64 there, by up to 1e-7. Of the mistakes known, the smallest, a bias whose shards are left out
# of the norm, moves the loss by 6e-6 and the norm by 8e-4 to 4e-3; a mask that is not applied moves the loss by 8e-5 at
# the first iteration and 5e-4 later, and the norm by 1e-3 and more.
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-5

# What decides a curve, and so must be the same in both runs: with one of these changed it is another training.
SAME_SETTINGS = (
    "ENCODER_NUM_LAYERS", "DECODER_NUM_LAYERS", "HIDDEN_SIZE", "NUM_ATTENTION_HEADS", "FFN_HIDDEN_SIZE",
    "ENCODER_SEQ_LENGTH", "DECODER_SEQ_LENGTH", "DROPOUT", "TRAIN_ITERS", "GLOBAL_BATCH_SIZE", "PRECISION_FLAG", "LR",
    "MIN_LR", "LR_WARMUP_ITERS", "WEIGHT_DECAY", "CLIP_GRAD", "SEED", "LOG_INTERVAL",
)  # fmt: skip


class UsageError(ValueError):
    """Runs with which the comparison cannot be made; ``remedy`` says what to do."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of two curves, its iteration, and the first iteration beyond the tolerance."""

    largest: float
    iteration: int
    first_beyond: int | None

    def __str__(self) -> str:
        return f"{self.largest:.1e} (it. {self.iteration})"


@dataclass(frozen=True)
class Verdict:
    """Of one run; it passed when ``reasons`` is empty. A difference is None where there was nothing to compare."""

    name: str
    run: Run | None = None
    loss: Difference | None = None
    norm: Difference | None = None
    reasons: Sequence[str] = field(default_factory=tuple)

    @property
    def passed(self) -> bool:
        return not self.reasons

    @property
    def engine(self) -> str:
        return self.run.engine if self.run else "-"


def relative_difference(value: float, reference: float) -> float:
    """|value - reference| / |reference|; 0 when they are equal, whatever they are."""
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf


def difference(curve: dict[int, float], reference: dict[int, float], tolerance: float) -> Difference | None:
    """Two curves by iteration, of finite numbers; None when they share no iteration."""
    shared = {number: relative_difference(curve[number], reference[number]) for number in curve if number in reference}
    if not shared:
        return None
    worst = max(shared, key=lambda number: shared[number])
    beyond = (number for number in sorted(shared) if shared[number] > tolerance)
    return Difference(shared[worst], worst, next(beyond, None))


def defect(run: Run) -> str | None:
    """Why a run's curves cannot be compared; None when they can."""
    if run.status == RUNNING:
        return "has not ended, or its launcher was killed"
    if run.status != COMPLETE:
        return f"{run.status}: {run.reason}".removesuffix(": ")
    if not run.iterations:
        return "logged no iteration"
    for line in run.iterations:
        where = f"at iteration {line.iteration}"
        if line.lm_loss is None or line.skipped:
            return f"updates were skipped {where}"
        if not math.isfinite(line.lm_loss) or line.nan:
            return f"the loss is not a number {where}"
        if line.grad_norm is None:
            return f"no gradient norm was logged {where}"
        if not math.isfinite(line.grad_norm):
            return f"the gradient norm is not a number {where}"
    return None


def other_training(run: Run, baseline: Run) -> list[str]:
    """What makes these two runs different trainings by their settings or data: one sentence each."""
    ours, theirs = run.record["settings"], baseline.record["settings"]
    found = [
        f"{name} is '{ours.get(name, '')}', and '{theirs.get(name, '')}' in the baseline"
        for name in SAME_SETTINGS
        if ours.get(name) != theirs.get(name)
    ]
    if run.record["data"]["idx_sha256"] != baseline.record["data"]["idx_sha256"]:
        found.append("it was trained on other data than the baseline")
    return found


def compare(run: Run, baseline: Run) -> Verdict:
    """The verdict over a run, given a baseline without a defect."""
    if problem := defect(run):
        return Verdict(run.name, run, reasons=(problem,))
    reasons = other_training(run, baseline)
    ours, theirs = ({line.iteration: line for line in curve.iterations} for curve in (run, baseline))
    loss = difference(*({n: line.lm_loss for n, line in curve.items()} for curve in (ours, theirs)), LOSS_TOLERANCE)
    norm = difference(*({n: line.grad_norm for n, line in curve.items()} for curve in (ours, theirs)), NORM_TOLERANCE)
    if loss is None or norm is None:
        return Verdict(run.name, run, reasons=(*reasons, "shares no iteration with the baseline"))
    if alone := sorted(ours.keys() ^ theirs.keys()):
        shown = ", ".join(map(str, alone[:5])) + (", ..." if len(alone) > 5 else "")
        reasons.append(f"only one of the two logged iteration {shown}")
    reasons += _beyond(loss, norm, first=min(ours.keys() & theirs.keys()))
    return Verdict(run.name, run, loss, norm, tuple(reasons))


def _beyond(loss: Difference, norm: Difference, first: int) -> list[str]:
    """What differs, and what that says about where to look."""
    found = [
        f"the {name} differs by {found.largest:.1e} at iteration {found.iteration} (allowed: {tolerance:.0e})"
        for name, found, tolerance in (("loss", loss, LOSS_TOLERANCE), ("gradient norm", norm, NORM_TOLERANCE))
        if found.first_beyond is not None
    ]
    if not found:
        return []
    if loss.first_beyond == first:
        hint = f"iteration {first}'s loss differs already: other weights, other data or another forward pass"
    elif norm.first_beyond == first:
        hint = f"iteration {first}'s loss agrees, its gradient norm does not: the gradients, or how they are added up"
    else:
        begin = min(number for number in (loss.first_beyond, norm.first_beyond) if number is not None)
        hint = f"it begins at iteration {begin}: look at the clipping and the optimizer's step"
    return [*found, hint]


def blind_spots(baseline: Run) -> list[str]:
    """Why these runs would agree in spite of a mistake, judged by the baseline: what to change, one sentence each."""
    found = []
    norms = [line.grad_norm for line in baseline.iterations if line.grad_norm is not None]
    clip, lowest, highest = float(baseline.setting("CLIP_GRAD")), min(norms), max(norms)
    if not lowest < clip < highest:
        where = "no" if clip >= highest or not clip else "every"
        found.append(
            f"CLIP_GRAD={baseline.setting('CLIP_GRAD')} clips the gradients of {where} iteration, and a wrong scale of "
            f"gradients can hide. DDP's norms ask for CLIP_GRAD between {lowest:.4g} and {highest:.4g}, "
            f"for example {math.sqrt(lowest * highest):.3g}"
        )
    if baseline.layout["micro_batches"] < 2:
        found.append(
            "an iteration has one micro-batch, and what goes wrong in adding up several can hide. "
            "Lower MICRO_BATCH_SIZE, or set a larger GLOBAL_BATCH_SIZE"
        )
    return found


def check_comparable(baseline: Run) -> None:
    """Raises UsageError where more than rounding may differ between runs that train the same model."""
    precision, dropout = baseline.setting("PRECISION_FLAG"), baseline.setting("DROPOUT")
    if precision:
        raise UsageError(f"the runs are in {precision.lstrip('-')}, whose rounding hides what is looked for",
                         "Train with PRECISION_FLAG='' (scripts/check_parity.sh does)")  # fmt: skip
    if float(dropout) != 0:
        raise UsageError(f"the runs have DROPOUT={dropout}, which every layout draws otherwise",
                         "Train with DROPOUT=0 (scripts/check_parity.sh does)")  # fmt: skip
    if baseline.record["engine_patches"] != "series":
        raise UsageError("the engine starts every layout from other weights: only megatron_t5_fixes.patch is applied",
                         "Apply the whole series: bash scripts/setup_megatron.sh")  # fmt: skip


def find_baseline(directories: Sequence[Path]) -> Path:
    """The first directory with a run of DDP. Raises UsageError."""
    for directory in directories:
        with suppress(RecordError):
            if load(directory).strategy == BASELINE:
                return directory
    raise UsageError(
        f"none of these directories holds a run of {BASELINE}, with which the others are compared",
        "Name its directory too, or another run with --baseline",
    )


def judge(directories: Sequence[Path], baseline: Path) -> tuple[list[Verdict], list[str]]:
    """The verdict over each run, and the blind spots of all. Raises UsageError, and RecordError for the baseline's."""
    standard = load(baseline)
    check_comparable(standard)
    if all(directory.resolve() == baseline.resolve() for directory in directories):
        raise UsageError(f"{baseline} is the baseline, and there is no other run", "Name the runs to compare with it")
    problem = defect(standard)
    verdicts = []
    for directory in directories:
        try:
            run = load(directory)
        except RecordError as error:
            verdicts.append(Verdict(directory.name, reasons=(str(error),)))
            continue
        if problem:
            where = "" if directory == baseline else "there is nothing to compare with, for the baseline: "
            verdicts.append(Verdict(run.name, run, reasons=(where + problem,)))
        else:
            verdicts.append(compare(run, standard))
    return verdicts, [] if problem else blind_spots(standard)


def report(verdicts: Sequence[Verdict], blind: Sequence[str]) -> str:
    """The table and, below, why what failed did."""
    rows = []
    for verdict in verdicts:
        layout = verdict.run.layout if verdict.run else {}
        shape = "/".join(str(layout.get(key, "-")) for key in ("tp", "pp", "dp"))
        rows.append([
            verdict.name, verdict.engine, shape, layout.get("micro_batches", "-"),
            verdict.loss or "-", verdict.norm or "-", "PASS" if verdict.passed else "FAIL",
        ])  # fmt: skip
    header = ["run", "engine", "TP/PP/DP", "micro-batches", "loss differs by", "gradient norm differs by", "verdict"]
    alignment = ("left", "left", "center", "right", "left", "left", "left")
    lines = [tabulate(rows, header, colalign=alignment, disable_numparse=True), ""]
    lines += [f"FAIL {v.name} ({v.engine}): {'; '.join(v.reasons)}" for v in verdicts if not v.passed]
    lines += [f"FAIL, for a mistake could hide: {spot}" for spot in blind]
    lines += [
        f"{v.name} ({v.engine}) ran in one process: nothing was divided, and nothing about dividing is shown"
        for v in verdicts
        if v.passed and v.run and v.run.world_size == 1 and v.run.strategy != BASELINE
    ]
    if not blind and all(verdict.passed for verdict in verdicts):
        lines.append(
            f"PASS: all train the same model (allowed: loss {LOSS_TOLERANCE:.0e}, norm {NORM_TOLERANCE:.0e}, relative)"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--baseline", type=Path, metavar="DIR", help=f"compare with this run (default: the {BASELINE} among them)"
    )
    parser.add_argument(
        "--reference", type=Path, metavar="DIR", help="a run of another engine, compared with the baseline too"
    )


def run(arguments: argparse.Namespace) -> int:
    directories = [*arguments.runs, *([arguments.reference] if arguments.reference else [])]
    try:
        verdicts, blind = judge(directories, arguments.baseline or find_baseline(arguments.runs))
    except UsageError as error:
        print(f"error: {error}\n       {error.remedy}", file=sys.stderr)
        return 2
    except RecordError as error:
        print(f"error: {error}\n       Train the baseline first: bash scripts/check_parity.sh", file=sys.stderr)
        return 2
    print(report(verdicts, blind))
    return 0 if not blind and all(verdict.passed for verdict in verdicts) else 1
