"""What every model is made of: one layer, built from a description of its parts (Architecture in
t5bench/costmodel/job.py): norms, positions, heads and their groups, biases, feed-forward, residual stream.

Parameters have Megatron's names and layouts, so that both engines can start from the same weights. Activations are
[batch, sequence, hidden].
"""

from argparse import Namespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from native.parallel import Axis
from native.positions import RelativePositions, causal_mask, rotate, rotation_of
from native.precision import cast
from native.recompute import recomputed
from native.sequence_parallel import own_part
from native.tensor_parallel import ColumnLinear, RowLinear, SharedDropout, VocabEmbedding, column_outputs, sliced
from t5bench.costmodel.job import Architecture

# PyTorch's attention has them since 2.5.
HAS_GROUPED_HEADS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 5)


class Stack(nn.Module):
    """`depth` layers, and a norm after the last one of the model."""

    def __init__(
        self,
        args: Namespace,
        model: Architecture,
        tp: Axis,
        depth: int,
        *,
        causal: bool,
        cross: bool = False,
        is_last: bool = True,
    ) -> None:
        """causal: attention looks back alone. cross: layers attend to an encoder's output, too. is_last: the stack ends
        the encoder or the decoder."""
        super().__init__()
        self.model = model
        self.tp = tp
        self.causal = causal
        if model.positions == "relative":
            self.relative_positions = RelativePositions(model, tp, causal=causal)
        self.layers = nn.ModuleList(Layer(args, model, tp, cross=cross) for _ in range(depth))
        self.final_layernorm = norm_of(model, model.hidden) if is_last else nn.Identity()
        if args.compile:
            for layer in self.layers:  # one by one, since all share the compiled code
                layer.compile()

    def forward(self, x: Tensor, padding: Tensor | None = None, encoded: Tensor | None = None) -> Tensor:
        """`padding` is the encoder's, [b, 1, 1, s_enc]: 0, and -inf where there is none of its tokens."""
        length = x.size(1) * self.tp.sequence_parts
        mask = None if self.causal else padding
        rotation = None
        if self.model.positions == "relative":
            mask = self.relative_mask(length, x, mask)
        elif self.model.positions == "rotary":
            rotation = rotation_of(self.model, length, x)
        for layer in self.layers:
            x = layer(x, mask, rotation, encoded, padding)
        return self.final_layernorm(x)

    def relative_mask(self, length: int, x: Tensor, padding: Tensor | None) -> Tensor:
        """What every layer adds to its scores, [1 or b, heads / tp, s, s]; its gradient is the sum of the layers'."""
        mask = self.relative_positions(length, x.dtype)
        return mask + (causal_mask(length, x) if padding is None else padding)


class Layer(nn.Module):
    """x + attention(norm(x)), in T5's decoder then + cross-attention(norm(x)), then + feed-forward(norm(x)).

    With a parallel residual x + attention(norm(x)) + feed-forward(other norm(x)).
    """

    def __init__(self, args: Namespace, model: Architecture, tp: Axis, *, cross: bool) -> None:
        super().__init__()
        self.input_layernorm = norm_of(model, model.hidden)
        self.self_attention = SelfAttention(args, model, tp)
        self.post_attention_layernorm = norm_of(model, model.hidden)
        self.cross = cross
        self.parallel_residual = model.parallel_residual
        if cross:
            self.inter_attention = CrossAttention(args, model, tp)
            self.post_inter_attention_layernorm = norm_of(model, model.hidden)
        self.mlp = FeedForward(model, tp)
        self.dropout = SharedDropout(args.hidden_dropout, tp)
        self.tp = tp
        self.recomputes = args.recompute_granularity == "full"

    def forward(self, x: Tensor, *others: Tensor | None) -> Tensor:
        if self.recomputes and self.training:
            return recomputed(self.blocks, x, *others, tp=self.tp)
        return self.blocks(x, *others)

    def blocks(
        self, x: Tensor, mask: Tensor | None, rotation: Tensor | None, encoded: Tensor | None, padding: Tensor | None
    ) -> Tensor:
        """mask: of self-attention. padding: of cross-attention."""
        attended = self.dropout(self.self_attention(self.input_layernorm(x), mask, rotation))
        if self.parallel_residual:
            return x + attended + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        x = x + attended
        normed = self.post_attention_layernorm(x)
        if self.cross:
            x = x + self.dropout(self.inter_attention(normed, encoded, padding))
            normed = self.post_inter_attention_layernorm(x)
        return x + self.dropout(self.mlp(normed))


