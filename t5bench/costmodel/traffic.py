"""Every collective of an iteration, and what a node's network interface counts of them.

As the engines do it: Megatron-DeepSpeed at commit 4efb479d (optimizer/optimizer.py, core/tensor_parallel,
core/pipeline_parallel), DeepSpeed 0.19.8 (runtime/zero), PyTorch 2.13 (distributed/fsdp/_fully_shard) and native/.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product
from math import ceil, log2, prod
from typing import Any

from t5bench import Problem
from t5bench.costmodel import buckets
from t5bench.costmodel.job import BYTES, Architecture, FullySharded, Job, Parallel, padded
from t5bench.costmodel.parameters import layer_shapes, parameters, shapes_of, stage_of, tensors

# Measured with torch 2.13's gloo over TCP: besides its data a message costs both ends together this much (two headers
# of 48 bytes, and packets' headers of 66), and the data cost one TCP/IP header per packet of 64 KiB that the interface
# receives. Links whose cards count packets of 1,500 bytes add 5 % instead.
MESSAGE = 350
HEADERS = 0.001
GLOO_SEGMENT = 2**20
MOST_RANKS = 100_000
LAST_WEIGHTS = "last gradients of weights"  # of a zero-bubble schedule, see schedule.order()


@dataclass(frozen=True)
class Collective:
    """A kind of collective: `count` of them an iteration in every `group` of these stages."""

    what: str
    group: str
    """A key of groups()."""
    kind: str
    """all-reduce, all-gather, reduce-scatter, broadcast; "send" to the next stage, "send back" to the previous one."""
    count: int
    bytes: float
    """Of one: an all-reduce's buffer, all that is gathered or scattered, or a message."""
    when: str
    overlap: str = ""
    """What is computed at the same time; "" if all ranks wait."""
    stages: tuple[int, ...] = ()


@lru_cache(maxsize=16384)
def collectives_of(job: Job) -> Sequence[Collective]:
    """All collectives of an iteration, except those in groups of one rank."""
    stages_by_collective: dict[tuple[Any, ...], list[int]] = {}  # by its fields but the stages
    apart = job.apart
    for stage in range(job.parallel.pipeline):
        counts: Counter[tuple[Any, ...]] = Counter()
        chunks = job.parallel.chunks_of(stage)
        tensor_parallel = (collective for chunk in chunks for collective in _tensor_parallel(apart, chunk))
        partial = _partial_gradients(job, stage)  # of all chunks together
        for one in (*_data_parallel(job, stage), *tensor_parallel, *partial, *_pipeline(job, stage)):
            if one.count and one.bytes:
                counts[one.what, one.group, one.kind, one.bytes, one.when, one.overlap] += one.count
        for kind, count in counts.items():
            stages_by_collective.setdefault((kind, count), []).append(stage)
    found: list[Collective] = []
    for (kind, count), stages in stages_by_collective.items():
        what, group, way, size, when, overlap = kind
        found.append(Collective(what, group, way, count, size, when, overlap, tuple(stages)))
    return tuple(found)


def large_tensors(job: Job, stage: int) -> int:
    """Elements of all tensors above ZeRO-3's persistence threshold, except the word embedding and the head."""
    by_part = tensors(job.architecture, job.parallel, stage)
    sizes = (*by_part["encoder"], *by_part["decoder"], *by_part["embedding"][1:])
    return sum(size for size in sizes if size > job.zero.persistence_threshold)


def _data_parallel(job: Job, stage: int) -> Iterator[Collective]:
    if job.parallel.data == 1:
        return
    if job.fully_sharded:
        yield from _fully_sharded(job, stage, job.fully_sharded)
        return
    if job.zero.stage:
        yield from _zero(job, stage)
    elif job.engine == "native":
        yield from _ddp(job, stage)
    else:
        yield from _megatron_data_parallel(job, stage)
    if job.engine == "megatron" and stage == job.parallel.pipeline - 1:
        yield Collective("loss", "data", "all-reduce", job.micro_batches, 4, "each forward")


