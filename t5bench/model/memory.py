"""The memory of every rank by component, as torch counts it.

States follow ZeRO (https://arxiv.org/abs/1910.02054); what a forward pass keeps for the backward pass follows
Korthikanti et al. (https://arxiv.org/abs/2205.05198), extended to any FFN size, cross-attention, grouped queries,
attention kernels and what software keeps.
"""

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from t5bench.model import buckets
from t5bench.model.job import Job
from t5bench.model.machine import MIB, Device
from t5bench.model.parameters import Stage, layer_shapes, parameters, stage_of, tensors
from t5bench.model.traffic import sharded_groups

FP32_GRADIENTS = 4  # bytes per parameter of the fp32 gradients that an update makes

# What a device reports as used but torch does not count: a CUDA context with its kernels, 400 to 612 MiB in public
# reports, and what the driver reserves, 462 MiB in the median of twelve public ``nvidia-smi -q`` of H100, L40S and A40.
CONTEXT, DRIVER = 500 * 10**6, 462 * MIB


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    states: Mapping[str, float]  # between iterations
    moments: Mapping[str, Mapping[str, float]]  # what comes on top, by moment
    cpu: Mapping[str, float]  # in host memory
    cached: float = 0.0  # blocks that the allocator keeps but cannot use at the peak
    leftover: Mapping[str, float] = field(default_factory=dict)  # what the next forward frees

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
    if not (job.zero.stage or job.fully_sharded or job.distributed_optimizer or job.element == 4):
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
    if job.zero.stage == 3:  # its buffer is made once (runtime/zero/stage3.py:611)
        states["reduction bucket"] = _reduction_bucket(job)
    kept = activation_bytes(job, stage)
    again = kept.pop("recomputed layer", 0.0)  # by then the logits are gone
    loss, gradients = logits_bytes(job, stage)
    buffers, words = transient_states(job, count), {}
    if part.embedding and part.head and a.tied:
        # The gradient of the tied words from the head and from the decoder's embedding, and their sum. The decoder's
        # backward pass is done; an encoder still has its activations.
        words = {"encoder": kept["encoder"] * a.cross_attention, "gradients of words": 3 * word_gradient(job)}
    leftover = _leftover(job, part, stage, count)
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
    if buckets.casts_come_last(job):
        positions = sum(tensors(a, job.parallel, stage)["embedding"][1:])
        gradients_of_copies = {"16-bit gradients": job.element * (count - positions)}
        gradients_of_words = {name: size for name, size in words.items() if name != "encoder"}
        moments["copies"] = buffers["backward"] | gradients_of_copies | gradients_of_words
    return Memory(states, moments, cpu, _cached_scores(job), leftover)


def states_of(job: Job) -> dict[str, tuple[float, float]]:
    """Bytes per parameter of the states that every data-parallel rank has, and of those divided among the ranks."""
    e, kept, zero, moments = job.element, job.software, job.zero.stage, sum(job.moments)
    if job.fully_sharded:  # fp32 parameters are the masters; there are no gradients between iterations
        return {"weights": (0, 4), "optimizer": (0, moments)}
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
    n, zero = job.parallel.states_over, job.zero
    sizes = {name: (whole + divided / n) * count for name, (whole, divided) in states_of(job).items()}
    cpu = {}
    if zero.offload_optimizer or zero.offload_parameters:
        cpu["optimizer"] = sizes.pop("optimizer") + FP32_GRADIENTS * count / n
        if zero.offload_parameters:
            cpu |= {name: sizes.pop(name) for name in ("weights", "gradients")}
    return sizes, cpu


def _reduction_bucket(job: Job) -> float:
    return job.zero.reduce_bucket * job.element * (2 if job.zero.overlap else 1)


def transient_states(job: Job, count: int) -> dict[str, dict[str, float]]:
    """What a moment adds to the states: ZeRO's buckets and gathered window, copies, the optimizer's temporaries."""
    e, n, zero = job.element, job.parallel.data, job.zero
    found: dict[str, dict[str, float]] = {"forward": {}, "backward": {}, "step": {}}
    if job.fully_sharded:
        return _fully_sharded_states(job, count)
    if job.software.cast_parameters and not zero.stage and e == 2:
        found["forward"]["16-bit copies"] = found["backward"]["16-bit copies"] = e * count
    if zero.stage:
        bucket = {"reduction bucket": _reduction_bucket(job)} if zero.stage < 3 else {}
        found["backward"] |= bucket
        found["step"] = bucket | {"fp32 gradients": 0 if zero.offload_optimizer else FP32_GRADIENTS * count / n}
    if zero.stage in (1, 2):
        found["step"]["flattened gradients"] = e * count / n
    if zero.stage == 3:
        window = e * min(count, zero.live_parameters, zero.reuse_distance / 2)
        found["forward"]["gathered parameters"] = found["backward"]["gathered parameters"] = window
    return found


