"""The Python packages that a machine lacks: which they are, packed where there is internet, installed where not.

    python -m acceptance.packages missing             prints what requirements.txt names and this Python lacks
    python -m acceptance.packages pack DIRECTORY      wheels for another machine (--python 3.12)
    python -m acceptance.packages install WHEELS TO   those that this Python lacks, into a directory for PYTHONPATH

Installed beside and not into the Python that is there: its torch was built for its CUDA, and a package index that
resolves dependencies anew would replace it.
"""

import argparse
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from t5bench import REPOSITORY

# Exporting XSum and uploading to W&B do not happen here, and without matplotlib there is no picture.
NOT_NEEDED = {"datasets", "pyarrow", "wandb", "matplotlib"}
# What an image with torch and transformers may lack for both engines; pip adds what these need in turn. Small: what is
# copied to a machine without internet should not hold a second torch.
CARRIED = (
    "hjson", "pydantic", "ninja", "py-cpuinfo", "msgpack", "psutil", "einops", "tqdm", "regex", "six", "packaging",
    "pybind11", "tabulate", "jinja2", "sentencepiece",
)  # fmt: skip
# Built from its sources: pure Python as long as no operator is compiled ahead, so it serves every machine.
BUILT = "deepspeed"
# Of what manylinux builds of these packages were made for; pip takes each name exactly.
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
    "manylinux_2_5_x86_64",
)


def normal(name: str) -> str:
    """A distribution's name as PEP 503 compares them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> set[str]:
    return {normal(distribution.name) for distribution in metadata.distributions() if distribution.name}


def required() -> dict[str, str]:
    """The lines of requirements.txt by normal name."""
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    found = {}
    for line in lines:
        if match := re.match(r"[A-Za-z0-9_.-]+", line):
            found[normal(match[0])] = line.strip()
    return found


def missing() -> list[str]:
    """Lines of requirements.txt for what is not installed in any version."""
    have = installed()
    return [line for name, line in required().items() if name not in have | NOT_NEEDED]


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def pack(directory: Path, python: str) -> None:
    """Fills directory with wheels for that Python on x86-64 Linux. Raises CalledProcessError."""
    directory.mkdir(parents=True, exist_ok=True)
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory), required()[BUILT])
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    pip("download", "--quiet", "--only-binary=:all:", "--python-version", python, "--implementation", "cp",
        *platforms, "--dest", str(directory), *CARRIED)  # fmt: skip


def install(wheels: Path, target: Path) -> list[str]:
    """Installs those of the wheels that are lacking; their names. Raises CalledProcessError."""
    have = installed()
    chosen = {normal(wheel.name.split("-")[0]): wheel for wheel in sorted(wheels.glob("*.whl"))}
    lacking = {name: wheel for name, wheel in chosen.items() if name not in have}
    if lacking:
        pip("install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(target),
            *map(str, lacking.values()))  # fmt: skip
    return sorted(lacking)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("missing")
    packing = commands.add_parser("pack")
    packing.add_argument("directory", type=Path)
    packing.add_argument("--python", default="3.12")
    installing = commands.add_parser("install")
    installing.add_argument("wheels", type=Path)
    installing.add_argument("target", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.command == "missing":
            print("\n".join(missing()))
        elif arguments.command == "pack":
            pack(arguments.directory, arguments.python)
        else:
            print(" ".join(install(arguments.wheels, arguments.target)))
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
