"""The software that trains: whether a Megatron-DeepSpeed checkout is patched exactly as patches/ says, what it can do
here, and DeepSpeed's release and effective JSON.

python -m t5bench.plan.engine state DIRECTORY         prints series, megatron_t5_fixes, unpatched, changed or missing
python -m t5bench.plan.engine differences DIRECTORY   prints what differs from the patched engine

The files themselves are compared, without git, which can overlook files and is absent from a bundle.
"""

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

from t5bench import FILES, REPOSITORY, Problem
from t5bench.costmodel.layout import Layout
from t5bench.given_files import Repetition, without_repetition
from t5bench.plan.draft import Draft
from t5bench.plan.engine_arguments import check_arguments
from t5bench.plan.interpreter import extensions_folder, path_of_programs, plain_caches
from t5bench.plan.releases import check_packages
from t5bench.plan.toolkit import check_curand
from t5bench.record.ds_config import check_strategy
from t5bench.record.machine import checksum, installed_version
from t5bench.text import guard_streams, visible

CHECKSUMS = REPOSITORY / "patches" / "checksums"
SERIES = "series"
FIXES_ALONE = "megatron_t5_fixes"
UNPATCHED = "unpatched"
CHANGED = "changed"
MISSING = "missing"
# What Python imports, a compiler reads, or make uses as its Makefile.
CODE = re.compile(r".+\.(py|pyc|so|c|cc|cpp|cu|cuh|h|hpp)|(GNU)?[Mm]akefile")
IMPORTABLE = (".py", ".pyc", ".so")
# What the engine compiles from these sources, again whenever the sources are newer.
BUILT = re.compile(r"megatron/(fused_kernels/build/.*|data/helpers\.cpython-[\w-]+\.so)")
# Upstream's other folders, from which training imports nothing.
OTHER_FOLDERS = {"__pycache__", "dataset", "docs", "examples", "examples_deepspeed", "images", "megatron", "tasks"}
# What the engine and its libraries import if it is there, so that a folder of that name would count as installed.
IMPORTED_IF_THERE = {
    "amp_C", "apex", "faiss", "flash_attn", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda",
    "intel_extension_for_deepspeed", "intel_extension_for_pytorch", "torch_npu", "transformer_engine", "triton",
}  # fmt: skip
# The extensions that DeepSpeed compiles for a strategy of this project.
DEEPSPEED_EXTENSIONS = ("cpu_adam", "fused_adam", "utils", "deepspeed_shm_comm")
MOST_NAMED = 3
NO_JSON = "Correct it; JSON has no comments, no comma after a last entry and only double quotation marks"
# Where the engine compiles its kernels, in its checkout.
KERNELS = Path("megatron", "fused_kernels", "build")
COMPILING_SECONDS = 900  # longer than any extension of the engine takes


def _recorded(state: str, checksums: Path | None = None) -> dict[str, str]:
    """The sha256 of each of the engine's files, with these patches applied."""
    lines = ((checksums or CHECKSUMS) / f"{state}.sha256").read_text().splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def state_of(directory: Path, checksums: Path | None = None) -> str:
    """The state of a checkout, one of the constants above. It covers everything that decides how the engine trains.

    checksums: the directory with the checksums of each state (default: this repository's).
    """
    if not (directory / "pretrain_t5.py").is_file():
        return MISSING
    digest = cache(lambda name: checksum(directory / name))
    for state in (SERIES, FIXES_ALONE, UNPATCHED):
        recorded = _recorded(state, checksums)
        if all(digest(name) == wanted for name, wanted in recorded.items()):
            return CHANGED if any(_intruders(directory, recorded)) else state
    return CHANGED


def differences(directory: Path) -> list[str]:
    """One line for each file that does not belong to the patched engine, and for each that differs from it."""
    recorded = _recorded(SERIES)
    found = {name: checksum(directory / name) for name in recorded}
    changed = [name for name, digest in recorded.items() if found[name] != digest]
    lines = [f"{name} {'differs' if found[name] else 'is missing'}" for name in changed]
    return [*_intruders(directory, recorded), *lines]


