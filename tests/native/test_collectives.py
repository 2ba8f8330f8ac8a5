"""What the native engine sends, counted in one process and held against the model."""

from collections import defaultdict

import torch
import torch.distributed as dist
from command_lines import parsed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from native.parallel import Layout
from native.trainers import TorchTrainer
from t5bench.model import traffic
from t5bench.model.job import Architecture, Job, Parallel


class Collectives(TorchDispatchMode):
    """Count and bytes of each kind of collective that goes through PyTorch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            entry = self.seen[function.__name__.partition(".")[0]]
            entry[0] += 1
            entry[1] += sum(tensor.nbytes for tensor in args[0])
        return function(*args, **(kwargs or {}))


def test_the_native_engine_sends_these_collectives():
    """One tensor-parallel rank of two, in one process: what the other would send is not waited for."""
    args = parsed(TENSOR_PARALLEL_SIZE="1", MICRO_BATCH_SIZE="2", GLOBAL_BATCH_SIZE="8")
    args.tp, args.world_size = 2, 2
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        trainer = TorchTrainer(args, Layout.build(1, 1, 2, args.device, args.seed))
        shapes = args.encoder_seq_length, args.decoder_seq_length, args.decoder_seq_length
        args.micro_batches = 4
        batch = tuple(torch.ones(8, length, dtype=torch.int64) for length in shapes)
        with Collectives() as counter:
            trainer.step(batch, 1e-4)
    finally:
        dist.destroy_process_group()
    architecture = Architecture.of_arguments(vars(args), args.padded_vocab_size)
    job = Job(architecture, Parallel(tensor=2), 2, 8, precision="fp32", engine="native")
    found = traffic.rows(job)
    # The norm is reduced over the tensor group; without a pipeline that is the model's.
    assert {row.kind for row in found} == {"all-reduce"}
    assert dict(counter.seen) == {"allreduce_": [sum(r.count for r in found), sum(r.count * r.bytes for r in found)]}
