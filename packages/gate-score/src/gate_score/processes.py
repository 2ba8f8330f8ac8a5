"""Two processes that are started once and train many recipes one after another, with or without a defect."""

import hashlib
import inspect
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from gate_score import defects as all_defects  # fills DEFECTS
from gate_score import layouts, runs, trainer
from gate_score.defect import DEFECTS
from gate_score.layouts import LAYOUTS
from gate_score.runs import train
from gate_score.trainer import Recipe

RANKS = 2
LONGEST = timedelta(seconds=60)  # that a rank waits for the other
DONE = "recipe.json"
SHOWN_EVERY = 10.0  # seconds
__all__ = ["Job", "all_defects", "run"]


@dataclass(frozen=True)
class Job:
    """A training, into a directory of its own."""

    directory: str
    layout: str
    recipe: Recipe
    defect: str = ""
    """Its name; "" for an honest training."""

    @property
    def meaning(self) -> str:
        """All that its result follows from: the recipe, and the code of the trainer and of the mistake."""
        return json.dumps(asdict(self) | {"directory": "", "code": checksum_of_code(self.defect)})


@cache
def checksum_of_code(defect: str) -> str:
    texts = [inspect.getsource(module) for module in (trainer, layouts, runs)]
    texts += [inspect.getsource(one.patch) for one in DEFECTS if one.name == defect]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def run(jobs: Sequence[Job], root: Path) -> None:
    """Trains what is not there yet, into root/<directory>, so an interrupted command goes on where it was."""
    left = [job for job in jobs if not is_done(job, root)]
    say(f"{len(jobs) - len(left)} of {len(jobs)} trainings are in {root}")
    if not left:
        return
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(work, (f"{directory}/store", left, root), nprocs=RANKS)


def say(what: str) -> None:
    print(f"gate-score: {what}", file=sys.stderr, flush=True)


def leave_out_future_warnings() -> None:
    """PyTorch's own, about what its later releases will do with its own calls."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")


def is_done(job: Job, root: Path) -> bool:
    path = root / job.directory / DONE
    return path.is_file() and path.read_text() == job.meaning


def work(rank: int, store: str, jobs: Sequence[Job], root: Path) -> None:
    torch.set_num_threads(1)
    leave_out_future_warnings()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=LONGEST)
    named = {defect.name: defect for defect in DEFECTS}
    said = time.monotonic()
    for number, job in enumerate(jobs):
        if rank == 0 and time.monotonic() - said > SHOWN_EVERY:
            said = time.monotonic()
            say(f"training {number + 1} of {len(jobs)}: {job.directory}")
        is_alone = job.layout == "one"
        if is_alone and number % RANKS != rank:
            continue
        directory = root / job.directory
        if is_alone or rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        if not is_alone:
            dist.barrier()
        kind = named[job.defect].trainer if job.defect else LAYOUTS[job.layout]
        try:
            train(kind, job.recipe, directory)
        except Exception:
            print(f"{job.defect or 'an honest training'} in {job.layout}, rank {rank}:", file=sys.stderr)
            traceback.print_exc()
            raise
        if not is_alone:
            dist.barrier()
        if is_alone or rank == 0:
            (directory / DONE).write_text(job.meaning)
    dist.barrier()
    dist.destroy_process_group()
