"""The gates: what each says of two trainings, as its documentation has it.

A gate compares a training with the reference, the same recipe in one process. Two gates ask for equal bits or digits,
which no other layout has: they compare with the same layout before the mistake, as their documentation does.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from gate_score.beginning import said_of_beginnings
from gate_score.proving import said_by_prove
from gate_score.runs import TRACE
from gate_score.trainer import Recipe, Trainer
from t5bench_judge.columns import Names
from t5bench_judge.logs import Log, read_log
from t5bench_judge.verdict import answer
from training_comparison.copies import copies_apart
from training_comparison.curves import TOLERANCE, Curves, compare
from training_comparison.first_difference import first_difference, rounded_to_bf16
from training_comparison.verdict import DIFFERENT, hidden_by_recipe, verdict_on


@dataclass(frozen=True)
class Pair:
    """What a gate sees."""

    kind: type[Trainer]
    recipe: Recipe
    tried: Path
    reference: Path
    """The same recipe in one process."""
    before: Path
    """The same recipe in the same layout, without the mistake."""
    one_process: Recipe
    """The reference's."""


@dataclass(frozen=True)
class Line:
    """Of a step, as rank 0 prints it."""

    step: int
    loss: float
    own_loss: float
    norm: float


def lines_of(directory: Path) -> list[Line]:
    found = []
    for text in (directory / "log0.jsonl").read_text().splitlines():
        line = json.loads(text)
        found.append(Line(line["step"], line["loss"], line["own_loss"], line["grad_norm"]))
    return found


def steps(pair: Pair) -> Iterator[tuple[Line, Line]]:
    yield from zip(lines_of(pair.tried), lines_of(pair.reference), strict=True)


def is_near(value: float, reference: float, relative: float = 0.0, absolute: float = 0.0) -> bool:
    """False for what is no number."""
    return abs(value - reference) <= max(relative * abs(reference), absolute)


# ---- others' ---------------------------------------------------------------------------------------------------------


def loss_alone(pair: Pair) -> str:
    """The loss of each step within 1 %."""
    return first(pair, lambda one, other: is_near(one.loss, other.loss, relative=0.01))


def automodel(pair: Pair) -> str:
    """NeMo Automodel, tests/functional_tests/parallelism/compare_parallel_parity.py: 0.05 and 5 %."""

    def agrees(one: Line, other: Line) -> bool:
        return is_near(one.loss, other.loss, absolute=0.05) and is_near(one.norm, other.norm, relative=0.05)

    return first(pair, agrees)


def trainer_tests(pair: Pair) -> str:
    """transformers PR 35121, tests/trainer/test_trainer.py: losses with and without accumulation within 0.01."""
    return first(pair, lambda one, other: is_near(one.loss, other.loss, absolute=0.01))


def slime_grid(pair: Pair) -> str:
    """slime PR 1000, tests/test_qwen3_0.6B_parallel_check.py: the first step's norm within 1 % or 0.01.

    Of the layouts that the loop visits on two ranks. It runs Megatron-LM, so FSDP2 is not among them, nor is a resume.
    """
    if pair.kind.layout not in visited_by_slime(2) or pair.recipe.resume_after:
        return ""
    one, other = next(steps(pair))
    return "" if is_near(one.norm, other.norm, 0.01, 0.01) else f"step 1: norm {one.norm:.5g}, not {other.norm:.5g}"


def visited_by_slime(ranks: int) -> set[str]:
    """Its three loops divide the ranks that are left, and never put them back, so later sizes are skipped."""
    found = set()
    left = float(ranks)
    for tensor in (1, 2, 4, 8):
        left /= tensor
        for pipeline in (1, 2, 4):
            if left < pipeline:
                continue
            left /= pipeline
            for context in (1, 2, 4, 8):
                if left < context:
                    continue
                sizes = {"tensor": tensor, "sequence": tensor, "pipeline": pipeline, "context": context}
                found |= {name for name, size in sizes.items() if size == ranks}
                if tensor * pipeline * context == 1:
                    found |= {"data", "zero1"}
    return found


def torchtitan(pair: Pair) -> str:
    """torchtitan, scripts/loss_compare.py --assert-equal: losses equal in the five digits that it prints."""
    for one, other in zip(lines_of(pair.tried), lines_of(pair.before), strict=True):
        if f"{one.loss:8.5f}" != f"{other.loss:8.5f}":
            return f"step {one.step}: {one.loss:8.5f}, not {other.loss:8.5f}"
    return ""


def bits_of_one_rank(pair: Pair) -> str:
    """All digits of rank 0's own loss and norm."""
    for one, other in zip(lines_of(pair.tried), lines_of(pair.before), strict=True):
        if one.own_loss != other.own_loss or one.norm != other.norm:
            return f"step {one.step}"
    return ""


