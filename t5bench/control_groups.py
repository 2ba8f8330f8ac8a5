"""What the kernel allows and counts in the control groups of this process, such as a SLURM job's or a container's.

Version 1 has a hierarchy of groups for each controller or pair of them, version 2 one for all; a machine may have both.
Linux documents the files: admin-guide/cgroup-v1/ and admin-guide/cgroup-v2.rst.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Mount(NamedTuple):
    """A hierarchy of control groups, as far as this process sees it. mountinfo is described in proc(5)."""

    root: Path
    """The group that is mounted, as its hierarchy names it: a container's own, where the host's is hidden."""
    point: Path
    is_second: bool
    """Version 2, in which one hierarchy has all controllers."""


def groups(controller: str, system: Path = Path("/")) -> list[Path]:
    """The directory of this process's group, and of those around it that this process sees. Empty without any.

    controller: memory, cpu or pids. Limits of the groups around it hold, too.
    """
    try:
        lines = [line.split(":", 2) for line in (system / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    found = []
    for mount in _mounts(controller, system):
        for words in lines:
            has_it = not words[1] if mount.is_second else controller in words[1].split(",")
            if has_it:
                found += _around(mount, Path(words[2]))
    return found


def number(path: Path) -> int | None:
    """The number in a file; None if it has another word, such as "max", or cannot be read."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def counters(path: Path) -> dict[str, int]:
    """Those of a file whose lines are "NAME NUMBER"; empty if it cannot be read."""
    counted = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if value.strip().isdecimal():
                counted[name] = int(value)
    return counted


def killed(system: Path = Path("/")) -> int | None:
    """How many processes of this process's group the kernel has killed because memory ran out; None if no group counts
    them."""
    for group in groups("memory", system):
        for file in ("memory.events", "memory.oom_control"):
            count = counters(group / file).get("oom_kill")
            if count is not None:
                return count
    return None


def free_bytes(system: Path = Path("/")) -> list[int]:
    """What is left in each of these groups that has a limit. What was read from files and is idle is free, because
    the kernel drops it first."""
    left = []
    for group in groups("memory", system):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most = number(group / limit)
            now = number(group / used)
            if most is not None and now is not None:
                kept = counters(group / "memory.stat")
                left.append(most - now + kept.get("total_inactive_file", kept.get("inactive_file", 0)))
    return left


def processor_quota(group: Path) -> float | None:
    """How many processors a group may use; None without a quota."""
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    quota_us, period_us = number(group / "cpu.cfs_quota_us"), number(group / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def throttled_ms(system: Path = Path("/")) -> float:
    """For how long quotas of control groups held this process back."""
    throttled = 0.0
    for group in groups("cpu", system):
        counted = counters(group / "cpu.stat")
        # Version 1 counts nanoseconds, version 2 microseconds.
        throttled += counted.get("throttled_time", 0) / 1e6 + counted.get("throttled_usec", 0) / 1e3
    return throttled


def refused_starts(system: Path = Path("/")) -> int:
    """How often the kernel has refused to start a process or thread because a control group of this process had as many
    as it may (pids.max). The libraries that ask for one often abort without a word."""
    return sum(counters(group / "pids.events").get("max", 0) for group in groups("pids", system))


def _mounts(controller: str, system: Path) -> Iterator[Mount]:
    try:
        lines = (system / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(" - ")
        root, point = map(_unescaped, before.split(" ")[3:5])
        kind, *_, options = after.split(" ")
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            yield Mount(Path(root), system / point.lstrip("/"), kind == "cgroup2")


def _unescaped(path: str) -> str:
    """mountinfo writes blanks and backslashes, which systemd has in the names of groups, as \\040 and \\134."""
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), path)


def _around(mount: Mount, path: Path) -> list[Path]:
    """The group's directory and those above it. What lies outside of the mounted group is that group itself."""
    own = mount.point
    if path.is_relative_to(mount.root) and (mount.point / path.relative_to(mount.root)).is_dir():
        own = mount.point / path.relative_to(mount.root)
    return [group for group in (own, *own.parents) if group.is_relative_to(mount.point)]
