"""How a checkout is asked: with an environment of its own, two programs at a time, and answers without what varies."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

AT_A_TIME = 2
LONGEST_SECONDS = 1800
ENGINE = Path.home() / ".cache" / "t5-parallelism" / "Megatron-DeepSpeed"
# A shell's background ignores these signals, and bash can catch no signal that it inherits as ignored.
BEGINNING = ("nice", "-n", "10", "env", "--default-signal=HUP,INT,QUIT")
# Of any program; what else varies in a part is that part's to name.
VARYING = (
    (r"\b[0-9a-f]{40}\b", "<commit>"),
    (r"\b[0-9a-f]{32}\b", "<unique>"),
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d([.,]\d+)?(Z|[+-]\d\d:\d\d)?", "<time>"),
    (r"\b20\d{6}-\d{6}\b", "<time>"),
    (r"\(process \d+(, \d+)?", "(process <pid>"),
)


@cache
def own_network() -> list[str]:
    """What begins a command that gets a network of its own, where no other program holds a port that a plan checks."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    words = ["unshare", "--net", *user, "bash", "-c", 'ip link set lo up && exec "$@"', "own-network"]
    try:
        subprocess.run([*words, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        print("no network of their own for programs here: ports that others hold may show", file=sys.stderr)
        return []
    return words


@dataclass(frozen=True)
class Question:
    """A program that is run, and the file that its answer goes to."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """A look at one checkout."""

    tree: Path
    scratch: Path
    """A directory that is removed at the end."""

    def __post_init__(self) -> None:
        """What PyTorch compiled for the user need not be compiled again, although the programs have another home
        directory. It is copied, because a compilation that goes on elsewhere would hold them up."""
        compiled = Path.home() / ".cache" / "torch_extensions"
        if compiled.is_dir():
            shutil.copytree(compiled, self.scratch / ".cache" / compiled.name, ignore=shutil.ignore_patterns("*lock"))

    @property
    def made(self) -> Path:
        """A copy of the stored records."""
        return self.scratch / "made"

    def environment(self, **settings: str) -> dict[str, str]:
        """Nothing of the user's but the path, and nothing that asks the network."""
        fixed = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "HOME": str(self.scratch),
            "LANG": "C.UTF-8",
            "COLUMNS": "120",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "T5_RUN_SECRET": "what the nodes of these runs share",
        }
        return fixed | settings

    def run(self, *command: str, has_own_network: bool = True, **settings: str) -> subprocess.CompletedProcess[str]:
        """The program's end, with low priority, started in the checkout."""
        words = [*BEGINNING, *(own_network() if has_own_network else []), *command]
        where = {"cwd": self.tree, "env": self.environment(**settings), "timeout": LONGEST_SECONDS}
        return subprocess.run(words, **where, capture_output=True, text=True, check=False)

    def prepare(self, *command: str, **settings: str) -> None:
        """Runs what must succeed before questions can be asked."""
        result = self.run(*command, **settings)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)} failed in {self.tree}:\n{result.stdout}{result.stderr}")

    def t5bench(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "t5bench", *words]

    def script(self, name: str, *words: str) -> list[str]:
        return ["bash", str(self.tree / "scripts" / name), *words]

    def answers(self, questions: Iterable[Question]) -> Iterator[tuple[str, str]]:
        """Each question's name and answer, in their order; says on standard error how far it is."""
        asked = list(questions)

        def answer(question: Question) -> str:
            return shown(self.run(*question.command, **question.environment))

        with ThreadPoolExecutor(AT_A_TIME) as pool:
            for number, text in enumerate(pool.map(answer, asked), 1):
                if number % 20 == 0:
                    print(f"  {number} of {len(asked)}", file=sys.stderr)
                yield asked[number - 1].name, text

    def launchers(self) -> list[str]:
        """The strategies' names, in alphabetical order."""
        prefix = "run_megatron_t5_"
        names = [path.stem.removeprefix(prefix) for path in (self.tree / "scripts").glob(f"{prefix}*.sh")]
        return sorted(name for name in names if name != "all")

    @cached_property
    def engine(self) -> Path:
        """A clone of Megatron-DeepSpeed with the checkout's patches."""
        source = os.environ.get("MEGATRON_DIR", str(ENGINE))
        directory = self.scratch / "Megatron-DeepSpeed"
        settings = {"MEGATRON_DIR": str(directory), "MEGATRON_REPO": source, "INSTALL": "0"}
        self.prepare(*self.script("setup_megatron.sh"), **settings)
        return directory

    def data(self, family: str) -> Path:
        """The bundled articles, prepared for a model family."""
        directory = self.scratch / f"data-{family}"
        if not directory.exists():
            settings = {"MODEL_FAMILY": family, "MEGATRON_DIR": str(self.engine), "MEGATRON_DATA_DIR": str(directory)}
            self.prepare(*self.script("prepare_xsum_megatron.sh"), SAMPLE="1", **settings)
        return directory

    def job(self, family: str, engine: str) -> dict[str, str]:
        """The settings that say what is trained, and by which engine."""
        return {
            "MODEL_FAMILY": family,
            "ENGINE": engine,
            "MEGATRON_DIR": str(self.engine),
            "MEGATRON_DATA_DIR": str(self.data(family)),
        }

    def normal(self, text: str) -> str:
        """The text without what varies between two looks."""
        places = {self.made: "<made>", self.scratch: "<scratch>", self.tree: "<tree>", Path(sys.prefix): "<python>"}
        for place, name in places.items():
            text = text.replace(str(place), name)
        for pattern, name in VARYING:
            text = re.sub(pattern, name, text)
        return text


def shown(result: subprocess.CompletedProcess[str]) -> str:
    """How a program ended and all that it said."""
    parts = [f"exit status {result.returncode}"]
    for name in ("stderr", "stdout"):
        said = getattr(result, name)
        if said:
            parts.append(f"---- {name}\n{said.rstrip()}")
    return "\n".join(parts) + "\n"
