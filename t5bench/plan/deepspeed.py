"""DeepSpeed's part of a plan: the effective JSON, and releases that train wrongly."""

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from t5bench import REPOSITORY
from t5bench.plan.request import Request
from t5bench.record.machine import installed_version
from t5bench.record.plan import Layout

# Releases in which ZeRO-2 overwrites the gradients of each micro-batch with those of the next (DeepSpeed issue 7718).
WRONG_ZERO2 = re.compile(r"(0\.17\.6|0\.18\.[0-2])([^0-9].*)?")
# What a strategy's JSON may contain. DeepSpeed takes these as they are; for offload_optimizer the launchers add
# --cpu-optimizer. All else is refused: it comes from the settings, has no effect here, or changes what is trained, as
# contiguous_gradients, reduce_scatter, allgather_partitions and round_robin_gradients together did with ZeRO-2.
OPTIONS = {"zero_optimization", "communication_data_type", "comms_logger", "wall_clock_breakdown"}
ZERO_OPTIONS = {
    *("stage", "overlap_comm", "reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "offload_optimizer"),
    *("offload_param", "memory_efficient_linear"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold"),
}


def effective_config(request: Request) -> dict[str, Any] | None:
    """A strategy's own JSON completed with the run's batch sizes (in samples), clipping norm and precision.

    DeepSpeed takes these from the JSON and Megatron from its arguments, and neither notices when they differ: a
    different micro-batch size changes the gradient scale, fp32 arguments with a bf16 JSON train in bf16. Here both come
    from the same settings. None for a strategy without DeepSpeed, or with a JSON that cannot be used.
    """
    if not request.strategy.ds_config:
        return None
    path = REPOSITORY / "ds_configs" / request.strategy.ds_config
    precision = request.value("PRECISION_FLAG")
    run_config: dict[str, Any] = {
        "train_batch_size": request.number("GLOBAL_BATCH_SIZE"),
        "train_micro_batch_size_per_gpu": request.number("MICRO_BATCH_SIZE"),
        "gradient_clipping": float(request.value("CLIP_GRAD")),
        "bf16": {"enabled": precision == "--bf16"},
        "fp16": {"enabled": precision == "--fp16"},
        # DeepSpeed's own progress lines would mix with the engine's.
        "steps_per_print": 10**9,
    }
    if request.value("GRADIENT_REDUCTION") == "fp32":
        # As Megatron's DDP does in every precision. Without data_types.grad_accum_dtype, with which DeepSpeed would
        # choose another optimizer for ZeRO-1 in bf16.
        run_config["communication_data_type"] = "fp32"
    try:
        stage_config = json.loads(path.read_text())
        _check_options(stage_config, run_config, request)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        request.findings.refuse("ds-config", f"{path}: {error}")
        return None
    zero = stage_config["zero_optimization"]
    if zero.get("overlap_comm", zero["stage"] == 3) and zero["stage"] > 1:
        warning = f"warning: overlap_comm is true in {path}, which makes ZeRO-2 and ZeRO-3 hang on GPUs"
        request.findings.notes.append(f"{warning}: set it to false (DeepSpeed's default for ZeRO-3 is true)")
    return run_config | stage_config


def _check_options(config: Mapping[str, Any], run_config: Mapping[str, Any], request: Request) -> None:
    """Raises ValueError for an option that would have no effect or change what is trained."""
    zero = config["zero_optimization"]
    stage = zero["stage"]
    if stage not in (1, 2, 3):
        raise ValueError(f"ZeRO stage {stage} is not 1, 2 or 3")
    if stage > 1 and request.number("PIPELINE_PARALLEL_SIZE") > 1:
        raise ValueError(f"DeepSpeed's pipeline engine supports only ZeRO stage 1, found {stage}")
    if twice := sorted(run_config.keys() & config.keys()):
        raise ValueError(f"{', '.join(twice)} come from the settings and must not be in the strategy's JSON")
    if unknown := sorted((config.keys() - OPTIONS) | (zero.keys() - ZERO_OPTIONS)):
        known = ", ".join(sorted(OPTIONS | ZERO_OPTIONS))
        found = f"{', '.join(unknown)} would have no effect or change what is trained"
        raise ValueError(f"{found}. A strategy's JSON may have: {known}")
    for name in ("offload_optimizer", "offload_param"):
        device = (zero.get(name) or {}).get("device", "none")
        if device not in ("cpu", "none"):
            raise ValueError(f"{name} must use the device 'cpu', found '{device}'")
        if name == "offload_param" and device == "cpu" and stage < 3:
            raise ValueError(f"offload_param needs ZeRO stage 3, found {stage}")


def offloads_optimizer(config: Mapping[str, Any] | None) -> bool:
    offload = ((config or {}).get("zero_optimization") or {}).get("offload_optimizer") or {}
    return offload.get("device", "none") == "cpu"


def check_release(request: Request, config: Mapping[str, Any] | None, layout: Layout) -> None:
    """Checks that DeepSpeed is installed, in a release that trains this stage correctly."""
    if not config:
        return
    version, stage = installed_version("deepspeed"), config["zero_optimization"]["stage"]
    install = f"pip install -r '{REPOSITORY}/requirements.txt'"
    if not version:
        request.findings.lack("no-deepspeed", f"DeepSpeed is not installed for {sys.executable}", f"Run: {install}")
    elif stage == 2 and layout.micro_batches > 1 and WRONG_ZERO2.fullmatch(version):
        request.findings.refuse(
            "deepspeed-release",
            f"DeepSpeed {version} trains ZeRO-2 on only the last of the {layout.micro_batches} micro-batches of an"
            " iteration",
            f"Install the pinned release: {install}",
        )
