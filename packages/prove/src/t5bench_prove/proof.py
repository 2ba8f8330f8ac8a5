"""Whether an executed step sums every gradient over the right ranks exactly once, before anything is trained.

And whether the optimizer gets it times 1 / replicas, as far as the program's own numbers say: the mean over replicas of
what autograd computes. How the loss was scaled before, and all arithmetic within a rank, is not seen.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from native.data_parallel import TorchTrainer
from t5bench.costmodel import traffic
from t5bench.costmodel.job import Job
from t5bench_prove.origins import (
    DATA,
    KEYS,
    PIPELINE,
    TENSOR,
    Axes,
    GradientSum,
    Origin,
    OriginPiece,
    Origins,
    members,
)

WORDS = ("word_embeddings.weight", "word_embeddings_for_head.weight")
POSITIONS = ("position_embeddings.weight",)
MOST_FACTOR_ERROR = 1e-3
RELATIVE_POSITIONS = "relative_positions.weight"
KEYS_AND_VALUES = "self_attention.key_value."


@dataclass(frozen=True)
class Settled:
    """A parameter, and what makes its gradient the same on all ranks that have a copy."""

    name: str
    copies: tuple[str, ...]
    """The axes along which other ranks have the same parameter, or a part of it under ZeRO and FSDP2."""
    by: tuple[str, ...]
    """The collectives that add up its gradient."""


@dataclass(frozen=True)
class Report:
    """Of one rank's step."""

    findings: list[str] = field(default_factory=list)
    settled: list[Settled] = field(default_factory=list)


