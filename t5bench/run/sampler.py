"""Samples of the GPUs and of the network counters while a run goes on, from a thread that sleeps in between."""

import contextlib
import json
import shutil
import subprocess
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from t5bench.record.clock import now
from t5bench.record.machine import visible_gpus

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
            name, _, counters = line.partition(":")
            name, values = name.strip(), counters.split()
            if len(values) >= 9 and not (root / "sys/class/net" / name / "master").exists():
                found[name] = {"sent": int(values[8]), "received": int(values[0])}
    for port in (root / "sys/class/infiniband").glob("*/ports/*"):
        with contextlib.suppress(OSError, ValueError):
            sent = int((port / "counters/port_xmit_data").read_text())
            received = int((port / "counters/port_rcv_data").read_text())
            found[f"ib:{port.parent.parent.name}/{port.name}"] = {
                "sent": sent * _INFINIBAND_WORD,
                "received": received * _INFINIBAND_WORD,
            }
    return found


def link_speeds(root: Path = Path("/")) -> dict[str, dict[str, int | None]]:
    """Each interface's speed in Mbit/s as its driver states it; None where it states none."""
    found: dict[str, dict[str, int | None]] = {}
    for name in network_counters(root):
        speed = None
        if not name.startswith("ib:"):
            with contextlib.suppress(OSError, ValueError):
                speed = int((root / "sys/class/net" / name / "speed").read_text())
        found[name] = {"speed_mbit": speed if speed and speed > 0 else None}
    return found


def _gpu_sample(line: str) -> dict[str, float | None] | None:
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(_GPU_FIELDS) or not values[0].isdigit():
        return None
    sample: dict[str, float | None] = {}
    for key, value in zip(_GPU_FIELDS.values(), values, strict=True):
        try:
            sample[key] = float(value)
        except ValueError:
            sample[key] = None  # "[N/A]", for a GPU that does not measure this
    return sample | {"index": int(values[0])}


class Sampler:
    """Writes a line to ``path`` every ``seconds``; one nvidia-smi runs along where there are GPUs."""

    def __init__(self, path: Path, seconds: float, *, has_gpus: bool, environment: Mapping[str, str]) -> None:
        self.path, self.seconds = path, seconds
        self.ended = threading.Event()
        self.latest: dict[Any, dict[str, Any]] = {}  # the last sample of each GPU
        self.smi: subprocess.Popen[str] | None = None
        if has_gpus:
            # Into a pipe it would keep back what it prints until 4 KiB are full.
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
            if sample := _gpu_sample(line):
                self.latest[sample["index"]] = sample

    def _run(self) -> None:
        last = False
        while True:
            gpus, self.latest = self.latest, {}
            sample = {"time": round(now(), 3), "gpus": [gpus[index] for index in sorted(gpus)]}
            # Opened each time: a directory that was removed may have come back.
            with contextlib.suppress(OSError), self.path.open("a") as file:
                file.write(json.dumps(sample | {"network": network_counters()}) + "\n")
            if last:
                return
            last = self.ended.wait(self.seconds)

    def end(self) -> None:
        """Take a last sample and stop."""
        self.ended.set()
        self.thread.join(timeout=5)
        if self.smi:
            self.smi.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.smi.wait(timeout=5)
