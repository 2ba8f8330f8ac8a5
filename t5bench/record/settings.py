"""The settings of a run, declared once: name, kind, role, engine argument, default and meaning.

Every setting is an environment variable. A launcher's plan gives each a value; a record keeps the values with their
roles. docs/generated/settings.md is printed from this table (``python -m t5bench settings``).
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from t5bench import REPOSITORY
from t5bench.costmodel.schedule import ONE_F_ONE_B, SCHEDULES

# Of a setting: so that the product of two whole numbers fits into the 64 bits of the engines, and fp32's range.
MOST_WHOLE = 10**9 - 1
MOST_DECIMAL = 1e38
# Of Linux's 4,096 bytes of a path, some are for the files in a directory.
MOST_OF_A_NAME = 255
MOST_OF_A_PATH = 3900
PRECISIONS = ("--bf16", "--fp16")  # values of PRECISION_FLAG, which are arguments themselves

# ---- roles -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Role:
    """What a setting means for comparing and resuming runs."""

    heading: str
    """What --help prints above the role's settings."""
    compared: bool = False
    """Runs that differ in it are not compared unless that is allowed."""
    trains: bool = False
    """Another value gives another loss curve."""
    kept: bool = False
    """A resumed run must keep it."""
    local: bool = False
    """The nodes of one run may differ in it."""
    told: bool = False
    """A comparison reports that runs differ in it."""


RoleName: TypeAlias = Literal["model", "recipe", "load", "micro-batch", "method", "layout", "place", "watch", "label"]
COMPARED_HEADING = "The model, its data and its processes: only runs with equal values are compared"
# In the order of --help, where roles with one heading are one group.
ROLES: Mapping[str, Role] = {
    "model": Role(COMPARED_HEADING, compared=True, trains=True, kept=True),
    "recipe": Role("Recipe (changes the loss curve)", trains=True, kept=True, told=True),
    "load": Role(COMPARED_HEADING, compared=True, kept=True),
    # Its size changes the cost, and the curve where micro-batches have unequally many targets, or dropout.
    "micro-batch": Role(
        "Micro-batches (another cost, and mostly another loss curve)", trains=True, kept=True, told=True
    ),
    "method": Role("Method (same loss, different cost)", kept=True, told=True),
    "layout": Role("Processes and devices"),
    "place": Role("Hosts and paths, which may differ between nodes", local=True),
    "watch": Role("Monitoring, checkpoints, timeouts", told=True),
    "label": Role("Names, and Weights & Biases", local=True),
}

# Settings besides the trained ones that say when all processes do something together.
TOGETHER = ("RESUME", "EVAL_ONLY", "EVAL_ITERS", "EVAL_INTERVAL", "SAVE_INTERVAL")

# What a run of the native engine may change on purpose when it is resumed: each is a number that every iteration reads.
RESUMABLE_CHANGES = (
    *("TRAIN_ITERS", "LR", "MIN_LR", "LR_WARMUP_ITERS", "LR_DECAY_ITERS", "WEIGHT_DECAY", "CLIP_GRAD", "DROPOUT"),
    *("GLOBAL_BATCH_SIZE", "MICRO_BATCH_SIZE"),
)

WHY_NO_SEED_0 = "Megatron-DeepSpeed takes no seed 0, and a comparison has the same seed in every engine: use SEED=1"

# ---- kinds of values -------------------------------------------------------------------------------------------------

