"""What operators check of a node's operating system before a run: limits, memory, space, processors, network cards."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from t5bench.control_groups import free_bytes, groups, number, processor_quota
from t5bench.tools.nodes.findings import Fault, Finding, Findings, judged

MIB = 2**20
GIB = 2**30
LEAST_LOCKED = 32 * GIB  # what RDMA registers under load
LEAST_FILES = 4096  # sockets, libraries and files of workers
LEAST_PROCESSES = 4096
LEAST_FREE_PROCESSES = 512
LEAST_SHARED = 8 * GIB  # NCCL's buffers and the batches of data loaders
LEAST_FREE_SHARED = 1 * GIB
LEAST_TEMPORARY = 1 * GIB
LEAST_GROUP_MEMORY = 2 * GIB
LEAST_CLOCK = 0.7  # of the highest that the processor has
MOST_BAD_PACKETS = 1e-3
UNLIMITED = 2**63 - 1


@dataclass(frozen=True)
class HostFiles:
    """Where the files of a host are; tests make a directory that looks like a host with a fault."""

    root: Path = Path("/")

    def text(self, path: str) -> str:
        """The content of a file; empty if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        text = self.text(path)
        return int(text) if re.fullmatch(r"-?\d+", text) else None

    def glob(self, pattern: str) -> list[Path]:
        return sorted(self.root.glob(pattern))

    def space(self, path: str) -> tuple[int, int] | None:
        """Bytes in all and free bytes of a file system; None if it does not exist."""
        try:
            status = os.statvfs(self.root / path)
        except OSError:
            return None
        return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize

    def affinity(self) -> int:
        """Processors that this process may use."""
        return len(os.sched_getaffinity(0))

    @property
    def memory(self) -> int:
        match = re.search(r"^MemTotal: +(\d+) kB", self.text("proc/meminfo"), re.MULTILINE)
        return int(match[1]) * 1024 if match else 0

    @property
    def uptime(self) -> float:
        words = self.text("proc/uptime").split()
        return float(words[0]) if words else 0.0


def _limits_of(host: HostFiles) -> dict[str, tuple[int, int]]:
    """The soft and the hard limit of this process, by name."""
    limits = {}
    for line in host.text("proc/self/limits").splitlines():
        match = re.match(r"Max (.*?)\s{2,}(\S+)\s+(\S+)", line)
        if match:
            soft, hard = (UNLIMITED if word == "unlimited" else int(word) for word in (match[2], match[3]) if word)
            limits[match[1]] = soft, hard
    return limits


def limits(host: HostFiles, _: int) -> Findings:
    """Limits of a process that stop a run after it has started."""
    known = _limits_of(host)
    faults: list[Fault] = []
    how = "Raise it in /etc/security/limits.conf, for SLURM in slurmd's unit file too"
    locked = known.get("locked memory", (UNLIMITED, UNLIMITED))[0]
    if host.glob("sys/class/infiniband/*") and locked < LEAST_LOCKED:
        found = f"memlock is {locked / MIB:,.0f} MiB, but RDMA needs at least {LEAST_LOCKED // GIB} GiB"
        faults.append((found, f"ulimit -l unlimited. {how}"))
    files = known.get("open files", (UNLIMITED, UNLIMITED))[1]
    if files < LEAST_FILES:
        faults.append((f"nofile allows {files} open files, fewer than {LEAST_FILES}", f"ulimit -n 65536. {how}"))
    processes = known.get("processes", (UNLIMITED, UNLIMITED))[1]
    if processes < LEAST_PROCESSES:
        found = f"nproc allows {processes} processes and threads, fewer than {LEAST_PROCESSES}"
        faults.append((found, f"ulimit -u unlimited. {how}"))
    faults.extend(_group_faults(host))
    text = "memlock unlimited" if locked >= LEAST_LOCKED else f"memlock {locked / MIB:,.0f} MiB"
    return {"limits": judged(text, faults)}


def _group_faults(host: HostFiles) -> Iterator[Fault]:
    """Limits of the control group, which a container or SLURM sets."""
    for group in groups("pids", host.root):
        most = number(group / "pids.max")
        now = number(group / "pids.current") or 0
        if most is not None and most - now < LEAST_FREE_PROCESSES:
            found = f"the control group allows {most} processes and threads and has {now} (pids.max)"
            yield found, "Raise pids.max (docker: --pids-limit, systemd: TasksMax)"
    for left in free_bytes(host.root):
        if left < LEAST_GROUP_MEMORY:
            found = f"the control group has {max(0, left) / GIB:.1f} GiB of memory left"
            yield found, "Ask for more memory (SLURM: --mem=0, docker: --memory)"


