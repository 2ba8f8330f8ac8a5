"""Whether runs train the same model: compares their curves with a baseline's.

The gate (``t5bench parity``, scripts/check_parity.sh) judges controlled runs, by loss and gradient norm. A comparison
judges whatever runs it is given, only by the loss, and says which ones it cannot judge.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from t5bench import Problem
from t5bench.compare import sensitivity, traces
from t5bench.compare.comparable import differing, show, trains
from t5bench.compare.likely import differing as differing_curves
from t5bench.compare.likely import likely, relative_difference
from t5bench.compare.sensitivity import MARGIN, Sensitivity, Tolerance
from t5bench.given_files import read_json
from t5bench.printed_table import text_table
from t5bench.record.files import RecordError
from t5bench.record.plan import by_name
from t5bench.record.records import load
from t5bench.record.run import Run
from t5bench.record.status import COMPLETE, RUNNING

BASELINE_STRATEGY = "ddp"  # with which the others are compared

# All tolerances are relative. The gate's are based on measurements (docs/parity_evidence.md): the largest differences
# of correct runs, by strategy and layout, and how far a small change of each number moves the curves.
TOLERANCE = {"fp32": Tolerance(loss=5e-6, norm=5e-6), "bf16": Tolerance(loss=2e-3, norm=2e-2)}
# With dropout, layouts that draw other masks are judged by a sign test over this many seeds: if both train the same
# model, each is equally likely to have the larger loss, so all seeds agree by chance once in 2 ** (SEEDS - 1) checks.
SEEDS = 8
# A comparison's tolerances of the loss, by precision: looser, because rounding grows with a run's length and learning
# rate. In bf16 and fp16 a rounding is up to 2**-9 of a number, and layouts round at different places.
COMPARISON_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}

NATIVE = "native"  # the engine that draws the same dropout masks in equal layouts
BASELINE = "baseline"
EQUAL = "yes"
DIFFERENT = "NO"
UNKNOWN = "-"
# Exit statuses of parity. Curves that agree show nothing of a number that the recipe hides.
EXIT_DIFFERENT = 1
EXIT_NOT_SHOWN = 3
ALL_PATCHES = "series"
# Beginnings of engine arguments that name a run or its files, for each launcher its own.
NAMES = ("--wandb-", "--tensorboard-", "--save", "--load")


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of two curves, its iteration, and the first iteration beyond the tolerance.

    If a value of either curve is not finite, the difference is nan, at the first such iteration.
    """

    largest: float
    iteration: int
    first_beyond: int | None

    def __str__(self) -> str:
        return f"{self.largest:.1e} (it. {self.iteration})"


def curve(run: Run, name: str = "lm_loss") -> dict[int, float]:
    """A field of the run's lines, by iteration, without the lines that lack it."""
    return {line.iteration: value for line in run.iterations if (value := getattr(line, name)) is not None}


def losses_beside(run: Run, other: Run) -> dict[int, float]:
    """A run's losses where the other has the mean over the same iterations: the first line after a resume may be over
    fewer."""

    def means(of: Run) -> set[tuple[int, int]]:
        length = of.plan.number("LOG_INTERVAL")
        return {(line.iteration, min(length, line.iteration - line.begin)) for line in of.iterations}

    shared = {iteration for iteration, _ in means(run) & means(other)}
    return {iteration: loss for iteration, loss in curve(run).items() if iteration in shared}


def difference(curve: Mapping[int, float], reference: Mapping[int, float], tolerance: float) -> Difference | None:
    """How two curves differ; None if they share no iteration."""
    shared = {n: relative_difference(curve[n], reference[n]) for n in sorted(curve.keys() & reference.keys())}
    if not shared:
        return None
    worst = max(shared, key=lambda n: (math.isnan(shared[n]), shared[n]))
    return Difference(shared[worst], worst, next((n for n, value in shared.items() if not value <= tolerance), None))


