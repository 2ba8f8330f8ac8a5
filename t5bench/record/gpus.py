"""Which GPUs CUDA shows to a process, who says so, and what the tools that failed said.

nvidia-smi is asked first. Where it is missing, fails or hangs, NVIDIA's management library (NVML) and then the files of
the kernel's driver answer, so that a broken tool does not turn a run on GPUs into one on the CPU.
"""

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from t5bench.record.tools import LONGEST_SENTENCE, ToolAnswer, ask

SMI_SECONDS = 5.0  # without a daemon that keeps the driver loaded, nvidia-smi takes seconds
NVML_SECONDS = 3.0
DRIVER = Path("/proc/driver/nvidia")
DEVICE_FILES = Path("/dev")
# Where neither of these exists, there is no driver, and nothing but nvidia-smi is asked.
DRIVER_TRACES = ("nvidiactl", "dxg")
NO_DEVICES = "No devices"  # nvidia-smi's own words for a driver that works and has no GPU


@dataclass(frozen=True)
class MigSlice:
    """A part of a GPU that is divided by MIG."""

    name: str
    """As NVML names it, "NVIDIA A100-SXM4-40GB MIG 3g.20gb"."""
    uuid: str


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine."""

    index: int
    name: str
    uuid: str = ""
    memory_mib: float | None = None
    driver: str = ""
    slices: tuple[MigSlice, ...] = ()
    """Its MIG slices. CUDA shows those instead of the GPU."""


@dataclass(frozen=True)
class GpuInventory:
    """GPUs, and how they are known."""

    names: tuple[str, ...] = ()
    """One for each device that CUDA shows; a MIG slice has the GPU's name and its own."""
    source: str = ""
    """Who listed them: nvidia-smi, NVML, /proc/driver/nvidia or CUDA_VISIBLE_DEVICES; empty if nothing could."""
    fault: str = ""
    """What the tool said that failed; empty if all worked. It may stand beside GPUs that another source listed."""
    note: str = ""
    """What is unusual about these devices, such as MIG slices."""
    gpus: tuple[Gpu, ...] = field(default=())
    """The GPUs behind the names."""

    @property
    def why(self) -> str:
        """One sentence without a full stop: what there is, who says so, and what failed."""
        kinds = [f"{self.names.count(name)} x {name}" for name in dict.fromkeys(self.names)]
        listed = f"{' + '.join(kinds)}, listed by {self.source}" if self.names else "no GPU is visible"
        return "; ".join(filter(None, [listed, self.note, self.fault]))


@dataclass(frozen=True)
class _Listing:
    """All GPUs of this machine, before CUDA_VISIBLE_DEVICES."""

    gpus: tuple[Gpu, ...] = ()
    source: str = ""
    fault: str = ""
    is_late: bool = False


def visible_gpus(environ: Mapping[str, str]) -> GpuInventory:
    """The GPUs that CUDA shows to a process with this environment. The machine is asked once in this process."""
    listing = _machine(environ.get("PATH", os.defpath))
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and not listing.gpus and listing.is_late:
        # Nothing could be listed, so what the scheduler or the user gave is all that is known.
        count = 0 if wanted.startswith("-1") or not wanted else wanted.count(",") + 1
        return GpuInventory(("unknown GPU",) * count, "CUDA_VISIBLE_DEVICES", listing.fault)
    chosen, parts = _chosen(listing.gpus, wanted)
    if not parts:
        hidden = len(listing.gpus) - len(chosen)
        note = f"CUDA_VISIBLE_DEVICES={wanted} hides {hidden} of {len(listing.gpus)} GPUs" if hidden else ""
        return GpuInventory(tuple(gpu.name for gpu in chosen), listing.source, listing.fault, note, chosen)
    total = sum(len(gpu.slices) for gpu in listing.gpus)
    note = f"MIG divides the GPU, and CUDA shows a process one of {total} slices" if total > 1 else "a MIG slice"
    return GpuInventory((parts[0].name,), listing.source, listing.fault, note, chosen)


