"""How long an iteration takes: computing, bubble, exposed communication, optimizer, offload and the host.

Times are absolute, from a device's figures, or calibrated: one measured run shows how much slower or faster its machine
is than these figures, and every other job is scaled in the same way.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from t5bench.model import schedule
from t5bench.model.flops import layer_multiply_adds, multiply_adds
from t5bench.model.job import Job, Zero
from t5bench.model.machine import Device, Machine
from t5bench.model.parameters import parameters, stage_of
from t5bench.model.traffic import Row, paths, ring_bytes, rows, steps

# The shares that large matrix products reach of a GPU's peak, element-wise operations of its memory's bandwidth, and
# collectives of a link's data rate: round figures from published benchmarks, not fitted.
PRODUCTS, ELEMENTS, NETWORK = 0.70, 0.80, {"nccl": 0.92, "gloo": 0.97}
# FlashAttention-2 reaches less of Hopper's peak (FlashAttention-3, https://arxiv.org/abs/2407.08608, abstract).
FLASH_ON_HOPPER = 0.35
# gloo's all-gather between two ranks takes this much longer than its bytes, between three or four no longer: the mean
# of eight measurements of 1 MB and more in tests/cluster's lab, 1.05 to 1.47 (docs/prediction.md).
GLOO_PAIR_GATHER = 1.35
# Operators that a layer dispatches for one micro-batch, forward and backward with the gradients' accumulation (counted
# with TorchDispatchMode); a third of them forward.
ENCODER_OPERATORS, DECODER_OPERATORS, OTHER_OPERATORS = 74, 125, 60
# Passes of element-wise operations over a layer's tensors in forward, read and written; backward has twice as many.
# Norms, biases, dropout, residuals: of [tokens, hidden] in each block; of [tokens, ffn]; of attention's scores.
BLOCK_PASSES, FFN_PASSES, SCORE_PASSES = 10, 4, 10
LOGIT_PASSES = 6
LAUNCH = 10e-6  # seconds of an eager operator on the host, on any machine (measured, docs/prediction.md)
# Adam reads and writes fp32 master, two moments and gradient, and writes the 16-bit copy; norm and clipping read and
# write the gradient once more.
OPTIMIZER_BYTES = 40
# A core and a desktop's memory, used only to be scaled by a measured run.
CPU = Device("cpu", "", tensor=0.05, vector=0.05, memory=0, bandwidth=10e9, pcie=10e9, ampere=False)
CPU_ADAM = 1e9  # parameters per second of DeepSpeedCPUAdam on one socket
# DeepSpeed's Python around every tensor of a micro-batch, in operators: gradient hooks, stage 3's fetching and
# releasing. Estimated from CPU runs over unlimited links, where ZeRO-2 still takes 10 % and ZeRO-3 8 to 24 % longer.
HOOK_OPERATORS = {0: 0, 1: 4, 2: 8, 3: 40}
# FSDP2's for a layer and for the root in a micro-batch: gathering, copying, freeing (counted with TorchDispatchMode;
# its Python between them is not counted).
FSDP2_LAYER_OPERATORS, FSDP2_ROOT_OPERATORS = 16, 13


@dataclass(frozen=True)
class Time:
    """Seconds of an iteration by purpose."""

    computing: float
    host: float
    bubble: float
    communication: float  # what no computing hides; hidden: the rest of it
    optimizer: float
    offload: float
    hidden: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        return {name: seconds for name, seconds in vars(self).items() if name != "hidden"}

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def limit(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])


class Pass(NamedTuple):
    """A micro-batch's forward or backward on a stage: the GPU's seconds, and the seconds including the host."""

    gpu: float
    seconds: float


def _rates(job: Job, device: Device) -> tuple[float, float, float]:
    """FLOP/s of the linear layers' matrix products, and of attention's and the head's, which fp8 leaves in bf16; and
    seconds per element of element-wise operations."""
    precisions = job.precision, "bf16" if job.precision == "fp8" else job.precision
    own, other = (device.peak(each) or device.vector * 1e12 for each in precisions)  # without tensor cores for it
    return own * PRODUCTS, other * PRODUCTS, job.element / (device.bandwidth * ELEMENTS)


@lru_cache(maxsize=65536)
def _layer_seconds(job: Job, decoder: bool, device: Device) -> tuple[float, float]:
    """Seconds of one layer: a micro-batch's forward on one GPU, and the share of attention's core."""
    a, t, b = job.architecture, job.parallel.tensor, job.micro_batch
    linear, attention, in_memory = _rates(job, device)
    weights, own_core = layer_multiply_adds(a, decoder)
    n, attentions = a.length(decoder), job.attentions(decoder)
    if device.hopper:  # longer by what flash attention misses of its share of the multiply-adds
        slower = [length * (PRODUCTS / FLASH_ON_HOPPER if kernel == "flash" else 1) for length, kernel in attentions]
        attention *= sum(a.attended(decoder)) / sum(slower)
    # Under autocast the residual stream, norms and softmax are fp32.
    stream, softmax = ((size or job.element) / job.element for size in (job.software.stream, job.software.softmax))
    passes = (1 + len(attentions)) * BLOCK_PASSES * n * a.hidden * stream / job.parallel.sequence
    passes += (FFN_PASSES * n * a.ffn * (1.5 if a.gated else 1) + 2 * n * (a.query + 2 * a.key)) / t
    scores = sum(a.heads * n * length for length, kernel in attentions if kernel == "unfused")
    core = 2 * b * own_core / t / attention + SCORE_PASSES * b * scores * softmax / t * in_memory
    return 2 * b * weights / t / linear + b * passes * in_memory + core, core


def stage_seconds(job: Job, device: Device, stage: int, slower: float = 1.0) -> tuple[Pass, Pass]:
    """A micro-batch's forward and backward on a stage."""
    a, t, part = job.architecture, job.parallel.tensor, stage_of(job.architecture, job.parallel, stage)
    _, products, in_memory = _rates(job, device)
    alone = replace(job.parallel, data=1, pipeline=1, split_rank=None)
    plain = replace(job, zero=Zero(), global_batch=1, recompute="none", parallel=alone)
    gpu = core = head = 0.0
    for is_decoder, layers in enumerate((part.encoder_layers, part.decoder_layers)):
        seconds, own = _layer_seconds(plain, bool(is_decoder), device) if layers else (0.0, 0.0)
        gpu, core = gpu + layers * seconds, core + layers * own
    operators = ENCODER_OPERATORS * part.encoder_layers
    operators += (DECODER_OPERATORS if a.cross_attention else ENCODER_OPERATORS) * part.decoder_layers
    repeated = {"none": (0.0, 0.0), "selective": (core, operators / 18), "full": (gpu, operators / 3)}
    again, operators_again = repeated[job.recompute]
    if part.head:
        logits = job.micro_batch * a.output_length * a.padded_vocabulary / t
        passes = LOGIT_PASSES * (4 / job.element if job.software.casts else 1)
        head = 2 * job.micro_batch * multiply_adds(a)["head"] / t / products + logits * passes * in_memory
        operators += OTHER_OPERATORS
    if job.fully_sharded:
        operators += FSDP2_LAYER_OPERATORS * (part.encoder_layers + part.decoder_layers) + FSDP2_ROOT_OPERATORS
    operators += HOOK_OPERATORS[job.zero.stage] * (12 * part.encoder_layers + 20 * part.decoder_layers + 4)

    def way(gpu: float, operators: float) -> Pass:
        """The time of both: a GPU computes while the host launches; on a CPU the two alternate."""
        gpu, host = gpu * slower, operators * LAUNCH * slower
        return Pass(gpu, gpu + host if device.name == CPU.name else max(gpu, host))

    adding = parameters(a, job.parallel, stage) * 3 * in_memory  # a micro-batch's gradients to the earlier ones
    backward = 2 * (gpu + head) + again + adding
    return way(gpu + head, operators / 3), way(backward, operators * 2 / 3 + operators_again)