class Attention(nn.Module):
    """What self- and cross-attention share: each tensor-parallel rank has a share of the heads."""

    def __init__(self, args: Namespace, model: Architecture, tp: Axis) -> None:
        super().__init__()
        self.head_size = model.head_size
        self.scale = None if model.scaled_scores else 1.0  # None: by the square root of the head size
        self.tp = tp
        self.dropout_p = args.attention_dropout
        self.recomputes = args.recompute_granularity == "selective"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attends with [b, s, heads, d] tensors, to [b, s_query, hidden]; causal without a mask. A key's head serves
        as many heads of queries as there are for each.

        `mask` [1 or b, 1 or heads, 1 or s_query, s_key] is added to the scores: 0, and -inf on padding. A causal
        decoder needs none: its padding comes last, where no real token looks, and the padding's own outputs carry no
        loss.
        """
        if self.recomputes and self.training:
            context = recomputed(self.core, query, key, value, mask, tp=self.tp)
        else:
            context = self.core(query, key, value, mask)
        return self.dense(context)

    def core(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and mask.requires_grad and mask.device.type == "cpu":
            return self.learned_core(query, key, value, mask)
        times = query.size(2) // key.size(2)
        grouped = {"enable_gqa": True} if times > 1 and HAS_GROUPED_HEADS else {}
        if times > 1 and not grouped:
            key = key.repeat_interleave(times, 2)
            value = value.repeat_interleave(times, 2)
        context = F.scaled_dot_product_attention(
            query.transpose(1, 2),  # [b, heads, s_query, d]
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.dropout_p if self.training else 0.0,
            is_causal=mask is None,
            scale=self.scale,
            **grouped,
        )
        return context.transpose(1, 2).flatten(2)  # [b, s_query, heads * d]

    def learned_core(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """With relative positions on a CPU, where PyTorch's fused attention has no gradient of a mask: what it does
        instead multiplies bf16 in fp32, and takes up to three times as long."""
        scale = self.head_size**-0.5 if self.scale is None else self.scale
        if scale != 1.0:
            query = query * scale
        scores = query.transpose(1, 2) @ key.permute(0, 2, 3, 1) + mask  # [b, heads, s_query, s_key]
        weights = F.dropout(scores.softmax(-1), self.dropout_p, self.training)
        context = weights @ value.transpose(1, 2)
        return context.transpose(1, 2).flatten(2)


class SelfAttention(Attention):
    def __init__(self, args: Namespace, model: Architecture, tp: Axis) -> None:
        super().__init__(args, model, tp)
        self.is_grouped = model.kv_heads < model.heads
        bias = model.biases or model.query_biases
        if self.is_grouped:  # apart, since ranks may have to hold copies of keys and values
            copies = model.copies_of_keys(tp.size)
            self.query = ColumnLinear(model.hidden, model.query, tp, bias=bias)
            self.key_value = ColumnLinear(model.hidden, 2 * model.key, tp, blocks=2, copies=copies, bias=bias)
        else:
            self.query_key_value = ColumnLinear(model.hidden, 3 * model.query, tp, blocks=3, bias=bias)
        if model.query_key_norms:  # of each head, all with the same weights
            self.query_layernorm = norm_of(model, model.head_size, is_partial=True)
            self.key_layernorm = norm_of(model, model.head_size, is_partial=True)
        self.has_norms = model.query_key_norms
        self.dense = RowLinear(model.query, model.hidden, tp, bias=model.biases or model.output_biases)

    def forward(self, x: Tensor, mask: Tensor | None, rotation: Tensor | None) -> Tensor:
        query, key, value = self.projections(x)
        if self.has_norms:
            query = self.query_layernorm(query)
            key = self.key_layernorm(key)
        if rotation is not None:
            query = rotate(query, rotation)
            key = rotate(key, rotation)
        return self.attend(query, key, value, mask)

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, [b, s, heads, d] each."""
        if not self.is_grouped:
            query_key_value = self.query_key_value(x)  # [b, s, 3 * heads * d]
            return query_key_value.unflatten(-1, (3, -1, self.head_size)).unbind(2)
        query, key_value = column_outputs(x, self.query, self.key_value)
        key, value = key_value.unflatten(-1, (2, -1, self.head_size)).unbind(2)
        return query.unflatten(-1, (-1, self.head_size)), key, value


