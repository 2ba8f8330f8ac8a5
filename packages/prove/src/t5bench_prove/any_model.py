"""Anybody's model, wrapped in anybody's way: over which ranks a step sums each gradient, by what, and how often.

    proof = prove_step(
        make_model=lambda: Llama(config),
        wrap=lambda model, mesh: fully_shard(model, mesh=mesh["data"]) and model,
        make_batch=lambda: torch.randint(1000, (2, 128)),
        step=lambda model, optimizer, batch: (model(batch).loss.backward(), optimizer.step()),
        mesh={"data": 4, "tensor": 2},
    )
    print(proof)

The step is executed for one rank of PyTorch's fake process group, without arithmetic, so it takes one core and as many
ranks as one likes. It knows DDP, FSDP2, parallelize_module's DTensors, DeepSpeed's ZeRO 1 to 3, and collectives that
are called by hand.
"""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from t5bench_prove.hollow import HollowTensors
from t5bench_prove.mesh import TOGETHER, MeshAxes
from t5bench_prove.origins import GradientSum, Origin, Origins

EARLIER = "an earlier step"
WARM_UP = 1  # DDP arranges its buckets anew after the first step
LOW = {torch.bfloat16, torch.float16}
MOST_FACTOR_ERROR = 1e-3
Wrap = Callable[[nn.Module, DeviceMesh], Any]
Step = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Summed:
    """A parameter, and what its gradient went through."""

    name: str
    divided: tuple[str, ...]
    """The axes along which ranks have other slices or shards of it."""
    copies: tuple[str, ...]
    """The axes along which other ranks have a copy, or a share in one."""
    by: tuple[str, ...]
    """The collectives that added its gradient up, with how often."""
    times: tuple[float, ...]
    """By what the program's own numbers multiplied it between autograd and the optimizer."""


@dataclass
class StepProof:
    """What one step of one rank did with gradients."""

    parameters: list[Summed] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    """What is wrong, a sentence each."""
    not_followed: list[str] = field(default_factory=list)
    """What the step did that is not understood: then nothing is proved."""

    @property
    def is_proved(self) -> bool:
        return not self.findings and not self.not_followed

    def __str__(self) -> str:
        verdict = "proved" if self.is_proved else "NOT PROVED"
        lines = [f"{verdict}: {len(self.parameters)} parameters"]
        lines += [f"  {finding}" for finding in self.findings]
        lines += [f"  not followed: {what}" for what in self.not_followed]
        by_sums = Counter((one.divided, one.copies, one.by, one.times) for one in self.parameters)
        for (divided, copies, by, times), count in by_sums.items():
            where = f"divided along {', '.join(divided)}" if divided else "whole"
            numbers = ", ".join(f"{number:g}" for number in times) or "no number"
            lines.append(
                f"  {count} {where}, copies along {', '.join(copies) or 'no axis'}: {'; '.join(by) or 'no sum'}"
            )
            lines[-1] += f"; times {numbers}"
        return "\n".join(lines)


def prove_step(
    *,
    make_model: Callable[[], nn.Module],
    wrap: Wrap,
    make_batch: Callable[[], Any],
    step: Step,
    mesh: Mapping[str, int],
    samples: Collection[str] = ("data",),
    make_optimizer: Callable[[Any], Any] = lambda model: torch.optim.AdamW(model.parameters()),
    slices: Callable[[str], str] = lambda name: "",
    tied_over: Callable[[str], str] = lambda name: "",
    has_stages: str = "",
    rank: int = 0,
    scale: float | None = None,
) -> StepProof:
    """Executes one step of a rank, after a first one, and follows every gradient from autograd to the optimizer.

    wrap: gets the model and a mesh of these axes, and returns what step gets. make_batch: this rank's samples, as
    tensors anywhere in it; a list is of micro-batches, each of which must be in every gradient. step: forward pass,
    backward pass and optimizer.step(). mesh: the size of each axis. samples: the axes along which ranks read other
    samples, or other tokens of them. slices: for a parameter that is divided by hand, the axis along which; DTensors
    and DeepSpeed know. tied_over: for one that several stages of a pipeline have, the axis of the stages, which
    has_stages names. scale: by what every gradient is to be multiplied between autograd and the optimizer; None if any
    number will do that is the same for all.
    """
    with as_rank(rank, mesh):
        return Follower(mesh, rank, frozenset(samples), slices, tied_over, has_stages, scale).run(
            make_model, wrap, make_batch, step, make_optimizer
        )


