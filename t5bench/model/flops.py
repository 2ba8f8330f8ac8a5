"""The shape of a T5, its parameters and its floating-point operations. Everything in this project counts them here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A T5's dimensions. kv_channels is the dimension of one head, lengths are in tokens."""

    encoder_layers: int
    decoder_layers: int
    hidden: int
    heads: int
    kv_channels: int
    ffn: int
    encoder_length: int
    decoder_length: int
    padded_vocabulary: int

    @classmethod
    def of_settings(cls, number: Callable[[str], int], padded_vocabulary: int) -> "Shape":
        """The model that the launchers' settings describe; Megatron's arguments have the same names in lower case."""
        layers = number("ENCODER_NUM_LAYERS"), number("DECODER_NUM_LAYERS")
        hidden, heads, ffn = number("HIDDEN_SIZE"), number("NUM_ATTENTION_HEADS"), number("FFN_HIDDEN_SIZE")
        lengths = number("ENCODER_SEQ_LENGTH"), number("DECODER_SEQ_LENGTH")
        return cls(*layers, hidden, heads, hidden // heads, ffn, *lengths, padded_vocabulary)


def multiply_adds(shape: Shape) -> dict[str, int]:
    """Multiply-adds of one sample's forward pass in encoder, decoder and head, in matrix products alone.

    Narayanan et al. (https://arxiv.org/abs/2104.04473, section 5.1) for an encoder-decoder: the decoder and the head at
    the decoder's length, cross-attention's keys and values at the encoder's.
    """
    h, f, s, d = shape.hidden, shape.ffn, shape.encoder_length, shape.decoder_length
    p = shape.kv_channels * shape.heads
    return {
        "encoder": shape.encoder_layers * s * (4 * h * p + 2 * p * s + 2 * h * f),
        "decoder": shape.decoder_layers * (d * (6 * h * p + 2 * p * (d + s) + 2 * h * f) + 2 * h * p * s),
        "head": shape.padded_vocabulary * h * d,
    }


def flops_per_iteration(shape: Shape, global_batch_size: int) -> float:
    """Floating-point operations of one iteration: 2 per multiply-add, backward twice the forward, no recomputation."""
    return 6.0 * global_batch_size * sum(multiply_adds(shape).values())


def components(shape: Shape, tp: int = 1) -> dict[str, int]:
    """Parameters of each component on one of `tp` tensor-parallel ranks, the tied embedding once.

    Every rank has all of the layer norms, the positions, and the biases that are added after an all-reduce.
    """
    h, f, p, vocabulary = shape.hidden, shape.ffn, shape.kv_channels * shape.heads, shape.padded_vocabulary // tp
    positions = max(shape.encoder_length, shape.decoder_length)  # as many as the launchers ask for
    attention = (4 * h * p + 3 * p) // tp + h
    mlp = (2 * h * f + f) // tp + h
    norm = 2 * h
    return {
        "encoder": shape.encoder_layers * (attention + mlp + 2 * norm) + norm,
        "embedding": (vocabulary + positions) * h,
        "decoder": shape.decoder_layers * (2 * attention + mlp + 3 * norm) + norm,
        "head": vocabulary,
    }


def of_stage(parts: Mapping[str, float], pp: int, stage: int = 0) -> float:
    """The sum of the components' parts on a pipeline stage: encoder and decoder have one each, the embedding both."""
    if pp > 2:
        raise ValueError(f"the cost model covers pipelines of one or two stages, found {pp}")
    absent = (("decoder", "head"), ("encoder",))[stage] if pp == 2 else ()
    return sum(part for name, part in parts.items() if name not in absent)


def parameters(shape: Shape, tp: int = 1, pp: int = 1, stage: int = 0) -> int:
    """Parameters on one GPU of a tensor- and pipeline-parallel layout; with the defaults, of the whole model."""
    return int(of_stage(components(shape, tp), pp, stage))