def _ddp(job: Job, stage: int) -> Iterator[Collective]:
    """PyTorch's DistributedDataParallel."""
    overlap = "" if buckets.casts_come_last(job) else "last backward"
    if job.parallel.puts_off_weights(stage):
        overlap = LAST_WEIGHTS
    sizes = buckets.ddp_buckets(job, stage)
    for size, count in Counter(sizes[:-1]).items():
        yield Collective("gradients", "data", "all-reduce", count, size, overlap or "after backward", overlap)
    # Its last gradient, usually the tied embedding's, ends the backward pass.
    yield Collective("gradients", "data", "all-reduce", 1, sizes[-1], "after backward")


def _megatron_data_parallel(job: Job, stage: int) -> Iterator[Collective]:
    """Gradients in one buffer: bf16's are accumulated in fp32, those of Megatron-DeepSpeed's fp16 in fp16."""
    count = parameters(job.architecture, job.parallel, stage)
    width = 2 if job.engine == "megatron" and job.precision == "fp16" else 4
    if job.distributed_optimizer and job.overlaps:
        part = stage_of(job.architecture, job.parallel, stage)
        layers = max(1, part.encoder_layers + part.decoder_layers)
        gradients = Collective("gradients", "data", "reduce-scatter", 1, width * count, "last backward")
        weights = Collective("parameters", "data", "all-gather", 1, count * job.element, "first forward")
        yield from _in_pieces(gradients, layers)
        yield from _in_pieces(weights, layers)
    elif job.distributed_optimizer:
        yield Collective("gradients", "data", "reduce-scatter", 1, width * count, "after backward")
        yield Collective("parameters", "data", "all-gather", 1, count * job.element, "after the optimizer")
    else:
        yield Collective("gradients", "data", "all-reduce", 1, width * count, "after backward")


def _in_pieces(collective: Collective, pieces: int) -> Iterator[Collective]:
    """The same in pieces, of which one is waited for; the others are sent while the pass is computed.

    NVIDIA/NeMo, docs/source/features/optimizations/communication_overlap.rst.
    """
    piece = collective.bytes / pieces
    others = collective.count * (pieces - 1)
    yield Collective(collective.what, collective.group, collective.kind, collective.count, piece, collective.when)
    yield Collective(
        collective.what, collective.group, collective.kind, others, piece, collective.when, collective.when
    )


def _zero(job: Job, stage: int) -> Iterator[Collective]:
    zero = job.zero
    count = parameters(job.architecture, job.parallel, stage)
    gradients = count * BYTES[zero.reduction or job.precision]  # ZeRO has its own dtype for sending gradients
    kind = "reduce-scatter" if zero.stage == 3 else "all-reduce"
    times = job.micro_batches if zero.stage > 1 and not job.reduces_once else 1
    when = "each backward" if times > 1 else "after backward"
    overlap = "each backward" if zero.overlap and zero.stage > 1 and not job.reduces_once else ""
    for elements, number in Counter(_zero_buckets(job, stage)).items():
        yield Collective("gradients", "data", kind, times * number, gradients / count * elements, when, overlap)
    # stage3.py adds up squares in fp64, but fp32 ones if the CPU has the optimizer.
    norm = 8 if zero.stage == 3 and not zero.offload_optimizer else 4
    yield Collective("gradient norm", "data", "all-reduce", 2, norm, "optimizer")
    # Is a gradient infinite? ZeRO-3 asks in fp16 alone; ZeRO-1 and 2 in bf16 too since 0.19.3 (check_grad_overflow).
    # Other software's measurements are of older releases.
    asks_in_bf16 = zero.stage < 3 and job.engine in ("native", "megatron")
    if job.precision == "fp16" or (job.precision == "bf16" and asks_in_bf16):
        yield Collective("overflow", "data", "all-reduce", 1, 1, "optimizer")
    if zero.stage == 3:
        yield from _gathers(job, stage)
        return
    for group in buckets.weights_and_vectors(job, stage):
        whole = padded(group, buckets.ALIGNMENT, job.parallel.data)
        yield Collective("parameters", "data", "all-gather", 1, whole * job.element, "after the optimizer")


