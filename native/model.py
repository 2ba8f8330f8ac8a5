"""The T5 that Megatron-DeepSpeed trains: pre-LayerNorm, learned positions, biases, tied embeddings with an output bias.

Parameters have Megatron's names and layouts, so that both engines can start from the same weights. Activations are
[batch, sequence, hidden]. A pipeline stage builds only the encoder or the decoder.
"""

import contextlib
import hashlib
import math
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from native import parallel
from native.parallel import Axis, ColumnLinear, Layout, RowLinear, SharedDropout, cast, enter_tp


class T5(nn.Module):
    """Encoder and decoder, or the one of them that this pipeline stage holds, with the stage's own embeddings."""

    def __init__(self, args: Namespace, layout: Layout) -> None:
        super().__init__()
        # PyTorch 2.11 prefers cuDNN's attention on Hopper. Some of its kernels drop only multiples of 1/16 (PyTorch
        # pull request 174245), and for some lengths its gradients with a mask are nan (issue 196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.tp, self.pad, self.dtype = layout.tp, args.pad_token, args.dtype
        parts: dict[str, nn.Module] = {"embedding": Embedding(args, self.tp)}
        if layout.pp.rank == 0:
            parts["encoder"] = Stack(args, self.tp, decoder=False)
        if layout.last_stage:
            parts["decoder"] = Stack(args, self.tp, decoder=True)
            self.lm_head = LMHead(args, self.tp)
        self.language_model = nn.ModuleDict(parts)

    def forward(
        self, encoder_tokens: Tensor, decoder_tokens: Tensor, labels: Tensor, encoded: Tensor | None = None
    ) -> Tensor:
        """The loss of each label, [b, s_dec] fp32 and 0 where the label is -1.

        A stage without the decoder returns the encoder's output [b, s_enc, hidden], and a stage without the encoder
        takes that as `encoded`. Token ids and labels are int64, [b, s_enc] or [b, s_dec].
        """
        model = self.language_model
        # A boolean mask would be converted into this one in every layer.
        mask = torch.zeros_like(encoder_tokens, dtype=self.dtype).masked_fill_(encoder_tokens == self.pad, -math.inf)
        mask = mask[:, None, None, :]
        if "encoder" in model:
            encoded = model["encoder"](model["embedding"](encoder_tokens), mask)
        if "decoder" not in model:
            return encoded
        # Entering here rather than in each layer: backward sums the layers' gradients first and sends one.
        encoded = enter_tp(encoded, self.tp)
        x = model["decoder"](model["embedding"](decoder_tokens), mask, encoded)
        logits = self.lm_head(enter_tp(x, self.tp), model["embedding"].word_embeddings.weight)
        return parallel.vocab_cross_entropy(logits, labels, self.tp)


class Stack(nn.Module):
    def __init__(self, args: Namespace, tp: Axis, decoder: bool) -> None:
        super().__init__()
        depth = args.decoder_num_layers if decoder else args.encoder_num_layers
        self.layers = nn.ModuleList(Layer(args, tp, decoder) for _ in range(depth))
        self.final_layernorm = LayerNorm(args.hidden_size)
        if args.compile:
            for layer in self.layers:  # one by one, since all share the compiled code
                layer.compile()

    def forward(self, x: Tensor, mask: Tensor, encoded: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask, encoded)
        return self.final_layernorm(x)


class Layer(nn.Module):
    """x + attention(norm(x)), in the decoder then + cross-attention(norm(x)), then + feed-forward(norm(x))."""

    def __init__(self, args: Namespace, tp: Axis, decoder: bool) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(args.hidden_size)
        self.self_attention = SelfAttention(args, tp)
        self.post_attention_layernorm = LayerNorm(args.hidden_size)
        if decoder:
            self.inter_attention = CrossAttention(args, tp)
            self.post_inter_attention_layernorm = LayerNorm(args.hidden_size)
        self.decoder, self.mlp, self.dropout = decoder, FeedForward(args, tp), SharedDropout(args.hidden_dropout, tp)

    def forward(self, x: Tensor, mask: Tensor, encoded: Tensor | None = None) -> Tensor:
        """`mask` is the encoder's padding, for an encoder's self-attention and a decoder's cross-attention."""
        x = x + self.dropout(self.self_attention(self.input_layernorm(x), None if self.decoder else mask))
        normed = self.post_attention_layernorm(x)
        if self.decoder:
            x = x + self.dropout(self.inter_attention(normed, encoded, mask))
            normed = self.post_inter_attention_layernorm(x)
        return x + self.dropout(self.mlp(normed))


