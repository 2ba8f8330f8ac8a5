"""Recomputation: what a function keeps for its backward pass is dropped, and computed again when that pass needs it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from native.parallel import Axis


def recomputed(function: Callable[..., Tensor], *inputs: Tensor | None, tp: Axis) -> Tensor:
    """function(*inputs), of which only the inputs are kept. Dropout draws the same masks the second time."""
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=lambda: same_dropout(tp))


def same_dropout(tp: Axis) -> tuple[Any, Any]:
    """Contexts of both computations. PyTorch restores its own generators; this does so for the TP ranks' shared one."""
    if tp.rng is None:
        return nullcontext(), nullcontext()
    state_before = tp.rng.get_state()

    @contextmanager
    def same_masks() -> Iterator[None]:
        state_now = tp.rng.get_state()
        tp.rng.set_state(state_before)
        try:  # PyTorch leaves by an exception once it has what it needs
            yield
        finally:
            tp.rng.set_state(state_now)

    return nullcontext(), same_masks()
