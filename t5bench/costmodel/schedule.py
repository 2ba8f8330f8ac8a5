"""When each pipeline stage computes, simulated for any number of unequal stages. The native engine follows order().

1F1B (one forward, one backward) and its interleaved form, in which a GPU has several chunks of the model and
micro-batches go round the GPUs once per chunk: Narayanan et al. (https://arxiv.org/abs/2104.04473, section 2.2). GPipe,
all forwards before all backwards: Huang et al. (https://arxiv.org/abs/1811.06965, section 2.3). Zero-bubble is ZB-H1,
1F1B with backward passes in two steps: Qi et al. (https://arxiv.org/abs/2401.10241, section 2.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


@dataclass(frozen=True)
class Slot:
    """A stage's work on one micro-batch. Times are in seconds."""

    stage: int
    way: str
    """ "F", "B" or "W", see order()."""
    micro_batch: int
    chunk: int
    """The stage's model chunk."""
    start: float
    end: float


ONE_F_ONE_B = "1f1b"
GPIPE = "gpipe"
INTERLEAVED = "interleaved"  # 1F1B with several chunks
ZERO_BUBBLE = "zero-bubble"  # ZB-H1
SCHEDULES = (ONE_F_ONE_B, GPIPE, INTERLEAVED, ZERO_BUBBLE)

WEIGHT_STEP = "gradients of weights"  # the name of a "W" step in a profile

# Why the native engine has no zero-bubble schedule with sequence parallelism.
GATHERED_AGAIN = "a block's input would have to be gathered once more for its weight's gradient"


def interleaving_fault(stages: int, micro_batches: int) -> str:
    """Why the interleaved schedule cannot take so many micro-batches; "" if it can."""
    if micro_batches % stages == 0:
        return ""
    return f"the interleaved schedule takes a multiple of {stages} micro-batches, found {micro_batches}"


def puts_off_weights(stage: int, kind: str) -> bool:
    """Whether a stage computes the gradients of its layers' weights apart from the rest of the backward pass.

    The first stage of a zero-bubble schedule need not, because it would do so right behind it.
    """
    return kind == ZERO_BUBBLE and stage > 0


@lru_cache(maxsize=4096)
def order(
    stage: int, stages: int, micro_batches: int, chunks: int = 1, kind: str = ONE_F_ONE_B
) -> tuple[tuple[str, int, int], ...]:
    """What a stage does, in order: (way, micro-batch, chunk). kind: one of SCHEDULES; chunks decide on interleaving.

    Ways: "F" is a forward pass and "B" a backward pass. Under the zero-bubble schedule "B" leaves out the gradients of
    weights, for which no other stage waits, and "W" computes them. The paper's rule (its figure 3): a stage puts off
    "W" by as many micro-batches as there are stages before it. These are the ones that it has fewer in flight than the
    first stage; so every stage keeps as many micro-batches until their "W" as the first stage under 1F1B. In the end,
    the stage does the rest while 1F1B would wait.
    """
    fault = interleaving_fault(stages, micro_batches)
    if chunks > 1 and fault:
        raise ValueError(fault)
    total = micro_batches * chunks
    stages_behind = stages - stage - 1
    warm_up = stages_behind if chunks == 1 else 2 * stages_behind + (chunks - 1) * stages
    ahead = total if kind == GPIPE else min(total, warm_up)  # forwards before the first backward

    def step(way: str, k: int) -> tuple[str, int, int]:
        rounds, place = divmod(k, stages * chunks)
        chunk = place // stages
        if way != "F":
            chunk = chunks - 1 - chunk
        return way, rounds * stages + place % stages, chunk

    steps = [step("F", k) for k in range(ahead)]
    for k in range(total):
        if ahead + k < total:
            steps.append(step("F", ahead + k))
        steps.append(step("B", k))
        if kind == ZERO_BUBBLE and k >= stage:
            steps.append(step("W", k - stage))
    if kind == ZERO_BUBBLE:
        steps += [step("W", k) for k in range(max(0, total - stage), total)]
    return tuple(steps)


class Step(NamedTuple):
    """A step of a stage, and what the stage keeps meanwhile."""

    way: str
    """ "F", "B" or "W", see order()."""
    chunk: int
    """The stage's model chunk."""
    is_first: bool
    """Whether the micro-batch is an iteration's first."""
    kept: tuple[int, ...]
    """For each chunk, the micro-batches of which it keeps the activations, the own one of "F" and "B" included."""
    put_off: tuple[int, ...]
    """For each chunk, the micro-batches whose gradients of weights are still to be computed, that of "W" included."""


