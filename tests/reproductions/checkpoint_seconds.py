"""How long a checkpoint of a whole T5 stops training: as torch.save wrote it, and as the native engine writes it.

    PYTHONPATH=.:tests python tests/reproductions/checkpoint_seconds.py DIRECTORY [--preset large] [--repeats 3]

prints a line for each repeat, in turns: seconds that torch.save of weights and moments takes; that Saver.save takes
when it waits, and when a thread writes a copy; and the seconds until that copy is complete. One process, fp32.
DIRECTORY is on the disk to be measured; for T5-Large it takes 9 GB, and the host needs 20 GB of free memory.
"""

import argparse
import os
import shutil
import time
from pathlib import Path

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}

import torch
import torch.distributed as dist
from command_lines import parsed

from native import checkpoint
from native.parallel import Mesh
from native.trainers import make_trainer


def seconds(action, *words: object) -> float:
    began = time.monotonic()
    action(*words)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--preset", default="large")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    folder = arguments.directory / "checkpoint-seconds"
    flags = ["--save", str(folder), "--save-interval", "1"]
    args = parsed(*flags, vocabulary=32128, MODEL_PRESET=arguments.preset)
    dist.init_process_group("gloo")
    mesh = Mesh.build(1, 1, 1, args.device, args.seed)
    trainer = make_trainer(args, mesh)
    trainer.begin_load(1)
    for state in trainer.optimizer.state.values():
        for kind in ("exp_avg", "exp_avg_sq"):
            state[kind].uniform_()
    size = sum(piece.tensor.nbytes for piece in trainer.pieces())
    print(f"{size / 1e9:.2f} GB; can be copied: {checkpoint.has_memory_for(trainer.pieces())}", flush=True)
    saver = checkpoint.Saver(trainer, args, mesh)
    has_memory_for = checkpoint.has_memory_for

    def by_torch_save() -> None:
        state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / "model_optim_rng.pt")

    for number in range(arguments.repeats):
        before = seconds(by_torch_save)
        synced = seconds(os.sync)
        shutil.rmtree(folder)
        checkpoint.has_memory_for = lambda pieces: False
        waits = seconds(saver.save, number)
        os.sync()
        shutil.rmtree(folder)
        checkpoint.has_memory_for = has_memory_for
        copies = seconds(saver.save, number)
        complete = copies + seconds(saver.finish)
        os.sync()
        shutil.rmtree(folder)
        print(
            f"torch.save {before:.1f} s (and {synced:.1f} s until it is on the disk), waiting {waits:.1f} s,"
            f" in the background {copies:.1f} s, complete after {complete:.1f} s",
            flush=True,
        )
    saver.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
