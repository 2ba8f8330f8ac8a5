"""Compiles what the engines would compile in their first run: ``python -m acceptance.compile deepspeed|megatron``.

By itself, so that no timed run waits for nvcc and a failure shows the compiler's own messages.
"""

import sys
from argparse import Namespace


def deepspeed() -> None:
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

    for builder in (FusedAdamBuilder(), CPUAdamBuilder()):
        builder.load()


def megatron() -> None:
    """Needs the engine on PYTHONPATH."""
    from megatron import fused_kernels

    fused_kernels.load(Namespace(rank=0, masked_softmax_fusion=True))


if __name__ == "__main__":
    {"deepspeed": deepspeed, "megatron": megatron}[sys.argv[1]]()
