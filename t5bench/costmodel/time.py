"""How long an iteration takes: computing, bubble, exposed communication, optimizer, offload and the host.

Times are absolute, from a device's figures, or calibrated: one measured run shows how much slower or faster its machine
is than these figures, and every other job is scaled in the same way.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod, sqrt
from typing import NamedTuple

from t5bench.costmodel import schedule
from t5bench.costmodel.flops import layer_multiply_adds
from t5bench.costmodel.job import UNREAD_MEMORY, Job, Zero
from t5bench.costmodel.machine import Device, Link, Machine
from t5bench.costmodel.parameters import Stage, layer_shapes, parameters, stage_of
from t5bench.costmodel.traffic import (
    LAST_WEIGHTS,
    Collective,
    collectives_of,
    layout_of_groups,
    paths,
    ring_bytes,
    steps,
)

# The shares that element-wise operations reach of a memory's bandwidth, and collectives of a link's data rate: round
# figures from published benchmarks, not fitted. achievable_rates.py has what matrix products reach of a GPU's peak.
ELEMENTS = 0.80
NETWORK = {"nccl": 0.92, "gloo": 0.97}
# FlashAttention-2 reaches less of Hopper's peak (FlashAttention-3, https://arxiv.org/abs/2407.08608, abstract).
FLASH_ON_HOPPER = 0.35
# gloo's all-gather between two ranks takes this much longer than its bytes, between three or four no longer: measured
# in tests/tools/nodes's lab from 0.25 to 15 MB at three rates (packages/costmodel-evidence/EVIDENCE.md).
GLOO_PAIR_GATHER = 1.5
# Rows and columns of a product's tiles, each of which one multiprocessor computes: the largest that NVIDIA's "Matrix
# Multiplication Background User's Guide" names. The rates of 183 products that SimuMax measured on an A100
# (achievable_rates.py) differ by 10.2 % without this, and by 6.4 % with it and with divided sums (6.6 % if smaller
# tiles may be taken, too); those on its B200 are not explained by it.
TILES = ((256, 128), (128, 256))
# A library also divides long sums over the inner size into parts, which are added up in the end.
SPLIT = 0.9
LEAST_PART = 4096
MOST_PARTS = 8
NORM_OPERATORS = 3  # a further norm's forward and backward, and its gradient's accumulation
# For the gradient of one linear layer's weight where a zero-bubble schedule computes it later, counted likewise.
WEIGHT_OPERATORS = 5
# Passes of element-wise operations over a layer's tensors in forward, read and written; backward has twice as many.
# Norms, biases, dropout, residuals: of [tokens, hidden] in each block; of [tokens, ffn].
BLOCK_PASSES = 10
FFN_PASSES = 4
# Over stored scores, with a fused softmax, counted in what each kernel reads and writes. Forward: the first product
# writes them, softmax reads and writes them, dropout too with a mask of half their size, the second product reads them.
# Backward: the product writes a gradient, dropout reads it and the mask and writes it, softmax reads it and its output
# and writes its own; the gradients of query, key and value read three of these.
SCORE_PASSES_FORWARD = 5.5
SCORE_PASSES_BACKWARD = 9.5
SEPARATE_SCORE_PASSES = 10  # forward, with scale and mask as kernels of their own, which read and write; backward twice
LOGIT_PASSES = 6
NORM_PASSES = 2  # of a tensor that has a norm besides its block's first one
# What separate operators add, counted (tests/costmodel/count_passes.py) less a fused norm's two passes forward and four
# backward: an RMS norm, which converts inputs of 2 bytes to 4 and back. Of Hugging Face's modules (transformers 4.57),
# counted likewise: gelu_new, and attention's passes over its scores, with softmax in fp32.
EAGER_RMS_NORM = {2: 16, 4: 5}
EAGER_RMS_NORM_BACKWARD = {2: 42, 4: 19}
EAGER_GELU = 16
EAGER_SCORES = {2: 15, 4: 6}
# Of rotary positions: one kernel reads and writes; separate operators multiply, negate, join, multiply and add.
ROTARY_PASSES = 2
EAGER_ROTARY = 10
ADDING_PASSES = 3  # over a gradient that is added to those of earlier micro-batches
# Adam reads and writes fp32 master, two moments and gradient, and writes the 16-bit copy; norm and clipping read and
# write the gradient once more.
OPTIMIZER_BYTES = 40
# A core and a desktop's memory, used only to be scaled by a measured run.
CPU = Device("cpu", "", tensor=0.05, vector=0.05, memory=0, bandwidth=10e9, pcie=10e9, ampere=False)
CPU_ADAM = 1e9  # parameters per second of DeepSpeedCPUAdam on one socket
# DeepSpeed's Python around every tensor of a micro-batch, in operators: gradient hooks, stage 3's fetching and
# releasing. What DeepSpeed 0.19.8 adds in operators and calls of Python, as the ledger counts them
# (packages/ledger/src/t5bench_ledger/data/costs.json); that a call costs 6 % of an operator is an estimate.
HOOK_OPERATORS = {0: 0, 1: 5, 2: 10, 3: 36}
# FSDP2's for a layer and for the root in a micro-batch: gathering, copying, freeing (counted with TorchDispatchMode;
# its Python between them is not counted).
FSDP2_LAYER_OPERATORS = 16
FSDP2_ROOT_OPERATORS = 13
# Tensors of a layer around which HOOK_OPERATORS run.
ENCODER_TENSORS = 12
DECODER_TENSORS = 20
OTHER_TENSORS = 4


@dataclass(frozen=True)
class Operators:
    """What a model dispatches for one micro-batch, forward and backward with the gradients' accumulation.

    About a third is forward.
    """

    encoder_layer: int
    decoder_layer: int
    """With cross-attention."""
    layer: int
    """Of a model with a single stack."""
    others: int
    """Of the embeddings, head and loss of a single stack."""
    others_of_two: int
    """Of an encoder and a decoder, with their masks."""
    cost: float = 1.0
    """Of one for the host, beside one of Megatron-DeepSpeed's, around which there is more Python: 0.5 to 0.6 on one
    CPU, where an encoder layer's fused kernels are 32 operators more. On GPUs it was not measured: nearer to 1."""


