"""What every value of an executed step depends on: which ranks have another one, and whose gradient it is.

A step is executed without arithmetic (execution.py), but each of its operators is seen. A value that is computed from
this rank's tokens differs between data-parallel ranks, one from a slice of a weight between tensor-parallel ranks, a
gradient of one stage's copy of a tied embedding between stages. An all-reduce over a group makes its values equal
there. So at the optimizer's step it is known whether a parameter that ranks share gets the same gradient on all of
them, which collectives made it so, how they combined it (sum, average, maximum), and by which numbers the program
multiplied it on the way. Numbers that tensors hold are not known, so a clipping factor, for one, is left out.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from t5bench.costmodel.layout import coordinates
from t5bench_prove.hollow import is_wrapped

DATA = "data"
TENSOR = "tensor"
PIPELINE = "pipeline"
KEYS = "keys"  # the tensor-parallel ranks that hold the same keys and values
SHARD = "shard"
REPLICA = "replica"
REDUCES_IN_PLACE = {"allreduce_": "all-reduce", "allreduce_coalesced_": "all-reduce", "reduce_": "reduce"}
SCATTERS = {"_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "reduce_scatter_"}
GATHERS = {"_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"}
SILENT = {"barrier", "monitored_barrier_", "broadcast_"}  # after which no value differs that was equal
FUNCTIONAL = "_c10d_functional"
POINTWISE = {"add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_"}
COPIES = {"copy_", "clone", "_to_copy", "contiguous"}
SUM = "SUM"
AVERAGE = "AVG"
SCALED_SUM = "PREMUL_SUM"
"""A sum of what each rank multiplies by a number that its operator does not show."""
SUMS = {SUM, AVERAGE, SCALED_SUM}
MAXIMA = {"amax", "max"}


class Term(NamedTuple):
    """A part of a gradient: what autograd gave in one backward pass."""

    factor: float
    """What it has been multiplied by since then; NaN if that was not seen."""
    differs: frozenset[str] = frozenset()
    """The axes along which ranks have another one."""


class Origin(NamedTuple):
    """Of a value."""

    differs: frozenset[str] = frozenset()
    """The axes of the layout along which ranks have other values."""
    gradients: frozenset[str] = frozenset()
    """The parameters whose gradients are in it."""
    terms: frozenset[Term] = frozenset()
    """The parts of these gradients, each of which may have been multiplied and summed otherwise."""
    scales: frozenset[str] = frozenset()
    """The axes along which ranks have multiplied these gradients by another number, such as a norm's."""
    parts: frozenset[str] = frozenset()
    """The axes along which ranks have other elements of these gradients: a number made of them differs there."""
    marks: frozenset[str] = frozenset()
    """What else it was computed from, by names that whoever follows a step has given."""

    def with_(self, other: "Origin") -> "Origin":
        return Origin(
            self.differs | other.differs,
            self.gradients | other.gradients,
            self.terms | other.terms,
            self.scales | other.scales,
            self.parts | other.parts,
            self.marks | other.marks,
        )

    def without(self, axes: frozenset[str]) -> "Origin":
        return self._replace(differs=self.differs - axes, scales=self.scales - axes)

    def times(self, number: float) -> "Origin":
        return self._replace(terms=frozenset(Term(term.factor * number, term.differs) for term in self.terms))

    def of_gradient(self, name: str, differs: frozenset[str]) -> "Origin":
        """What autograd gives a parameter, of which ranks along these axes have another one besides."""
        differs = self.differs | differs
        return self.with_(Origin(differs, frozenset({name}), frozenset({Term(1.0, differs)})))

    @property
    def factors(self) -> frozenset[float]:
        """What these gradients have been multiplied by since autograd computed them; NaN if that was not seen."""
        return frozenset(term.factor for term in self.terms)


NOTHING = Origin()


class OriginPiece(NamedTuple):
    """A part of a tensor's memory."""

    start: int
    """In bytes."""
    end: int
    origin: Origin


