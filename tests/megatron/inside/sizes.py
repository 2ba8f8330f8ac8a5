"""Inside the engine, in one process: every rank of every layout has the parameters that t5bench/model says it has."""

from argparse import Namespace
from unittest.mock import Mock

import pytest
from deepspeed.runtime.pipe import module as pipe
from megatron.arguments import core_transformer_config_from_args
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.model import GPTModel, GPTModelPipe, T5Model

from t5bench.model.job import Architecture, Parallel
from t5bench.model.parameters import parameters

HEADS, VOCABULARY = 8, 4224


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch):
    """Makes the engine believe that this process has a place in a layout."""

    def put(parallel: Parallel, stage: int) -> None:
        sizes = {
            "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE": parallel.tensor,
            "_MPU_TENSOR_MODEL_PARALLEL_RANK": 0,
            "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": parallel.pipeline,
            "_MPU_PIPELINE_MODEL_PARALLEL_RANK": stage,
            "_PIPELINE_MODEL_PARALLEL_SPLIT_RANK": parallel.decoder_stage,
            "_EMBEDDING_GLOBAL_RANKS": [],  # it has nobody to share initial values with
            "_POSITION_EMBEDDING_GLOBAL_RANKS": [],
        }
        for name, value in sizes.items():
            monkeypatch.setattr(parallel_state, name, value)

    return put


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
def test_parameters_of_every_stage(args: Namespace, place, monkeypatch, kind: str, tensor: int, stages: int):
    t5, deepspeed = kind == "t5", kind.endswith("pipeline")
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
    for name, value in given.items():
        monkeypatch.setattr(args, name, value, raising=False)
    architecture = Architecture.of_arguments(vars(args), VOCABULARY)
    for stage in range(stages):
        place(parallel, stage)
        parts = {"pre_process": stage in (0, split), "post_process": stage in (split - 1, stages - 1)}
        if t5 and stages > 1:
            parts |= {"add_encoder": stage < split, "add_decoder": stage >= split}
        config = core_transformer_config_from_args(args)
        if deepspeed:
            model = deepspeeds(config, tensor, stage, monkeypatch)
        else:
            model = (T5Model if t5 else GPTModel)(config, **parts)
        assert sum(p.numel() for p in model.parameters()) == parameters(architecture, parallel, stage)
