"""The memory of every rank by component, as torch counts it; states follow ZeRO (https://arxiv.org/abs/1910.02054)."""

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from t5bench.model.activations import activation_bytes, logits_bytes, word_gradient
from t5bench.model.job import Job
from t5bench.model.machine import MIB, Device
from t5bench.model.parameters import layer_shapes, parameters, stage_of, tensors

FP32_GRADIENTS = 4  # bytes per parameter of the fp32 gradients that an update makes

# What a device reports as used but torch does not count: a CUDA context with its kernels, 400 to 612 MiB in public
# reports, and what the driver reserves, 462 MiB in the median of twelve public ``nvidia-smi -q`` of H100, L40S and A40.
CONTEXT, DRIVER = 500 * 10**6, 462 * MIB


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. states: between iterations. moments: what comes on top, by moment. cpu: in host memory.

    cached: blocks that the allocator keeps but cannot use at the peak. leftover: what the next forward frees.
    """

    states: Mapping[str, float]
    moments: Mapping[str, Mapping[str, float]]
    cpu: Mapping[str, float]
    cached: float = 0.0
    leftover: Mapping[str, float] = field(default_factory=dict)

    @property
    def allocated(self) -> float:
        """Between iterations."""
        return sum(self.states.values()) + sum(self.leftover.values())

    @property
    def moment(self) -> str:
        """The moment with the largest allocation."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def components(self) -> dict[str, float]:
        """Everything at the moment of the peak."""
        return dict(Counter(self.states) + Counter(self.moments[self.moment]))

    @property
    def peak(self) -> float:
        return sum(self.states.values()) + sum(self.moments[self.moment].values())

    @property
    def in_use(self) -> float:
        """What the device reports at the peak."""
        return self.peak + self.cached + CONTEXT + DRIVER


