"""Trains a tiny model under a strategy of the native engine: its processes are forks of this one, over gloo."""

import contextlib
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from described import arguments_of, batch_of
from support import REPO_ROOT

from native.data_parallel import TorchTrainer
from native.model import mesh_of
from native.trainers import make_trainer

Curve = list[tuple[float, float]]
"""A loss and a gradient norm for each step."""


@dataclass(frozen=True)
class Strategy:
    world: int
    flags: Sequence[str] = ()
    zero: str = ""
    """The name of DeepSpeed's JSON in ds_configs."""
    split: int = 1
    """The decoder's first stage."""


def _pp(stages: int, schedule: str = "1f1b", parts: int = 1, tp: int = 1) -> list[str]:
    flags = ["--pipeline-model-parallel-size", str(stages), "--tensor-model-parallel-size", str(tp)]
    if schedule != "1f1b":
        flags += ["--pipeline-schedule", schedule]
    return [*flags, "--virtual-pipeline-stages", str(parts)] if parts > 1 else flags


def _tp(size: int) -> list[str]:
    return ["--tensor-model-parallel-size", str(size)]


STRATEGIES: Mapping[str, Strategy] = {
    "ddp": Strategy(2),
    "zero1": Strategy(2, zero="zero1"),
    "zero2": Strategy(2, zero="zero2"),
    "zero3": Strategy(2, zero="zero3"),
    "zero3_offload": Strategy(2, zero="zero3_offload"),
    "fsdp2": Strategy(2, ["--fsdp2"]),
    "hsdp": Strategy(4, ["--fsdp2", "--fsdp2-shard-size", "2"]),
    "tensor": Strategy(2, _tp(2)),
    "tensor of 4": Strategy(4, _tp(4)),
    "tensor, sequence": Strategy(2, [*_tp(2), "--sequence-parallel"]),
    "tensor of 4, sequence": Strategy(4, [*_tp(4), "--sequence-parallel"]),
    "tensor, fsdp2": Strategy(4, [*_tp(2), "--fsdp2"]),
    "pipeline": Strategy(2, _pp(2)),
    "pipeline of 4": Strategy(4, _pp(4), split=2),
    "pipeline, gpipe": Strategy(2, _pp(2, "gpipe")),
    "pipeline, interleaved": Strategy(2, _pp(2, "interleaved", 2), split=2),
    "pipeline, zero-bubble": Strategy(2, _pp(2, "zero-bubble")),
    "hybrid": Strategy(4, _pp(2, tp=2)),
    "hybrid, sequence": Strategy(4, [*_pp(2, tp=2), "--sequence-parallel"]),
    "hybrid, zero-bubble": Strategy(4, _pp(2, "zero-bubble", tp=2)),
    "pipeline, ddp": Strategy(4, _pp(2)),
    "recompute, full": Strategy(1, ["--recompute-granularity", "full"]),
    "recompute, selective": Strategy(1, ["--recompute-granularity", "selective"]),
}


def flags_of(config: Mapping[str, Any], strategy: Strategy, directory: Path) -> list[str]:
    flags = list(strategy.flags)
    if "--pipeline-model-parallel-size" in flags and config["model_type"] in ("t5", "mt5"):
        flags += ["--pipeline-model-parallel-split-rank", str(strategy.split)]
    if strategy.zero:
        path = REPO_ROOT / "ds_configs" / f"megatron_{strategy.zero}.json"
        ds = json.loads(path.read_text())
        data = strategy.world
        ds.pop("train_batch_size", None)
        ds |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4 // data}
        ds |= {"bf16": {"enabled": False}, "gradient_clipping": 1.0}
        ds.pop("communication_data_type", None)
        own = directory / "ds.json"
        own.write_text(json.dumps(ds))
        flags += ["--deepspeed", "--deepspeed_config", str(own)]
    return flags


Work = Callable[[TorchTrainer], Any]
Mistake = Callable[[int], None]
"""Changes the engine in a process, which is given its rank."""


def in_processes(
    config: Mapping[str, Any],
    strategy: Strategy,
    directory: Path,
    work: Work,
    *more: str,
    mistake: Mistake = lambda _: None,
) -> list[Any]:
    """What `work` returns in each process, by rank. Raises AssertionError with what went wrong in one of them."""
    directory.mkdir(parents=True, exist_ok=True)
    flags = [*flags_of(config, strategy, directory), *more]
    if strategy.zero:
        from t5bench.imports import import_deepspeed

        os.environ["DS_ACCELERATOR"] = "cpu"
        import_deepspeed()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = []
    for rank in range(strategy.world):
        given = (config, flags, rank, strategy.world, directory, work, answers, mistake)
        process = context.Process(target=_process, args=given)
        process.start()
        processes.append(process)
    found: dict[int, Any] = {}
    try:
        for _ in processes:
            rank, answer, fault = answers.get(timeout=240)
            assert not fault, f"rank {rank}: {fault}"
            found[rank] = answer
    finally:
        for process in processes:
            if len(found) < len(processes):
                process.terminate()
            process.join()
    return [found[rank] for rank in range(strategy.world)]


def _process(
    config: Mapping[str, Any],
    flags: Sequence[str],
    rank: int,
    world: int,
    directory: Path,
    work: Work,
    answers: Any,
    mistake: Mistake,
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout((directory / f"{rank}.out").open("w")):
            dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
            args = arguments_of(config, *flags)
            mistake(rank)
            trainer = make_trainer(args, mesh_of(args))
            answer = work(trainer)
            dist.barrier()
        answers.put((rank, answer, ""))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    answers.close()
    answers.join_thread()
    os._exit(0)


def own_batch(trainer: TorchTrainer, config: Mapping[str, Any], step: int) -> tuple[torch.Tensor, ...]:
    """A data-parallel rank's share of every micro-batch."""
    args = trainer.args
    rows = torch.arange(args.global_batch_size).view(-1, args.dp, args.micro_batch_size)
    own = rows[:, trainer.mesh.dp.rank].flatten()
    return tuple(tensor[own] for tensor in batch_of(config, args.global_batch_size, step))


def curve_of(trainer: TorchTrainer, config: Mapping[str, Any], steps: range) -> Curve:
    found = []
    for step in steps:
        loss, norm = trainer.step(own_batch(trainer, config, step), trainer.args.lr)
        is_counted = trainer.mesh.is_last_stage and trainer.mesh.tp.rank == 0
        loss = loss / trainer.args.dp if is_counted else torch.zeros_like(loss)
        dist.all_reduce(loss)
        found.append((loss.item(), norm.item()))
    return found


def train(config: Mapping[str, Any], strategy: Strategy, directory: Path, steps: int) -> Curve:
    return in_processes(config, strategy, directory, lambda trainer: curve_of(trainer, config, range(steps)))[0]


def largest_difference(curve: Curve, reference: Curve) -> float:
    """Relative, of all losses and norms."""
    pairs = [pair for step, true in zip(curve, reference, strict=True) for pair in zip(step, true, strict=True)]
    return max(abs(value / true - 1) for value, true in pairs)