def sharded_groups(job: Job, stage: int = 0) -> list[tuple[str, int, int]]:
    """FSDP2's groups of parameters, which are gathered together: what, how many such groups, elements of one.

    A layer's tensors are divided along their first dimension, whose rows are padded (_fsdp_param.py). The root has the
    rest.
    """
    a = job.architecture
    n = job.parallel.states_over
    part = stage_of(a, job.parallel, stage)
    stacks = (("encoder", part.encoder_layers, False), ("decoder", part.decoder_layers, True))
    groups_of_layers: list[tuple[str, int, int]] = []
    every_shape = Counter(shape for shapes in shapes_of(a, job.parallel, stage).values() for shape in shapes)
    rest = sum(count * _with_padded_rows(shape, n) for shape, count in every_shape.items())
    for name, layers, is_decoder in stacks:
        if not layers:
            continue
        shapes = layer_shapes(a, job.parallel.tensor, is_decoder)
        padded_elements = sum(_with_padded_rows(shape, n) for shape in shapes)
        rest -= layers * padded_elements
        groups_of_layers.append((f"{name} layers", layers, padded_elements))
    return [*groups_of_layers, ("embedding and rest", 1, rest)]


def _with_padded_rows(shape: Sequence[int], ranks: int) -> int:
    """Elements of a tensor whose rows are divided evenly among ranks."""
    return ceil(shape[0] / ranks) * ranks * prod(shape[1:])


def _fully_sharded(job: Job, stage: int, how: FullySharded) -> Iterator[Collective]:
    """FSDP2 (_fsdp_param_group.py) as native/fsdp2.py asks for it.

    A layer is gathered for every forward and again for every backward pass; the root, which is used last in forward and
    first in backward, once a micro-batch. Gradients are reduced in the last micro-batch, in fp32; each copy of the
    states then adds up what the others have.
    """
    m = job.micro_batches
    n = job.parallel.states_over
    group = "shard" if job.parallel.shards else "data"
    for what, count, elements in sharded_groups(job, stage):
        gathered = elements * job.element
        if how.keeps_parameters:
            yield Collective(what, group, "all-gather", count, gathered, "first forward")
        else:
            yield Collective(what, group, "all-gather", m * count, gathered, "each forward", "each forward")
        if not how.keeps_parameters and "layers" in what:
            yield Collective(what, group, "all-gather", m * count, gathered, "each backward", "each backward")
        yield Collective(
            f"gradients of {what}", group, "reduce-scatter", count, 4 * elements, "last backward", "last backward"
        )
        if n < job.parallel.data:
            shard = 4 * elements / n
            yield Collective(
                f"gradients of {what}", "replica", "all-reduce", count, shard, "last backward", "last backward"
            )
    yield Collective("gradient norm", group, "all-reduce", 1, 4, "optimizer")


def _zero_buckets(job: Job, stage: int) -> list[int]:
    """Elements of ZeRO's buckets. In which order Megatron's gradients come was not traced: its buckets are equal."""
    size = parameters(job.architecture, job.parallel, stage)
    limit = job.zero.reduce_bucket
    if job.engine != "native":
        count = ceil(size / limit)
        return [size / count] * count
    ranks = job.parallel.data if job.zero.stage == 3 else 1
    sizes = buckets.in_order_of_gradients(job, stage)
    return [buckets.padded_to(ranks, bucket) for bucket in buckets.zero_buckets(sizes, limit)]


def _gathers(job: Job, stage: int) -> Iterator[Collective]:
    """ZeRO-3 (partitioned_param_coordinator.py): small tensors stay whole, and are gathered after each change.

    The others are gathered for every micro-batch, once for forward and backward together if fewer elements than the
    reuse distance lie between the two. The embedding's inputs are tokens, which have no gradient, so DeepSpeed's hook
    after its backward pass does not run, and the embedding stays. Up to 0.19.2 it stayed until the optimizer's step;
    since 0.19.3 it is released after each micro-batch (release_backward_leftovers, #8148).
    """
    zero = job.zero
    m = job.micro_batches
    whole = parameters(job.architecture, job.parallel, stage)
    large = large_tensors(job, stage)
    embedding = job.architecture.padded_vocabulary // job.parallel.tensor * job.architecture.hidden
    external = embedding if embedding > zero.persistence_threshold else 0
    fetches = max(1, ceil(large / zero.prefetch_bucket))
    gathered_again = max(0.0, 1 - zero.reuse_distance / (2 * whole))
    for share, when in ((1.0, "each forward"), (gathered_again, "each backward")):
        fetch = share * large * job.element / fetches
        yield Collective("parameters", "data", "all-gather", m, fetch, when)  # the first is waited for
        yield Collective("parameters", "data", "all-gather", m * (fetches - 1), fetch, when, when)
    if job.engine not in ("native", "megatron"):
        # Other software, whose measurements are of older releases; it may gather small ones together.
        small = whole - large - external
        yield Collective("embedding", "data", "all-gather", 1, external * job.element, "first forward")
        yield Collective("small parameters", "data", "all-gather", 1, small * job.element, "after the optimizer")
        return
    yield Collective("embedding", "data", "all-gather", m, external * job.element, "each forward")
    sizes = chain.from_iterable(tensors(job.architecture, job.parallel, stage).values())
    small_sizes = [size for size in sizes if size <= zero.persistence_threshold]
    for size, count in Counter(small_sizes).items():
        one = buckets.padded_to(job.parallel.data, [size]) * job.element
        yield Collective("small parameters", "data", "all-gather", count, one, "after the optimizer")


