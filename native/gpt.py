"""A decoder, such as GPT-2 or Llama: an embedding, causal layers, which Megatron calls the encoder, and a head.

A pipeline stage builds its share of the layers; the first has the embedding, and the last the head, for which it has a
copy of the embedding if these are tied.
"""

import re
from argparse import Namespace

from torch import Tensor, nn

from native.layers import Embedding, Head, Stack
from native.parallel import Mesh, Tied
from native.tensor_parallel import VocabEmbedding, enter_tp, vocab_cross_entropy
from t5bench.costmodel.job import Architecture
from t5bench.costmodel.layout import share


class GPT(nn.Module):
    def __init__(self, args: Namespace, model: Architecture, mesh: Mesh) -> None:
        super().__init__()
        self.model = model
        self.tp = mesh.tp
        # Tokens of a sample that come from the stage before.
        self.received_length = args.seq_length // self.tp.sequence_parts
        self.is_last = mesh.is_last_stage
        layers = share(model.decoder_layers, range(mesh.pp.size), mesh.pp.rank)
        self.first_layer = layers.start
        parts: dict[str, nn.Module] = {}
        if mesh.is_first_stage:
            parts["embedding"] = Embedding(args, model, self.tp)
        elif self.is_last and model.tied:
            self.word_embeddings_for_head = VocabEmbedding(model.padded_vocabulary, model.hidden, self.tp)
        parts["encoder"] = Stack(args, model, self.tp, len(layers), causal=True, is_last=self.is_last)
        if self.is_last:
            self.lm_head = Head(model, self.tp)
        self.language_model = nn.ModuleDict(parts)
        self.tied: list[Tied] = []  # of which another stage has a copy, too
        if mesh.pp.size > 1 and model.tied:
            words = self.word_embeddings()
            self.tied = [Tied({0, mesh.pp.size - 1}, [words.weight] if words else [])]

    def word_embeddings(self) -> VocabEmbedding | None:
        """Of the first stage's embedding, or the last stage's copy for a tied head; None on a stage without one."""
        if "embedding" in self.language_model:
            return self.language_model["embedding"].word_embeddings
        return getattr(self, "word_embeddings_for_head", None)

    def forward(self, tokens: Tensor, labels: Tensor, received: Tensor | None = None) -> Tensor:
        """The loss of each label, [b, s] fp32. Tokens and labels are int64, [b, s].

        All stages but the last return hidden states [b, s, hidden]; all but the first take them as `received`.
        """
        model = self.language_model
        x = model["embedding"](tokens) if "embedding" in model else received
        x = model["encoder"](x)  # [b, s, hidden]
        if not self.is_last:
            return x
        words = self.word_embeddings()
        logits = self.lm_head(enter_tp(x, self.tp), words.weight if words else None)  # [b, s, vocabulary / tp]
        return vocab_cross_entropy(logits, labels, self.tp, self.model.padded_vocabulary)

    def whole_name(self, name: str) -> str:
        """The name of a stage's parameter in the model of one process; each stage counts its layers from 0."""
        if name == "word_embeddings_for_head.weight":
            return "language_model.embedding.word_embeddings.weight"
        return re.sub(r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) + self.first_layer}", name)
