"""The one check of DeepSpeed's JSON: keys and values, in a strategy's file and in a record."""

import json
from typing import Any

import pytest
from support import REPO_ROOT

from t5bench import Problem
from t5bench.record.ds_config import check_effective, check_strategy

FILES = sorted((REPO_ROOT / "ds_configs").glob("*.json"))
FILE = "megatron_zero2.json"


def zero(**options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2} | options}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_projects_own_files_pass(file):
    check_strategy(json.loads(file.read_text()), file.name)


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
        (zero(offload_optimizer={"device": "cpu", "pin": True}), "zero_optimization.offload_optimizer.pin would have"),
        (zero(offload_param={"device": "cpu"}), "offload_param needs ZeRO stage 3, found 2"),
        (zero(contiguous_gradients=False), "contiguous_gradients would have no effect or change what is trained"),
        (zero(stage=True), "stage must be 1 or 2 or 3, found true"),
        (zero(stage="2"), 'stage must be 1 or 2 or 3, found "2"'),
        (zero(stage=5), "stage must be 1 or 2 or 3, found 5"),
        (zero(stage=[2]), "stage must be 1 or 2 or 3, found [2]"),
        (zero(stage=3), '"stage" is 3, but the name of the file promises 2'),
        (zero() | {"optimizer": {"type": "Adam"}}, "optimizer would have no effect"),
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
    with pytest.raises(Problem, match=f"{name} would have no effect or change what is trained") as raised:
        check_strategy(zero() | {name: {"enabled": True}}, FILE)
    assert "sequences grow" in raised.value.remedy and "docs/gpt.md" in raised.value.remedy


def test_values_as_json_writes_them_are_accepted():
    check_strategy(zero(reduce_bucket_size=5e8, overlap_comm=True, offload_optimizer={"device": "none"}), FILE)
    check_strategy({"zero_optimization": {"stage": 1}}, "ninth.json")


def test_a_record_has_the_settings_as_well():
    settings = {
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "steps_per_print": 10**9,
        "bf16": {"enabled": True}, "fp16": {"enabled": False},
    }  # fmt: skip
    check_effective(settings | zero(), "node0.json")
    for wrong in ({"gradient_clipping": "1"}, {"bf16": True}, {"bf16": {"enabled": 1}}, {"train_batch_size": 0}):
        with pytest.raises(Problem, match=next(iter(wrong))):
            check_effective(settings | zero() | wrong, "node0.json")
