"""Whether a node is healthy, without any other node: check.py runs this module there.

argv: the device of a run (cuda or cpu), and the time limit in seconds. Prints an Examination as JSON, with ``clock``
(in seconds since 1970). A node without a GPU is measured on its CPU.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from t5bench import REPOSITORY
from t5bench.record.gpus import GpuInventory, visible_gpus
from t5bench.record.tools import ask
from t5bench.text import guard_streams
from t5bench.tools.nodes import gpu_state, host_state
from t5bench.tools.nodes.findings import Fault, Finding, Findings, judged
from t5bench.tools.nodes.floors import Floors, floors_of
from t5bench.tools.nodes.host_state import HostFiles
from t5bench.tools.nodes.kernel_log import kernel_log

SECONDS = 18.0  # for everything, and 30 with starting Python over ssh on a slow file system
TOOL_SECONDS = 8.0  # for nvidia-smi -q with eight GPUs and no daemon that keeps the driver loaded
HISTORY = Path("~/.cache/t5-parallelism/health")
KEPT = 20  # figures of a machine
OWN_SHARE = 1 / 3  # of the median of a machine's own figures: other programs on it cost up to a half
LEAST_CLOCK = 0.6  # of a GPU's highest, under load
POWER_CAP = 0x4
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80  # hardware, software heat, hardware heat, power brake
# Rows: the figure, its unit on GPUs and on a CPU.
SPEEDS = {
    "matrix product": ("product", "TFLOP/s", "GFLOP a CPU second"),
    "memory copy": ("memory", "GB/s", "GB a CPU second"),
    "copy from the host": ("host_copy", "GB/s", ""),
    "all-reduce": ("all_reduce", "GB/s", "GB a CPU second"),
}
SLOW = "Look for other programs, heat, a power limit or a narrow link; otherwise leave the node out"


@dataclass
class Examination:
    """What a node says about itself."""

    findings: Findings = field(default_factory=dict)
    """By row of the table."""
    kind: str = "cpu"
    """The GPU's name in nvidia-smi, or cpu."""
    speeds: dict[str, float] = field(default_factory=dict)
    """The slowest device's figures, by the names in SPEEDS."""


def examine(device: str, host: HostFiles, environ: Mapping[str, str], seconds: float) -> Examination:
    """All rows. What hangs is named and does not delay the others."""
    deadline = time.monotonic() + seconds
    throttled_before = host_state.throttle_counts(host)
    inventory = visible_gpus(environ)
    examination = Examination(kind=inventory.names[0] if inventory.names and device == "cuda" else "cpu")
    pool = ThreadPoolExecutor(12)
    jobs: dict[str, Future[Findings]] = {}
    for check in host_state.CHECKS:
        jobs[check.__name__.replace("_", " ")] = pool.submit(check, host, len(inventory.names))
    jobs["kernel log"] = pool.submit(lambda: {"kernel log": kernel_log(ask("dmesg", environ=environ), host.uptime)})
    jobs["vendor tool"] = pool.submit(_gpus, inventory, environ)
    jobs["speed"] = pool.submit(_speeds, examination, environ, deadline - 1)
    findings = examination.findings
    for name, job in jobs.items():
        try:
            findings.update(job.result(max(0.1, deadline - time.monotonic())))
        except Late:
            findings[name] = judged("no answer", [("no answer in time", "Something hangs: see the kernel log")])
        except Exception as error:  # a fact that cannot be read is a line in the table, not the end of the check
            findings[name] = Finding("unknown", f"{type(error).__name__}: {error}", "Investigate it on the node")
    slowed = host_state.throttle_counts(host) - throttled_before
    if slowed > 0 and "processors" in findings:
        problem = f"heat slowed the processors down {slowed} times during this check"
        findings["processors"] = judged(findings["processors"].text, [(problem, gpu_state.COOL)])
    return examination


def _gpus(inventory: GpuInventory, environ: Mapping[str, str]) -> Findings:
    return gpu_state.gpu_cells(ask("nvidia-smi", "-q", "-x", seconds=TOOL_SECONDS, environ=environ), inventory)


# ---- speed ---------------------------------------------------------------------------------------------------------


