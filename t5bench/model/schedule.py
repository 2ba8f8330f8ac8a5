"""When each pipeline stage computes, simulated for any number of unequal stages. The native engine follows order().

1F1B (one forward, one backward) and its interleaved form, in which a GPU has several chunks of the model and
micro-batches go round the GPUs once per chunk: Narayanan et al. (https://arxiv.org/abs/2104.04473, section 2.2). GPipe,
all forwards before all backwards: Huang et al. (https://arxiv.org/abs/1811.06965, section 2.3).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


@dataclass(frozen=True)
class Slot:
    """A stage's work on one micro-batch. Times are in seconds."""

    stage: int
    way: str
    """ "F" or "B"."""
    micro_batch: int
    chunk: int
    """The stage's model chunk."""
    start: float
    end: float


ONE_F_ONE_B = "1f1b"
GPIPE = "gpipe"
INTERLEAVED = "interleaved"  # 1F1B with several chunks
SCHEDULES = (ONE_F_ONE_B, GPIPE, INTERLEAVED)


def interleaving_fault(stages: int, micro_batches: int) -> str:
    """Why the interleaved schedule cannot take so many micro-batches; "" if it can."""
    if micro_batches % stages == 0:
        return ""
    return f"the interleaved schedule takes a multiple of {stages} micro-batches, found {micro_batches}"


def order(
    stage: int, stages: int, micro_batches: int, chunks: int = 1, kind: str = ONE_F_ONE_B
) -> list[tuple[str, int, int]]:
    """What a stage does, in order: (way, micro-batch, chunk). kind: one of SCHEDULES; chunks decide on interleaving."""
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
        if way == "B":
            chunk = chunks - 1 - chunk
        return way, rounds * stages + place % stages, chunk

    steps = [step("F", k) for k in range(ahead)]
    for k in range(total - ahead):
        steps += [step("F", ahead + k), step("B", k)]
    steps += [step("B", k) for k in range(total - ahead, total)]
    return steps


class Step(NamedTuple):
    """A step of a stage, and what the stage keeps meanwhile."""

    way: str
    """ "F" or "B"."""
    chunk: int
    """The stage's model chunk."""
    is_first: bool
    """Whether the micro-batch is an iteration's first."""
    kept: tuple[int, ...]
    """For each chunk, the micro-batches of which it keeps the activations, the step's own included."""


@lru_cache(maxsize=65536)
def steps(stage: int, stages: int, micro_batches: int, chunks: int = 1, kind: str = ONE_F_ONE_B) -> tuple[Step, ...]:
    """The different steps that a stage does. An interleaved schedule's micro-batches are rounded up."""
    if chunks > 1:
        micro_batches = -(-micro_batches // stages) * stages
    if kind != GPIPE:
        micro_batches = min(micro_batches, 3 * stages)  # later ones repeat their steps
    kept = [0] * chunks
    found: dict[Step, bool] = {}
    for way, micro_batch, chunk in order(stage, stages, micro_batches, chunks, kind):
        if way == "F":
            kept[chunk] += 1
        found[Step(way, chunk, micro_batch == 0, tuple(kept))] = True
        if way == "B":
            kept[chunk] -= 1
    return tuple(found)


def one_f_one_b(
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: float = 0.0,
    chunks: int = 1,
    kind: str = ONE_F_ONE_B,
) -> list[Slot]:
    """The slots of an iteration, in the order in which they start.

    forward, backward: seconds of a micro-batch on each stage, all of its chunks together. transfer: seconds from one
    stage to the next, in which neither of them waits.
    """
    stages = len(forward)
    last = stages * chunks - 1
    queues = [deque(order(stage, stages, micro_batches, chunks, kind)) for stage in range(stages)]
    free = [0.0] * stages  # when each stage has ended its last slot
    slots: list[Slot] = []
    ready = list(range(stages))
    ends: dict[tuple[int, int], float] = {}
    while ready:
        stage = ready.pop()
        while queues[stage]:
            way, micro_batch, chunk = queues[stage][0]
            place = chunk * stages + stage  # the chunk's place among all chunks of the model
            step = place if way == "F" else 2 * last + 1 - place  # on the micro-batch's way through them and back
            if step and (micro_batch, step - 1) not in ends:
                break
            arrives = 0.0
            if step:
                turns_back = step == last + 1  # the last chunk's backward pass follows its own forward pass
                arrives = ends[micro_batch, step - 1] + (0.0 if turns_back else transfer)
            start = max(free[stage], arrives)
            seconds = forward[stage] if way == "F" else backward[stage]
            free[stage] = start + seconds / chunks
            ends[micro_batch, step] = free[stage]
            slots.append(Slot(stage, way, micro_batch, chunk, start, free[stage]))
            queues[stage].popleft()
            ready.extend({(stage + 1) % stages, (stage - 1) % stages} - {stage})
    return sorted(slots, key=lambda slot: (slot.start, slot.stage))


def duration(
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: float = 0.0,
    chunks: int = 1,
    kind: str = ONE_F_ONE_B,
) -> float:
    """Seconds from the first forward to the last backward; long schedules are extrapolated from their steady state."""
    stages = len(forward)
    if stages == 1:
        return micro_batches * (forward[0] + backward[0])
    few = 4 * stages + micro_batches % stages
    more = few + stages

    def end(simulated: int) -> float:
        return max(slot.end for slot in one_f_one_b(forward, backward, simulated, transfer, chunks, kind))

    if micro_batches <= more:
        return end(micro_batches)
    end_of_more = end(more)
    per_micro_batch = (end_of_more - end(few)) / stages
    return end_of_more + per_micro_batch * (micro_batches - more)


def idle_share(
    forward: Sequence[float], backward: Sequence[float], micro_batches: int, chunks: int = 1, kind: str = ONE_F_ONE_B
) -> float:
    """The bubble: the share of all stages' time, from the first forward to the last backward, in which they wait.

    Of equal stages it is (p - 1) / (v m + p - 1), p stages with v chunks each and m micro-batches (section 2.2).
    """
    whole = duration(forward, backward, micro_batches, chunks=chunks, kind=kind)
    working = micro_batches * (sum(forward) + sum(backward))
    return 1 - working / (len(forward) * whole)


def draw(slots: Sequence[Slot], width: int = 100) -> str:
    """The schedule as text, a line for each stage: digits are forwards, letters backwards, dots waiting."""
    end = max(slot.end for slot in slots)
    lines = [["."] * width for _ in range(1 + max(slot.stage for slot in slots))]
    for slot in slots:
        begin = round(slot.start / end * width)
        stop = round(slot.end / end * width)
        if slot.way == "F":
            mark = str(slot.micro_batch % 10)
        else:
            mark = chr(ord("a") + slot.micro_batch % 26)
        lines[slot.stage][begin:stop] = mark * (stop - begin)
    return "\n".join(f"stage {stage:<3} {''.join(line)}" for stage, line in enumerate(lines))
