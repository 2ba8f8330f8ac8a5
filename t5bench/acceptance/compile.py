"""Compiles what Megatron and DeepSpeed would compile in their first run: ``python -m t5bench.acceptance.compile``.

So no timed run waits for nvcc, a failure shows the compiler's own messages, and all are compiled at once, for each
takes a minute or more. The engine has to be on PYTHONPATH.
"""

import multiprocessing
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

from torch.utils import cpp_extension


def megatron_extensions() -> list[dict[str, Any]]:
    """What the engine would give torch's compiler for this GPU."""
    from megatron import fused_kernels

    with mock.patch.object(cpp_extension, "load") as load:
        fused_kernels.load(Namespace(rank=0, masked_softmax_fusion=True))
    return [call.kwargs for call in load.call_args_list]


def compile_extension(arguments: dict[str, Any]) -> None:
    cpp_extension.load(**arguments)


def compile_optimizer() -> None:
    """The Adam of the offloading strategy; the other optimizers are PyTorch's."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load()


def main() -> None:
    # Not forked: a process that has asked for the GPU must not be.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        begun = [pool.submit(compile_optimizer)]
        begun += [pool.submit(compile_extension, arguments) for arguments in megatron_extensions()]
        for future in begun:
            future.result()


if __name__ == "__main__":
    main()
