"""The engine: the state of a Megatron-DeepSpeed checkout, by checksum, and what it can do on this machine.

python -m t5bench.plan.engine state DIRECTORY         prints series, megatron_t5_fixes, unpatched, changed or missing
python -m t5bench.plan.engine differences DIRECTORY   prints the files that differ from the patched engine
"""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from t5bench import REPOSITORY
from t5bench.plan.request import Request

CHECKSUMS = REPOSITORY / "patches" / "checksums"
SERIES, FIXES_ALONE, UNPATCHED, CHANGED, MISSING = "series", "megatron_t5_fixes", "unpatched", "changed", "missing"
EXIT_CONFIGURATION = 2


def recorded_checksums(state: str, checksums: Path | None = None) -> dict[str, str]:
    """The sha256 of each file of the engine in a state of the patches."""
    lines = ((checksums or CHECKSUMS) / f"{state}.sha256").read_text().splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _digest(path: Path) -> str:
    """'' for a file that cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def state_of(directory: Path, checksums: Path | None = None) -> str:
    """What a checkout holds: one of the constants above. Everything that decides how the engine trains is compared.

    checksums: the directory with those of each state, where it is not this repository's.
    """
    if not (directory / "pretrain_t5.py").is_file():
        return MISSING
    found: dict[str, str] = {}
    for state in (SERIES, FIXES_ALONE, UNPATCHED):
        recorded = recorded_checksums(state, checksums)
        for name, digest in recorded.items():
            if name not in found:
                found[name] = _digest(directory / name)
            if found[name] != digest:
                break
        else:
            return state
    return CHANGED


def differing_files(directory: Path) -> list[str]:
    """One line for each file that is not as in the patched engine."""
    lines = []
    for name, digest in recorded_checksums(SERIES).items():
        found = _digest(directory / name)
        if found != digest:
            lines.append(f"{name} {'differs' if found else 'is missing'}")
    return lines


def check_engine(request: Request, directory: Path, device: str, gpus_shared: bool) -> str:
    """The state of the checkout that the plan records; what a run would miss goes to the findings."""
    if request.value("ENGINE") != "megatron":
        return SERIES
    state, lack = state_of(directory), request.findings.lack
    checkout = f"the Megatron-DeepSpeed checkout at {directory}"
    setup = f"Run: MEGATRON_DIR='{directory}' bash '{REPOSITORY}/scripts/setup_megatron.sh'"
    if state == MISSING:
        lack("no-engine", f"there is no Megatron-DeepSpeed checkout at {directory}", setup)
    elif state in (UNPATCHED, CHANGED):
        lack("engine-not-patched", f"{checkout} is not patched as patches/ says (--check tells how it differs)", setup)
    elif state == FIXES_ALONE:
        alone = f"{checkout} has megatron_t5_fixes.patch alone"
        if device == "cpu":
            lack("engine-partly-patched", f"{alone}, and CPU needs the whole series", setup)
        elif gpus_shared:
            lack("engine-partly-patched", f"{alone}, and SHARE_GPUS=1 needs the whole series", setup)
        request.findings.notes.append(
            "warning: only megatron_t5_fixes.patch is applied: no W&B keys by the README's names, TFLOPs of the encoder"
            f" alone. {setup}"
        )
    return state


def main(arguments: Sequence[str]) -> int:
    task, directory = arguments
    print("\n".join([state_of(Path(directory))] if task == "state" else differing_files(Path(directory))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
