"""Whether runs train the same model: compares their curves with a baseline's.

One gate, by loss and gradient norm, within bounds that were measured: ``t5bench parity`` and scripts/check_parity.sh,
and a comparison's sentence "All rows train as ddp does". It has three answers: equal, different and not shown.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from t5bench import Problem
from t5bench.compare import sensitivity
from t5bench.compare.comparable import differing, show, trains
from t5bench.compare.sensitivity import MARGIN, Sensitivity
from t5bench.given_files import read_json
from t5bench.printed_table import text_table
from t5bench.record.files import RecordError
from t5bench.record.plan import by_name
from t5bench.record.records import load
from t5bench.record.run import Run
from t5bench.record.status import COMPLETE, RUNNING
from training_comparison import verdict as answers
from training_comparison.contradictions import contradictions
from training_comparison.curves import TOLERANCE, ComparedCurves, Curves, Difference, compare
from training_comparison.first_difference import differences_in_bf16, first_difference
from training_comparison.traces import DIRECTORY, is_of_an_older_release, is_of_this_release, trace_of_run
from training_comparison.verdict import (
    EXIT_DIFFERENT,
    EXIT_NOT_SHOWN,
    BlindSpot,
    Verdict,
    hidden_by_recipe,
    verdict_on,
)

BASELINE_STRATEGY = "ddp"  # with which the others are compared

# With dropout, layouts that draw other masks are judged by a sign test over this many seeds: if both train the same
# model, each is equally likely to have the larger loss, so all seeds agree by chance once in 2 ** (SEEDS - 1) checks.
SEEDS = 8
ITERATION = "iteration"  # what this harness calls a step
NATIVE = "native"  # the engine that draws the same dropout masks in equal layouts
BASELINE = "baseline"
EQUAL = "yes"
DIFFERENT = "NO"
UNKNOWN = "-"
NOT_SHOWN = "not shown"
ALL_PATCHES = "series"
# Beginnings of engine arguments that name a run or its files, for each launcher its own.
NAMES = ("--wandb-", "--tensorboard-", "--save", "--load")


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


def curves_of(run: Run, losses: Mapping[int, float] | None = None) -> Curves:
    """A run's losses, or these, and gradient norms."""
    return Curves(curve(run) if losses is None else losses, curve(run, "grad_norm"), run.name)


def compare_runs(run: Run, baseline: Run) -> ComparedCurves:
    """Two runs of one training, in the bounds of their precision; its loss and norm are None without common lines."""
    theirs = curves_of(baseline)
    return compare(curves_of(run, losses_beside(run, baseline)), theirs, TOLERANCE[baseline.plan.precision])


def other_training(run: Run, baseline: Run) -> dict[str, tuple[Any, Any]]:
    """The facts that make these two runs different trainings: both values, by name."""
    return {name: tuple(by_value) for name, by_value in differing(trains, [run, baseline]).items()}


@dataclass(frozen=True)
class Parity:
    """Whether a row trains as the baseline does, by the gate."""

    verdict: str
    """EQUAL, DIFFERENT, NOT_SHOWN, BASELINE or UNKNOWN."""
    difference: float | None = None
    """The largest relative difference of the loss, where it was compared."""
    iteration: int | None = None
    """Where it is."""
    norm_difference: float | None = None
    """The same of the gradient norm."""
    where: str = ""
    """Which difference matters most and at which iteration, in words."""
    why: str = ""
    """A word for the reason, where it is not shown."""
    reasons: Sequence[str] = ()
    """Sentences: what a difference is like, or what would show that there is none."""

    def __str__(self) -> str:
        return " ".join([self.verdict, *(f"({words})" for words in (self.why, self.where) if words)])


def where_in_words(compared: ComparedCurves) -> str:
    """The larger of the two differences, in units of their bounds, and its iteration."""
    loss, norm = compared.loss, compared.norm
    is_in_norm = bool(norm and norm.is_beyond and not (loss and loss.is_beyond))
    found = norm if is_in_norm else loss
    if found is None or not found.largest:
        return "0"
    size = "not a number" if math.isnan(found.largest) else f"{found.largest:.0e}"
    return f"{'norm ' if is_in_norm else ''}{size} at {found.largest_step}"


def judge(repeats: Sequence[Run], references: Sequence[Run]) -> Parity:
    """Compares each repeat of a row with the first run of the baseline that is the same training; the worst counts."""
    found = [judge_run(run, references) for run in repeats]
    return max(found, key=_severity)


