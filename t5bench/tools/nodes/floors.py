"""The speeds below which a GPU is not healthy, by kind, with their sources.

A floor is well below what a healthy GPU of the kind reaches, so that none is named by chance, and well above what a GPU
reaches that is throttled, shares its link or is used by somebody else.
"""

from dataclasses import dataclass

from t5bench.costmodel.machine import GB, device_of

MAMF = "maximum achievable matmul FLOPS measured by S. Bekman, ml-engineering, compute/accelerator"
AZNHC = "expected values of Azure's node health checks, azurehpc-health-checks, commit 0e0a1ac, conf/"
DATA_SHEET = "NVIDIA's data sheet, as in t5bench/costmodel/machine.py"

# Of the best measured product. Square matrices, a warm GPU and a power limit cost up to a quarter of it.
PRODUCT_SHARE = 0.65
# Of the data sheet's figure where nothing is measured: an L4 or T4 reaches 40 to 50 % at its power limit.
UNMEASURED_PRODUCT_SHARE = 0.3
# Of the data sheet's bandwidth: a copy inside a healthy GPU's memory reaches 80 to 92 %.
MEMORY_SHARE = 0.65
# Of the expected all-reduce, which is for messages of 8 or 16 GiB; the check sends 256 MiB.
ALL_REDUCE_SHARE = 0.5


@dataclass(frozen=True)
class ExpectedSpeed:
    """What healthy GPUs of a kind are known to reach."""

    device: str
    """Its name in t5bench/costmodel/machine.py."""
    product: float | None = None
    """TFLOP/s of 16-bit matrix products, the best shape."""
    host_copy: float | None = None
    """GB/s from pinned memory of the host, the least that is accepted."""
    all_reduce: float | None = None
    """GB/s of bus bandwidth among all GPUs of a node, the least that is accepted."""
    sources: tuple[str, ...] = ()


MEASURED = (
    ExpectedSpeed("v100-16", None, 9, 110, (f"{AZNHC}nd40rs_v2.conf",)),
    ExpectedSpeed("v100", None, 9, 110, (f"{AZNHC}nd40rs_v2.conf",)),
    ExpectedSpeed("a100-40", 267.9, 21, 228, (MAMF, f"{AZNHC}nd96asr_v4.conf")),
    ExpectedSpeed("a100", 267.9, 21, 228, (MAMF, f"{AZNHC}nd96amsr_a100_v4.conf")),
    ExpectedSpeed("h100", 792.1, 48, 460, (MAMF, f"{AZNHC}nd96isr_h100_v5.conf")),
    ExpectedSpeed("h100-nvl", None, 48, None, (f"{AZNHC}nc40ads_h100_v5.conf",)),
    ExpectedSpeed("h200", 794.5, 48, 431, (MAMF, f"{AZNHC}nd96isr_h200_v5.conf")),
    ExpectedSpeed("gh200", 821.0, None, None, (MAMF,)),
    ExpectedSpeed("b200", 1745.0, None, None, (MAMF,)),
)


@dataclass(frozen=True)
class Floors:
    """The least speeds of a healthy GPU; None where nothing is known."""

    product: float | None = None
    """TFLOP/s."""
    memory: float | None = None
    """GB/s of a copy inside the GPU's memory, bytes read and bytes written."""
    host_copy: float | None = None
    """GB/s."""
    all_reduce: float | None = None
    """GB/s of bus bandwidth."""
    sources: tuple[str, ...] = ()


def floors_of(name: str) -> Floors | None:
    """The floors of a GPU with this name in nvidia-smi; None for a kind without figures, such as a MIG slice."""
    device = device_of(name)
    if device is None:
        return None
    measured = next((row for row in MEASURED if row.device == device.name), ExpectedSpeed(device.name))
    product = device.tensor * UNMEASURED_PRODUCT_SHARE
    if measured.product is not None:
        product = measured.product * PRODUCT_SHARE
    all_reduce = None
    if measured.all_reduce is not None:
        all_reduce = measured.all_reduce * ALL_REDUCE_SHARE
    return Floors(
        product=product,
        memory=device.bandwidth / GB * MEMORY_SHARE,
        host_copy=measured.host_copy,
        all_reduce=all_reduce,
        sources=(*measured.sources, DATA_SHEET),
    )