# Counted with TorchDispatchMode: tests/costmodel/count_operators.py does it for the two engines. Hugging Face's are of
# T5 v1.1 in 16 bits.
OPERATORS = {
    "native": Operators(89, 162, 94, 44, 73, cost=0.7),
    "huggingface": Operators(139, 211, 139, 60, 60),
    "autocast": Operators(159, 239, 159, 60, 60),
}
FUSED_OPERATORS = Operators(64, 110, 66, 60, 188)
"""Of Megatron-DeepSpeed with its fused kernels, and of other software. Around the layers 92 and 220 are counted. With
32 fewer, a search replayed on published times ends nearer to the fastest; why is not known. A GPU
may not wait for those that prepare a micro-batch."""


@dataclass(frozen=True)
class Time:
    """Seconds of an iteration by purpose."""

    computing: float
    host: float
    bubble: float
    communication: float
    """What no computing hides."""
    optimizer: float
    offload: float
    hidden: float = 0.0
    """The rest of the communication."""

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
    """A micro-batch's forward or backward on a stage, in seconds."""

    gpu: float
    """Of the GPU."""
    seconds: float
    """Including the host, without collectives."""
    layers_gpu: float
    """Of the GPU in the layers alone."""
    layers_host: float
    """Of the host in the layers alone. Where it is the longer one, it hides the layers' collectives, too."""

    def with_queued(self, seconds: float) -> float:
        """The pass with collectives in the GPU's queue, which is empty while the layers wait for their host."""
        return self.seconds + max(0.0, seconds - max(0.0, self.layers_host - self.layers_gpu))