def _severity(one: Parity) -> tuple[int, bool, float]:
    """Orders verdicts; of equal ones, the largest difference counts, and one that is not a number most."""
    sizes = [size for size in (one.difference, one.norm_difference) if size is not None]
    is_no_number = any(map(math.isnan, sizes))
    return (UNKNOWN, EQUAL, NOT_SHOWN, DIFFERENT).index(one.verdict), is_no_number, max(sizes, default=0.0)


def judge_run(run: Run, references: Sequence[Run]) -> Parity:
    """The gate's verdict on one run of a comparison, which may hold any runs."""
    reference = next((other for other in references if not other_training(run, other)), None)
    if reference is None:
        names = ", ".join(other_training(run, references[0]))
        return Parity(NOT_SHOWN, why=names, reasons=[f"they are other trainings: make {names} the same"])
    not_finite = [n for n, loss in curve(run).items() if not math.isfinite(loss)]
    not_finite += [n for n, norm in curve(run, "grad_norm").items() if not math.isfinite(norm)]
    if not_finite:
        return Parity(DIFFERENT, math.nan, min(not_finite), where=f"not a number at {min(not_finite)}")
    obstacle = what_cannot_be_compared(run, reference)
    if obstacle:
        return Parity(NOT_SHOWN, why=obstacle.what, reasons=[obstacle.sentence])
    compared = compare_runs(run, reference)
    if compared.loss is None or compared.norm is None:
        why = "they share no log interval" if compared.loss is None else "no gradient norm was logged"
        remedy = "set the same LOG_INTERVAL" if compared.loss is None else "log it"
        return Parity(NOT_SHOWN if compared.loss else UNKNOWN, reasons=[f"{why}: {remedy}"])
    found = verdict_on(compared, blind_spots(reference, []), reference.plan.decimal("CLIP_GRAD"))
    by_trace = [*own_contradictions(run), *traced_differences(run, reference)]
    sizes = (compared.loss.largest, compared.loss.largest_step, compared.norm.largest, where_in_words(compared))
    if by_trace or found.verdict == answers.DIFFERENT:
        like = [f"likely: {found.likely}"] if found.likely else []
        return Parity(DIFFERENT, *sizes, reasons=[*like, *by_trace])
    if found.verdict == answers.NOT_SHOWN:
        why = ", ".join(spot.what for spot in found.hidden)
        return Parity(NOT_SHOWN, *sizes, why, [spot.sentence for spot in found.hidden])
    return Parity(EQUAL, *sizes)


def what_cannot_be_compared(run: Run, reference: Run) -> BlindSpot | None:
    """Why the gate has no answer for these two, and what to change."""
    plan = run.plan
    if plan.precision not in TOLERANCE:
        sentence = f"no bound was measured for {plan.precision}: train with PRECISION_FLAG='' or --bf16"
        return BlindSpot(plan.precision, sentence)
    if plan.engine_patches != ALL_PATCHES and run.layout.tp * run.layout.pp > 1:
        sentence = "without all patches each layout starts from other weights: bash scripts/setup_megatron.sh"
        return BlindSpot("initial weights", sentence)
    if not draws_alike(run, reference):
        return BlindSpot("dropout", "its dropout masks are others: train with DROPOUT=0")
    return None


def judge_baseline(repeats: Sequence[Run]) -> Parity:
    """Judges the baseline's own row: only a loss that is not a number counts against it."""
    faults = [iteration for run in repeats for iteration, loss in curve(run).items() if not math.isfinite(loss)]
    if faults:
        return Parity(DIFFERENT, math.nan, faults[0], where=f"not a number at {faults[0]}")
    return Parity(BASELINE)


@dataclass(frozen=True)
class RunVerdict:
    """The gate's verdict on a run; without anything to compare, differences are None."""

    name: str
    run: Run | None = None
    loss: Difference | str | None = None
    norm: Difference | str | None = None
    reasons: Sequence[str] = ()
    """Why it failed."""
    hidden: Sequence[str] = ()
    """Why its agreement is not shown."""

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


