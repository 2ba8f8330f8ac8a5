"""Compiles what the engines would compile in their first run: ``python -m acceptance.compile deepspeed|megatron``.

By itself, so that no timed run waits for nvcc and a failure shows the compiler's own messages; and all at once, for
each takes minutes.
"""

import multiprocessing
import sys
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from types import ModuleType
from typing import Any

from torch.utils import cpp_extension

# Megatron hands DeepSpeed PyTorch's AdamW, so FusedAdam is compiled to see that it can be; offloading needs CPUAdam.
DEEPSPEED_BUILDERS = ("FusedAdamBuilder", "CPUAdamBuilder")


def load_builder(name: str) -> None:
    from deepspeed.ops import op_builder

    getattr(op_builder, name)().load()


def load_extension(arguments: dict[str, Any]) -> None:
    cpp_extension.load(**arguments)


def megatron_extensions() -> list[dict[str, Any]]:
    """What the engine, which has to be on PYTHONPATH, would give torch's compiler for this GPU."""
    from megatron import fused_kernels

    asked: list[dict[str, Any]] = []
    load = cpp_extension.load

    def note(**arguments: Any) -> ModuleType:
        asked.append(arguments)
        return ModuleType(arguments["name"])

    cpp_extension.load = note
    try:
        fused_kernels.load(Namespace(rank=0, masked_softmax_fusion=True))
    finally:
        cpp_extension.load = load
    return asked


def main() -> None:
    work: list[tuple[Any, Any]]
    if sys.argv[1] == "deepspeed":
        work = [(load_builder, name) for name in DEEPSPEED_BUILDERS]
    else:
        work = [(load_extension, arguments) for arguments in megatron_extensions()]
    # Not forked: a process that has asked for the GPU must not be.
    with ProcessPoolExecutor(len(work), multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(load, what) for load, what in work]:
            future.result()


if __name__ == "__main__":
    main()
