"""The values of a run's settings: from the environment, and from engine arguments after ``--``."""

from collections.abc import Mapping
from pathlib import Path

from t5bench.plan.draft import Draft
from t5bench.record.ds_config import WHY_NO_CURRICULUM
from t5bench.record.plan import Strategy
from t5bench.record.settings import (
    BY_NAME,
    DEFAULT_FAMILY,
    DEFAULT_PRESET,
    MODEL_FAMILIES,
    Declaration,
    FilePath,
    OneOf,
    default_values,
)

WANDB_IS_DISABLED = ("1", "true", "yes", "on", "y", "t")

# These decide a run's directory, data and processes; an argument that changed them would make the plan wrong.
DECIDED_ELSEWHERE = {
    "--data-path": "MEGATRON_DATA_DIR sets the one dataset of a run; python -m t5bench merge-data makes one of several",
    "--load": "RESUME=1 continues a run; --finetune --load starts a new one from another's weights",
    "--tokenizer-type": "The data decide it",
    "--make-vocab-size-divisible-by": "Use VOCABULARY_MULTIPLE, which pads to the same size in every layout",
    "--checkpoint-activations": "It breaks the engine; use RECOMPUTE=full",
    **dict.fromkeys(("--tokenizer-model", "--vocab-file", "--merge-file"), "TOKENIZER_MODEL sets the tokenizer"),
    **dict.fromkeys(("--deepspeed", "--deepspeed_config", "--zero-stage"), "Choose a ZeRO strategy"),
    **dict.fromkeys(("--tensorboard-dir", "--save"), "OUTPUT_DIR sets the run's directory"),
    **dict.fromkeys(("--recompute-granularity", "--recompute-activations"), "Use RECOMPUTE"),
    "--use-distributed-optimizer": "Choose a ZeRO strategy",
    "--use-checkpoint-args": "The settings define the model, and the record and the comparison rely on them",
    "--data-efficiency-curriculum-learning": WHY_NO_CURRICULUM,
    "--help": "It starts no run; a launcher's own --help comes before --",
    "--DDP-impl": "The record, the cost model and the parity check know only the engine's own DDP",
    "--distributed-backend": "DEVICE and SHARE_GPUS decide it",
    "--pipeline-model-parallel-split-rank": "PIPELINE_PARALLEL_SIZE decides it",
    "--pipeline-schedule": "Use PIPELINE_SCHEDULE",
    "--virtual-pipeline-stages": "Use VIRTUAL_PIPELINE_STAGES",
    "--num-layers-per-virtual-pipeline-stage": "Use PIPELINE_SCHEDULE=interleaved and VIRTUAL_PIPELINE_STAGES",
    "--save-interval": "Use SAVE_INTERVAL",
    "--skip-train": "Use EVAL_ONLY=1",
    "--rampup-batch-size": "Use RAMPUP_BATCH_SIZE",
    "--train-samples": "Use TRAIN_ITERS: a run has TRAIN_ITERS x GLOBAL_BATCH_SIZE samples",
    **dict.fromkeys(
        ("--train-data-path", "--valid-data-path", "--test-data-path"),
        "The record and the comparison know only the dataset in MEGATRON_DATA_DIR",
    ),
    "--sequence-parallel": "Use SEQUENCE_PARALLEL=1, with ENGINE=native",
    **dict.fromkeys(
        (
            *("--swiglu", "--squared-relu", "--num-experts", "--expert-interval", "--num-key-value-heads"),
            *("--normalization", "--apply-layernorm-1p", "--use-rotary-position-embeddings", "--disable-bias-linear"),
            *("--untie-embeddings-and-output-weights", "--ds-sequence-parallel-size"),
        ),
        "This project does not cover this feature: layouts would train different models",
    ),
}


def values_from(environ: Mapping[str, str], strategy: Strategy) -> tuple[dict[str, str], dict[str, str]]:
    """The settings' values and defaults: the environment wins over a default, even with an empty value."""
    family = BY_NAME["MODEL_FAMILY"].kind.read(environ.get("MODEL_FAMILY", DEFAULT_FAMILY))
    if family not in MODEL_FAMILIES:
        family = DEFAULT_FAMILY  # the check of MODEL_FAMILY's value refuses the name
    preset = BY_NAME["MODEL_PRESET"].kind.read(environ.get("MODEL_PRESET", DEFAULT_PRESET))
    if preset not in MODEL_FAMILIES[family].presets:
        preset = DEFAULT_PRESET
    defaults = default_values(
        family,
        preset,
        strategy=strategy.name,
        port=strategy.port,
        tp=strategy.tp,
        pp=strategy.pp,
        gpus_per_node=environ.get("GPUS_PER_NODE", ""),
    )
    if defaults["ENGINE"] not in strategy.engines:
        defaults["ENGINE"] = strategy.engines[0]
    values = {}
    for name, default in defaults.items():
        values[name] = BY_NAME[name].kind.read(environ.get(name, default))
    # W&B's older switch, which it still reads where WANDB_MODE is not set.
    if environ.get("WANDB_DISABLED", "").lower() in WANDB_IS_DISABLED and not environ.get("WANDB_MODE"):
        values["WANDB_MODE"] = "disabled"
    return values, defaults


