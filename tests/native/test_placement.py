"""Where the native engine's tensors are on a GPU, and what it sends, in one process and without a GPU.

The GPU is PyTorch's device "meta". Fake tensors there know their device and compute nothing, and an operation that
mixes devices raises.
"""

from argparse import Namespace
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from command_lines import parsed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from native import data_parallel, pipeline_parallel
from native.data import Batch
from native.parallel import Mesh
from native.pipeline_parallel import PipelineTrainer
from native.tensor_parallel import SharedDropout
from native.trainers import make_trainer
from t5bench.costmodel import traffic
from t5bench.costmodel.job import Architecture, FullySharded, Job, Parallel

GPU = torch.device("meta")
ADAMW = torch.optim.AdamW
Patch = pytest.MonkeyPatch


@pytest.fixture
def args() -> Namespace:
    sizes = ["--encoder-num-layers", "1", "--decoder-num-layers", "1", "--global-batch-size", "4"]
    args = parsed("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--bf16", *sizes)
    args.device = GPU
    with FakeTensorMode():
        yield args


def batch(args: Namespace, device: torch.device = GPU) -> Batch:
    rows = args.global_batch_size
    lengths = (args.encoder_seq_length, args.decoder_seq_length, args.decoder_seq_length)
    return tuple(torch.ones(rows, length, dtype=torch.int64, device=device) for length in lengths)


def test_an_iteration_stays_on_the_device(args: Namespace, monkeypatch: Patch):
    # The fused kernel is for real devices alone.
    monkeypatch.setattr(torch.optim, "AdamW", lambda *groups, **options: ADAMW(*groups, **options | {"fused": False}))
    trainer = data_parallel.TorchTrainer(args, Mesh())
    loss, norm = trainer.step(batch(args), 1e-3)
    moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    parameters = list(trainer.model.parameters())
    assert len(moments) == len(parameters)
    assert {tensor.device for tensor in (loss, norm, *moments, *parameters)} == {GPU}
    assert trainer.evaluate(batch(args)).device == GPU
    with pytest.raises(RuntimeError, match="device"):
        trainer.step(batch(args, torch.device("cpu")), 1e-3)


def test_tensor_parallel_dropout_draws_on_the_device(args: Namespace):
    mesh = Mesh()
    mesh.tp.size = 2
    assert SharedDropout(0.5, mesh.tp)(torch.ones(4, 8, device=GPU, requires_grad=True)).device == GPU


@pytest.mark.parametrize(("backend", "place"), [("gloo", "cpu"), ("nccl", "meta")])
def test_pipeline_stages_exchange_where_the_backend_can(args: Namespace, monkeypatch: Patch, backend: str, place: str):
    """Over gloo through host memory. What one stage sends has the form that the other receives."""
    messages = []
    work = Namespace(wait=lambda: None, is_completed=lambda: False)

    def transfer(way: str):
        return lambda tensor, *other: messages.append((way, tensor)) or work

    monkeypatch.setattr("torch.distributed.get_backend", lambda: backend)
    monkeypatch.setattr("torch.distributed.get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr("torch.distributed.isend", transfer("send"))
    monkeypatch.setattr("torch.distributed.irecv", transfer("receive"))
    monkeypatch.setattr(pipeline_parallel, "group_of", lambda stages, mesh: None)
    mesh = Mesh()
    mesh.pp.size = 2
    for mesh.pp.rank in (0, 1):
        trainer = PipelineTrainer(args, mesh)
        assert trainer.forward_backward(data_parallel.split_batch(batch(args), args)).device == GPU
        assert trainer.evaluate(batch(args)).device == GPU
    count = args.micro_batches
    assert [way for way, _ in messages].count("send") == [way for way, _ in messages].count("receive") == 3 * count
    forms = {(tensor.device.type, tensor.dtype, tuple(tensor.shape)) for _, tensor in messages}
    assert forms == {(place, torch.bfloat16, (args.micro_batch_size, 64, 64))}


class Collectives(TorchDispatchMode):
    """Count and bytes of each kind of collective that goes through PyTorch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            entry = self.seen[function.__name__.partition(".")[0]]
            entry[0] += 1
            # The whole of what is gathered or scattered: the larger one of output and input.
            tensors = [args[0], args[1]] if "_base_" in function.__name__ else args[:1]
            sizes = [
                sum(tensor.nbytes for tensor in ([each] if isinstance(each, torch.Tensor) else each))
                for each in tensors
            ]
            entry[1] += max(sizes)
        return function(*args, **(kwargs or {}))


def test_the_native_engine_sends_these_collectives():
    """One tensor-parallel rank of two, in one process: what the other would send is not waited for."""
    args = parsed(TENSOR_PARALLEL_SIZE="1", MICRO_BATCH_SIZE="2", GLOBAL_BATCH_SIZE="8")
    args.tp = 2
    args.world_size = 2
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        trainer = make_trainer(args, Mesh.build(1, 1, 2, args.device, args.seed))
        args.micro_batches = 4
        with Collectives() as counter:
            trainer.step(batch(args, torch.device("cpu")), 1e-4)
    finally:
        dist.destroy_process_group()
    architecture = Architecture.of_arguments(vars(args), args.padded_vocab_size)
    job = Job(architecture, Parallel(tensor=2), 2, 8, precision="fp32", engine="native")
    found = traffic.collectives_of(job)
    # The norm is reduced over the tensor group; without a pipeline that is the model's.
    assert {row.kind for row in found} == {"all-reduce"}
    assert dict(counter.seen) == {"allreduce_": [sum(r.count for r in found), sum(r.count * r.bytes for r in found)]}


KINDS = {"all-gather": "_allgather_base_", "reduce-scatter": "_reduce_scatter_base_", "all-reduce": "allreduce_"}


@pytest.mark.parametrize(
    ("flags", "sharding", "shards"),
    [
        ([], FullySharded(), 0),
        (["--bf16"], FullySharded(), 0),
        (["--fsdp2-keep-parameters"], FullySharded(keeps_parameters=True), 0),
        (["--fsdp2-shard-size", "2"], FullySharded(), 2),
    ],
)
def test_fsdp2_sends_these_collectives(monkeypatch: Patch, flags: list[str], sharding: FullySharded, shards: int):
    """One data-parallel rank of four, in two micro-batches, byte for byte."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = parsed("--fsdp2", *flags, MICRO_BATCH_SIZE="2", GLOBAL_BATCH_SIZE="16")
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        trainer = make_trainer(args, Mesh.build(1, 4, 1, args.device, args.seed))
        own = tuple(tensor[:4] for tensor in batch(args, torch.device("cpu")))
        trainer.step(own, 1e-4)  # the first iteration sets things up
        with Collectives() as counter:
            trainer.step(own, 1e-4)
    finally:
        dist.destroy_process_group()
    architecture = Architecture.of_arguments(vars(args), args.padded_vocab_size)
    precision = "bf16" if args.bf16 else "fp32"
    parallel = Parallel(data=4, shards=shards)
    job = Job(architecture, parallel, 2, 16, fully_sharded=sharding, precision=precision, engine="native")
    predicted: dict[str, list[float]] = defaultdict(lambda: [0, 0])
    for row in traffic.collectives_of(job):
        predicted[KINDS[row.kind]][0] += row.count
        predicted[KINDS[row.kind]][1] += row.count * row.bytes
    assert dict(counter.seen) == dict(predicted)