def _intruders(directory: Path, own: Mapping[str, str]) -> Iterator[str]:
    """One line for each file that Python or a compiler would use although it does not belong to the engine."""
    for path in sorted(directory.iterdir()):
        name = path.name
        is_folder = path.is_dir()
        if is_folder and _is_imported(path, own):
            yield f"{name}/ would be imported instead of the package of that name"
        elif path.suffix in (".dist-info", ".egg-info") and installed_version(path.stem.split("-")[0]):
            yield f"{name}/ would be mistaken for the installed package"
        elif path.suffix in IMPORTABLE and name not in own and not is_folder and _is_another_module(name.split(".")[0]):
            yield f"{name} would be imported instead of the module of that name"
    for folder, folders, names in os.walk(directory / "megatron"):
        place = Path(folder).relative_to(directory)
        # Python imports nothing from a folder or a file of another name, such as an editor's .ipynb_checkpoints/.
        folders[:] = [name for name in folders if name.isidentifier() or _has_own(place / name, own)]
        for name in sorted(names):
            file = str(place / name)
            can_be_imported = name.partition(".")[0].isidentifier() or Path(name).suffix not in IMPORTABLE
            if not (can_be_imported or file in own):
                continue
            if place.name == "__pycache__":
                # Compiled Python that is never compared with its source (PEP 552).
                if Path(folder, name).read_bytes()[4:8] == b"\1\0\0\0":
                    yield f"{file} would be used whatever its source says"
            elif CODE.fullmatch(name) and file not in own and not BUILT.fullmatch(file):
                yield f"{file} does not belong to the engine"
        links = [str(place / name) for name in folders if Path(folder, name).is_symlink()]
        yield from (f"{link} is a symbolic link" for link in links if not BUILT.fullmatch(f"{link}/"))


def _has_own(folder: Path, own: Mapping[str, str]) -> bool:
    return any(name.startswith(f"{folder}/") for name in own)


def _is_imported(folder: Path, own: Mapping[str, str]) -> bool:
    """Whether Python would import this folder of the checkout for a package that training imports from elsewhere.

    A folder without __init__.py is a package only if no other of its name has one, and without code it does not matter.
    """
    name = folder.name
    inits = [f"{name}/{init.name}" for init in folder.glob("__init__.*") if init.suffix in IMPORTABLE]
    if inits or name in OTHER_FOLDERS or not name.isidentifier():
        return any(init not in own for init in inits) and (name in OTHER_FOLDERS or _is_another_module(name))
    if not any(path.suffix in IMPORTABLE for pattern in ("*", "*/*") for path in folder.glob(pattern)):
        return False
    installed = util.find_spec(name)
    has_no_init = installed is None or installed.origin is None
    is_installed = installed is not None and any(
        not _is_of_this_repository(path) for path in installed.submodule_search_locations or ()
    )
    return has_no_init and (is_installed or name in IMPORTED_IF_THERE)


def _is_of_this_repository(place: str | Path) -> bool:
    """Whether a module is this repository's own; the environment in its .venv holds others'."""
    path = Path(place).resolve()
    return path.is_relative_to(REPOSITORY) and not path.is_relative_to(Path(sys.prefix).resolve())


def _is_another_module(name: str) -> bool:
    """Whether a module of that name is Python's own, is installed, or would be used if it were there."""
    if name in sys.stdlib_module_names or name in IMPORTED_IF_THERE:
        return True
    installed = util.find_spec(name)
    return installed is not None and not _is_of_this_repository(installed.origin or REPOSITORY)


def check_software(
    draft: Draft, device: str, gpus_shared: bool, ds_config: Mapping[str, Any] | None, layout: Layout
) -> tuple[str, str]:
    """The state of the engine's patches, and what the ledger says of DeepSpeed."""
    patches = SERIES
    if draft.value("ENGINE") == "megatron":
        directory = Path(draft.value("MEGATRON_DIR"))
        patches = check_engine(draft, directory, device, gpus_shared)
        check_arguments(draft, directory)
    check_locks(draft, ds_config, device)
    ledger = check_packages(draft, ds_config, layout, device)
    if device == "cuda" and ds_config and offload_device(ds_config, "offload_optimizer") == "cpu":
        try:
            check_curand({**draft.environ, "PATH": path_of_programs(draft.environ)})
        except Problem as problem:
            draft.lack("no-curand", str(problem), problem.remedy)
    return patches, ledger


