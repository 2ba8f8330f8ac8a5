"""The settings of the scripts that are not launchers, by the script's name."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence

from t5bench.plan.settings import absolute
from t5bench.record.settings import (
    DEFAULT_FAMILY,
    DEFAULT_TOKENIZER,
    MODEL_FAMILIES,
    Decimal,
    Declaration,
    Fault,
    FilePath,
    Integer,
    Kind,
    OneOf,
    Text,
    default_paths,
)


def _setting(name: str, kind: Kind, default: str, meaning: str) -> Declaration:
    return Declaration(name, kind, "label", "", default, meaning)


_ON_OFF = OneOf(("0", "1"))
_OPTIONAL_TEXT = Text(optional=True)
_OPTIONAL_PATH = FilePath(optional=True)
_OPTIONAL_COUNT = Integer(1, optional=True)
_FAMILY = OneOf(tuple(sorted(MODEL_FAMILIES)))
_ENGINE_DIRECTORY = "{repository}/../Megatron-DeepSpeed"

# fmt: off
SCRIPTS: Mapping[str, Sequence[Declaration]] = {
    "quickstart": (
        _setting("ENGINE", OneOf(("native", "megatron")), "native", "native (the engine in native/, from Python packages alone) or megatron (scripts/setup_megatron.sh first)"),
        _setting("TRAIN_ITERS", Integer(1), "12", "Iterations of each strategy"),
        _setting("RUNS_DIR", FilePath(), "{repository}/outputs/quickstart/{model_prefix}{engine}", "Directory of the runs; complete runs in it are not repeated"),
    ),
    "run_megatron_t5_all": (
        _setting("STRATEGIES", _OPTIONAL_TEXT, "", "Strategies to run, separated by spaces (unset: all); zero1-tp2-mb4 is zero1 with TENSOR_PARALLEL_SIZE=2 and MICRO_BATCH_SIZE=4"),
        _setting("REPEATS", Integer(1), "1", "Runs of each strategy, interleaved so that slow changes of the machine affect all equally"),
        _setting("RETRIES", Integer(0), "1", "Retries of a failed run, once all others have run"),
        _setting("LAUNCH", OneOf(("local", "ssh")), "local", "local (on this machine), or ssh (on the nodes of HOSTS or SLURM, from this one terminal)"),
        _setting("RECIPE", _OPTIONAL_TEXT, "", "Your own recipe, such as 'DROPOUT=0.1 CLIP_GRAD=1': the three fastest rows run once more with it, and the comparison says whether their order holds"),
        _setting("RUNS_DIR", FilePath(), "{repository}/outputs/{family_prefix}all", "Directory of the runs; complete runs in it are not repeated"),
    ),
    "search": (
        _setting("RUNS", _OPTIONAL_COUNT, "", "Budget: at most so many runs (unset: until the answer is certain)"),
        _setting("MINUTES", Decimal(optional=True), "", "Budget: minutes of runs (unset: until the answer is certain)"),
        _setting("TRAIN_ITERS", Integer(25), "40", "Iterations of each run; the first 20 are warm-up"),
        _setting("LAUNCH", OneOf(("local", "ssh")), "local", "local (on this machine), or ssh (on the nodes of HOSTS or SLURM, from this one terminal)"),
        _setting("GPU", _OPTIONAL_TEXT, "", "The hosts' GPU, as nvidia-smi names it (unset: this machine's)"),
        _setting("LINK", Decimal(optional=True), "", "A node's link in Gbit/s (unset: 10, until runs show otherwise)"),
        _setting("NETWORK", _OPTIONAL_PATH, "", "The file that check_cluster.sh --network wrote, instead of LINK"),
        _setting("HOST_COST", _OPTIONAL_PATH, "", "The file that check_cluster.sh --host wrote"),
        _setting("RUNS_DIR", FilePath(), "{repository}/outputs/{family_prefix}search", "Directory of the search; no run in it is repeated"),
    ),
    # A recipe in which a change of 1 % in any number shows; docs/parity_evidence.md explains how it was found.
    "check_parity": (
        _setting("ENGINE", OneOf(("megatron", "native")), "megatron", "megatron (patched Megatron-DeepSpeed; its DDP is also compared with native/) or native"),
        _setting("MODEL_PRESET", OneOf(("tiny", "small", "base", "large")), "tiny", "Model size: tiny, small, base or large"),
        _setting("TRAIN_ITERS", Integer(2), "12", "Iterations of each strategy"),
        _setting("GLOBAL_BATCH_SIZE", Integer(1), "8", "Samples per iteration"),
        _setting("MICRO_BATCH_SIZE", Integer(1), "2", "Per-process micro-batch size; small enough for several micro-batches per iteration"),
        _setting("LR", Decimal(), "0.04", "Peak learning rate; with this weight decay, a change of 1 % in either is visible"),
        _setting("MIN_LR", Decimal(), "0.01", "Learning rate at the end"),
        _setting("LR_WARMUP_ITERS", Integer(0), "3", "Iterations of warm-up"),
        _setting("WEIGHT_DECAY", Decimal(), "5", "Weight decay"),
        _setting("CLIP_GRAD", Decimal(), "1.3", "Gradient-norm clipping; must lie among DDP's gradient norms, so that only some iterations are clipped"),
        _setting("SEED", Integer(1), "1234", "Seed; --benchmark-mode also uses the next seven"),
        _setting("CHECK_BLIND_SPOTS", _ON_OFF, "1", "1 also measures which mistakes these settings cannot reveal"),
        _setting("MEGATRON_DATA_DIR", _OPTIONAL_PATH, "", "Directory containing indexed dataset files (unset: the bundled sample, prepared in outputs/parity/data)"),
        _setting("RUNS_DIR", FilePath(), "{repository}/outputs/parity/{now}", "Where to put the run directories"),
    ),
    "setup_megatron": (
        _setting("MEGATRON_DIR", FilePath(), _ENGINE_DIRECTORY, "Path to your Megatron-DeepSpeed checkout"),
        _setting("MEGATRON_REPO", Text(), "https://github.com/deepspeedai/Megatron-DeepSpeed.git", "What to clone: a URL, or a local path if there is no internet"),
        _setting("INSTALL", _ON_OFF, "1", "0 skips installing the Python packages"),
    ),
    "prepare_xsum_megatron": (
        _setting("MODEL_FAMILY", _FAMILY, DEFAULT_FAMILY, "Model family; each has its own tokenizer"),
        _setting("SAMPLE", _ON_OFF, "0", "1 uses the articles and the tokenizer in megatron_data/sample; needs no network"),
        _setting("MEGATRON_DATA_DIR", FilePath(), "{family_data}", "Directory to write to; a relative path starts at the current directory, the default at the repository"),
        _setting("XSUM_SOURCE", _OPTIONAL_PATH, "", "Local JSONL or Parquet file with the columns document and summary, or text; a directory of such files; or a pattern, as in 'data/*.jsonl' (unset: EdinburghNLP/xsum from the hub)"),
        _setting("TEXT_COLUMN", _OPTIONAL_TEXT, "", "The column with the text, where it has another name or more than one may be meant"),
        _setting("XSUM_SPLIT", Text(), "train", "Split of the hub's dataset: train, validation or test"),
        _setting("XSUM_LIMIT", _OPTIONAL_COUNT, "", "Stop after this many documents (unset: all)"),
        _setting("TOKENIZER_MODEL", _OPTIONAL_TEXT, "", f"Hugging Face name or directory of a tokenizer (unset: {DEFAULT_TOKENIZER}; for gpt, GPT-2's from the engine's checkout)"),
        _setting("MEGATRON_DIR", FilePath(), _ENGINE_DIRECTORY, "Path to your Megatron-DeepSpeed checkout, for GPT-2's tokenizer"),
        _setting("FORCE", _ON_OFF, "0", "1 exports again, and replaces data from another source or tokenizer"),
        _setting("WORKERS", _OPTIONAL_COUNT, "", "Tokenising processes (unset: one per processor)"),
        _setting("PYTHON", Text(), "python3", "The Python that has the packages of requirements.txt"),
    ),
    "gpu_acceptance": (
        _setting("MINUTES", Integer(1), "10", "Minutes that this call may take in all"),
        _setting("RESULTS_DIR", FilePath(), "{repository}/outputs/acceptance/results", "Where to put the packed runs and the log"),
        _setting("WORK_DIR", FilePath(), "{repository}/outputs/acceptance/{now}", "Directory of the runs; an earlier call's continues its sweeps"),
        _setting("BUNDLE", FilePath(), "{repository}/outputs/bundle", "The directory that --pack makes, for a machine without internet"),
        _setting("TARGET_PYTHON", Text(), "3.12", "With --pack: the Python version of the machine that will use the bundle"),
        _setting("MEGATRON_DIR", FilePath(), _ENGINE_DIRECTORY, "Path to your patched Megatron-DeepSpeed checkout"),
    ),
}
# fmt: on


def prefix_of_model(description: str) -> str:
    """What precedes names where several models have a place each: a model's kind, and a checksum of its description;
    "" without one."""
    if not description:
        return ""
    kind = json.loads(description)["kind"]
    return f"{kind}-{hashlib.sha256(description.encode()).hexdigest()[:6]}-"


def script_defaults(script: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The defaults of a script's settings."""
    family = environ.get("MODEL_FAMILY", DEFAULT_FAMILY)
    words = default_paths(family if family in MODEL_FAMILIES else DEFAULT_FAMILY)
    words["model_prefix"] = prefix_of_model(environ.get("MODEL", "")) or words["family_prefix"]
    words |= {"now": time.strftime("%Y%m%d-%H%M%S"), "engine": environ.get("ENGINE") or "native"}
    return {declaration.name: declaration.default.format(**words) for declaration in SCRIPTS[script]}


def script_values(script: str, environ: Mapping[str, str], directory: str) -> tuple[dict[str, str], list[Fault]]:
    """The values of a script's settings, with paths made absolute, and what is wrong with them."""
    values = {}
    faults = []
    for declaration, default in zip(SCRIPTS[script], script_defaults(script, environ).values(), strict=True):
        value = declaration.kind.read(environ.get(declaration.name, default))
        fault = declaration.kind.fault(declaration.name, value)
        if fault:
            faults.append(fault)
        if isinstance(declaration.kind, FilePath) and value:
            value = absolute(directory, value, environ)
        values[declaration.name] = value
    return values, faults
