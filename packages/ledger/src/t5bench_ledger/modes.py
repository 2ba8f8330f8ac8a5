"""What the ledger trains: strategies, and the modes in which releases of DeepSpeed were wrong."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The last release of every minor version since 0.14, and those around which upstream broke or mended something.
RELEASES = (
    *("0.14.5", "0.15.4", "0.16.9"),
    *("0.17.5", "0.17.6", "0.18.0", "0.18.1", "0.18.2", "0.18.3", "0.18.4", "0.18.5", "0.18.6", "0.18.9"),
    *("0.19.0", "0.19.1", "0.19.2", "0.19.3", "0.19.4", "0.19.8"),
)
# transformers' and accelerate's: those around which upstream broke or mended something, and some between them.
RELEASES_OF = {
    "deepspeed": RELEASES,
    "transformers": (
        *("4.42.4", "4.44.2", "4.45.2", "4.46.0", "4.46.3", "4.47.1", "4.48.3", "4.53.3", "4.54.1", "4.57.6"),
        *("5.0.0", "5.9.0", "5.10.4", "5.14.1", "5.15.1", "5.24.0"),
    ),
    "accelerate": (
        *("0.34.2", "1.0.1", "1.1.1", "1.2.1", "1.4.0", "1.6.0", "1.8.1", "1.10.1", "1.12.0", "1.14.0", "1.15.0"),
    ),
}
# With which releases of other libraries a library is tried.
BESIDE = {"deepspeed": {}, "transformers": {"accelerate": "1.15.0"}, "accelerate": {"deepspeed": "0.19.8"}}
BASELINE = "ddp"
# DeepSpeed's own pipeline engine, with the small model of pipeline.py: the native engine's pipeline needs no DeepSpeed.
# With ZeRO-1, as the 3D launcher uses it.
DEEPSPEED_PIPELINE = "deepspeed-pipeline"
# DeepSpeed without sharding, and its pipeline without sharding, which no launcher has.
STAGE_0 = "stage 0"
PIPELINE_STAGE_0 = "deepspeed-pipeline stage 0"
# FSDP2 over one mesh and tensor parallelism over another, which no launcher has either: two_meshes.py.
FSDP2_TENSOR = "fsdp2 tensor"
OF_NO_LAUNCHER = (STAGE_0, PIPELINE_STAGE_0, FSDP2_TENSOR)
PIPELINES = {DEEPSPEED_PIPELINE: 1, PIPELINE_STAGE_0: 0}  # with their ZeRO stages
OVERFLOWING = {STAGE_0: 0, "zero1": 1, "zero2": 2, "zero3": 3}  # what overflow.py trains, shapes.py but stage 0
ZERO_STRATEGIES = ("zero1", "zero2", "zero3", "zero3_offload")
DEEPSPEED_STRATEGIES = (*ZERO_STRATEGIES, STAGE_0, *PIPELINES)
# What trainers.py trains: transformers' Trainer and accelerate's loop, each over DDP, the loop also over ZeRO.
TRAINER = "trainer"
ACCELERATE = "accelerate"
ACCELERATE_STAGES = {ACCELERATE: 0, "accelerate zero2": 2, "accelerate zero3": 3}  # with their ZeRO stages
TRAINERS = (TRAINER, *ACCELERATE_STAGES)
# What needs PyTorch alone. DDP is compared with one process, the others with DDP.
TORCH_STRATEGIES = (BASELINE, "tensor", "pipeline", "hybrid", "fsdp2")
STRATEGIES = (*DEEPSPEED_STRATEGIES, *TORCH_STRATEGIES, FSDP2_TENSOR, *TRAINERS)
STRATEGIES_OF = {"deepspeed": DEEPSPEED_STRATEGIES, "transformers": (TRAINER,), "accelerate": tuple(ACCELERATE_STAGES)}

NAMES = {
    "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "zero3_offload": "ZeRO-3 + offload",
    STAGE_0: "stage 0", DEEPSPEED_PIPELINE: "DeepSpeed's pipeline (ZeRO-1)",
    PIPELINE_STAGE_0: "DeepSpeed's pipeline (stage 0)", "ddp": "DDP", "tensor": "Tensor", "pipeline": "Pipeline",
    "hybrid": "Hybrid", "fsdp2": "FSDP2", FSDP2_TENSOR: "FSDP2 and tensor", "trainer": "Trainer over DDP",
    "accelerate": "accelerate over DDP", "accelerate zero2": "accelerate over ZeRO-2",
    "accelerate zero3": "accelerate over ZeRO-3",
}  # fmt: skip
LIBRARY = {
    "deepspeed": "DeepSpeed", "torch": "PyTorch", "transformers": "transformers", "accelerate": "accelerate",
}  # fmt: skip

PIPELINE_CLIPPING = "pipeline clipping"
PIPELINE_CLIP_NORM = 0.05  # the norm is 0.15 to 0.20

ITERATIONS = 6
SAVED_AFTER = 3
# The recipe of scripts/check_parity.sh, in which a change of 1 % in any number shows, over half its iterations.
SETTINGS = {
    "ENGINE": "native", "MODEL_PRESET": "tiny", "DEVICE": "cpu", "PRECISION_FLAG": "", "DROPOUT": "0",
    "TRAIN_ITERS": str(ITERATIONS), "GLOBAL_BATCH_SIZE": "8", "MICRO_BATCH_SIZE": "2", "LR": "0.04", "MIN_LR": "0.01",
    "LR_WARMUP_ITERS": "2", "WEIGHT_DECAY": "5", "CLIP_GRAD": "1.3", "SEED": "1234", "LOG_INTERVAL": "1",
    "EVAL_ITERS": "0", "SAVE_INTERVAL": "0", "RESUME": "0", "WANDB_MODE": "disabled",
}  # fmt: skip
PROCESSES = 2
# Two stages, each in two processes.
PIPELINE_PROCESSES = 4
HYBRID_PROCESSES = 4
TWO_MESHES_PROCESSES = 4
SAMPLES = 4  # of one process and iteration


@dataclass(frozen=True)
class Mode:
    """One way of training. What it is decides which runs of a launcher it speaks for: see t5bench/record/ledger.py."""

    name: str
    meaning: str
    strategies: tuple[str, ...]
    precision: str = "fp32"
    micro_batches: int = SAMPLES  # of one process and iteration; some mistakes show with three or more only
    processes: int = PROCESSES  # of the native engine
    clipping: bool = True  # False: the JSON does not mention it, and nothing should be clipped
    offload: bool = False  # of the optimizer; zero3_offload always has it
    fp32_accumulation: bool = False
    resumes: bool = False
    # Fresh memory holds not-a-numbers, so that a release that reads memory before it writes it is always found.
    poisons_memory: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)  # what it adds to DeepSpeed's JSON
    when: str = ""  # in an answer: a trainer is wrong "with label smoothing"
    shape: str = ""  # of shapes.py, or a case of trainers.py; the launchers train none of them

    @property
    def is_of_launchers(self) -> bool:
        """Whether launchers train so: they always say at which norm they clip, and set none of the other options."""
        return self.clipping and not self.config and not self.shape


_SHARDED = ("zero1", "zero2", "zero3")
_FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
_ALL_REDUCE_FETCH = {"zero_optimization": {"stage3_use_all_reduce_for_fetch_params": True}}
MODES = (
    Mode(
        "fp32", "fp32, four micro-batches, clipping (DeepSpeed's pipeline without)",
        (*DEEPSPEED_STRATEGIES, *TORCH_STRATEGIES, FSDP2_TENSOR),
    ),
    Mode(
        "bf16", "bf16, four micro-batches, clipping (DeepSpeed's pipeline without)",
        (*ZERO_STRATEGIES, STAGE_0, DEEPSPEED_PIPELINE, *TORCH_STRATEGIES, FSDP2_TENSOR), "bf16",
    ),
    Mode(PIPELINE_CLIPPING, f"fp32, DeepSpeed's pipeline clips at {PIPELINE_CLIP_NORM}", tuple(PIPELINES)),
    Mode(
        "fp16 overflow", "fp16, a gradient overflows in one process's partition; no clipping", tuple(OVERFLOWING),
        "fp16",
    ),
    Mode("one micro-batch", "fp32, one micro-batch", (*_SHARDED, *TORCH_STRATEGIES), micro_batches=1),
    Mode(
        "three processes", "fp32, three processes: what cannot be divided is padded",
        (*ZERO_STRATEGIES, BASELINE, "fsdp2"), processes=3,
    ),
    Mode("four processes", "fp32, four processes", (*ZERO_STRATEGIES, BASELINE, "fsdp2"), processes=4),
    Mode("clipping unset", "fp32, no gradient_clipping in the JSON: nothing may be clipped", _SHARDED, clipping=False),
    Mode(
        "fp32 accumulation", "bf16, gradients accumulated in fp32 (data_types)", _SHARDED, "bf16",
        fp32_accumulation=True, config=_FP32_SUMS,
    ),
    Mode("offload", "fp32, PyTorch's optimizer offloaded to the CPU", ("zero1", "zero2"), offload=True),
    Mode("bf16 offload", "bf16, PyTorch's optimizer offloaded to the CPU", ("zero1", "zero2"), "bf16", offload=True),
    Mode(
        "resume", f"fp32, saved after iteration {SAVED_AFTER} and resumed", (*ZERO_STRATEGIES, *TORCH_STRATEGIES),
        resumes=True,
    ),
    Mode(
        "all-reduce fetch", "fp32, three processes, stage3_use_all_reduce_for_fetch_params, fresh memory full of nan",
        ("zero3",), processes=3, poisons_memory=True, config=_ALL_REDUCE_FETCH,
    ),
    Mode(
        "used once", "bf16, eight micro-batches, clipping: what the next one is without its shape", _SHARDED, "bf16",
        micro_batches=8, shape="used once",
    ),
    Mode(
        "used twice", "bf16, eight micro-batches, clipping; a layer is used twice", _SHARDED, "bf16", micro_batches=8,
        shape="used twice",
    ),
    Mode("frozen", "fp32; a layer is frozen", _SHARDED, micro_batches=1, shape="frozen"),
    Mode("unused", "fp32; a layer is not used", _SHARDED, micro_batches=1, shape="unused"),
    Mode("empty last", "fp32; the last parameter has no elements", _SHARDED, micro_batches=1, shape="empty last"),
    Mode(
        "empty inside", "fp32; a parameter in the middle of a partition has no elements", _SHARDED, micro_batches=1,
        shape="empty inside",
    ),
    Mode(
        "large parameter", "bf16 communicated in fp32; a parameter is larger than the bucket", _SHARDED, "bf16",
        micro_batches=1, shape="large parameter",
    ),
    Mode(
        "reentrant checkpointing", "fp32; a layer is recomputed, reentrant", _SHARDED, micro_batches=1,
        shape="reentrant checkpointing",
    ),
    Mode("checkpointing", "fp32; a layer is recomputed", _SHARDED, micro_batches=1, shape="checkpointing"),
    Mode(
        "checkpointed twice", "fp32; a layer is used twice and recomputed, reentrant", _SHARDED, micro_batches=1,
        shape="checkpointed twice",
    ),
    Mode(
        "several backward passes", "fp32; four backward passes, then one step, without accumulation in the JSON",
        _SHARDED, shape="several backward passes",
    ),
    Mode("evaluation", "fp32; evaluation between steps", _SHARDED, micro_batches=1, shape="evaluation"),
    Mode("saving", "fp32; saved between micro-batches", _SHARDED, shape="saving"),
    Mode(
        "scattered gradients", "fp32, no contiguous_gradients", ("zero1", "zero2"), micro_batches=1,
        shape="scattered gradients",
    ),
    Mode(
        "equal targets", "fp32, four micro-batches, clipping; every sample has eight target tokens", TRAINERS,
        shape="equal targets",
    ),
    Mode(
        "unequal targets", "fp32, four micro-batches, clipping; 1 to 11 target tokens",
        (TRAINER, ACCELERATE), shape="unequal targets", when="with unequal numbers of target tokens",
    ),
    Mode(
        "unequal at once", "fp32, one micro-batch, clipping; 1 to 11 target tokens", (TRAINER, ACCELERATE),
        micro_batches=1, shape="unequal at once", when="with unequal numbers of target tokens in one micro-batch",
    ),
    Mode(
        "averaged tokens", "as unequal targets, and the Trainer is told average_tokens_across_devices", (TRAINER,),
        shape="averaged tokens", when="with average_tokens_across_devices",
    ),
    Mode(
        "all targets", "as equal targets, but every token is one, also a sample's first, which nothing predicts",
        (TRAINER,), shape="all targets", when="where a sample's first token is a target",
    ),
    Mode(
        "equal targets bf16", "as equal targets, in bf16", (TRAINER, ACCELERATE), "bf16", shape="equal targets bf16",
        when="in bf16",
    ),
    Mode(
        "encoder-decoder", "as equal targets, with T5, which takes the mean of its loss on its own", (TRAINER,),
        shape="encoder-decoder", when="with T5",
    ),
    Mode(
        "unequal encoder-decoder", "as unequal targets, with T5", (TRAINER,), shape="unequal encoder-decoder",
        when="with T5 and unequal numbers of targets",
    ),
    Mode(
        "one process", "as equal targets, in one process", (TRAINER,), processes=1, shape="one process",
        when="on one process",
    ),
    Mode(
        "unequal on one process", "as unequal targets, in one process", (TRAINER,), processes=1,
        shape="unequal on one process", when="with unequal numbers of target tokens on one process",
    ),
    Mode("bart", "as equal targets, with BART", (TRAINER,), shape="bart", when="with BART"),
    Mode(
        "encoder-decoder on one process", "as equal targets, with T5, in one process", (TRAINER,), processes=1,
        shape="encoder-decoder on one process", when="with T5 on one process",
    ),
    Mode(
        "classifier", "as equal targets, with BERT that classifies samples", (TRAINER,), shape="classifier",
        when="with a classifier",
    ),
    Mode(
        "classifier on one process", "as classifier, in one process", (TRAINER,), processes=1,
        shape="classifier on one process", when="with a classifier on one process",
    ),
    Mode(
        "smoothed targets", "as equal targets, with label smoothing", (TRAINER,), shape="smoothed targets",
        when="with label smoothing",
    ),
    Mode(
        "last window", "as equal targets; an epoch has six micro-batches, so its last step may have two",
        (TRAINER, ACCELERATE), shape="last window", when="in a short last window",
    ),
    Mode(
        "continued", f"as equal targets; saved after step {SAVED_AFTER} and continued", (TRAINER, ACCELERATE),
        shape="continued", when="when it is continued",
    ),
    Mode(
        "split batches", "as equal targets, with split_batches", (ACCELERATE,), shape="split batches",
        when="with split_batches",
    ),
    Mode(
        "dispatched batches", "as equal targets; the first process reads the data for all", (ACCELERATE,),
        shape="dispatched batches", when="with dispatch_batches",
    ),
)  # fmt: skip


def library_of(strategy: str) -> str:
    """Whose releases a strategy is tried in; "torch" if it needs PyTorch alone."""
    return next((library for library, names in STRATEGIES_OF.items() if strategy in names), "torch")


def batch_sizes(mode: Mode) -> tuple[int, int]:
    """The samples of an iteration of all processes, and of a micro-batch of one process."""
    return SAMPLES * mode.processes, SAMPLES // mode.micro_batches


def arguments(mode: Mode) -> list[str]:
    """What the mode adds to the command line of a strategy's launcher; a later argument wins."""
    batch, micro_batch = map(str, batch_sizes(mode))
    added = ["--global-batch-size", batch, "--micro-batch-size", micro_batch, "--num-workers", "0"]
    added += ["--tensorboard-dir", ""]
    if mode.precision == "bf16":
        added.append("--bf16")
    if not mode.clipping:
        added += ["--clip-grad", "0"]
    return added


def deepspeed_json(stage_config: Mapping[str, Any], strategy: str, mode: Mode) -> dict[str, Any]:
    """A strategy's JSON from ds_configs/, completed as its launcher does, and changed by the mode."""
    batch, micro_batch = batch_sizes(mode)
    config: dict[str, Any] = copy.deepcopy(dict(stage_config)) | {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "bf16": {"enabled": mode.precision == "bf16"},
        "steps_per_print": 10**9,
    }
    if mode.clipping:
        config["gradient_clipping"] = float(SETTINGS["CLIP_GRAD"])
    if mode.offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if strategy == STAGE_0:
        config["zero_optimization"]["stage"] = 0
    for section, values in mode.config.items():
        config[section] = config.get(section, {}) | values
    return config


def reference_mode(mode: Mode) -> tuple[str, int, int, bool]:
    """What the baseline must have in common with a mode: precision, micro-batches, processes and clipping."""
    return mode.precision, mode.micro_batches, mode.processes, mode.clipping