def collective_seconds(row: Row, job: Job, machine: Machine, backend: str = "nccl") -> float:
    """One collective, with all groups of its kind busy at the same time."""
    size, has_inside, leaving = paths(job.parallel, job.architecture.cross_attention)[row.group]
    pair_gather = (row.kind, size, backend) == ("all-gather", 2, "gloo")
    each = ring_bytes(row, size, backend) * (GLOO_PAIR_GATHER if pair_gather else 1)
    busiest = max(has_inside * each / machine.inside.bandwidth, leaving * each / machine.between.bandwidth)
    latency = (machine.between if leaving else machine.inside).latency
    return busiest / NETWORK[backend] + steps(row, size, backend) * latency


def iteration(job: Job, machine: Machine, backend: str = "nccl", slower: float = 1.0) -> Time:
    """The seconds of an iteration by purpose, on the busiest stage.

    slower: how many times longer GPUs and hosts take than their figures say.
    """
    m, stages = job.micro_batches, range(job.parallel.pipeline)
    passes = [stage_seconds(job, machine.device, stage, slower) for stage in stages]
    # What a stage waits for: in every forward, in every backward, and once per iteration.
    waits = {when: [0.0] * len(stages) for when in ("each forward", "each backward", "once")}
    overlapped: Counter[tuple[int, str]] = Counter()  # of a stage, what is sent while it computes
    hidden, transfer = [0.0] * len(stages), 0.0
    for row in rows(job):
        seconds = row.count * collective_seconds(row, job, machine, backend)
        if row.kind in ("send", "send back"):
            transfer = max(transfer, seconds / row.count)
            continue
        for stage in row.stages:
            if row.overlap:
                overlapped[stage, row.overlap] += seconds
            elif row.when in waits:
                waits[row.when][stage] += seconds / m
            else:
                waits["once"][stage] += seconds
    for (stage, overlap), seconds in overlapped.items():
        way = passes[stage][overlap != "each forward"].seconds
        beside = min(seconds, way * (m if overlap.startswith("each") else 1))
        hidden[stage] += beside
        waits["once"][stage] += seconds - beside
    forward = [each.seconds + wait for (each, _), wait in zip(passes, waits["each forward"], strict=True)]
    backward = [each.seconds + wait for (_, each), wait in zip(passes, waits["each backward"], strict=True)]
    whole = schedule.duration(forward, backward, m, transfer, job.parallel.virtual_stages)
    busiest = max(stages, key=lambda stage: forward[stage] + backward[stage])
    computing = m * sum(each.gpu for each in passes[busiest])
    host = m * sum(each.seconds for each in passes[busiest]) - computing
    bubble = max(0.0, whole - m * (forward[busiest] + backward[busiest]))
    waiting = m * (waits["each forward"][busiest] + waits["each backward"][busiest])
    update = _update_seconds(job, machine.device, slower)
    return Time(computing, host, bubble, waiting + max(waits["once"]), *update, max(hidden))


