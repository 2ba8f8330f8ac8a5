"""Samples of the GPUs and the network counters during a run, from a thread that sleeps in between."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import IO

import psutil

from t5bench.record.gpus import smi_selection
from t5bench.record.status import now
from t5bench.run.self_healing import SelfHealingFile

# nvidia-smi's names of the fields, and those in a sample.
_GPU_FIELDS = {
    "index": "index",
    "memory.used": "memory_mib",
    "utilization.gpu": "utilization",
    "power.draw": "power_w",
    "clocks.sm": "sm_mhz",
}
_INFINIBAND = {"sent": "xmit", "received": "rcv"}  # counters of words of four bytes
_DEVICES = Path("/sys/class")


def network_counters() -> dict[str, dict[str, int]]:
    """Bytes sent and received since the machine started, by interface, and by port for InfiniBand.

    Members of a bond are left out: the bond counts the same bytes.
    """
    counters = {}
    for name, count in psutil.net_io_counters(pernic=True, nowrap=False).items():
        if not (_DEVICES / "net" / name / "master").exists():
            counters[name] = {"sent": count.bytes_sent, "received": count.bytes_recv}
    for port in (_DEVICES / "infiniband").glob("*/ports/*"):
        with contextlib.suppress(OSError, ValueError):
            words = {to: int((port / f"counters/port_{name}_data").read_text()) for to, name in _INFINIBAND.items()}
            counters[f"ib:{port.parent.parent.name}/{port.name}"] = {to: 4 * count for to, count in words.items()}
    return counters


def link_speeds() -> dict[str, dict[str, int | None]]:
    """Each interface's speed in Mbit/s as its driver states it; None if it does not."""
    speeds = {name: link.speed for name, link in psutil.net_if_stats().items()}
    return {name: {"speed_mbit": speeds.get(name) or None} for name in network_counters()}


class Sampler:
    """Writes a line to ``path`` every ``seconds``; with GPUs, one nvidia-smi runs alongside."""

    def __init__(self, path: Path, seconds: float, *, has_gpus: bool) -> None:
        self.path = path
        self.seconds = seconds
        self.ended = threading.Event()
        self.file: SelfHealingFile | None = None
        self.latest: dict[int, dict[str, float | None]] = {}  # the last sample of each GPU
        self.smi: subprocess.Popen[str] | None = None
        if has_gpus:
            # Into a pipe it would hold its output back until 4 KiB are full.
            line_buffered = ["stdbuf", "-oL"] if shutil.which("stdbuf") else []
            command = [*line_buffered, "nvidia-smi", *smi_selection(os.environ), f"--query-gpu={','.join(_GPU_FIELDS)}"]
            command += ["--format=csv,noheader,nounits", "-lms", str(max(1, int(seconds * 1000)))]
            with contextlib.suppress(OSError):
                pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
                self.smi = subprocess.Popen(command, text=True, **pipes)
                threading.Thread(target=self._read_gpus, args=(self.smi.stdout,), daemon=True).start()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _read_gpus(self, lines: IO[str]) -> None:
        for line in lines:
            # "[N/A]" means that the GPU does not measure it.
            values = [float(word) if re.fullmatch(r"\s*[0-9.]+\s*", word) else None for word in line.split(",")]
            if values[0] is not None and len(values) == len(_GPU_FIELDS):
                sample = dict(zip(_GPU_FIELDS.values(), values, strict=True))
                self.latest[int(values[0])] = sample | {"index": int(values[0])}

    def _run(self) -> None:
        is_last = False
        while True:
            gpus, self.latest = self.latest, {}
            sample = {"time": round(now(), 3), "gpus": [gpus[index] for index in sorted(gpus)]}
            line = json.dumps(sample | {"network": network_counters()}) + "\n"
            with contextlib.suppress(OSError):
                self.file = self.file or SelfHealingFile(self.path)
                self.file.write(line.encode())
                self.file.restore()
            if is_last:
                return
            is_last = self.ended.wait(self.seconds)

    def end(self) -> None:
        """Takes a last sample and stops."""
        self.ended.set()
        self.thread.join(timeout=5)
        with contextlib.suppress(OSError):
            if self.file:
                self.file.close()
        if self.smi:
            self.smi.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.smi.wait(timeout=5)