class CrossAttention(Attention):
    def __init__(self, args: Namespace, model: Architecture, tp: Axis) -> None:
        super().__init__(args, model, tp)
        self.query = ColumnLinear(model.hidden, model.query, tp, bias=model.biases)
        # per head [k|v], unlike query_key_value
        self.key_value = ColumnLinear(model.hidden, 2 * model.query, tp, enters=False, bias=model.biases)
        self.dense = RowLinear(model.query, model.hidden, tp, bias=model.biases)

    def forward(self, x: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        """`encoded` has already gone through enter_tp."""
        query = self.query(x).unflatten(-1, (-1, self.head_size))  # [b, s_dec, heads, d]
        key_value = self.key_value(encoded)  # [b, s_enc, heads * 2 * d]
        key, value = key_value.unflatten(-1, (-1, 2, self.head_size)).unbind(3)  # [b, s_enc, heads, d] each
        return self.attend(query, key, value, mask)


class FeedForward(nn.Module):
    """activation(x W) V, or with a gate (activation(x W) * x U) V, where [W | U] are one weight."""

    def __init__(self, model: Architecture, tp: Axis) -> None:
        super().__init__()
        self.activation = model.activation
        self.gated = model.gated
        blocks = 2 if model.gated else 1
        bias = model.biases or model.ffn_biases
        self.dense_h_to_4h = ColumnLinear(model.hidden, blocks * model.ffn, tp, blocks=blocks, bias=bias)
        self.dense_4h_to_h = RowLinear(model.ffn, model.hidden, tp, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.dense_h_to_4h(x)  # [b, s, ffn / tp], twice as wide with a gate
        if self.gated:
            gate, inner = inner.chunk(2, -1)
            return self.dense_4h_to_h(activate(gate, self.activation) * inner)
        return self.dense_4h_to_h(activate(inner, self.activation))


def activate(x: Tensor, activation: str) -> Tensor:
    match activation:
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":  # the form of Megatron's fused kernel, and of GPT-2
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "silu":
            return F.silu(x)
    raise ValueError(f"unknown activation '{activation}'")


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight = cast(self.weight, x.dtype)
        bias = cast(self.bias, x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight: no mean is taken off, and there is no bias."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, cast(self.weight, x.dtype), self.epsilon)


def norm_of(model: Architecture, width: int, *, is_partial: bool = False) -> nn.Module:
    """is_partial: each tensor-parallel rank applies it to its own heads, so that its gradient is one of several terms
    (sum_partial_gradients)."""
    norm = RMSNorm(width, model.norm_epsilon) if model.norm == "rms" else LayerNorm(width, eps=model.norm_epsilon)
    if is_partial:
        for parameter in norm.parameters():
            parameter.is_partial = True
    return norm


class Embedding(nn.Module):
    """Token embeddings, plus those of positions if they are learned; one table of each for encoder and decoder."""

    def __init__(self, args: Namespace, model: Architecture, tp: Axis) -> None:
        super().__init__()
        self.word_embeddings = VocabEmbedding(model.padded_vocabulary, model.hidden, tp)
        self.has_positions = model.positions == "learned"
        if self.has_positions:
            self.position_embeddings = nn.Embedding(model.position_rows, model.hidden)
        self.dropout = SharedDropout(args.hidden_dropout, tp)
        self.dtype = args.dtype
        self.tp = tp

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.word_embeddings(tokens, self.dtype)  # [b, s, hidden]
        if not self.has_positions:
            return self.dropout(words)
        places = torch.arange(tokens.size(1), device=tokens.device)
        if self.tp.divides_sequence:
            places = own_part(places, self.tp, dim=0)
        positions = self.position_embeddings(places)  # [s, hidden]
        return self.dropout(words + positions.to(self.dtype))


class Head(nn.Module):
    """The logits: hidden states times the words' embeddings, or times a weight of its own if these are not tied."""

    def __init__(self, model: Architecture, tp: Axis) -> None:
        super().__init__()
        self.tp = tp
        self.scale = model.hidden**-0.5 if model.scaled_head else 1.0
        self.weight = None if model.tied else sliced(model.padded_vocabulary, model.hidden, dim=0, tp=tp)
        self.bias = sliced(model.padded_vocabulary, dim=0, tp=tp) if model.head_bias else None

    def forward(self, x: Tensor, embeddings: nn.Parameter | None) -> Tensor:
        """[b, s, vocabulary / tp]."""
        if self.scale != 1.0:
            x = x * self.scale
        weight = cast(embeddings if self.weight is None else self.weight, x.dtype)
        bias = None if self.bias is None else cast(self.bias, x.dtype)
        return F.linear(x, weight, bias)