@contextlib.contextmanager
def as_rank(rank: int, mesh: Mapping[str, int]) -> Iterator[None]:
    """This process is a rank of a fake process group."""
    world = 1
    for size in mesh.values():
        world *= size
    before = dict(os.environ)
    excepthook = sys.excepthook  # init_process_group puts the rank before each line of it, each time once more
    own = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in own.items()}, DS_ACCELERATOR="cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    verify = torch.nn.parallel.distributed._verify_param_shape_across_processes
    # DDP compares the shapes of parameters with those of ranks that do not exist here.
    torch.nn.parallel.distributed._verify_param_shape_across_processes = lambda *_, **__: True
    try:
        yield
    finally:
        torch.nn.parallel.distributed._verify_param_shape_across_processes = verify
        dist.destroy_process_group()
        sys.excepthook = excepthook
        os.environ.clear()
        os.environ.update(before)


@dataclass
class Follower:
    """Marks what differs between ranks, executes the step, and looks at what the optimizer gets."""

    mesh: Mapping[str, int]
    rank: int
    samples: frozenset[str]
    slices: Callable[[str], str]
    tied_over: Callable[[str], str]
    has_stages: str
    scale: float | None
    proof: StepProof = field(default_factory=StepProof)
    origins: "OfMicroBatches" = field(init=False)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    times: dict[str, set[float]] = field(default_factory=dict)
    """The numbers with which each parameter's gradient reached the optimizer."""
    micro_batches: list[str] = field(default_factory=list)
    has_own_part: bool = False
    """Whether the optimizer has a part of all elements, as ZeRO gives it, in which a parameter may have none."""

    def __post_init__(self) -> None:
        axes = MeshAxes(self.rank, self.mesh, self.samples)
        self.origins = OfMicroBatches(axes, received=Origin(self.samples))  # type: ignore[arg-type]
        self.origins.micro_batches = self.micro_batches

    def run(
        self,
        make_model: Callable[[], nn.Module],
        wrap: Wrap,
        make_batch: Callable[[], Any],
        step: Step,
        make_optimizer: Callable[[Any], Any],
    ) -> StepProof:
        with HollowTensors(), self.origins, self.looking_at_updates():
            device_mesh = init_device_mesh("cpu", tuple(self.mesh.values()), mesh_dim_names=tuple(self.mesh))
            model = make_model()
            wrapped = wrap(model, device_mesh)
            if isinstance(wrapped, DistributedDataParallel):
                wrapped.register_comm_hook(wrapped.process_group, reduce_bucket)
            optimizer = make_optimizer(wrapped)
            for _ in range(WARM_UP):
                step(wrapped, optimizer, make_batch())
            self.begin(wrapped if isinstance(wrapped, nn.Module) else model)
            batch = make_batch()
            self.mark(batch)
            self.origins.is_on = True
            step(wrapped, optimizer, batch)
            self.origins.is_on = False
        self.end()
        return self.proof

    # ---- before the step ---------------------------------------------------------------------------------------------

    def begin(self, model: nn.Module) -> None:
        self.parameters = {plain(name): one for name, one in model.named_parameters() if one.requires_grad}
        for name, parameter in self.parameters.items():
            own = frozenset(self.divided_by_model(name, parameter))
            if own and parameter.numel():
                self.origins.memory.write_whole(parameter, Origin(own))
        for name, leaf in self.leaves(model).items():
            self.name_gradient(name, leaf)

    def mark(self, batch: Any) -> None:
        """Each micro-batch, so that its part in a gradient is known, and gradients that earlier steps have left."""
        micro_batches = batch if isinstance(batch, list) else [batch]
        for number, micro_batch in enumerate(micro_batches, 1):
            name = f"micro-batch {number}"
            self.micro_batches.append(name)
            for tensor in tensors_in(micro_batch):
                self.origins.memory.write_whole(tensor, Origin(self.samples, marks=frozenset({name})))
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                earlier = Origin(marks=frozenset({EARLIER}))
                self.origins.memory.change(parameter.grad, lambda origin, earlier=earlier: origin.with_(earlier))

    def leaves(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The tensors whose gradients autograd computes: FSDP2's are the gathered parameters."""
        found = dict(self.parameters)
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for module in model.modules():
            state = getattr(module, "_get_fsdp_state", None)
            groups = []
            if state is not None:
                groups = getattr(state(), "_fsdp_param_groups", None) or [state()._fsdp_param_group]
            for group in groups:
                for divided in group.fsdp_params if group else ():
                    name = names.get(id(divided.sharded_param))
                    if name:
                        found[name] = divided._unsharded_param
        return found

    def name_gradient(self, name: str, leaf: nn.Parameter) -> None:
        differs = set(self.divided_by_model(name, self.parameters[name]))
        if self.has_stages:
            differs.add(self.has_stages)
        axes = frozenset(differs)
        memory = self.origins.memory
        leaf.register_hook(lambda gradient: memory.change(gradient, lambda origin: origin.of_gradient(name, axes)))

    def divided(self, name: str, parameter: nn.Parameter) -> tuple[str, ...]:
        """The axes along which other ranks have other slices or shards."""
        by_hand = self.slices(name)
        found = [by_hand] if by_hand else []
        for axis, placement in self.placements(parameter):
            if placement.is_shard():
                found += axis.split(TOGETHER)
        return tuple(found)

    def placements(self, tensor: Tensor) -> Iterator[tuple[str, Any]]:
        """The axes of a DTensor, and what it is along each; nothing of other tensors."""
        for number, placement in enumerate(getattr(tensor, "placements", ())):
            axis = self.origins.axes.name(dist.get_process_group_ranks(tensor.device_mesh.get_group(number)))
            if axis:
                yield axis, placement

    def divided_by_model(self, name: str, parameter: nn.Parameter) -> tuple[str, ...]:
        """Of these, those along which ranks compute with their slices; FSDP2 gathers its shards before."""
        return tuple(axis for axis in self.divided(name, parameter) if axis not in self.samples)

    # ---- when the optimizer takes its step ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def looking_at_updates(self) -> Iterator[None]:
        handle = register_optimizer_step_pre_hook(self.before_update)
        try:
            yield
        finally:
            handle.remove()

    def before_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self.origins.is_on:
            known = {id(parameter) for parameter in self.parameters.values()}
            for group in optimizer.param_groups:
                self.has_own_part |= any(id(parameter) not in known for parameter in group["params"])
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.look_at(parameter.grad)

    def look_at(self, gradient: Tensor) -> None:
        for axis, placement in self.placements(gradient):
            if placement.is_partial():
                self.found(f"a gradient reaches the optimizer as a part of its sum along {axis}")
        for piece in self.origins.memory.read(gradient):
            for axis in sorted(piece.origin.scales):
                self.found(f"all gradients are scaled by a number that is not the same along {axis}")
            for name in sorted(piece.origin.gradients):
                self.times.setdefault(name, set()).update(piece.origin.factors)
                missing = [one for one in self.micro_batches if one not in piece.origin.marks]
                if missing:
                    self.found(f"{name}: its gradient lacks {', '.join(missing)}")
                if EARLIER in piece.origin.marks:
                    self.found(f"{name}: its gradient has that of an earlier step in it")
                for axis in self.copies(name):
                    if axis in piece.origin.differs:
                        self.found(f"{name}: ranks along {axis} have a copy, and get different gradients")

    def copies(self, name: str) -> tuple[str, ...]:
        """The axes along which other ranks have a copy, or share one with this rank."""
        apart = {self.has_stages} - {self.tied_over(name)}
        divided = self.divided_by_model(name, self.parameters[name])
        return tuple(axis for axis, size in self.mesh.items() if size > 1 and axis not in {*divided, *apart})

    def found(self, finding: str) -> None:
        if finding not in self.proof.findings:
            self.proof.findings.append(finding)

    # ---- after the step ----------------------------------------------------------------------------------------------

    def end(self) -> None:
        for name, parameter in self.parameters.items():
            done = self.origins.reductions.get(name, [])
            self.judge(name, parameter, done)
            self.judge_update(name, parameter)
            counted = Counter(done)
            by = tuple(f"{one} x {count}" if count > 1 else str(one) for one, count in counted.items())
            times = tuple(sorted(self.times.get(name, ())))
            self.proof.parameters.append(Summed(name, self.divided(name, parameter), self.copies(name), by, times))
        for name, reduction in self.origins.not_summed:
            subject = f"{name}: its gradient" if name else "a value"
            self.found(f"{subject} is combined by {reduction}, where a sum is needed")
        for name, reduction in self.origins.summed_again:
            self.found(f"{name}: summed again by {reduction}, though these ranks have the same gradient")
        for reduction in self.origins.values_again:
            self.found(f"a value is summed again by {reduction}, though these ranks have the same")
        if self.has_own_part and not self.times:
            self.found("no gradient of any parameter reaches the optimizer")
        self.judge_factors()
        self.proof.not_followed = sorted(self.origins.not_followed)

    def judge(self, name: str, parameter: nn.Parameter, done: list[GradientSum]) -> None:
        if name not in self.times and not self.has_own_part:
            self.found(f"{name}: no gradient of it reaches the optimizer")
        along = {axis for reduction in done for axis in reduction.axis.split(TOGETHER)}
        needed = [axis for axis in self.copies(name) if axis in self.samples]
        needed += [axis for axis in (self.tied_over(name),) if axis]
        for axis in needed:
            if axis not in along:
                self.found(f"{name}: its gradient is not summed along {axis}")
        for reduction in done:
            if not reduction.axis:
                self.found(f"{name}: {reduction}")
            if reduction.dtype in LOW and parameter.dtype not in LOW:
                kind = str(reduction.dtype).removeprefix("torch.")
                self.found(f"{name}: its gradient is summed in {kind}, though the parameter is not")

    def judge_update(self, name: str, parameter: nn.Parameter) -> None:
        """Whether the step has written values of which gradients are a part into all of it."""
        pieces = self.origins.memory.read(parameter)
        is_written = bool(pieces) and all(one.origin.gradients for one in pieces)
        if name in self.times and not self.has_own_part and not is_written:
            self.found(f"{name}: the optimizer has its gradient, and the step leaves all or some of it as it was")

    def judge_factors(self) -> None:
        """One number for all: two parameters with other ones get gradients of other losses."""
        expected = self.scale if self.scale is not None else usual(self.times)
        for name, numbers in self.times.items():
            for number in sorted(numbers):
                if not abs(number - expected) <= MOST_FACTOR_ERROR * abs(expected):
                    self.found(f"{name}: its gradient reaches the optimizer times {number:g} instead of {expected:g}")


@dataclass
class OfMicroBatches(Origins):
    """Origins in which messages between stages belong to one micro-batch after another, each way."""

    micro_batches: list[str] = field(default_factory=list)
    arrived: int = 0

    def next_received(self) -> Origin:
        if not self.micro_batches:
            return self.received
        name = self.micro_batches[self.arrived % len(self.micro_batches)]
        self.arrived += 1
        return self.received._replace(marks=frozenset({name}))


def usual(times: Mapping[str, set[float]]) -> float:
    """The number that most parameters have."""
    counted = Counter(number for numbers in times.values() for number in numbers)
    return counted.most_common(1)[0][0] if counted else 1.0


def plain(name: str) -> str:
    """A parameter's name in the model without its wrappers."""
    parts = [part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module")]
    while parts[0] == "module" and len(parts) > 1:
        parts = parts[1:]
    return ".".join(parts)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """In lists, tuples, dictionaries and dataclasses."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):
            for one in fields(leaf):
                yield from tensors_in(getattr(leaf, one.name))


def reduce_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP does itself: the fake group's own answer holds no tensor, which DDP would not accept."""
    dist.all_reduce(bucket.buffer().div_(group.size()), group=group)
    answer: torch.futures.Future[Tensor] = torch.futures.Future()
    answer.set_result(bucket.buffer())
    return answer
