"""The one check of DeepSpeed's JSON: keys and values, in a strategy's file and in a record."""

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from support import REPO_ROOT

from t5bench import Problem
from t5bench.record.ds_config import FROM_SETTINGS, OFFLOADING, STRATEGY, ZERO, WithoutEffect, check_strategy

FILES = sorted((REPO_ROOT / "ds_configs").glob("*.json"))
FILE = "megatron_zero2.json"


def zero(**options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2} | options}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_projects_own_files_pass(file):
    check_strategy(json.loads(file.read_text()), file.name)


USUAL = {
    "zero_optimization": {
        "stage": 2, "contiguous_gradients": True, "reduce_scatter": True, "allgather_partitions": True,
        "round_robin_gradients": False, "ignore_unused_parameters": True, "zero_hpz_partition_size": 1,
        "stage3_gather_16bit_weights_on_model_save": True, "zero_quantized_weights": False,
        "load_from_fp32_weights": True, "elastic_checkpoint": False, "legacy_stage1": False,
    },
    "prescale_gradients": False, "gradient_predivide_factor": 1.0, "dump_state": False, "memory_breakdown": False,
    "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": True, "sparse_gradients": False,
    "flops_profiler": {"enabled": False}, "tensorboard": {"enabled": False}, "wandb": {"enabled": False},
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
    "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False},
    "checkpoint": {"tag_validation": "Warn"}, "data_types": {"grad_accum_dtype": None}, "amp": {"enabled": False},
    "wall_clock_breakdown": False,
}  # fmt: skip


def test_usual_options_that_change_no_numbers_pass():
    check_strategy(USUAL, FILE)