def verdict(run: Run, baseline: Run) -> RunVerdict:
    """The gate's verdict on a run, by its directory's name, and its strategy's if that is another."""
    name = run.name if run.name == run.strategy else f"{run.name} [{run.strategy}]"
    for whose, curves in (("", run), ("the baseline cannot be used: ", baseline)):
        problem = defect(curves)
        if problem:
            return RunVerdict(name, run, reasons=[whose + problem])
    reasons = unlike(run, baseline)
    compared = compare_runs(run, baseline)
    if compared.loss is None or compared.norm is None:
        reasons.append("it shares no log interval with the baseline: set the same LOG_INTERVAL for both")
        return RunVerdict(name, run, reasons=reasons)
    alone = sorted(curve(run).keys() ^ curve(baseline).keys())
    if alone:
        reasons.append(f"only one of the two runs logged iteration {alone[0]} ({len(alone)} in all)")
    found = verdict_on(compared, [], baseline.plan.decimal("CLIP_GRAD"))
    if found.verdict == answers.DIFFERENT:
        reasons += described(compared, found, run, baseline)
    reasons += own_contradictions(run)
    reasons += traced_differences(run, baseline)
    return RunVerdict(name, run, compared.loss, compared.norm, reasons, [spot.sentence for spot in found.hidden])


def described(compared: ComparedCurves, found: Verdict, run: Run, baseline: Run) -> list[str]:
    """How far the curves are apart, where it begins, what to check first and what it is like."""
    reasons = []
    for differs in found.differences:
        where = f"at iteration {differs.largest_step} (allowed: {differs.bound:.0e})"
        reasons.append(f"the {differs.what} differs by {differs.largest:.1e} {where}")
    flags = run.plan.strategy.flags
    if list(flags) != list(baseline.plan.strategy.flags):
        first_check = f"its launcher's own STRATEGY_FLAGS=({' '.join(flags)})"
    elif compared.loss and compared.loss.step == compared.start:
        first_check = "the weights, the data and the forward pass"
    elif compared.norm and compared.norm.step == compared.start:
        first_check = "the gradients, their accumulation and their norm"
    else:
        first_check = "clipping and the optimizer step"
    begin = min(differs.step or 0 for differs in found.differences)
    reasons.append(f"the difference begins at iteration {begin}: check {first_check} first")
    reasons.append(f"likely: {found.likely}")
    return reasons


def traced_differences(run: Run, baseline: Run) -> list[str]:
    """Where traced runs in bf16 differ by more than rounding: their curves may differ by more than small mistakes.

    Raises Problem.
    """
    in_bf16 = baseline.plan.precision == "bf16" and run.directory != baseline.directory
    if not in_bf16 or not all(is_of_this_release(one.directory / DIRECTORY) for one in (run, baseline)):
        return []
    return differences_in_bf16(trace_of_run(run.directory), trace_of_run(baseline.directory), ITERATION)


def own_contradictions(run: Run) -> list[str]:
    """Where a traced run did not do what follows from its own numbers; nothing for one without a trace.

    Raises Problem.
    """
    if not is_of_this_release(run.directory / DIRECTORY):
        return []
    # A line has the mean loss of its interval.
    losses = curve(run) if run.plan.number("LOG_INTERVAL") == 1 else {}
    in_16_bits = run.plan.zero_stage > 0 and run.plan.precision != "fp32"
    norms = curve(run, "grad_norm")
    return contradictions(trace_of_run(run.directory), losses, norms, sums_in_16_bits=in_16_bits)


class ReferenceLines(msgspec.Struct):
    """What native/reference.py prints."""

    losses: list[float]
    """Of every iteration."""
    norms: list[float]
    """Of the gradients, of every iteration."""


def outside_verdict(path: Path, baseline: Run) -> RunVerdict:
    """The verdict on the baseline by a reference that shares nothing with its engine but samples and initial weights:
    the curves that native/reference.py printed. Raises Problem."""
    name = "hugging-face"
    problem = defect(baseline)
    if problem:
        return RunVerdict(name, reasons=[f"the baseline cannot be used: {problem}"])
    remedy = "Name the file that native.reference printed its curves to: --outside FILE"
    printed = read_json(path, ReferenceLines, remedy)
    outside = Curves(dict(enumerate(printed.losses, 1)), dict(enumerate(printed.norms, 1)), name)
    own = curves_of(baseline)
    compared = compare(own, outside, TOLERANCE[baseline.plan.precision])
    reasons = []
    if outside.loss.keys() != own.loss.keys():
        reasons.append(f"it trained {len(outside.loss)} iterations, the baseline logged {len(own.loss)}")
    for differs in compared.beyond:
        where = f"at iteration {differs.largest_step} (allowed: {differs.bound:.0e})"
        reasons.append(
            f"the {differs.what} of {baseline.strategy} differs from Hugging Face's by {differs.largest:.1e} {where}"
        )
    if reasons:
        reasons.append("all strategies may share this mistake")
    return RunVerdict(name, None, compared.loss, compared.norm, reasons)