def smi_selection(environ: Mapping[str, str]) -> list[str]:
    """nvidia-smi's option for the GPUs that CUDA shows to a process with this environment; empty when it shows all.

    A MIG slice is selected by the GPU that it is a part of, because only that one has counters.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    if "MIG-" not in visible:
        return ["-i", visible] if visible else []
    gpus = visible_gpus(environ).gpus
    return ["-i", ",".join(gpu.uuid or str(gpu.index) for gpu in gpus)] if gpus else []


def _chosen(gpus: tuple[Gpu, ...], wanted: str | None) -> tuple[tuple[Gpu, ...], list[MigSlice]]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects, and the MIG slices among them, which come before whole GPUs.

    As CUDA reads it: indices, or the beginnings of UUIDs; the first that names nothing hides all after it.
    """
    if wanted is None:
        return gpus, [part for gpu in gpus for part in gpu.slices]
    chosen: list[Gpu] = []
    parts: list[MigSlice] = []
    for word in (word.strip() for word in wanted.split(",")):
        if word.startswith("MIG-"):
            named = [(gpu, part) for gpu in gpus for part in gpu.slices if part.uuid.startswith(word)]
            if not named:
                break
            gpu, part = named[0]
            parts.append(part)
        else:
            by_word = [gpu for gpu in gpus if _is_named(gpu, word)]
            if not by_word:
                break
            gpu = by_word[0]
            parts.extend(gpu.slices)
        if gpu not in chosen:
            chosen.append(gpu)
    return tuple(chosen), parts


def _is_named(gpu: Gpu, word: str) -> bool:
    if word.isdecimal():
        return gpu.index == int(word)
    return word.startswith("GPU-") and gpu.uuid.startswith(word)


# ---- the sources ---------------------------------------------------------------------------------------------------


@cache
def _machine(path: str) -> _Listing:
    """Asks the sources in turn. ``path``: the directories in which nvidia-smi is searched."""
    answer = ask("nvidia-smi", "-L", seconds=SMI_SECONDS, environ={**os.environ, "PATH": path})
    gpus, rest = _read_smi(answer.output)
    if gpus or not answer.fault or rest.startswith(NO_DEVICES):
        return _Listing(gpus, "nvidia-smi", rest[:LONGEST_SENTENCE])
    if not DRIVER.exists() and not any((DEVICE_FILES / name).exists() for name in DRIVER_TRACES):
        return _Listing(fault="" if answer.is_missing else _said("nvidia-smi", answer), is_late=answer.is_late)
    fault = _said("nvidia-smi", answer)
    if not answer.is_late:
        nvml = _from_nvml()
        if nvml.gpus:
            return _Listing(nvml.gpus, nvml.source, fault)
        fault = fault if not nvml.fault or not answer.is_missing else f"{fault}; {nvml.fault}"
    listed = _from_driver()
    return _Listing(listed, str(DRIVER) if listed else "", fault, answer.is_late)


def _said(tool: str, answer: ToolAnswer) -> str:
    """The tool's sentence, which may not name the tool."""
    return answer.fault if tool in answer.fault.lower() else f"{tool}: {answer.fault}"


def _read_smi(text: str) -> tuple[tuple[Gpu, ...], str]:
    """What `nvidia-smi -L` lists, and the first line that is no GPU."""
    gpus: list[Gpu] = []
    rest = ""
    for line in text.splitlines():
        match = re.match(r"GPU (\d+): (.*?)(?: \(UUID: ([^)]*)\))?\s*$", line)
        if match:
            gpus.append(Gpu(int(match[1]), match[2], match[3] or ""))
        elif gpus and (match := re.match(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: ([^)]*)\)", line)):
            gpu = gpus[-1]
            part = MigSlice(f"{gpu.name} MIG {match[1]}", match[2])
            gpus[-1] = Gpu(gpu.index, gpu.name, gpu.uuid, slices=(*gpu.slices, part))
        elif line.strip():
            rest = rest or line.strip()
    return tuple(gpus), rest


def _from_nvml() -> _Listing:
    program = Path(__file__).with_name("nvml.py")
    answer = ask(sys.executable, "-I", str(program), seconds=NVML_SECONDS)
    if answer.fault:
        return _Listing(fault=answer.fault)
    gpus = []
    for entry in json.loads(answer.output):
        slices = tuple(MigSlice(**part) for part in entry.pop("slices"))
        gpus.append(Gpu(**entry, slices=slices))
    return _Listing(tuple(gpus), "NVML")


def _from_driver() -> tuple[Gpu, ...]:
    """The GPUs that the kernel's driver lists and this process has a device file for: a container may see all of the
    machine's in /proc and only its own in /dev."""
    version = ""
    if (DRIVER / "version").exists():
        match = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", (DRIVER / "version").read_text(errors="replace"))
        version = match[1] if match else ""
    gpus = []
    for path in sorted((DRIVER / "gpus").glob("*/information")):
        try:
            pairs = re.findall(r"^([^:\n]+):[ \t]*(.*)$", path.read_text(errors="replace"), re.MULTILINE)
        except OSError:
            continue
        facts = {name.strip(): value.strip() for name, value in pairs}
        minor = facts.get("Device Minor", "")
        if (DEVICE_FILES / f"nvidia{minor}").exists():
            uuid = facts.get("GPU UUID", "")
            gpus.append(Gpu(len(gpus), facts.get("Model", "NVIDIA GPU"), uuid, driver=version))
    return tuple(gpus)
