"""Peak rates of GPUs, for the share of them that a run uses (MFU).

Dense tensor-core TFLOP/s without sparsity, with accumulation in fp32, which is what PyTorch asks for. GPUs before
Ampere have no bf16 tensor cores. A name that is not here, such as a MIG slice or a laptop's GPU, has no peak: better no
MFU than that of another GPU. The figures of V100, T4, Quadro RTX 5000, A100, A10, RTX A4000, L4, L40S and H100 agree
with public lists of specifications. Look up the others before you publish an MFU, or give PEAK_TFLOPS.
"""

import re

FP16, BF16 = "fp16", "bf16"

# The name that nvidia-smi gives, without "NVIDIA", and TFLOP/s. "Sparse" figures of a data sheet are halved.
_BEFORE_AMPERE = {
    r"(Tesla )?V100-SXM[23]-\d+GB(-LS)?": 125.0,  # Tesla V100 data sheet
    r"(Tesla )?V100-PCIE-\d+GB": 112.0,
    r"(Tesla )?V100S-PCIE-\d+GB": 130.0,
    r"(Tesla )?T4": 65.0,  # T4 data sheet
    r"Quadro RTX 4000": 57.0,  # Quadro RTX data sheets, "Tensor Performance"
    r"Quadro RTX 5000": 89.2,
    r"Quadro RTX [68]000": 130.5,
}
_SINCE_AMPERE = {
    r"A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe": 312.0,  # A100 data sheet
    r"A30": 165.0,  # A30, A10 and A40 data sheets
    r"A10": 125.0,
    r"A40": 149.7,
    r"RTX A6000": 154.8,  # RTX A6000, A5000 and A4000 data sheets, with sparsity 309.7, 222.2 and 153.4
    r"RTX A5000": 111.1,
    r"RTX A4000": 76.7,
    r"L4": 121.0,  # L4, L40 and L40S data sheets, with sparsity 242, 362.1 and 733
    r"L40": 181.05,
    r"L40S": 362.05,
    r"H100 80GB HBM3": 989.4,  # H100 data sheet, with sparsity: SXM 1979, PCIe 1513, NVL 1671; Hopper white paper
    r"H100 PCIe": 756.0,
    r"H100 NVL": 835.5,
    r"H200": 989.4,  # H200 data sheet, with sparsity: SXM 1979, NVL 1671
    r"H200 NVL": 835.5,
    r"GH200 (120GB|480GB|144G HBM3e)": 989.4,  # GH200 data sheet, with sparsity 1979
    r"B200": 2250.0,  # DGX B200 data sheet, eight GPUs with sparsity 36 PFLOP/s
    r"GeForce RTX 3090": 71.0,  # GA102, Ada and RTX Blackwell white papers: FP16 tensor with FP32 accumulate, dense
    r"GeForce RTX 4090": 165.2,
    r"GeForce RTX 5090": 209.5,
    r"RTX 6000 Ada Generation": 364.25,  # data sheets, FP8 with sparsity, four times this: 1457.0, 1044.4, 327.6
    r"RTX 5000 Ada Generation": 261.1,
    r"RTX 4000 Ada Generation": 81.9,
}


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Dense peak TFLOP/s of a GPU as nvidia-smi names it, in "bf16" or "fp16"; None where it is not known.

    fp32 has none: whether it runs on tensor cores, as TF32, is a setting that records do not hold.
    """
    name = device_name.strip().removeprefix("NVIDIA ").strip()
    tables = {FP16: _BEFORE_AMPERE | _SINCE_AMPERE, BF16: _SINCE_AMPERE}
    return next((peak for pattern, peak in tables.get(precision, {}).items() if re.fullmatch(pattern, name)), None)