# What people have in files for other trainers and for earlier releases, all of it off or at its default.
WITHOUT_EFFECT: dict[str, Mapping[str, Any]] = {
    "apex": {"amp": {"enabled": False, "opt_level": "O1"}},
    "elasticity": {"elasticity": {"enabled": False, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}},
    "old curriculum": {"curriculum_learning": {"enabled": False, "curriculum_type": "seqlen", "min_difficulty": 8}},
    "layer drop": {"progressive_layer_drop": {"enabled": False, "theta": 0.5, "gamma": 0.001}},
    "nebula": {"nebula": {"enabled": False, "persistent_storage_path": "/foo"}},
    "mixture of quantization": {"quantize_training": {"enabled": False, "quantize_verbose": True}, "eigenvalue": {}},
    "sparse gradients": {"sparse_gradients": False, "disable_allgather": False, "graph_harvesting": False},
    "compression": {
        "compression_training": {
            "weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {}},
            "sparse_pruning": {"shared_parameters": {"enabled": False, "schedule_offset": 30}},
        }
    },
    "old offload": zero(cpu_offload=False, cpu_offload_params=False, cpu_offload_use_pin_memory=False),
    "MiCS and LoCo": zero(mics_shard_size=-1, mics_hierarchical_params_gather=False, zeropp_loco_param=None),
    "pipeline": {"pipeline": {"stages": "auto", "partition": "best", "seed_layers": False, "grad_partitioned": True}},
    "tensor parallel": {"tensor_parallel": {"autotp_size": 0}, "sequence_parallel_size": 1},
    "tensor parallel of one": {"tensor_parallel": {"autotp_size": 1}},
    "compiler": {"compile": {"enabled": False, "backend": "inductor", "kwargs": {}}},
    "compiler of axolotl": {"compile": {"disable": False, "backend": "inductor"}},
    "autocast": {"torch_autocast": {"enabled": False, "dtype": "bfloat16", "lower_precision_safe_modules": [1]}},
    "monitors": {"csv_monitor": {"enabled": False, "output_path": None}, "wandb": {"entity": "us"}, "comet": {}},
    "hybrid engine": {"hybrid_engine": {"enabled": False, "max_out_tokens": 512, "of_a_fork": 1}},
    "NVMe": {"aio": {"use_gds": True, "block_size": 1048576}},
    "data types": {"data_types": {"grad_accum_dtype": None}, "communication_data_type": None, "fp32_allreduce": False},
    "checkpointing": {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
    "others' keys": {"moe": {"enabled": True}, "vocabulary_size": 32100, "monitor_config": {"enabled": False}},
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_deepspeed_does_not_get_what_has_no_effect(name: str):
    """Some releases refuse an option that another one had, even if it is off."""
    config = copy.deepcopy(zero() | WITHOUT_EFFECT[name])
    assert check_strategy(config, FILE).options == zero()


# Each leaves something of what DeepSpeed does to something else than the settings.
WITH_EFFECT: dict[str, Mapping[str, Any]] = {
    "divides the batch": {"sequence_parallel_size": 2},
    "compiles": {"compile": {"deepcompile": True}},
    "sparse graphs": {"graph_harvesting": True},
    "prunes": {"compression_training": {"head_pruning": {"shared_parameters": {"enabled": True}}}},
    "removes layers": {"compression_training": {"layer_reduction": {"enabled": True, "keep_number_layer": 5}}},
    "quantizes": {"quantize_training": {"enabled": True, "quantize_bits": {"start_bits": 12}}},
    "divides layers": {"pipeline": {"stages": 2}},
    "seeds layers": {"pipeline": {"seed_layers": True}},
    "splits tensors": {"tensor_parallel": {"autotp_size": 4}},
    "shards elsewhere": zero(mics_shard_size=8),
    "offloads": zero(cpu_offload=True),
    "word of another library": {"amp": {"enabled": "auto"}},
    "old word for bf16": {"communication_data_type": "bfp16"},
    "level that is none": {"log_level": "chatty"},
    "stage of another type": zero(stage=2.0),
}


@pytest.mark.parametrize("name", WITH_EFFECT)
def test_what_has_an_effect_beyond_the_settings_is_refused(name: str):
    with pytest.raises(Problem):
        check_strategy(copy.deepcopy(zero() | WITH_EFFECT[name]), FILE)


def test_deepspeed_reads_what_it_gets():
    """Its own reader, with every part at once; and what was left out changes none of its values."""
    from deepspeed.runtime.config import DeepSpeedConfig

    def read(options: Mapping[str, Any]) -> dict[str, str]:
        config = DeepSpeedConfig({"train_batch_size": 1} | copy.deepcopy(options))
        return {name: str(value) for name, value in vars(config).items() if name != "_param_dict"}

    given = copy.deepcopy(USUAL)
    for options in WITHOUT_EFFECT.values():
        for name, value in options.items():
            given[name] = {**value, **given[name]} if name in given and isinstance(value, dict) else value
    checked = check_strategy(copy.deepcopy(given), FILE).options
    handed_on = read(checked)
    for name, value in given.items():
        try:
            whole = read(checked | {name: value})
        except Exception:  # what this release refuses it cannot tell the effect of
            continue
        assert {key for key, said in whole.items() if plain(said) != plain(handed_on[key])} == set(), name


def plain(said: str) -> str:
    """Without the addresses of objects."""
    return re.sub("0x[0-9a-f]+", "", said)


def test_the_defaults_are_deepspeeds():
    """Where an option may only stand at its default."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = {field.alias or name: field.default for name, field in DeepSpeedZeroConfig.model_fields.items()}
    checked = 0
    for name, check in ZERO.items():
        if name in fields and callable(check) and "its default" in (check(object()) or ""):
            assert check(fields[name]) is None, name
            checked += 1
    assert checked > 10


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (zero(reduce_bucket_size="auto"), 'reduce_bucket_size must be a whole number of at least 1, found "auto"'),
        (zero(reduce_bucket_size=0), "at least 1, found 0"),
        (zero(reduce_bucket_size=None), "at least 1, found null"),
        (zero(reduce_bucket_size={}), "at least 1, found {}"),
        (zero(reduce_bucket_size=True), "at least 1, found true"),
        (zero(reduce_bucket_size=2.5), "at least 1, found 2.5"),
        (zero(reduce_bucket_size=float("inf")), "at least 1, found Infinity"),
        (zero(reduce_bucket_size=-5e8), "at least 1, found -5"),
        (zero(overlap_comm="false"), 'zero_optimization.overlap_comm must be true or false, found "false"'),
        (zero(overlap_comm=0), "must be true or false, found 0"),
        (zero(offload_optimizer={}), "offload_optimizer names no device"),
        (zero(offload_optimizer=None), "offload_optimizer must be an object of options, found null"),
        (zero(offload_optimizer={"device": "nvme"}), 'offload_optimizer.device must be "cpu" or "none", found "nvme"'),
        (zero(offload_optimizer={"device": "cpu", "pin_memory": "true"}), "pin_memory must be true or false"),
        (zero(offload_optimizer={"device": "cpu", "pin": True}), "offload_optimizer.pin is not an option"),
        (zero(offload_param={"device": "cpu"}), "offload_param needs ZeRO stage 3, found 2"),
        (zero(contiguous_gradients=False), "contiguous_gradients must be true, its default, because"),
        (zero(zero_quantized_gradients=True), "zero_quantized_gradients must be false, its default, because gradients"),
        (zero(round_robin_gradients=0), "round_robin_gradients must be false, its default"),
        (zero(stage=True), "stage must be 1 or 2 or 3, found true"),
        (zero(stage="2"), 'stage must be 1 or 2 or 3, found "2"'),
        (zero(stage=5), "stage must be 1 or 2 or 3, found 5"),
        (zero(stage=[2]), "stage must be 1 or 2 or 3, found [2]"),
        (zero(stage=3), '"stage" is 3, but the name of the file promises 2'),
        (zero() | {"optimizer": {"type": "Adam"}}, "optimizer must be left out: the engine makes Adam"),
        (zero() | {"train_batch_size": 3}, "train_batch_size comes from the settings"),
        (zero() | {"wall_clock_breakdown": 1}, "wall_clock_breakdown must be true or false, found 1"),
        (zero() | {"communication_data_type": "int8"}, "communication_data_type must be"),
        (zero() | {"comms_logger": True}, "comms_logger must be an object of options, found true"),
        ({"zero_optimization": None}, "zero_optimization must be an object of options, found null"),
        ({"zero_optimization": {}}, "there is no zero_optimization with a stage"),
        ({}, "there is no zero_optimization with a stage"),
        ([], "the file must be an object of options, found []"),
        (None, "found null"),
    ],
)  # fmt: skip
def test_a_value_that_deepspeed_would_misread_is_named(config: Any, said: str):
    with pytest.raises(Problem) as raised:
        check_strategy(config, FILE)
    assert said in str(raised.value) and str(raised.value).startswith(FILE) and raised.value.remedy


@pytest.mark.parametrize("name", ["curriculum_learning", "data_efficiency"])
def test_curriculum_learning_is_refused_with_its_reason(name: str):
    with pytest.raises(Problem, match=f"{name} must be .* because sequences would grow") as raised:
        check_strategy(zero() | {name: {"enabled": True}}, FILE)
    assert "sequences grow" in raised.value.remedy and "docs/gpt.md" in raised.value.remedy


def test_values_as_json_writes_them_are_accepted():
    check_strategy(zero(reduce_bucket_size=5e8, overlap_comm=True, offload_optimizer={"device": "none"}), FILE)
    check_strategy({"zero_optimization": {"stage": 1}}, "ninth.json")


def test_all_faults_are_told_at_once():
    config = zero(overlap_comm="auto", reduce_scatter=False, offload_param={"pin": 1}, stage=1)
    config["zero_optimization"]["allgather_bucket_sizes"] = 5
    config |= {"train_batch_size": "auto", "fp16": {"enabled": True}}
    config |= {"optimizer": {"type": "AdamW"}, "zero_optimisation": {}}
    with pytest.raises(Problem) as raised:
        check_strategy(config, FILE)
    told = raised.value.remedy.splitlines()
    assert raised.value.found == f"{FILE}: 9 things must change" and len(told) == 9
    for part in (
        "fp16, train_batch_size come from the settings",
        'overlap_comm must be true or false, found "auto"',
        "reduce_scatter must be true, its default",
        "allgather_bucket_sizes is not an option that this project knows. Write allgather_bucket_size, or remove it",
        "offload_param.pin is not an option that this project knows",
        "offload_param names no device",
        '"stage" is 1, but the name of the file promises 2',
        "optimizer must be left out",
        "zero_optimisation is not an option that this project knows. Write zero_optimization",
    ):
        assert sum(part in line for line in told) == 1, part


def test_what_is_off_may_say_what_it_likes_and_what_deepspeed_does_not_read_passes():
    config = zero(offload_optimizer={"device": "none", "nvme_path": "/local_nvme", "pipeline_read": True})
    config |= {
        "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "output_file": None},
        "csv_monitor": {"enabled": False, "output_path": "/job/logs", "job_name": "trial"},
        "wandb": {"team": "us", "project": "t5"},
        "data_efficiency": {"enabled": False, "seed": 3},
        "autotuning": {"enabled": False, "fast": True, "tuner_type": "gridsearch"},
        "elasticity": {"enabled": False, "max_train_batch_size": 2000},
        "_comment": "from the cluster's wiki", "seed": 42, "model": {"hidden": 5},
    }  # fmt: skip
    assert check_strategy(config, FILE).unread == ["_comment", "seed", "model"]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            {"tensorboard": {"enabled": True, "output_path": "x"}},
            'tensorboard must be an object whose "enabled" is false',
        ),
        ({"torch_autocast": {"enabled": "false"}}, 'torch_autocast must be an object whose "enabled" is false'),
        ({"amp": False}, "amp must be an object of options, found false"),
        ({"pipeline": {"stages": 2}}, 'pipeline.stages must be "auto", its default'),
        ({"Gradient-Clipping": 1.0}, "Gradient-Clipping is not an option that this project knows"),
        ({"wall_clock_brakedown": True}, "wall_clock_brakedown is not an option"),
    ],
)
def test_what_is_on_or_misspelt_is_refused(part: dict[str, Any], said: str):
    with pytest.raises(Problem) as raised:
        check_strategy(zero() | part, FILE)
    assert said in raised.value.found


class Watched(dict):
    """An object of JSON that notes which of its keys are asked for."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def keys(self) -> "Watched":  # type: ignore[override]  # which is only asked whether it contains a key
        return self


def test_every_option_that_deepspeed_reads_is_known():
    """By DeepSpeed's own reader and models: a key that changes numbers must not pass as one that nobody reads."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.config import (
        _REMOVED_TOP_LEVEL_CONFIG_KEYS,
        _REMOVED_ZERO_CONFIG_KEYS,
        DeepSpeedConfig,
    )
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    watched = Watched({"train_batch_size": 1, "zero_optimization": {"stage": 1}})
    DeepSpeedConfig(watched)
    unknown = watched.asked - STRATEGY.keys() - {*FROM_SETTINGS, "zero_optimization"}
    assert len(watched.asked) > 40 and unknown <= {"vocabulary_size"}  # of which DeepSpeed says whether 8 divides it

    def names_of(model: Any) -> set[str]:
        return {field.alias or name for name, field in model.model_fields.items()}

    assert _REMOVED_TOP_LEVEL_CONFIG_KEYS.keys() <= STRATEGY.keys() and _REMOVED_ZERO_CONFIG_KEYS.keys() <= ZERO.keys()
    assert names_of(DeepSpeedZeroConfig) <= ZERO.keys()
    assert names_of(CommsLoggerConfig) <= STRATEGY["comms_logger"].keys()
    for model in (DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig):
        assert names_of(model) <= OFFLOADING.keys()
    for name in ("tensorboard", "wandb", "csv_monitor", "comet", "hybrid_engine", "compile"):
        assert isinstance(STRATEGY[name], WithoutEffect)  # whatever it is told, DeepSpeed does not hear it