Fault: TypeAlias = tuple[str, str]  # what is wrong, and what to do about it


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What values a setting may have."""

    optional: bool = False
    """Whether it may be empty."""

    def fault(self, name: str, value: str) -> Fault | None:
        """What is wrong with this value of the setting; None if it is valid."""
        if re.search("[\ud800-\udfff]", value):  # how Python reads other bytes, which no record can hold
            return f"{name} is not UTF-8 text, found {value!a}", ""
        if not value and self.optional:
            return None
        if not value:
            return self.fault_when_empty(name)
        return self.fault_of_text(name, value)

    def read(self, value: str) -> str:
        """The value as plans and records have it."""
        return value

    def fault_when_empty(self, name: str) -> Fault | None:
        return f"{name} is empty", "Unset it, or give it a value"

    def fault_of_text(self, name: str, value: str) -> Fault | None:
        return None


class Text(Kind):
    """Any text."""


class FilePath(Kind):
    """A path, relative to the directory in which the user typed the command."""

    def fault_of_text(self, name: str, value: str) -> Fault | None:
        longest = max(len(os.fsencode(part)) for part in value.split("/"))
        if longest > MOST_OF_A_NAME or len(os.fsencode(value)) > MOST_OF_A_PATH:
            limits = f"{MOST_OF_A_NAME} bytes in a name and {MOST_OF_A_PATH} in all"
            return f"{name} is too long for a path, which may have {limits}: '{value[:40]}...'", "Choose a shorter one"
        return None


class Secret(Kind):
    """A text of which plans and records say only that it was given."""


@dataclass(frozen=True)
class Integer(Kind):
    """A whole number."""

    least: int = 0
    most: int = MOST_WHOLE
    why: str = ""
    """Why no number is smaller, in one clause."""

    def fault_when_empty(self, name: str) -> Fault | None:
        return self.fault_of_text(name, "")

    def fault_of_text(self, name: str, value: str) -> Fault | None:
        if not re.fullmatch("0|[1-9][0-9]*", value) or float(value) < self.least:
            return f"{name} must be a whole number of at least {self.least}, found '{value}'", self.why
        if float(value) > self.most:
            return f"{name} must be at most {self.most}, found {value}", ""
        return None


@dataclass(frozen=True)
class Decimal(Kind):
    """A number that is not negative, such as 0.1 or 1e-4."""

    least: float = 0

    def fault_when_empty(self, name: str) -> Fault | None:
        return self.fault_of_text(name, "")

    def fault_of_text(self, name: str, value: str) -> Fault | None:
        is_number = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", value)
        if not is_number or float(value) < self.least:
            return f"{name} must be a number of at least {self.least:g}, found '{value}'", ""
        if float(value) > MOST_DECIMAL:
            return f"{name} must be at most {MOST_DECIMAL}, found {value}", ""
        return None


@dataclass(frozen=True)
class OneOf(Kind):
    """One of a few words."""

    choices: Sequence[str] = ()
    also: Mapping[str, str] = field(default_factory=dict)
    """Other words for a choice, in small letters. Small and capital letters are the same in all of them."""

    def read(self, value: str) -> str:
        word = value.lower()
        for choice in self.choices:
            if choice.lower() == word:
                return choice
        return self.also.get(word, value)

    def fault_when_empty(self, name: str) -> Fault | None:
        return self.fault_of_text(name, "")

    def fault_of_text(self, name: str, value: str) -> Fault | None:
        if value in self.choices:
            return None
        return f"{name} is '{value}'", f"It may be one of: {' '.join(self.choices)}"


@dataclass(frozen=True)
class SomeOf(Kind):
    """Some of a few words, separated by spaces."""

    choices: Sequence[str] = ()

    def fault_of_text(self, name: str, value: str) -> Fault | None:
        for word in value.split():
            if word not in self.choices:
                return f"{name} names '{word}'", f"It may name some of: {' '.join(self.choices)}"
        return None


# ---- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Declaration:
    """One setting."""

    name: str
    kind: Kind
    role: RoleName
    """Without meaning for a setting of a script that is not a launcher."""
    argument: str
    """The engine's argument for it; several are separated by commas; ``=`` where the value is the argument itself;
    empty for a setting that the engine does not see."""
    default: str
    """A format string; see ``default_values``. A model preset's sizes replace the defaults of the size settings."""
    meaning: str
    family: str = ""
    """The model family that has this setting; empty for all."""

    @property
    def arguments(self) -> list[str]:
        return [argument for argument in self.argument.split(",") if argument not in ("", "=")]

    @property
    def is_secret(self) -> bool:
        return isinstance(self.kind, Secret)


@dataclass(frozen=True)
class ModelFamily:
    """What the settings need to know about a model family. To add a family, add one to FAMILY_SETTINGS and to
    t5bench/plan/families.py."""

    presets: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The sizes of MODEL_PRESET: a setting's name to its default."""
    has_equal_targets: bool = False
    """Whether each sample has as many target tokens as every other. A micro-batch's loss is the mean over its tokens,
    so only then does the size of micro-batches leave the curve as it is."""


