"""Whether a node is healthy: thirty and more planted faults, each found and none else, and a healthy node often."""

import json
import os
import re
import shlex
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support import REPO_ROOT

from t5bench.costmodel.machine import DEVICES
from t5bench.record import gpus
from t5bench.tools.nodes import check, health, speed
from t5bench.tools.nodes.check import CheckedNode
from t5bench.tools.nodes.findings import Finding
from t5bench.tools.nodes.floors import MEASURED, floors_of
from t5bench.tools.nodes.host_state import GIB, HostFiles

H100 = "NVIDIA H100 80GB HBM3"
UPTIME = 500_000.0
# Figures of a healthy H100, in the units of health.SPEEDS.
HEALTHY = {"product": [690.0] * 8, "memory": [3000.0] * 8, "host_copy": [54.0] * 8, "all_reduce": 390.0}
CLOCKS = "1750, 1980, 0x0000000000000004\n" * 8
GPU_XML = """
<gpu id="00000000:{index:02x}:00.0">
  <product_name>{name}</product_name><uuid>GPU-{index}</uuid><compute_mode>Default</compute_mode>
  <pci><pci_gpu_link_info><link_widths><max_link_width>16x</max_link_width>
    <current_link_width>16x</current_link_width></link_widths></pci_gpu_link_info></pci>
  <fb_memory_usage><total>81559 MiB</total><used>4 MiB</used></fb_memory_usage>
  <clocks_event_reasons><clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
    <clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
    <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
    <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
    <clocks_event_reason_hw_power_brake_slowdown>Not Active</clocks_event_reason_hw_power_brake_slowdown>
    <clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
  </clocks_event_reasons>
  <ecc_errors><volatile><sram_correctable>3</sram_correctable><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
    <dram_uncorrectable>0</dram_uncorrectable></volatile></ecc_errors>
  <remapped_rows><remapped_row_unc>1</remapped_row_unc><remapped_row_pending>No</remapped_row_pending>
    <remapped_row_failure>No</remapped_row_failure></remapped_rows>
  <temperature><gpu_temp>34 C</gpu_temp></temperature>
  <gpu_power_readings><current_power_limit>700.00 W</current_power_limit>
    <default_power_limit>700.00 W</default_power_limit></gpu_power_readings>
  <fabric><state>Completed</state></fabric>
  <processes><process_info><pid>7</pid><type>C</type><process_name>/usr/bin/nvidia-persistenced</process_name>
    <used_memory>4 MiB</used_memory></process_info></processes>
</gpu>
"""
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max processes             {processes}               {processes}               processes
Max open files            1024                 {files}               files
Max locked memory         {locked}            {locked}            bytes
"""
# What a healthy kernel writes: an application's own Xid, a link that comes up, corrected errors, old faults, a full
# file that was mounted as a disk.
LOG = """[    1.200000] mlx5_core 0000:0c:00.0: Link up
[    2.100000] eth0: Link is Down
[    4.100000] eth0: Link is Up - 100Gbps/Full
[ 9000.000000] NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', GPU has fallen off the bus.
[499000.000000] NVRM: Xid (PCI:0000:01:00): 31, pid=4242, name=python, MMU Fault
[499100.000000] NVRM: Xid (PCI:0000:01:00): 43, pid=4242, name=python, Ch 00000008
[499500.000000] EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0
[499600.000000] EXT4-fs (loop0): Remounting filesystem read-only
"""


@dataclass(frozen=True)
class MadeHost(HostFiles):
    """A directory that looks like a host's files, and what no file says: the space of file systems, and processors."""

    spaces: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    usable: list[int] = field(default_factory=lambda: [64])

    def space(self, path: str) -> tuple[int, int] | None:
        return self.spaces.get(path, (900 * GIB, 400 * GIB))

    def affinity(self) -> int:
        return self.usable[0]


