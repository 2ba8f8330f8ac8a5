"""fp32 master weights, and the bf16 copies with which an iteration computes."""

import torch
from torch import Tensor, nn

_copies: dict[nn.Parameter, Tensor] = {}


def cast(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """A parameter in the dtype of the activations: fp32 masters are copied to bf16 once, for all micro-batches.

    Autograd goes through the copy, so the masters receive fp32 gradients. forget_copies() ends an iteration.
    """
    if parameter.dtype == dtype:
        return parameter
    if torch.compiler.is_compiling():  # a compiled layer fuses the copy instead
        return parameter.to(dtype)
    if parameter not in _copies:
        _copies[parameter] = parameter.to(dtype)
    return _copies[parameter]


def cast_or_none(parameter: nn.Parameter | None, dtype: torch.dtype) -> Tensor | None:
    """The same of a bias, which a layer may lack."""
    return None if parameter is None else cast(parameter, dtype)


def forget_copies() -> None:
    _copies.clear()


def copies() -> dict[nn.Parameter, Tensor]:
    """This iteration's bf16 copies, by their masters."""
    return _copies
