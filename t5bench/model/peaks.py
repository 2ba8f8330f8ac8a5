"""Peak rates of GPUs, for the share of them that a run uses (MFU).

Dense tensor-core TFLOP/s without sparsity, with accumulation in fp32, which is what PyTorch asks for. GPUs before
Ampere have no bf16 tensor cores. A name that is not here, such as a MIG slice or a laptop's GPU, has no peak: better no
MFU than that of another GPU. The figures were entered by hand. Those of V100, T4, Quadro RTX 5000, A100, A10, RTX
A4000, L4, L40S and H100 agree with public lists of specifications; the others were compared with nothing since, so look
one up before an MFU is published, or give PEAK_TFLOPS.
"""

import re

FP16, BF16 = "fp16", "bf16"
_BOTH = (BF16, FP16)

# (the name that nvidia-smi gives, without "NVIDIA"; TFLOP/s; precisions). "Sparse" figures of a data sheet are halved.
_PEAKS: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    # Tesla V100 data sheet (SXM2 125, PCIe 112, V100S 130)
    (r"(Tesla )?V100-SXM[23]-\d+GB(-LS)?", 125.0, (FP16,)),
    (r"(Tesla )?V100-PCIE-\d+GB", 112.0, (FP16,)),
    (r"(Tesla )?V100S-PCIE-\d+GB", 130.0, (FP16,)),
    # T4 data sheet
    (r"(Tesla )?T4", 65.0, (FP16,)),
    # Quadro RTX 4000, 5000, 6000 and 8000 data sheets, "Tensor Performance"
    (r"Quadro RTX 4000", 57.0, (FP16,)),
    (r"Quadro RTX 5000", 89.2, (FP16,)),
    (r"Quadro RTX [68]000", 130.5, (FP16,)),
    # A100 data sheet, the same for SXM and PCIe
    (r"A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe", 312.0, _BOTH),
    # A30, A10 and A40 data sheets
    (r"A30", 165.0, _BOTH),
    (r"A10", 125.0, _BOTH),
    (r"A40", 149.7, _BOTH),
    # RTX A6000, A5000 and A4000 data sheets, "Tensor Performance" with sparsity 309.7, 222.2 and 153.4
    (r"RTX A6000", 154.8, _BOTH),
    (r"RTX A5000", 111.1, _BOTH),
    (r"RTX A4000", 76.7, _BOTH),
    # L4, L40 and L40S data sheets (with sparsity 242, 362.1 and 733)
    (r"L4", 121.0, _BOTH),
    (r"L40", 181.05, _BOTH),
    (r"L40S", 362.05, _BOTH),
    # H100 data sheet (with sparsity: SXM 1979, PCIe 1513, NVL 1671) and Hopper white paper (SXM dense 989.4)
    (r"H100 80GB HBM3", 989.4, _BOTH),
    (r"H100 PCIe", 756.0, _BOTH),
    (r"H100 NVL", 835.5, _BOTH),
    # H200 data sheet (with sparsity: SXM 1979, NVL 1671)
    (r"H200", 989.4, _BOTH),
    (r"H200 NVL", 835.5, _BOTH),
    # GH200 Grace Hopper data sheet (with sparsity 1979)
    (r"GH200 (120GB|480GB|144G HBM3e)", 989.4, _BOTH),
    # DGX B200 data sheet (eight GPUs, with sparsity 36 PFLOP/s)
    (r"B200", 2250.0, _BOTH),
    # GA102 white paper, appendix A: FP16 tensor with FP32 accumulate, dense
    (r"GeForce RTX 3090", 71.0, _BOTH),
    # Ada white paper, appendix A: FP16 tensor with FP32 accumulate, dense
    (r"GeForce RTX 4090", 165.2, _BOTH),
    # RTX Blackwell white paper, appendix A: FP16 tensor with FP32 accumulate, dense
    (r"GeForce RTX 5090", 209.5, _BOTH),
    # RTX 6000, 5000 and 4000 Ada Generation data sheets: "Tensor Performance" is FP8 with sparsity, four times this
    # (1457.0, 1044.4 and 327.6)
    (r"RTX 6000 Ada Generation", 364.25, _BOTH),
    (r"RTX 5000 Ada Generation", 261.1, _BOTH),
    (r"RTX 4000 Ada Generation", 81.9, _BOTH),
)


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Dense peak TFLOP/s of a GPU as nvidia-smi names it, in "bf16" or "fp16"; None where it is not known.

    fp32 has none: whether it runs on tensor cores, as TF32, is a setting that records do not hold.
    """
    name = device_name.strip().removeprefix("NVIDIA ").strip()
    for pattern, tflops, precisions in _PEAKS:
        if re.fullmatch(pattern, name):
            return tflops if precision in precisions else None
    return None
