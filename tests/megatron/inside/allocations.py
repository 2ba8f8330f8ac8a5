"""Inside the engine, in one process: what a forward keeps and the peak are what t5bench/model says.

The engine runs on a CPU. Dropout and the masked softmax, which have kernels of their own on a GPU, are replaced by
functions that keep what those kernels keep: a mask of one byte an element, and the probabilities.
"""

from argparse import Namespace

import pytest
import torch
from megatron.arguments import core_transformer_config_from_args
from megatron.core.enums import ModelType
from megatron.model import Float16Module, GPTModel, T5Model
from megatron.model.fused_softmax import FusedScaleMaskSoftmax
from torch.distributed._tools.mem_tracker import MemTracker

from t5bench.model.job import Architecture, Job
from t5bench.model.machine import MIB
from t5bench.model.memory import memory_of

MICRO_BATCH, VOCABULARY = 2, 4224
CUBLAS = 2 * 32 * MIB  # a GPU's


class MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, mask):
        probabilities = torch.softmax(scores if mask is None else scores.masked_fill(mask, -10000.0), -1)
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    def backward(ctx, gradient):
        (probabilities,) = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, probabilities, -1, probabilities.dtype), None


def dropout(values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(values, p, training)[0] if training and p else values


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    monkeypatch.setattr(FusedScaleMaskSoftmax, "forward_torch_softmax", lambda _, *given: MaskedSoftmax.apply(*given))


@pytest.mark.parametrize("dropped", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["t5", "gpt"])
def test_own_allocations(args: Namespace, as_on_a_gpu, monkeypatch, kind: str, dropped: float):
    t5, own, cross = kind == "t5", 512, 128
    given = {
        "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_channels": 64,
        "ffn_hidden_size": 704, "num_layers": 2, "encoder_num_layers": 2, "decoder_num_layers": 2 if t5 else None,
        "seq_length": own, "encoder_seq_length": own, "decoder_seq_length": cross, "max_position_embeddings": own,
        "padded_vocab_size": VOCABULARY, "attention_dropout": dropped, "hidden_dropout": dropped, "bf16": True,
        "params_dtype": torch.bfloat16, "bias_dropout_fusion": False,
        "model_type": ModelType.encoder_and_decoder if t5 else ModelType.encoder_or_decoder,
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setattr(args, name, value, raising=False)
    model = Float16Module((T5Model if t5 else GPTModel)(core_transformer_config_from_args(args)), args).train()

    def tokens(length: int) -> torch.Tensor:
        return torch.ones(MICRO_BATCH, length, dtype=torch.int64)

    def mask(rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(MICRO_BATCH, rows, columns, dtype=torch.bool)

    if t5:
        inputs = tokens(own), tokens(cross), mask(own, own), mask(cross, cross), mask(cross, own)
        labels = {"lm_labels": tokens(cross)}
    else:
        inputs = tokens(own), torch.arange(own).expand(MICRO_BATCH, own), mask(1, own)[:1, None]
        labels = {"labels": tokens(own)}
    with MemTracker() as tracker:
        tracker.track_external(model)
        weights = total(tracker, "current")
        loss = model(*inputs, **labels)
        peak = total(tracker, "peak") - weights
        (loss[0] if isinstance(loss, tuple) else loss).sum().backward()
    architecture = Architecture.of_arguments(vars(args), VOCABULARY)
    found = memory_of(Job(architecture, micro_batch=MICRO_BATCH, dropout=dropped, engine="megatron"))
    scores = found.states["workspace"] - CUBLAS  # the engine's buffer of scores
    assert peak == pytest.approx(scores + sum(found.moments["loss"].values()), rel=0.002)


def total(tracker: MemTracker, kind: str) -> int:
    return tracker.get_tracker_snapshot(kind)[torch.device("cpu")]["Total"]