def _tensor_parallel(job: Job, stage: int) -> Iterator[Collective]:
    if job.parallel.tensor == 1:
        return
    a = job.architecture
    m = job.micro_batches
    last = job.parallel.pipeline - 1
    if job.engine == "native" and job.parallel.sequence_parallel:
        yield from _divided_activations(job, stage)
    else:
        yield from _whole_activations(job, stage)
    if stage_of(a, job.parallel, stage).head:
        loss = 4 * a.output_length * job.micro_batch
        yield Collective("cross entropy", "tensor", "all-reduce", 3 * m, loss, "each forward")
    if job.parallel.deepspeed:
        # Each rank sends a slice to the other stage, where the slices are gathered again (pipe_partitioned).
        activations = a.decoder_length * job.micro_batch * a.hidden * job.element
        if stage > 0:
            yield Collective("activations", "tensor", "all-gather", m, activations, "each forward")
        if stage < last:
            yield Collective("activations", "tensor", "all-gather", 2 * m, activations, "each backward")
    if job.engine == "megatron" and (stage in (0, last) or not job.parallel.deepspeed):
        s = a.encoder_length
        d = a.decoder_length
        numbers = d + 1
        if a.cross_attention:  # tokens, labels and loss mask, and the three masks of attention
            numbers = s + 3 * d + s * s + d * d + s * d
        yield Collective("batch", "tensor", "broadcast", m, 8 * job.micro_batch * numbers, "each forward")


def _stacks(job: Job, stage: int) -> list[tuple[str, int, int, int]]:
    """A stage's encoder and decoder if it has them: name, layers, tokens of a sample, blocks in all layers."""
    a = job.architecture
    part = stage_of(a, job.parallel, stage)
    stacks = [
        ("encoder", part.encoder_layers, a.encoder_length, 1 + len(a.attended(False))),
        ("decoder", part.decoder_layers, a.decoder_length, 1 + len(a.attended(True))),
    ]
    return [(name, layers, length, layers * blocks) for name, layers, length, blocks in stacks if layers]


def _whole_activations(job: Job, stage: int) -> Iterator[Collective]:
    """Shoeybi et al. (https://arxiv.org/abs/1909.08053): an all-reduce after each block, and one before it in backward.

    Under the sequence parallelism of other software it is a reduce-scatter and an all-gather of the same bytes, and
    backward gathers once more (https://arxiv.org/abs/2205.05198).
    """
    a = job.architecture
    m = job.micro_batches
    part = stage_of(a, job.parallel, stage)
    stacks = _stacks(job, stage)
    per_token = job.micro_batch * a.hidden * job.element

    def collective(what: str, count: int, length: float, when: str) -> Collective:
        return Collective(what, "tensor", "all-reduce", m * count, length * per_token, when)

    forwards = 2 if job.recompute == "full" else 1
    backwards = 1.5 if job.parallel.sequence_parallel else 1
    for name, _, length, blocks in stacks:
        forward = collective(f"{name} blocks", blocks * forwards, length, "each forward")
        backward = collective(f"{name} blocks", blocks, length * backwards, "each backward")
        # Transformer Engine multiplies what one rank has sent while the next one sends.
        pieces = job.parallel.tensor if job.overlaps and job.parallel.sequence_parallel else 1
        yield from _in_pieces(forward, pieces)
        yield from _in_pieces(backward, pieces)
    if job.recompute == "full" and job.partitions_inputs:
        # DeepSpeed's runtime/activation_checkpointing/checkpointing.py, gather_partitioned_activations.
        for name, layers, length, _ in stacks:
            inputs = length * per_token
            yield Collective(f"{name} inputs", "tensor", "all-gather", m * layers, inputs, "each backward")
    if part.decoder_layers and a.cross_attention:
        # Every layer's keys and values come from the encoder's output; the native engine sums their gradients first.
        sums = 1 if job.engine == "native" else part.decoder_layers
        yield collective("encoder output", sums, a.encoder_length, "each backward")
    for _, _, length, _ in stacks:
        if part.embedding:
            yield collective("embedding", 1, length, "each forward")
    if part.head:
        yield collective("head", 1, a.output_length, "each backward")


