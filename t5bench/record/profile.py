"""Where the time of one iteration went: a profile as numbers by category, and what they say limits it.

Kernels are told by their names, which CUDA's libraries and PyTorch choose: ``KINDS`` is the one table of rules. On a
CPU the operators stand for them, each with its own time.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MATMUL, ATTENTION, NORM, OPTIMIZER = "matrix products", "attention", "softmax, norms, dropout", "optimizer and norms"
ELEMENTWISE, EMBEDDING, COPY = "elementwise", "embeddings and losses", "memory copies"
COMMUNICATION, OTHER = "communication", "other"
# The parts of a rank's iteration, which add up to it (t5bench/run/timeline.py).
HOST, FORWARD, BACKWARD, RECOMPUTATION = "host gaps", "forward", "backward", "recomputation"
STEP, DATA, LOGGING = "optimizer and clipping", "data loading", "logging"
TRANSFER, BUBBLE, WAITING = "transfers between host and device", "pipeline bubble", "waiting for slower ranks"
AXES = ("data parallel", "tensor parallel", "pipeline parallel", "ZeRO's gathers", "all ranks")
SENDING = {axis: f"communication: {axis}" for axis in AXES}
PARTS = (HOST, FORWARD, BACKWARD, RECOMPUTATION, STEP, DATA, LOGGING, TRANSFER, BUBBLE, WAITING,
         *SENDING.values())  # fmt: skip
CATEGORIES = (MATMUL, ATTENTION, NORM, ELEMENTWISE, EMBEDDING, OPTIMIZER, COPY, COMMUNICATION, OTHER)

# The first rule that a name fits decides, so the special stand before the general.
KINDS: tuple[tuple[str, str], ...] = (
    (r"nccl|gloo|c10d::|all_?reduce|all_?gather|reduce_?scatter|deepspeed_comm", COMMUNICATION),
    # Compiled kernels are named after the operators that they prepare.
    (r"^triton_(poi|per|red|for)_", ELEMENTWISE),
    (r"^triton_(tem|mm)_", MATMUL),
    (r"flash|fmha|efficient_attention|cudnn.*(sdpa|attention)|mha_|scaled_dot_product", ATTENTION),
    (r"multi_tensor|adam|foreach|lpnorm|clip_grad", OPTIMIZER),
    (r"layer_?norm|rms_?norm|GammaBeta|softmax|dropout|triu|tril|bernoulli", NORM),
    (r"embedding|nll_loss|cross_entropy|index_?select|gather_|scatter_|indexing_backward|index_put", EMBEDDING),
    (r"nvjet|gemm|gemv|cutlass|xmma|cublas|splitK|aten::(addmm|mm|bmm|matmul|linear|addbmm|baddbmm)\b", MATMUL),
    (r"memcpy|memset|copy_?kernel|direct_copy|CatArray|aten::(copy_|cat|clone|contiguous|_to_copy|fill_|zero_)", COPY),
    (r"elementwise|reduce_kernel|triton_|fused_(add|mul|gelu|bias)|gelu|bias_|vectorized|aten::(add|mul|div|sub|sum|"
     r"pow|sqrt|where|ne|lt|masked_fill|neg|norm|mean|tanh|exp|log)", ELEMENTWISE),
)  # fmt: skip
_RULES = tuple((re.compile(pattern, re.IGNORECASE), kind) for pattern, kind in KINDS)

# Above this share of the time without a kernel, launching them is what the device waits for.
_IDLE = 0.25
# Below this share of the time in matrix products something else has the most to give.
_MOSTLY = 0.5


def category(name: str) -> str:
    """The category of a kernel (or, on a CPU, of an operator) by its name."""
    return next((kind for rule, kind in _RULES if rule.search(name)), OTHER)


@dataclass(frozen=True)
class Span:
    """One kernel or operator on the device: its begin and its own duration, in microseconds."""

    name: str
    begin: float
    duration: float


def union(spans: Iterable[Span]) -> float:
    """Microseconds in which at least one of them ran."""
    busy = reached = 0.0
    for span in sorted(spans, key=lambda span: span.begin):
        end = span.begin + span.duration
        busy += max(0.0, end - max(span.begin, reached))
        reached = max(reached, end)
    return busy


def summary(spans: Sequence[Span], *, wall_ms: float, iteration: int, device: str) -> dict[str, Any]:
    """The content of profile.json, in milliseconds; ``by_name`` begins with the name that takes longest.

    On a CPU ``busy_ms`` is the sum of the operators' own times. Categories add up to more than ``busy_ms`` where
    kernels of several streams run at once.
    """
    by_category = dict.fromkeys(CATEGORIES, 0.0)
    by_name: dict[str, list[float]] = {}
    for span in spans:
        by_category[category(span.name)] += span.duration / 1000
        by_name.setdefault(span.name, []).append(span.duration / 1000)
    busy = union(spans) if device != "cpu" else sum(span.duration for span in spans)
    return {
        "device": device,
        "iteration": iteration,
        "wall_ms": round(wall_ms, 3),
        "busy_ms": round(busy / 1000, 3),
        "kernels": len(spans),
        "by_category": {kind: round(ms, 3) for kind, ms in by_category.items() if ms},
        "by_name": [
            {"name": name, "category": category(name), "count": len(times), "ms": round(sum(times), 3)}
            for name, times in sorted(by_name.items(), key=lambda entry: -sum(entry[1]))
        ],
    }


def device_spans(trace: Mapping[str, Any]) -> list[Span]:
    """The kernels, copies and fills of a GPU in what ``torch.profiler.profile.export_chrome_trace`` wrote."""
    return [
        Span(event["name"], float(event["ts"]), float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def limits(profile: Mapping[str, Any]) -> str:
    """One sentence about what an iteration with this profile waits for.

    Profiling makes launches slower, so a device that waits a little may not wait without it.
    """
    wall, busy = profile["wall_ms"], profile["busy_ms"]
    kinds = Counter(profile["by_category"])
    if not wall or not kinds:
        return "nothing was profiled"
    total = sum(kinds.values())
    shares = ", ".join(f"{kind} {ms / total:.0%}" for kind, ms in kinds.most_common(3))
    if profile["device"] == "cpu":
        return f"operators on the CPU: {shares}"
    idle, launches = max(0.0, 1 - busy / wall), profile["kernels"]
    if idle > _IDLE:
        return f"the GPU has nothing to do {idle:.0%} of the time: launching {launches} kernels; then {shares}"
    matmul = (kinds[MATMUL] + kinds[ATTENTION]) / total
    what, share = "matrix products and attention", matmul
    if matmul <= _MOSTLY:
        what, share = "what moves memory and does no matrix products", 1 - matmul
    return f"{what}, {share:.0%} of the GPU's time; {shares}; idle {idle:.0%}"
