"""Samples of the GPUs and the network counters during a run, from a thread that sleeps in between."""

import contextlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from t5bench.record.machine import visible_gpus
from t5bench.record.status import now

# nvidia-smi's names of the fields, and those in a sample.
_GPU_FIELDS = {
    "index": "index",
    "memory.used": "memory_mib",
    "utilization.gpu": "utilization",
    "power.draw": "power_w",
    "clocks.sm": "sm_mhz",
}
# InfiniBand counts words of four bytes.
_INFINIBAND_WORD = 4


def network_counters(root: Path = Path("/")) -> dict[str, dict[str, int]]:
    """Bytes sent and received since the machine started, by interface, and by port for InfiniBand.

    Members of a bond are left out: the bond counts the same bytes.
    """
    found = {}
    with contextlib.suppress(OSError):
        for line in (root / "proc/net/dev").read_text().splitlines()[2:]:
            name, *counters = line.replace(":", " ", 1).split()
            if not (root / "sys/class/net" / name / "master").exists():
                found[name] = {"sent": int(counters[8]), "received": int(counters[0])}
    for port in (root / "sys/class/infiniband").glob("*/ports/*"):
        with contextlib.suppress(OSError, ValueError):
            sent, received = (int((port / f"counters/port_{name}_data").read_text()) for name in ("xmit", "rcv"))
            name = f"ib:{port.parent.parent.name}/{port.name}"
            found[name] = {"sent": sent * _INFINIBAND_WORD, "received": received * _INFINIBAND_WORD}
    return found


def link_speeds(root: Path = Path("/")) -> dict[str, dict[str, int | None]]:
    """Each interface's speed in Mbit/s as its driver states it; None if it does not."""
    found: dict[str, dict[str, int | None]] = {}
    for name in network_counters(root):
        found[name] = {"speed_mbit": None}
        with contextlib.suppress(OSError, ValueError):
            found[name]["speed_mbit"] = max(0, int((root / "sys/class/net" / name / "speed").read_text())) or None
    return found


def _numbers(line: str) -> list[float | None]:
    """None for "[N/A]", which means that the GPU does not measure it."""
    return [float(word) if re.fullmatch(r"\s*[0-9.]+\s*", word) else None for word in line.split(",")]


class Sampler:
    """Writes a line to ``path`` every ``seconds``; with GPUs, one nvidia-smi runs alongside."""

    def __init__(self, path: Path, seconds: float, *, has_gpus: bool, environment: Mapping[str, str]) -> None:
        self.path, self.seconds, self.ended = path, seconds, threading.Event()
        self.latest: dict[int, dict[str, float | None]] = {}  # the last sample of each GPU
        self.smi: subprocess.Popen[str] | None = None
        if has_gpus:
            # Into a pipe it would hold its output back until 4 KiB are full.
            line_buffered = ["stdbuf", "-oL"] if shutil.which("stdbuf") else []
            command = [*line_buffered, "nvidia-smi", *visible_gpus(environment), f"--query-gpu={','.join(_GPU_FIELDS)}"]
            command += ["--format=csv,noheader,nounits", "-lms", str(max(1, int(seconds * 1000)))]
            with contextlib.suppress(OSError):
                pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
                self.smi = subprocess.Popen(command, text=True, **pipes)
                threading.Thread(target=self._read_gpus, args=(self.smi.stdout,), daemon=True).start()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _read_gpus(self, lines: Iterable[str]) -> None:
        for line in lines:
            index, *values = _numbers(line)
            if index is not None and len(values) == len(_GPU_FIELDS) - 1:
                self.latest[int(index)] = dict(zip(_GPU_FIELDS.values(), (int(index), *values), strict=True))

    def _run(self) -> None:
        is_last = False
        while True:
            gpus, self.latest = self.latest, {}
            sample = {"time": round(now(), 3), "gpus": [gpus[index] for index in sorted(gpus)]}
            # Opened each time: a directory that was removed may have come back.
            with contextlib.suppress(OSError), self.path.open("a") as file:
                file.write(json.dumps(sample | {"network": network_counters()}) + "\n")
            if is_last:
                return
            is_last = self.ended.wait(self.seconds)

    def end(self) -> None:
        """Takes a last sample and stops."""
        self.ended.set()
        self.thread.join(timeout=5)
        if self.smi:
            self.smi.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.smi.wait(timeout=5)