class MadeNode:
    """A healthy node with eight GPUs; a fault changes something of it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch = root, monkeypatch
        self.host = MadeHost(root)
        self.log = LOG
        self.limits = {"processes": "unlimited", "files": "1048576", "locked": "unlimited"}
        self.gpus = ElementTree.fromstring(
            f"<log>{''.join(GPU_XML.format(index=i, name=H100) for i in range(8))}</log>"
        )
        self.smi, self.listed = "", 8
        self.figures: dict = {**HEALTHY, "clocks": CLOCKS}
        for path, text in {
            "proc/meminfo": "MemTotal:       2113000000 kB\n",
            "proc/uptime": f"{UPTIME} 1.0\n",
            "proc/cpuinfo": "model name\t: Xeon\n",
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/job/pids.max": "max\n",
            "sys/fs/cgroup/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/job/memory.max": "max\n",
            "sys/fs/cgroup/job/memory.current": "4096\n",
            "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3800000\n",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "3800000\n",
            "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "12\n",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
            "sys/class/net/eth0/duplex": "full\n",
            "sys/class/net/eth0/statistics/rx_packets": "1000000\n",
            "sys/class/net/eth0/statistics/rx_errors": "7\n",
        }.items():
            self.write(path, text)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def gpu(self, index: int, path: str, text: str) -> None:
        self.gpus.findall("gpu")[index].find(path).text = text

    def program(self, name: str, script: str) -> None:
        self.write(f"bin/{name}", f"#!/bin/sh\n{script}\n")
        (self.root / "bin" / name).chmod(0o755)

    def use(self, gpu: int, program: str, used: str) -> None:
        process = ElementTree.SubElement(self.gpus.findall("gpu")[gpu].find("processes"), "process_info")
        for tag, text in (("pid", "4711"), ("type", "C"), ("process_name", program), ("used_memory", used)):
            ElementTree.SubElement(process, tag).text = text

    def examine(self) -> CheckedNode:
        """As check.py sees the node."""
        self.write("proc/self/limits", LIMITS.format(**self.limits))
        self.write("dmesg", self.log)
        self.write("smi.xml", ElementTree.tostring(self.gpus, encoding="unicode"))
        listing = "".join(f"GPU {index}: {H100} (UUID: GPU-{index})\n" for index in range(self.listed))
        self.write("smi.list", listing)
        self.program("dmesg", f"cat {self.root}/dmesg")
        if not (self.root / "bin" / "nvidia-smi").exists():
            self.program(
                "nvidia-smi", f"{self.smi}\ncase $1 in -L) cat {self.root}/smi.list;; *) cat {self.root}/smi.xml;; esac"
            )
        gpus._machine.cache_clear()
        self.monkeypatch.setattr(gpus, "SMI_SECONDS", 2.0)
        self.monkeypatch.setattr(health, "HISTORY", self.root / "history")
        self.monkeypatch.setattr(health, "measured_speeds", lambda *_: self.figures)
        self.monkeypatch.setenv("TMPDIR", "/tmp")
        self.write("tmp/file", "")
        environ = {"PATH": f"{self.root / 'bin'}:/usr/bin:/bin"}
        made = health.examine("cuda", self.host, environ, 15)
        node = CheckedNode("node1", kind=made.kind, speeds=made.speeds, own_rows=set(made.findings))
        node.findings = {"reachable": Finding("ssh"), **made.findings}
        return node


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeNode:
    return MadeNode(tmp_path, monkeypatch)


def logged(text: str, times: int = 1) -> Callable[[MadeNode], None]:
    def plant(node: MadeNode) -> None:
        node.log += "".join(f"[499990.{number:06d}] {text}\n" for number in range(times))

    return plant


def on_gpu(path: str, text: str, index: int = 3) -> Callable[[MadeNode], None]:
    return lambda node: node.gpu(index, path, text)


def file_says(path: str, text: str) -> Callable[[MadeNode], None]:
    return lambda node: node.write(path, text)


def limited(name: str, value: int) -> Callable[[MadeNode], None]:
    return lambda node: node.limits.update({name: str(value)})


def measures(name: str, value: object) -> Callable[[MadeNode], None]:
    return lambda node: node.figures.update({name: value})


def slow(name: str, value: float) -> Callable[[MadeNode], None]:
    return measures(name, [*HEALTHY[name][:7], value])


def double_bit_errors(node: MadeNode) -> None:
    """As drivers before 450 say it."""
    old = "<volatile><double_bit><device_memory>2</device_memory><total>2</total></double_bit></volatile>"
    errors = node.gpus.findall("gpu")[3].find("ecc_errors")
    assert errors is not None
    errors[:] = [ElementTree.fromstring(old)]


def in_version_1(path: str, text: str) -> Callable[[MadeNode], None]:
    """A file of a control group of cgroup 1; the quota's period is its usual one."""

    def plant(node: MadeNode) -> None:
        node.write("proc/self/cgroup", "5:pids:/job\n4:memory:/job\n3:cpu,cpuacct:/job\n0::/job\n")
        mounts = [
            f"31 1 0:27 / /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n" for name in ("pids", "memory", "cpu")
        ]
        node.write("proc/self/mountinfo", "".join(mounts))
        node.write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n")
        node.write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "0\n")
        node.write(f"sys/fs/cgroup/{path}", text)

    return plant


