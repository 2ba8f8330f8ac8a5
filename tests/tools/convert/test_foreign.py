"""Checkpoints and models of strangers: wrong kinds, types and sizes are refused before anything is built."""

import json
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from t5bench import Problem
from t5bench.checkpoint_form import TRACKER
from t5bench.tools.convert.foreign import check_config
from t5bench.tools.convert.trained import TrainedModel

ARGUMENTS: dict[str, Any] = {
    "num_layers": 2, "encoder_num_layers": 2, "decoder_num_layers": None, "hidden_size": 64, "ffn_hidden_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_channels": 16, "padded_vocab_size": 128,
    "max_position_embeddings": 32, "seq_length": 32, "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1, "deepspeed": False, "ds_pipeline_enabled": False, "zero_stage": 1.0,
    "layernorm_epsilon": 1e-5, "make_vocab_size_divisible_by": 128, "params_dtype": torch.float32,
    "tokenizer_model": "tokenizer", "vocab_file": None, "swiglu": False, "untie_embeddings_and_output_weights": False,
    "bias_gelu_fusion": True,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 32, "vocab_size": 100}
T5 = {"model_type": "blenderbot", "encoder_layers": 2, "decoder_layers": 2, "d_model": 64, "vocab_size": 100,
      "encoder_attention_heads": 4, "decoder_attention_heads": 4}  # fmt: skip


def make_checkpoint(run: Path, content: Any, tracker: str = "3") -> Path:
    folder = run / "checkpoints" / "iter_0000003" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save(content, folder / "model_optim_rng.pt")
    (run / "checkpoints" / TRACKER).write_text(tracker)
    return run


def test_an_honest_checkpoint_is_read(tmp_path: Path):
    run = make_checkpoint(tmp_path, {"args": Namespace(**ARGUMENTS), "model": {}})
    assert TrainedModel.of_run(run).architecture.layers == 2


CONTENTS = {
    "a list": ([1, 2], "holds a list"),
    "a number": (7, "holds a int"),
    "a tensor": (torch.zeros(3), "holds a Tensor"),
    "None": (None, "holds a NoneType"),
    "no arguments": ({"model": {}}, "has no arguments of the engine"),
    "arguments as a dictionary": ({"args": ARGUMENTS, "model": {}}, "has no arguments of the engine"),
    "arguments without values": ({"args": Namespace(), "model": {}}, "missing required field"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path, name: str):
    content, said = CONTENTS[name]
    with pytest.raises(Problem, match=said):
        TrainedModel.of_run(make_checkpoint(tmp_path, content))


@pytest.mark.parametrize(("name", "value"), [
    ("num_layers", 10**9), ("num_layers", 0), ("num_layers", "2"), ("num_layers", [2]), ("num_layers", 2.5),
    ("hidden_size", -64), ("hidden_size", 10**12), ("num_attention_heads", 0), ("num_attention_heads", 5),
    ("padded_vocab_size", None), ("padded_vocab_size", 10**12), ("tensor_model_parallel_size", 0),
    ("pipeline_model_parallel_size", "1"), ("deepspeed", "no"), ("zero_stage", 7), ("kv_channels", {}),
    ("layernorm_epsilon", float("nan")), ("make_vocab_size_divisible_by", -1),
])  # fmt: skip
def test_arguments_of_wrong_types_and_sizes_are_refused(tmp_path: Path, name: str, value: Any):
    run = make_checkpoint(tmp_path, {"args": Namespace(**ARGUMENTS | {name: value}), "model": {}})
    began = time.monotonic()
    with pytest.raises(Problem, match="arguments that no engine takes"):
        TrainedModel.of_run(run)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("tracker", ["", "three", "-3", "3\n4", "1e3"])
def test_a_tracker_that_names_no_iteration_is_refused(tmp_path: Path, tracker: str):
    run = make_checkpoint(tmp_path, {"args": Namespace(**ARGUMENTS), "model": {}}, tracker)
    with pytest.raises(Problem, match="names no iteration"):
        TrainedModel.of_run(run)


@pytest.mark.parametrize("config", [GPT2, T5], ids=["gpt2", "blenderbot"])
def test_an_honest_configuration_is_accepted(tmp_path: Path, config: dict[str, Any]):
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32", "architectures": ["x"]}))
    check_config(tmp_path)


@pytest.mark.parametrize(("name", "value"), [
    ("n_head", 0), ("n_head", "32"), ("n_head", [4]), ("n_head", 3), ("n_head", None), ("n_layer", 10**9),
    ("n_layer", -1), ("n_layer", 2.5), ("n_layer", True), ("n_embd", 10**10), ("n_positions", 0),
    ("vocab_size", 10**12), ("vocab_size", "100"), ("n_inner", "x"), ("activation_function", 3),
    ("layer_norm_epsilon", "1e-5"), ("resid_pdrop", 7), ("model_type", None), ("model_type", ["gpt2"]),
])  # fmt: skip
def test_a_configuration_of_wrong_types_and_sizes_is_refused(tmp_path: Path, name: str, value: Any):
    (tmp_path / "config.json").write_text(json.dumps(GPT2 | {name: value}))
    with pytest.raises(Problem, match=r"config\.json"):
        check_config(tmp_path)


@pytest.mark.parametrize(("name", "value"), [
    ("encoder_layers", 10**9), ("decoder_layers", "2"), ("d_model", 63), ("encoder_attention_heads", 0),
    ("decoder_attention_heads", [4]), ("max_position_embeddings", -1), ("dropout", "high"),
])  # fmt: skip
def test_a_t5_s_configuration_of_wrong_types_and_sizes_is_refused(tmp_path: Path, name: str, value: Any):
    (tmp_path / "config.json").write_text(json.dumps(T5 | {name: value}))
    with pytest.raises(Problem, match=r"config\.json"):
        check_config(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "7", "{", "[" * 100_000, '"gpt2"', "\0"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Problem, match=r"config\.json"):
        check_config(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(Problem, match="not a regular file"):
        check_config(tmp_path)