def blind_spots(baseline: Run, measured: Sequence[Sensitivity]) -> list[BlindSpot]:
    """Why these runs might agree in spite of a mistake, judged by the baseline and its recipe's measured sensitivities,
    and what to change."""
    tolerance = TOLERANCE[baseline.plan.precision]
    found = [
        BlindSpot(
            one.number,
            f"a mistake of {one.change} in the {one.number} moves the loss by {one.loss:.1e}, the norm by "
            f"{one.norm:.1e}: less than {MARGIN} times the bound. The recipe of scripts/check_parity.sh reveals it",
        )
        for one in measured
        if not one.is_seen(tolerance)
    ]
    norms = curve(baseline, "grad_norm").values()
    return [*found, *hidden_by_recipe(norms, baseline.plan.decimal("CLIP_GRAD"), baseline.layout.micro_batches)]


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


def sign_test(runs: Sequence[Run], baselines: Sequence[Run]) -> RunVerdict:
    """The verdict on a strategy with other dropout masks: compares each run with the baseline of its seed."""
    name = runs[0].strategy
    pairs = [(run, other) for run in runs for other in baselines if not other_training(run, other)]
    for run in (run for pair in pairs for run in pair):
        problem = defect(run)
        if problem:
            return RunVerdict(name, run, reasons=[f"{run.name}: {problem}"])
    if len(pairs) < SEEDS:
        needed = f"{SEEDS} seeds each are needed, but there are {len(pairs)}"
        return RunVerdict(name, runs[0], reasons=[f"its dropout masks differ from the baseline's: {needed}"])
    said = []
    reasons = unlike(*pairs[0])
    for what, field in (("loss", "lm_loss"), ("gradient norm", "grad_norm")):
        means = [[fmean(curve(run, field).values()) for run in pair] for pair in pairs]
        larger = sum(own > its for own, its in means)
        said.append(f"larger in {larger} of {len(pairs)} seeds")
        if larger in (0, len(pairs)):
            by = f"by {fmean(own / its - 1 for own, its in means):.1e} on average"
            reasons.append(f"the {what} is {said[-1]}, {by}; chance does this once in {2 ** (len(pairs) - 1)} checks")
    return RunVerdict(name, runs[0], *said, reasons)


def gate(
    directories: Sequence[Path],
    baseline: Path | None,
    measured: Sequence[Sensitivity] = (),
    outside: Path | None = None,
) -> tuple[list[RunVerdict], list[str]]:
    """The verdict on each run, and the blind spots of all. Raises Problem.

    baseline: None for the first run of DDP. outside: a file of native/reference.py, by which DDP itself is judged.
    """
    verdicts: dict[Path, RunVerdict | None] = dict.fromkeys(directories)
    runs = {}
    tested = dict[tuple[str, str], list[Run]]()
    for directory in verdicts:
        try:
            runs[directory] = load(directory)
        except RecordError as error:
            verdicts[directory] = RunVerdict(directory.name, reasons=[str(error)])
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
    blind = [] if defect(standard) else [spot.sentence for spot in blind_spots(standard, measured)]
    blind += dict.fromkeys(f"{entry.name}: {spot}" for entry in verdicts.values() if entry for spot in entry.hidden)
    of_outside = [outside_verdict(outside, standard)] if outside else []
    return [*filter(None, verdicts.values()), *of_seeds, *of_outside], blind


def report(verdicts: Sequence[RunVerdict], blind: Sequence[str]) -> str:
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
            if is_of_an_older_release(run.directory / DIRECTORY):
                notes.append(f"{entry}: an older release wrote its trace, so it is judged by its curves alone")
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
            place = first_difference(trace_of_run(directory), trace_of_run(standard))
            said = place.sentence(ITERATION) if place else "nothing differs beyond rounding"
            lines.append(f"{directory.name}: {said}")
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
