"""The memory of every rank by component, as torch counts it.

States follow ZeRO (https://arxiv.org/abs/1910.02054); what a forward pass keeps for the backward pass follows
Korthikanti et al. (https://arxiv.org/abs/2205.05198), extended to any FFN size, cross-attention, grouped queries,
attention kernels and what software keeps.
"""

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

from t5bench.costmodel import buckets
from t5bench.costmodel.job import Job
from t5bench.costmodel.machine import MIB, Device
from t5bench.costmodel.parameters import Stage, layer_shapes, parameters, stage_of, tensors
from t5bench.costmodel.schedule import GPIPE, ZERO_BUBBLE, Step, fullest_steps
from t5bench.costmodel.traffic import sharded_groups

FP32_GRADIENTS = 4  # bytes per parameter of the fp32 gradients that an update makes

# What a device reports as used but torch does not count: a CUDA context with its kernels, 400 to 612 MiB in public
# reports, and what the driver reserves, 462 MiB in the median of twelve public ``nvidia-smi -q`` of H100, L40S and A40.
CONTEXT = 500 * 10**6
DRIVER = 462 * MIB
# Whether a job runs or runs out of memory. These three were set on 354 published verdicts of Llamas on A100s, 188 that
# ran and 166 that did not (packages/costmodel-evidence/EVIDENCE.md). Blocks come and go in other orders and sizes, so
# the allocator cannot use a share of what an iteration adds to the states; half of the jobs run that need HALF_RUN of
# the device's memory, and STEEPNESS says how quickly that changes around it.
FRAGMENTATION = 0.10
HALF_RUN = 0.932
STEEPNESS = 17.0
SURE = 0.9
"""The chance from which on a layout is said to fit surely, or surely not."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    states: Mapping[str, float]
    """Between iterations."""
    moments: Mapping[str, Mapping[str, float]]
    """What comes on top, by moment."""
    cpu: Mapping[str, float]
    """In host memory."""
    cached: float = 0.0
    """Blocks that the allocator keeps but cannot use at the peak."""
    leftover: Mapping[str, float] = field(default_factory=dict)
    """What the next forward pass frees."""

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
    def needed(self) -> float:
        """What the device must have: what is in use, and what the allocator loses between blocks at the peak."""
        return self.in_use + FRAGMENTATION * sum(self.moments[self.moment].values())

    @property
    def in_use(self) -> float:
        """What the device reports at the peak."""
        return self.peak + self.cached + CONTEXT + DRIVER


def chance_to_fit(needed: float, size: int) -> float:
    """The chance that a job that needs so many bytes runs on a device of this size: a logistic curve in the logarithm
    of their ratio."""
    return 1 / (1 + (needed / (HALF_RUN * size)) ** STEEPNESS)


def memory_of(job: Job, stage: int = 0, device: Device | None = None) -> Memory:
    """The memory of a rank on pipeline stage `stage`. device: whose workspaces, those of an H100 unless given."""
    part = stage_of(job.architecture, job.parallel, stage)
    count = parameters(job.architecture, job.parallel, stage)
    states, cpu = _lasting(job, stage, count, device)
    leftover = _leftover(job, part, stage, count)
    moments = _moments(job, stage, count, leftover)
    return Memory(states, moments, cpu, _cached_scores(job), leftover)


def stages_to_compare(job: Job) -> list[int]:
    """The pipeline stages among which is the one that needs most memory.

    Of stages that hold and receive the same, the first keeps the most micro-batches, unless one has several chunks of
    the model or puts off gradients of weights.
    """
    parallel = job.parallel
    stages = range(parallel.pipeline)
    if parallel.virtual_stages > 1 or parallel.schedule == ZERO_BUBBLE:
        return list(stages)
    parts = [stage_of(job.architecture, parallel, stage) for stage in stages]
    first: dict[tuple[Stage, Stage | None], int] = {}
    for stage in stages:
        first.setdefault((parts[stage], parts[stage - 1] if stage else None), stage)
    return list(first.values())


def _lasting(job: Job, stage: int, count: int, device: Device | None) -> tuple[dict[str, float], dict[str, float]]:
    """What `count` parameters keep between iterations: on the GPU, and in CPU memory."""
    states, cpu = model_states(job, count)
    states["workspace"] = workspace(job, stage, device)
    has_flat_states = job.zero.stage or job.fully_sharded or job.distributed_optimizer
    if not has_flat_states and job.element < 4:
        states["allocator"] = _slack_of_states(job, stage)
    if job.dummy_gradients:
        states["dummy gradients"] = _dummy_gradients(job)
    if job.zero.stage == 3:  # its buffer is made once (runtime/zero/stage3.py:611)
        states["reduction bucket"] = _reduction_bucket(job)
    return states, cpu


def _slack_of_states(job: Job, stage: int) -> int:
    """What the allocator adds to the states of a model in 16 bits.

    Every parameter has a tensor of weights, one of masters and two of moments; gradients are one buffer. ZeRO and
    Megatron's distributed optimizer have a few flat tensors, which waste next to nothing.
    """
    sizes: list[int] = []
    for group in tensors(job.architecture, job.parallel, stage).values():
        sizes += group
    return _slack_of_tensors(tuple(sizes), job.moments)


@lru_cache(maxsize=1024)  # layouts share their stages
def _slack_of_tensors(sizes: tuple[int, ...], widths: tuple[int, ...]) -> int:
    """sizes: elements of each parameter. widths: bytes of an element of each of the optimizer's moments."""
    weights = [2 * size for size in sizes]
    gradients = [4 * sum(sizes)]
    masters = [4 * size for size in sizes]
    moments = [width * size for size in sizes for width in widths]
    return slack([*weights, *gradients, *masters, *moments])