class Passes(NamedTuple):
    """Of element-wise operations in a layer's forward pass."""

    block: int
    """Over [tokens, hidden] in each block."""
    block_backward: int
    ffn: float
    """Over [tokens, ffn]."""
    scores_forward: float
    """Over attention's scores, where they are stored."""
    scores_backward: float
    """The same in a backward pass. Of the FFN's, it has twice a forward pass's."""


class Rates(NamedTuple):
    """What a device reaches in a job's precision."""

    linear: float
    """FLOP/s of the linear layers' matrix products."""
    products: float
    """FLOP/s of attention's and the head's, which fp8 leaves in bf16."""
    element: float
    """Seconds per element of an element-wise operation."""


def _rates(job: Job, device: Device) -> Rates:
    def products(precision: str) -> float:
        peak = device.peak(precision) or device.vector * 1e12  # without tensor cores for it
        return peak * (device.achievable.fp8 if precision == "fp8" else device.achievable.products)

    return Rates(
        linear=products(job.precision),
        products=products("bf16" if job.precision == "fp8" else job.precision),
        element=job.element / (device.bandwidth * ELEMENTS),
    )


def _passes(job: Job) -> Passes:
    a = job.architecture
    software = job.software
    ffn = FFN_PASSES * (1.5 if a.gated else 1)
    width = software.stream or job.element
    has_eager_norms = job.has_eager_norms or (software.eager and a.norm == "rms")
    block = BLOCK_PASSES + (EAGER_RMS_NORM[width] if has_eager_norms else 0)
    block_backward = 2 * BLOCK_PASSES + (EAGER_RMS_NORM_BACKWARD[width] if has_eager_norms else 0)
    if not software.eager:
        if software.fused_softmax and not (software.softmax_of_16_bits and job.element > 2):
            return Passes(block, block_backward, ffn, SCORE_PASSES_FORWARD, SCORE_PASSES_BACKWARD)
        return Passes(block, block_backward, ffn, SEPARATE_SCORE_PASSES, 2 * SEPARATE_SCORE_PASSES)
    gelu = EAGER_GELU if a.gated or a.family == "gpt" else 0
    scores = SEPARATE_SCORE_PASSES if software.softmax else EAGER_SCORES[job.element]
    return Passes(block, block_backward, ffn + gelu, scores, 2 * scores)


