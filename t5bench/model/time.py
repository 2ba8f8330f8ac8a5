"""How long an iteration takes: computing, bubble, exposed communication, optimizer, offload and the host.

Absolute from a device's figures, or calibrated: one measured run says how much slower or faster its machine is than
these figures, and every other job is scaled alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from t5bench.model import schedule
from t5bench.model.job import BYTES, Architecture, Job
from t5bench.model.machine import Device, Machine
from t5bench.model.traffic import Row, paths, ring_bytes, rows, stage_layers, stage_size, steps

# What matrix products reach of a GPU's peak and element-wise operations of its memory's bandwidth, where they are large
# (facts of Megatron-LM's, NVIDIA's and Galvatron's published runs); of a link's data rate NCCL and TCP reach this much.
PRODUCTS, ELEMENTS, NETWORK = 0.70, 0.80, 0.92
# Operators that a layer dispatches for one micro-batch, forward and backward with the gradients' accumulation (counted
# with TorchDispatchMode); a third of them forward.
ENCODER_OPERATORS, DECODER_OPERATORS, OTHER_OPERATORS = 74, 125, 60
# Passes of element-wise operations over a layer's tensors in forward, read and written; backward has twice as many.
# Norms, biases, dropout, residuals: of [tokens, hidden] in each block; of [tokens, ffn]; of attention's scores.
BLOCK_PASSES, FFN_PASSES, SCORE_PASSES = 10, 4, 10
# Adam reads and writes fp32 master, two moments and gradient, and writes the 16-bit copy; norm and clipping read and
# write the gradient once more.
OPTIMIZER_BYTES, CLIP_BYTES = 32, 8
CPU_ADAM = 1e9  # parameters per second of DeepSpeedCPUAdam on one socket
# DeepSpeed's Python around every tensor of a micro-batch, in operators: ZeRO's gradient hooks, and stage 3's fetching
# and letting go. Fitted to the native engine's runs over unlimited links (docs/prediction.md).
HOOK_OPERATORS = {0: 0, 1: 4, 2: 8, 3: 40}


@dataclass(frozen=True)
class Operations:
    """Multiply-adds of one sample's forward pass in matrix products; core: of attention's scores and context."""

    layers: float
    core: float
    head: float


def layer_operations(a: Architecture, decoder: bool) -> Operations:
    """Of one layer. Narayanan et al. (https://arxiv.org/abs/2104.04473, section 5.1), for grouped queries, gated FFNs
    and cross-attention, whose keys and values are made at the encoder's length."""
    s, d = a.encoder_length, a.decoder_length
    n, h = (d if decoder else s), a.hidden
    linear = n * (2 * h * a.query + 2 * h * a.key + (3 if a.gated else 2) * h * a.ffn)
    core = 2 * a.query * n * n
    if decoder and a.cross_attention:
        linear += 2 * h * a.query * d + 2 * h * a.key * s
        core += 2 * a.query * d * s
    return Operations(linear + core, core, 0)


def head_operations(a: Architecture) -> float:
    return a.padded_vocabulary * a.hidden * (a.decoder_length if a.decoder_layers else a.encoder_length)


def model_flops(job: Job) -> float:
    """Of an iteration, without recomputation: 2 a multiply-add, and backward twice the forward."""
    return 3 * _forward_flops(job)[0] * job.global_batch


def hardware_flops(job: Job) -> float:
    """Of an iteration with what recomputation does a second time: all of the layers, or attention's core."""
    whole, layers, core = _forward_flops(job)
    again = {"none": 0.0, "selective": core, "full": layers}[job.recompute]
    return (3 * whole + again) * job.global_batch


def _forward_flops(job: Job) -> tuple[float, float, float]:
    a = job.architecture
    encoder, decoder = layer_operations(a, decoder=False), layer_operations(a, decoder=True)
    layers = a.encoder_layers * encoder.layers + a.decoder_layers * decoder.layers
    core = a.encoder_layers * encoder.core + a.decoder_layers * decoder.core
    return 2 * (layers + head_operations(a)), 2 * layers, 2 * core


@dataclass(frozen=True)
class Rates:
    """What the machine is scaled by: slower multiplies everything that a GPU or its host does."""

    slower: float = 1.0
    products: float = PRODUCTS
    elements: float = ELEMENTS
    network: float = NETWORK


@dataclass(frozen=True)
class Time:
    """Seconds of an iteration by what they go to; communication is what no computing hides.

    hidden: communication beside computing. collectives: each kind of row and its seconds, hidden or not.
    """

    computing: float
    host: float
    bubble: float
    communication: float
    optimizer: float
    offload: float
    hidden: float = 0.0
    collectives: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.computing + self.host + self.bubble + self.communication + self.optimizer + self.offload

    @property
    def parts(self) -> dict[str, float]:
        names = ("computing", "host", "bubble", "communication", "optimizer", "offload")
        return {name: getattr(self, name) for name in names}

    @property
    def limit(self) -> str:
        """What takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])


@lru_cache(maxsize=65536)
def _layer_seconds(
    a: Architecture, decoder: bool, job: Job, device: Device, rates: Rates
) -> tuple[float, float, float]:
    """One layer's forward of one micro-batch on one GPU: seconds, of them attention's core, and of the host."""
    t, b, element = job.parallel.tensor, job.micro_batch, BYTES[job.precision]
    peak = (device.peak(job.precision) or device.peak("fp16") or device.tensor * 1e12) * rates.products
    operations = layer_operations(a, decoder)
    n = a.decoder_length if decoder else a.encoder_length
    cross = decoder and a.cross_attention
    whole = t if job.parallel.sequence_parallel else 1
    passes = (3 if cross else 2) * BLOCK_PASSES * n * a.hidden / whole
    passes += (FFN_PASSES * n * a.ffn * (1.5 if a.gated else 1) + 2 * n * (a.query + 2 * a.key)) / t
    kernel = job.causal_attention if decoder else job.attention
    scores = a.heads * n * n if kernel == "unfused" else 0
    scores += a.heads * n * a.encoder_length if cross and job.attention == "unfused" else 0
    in_memory = b * element / (device.bandwidth * rates.elements)
    core = 2 * b * operations.core / t / peak + SCORE_PASSES * scores / t * in_memory
    seconds = 2 * b * (operations.layers - operations.core) / t / peak + passes * in_memory + core
    operators = DECODER_OPERATORS if cross else ENCODER_OPERATORS
    return seconds, core, operators / 3 * device.launch


def stage_seconds(job: Job, device: Device, rates: Rates, stage: int) -> tuple[float, float, float, float]:
    """A micro-batch on a stage: forward and backward by its GPU, and the host's for each, which run side by side."""
    a = job.architecture
    plain = replace(
        job,
        zero=replace(job.zero, stage=0),
        global_batch=1,
        parallel=replace(job.parallel, data=1, pipeline=1, split_rank=None),
    )
    forward = core = host = 0.0
    for count, decoder in zip(stage_layers(job, stage), (False, True), strict=True):
        if count:
            seconds, own_core, launches = _layer_seconds(a, decoder, plain, device, rates)
            forward, core, host = forward + count * seconds, core + count * own_core, host + count * launches
    again, again_host = {"none": (0.0, 0.0), "selective": (core, host / 6), "full": (forward, host)}[job.recompute]
    backward = 2 * forward + again
    if stage == job.parallel.pipeline - 1:
        peak = (device.peak(job.precision) or device.tensor * 1e12) * rates.products
        head = 2 * job.micro_batch * head_operations(a) / job.parallel.tensor / peak
        length = a.decoder_length if a.decoder_layers else a.encoder_length
        logits = job.micro_batch * length * a.padded_vocabulary / job.parallel.tensor
        head += logits * 12 / (device.bandwidth * rates.elements)
        forward, backward = forward + head, backward + 2 * head
        host += OTHER_OPERATORS / 3 * device.launch
    # Every micro-batch adds its gradients to those before, in fp32.
    size = stage_size(job.architecture, job.parallel, stage)
    backward += size * (job.element + 8) / (device.bandwidth * rates.elements)
    hooks = HOOK_OPERATORS[job.zero.stage] * device.launch * _tensor_count(job, stage)
    slower = rates.slower
    return (
        forward * slower,
        backward * slower,
        (host + hooks / 3) * slower,
        (2 * host + again_host + hooks * 2 / 3) * slower,
    )


def _tensor_count(job: Job, stage: int) -> int:
    encoder, decoder = stage_layers(job, stage)
    return 12 * encoder + 20 * decoder + 4


def collective_seconds(row: Row, job: Job, machine: Machine, backend: str = "nccl", network: float = NETWORK) -> float:
    """One collective, with all groups of its kind busy at the same time."""
    path = paths(job.parallel, job.architecture.cross_attention)[row.group]
    each = ring_bytes(row, path.size, backend)
    # A pipeline's neighbours may share a node or not: the slower of the two counts.
    inside = each / machine.inside.bandwidth if path.inside else 0.0
    between = path.leaving * each / machine.between.bandwidth
    latency = (machine.between if path.leaving else machine.inside).latency
    return max(inside, between) / network + steps(row, path.size, backend) * latency


def iteration(job: Job, machine: Machine, rates: Rates = Rates(), backend: str = "nccl") -> Time:
    """The seconds of an iteration on the busiest rank of every stage together."""
    device, parallel, m = machine.device, job.parallel, job.micro_batches
    stages = range(parallel.pipeline)
    by_stage = [stage_seconds(job, device, rates, stage) for stage in stages]
    found = rows(job)
    cost = {row: row.count * collective_seconds(row, job, machine, backend, rates.network) for row in found}
    # What all stages wait for in every micro-batch makes their forwards and backwards longer.
    waits = {way: [0.0] * len(stages) for way in ("each forward", "each backward")}
    hidden, exposed = 0.0, 0.0
    transfer = 0.0
    busy = [max(f, fh) + max(b, bh) for f, b, fh, bh in by_stage]
    for row, seconds in cost.items():
        if row.group == "pipeline":
            transfer = max(transfer, seconds / row.count)
        elif row.overlap:
            window = {"last backward": max(max(b, bh) for _, b, _, bh in by_stage)}.get(
                row.overlap, m * max(busy) * 0.5
            )
            hidden += min(seconds, window)
            exposed += max(0.0, seconds - window)
        elif row.when in waits:
            for stage in row.stages if row.group in ("tensor", "data") else ():
                waits[row.when][stage] += seconds / m
        else:
            exposed += seconds
    computes = [max(f, fh) + waits["each forward"][s] for s, (f, _, fh, _) in enumerate(by_stage)]
    returns = [max(b, bh) + waits["each backward"][s] for s, (_, b, _, bh) in enumerate(by_stage)]
    busiest = max(stages, key=lambda stage: computes[stage] + returns[stage])
    f, b, fh, bh = by_stage[busiest]
    whole = schedule.duration(computes, returns, m, transfer, parallel.virtual_stages)
    waiting = m * (waits["each forward"][busiest] + waits["each backward"][busiest])
    optimizer, offload = _update_seconds(job, device, rates)
    return Time(
        computing=m * (f + b),
        host=m * (max(f, fh) - f + max(b, bh) - b),
        bubble=max(0.0, whole - m * (computes[busiest] + returns[busiest])),
        communication=exposed + waiting,
        optimizer=optimizer,
        offload=offload,
        hidden=hidden,
        collectives={f"{row.group}: {row.what}, {row.kind} {row.when}": seconds for row, seconds in cost.items()},
    )


def _update_seconds(job: Job, device: Device, rates: Rates) -> tuple[float, float]:
    """The optimizer's step on its GPU; with offload instead the copies over PCIe and Adam on the CPU."""
    size = max(stage_size(job.architecture, job.parallel, stage) for stage in range(job.parallel.pipeline))
    shared = job.zero.stage or job.distributed_optimizer
    own = size / job.parallel.data if shared else size
    at_bandwidth = device.bandwidth * rates.elements
    offload = 0.0
    if job.zero.offload_parameters:
        # Each rank's part of parameters in, once or twice, and of gradients out, in every micro-batch.
        offload += job.micro_batches * 2 * own * job.element / device.pcie
    if job.zero.offload_optimizer:
        return 0.0, (offload + own * (job.element + 4) / device.pcie + own / CPU_ADAM) * rates.slower
    return (own * (OPTIMIZER_BYTES + CLIP_BYTES)) / at_bandwidth * rates.slower, offload * rates.slower


def calibrated(job: Job, machine: Machine, seconds: float, rates: Rates = Rates(), backend: str = "nccl") -> Rates:
    """The rates with which this job takes the measured seconds; ValueError where its network alone takes longer."""

    def total(slower: float) -> float:
        return iteration(job, machine, replace(rates, slower=slower), backend).total

    low, high = 0.0, 1.0
    if total(low) > seconds:
        raise ValueError(
            f"sending alone takes {total(low):.3g} s at this link's rate, the iteration took {seconds:.3g} s"
        )
    while total(high) < seconds:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) < seconds else (low, middle)
    return replace(rates, slower=high)


def pipeline_slots(job: Job, device: Device, rates: Rates = Rates()) -> Sequence[schedule.Slot]:
    """When each stage computes, for a picture."""
    costs = [stage_seconds(job, device, rates, stage) for stage in range(job.parallel.pipeline)]
    forward, backward = [max(f, h) for f, _, h, _ in costs], [max(b, h) for _, b, _, h in costs]
    return schedule.one_f_one_b(forward, backward, job.micro_batches, chunks=job.parallel.virtual_stages)
