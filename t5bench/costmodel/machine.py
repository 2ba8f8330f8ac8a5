"""What a job runs on: a GPU's rates and memory, and the links inside a node and between nodes.

Figures are what the data sheets and white papers of NVIDIA and AMD say, not measured: dense (a "sparse" figure is
halved) and with accumulation in fp32, as PyTorch uses it. A device that is not in the table, such as a MIG slice or a
laptop's GPU, has no figures: better none than another GPU's. Check the figures that you rely on before you publish an
MFU, or set PEAK_TFLOPS.
"""

import re
from dataclasses import dataclass
from typing import Any

from t5bench.costmodel.achievable_rates import BY_FAMILY, AchievableRates

GB, MIB, GIB = 10**9, 2**20, 2**30


@dataclass(frozen=True)
class Link:
    bandwidth: float  # bytes per second in one direction
    latency: float = 0.0  # seconds of one message
    is_measured: bool = False  # the bandwidth is what collectives reach, not the link's data rate
    straggling: float = 0.0
    """Seconds that a collective waits for the slowest process after all have computed for one second; after other
    times it grows with their square root, as delays that come by chance do."""


@dataclass(frozen=True)
class Device:
    """A GPU."""

    name: str
    pattern: str  # of nvidia-smi's name without "NVIDIA"
    tensor: float  # dense TFLOP/s of 16-bit matrix products
    vector: float  # of fp32 outside tensor cores
    memory: int  # bytes
    bandwidth: float  # of its memory, bytes per second
    nvlink: float = 0.0  # bytes per second and direction to the GPUs of its node, 0 for PCIe alone
    pcie: float = 24e9  # to the CPU, what a copy from pinned memory reaches of 32, 64 or 16 GB/s
    ampere: bool = True  # or later, with bf16 and TF32 on tensor cores
    fp8: bool = False  # at twice the 16-bit rate
    family: str = "cpu"  # a key of achievable_rates.BY_FAMILY
    multiprocessors: int = 0  # which share the tiles of a matrix product; 0 where that is not modelled (time.py)

    @property
    def hopper(self) -> bool:
        return self.family == "hopper"

    @property
    def achievable(self) -> AchievableRates:
        return BY_FAMILY[self.family]

    def peak(self, precision: str) -> float | None:
        """Dense FLOP/s of matrix products; None where the device has no tensor cores for the precision."""
        tensor = {"fp16": 1.0, "bf16": 1.0 * self.ampere, "tf32": 0.5 * self.ampere, "fp8": 2.0 * self.fp8}
        found = self.vector if precision == "fp32" else self.tensor * tensor.get(precision, 0.0)
        return found * 1e12 or None


@dataclass(frozen=True)
class Host:
    """A node's CPU with its Python and PyTorch, which start every operator."""

    operator_seconds: float
    """Seconds that the host spends on one of an engine's operators (time.OPERATORS)."""
    uncertainty: float = 1.0
    """Factor: with 90 % certainty the cost lies between operator_seconds / uncertainty and operator_seconds x
    uncertainty."""


# Of hosts that were not measured, by what they usually have for GPUs.
# A100: VIA-Research/vTrain at f8dda84, 720 iterations of Megatron-DeepSpeed on one kind of host.
# Hopper and later: the same tests of NVIDIA/Megatron-LM, which the host limits, take 0.63 to 0.73 times as long on a
# DGX H100 as on a DGX A100 (packages/costmodel-evidence).
# Of a CPU: measured here, as a core of it computes, which is calibrated, too.
# The uncertainty: a current EPYC, with this project's native engine, has 10 us; what Megatron-LM's tests imply for a
# DGX A100 is 80 us.
UNMEASURED = 2.5
ON_AMPERE = Host(40e-6, UNMEASURED)
ON_HOPPER = Host(28e-6, UNMEASURED)
ON_CPU = Host(10e-6, UNMEASURED)
OLDER = ("volta", "turing", "ampere", "ampere-sxm", "cdna2")


def usual_host(device: Device) -> Host:
    """What is known of the host of GPUs, or of a CPU, that was not measured."""
    if not device.memory:
        return ON_CPU
    return ON_AMPERE if device.family in OLDER else ON_HOPPER


@dataclass(frozen=True)
class Machine:
    """Nodes of equal GPUs."""

    device: Device
    inside: Link  # between two GPUs of a node
    between: Link  # what one node sends over all its interfaces
    devices_per_node: int = 8
    measured_host: Host | None = None

    @property
    def host(self) -> Host:
        return self.measured_host or usual_host(self.device)


