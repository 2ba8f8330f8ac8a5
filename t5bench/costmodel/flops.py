"""Floating-point operations of a transformer's matrix products, the only place where this project counts them.

Narayanan et al. (https://arxiv.org/abs/2104.04473, section 5.1), extended to grouped queries, gated FFNs and
encoder-decoders: the decoder and the head at the decoder's length, cross-attention's keys and values at the encoder's.
Tokens outside a sliding window do not count.
"""

from t5bench.costmodel.job import Architecture, Job


def layer_multiply_adds(a: Architecture, decoder: bool = False) -> tuple[int, int]:
    """Multiply-adds of one layer's forward pass for one sample: with its weights, and in attention's core."""
    n = a.length(decoder)
    h = a.hidden
    lengths = a.attended(decoder)
    ffn = n * h * (3 if a.gated else 2) * a.ffn
    projections = sum(2 * h * (a.query * n + a.key * length) for length in lengths)
    return ffn + projections, 2 * a.query * n * sum(lengths)


def outside_windows(a: Architecture, decoder: bool = False) -> int:
    """Multiply-adds of a stack's forward pass for one sample that only a masked kernel does: those outside of windows.

    In a layer with local attention, a token attends to `window` tokens of its own stack.
    """
    layers = a.decoder_layers if decoder else a.encoder_layers
    local_layers = layers - layers // a.global_every if a.window else 0
    n = a.length(decoder)
    return local_layers * 2 * a.query * n * max(0, n - a.window)


def multiply_adds(a: Architecture) -> dict[str, int]:
    """Multiply-adds of the forward pass for one sample, in encoder, decoder and head."""
    return {
        "encoder": a.encoder_layers * sum(layer_multiply_adds(a)) - outside_windows(a),
        "decoder": a.decoder_layers * sum(layer_multiply_adds(a, decoder=True)) - outside_windows(a, decoder=True),
        "head": a.padded_vocabulary * a.hidden * a.output_length,
    }


def flops_per_iteration(architecture: Architecture, global_batch_size: int) -> float:
    """FLOPs of an iteration: 2 per multiply-add, backward twice the forward, no recomputation."""
    return 6.0 * global_batch_size * sum(multiply_adds(architecture).values())


def hardware_flops(job: Job) -> float:
    """FLOPs of an iteration, including recomputation of whole layers or of attention's core, outside of windows, and
    keys and values that several tensor-parallel ranks compute."""
    a = job.architecture
    columns_of_copies = a.keys_of_all(job.parallel.tensor) - a.key
    repeated = 0
    beyond = outside_windows(a) + outside_windows(a, decoder=True)
    for layers, is_decoder in ((a.encoder_layers, False), (a.decoder_layers, True)):
        weights, core = layer_multiply_adds(a, is_decoder)
        copies = 2 * a.hidden * columns_of_copies * sum(a.attended(is_decoder))
        repeated += layers * {"none": 0, "selective": core, "full": core + weights + copies}[job.recompute]
        beyond += layers * copies
    return flops_per_iteration(a, job.global_batch) + (6.0 * beyond + 2 * repeated) * job.global_batch
