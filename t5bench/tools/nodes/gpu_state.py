"""What nvidia-smi says about the state of a node's GPUs: who uses them, what slows them, which errors they counted."""

import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

from t5bench.record.gpus import GpuInventory
from t5bench.record.tools import ToolAnswer
from t5bench.tools.nodes.findings import Fault, Finding, Findings, judged

SLOW_SECONDS = 3.0
MOST_USED = 2 * 1024  # MiB before anything of ours runs
LEAST_POWER = 0.9  # of the default limit
HOTTEST = 87  # degrees Celsius of a GPU without work
# Programs that watch GPUs and compute nothing.
WATCHERS = ("nvidia-persistenced", "nv-hostengine", "dcgm-exporter", "nvidia-smi", "nvtop")
# Reasons for a low clock that are faults: others are a GPU without work, and its usual power limit.
THROTTLING = {
    "hw_slowdown": "the hardware slows it down (heat, power supply or a brake)",
    "hw_thermal_slowdown": "it is too hot, and the hardware slows it down",
    "hw_power_brake_slowdown": "the power supply slows it down",
    "sw_thermal_slowdown": "it is too hot, and the driver slows it down",
}
COOL = "Check fans, inlet temperature and power supplies"
RESET = "Reset the GPU (nvidia-smi -r) or reboot the node; if it comes back, replace the GPU"


def vendor_tool(answer: ToolAnswer, inventory: GpuInventory) -> Finding:
    """Whether nvidia-smi answers, and in time: a driver about to fail is slow first."""
    if answer.is_missing and not inventory.names:
        return Finding("none")
    if answer.fault or inventory.fault:
        said = answer.fault or inventory.fault
        return judged("failed", [(said, "Check the driver: dmesg | grep NVRM; a reboot loads the installed version")])
    if answer.seconds > SLOW_SECONDS:
        remedy = "Keep the driver loaded (nvidia-smi -pm 1, or nvidia-persistenced); else reboot the node"
        return judged(f"{answer.seconds:.1f} s", [(f"nvidia-smi took {answer.seconds:.1f} s", remedy)])
    return Finding(f"{answer.seconds:.1f} s")


def _number(text: str | None) -> float | None:
    match = re.match(r"\s*([\d.]+)", text or "")
    return float(match[1]) if match else None


def _first(gpu: ElementTree.Element, *paths: str) -> str | None:
    """The text of the first element that exists: names differ between versions of the driver."""
    return next((text for path in paths if (text := gpu.findtext(path)) is not None), None)


def _state_faults(gpu: ElementTree.Element) -> Iterator[Fault]:
    for group in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for reason in gpu.iterfind(f"{group}/*"):
            name = reason.tag.partition("_reason_")[2]
            if reason.text == "Active" and name in THROTTLING:
                yield THROTTLING[name], COOL
    errors = 0.0
    for count in gpu.iterfind("ecc_errors/volatile//*"):
        if "uncorrectable" in count.tag:
            errors += _number(count.text) or 0
    errors += _number(_first(gpu, "ecc_errors/volatile/double_bit/total")) or 0  # as drivers before 450 name them
    if errors:
        yield f"{errors:.0f} ECC errors that could not be corrected", RESET
    if _first(gpu, "remapped_rows/remapped_row_failure") == "Yes":
        yield "it could not replace a damaged row of its memory", "Replace the GPU"
    pending = _first(gpu, "remapped_rows/remapped_row_pending", "retired_pages/pending_retirement")
    if pending == "Yes":
        yield "it waits for a reset to replace damaged memory", RESET
    most = _number(_first(gpu, "pci/pci_gpu_link_info/link_widths/max_link_width"))
    width = _number(_first(gpu, "pci/pci_gpu_link_info/link_widths/current_link_width"))
    if most and width and width < most:
        yield f"its PCIe link has {width:.0f} of {most:.0f} lanes", "Reseat the card or the riser"
    limit = _number(_first(gpu, "gpu_power_readings/current_power_limit", "power_readings/power_limit"))
    usual = _number(_first(gpu, "gpu_power_readings/default_power_limit", "power_readings/default_power_limit"))
    if limit and usual and limit < LEAST_POWER * usual:
        yield f"its power limit is {limit:.0f} instead of {usual:.0f} W", f"nvidia-smi -pl {usual:.0f}"
    temperature = _number(_first(gpu, "temperature/gpu_temp"))
    if temperature and temperature >= HOTTEST:
        yield f"it has {temperature:.0f} °C", COOL
    if _first(gpu, "compute_mode") == "Prohibited":
        yield "its compute mode forbids programs", "nvidia-smi -c 0"
    fabric = _first(gpu, "fabric/state")
    if fabric not in (None, "N/A", "Completed"):
        yield f"NVLink's fabric is '{fabric}'", "systemctl restart nvidia-fabricmanager"


def _users(gpu: ElementTree.Element) -> Iterator[str]:
    """Programs that compute on a GPU."""
    for process in gpu.iterfind("processes/process_info"):
        name = process.findtext("process_name") or "a program"
        is_watcher = name.rpartition("/")[2].split(" ")[0] in WATCHERS
        if "C" in (process.findtext("type") or "") and not is_watcher and process.findtext("pid") != str(os.getpid()):
            yield f"{name} (process {process.findtext('pid')}, {process.findtext('used_memory')})"


def gpu_cells(answer: ToolAnswer, inventory: GpuInventory) -> Findings:
    """Rows from `nvidia-smi -q -x` of the GPUs that CUDA shows to a run."""
    findings: Findings = {"vendor tool": vendor_tool(answer, inventory)}
    if answer.fault or not inventory.names:
        return findings
    try:
        gpus = ElementTree.fromstring(answer.output).findall("gpu")
    except ElementTree.ParseError as error:
        problem = f"nvidia-smi -q -x printed no XML: {error}"
        return {"vendor tool": judged("failed", [(problem, "Reinstall the driver's tools")])}
    wanted = {gpu.uuid for gpu in inventory.gpus}
    states: list[Fault] = []
    uses: list[Fault] = []
    for index, gpu in enumerate(gpus):
        uuid = gpu.findtext("uuid") or ""
        if uuid not in wanted:
            continue
        states += [(f"GPU {index}: {problem}", remedy) for problem, remedy in _state_faults(gpu)]
        users = list(_users(gpu))
        uses += [(f"GPU {index} is used by {user}", "Stop it, or wait until it ends") for user in users]
        used = _number(gpu.findtext("fb_memory_usage/used")) or 0
        if used >= MOST_USED and not users:
            found = f"GPU {index} has {used / 1024:.1f} GiB in use by no visible program"
            uses.append((found, "Find what holds it: fuser -v /dev/nvidia*; else reset the GPU"))
    missing = wanted - {gpu.findtext("uuid") for gpu in gpus}
    states += [(f"nvidia-smi -q does not report {uuid}", RESET) for uuid in sorted(missing) if uuid]
    findings["GPU state"] = judged("as it should be" if not states else "faults", states)
    findings["GPU use"] = judged("free" if not uses else "in use", uses)
    return findings