# Where the figures of these rows are published:
# rtx2080ti: the Turing white paper, at reference clocks with fp32 sums. The Founders Edition has 56.9.
# a10g: NVIDIA's data sheet for AWS, with sparsity 140. The A10 has 125.
# a800, h800: the A100's and the H100's figures, but NVLink at 400 GB/s in both directions, as NVIDIA's page of the A800
#   40GB Active and its data sheet of the H800 (2631447) say.
# h20: NVIDIA has published none. These are a retailer's (Tom's Hardware on the H20, L20 and L2).
# b200: the page of the DGX B200, eight GPUs with sparsity 36 PFLOP/s; in fp32 the page of the HGX B200, 600 TFLOP/s.
# gb200: the page of the GB200 NVL72, 72 GPUs: with sparsity 360 PFLOP/s, in fp32 5,760 TFLOP/s, 13.4 TB at 576 TB/s.
# b300, gb300: Blackwell Ultra's data sheet, one GPU with sparsity 4.5 and 5 PFLOP/s.
# The fields of Device, with memory in GiB and rates in GB/s.
_VOLTA = (
    ("v100-16", r"(Tesla )?V100-SXM[23]-16GB(-LS)?", 125.0, 15.7, 16, 900, 150),
    ("v100", r"(Tesla )?V100-SXM[23]-\d+GB(-LS)?", 125.0, 15.7, 32, 900, 150),
    ("v100-pcie-16", r"(Tesla )?V100-PCIE-16GB", 112.0, 14.0, 16, 900),
    ("v100-pcie", r"(Tesla )?V100-PCIE-\d+GB", 112.0, 14.0, 32, 900),
    ("v100s", r"(Tesla )?V100S-PCIE-\d+GB", 130.0, 16.4, 32, 1134),
)
_TURING = (
    ("t4", r"(Tesla )?T4", 65.0, 8.1, 16, 320),
    ("rtx4000", r"Quadro RTX 4000", 57.0, 7.1, 8, 416),
    ("rtx5000", r"(Quadro )?RTX 5000", 89.2, 11.2, 16, 448),
    ("rtx6000", r"Quadro RTX 6000", 130.5, 16.3, 24, 672),
    ("rtx8000", r"Quadro RTX [68]000", 130.5, 16.3, 48, 672),
    ("rtx2080ti", r"(GeForce )?RTX 2080 Ti", 53.8, 13.4, 11, 616),
    ("titan-rtx", r"TITAN RTX", 130.5, 16.3, 24, 672),
)
_AMPERE_SXM = (
    ("a100-40", r"A100-SXM4-40GB", 312.0, 19.5, 40, 1555, 300),
    ("a100", r"A100-SXM4-80GB", 312.0, 19.5, 80, 2039, 300),
    ("a800", r"A800-SXM4-80GB", 312.0, 19.5, 80, 2039, 200),  # A100 with NVLink at 400 GB/s in both directions
)
_AMPERE = (
    ("a100-pcie-40", r"A100-PCIE-40GB", 312.0, 19.5, 40, 1555),
    ("a100-pcie", r"A100-PCIE-80GB|A100 80GB PCIe", 312.0, 19.5, 80, 1935),
    ("a800-pcie", r"A800 80GB PCIe", 312.0, 19.5, 80, 1935),
    ("a30", r"A30", 165.0, 10.3, 24, 933),
    ("a10g", r"A10G", 70.0, 35.0, 24, 600),
    ("a10", r"A10", 125.0, 31.2, 24, 600),
    ("a40", r"A40", 149.7, 37.4, 48, 696),
    ("a6000", r"RTX A6000", 154.8, 38.7, 48, 768),  # with sparsity 309.7, A5000 222.2, A4000 153.4
    ("a5000", r"RTX A5000", 111.1, 27.8, 24, 768),
    ("a4000", r"RTX A4000", 76.7, 19.2, 16, 448),
    ("rtx3090", r"GeForce RTX 3090", 71.0, 35.6, 24, 936),  # GA102, Ada and RTX Blackwell white papers
)
_ADA = (
    ("rtx4090", r"GeForce RTX 4090", 165.2, 82.6, 24, 1008),
    ("rtx6000-ada", r"RTX 6000 Ada Generation", 364.25, 91.1, 48, 960),  # FP8 with sparsity 1457.0
    ("rtx5000-ada", r"RTX 5000 Ada Generation", 261.1, 65.3, 32, 576),  # FP8 with sparsity 1044.4
    ("rtx4000-ada", r"RTX 4000 Ada Generation", 81.9, 26.7, 20, 360),  # FP8 with sparsity 327.6
    ("l4", r"L4", 121.0, 30.3, 24, 300),
    ("l40", r"L40", 181.05, 90.5, 48, 864),
    ("l40s", r"L40S", 362.05, 91.6, 48, 864),
)
_HOPPER = (
    ("h100", r"H100 80GB HBM3", 989.4, 66.9, 80, 3350, 450, 50),  # with sparsity: SXM 1979, PCIe 1513, NVL 1671
    ("h100-pcie", r"H100 PCIe", 756.0, 51.2, 80, 2000, 0, 50),
    ("h100-nvl", r"H100 NVL", 835.5, 60.0, 94, 3900, 300, 50),
    ("h200", r"H200", 989.4, 66.9, 141, 4800, 450, 50),  # with sparsity 1979, NVL 1671
    ("h200-nvl", r"H200 NVL", 835.5, 60.0, 141, 4800, 450, 50),
    ("h800", r"H800", 989.4, 66.9, 80, 3350, 200, 50),
    ("h800-pcie", r"H800 PCIe", 756.0, 51.2, 80, 2000, 0, 50),
    ("h20", r"H20", 148.0, 44.0, 96, 4000, 450, 50),
    ("gh200", r"GH200 (120GB|480GB)", 989.4, 66.9, 96, 4000, 450, 200),  # CPU by NVLink-C2C
    ("gh200-144", r"GH200 144G HBM3e", 989.4, 66.9, 144, 4900, 450, 200),
)
_GEFORCE_BLACKWELL = (("rtx5090", r"GeForce RTX 5090", 209.5, 104.8, 32, 1792, 0, 50),)
_BLACKWELL = (
    ("b200", r"B200", 2250.0, 75.0, 180, 8000, 900, 50),
    ("gb200", r"GB200", 2500.0, 80.0, 186, 8000, 900, 200),
    ("b300", r"B300( SXM6 AC)?", 2250.0, 75.0, 270, 7700, 900, 50),
    ("gb300", r"GB300", 2500.0, 80.0, 279, 8000, 900, 200),
)
# One of the card's two dies, which PyTorch sees as a GPU each: half of what AMD's data sheet says of the card (383
# TFLOP/s, 47.9 in fp32 vectors, 128 GB, 3,277 GB/s). Between cards one link of Infinity Fabric, 50 GB/s (ROCm's page
# of the MI250). It has no TF32, and the workspaces of the memory model are those of NVIDIA's libraries.
_CDNA2 = (("mi250x", r"(AMD )?(Instinct )?MI250X", 191.5, 23.95, 64, 1638, 50),)
# AMD's data sheet, still to be checked: dense 1,307.4 TFLOP/s, seven links of Infinity Fabric of 64 GB/s each way.
_CDNA3 = (("mi300x", r"(AMD )?(Instinct )?MI300X", 1307.4, 163.4, 192, 5300, 448, 50),)


