"""The control groups that limit this process's memory, with version 1 or 2, on a host or in a container."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Mount(NamedTuple):
    """A hierarchy of control groups, as far as this process sees it. mountinfo is described in proc(5)."""

    root: Path
    """The group that is mounted, as its hierarchy names it: a container's own, where the host's is hidden."""
    point: Path
    is_second: bool
    """Version 2, in which one hierarchy has all controllers."""


def groups(system: Path = Path("/")) -> list[Path]:
    """The directory of this process's group, and of those around it that this process sees. Empty without any."""
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for mount in _mounts(system):
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if (mount.is_second and not controllers) or (not mount.is_second and "memory" in controllers.split(",")):
                found += _around(mount, Path(path))
    return found


def killed(system: Path = Path("/")) -> int | None:
    """How many processes of this process's group the kernel has killed because memory ran out; None if no group counts
    them."""
    for group in groups(system):
        for counter in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                count = re.search(r"^oom_kill (\d+)", (group / counter).read_text(), re.MULTILINE)
                if count:
                    return int(count[1])
    return None


def free_bytes(system: Path = Path("/")) -> list[int]:
    """What is left in each of these groups that has a limit."""
    left = []
    for group in groups(system):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                left.append(int((group / limit).read_text()) - int((group / used).read_text()))
    return left


def _mounts(system: Path) -> Iterator[Mount]:
    try:
        lines = (system / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(" - ")
        root, point = before.split(" ")[3:5]
        kind, *_, options = after.split(" ")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            yield Mount(Path(root), system / point.lstrip("/"), kind == "cgroup2")


def _around(mount: Mount, path: Path) -> list[Path]:
    """The group's directory and those above it. What lies outside of the mounted group is that group itself."""
    own = mount.point
    if path.is_relative_to(mount.root) and (mount.point / path.relative_to(mount.root)).is_dir():
        own = mount.point / path.relative_to(mount.root)
    return [group for group in (own, *own.parents) if group.is_relative_to(mount.point)]
