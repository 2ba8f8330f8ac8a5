"""Saving and resuming: <directory>/iter_0000020/..., and latest_checkpointed_iteration.txt once it is complete.

Weights and optimizer states are written once per tensor- and pipeline-parallel rank, by the first data-parallel rank
(the others' are the same); DeepSpeed writes its own shards. Every process writes its dropout state.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from native.parallel import Layout

TRACKER = "latest_checkpointed_iteration.txt"


def name_of(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def shard_path(directory: str, iteration: int, layout: Layout) -> Path:
    """Where the weights of this tensor- and pipeline-parallel rank are, by Megatron's naming."""
    stage = f"_{layout.pp.rank:03d}" if layout.pp.size > 1 else ""
    return Path(directory) / name_of(iteration) / f"mp_rank_{layout.tp.rank:02d}{stage}" / "model_optim_rng.pt"


def latest(directory: str | None) -> int:
    """The iteration of the newest intact checkpoint, which the launcher has checked; 0 without one."""
    tracker = Path(directory or "", TRACKER)
    return int(tracker.read_text()) if directory and tracker.is_file() else 0


def generators(args: Namespace, layout: Layout) -> dict[str, torch.Generator]:
    """What this process's dropout masks are drawn from."""
    found = {"cpu": torch.default_generator, "tp": layout.tp.rng}
    return found | ({"cuda": torch.cuda.default_generators[args.device.index]} if args.device.type == "cuda" else {})


def save(trainer: Any, args: Namespace, layout: Layout, iteration: int) -> None:
    """Writes a checkpoint of `trainer`, which knows how to save its own weights and optimizer."""
    trainer.save(args.save, iteration)
    random_path = Path(args.save) / name_of(iteration) / f"random_{args.rank:05d}.pt"
    random_path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: each.get_state() for name, each in generators(args, layout).items()}, random_path)
    dist.barrier()
    if args.local_rank == 0:
        written = Path(args.save) / f"{TRACKER}.{args.rank}"
        written.write_text(str(iteration))
        written.replace(Path(args.save) / TRACKER)
    dist.barrier()


def load(trainer: Any, args: Namespace, layout: Layout, iteration: int) -> None:
    """Continues from the checkpoint of `iteration`."""
    trainer.load(args.load, iteration)
    state = torch.load(Path(args.load) / name_of(iteration) / f"random_{args.rank:05d}.pt", weights_only=True)
    for name, generator in generators(args, layout).items():
        generator.set_state(state[name])