def _t5(encoder: int, decoder: int, hidden: int, heads: int, ffn: int, lengths: tuple[int, int]) -> dict[str, int]:
    return {
        "ENCODER_NUM_LAYERS": encoder,
        "DECODER_NUM_LAYERS": decoder,
        "HIDDEN_SIZE": hidden,
        "NUM_ATTENTION_HEADS": heads,
        "FFN_HIDDEN_SIZE": ffn,
        "ENCODER_SEQ_LENGTH": lengths[0],
        "DECODER_SEQ_LENGTH": lengths[1],
    }


def _gpt(layers: int, hidden: int, heads: int, ffn: int, length: int) -> dict[str, int]:
    return {
        "NUM_LAYERS": layers,
        "HIDDEN_SIZE": hidden,
        "NUM_ATTENTION_HEADS": heads,
        "FFN_HIDDEN_SIZE": ffn,
        "SEQ_LENGTH": length,
    }


MODEL_FAMILIES: Mapping[str, ModelFamily] = {
    "t5": ModelFamily(
        presets={
            "tiny": _t5(2, 2, hidden=64, heads=4, ffn=128, lengths=(128, 64)),
            "small": _t5(6, 6, hidden=512, heads=8, ffn=1024, lengths=(512, 128)),
            "base": _t5(12, 12, hidden=768, heads=12, ffn=2048, lengths=(512, 128)),
            "large": _t5(24, 24, hidden=1024, heads=16, ffn=2816, lengths=(512, 128)),
        },
    ),
    "gpt": ModelFamily(
        presets={
            "tiny": _gpt(4, hidden=64, heads=4, ffn=128, length=128),
            "small": _gpt(6, hidden=512, heads=8, ffn=2048, length=512),
            "base": _gpt(12, hidden=768, heads=12, ffn=3072, length=1024),
            "large": _gpt(24, hidden=1024, heads=16, ffn=4096, length=1024),
        },
        has_equal_targets=True,
    ),
}
DOCUMENT_SAMPLES = "--document-samples"  # the native engine's: samples of unequally many tokens


def micro_batches_leave_the_curve(value: Callable[[str], str], extra: Sequence[str]) -> bool:
    """Whether a run's MICRO_BATCH_SIZE changes only its cost. value: of a setting, by its name. extra: the engine's
    arguments that the user gives.

    Dropout draws its masks for each micro-batch. Of Megatron-DeepSpeed this was not tried.
    """
    family = MODEL_FAMILIES[value("MODEL_FAMILY")]
    has_equal_targets = family.has_equal_targets and DOCUMENT_SAMPLES not in extra
    return has_equal_targets and value("ENGINE") == "native" and float(value("DROPOUT")) == 0


DEFAULT_FAMILY = "t5"
DEFAULT_PRESET = "large"
DEFAULT_TOKENIZER = "google-t5/t5-large"

_ON_OFF = OneOf(("0", "1"), also={"false": "0", "no": "0", "off": "0", "true": "1", "yes": "1", "on": "1"})
# W&B's own other words for its modes.
_WANDB_MODES = OneOf(("online", "offline", "disabled"), also={"run": "online", "dryrun": "offline"}, optional=True)
_OPTIONAL_TEXT = Text(optional=True)
_OPTIONAL_WHOLE = Integer(1, optional=True)

