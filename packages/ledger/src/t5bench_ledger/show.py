"""``ledger --show LIBRARY RELEASE MODE``: a fault as one file of plain PyTorch and the accused library, and its output.

The files lie in accusations/, each with what it printed when it was written (.txt). They use none of this code. In a
checkout they run under the release that is asked about; elsewhere under the installed one, if it is that.
"""

import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from t5bench_ledger.answer import NoAnswer, named, public
from t5bench_ledger.modes import BESIDE

FOLDER = Path(__file__).with_name("accusations")
RAN = re.compile(r"^(?:transformers|deepspeed) (\S+) ", re.MULTILINE)
FIELD = re.compile(r"^(Library|Strategies|Modes): ((?:.|\n  )+)$", re.MULTILINE)


@dataclass(frozen=True)
class Accusation:
    """A file, and what it says that it is about."""

    path: Path
    library: str
    strategies: frozenset[str]
    modes: frozenset[str]

    @property
    def printed(self) -> str:
        """What it printed under releases with the fault and without it."""
        return self.path.with_suffix(".txt").read_text()

    def shows(self, releases: Collection[str]) -> bool:
        """Whether it ran under one of these."""
        return any(release in releases for release in RAN.findall(self.printed))


def accusations() -> Iterator[Accusation]:
    for path in sorted(FOLDER.glob("*.py")):
        fields = {name: value.split(", ") for name, value in FIELD.findall(path.read_text().replace(",\n  ", ", "))}
        (library,) = fields["Library"]
        yield Accusation(path, library, frozenset(fields["Strategies"]), frozenset(fields["Modes"]))


def accusation_of(library: str, mode: str, strategy: str = "", releases: Collection[str] = ()) -> Accusation | None:
    """That of a mode, and of a strategy and of releases in which it ran if they are named; a mode may also be called as
    the file is."""
    for each in accusations():
        is_of_mode = each.library == library and (mode in each.modes or mode == each.path.stem)
        is_of_strategy = not strategy or strategy in each.strategies
        if is_of_mode and is_of_strategy and (not releases or each.shows(releases)):
            return each
    return None


def show(library: str, release: str, mode: str) -> int:
    """Prints the file and what it printed, and runs it; the exit status. Raises NoAnswer."""
    ((library, release),) = named(f"{library}=={release}").items()
    strategy, _, rest = mode.partition("/")
    asked = (library, rest, strategy) if rest else (library, mode)
    found = accusation_of(*asked, releases=[release]) or accusation_of(*asked)
    if not found:
        known = "; ".join(f"{each.library} {each.path.stem}" for each in accusations())
        raise NoAnswer(f"no file shows '{mode}' of {library}", f"Choose a mode of one of these, or its name: {known}")
    print(f"{found.path}\n\n{found.path.read_text()}\n# It printed:\n{found.printed}", flush=True)
    environment = environment_of(library, release)
    if environment is None:
        beside = " ".join(f"{name}=={version}" for name, version in BESIDE[library].items())
        print(f"Run it yourself: pip install torch {library}=={release} {beside}; python {found.path.name}")
        return 0
    print(f"# Now, under {library} {release}:", flush=True)
    words = [sys.executable, str(found.path)]
    run = subprocess.run(words, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        print(run.stderr[-2000:], file=sys.stderr)
    return run.returncode


def environment_of(library: str, release: str) -> dict[str, str] | None:
    """In which a release is found; None where it is neither installed nor can be."""
    inherited = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    try:
        if public(metadata.version(library)) == release:
            return inherited
    except metadata.PackageNotFoundError:
        pass
    if not find_spec("t5bench"):
        return None
    from t5bench_ledger import environments

    needed = {library: release} | BESIDE[library]
    python = Path(sys.executable)
    folders = [environments.release_folder(version, python, None, name) for name, version in needed.items()]
    return environments.environment(folders, {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"})
