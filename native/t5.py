"""An encoder-decoder, such as T5: an encoder, a decoder that attends to it, and a head.

A pipeline stage builds only some layers of the encoder or of the decoder.
"""

import math
import re
from argparse import Namespace
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from native.layers import Embedding, Head, Stack
from native.parallel import Mesh, Tied
from native.tensor_parallel import VocabEmbedding, enter_tp, vocab_cross_entropy
from t5bench.costmodel.job import Architecture
from t5bench.costmodel.layout import share


class T5(nn.Module):
    """Encoder and decoder, or the layers of one of them that this pipeline stage holds, with the stage's embeddings."""

    def __init__(self, args: Namespace, model: Architecture, mesh: Mesh) -> None:
        super().__init__()
        self.model = model
        self.tp = mesh.tp
        self.pad = args.pad_token
        self.dtype = args.dtype
        self.decoder_length = args.decoder_seq_length // self.tp.sequence_parts
        self.is_first = mesh.is_first_stage
        self.is_last = mesh.is_last_stage
        stage = mesh.pp.rank
        split = args.pipeline_model_parallel_split_rank if mesh.pp.size > 1 else 0  # the decoder's first stage
        encoder_stages = range(split or 1)
        decoder_stages = range(split, mesh.pp.size)
        self.first_layer = 0
        parts: dict[str, nn.Module] = {}
        if stage in (0, split):
            parts["embedding"] = Embedding(args, model, self.tp)
        elif self.is_last and model.tied:
            self.word_embeddings_for_head = VocabEmbedding(model.padded_vocabulary, model.hidden, self.tp)
        if stage in encoder_stages:
            layers = share(model.encoder_layers, encoder_stages, stage)
            self.first_layer = layers.start
            ends = stage == encoder_stages[-1]
            parts["encoder"] = Stack(args, model, self.tp, len(layers), causal=False, is_last=ends)
        if stage in decoder_stages:
            layers = share(model.decoder_layers, decoder_stages, stage)
            self.first_layer = layers.start
            parts["decoder"] = Stack(args, model, self.tp, len(layers), causal=True, cross=True, is_last=self.is_last)
        if self.is_last:
            self.lm_head = Head(model, self.tp)
        self.language_model = nn.ModuleDict(parts)
        # Tokens of a sample that come from the stage before.
        self.received_length = args.encoder_seq_length // self.tp.sequence_parts
        if stage > split:
            self.received_length += self.decoder_length
        self.tied: list[Tied] = []  # of which other stages have copies, too
        if mesh.pp.size > 1:
            self.tied = list(self.copied_elsewhere(split, mesh.pp.size))

    def copied_elsewhere(self, split: int, stages: int) -> Iterator[Tied]:
        """What several stages have; the same list on all of them, where a stage without a copy has none to name."""
        words = self.word_embeddings()
        holders = {0, split, stages - 1} if self.model.tied else {0, split}
        yield Tied(holders, [words.weight] if words else [])
        if self.model.positions == "learned":
            has_positions = "embedding" in self.language_model
            table = self.language_model["embedding"].position_embeddings.weight if has_positions else None
            yield Tied({0, split}, [table] if has_positions else [])
        if self.model.positions == "relative":
            for name, holding in (("encoder", range(split)), ("decoder", range(split, stages))):
                has_stack = name in self.language_model
                table = self.language_model[name].relative_positions.weight if has_stack else None
                yield Tied(set(holding), [table] if has_stack else [])

    def word_embeddings(self) -> VocabEmbedding | None:
        """Of the stage's embedding, or the last stage's copy for a tied head; None on a stage without one."""
        if "embedding" in self.language_model:
            return self.language_model["embedding"].word_embeddings
        return getattr(self, "word_embeddings_for_head", None)

    def forward(
        self, encoder_tokens: Tensor, decoder_tokens: Tensor, labels: Tensor, received: Tensor | None = None
    ) -> Tensor:
        """The loss of each label, [b, s_dec] fp32 and 0 where the label is -1.

        Of stages, only the last returns that. One of the encoder returns hidden states [b, s_enc, hidden]. One of the
        decoder returns [b, s_dec + s_enc, hidden]: hidden states, and behind them the encoder's output, which the next
        stages need. `received` is what the stage before returned. Token ids and labels are int64, [b, s_enc] or
        [b, s_dec].
        """
        model = self.language_model
        # A boolean mask would be converted into this one in every layer.
        mask = torch.zeros_like(encoder_tokens, dtype=self.dtype)
        mask = mask.masked_fill_(encoder_tokens == self.pad, -math.inf)[:, None, None, :]  # [b, 1, 1, s_enc]
        if "encoder" in model:
            x = model["embedding"](encoder_tokens) if self.is_first else received
            received = model["encoder"](x, mask)  # [b, s_enc, hidden]
        if "decoder" not in model:
            return received
        if "embedding" in model:
            x = model["embedding"](decoder_tokens)  # [b, s_dec, hidden]
            encoded = received
        else:
            x, encoded = received.tensor_split([self.decoder_length], dim=1)
            encoded = encoded.contiguous()  # or each layer's cross-attention would make a copy, and keep it
        # Entering here rather than in each layer: backward sums the layers' gradients first and sends one.
        x = model["decoder"](x, mask, enter_tp(encoded, self.tp))  # [b, s_dec, hidden]
        if not self.is_last:
            return torch.cat([x, encoded], dim=1)
        words = self.word_embeddings()
        logits = self.lm_head(enter_tp(x, self.tp), words.weight if words else None)  # [b, s_dec, vocabulary / tp]
        return vocab_cross_entropy(logits, labels, self.tp, self.model.padded_vocabulary)

    def whole_name(self, name: str) -> str:
        """The name of a stage's parameter in the model of one process; each stage counts its layers from 0."""
        if name == "word_embeddings_for_head.weight":
            return "language_model.embedding.word_embeddings.weight"
        return re.sub(r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) + self.first_layer}", name)