def other_training(run: Run, baseline: Run) -> dict[str, tuple[Any, Any]]:
    """The facts that make these two runs different trainings: both values, by name."""
    return {name: tuple(by_value) for name, by_value in differing(trains, [run, baseline]).items()}


@dataclass(frozen=True)
class Parity:
    """Whether a row trains as the baseline does: the largest relative difference of the loss, and its iteration."""

    verdict: str
    difference: float | None = None
    iteration: int | None = None

    def __str__(self) -> str:
        if self.difference is None:
            return self.verdict
        largest = "not a number" if math.isnan(self.difference) else f"{self.difference:.0e}"
        return f"{self.verdict} ({f'{largest} at {self.iteration}' if self.difference else 0})"


def judge(repeats: Sequence[Run], references: Sequence[Run]) -> Parity:
    """Compares each repeat of a row with the first run of the baseline that is the same training."""
    plan = repeats[0].plan
    layout = repeats[0].layout
    tolerance = COMPARISON_TOLERANCE[plan.precision]
    found = []
    for run in repeats:
        reference = next((other for other in references if not other_training(run, other)), None)
        if reference is None:
            return Parity(f"n/a ({', '.join(other_training(run, references[0]))})")
        own = difference(losses_beside(run, reference), curve(reference), tolerance)
        if own:
            found.append(own)
    if plan.engine_patches != ALL_PATCHES and layout.tp * layout.pp > 1:
        return Parity("n/a (initial weights)")
    if not found:
        return Parity(UNKNOWN)
    worst = max(found, key=lambda own: (math.isnan(own.largest), own.largest))
    verdict = EQUAL if worst.largest <= tolerance else DIFFERENT
    if plan.decimal("DROPOUT") > 0 and not math.isnan(worst.largest):
        verdict = "n/a (dropout)"
    return Parity(verdict, worst.largest, worst.iteration)


def judge_baseline(repeats: Sequence[Run]) -> Parity:
    """Judges the baseline's own row: only a loss that is not a number counts against it."""
    faults = [iteration for run in repeats for iteration, loss in curve(run).items() if not math.isfinite(loss)]
    return Parity(DIFFERENT, math.nan, faults[0]) if faults else Parity(BASELINE)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run, which passed if ``reasons`` is empty; without anything to compare, differences are None."""

    name: str
    run: Run | None = None
    loss: Difference | str | None = None
    norm: Difference | str | None = None
    reasons: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return f"{self.name} ({self.run.engine if self.run else '-'})"


def defect(run: Run) -> str | None:
    """Why a run's curves cannot be compared; None if they can."""
    if run.status == RUNNING:
        return "has not ended, or its launcher was killed"
    if run.status != COMPLETE:
        return f"{run.status}: {run.reason}".removesuffix(": ")
    for line in run.iterations:
        faults = {
            "updates were skipped": line.lm_loss is None or line.skipped,
            "no gradient norm was logged": line.grad_norm is None,
            "the loss is not a number": not math.isfinite(line.lm_loss or 0) or line.nan,
            "the gradient norm is not a number": not math.isfinite(line.grad_norm or 0),
        }
        found = next((what for what, is_so in faults.items() if is_so), None)
        if found:
            return f"{found} at iteration {line.iteration}"
    return None if run.iterations else "logged no iteration"


def unlike(run: Run, baseline: Run) -> list[str]:
    """Why these two are not the same training, or would not be without an argument after ``--``."""
    replaced = by_name(word for one in (run, baseline) for word in one.plan.arguments.extra)

    def hidden(one: Run) -> dict[str, str]:
        given = by_name([*one.plan.arguments.fixed, *one.plan.arguments.own])
        names = [name for name in given if name in replaced and not name.startswith(NAMES)]
        return {name: given[name] or "given" for name in names}

    return [
        f"{name} is {show(own)}, but {show(its)} in the baseline"
        for name, (own, its) in other_training(run, baseline).items()
    ] + [
        f"{name}, which an argument after -- replaces here, is {own} in this launcher, but {its} in the baseline's"
        for name, (own, its) in differing(hidden, [run, baseline]).items()
    ]