def check_engine(draft: Draft, directory: Path, device: str, gpus_shared: bool) -> str:
    """The state of the checkout, for the plan; what a run lacks goes to the draft."""
    state = state_of(directory)
    lack = draft.lack
    checkout = f"the Megatron-DeepSpeed checkout at {directory}"
    setup = f"Run: MEGATRON_DIR='{directory}' bash '{REPOSITORY}/scripts/setup_megatron.sh'"
    if state == MISSING:
        lack("no-engine", f"there is no Megatron-DeepSpeed checkout at {directory}", setup)
    elif state == UNPATCHED:
        lack("engine-not-patched", f"{checkout} is not patched", setup)
    elif state == CHANGED:
        named = "; ".join(differences(directory)[:MOST_NAMED])
        remedy = f"{setup} --check lists all differences, --reset stashes them; delete ignored files yourself"
        lack("engine-not-patched", f"{checkout} does not match patches/: {named}", remedy)
    elif state == FIXES_ALONE and (device == "cpu" or gpus_shared):
        found = f"{checkout} has only megatron_t5_fixes.patch, but CPU and SHARE_GPUS=1 need all patches"
        lack("engine-partly-patched", found, setup)
    elif state == FIXES_ALONE:
        without = "W&B does not get the README's metrics, and TFLOPs count only the encoder"
        draft.notes.append(f"warning: only megatron_t5_fixes.patch is applied: {without}. {setup}")
    return state


def extension_locks(environ: Mapping[str, str], names: Collection[str] = DEEPSPEED_EXTENSIONS) -> Iterator[Path]:
    """The lock files of these extensions: PyTorch keeps one next to each extension that it compiles, and waits forever
    if one exists."""
    folders = {extensions_folder(environ)}
    with contextlib.suppress(OSError):
        folders.add(extensions_folder({**environ, **plain_caches(environ)}))
    return (lock for folder in folders for lock in folder.glob("**/lock") if lock.parent.name in names)


def _compiled_extensions(draft: Draft, config: Mapping[str, Any] | None, device: str) -> set[str]:
    """The extensions of DeepSpeed that this run compiles, or has compiled."""
    if not config:
        return set()
    names = {"deepspeed_shm_comm"} if device == "cpu" else {"utils"}
    if draft.value("ENGINE") == "megatron":  # the native engine's optimizer is PyTorch's
        if offload_device(config, "offload_optimizer") == "cpu":
            names.add("cpu_adam")
        elif device == "cuda":
            names.add("fused_adam")
    return names


def check_locks(draft: Draft, config: Mapping[str, Any] | None, device: str) -> None:
    """Finds locks left by a killed compilation of what this run compiles.

    A lock may be in use if it is new or a process here has it open. config: the effective DeepSpeed options.
    """
    compiled = _compiled_extensions(draft, config, device)
    locks = list(extension_locks(draft.environ, compiled))
    if draft.value("ENGINE") == "megatron" and device == "cuda":
        locks += Path(draft.value("MEGATRON_DIR"), KERNELS).glob("**/lock")
    for lock in locks:
        with contextlib.suppress(OSError):
            age = time.time() - lock.stat().st_mtime
            if _is_open(lock):
                continue
            if age > COMPILING_SECONDS:
                found = f"{lock} was left by a compilation that was killed, and PyTorch would wait for it forever"
                draft.lack("stale-lock", found, f"Run: rm '{lock}'")
            else:
                waits = f"warning: PyTorch waits as long as {lock} exists, and no process of this machine holds it"
                draft.notes.append(f"{waits}. Unless another host is compiling, run: rm '{lock}'")


def _is_open(path: Path) -> bool:
    for opened in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if opened.samefile(path):
                return True
    return False