def check_values(draft: Draft) -> None:
    """Refuses invalid values, and makes paths absolute, relative to the user's directory."""
    for name, value in draft.values.items():
        declaration = BY_NAME[name]
        fault = declaration.kind.fault(name, value)
        if fault:
            draft.refuse("setting-value", *fault)
        if isinstance(declaration.kind, FilePath) and value:
            draft.values[name] = absolute(draft.directory, value, draft.environ)


def absolute(directory: str, path: str, environ: Mapping[str, str]) -> str:
    """A path as the user meant it, where it may begin with a ~ that the shell did not expand, being quoted."""
    home = environ.get("HOME")
    if home and (path == "~" or path.startswith("~/")):
        path = home + path[1:]
    return str(Path(directory, path))


def take_engine_arguments(draft: Draft) -> None:
    """Gives the settings the values of the engine arguments after ``--`` that they own; the last of several wins."""
    given = draft.given
    continues = draft.is_on("RESUME") or draft.is_on("EVAL_ONLY")
    finetunes = "--finetune" in given and not continues
    owned = set(DECIDED_ELSEWHERE)
    for name in draft.values:
        owned.update(BY_NAME[name].arguments)
    for name in given:
        if name in DECIDED_ELSEWHERE and not (finetunes and name == "--load"):
            draft.refuse("launcher-argument", f"{name} cannot be given after --", DECIDED_ELSEWHERE[name])
        elif name not in owned:
            meant = sorted(argument for argument in owned if argument.startswith(name))
            if meant:
                problem = f"ambiguous argument {name} (did you mean {' or '.join(meant)}?)"
                draft.refuse("abbreviated-argument", problem, "Write engine arguments in full")
    for name in draft.values:
        _take(draft, BY_NAME[name], given)


def _take(draft: Draft, declaration: Declaration, given: Mapping[str, str]) -> None:
    kind = declaration.kind
    if declaration.argument == "=" and isinstance(kind, OneOf):
        chosen = [argument for argument in given if argument in kind.choices]
        if chosen:
            draft.values[declaration.name] = chosen[-1]
        return
    values = {argument: given[argument] for argument in declaration.arguments if argument in given}
    for argument, value in values.items():
        fault = kind.fault(argument, value)
        if fault:
            draft.refuse("engine-argument", *fault)
            return
    if not values:
        return
    if len(values) < len(declaration.arguments):
        problem = f"{' and '.join(declaration.arguments)} must be given together"
        draft.refuse("engine-argument", problem, f"Give both, or set {declaration.name}")
    elif len(values) > 1:
        draft.values[declaration.name] = max(values.values(), key=float)
    else:
        draft.values[declaration.name] = values[declaration.arguments[0]]


def check_numbers(draft: Draft) -> None:
    """Refuses numbers that are valid alone but do not fit together, or that no engine accepts."""
    value = draft.value
    last = draft.number("TRAIN_ITERS")
    given = draft.given
    profiled = draft.number("PROFILE_ITERATION")
    if profiled and not 2 <= profiled <= last:
        problem = f"PROFILE_ITERATION must be between 2 and TRAIN_ITERS={last}, found {profiled}"
        draft.refuse("profile-iteration", problem, "The first iteration is only warm-up; 0 profiles none")
    warm_up = draft.number("LR_WARMUP_ITERS")
    decay = int(value("LR_DECAY_ITERS") or last)
    if warm_up >= decay:
        problem = f"LR_WARMUP_ITERS={warm_up} leaves none of the {decay} iterations for the learning rate's decay"
        draft.refuse("learning-rate", problem, "Lower LR_WARMUP_ITERS, or raise TRAIN_ITERS or LR_DECAY_ITERS")
    if float(value("MIN_LR")) > float(value("LR")):
        problem = f"MIN_LR={value('MIN_LR')} is more than LR={value('LR')}"
        draft.refuse("learning-rate", problem, "Lower MIN_LR, or raise LR")
    if float(value("DROPOUT")) >= 1:
        draft.refuse("dropout", f"DROPOUT must be less than 1, found {value('DROPOUT')}")
    if draft.is_on("EVAL_ONLY") and value("EVAL_ITERS") == "0":
        remedy = "Set EVAL_ITERS to the number of validation batches"
        draft.refuse("eval-iters", "EVAL_ONLY=1 but EVAL_ITERS is 0", remedy)
    for name in ("--exit-interval", "--exit-duration-in-mins"):
        if name in given and not (given[name].isascii() and given[name].isdecimal() and int(given[name]) > 0):
            problem = f"{name} must be a whole number of at least 1, found '{given[name]}'"
            draft.refuse("engine-argument", problem)
    if draft.number("LOG_INTERVAL") > last and not value("RAMPUP_BATCH_SIZE") and not draft.is_on("EVAL_ONLY"):
        silent = f"warning: LOG_INTERVAL={value('LOG_INTERVAL')} is more than TRAIN_ITERS={last}"
        draft.notes.append(f"{silent}, so this run will log neither loss nor time. Set LOG_INTERVAL=1")
