"""A copy of the project with stubs around it, so that the launchers can be driven without torch, engine or GPU."""

import contextlib
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_plan

from t5bench.plan.ports import free_port
from t5bench.record.plan import Plan


def nightly(*cases: Any) -> list[Any]:
    """Cases of a parametrization, each a value or a tuple of them, that are played every night alone."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*each, marks=pytest.mark.nightly) for each in values]


REPO_ROOT = Path(__file__).resolve().parent.parent
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "zero3_offload", "tensor", "pipeline", "hybrid")
NATIVE_STRATEGIES = (*STRATEGIES, "fsdp2")

# `python -m torch.distributed.run` becomes the stub below before Python looks for torch, which stays what it is.
SITE_CUSTOMIZATION = """import os, sys
if sys.orig_argv[1:3] == ["-m", "torch.distributed.run"]:
    os.execv(os.path.join(os.environ["STUB_DIR"], "torchrun"), ["torchrun", *sys.orig_argv[3:]])
"""
# Records what it was given, and says what an engine says that trained to its end, after STUB_WAIT seconds. STUB_SLEEP
# keeps it and two children alive, one of them in a session of its own, as torchrun's workers are; STUB_STUBBORN lets
# that one ignore TERM.
TORCHRUN_STUB = """#!/usr/bin/env bash
printf '%s\\0' "$@" >"$STUB_DIR/arguments"
env -0 >"$STUB_DIR/environment"
echo "stub torchrun output"
while (($# > 1)); do
  [[ $1 != --train-iters ]] || iterations=$2
  [[ $1 != --log-interval ]] || interval=$2
  [[ $1 != --nnodes ]] || nodes=$2
  [[ $1 != --node_rank ]] || node=$2
  shift
done
for ((done = interval; done <= iterations && node == nodes - 1; done += interval)); do
  echo " iteration $done/$iterations | elapsed time per iteration (ms): 10.0 | learning rate: 0.0 |" \\
    "lm loss: 8.5E+00 | grad norm: 1.5 | samples per second: 1600 | TFLOPs: 0.1 |"
done
for rank in 0 1 2 3 4 5 6 7; do
  echo " peak memory | rank $rank | host stub | device cpu | allocated MiB 0.0 | reserved MiB 0.0 | host rss MiB 123.4"
done
sleep "${STUB_WAIT:-0}"
if [[ -n ${STUB_SLEEP:-} ]]; then
  sleep "$STUB_SLEEP" &
  setsid bash -c '[[ -z ${STUB_STUBBORN:-} ]] || trap "" TERM; sleep "$STUB_SLEEP" & wait; wait' &
  echo $$ >"$STUB_DIR/pid" && touch "$STUB_DIR/started"
  wait
fi
exit "${STUB_STATUS:-0}"
"""


def write_indexed_dataset(prefix: Path, documents: list[list[int]]) -> None:
    """The mmap format of Megatron, written independently of the project's own writer: uint16 tokens."""
    sizes = [len(document) for document in documents]
    pointers = [2 * sum(sizes[:index]) for index in range(len(sizes))]
    prefix.with_suffix(".bin").write_bytes(b"".join(struct.pack(f"<{len(d)}H", *d) for d in documents))
    count = len(documents)
    layout, numbers = f"<QBQQ{count}i{count}q{count + 1}q", [1, 8, count, count + 1, *sizes, *pointers]
    prefix.with_suffix(".idx").write_bytes(b"MMIDIDX\0\0" + struct.pack(layout, *numbers, *range(count + 1)))


def write_data_record(prefix: Path, **content: object) -> None:
    """The record of prepared data as the preparation writes it, with what else it is to say."""
    contents = {path.name: path.read_bytes() for path in (prefix.with_suffix(".bin"), prefix.with_suffix(".idx"))}
    files = {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in contents.items()}
    Path(f"{prefix}.meta.json").write_text(json.dumps({"source": "stub", "files": files} | content))


def processes_with(text: str, but: int = 0) -> list[int]:
    """Other processes, but for one, that have this text in the environment they were started with."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return [pid for pid in found if pid not in (os.getpid(), but)]


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@dataclass
class Project:
    """A project directory (with a space in its path), an engine next to it, and stubs first on PATH."""

    root: Path
    stubs: Path
    engine: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def data_prefix(self) -> Path:
        return self.root / "megatron_data" / "xsum_text_document"

    def script(self, name: str) -> Path:
        return self.root / "scripts" / name

    def environment_with(self, changes: dict[str, str | None]) -> dict[str, str]:
        merged = self.environment | {k: v for k, v in changes.items() if v is not None}
        return {k: v for k, v in merged.items() if changes.get(k, "") is not None}

    def launch(
        self, strategy: str, *arguments: str, cwd: Path | None = None, timeout: float = 60, **environment: str | None
    ):
        """Run a launcher to its end; an environment value of None removes the variable."""
        command = ["bash", str(self.script(f"run_megatron_t5_{strategy}.sh")), *arguments]
        where = {"env": self.environment_with(environment), "cwd": cwd or self.root}
        return subprocess.run(command, **where, capture_output=True, text=True, timeout=timeout, check=False)

    def start_sleeping(self, **environment: str) -> subprocess.Popen[str]:
        """The DDP launcher in its own process group; its stub torchrun is still sleeping when this returns.

        Its port is a free one, because a test in another process may check those of all strategies.
        """
        changes = {"STUB_SLEEP": "300", "MASTER_PORT": str(free_port())} | environment
        where = {"env": self.environment_with(changes), "cwd": self.root, "start_new_session": True}
        output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        launcher = subprocess.Popen(["bash", str(self.script("run_megatron_t5_ddp.sh"))], **where, **output)
        wait_for((self.stubs / "started").exists)
        return launcher

    def recorded_arguments(self) -> list[str]:
        return (self.stubs / "arguments").read_text().split("\0")[:-1]

    def recorded_environment(self) -> dict[str, str]:
        pairs = (self.stubs / "environment").read_text().split("\0")[:-1]
        return dict(pair.split("=", 1) for pair in pairs)

    def use_real_torch(self) -> None:
        (self.stubs / "site" / "sitecustomize.py").unlink()

    def was_started(self) -> bool:
        return (self.stubs / "arguments").exists()

    def add_stub(self, name: str, text: str) -> None:
        path = self.stubs / name
        path.write_text(text)
        path.chmod(0o755)

    def set_gpus(self, count: int) -> None:
        """Let nvidia-smi list this many GPUs, and the launchers use them."""
        self.environment["DEVICE"] = "auto" if count else "cpu"  # large is not for CPUs unless asked for
        lines = "".join(f"echo 'GPU {i}: NVIDIA Stub (UUID: GPU-{i})'\n" for i in range(count))
        self.add_stub("nvidia-smi", f"#!/usr/bin/env bash\n{lines}")

    def install(self, distribution: str, version: str) -> None:
        """Pretend that a Python package is installed, by its metadata folder."""
        site = self.stubs / "site"
        for old in site.glob(f"{distribution}-*"):
            old.rmdir()
        (site / f"{distribution}-{version}.dist-info").mkdir(parents=True)

    def record_engine(self, state: str = "series") -> None:
        """Declares the stand-in engine's present files to be the given state of the patches."""
        paths = sorted(self.engine.rglob("*.py"))
        sums = {path.relative_to(self.engine): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
        text = "".join(f"{checksum}  {name}\n" for name, checksum in sums.items())
        (self.root / "patches" / "checksums" / f"{state}.sha256").write_text(text)


def make_project(tmp_path: Path) -> Project:
    """A project under tmp_path, complete enough that every launcher starts the stub torchrun."""
    root = tmp_path / "a path with spaces" / "T5-Parallelism"
    for folder in ("scripts", "ds_configs", "patches", "native", "t5bench", "packages/judge/src"):
        shutil.copytree(REPO_ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    engine = root.parent / "Megatron-DeepSpeed"
    (engine / "megatron").mkdir(parents=True)
    (engine / "pretrain_t5.py").write_text("raise SystemExit('a stand-in')\n")
    (engine / "megatron" / "training.py").write_text("patched = True\n")
    (root / "megatron_data").mkdir()
    result = Project(root, stubs, engine)
    write_indexed_dataset(result.data_prefix, [[5, 6, 7, 1], [8, 9, 1]] * 10)
    write_data_record(result.data_prefix)  # without it they count as copied without their tokenizer
    result.add_stub("torchrun", TORCHRUN_STUB)
    (stubs / "site").mkdir(exist_ok=True)
    (stubs / "site" / "sitecustomize.py").write_text(SITE_CUSTOMIZATION)
    result.set_gpus(0)
    result.install("deepspeed", "0.19.8")
    result.record_engine()
    result.environment = {
        "PATH": f"{stubs}:{os.environ['PATH']}", "HOME": str(tmp_path), "LANG": "C.UTF-8", "PYTHON": sys.executable,
        "PYTHONPATH": str(stubs / "site"), "STUB_DIR": str(stubs), "DEVICE": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",  # this machine's own name may lead to a loopback address
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", ""),
    }  # fmt: skip
    return result


ITERATION = (
    " iteration {:8d}/ {} | elapsed time per iteration (ms): 419.3 | learning rate: 5.000E-05 | lm loss: {} |"
    " grad norm: 1.774590E+00 | samples per second: 38.161 | TFLOPs: 0.00 |\n"
)
MEMORY = " peak memory | rank {} | host vm | device cpu | allocated MiB 0.0 | reserved MiB 0.0 | host rss MiB 562.4\n"


def engine_output(iterations: int, total: int = 3, loss: str = "8.0E+00", ranks: Sequence[int] = (0,)) -> str:
    """What an engine prints of these iterations, and each rank's peak memory."""
    lines = [ITERATION.format(number, total, loss) for number in range(1, iterations + 1)]
    return "".join(lines + [MEMORY.format(rank) for rank in ranks])


def write_plan(path: Path, plan: Plan) -> None:
    """What the planning process hands to the recorder."""
    path.write_text(json.dumps(replace(plan, environment={"A": "B", **plan.environment}).to_json()))


# No two processes of a test session, nor two sessions, take each other's recorders for theirs.
RECORDED_PORT = 20000 + os.getpid() % 10000


def record(
    directory: Path, output: str, *, end: str = "exit 0", node: int = 0, nodes: int = 1, **settings: str
) -> subprocess.CompletedProcess:
    """What `python -m t5bench record` makes of a command that prints this output, with one process on each node, and
    then does `end`, in a shell whose $PPID is the recorder."""
    directory.mkdir(parents=True, exist_ok=True)
    printed = directory.parent / f"{directory.name}.printed"
    printed.write_text(output)
    fixed = {"LOG_INTERVAL": "1", "SAMPLE_INTERVAL": "1", "WATCHDOG_SECONDS": "0", "MASTER_PORT": str(RECORDED_PORT)}
    chosen = {"OUTPUT_DIR": str(directory)} | fixed | settings
    fields = {"node": node, "engine": "native", "master_address": "127.0.0.1", "output_dir": str(directory)}
    plan = made_plan("ddp", chosen, nodes=nodes, world_size=nodes, **fields)
    write_plan(directory / f"node{node}.plan", plan)
    command = [sys.executable, "-m", "t5bench", "record", str(directory), str(node), "--"]
    command += ["sh", "-c", f'cat "$0"; {end}', str(printed)]
    return subprocess.run(command, cwd=REPO_ROOT, capture_output=True, timeout=60, check=False)
