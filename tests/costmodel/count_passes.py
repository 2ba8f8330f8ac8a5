"""Counts the passes over a tensor that separate operators make: t5bench/costmodel/time.py's EAGER constants.

    python tests/costmodel/count_passes.py

A pass reads or writes a tensor of the input's size in 16 bits, or in fp32 where the input is. Views are no passes.
"""

from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = 64
COLUMNS = 1024
HEADS = 8
VIEWS = {"view", "t", "transpose", "expand", "unsqueeze", "detach", "_unsafe_view", "slice", "chunk", "split"}


class Passes(TorchDispatchMode):
    """Adds up the bytes that operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ not in VIEWS:
            self.bytes += size_of([args, result])
        return result


def size_of(values: object) -> int:
    """Bytes of all tensors; of one that is expanded, those that it has in memory."""
    if isinstance(values, torch.Tensor):
        return min(values.numel() * values.element_size(), values.untyped_storage().nbytes())
    if isinstance(values, Sequence) and not isinstance(values, str):
        return sum(size_of(value) for value in values)
    return 0


def rms_norm(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As T5's and Llama's in Transformers: in fp32, and back."""
    wide = states.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (wide * scale).to(states.dtype)


def rotary(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, -1)
    return states * cosine + torch.cat((-second, first), -1) * sine


def counted(states: torch.Tensor, function, *others: torch.Tensor) -> tuple[float, float]:
    """Passes forward and backward."""
    one = states.numel() * states.element_size()
    with Passes() as forward:
        output = function(states, *others)
    gradient = torch.ones_like(output)
    with Passes() as backward:
        output.backward(gradient)
    return forward.bytes / one, backward.bytes / one


def of_norm(dtype: torch.dtype) -> tuple[float, float]:
    states = torch.randn(ROWS, COLUMNS, dtype=dtype, requires_grad=True)
    weight = torch.ones(COLUMNS, dtype=dtype, requires_grad=True)
    return counted(states, rms_norm, weight)


def of_rotary(dtype: torch.dtype) -> tuple[float, float]:
    states = torch.randn(ROWS, HEADS, COLUMNS // HEADS, dtype=dtype, requires_grad=True)
    angles = torch.randn(ROWS, 1, COLUMNS // HEADS, dtype=dtype)
    return counted(states, rotary, angles, angles)


if __name__ == "__main__":
    for dtype in (torch.bfloat16, torch.float32):
        print(f"{dtype}: RMS norm {of_norm(dtype)}, rotary {of_rotary(dtype)}")
