"""One run, as its record says: what records.py loads and reader.py checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from t5bench.costmodel.job import Architecture
from t5bench.record.log import Evaluation, Iteration, PeakMemory
from t5bench.record.plan import Layout, Plan


@dataclass(frozen=True)
class Run:
    """One run, from its directory. ``record`` is the content of run.json, ``plan`` that of the first node's part.

    samples: by node. remarks: what to know about the record before its figures are believed, a sentence each.
    """

    directory: Path
    record: Mapping[str, Any] = field(repr=False)
    plan: Plan = field(repr=False)
    iterations: Sequence[Iteration] = field(repr=False)
    samples: Mapping[int, Sequence[Mapping[str, Any]]] = field(repr=False)
    remarks: Sequence[str] = ()

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def strategy(self) -> str:
        return self.plan.strategy.name

    @property
    def engine(self) -> str:
        return self.plan.engine

    @property
    def status(self) -> str:
        return self.record["status"]

    @property
    def reason(self) -> str:
        return self.record["reason"]

    @property
    def layout(self) -> Layout:
        assert self.plan.layout, "a run that began has a layout"
        return self.plan.layout

    @cached_property
    def architecture(self) -> Architecture:
        """Without a vocabulary if the engine has not printed it yet."""
        return Architecture.of_arguments(self.plan.named_arguments, self.padded_vocab_size or 0)

    @property
    def evaluations(self) -> list[Evaluation]:
        """What the last rank's node logged of evaluations, in order."""
        return [Evaluation(**entry) for entry in self.nodes[-1].get("evaluations", [])]

    @property
    def is_evaluation(self) -> bool:
        """Whether the run only evaluated a checkpoint."""
        return bool(self.evaluations) and not self.plan.last_iteration

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def padded_vocab_size(self) -> int | None:
        """None if the engine has not printed it yet."""
        return self.record["padded_vocab_size"]

    @property
    def nodes(self) -> Sequence[Mapping[str, Any]]:
        return self.record["nodes"]

    @cached_property
    def peak_memory(self) -> list[PeakMemory]:
        found = [PeakMemory(**peak) for node in self.nodes for peak in node["peak_memory"]]
        return sorted(found, key=lambda peak: peak.rank)
