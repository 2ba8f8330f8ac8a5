"""The GPT-2 that Megatron-DeepSpeed trains: causal layers, which it calls the encoder, and the embedding as the head.

The first pipeline stage builds the first half of the layers, the last one the other half and a copy of the embedding.
"""

import re
from argparse import Namespace

from torch import Tensor, nn
from torch.nn import functional as F

from native.layers import Embedding, Stack
from native.parallel import Layout
from native.precision import cast
from native.tensor_parallel import VocabEmbedding, enter_tp, vocab_cross_entropy


class GPT(nn.Module):
    def __init__(self, args: Namespace, layout: Layout) -> None:
        super().__init__()
        self.tp, self.stage_length = layout.tp, args.seq_length  # the latter: tokens that travel between stages
        depth = args.num_layers // layout.pp.size
        self.first_layer, is_last = depth * layout.pp.rank, layout.last_stage
        parts: dict[str, nn.Module] = {}
        if layout.pp.rank == 0:
            parts["embedding"] = Embedding(args, self.tp)
            words = parts["embedding"].word_embeddings
        elif is_last:
            self.word_embeddings_for_head = words = VocabEmbedding(args.padded_vocab_size, args.hidden_size, self.tp)
        parts["encoder"] = Stack(args, self.tp, depth, causal=True, is_last=is_last)
        self.language_model = nn.ModuleDict(parts)
        self.tied = list(words.parameters()) if layout.pp.size > 1 else []  # the other stage has it, too
        self.is_last = is_last

    def forward(self, tokens: Tensor, labels: Tensor, received: Tensor | None = None) -> Tensor:
        """The loss of each label, [b, s] fp32. Tokens and labels are int64, [b, s].

        All stages but the last return hidden states [b, s, hidden]; all but the first take them as `received`.
        """
        model = self.language_model
        x = model["embedding"](tokens) if "embedding" in model else received
        x = model["encoder"](x)
        if not self.is_last:
            return x
        words = model["embedding"].word_embeddings if "embedding" in model else self.word_embeddings_for_head
        logits = F.linear(enter_tp(x, self.tp), cast(words.weight, x.dtype))
        return vocab_cross_entropy(logits, labels, self.tp)

    def whole_name(self, name: str) -> str:
        """The name of a stage's parameter in the model of one process; each stage counts its layers from 0."""
        if name == "word_embeddings_for_head.weight":
            return "language_model.embedding.word_embeddings.weight"
        return re.sub(r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) + self.first_layer}", name)