# Of devices whose matrix products come in whole waves of tiles (time.py): the white papers of the A100 and GA102.
_MULTIPROCESSORS = {
    "a100-40": 108, "a100": 108, "a800": 108, "a100-pcie-40": 108, "a100-pcie": 108, "a800-pcie": 108, "a30": 56,
    "a10g": 80, "a10": 72, "a40": 84, "a6000": 84, "a5000": 64, "a4000": 48, "rtx3090": 82,
}  # fmt: skip


def _device(row: Any, nvlink: int = 0, pcie: int = 24, **since: Any) -> Device:
    name, pattern, tensor, vector, memory, bandwidth = row
    since["multiprocessors"] = _MULTIPROCESSORS.get(name, 0)
    return Device(
        name, pattern, tensor, vector, memory * GIB, bandwidth * GB, float(nvlink * GB), float(pcie * GB), **since
    )


def _devices(family: str, rows: Any, **since: Any) -> list[Device]:
    return [_device(row[:6], *row[6:], family=family, **since) for row in rows]


_FOUND = [
    *_devices("volta", _VOLTA, pcie=12, ampere=False),
    *_devices("turing", _TURING, pcie=12, ampere=False),
    *_devices("ampere-sxm", _AMPERE_SXM),
    *_devices("ampere", _AMPERE),
    *_devices("cdna2", _CDNA2),
    *_devices("ada", _ADA, fp8=True),
    *_devices("hopper", _HOPPER, fp8=True),
    *_devices("geforce-blackwell", _GEFORCE_BLACKWELL, fp8=True),
    *_devices("blackwell", _BLACKWELL, fp8=True),
    *_devices("cdna3", _CDNA3, fp8=True),
]
DEVICES = {device.name: device for device in _FOUND}


def device_of(name: str) -> Device | None:
    """The device with this name in nvidia-smi or in the table; None if it is not known."""
    plain = name.strip().removeprefix("NVIDIA ").strip()
    known = DEVICES.get(plain.lower().replace(" ", "-"))
    return known or next((device for device in DEVICES.values() if re.fullmatch(device.pattern, plain)), None)


def peak_tflops(name: str, precision: str) -> float | None:
    """Dense peak TFLOP/s of a GPU with nvidia-smi's name; None if it is not known.

    fp32 has none: whether it runs on tensor cores, as TF32, is a setting that records do not hold.
    """
    device = device_of(name) if precision in ("bf16", "fp16") else None
    peak = device and device.peak(precision)
    return peak / 1e12 if peak else None