def measured_speeds(device: str, environ: Mapping[str, str], deadline: float) -> dict[str, Any]:
    """The figures of speed.py, in a process of its own."""
    seconds = max(1.0, deadline - time.monotonic())
    command = [sys.executable, "-m", "t5bench.tools.nodes.speed", device, str(seconds)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=dict(environ), text=True, **pipes)
    try:
        output = process.communicate(timeout=seconds)[0]
        is_late = False
    except subprocess.TimeoutExpired as late:
        process.kill()
        printed = late.stdout or b""
        output = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        is_late = True
    lines = [line for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
    figures: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return figures | ({"late": True} if is_late else {})


def _speeds(examination: Examination, environ: Mapping[str, str], deadline: float) -> Findings:
    kind = examination.kind
    figures = measured_speeds("cpu" if kind == "cpu" else "cuda", environ, deadline)
    history = History.of_this_machine(kind)
    for name, *_ in SPEEDS.values():
        values = values_of(figures, name)
        if values:
            examination.speeds[name] = min(values)
    findings = judge_speeds(figures, kind, floors_of(kind), history.figures)
    if not any(finding.problem for finding in findings.values()):
        history.add(figures)
    return findings


def values_of(figures: Mapping[str, Any], name: str) -> list[float]:
    """A figure of every device, or the one of all together; empty if it was not measured."""
    value = figures.get(name)
    if isinstance(value, list):
        return value
    return [value] if isinstance(value, int | float) else []


def judge_speeds(
    figures: Mapping[str, Any], kind: str, floors: Floors | None, history: Sequence[Mapping[str, Any]]
) -> Findings:
    """Rows from measured figures. A kind of GPU without floors, and a CPU, is compared with this machine's own earlier
    figures; without any, the figures are only shown."""
    findings: Findings = {}
    on_gpus = kind != "cpu"
    error = figures.get("error", "")
    if on_gpus and not error and figures.get("late"):
        error = f"no more than {', '.join(figures) or 'nothing'} was measured in time"
    for row, (name, gpu_unit, cpu_unit) in SPEEDS.items():
        values = values_of(figures, name)
        if not values:
            continue
        unit = gpu_unit if on_gpus else cpu_unit
        least = None
        origin = ""
        if floors:
            least = getattr(floors, name)
            origin = f"of a healthy {kind}"
        elif earlier := own_floor(name, history):
            least = earlier
            origin = "a third of what this machine reached in earlier checks"
        faults: list[Fault] = []
        for index, measured in enumerate(values):
            place = f"GPU {index}: " if len(values) > 1 else ""
            if least and measured < least:
                faults.append((f"{place}{measured:.3g} {unit}; at least {least:.3g} are expected {origin}", SLOW))
        findings[row] = judged(f"{min(values):.3g} {unit}", faults)
    if error and on_gpus:
        remedy = "Check that torch is built for CUDA, the driver's version, and what uses the GPU's memory"
        findings["matrix product"] = judged("failed", [(error, remedy)])
    if on_gpus and figures.get("clocks"):
        findings["clocks under load"] = judge_clocks(figures["clocks"])
    return findings


def judge_clocks(table: str) -> Finding:
    """From nvidia-smi's clock, highest clock and throttle reasons of each GPU, while all compute."""
    faults: list[Fault] = []
    lowest = ""
    for index, line in enumerate(table.splitlines()):
        words = [word.strip() for word in line.split(",")]
        if len(words) != 3 or not words[0].isdigit() or not words[1].isdigit():
            continue
        clock = int(words[0])
        highest = int(words[1])
        reasons = int(words[2], 16) if words[2].startswith("0x") else 0
        lowest = lowest or f"{clock} of {highest} MHz"
        if reasons & THROTTLED:
            faults.append((f"GPU {index} is slowed down under load (reasons {reasons:#x})", gpu_state.COOL))
        elif clock < LEAST_CLOCK * highest and not reasons & POWER_CAP:
            found = f"GPU {index} computes at {clock} of {highest} MHz"
            faults.append((found, "Remove a fixed clock: nvidia-smi -rgc; nvidia-smi -rac"))
    return judged(lowest or "not reported", faults)


def own_floor(name: str, history: Sequence[Mapping[str, Any]]) -> float | None:
    """The least that is expected of this machine, from what it reached in earlier checks."""
    earlier = [min(values) for figures in history if (values := values_of(figures, name))]
    return statistics.median(earlier) * OWN_SHARE if earlier else None


class History:
    """What a machine reached in earlier checks, in a file in the home directory, which nodes may share."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        figures = []
        if path:
            with contextlib.suppress(OSError, ValueError):
                figures = json.loads(path.read_text())
        self.figures: list[dict[str, Any]] = figures if isinstance(figures, list) else []

    @classmethod
    def of_this_machine(cls, kind: str) -> "History":
        try:
            folder = HISTORY.expanduser()
        except RuntimeError:  # no home directory
            return cls(None)
        name = f"{os.uname().nodename}-{kind}".replace("/", "-").replace(" ", "-")
        return cls(folder / f"{name}.json")

    def add(self, figures: Mapping[str, Any]) -> None:
        if not figures or not self.path:
            return
        with contextlib.suppress(OSError):  # what could not be kept is not compared with
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps([*self.figures, figures][-KEPT:]))
            new.replace(self.path)


def main() -> None:
    device = sys.argv[1]
    seconds = float(sys.argv[2])
    examination = examine(device, HostFiles(), os.environ, seconds)
    print(json.dumps(asdict(examination) | {"clock": time.time()}), flush=True)
    os._exit(0)  # even if a thread hangs


if __name__ == "__main__":
    guard_streams()
    main()
