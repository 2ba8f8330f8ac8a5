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
from native.sequence_parallel import own_part
from native.tensor_parallel import ColumnLinear, RowLinear, SharedDropout, VocabEmbedding


class Stack(nn.Module):
    """`depth` layers, and a LayerNorm after the last one of the model."""

    def __init__(
        self, args: Namespace, tp: Axis, depth: int, *, causal: bool, cross: bool = False, is_last: bool = True
    ) -> None:
        """causal: attention looks back alone. cross: layers attend to an encoder's output, too. is_last: the stack ends
        the encoder or the decoder."""
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
        self.causal = causal
        self.cross = cross
        if cross:
            self.inter_attention = CrossAttention(args, tp)
            self.post_inter_attention_layernorm = LayerNorm(args.hidden_size)
        self.mlp = FeedForward(args, tp)
        self.dropout = SharedDropout(args.hidden_dropout, tp)
        self.tp = tp
        self.recomputes = args.recompute_granularity == "full"

    def forward(self, x: Tensor, mask: Tensor | None, encoded: Tensor | None = None) -> Tensor:
        if self.recomputes and self.training:
            return recomputed(self.blocks, x, mask, encoded, tp=self.tp)
        return self.blocks(x, mask, encoded)

    def blocks(self, x: Tensor, mask: Tensor | None, encoded: Tensor | None) -> Tensor:
        """`mask` is the encoder's padding, for an encoder's self-attention and a decoder's cross-attention."""
        self_mask = None if self.causal else mask
        x = x + self.dropout(self.self_attention(self.input_layernorm(x), self_mask))
        normed = self.post_attention_layernorm(x)
        if self.cross:
            x = x + self.dropout(self.inter_attention(normed, encoded, mask))
            normed = self.post_inter_attention_layernorm(x)
        return x + self.dropout(self.mlp(normed))


class Attention(nn.Module):
    """What self- and cross-attention share: each tensor-parallel rank has a share of the heads."""

    def __init__(self, args: Namespace, tp: Axis) -> None:
        super().__init__()
        self.head_size = args.kv_channels
        self.width = args.kv_channels * args.num_attention_heads
        self.tp = tp
        self.dropout_p = args.attention_dropout
        self.recomputes = args.recompute_granularity == "selective"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attends with three [b, s, heads, d] tensors, to [b, s_query, hidden]; causal without a mask.

        `mask` [b, 1, 1, s_key] is added to the scores: 0, and -inf on padding. A causal decoder needs none: its padding
        comes last, where no real token looks, and the padding's own outputs carry no loss.
        """
        if self.recomputes and self.training:
            context = recomputed(self.core, query, key, value, mask, tp=self.tp)
        else:
            context = self.core(query, key, value, mask)
        return self.dense(context)

    def core(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        context = F.scaled_dot_product_attention(
            query.transpose(1, 2),  # [b, heads, s_query, d]
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.dropout_p if self.training else 0.0,
            is_causal=mask is None,
        )
        return context.transpose(1, 2).flatten(2)  # [b, s_query, heads * d]


class SelfAttention(Attention):
    def __init__(self, args: Namespace, tp: Axis) -> None:
        super().__init__(args, tp)
        self.query_key_value = ColumnLinear(args.hidden_size, 3 * self.width, tp, blocks=3)
        self.dense = RowLinear(self.width, args.hidden_size, tp)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query_key_value = self.query_key_value(x)  # [b, s, 3 * heads * d]
        query, key, value = query_key_value.unflatten(-1, (3, -1, self.head_size)).unbind(2)  # [b, s, heads, d] each
        return self.attend(query, key, value, mask)


class CrossAttention(Attention):
    def __init__(self, args: Namespace, tp: Axis) -> None:
        super().__init__(args, tp)
        self.query = ColumnLinear(args.hidden_size, self.width, tp)
        # per head [k|v], unlike query_key_value
        self.key_value = ColumnLinear(args.hidden_size, 2 * self.width, tp, enters=False)
        self.dense = RowLinear(self.width, args.hidden_size, tp)

    def forward(self, x: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        """`encoded` has already gone through enter_tp."""
        query = self.query(x).unflatten(-1, (-1, self.head_size))  # [b, s_dec, heads, d]
        key_value = self.key_value(encoded)  # [b, s_enc, heads * 2 * d]
        key, value = key_value.unflatten(-1, (-1, 2, self.head_size)).unbind(3)  # [b, s_enc, heads, d] each
        return self.attend(query, key, value, mask)


class FeedForward(nn.Module):
    def __init__(self, args: Namespace, tp: Axis) -> None:
        super().__init__()
        self.gelu = "none" if args.no_bias_gelu_fusion else "tanh"  # the form of Megatron's fused kernel
        self.dense_h_to_4h = ColumnLinear(args.hidden_size, args.ffn_hidden_size, tp)
        self.dense_4h_to_h = RowLinear(args.ffn_hidden_size, args.hidden_size, tp)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.dense_h_to_4h(x)  # [b, s, ffn / tp]
        return self.dense_4h_to_h(F.gelu(inner, approximate=self.gelu))


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight = cast(self.weight, x.dtype)
        bias = cast(self.bias, x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Embedding(nn.Module):
    """Token plus position embeddings, one table of each for encoder and decoder."""

    def __init__(self, args: Namespace, tp: Axis) -> None:
        super().__init__()
        self.word_embeddings = VocabEmbedding(args.padded_vocab_size, args.hidden_size, tp)
        self.position_embeddings = nn.Embedding(args.max_position_embeddings, args.hidden_size)
        self.dropout = SharedDropout(args.hidden_dropout, tp)
        self.dtype = args.dtype
        self.tp = tp

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.word_embeddings(tokens, self.dtype)  # [b, s, hidden]
        places = torch.arange(tokens.size(1), device=tokens.device)
        if self.tp.divides_sequence:
            places = own_part(places, self.tp, dim=0)
        positions = self.position_embeddings(places)  # [s, hidden]
        return self.dropout(words + positions.to(self.dtype))
