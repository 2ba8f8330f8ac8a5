"""``judge A B``: whether two trainings, by whatever trainers, are the same; by their logs."""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from t5bench_judge.columns import Names
from t5bench_judge.logs import Log, read_log
from t5bench_judge.verdict import Answer, answer
from training_comparison.copies import copies_apart
from training_comparison.curves import TOLERANCE, Difference
from training_comparison.first_difference import first_difference, rounded_to_bf16
from training_comparison.likely import ranks_in_words
from training_comparison.problem import Problem
from training_comparison.traces import DIRECTORY, Trace, is_trace, trace_of_run
from training_comparison.verdict import DIFFERENT, EQUAL, EXIT_DIFFERENT, EXIT_NOT_SHOWN, NOT_SHOWN

DESCRIPTION = (
    "Whether two trainings are the same, by their logs: JSON lines, CSV and other tables, what trainers print, "
    "transformers' trainer_state.json, the offline files of TensorBoard and W&B, or run directories."
)
EXIT_STATUS = {EQUAL: 0, DIFFERENT: EXIT_DIFFERENT, NOT_SHOWN: EXIT_NOT_SHOWN}
FP32 = "fp32"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = "Exit status: 0 equal, 1 different, 2 not comparable, 3 equal, but these logs would hide a mistake."
    parser.add_argument("first", type=Path, metavar="A", help="a training's log")
    parser.add_argument("second", type=Path, metavar="B", help="the log to compare it with")
    parser.add_argument(
        "--loss", default="", metavar="NAME", help="the column of the loss, where its name is not usual"
    )
    parser.add_argument("--norm", default="", metavar="NAME", help="the column of the gradient norm before clipping")
    parser.add_argument("--step", default="", metavar="NAME", help="the column of the step")
    parser.add_argument(
        "--precision", choices=tuple(TOLERANCE), help="of the training (default: a run directory's own, else fp32)"
    )
    locate = "name the step, the tensor and the ranks where two traces first differ (step_trace.py writes them)"
    parser.add_argument("--locate", action="store_true", help=locate)
    parser.add_argument("--json", action="store_true", help="for programs")


def precision_of(arguments: argparse.Namespace, logs: tuple[Log, Log]) -> str:
    """Raises Problem for a precision without bounds."""
    if arguments.precision:
        return arguments.precision
    recorded = [log.precision for log in logs if log.precision]
    for precision in recorded:
        if precision not in TOLERANCE:
            raise Problem(f"a run is in {precision}, for which no bound was measured", "Train in fp32 or bf16")
    return "bf16" if "bf16" in recorded else FP32


def sentence(difference: Difference) -> str:
    largest = "not a number" if math.isnan(difference.largest) else f"{difference.largest:.1e}"
    values = f"{difference.first:.9g} and {difference.second:.9g}"
    most = f"at most {largest} at step {difference.largest_step} (bound: {difference.bound:.0e})"
    return f"the {difference.what} first differs at step {difference.step}: {values}; {most}"


def lines_of(answered: Answer) -> list[str]:
    found = answered.found
    given = f"{answered.steps} steps, bounds of {answered.precision}: {answered.bounds}, relative"
    lines = [f"{found.verdict.upper()}: {given}"]
    lines += [sentence(difference) for difference in found.differences]
    if found.likely:
        lines.append(f"likely: {found.likely}")
    lines += [f"a mistake could hide: {spot.sentence}" for spot in found.hidden]
    lines += [f"note: {note}" for note in answered.notes]
    return lines


def located(first: Trace, second: Trace, names: tuple[str, str], precision: str) -> str:
    lines = []
    for name, trace, other in ((names[0], first, second), (names[1], second, first)):
        apart = copies_apart(trace, other)
        if apart:
            where = f"{apart.name} ({apart.differing} of {apart.compared} parameters), {ranks_in_words(apart.ranks)}"
            lines.append(f"the ranks of {name} have different copies of weights from step {apart.step} on: {where}")
        step = rounded_to_bf16(trace, other)
        if step is not None:
            lines.append(f"the weights of {name} are numbers of bf16 at step {step}, the other's are not")
    place = first_difference(first, second, precision)
    if place or not lines:
        lines.append(place.sentence() if place else "nothing differs beyond rounding")
    return "\n".join(lines)


def trace_of(log: Log, path: Path) -> Trace:
    """A log's own, or that of a run directory. Raises Problem."""
    if log.trace:
        return log.trace
    if not is_trace(path / DIRECTORY):
        found = f"{log.name} has no trace, so nobody knows what its modules did"
        raise Problem(found, "Write one: packages/judge/README.md, 'Which tensor, which rank'")
    return trace_of_run(path)


def to_json(answered: Answer) -> dict[str, Any]:
    found = answered.found
    return {
        "verdict": found.verdict,
        "precision": answered.precision,
        "bounds": answered.bounds._asdict(),
        "steps": answered.steps,
        "differences": [asdict(difference) for difference in found.differences],
        "likely": found.likely,
        "hidden": [spot.sentence for spot in found.hidden],
        "notes": answered.notes,
    }


def judged(arguments: argparse.Namespace) -> tuple[int, str]:
    """The exit status, and what to print. Raises Problem."""
    names = Names(arguments.step, arguments.loss, arguments.norm)
    logs = (read_log(arguments.first, names), read_log(arguments.second, names))
    precision = precision_of(arguments, logs)
    answered = answer(*logs, precision)
    place = ""
    if arguments.locate:
        traces = trace_of(logs[0], arguments.first), trace_of(logs[1], arguments.second)
        place = located(*traces, (logs[0].name, logs[1].name), precision)
    if arguments.json:
        text = json.dumps(to_json(answered) | ({"place": place} if arguments.locate else {}))
    else:
        text = "\n".join([*lines_of(answered), *([place] if place else [])])
    return EXIT_STATUS[answered.found.verdict], text


def run(arguments: argparse.Namespace) -> int:
    """Raises Problem."""
    status, text = judged(arguments)
    print(text)
    return status
