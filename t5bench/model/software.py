"""What different software keeps in memory for the same arithmetic. Each figure cites the source code.

Megatron-LM at a53107c006, Megatron-DeepSpeed at 4efb479d, Hetu-Galvatron at 498bcadeb6, transformers 4.49.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Software:
    """norm_tensors: hidden states that a norm keeps; stream: bytes of one, 0 for the training precision.

    casts: each linear layer keeps its own 16-bit copy of its input (autocast caches copies of parameters alone).
    softmax: bytes of a kept probability, 0 for the training precision; score_copies: further tensors of attention
    scores, in that width; keeps_masks: unfused attention keeps a mask of its scores in every layer unless that is
    causal; scores_buffer: it has a buffer of scores for ever. repeats_keys: keys and values are kept for every query
    head, even if heads share them. copies_flash: flash attention's output is kept, and its copy in another order or
    with padding put back. mask: bytes of a dropout mask; mlp_dropout: inside the MLP too. fused_gate: a gated MLP
    keeps its product and two inputs alone. logits: bytes of a logit at the most, while the loss is computed;
    logit_gradients: while the head's gradients are. cast_parameters: parameters are fp32, and cast to 16 bits in every
    iteration. tensor_mask, tensor_logits: mask and logits under tensor parallelism, 0 where they are the same.
    keeps_inputs: of pipeline stages, and fp16's fp32 gradients, until the next iteration (memory.py).
    """

    norm_tensors: int = 2
    stream: int = 0
    casts: bool = False
    softmax: int = 0
    score_copies: int = 0
    keeps_masks: bool = False
    repeats_keys: bool = False
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
    keeps_inputs: bool = False


SOFTWARE = {
    # lm_logits.float() and its difference to the maximum are both there: core/tensor_parallel/cross_entropy.py:26.
    "megatron": Software(logits=10, scores_buffer=True, fused_gate=False, keeps_inputs=True),
    # native/: log_softmax's output and two gradients of the logits in fp32. Under tensor parallelism the exponentials
    # and three gradients (of the label's logit, of the exponentials, their sum); SharedDropout's mask has 16 bits.
    "native": Software(logits=12, cast_parameters=True, tensor_mask=2, tensor_logits=16),
    # Megatron-LM: vocab_parallel_cross_entropy computes in place on the fp32 copy of the logits and keeps it for
    # backward: core/tensor_parallel/cross_entropy.py:28-120. DotProductAttention's scores go to a global buffer:
    # core/transformer/dot_product_attention.py:189.
    "megatron-core": Software(scores_buffer=True, keeps_inputs=True),
    # The same without the fused softmax: FusedScaleMaskSoftmax.forward_torch_softmax computes in fp32, and autograd
    # keeps its result: core/fusions/fused_softmax.py:313.
    "megatron-core-softmax": Software(softmax=4, scores_buffer=True, keeps_inputs=True),
    # Megatron-LM with it: UnfusedDotProductAttention fills padded rows of the probabilities, which keeps each layer's
    # mask, if "padding" is in the mask's type (transformer_engine/pytorch/attention/dot_product_attention/backends.py,
    # masked_fill). GPT's and T5's decoders have "causal".
    "transformer-engine": Software(keeps_masks=True, copies_flash=True, keeps_inputs=True),
    # FlashSelfOrCrossAttention's output is kept, and its rearranged copy:
    # core/runtime/tensor_parallel/transformer.py:846. swiglu is silu(x) * y in separate operators (:121), and
    # repeat_interleave copies keys and values for every query head (:825).
    "galvatron": Software(copies_flash=True, fused_gate=False, repeats_keys=True),
    # Hetu's first Galvatron: HF's T5LayerNorm in fp32 around Megatron's attention, which masks scores out of place.
    "galvatron-1": Software(norm_tensors=3, score_copies=1),
    # HF's T5LayerNorm keeps its input, the normalised input and the output; relu or gelu and dropout are in the MLP.
    "huggingface": Software(norm_tensors=3, mlp_dropout=True, fused_gate=False, logits=12, logit_gradients=12),
    # Under autocast the residual stream is fp32, softmax too, and the loss: T5ForConditionalGeneration's logits in
    # 16 bits, log_softmax's output and two gradients in fp32.
    "autocast": Software(2, 4, True, softmax=4, mlp_dropout=True, fused_gate=False, logits=14, logit_gradients=8),
}


def beyond_native(tensor: int, pipeline: int, has_zero: bool, micro_batches: int, is_fp16: bool = False) -> str:
    """Why the native engine cannot train a T5 in this layout and precision; "" if it can."""
    if is_fp16:
        return "the native engine does not train in fp16, because it has no loss scaling"
    if pipeline > 2:
        return f"the native engine has at most two pipeline stages, but {pipeline} were asked for"
    if has_zero and tensor * pipeline > 1:
        return "the native engine's ZeRO shards only over data-parallel ranks, without TP and PP"
    if micro_batches < pipeline:
        return f"the native engine's pipeline needs at least {pipeline} micro-batches, found {micro_batches}"
    return ""