def verdict(run: Run, baseline: Run) -> Verdict:
    """The gate's verdict on a run, by its directory's name, and its strategy's if that is another."""
    name = run.name if run.name == run.strategy else f"{run.name} [{run.strategy}]"
    for whose, curves in (("", run), ("the baseline cannot be used: ", baseline)):
        problem = defect(curves)
        if problem:
            return Verdict(name, run, reasons=[whose + problem])
    reasons = unlike(run, baseline)
    begins = []
    losses = losses_beside(run, baseline)
    reference = curve(baseline)
    allowed = TOLERANCE[baseline.plan.precision]
    loss = difference(losses, reference, allowed.loss)
    norm = difference(curve(run, "grad_norm"), curve(baseline, "grad_norm"), allowed.norm)
    if loss is None or norm is None:
        reasons.append("it shares no log interval with the baseline: set the same LOG_INTERVAL for both")
        return Verdict(name, run, reasons=reasons)
    alone = sorted(losses.keys() ^ reference.keys())
    if alone:
        reasons.append(f"only one of the two runs logged iteration {alone[0]} ({len(alone)} in all)")
    for what, found, most in (("loss", loss, allowed.loss), ("gradient norm", norm, allowed.norm)):
        if found.first_beyond is not None:
            begins.append(found.first_beyond)
            where = f"at iteration {found.iteration} (allowed: {most:.0e})"
            reasons.append(f"the {what} differs by {found.largest:.1e} {where}")
    if begins:
        first = min(losses.keys() & reference.keys())
        flags = run.plan.strategy.flags
        if list(flags) != list(baseline.plan.strategy.flags):
            where = f"its launcher's own STRATEGY_FLAGS=({' '.join(flags)})"
        elif loss.first_beyond == first:
            where = "the weights, the data and the forward pass"
        else:
            where = "gradients and accumulation" if norm.first_beyond == first else "clipping and the optimizer step"
        reasons.append(f"the difference begins at iteration {min(begins)}: check {where} first")
        reasons.append(f"likely: {likely_between(run, baseline)}")
    reasons += own_contradictions(run)
    reasons += traced_differences(run, baseline)
    return Verdict(name, run, loss, norm, reasons)


def traced_differences(run: Run, baseline: Run) -> list[str]:
    """Where traced runs in bf16 differ by more than rounding: their curves may differ by more than small mistakes.

    Raises Problem.
    """
    directories = (run.directory, baseline.directory)
    in_bf16 = baseline.plan.precision == "bf16" and run.directory != baseline.directory
    if not in_bf16 or not all(traces.is_traced(directory) for directory in directories):
        return []
    return traces.differences_in_bf16(*directories)


class LoggedRun(NamedTuple):
    """A run's curves, as likely() wants them."""

    name: str
    loss: Mapping[int, float]
    norm: Mapping[int, float]


def likely_between(run: Run, baseline: Run) -> str:
    """What their difference is like, in judge's words."""
    allowed = TOLERANCE[baseline.plan.precision]
    ours = LoggedRun(run.name, losses_beside(run, baseline), curve(run, "grad_norm"))
    theirs = LoggedRun(baseline.name, curve(baseline), curve(baseline, "grad_norm"))
    of_loss = differing_curves("loss", ours.loss, theirs.loss, allowed.loss)
    of_norm = differing_curves("gradient norm", ours.norm, theirs.norm, allowed.norm)
    return likely(ours, theirs, [found for found in (of_loss, of_norm) if found])


