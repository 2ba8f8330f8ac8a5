"""``ledger --show LIBRARY RELEASE MODE``: a fault as one file of plain PyTorch and the accused library, and its output.

The files lie in accusations/, each with what it printed when it was written (.txt). They use none of this code. In a
checkout they run under the release that is asked about; elsewhere under the installed one, if it is that.
"""

import os
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from t5bench_ledger.answer import NoAnswer, named, public
from t5bench_ledger.modes import BESIDE

FOLDER = Path(__file__).with_name("accusations")
# The first line of a file's output, and how each of its statements ends.
VERSIONS = re.compile(r"(?:transformers|deepspeed|torch) (\S+)(?: .*torch (\S+))?$")
AS_PROMISED = "as promised"
NOT_AS_PROMISED = f"NOT {AS_PROMISED}"
FIELD = re.compile(r"^(Library|Strategies|Modes|Pairs|Reported): ((?:.|\n  )+)$", re.MULTILINE)


@dataclass(frozen=True)
class Accusation:
    """A file, and what it says that it is about."""

    path: Path
    library: str
    strategies: frozenset[str]
    modes: frozenset[str]
    pairs: frozenset[str]
    """The smallest forms of pairs of settings that it shows, in words."""
    reported: str = ""
    """Where others report it; of a file of pairs, whose fault no change upstream explains."""

    @property
    def printed(self) -> str:
        """What it printed under releases with the fault and without it."""
        path = self.path.with_suffix(".txt")
        return path.read_text() if path.exists() else ""

    @cached_property
    def outputs(self) -> dict[tuple[str, str], list[str]]:
        """Its statements, by release and PyTorch's release."""
        return statements(self.printed)

    def is_of(self, library: str, strategy: str, mode: str) -> bool:
        """Whether it speaks for this way of training."""
        return self.library == library and strategy in self.strategies and mode in self.modes

    def shows(self, releases: Collection[str], mode: str) -> bool:
        """Whether it printed in one of these that what it trained is not as promised.

        Of a file whose lines begin with modes, those of this mode count.
        """
        lines = [line for (release, _), own in self.outputs.items() if release in releases for line in own]
        names_modes = any(line.startswith(f"{each}: ") for line in lines for each in self.modes)
        own = [line for line in lines if not names_modes or line.startswith(f"{mode}: ")]
        return any(line.endswith(NOT_AS_PROMISED) for line in own)


def statements(printed: str) -> dict[tuple[str, str], list[str]]:
    """By release and PyTorch's release what files say; libraries print more. The first line has the versions."""
    found: dict[tuple[str, str], list[str]] = {}
    own: list[str] = []
    for line in printed.splitlines():
        versions = VERSIONS.match(line)
        if versions:
            own = [line]
            found[public(versions[1]), public(versions[2] or versions[1])] = own
        elif line.endswith(AS_PROMISED):
            own.append(line)
    return {versions: lines for versions, lines in found.items() if len(lines) > 1}


def is_shown(library: str, strategy: str, mode: str, release: str) -> bool:
    """Whether a file that needs none of this project shows this fault in this very release."""
    return any(each.shows([release], mode) for each in accusations() if each.is_of(library, strategy, mode))


@cache
def accusations() -> Sequence[Accusation]:
    made = []
    for path in sorted(FOLDER.glob("*.py")):
        fields = {name: value.replace("\n  ", " ") for name, value in FIELD.findall(path.read_text())}
        strategies = frozenset(fields.get("Strategies", "").split(", "))
        modes = frozenset(fields.get("Modes", "").split(", "))
        pairs = frozenset(fields.get("Pairs", "").split("; "))
        reported = fields.get("Reported", "")
        made.append(Accusation(path, fields["Library"], strategies, modes, pairs, reported))
    return made


def accusation_of(library: str, mode: str, strategy: str = "", releases: Collection[str] = ()) -> Accusation | None:
    """That of a mode, and of a strategy and of releases in which it ran if they are named; a mode may also be called as
    the file is."""
    for each in accusations():
        is_of_mode = each.library == library and (mode in each.modes or mode == each.path.stem)
        is_of_strategy = not strategy or strategy in each.strategies
        if is_of_mode and is_of_strategy and (not releases or each.shows(releases, mode)):
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