def shared_memory(host: HostFiles, _: int) -> Findings:
    """/dev/shm, against what a machine of this size has by default: half of its memory."""
    space = host.space("dev/shm")
    if space is None:
        found = "there is no /dev/shm", "Mount it: mount -t tmpfs tmpfs /dev/shm"
        return {"shared memory": judged("none", [found])}
    total, free = space
    least = min(LEAST_SHARED, host.memory // 4)
    faults: list[Fault] = []
    if total < least:
        found = f"/dev/shm has {total / GIB:.2g} GiB, less than {least / GIB:.2g} GiB"
        faults.append((found, "mount -o remount,size=16G /dev/shm   (docker: --shm-size=16g or --ipc=host)"))
    elif free < min(LEAST_FREE_SHARED, least // 2):
        found = f"only {free / MIB:,.0f} MiB of /dev/shm are free"
        faults.append((found, "Remove what an earlier run left there: ls -l /dev/shm"))
    return {"shared memory": judged(f"{total / GIB:.0f} GiB", faults)}


def temporary_files(host: HostFiles, _: int) -> Findings:
    """TMPDIR, where torch, its compilers and Python's processes put their files."""
    directory = os.environ.get("TMPDIR", "/tmp")
    space = host.space(directory.lstrip("/"))
    if space is None:
        return {"temporary files": judged("none", [(f"there is no directory {directory}", "Create it, or set TMPDIR")])}
    faults: list[Fault] = []
    if space[1] < LEAST_TEMPORARY:
        faults.append((f"only {space[1] / MIB:,.0f} MiB are free in {directory}", "Remove old files, or set TMPDIR"))
    elif not os.access(host.root / directory.lstrip("/"), os.W_OK):
        faults.append((f"{directory} is not writable", "Correct its permissions, or set TMPDIR"))
    return {"temporary files": judged(f"{space[1] / GIB:.0f} GiB free", faults)}


def processors(host: HostFiles, gpus: int) -> Findings:
    """How many this process may use, and whether they may run at full speed."""
    usable = float(host.affinity())
    faults: list[Fault] = []
    for group in groups("cpu", host.root):
        usable = min(usable, processor_quota(group) or usable)
    if usable < max(1, gpus):
        found = (
            f"a job may use {usable:g} processors for {gpus} GPUs" if gpus else f"a job may use {usable:g} processors"
        )
        faults.append((found, "Ask for more (SLURM: --cpus-per-task or --exclusive, docker: --cpus)"))
    slow = []
    for folder in host.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq"):
        highest = host.number(str((folder / "cpuinfo_max_freq").relative_to(host.root)))
        allowed = host.number(str((folder / "scaling_max_freq").relative_to(host.root)))
        if highest and allowed and allowed < LEAST_CLOCK * highest:
            slow.append((allowed, highest))
    if slow:
        allowed, highest = slow[0]
        found = f"{len(slow)} processors are limited to {allowed / 1e6:.1f} of {highest / 1e6:.1f} GHz"
        faults.append((found, "cpupower frequency-set --governor performance --max=0, or check the power limit"))
    match = re.search(r"^model name\s*: (.*)$", host.text("proc/cpuinfo"), re.MULTILINE)
    model = match[1] if match else "unknown"
    return {"processors": judged(f"{usable:g}", faults, {"model": model, "number": f"{usable:g}"})}


def network_cards(host: HostFiles, _: int) -> Findings:
    """Ports of InfiniBand that are half up, Ethernet in half duplex, and packets that arrive damaged."""
    faults: list[Fault] = []
    active = 0
    for port in host.glob("sys/class/infiniband/*/ports/*"):
        name = f"{port.parent.parent.name}/{port.name}"
        state = host.text(str((port / "state").relative_to(host.root))).partition(": ")[2]
        active += state == "ACTIVE"
        if state in ("INIT", "ARMED"):
            found = f"InfiniBand port {name} is {state}: it has a link and no subnet manager"
            faults.append((found, "Start opensm, or check the switch"))
    ports = host.glob("sys/class/infiniband/*/ports/*")
    if ports and not active:
        faults.append(("no port of InfiniBand is active", "Check cables and switch: ibstat"))
    for folder in host.glob("sys/class/net/*"):
        name = folder.name
        where = f"sys/class/net/{name}"
        if host.text(f"{where}/duplex") == "half":
            faults.append((f"{name} runs in half duplex", "Check the cable and the switch port: ethtool"))
        received = host.number(f"{where}/statistics/rx_packets") or 0
        damaged = host.number(f"{where}/statistics/rx_errors") or 0
        if damaged > max(100, MOST_BAD_PACKETS * received):
            found = f"{name} received {damaged:,} damaged packets of {received:,}"
            faults.append((found, "Check the cable and the transceiver: ethtool -S"))
    if not ports and not faults:
        return {"network cards": Finding("Ethernet")}
    return {"network cards": judged(f"{active} InfiniBand" if ports else "Ethernet", faults)}


def throttle_counts(host: HostFiles) -> int:
    """How often the processors were slowed down because of heat since the machine started."""
    counts = host.glob("sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/core_throttle_count")
    return sum(host.number(str(path.relative_to(host.root))) or 0 for path in counts)


CHECKS = (limits, shared_memory, temporary_files, processors, network_cards)