def own_contradictions(run: Run) -> list[str]:
    """Where a traced run did not do what follows from its own numbers; nothing for one without a trace.

    Raises Problem.
    """
    if not traces.is_traced(run.directory):
        return []
    # A line has the mean loss of its interval.
    losses = curve(run) if run.plan.number("LOG_INTERVAL") == 1 else {}
    in_16_bits = run.plan.zero_stage > 0 and run.plan.precision != "fp32"
    return traces.contradictions(run.directory, losses, curve(run, "grad_norm"), sums_in_16_bits=in_16_bits)


class Curves(msgspec.Struct):
    """What native/reference.py prints."""

    losses: list[float]
    """Of every iteration."""
    norms: list[float]
    """Of the gradients, of every iteration."""


def outside_verdict(path: Path, baseline: Run) -> Verdict:
    """The verdict on the baseline by a reference that shares nothing with its engine but samples and initial weights:
    the curves that native/reference.py printed. Raises Problem."""
    name = "hugging-face"
    problem = defect(baseline)
    if problem:
        return Verdict(name, reasons=[f"the baseline cannot be used: {problem}"])
    curves = read_json(path, Curves, "Name the file that native.reference printed its curves to: --outside FILE")
    losses = dict(enumerate(curves.losses, 1))
    norms = dict(enumerate(curves.norms, 1))
    allowed = TOLERANCE[baseline.plan.precision]
    reasons = []
    loss = difference(curve(baseline), losses, allowed.loss)
    norm = difference(curve(baseline, "grad_norm"), norms, allowed.norm)
    if losses.keys() != curve(baseline).keys():
        reasons.append(f"it trained {len(losses)} iterations, the baseline logged {len(curve(baseline))}")
    for what, differs, most in (("loss", loss, allowed.loss), ("gradient norm", norm, allowed.norm)):
        if differs and differs.first_beyond is not None:
            where = f"at iteration {differs.iteration} (allowed: {most:.0e})"
            reasons.append(
                f"the {what} of {baseline.strategy} differs from Hugging Face's by {differs.largest:.1e} {where}"
            )
    if reasons:
        reasons.append("all strategies may share this mistake")
    return Verdict(name, None, loss, norm, reasons)


def blind_spots(baseline: Run, measured: Sequence[Sensitivity]) -> list[str]:
    """Why these runs might agree in spite of a mistake, judged by the baseline and its recipe's measured sensitivities,
    and what to change: one sentence each."""
    tolerance = TOLERANCE[baseline.plan.precision]
    found = [
        f"a mistake of {one.change} in the {one.number} moves the loss by {one.loss:.1e}, the norm by {one.norm:.1e}: "
        f"less than {MARGIN} times the bound. The recipe of scripts/check_parity.sh reveals it"
        for one in measured
        if not one.is_seen(tolerance)
    ]
    norms = curve(baseline, "grad_norm").values()
    clip = baseline.plan.decimal("CLIP_GRAD")
    lowest = min(norms)
    highest = max(norms)
    if not lowest < clip < highest:
        where = "no" if clip >= highest or not clip else "every"
        found.append(
            f"CLIP_GRAD={clip:g} clips the gradients of {where} iteration, so a wrong scale could go unnoticed. "
            f"For DDP's norms choose CLIP_GRAD between {lowest:.4g} and {highest:.4g}, "
            f"for example {math.sqrt(lowest * highest):.3g}"
        )
    if baseline.layout.micro_batches < 2:
        found.append(
            "an iteration has one micro-batch, so a mistake in accumulating several could go unnoticed. "
            "Lower MICRO_BATCH_SIZE, or set a larger GLOBAL_BATCH_SIZE"
        )
    return found


