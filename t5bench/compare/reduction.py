"""How a run reduces its gradients over the data-parallel replicas: in which numbers, when, in pieces of what size."""

from dataclasses import dataclass

from t5bench.compare.comparable import setting
from t5bench.record.records import Run

# DeepSpeed's own defaults, where its JSON leaves them open (deepspeed/runtime/zero/config.py).
_DEEPSPEED_BUCKET_ELEMENTS = 500_000_000
_DEEPSPEED_NAMES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}


@dataclass(frozen=True)
class Reduction:
    """dtype is None where there is one replica and so nothing to reduce; bucket is text with its unit."""

    dtype: str | None
    overlap: bool = False
    bucket: str = ""

    def __str__(self) -> str:
        if self.dtype is None:
            return self.bucket or "none (one replica)"
        return f"{self.dtype}, {'during' if self.overlap else 'after'} backward, {self.bucket}"


def precision(run: Run) -> str:
    """bf16, fp16 or fp32."""
    return (setting(run, "PRECISION_FLAG") or "").removeprefix("--") or "fp32"


def reduction_of(run: Run) -> Reduction:
    """From the run's strategy, precision, engine and effective DeepSpeed JSON."""
    if run.layout["dp"] == 1:
        # Its two copies, on the first and the decoder's first stage, are summed even so.
        return Reduction(None, bucket="none but the tied embedding's (one replica)" if run.layout["pp"] > 1 else "")
    config = run.record.get("ds_config")
    if config:
        zero = config["zero_optimization"]
        dtype = _DEEPSPEED_NAMES.get(str(config.get("communication_data_type") or precision(run)), "unknown")
        overlap = zero.get("overlap_comm")
        if overlap is None:
            overlap = zero["stage"] == 3
        elements = int(float(zero.get("reduce_bucket_size", _DEEPSPEED_BUCKET_ELEMENTS)))
        return Reduction(dtype, bool(overlap), f"buckets of {elements / 1e6:g}M elements")
    if run.engine == "native":
        # fp32 master weights have fp32 gradients; PyTorch's DDP fills buckets of 25 MiB unless told otherwise.
        return Reduction("fp32", True, "buckets of 25 MiB")
    # Megatron's local DDP accumulates bf16's gradients in fp32, fp16's in fp16 unless told otherwise.
    told = any("--accumulate-allreduce-grads-in-fp32" in node.get("command", ()) for node in run.nodes)
    kept = precision(run) if precision(run) == "fp16" and not told else "fp32"
    return Reduction(kept, False, "one flat buffer")
