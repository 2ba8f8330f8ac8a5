"""The one check of DeepSpeed's JSON: keys and values, in a strategy's file and in a record."""

import json
from typing import Any

import pytest
from support import REPO_ROOT

from t5bench import Problem
from t5bench.record.ds_config import FROM_SETTINGS, OFFLOADING, STRATEGY, ZERO, check_strategy

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
    assert check_strategy(config, FILE) == ["_comment", "seed", "model"]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            {"tensorboard": {"enabled": True, "output_path": "x"}},
            'tensorboard must be an object whose "enabled" is false',
        ),
        ({"csv_monitor": {"enabled": False, "outputpath": "x"}}, 'only "enabled", output_path, job_name'),
        ({"comet": {"samples_log_interval": "ten"}}, '"samples_log_interval" is a whole number'),
        ({"torch_autocast": {"enabled": "false"}}, 'torch_autocast must be an object whose "enabled" is false'),
        ({"amp": False}, "amp must be an object of options, found false"),
        ({"pipeline": {"stages": 2}}, "pipeline must be left out"),
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
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import DeepSpeedConfig, HybridEngineConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    watched = Watched({"train_batch_size": 1, "zero_optimization": {"stage": 1}})
    reader = DeepSpeedConfig.__new__(DeepSpeedConfig)
    reader._param_dict = watched
    reader._initialize_params(watched)
    assert len(watched.asked) > 40 and watched.asked - {"zero_optimization"} - STRATEGY.keys() <= set(FROM_SETTINGS)

    def names_of(model: Any) -> set[str]:
        return {field.alias or name for name, field in model.model_fields.items()}

    assert names_of(DeepSpeedZeroConfig) <= ZERO.keys()
    assert names_of(CommsLoggerConfig) <= STRATEGY["comms_logger"].keys()
    for model in (DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig):
        assert names_of(model) <= OFFLOADING.keys()
    parts = {"tensorboard": TensorBoardConfig, "wandb": WandbConfig, "csv_monitor": CSVConfig, "comet": CometConfig}
    for name, model in (parts | {"hybrid_engine": HybridEngineConfig}).items():
        defaults = {field: info.default for field, info in model.model_fields.items()}
        assert STRATEGY[name](defaults) is None, name
        assert STRATEGY[name]({"enabled": False, "another": 1}), name
        with pytest.raises(ValueError, match="another"):
            model(another=1)