def draws_alike(run: Run, baseline: Run) -> bool:
    """Whether both draw the same dropout masks: without model parallelism, every rank draws from its own seed.

    The native engine also draws the same ones in an equal layout, for example with sequence parallelism and without.
    Interleaved stages have other layers.
    """
    own = run.layout
    its = baseline.layout
    sizes = (own.world_size, own.tp, own.pp, own.micro_batches)
    chunks = [each.plan.named_arguments.get("virtual_pipeline_stages") for each in (run, baseline)]
    same = (
        run.engine == baseline.engine
        and sizes == (its.world_size, its.tp, its.pp, its.micro_batches)
        and chunks[0] == chunks[1]
    )
    return run.plan.decimal("DROPOUT") == 0 or (same and (own.tp * own.pp == 1 or run.engine == NATIVE))


def sign_test(runs: Sequence[Run], baselines: Sequence[Run]) -> Verdict:
    """The verdict on a strategy with other dropout masks: compares each run with the baseline of its seed."""
    name = runs[0].strategy
    pairs = [(run, other) for run in runs for other in baselines if not other_training(run, other)]
    for run in (run for pair in pairs for run in pair):
        problem = defect(run)
        if problem:
            return Verdict(name, run, reasons=[f"{run.name}: {problem}"])
    if len(pairs) < SEEDS:
        needed = f"{SEEDS} seeds each are needed, but there are {len(pairs)}"
        return Verdict(name, runs[0], reasons=[f"its dropout masks differ from the baseline's: {needed}"])
    said = []
    reasons = unlike(*pairs[0])
    for what, field in (("loss", "lm_loss"), ("gradient norm", "grad_norm")):
        means = [[fmean(curve(run, field).values()) for run in pair] for pair in pairs]
        larger = sum(own > its for own, its in means)
        said.append(f"larger in {larger} of {len(pairs)} seeds")
        if larger in (0, len(pairs)):
            by = f"by {fmean(own / its - 1 for own, its in means):.1e} on average"
            reasons.append(f"the {what} is {said[-1]}, {by}; chance does this once in {2 ** (len(pairs) - 1)} checks")
    return Verdict(name, runs[0], *said, reasons)


def gate(
    directories: Sequence[Path],
    baseline: Path | None,
    measured: Sequence[Sensitivity] = (),
    outside: Path | None = None,
) -> tuple[list[Verdict], list[str]]:
    """The verdict on each run, and the blind spots of all. Raises Problem.

    baseline: None for the first run of DDP. outside: a file of native/reference.py, by which DDP itself is judged.
    """
    verdicts: dict[Path, Verdict | None] = dict.fromkeys(directories)
    runs = {}
    tested = dict[tuple[str, str], list[Run]]()
    for directory in verdicts:
        try:
            runs[directory] = load(directory)
        except RecordError as error:
            verdicts[directory] = Verdict(directory.name, reasons=[str(error)])
    baselines = [run for run in runs.values() if run.strategy == BASELINE_STRATEGY]
    if baseline:
        standard = load(baseline)
    elif baselines:
        standard = baselines[0]
    else:
        why = "".join(f"; {entry.reasons[0]}" for entry in verdicts.values() if entry)
        problem = f"none of these directories holds a run of {BASELINE_STRATEGY}, the baseline{why}"
        raise Problem(problem, "Add its directory, or name another run with --baseline")
    if standard.plan.precision not in TOLERANCE:
        problem = f"the runs are in {standard.plan.precision}, for which no bound was measured"
        raise Problem(problem, "Train with PRECISION_FLAG='' (scripts/check_parity.sh does)")
    only = standard.plan.engine_patches
    if only != ALL_PATCHES:
        problem = f"the engine starts every layout from different weights: only {only}.patch is applied"
        raise Problem(problem, "Apply all patches: bash scripts/setup_megatron.sh")
    if not outside and all(map(standard.directory.samefile, runs)) and len(runs) == len(directories):
        problem = f"{standard.directory} is the baseline, and there is no other run"
        raise Problem(problem, "Name the runs to compare with it")
    for directory, run in runs.items():
        if not draws_alike(run, standard):
            tested.setdefault((run.strategy, run.engine), []).append(run)
        # Further seeds of the baseline serve the sign test.
        elif run.strategy != BASELINE_STRATEGY or run.plan.value("SEED") == standard.plan.value("SEED"):
            verdicts[directory] = verdict(run, standard)
    baselines = [standard, *(run for run in baselines if run.directory != standard.directory)]
    of_seeds = [sign_test(those, baselines) for those in tested.values()]
    blind = [] if defect(standard) else blind_spots(standard, measured)
    of_outside = [outside_verdict(outside, standard)] if outside else []
    return [*filter(None, verdicts.values()), *of_seeds, *of_outside], blind