def _divided_activations(job: Job, stage: int) -> Iterator[Collective]:
    """Sequence parallelism (https://arxiv.org/abs/2205.05198) as in native/sequence_parallel.py.

    Tokens are gathered before a block and scattered after it, and once more each in backward; there the block's first
    layer also gathers its input again.
    """
    a = job.architecture
    m = job.micro_batches
    part = stage_of(a, job.parallel, stage)
    stacks = _stacks(job, stage)
    per_token = job.micro_batch * a.hidden * job.element

    def collective(what: str, kind: str, count: int, length: int, when: str) -> Collective:
        return Collective(what, "tensor", kind, m * count, length * per_token, when)

    forwards = 2 if job.recompute == "full" else 1
    for name, _, length, blocks in stacks:
        yield collective(f"{name} blocks", "all-gather", blocks * forwards, length, "each forward")
        yield collective(f"{name} blocks", "reduce-scatter", blocks * forwards, length, "each forward")
        yield collective(f"{name} blocks", "all-gather", 2 * blocks, length, "each backward")
        yield collective(f"{name} blocks", "reduce-scatter", blocks, length, "each backward")
    if part.decoder_layers and a.cross_attention:  # gathered once for the keys and values of all layers
        yield collective("encoder output", "all-gather", 1, a.encoder_length, "each forward")
        yield collective("encoder output", "reduce-scatter", 1, a.encoder_length, "each backward")
    for _, _, length, _ in stacks:
        if part.embedding:
            yield collective("embedding", "reduce-scatter", 1, length, "each forward")
            yield collective("embedding", "all-gather", 1, length, "each backward")
    if part.head:
        yield collective("head", "all-gather", 1, a.output_length, "each forward")
        yield collective("head", "reduce-scatter", 1, a.output_length, "each backward")


def _partial_gradients(job: Job, stage: int) -> Iterator[Collective]:
    """What the native engine's tensor-parallel ranks have terms of (sum_partial_gradients).

    With sequence parallelism the gradients of what each rank applied to its own tokens: of all that is not divided.
    Without it those of norms that each rank applied to its own heads. And those of keys and values that several ranks
    hold.
    """
    t = job.parallel.tensor
    if t == 1 or job.engine != "native":
        return
    a = job.architecture
    part = stage_of(a, job.parallel, stage)
    layers = part.encoder_layers + part.decoder_layers
    shards = job.parallel.states_over if job.fully_sharded else 1  # each rank sums what it has of these
    undivided = 2 * layers * ceil(a.head_size / shards) if a.query_key_norms else 0
    if job.parallel.sequence_parallel:
        undivided = sum(_undivided(job, stage))
    yield Collective("gradients of undivided parameters", "tensor", "all-reduce", 1, 4 * undivided, "after backward")
    if a.copies_of_keys(t) > 1:
        columns = a.hidden + (1 if a.biases or a.query_biases else 0)
        size = 4 * layers * columns * ceil(2 * a.head_size / shards)
        yield Collective("gradients of keys and values", "keys", "all-reduce", 1, size, "after backward")


