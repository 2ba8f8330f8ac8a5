"""What software attains of a GPU's data sheet in matrix products, as others measured it on kernels alone: with sources.

No published training (docs/*_measurements.json) sets a figure here, so all of them judge these
(packages/costmodel-evidence/EVIDENCE.md).
"""

from dataclasses import dataclass

# What set the figures below; a test asserts that no published training is from one of these.
SOURCES = {
    "openxla": "tensorflow/tensorflow at 372d578bb8 and ROCm/xla at d02afb4fc1, matmul_interpolator_data.h",
    "azure": "Azure/AI-benchmarking-guide at 8fd0c6e1bd, for GB200 and MI300X its fork samuel-bohman/... at 2b25b6966d",
    "simumax": "MooreThreads/SimuMax at 4dcaae513b, configs/system",
    "semianalysis": "https://newsletter.semianalysis.com/p/mi300x-vs-h100-vs-h200-benchmark-part-1-training",
    "stas00": "stas00/ml-engineering at 744d01e18b, compute/accelerator/README.md",
}
# OpenXLA's tables of cuBLAS: what a product of 0.1 to 17 GFLOP takes beyond its FLOPs at the best rate, which for the
# B200 is stas00's. The median of 17 products on an H100 and of 14 on a B200, which vary from 5.3 to 9.7.
START = 6.5e-6


@dataclass(frozen=True)
class AchievableRates:
    products: float
    """The share of the peak that a training's products reach in bf16, fp16, TF32 and fp32."""
    fp8: float
    """The same in fp8."""
    start: float = START
    """Seconds that a product takes besides."""


# Azure: random numbers, 10,000 products to warm up; the geometric mean of the square products of 4,096 and 8,192, in
# TFLOP/s. A100 SXM in fp16 228.0 and 253.7 of 312, divided by the share that their tiles fill (time.py); in fp8 H100
# 1,216.9 and 1,290.1 of 1,979, GB200 2,694.7 and 2,781.5 of 5,000, MI300X 1,085.4 and 1,222.9 of 2,615.
# SimuMax: the median of the bf16 products of Llama and DeepSeek layers, forward and both of backward, with random
# numbers, 183 on an A100 PCIe, likewise divided, and 514 on a B200.
# SemiAnalysis: the bf16 products of a Llama 70B, with random numbers and cold caches, MI300X 620 of 1,307 TFLOP/s. H100
# and H200 reach 720 of 989 there, but the judging sources are predicted worse with that (docs/log.md).
# For the others no benchmark of products as large as a training's was found, so they have a round figure. What a CPU
# attains is measured by the run that calibrates it.
BY_FAMILY = {
    "volta": AchievableRates(0.70, 0.70),
    "turing": AchievableRates(0.70, 0.70),
    "ampere": AchievableRates(0.76, 0.76),
    "ampere-sxm": AchievableRates(0.79, 0.79),
    "ada": AchievableRates(0.70, 0.70),
    "hopper": AchievableRates(0.70, 0.63),
    "geforce-blackwell": AchievableRates(0.70, 0.70),
    "blackwell": AchievableRates(0.485, 0.55),
    "cdna2": AchievableRates(0.70, 0.70),
    "cdna3": AchievableRates(0.47, 0.44),
    "cpu": AchievableRates(0.70, 0.70, start=0.0),
}
