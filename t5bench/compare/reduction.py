"""How a run reduces its gradients over the data-parallel replicas: in which data type, when, and in which pieces."""

from dataclasses import dataclass

from t5bench.model.job import Zero
from t5bench.record.records import Run

_DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}  # DeepSpeed's names


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced. A single replica reduces nothing and has no dtype. bucket: text with its unit."""

    dtype: str | None
    overlap: bool = False
    bucket: str = ""

    def __str__(self) -> str:
        when = "during" if self.overlap else "after"
        return f"{self.dtype}, {when} backward, {self.bucket}" if self.dtype else self.bucket or "none (one replica)"


def reduction_of(run: Run) -> Reduction:
    """From the plan's layout, precision, engine and effective DeepSpeed JSON."""
    plan, layout = run.plan, run.layout
    if layout.dp == 1:
        # Its two copies, on the first stage and the decoder's first stage, are still summed.
        return Reduction(None, bucket="none but the tied embedding's (one replica)" if layout.pp > 1 else "")
    if plan.ds_config:
        zero = Zero.of_config(plan.ds_config)
        dtype = _DTYPES.get(zero.reduction or plan.precision, "unknown")
        return Reduction(dtype, zero.overlap, f"buckets of {zero.reduce_bucket / 1e6:g}M elements")
    if plan.engine == "native":
        # fp32 master weights have fp32 gradients; PyTorch's DDP fills buckets of 25 MiB unless told otherwise.
        return Reduction("fp32", True, "buckets of 25 MiB")
    # Megatron's local DDP accumulates bf16's gradients in fp32, fp16's in fp16 unless told otherwise.
    told = "--accumulate-allreduce-grads-in-fp32" in plan.arguments.words
    return Reduction("fp16" if plan.precision == "fp16" and not told else "fp32", False, "one flat buffer")