def _fully_sharded_states(job: Job, count: int) -> dict[str, dict[str, float]]:
    """FSDP2's gathered parameters and gradients.

    Gathered are the root and a layer, or everything if it is kept. Whole fp32 gradients add up until the last
    micro-batch, which divides them layer by layer; with one micro-batch only the layer that is reduced is whole. The
    root's gradient is not divided before the backward pass has reached the embedding.
    """
    e, n = job.element, job.parallel.states_over
    sizes = {what: (groups, size) for what, groups, size in sharded_groups(job)}
    _, root = sizes.pop("embedding and rest")
    layer = max(size for _, size in sizes.values())
    keeps = job.fully_sharded is not None and job.fully_sharded.keeps_parameters
    gathered = {"gathered parameters": e * (count if keeps else root + layer)}
    if job.micro_batches > 1:
        added_up, gradients = 4 * count, 4 * count
    else:
        added_up, gradients = 0, 4 * (count - root) / n
    return {
        "forward": gathered | {"gradients": added_up},
        "backward": gathered | {"gradients": gradients, "reduction": 4 * layer},
        "step": {"gradients": 4 * count / n},
    }


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
    if job.engine != "autocast" or job.attention != "unfused" or not a.cross_attention:
        return 0.0
    own, cross = (a.decoder_length * length for length in a.attended(True))
    return a.heads * job.micro_batch * (4 * own + 4 * cross + 8 * max(own, cross))


def _leftover(job: Job, part: Stage, stage: int, count: int) -> dict[str, float]:
    """What an iteration of Megatron-LM leaves until the next one: under fp16 the optimizer's fp32 copy of gradients
    (core/optimizer/optimizer.py), and each model chunk's last input, which set_input_tensor keeps, with its gradient
    (core/pipeline_parallel/schedules.py)."""
    a, parallel = job.architecture, job.parallel
    if job.zero.stage or not job.software.keeps_inputs:
        return {}
    received = (parallel.virtual_stages - (stage == 0)) * (parallel.pipeline > 1)
    tokens = job.tokens(part.decoder_layers > 0)
    if part.decoder_layers and a.cross_attention:  # the encoder's output, and from the second stage on the decoder's
        tokens = job.tokens(False) + tokens * (not part.embedding)
    copies = (job.precision == "fp16") / (parallel.data if job.distributed_optimizer else 1)
    inputs = 2 * received * tokens * a.hidden * job.element / parallel.sequence
    return {"fp32 gradients": FP32_GRADIENTS * count * copies, "inputs of stages": inputs}


def layer_bytes(job: Job, decoder: bool = False) -> float:
    """What one layer keeps of one micro-batch; with full recomputation only its input."""
    a, tokens = job.architecture, job.tokens(decoder)
    if job.recompute == "full":
        return tokens * a.hidden * (job.software.stream or job.element) / job.parallel.sequence
    attentions = sum(_attention(job, decoder, place > 0, *each) for place, each in enumerate(job.attentions(decoder)))
    return attentions + _mlp(job, tokens)


def _norm(job: Job, tokens: int, readers: int = 1) -> float:
    """A norm's tensors. readers: linear layers that take its output, each with its own copy under autocast."""
    a, kept = job.architecture, job.software
    each = kept.norm_tensors * (kept.stream or job.element) + 2 * readers * kept.casts
    statistics = 8 if a.norm == "layer" else 4  # of a token: the fp32 mean and reciprocal deviation
    return tokens * (a.hidden * each + statistics) / job.parallel.sequence


def _dropped(job: Job, elements: float) -> float:
    """The mask of a dropout that tensor parallelism does not divide."""
    mask = job.software.tensor_mask if job.parallel.tensor > 1 else 1
    return elements * mask / job.parallel.sequence if job.dropout else 0.0


def _attention(job: Job, decoder: bool, cross: bool, length: int, kernel: str) -> float:
    """Norm, projections, core and dropout. length: of a sample's keys and values, the encoder's under `cross`.

    For every score, unfused attention keeps the probability and, with dropout, its mask and its value after dropout.
    """
    a, kept, e = job.architecture, job.software, job.element
    tokens, keys = job.tokens(decoder), job.micro_batch * length
    projections = e * (2 * tokens * a.query + 2 * keys * (a.query if kept.repeats_keys else a.key))
    copied = 2 * 2 * keys * a.hidden if cross and kept.casts else 0
    core, masks = 0.0, 0
    if job.recompute != "selective" and kernel == "unfused":
        probability = kept.softmax or e
        each = probability + (1 + e if job.dropout else e * (probability != e)) + kept.score_copies * e
        padded = cross or not decoder  # a decoder's own mask is causal
        core, masks = a.heads * tokens * length * each, tokens * length * (kept.keeps_masks and padded)
    elif job.recompute != "selective":
        again = kernel == "flash" and kept.copies_flash and job.micro_batch > 1
        core = 4 * a.heads * tokens + again * e * tokens * a.query
    kept_whole = copied + masks + _dropped(job, tokens * a.hidden)
    return _norm(job, tokens, readers=1 if cross else 3) + (projections + core) / job.parallel.tensor + kept_whole