def first(pair: Pair, agrees: Callable[[Line, Line], bool]) -> str:
    """The first step that does not agree, in words; "" if all do."""
    for one, other in steps(pair):
        if not agrees(one, other):
            return f"step {one.step}: {one.loss:.6g} and {one.norm:.6g}, not {other.loss:.6g} and {other.norm:.6g}"
    return ""


# ---- ours ------------------------------------------------------------------------------------------------------------


def judge(pair: Pair) -> str:
    """judge A B, of what rank 0 printed."""
    tried, reference = (read_log(directory / "log0.jsonl", Names()) for directory in (pair.tried, pair.reference))
    found = answer(tried, reference, pair.recipe.precision).found
    return found.likely or "different" if found.verdict == DIFFERENT else ""


def judge_with_trace(pair: Pair) -> str:
    """judge --locate A B, of the lines that StepTrace wrote."""
    return said_of_traces(*traces(pair), pair.recipe.precision)


def first_step_alone(pair: Pair) -> str:
    """judge --locate A B, of the first step: the initial weights and the gradients before anything is updated."""
    if pair.recipe.resume_after:
        return ""
    return said_of_traces(*map(begin, traces(pair)), pair.recipe.precision)


def traces(pair: Pair) -> tuple[Log, Log]:
    return read_log(pair.tried / TRACE, Names()), read_log(pair.reference / TRACE, Names())


def begin(log: Log) -> Log:
    """Its first step."""
    start = min(log.trace.steps)
    lines = {key: lines for key, lines in log.trace.lines.items() if key[0] == start}
    curves = Curves({start: log.curves.loss[start]}, {start: log.curves.norm[start]}, log.curves.name)
    return replace(log, trace=replace(log.trace, lines=lines), curves=curves)


def said_of_traces(tried: Log, reference: Log, precision: str) -> str:
    found = answer(tried, reference, precision).found
    if found.verdict == DIFFERENT:
        return found.likely or "different"
    place = first_difference(tried.trace, reference.trace, precision) or copies_apart(tried.trace, reference.trace)
    return place.sentence() if place else ""


def parity(pair: Pair) -> str:
    """The bounds of scripts/check_parity.sh, and what its recipe would hide."""
    tried, reference = (curves(lines_of(directory)) for directory in (pair.tried, pair.reference))
    compared = compare(tried, reference, TOLERANCE[pair.recipe.precision])
    hidden = hidden_by_recipe(reference.norm.values(), pair.recipe.clip, pair.recipe.micro_batches)
    found = verdict_on(compared, hidden, pair.recipe.clip)
    return found.likely or "different" if found.verdict == DIFFERENT else ""


def prove(pair: Pair) -> str:
    """prove, which trains nothing: one step executed without arithmetic. It knows no resume."""
    if pair.recipe.resume_after:
        return ""
    usual = Recipe()
    return said_once(pair.kind, replace(pair.recipe, seed=usual.seed, width=usual.width, global_seed=usual.global_seed))


@cache
def said_once(kind: type[Trainer], recipe: Recipe) -> str:
    return said_by_prove(kind, recipe)


def beginnings(pair: Pair) -> str:
    """prove's comparison of what each rank begins with, which executes no step."""
    return said_of_beginnings(pair.kind, pair.recipe, pair.one_process)


def curves(lines: list[Line]) -> Curves:
    return Curves({line.step: line.loss for line in lines}, {line.step: line.norm for line in lines})


def shows(pair: Pair) -> list[str]:
    """Where a difference from the reference is seen, within the bounds of the precision."""
    tried, reference = (curves(lines_of(directory)) for directory in (pair.tried, pair.reference))
    compared = compare(tried, reference, TOLERANCE[pair.recipe.precision])
    log, other = traces(pair)
    seen = {
        "loss": compared.loss and compared.loss.is_beyond,
        "norm": compared.norm and compared.norm.is_beyond,
        "some ranks": copies_apart(log.trace),
        "a parameter": first_difference(log.trace, other.trace, pair.recipe.precision)
        or rounded_to_bf16(log.trace, other.trace),
    }
    return [name for name, is_seen in seen.items() if is_seen]


BEFORE_THE_FIRST_STEP = ("prove", "what ranks begin with")
OTHERS = {
    "loss within 1 %": loss_alone,
    "Trainer's tests": trainer_tests,
    "NeMo Automodel": automodel,
    "slime's grid": slime_grid,
    "torchtitan's loss comparison": torchtitan,
    "bits of one rank's log": bits_of_one_rank,
}
OURS = {
    "parity check": parity,
    "judge": judge,
    "judge --locate": judge_with_trace,
    "prove": prove,
    "what ranks begin with": beginnings,
}
REGRESSION = ("torchtitan's loss comparison", "bits of one rank's log")  # compare with the same layout
GATES = OTHERS | OURS
