"""The one check of DeepSpeed's JSON: keys and values, in a strategy's file and in a record."""

import json
from typing import Any

import pytest
from support import REPO_ROOT

from t5bench import Problem
from t5bench.record.ds_config import ZERO, check_strategy

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
        (zero(reduce_bucket_size=float("inf")), "at least 1, found inf"),
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
        (zero() | {"train_batch_size": 3}, "train_batch_size come from the settings"),
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
    with pytest.raises(Problem, match=f"{name} is not an option that this project knows") as raised:
        check_strategy(zero() | {name: {"enabled": True}}, FILE)
    assert "sequences grow" in raised.value.remedy and "docs/gpt.md" in raised.value.remedy


def test_values_as_json_writes_them_are_accepted():
    check_strategy(zero(reduce_bucket_size=5e8, overlap_comm=True, offload_optimizer={"device": "none"}), FILE)
    check_strategy({"zero_optimization": {"stage": 1}}, "ninth.json")