class Attention(nn.Module):
    """What self- and cross-attention share: each tensor-parallel rank has a share of the heads."""

    def __init__(self, args: Namespace, tp: Axis) -> None:
        super().__init__()
        self.head, self.width, self.tp = args.kv_channels, args.kv_channels * args.num_attention_heads, tp
        self.p = args.attention_dropout

    def attend(self, *query_key_value: Tensor, mask: Tensor | None) -> Tensor:
        """Attends with three [b, s, heads, d] tensors, to [b, s_query, hidden]; causal without a mask.

        `mask` [b, 1, 1, s_key] is added to the scores: 0, and -inf on padding. A causal decoder needs none: its padding
        comes last, where no real token looks, and the padding's own outputs carry no loss.
        """
        by_head = (x.transpose(1, 2) for x in query_key_value)
        p = self.p if self.training else 0.0
        context = F.scaled_dot_product_attention(*by_head, attn_mask=mask, dropout_p=p, is_causal=mask is None)
        return self.dense(context.transpose(1, 2).flatten(2))


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
        self.word_embeddings = parallel.VocabEmbedding(args.padded_vocab_size, args.hidden_size, tp)
        self.position_embeddings = nn.Embedding(args.max_position_embeddings, args.hidden_size)
        self.dropout, self.dtype = SharedDropout(args.hidden_dropout, tp), args.dtype

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.position_embeddings(torch.arange(tokens.size(1), device=tokens.device))
        return self.dropout(self.word_embeddings(tokens, self.dtype) + positions.to(self.dtype))


class LMHead(nn.Module):
    def __init__(self, args: Namespace, tp: Axis) -> None:
        super().__init__()
        self.bias = parallel.sliced(args.padded_vocab_size, dim=0, tp=tp)

    def forward(self, x: Tensor, embeddings: nn.Parameter) -> Tensor:
        return F.linear(x, cast(embeddings, x.dtype), cast(self.bias, x.dtype))


def initial_value(name: str, shape: list[int], args: Namespace) -> Tensor:
    """A whole parameter's initial value, fp32 on the CPU: it depends on the seed and its name, not on the layout."""
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("layernorm.weight") else torch.zeros(shape)
    seed = int.from_bytes(hashlib.sha256(f"{args.seed}:{name}".encode()).digest()[:8], "big") >> 1
    output = name.endswith((".dense.weight", ".dense_4h_to_h.weight"))
    std = args.init_method_std / (math.sqrt(2 * args.encoder_num_layers) if output else 1)
    return torch.empty(shape).normal_(0.0, std, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def initialise(model: T5, args: Namespace, layout: Layout, gather: Callable[..., Any] = contextlib.nullcontext) -> None:
    """Fills the parameters of any layout with the same model, rounded to the training dtype as Megatron's are.

    `gather(parameter)` is a context in which a parameter has all its values (ZeRO-3 keeps a part of each).
    """
    for name, parameter in model.named_parameters():
        # ZeRO-3 keeps the shape and parts with the values.
        shape = list(getattr(parameter, "ds_shape", parameter.shape))
        tp, (dim, blocks) = (layout.tp, parameter.tp_slice) if hasattr(parameter, "tp_slice") else (Axis(), (0, 1))
        shape[dim] *= tp.size
        whole = initial_value(name, shape, args)
        own = torch.cat([block.chunk(tp.size, dim)[tp.rank] for block in whole.chunk(blocks, dim)], dim)
        with gather(parameter):
            parameter.copy_(own.to(args.dtype))