def report(verdicts: Sequence[Verdict], blind: Sequence[str]) -> str:
    """The table and, below it, why runs failed."""
    header = ["run", "engine", "TP/PP/DP", "micro-batches", "loss differs by", "gradient norm differs by", "verdict"]
    rows = []
    notes = []
    for entry in verdicts:
        of_run: list[Any] = ["-", "-", "-"]
        run = entry.run
        if run:
            of_run = [run.engine, f"{run.layout.tp}/{run.layout.pp}/{run.layout.dp}", run.layout.micro_batches]
            notes += run.remarks
            if entry.passed and run.layout.dp == 1 and run.strategy != BASELINE_STRATEGY:
                single = "so a mistake in reducing gradients could hide: docs/parity_evidence.md has settings for more"
                alone = "in one process, which says nothing about parallelism"
                notes.append(f"{entry} ran {alone if run.world_size == 1 else f'with one replica, {single}'}")
        rows.append([entry.name, *of_run, entry.loss or "-", entry.norm or "-", "PASS" if entry.passed else "FAIL"])
    alignment = ("left", "left", "center", "right", "left", "left", "left")
    lines = [text_table(rows, header, alignment), ""]
    lines += [f"FAIL {entry}: {'; '.join(entry.reasons)}" for entry in verdicts if not entry.passed]
    lines += [f"A mistake could hide: {spot}" for spot in blind]
    lines += [f"note: {text}" for text in notes]
    if all(entry.passed for entry in verdicts):
        (allowed,) = {TOLERANCE[entry.run.plan.precision] for entry in verdicts if entry.run}
        if blind:
            lines.append(f"NOT SHOWN: the curves agree (allowed: {allowed}, relative), but this recipe hides mistakes")
        else:
            lines.append(f"PASS: all train the same model (allowed: {allowed}, relative)")
    return "\n".join(lines)


def locations(directories: Sequence[Path], baseline: Path | None) -> str:
    """Where each run first differs from the baseline, a line each. Raises Problem for a run without a trace."""
    standard = baseline or next(path for path in directories if load(path).strategy == BASELINE_STRATEGY)
    lines = []
    for directory in directories:
        if directory.resolve() != standard.resolve():
            location = traces.first_difference(directory, standard)
            lines.append(f"{directory.name}: {location or 'nothing differs beyond rounding'}")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    """Raises Problem."""
    for named in filter(None, (arguments.baseline, arguments.reference)):
        load(named)  # before anything is judged
    measured = sensitivity.read(arguments.sensitivity) if arguments.sensitivity else []
    if measured and not arguments.runs:
        print(sensitivity.table(measured, TOLERANCE["fp32"]))
        return int(any(not one.is_seen(TOLERANCE["fp32"]) for one in measured))
    directories = [*arguments.runs, *([arguments.reference] if arguments.reference else [])]
    if not directories:
        raise Problem("no run is given", "Give run directories, or --sensitivity FILE")
    verdicts, blind = gate(directories, arguments.baseline, measured, arguments.outside)
    print(report(verdicts, blind))
    if arguments.locate:
        print(f"\n{locations(directories, arguments.baseline)}")
    if not all(entry.passed for entry in verdicts):
        return EXIT_DIFFERENT
    return EXIT_NOT_SHOWN if blind else 0