def _update_seconds(job: Job, device: Device, slower: float) -> tuple[float, float]:
    """The optimizer's step on its GPU; with offload instead the copies over PCIe and Adam on the CPU."""
    own = float(max(parameters(job.architecture, job.parallel, stage) for stage in range(job.parallel.pipeline)))
    if job.zero.stage or job.fully_sharded or job.distributed_optimizer:
        own /= job.parallel.states_over
    # With offload its part of the parameters comes in, and of the gradients goes out, for every micro-batch.
    offload = job.zero.offload_parameters * job.micro_batches * 2 * own * job.element / device.pcie
    if job.zero.offload_optimizer:
        return 0.0, (offload + own * (job.element + 4) / device.pcie + own / CPU_ADAM) * slower
    return own * OPTIMIZER_BYTES / (device.bandwidth * ELEMENTS) * slower, offload * slower


def calibrated(job: Job, machine: Machine, seconds: float, backend: str = "nccl") -> float:
    """How much slower than its figures a machine is, if this job took the measured seconds on it.

    Raises ValueError if the network alone would take longer.
    """

    def total(slower: float) -> float:
        return iteration(job, machine, backend, slower).total

    low, high = 0.0, 1.0
    if total(low) > seconds:
        raise ValueError(f"sending alone takes {total(low):.3g} s at this link's rate, the iteration {seconds:.3g} s")
    while total(high) < seconds:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) < seconds else (low, middle)
    return high