def config_of_settings(draft: Draft) -> dict[str, Any]:
    """The DeepSpeed options that come from settings: batch sizes (in samples), clipping norm, precision."""
    precision = draft.value("PRECISION_FLAG")
    config: dict[str, Any] = {
        "train_batch_size": draft.number("GLOBAL_BATCH_SIZE"),
        "train_micro_batch_size_per_gpu": draft.number("MICRO_BATCH_SIZE"),
        "gradient_clipping": float(draft.value("CLIP_GRAD")),
        "bf16": {"enabled": precision == "--bf16"},
        "fp16": {"enabled": precision == "--fp16"},
        # DeepSpeed's own progress lines would mix with the engine's.
        "steps_per_print": 10**9,
    }
    if draft.value("GRADIENT_REDUCTION") == "fp32":
        # As Megatron's DDP does in every precision. Without data_types.grad_accum_dtype, with which DeepSpeed would
        # choose another optimizer for ZeRO-1 in bf16.
        config["communication_data_type"] = "fp32"
    return config


def effective_config(draft: Draft) -> dict[str, Any] | None:
    """A strategy's own JSON completed with the run's batch sizes (in samples), clipping norm and precision.

    DeepSpeed takes these from the JSON and Megatron from its arguments, and neither notices when they differ: a
    different micro-batch size changes the gradient scale, fp32 arguments with a bf16 JSON train in bf16. Here both come
    from the same settings. None for a strategy without DeepSpeed, or with a JSON that cannot be used.
    """
    if not draft.strategy.ds_config:
        return None
    options = config_of_settings(draft)
    path = FILES / "ds_configs" / draft.strategy.ds_config
    try:
        written = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=without_repetition)
        stage_config, unread = check_strategy(written, str(path))
    except Problem as problem:
        draft.refuse("ds-config", str(problem), problem.remedy)
        return None
    except Repetition as error:
        draft.refuse("ds-config", f"{path}: an object {error}", "Keep one of them")
        return None
    except json.JSONDecodeError as error:
        draft.refuse("ds-config", f"{path}: line {error.lineno} is no JSON, found {_line(error)}", NO_JSON)
        return None
    except (OSError, ValueError) as error:
        draft.refuse("ds-config", f"{path}: {error}")
        return None
    if unread:
        draft.notes.append(f"note: {', '.join(unread)} in {path} is no option of DeepSpeed, and is left out")
    for name in options.keys() & stage_config.keys():
        found = f'{name} is "{stage_config[name]}" in {path}, but GRADIENT_REDUCTION={options[name]}'
        if options[name] != stage_config[name]:
            draft.refuse("ds-config", found, "Remove one of them")
    zero = stage_config["zero_optimization"]
    if zero["stage"] > 1 and draft.number("PIPELINE_PARALLEL_SIZE") > 1:
        problem = f"DeepSpeed's pipeline engine supports only ZeRO stage 1, found {zero['stage']}"
        draft.refuse("ds-config", f"{path}: {problem}")
        return None
    if draft.value("OVERLAP_COMM") != "default":
        zero["overlap_comm"] = draft.value("OVERLAP_COMM") == "on"
    if zero.get("overlap_comm", zero["stage"] == 3) and zero["stage"] > 1:
        source = "OVERLAP_COMM=on" if draft.value("OVERLAP_COMM") == "on" else str(path)
        warning = f"warning: overlap_comm is true ({source}), with which ZeRO-2 and ZeRO-3 have hung on GPUs"
        draft.notes.append(f"{warning}: OVERLAP_COMM=off avoids it (DeepSpeed's default for ZeRO-3 is true)")
    return options | stage_config


def _line(error: json.JSONDecodeError) -> str:
    """What stands where JSON was expected."""
    return visible(error.doc.split("\n")[error.lineno - 1].strip()) or "nothing"


def offload_device(config: Mapping[str, Any], name: str) -> str:
    return (config["zero_optimization"].get(name) or {}).get("device", "none")


if __name__ == "__main__":
    guard_streams()
    task = sys.argv[1]
    place = Path(sys.argv[2])
    print("\n".join([state_of(place)] if task == "state" else differences(place)))
