"""The least time of an iteration by what the device was measured to do at best (floor.py)."""

from collections.abc import Mapping
from typing import Any

from t5bench.model import flops

# Bytes per parameter of an iteration. AdamW in fp32 reads the weight, its gradient and two averages and writes all but
# the gradient; the weight's bf16 copy is written; clipping reads the gradient once before.
_UPDATE_BYTES = 4 * 4 + 3 * 4 + 2 + 4
# Of each micro-batch: bf16 weights read forward and backward, fp32 gradients read and written to add to them. The first
# micro-batch's are only written.
_MICRO_BATCH_BYTES = 2 * 2 + 2 * 4
_FIRST_IS_SPARED = 4


def iteration_ms(
    shape: flops.Shape, global_batch: int, micro_batch: int, rates: Mapping[str, Any]
) -> tuple[float, float]:
    """The least time of an iteration on one device, in ms: of its matrix products, and of its memory traffic.

    No iteration can be faster than its matrix products at the rate of a large one, nor than what it must read and write
    at the bandwidth of a copy. Mixed precision: bf16 weights and activations, fp32 gradients and optimizer states.
    """
    products = flops.flops_per_iteration(shape, global_batch) / (rates["matmul_tflops"] * 1e12)
    traffic = least_bytes(shape, global_batch, micro_batch) / (rates["copy_gb_per_s"] * 1e9)
    return 1000 * products, 1000 * traffic


def least_bytes(shape: flops.Shape, global_batch: int, micro_batch: int) -> float:
    """Bytes that an iteration on one device has to read and write."""
    per_parameter = _UPDATE_BYTES - _FIRST_IS_SPARED + global_batch // micro_batch * _MICRO_BATCH_BYTES
    return per_parameter * flops.parameters(shape) + global_batch * activation_bytes(shape)


def activation_bytes(shape: flops.Shape) -> int:
    """Bytes that one sample's forward pass writes and its backward pass reads again, at least.

    In bf16, and only what nothing but another matrix product could make again: queries, keys and values, attention's
    output, the feed-forward's hidden units before their activation, and the residual stream after each block. Norms,
    dropout masks, activations and logits are left out, since kernels can fuse or recompute them.
    """
    h, f, p = shape.hidden, shape.ffn, shape.kv_channels * shape.heads
    encoder = shape.encoder_layers * shape.encoder_length * (4 * p + f + 2 * h)
    decoder = shape.decoder_layers * shape.decoder_length * (6 * p + f + 3 * h)
    cross_keys_and_values = shape.decoder_layers * shape.encoder_length * 2 * p
    return 2 * 2 * (encoder + decoder + cross_keys_and_values)