@dataclass(frozen=True)
class GradientSum:
    """A collective that adds up gradients."""

    kind: str
    ranks: tuple[int, ...]
    axis: str
    """"" for ranks that are no group of the layout."""
    bytes: int
    operation: str = SUM
    """As PyTorch calls it."""
    dtype: torch.dtype = torch.float32
    """In which it adds."""

    def __str__(self) -> str:
        kind = self.kind if self.operation == SUM else f"{self.kind} ({self.operation})"
        return f"{kind} of {self.bytes:,} bytes over {self.axis or 'no group of the layout'} ({members(self.ranks)})"


def members(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"{len(ranks)} ranks: {shown}"


@dataclass
class Axes:
    """Names the groups of a layout."""

    rank: int
    tensor: int
    data: int
    shards: int = 0
    """FSDP2: how many ranks share one copy of the states; 0 if all do."""
    copies_of_keys: int = 1
    """How many tensor-parallel ranks hold the same keys and values."""

    def name(self, ranks: Sequence[int]) -> str:
        """The axis that a group goes along; "" for another set of ranks."""
        places = [coordinates(rank, self.tensor, self.data) for rank in ranks]
        moving = [len({place[axis] for place in places}) for axis in range(3)]
        if sum(count > 1 for count in moving) != 1:
            return ""
        if moving[2] == self.tensor and self.tensor > 1:
            return TENSOR
        if moving[2] == self.copies_of_keys and self.copies_of_keys > 1:
            return KEYS
        if moving[0] > 1:
            return PIPELINE
        if moving[1] == self.data:
            return DATA
        numbers = sorted(place.dp for place in places)
        if not self.shards:
            return ""
        first = numbers[0]
        if numbers == list(range(first, first + self.shards)) and first % self.shards == 0:
            return SHARD
        return REPLICA if numbers == list(range(first % self.shards, self.data, self.shards)) else ""

    def settled_by(self, axis: str) -> frozenset[str]:
        """The axes along which values are equal after a reduction along this one."""
        if axis == KEYS:
            return frozenset({TENSOR})
        return frozenset({SHARD, REPLICA}) if axis == DATA and self.shards else frozenset({axis} - {""})

    def divides_tokens(self, axis: str) -> bool:
        """Whether a part that is scattered along this axis is of other tokens than the other ranks'."""
        return axis == TENSOR

    @property
    def of_data(self) -> frozenset[str]:
        """The axes along which ranks read other samples."""
        return frozenset({SHARD, REPLICA} if self.shards and self.shards < self.data else {DATA})


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor that several divide."""
    return getattr(tensor, "_local_tensor", tensor)


class OriginMemory:
    """The origins of everything in memory, by storage and byte."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[OriginPiece]] = {}
        self.kept: dict[int, torch.UntypedStorage] = {}
        """So that no other storage gets the number of one that was freed."""

    @staticmethod
    def extent(tensor: Tensor) -> tuple[int, int, int]:
        """A tensor's storage, and its first byte and the one behind its last. Between these may be gaps."""
        tensor = local(tensor)
        storage = tensor.untyped_storage()._cdata
        size = tensor.element_size()
        start = tensor.storage_offset() * size
        if tensor.numel() == 0:
            return storage, start, start
        last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return storage, start, start + (last + 1) * size

    def read(self, tensor: Tensor) -> list[OriginPiece]:
        """A tensor's pieces with origins, in bytes from its own start."""
        storage, start, end = self.extent(tensor)
        found = []
        for piece in self.pieces.get(storage, ()):
            if piece.start < end and piece.end > start:
                found.append(OriginPiece(max(piece.start, start) - start, min(piece.end, end) - start, piece.origin))
        return found

    def origin(self, tensor: Tensor) -> Origin:
        found = NOTHING
        for piece in self.read(tensor):
            found = found.with_(piece.origin)
        return found

    def write(self, tensor: Tensor, pieces: Sequence[OriginPiece]) -> None:
        """pieces: in bytes from the tensor's start. What a tensor with gaps leaves between them is kept, too."""
        storage, start, end = self.extent(tensor)
        if start == end:
            return
        kept = []
        before = self.pieces.get(storage, [])
        has_gaps = (end - start) != tensor.numel() * tensor.element_size()
        for piece in before:
            if piece.end <= start or piece.start >= end:
                kept.append(piece)
                continue
            if has_gaps:
                kept.append(piece)
                continue
            if piece.start < start:
                kept.append(OriginPiece(piece.start, start, piece.origin))
            if piece.end > end:
                kept.append(OriginPiece(end, piece.end, piece.origin))
        self.kept[storage] = local(tensor).untyped_storage()
        written = [OriginPiece(piece.start + start, min(piece.end + start, end), piece.origin) for piece in pieces]
        self.pieces[storage] = sorted(
            kept + [piece for piece in written if piece.start < piece.end and piece.origin != NOTHING]
        )

    def write_whole(self, tensor: Tensor, origin: Origin) -> None:
        _, start, end = self.extent(tensor)
        self.write(tensor, [OriginPiece(0, end - start, origin)])

    def change(self, tensor: Tensor, function: Callable[[Origin], Origin]) -> None:
        """Changes the origin of each of a tensor's pieces, and of what lies between them."""
        self.write(
            tensor, [OriginPiece(piece.start, piece.end, function(piece.origin)) for piece in self.covered(tensor)]
        )

    def covered(self, tensor: Tensor) -> list[OriginPiece]:
        """A tensor's pieces, with those that have no origin."""
        _, start, end = self.extent(tensor)
        return covered(self.read(tensor), end - start)


def covered(pieces: Sequence[OriginPiece], size: int) -> list[OriginPiece]:
    """Pieces that cover all bytes and overlap nowhere."""
    edges = sorted({0, size, *(edge for piece in pieces for edge in (piece.start, piece.end))})
    found: list[OriginPiece] = []
    for start, end in pairwise(edges):
        origin = NOTHING
        for piece in pieces:
            if piece.start < end and piece.end > start:
                origin = origin.with_(piece.origin)
        if found and found[-1].origin == origin:
            found[-1] = OriginPiece(found[-1].start, end, origin)
        else:
            found.append(OriginPiece(start, end, origin))
    return found


@dataclass
class Origins(TorchDispatchMode):
    """Follows the origins of values through the operators and collectives of a step."""

    axes: Axes
    memory: OriginMemory = field(default_factory=OriginMemory)
    reductions: dict[str, list[GradientSum]] = field(default_factory=dict)
    """Of each parameter's gradient."""
    summed_again: list[tuple[str, GradientSum]] = field(default_factory=list)
    """Parameters whose gradients were equal on the ranks that added them up."""
    not_summed: list[tuple[str, GradientSum]] = field(default_factory=list)
    """Reductions that form no sum where one is needed, with the parameter whose gradient is in them, or ""."""
    maxima: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    """Of largest elements, whose maximum over ranks is right."""
    is_on: bool = False
    """Whether operators are followed."""
    received: Origin = NOTHING
    """Of what other stages send."""
    sent: list[tuple[tuple[int, int], Origin]] = field(default_factory=list)
    """Messages to other stages: from where to where, and what of."""
    values_again: list[GradientSum] = field(default_factory=list)
    """Sums of activations, or of their gradients, that were equal on the ranks that added them up."""
    not_followed: set[str] = field(default_factory=set)
    """Collectives of several ranks whose effect is not known."""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_wrapped(types):
            return NotImplemented
        if not self.is_on:
            return function(*args, **kwargs)
        name = function.__name__.partition(".")[0]
        if function.namespace == "c10d":
            return self.collective(function, name, args, kwargs)
        if function.namespace == FUNCTIONAL:
            return self.functional(function, name, args, kwargs)
        before = self.inputs(function, name, args, kwargs)
        result = function(*args, **kwargs)
        self.operator(function, name, args, kwargs, result, before)
        return result

    # ---- operators ---------------------------------------------------------------------------------------------------

    def inputs(self, function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """What an operator reads, before it writes anything: tensors or lists of them, with their pieces."""
        is_overwritten = set()
        if name in ("copy_", "_foreach_copy_", "zero_", "_foreach_zero_", "fill_", "normal_", "uniform_", "bernoulli_"):
            is_overwritten.add(0)
        found = []
        for position, value in enumerate(args):
            if position not in is_overwritten:
                found.append(self.read(value))
        for key, value in kwargs.items():
            if key != "out":
                found.append(self.read(value))
        return multiplied(name, args, kwargs, [value for value in found if value is not None])

    def read(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Read(value, self.memory.read(value))
        if isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
            return [Read(each, self.memory.read(each)) for each in value if isinstance(each, Tensor)]
        return None

    def operator(
        self,
        function: Any,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        inputs: Sequence[Any],
    ) -> None:
        schema = function._schema
        written = self.written(schema, args, kwargs)
        aliases = [value.alias_info for value in schema.returns]
        if not written and any(aliases):
            return  # a view
        targets = written or [result]
        if name in MAXIMA:
            for tensor in tensors_of(result):
                storage = tensor.untyped_storage()
                self.maxima[storage._cdata] = storage
        for target in targets:
            self.write(name, target, inputs, args, kwargs)

    @staticmethod
    def written(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        found = []
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                if value is not None:
                    found.append(value)
        return found

    def write(
        self, name: str, target: Any, inputs: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if isinstance(target, list | tuple):
            tensors = [each for each in target if isinstance(each, Tensor)]
            if name == "split_with_sizes_copy":
                self.split(tensors, inputs, args)
            elif name == "all_gather_copy_in":
                reads = inputs[0]
                self.memory.write(tensors[0], joined(reads, [read.size for read in reads]))
            elif name.startswith(("_foreach_", "_fused_", "_amp_foreach")):
                for number, tensor in enumerate(tensors):
                    self.write_one(name, tensor, [each for value in inputs for each in one_of(value, number)])
            else:
                for tensor in tensors:
                    self.write_one(name, tensor, list(flat(inputs)))
            return
        if not isinstance(target, Tensor):
            return
        reads = list(flat(inputs))
        if name == "cat" and (args[1] if len(args) > 1 else 0) == 0 and contiguous(reads):
            self.memory.write(target, joined(reads, [read.size for read in reads]))
        elif name == "chunk_cat":
            self.chunk_cat(target, reads, kwargs["num_chunks"] if "num_chunks" in kwargs else args[2])
        else:
            self.write_one(name, target, reads)

    def write_one(self, name: str, target: Tensor, reads: Sequence["Read"]) -> None:
        if target.numel() == 0:
            return
        large = [read for read in reads if read.tensor.numel() > 1]
        if name in COPIES and len(reads) == 1 and reads[0].fits(target):
            scale = target.element_size() / reads[0].tensor.element_size()
            pieces = [OriginPiece(int(p.start * scale), int(p.end * scale), p.origin) for p in reads[0].pieces]
            self.memory.write(target, pieces)
            return
        small = NOTHING
        for read in reads:
            if read.tensor.numel() == 1:
                small = small.with_(read.origin)
        if any(read.origin.gradients for read in large):
            small = Origin(scales=small.differs | small.scales)
        elif target.numel() > 1:
            small = Origin(small.differs, marks=small.marks)  # a scale has no gradient in it
        if target.numel() == 1:
            for read in large:
                small = small.with_(Origin(read.origin.parts))
        if (
            large
            and all(read.fits(target) for read in large)
            and (target.dim() == 1 or len(large) == 1 or name in POINTWISE)
        ):
            pieces = []
            for read in large:
                scale = target.element_size() / read.tensor.element_size()
                pieces += [OriginPiece(int(p.start * scale), int(p.end * scale), p.origin) for p in read.pieces]
            size = target.numel() * target.element_size()
            merged = [OriginPiece(piece.start, piece.end, piece.origin.with_(small)) for piece in covered(pieces, size)]
            self.memory.write(target, merged)
            return
        origin = small
        for read in large:
            origin = origin.with_(read.origin)
        self.memory.write_whole(target, origin)

    def split(self, targets: Sequence[Tensor], inputs: Sequence[Any], args: Sequence[Any]) -> None:
        """FSDP2 divides what it gathered, [ranks, elements], into parameters: its first row says what each has."""
        (whole,) = list(flat(inputs))[:1]
        size = whole.tensor.element_size()
        edges = [0, *accumulate(args[1])]
        for target, (start, end) in zip(targets, pairwise(edges), strict=True):
            origin = NOTHING
            for piece in whole.pieces:
                if piece.start < end * size and piece.end > start * size:
                    origin = origin.with_(piece.origin)
            self.memory.write_whole(target, origin)

    def chunk_cat(self, target: Tensor, reads: Sequence["Read"], ranks: int) -> None:
        """FSDP2 lays gradients side by side, [ranks, elements]: the first row has a part of each."""
        size = target.element_size()
        rows = []
        for read in reads:
            shape = read.tensor.shape
            inner = read.tensor.numel() // shape[0]
            rows.append(-(-shape[0] // ranks) * inner * size)
        pieces = []
        start = 0
        for read, length in zip(reads, rows, strict=True):
            pieces.append(OriginPiece(start, start + length, read.origin))
            start += length
        self.memory.write(target, pieces)

    # ---- collectives -------------------------------------------------------------------------------------------------

    def collective(self, function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        group = next((value for value in args if isinstance(value, torch.ScriptObject)), None)
        if group is None:
            return function(*args, **kwargs)
        group_name = dist.ProcessGroup.unbox(group).group_name
        ranks = tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(group_name)))
        if len(ranks) > 1:
            self.among(name, args, ranks, operation_of(args))
        elif name in SCATTERS | GATHERS:
            for output, given in zip(tensors_of(args[0]), tensors_of(args[1]), strict=False):
                self.memory.write(output, self.memory.read(given))
        return function(*args, **kwargs)

    def functional(self, function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A collective that returns a new tensor, as DTensors call them."""
        names = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
        if not names:
            return function(*args, **kwargs)  # waits for tensors, and returns them
        group_name = names[-1]
        ranks = tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(group_name)))
        result = function(*args, **kwargs)
        outputs, given = tensors_of(result), tensors_of(args[0])
        operation = args[1].upper() if len(args) > 1 and isinstance(args[1], str) else SUM
        axis = self.axes.name(ranks) if len(ranks) > 1 else ""
        axes = self.axes.settled_by(axis) if axis else frozenset()
        for output, tensor in zip(outputs, given, strict=True):
            if len(ranks) == 1:
                self.memory.write(output, self.memory.read(tensor))
            elif name.startswith("all_reduce"):
                self.reduced("all-reduce", tensor, ranks, axis, operation)
                self.memory.write_whole(output, combined(self.memory.origin(tensor), axes, operation, ranks))
            elif name.startswith("all_gather_into_tensor"):
                self.gather(output, tensor, axis)
            elif name.startswith("reduce_scatter_tensor"):
                self.reduced("reduce-scatter", tensor, ranks, axis, operation)
                self.scatter(output, tensor, axis, operation, ranks)
            else:
                self.not_followed.add(f"{name} among {members(ranks)}")
                self.memory.write_whole(output, self.memory.origin(tensor))
        return result

    def among(self, name: str, args: Sequence[Any], ranks: tuple[int, ...], operation: str) -> None:
        """What a collective of several ranks does to the origins."""
        axis = self.axes.name(ranks)

        def settle(origin: Origin) -> Origin:
            return combined(origin, self.axes.settled_by(axis), operation, ranks)

        if name == "recv_":
            for tensor in tensors_of(args[0]):
                self.memory.write_whole(tensor, self.next_received())
        elif name == "send":
            for tensor in tensors_of(args[0]):
                self.sent.append(((self.axes.rank, ranks[args[2]]), self.memory.origin(tensor)))
        elif name in REDUCES_IN_PLACE:
            for tensor in tensors_of(args[0]):
                self.reduced(REDUCES_IN_PLACE[name], tensor, ranks, axis, operation)
                self.memory.change(tensor, settle)
        elif name in SCATTERS | GATHERS:
            for output, given in zip(tensors_of(args[0]), tensors_of(args[1]), strict=False):
                if name in GATHERS:
                    self.gather(output, given, axis)
                else:
                    self.reduced("reduce-scatter", given, ranks, axis, operation)
                    self.scatter(output, given, axis, operation, ranks)
        elif name not in SILENT:
            self.not_followed.add(f"{name.rstrip('_')} among {members(ranks)}")

    def next_received(self) -> Origin:
        """What of a message has that another stage sends."""
        return self.received

    def reduced(self, kind: str, tensor: Tensor, ranks: tuple[int, ...], axis: str, operation: str) -> None:
        """Notes which gradients are added up, those that are the same on all these ranks, and what is no sum."""
        size = tensor.numel() * tensor.element_size()
        reduction = GradientSum(kind, ranks, axis, size, operation, tensor.dtype)
        axes = self.axes.settled_by(axis)
        pieces = self.memory.covered(tensor)
        has_gradients = any(piece.origin.gradients for piece in pieces) and tensor.numel() > 1
        is_largest = operation == "MAX" and local(tensor).untyped_storage()._cdata in self.maxima
        if not has_gradients:
            if operation != SUM and tensor.is_floating_point() and not is_largest:
                self.not_summed.append(("", reduction))
            if is_shared(pieces, axes) and operation == SUM and tensor.is_floating_point() and tensor.numel() > 1:
                self.values_again.append(reduction)
            return  # activations, or a norm
        for piece in pieces:
            for name in piece.origin.gradients:
                if operation not in SUMS:
                    self.not_summed.append((name, reduction))
                self.reductions.setdefault(name, []).append(reduction)
                if axes and not axes & piece.origin.differs and operation != AVERAGE:
                    self.summed_again.append((name, reduction))

    def scatter(self, output: Tensor, given: Tensor, axis: str, operation: str, ranks: Sequence[int]) -> None:
        """Between tensor-parallel ranks the parts are of other tokens, so they differ; elsewhere of the same sum."""
        pieces = self.memory.covered(given)
        axes = self.axes.settled_by(axis)
        settled = [
            OriginPiece(piece.start, piece.end, combined(piece.origin, axes, operation, ranks)) for piece in pieces
        ]
        has_gradients = any(piece.origin.gradients for piece in pieces)
        if has_gradients:
            apart = Origin(parts=axes)
            settled = [OriginPiece(piece.start, piece.end, piece.origin.with_(apart)) for piece in settled]
        is_of_tokens = self.axes.divides_tokens(axis) and not has_gradients
        if is_of_tokens:
            other = Origin(axes)
            settled = [OriginPiece(piece.start, piece.end, piece.origin.with_(other)) for piece in settled]
        size = output.numel() * output.element_size()
        if is_of_tokens or given.numel() == 0:
            whole = NOTHING
            for piece in settled:
                whole = whole.with_(piece.origin)
            self.memory.write(output, [OriginPiece(0, size, whole)])
        else:
            self.memory.write(output, [piece for piece in settled if piece.start < size])

    def gather(self, output: Tensor, given: Tensor, axis: str) -> None:
        """All ranks' parts are like this rank's; the first and this rank's own are noted."""
        axes = self.axes.settled_by(axis)
        size = given.numel() * given.element_size()
        pieces = []
        for piece in self.memory.covered(given):
            whole = piece.origin.without(axes)
            pieces.append(OriginPiece(piece.start, piece.end, whole._replace(parts=whole.parts - axes)))
        _, start, end = self.memory.extent(output)
        origin = NOTHING
        for piece in pieces:
            origin = origin.with_(piece.origin)
        behind = [OriginPiece(size, end - start, origin)] if end - start > size else []
        self.memory.write(output, [*pieces, *behind])


def is_shared(pieces: Sequence[OriginPiece], axes: frozenset[str]) -> bool:
    """Whether a value comes from samples and is the same on all ranks along these axes."""
    origins = [piece.origin for piece in pieces]
    return bool(axes) and any(one.marks for one in origins) and not any(axes & one.differs for one in origins)


class Read(NamedTuple):
    """A tensor that an operator reads."""

    tensor: Tensor
    pieces: list[OriginPiece]

    @property
    def origin(self) -> Origin:
        found = NOTHING
        for piece in self.pieces:
            found = found.with_(piece.origin)
        return found

    @property
    def size(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def fits(self, target: Tensor) -> bool:
        """Whether each byte of this tensor stands for the one at the same place of the target."""
        same = self.tensor.numel() == target.numel()
        return same and self.tensor.is_contiguous() and target.is_contiguous()

    def times(self, number: float) -> "Read":
        return Read(
            self.tensor, [OriginPiece(piece.start, piece.end, piece.origin.times(number)) for piece in self.pieces]
        )


def operation_of(args: Sequence[Any]) -> str:
    """How a collective combines what the ranks give, in PyTorch's words; SUM for one that combines nothing."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and value._type().qualified_name().endswith(".ReduceOp"):
            return dist.ReduceOp.RedOpType(value.op()).name
    return SUM


def combined(origin: Origin, axes: frozenset[str], operation: str, ranks: Sequence[int]) -> Origin:
    """What a reduction over the ranks along these axes makes of a value; () for ranks that are no group of the layout.

    A sum counts a term once for each rank where all have the same one, and a mean leaves that one as it is.
    """
    terms = set()
    for term in origin.terms:
        is_same = bool(axes) and not axes & term.differs
        times = 1.0
        if operation == SCALED_SUM:
            times = math.nan
        elif operation == AVERAGE and not is_same:
            times = 1 / len(ranks)
        elif operation == SUM and is_same:
            times = float(len(ranks))
        terms.add(Term(term.factor * times, term.differs - axes))
    return origin.without(axes)._replace(terms=frozenset(terms))


def multiplied(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Any]) -> list[Any]:
    """An operator's inputs times the Python numbers that it multiplies them by."""
    operator = name.removeprefix("_foreach_").removesuffix("_")
    numbers = [value for value in args if isinstance(value, int | float)]
    last = args[-1] if args else None
    if operator in ("mul", "div") and isinstance(last, list | tuple) and all(isinstance(n, int | float) for n in last):
        return [[scaled(operator, read, number) for read, number in zip(inputs[0], last, strict=True)], *inputs[1:]]
    if operator in ("mul", "div") and len(numbers) == 1:
        return [scaled(operator, value, numbers[0]) for value in inputs]
    if operator == "neg":
        return [scaled("mul", value, -1) for value in inputs]
    if operator in ("add", "sub") and len(inputs) > 1:
        sign = -1 if operator == "sub" else 1
        alpha = kwargs.get("alpha", numbers[0] if numbers else 1)
        return [inputs[0], scaled("mul", inputs[1], sign * alpha), *inputs[2:]]
    return list(inputs)


def scaled(operator: str, value: Any, number: float) -> Any:
    """A read tensor, or a list of them, times or divided by a number."""
    times = float(number)
    if operator == "div":
        times = 1 / times if times else math.nan
    return value.times(times) if isinstance(value, Read) else [read.times(times) for read in value]


def one_of(value: Any, number: int) -> Iterator[Read]:
    """The tensor of that number of a list; a single tensor belongs to all."""
    if isinstance(value, Read):
        yield value
    elif number < len(value):
        yield value[number]


def flat(inputs: Sequence[Any]) -> Iterator[Read]:
    for value in inputs:
        if isinstance(value, Read):
            yield value
        else:
            yield from value


def contiguous(reads: Sequence[Read]) -> bool:
    return all(read.tensor.is_contiguous() for read in reads)


def joined(reads: Sequence[Read], sizes: Sequence[int]) -> list[OriginPiece]:
    """The pieces of tensors that lie one behind another."""
    found = []
    start = 0
    for read, size in zip(reads, sizes, strict=True):
        found += [OriginPiece(piece.start + start, piece.end + start, piece.origin) for piece in read.pieces]
        start += size
    return found


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
