"""Where a traced run did not do what follows from its own numbers: no second run is needed, and layouts do not matter.

In bf16 this shows mistakes that are smaller than what layouts differ by.
"""

import math
from collections.abc import Iterator, Mapping

from training_comparison.first_difference import LAST_DIGIT, apart
from training_comparison.likely import ranks_in_words
from training_comparison.traces import Trace

# The relative differences of a run's own figures from what follows from its numbers, in either precision
# (docs/parity_evidence.md has what honest runs reach).
LOSS = 2e-6
NORM = 1e-5
SUM = 1e-5  # of gradients over micro-batches and ranks
SUM_IN_16_BITS = 5e-2  # where gradients are added up in 16 bits, as DeepSpeed does in bf16
UPDATE = 1e-5


def contradictions(
    trace: Trace, losses: Mapping[int, float], norms: Mapping[int, float], *, sums_in_16_bits: bool = False
) -> list[str]:
    """A sentence for each kind, with its first place.

    losses and norms: what the run printed, by iteration. sums_in_16_bits: its gradients are added up so, by design.
    """
    kinds = (
        wrong_losses(trace, losses),
        wrong_norms(trace, norms),
        wrong_sums(trace, SUM_IN_16_BITS if sums_in_16_bits else SUM),
        wrong_updates(trace),
        stale_copies(trace),
    )
    firsts = [next(sentences, "") for sentences in kinds]
    return [sentence for sentence in firsts if sentence]


def is_off(value: float, expected: float, allowed: float) -> bool:
    return not abs(value - expected) <= allowed * abs(expected)


def wrong_losses(trace: Trace, losses: Mapping[int, float]) -> Iterator[str]:
    for step, expected in trace.losses.items():
        printed = losses.get(step)
        if printed is not None and is_off(printed, expected, LOSS):
            yield f"iteration {step} printed the loss {printed:.7g}, but its logits give {expected:.7g}"


def wrong_norms(trace: Trace, norms: Mapping[int, float]) -> Iterator[str]:
    for step, expected in trace.norms.items():
        printed = norms.get(step)
        if printed is not None and is_off(printed, expected, NORM):
            its = f"its gradients give {expected:.7g}"
            yield f"iteration {step} printed the gradient norm {printed:.7g}, but {its}"


def wrong_sums(trace: Trace, allowed: float) -> Iterator[str]:
    """A reduced gradient is the sum of all ranks' and micro-batches'."""
    for step in trace.steps:
        for name in trace.names(step, "reduced"):
            of_ranks = trace.values(step, "gradient", name, per_replica=False)
            if not of_ranks:  # FSDP2 divides gradients before a trace can see them
                lines = trace.lines[step, "reduced", name]
                if trace.header.replicas > 1 and all(line.in_16_bits for line in lines):
                    yield f"in iteration {step} the reduced gradient of {name} has only values of 16 bits"
                continue
            total = of_ranks[0][0]
            for value in trace.values(step, "reduced", name)[0]:
                difference = apart(value, total)
                if not difference <= allowed:
                    what = f"the reduced gradient of {name} on {ranks_in_words(value.ranks)}"
                    from_what = f"the sum over micro-batches and ranks by {difference:.1e}"
                    yield f"in iteration {step} {what} differs from {from_what}"


def wrong_updates(trace: Trace) -> Iterator[str]:
    for line in trace.of("update"):
        if not line.off <= UPDATE * line.size + 2 * LAST_DIGIT * line.weight:
            share = line.off / line.size if line.size else math.inf
            what = f"the update of {line.name} on rank {line.rank} differs from AdamW's by {share:.1e}"
            yield f"in iteration {line.step} {what}"


def stale_copies(trace: Trace) -> Iterator[str]:
    for line in trace.of("stale"):
        if line.names:
            what = f"computed with copies of {len(line.names)} parameters that are not their rounded masters"
            yield f"in iteration {line.step} rank {line.rank} {what}: {line.names[0]}"
