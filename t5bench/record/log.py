"""The engines' log lines. Both engines print Megatron's iteration line, on the last rank."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

# A line ends with TFLOPs: an unbuffered Python writes the newline separately, and another rank's output may come in
# between. A new line may begin in the middle of a truncated one.
ITERATION = re.compile(
    r"\biteration\s+(?P<iteration>\d+)/\s*(?P<total>\d+) \|"
    r"(?P<fields>(?:(?!\biteration\s+\d+/\s*\d+ \|).)*?\bTFLOPs:\s*[-+0-9.eE]+\s*\|)"
)
_FIELDS = {
    "elapsed time per iteration (ms)": "elapsed_ms",
    "lm loss": "lm_loss",
    "learning rate": "learning_rate",
    "samples per second": "samples_per_second",
    "TFLOPs": "tflops",
    "grad norm": "grad_norm",
    "loss scale": "loss_scale",
    "number of skipped iterations": "skipped",
    "number of nan iterations": "nan",
}
_FIELD = re.compile(r"(?:^|(?<=\|))(?P<name>[^:|]+):\s*(?P<value>[-+0-9.eE]+|(?i:-?nan|-?inf))\s*\|")
# Several ranks print this at once, perhaps into one line.
_PEAK_MEMORY = re.compile(
    r"\bpeak memory \| rank (?P<rank>\d+) \|(?:(?!peak memory).)*?"
    r"\ballocated MiB (?P<device>[0-9.]+) \|(?:(?!peak memory).)*?\bhost rss MiB (?P<host>\d+\.\d)"
)
# Megatron-DeepSpeed's line, and the native engine's.
_PADDED_VOCABULARY = re.compile(r"padded vocab \(size: \d+\).*\(new size: (\d+)\)|vocabulary padded to (\d+)")
_EVALUATION = re.compile(
    r"\bvalidation loss at iteration (?P<iteration>\d+)(?: on \d+-sample draw from (?P<samples>\w+) set)? \|"
    r" lm loss value: (?P<loss>\d+\.\d+(?:E[-+]\d+)?) \| lm loss PPL: (?P<perplexity>\d+\.\d+(?:E[-+]\d+)?) \|"
)


# What a record may hold: numbers up to fp32's largest, and times from 2001 to 2103 in seconds since 1970.
MOST = 2.0**128
Count = Annotated[int, Meta(ge=0, le=2**53)]
Amount = Annotated[float, Meta(ge=0, le=MOST)]
Clock = Annotated[float, Meta(ge=1e9, le=4.2e9)]


@dataclass(frozen=True)
class Evaluation:
    """One evaluation: lm_loss in nats per target token, over samples of the validation or the test set."""

    iteration: Count
    samples: str
    lm_loss: Amount
    perplexity: Amount


@dataclass(frozen=True)
class Iteration:
    """One iteration line: the mean over the iterations since the line before it.

    elapsed_ms is per iteration, lm_loss in nats per target token (None where every iteration was skipped),
    samples_per_second over all processes, tflops per GPU, grad_norm before clipping, skipped and nan the iterations
    without an update or a finite loss since the line before, time when the line came, begin the iteration after which
    the processes that logged it began: not 0 in a run that was resumed. Raises ValueError for what no engine logs.
    """

    iteration: int
    total: int
    elapsed_ms: float
    lm_loss: float | None
    learning_rate: float
    samples_per_second: float
    tflops: float
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: int = 0
    nan: int = 0
    time: Clock | None = None
    begin: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            # A run can diverge to nan and inf, but nothing that is logged can be negative.
            if value is not None and (value < 0 or MOST < value < math.inf):
                raise ValueError(f"{name} is {value}")
        if not 1 <= self.iteration <= self.total:
            raise ValueError(f"it is iteration {self.iteration} of {self.total}")
        if self.lm_loss is None and not self.skipped:
            raise ValueError("it has no lm_loss")


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory of one rank in MiB; device_mib is None on a CPU."""

    rank: Count
    device_mib: Amount | None
    host_mib: Amount


def iteration(line: str, time: float | None = None) -> Iteration | None:
    """The last complete iteration line in this text; None if it was truncated or mixed with another."""
    matches = list(ITERATION.finditer(line))
    if not matches:
        return None
    match = matches[-1]
    found = _FIELD.findall(matches[-1]["fields"])
    try:
        fields = {name.strip(): float(value) for name, value in found}
        if len(fields) < len(found):  # only two lines in one can give a field twice, or a number such as 1.2.3
            return None
        # Megatron leaves the loss out of a line whose iterations were all skipped.
        values: dict[str, Any] = {"lm_loss": None, "time": time}
        values |= {_FIELDS[name]: value for name, value in fields.items() if name in _FIELDS}
        values |= {name: int(values.get(name, 0)) for name in ("skipped", "nan")}
        return Iteration(int(match["iteration"]), int(match["total"]), **values)
    except (TypeError, ValueError, OverflowError):  # it lacks a field, or has one of no possible value
        return None


def figures(line: str) -> dict[str, float]:
    """Every figure of the last complete iteration line in this text, by the name that the engine gives it."""
    matches = list(ITERATION.finditer(line))
    if not matches:
        return {}
    return {name.strip(): float(value) for name, value in _FIELD.findall(matches[-1]["fields"])}


def iterations(lines: Iterable[str]) -> Iterator[Iteration]:
    """The complete iteration lines of a log."""
    return (found for line in lines if (found := iteration(line)))


def evaluation(line: str) -> Evaluation | None:
    """The evaluation that this text reports; None if it is truncated or its loss is not a number."""
    match = _EVALUATION.search(line)
    if not match:
        return None
    loss = float(match["loss"])
    perplexity = float(match["perplexity"])
    return Evaluation(int(match["iteration"]), match["samples"] or "validation", loss, perplexity)


def padded_vocabulary(line: str) -> int | None:
    """The padded vocabulary's size, if the line reports it."""
    match = _PADDED_VOCABULARY.search(line)
    return int(match[1] or match[2]) if match else None


def peak_memory(lines: Iterable[str]) -> list[PeakMemory]:
    """Peak memory by rank, in rank order."""
    matches = [match for line in lines for match in _PEAK_MEMORY.finditer(line)]
    found = {int(m["rank"]): (float(m["device"]) or None, float(m["host"])) for m in matches}
    return [PeakMemory(rank, *found[rank]) for rank in sorted(found)]