def uses_memory_without_a_program(node: MadeNode) -> None:
    node.gpu(2, "fb_memory_usage/used", "40000 MiB")


def heat_during_the_check(node: MadeNode) -> None:
    counts = iter((12, 40))
    node.monkeypatch.setattr(health.host_state, "throttle_counts", lambda _: next(counts))


XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid='<unknown>', name=<unknown>"
CPU = "sys/devices/system/cpu/cpu0/cpufreq"
# What is planted; the row that is to fail; words of its reason.
FAULTS = {
    "memlock": (limited("locked", 65536), "limits", "memlock is 0 MiB"),
    "nofile": (limited("files", 1024), "limits", "nofile allows 1024"),
    "nproc": (limited("processes", 256), "limits", "nproc allows 256"),
    "pids.max": (file_says("sys/fs/cgroup/job/pids.max", "300\n"), "limits", "(pids.max)"),
    "memory.max": (file_says("sys/fs/cgroup/job/memory.max", "1000000000\n"), "limits", "0.9 GiB of memory left"),
    "small shm": (lambda n: n.host.spaces.update({"dev/shm": (64 << 20, 64 << 20)}), "shared memory", "0.062 GiB"),
    "full shm": (
        lambda n: n.host.spaces.update({"dev/shm": (99 * GIB, 1 << 20)}),
        "shared memory",
        "1 MiB of /dev/shm",
    ),
    "no shm": (lambda n: n.host.spaces.update({"dev/shm": None}), "shared memory", "there is no /dev/shm"),
    "full tmp": (lambda n: n.host.spaces.update({"tmp": (GIB, 5 << 20)}), "temporary files", "5 MiB are free in /tmp"),
    "few processors": (lambda n: n.host.usable.insert(0, 4), "processors", "4 processors for 8 GPUs"),
    "cpu quota": (file_says("sys/fs/cgroup/job/cpu.max", "200000 100000\n"), "processors", "2 processors for 8"),
    "low cpu clock": (file_says(f"{CPU}/scaling_max_freq", "1200000\n"), "processors", "1.2 of 3.8 GHz"),
    "hot processor": (heat_during_the_check, "processors", "slowed the processors down 28 times"),
    "infiniband init": (
        file_says("sys/class/infiniband/mlx5_1/ports/1/state", "2: INIT\n"),
        "network cards",
        "is INIT",
    ),
    "infiniband down": (
        file_says("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n"),
        "network cards",
        "no port of InfiniBand",
    ),
    "half duplex": (file_says("sys/class/net/eth0/duplex", "half\n"), "network cards", "half duplex"),
    "damaged packets": (
        file_says("sys/class/net/eth0/statistics/rx_errors", "51000\n"),
        "network cards",
        "51,000 damaged packets",
    ),
    "xid 79": (logged(XID.format(79)), "kernel log", "GPU PCI:0000:3b:00: it has fallen off the bus (Xid 79"),
    "xid 48": (logged(XID.format(48)), "kernel log", "an ECC error that could not be corrected (Xid 48"),
    "xid 74": (logged(XID.format(74)), "kernel log", "an NVLink error"),
    "xid 119": (logged(XID.format(119)), "kernel log", "Xid 119"),
    "unknown xid": (logged(XID.format(157)), "kernel log", "NVIDIA's list of Xid errors (Xid 157"),
    "host ecc": (logged("EDAC MC1: 1 UE memory read error"), "kernel log", "could not be corrected"),
    "many corrected": (logged("EDAC MC1: 1 CE memory read error", 12), "kernel log", "many corrected ECC errors"),
    "pcie": (logged("pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrected (Fatal)"), "kernel log", "PCIe error"),
    "flapping link": (logged("eth0: Link is Down", 3), "kernel log", "goes up and down"),
    "disk": (logged("blk_update_request: I/O error, dev nvme0n1, sector 8"), "kernel log", "a disk fails"),
    "read-only": (logged("EXT4-fs (sda1): Remounting filesystem read-only"), "kernel log", "a file system is damaged"),
    "nfs": (logged("nfs: server home not responding, still trying"), "kernel log", "a file server does not answer"),
    "hanging": (logged("INFO: task python:99 blocked for more than 120 seconds."), "kernel log", "hang in the kernel"),
    "slow tool": (lambda n: setattr(n, "smi", "sleep 0.4"), "vendor tool", "nvidia-smi took 0."),
    "tool hangs": (lambda n: setattr(n, "smi", "[ $1 = -L ] || exec sleep 60"), "vendor tool", "did not answer within"),
    "tool fails": (
        lambda n: setattr(n, "smi", "[ $1 = -L ] || { echo 'Unable to determine the device handle'; exit 15; }"),
        "vendor tool",
        "Unable to determine the device handle",
    ),
    "slowdown": (
        on_gpu("clocks_event_reasons/clocks_event_reason_hw_slowdown", "Active"),
        "GPU state",
        "GPU 3: the hardware slows",
    ),
    "thermal": (
        on_gpu("clocks_event_reasons/clocks_event_reason_hw_thermal_slowdown", "Active"),
        "GPU state",
        "too hot",
    ),
    "power brake": (
        on_gpu("clocks_event_reasons/clocks_event_reason_hw_power_brake_slowdown", "Active"),
        "GPU state",
        "power supply",
    ),
    "gpu ecc of an old driver": (double_bit_errors, "GPU state", "2 ECC errors"),
    "pids of cgroup 1": (in_version_1("pids/job/pids.max", "300\n"), "limits", "(pids.max)"),
    "memory of cgroup 1": (
        in_version_1("memory/job/memory.limit_in_bytes", "1000000000\n"),
        "limits",
        "0.9 GiB of memory left",
    ),
    "quota of cgroup 1": (in_version_1("cpu/job/cpu.cfs_quota_us", "200000\n"), "processors", "2 processors for 8"),
    "gpu ecc": (on_gpu("ecc_errors/volatile/dram_uncorrectable", "2"), "GPU state", "2 ECC errors"),
    "row failure": (on_gpu("remapped_rows/remapped_row_failure", "Yes"), "GPU state", "could not replace"),
    "row pending": (on_gpu("remapped_rows/remapped_row_pending", "Yes"), "GPU state", "waits for a reset"),
    "narrow link": (on_gpu("pci/pci_gpu_link_info/link_widths/current_link_width", "8x"), "GPU state", "8 of 16 lanes"),
    "power limit": (on_gpu("gpu_power_readings/current_power_limit", "400.00 W"), "GPU state", "400 instead of 700 W"),
    "hot": (on_gpu("temperature/gpu_temp", "91 C"), "GPU state", "it has 91"),
    "compute mode": (on_gpu("compute_mode", "Prohibited"), "GPU state", "forbids programs"),
    "fabric": (on_gpu("fabric/state", "In Progress"), "GPU state", "'In Progress'"),
    "foreign program": (
        lambda n: n.use(5, "python train.py", "70000 MiB"),
        "GPU use",
        "GPU 5 is used by python train.py",
    ),
    "leaked memory": (uses_memory_without_a_program, "GPU use", "39.1 GiB in use by no visible program"),
    "slow product": (slow("product", 310.0), "matrix product", "GPU 7: 310 TFLOP/s; at least 515"),
    "slow memory": (slow("memory", 1500.0), "memory copy", "GPU 7: 1.5e+03 GB/s; at least 2.18e+03"),
    "slow host link": (slow("host_copy", 12.0), "copy from the host", "at least 48"),
    "slow all-reduce": (measures("all_reduce", 90.0), "all-reduce", "90 GB/s; at least 230"),
    "low gpu clock": (
        measures("clocks", "345, 1980, 0x0000000000000000\n" * 8),
        "clocks under load",
        "345 of 1980 MHz",
    ),
    "throttled under load": (
        measures("clocks", "1100, 1980, 0x0000000000000040\n" * 8),
        "clocks under load",
        "slowed down under load",
    ),
    "torch without cuda": (
        lambda n: setattr(n, "figures", {"error": "torch 2.6.0+cpu (CUDA None) sees no GPU"}),
        "matrix product",
        "sees no GPU",
    ),
    "speed hangs": (
        lambda n: setattr(n, "figures", {"product": [690.0], "late": True}),
        "matrix product",
        "was measured in time",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_and_nothing_else(made: MadeNode, name: str, monkeypatch: pytest.MonkeyPatch):
    plant, row, words = FAULTS[name]
    monkeypatch.setattr(health.gpu_state, "SLOW_SECONDS", 0.3 if name == "slow tool" else 3.0)
    monkeypatch.setattr(health, "TOOL_SECONDS", 1.0 if name == "tool hangs" else 8.0)
    plant(made)
    node = made.examine()
    failed = {row: finding.problem for row, finding in node.findings.items() if finding.problem}
    assert set(failed) == {row}, failed
    assert words in failed[row] and node.findings[row].remedy
    shown = check.verdicts([CheckedNode("node0", findings={"reachable": Finding("ssh")}), node])
    assert shown.startswith(f"PASS  node0\nFAIL  node1  {row}: ") and shown.endswith("--exclude=node1")


def test_a_healthy_node_is_never_named(made: MadeNode):
    for _ in range(int(os.environ.get("HEALTHY_CHECKS", "5"))):
        node = made.examine()
        assert not [finding for finding in node.findings.values() if finding.problem], node.findings
        assert check.verdicts([node]) == "PASS  node1"


@pytest.mark.nightly
def test_this_machine_is_healthy_in_30_seconds(tmp_path: Path):
    """On the CPU, with its own figures: those of the first check are what later ones are compared with."""
    environment = {**os.environ, "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "DEVICE": "cpu"}
    command = ["bash", str(REPO_ROOT / "scripts" / "check_cluster.sh"), "--health", os.uname().nodename]
    for _ in range(2):
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    assert f"\nPASS  {os.uname().nodename}\n" in result.stdout and "GFLOP a CPU second" in result.stdout
    (history,) = (tmp_path / ".cache" / "t5-parallelism" / "health").iterdir()
    figures = json.loads(history.read_text())
    assert len(figures) == 2 and figures[0]["product"][0] > 0
    history.write_text(json.dumps([{"product": [1e6]}]))
    slow = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert slow.returncode == 1 and "--exclude=" in slow.stdout
    assert "a third of what this machine reached in earlier checks" in slow.stdout


def test_floors_are_of_known_gpus_and_have_sources():
    assert all(row.device in DEVICES and row.sources for row in MEASURED)
    for name, product, memory in (("NVIDIA H100 80GB HBM3", 515, 2178), ("NVIDIA A100-SXM4-80GB", 174, 1325)):
        floors = floors_of(name)
        assert (round(floors.product), round(floors.memory)) == (product, memory) and floors.sources
    assert floors_of("NVIDIA A100-SXM4-40GB MIG 3g.20gb") is None
    for device in DEVICES.values():
        reached = [row.product for row in MEASURED if row.device == device.name and row.product]
        assert floors_of(device.name).product < (reached or [0.45 * device.tensor])[0]


def test_the_page_has_the_floors_and_the_number_of_faults():
    page = (REPO_ROOT / "docs" / "nodes.md").read_text()
    rows = re.findall(r"^\| (\S+\d.*?) \| ([\d,]+) \| ([\d,]+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for name, *shown in rows:
        floors = floors_of(f"NVIDIA {name}")
        figures = (floors.product, floors.memory, floors.host_copy, floors.all_reduce)
        assert shown == [f"{figure:,.0f}" for figure in figures], name
    assert f"plants {len(FAULTS)} faults" in page


def test_nodes_of_one_kind_are_compared():
    nodes = [CheckedNode(f"node{i}", kind="GPU", speeds={"product": 100.0}) for i in range(4)]
    for node in nodes:
        node.findings["matrix product"] = Finding("100 TFLOP/s")
    nodes[2] = replace(nodes[2], speeds={"product": 60.0})
    check.compare_speeds(nodes)
    assert [bool(node.findings["matrix product"].problem) for node in nodes] == [False, False, True, False]
    for node in nodes:
        node.kind = "cpu"
        node.findings["matrix product"] = Finding("100 GFLOP")
    check.compare_speeds(nodes)
    assert not any(node.findings["matrix product"].problem for node in nodes)


@pytest.mark.parametrize(("known", "asked"), [("event", 1), ("throttle", 2), ("nothing", 2)])
def test_the_reasons_for_a_low_clock_have_the_name_that_the_driver_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str, asked: int
):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"""#!/bin/sh
echo >>{shlex.quote(str(tmp_path / "asked"))}
case $* in
  *clocks_{known}_reasons.active*) echo "1980, 1980, 0x0" ;;
  *) echo "Field is not a valid field to query."; exit 2 ;;
esac
""")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert speed.clocks_of([]) == ("" if known == "nothing" else "1980, 1980, 0x0\n")
    assert len((tmp_path / "asked").read_text()) == asked