@dataclass
class Watch:
    """Follows one step of a rank, and says what is wrong with its gradients."""

    job: Job
    rank: int
    origins: Origins = field(init=False)
    report: Report = field(default_factory=Report)
    arrived: set[str] = field(default_factory=set)
    """The parameters whose gradients the optimizer got."""
    micro_batches: list[str] = field(default_factory=list)
    """Their names, where each gradient must have a part of each."""

    def __post_init__(self) -> None:
        parallel = self.job.parallel
        copies_of_keys = self.job.architecture.copies_of_keys(parallel.tensor)
        axes = Axes(self.rank, parallel.tensor, parallel.data, parallel.shards, copies_of_keys)
        received = set(axes.of_data) if parallel.data > 1 else set()
        if parallel.sequence_parallel and parallel.tensor > 1:
            received.add(TENSOR)
        self.origins = Origins(axes, received=Origin(frozenset(received)))
        groups = traffic.groups_of(self.job)
        of_stages = ("embedding", "position", "encoder stages", "decoder stages")
        self.holders = {kind: self.own(groups[kind]) for kind in of_stages if kind in groups}
        """The ranks of all stages that have a copy of the words' and of the positions' table."""

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Within this, every operator is seen."""
        handle = register_optimizer_step_pre_hook(self.before_update)
        try:
            with self.origins:
                yield
        finally:
            handle.remove()

    def own(self, groups: list[tuple[int, ...]]) -> tuple[int, ...]:
        return next((ranks for ranks in groups if self.rank in ranks), ())

    def begin(self, trainer: TorchTrainer, batch: tuple[Tensor, ...]) -> None:
        """Before the step that is followed."""
        model = trainer.model
        model = getattr(model, "module", model)  # of DeepSpeed's engine
        self.parameters = {model.whole_name(name): own for name, own in model.named_parameters()}
        has_slices = self.job.parallel.tensor > 1
        self.is_divided = {name: has_slices and hasattr(own, "tp_slice") for name, own in self.parameters.items()}
        memory = self.origins.memory
        parallel = self.job.parallel
        if parallel.pipeline == 1:  # what a stage receives says of no micro-batch whose it is
            self.micro_batches = [f"micro-batch {number + 1}" for number in range(trainer.args.micro_batches)]
        for tokens in batch:
            self.mark(tokens)
        for name, parameter in self.parameters.items():
            if self.is_divided[name] and parameter.numel():
                memory.write_whole(parameter, Origin(frozenset({TENSOR})))
        for name, leaf in self.leaves(model).items():
            self.name_gradient(name, leaf)
        self.origins.is_on = True

    def mark(self, tokens: Tensor) -> None:
        """Notes which ranks have others, and of which micro-batch each row is: split_batch() cuts it in equal parts."""
        differs = self.origins.axes.of_data if self.job.parallel.data > 1 else frozenset()
        if not self.micro_batches:
            self.origins.memory.write_whole(tokens, Origin(differs))
            return
        each = tokens.numel() * tokens.element_size() // len(self.micro_batches)
        pieces = [
            OriginPiece(number * each, (number + 1) * each, Origin(differs, marks=frozenset({name})))
            for number, name in enumerate(self.micro_batches)
        ]
        self.origins.memory.write(tokens, pieces)

    def leaves(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The tensors whose gradients autograd computes: FSDP2's are the gathered parameters."""
        found = dict(self.parameters)
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for module in model.modules():
            state = getattr(module, "_get_fsdp_state", None)
            group = state()._fsdp_param_group if state else None
            for divided in group.fsdp_params if group else ():
                found[names[id(divided.sharded_param)]] = divided._unsharded_param
        return found

    def name_gradient(self, name: str, leaf: nn.Parameter) -> None:
        parallel = self.job.parallel
        differs = set()
        if self.is_divided[name]:
            differs.add(TENSOR)
        if parallel.pipeline > 1:
            differs.add(PIPELINE)

        def note(gradient: Tensor) -> None:
            self.origins.memory.change(gradient, lambda origin: origin.of_gradient(name, frozenset(differs)))

        leaf.register_hook(note)

    def before_update(self, optimizer: Any, *_: Any) -> None:
        """When the optimizer takes its step."""
        if not self.origins.is_on:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.check_gradient(parameter.grad)

    def check_gradient(self, gradient: Tensor) -> None:
        mean = 1 / self.job.parallel.data
        for piece in self.origins.memory.read(gradient):
            for axis in sorted(piece.origin.scales):
                self.found(f"all gradients are scaled by a number that is not the same on {RANKS_ALONG[axis]}")
            for name in sorted(piece.origin.gradients):
                self.arrived.add(name)
                missing = [one for one in self.micro_batches if one not in piece.origin.marks]
                if missing:
                    self.found(f"{name}: its gradient lacks {', '.join(missing)}")
                for factor in sorted(piece.origin.factors):
                    if math.isnan(factor):
                        self.found(f"{name}: its gradient is multiplied by a number that its collective does not show")
                    elif abs(factor - mean) > MOST_FACTOR_ERROR * mean:
                        self.found(f"{name}: its gradient reaches the optimizer times {factor:g} instead of {mean:g}")
                for axis in self.copies(name):
                    if piece.origin.differs & self.origins.axes.settled_by(axis):
                        self.found(f"{name}: {MISSING[axis]}")

    def found(self, finding: str) -> None:
        if finding not in self.report.findings:
            self.report.findings.append(finding)

    def copies(self, name: str) -> Iterator[str]:
        """The axes along which other ranks have the same parameter."""
        parallel = self.job.parallel
        if parallel.data > 1:
            yield DATA
        if parallel.tensor > 1 and not self.is_divided[name]:
            yield TENSOR
        if KEYS_AND_VALUES in name and self.origins.axes.copies_of_keys > 1:
            yield KEYS
        if len(self.tied_over(name)) > 1:
            yield PIPELINE

    def tied_over(self, name: str) -> tuple[int, ...]:
        """The ranks of the stages that have a copy of a parameter; () if no other has."""
        if self.job.parallel.pipeline == 1:
            return ()
        a = self.job.architecture
        if name.endswith(WORDS):
            if a.tied:
                return self.holders["embedding"]
            return self.holders["position"] if a.cross_attention else ()
        if name.endswith(RELATIVE_POSITIONS):
            return self.holders["encoder stages" if ".encoder." in name else "decoder stages"]
        return self.holders["position"] if name.endswith(POSITIONS) else ()

    def end(self) -> None:
        """After the step."""
        self.origins.is_on = False
        for name in self.parameters:
            # ZeRO gives a rank's optimizer a part of all elements, in which a parameter may have none.
            if name not in self.arrived and not self.job.zero.stage:
                self.found(f"{name}: no gradient of it reaches the optimizer")
            done = self.origins.reductions.get(name, [])
            copies = list(self.copies(name))
            for axis in copies:
                self.check_reductions(name, axis, done)
            counted = Counter(done)
            by = tuple(
                f"{reduction} x {count}" if count > 1 else str(reduction) for reduction, count in counted.items()
            )
            self.report.settled.append(Settled(name, tuple(copies), by))
        for name, reductions in self.origins.reductions.items():
            for reduction in reductions:
                if not reduction.axis:
                    self.found(f"{name}: {reduction}")
        for name, reduction in self.origins.not_summed:
            subject = f"{name}: its gradient" if name else "a value"
            self.found(f"{subject} is combined by {reduction}, where a sum is needed")
        for name, reduction in self.origins.summed_again:
            self.found(f"{name}: summed again by {reduction}, though these ranks have the same gradient")
        if self.job.parallel.sequence_parallel:
            return
        for (source, target), origin in self.origins.sent:
            if TENSOR in origin.differs:
                self.found(f"message from rank {source} to rank {target}: it differs between tensor-parallel ranks")

    def check_reductions(self, name: str, axis: str, done: list[GradientSum]) -> None:
        """Data-parallel replicas and stages add up the gradients themselves; tensor-parallel ranks what is before."""
        if axis == TENSOR:
            return
        along = {reduction.axis for reduction in done}
        if axis == KEYS and not along & {KEYS, TENSOR}:  # these are the same ranks if there is one group of heads
            self.found(f"{name}: {MISSING[KEYS]}")
        if axis == DATA and not (DATA in along or self.origins.axes.of_data <= along):
            self.found(f"{name}: {MISSING[DATA]}")
        if axis == PIPELINE:
            expected = self.tied_over(name)
            among_stages = [reduction.ranks for reduction in done if reduction.axis == PIPELINE]
            if not among_stages:
                self.found(f"{name}: {MISSING[PIPELINE]}")
            elif expected not in among_stages:
                found = members(among_stages[0])
                self.found(f"{name}: its gradient is summed over {found}; copies are on {members(expected)}")


RANKS_ALONG = {
    "data": "all data-parallel replicas",
    "shard": "all ranks that share one copy of the states",
    "replica": "all copies of the states",
    "tensor": "all tensor-parallel ranks",
    "pipeline": "all stages",
}
MISSING = {
    DATA: "its gradient is not summed over the data-parallel replicas",
    TENSOR: "tensor-parallel ranks share it, and get different gradients",
    KEYS: "its gradient is not summed over the tensor-parallel ranks that hold the same keys and values",
    PIPELINE: "its gradient is not summed over the stages that have a copy",
}


def representatives(job: Job) -> list[int]:
    """The ranks that are executed: of each stage the first and the last, whose data and slices are others."""
    parallel = job.parallel
    of_a_stage = parallel.tensor * parallel.data
    ranks = []
    for stage in range(parallel.pipeline):
        ranks += [stage * of_a_stage, (stage + 1) * of_a_stage - 1]
    return sorted(set(ranks))
