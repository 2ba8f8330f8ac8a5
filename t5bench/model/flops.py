"""What an iteration costs in floating-point operations. The formula stands here alone; the native engine uses it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A T5 as the launchers' settings name it. kv_channels is the dimension of one head, lengths are in tokens."""

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
        """The launchers' settings, each by its name, make this model."""
        return cls(
            encoder_layers=number("ENCODER_NUM_LAYERS"),
            decoder_layers=number("DECODER_NUM_LAYERS"),
            hidden=number("HIDDEN_SIZE"),
            heads=number("NUM_ATTENTION_HEADS"),
            kv_channels=number("HIDDEN_SIZE") // number("NUM_ATTENTION_HEADS"),
            ffn=number("FFN_HIDDEN_SIZE"),
            encoder_length=number("ENCODER_SEQ_LENGTH"),
            decoder_length=number("DECODER_SEQ_LENGTH"),
            padded_vocabulary=padded_vocabulary,
        )


def multiply_adds_per_sample(shape: Shape) -> int:
    """Multiply-adds of one sample's forward pass, in matrix products alone.

    Narayanan et al. (https://arxiv.org/abs/2104.04473, section 5.1) for an encoder-decoder: the decoder and the head at
    the decoder's length, cross-attention's keys and values at the encoder's.
    """
    h, f, s, d = shape.hidden, shape.ffn, shape.encoder_length, shape.decoder_length
    p = shape.kv_channels * shape.heads
    encoder = shape.encoder_layers * s * (4 * h * p + 2 * p * s + 2 * h * f)
    decoder = shape.decoder_layers * (d * (6 * h * p + 2 * p * (d + s) + 2 * h * f) + 2 * h * p * s)
    return encoder + decoder + shape.padded_vocabulary * h * d


def flops_per_iteration(shape: Shape, global_batch_size: int) -> float:
    """Floating-point operations of one iteration: 2 per multiply-add, backward twice the forward, no recomputation."""
    return 6.0 * global_batch_size * multiply_adds_per_sample(shape)


def parameters(shape: Shape) -> int:
    """Parameters of the whole model, the tied embedding once: matrices, biases, layer norms, learned positions.

    There are as many positions as the longer of the two lengths, as the launchers ask for.
    """
    h, f, p = shape.hidden, shape.ffn, shape.kv_channels * shape.heads
    attention = 4 * h * p + 3 * p + h
    mlp = 2 * h * f + f + h
    encoder = shape.encoder_layers * (attention + mlp + 2 * 2 * h)
    decoder = shape.decoder_layers * (2 * attention + mlp + 3 * 2 * h)
    positions = max(shape.encoder_length, shape.decoder_length)
    last_norms = 2 * 2 * h
    return encoder + decoder + last_norms + (shape.padded_vocabulary + positions) * h + shape.padded_vocabulary