# fmt: off
TABLE: Sequence[Declaration] = (
    Declaration("MODEL", _OPTIONAL_TEXT, "model", "--model-description", "", "The model: a config.json of Transformers, its directory, or a published name such as smollm2-135m (unset: the sizes below). Needs ENGINE=native, and records keep it as a description of its parts"),
    Declaration("MODEL_FAMILY", OneOf(tuple(sorted(MODEL_FAMILIES))), "model", "", DEFAULT_FAMILY, "Model family: t5 or gpt (docs/gpt.md has GPT's settings)"),
    Declaration("MODEL_PRESET", OneOf(("tiny", "small", "base", "large")), "layout", "", DEFAULT_PRESET, "Model size: tiny, small, base or large"),

    Declaration("HOSTS", _OPTIONAL_TEXT, "place", "", "", "Node host names in rank order, separated by spaces (unset: SLURM's nodes, or only this host)"),
    Declaration("NNODES", _OPTIONAL_WHOLE, "layout", "", "", "Number of nodes (unset: from HOSTS or SLURM; 2 if only a master is given)"),
    Declaration("NPROC_PER_NODE", _OPTIONAL_WHOLE, "layout", "", "{gpus_per_node}", "Processes per node (unset: TP x PP in all, at least 2; without TP and PP, 1 on a node with one GPU). Alias: GPUS_PER_NODE"),
    Declaration("MASTER_PORT", Integer(1, 65535), "layout", "", "{port}", "torchrun rendezvous port"),
    Declaration("DEVICE", OneOf(("auto", "cuda", "cpu")), "layout", "", "auto", "auto, cuda or cpu; auto uses GPUs if there are any"),
    Declaration("SHARE_GPUS", _ON_OFF, "load", "", "0", "1: several processes share one GPU (gloo). For checks, not for timing; not with ZeRO or FSDP2"),
    Declaration("ENGINE", OneOf(("megatron", "native")), "layout", "", "megatron", "megatron (patched Megatron-DeepSpeed) or native (the engine in native/)"),
    Declaration("MEGATRON_DIR", FilePath(), "place", "", "{repository}/../Megatron-DeepSpeed", "Path to your Megatron-DeepSpeed checkout"),
    Declaration("MEGATRON_DATA_DIR", FilePath(), "place", "", "{family_data}", "Directory containing indexed dataset files"),
    Declaration("TOKENIZER_MODEL", _OPTIONAL_TEXT, "place", "", "", f"Hugging Face name or directory (unset: the tokenizer next to the data, or {DEFAULT_TOKENIZER})"),
    Declaration("OUTPUT_DIR", FilePath(), "place", "", "{repository}/outputs/{run}", "Checkpoint and log directory"),
    Declaration("RESUME", _ON_OFF, "watch", "", "0", "1 continues the run in OUTPUT_DIR from its newest intact checkpoint"),
    Declaration("RESUME_CHANGES", SomeOf(optional=True, choices=RESUMABLE_CHANGES), "watch", "", "", f"With RESUME=1, which of these the run changes on purpose, separated by spaces: {', '.join(RESUMABLE_CHANGES)} (needs ENGINE=native; docs/models.md)"),

    Declaration("ENCODER_NUM_LAYERS", Integer(1, 10000), "model", "--encoder-num-layers", "", "Encoder depth", "t5"),
    Declaration("DECODER_NUM_LAYERS", Integer(1, 10000), "model", "--decoder-num-layers", "", "Decoder depth", "t5"),
    Declaration("NUM_LAYERS", Integer(1, 10000), "model", "--num-layers", "", "Depth", "gpt"),
    Declaration("HIDDEN_SIZE", Integer(1), "model", "--hidden-size", "", "Hidden dimension"),
    Declaration("NUM_ATTENTION_HEADS", Integer(1), "model", "--num-attention-heads", "", "Attention heads"),
    Declaration("FFN_HIDDEN_SIZE", Integer(1), "model", "--ffn-hidden-size", "", "FFN intermediate size"),
    Declaration("ENCODER_SEQ_LENGTH", Integer(1), "model", "--encoder-seq-length", "", "Encoder input length", "t5"),
    Declaration("DECODER_SEQ_LENGTH", Integer(1), "model", "--decoder-seq-length", "", "Decoder output length", "t5"),
    Declaration("SEQ_LENGTH", Integer(1), "model", "--seq-length", "", "Sequence length", "gpt"),
    Declaration("VOCABULARY_MULTIPLE", Integer(1), "model", "", "128", "The vocabulary is padded to a multiple of this in every layout"),
    Declaration("DROPOUT", Decimal(), "model", "--attention-dropout,--hidden-dropout", "0.1", "Dropout of hidden states and attention weights"),
    Declaration("GLOBAL_BATCH_SIZE", Integer(1), "model", "--global-batch-size", "16", "Global batch size"),
    Declaration("MICRO_BATCH_SIZE", Integer(1), "micro-batch", "--micro-batch-size", "1", "Per-GPU micro-batch size (a sweep also takes best, and several)"),
    Declaration("PRECISION_FLAG", OneOf(PRECISIONS, optional=True), "model", "=", "--bf16", "--bf16, --fp16, or empty for fp32"),
    Declaration("FLASH_ATTENTION", OneOf(("auto", "on", "off")), "method", "", "auto", "auto, on or off: for the decoder's self-attention, on CUDA in bf16 or fp16"),
    Declaration("GRADIENT_REDUCTION", OneOf(("default", "fp32")), "method", "", "default", "ZeRO reduces gradients in the training precision (default), or in fp32 as DDP does (fp32)"),
    Declaration("ZERO_REDUCE_ONCE", _ON_OFF, "method", "", "0", "ZeRO-2 and ZeRO-3 reduce gradients in every micro-batch (0), or add them up and reduce once an iteration (1, needs ENGINE=native)"),
    Declaration("OVERLAP_COMM", OneOf(("default", "on", "off")), "method", "", "default", "ZeRO communicates while it computes: on, off, or as the strategy's JSON says (default). On has hung on GPUs"),
    Declaration("CUDA_DEVICE_MAX_CONNECTIONS", Integer(1, 32), "method", "", "1", "Hardware queues of a GPU; 1 keeps the order in which kernels are launched, more may overlap communication with computing"),
    Declaration("RECOMPUTE", OneOf(("none", "selective", "full")), "method", "", "none", "Recompute activations in the backward pass: none, selective (attention) or full (layers)"),
    Declaration("PIPELINE_SCHEDULE", OneOf(SCHEDULES), "method", "", ONE_F_ONE_B, "Order of a pipeline's micro-batches: 1f1b, gpipe, interleaved or zero-bubble (docs/glossary.md). ENGINE=megatron has 1f1b, and interleaved for GPT"),
    Declaration("VIRTUAL_PIPELINE_STAGES", Integer(2), "method", "", "2", "Parts of the model on each stage under PIPELINE_SCHEDULE=interleaved"),
    Declaration("FSDP_KEEP_PARAMETERS", _ON_OFF, "method", "", "0", "FSDP2 gathers each layer's parameters when it computes (0), or all once an iteration and keeps them, as ZeRO-2 does (1)"),
    Declaration("FSDP_SHARD_SIZE", Integer(0), "method", "", "0", "HSDP: number of processes that share one copy of the states (0: all data-parallel processes)"),
    Declaration("TENSOR_PARALLEL_SIZE", Integer(1), "layout", "--tensor-model-parallel-size", "{tp}", "Tensor-parallel size"),
    Declaration("SEQUENCE_PARALLEL", _ON_OFF, "method", "", "0", "1 also divides the tokens between tensor-parallel layers (needs ENGINE=native)"),
    Declaration("PIPELINE_PARALLEL_SIZE", Integer(1), "layout", "--pipeline-model-parallel-size", "{pp}", "Pipeline-parallel size"),

    Declaration("TRAIN_ITERS", Integer(1), "recipe", "--train-iters", "1000", "Total training iterations"),
    Declaration("RAMPUP_BATCH_SIZE", _OPTIONAL_TEXT, "recipe", "", "", "Three numbers, START STEP SAMPLES: the batch grows from START in steps of STEP over SAMPLES samples; the run has TRAIN_ITERS x GLOBAL_BATCH_SIZE samples"),
    Declaration("LR", Decimal(), "recipe", "--lr", "0.0001", "Peak learning rate"),
    Declaration("MIN_LR", Decimal(), "recipe", "--min-lr", "0", "Learning rate at the end of the cosine"),
    Declaration("LR_WARMUP_ITERS", Integer(0), "recipe", "--lr-warmup-iters", "0", "Iterations of linear warm-up"),
    Declaration("LR_DECAY_ITERS", _OPTIONAL_WHOLE, "recipe", "--lr-decay-iters", "", "Iterations until the learning rate is MIN_LR (unset: TRAIN_ITERS)"),
    Declaration("WEIGHT_DECAY", Decimal(), "recipe", "--weight-decay", "0.01", "AdamW weight decay"),
    Declaration("CLIP_GRAD", Decimal(), "recipe", "--clip-grad", "1.0", "Gradient-norm clipping (a sweep also takes among: a number among DDP's own norms)"),
    Declaration("SEED", Integer(1, why=WHY_NO_SEED_0), "recipe", "--seed", "1234", "Seed of weights, data order and dropout"),
    Declaration("LOG_INTERVAL", Integer(1), "recipe", "--log-interval", "20", "Iterations between log lines; each shows the mean loss since the previous one"),

    Declaration("EVAL_ONLY", _ON_OFF, "watch", "", "0", "1 only evaluates the newest intact checkpoint in OUTPUT_DIR; the record goes to OUTPUT_DIR/evaluation"),
    Declaration("EVAL_ITERS", Integer(0), "watch", "--eval-iters", "0", "Validation batches per evaluation (0: no evaluation)"),
    Declaration("EVAL_INTERVAL", Integer(1), "watch", "--eval-interval", "1000", "Iterations between evaluations"),
    Declaration("SAVE_INTERVAL", Integer(0), "watch", "", "0", "Iterations between checkpoints (0: none)"),
    Declaration("PROFILE_ITERATION", Integer(0), "watch", "", "0", "Iteration to profile (0: none); t5bench explain shows where its time went"),
    Declaration("SAMPLE_INTERVAL", Decimal(0.01), "watch", "", "2", "Seconds between samples of the GPUs and the network counters"),
    Declaration("PEAK_TFLOPS", Decimal(optional=True), "watch", "", "", "The GPU's dense peak TFLOP/s, for the MFU (unset: looked up by the GPU's name)"),
    Declaration("WATCHDOG_SECONDS", Integer(0), "watch", "", "3600", "Stop a run that makes no progress for this many seconds, and log every worker's stack (0: never)"),
    Declaration("RENDEZVOUS_TIMEOUT", Integer(1), "watch", "", "600", "Seconds that a node waits for the others"),
    Declaration("DISTRIBUTED_TIMEOUT_MINUTES", Integer(1), "watch", "--distributed-timeout-minutes", "10", "Minutes after which a stuck collective ends the run"),

    Declaration("T5_RUN_SECRET", Secret(optional=True), "label", "", "", "Secret that the nodes of a run share (unset: the one in your home directory)"),
    Declaration("WANDB_PROJECT", Text(), "label", "", "ml710-t5-parallelism", "W&B project name"),
    Declaration("WANDB_RUN_NAME", Text(), "label", "", "megatron-{run}", "W&B run name"),
    Declaration("WANDB_RUN_GROUP", _OPTIONAL_TEXT, "label", "", "", "W&B group of the runs to compare"),
    Declaration("WANDB_API_KEY", Secret(optional=True), "label", "", "", "Your W&B API key; without one the run is logged offline"),
    Declaration("WANDB_MODE", _WANDB_MODES, "label", "", "", "online, offline or disabled (unset: online with a key, else offline)"),
)
# fmt: on
BY_NAME: Mapping[str, Declaration] = {declaration.name: declaration for declaration in TABLE}
# Settings that choose among the layouts, each of which is ranked; DDP's plan would refuse the first two.
LAYOUT_SETTINGS = (
    "TENSOR_PARALLEL_SIZE",
    "PIPELINE_PARALLEL_SIZE",
    "PIPELINE_SCHEDULE",
    "VIRTUAL_PIPELINE_STAGES",
    "SEQUENCE_PARALLEL",
    "FSDP_SHARD_SIZE",
    "FSDP_KEEP_PARAMETERS",
    "ZERO_REDUCE_ONCE",
)
# What a sweep that shows equality sets otherwise than the user would.
OWN_RECIPE = ("DROPOUT", "CLIP_GRAD", "PRECISION_FLAG")


def family_prefix(family: str) -> str:
    """What precedes a strategy in names; T5 came first and has none."""
    return "" if family == DEFAULT_FAMILY else f"{family}-"


def default_paths(family: str) -> dict[str, str]:
    """The places that formats of defaults name, for a model family."""
    directory = REPOSITORY / "megatron_data"
    data = directory if family == DEFAULT_FAMILY else directory / family
    return {"repository": str(REPOSITORY), "family_data": str(data), "family_prefix": family_prefix(family)}


def declarations_of(family: str) -> list[Declaration]:
    """The settings of a launcher for a model family."""
    return [declaration for declaration in TABLE if declaration.family in ("", family)]


def default_values(family: str, preset: str, **named: object) -> dict[str, str]:
    """The default of every setting of a launcher.

    named: strategy, port, tp and pp of the strategy's declaration, and gpus_per_node.
    """
    words = default_paths(family) | {name: str(value) for name, value in named.items()}
    words["run"] = f"{family_prefix(family)}{words['strategy']}"
    values = {entry.name: entry.default.format(**words) for entry in declarations_of(family)}
    sizes = MODEL_FAMILIES[family].presets[preset]
    return values | {name: str(size) for name, size in sizes.items()}