def _dummy_gradients(job: Job) -> float:
    """One gradient of each shape of weight."""
    a = job.architecture
    tensor = job.parallel.tensor
    shapes = {(a.padded_vocabulary // tensor, a.hidden)}
    for is_decoder in (False, True):
        shapes |= {shape for shape in layer_shapes(a, tensor, is_decoder) if len(shape) == 2}
    return float(job.element * sum(prod(shape) for shape in shapes))


def _moments(job: Job, stage: int, count: int, leftover: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """What comes on top of the states at each moment of an iteration that may be its peak."""
    chunks = list(job.parallel.chunks_of(stage))
    kept = [_of_a_micro_batch(job.apart, chunk) for chunk in chunks]
    in_work = [one | {"logits that wait": 0.0} for one in kept]
    loss = []
    start = []
    for chunk, one in zip(chunks, in_work, strict=True):
        at_loss, at_start = logits_bytes(job.apart, chunk)
        loss.append(one | {"logits and loss": at_loss})
        start.append(one | {"logits and loss": at_start} | _start_of_backward(job.apart, chunk))
    recomputed = {"recomputed layer": _recomputed_layer(job, stage)}  # by then the logits are gone
    copies = {"16-bit copies": sum(_copies(job.apart, chunk) for chunk in chunks)}
    transient = transient_states(job, count)
    forward = transient["forward"] | copies
    backward = transient["backward"] | copies
    in_layers = transient.get("layers", transient["backward"]) | copies
    at_end = transient.get("end", transient["backward"]) | copies
    waiting: dict[str, float] = {}
    if job.parallel.virtual_stages == 1:
        # While a micro-batch is computed, the loop's variable output_tensor still has the graph of the one before, and
        # so its input with its gradient (Megatron-LM core/pipeline_parallel/schedules.py:2280-2336).
        waiting["inputs of stages"] = leftover.get("inputs of stages", 0.0) if job.micro_batches > 1 else 0.0
    forward_passes = _fullest(job, stage, "F")
    backward_passes = _fullest(job, stage, "B")
    put_off = [_put_off(job.apart, chunk) for chunk in chunks]
    ends = [_end_of_backward(job.apart, chunk, one["encoder"]) for chunk, one in zip(chunks, kept, strict=True)]
    if job.parallel.puts_off_weights(stage):
        if job.recompute == "full":  # in the end the layers' inputs are gone, and this has come instead
            in_work = put_off
        ends = [end | own for end, own in zip(ends, put_off, strict=True)]
    moments = {
        "loss": _largest(forward_passes, kept, loss, put_off) | waiting | forward,
        "start of backward": _largest(backward_passes, kept, start, put_off) | waiting | backward,
        "layers": _largest(backward_passes, kept, in_work, put_off) | waiting | in_layers | recomputed,
        "embedding": _largest(backward_passes, kept, ends, put_off) | at_end,
        "step": transient["step"] | leftover,
    }
    if job.parallel.puts_off_weights(stage):
        inside = [one | _inside_backward(job, chunk) for chunk, one in zip(chunks, in_work, strict=True)]
        moments["layer's backward"] = _largest(backward_passes, kept, inside, put_off) | backward | recomputed
        weights = _fullest(job, stage, "W")
        gradient = [{"gradient of a weight": _largest_weight(job, stage)}]
        moments["weights"] = _largest(weights, kept, gradient, put_off) | backward
    if "reduction" in transient:  # after the last backward pass
        moments["reduction"] = transient["reduction"]
    if buckets.casts_come_last(job):
        later_passes = _fullest(job, stage, "B", later=True)
        ends = [_end_of_later_backward(job.apart, chunk) | own for chunk, own in zip(chunks, put_off, strict=True)]
        moments["copies"] = _largest(later_passes, kept, ends, put_off) | at_end
    return moments


def _fullest(job: Job, stage: int, way: str, later: bool = False) -> tuple[Step, ...]:
    parallel = job.parallel
    chunks = parallel.virtual_stages
    return fullest_steps(way, stage, parallel.pipeline, job.micro_batches, chunks, parallel.schedule, later)


def _largest(
    during: Iterable[Step],
    waiting: Sequence[Mapping[str, float]],
    in_work: Sequence[Mapping[str, float]],
    put_off: Sequence[Mapping[str, float]],
) -> dict[str, float]:
    """What a stage keeps in the one of the steps in which that is most, by component.

    waiting: by chunk, what it keeps of a micro-batch between its forward and its backward pass. in_work: of the
    micro-batch of the step instead. put_off: of one whose gradients of weights are still to be computed, that of a
    step that does so included.
    """
    sizes = [sum(one.values()) for one in waiting]
    put_off_sizes = [sum(one.values()) for one in put_off]
    own_sizes = [sum(one.values()) for one in in_work]

    def size_in(step: Step) -> float:
        own = own_sizes[step.chunk]
        if step.way != "W":
            own -= sizes[step.chunk]
        if len(sizes) == 1:
            return own + step.kept[0] * sizes[0] + step.put_off[0] * put_off_sizes[0]
        kept = sum(count * size for count, size in zip(step.kept, sizes, strict=True))
        return own + kept + sum(count * size for count, size in zip(step.put_off, put_off_sizes, strict=True))

    fullest = max(during, key=size_in)
    found = dict(in_work[fullest.chunk])
    for chunk, one in enumerate(waiting):
        others = fullest.kept[chunk] - (1 if chunk == fullest.chunk and fullest.way != "W" else 0)
        for name, size in one.items():
            found[name] = found.get(name, 0.0) + others * size
        for name, size in put_off[chunk].items():
            found[name] = found.get(name, 0.0) + fullest.put_off[chunk] * size
    return found


def _start_of_backward(job: Job, chunk: int) -> dict[str, float]:
    """What a chunk of the native engine that computes no loss adds: the gradient that it has received, and one of the
    last feed-forward block. The gradient of GELU's output takes the output's place; then comes that of the weight,
    which in the first micro-batch becomes fp32 at once, or that of GELU's input.
    """
    a = job.architecture
    part = stage_of(a, job.parallel, chunk)
    if job.engine != "native" or part.head:
        return {}
    weight = a.hidden * (job.element + (4 if job.casts_weights else 0))
    if job.parallel.puts_off_weights(chunk):
        weight = 0
    gelu_input = job.tokens(part.decoder_layers > 0) * job.element
    first = max(weight, gelu_input) * a.ffn / job.parallel.tensor
    return {"messages": _messages(job, chunk)[1], "first gradients": first}


def _end_of_backward(job: Job, chunk: int, encoder: float) -> dict[str, float]:
    """What a chunk has of a micro-batch while the words get their gradient. encoder: bytes of its activations."""
    a = job.architecture
    part = stage_of(a, job.parallel, chunk)
    received, sent = _messages(job, chunk)
    found = {"messages": 2 * (received + sent)}
    if job.parallel.puts_off_weights(chunk) and _reads_what_it_received(job, part):
        found["messages"] -= received  # it is part of what is put off
    if not part.embedding:
        return found
    if part.head and a.tied:
        # The gradient of the tied words from the head and from the decoder's embedding, and their sum. The decoder's
        # backward pass is done; an encoder still has its activations.
        found["encoder"] = encoder if a.cross_attention else 0.0
        found["gradients of words"] = 3 * word_gradient(job)
    else:
        found["gradients of words"] = word_gradient(job)
    return found


def _end_of_later_backward(job: Job, chunk: int) -> dict[str, float]:
    """The same where the gradients of all 16-bit copies wait for the end, when one after the other becomes fp32."""
    a = job.architecture
    part = stage_of(a, job.parallel, chunk)
    by_part = tensors(a, job.parallel, chunk)
    gradients = _copies(job, chunk)
    layers = [*by_part["encoder"], *by_part["decoder"]]
    if job.parallel.puts_off_weights(chunk):
        gradients -= job.element * sum(buckets.weights_put_off(job, chunk))
        layers = buckets.vectors_of_layers(job, chunk)
    if part.embedding and part.head and a.tied and not part.encoder_layers:
        # The head's of the words is fp32 by now. With an encoder it waits until both embeddings' are added up.
        gradients -= job.element * by_part["embedding"][0]
    largest = max([*layers, *by_part["head"]])
    found = _end_of_backward(job, chunk, encoder=0.0)
    found["gradients of words"] = max(found.get("gradients of words", 0.0), 4 * largest)
    return found | {"16-bit gradients": gradients}


def _put_off(job: Job, chunk: int) -> dict[str, float]:
    """What a zero-bubble schedule keeps of a micro-batch after its backward pass: inputs of linear layers and the
    gradients of their outputs, from which the gradients of their weights are computed. Nothing under other schedules.
    """
    a = job.architecture
    if not job.parallel.puts_off_weights(chunk):
        return {}
    part = stage_of(a, job.parallel, chunk)
    size = 0.0
    for is_decoder, layers in ((False, part.encoder_layers), (True, part.decoder_layers)):
        if layers:
            size += layers * _inputs_and_gradients(job, is_decoder)
    if a.cross_attention and part.decoder_layers:  # the encoder's output, which all layers read
        tokens = job.tokens(False)
        if _reads_what_it_received(job, part) and not part.embedding:
            tokens += job.tokens(True)
        size += tokens * a.hidden * job.element
    return {"put off": size}


def _reads_what_it_received(job: Job, part: Stage) -> bool:
    """Whether a stage's cross-attention reads the tensor that it has received, not a copy of the part behind the
    decoder's hidden states."""
    return job.architecture.cross_attention and part.decoder_layers > 0 and (part.embedding or job.micro_batch == 1)


def _inputs_and_gradients(job: Job, decoder: bool) -> float:
    """The inputs of a layer's linear layers and the gradients of their outputs, without the encoder's output."""
    a = job.architecture
    tokens = job.tokens(decoder)
    whole = 0
    divided = 0
    for length, _ in job.attentions(decoder):
        whole += 2 * tokens * a.hidden  # the query's input, the output's gradient
        divided += 2 * tokens * a.query  # context, the query's gradient
        divided += 2 * job.micro_batch * length * a.keys_of_all(job.parallel.tensor)
    whole += 2 * tokens * a.hidden
    divided += 2 * tokens * a.ffn
    return job.element * (whole + divided / job.parallel.tensor)


def _inside_backward(job: Job, chunk: int) -> dict[str, float]:
    """What the backward pass of a layer needs besides activations, where these stay because weights are put off.

    In the feed-forward block: the gradients of its output, of GELU's output and of GELU's input. In attention: the
    gradients of the residual stream and of the block's output, of context, query, key and value.
    """
    a = job.architecture
    part = stage_of(a, job.parallel, chunk)
    t = job.parallel.tensor
    largest = 0.0
    for is_decoder, layers in ((False, part.encoder_layers), (True, part.decoder_layers)):
        if not layers:
            continue
        tokens = job.tokens(is_decoder)
        largest = max(largest, tokens * a.hidden + 2 * tokens * a.ffn / t)
        for length, _ in job.attentions(is_decoder):
            keys = job.micro_batch * length
            largest = max(largest, 2 * tokens * a.hidden + (2 * tokens * a.query + 2 * keys * a.keys_of_all(t)) / t)
    received = 0.0 if part.head else _messages(job, chunk)[1]
    return {"messages": received, "gradients of a layer": job.element * largest}


def _largest_weight(job: Job, stage: int) -> float:
    """Bytes of the largest gradient that a zero-bubble schedule puts off: in 16 bits it becomes fp32."""
    width = job.element + (4 if job.casts_weights else 0)
    return float(width * max(buckets.weights_put_off(job, stage)))


def _copies(job: Job, chunk: int) -> float:
    """Bytes of the 16-bit copies of a chunk's fp32 weights, and of their gradients.

    The tables of an embedding are read in fp32, and only what is read is cast; a head needs a copy of its words.
    """
    if not job.casts_weights:
        return 0.0
    by_part = tensors(job.architecture, job.parallel, chunk)
    tables = by_part["embedding"]
    if stage_of(job.architecture, job.parallel, chunk).head:
        tables = tables[1:]
    return job.element * (parameters(job.architecture, job.parallel, chunk) - sum(tables))


def states_of(job: Job) -> dict[str, tuple[float, float]]:
    """Bytes per parameter of the states that every data-parallel rank has, and of those divided among the ranks."""
    e = job.element
    zero = job.zero.stage
    moments = sum(job.moments)
    if job.fully_sharded:  # fp32 parameters are the masters; there are no gradients between iterations
        return {"weights": (0, 4), "optimizer": (0, moments)}
    if not zero and job.engine != "galvatron":
        software = job.software
        if software.cast_parameters or software.casts:
            # fp32 weights, which need no masters; autograd keeps autocast's 16-bit copies
            copies = 2 if software.casts else 0
            gradients = 0 if job.forgets_gradients else 4
            return {"weights": (4 + copies, 0), "gradients": (gradients, 0), "optimizer": (moments, 0)}
    gradients = e
    if not zero and job.engine != "galvatron":
        gradients = 2 if job.precision == "fp16" else 4  # Megatron accumulates in fp32 under bf16, in fp16 under fp16
    masters = 4 if e == 2 or zero else 0
    sizes = {"weights": e, "gradients": gradients, "optimizer": moments + masters}
    is_divided = {
        "weights": zero == 3,
        "gradients": zero > 1,
        "optimizer": zero > 0 or job.distributed_optimizer,
    }
    return {name: (0, size) if is_divided[name] else (size, 0) for name, size in sizes.items()}


def model_states(job: Job, count: int) -> tuple[dict[str, float], dict[str, float]]:
    """The lasting weights, gradients and optimizer states of `count` parameters: on the GPU, and in CPU memory."""
    n = job.parallel.states_over
    zero = job.zero
    on_gpu = {name: (whole + divided / n) * count for name, (whole, divided) in states_of(job).items()}
    on_cpu: dict[str, float] = {}
    if zero.offload_optimizer or zero.offload_parameters:
        on_cpu["optimizer"] = on_gpu.pop("optimizer") + FP32_GRADIENTS * count / n
    if zero.offload_parameters:
        on_cpu["weights"] = on_gpu.pop("weights")
        on_cpu["gradients"] = on_gpu.pop("gradients")
    return on_gpu, on_cpu


def _reduction_bucket(job: Job) -> float:
    return job.zero.reduce_bucket * job.element * (2 if job.zero.overlap else 1)


def transient_states(job: Job, count: int) -> dict[str, dict[str, float]]:
    """What a moment adds to the states: ZeRO's buckets and gathered window, copies, the optimizer's temporaries.

    Without "layers" and "end", these are as "backward", its start.
    """
    if job.fully_sharded:
        return _fully_sharded_states(job, count)
    if job.forgets_gradients:
        return _forgotten_gradients(job, count)
    e = job.element
    n = job.parallel.data
    zero = job.zero
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    step: dict[str, float] = {}
    if zero.stage in (1, 2):
        backward["reduction bucket"] = step["reduction bucket"] = _reduction_bucket(job)
    if zero.stage:
        step["fp32 gradients"] = 0 if zero.offload_optimizer else FP32_GRADIENTS * count / n
    if zero.stage in (1, 2):
        step["flattened gradients"] = e * count / n
    if zero.stage == 3:
        window = e * min(count, zero.live_parameters, zero.reuse_distance / 2)
        forward["gathered parameters"] = backward["gathered parameters"] = window
    if job.reduces_once:
        forward["whole gradients"] = backward["whole gradients"] = e * count
        reduction = backward
        backward = {name: size for name, size in backward.items() if name != "reduction bucket"}
        return {"forward": forward, "backward": backward, "reduction": reduction, "step": step}
    return {"forward": forward, "backward": backward, "step": step}


def _fully_sharded_states(job: Job, count: int) -> dict[str, dict[str, float]]:
    """FSDP2's gathered parameters and gradients.

    Gathered are the root and a layer, or everything if it is kept; a backward pass gathers the next layer, too, while
    it is in one. Whole fp32 gradients add up until the last micro-batch, which divides them layer by layer. The root's
    are not divided before the backward pass has reached the embedding.
    """
    n = job.parallel.states_over
    sizes = {what: size for what, _, size in sharded_groups(job)}
    root = sizes.pop("embedding and rest")
    layer = max(sizes.values())
    keeps_parameters = job.fully_sharded is not None and job.fully_sharded.keeps_parameters
    gathered = {"gathered parameters": job.element * (count if keeps_parameters else root + layer)}
    next_one = 0 if keeps_parameters or n == 1 else job.element * layer  # one GPU copies a layer when it comes
    words = {"gradients of words": word_gradient(job)}
    reduction = _reduction_of_a_layer(job, layer)
    divided = 4 * (count - root) / n
    if job.micro_batches > 1:
        added_up = 4 * count
        at_end: dict[str, float] = {"gradients": 4 * count}
        whole = 4 * root
    else:
        added_up = 0
        at_end = {"gradients": divided, "reduction": 4 * layer}
        whole = job.element * root
    return {
        "forward": gathered | {"gradients": added_up},
        "backward": gathered | {"gradients": added_up},
        "layers": gathered | words | {"gradients": added_up, "next layer": next_one, "reduction": reduction},
        "end": gathered | at_end,
        "reduction": {"gradients": divided + whole, "reduction": 4 * root},
        "step": {"gradients": 4 * count / n},
    }


def _reduction_of_a_layer(job: Job, layer: int) -> float:
    """What FSDP2 adds to the start of the last layer's backward pass, whose activations are gone then: in its
    reduction, or in the layer before it. layer: elements.

    A reduction copies the gradients, and keeps the copy until the next one. With it stay this rank's part of the sum,
    and the gradients of the layer in work, which otherwise take the place of the layer's gathered parameters.
    """
    activations = layer_bytes(job, decoder=job.architecture.decoder_layers > 0)
    copy = 4 * layer
    own = job.element * layer
    in_next = copy + copy / job.parallel.states_over + own - 2 * activations
    if job.micro_batches > 1:
        in_next -= copy  # which replaces what had been added up
    if job.fully_sharded is not None and job.fully_sharded.keeps_parameters:
        in_next -= own  # the first layer's are freed
    return max(0.0, copy - activations, in_next)


def _forgotten_gradients(job: Job, count: int) -> dict[str, dict[str, float]]:
    """Gradients that are not there before an iteration's first backward pass: of one micro-batch, they come while its
    activations go."""
    added_up = 0 if job.micro_batches == 1 else 4 * count
    at_end = 4 * count
    if job.micro_batches == 1:  # those of the words are counted where they come
        at_end -= word_gradient(job)
    return {
        "forward": {"gradients": added_up},
        "backward": {"gradients": added_up},
        "end": {"gradients": at_end},
        "step": {"gradients": 4 * count},
    }


def workspace(job: Job, stage: int = 0, device: Device | None = None) -> float:
    """Workspaces of cuBLAS, Transformer Engine and unfused attention's scores, which stay after the first iteration.

    cuBLAS has a workspace for the forward thread and one for autograd's: 32 MiB each on Hopper and under
    CUBLAS_WORKSPACE_CONFIG=:4096:8, which deterministic runs set, else 8.125 (aten/src/ATen/cuda/CublasHandlePool.cpp).
    """
    hopper = device is None or device.hopper or device.tensor > 1000  # Blackwell's are the same
    is_deterministic = job.engine.startswith(("megatron-core", "transformer-engine"))  # their published tests are
    size = 2 * (32 if hopper or is_deterministic else 8.125) * MIB
    if job.engine == "transformer-engine":
        size += (32 if hopper else 4) * MIB
    if job.software.scores_buffer:
        size += _scores_buffer(job, stage)
    return size


def _scores_buffer(job: Job, stage: int) -> float:
    """As large as the largest scores of a layer that the stage has."""
    a = job.architecture
    part = stage_of(a, job.parallel, stage)
    largest = 0
    for is_decoder, layers in ((False, part.encoder_layers), (True, part.decoder_layers)):
        if not layers:
            continue
        for length, kernel in job.attentions(is_decoder):
            if kernel == "unfused":
                largest = max(largest, a.length(is_decoder) * length)
    return job.element * job.micro_batch * a.heads / job.parallel.tensor * largest


def slack(sizes: Iterable[int]) -> int:
    """Bytes that PyTorch's allocator counts in addition to tensors that are made one after another.

    c10/cuda/CUDACachingAllocator.cpp, constants of 2.x: it rounds to 512 bytes. Blocks of up to 1 MiB come from
    segments of 2 MiB, larger ones from segments of 20 MiB, and those of 10 MiB or more get a segment each, in steps of
    2 MiB. It splits a large block only if more than 1 MiB is left over; otherwise the rest counts as allocated.
    """
    free_small: list[int] = []  # sorted sizes of blocks
    free_large: list[int] = []
    wasted = 0
    for size in sizes:
        rounded = max(512, _round_up(size, 512))
        is_small = rounded <= MIB
        free = free_small if is_small else free_large
        place = bisect.bisect_left(free, rounded)
        block = free.pop(place) if place < len(free) else _segment(rounded)
        left = block - rounded
        is_split = left >= 512 if is_small else left > MIB
        if is_split:
            bisect.insort(free, left)
            block = rounded
        wasted += block - size
    return wasted


def _segment(rounded: int) -> int:
    """Bytes that the allocator asks the device for, to serve a block of this size."""
    if rounded <= MIB:
        return 2 * MIB
    if rounded < 10 * MIB:
        return 20 * MIB
    return _round_up(rounded, 2 * MIB)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _cached_scores(job: Job) -> float:
    """Blocks of autocast's attention that stay cached while the loss is computed but are of no use then.

    For each score of the decoder: its bias with the mask, for self- and for cross-attention, in fp32; the score and the
    probability in 16 bits; the score in fp32 (transformers, models/t5/modeling_t5.py, T5Attention.forward).
    """
    a = job.architecture
    if job.engine != "autocast" or job.attention != "unfused" or not a.cross_attention or a.merged_attention:
        return 0.0
    self_scores, cross_scores = (a.decoder_length * length for length in a.attended(True))
    largest = max(self_scores, cross_scores)
    return a.heads * job.micro_batch * (4 * self_scores + 4 * cross_scores + 8 * largest)


def _leftover(job: Job, part: Stage, stage: int, count: int) -> dict[str, float]:
    """What an iteration of Megatron-LM leaves until the next one: under fp16 the optimizer's fp32 copy of gradients
    (core/optimizer/optimizer.py), and each model chunk's last input, which set_input_tensor keeps, with its gradient
    (core/pipeline_parallel/schedules.py)."""
    if job.zero.stage or not job.software.keeps_inputs:
        return {}
    a = job.architecture
    parallel = job.parallel
    copies = 0.0  # of an fp32 gradient
    if job.precision == "fp16":
        copies = 1 / (parallel.data if job.distributed_optimizer else 1)
    received = 0  # inputs of model chunks; the first chunk of the model has none
    if parallel.pipeline > 1:
        received = parallel.virtual_stages - (1 if stage == 0 else 0)
    tokens = job.tokens(part.decoder_layers > 0)
    if part.decoder_layers and a.cross_attention:  # the encoder's output, and from the second stage on the decoder's
        tokens = job.tokens(False) + (0 if part.embedding else tokens)
    inputs = 2 * received * tokens * a.hidden * job.element / parallel.sequence
    return {"fp32 gradients": FP32_GRADIENTS * count * copies, "inputs of stages": inputs}


def layer_bytes(job: Job, decoder: bool = False) -> float:
    """What one layer keeps of one micro-batch; with full recomputation only its input."""
    tokens = job.tokens(decoder)
    if job.recompute == "full":
        width = job.software.stream or job.element
        divided = job.parallel.tensor if job.partitions_inputs else job.parallel.sequence
        return tokens * job.architecture.hidden * width / divided
    attentions = 0.0
    for place, (length, kernel) in enumerate(job.attentions(decoder)):
        attentions += _attention(job, decoder, is_cross=place > 0, length=length, kernel=kernel)
    return attentions + _mlp(job, tokens)


def _norm(job: Job, tokens: int, readers: int = 1) -> float:
    """A norm's tensors.

    readers: linear layers that take its output, each with its own copy under autocast. Without any the output is added
    to the residual stream and not kept.
    """
    a = job.architecture
    software = job.software
    tensors = software.norm_tensors if readers else software.norm_tensors - 1
    element = tensors * (software.stream or job.element)
    if software.casts:
        element += 2 * readers
    if job.has_eager_norms and readers:
        element += software.eager_norm_bytes
    statistics = 8 if a.norm == "layer" else 4  # of a token: the fp32 mean and reciprocal deviation
    return tokens * (a.hidden * element + statistics) / job.parallel.sequence


def _post_norm(job: Job, tokens: int) -> float:
    return _norm(job, tokens, readers=0) if job.architecture.post_norms else 0.0


def _query_key_norms(job: Job, tokens: int, keys: int) -> float:
    """The inputs of the norms of queries and keys, and their statistics; attention keeps the outputs."""
    a = job.architecture
    if not a.query_key_norms:
        return 0.0
    columns_of_keys = a.keys_of_all(job.parallel.tensor)
    inputs = (job.software.norm_tensors - 1) * job.element * (tokens * a.query + keys * columns_of_keys)
    statistics = (8 if a.norm == "layer" else 4) * (tokens * a.heads + keys * columns_of_keys // a.head_size)
    return inputs + statistics


def _unrotated(job: Job, tokens: int, keys: int) -> float:
    """Queries and keys before they were rotated, which share their memory with the values; a norm keeps them anyway."""
    a = job.architecture
    if a.positions != "rotary" or not job.software.rotates_apart or a.query_key_norms:
        return 0.0
    queries = tokens * a.query if a.kv_heads == a.heads else 0  # grouped ones have a projection of their own
    return job.element * (queries + keys * a.keys_of_all(job.parallel.tensor))


def _dropped(job: Job, elements: float) -> float:
    """The mask of a dropout that tensor parallelism does not divide."""
    if not job.dropout:
        return 0.0
    mask = job.software.tensor_mask if job.parallel.tensor > 1 else 1
    return elements * mask / job.parallel.sequence


def _attention(job: Job, decoder: bool, is_cross: bool, length: int, kernel: str) -> float:
    """Norm, projections, core and dropout. length: of a sample's keys and values, the encoder's if `is_cross`."""
    a = job.architecture
    software = job.software
    tokens = job.tokens(decoder)
    keys = job.micro_batch * length
    width_of_keys = a.query if software.repeats_keys else a.keys_of_all(job.parallel.tensor)
    projections = job.element * (2 * tokens * a.query + 2 * keys * width_of_keys)
    divided = projections + _query_key_norms(job, tokens, keys) + _attention_core(job, tokens, length, kernel)
    if not is_cross:
        divided += _unrotated(job, tokens, keys)
    encoder_copies = 2 * 2 * keys * a.hidden if is_cross and software.casts else 0
    masks = 0
    is_padded = is_cross or not decoder or a.merged_attention  # a decoder's own mask is causal
    if job.recompute != "selective" and kernel == "unfused" and software.keeps_masks and is_padded:
        masks = tokens * length
    whole = encoder_copies + masks + _dropped(job, tokens * a.hidden)
    norms = _norm(job, tokens, readers=1 if is_cross else 3) + _post_norm(job, tokens)
    return norms + divided / job.parallel.tensor + whole


def _attention_core(job: Job, tokens: int, length: int, kernel: str) -> float:
    """What lies between the projections.

    For every score, unfused attention keeps the probability and, with dropout, its mask and its value after dropout;
    the other kernels keep an fp32 statistic of each query.
    """
    a = job.architecture
    e = job.element
    if job.recompute == "selective":
        return 0.0
    if kernel == "unfused":
        probability = job.software.softmax or e
        if job.dropout:
            after_softmax = 1 + e
        else:
            after_softmax = e if probability != e else 0  # cast to the training precision
        score = probability + after_softmax + job.software.score_copies * e
        return a.heads * tokens * length * score
    statistics = 4 * a.heads * tokens
    if kernel == "flash" and job.software.copies_flash and job.micro_batch > 1:
        return statistics + e * tokens * a.query
    return statistics


def _mlp(job: Job, tokens: int) -> float:
    a = job.architecture
    software = job.software
    e = job.element
    if a.gated:
        tensors = 3 if software.fused_gate else 4
    else:
        tensors = 1 if a.activation == "relu" else 2  # relu's backward pass needs its output alone
    dropped = e + 1 if software.mlp_dropout and job.dropout else 0
    inside = (e * tensors + dropped) * tokens * a.ffn / job.parallel.tensor
    norms = _norm(job, tokens, readers=2 if a.gated else 1) + _post_norm(job, tokens)
    if a.parallel_residual:  # attention's norm keeps the same input
        norms -= tokens * a.hidden * (software.stream or job.element) / job.parallel.sequence
    return norms + inside + _dropped(job, tokens * a.hidden)


def in_flight(job: Job, stage: int) -> int:
    """The largest number of chunks of layers between their forward and their backward pass, on a stage.

    1F1B keeps as many as there are stages from here to the end, and so does zero-bubble; GPipe keeps all.

    Interleaved (https://arxiv.org/abs/2104.04473, section 2.2): Megatron-LM core/pipeline_parallel/schedules.py:839.
    """
    p = job.parallel.pipeline
    v = job.parallel.virtual_stages
    if job.parallel.schedule == GPIPE:
        return job.micro_batches
    if v > 1:
        return min(2 * (p - stage - 1) + (v - 1) * p + 1, v * job.micro_batches)
    return min(p - stage, job.micro_batches)


def activation_bytes(job: Job, stage: int = 0) -> dict[str, float]:
    """What a stage keeps of all micro-batches in flight, by component, after a forward pass and before the loss."""
    kept = [_of_a_micro_batch(job.apart, chunk) for chunk in job.parallel.chunks_of(stage)]
    in_work = [one | {"logits that wait": 0.0} for one in kept]
    put_off = [_put_off(job.apart, chunk) for chunk in job.parallel.chunks_of(stage)]
    found = _largest(_fullest(job, stage, "F"), kept, in_work, put_off)
    if job.recompute != "none":
        found["recomputed layer"] = _recomputed_layer(job, stage)
    return found


def _of_a_micro_batch(job: Job, chunk: int) -> dict[str, float]:
    """What a chunk of the model keeps of a micro-batch between its forward and its backward pass, by component.

    In the job (Job.apart) a stage has no other chunk.
    """
    part = stage_of(job.architecture, job.parallel, chunk)
    return {
        "encoder": part.encoder_layers * layer_bytes(job, False) if part.encoder_layers else 0.0,
        "decoder": part.decoder_layers * layer_bytes(job, True) if part.decoder_layers else 0.0,
        "ends of stacks": _ends(job, part),
        "pipeline's buffers": _pipeline_buffers(job, part, chunk),
        # Where the backward pass does not follow at once, as under GPipe: the exponentials of softmax, in fp32.
        "logits that wait": 4 * _logits(job) if part.head else 0.0,
    }


def _pipeline_buffers(job: Job, part: Stage, stage: int) -> float:
    """Of a micro-batch in flight DeepSpeed's pipeline engine also keeps its output, and its input, of which the first
    layer has a clone. Under tensor parallelism: a slice of the output, and the first layer's own input
    (deepspeed 0.18.3, runtime/pipe/engine.py:712-764)."""
    if not job.parallel.deepspeed:
        return 0.0
    tensor = job.parallel.tensor
    outputs = 0.0 if part.head else 1 / tensor
    inputs = 1 if stage > 0 and tensor == 1 else 0
    tokens = job.tokens(part.decoder_layers > 0)
    return (outputs + inputs) * tokens * job.architecture.hidden * job.element


def _recomputed_layer(job: Job, stage: int) -> float:
    """What is made again of one layer at a time: all of it, or attention's scores."""
    if job.recompute == "none":
        return 0.0
    part = stage_of(job.architecture, job.parallel, stage)
    not_recomputed = replace(job, recompute="none")
    largest = 0.0
    for is_decoder, layers in ((False, part.encoder_layers), (True, part.decoder_layers)):
        if layers:
            kept = 0 if job.recompute == "full" else layer_bytes(job, is_decoder)
            gathered = job.tokens(is_decoder) * job.architecture.hidden * job.element if job.partitions_inputs else 0
            largest = max(largest, layer_bytes(not_recomputed, is_decoder) - kept + gathered)
    return largest


def _ends(job: Job, part: Stage) -> float:
    """Embedding dropout, final norms with their outputs, dense masks of padding, BERT's transform."""
    a = job.architecture
    has_encoder = part.encoder_layers > 0
    has_decoder = part.decoder_layers > 0
    tokens = 0
    if has_encoder:
        tokens += job.tokens(False)
    if has_decoder:
        tokens += job.tokens(True)
    size = _dropped(job, tokens * a.hidden) if part.embedding else 0.0
    if a.final_norm and part.encoder_end:
        size += _norm(job, job.tokens(False))
    if a.final_norm and part.head and has_decoder:
        size += _norm(job, job.tokens(True))
    if a.cross_attention and has_decoder and not has_encoder:
        size += job.tokens(False) * a.hidden * job.element  # the encoder's output, received
    if job.engine == "native" and job.parallel.pipeline > 1:
        size += _passed_on(job, part)
    if a.family == "bert" and part.head:
        size += 8 * job.tokens(False) * a.hidden  # dense, gelu and norm of the transform
    if a.family != "gpt" and "unfused" in (job.attention, job.causal_attention):
        encoder = a.encoder_length if has_encoder else 0
        decoder = a.decoder_length if has_decoder else 0
        masks = encoder * encoder + decoder * decoder + decoder * a.encoder_length
        size += job.micro_batch * masks * (2 if a.window else 1)  # of global and of local layers
    return size


def _passed_on(job: Job, part: Stage) -> float:
    """What a stage of the native engine keeps of its input and output, besides what layers and norms keep.

    A decoder's output has the encoder's behind it, so from the decoder's second stage on this is a slice of the input,
    of which cross-attention needs a copy in one piece.
    """
    a = job.architecture
    width = a.hidden * job.element
    size = 0.0
    if part.decoder_layers:
        encoded = job.tokens(False) * width if a.cross_attention else 0
        is_second = a.cross_attention and not part.embedding
        if is_second and (job.micro_batch > 1 or job.parallel.sequence > 1):
            size += encoded / job.parallel.sequence
        if not part.head:
            size += (job.tokens(True) * width + encoded) / job.parallel.sequence
    elif not part.encoder_end:
        size += job.tokens(False) * width / job.parallel.sequence
    return size


def _messages(job: Job, chunk: int) -> tuple[float, float]:
    """Bytes of a micro-batch that a chunk of the native engine receives and sends."""
    a = job.architecture
    if job.engine != "native" or job.parallel.pipeline == 1:
        return 0.0, 0.0

    def sent(part: Stage) -> float:
        tokens = job.tokens(part.decoder_layers > 0)
        if part.decoder_layers and a.cross_attention:
            tokens += job.tokens(False)
        return 0.0 if part.head else tokens * a.hidden * job.element / job.parallel.sequence

    received = sent(stage_of(a, job.parallel, chunk - 1)) if chunk > 0 else 0.0
    return received, sent(stage_of(a, job.parallel, chunk))


def logits_bytes(job: Job, stage: int = 0) -> tuple[float, float]:
    """What a last stage needs besides activations, while it computes the loss and while it computes head gradients.

    The gradient of the head's weight stays in the training precision until backward has reached the embedding too.
    """
    a = job.architecture
    software = job.software
    tensor = job.parallel.tensor
    if not stage_of(a, job.parallel, stage).head:
        return 0.0, 0.0
    logits = _logits(job)
    width = software.logits
    whole = 0.0  # logits that every tensor-parallel rank gathers
    if tensor > 1 and not software.divides_head:
        whole = logits * (tensor - 1) * width + 2 * logits
    hidden_states = 2 * job.micro_batch * a.output_length * a.hidden * job.element
    words = word_gradient(job)
    gradients = logits * software.logit_gradients + words
    if job.casts_weights:  # it is in 16 bits, and then becomes fp32
        words_in_16_bits = words * job.element / 4
        gradients = max(logits * software.logit_gradients + words_in_16_bits, words_in_16_bits + words)
    return logits * width + whole, gradients + hidden_states


def _logits(job: Job) -> float:
    """Elements of a micro-batch's logits on a tensor-parallel rank."""
    a = job.architecture
    return job.micro_batch * a.output_length * a.padded_vocabulary / job.parallel.tensor


def word_gradient(job: Job) -> float:
    """The word embedding's gradient in autograd: fp32 if parameters are cast."""
    a = job.architecture
    return a.padded_vocabulary / job.parallel.tensor * a.hidden * (4 if job.casts_weights else job.element)
