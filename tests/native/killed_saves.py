"""Kills a process at every step of its second save: before each file that it opens, renames or removes there.

    PYTHONPATH=.:tests:tests/native python tests/native/killed_saves.py DIRECTORY

prints a line of JSON for each death: what was about to happen, and which checkpoint is the newest whole one after it,
with what is wrong with a newer one. The last line is of the save that nothing interrupted.
"""

import json
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from command_lines import parsed
from made_runs import made_checkpoints

from native import checkpoint
from native.parallel import Axis, Mesh
from native.pieces import Piece
from t5bench.checkpoint_form import folder_of

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")


def saver_of(run: Path) -> checkpoint.Saver:
    dist.init_process_group("gloo", init_method=f"file://{run}/store", rank=0, world_size=1)
    args = parsed("--save", str(run / "checkpoints"), "--save-interval", "1")
    weight = torch.ones(2)
    pieces = [Piece("model.w", (2,), (0,), weight, 0)]
    trainer = Namespace(pieces=lambda: pieces, updates=3)
    return checkpoint.Saver(trainer, args, Mesh(tp=Axis(rng=torch.Generator())))


def die_at(number: int, folder: Path, told: int) -> None:
    """Kills this process when it does something in the checkpoints' directory for this time, which it tells before."""
    count = 0

    def look(event: str, arguments: tuple) -> None:
        nonlocal count
        if event not in EVENTS or not str(arguments[0]).startswith(str(folder)):
            return
        count += 1
        if count == number:
            os.write(told, f"{event} {Path(str(arguments[0])).name}".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def killed_at(number: int, run: Path) -> tuple[str, bool]:
    """What the save was about to do when it died, "" if it ended first; and whether it ended well."""
    run.mkdir()
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        saver = saver_of(run)
        saver.save(1)
        saver.finish()
        die_at(number, run / "checkpoints", writing)
        saver.save(2)
        saver.finish()
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(process, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read(), status == 0


def main() -> None:
    directory = Path(sys.argv[1])
    ended = False
    number = 0
    while not ended:
        number += 1
        run = directory / str(number)
        event, ended = killed_at(number, run)
        newest, faults = made_checkpoints(run, dp=1).newest()
        is_sealed = (folder_of(run / "checkpoints", 2) / "checkpoint.json").exists()
        print(json.dumps({"event": event, "newest": newest, "faults": list(faults.values()), "sealed": is_sealed}))


if __name__ == "__main__":
    main()