def memory_of(job: Job, stage: int = 0, device: Device | None = None) -> Memory:
    """The memory of a rank on pipeline stage `stage`. device: whose workspaces, those of an H100 unless given."""
    a, part = job.architecture, stage_of(job.architecture, job.parallel, stage)
    count, t = parameters(a, job.parallel, stage), job.parallel.tensor
    states, cpu = model_states(job, count)
    states["workspace"] = workspace(job, stage, device)
    if not (job.zero.stage or job.distributed_optimizer or job.element == 4):
        # Every parameter has a tensor of weights, one of masters and two of moments; gradients are one buffer. ZeRO and
        # Megatron's distributed optimizer have a few flat tensors, which waste next to nothing.
        sizes = [size for each in tensors(a, job.parallel, stage).values() for size in each]
        weights, masters = ([width * size for size in sizes] for width in (2, 4))
        moments_each = [width * size for size in sizes for width in job.moments]
        states["allocator"] = slack([*weights, 4 * sum(sizes), *masters, *moments_each])
    if job.dummy_gradients:
        shapes = {shape for decoder in (False, True) for shape in layer_shapes(a, t, decoder) if len(shape) == 2}
        shapes.add((a.padded_vocabulary // t, a.hidden))
        states["dummy gradients"] = float(job.element * sum(map(prod, shapes)))
    kept = activation_bytes(job, stage)
    again = kept.pop("recomputed layer", 0.0)  # by then the logits are gone
    loss, gradients = logits_bytes(job, stage)
    buffers, words = transient_states(job, count), {}
    if part.embedding and part.head and a.tied:
        # The gradient of the tied words from the head and from the decoder's embedding, and their sum. The decoder's
        # backward pass is done; an encoder still has its activations.
        words = {"encoder": kept["encoder"] * a.cross_attention, "gradients of words": 3 * word_gradient(job)}
    leftover = _leftover(job, stage, count)
    if job.parallel.virtual_stages == 1:
        # While a micro-batch is computed, the loop's variable output_tensor still has the graph of the one before, and
        # so its input with its gradient (Megatron-LM core/pipeline_parallel/schedules.py:2280-2336).
        kept["inputs of stages"] = leftover.get("inputs of stages", 0.0) * (job.micro_batches > 1)
    moments = {
        "loss": kept | buffers["forward"] | {"logits and loss": loss},
        "start of backward": kept | buffers["backward"] | {"logits and loss": gradients},
        "recomputed layer": kept | buffers["backward"] | {"recomputed layer": again},
        "embedding": words | buffers["backward"],
        "step": buffers["step"] | leftover,
    }
    return Memory(states, moments, cpu, _cached_scores(job), leftover)


def _leftover(job: Job, stage: int, count: int) -> dict[str, float]:
    """What an iteration of Megatron-LM leaves until the next one: under fp16 the optimizer's fp32 copy of gradients
    (core/optimizer/optimizer.py), and each model chunk's last input, which set_input_tensor keeps, with its gradient
    (core/pipeline_parallel/schedules.py)."""
    if job.zero.stage or not job.software.keeps_inputs:
        return {}
    a, parallel, part = job.architecture, job.parallel, stage_of(job.architecture, job.parallel, stage)
    received = (parallel.virtual_stages - (stage == 0)) * (parallel.pipeline > 1)
    tokens = job.tokens(part.decoder_layers > 0)
    if part.decoder_layers and a.cross_attention:  # the encoder's output, and from the second stage on the decoder's
        tokens = job.tokens(False) + tokens * (not part.embedding)
    copies = (job.precision == "fp16") / (parallel.data if job.distributed_optimizer else 1)
    inputs = 2 * received * tokens * a.hidden * job.element / parallel.sequence
    return {"fp32 gradients": FP32_GRADIENTS * count * copies, "inputs of stages": inputs}


def states_of(job: Job) -> dict[str, tuple[float, float]]:
    """Bytes per parameter of the states that every data-parallel rank has, and of those divided among the ranks."""
    e, kept, zero, moments = job.element, job.software, job.zero.stage, sum(job.moments)
    weights, gradients, optimizer = e, e, moments + (4 if e == 2 or zero else 0)  # with the masters
    if not zero and job.engine != "galvatron":
        gradients = 2 if job.precision == "fp16" else 4  # Megatron accumulates in fp32 under bf16, in fp16 under fp16
        if kept.cast_parameters or kept.casts:  # fp32 weights; autograd keeps autocast's 16-bit copies
            return {"weights": (4 + 2 * kept.casts, 0), "gradients": (4, 0), "optimizer": (moments, 0)}
    sizes = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    divided = {"weights": zero == 3, "gradients": zero > 1, "optimizer": zero > 0 or job.distributed_optimizer}
    return {name: (0, size) if divided[name] else (size, 0) for name, size in sizes.items()}


def model_states(job: Job, count: int) -> tuple[dict[str, float], dict[str, float]]:
    """The lasting weights, gradients and optimizer states of `count` parameters: on the GPU, and in CPU memory."""
    n, zero = job.parallel.data, job.zero
    sizes = {name: (whole + divided / n) * count for name, (whole, divided) in states_of(job).items()}
    cpu = {}
    if zero.offload_optimizer or zero.offload_parameters:
        cpu["optimizer"] = sizes.pop("optimizer") + FP32_GRADIENTS * count / n
        if zero.offload_parameters:
            cpu |= {name: sizes.pop(name) for name in ("weights", "gradients")}
    return sizes, cpu


def transient_states(job: Job, count: int) -> dict[str, dict[str, float]]:
    """What a moment adds to the states: ZeRO's buckets and gathered window, copies, the optimizer's temporaries."""
    e, n, zero = job.element, job.parallel.data, job.zero
    found: dict[str, dict[str, float]] = {"forward": {}, "backward": {}, "step": {}}
    if job.software.cast_parameters and not zero.stage and e == 2:
        found["forward"]["16-bit copies"] = found["backward"]["16-bit copies"] = e * count
    if zero.stage:
        bucket = {"reduction bucket": zero.reduce_bucket * e * (2 if zero.overlap else 1)}
        found["backward"] |= bucket
        found["step"] = bucket | {"fp32 gradients": 0 if zero.offload_optimizer else FP32_GRADIENTS * count / n}
    if zero.stage in (1, 2):
        found["step"]["flattened gradients"] = e * count / n
    if zero.stage == 3:
        window = e * min(count, zero.live_parameters, zero.reuse_distance / 2)
        found["forward"]["gathered parameters"] = found["backward"]["gathered parameters"] = window
    return found


def workspace(job: Job, stage: int = 0, device: Device | None = None) -> float:
    """Workspaces of cuBLAS, Transformer Engine and unfused attention's scores, which stay after the first iteration.

    cuBLAS has a workspace for the forward thread and one for autograd's: 32 MiB each on Hopper and under
    CUBLAS_WORKSPACE_CONFIG=:4096:8, which deterministic runs set, else 8.125 (aten/src/ATen/cuda/CublasHandlePool.cpp).
    """
    hopper = device is None or device.hopper or device.tensor > 1000  # Blackwell's are the same
    deterministic = job.engine.startswith(("megatron-core", "transformer-engine"))  # their published tests are
    found = 2 * (32 if hopper or deterministic else 8.125) * MIB
    if job.engine == "transformer-engine":
        found += (32 if hopper else 4) * MIB
    if job.software.scores_buffer:  # as large as the largest scores of a layer that the stage has
        a, part = job.architecture, stage_of(job.architecture, job.parallel, stage)
        stacks = [False] * (part.encoder_layers > 0) + [True] * (part.decoder_layers > 0)
        unfused = [a.length(own) * n for own in stacks for n, kernel in job.attentions(own) if kernel == "unfused"]
        found += job.element * job.micro_batch * a.heads / job.parallel.tensor * max(unfused, default=0)
    return found


def slack(sizes: Iterable[int]) -> int:
    """Bytes that PyTorch's allocator counts in addition to tensors that are made one after another.

    c10/cuda/CUDACachingAllocator.cpp, constants of 2.x: it rounds to 512 bytes. Blocks of up to 1 MiB come from
    segments of 2 MiB, larger ones from segments of 20 MiB, and those of 10 MiB or more get a segment each, in steps of
    2 MiB. It splits a large block only if more than 1 MiB is left over; otherwise the rest counts as allocated.
    """
    free: dict[bool, list[int]] = {True: [], False: []}  # sorted sizes of blocks, small and large
    found = 0
    for size in sizes:
        rounded = max(512, -(-size // 512) * 512)
        pool = free[small := rounded <= MIB]
        place = bisect.bisect_left(pool, rounded)
        segment = 2 * MIB if small else 20 * MIB if rounded < 10 * MIB else -(-rounded // (2 * MIB)) * 2 * MIB
        block = pool.pop(place) if place < len(pool) else segment
        left = block - rounded
        if left >= 512 if small else left > MIB:
            bisect.insort(pool, left)
            block = rounded
        found += block - size
    return found


def _cached_scores(job: Job) -> float:
    """Blocks of autocast's attention that stay cached while the loss is computed but are of no use then.

    For each score of the decoder: its bias with the mask, for self- and for cross-attention, in fp32; the score and the
    probability in 16 bits; the score in fp32 (transformers, models/t5/modeling_t5.py, T5Attention.forward).
    """
    a = job.architecture
    if job.engine != "autocast" or job.attention != "unfused" or not a.cross_attention:  # the source is T5Attention
        return 0.0
    own, *cross = (a.decoder_length * length for length in a.attended(True))
    return a.heads * job.micro_batch * (4 * own + 4 * sum(cross) + 8 * max(own, *cross))
