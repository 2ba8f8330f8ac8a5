"""What both models are made of: pre-LayerNorm layers with biases, learned positions, tied embeddings.

Parameters have Megatron's names and layouts, so that both engines can start from the same weights. Activations are
[batch, sequence, hidden].
"""

from argparse import Namespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from native.parallel import Axis
from native.precision import cast
from native.recompute import recomputed
from native.tensor_parallel import ColumnLinear, RowLinear, SharedDropout, VocabEmbedding, enter_tp


class Stack(nn.Module):
    """`depth` layers, and a LayerNorm after the last one of the model."""

    def __init__(
        self, args: Namespace, tp: Axis, depth: int, *, causal: bool, cross: bool = False, is_last: bool = True
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(args, tp, causal, cross) for _ in range(depth))
        self.final_layernorm = LayerNorm(args.hidden_size) if is_last else nn.Identity()
        if args.compile:
            for layer in self.layers:  # one by one, since all share the compiled code
                layer.compile()

    def forward(self, x: Tensor, mask: Tensor | None = None, encoded: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask, encoded)
        return self.final_layernorm(x)


class Layer(nn.Module):
    """x + attention(norm(x)), in T5's decoder then + cross-attention(norm(x)), then + feed-forward(norm(x))."""

    def __init__(self, args: Namespace, tp: Axis, causal: bool, cross: bool) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(args.hidden_size)
        self.self_attention = SelfAttention(args, tp)
        self.post_attention_layernorm = LayerNorm(args.hidden_size)
        self.causal, self.cross = causal, cross
        if cross:
            self.inter_attention = CrossAttention(args, tp)
            self.post_inter_attention_layernorm = LayerNorm(args.hidden_size)
        self.mlp = FeedForward(args, tp)
        self.dropout = SharedDropout(args.hidden_dropout, tp)
        self.tp, self.recomputes = tp, args.recompute_granularity == "full"

    def forward(self, x: Tensor, mask: Tensor | None, encoded: Tensor | None = None) -> Tensor:
        if self.recomputes and self.training:
            return recomputed(self.blocks, x, mask, encoded, tp=self.tp)
        return self.blocks(x, mask, encoded)

    def blocks(self, x: Tensor, mask: Tensor | None, encoded: Tensor | None) -> Tensor:
        """`mask` is the encoder's padding, for an encoder's self-attention and a decoder's cross-attention."""
        x = x + self.dropout(self.self_attention(self.input_layernorm(x), None if self.causal else mask))
        normed = self.post_attention_layernorm(x)
        if self.cross:
            x = x + self.dropout(self.inter_attention(normed, encoded, mask))
            normed = self.post_inter_attention_layernorm(x)
        return x + self.dropout(self.mlp(normed))


class Attention(nn.Module):
    """What self- and cross-attention share: each tensor-parallel rank has a share of the heads."""

    def __init__(self, args: Namespace, tp: Axis) -> None:
        super().__init__()
        self.head, self.width, self.tp = args.kv_channels, args.kv_channels * args.num_attention_heads, tp
        self.p, self.recomputes = args.attention_dropout, args.recompute_granularity == "selective"

    def attend(self, *query_key_value: Tensor, mask: Tensor | None) -> Tensor:
        """Attends with three [b, s, heads, d] tensors, to [b, s_query, hidden]; causal without a mask.

        `mask` [b, 1, 1, s_key] is added to the scores: 0, and -inf on padding. A causal decoder needs none: its padding
        comes last, where no real token looks, and the padding's own outputs carry no loss.
        """
        if self.recomputes and self.training:
            context = recomputed(self.core, *query_key_value, mask, tp=self.tp)
        else:
            context = self.core(*query_key_value, mask)
        return self.dense(context)

    def core(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        by_head = (x.transpose(1, 2) for x in (query, key, value))
        p = self.p if self.training else 0.0
        context = F.scaled_dot_product_attention(*by_head, attn_mask=mask, dropout_p=p, is_causal=mask is None)
        return context.transpose(1, 2).flatten(2)


class SelfAttention(Attention):
    def __init__(self, args: Namespace, tp: Axis) -> None:
        super().__init__(args, tp)
        self.query_key_value = ColumnLinear(args.hidden_size, 3 * self.width, tp, blocks=3)
        self.dense = RowLinear(self.width, args.hidden_size, tp)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query_key_value = self.query_key_value(enter_tp(x, self.tp)).unflatten(-1, (3, -1, self.head))
        return self.attend(*query_key_value.unbind(2), mask=mask)


class CrossAttention(Attention):
    def __init__(self, args: Namespace, tp: Axis) -> None:
        super().__init__(args, tp)
        self.query = ColumnLinear(args.hidden_size, self.width, tp)
        self.key_value = ColumnLinear(args.hidden_size, 2 * self.width, tp)  # per head [k|v], unlike query_key_value
        self.dense = RowLinear(self.width, args.hidden_size, tp)

    def forward(self, x: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        """`encoded` has already gone through enter_tp."""
        query = self.query(enter_tp(x, self.tp)).unflatten(-1, (-1, self.head))
        key, value = self.key_value(encoded).unflatten(-1, (-1, 2, self.head)).unbind(3)
        return self.attend(query, key, value, mask=mask)


class FeedForward(nn.Module):
    def __init__(self, args: Namespace, tp: Axis) -> None:
        super().__init__()
        # Megatron's fused kernel is the tanh form.
        self.tp, self.gelu = tp, "none" if args.no_bias_gelu_fusion else "tanh"
        self.dense_h_to_4h = ColumnLinear(args.hidden_size, args.ffn_hidden_size, tp)
        self.dense_4h_to_h = RowLinear(args.ffn_hidden_size, args.hidden_size, tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(enter_tp(x, self.tp)), approximate=self.gelu))


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, cast(self.weight, x.dtype), cast(self.bias, x.dtype), self.eps)


class Embedding(nn.Module):
    """Token plus position embeddings, one table of each for encoder and decoder."""

    def __init__(self, args: Namespace, tp: Axis) -> None:
        super().__init__()
        self.word_embeddings = VocabEmbedding(args.padded_vocab_size, args.hidden_size, tp)
        self.position_embeddings = nn.Embedding(args.max_position_embeddings, args.hidden_size)
        self.dropout, self.dtype = SharedDropout(args.hidden_dropout, tp), args.dtype

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.position_embeddings(torch.arange(tokens.size(1), device=tokens.device))
        return self.dropout(self.word_embeddings(tokens, self.dtype) + positions.to(self.dtype))
