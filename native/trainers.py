"""Which trainer a run has. A parallelism is one file."""

from argparse import Namespace

from native.data_parallel import TorchTrainer
from native.parallel import Mesh
from native.pipeline_parallel import PipelineTrainer
from native.zero import ZeroTrainer


def make_trainer(args: Namespace, mesh: Mesh) -> TorchTrainer:
    """Tensor parallelism is in the layers, and goes with all of these but DeepSpeed's ZeRO."""
    if args.deepspeed:
        return ZeroTrainer(args, mesh)
    if args.fsdp2:
        from native.fsdp2 import FSDP2Trainer  # older versions of PyTorch lack it

        return FSDP2Trainer(args, mesh)
    if args.pp > 1:
        return PipelineTrainer(args, mesh)
    return TorchTrainer(args, mesh)