def _mlp(job: Job, tokens: int) -> float:
    a, kept, e = job.architecture, job.software, job.element
    tensors = 4 - kept.fused_gate if a.gated else 2 - (a.activation == "relu")
    dropped = e + 1 if kept.mlp_dropout and job.dropout else 0
    inside = (e * tensors + dropped) * tokens * a.ffn / job.parallel.tensor
    return _norm(job, tokens, readers=1 + a.gated) + inside + _dropped(job, tokens * a.hidden)


def in_flight(job: Job, stage: int) -> int:
    """The largest number of chunks of layers between their forward and their backward pass, on a stage under 1F1B.

    Interleaved (https://arxiv.org/abs/2104.04473, section 2.2): Megatron-LM core/pipeline_parallel/schedules.py:839.
    """
    p, v = job.parallel.pipeline, job.parallel.virtual_stages
    if v > 1:
        return min(2 * (p - stage - 1) + (v - 1) * p + 1, v * job.micro_batches)
    return min(p - stage, job.micro_batches)


def activation_bytes(job: Job, stage: int = 0) -> dict[str, float]:
    """What a stage keeps of all micro-batches in flight, by component, after a forward pass and before the loss."""
    part, t = stage_of(job.architecture, job.parallel, stage), job.parallel.tensor
    chunks, v = in_flight(job, stage), job.parallel.virtual_stages
    layers = {"encoder": part.encoder_layers, "decoder": part.decoder_layers}
    found = {name: n and n * layer_bytes(job, name == "decoder") * chunks / v for name, n in layers.items()}
    found["ends of stacks"] = chunks / v * _ends(job, part) if v == 1 else _ends(job, part)
    # Of a micro-batch in flight DeepSpeed's pipeline engine also keeps its output, and its input, of which the first
    # layer has a clone. Under tensor parallelism: a slice of the output, and the first layer's own input
    # (deepspeed 0.18.3, runtime/pipe/engine.py:712-764).
    buffers = chunks * job.parallel.deepspeed * ((not part.head) / t + (stage > 0 and t == 1))
    tokens = job.tokens(part.decoder_layers > 0)
    found["pipeline's buffers"] = buffers * tokens * job.architecture.hidden * job.element
    if job.recompute != "none":  # of one layer at a time: all of it, or attention's scores
        plain, full = replace(job, recompute="none"), job.recompute == "full"
        stacks = [name == "decoder" for name, n in layers.items() if n]
        again = [layer_bytes(plain, stack) - (0 if full else layer_bytes(job, stack)) for stack in stacks]
        found["recomputed layer"] = max(again, default=0.0)
    return found


def _ends(job: Job, part: Stage) -> float:
    """Embedding dropout, final norms with their outputs, dense masks of padding, BERT's transform."""
    a, has_encoder, has_decoder = job.architecture, part.encoder_layers > 0, part.decoder_layers > 0
    tokens = has_encoder * job.tokens(False) + has_decoder * job.tokens(True)
    found = _dropped(job, tokens * a.hidden) if part.embedding else 0.0
    if a.final_norm and (part.head or (a.cross_attention and has_encoder)):
        found += _norm(job, tokens)
    if a.cross_attention and has_decoder and not has_encoder:
        found += job.tokens(False) * a.hidden * job.element  # the encoder's output, received
    if a.family == "bert" and part.head:
        found += 8 * job.tokens(False) * a.hidden  # dense, gelu and norm of the transform
    if a.family != "gpt" and "unfused" in (job.attention, job.causal_attention):
        s, d = a.encoder_length * has_encoder, a.decoder_length * has_decoder
        found += job.micro_batch * (s * s + d * d + d * a.encoder_length)
    return found


def logits_bytes(job: Job, stage: int = 0) -> tuple[float, float]:
    """What a last stage needs besides activations, while it computes the loss and while it computes head gradients.

    The gradient of the head's weight stays in the training precision until backward has reached the embedding too.
    """
    a, kept, t = job.architecture, job.software, job.parallel.tensor
    if not stage_of(a, job.parallel, stage).head:
        return 0.0, 0.0
    tokens = job.micro_batch * a.output_length
    logits = tokens * a.padded_vocabulary / t
    gradients = logits * kept.logit_gradients + word_gradient(job) + 2 * tokens * a.hidden * job.element
    return logits * ((t > 1 and kept.tensor_logits) or kept.logits), gradients


def word_gradient(job: Job) -> float:
    """The word embedding's gradient in autograd: fp32 in addition to 16 bits if parameters are cast."""
    a = job.architecture
    cast = job.software.cast_parameters and job.element == 2 and not (job.zero.stage or job.fully_sharded)
    return a.padded_vocabulary / job.parallel.tensor * a.hidden * (4 if cast else job.element)
