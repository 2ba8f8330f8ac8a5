"""Which trainer a run has: a parallelism is one file."""

from argparse import Namespace

from native.data_parallel import TorchTrainer
from native.parallel import Layout


def make_trainer(args: Namespace, layout: Layout) -> TorchTrainer:
    """Imports only what the run needs."""
    if args.deepspeed:
        from native.zero import ZeroTrainer as Trainer
    elif args.fsdp2:
        from native.fsdp2 import FSDP2Trainer as Trainer
    elif args.pp > 1:
        from native.pipeline_parallel import PipelineTrainer as Trainer
    else:
        Trainer = TorchTrainer
    return Trainer(args, layout)