@lru_cache(maxsize=65536)
def steps(stage: int, stages: int, micro_batches: int, chunks: int = 1, kind: str = ONE_F_ONE_B) -> tuple[Step, ...]:
    """The different steps that a stage does. An interleaved schedule's micro-batches are rounded up."""
    if chunks > 1:
        micro_batches = -(-micro_batches // stages) * stages
    if kind != GPIPE:
        micro_batches = min(micro_batches, 3 * stages)  # later ones repeat their steps
    kept = [0] * chunks
    put_off = [0] * chunks
    found: dict[Step, bool] = {}
    for way, micro_batch, chunk in order(stage, stages, micro_batches, chunks, kind):
        if way == "F":
            kept[chunk] += 1
        found[Step(way, chunk, micro_batch == 0, tuple(kept), tuple(put_off))] = True
        if way == "B":
            kept[chunk] -= 1
            if kind == ZERO_BUBBLE:
                put_off[chunk] += 1
        if way == "W":
            put_off[chunk] -= 1
    return tuple(found)


@lru_cache(maxsize=65536)
def fullest_steps(
    way: str, stage: int, stages: int, micro_batches: int, chunks: int = 1, kind: str = ONE_F_ONE_B, later: bool = False
) -> tuple[Step, ...]:
    """The steps of one way in which a stage may keep most, whatever each micro-batch takes.

    later: without those of the iteration's first micro-batch.
    """
    of_way = []
    for step in steps(stage, stages, micro_batches, chunks, kind):
        if step.way == way and not (later and step.is_first):
            of_way.append(step)
    if chunks > 1:
        return tuple(of_way)
    most: dict[tuple[int, ...], int] = {}  # by what is put off, how many micro-batches are kept at the most
    for step in of_way:
        most[step.put_off] = max(step.kept[0], most.get(step.put_off, 0))
    return tuple(step for step in of_way if step.kept[0] == most[step.put_off])


def one_f_one_b(
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: float = 0.0,
    chunks: int = 1,
    kind: str = ONE_F_ONE_B,
    weights: Sequence[float] = (),
) -> list[Slot]:
    """The slots of an iteration, in the order in which they start.

    forward, backward: seconds of a micro-batch on each stage, all of its chunks together. transfer: seconds from one
    stage to the next, in which neither of them waits. weights: the part of `backward` that computes gradients of
    weights, which the zero-bubble schedule needs.
    """
    stages = len(forward)
    orders = [order(stage, stages, micro_batches, chunks, kind) for stage in range(stages)]
    seconds_of_step = [_step_seconds(stage, forward, backward, chunks, kind, weights) for stage in range(stages)]
    course = _course(stages, micro_batches, chunks, kind)
    ends = _ends(course, seconds_of_step, transfer)
    slots: list[Slot] = []
    done = [0] * stages
    for stage, end in zip(course.stages, ends, strict=True):
        way, micro_batch, chunk = orders[stage][done[stage]]
        done[stage] += 1
        slots.append(Slot(stage, way, micro_batch, chunk, end - seconds_of_step[stage][way], end))
    return sorted(slots, key=lambda slot: (slot.start, slot.stage))


def _step_seconds(
    stage: int,
    forward: Sequence[float],
    backward: Sequence[float],
    chunks: int,
    kind: str,
    weights: Sequence[float],
) -> dict[str, float]:
    """The seconds of a step of a stage by its way."""
    if kind != ZERO_BUBBLE:
        return {"F": forward[stage] / chunks, "B": backward[stage] / chunks}
    of_inputs = backward[stage] - weights[stage]
    return {"F": forward[stage] / chunks, "B": of_inputs / chunks, "W": weights[stage] / chunks}


class Course(NamedTuple):
    """All steps of all stages, each after those that it waits for: what does not depend on how long a step takes."""

    stages: Sequence[int]
    """Of each step."""
    ways: Sequence[int]
    """Of each step, its place in WAYS."""
    needs: Sequence[int]
    """The step of another stage, or of the chunk before, that a step waits for; -1 for none."""
    is_sent: Sequence[bool]
    """Whether what it waits for comes from another stage, and takes the time of a transfer."""


WAYS = {"F": 0, "B": 1, "W": 2}


@lru_cache(maxsize=64)
def _course(stages: int, micro_batches: int, chunks: int, kind: str) -> Course:
    """A step waits for the stage's previous one and, but "W", for its micro-batch's step in the chunk before it."""
    last = stages * chunks - 1
    orders = [order(stage, stages, micro_batches, chunks, kind) for stage in range(stages)]
    done = [0] * stages
    step_of_arrival: dict[tuple[int, int], int] = {}  # by micro-batch, and place on its way through all chunks and back
    course = Course([], [], [], [])
    ready = list(range(stages))
    while ready:
        stage = ready.pop()
        before = done[stage]
        for way, micro_batch, chunk in orders[stage][before:]:
            need = -1
            is_sent = False
            if way != "W":
                place = chunk * stages + stage  # the chunk's place among all chunks of the model
                arrival = place if way == "F" else 2 * last + 1 - place
                if arrival:
                    need = step_of_arrival.get((micro_batch, arrival), -1)
                    if need < 0:
                        break
                    is_sent = arrival != last + 1  # the last chunk's backward pass follows its own forward pass
                step_of_arrival[micro_batch, arrival + 1] = len(course.stages)
            course.stages.append(stage)
            course.ways.append(WAYS[way])
            course.needs.append(need)
            course.is_sent.append(is_sent)
            done[stage] += 1
        if done[stage] > before:
            ready.append((stage + 1) % stages)
            ready.append((stage - 1) % stages)
    return course


def _ends(course: Course, seconds_of_step: Sequence[dict[str, float]], transfer: float) -> list[float]:
    """When each step of the course ends. seconds_of_step: by stage and way."""
    seconds = [[of_stage.get(way, 0.0) for way in WAYS] for of_stage in seconds_of_step]
    free = [0.0] * len(seconds)  # when each stage has ended its last step
    ends: list[float] = []
    for stage, way, need, is_sent in zip(course.stages, course.ways, course.needs, course.is_sent, strict=True):
        end = free[stage]
        if need >= 0:
            arrives = ends[need] + transfer if is_sent else ends[need]
            if arrives > end:
                end = arrives
        end += seconds[stage][way]
        free[stage] = end
        ends.append(end)
    return ends


@lru_cache(maxsize=8192)
def _duration(
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    micro_batches: int,
    transfer: float,
    chunks: int,
    kind: str,
    weights: tuple[float, ...],
) -> float:
    stages = len(forward)
    if stages == 1:
        return micro_batches * (forward[0] + backward[0])
    few = 4 * stages + micro_batches % stages
    more = few + stages
    seconds_of_step = [_step_seconds(stage, forward, backward, chunks, kind, weights) for stage in range(stages)]

    def end(simulated: int) -> float:
        return max(_ends(_course(stages, simulated, chunks, kind), seconds_of_step, transfer))

    if micro_batches <= more:
        return end(micro_batches)
    end_of_more = end(more)
    per_micro_batch = (end_of_more - end(few)) / stages
    return end_of_more + per_micro_batch * (micro_batches - more)


def duration(
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: float = 0.0,
    chunks: int = 1,
    kind: str = ONE_F_ONE_B,
    weights: Sequence[float] = (),
) -> float:
    """Seconds from the first forward to the last backward; long schedules are extrapolated from their steady state."""
    return _duration(tuple(forward), tuple(backward), micro_batches, transfer, chunks, kind, tuple(weights))


def idle_share(
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    chunks: int = 1,
    kind: str = ONE_F_ONE_B,
    weights: Sequence[float] = (),
) -> float:
    """The bubble: the share of all stages' time, from the first forward to the last backward, in which they wait.

    Of equal stages it is (p - 1) / (v m + p - 1), p stages with v chunks each and m micro-batches (section 2.2). The
    zero-bubble schedule's stages wait for (p - 1) (F + B - W) instead of (p - 1) (F + B + W), F, B and W being the
    seconds of a step (Qi et al., section 2.3).
    """
    whole = duration(forward, backward, micro_batches, chunks=chunks, kind=kind, weights=weights)
    working = micro_batches * (sum(forward) + sum(backward))
    return 1 - working / (len(forward) * whole)


def draw(slots: Sequence[Slot], width: int = 100) -> str:
    """The schedule as text, a line for each stage: digits are forwards, letters backwards, dots waiting.

    Where gradients of weights are a step of their own, it has the capital letter.
    """
    end = max(slot.end for slot in slots)
    lines = [["."] * width for _ in range(1 + max(slot.stage for slot in slots))]
    for slot in slots:
        begin = round(slot.start / end * width)
        stop = round(slot.end / end * width)
        if slot.way == "F":
            mark = str(slot.micro_batch % 10)
        elif slot.way == "B":
            mark = chr(ord("a") + slot.micro_batch % 26)
        else:
            mark = chr(ord("A") + slot.micro_batch % 26)
        lines[slot.stage][begin:stop] = mark * (stop - begin)
    return "\n".join(f"stage {stage:<3} {''.join(line)}" for stage, line in enumerate(lines))
