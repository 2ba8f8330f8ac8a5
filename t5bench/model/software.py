"""What pieces of software keep in memory for the same arithmetic. Each figure cites where its source keeps it.

Megatron-LM at a53107c006, Megatron-DeepSpeed at 4efb479d, Hetu-Galvatron at 498bcadeb6, transformers 4.49.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Software:
    """norm_tensors: hidden states that a norm keeps; stream: bytes of one, 0 for the training precision.

    casts: each linear layer keeps its own 16-bit copy of its input (autocast caches copies of parameters alone).
    softmax: bytes of a kept probability, 0 for the training precision; score_copies: further tensors of attention
    scores, in that width; keeps_masks: unfused attention keeps a mask of its scores in every layer.
    copies_flash: flash attention's output is kept, and its copy in another order
    or with padding put back. mask: bytes of a dropout mask.
    mlp_dropout: dropout inside the MLP. fused_gate: a gated MLP keeps its product and two inputs alone.
    logits: bytes of a logit at the most, while the loss is computed; logit_gradients: while the head's gradients are.
    scores_buffer: unfused attention has a buffer of scores for ever. cast_parameters: parameters are fp32, and cast to
    16 bits in every iteration. tensor_mask, tensor_logits: those of mask and logits under tensor
    parallelism, 0 where they are the same.
    """

    name: str
    norm_tensors: int = 2
    stream: int = 0
    casts: bool = False
    softmax: int = 0
    score_copies: int = 0
    keeps_masks: bool = False
    copies_flash: bool = False
    mask: int = 1
    mlp_dropout: bool = False
    fused_gate: bool = True
    logits: int = 6
    logit_gradients: int = 2
    scores_buffer: bool = False
    cast_parameters: bool = False
    tensor_mask: int = 0
    tensor_logits: int = 0


# vocab_parallel_cross_entropy computes in place on the fp32 copy of the logits and keeps it for backward: core/
# tensor_parallel/cross_entropy.py:28-120. DotProductAttention's scores go to a global buffer:
# core/transformer/dot_product_attention.py:189.
MEGATRON_CORE = Software("Megatron-LM", scores_buffer=True)
# UnfusedDotProductAttention fills padded rows of the probabilities, which keeps the mask of each layer
# (transformer_engine/pytorch/attention/dot_product_attention/backends.py, masked_fill after scale_mask_softmax).
TRANSFORMER_ENGINE = Software("Megatron-LM with Transformer Engine", keeps_masks=True, copies_flash=True)
# lm_logits.float() and its difference to the maximum are both there: core/tensor_parallel/cross_entropy.py:26.
MEGATRON_DEEPSPEED = Software("Megatron-DeepSpeed", logits=10, scores_buffer=True, fused_gate=False)
# FlashSelfOrCrossAttention's output is kept, and its rearranged copy: core/runtime/tensor_parallel/transformer.py:846.
GALVATRON = Software("Galvatron", copies_flash=True)
# HF's T5LayerNorm keeps its input, the normalised input and the output; relu or gelu and dropout follow in the MLP.
HUGGING_FACE = Software(
    "Hugging Face transformers", norm_tensors=3, mlp_dropout=True, fused_gate=False, logits=12, logit_gradients=12
)
# Under autocast the residual stream is fp32, softmax too, and the loss: T5ForConditionalGeneration's logits in 16 bits,
# log_softmax's output and two gradients in fp32.
AUTOCAST = Software(
    "Hugging Face transformers with autocast",
    norm_tensors=2, stream=4, casts=True, softmax=4, mlp_dropout=True, fused_gate=False, logits=14, logit_gradients=8,
)  # fmt: skip
# Hetu's first Galvatron: HF's T5LayerNorm in fp32 around Megatron's attention, whose scores are masked out of place.
GALVATRON_1 = Software("Galvatron in Hetu", norm_tensors=3, score_copies=1)
# native/: log_softmax's output and two gradients of the logits in fp32. Under tensor parallelism the exponentials and
# three gradients (of the label's logit, of the exponentials, and their sum); SharedDropout's mask is a 16-bit tensor.
NATIVE = Software("native", logits=12, cast_parameters=True, tensor_mask=2, tensor_logits=16)

SOFTWARE = {
    "megatron": MEGATRON_DEEPSPEED,
    "native": NATIVE,
    "megatron-core": MEGATRON_CORE,
    "transformer-engine": TRANSFORMER_ENGINE,
    "galvatron": GALVATRON,
    "galvatron-1": GALVATRON_1,
    "huggingface": HUGGING_FACE,
    "autocast": AUTOCAST,
}
