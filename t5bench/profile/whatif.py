"""What would make a profiled run faster: the cost model's answer, calibrated on that run's own iteration.

Three figures of the iteration decide: how long it takes, how much of that is communication that nothing hides, and how
fast large messages pass. From them follow how much slower than its figures the machine computes, how many bytes per
second its link carries, and how long a message takes besides.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from t5bench.compare.rows import prediction_of
from t5bench.costmodel import time
from t5bench.costmodel.machine import Machine
from t5bench.costmodel.prediction import Prediction
from t5bench.record.run import Run

GIGABITS = (1, 10, 25, 100, 400, 800)  # links that one can buy, per second
# Bytes per second, and seconds of latency, between which a run's link is looked for, the worst first.
RATES = (1e4, 1e12)
LATENCIES = (1.0, 1e-7)
HALVINGS = 20
MISSED = 0.1  # of the iteration: by how much the model may miss the exposed communication

Gain = tuple[float, str]  # how many times as fast an iteration is, and with what


@dataclass(frozen=True)
class WhatIf:
    """A run's job on the machine on which it takes as long; rest: seconds of the iteration that the model lacks."""

    found: Prediction
    rest: float

    @property
    def gigabits(self) -> float:
        """What the run's link carries."""
        return 8e-9 * getattr(self.found.machine, _side(self.found)).bandwidth

    def gain(self, *, gigabits: float = 0.0, micro_batch: int = 0) -> float:
        """How many times as fast an iteration is with another link or another micro-batch."""
        found = self.found
        before = self.found.time
        if gigabits:
            found = replace(found, machine=_linked(found, bandwidth=gigabits * 1e9 / 8))
        if micro_batch:
            found = replace(found, job=replace(found.job, micro_batch=micro_batch))
        assert before and found.time
        return (before.total + self.rest) / (found.time.total + self.rest)

    def faster_link(self) -> Gain:
        """The next one that is clearly faster."""
        gigabits = next((speed for speed in GIGABITS if speed >= 2 * self.gigabits), GIGABITS[-1])
        return self.gain(gigabits=gigabits), f"a link of {gigabits} Gbit/s"

    def other_micro_batch(self) -> Gain:
        """The fastest one that fits into the device."""
        gains = {size: self.gain(micro_batch=size) for size in self._micro_batches()}
        size = max(gains, key=gains.__getitem__)
        return gains[size], f"micro-batches of {size} instead of {self.found.job.micro_batch}"

    def _micro_batches(self) -> Iterator[int]:
        """Powers of two times the run's that divide the batch, and leave every pipeline stage one at least."""
        job = self.found.job
        local = job.global_batch // job.parallel.data
        for size in (job.micro_batch, *(2**power for power in range(local.bit_length()))):
            fits = not replace(self.found, job=replace(job, micro_batch=size)).shortage
            if local % size == 0 and local // size >= job.parallel.pipeline and fits:
                yield size


def calibrated(run: Run, seconds: float, exposed: float, rest: float, rate: float) -> WhatIf | None:
    """None where the model does not describe the run.

    exposed: seconds of communication and pipeline bubble. rate: bytes per second of large messages, 0 for none.
    """
    found = prediction_of(run)
    if not found:
        return None

    def taking_as_long(**link: float) -> Prediction | None:
        """None where sending alone takes longer."""
        machine = _linked(found, **link)
        try:
            slower = time.calibrated(found.job, machine, seconds - rest, found.backend)
        except ValueError:
            return None
        return replace(found, machine=machine, slower=slower)

    name = "bandwidth"
    (worse, better) = RATES
    best = None
    at_rate = taking_as_long(bandwidth=rate or better)
    if at_rate and _exposed(at_rate) < exposed:
        found = at_rate
        name = "latency"
        (worse, better) = LATENCIES
    for _ in range(HALVINGS):
        middle = math.sqrt(worse * better)
        tried = taking_as_long(**{name: middle})
        best = tried or best
        is_worse = tried is None or _exposed(tried) > exposed
        worse, better = (middle, better) if is_worse else (worse, middle)
    return WhatIf(best, rest) if best and abs(_exposed(best) - exposed) <= MISSED * seconds else None


def _exposed(found: Prediction) -> float:
    assert found.time
    return found.time.communication + found.time.bubble


def _side(found: Prediction) -> str:
    """Which link decides: the one between nodes, or inside the only one."""
    return "between" if found.job.parallel.world > found.job.parallel.devices_per_node else "inside"


def _linked(found: Prediction, **changes: float) -> Machine:
    """The machine with another bandwidth or latency of that link."""
    side = _side(found)
    return replace(found.machine, **{side: replace(getattr(found.machine, side), **changes)})
