"""How attention knows the places of tokens: rotary (Su et al., https://arxiv.org/abs/2104.09864) and relative
positions (Raffel et al., https://arxiv.org/abs/1910.10683, section 2.1). Learned ones are part of the embedding."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from native.parallel import Axis
from native.precision import cast
from native.tensor_parallel import sliced
from t5bench.costmodel.job import Architecture

# ---- rotary ----------------------------------------------------------------------------------------------------------


def frequencies(model: Architecture) -> Tensor:
    """Radians per position of each pair of a head's columns, fp32 [columns / 2]."""
    columns = model.rotary_columns or model.head_size
    exponents = torch.arange(0, columns, 2, dtype=torch.int64).float() / columns
    plain = 1.0 / model.rotary_base**exponents
    if not model.rotary_scaling:
        return plain
    factor, *of_llama3 = model.rotary_scaling
    if not of_llama3:
        return plain / factor
    # Llama 3.1: long waves are stretched by the factor, short ones kept, and those between mixed.
    low, high, old_length = of_llama3
    wave = 2 * math.pi / plain
    kept = ((old_length / wave - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / factor + kept * plain


def rotation_of(model: Architecture, length: int, like: Tensor) -> Tensor:
    """Cosines and sines of `length` positions, [2, s, 1, columns], of the tensor's dtype and device."""
    angles = torch.outer(torch.arange(length).float(), frequencies(model))  # [s, columns / 2]
    angles = torch.cat([angles, angles], -1).unsqueeze(1)
    return torch.stack([angles.cos(), angles.sin()]).to(device=like.device, dtype=like.dtype)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns each pair of columns (i, i + columns / 2) of [b, s, heads, d] by its position's angle; others stay."""
    cosines, sines = rotation
    columns = cosines.size(-1)
    first, second = x[..., :columns].chunk(2, -1)
    turned = x[..., :columns] * cosines + torch.cat([-second, first], -1) * sines
    return turned if columns == x.size(-1) else torch.cat([turned, x[..., columns:]], -1)


# ---- relative --------------------------------------------------------------------------------------------------------


class RelativePositions(nn.Module):
    """T5's: what is added to a score depends on the head and on the distance from the query to the key.

    All layers of a stack share one table of [buckets, heads], of which a tensor-parallel rank has its heads. Every
    pipeline stage of the stack has a copy.
    """

    def __init__(self, model: Architecture, tp: Axis, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.buckets = model.relative_buckets
        self.farthest = model.relative_distance
        self.weight = sliced(model.relative_buckets, model.heads, dim=1, tp=tp)

    def forward(self, length: int, dtype: torch.dtype) -> Tensor:
        """[1, heads / tp, s, s]: queries, then keys."""
        places = torch.arange(length, device=self.weight.device)
        distances = places[None, :] - places[:, None]  # from the query to the key
        biases = F.embedding(self.bucket_of(distances), cast(self.weight, dtype))  # [s, s, heads / tp]
        return biases.permute(2, 0, 1).unsqueeze(0)

    def bucket_of(self, distances: Tensor) -> Tensor:
        """Half of the buckets are for one distance each, the others for ranges that grow as logarithms do.

        An encoder has half of all buckets for each direction; a decoder looks back alone.
        """
        buckets = self.buckets
        first = torch.zeros_like(distances)
        if self.causal:
            distances = (-distances).clamp(min=0)
        else:
            buckets //= 2
            first = (distances > 0).long() * buckets
            distances = distances.abs()
        exact = buckets // 2
        far = torch.log(distances.clamp(min=1).float() / exact) / math.log(self.farthest / exact) * (buckets - exact)
        far = (exact + far.long()).clamp(max=buckets - 1)
        return first + torch.where(distances < exact, distances, far)


def causal_mask(length: int, like: Tensor) -> Tensor:
    """[s, s]: 0, and -inf where a key comes after the query."""
    return torch.full((length, length), -math.inf, dtype=like.dtype, device=like.device).triu(1)
