"""Saving and loading: any division of the model among processes continues any other's run.

What is saved has the names and shapes of a one-process model (form.py): `model.NAME` (fp32 weights), `exp_avg.NAME`,
`exp_avg_sq.NAME`, and what each process's dropout draws. Each process writes boxes of these (pieces.py), and what
several hold is written once. To load, a process asks for its own boxes under its own division, and what overlaps is
read: nothing is converted, and a process holds no more than its part and one saved box.

A checkpoint without checkpoint.json is incomplete. latest_checkpointed_iteration.txt names the last complete one.

Saving copies what the process writes, and a thread writes the copy while training goes on. DCP's async_save does the
same, but has no place where the checkpoint can be sealed. Without memory for a copy, training waits.
"""

import os
import re
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from native.data_parallel import TorchTrainer
from native.form import Reader, SavePlanner, Writer, save, write_index_and_seal
from native.parallel import Mesh
from native.pieces import WEIGHTS, Piece
from native.schedule import learning_rate
from t5bench import control_groups
from t5bench.checkpoint_form import (
    INDEX,
    SEAL,
    TRACKER,
    Division,
    Seal,
    folder_of,
    seal_of_iteration,
    write_whole,
)

ALIGNMENT = 64  # bytes, for every data type
SCHEDULE = ("lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "lr_decay_iters", "train_iters", "global_batch_size")
LARGEST_SHARE = 0.75  # of the host's available memory, for the copies of all its processes


def division_of(args: Namespace) -> Division:
    """How the processes divide the model."""
    return Division.of(
        tp=args.tp,
        pp=args.pp,
        dp=args.dp,
        zero_stage=args.deepspeed_json.get("zero_optimization", {}).get("stage", 0),
        has_fsdp2=args.fsdp2,
        shard_size=args.fsdp2_shard_size,
        parts=args.virtual_pipeline_stages,
        split=getattr(args, "pipeline_model_parallel_split_rank", 0),
    )


def last_saved(args: Namespace) -> Seal | None:
    """Of the checkpoint that --load names, which the launcher has checked; None if there is none. Raises Problem."""
    tracker = Path(args.load or "", TRACKER)
    if not args.load or not tracker.is_file():
        return None
    return seal_of_iteration(Path(args.load), int(tracker.read_text()))


def consumed_samples(args: Namespace, before: Seal | None, iteration: int) -> int:
    """How many samples were trained when this iteration ends. before: of the checkpoint that the run continues."""
    if before is None:
        return iteration * args.global_batch_size
    return before.consumed_samples + (iteration - before.iteration) * args.global_batch_size


def planned_samples(args: Namespace, before: Seal | None) -> list[int]:
    """The sample counts at which the orders of samples end: the planned run's, then that of what a longer run adds."""
    end = consumed_samples(args, before, args.train_iters)
    if before is None:
        return [end]
    ends = list(before.planned_samples)
    if not ends:  # of an earlier release, in which neither batch nor length could change
        iterations = before.learning_rate.get("train_iters", args.train_iters)
        ends = [before.consumed_samples * iterations // before.iteration]
    return ends if end <= ends[-1] else [*ends, end]


# ---- saving ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What one process writes of a checkpoint, and what is said about it."""

    iteration: int
    pieces: Sequence[Piece]
    seal: Seal
    read_from: Sequence[int]
    """The ranks whose files this process reads if it continues."""


class Saver:
    """Saves checkpoints of a trainer. All processes call its methods together."""

    def __init__(self, trainer: TorchTrainer, args: Namespace, mesh: Mesh, before: Seal | None = None) -> None:
        """before: of the checkpoint that the run continues."""
        self.before = before
        self.trainer = trainer
        self.args = args
        self.mesh = mesh
        # Of its own, because a thread uses it while training uses the others.
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.unfinished: Future[None] | None = None

    def save(self, iteration: int) -> None:
        """Training goes on when this process's share is copied, or if there is no memory for a copy, written."""
        self.finish()
        share = self.share(iteration)
        if not has_memory_for(share.pieces):
            self.write(share)
            return
        own = Share(iteration, copies_of(share.pieces), share.seal, share.read_from)
        self.unfinished = self.thread.submit(self.write, own)

    def check(self) -> None:
        """Raises what has gone wrong in the thread."""
        if self.unfinished and self.unfinished.done():
            self.finish()

    def finish(self) -> None:
        """Waits until the last checkpoint is complete."""
        if self.unfinished:
            self.unfinished.result()
        self.unfinished = None

    def close(self) -> None:
        self.finish()
        self.thread.shutdown()

    def share(self, iteration: int) -> Share:
        args = self.args
        pieces = [*self.trainer.pieces(), *dropout_pieces(args, self.mesh)]
        optimizer = ("adam_beta1", "adam_beta2", "adam_eps", "weight_decay")
        seal = Seal(
            iteration=iteration,
            step=self.trainer.updates,
            consumed_samples=consumed_samples(args, self.before, iteration),
            division=division_of(args),
            has_dropout=True,
            precision="bf16" if args.bf16 else "fp32",
            learning_rate={name: getattr(args, name) for name in SCHEDULE},
            planned_samples=planned_samples(args, self.before),
            optimizer={name: getattr(args, name) for name in optimizer},
        )
        own = [piece for piece in pieces if piece.writer == args.rank]
        return Share(iteration, own, seal, sorted({piece.writer for piece in pieces}))

    def write(self, share: Share) -> None:
        folder = folder_of(Path(self.args.save), share.iteration)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (SEAL, INDEX):  # of an attempt before
            (folder / name).unlink(missing_ok=True)
        writer = Writer(folder)
        index = save(writer, SavePlanner(share.pieces), self.group)
        told: list[Any] = [None] * self.args.world_size
        dist.all_gather_object(told, (writer.fs.written, share.read_from), group=self.group)
        if self.args.local_rank == 0:  # every node's directory gets the index and the seal: it need not be the others'
            files = {name: sums for written, _ in told for name, sums in written.items()}
            seal = replace(share.seal, read_from=[read_from for _, read_from in told])
            write_index_and_seal(folder, index, seal, files)
        dist.barrier(self.group)  # the tracker names a checkpoint once all nodes have sealed theirs
        if self.args.local_rank == 0:
            write_whole(Path(self.args.save, TRACKER), str(share.iteration).encode())
        dist.barrier(self.group)


def copies_of(pieces: Sequence[Piece]) -> list[Piece]:
    """The same in one stretch of host memory, which malloc gives back when it is freed: it keeps many small ones."""
    places = []
    end = 0
    for piece in pieces:
        places.append(end)
        end += -(-piece.tensor.nbytes // ALIGNMENT) * ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8)
    copies = []
    for place, piece in zip(places, pieces, strict=True):
        copy = memory[place : place + piece.tensor.nbytes].view(piece.tensor.dtype).view(piece.tensor.shape)
        copies.append(piece._replace(tensor=copy.copy_(piece.tensor.detach())))
    return copies


def has_memory_for(pieces: Sequence[Piece]) -> bool:
    """Whether this host's processes may all copy so much."""
    needed = sum(piece.tensor.nbytes for piece in pieces) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return needed < LARGEST_SHARE * free_memory()


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that are free on this host and in the control groups of this process: a SLURM job or a container may have
    a small share of the host. 0 if the kernel does not say."""
    available = re.search(r"^MemAvailable: +(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    left = [int(available[1]) * 1024 if available else 0]
    left += control_groups.free_bytes(root)
    return max(0, min(left))


# ---- loading ---------------------------------------------------------------------------------------------------------


def load(trainer: TorchTrainer, args: Namespace, mesh: Mesh, seal: Seal) -> str:
    """Continues any division's checkpoint. Returns what is continued and what begins anew, in words. Raises Problem."""
    reader = Reader(folder_of(Path(args.load), seal.iteration))
    index = reader.read_metadata()
    trainer.begin_load(seal.step)
    reader.fill(index, trainer.pieces())
    trainer.end_load()
    begins_anew = begun_anew(args, seal)
    # What is drawn continues if the same processes draw it.
    generators = dropout_generators(args, mesh)
    if not seal.has_dropout or not seal.division.draws_as(division_of(args)):
        for generator in generators.values():
            generator.manual_seed(generator.initial_seed() + seal.iteration)
        if args.hidden_dropout:
            begins_anew.append("dropout's random numbers")
        return continued(args, seal, begins_anew)
    pieces = dropout_pieces(args, mesh)
    reader.fill(index, pieces)
    for generator, piece in zip(generators.values(), pieces, strict=True):
        generator.set_state(piece.tensor)
    return continued(args, seal, begins_anew)


def begun_anew(args: Namespace, seal: Seal) -> list[str]:
    """What of the data is not continued, in words."""
    found = []
    ends = planned_samples(args, seal)
    if len(ends) > max(1, len(seal.planned_samples)):
        found.append(f"the order of the samples, after sample {ends[-2]}")
    lengths = {name: seal.learning_rate.get(name, getattr(args, name)) for name in ("train_iters", "global_batch_size")}
    if args.eval_iters and any(getattr(args, name) != value for name, value in lengths.items()):
        found.append("the order of validation's samples")
    return found


def continued(args: Namespace, seal: Seal, begins_anew: Sequence[str]) -> str:
    """One line that says what a run continues, and in what it goes on otherwise."""
    what = f"weights, AdamW's moments at step {seal.step}, the schedule at {seal.iteration}"
    line = f"continues iteration {seal.iteration} of checkpoint {seal.identity[:12]}: {what}"
    line += f", the data at sample {seal.consumed_samples}"
    schedule = {**vars(args), "lr_decay_iters": seal.learning_rate.get("train_iters"), **seal.learning_rate}
    if any(schedule[name] != getattr(args, name) for name in seal.learning_rate):
        before, now = (learning_rate(each, seal.iteration) for each in (Namespace(**schedule), args))
        line += f"; the next learning rate is {now:.3E}, and would have been {before:.3E}"
    return f"{line}; begins anew: {', '.join(begins_anew) or 'nothing'}"


def load_weights(trainer: TorchTrainer, folder: Path) -> None:
    """Begins with a checkpoint's weights, and an optimizer that has done nothing. Raises Problem."""
    reader = Reader(folder)
    trainer.begin_load(0)
    reader.fill(reader.read_metadata(), [piece for piece in trainer.pieces() if piece.key.startswith(f"{WEIGHTS}.")])
    trainer.end_load()


def dropout_generators(args: Namespace, mesh: Mesh) -> dict[str, torch.Generator]:
    """What this process's dropout masks are drawn from."""
    generators = {"cpu": torch.default_generator, "tp": mesh.tp.rng}
    if args.device.type == "cuda":
        generators["cuda"] = torch.cuda.default_generators[args.device.index]
    return generators


def dropout_pieces(args: Namespace, mesh: Mesh) -> list[Piece]:
    pieces = []
    for name, generator in dropout_generators(args, mesh).items():
        state = generator.get_state()
        pieces.append(Piece(f"dropout.{args.rank}.{name}", tuple(state.shape), (0,), state, args.rank))
    return pieces