class Product(NamedTuple):
    """A linear layer's matrix product on one GPU: rows x inner times inner x columns."""

    rows: float
    inner: float
    columns: float

    @property
    def backward(self) -> tuple["Product", "Product"]:
        """The gradient of the input, and of the weight."""
        return Product(self.rows, self.columns, self.inner), Product(self.columns, self.rows, self.inner)

    def seconds(self, rate: float, device: Device) -> float:
        """rate: FLOP/s of a product that fills the device."""
        work = 2 * self.rows * self.inner * self.columns
        return work / (rate * self.filled(device)) + device.achievable.start

    def filled(self, device: Device) -> float:
        """The share of the device that computes what is asked for: tiles reach beyond the edges, and the last wave of
        tiles leaves multiprocessors idle."""
        if not device.multiprocessors:
            return 1.0
        return max(self._filled(device.multiprocessors, high, wide) for high, wide in TILES)

    def _filled(self, multiprocessors: int, high: int, wide: int) -> float:
        tiles = ceil(self.rows / high) * ceil(self.columns / wide)
        inside = self.rows * self.columns / (tiles * high * wide)
        busy = tiles / (ceil(tiles / multiprocessors) * multiprocessors)
        for parts in range(2, min(MOST_PARTS, int(self.inner) // LEAST_PART) + 1):
            units = parts * tiles
            busy = max(busy, SPLIT * units / (ceil(units / multiprocessors) * multiprocessors))
        return inside * busy


def products_of_layer(job: Job, decoder: bool) -> list[Product]:
    """Of the linear layers, in a forward pass of a micro-batch."""
    a = job.architecture
    t = job.parallel.tensor
    rows = job.micro_batch * a.length(decoder)
    found = []
    for length in a.attended(decoder):
        keys = job.micro_batch * length
        if length == a.length(decoder) and not found:
            found.append(Product(rows, a.hidden, (a.query + 2 * a.keys_of_all(t)) / t))
        else:
            found += [Product(rows, a.hidden, a.query / t), Product(keys, a.hidden, 2 * a.keys_of_all(t) / t)]
        found.append(Product(rows, a.query / t, a.hidden))
    found.append(Product(rows, a.hidden, (2 if a.gated else 1) * a.ffn / t))
    found.append(Product(rows, a.ffn / t, a.hidden))
    return found


class LayerSeconds(NamedTuple):
    forward: float
    backward: float
    core: float
    """The forward share of attention's core, which selective recomputation repeats."""


@lru_cache(maxsize=65536)
def _layer_seconds(job: Job, decoder: bool, device: Device) -> LayerSeconds:
    """Of one layer and a micro-batch, on one GPU."""
    a = job.architecture
    t = job.parallel.tensor
    b = job.micro_batch
    rates = _rates(job, device)
    _, core_products = layer_multiply_adds(a, decoder)
    n = a.length(decoder)
    attentions = job.attentions(decoder)
    start = device.achievable.start
    attention = rates.products
    if device.hopper:  # longer by what flash attention misses of its share of the multiply-adds
        share = device.achievable.products / FLASH_ON_HOPPER
        slower = [length * (share if kernel == "flash" else 1) for length, kernel in attentions]
        attention *= sum(a.attended(decoder)) / sum(slower)
    # Under autocast the residual stream, norms and softmax are fp32.
    stream = (job.software.stream or job.element) / job.element
    softmax = (job.software.softmax or job.element) / job.element
    each = _passes(job)
    in_blocks = (1 + len(attentions)) * n * a.hidden * stream / job.parallel.sequence
    keys = a.keys_of_all(t)
    divided = (each.ffn * n * a.ffn + 2 * n * (a.query + 2 * keys)) / t + _further_norms(job, decoder)
    rotated = _rotary_passes(job) * n * (a.query + keys) / t
    passes = each.block * in_blocks + divided + rotated
    passes_backward = each.block_backward * in_blocks + 2 * divided + rotated
    scores = sum(a.heads * n * length for length, kernel in attentions if kernel == "unfused")
    score = b * scores * softmax / t * rates.element  # one pass
    core = 2 * b * core_products / t / attention + each.scores_forward * score
    core += start * sum(2 if kernel == "unfused" else 1 for _, kernel in attentions)
    products = products_of_layer(job, decoder)
    linear = sum(product.seconds(rates.linear, device) for product in products)
    gradients = sum(one.seconds(rates.linear, device) for product in products for one in product.backward)
    forward = linear + b * passes * rates.element + core
    core_backward = 2 * core + (each.scores_backward - 2 * each.scores_forward) * score
    return LayerSeconds(forward, gradients + b * passes_backward * rates.element + core_backward, core)


def _rotary_passes(job: Job) -> int:
    """Over queries and keys, forward and again backward."""
    if job.architecture.positions != "rotary":
        return 0
    is_fused = job.software.fused_rotary or job.precision == "fp8"  # which comes with Transformer Engine
    return ROTARY_PASSES if is_fused else EAGER_ROTARY


def _further_norms(job: Job, decoder: bool) -> float:
    """Passes over the tensors of a sample in a layer that have a norm besides their block's first one."""
    a = job.architecture
    n = a.length(decoder)
    lengths = a.attended(decoder)
    elements = 0.0
    if a.post_norms:
        elements += (1 + len(lengths)) * n * a.hidden / job.parallel.sequence
    if a.query_key_norms:
        t = job.parallel.tensor
        elements += (len(lengths) * n * a.query + sum(lengths) * a.keys_of_all(t)) / t
    return NORM_PASSES * elements


@lru_cache(maxsize=65536)
def _of_a_layer(job: Job) -> Job:
    """Without what a layer's time does not depend on, so that each is computed once."""
    one_replica = replace(job.parallel, data=1, pipeline=1, split_rank=None)
    return replace(job, zero=Zero(), global_batch=1, recompute="none", parallel=one_replica)


def stage_seconds(job: Job, machine: Machine, stage: int, slower: float = 1.0) -> tuple[Pass, Pass]:
    """A micro-batch's forward and backward on a stage."""
    a = job.architecture
    device = machine.device
    part = stage_of(a, job.parallel, stage)
    rates = _rates(job, device)
    plain = _of_a_layer(job)
    forward = backward = core = 0.0
    for is_decoder, layers in ((False, part.encoder_layers), (True, part.decoder_layers)):
        if layers:
            layer = _layer_seconds(plain, is_decoder, device)
            forward += layers * layer.forward
            backward += layers * layer.backward
            core += layers * layer.core
    head, head_backward = _head_seconds(job, rates, device) if part.head else (0.0, 0.0)
    operators = _layer_operators(job, part)
    others = _other_operators(job) if part.head else 0
    recomputed = {"none": 0.0, "selective": core, "full": forward}[job.recompute]
    operators_again = {"none": 0.0, "selective": operators / 18, "full": operators / 3}[job.recompute]

    # A micro-batch's gradients are added to the earlier ones.
    adding = parameters(a, job.parallel, stage) * ADDING_PASSES * rates.element
    hooks = _hook_operators(job, part)
    return (
        _pass(forward, (operators + hooks) / 3, head, others / 3, machine, slower),
        _pass(
            backward + recomputed + adding,
            (operators + hooks) * 2 / 3 + operators_again,
            head_backward,
            others * 2 / 3,
            machine,
            slower,
        ),
    )


def passes_of_stages(job: Job, machine: Machine, slower: float = 1.0) -> list[tuple[Pass, Pass]]:
    """A micro-batch's forward and backward on every stage; those that hold the same take as long."""
    found: dict[Stage, tuple[Pass, Pass]] = {}
    passes = []
    for stage in range(job.parallel.pipeline):
        part = stage_of(job.architecture, job.parallel, stage)
        if part not in found:
            found[part] = stage_seconds(job, machine, stage, slower)
        passes.append(found[part])
    return passes


def _pass(
    layers: float, layers_operators: float, rest: float, rest_operators: float, machine: Machine, slower: float
) -> Pass:
    """A GPU computes while the host launches: in the layers, and in the rest. On a CPU the two alternate.

    layers, rest: seconds by the device's figures. The rest is the head. A GPU that the host keeps waiting has nothing
    left to do when the head begins, and the head's few large operators give the host no lead.
    """
    layers *= slower
    rest *= slower
    cost = machine.host.operator_seconds * slower
    layers_host = layers_operators * cost
    rest_host = rest_operators * cost
    gpu = layers + rest
    if machine.device.name == CPU.name:
        return Pass(gpu, gpu + layers_host + rest_host, layers, layers_host)
    return Pass(gpu, max(layers, layers_host) + max(rest, rest_host), layers, layers_host)


def weight_seconds(job: Job, machine: Machine, slower: float = 1.0) -> list[float]:
    """For each stage, the part of a micro-batch's backward pass that a zero-bubble schedule puts off; none under
    others."""
    if job.parallel.schedule != schedule.ZERO_BUBBLE:
        return []
    return [_weight_seconds(job, machine, stage, slower) for stage in range(job.parallel.pipeline)]


def _weight_seconds(job: Job, machine: Machine, stage: int, slower: float) -> float:
    """The gradients of the weights of a stage's layers: matrix products that take as long as the forward pass's."""
    a = job.architecture
    device = machine.device
    part = stage_of(a, job.parallel, stage)
    rates = _rates(job, device)
    t = job.parallel.tensor
    gpu = 0.0
    operators = 0
    for is_decoder, layers in ((False, part.encoder_layers), (True, part.decoder_layers)):
        if layers:
            shapes = [shape for shape in layer_shapes(a, t, is_decoder) if len(shape) == 2]
            adding = sum(prod(shape) for shape in shapes) * ADDING_PASSES * rates.element
            gradients = [product.backward[1] for product in products_of_layer(job, is_decoder)]
            gpu += layers * (sum(one.seconds(rates.linear, device) for one in gradients) + adding)
            operators += layers * len(shapes) * WEIGHT_OPERATORS
    return _pass(gpu, operators, 0.0, 0.0, machine, slower).seconds


def _head_seconds(job: Job, rates: Rates, device: Device) -> tuple[float, float]:
    """Of a micro-batch, forward and backward."""
    a = job.architecture
    product = Product(job.micro_batch * a.output_length, a.hidden, a.padded_vocabulary / job.parallel.tensor)
    passes = LOGIT_PASSES * (4 / job.element if job.software.casts else 1)
    whole = job.parallel.tensor if not job.software.divides_head else 1  # each rank then has all logits
    others = product.rows * product.columns * whole * passes * rates.element
    gradients = sum(one.seconds(rates.products, device) for one in product.backward)
    return product.seconds(rates.products, device) + others, gradients + 2 * others


def _operators(job: Job) -> Operators:
    return OPERATORS.get(job.engine, FUSED_OPERATORS)


def _other_operators(job: Job) -> float:
    operators = _operators(job)
    return operators.cost * (operators.others_of_two if job.architecture.cross_attention else operators.others)


def _layer_operators(job: Job, part: Stage) -> float:
    """Operators that the layers of a stage dispatch for one micro-batch, forward and backward, by their cost."""
    a = job.architecture
    operators = _operators(job)
    norms = (2 if a.post_norms else 0) + (2 if a.query_key_norms else 0)
    layers = part.encoder_layers + part.decoder_layers
    further = NORM_OPERATORS * norms * layers
    if not a.cross_attention:
        return operators.cost * (operators.layer * layers + further)
    decoder = operators.encoder_layer if a.merged_attention else operators.decoder_layer
    counted = operators.encoder_layer * part.encoder_layers + decoder * part.decoder_layers + further
    return operators.cost * counted


def _hook_operators(job: Job, part: Stage) -> int:
    """Of what divides the states, around the layers' tensors."""
    layers = part.encoder_layers + part.decoder_layers
    is_unread = job.engine in UNREAD_MEMORY
    if job.fully_sharded or (job.zero.stage and is_unread):  # published ones are mostly PyTorch's FSDP
        return FSDP2_LAYER_OPERATORS * layers + FSDP2_ROOT_OPERATORS
    hooked = ENCODER_TENSORS * part.encoder_layers + DECODER_TENSORS * part.decoder_layers + OTHER_TENSORS
    return HOOK_OPERATORS[job.zero.stage] * hooked


class Sending(NamedTuple):
    """What of a collective's time does not depend on the links' figures."""

    collective: Collective
    bytes: float
    """That a rank sends to its neighbour."""
    has_inside: bool
    """Whether neighbours share a node."""
    leaving: int
    """How many rings leave the busiest node."""
    steps: int
    """Consecutive messages."""


@lru_cache(maxsize=16384)
def _sendings(job: Job, backend: str) -> list[Sending]:
    """Of all collectives of an iteration."""
    of_groups = paths(*layout_of_groups(job))
    return [_sending(collective, of_groups[collective.group], backend) for collective in collectives_of(job)]


def _sending(collective: Collective, path: tuple[int, bool, int], backend: str) -> Sending:
    size, has_inside, leaving = path
    sent = ring_bytes(collective, size, backend)
    if (collective.kind, size, backend) == ("all-gather", 2, "gloo"):
        sent *= GLOO_PAIR_GATHER
    return Sending(collective, sent, has_inside, leaving, steps(collective, size, backend))


def _sending_seconds(sending: Sending, machine: Machine, backend: str) -> float:
    """One collective, with all groups of its kind busy at the same time."""
    inside = sending.bytes / collective_bandwidth(machine.inside, backend) if sending.has_inside else 0.0
    between = sending.leaving * sending.bytes / collective_bandwidth(machine.between, backend)
    latency = machine.between.latency if sending.leaving else machine.inside.latency
    return max(inside, between) + sending.steps * latency


def collective_seconds(collective: Collective, job: Job, machine: Machine, backend: str = "nccl") -> float:
    """One collective, with all groups of its kind busy at the same time."""
    path = paths(*layout_of_groups(job))[collective.group]
    return _sending_seconds(_sending(collective, path, backend), machine, backend)


def collective_bandwidth(link: Link, backend: str) -> float:
    """The bytes per second that collectives reach."""
    return link.bandwidth if link.is_measured else link.bandwidth * NETWORK[backend]


def iteration(job: Job, machine: Machine, backend: str = "nccl", slower: float = 1.0) -> Time:
    """The seconds of an iteration by purpose, on the busiest stage.

    slower: how many times longer GPUs and hosts take than their figures say.
    """
    m = job.micro_batches
    stages = range(job.parallel.pipeline)
    passes = passes_of_stages(job, machine, slower)
    waits = _waits(job, machine, backend, passes, slower)
    forward = [
        way.with_queued(waits.queued_forward[stage]) + waits.forward[stage] for stage, (way, _) in enumerate(passes)
    ]
    backward = [
        way.with_queued(waits.queued_backward[stage]) + waits.backward[stage] for stage, (_, way) in enumerate(passes)
    ]
    parallel = job.parallel
    weights = weight_seconds(job, machine, slower)
    whole = schedule.duration(forward, backward, m, waits.transfer, parallel.virtual_stages, parallel.schedule, weights)
    busiest = max(stages, key=lambda stage: forward[stage] + backward[stage])
    computing = m * sum(way.gpu for way in passes[busiest])
    alone = sum(way.seconds for way in passes[busiest])
    waiting = m * (forward[busiest] + backward[busiest] - alone)
    waiting += _straggling_seconds(job, machine, busiest, m * alone)
    optimizer, offload = _update_seconds(job, machine.device, slower)
    return Time(
        computing=computing,
        host=m * alone - computing,
        bubble=max(0.0, whole - m * (forward[busiest] + backward[busiest])),
        communication=waiting + max(waits.once),
        optimizer=optimizer,
        offload=offload,
        hidden=max(waits.hidden),
    )


def _straggling_seconds(job: Job, machine: Machine, stage: int, computing: float) -> float:
    """What a stage waits in an iteration for processes that chance delays, if it computes for so many seconds."""
    parallel = job.parallel
    link = machine.between if parallel.world > parallel.devices_per_node else machine.inside
    if not link.straggling or parallel.world == 1:
        return 0.0
    meetings = 1  # at the end
    for collective in collectives_of(job):
        is_message = collective.kind in ("send", "send back")  # for which the schedule waits
        if stage in collective.stages and collective.when.startswith("each") and not is_message:
            meetings += collective.count
    return link.straggling * sqrt(meetings * computing)


@dataclass
class Waits:
    """Seconds that each stage waits for collectives."""

    forward: list[float]
    """In every forward pass of a micro-batch."""
    backward: list[float]
    queued_forward: list[float]
    """Of collectives in every forward pass that only the GPU's queue waits for, while the host goes on."""
    queued_backward: list[float]
    once: list[float]
    """In an iteration."""
    hidden: list[float]
    """What it computes meanwhile, in an iteration: it does not wait."""
    transfer: float = 0.0
    """From one stage to the next."""


def _waits(job: Job, machine: Machine, backend: str, passes: Sequence[tuple[Pass, Pass]], slower: float) -> Waits:
    m = job.micro_batches
    stages = len(passes)
    nothing = [0.0] * stages
    waits = Waits(list(nothing), list(nothing), list(nothing), list(nothing), list(nothing), list(nothing))
    # gloo computes on the host, which waits for it.
    in_forward = waits.forward if backend == "gloo" else waits.queued_forward
    in_backward = waits.backward if backend == "gloo" else waits.queued_backward
    overlapped: Counter[tuple[int, str]] = Counter()  # of a stage, what is sent while it computes
    for sending in _sendings(job, backend):
        collective = sending.collective
        seconds = collective.count * _sending_seconds(sending, machine, backend)
        if collective.kind in ("send", "send back"):
            if job.engine == "megatron":  # whoever sends waits, too (p2p_communication.py)
                ways = waits.forward if collective.kind == "send" else waits.backward
                for stage in collective.stages:
                    ways[stage] += seconds / m
            else:
                waits.transfer = max(waits.transfer, seconds / collective.count)
            continue
        # PyTorch hides FSDP2's collectives with CUDA's streams; on a CPU each is waited for (_fsdp_collectives.py).
        is_hidden = collective.overlap and not (job.fully_sharded and backend == "gloo")
        for stage in collective.stages:
            if is_hidden:
                overlapped[stage, collective.overlap] += seconds
            elif collective.when == "each forward":
                in_forward[stage] += seconds / m
            elif collective.when == "each backward":
                in_backward[stage] += seconds / m
            else:
                waits.once[stage] += seconds
    for (stage, overlap), seconds in overlapped.items():
        forward, backward = passes[stage]
        computing = forward.seconds if overlap in ("each forward", "first forward") else backward.seconds
        if overlap == LAST_WEIGHTS:
            computing = _weight_seconds(job, machine, stage, slower)
        if overlap.startswith("each"):
            computing *= m
        beside = min(seconds, computing)
        waits.hidden[stage] += beside
        waits.once[stage] += seconds - beside
    return waits


def _update_seconds(job: Job, device: Device, slower: float) -> tuple[float, float]:
    """The optimizer's step on its GPU; with offload instead the copies over PCIe and Adam on the CPU."""
    stages = range(job.parallel.pipeline)
    count = float(max(parameters(job.architecture, job.parallel, stage) for stage in stages))
    if job.zero.stage or job.fully_sharded or job.distributed_optimizer:
        count /= job.parallel.states_over
    offload = 0.0
    if job.zero.offload_parameters:
        # Its part of the parameters comes in, and of the gradients goes out, for every micro-batch.
        offload = job.micro_batches * 2 * count * job.element / device.pcie
    if job.zero.offload_optimizer:
        copies = count * (job.element + 4) / device.pcie
        return 0.0, (offload + copies + count / CPU_ADAM) * slower
    return count * OPTIMIZER_BYTES / (device.bandwidth * ELEMENTS) * slower, offload * slower


def calibrated(job: Job, machine: Machine, seconds: float, backend: str = "nccl") -> float:
    """How much slower than its figures a machine is, if this job took the measured seconds on it.

    Raises ValueError if the network alone would take longer.
    """

    def total(slower: float) -> float:
        return iteration(job, machine, backend, slower).total

    low = 0.0
    high = 1.0
    if total(low) > seconds:
        raise ValueError(f"sending alone takes {total(low):.3g} s at this link's rate, the iteration {seconds:.3g} s")
    while total(high) < seconds:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        if total(middle) < seconds:
            low = middle
        else:
            high = middle
    return high