def _undivided(job: Job, stage: int) -> Iterator[int]:
    """Elements of the parameters of a stage that every tensor-parallel rank has as a whole."""
    a = job.architecture
    by_part = tensors(a, job.parallel, stage)
    part = stage_of(a, job.parallel, stage)
    norm = a.hidden * (2 if a.norm == "layer" else 1)
    bias = a.hidden if a.biases or a.output_biases else 0  # of an attention's last linear layer
    bias_of_ffn = a.hidden if a.biases or a.ffn_biases else 0
    stacks = ((part.encoder_layers, False, part.encoder_end), (part.decoder_layers, True, part.head))
    for layers, is_decoder, ends in stacks:
        attentions = len(a.attended(is_decoder))
        yield layers * (norm + bias_of_ffn)
        yield layers * attentions * (norm + bias + (2 * a.head_size if a.query_key_norms else 0))
        if layers and ends and a.final_norm:
            yield norm
    yield part.embeddings * sum(by_part["embedding"][1 : len(by_part["embedding"]) // max(1, part.embeddings)])


def _pipeline(job: Job, stage: int) -> Iterator[Collective]:
    yield from _model_parallel_norm(job)
    if job.parallel.pipeline > 1:
        yield from _stages(job, stage)


def _model_parallel_norm(job: Job) -> Iterator[Collective]:
    parallel = job.parallel
    if job.engine == "native":  # along one axis after the other
        for group, size in (("tensor", parallel.tensor), ("pipeline", parallel.pipeline)):
            if size > 1:
                yield Collective("gradient norm", group, "all-reduce", 1, 4, "optimizer")
    elif parallel.tensor * parallel.pipeline > 1:
        yield Collective("gradient norm", "model", "all-reduce", 1, 4, "optimizer")


def _stages(job: Job, stage: int) -> Iterator[Collective]:
    """What stages send to each other, and what they both hold."""
    a = job.architecture
    parallel = job.parallel
    last = parallel.chunks - 1
    slices = parallel.tensor if parallel.deepspeed else parallel.sequence
    token = job.micro_batch * job.element * a.hidden / slices
    for chunk in parallel.chunks_of(stage):
        for source, kind, when in ((chunk, "send", "each forward"), (chunk - 1, "send back", "each backward")):
            if 0 <= source < last:
                length = a.encoder_length or a.decoder_length
                if a.cross_attention and source >= parallel.decoder_stage:
                    # Within the decoder the encoder's output is sent along.
                    length = a.encoder_length + a.decoder_length
                yield Collective("activations", "pipeline", kind, job.micro_batches, length * token, when, "computing")
    part = stage_of(a, parallel, stage)
    if a.tied and (part.embedding or part.head):
        # In fp32; DeepSpeed's pipeline engine reduces the parameter's own gradient (runtime/pipe/engine.py).
        width = job.element if parallel.deepspeed else 4
        word = -(-a.padded_vocabulary // parallel.tensor) * a.hidden * width
        yield Collective("tied embedding", "embedding", "all-reduce", 1, word, "after backward")
    if not (a.cross_attention and parallel.decoder_stage % parallel.pipeline):
        apart = False  # both stacks begin on the same stage
    else:
        apart = part.embedding
    if apart and a.positions == "learned":
        yield Collective("positions", "position", "all-reduce", 1, a.position_rows * a.hidden * 4, "after backward")
    if apart and not a.tied:
        word = -(-a.padded_vocabulary // parallel.tensor) * a.hidden * 4
        yield Collective("embedding", "position", "all-reduce", 1, word, "after backward")
    if _relative(a):
        table = 4 * a.relative_buckets * a.heads // parallel.tensor
        for stack, layers in (("encoder", part.encoder_layers), ("decoder", part.decoder_layers)):
            stages = _stages_of(stack, parallel)
            if layers and len(stages) > 1:
                yield Collective("relative positions", f"{stack} stages", "all-reduce", 1, table, "after backward")


def _stages_of(stack: str, parallel: Parallel) -> list[int]:
    """The pipeline stages that have layers of an encoder-decoder's stack."""
    chunks = range(parallel.decoder_stage) if stack == "encoder" else range(parallel.decoder_stage, parallel.chunks)
    return sorted({chunk % parallel.pipeline for chunk in chunks})


def groups_of(job: Job) -> dict[str, list[tuple[int, ...]]]:
    """The process groups of a job."""
    return groups(*layout_of_groups(job))


def layout_of_groups(job: Job) -> tuple[Parallel, bool, bool, int]:
    """What groups() must know of a job."""
    a = job.architecture
    return job.parallel, a.cross_attention, _relative(a), a.copies_of_keys(job.parallel.tensor)


def _relative(a: Architecture) -> bool:
    """Whether the pipeline stages of a stack have copies of a table of relative positions."""
    return a.cross_attention and a.positions == "relative"


def groups(
    parallel: Parallel, encoder_decoder: bool = True, relative: bool = False, copies_of_keys: int = 1
) -> dict[str, list[tuple[int, ...]]]:
    """Every process group by its kind, each with its ranks in order, in Megatron's numbering.

    "embedding": the stages that hold the tied word embedding. "position": those that hold the positions' table, which
    in an encoder-decoder are the first of each stack (Megatron-DeepSpeed, megatron/core/parallel_state.py). relative:
    an encoder's stages have copies of a table of positions, and a decoder's. copies_of_keys: tensor-parallel ranks
    that hold the same keys and values.
    Raises Problem where there are more ranks than can be listed one by one.
    """
    t = parallel.tensor
    d = parallel.data
    world = parallel.world
    if world > MOST_RANKS:
        raise Problem(f"{world} GPUs are more than {MOST_RANKS}", "Choose fewer GPUs")
    stage_size = t * d  # ranks of a stage, which follow one another; a replica's slices do so within it
    starts = range(0, world, stage_size)
    tensor = [tuple(range(first, first + t)) for first in range(0, world, t)]
    data = [tuple(range(start + part, start + stage_size, t)) for start, part in product(starts, range(t))]
    pipelines = [tuple(range(first, world, stage_size)) for first in range(stage_size)]
    models = [
        tuple(start + first + part for start, part in product(starts, range(t))) for first in range(0, stage_size, t)
    ]
    last = parallel.pipeline - 1
    with_positions = {0, parallel.decoder_stage % parallel.pipeline} if encoder_decoder and last else {0}
    with_words = with_positions | {last}
    copies = {}
    if parallel.shards:  # FSDP2's: neighbours share the states, and each has its equal in every other copy
        size = parallel.shards
        copies["shard"] = [members[at : at + size] for members in data for at in range(0, d, size)]
        copies["replica"] = [members[at::size] for members in data for at in range(size)]
    if relative and last:
        for stack in ("encoder", "decoder"):
            with_layers = _stages_of(stack, parallel)
            copies[f"{stack} stages"] = [tuple(members[stage] for stage in with_layers) for members in pipelines]
    if copies_of_keys > 1:
        size = copies_of_keys
        copies["keys"] = [members[at : at + size] for members in tensor for at in range(0, t, size)]
    return {
        "tensor": tensor,
        "data": data,
        **copies,
        "pipeline": pipelines,
        "model": models,
        "embedding": [tuple(members[stage] for stage in sorted(with_words)) for members in pipelines],
        "position": [tuple(members[stage] for stage in sorted(with_positions)) for members in pipelines],
        "world": [tuple(range(world))],
    }


def _rounds(kind: str, backend: str) -> int:
    """How many times data go round the ring. gloo's reduce-scatter is an all-reduce; each rank keeps its part."""
    scatter = 2 if backend == "gloo" else 1
    return {"all-reduce": 2, "reduce-scatter": scatter, "all-gather": 1}.get(kind, 0)  # others go one way


def ring_bytes(collective: Collective, size: int, backend: str) -> float:
    """Bytes that a rank sends to its neighbour in the ring, for one collective of `size` ranks or a whole message."""
    rounds = _rounds(collective.kind, backend)
    if rounds:
        return collective.bytes * (rounds * (size - 1) / size)
    return collective.bytes if size > 1 else 0.0


def steps(collective: Collective, size: int, backend: str) -> int:
    """Consecutive messages of a collective: those of a ring, or of NCCL's tree if that has fewer."""
    rounds = _rounds(collective.kind, backend)
    tree = ceil(log2(size))
    if not rounds:
        return tree if collective.kind == "broadcast" else 1
    ring = rounds * (size - 1)
    return ring if backend == "gloo" else min(ring, 4 * tree)


def neighbours(
    kind: str, members: tuple[int, ...], backend: str = "nccl", is_ring: bool = False
) -> Iterator[tuple[int, int]]:
    """Who sends to whom, (from, to), in one group; every pair carries ring_bytes. A pipeline's ends are not joined,
    unless `is_ring`."""
    if kind == "send back":
        members = members[::-1]
    if kind == "broadcast" and backend == "gloo":  # a binomial tree from the first rank
        return ((members[i - 2 ** int(log2(i))], members[i]) for i in range(1, len(members)))
    is_closed = len(members) > 1 and (is_ring or _rounds(kind, backend) > 0)
    next_ones = members[1:] + members[:1] if is_closed else members[1:]
    return zip(members, next_ones, strict=False)


def node_bytes(job: Job, collectives: Sequence[Collective], backend: str) -> list[float]:
    """Bytes that each node sends to other nodes in an iteration, including headers if they are known."""
    parallel = job.parallel
    per_node = parallel.devices_per_node
    ranks_of_stage = parallel.tensor * parallel.data
    nodes = [0.0] * ceil(parallel.world / per_node)
    members_by_group = groups_of(job)
    for collective in collectives:
        groups_of_kind = members_by_group[collective.group]
        size = len(groups_of_kind[0])
        data = ring_bytes(collective, size, backend) * collective.count
        headers = 0.0  # of each of the two ends
        if backend == "gloo":
            data *= 1 + HEADERS
            headers = MESSAGE / 2 * _gloo_messages(collective, size)
        is_of_every_stage = collective.group in ("model", "embedding", "position", "encoder stages", "decoder stages")
        for members in groups_of_kind:
            # From the last stage to the first goes what has another chunk of layers before it.
            is_ring = collective.kind in ("send", "send back") and parallel.virtual_stages > 1
            for source, target in neighbours(collective.kind, members, backend, is_ring):
                sender = source // per_node
                receiver = target // per_node
                if sender != receiver and (is_of_every_stage or source // ranks_of_stage in collective.stages):
                    nodes[sender] += data + headers
                    nodes[receiver] += headers
    return nodes


def _gloo_messages(collective: Collective, size: int) -> float:
    """Messages that a rank sends in all collectives of a collective."""
    segments = max(2, ceil(collective.bytes / size / GLOO_SEGMENT))
    return collective.count * (segments * _rounds(collective.kind, "gloo") * (size - 1) or 1)


def paths(
    parallel: Parallel, encoder_decoder: bool, relative: bool = False, copies_of_keys: int = 1
) -> Mapping[str, tuple[int, bool, int]]:
    """A kind of group: its size, whether neighbours share a node, and how many of its rings leave the busiest node.

    What pipelines send goes one way at a time.
    """
    # Without what groups do not depend on, so that each layout's are followed once.
    plain = Parallel(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        data=parallel.data,
        split_rank=parallel.decoder_stage % parallel.pipeline if encoder_decoder else 0,
        devices_per_node=parallel.devices_per_node,
        shards=parallel.shards,
    )
    if relative:
        plain = replace(plain, split_rank=parallel.decoder_stage, virtual_stages=parallel.virtual_stages)
    return _paths(plain, encoder_decoder, relative, copies_of_keys)


@lru_cache(maxsize=4096)
def _paths(
    parallel: Parallel, encoder_decoder: bool, relative: bool, copies_of_keys: int
) -> Mapping[str, tuple[int, bool, int]]:
    per_node = parallel.devices_per_node
    found: dict[str, tuple[int, bool, int]] = {}
    for kind, members_of_groups in groups(parallel, encoder_decoder, relative, copies_of_keys).items():
        way = "send" if kind == "pipeline" else "all-reduce"
        inside = False
        leaving: dict[int, int] = {}  # rings by the node that they leave
        nodes_of_groups = [tuple([member // per_node for member in members]) for members in members_of_groups]
        pairs = Counter(chain(*[neighbours(way, nodes) for nodes in nodes_of_groups]))
        for (source, target), count in pairs.items():
            if source == target:
                inside = True
            else:
                leaving[source] = leaving.get(source, 0) + count
        found[kind] = (len(members_of_groups[0]), inside, max(leaving.values(), default=0))
    return found
