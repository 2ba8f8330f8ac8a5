"""The T5 that Megatron-DeepSpeed trains: an encoder, a decoder that attends to it, and a head with an output bias.

A pipeline stage builds only the encoder or the decoder.
"""

import math
from argparse import Namespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from native.layers import Embedding, Stack
from native.parallel import Axis, Mesh
from native.precision import cast
from native.tensor_parallel import enter_tp, sliced, vocab_cross_entropy


class T5(nn.Module):
    """Encoder and decoder, or the one of them that this pipeline stage holds, with the stage's own embeddings."""

    def __init__(self, args: Namespace, mesh: Mesh) -> None:
        super().__init__()
        self.tp = mesh.tp
        self.pad = args.pad_token
        self.dtype = args.dtype
        # Tokens of a sample that travel between pipeline stages.
        self.stage_length = args.encoder_seq_length // self.tp.sequence_parts
        parts: dict[str, nn.Module] = {"embedding": Embedding(args, self.tp)}
        if mesh.pp.rank == 0:
            parts["encoder"] = Stack(args, self.tp, args.encoder_num_layers, causal=False)
        if mesh.is_last_stage:
            parts["decoder"] = Stack(args, self.tp, args.decoder_num_layers, causal=True, cross=True)
            self.lm_head = LMHead(args, self.tp)
        self.language_model = nn.ModuleDict(parts)
        self.tied: list[nn.Parameter] = []  # parameters of which the other stage has a copy
        if mesh.pp.size > 1:
            self.tied = list(parts["embedding"].parameters())

    def forward(
        self, encoder_tokens: Tensor, decoder_tokens: Tensor, labels: Tensor, encoded: Tensor | None = None
    ) -> Tensor:
        """The loss of each label, [b, s_dec] fp32 and 0 where the label is -1.

        A stage without the decoder returns the encoder's output [b, s_enc, hidden], and a stage without the encoder
        takes that as `encoded`. Token ids and labels are int64, [b, s_enc] or [b, s_dec].
        """
        model = self.language_model
        # A boolean mask would be converted into this one in every layer.
        mask = torch.zeros_like(encoder_tokens, dtype=self.dtype)
        mask = mask.masked_fill_(encoder_tokens == self.pad, -math.inf)[:, None, None, :]  # [b, 1, 1, s_enc]
        if "encoder" in model:
            encoded = model["encoder"](model["embedding"](encoder_tokens), mask)
        if "decoder" not in model:
            return encoded
        # Entering here rather than in each layer: backward sums the layers' gradients first and sends one.
        encoded = enter_tp(encoded, self.tp)
        x = model["decoder"](model["embedding"](decoder_tokens), mask, encoded)  # [b, s_dec, hidden]
        words = model["embedding"].word_embeddings
        logits = self.lm_head(enter_tp(x, self.tp), words.weight)  # [b, s_dec, vocabulary / tp]
        return vocab_cross_entropy(logits, labels, self.tp)

    def whole_name(self, name: str) -> str:
        """The name of a stage's parameter in the model of one process: here the same."""
        return name


class LMHead(nn.Module):
    def __init__(self, args: Namespace, tp: Axis) -> None:
        super().__init__()
        self.bias = sliced(args.padded_vocab_size, dim=0, tp=tp)

    def forward(self, x: Tensor, embeddings: nn.Parameter) -> Tensor:
        return F.linear(x, cast(embeddings, x.dtype), cast(self.bias, x.dtype))
