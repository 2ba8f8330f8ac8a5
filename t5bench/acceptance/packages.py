"""The Python packages that a machine without internet lacks.

    python -m t5bench.acceptance.packages pack WHEELS PYTHON     wheels for another machine's Python, such as 3.12
    python -m t5bench.acceptance.packages complete SITE [WHEELS] installs what this Python lacks into SITE, which is on
                                                                 PYTHONPATH, and prints what is still missing

Installed next to the existing Python, not into it: its torch matches its CUDA, and resolving dependencies again could
replace it.
"""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from t5bench import REPOSITORY

# Not needed: exporting XSum and uploading to W&B do not happen here.
NOT_NEEDED = {"datasets", "pyarrow", "wandb"}
# Packages that an image with torch and transformers may lack; pip adds their dependencies. The list is short because a
# bundle for a machine without internet should not contain a second torch.
CARRIED = (
    "hjson", "pydantic", "ninja", "py-cpuinfo", "msgpack", "msgspec", "psutil", "einops", "tqdm", "regex", "six",
    "packaging", "pybind11", "tabulate", "jinja2", "sentencepiece", "matplotlib",
)  # fmt: skip
# Built from its sources: pure Python as long as no operator is compiled ahead, so it serves every machine.
BUILT = "deepspeed"
# pip takes each name exactly.
MANYLINUX = ("_2_28", "_2_27", "_2_17", "2014", "1", "_2_5")


def required() -> dict[str, str]:
    """The lines of requirements.txt by name."""
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    return {match[0]: line for line in lines if (match := re.match(r"[\w.-]+", line))}


def lacks(name: str) -> bool:
    """An installed package, in any version, was chosen for this machine."""
    return not any(metadata.distributions(name=name))


def pip(*arguments: str | Path) -> None:
    """Ends this process if pip fails, which says why."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, arguments)]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        sys.exit(1)


def pack(wheels: Path, python: str) -> None:
    """Downloads the wheels for x86-64 Linux."""
    platforms = [f"--platform=manylinux{version}_x86_64" for version in MANYLINUX]
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, required()[BUILT])
    pip("download", "--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms,
        "--dest", wheels, *CARRIED)  # fmt: skip


def complete(site: Path, wheels: Path | None = None) -> list[str]:
    """The lines of requirements.txt that are still missing."""
    if wheels and (lacking := [wheel for wheel in sorted(wheels.glob("*.whl")) if lacks(wheel.name.split("-")[0])]):
        pip("install", "--no-index", "--no-deps", "--no-compile", "--target", site, *lacking)
    return [line for name, line in required().items() if name not in NOT_NEEDED and lacks(name)]


if __name__ == "__main__":
    task, *arguments = sys.argv[1:]
    if task == "pack":
        pack(Path(arguments[0]), arguments[1])
    else:
        print(", ".join(complete(*map(Path, arguments))))
