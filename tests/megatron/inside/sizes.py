"""In one process of the engine: its parameters, what a forward keeps and the peak are what t5bench/costmodel says."""

from argparse import Namespace
from unittest.mock import Mock

import pytest
import torch
from deepspeed.runtime.pipe import module as pipe
from megatron.arguments import core_transformer_config_from_args
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.model import Float16Module, GPTModel, GPTModelPipe, T5Model
from megatron.model.fused_softmax import FusedScaleMaskSoftmax
from torch.distributed._tools.mem_tracker import MemTracker

from t5bench.costmodel.job import Architecture, Job, Parallel
from t5bench.costmodel.machine import MIB
from t5bench.costmodel.memory import memory_of
from t5bench.costmodel.parameters import parameters

HEADS = 8
MICRO_BATCH = 2
VOCABULARY = 4224
CUBLAS = 2 * 32 * MIB  # a GPU's


def change(monkeypatch: pytest.MonkeyPatch, target: object, **values: object) -> None:
    for name, value in values.items():
        monkeypatch.setattr(target, name, value, raising=False)


def place(monkeypatch: pytest.MonkeyPatch, parallel: Parallel, stage: int) -> None:
    """Makes the engine believe that this process has a place in a layout."""
    change(
        monkeypatch,
        parallel_state,
        _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE=parallel.tensor,
        _MPU_TENSOR_MODEL_PARALLEL_RANK=0,
        _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE=parallel.pipeline,
        _MPU_PIPELINE_MODEL_PARALLEL_RANK=stage,
        _PIPELINE_MODEL_PARALLEL_SPLIT_RANK=parallel.decoder_stage,
        _EMBEDDING_GLOBAL_RANKS=[],  # it has nobody to share initial values with
        _POSITION_EMBEDDING_GLOBAL_RANKS=[],
    )


def deepspeeds(config, tensor: int, stage: int, monkeypatch) -> GPTModelPipe:
    """A stage in DeepSpeed's pipeline, without any peer."""
    answers = {"get_rank": stage * tensor, "get_world_size": 64, "new_group": None, "broadcast": None}
    for name, answer in answers.items():
        monkeypatch.setattr(pipe.dist, name, lambda *_, answer=answer, **__: answer)
    monkeypatch.setattr(pipe, "PipelineParallelGrid", Mock())
    monkeypatch.setattr(pipe.PipelineModule, "_index_tied_modules", lambda self: {})
    return GPTModelPipe(config)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["t5", "gpt", "gpt in DeepSpeed's pipeline"])
def test_parameters_of_every_stage(args: Namespace, monkeypatch, kind: str, tensor: int, stages: int):
    t5 = kind == "t5"
    deepspeed = kind.endswith("pipeline")
    parallel = Parallel(tensor, stages, deepspeed=deepspeed)
    split = parallel.decoder_stage if t5 else 0
    given = {
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "kv_channels": 4, "num_layers": 4,
        "encoder_num_layers": 4, "decoder_num_layers": 8 if t5 else None, "padded_vocab_size": VOCABULARY,
        "seq_length": 32, "pipeline_model_parallel_split_rank": split or None,
        "transformer_pipeline_model_parallel_size": stages, "pipeline_model_parallel_size": stages,
        "tensor_model_parallel_size": tensor,
        "model_type": ModelType.encoder_and_decoder if t5 else ModelType.encoder_or_decoder,
    }  # fmt: skip
    change(monkeypatch, args, **given)
    architecture = Architecture.of_arguments(vars(args), VOCABULARY)
    for stage in range(stages):
        place(monkeypatch, parallel, stage)
        parts = {"pre_process": stage in (0, split), "post_process": stage in (split - 1, stages - 1)}
        if t5 and stages > 1:
            parts |= {"add_encoder": stage < split, "add_decoder": stage >= split}
        config = core_transformer_config_from_args(args)
        if deepspeed:
            model = deepspeeds(config, tensor, stage, monkeypatch)
        else:
            model = (T5Model if t5 else GPTModel)(config, **parts)
        assert sum(p.numel() for p in model.parameters()) == parameters(architecture, parallel, stage)


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


@pytest.mark.parametrize("dropped", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["t5", "gpt"])
def test_own_allocations(args: Namespace, monkeypatch, kind: str, dropped: float):
    """What a forward keeps and the peak, on a CPU. Dropout and the masked softmax, which have kernels of their own on a
    GPU, are functions that keep what those kernels keep: a mask of one byte an element, and the probabilities."""
    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    monkeypatch.setattr(FusedScaleMaskSoftmax, "forward_torch_softmax", lambda _, *given: MaskedSoftmax.apply(*given))
    t5 = kind == "t5"
    own = 512
    cross = 128
    given = {
        "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_channels": 64,
        "ffn_hidden_size": 704, "num_layers": 2, "encoder_num_layers": 2, "decoder_num_layers": 2 if t5 else None,
        "seq_length": own, "encoder_seq_length": own, "decoder_seq_length": cross, "max_position_embeddings": own,
        "padded_vocab_size": VOCABULARY, "attention_dropout": dropped, "hidden_dropout": dropped, "bf16": True,
        "params_dtype": torch.bfloat16, "bias_dropout_fusion": False,
        "model_type": ModelType.encoder_and_decoder if t5 else ModelType.encoder_or_decoder,
    }  # fmt: skip
    change(monkeypatch, args, **given)
    model = Float16Module((T5Model if t5 else GPTModel)(core_transformer_config_from_args(args)), args).train()

    def mask(rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(MICRO_BATCH, rows, columns, dtype=torch.bool)

    encoder, decoder = (torch.ones(MICRO_BATCH, length, dtype=torch.int64) for length in (own, cross))
    if t5:
        inputs = encoder, decoder, mask(own, own), mask(cross, cross), mask(cross, own)
        labels = {"lm_labels": decoder}
    else:
        inputs = encoder, torch.arange(own).expand(MICRO_BATCH, own), mask(1, own)[:1, None]
        labels = {"labels": encoder}
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
