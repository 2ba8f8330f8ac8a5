"""Counts the operators that an engine dispatches in an iteration: the figures of OPERATORS in costmodel/time.py.

    python tests/costmodel/count_operators.py [--launcher NAME] [--processes N] [SETTING=VALUE...]

trains tiny models of two depths with two and three micro-batches on CPUs, with the arguments that the launcher plans,
and prints what a layer adds to each micro-batch, what a micro-batch adds, and what is left of an iteration.
MEGATRON_DATA_DIR names data that scripts/prepare_xsum_megatron.sh prepared. Kernels that only GPUs have are counted as
one operator.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))


# They make a tensor of another shape, or none of a gradient's kernels, and cost the host next to nothing.
WITHOUT_KERNELS = (torch.ops.aten._unsafe_view, torch.ops.aten.detach)


class Counter(TorchDispatchMode):
    """Operators that start a kernel, by the part of a step: forward, backward or the rest."""

    part = "other"
    is_paused = False

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"forward": 0, "backward": 0, "other": 0}

    def add(self) -> None:
        if not self.is_paused:
            self.counts[self.part] += 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and function.overloadpacket not in WITHOUT_KERNELS:
            self.add()
        return function(*args, **(kwargs or {}))


def as_part(counter: Counter, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        before = counter.part
        counter.part = part
        try:
            return function(*args, **kwargs)
        finally:
            counter.part = before

    return counted


def as_one(counter: Counter, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function as a single kernel, in either direction."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, *tensors: Any) -> torch.Tensor:
            counter.add()
            before = counter.is_paused
            counter.is_paused = True
            with torch.enable_grad():
                inputs = [
                    each.detach().requires_grad_(each.is_floating_point()) if isinstance(each, torch.Tensor) else each
                    for each in tensors
                ]
                context.output = function(*inputs)
            context.inputs = inputs
            counter.is_paused = before
            return context.output.detach()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            counter.add()
            before = counter.is_paused
            counter.is_paused = True
            asked = [each for each in context.inputs if isinstance(each, torch.Tensor) and each.requires_grad]
            found = iter(torch.autograd.grad(context.output, asked, gradient, allow_unused=True))
            counter.is_paused = before
            return tuple(
                next(found) if isinstance(each, torch.Tensor) and each.requires_grad else None
                for each in context.inputs
            )

    return Kernel.apply


def fuse(counter: Counter) -> None:
    """Gives Megatron-DeepSpeed stand-ins for the kernels that it has on a GPU."""
    from megatron.model import fused_softmax, transformer

    def softmax(self: Any, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return as_one(counter, lambda given, covered: self.forward_torch_softmax(given, covered))(scores, mask)

    fused_softmax.FusedScaleMaskSoftmax.forward = softmax
    transformer.bias_gelu_impl = as_one(counter, transformer.bias_gelu_impl)
    for name in ("bias_dropout_add_fused_train", "bias_dropout_add_fused_inference"):
        setattr(transformer, name, as_one(counter, getattr(transformer, name)))


def train(engine: str, program: str, words: list[str]) -> None:
    """In each process: trains with these arguments, and prints what the last iteration dispatched."""
    counter = Counter()
    sys.argv = [program, *words]
    sys.path.insert(0, str(Path(program).parent))

    def step(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counter.counts = dict.fromkeys(counter.counts, 0)
            with counter:
                result = function(*args, **kwargs)
            if int(os.environ.get("RANK", "0")) == 0:
                print("COUNTED " + json.dumps(counter.counts), flush=True)
            return result

        return counted

    if engine == "native":
        from native.data_parallel import TorchTrainer

        TorchTrainer.step = step(TorchTrainer.step)
        TorchTrainer.forward = as_part(counter, "forward", TorchTrainer.forward)
        TorchTrainer.backward = as_part(counter, "backward", TorchTrainer.backward)
    else:
        from megatron import training
        from megatron.core.pipeline_parallel import schedules

        training.train_step = step(training.train_step)
        schedules.forward_step = as_part(counter, "forward", schedules.forward_step)
        schedules.backward_step = as_part(counter, "backward", schedules.backward_step)
        fuse(counter)
    runpy.run_path(program, run_name="__main__")


def counts_of(settings: dict[str, str], launcher: str, processes: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | settings | {"OUTPUT_DIR": f"{directory}/run", "NNODES": "1", "DEVICE": "cpu"}
        environment |= {
            "NPROC_PER_NODE": str(processes),
            "TRAIN_ITERS": "3",
            "LOG_INTERVAL": "1",
            "WANDB_MODE": "disabled",
        }
        script = ["bash", str(REPOSITORY / f"scripts/run_megatron_t5_{launcher}.sh"), "--dry-run=json"]
        planned = json.loads(subprocess.run(script, env=environment, check=True, capture_output=True).stdout)
        if planned["ds_config"]:
            config = Path(directory) / "run" / "ds_config.json"
            config.parent.mkdir(exist_ok=True)
            config.write_text(json.dumps(planned["ds_config"]))
        words = [word for part in ("settings", "fixed", "own", "extra") for word in planned["arguments"][part]]
        words = [
            word
            for word in words
            if not word.startswith("--no-") or not word.endswith(("gelu-fusion", "dropout-fusion"))
        ]
        program = planned["program"][-1]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [*torchrun, __file__, "--inside", settings["ENGINE"], program, *words]
        own = (
            environment
            | planned["environment"]
            | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        )
        done = subprocess.run(command, env=own, capture_output=True, text=True, cwd=directory, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("COUNTED ")]
    if not lines:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    return json.loads(lines[-1].removeprefix("COUNTED "))


def main() -> None:
    if "--inside" in sys.argv:
        train(sys.argv[2], sys.argv[3], sys.argv[4:])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--launcher", default="ddp")
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    settings = {"ENGINE": "native", "MODEL_PRESET": "tiny", "GLOBAL_BATCH_SIZE": "2"}
    settings |= dict(word.split("=", 1) for word in args.settings)
    is_gpt = settings.get("MODEL_FAMILY") == "gpt"

    def count(encoder: int, decoder: int, micro_batches: int) -> dict[str, int]:
        depths = (
            {"NUM_LAYERS": str(decoder)}
            if is_gpt
            else {"ENCODER_NUM_LAYERS": str(encoder), "DECODER_NUM_LAYERS": str(decoder)}
        )
        batch = {"GLOBAL_BATCH_SIZE": str(micro_batches * args.batch_over), "MICRO_BATCH_SIZE": "1"}
        return counts_of(settings | depths | batch, args.launcher, args.processes)

    args.batch_over = 1 if args.launcher in ("tensor", "pipeline") else args.processes
    base1, base2 = count(2, 2, 2), count(2, 2, 3)
    found = {
        "micro-batch of 2 + 2 layers": difference(base2, base1),
        "rest of an iteration": difference(base1, base2, 2),
    }
    deeper = count(2, 4, 2), count(2, 4, 3)
    found["decoder layer"] = half(difference(difference(deeper[1], deeper[0]), difference(base2, base1)))
    found["decoder layer's rest"] = half(difference(difference(deeper[0], deeper[1], 2), difference(base1, base2, 2)))
    if not is_gpt:
        deeper = count(4, 2, 2), count(4, 2, 3)
        found["encoder layer"] = half(difference(difference(deeper[1], deeper[0]), difference(base2, base1)))
    print(json.dumps(found, indent=1))


def difference(more: dict[str, int], less: dict[str, int], micro_batches: int = 0) -> dict[str, int]:
    """What one has more than the other; with `micro_batches`, what is left of `more` without its micro-batches."""
    if micro_batches:
        return {part: more[part] - micro_batches * (less[part] - more[part]) for part in more}
    return {part: more[part] - less[part] for part in more}


def half(counts: dict[str, int]) -> dict[str, float]:
    return {part: count / 2 for part, count in counts.items()}


if __name__ == "__main__":
    main()
