"""How gradients and parameters are cut into collectives: the buckets of PyTorch's DDP and of DeepSpeed's ZeRO.

torch 2.4 to 2.13, csrc/distributed/c10d/reducer.cpp; DeepSpeed 0.18.3, runtime/zero. Sizes are in elements.
"""

from collections.abc import Iterable, Sequence

from t5bench.costmodel.job import Job
from t5bench.costmodel.parameters import layer_shapes, tensors

FIRST_DDP_BUCKET = 2**20  # bytes
DDP_BUCKET = 25 * 2**20
ALIGNMENT = 2  # ZeRO-1 and 2 pad each group of parameters to this many elements on every rank


def in_order_of_gradients(job: Job, stage: int) -> list[int]:
    """A rank's parameters in the order in which the native engine's backward pass completes their gradients.

    That is the order of the forward pass, reversed; but the embeddings are used first and last, so they come last.
    Where gradients go through 16-bit copies at the end (casts_come_last), the positions come first, which have none.
    Weights that a zero-bubble schedule puts off come after all others.
    """
    by_part = tensors(job.architecture, job.parallel, stage)
    head = by_part["head"][::-1]
    layers = [*reversed(by_part["decoder"]), *reversed(by_part["encoder"])]
    put_off: list[int] = []
    if job.parallel.puts_off_weights(stage):
        put_off = weights_put_off(job, stage)
        layers = vectors_of_layers(job, stage)
    if not casts_come_last(job):
        return [*head, *layers, *reversed(by_part["embedding"]), *put_off]
    words = by_part["embedding"][:1]
    positions = by_part["embedding"][1:]
    return [*positions, *head, *words, *layers, *put_off]


def weights_put_off(job: Job, stage: int) -> list[int]:
    """The weights of linear layers, whose gradients a zero-bubble schedule can put off, from the last layer on.

    The head's is not among them.
    """
    return [size for size, is_weight in _of_layers(job, stage) if is_weight]


def vectors_of_layers(job: Job, stage: int) -> list[int]:
    """The other parameters of a stage's layers and the norms behind them, from the last on."""
    return [size for size, is_weight in _of_layers(job, stage) if not is_weight]


def _of_layers(job: Job, stage: int) -> list[tuple[int, bool]]:
    """The parameters of a stage's layers from the last on, and whether each is a linear layer's weight."""
    a = job.architecture
    by_part = tensors(a, job.parallel, stage)
    found: list[tuple[int, bool]] = []
    for is_decoder in (False, True):
        sizes = by_part["decoder" if is_decoder else "encoder"]
        are_weights = [len(shape) == 2 for shape in layer_shapes(a, job.parallel.tensor, is_decoder)]
        layers = len(sizes) // len(are_weights)
        before = 1 if layers and a.positions == "relative" else 0  # the table of positions
        rest = len(sizes) - before - layers * len(are_weights)
        found += list(zip(sizes, [*before * [False], *layers * are_weights, *rest * [False]], strict=True))
    return found[::-1]


def casts_come_last(job: Job) -> bool:
    """Whether all gradients of 16-bit copies are there before the first one is added to its parameter's in fp32.

    The native engine makes the copies in an iteration's first micro-batch, and autograd runs what was made first last.
    So from the second micro-batch on, nothing is reduced while the backward pass computes.
    """
    return job.casts_weights and job.micro_batches > 1


def ddp_buckets(job: Job, stage: int) -> list[int]:
    """Bytes of DDP's buckets from the second iteration on. A bucket is closed once it has reached its limit."""
    if job.parallel.virtual_stages > 1:  # each chunk has its own
        return [size for chunk in job.parallel.chunks_of(stage) for size in ddp_buckets(job.apart, chunk)]
    buckets: list[int] = []
    filled = 0
    limit = FIRST_DDP_BUCKET
    for size in in_order_of_gradients(job, stage):
        filled += 4 * size
        if filled >= limit:
            buckets.append(filled)
            filled = 0
            limit = DDP_BUCKET
    return [*buckets, filled] if filled else buckets


def zero_buckets(sizes: Iterable[int], limit: int) -> list[list[int]]:
    """The tensors of each of ZeRO's buckets: a bucket is sent before a tensor that would not fit into it any more."""
    buckets: list[list[int]] = [[]]
    for size in sizes:
        if buckets[-1] and sum(buckets[-1]) + size > limit:
            buckets.append([])
        buckets[-1].append(size)
    return buckets


def padded_to(ranks: int, sizes: Sequence[int]) -> int:
    """Elements of tensors of which each is divided evenly among ranks."""
    return sum(-(-size // ranks) * ranks for size in sizes)


def weights_and_vectors(job: Job, stage: int) -> tuple[int, int]:
    """Elements of a rank's matrices, which have weight decay, and of its biases and norms, which have none."""
    a = job.architecture
    tensor = job.parallel.tensor
    by_part = tensors(a, job.parallel, stage)
    whole = sum(sum(sizes) for sizes in by_part.values())
    vectors = sum(size for size in by_part["head"] if size == a.padded_vocabulary // tensor)
    for name in ("encoder", "decoder"):
        layers = by_part[name][1 if a.positions == "relative" else 0 :]  # without the table of positions
        shapes = layer_shapes(a, tensor, name == "decoder")
        count = len(layers) // len(shapes)
        vectors += count * sum(shape[0] for shape in shapes if len(shape) == 1)
        vectors += sum(size for size in layers[count * len(shapes) :] if size == a.hidden)  # the final norm
    return whole - vectors, vectors
