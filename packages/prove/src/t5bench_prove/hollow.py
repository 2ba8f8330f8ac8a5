"""Runs PyTorch code without doing its arithmetic: tensors have shapes and memory, but nobody writes their numbers.

Memory that is never written is never taken from the machine, so a rank of any model runs in a few hundred MB. Unlike
fake tensors these have storage, which DDP's reducer and DeepSpeed's partitions need.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

ATEN = torch.ops.aten
# Operators that return or change a tensor's storage, though their schemas do not say so.
REAL = {ATEN._unsafe_view.default, ATEN.lift_fresh.default, ATEN.set_.source_Storage}
REAL |= {ATEN.set_.source_Storage_storage_offset, ATEN.set_.source_Tensor, ATEN.set_.default, ATEN.resize_.default}
# FSDP2's, which copies what a rank gives to an all-gather to its place in the whole, and returns both.
COPY_IN = "fsdp.all_gather_copy_in.default"
SMALL = 1024  # elements of a new tensor that is filled as it should be


class HollowTensors(TorchDispatchMode):
    """Operators on floating-point tensors return tensors of the right shape with arbitrary numbers.

    Whole numbers and truth values are computed, because Python branches on them; those that stand for a comparison of
    floating-point numbers are 0. A floating-point number that Python reads is 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layouts: dict[Any, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_wrapped(types):
            return NotImplemented
        if function.namespace == "c10d":
            return without_data(function, args, kwargs)
        if function.namespace == "_c10d_functional":
            return function(*args, **kwargs)
        if function is ATEN._local_scalar_dense.default and args[0].is_floating_point():
            return 1.0
        if str(function) == COPY_IN:
            return _input_of_gather(*args)
        schema = function._schema
        returned = [value.alias_info for value in schema.returns]
        if function in REAL or any(alias and not alias.is_write for alias in returned):
            return function(*args, **kwargs)  # a view
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if tensors and not any(map(torch.is_floating_point, tensors)) and not _is_float(kwargs.get("dtype")):
            return function(*args, **kwargs)
        if function._schema.is_mutable:
            return _written(schema, args, kwargs)
        layouts, shape_of_result = self._layout(function, leaves, structure)
        if not tensors and sum(map(_elements, layouts)) <= SMALL:
            return function(*args, **kwargs)
        made = [layout if not isinstance(layout, TensorSpec) else layout.new() for layout in layouts]
        return tree_unflatten(made, shape_of_result)

    def _layout(self, function: Any, leaves: Sequence[Any], structure: Any) -> tuple[list[Any], Any]:
        """The shapes of an operator's results, which PyTorch's meta device knows."""
        key = function, str(structure), tuple(map(_key, leaves))
        if key not in self._layouts:
            args, kwargs = tree_unflatten([_on_meta(leaf) for leaf in leaves], structure)
            has_device = any(argument.name == "device" for argument in function._schema.arguments)
            if has_device and (not any(isinstance(leaf, Tensor) for leaf in leaves) or kwargs.get("device")):
                kwargs = kwargs | {"device": torch.device("meta")}
            results, shape = tree_flatten(function(*args, **kwargs))
            self._layouts[key] = (
                [TensorSpec(result) if isinstance(result, Tensor) else result for result in results],
                shape,
            )
        return self._layouts[key]


def is_wrapped(types: Sequence[type]) -> bool:
    """Whether an operator gets a tensor that becomes others: a DTensor its local parts, and one that is awaited."""
    return any(issubclass(one, (DTensor, AsyncCollectiveTensor)) for one in types)


def _input_of_gather(
    _parts: Sequence[Tensor], whole: Tensor, _sizes: Sequence[int], elements: int, rank: int
) -> tuple[Tensor, Tensor]:
    """The input, which is a view of the whole, and the whole."""
    return whole.narrow(0, elements * rank, elements), whole


class TensorSpec:
    """What a new tensor needs."""

    def __init__(self, tensor: Tensor) -> None:
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.dtype = tensor.dtype

    def new(self) -> Tensor:
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="cpu")
        return made if _is_float(self.dtype) else made.zero_()


def _is_float(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point


def _elements(layout: Any) -> int:
    return layout.size.numel() if isinstance(layout, TensorSpec) else 0


def _key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.size(), leaf.stride(), leaf.dtype
    return (type(leaf), leaf) if isinstance(leaf, (int, float, bool, str)) else str(leaf)


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


def _written(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operator returns that writes into its arguments: those."""
    written = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            written.append(args[position] if position < len(args) else kwargs[argument.name])
    if not schema.returns:
        return None
    return written[0] if len(schema.returns) == 1 else tuple(written)


def without_data(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A collective's answer, without a copy of what it gathers."""

    def emptied(value: Any) -> Any:
        return value.new_empty(0) if isinstance(value, Tensor) else value

    return function(*tree_map(emptied, args), **tree_map(emptied, kwargs))
