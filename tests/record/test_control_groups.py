"""Whose memory was full, and how much is left: of the group that this process is in."""

from pathlib import Path

import pytest

from t5bench import control_groups
from t5bench.record.machine import oom_kills

V2 = "30 1 0:26 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1 = "31 1 0:27 {root} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}"
CPU = "32 1 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"
COUNTED = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
# What /proc/self/cgroup and mountinfo say, and the group's directory, if there is one.
PLACES = {
    "version 2, a SLURM job": ("0::/slurm/job_7/step_0", V2.format(root="/"), "slurm/job_7/step_0"),
    "version 2, a container": ("0::/", V2.format(root="/"), ""),
    "version 2, a container that sees its host's name": ("0::/docker/a1", V2.format(root="/docker/a1"), ""),
    "version 2, outside of its own namespace": ("0::/../../other", V2.format(root="/"), ""),
    "version 1": ("9:memory:/slurm/job_7\n4:cpu:/x", V1.format(root="/", name="memory"), "memory/slurm/job_7"),
    "version 1, a container": ("9:memory:/docker/a1", V1.format(root="/docker/a1", name="memory"), "memory"),
    "version 1, one mount of two controllers": (
        "9:cpuset,memory:/job", V1.format(root="/", name="cpuset,memory"), "cpuset,memory/job"
    ),
    # As systemd and podman name groups, of which the mount is escaped.
    "version 2, a machine of systemd": (
        "0::/m.slice/m-a\\x2d1.scope/payload/job", V2.format(root="/m.slice/m-a\\134x2d1.scope"), "payload/job"
    ),
    "version 1, a blank in a name": (
        "9:memory:/my jobs/7/step", V1.format(root="/my\\040jobs/7", name="memory"), "memory/step"
    ),
    "both": ("9:memory:/job\n0::/user", V1.format(root="/", name="memory"), "memory/job"),
}  # fmt: skip


def system(tmp_path: Path, groups: str, mounts: str) -> Path:
    files = {"proc/self/cgroup": groups + "\n", "proc/self/mountinfo": f"{CPU}\n{mounts}".strip() + "\n"}
    for name, text in {**files, "proc/vmstat": "oom_kill 70\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", PLACES)
def test_the_group_of_this_process(tmp_path: Path, name: str):
    groups, mounts, place = PLACES[name]
    root = system(tmp_path, groups, mounts)
    own = root / "sys/fs/cgroup" / place
    own.mkdir(parents=True)
    is_second = "cgroup2" in mounts
    (own / ("memory.events" if is_second else "memory.oom_control")).write_text(COUNTED)
    (own / ("memory.max" if is_second else "memory.limit_in_bytes")).write_text("900\n")
    (own / ("memory.current" if is_second else "memory.usage_in_bytes")).write_text("200\n")
    stranger = root / "sys/fs/cgroup/stranger"
    stranger.mkdir(parents=True)
    (stranger / "memory.events").write_text("oom_kill 50\n")
    assert control_groups.killed(root) == oom_kills(root) == 3
    assert control_groups.free_bytes(root) == [700]


def test_a_group_around_this_one_limits_it_too(tmp_path: Path):
    root = system(tmp_path, "0::/job/step", V2.format(root="/"))
    for place, limit in (("job/step", "max"), ("job", "500")):
        own = root / "sys/fs/cgroup" / place
        own.mkdir(parents=True, exist_ok=True)
        (own / "memory.max").write_text(limit)
        (own / "memory.current").write_text("100")
    assert control_groups.free_bytes(root) == [400]


def test_without_a_group_the_machine_counts(tmp_path: Path):
    assert oom_kills(system(tmp_path, "0::/", "")) == 70
    (tmp_path / "proc/self/cgroup").unlink()
    assert oom_kills(tmp_path) == 70


@pytest.mark.parametrize("version", [1, 2])
def test_what_the_kernel_drops_is_free(tmp_path: Path, version: int):
    mount = V1.format(root="/", name="memory") if version == 1 else V2.format(root="/")
    root = system(tmp_path, "9:memory:/" if version == 1 else "0::/", mount)
    group = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    group.mkdir(parents=True)
    (group / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text("5000\n")
    (group / ("memory.usage_in_bytes" if version == 1 else "memory.current")).write_text("4900\n")
    of_children = "total_inactive_file 700\n" if version == 1 else ""
    (group / "memory.stat").write_text(f"cache 800\ninactive_file {100 if version == 1 else 700}\n{of_children}")
    assert control_groups.free_bytes(root) == [800]


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"}, 1.5),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_a_quota_of_processors(tmp_path: Path, files: dict[str, str], quota: float | None):
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert control_groups.processor_quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("groups", "mount", "place", "counted"),
    [
        ("4:cpu,cpuacct:/", V1.format(root="/", name="cpu,cpuacct"), "cpu,cpuacct", "throttled_time 3000000"),
        ("0::/job", V2.format(root="/"), "job", "throttled_usec 3000"),
    ],
)
def test_for_how_long_a_quota_held_back(tmp_path: Path, groups: str, mount: str, place: str, counted: str):
    root = system(tmp_path, groups, mount)
    (root / "sys/fs/cgroup" / place).mkdir(parents=True)
    (root / "sys/fs/cgroup" / place / "cpu.stat").write_text(f"nr_periods 9\n{counted}\n")
    assert control_groups.throttled_ms(root) == 3
