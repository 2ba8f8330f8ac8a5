"""Resumed trainings of the native engine with the mistakes that others met in public, and without them.

    python tests/native/resume_faults.py DIRECTORY

writes a log of each step's loss and gradient norm for every fault: DIRECTORY/<fault>.jsonl, and the uninterrupted
run's, DIRECTORY/uninterrupted of <set-up>.jsonl. Dropout is on, so that its random numbers count.
"""

import gc
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import continuations
import torch
from continuations import LAST, SAVED, SETUPS, Curve, Process, forked, prepared, words_of

from native import checkpoint
from native.form import Reader
from native.pieces import MOMENTS, WEIGHTS, Piece
from native.schedule import learning_rate
from t5bench.checkpoint_form import folder_of
from t5bench.imports import import_deepspeed, leave_out_compiler

ZERO = "ZeRO-1, 2"
PIPELINE = "pipeline 1F1B, 2"
FAULTS = {
    "none": ZERO,
    "moments dropped": ZERO,
    "a fresh optimizer, at step 1": ZERO,
    "effect after the first step": ZERO,
    "a stale shard": ZERO,
    "only rank 0's shard": ZERO,
    "an embedding's copy": PIPELINE,
    "the schedule begun anew": ZERO,
    "data repeated": ZERO,
    "data skipped": ZERO,
    "random numbers of dropout": ZERO,
    "none in a pipeline": PIPELINE,
}
HEALTHY = [name for name in FAULTS if name.startswith("none")]


class Faulty(Process):
    """A rank that makes one of these mistakes when it continues."""

    saves = (SAVED - 1, SAVED)
    fault = "none"

    def consumed(self, done: int) -> int:
        shift = {"data repeated": -1, "data skipped": 1}.get(self.fault, 0)
        return super().consumed(done) + shift * bool(done) * self.args.micro_batch_size * self.args.dp

    def rate(self, iteration: int, done: int) -> float:
        if done and self.fault == "the schedule begun anew":
            return learning_rate(self.args, iteration - 1 - done)
        if self.fault == "effect after the first step" and iteration == done + 1:
            return self.args.lr
        return super().rate(iteration, done)

    def make_mistake(self) -> None:
        pieces = self.trainer.pieces()
        moments = [piece for piece in pieces if piece.key.partition(".")[0] in MOMENTS]
        if self.fault in ("moments dropped", "a fresh optimizer, at step 1"):
            self.forget(moments)
        if self.fault == "a fresh optimizer, at step 1":
            self.trainer.begin_load(0)
        if self.fault == "only rank 0's shard" and self.args.rank:
            self.forget(moments)
        if self.fault == "a stale shard" and self.args.rank:
            self.read_earlier(moments)
        if self.fault == "an embedding's copy" and self.mesh.pp.rank:
            self.read_earlier(self.copies())
        if self.fault == "random numbers of dropout":
            for generator in checkpoint.dropout_generators(self.args, self.mesh).values():
                generator.manual_seed(self.args.seed)

    def copies(self) -> list[Piece]:
        """Of the words' embedding, which the first stage has."""
        index = Reader(folder_of(Path(self.args.load), SAVED)).read_metadata()
        tied = self.trainer.model.tied[0]
        shape = tuple(tied.copies[0].shape)
        key = next(key for key in index.state_dict_metadata if key.startswith(f"{WEIGHTS}.") and "word" in key)
        return [Piece(key, shape, (0,) * len(shape), copy.detach(), 0) for copy in tied.copies]

    def forget(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            piece.tensor.zero_()

    def read_earlier(self, pieces: Sequence[Piece]) -> None:
        """From the checkpoint of the iteration before."""
        assert pieces
        reader = Reader(folder_of(Path(self.args.load), SAVED - 1))
        reader.fill(reader.read_metadata(), pieces)

    def continued_with(self, directory: Path, fault: str) -> Curve:
        self.fault = fault
        return self.continued(directory)


def rank_of(words: Sequence[str], directory: Path, faults: Sequence[str]) -> dict[str, Curve]:
    process = Faulty(words, "t5")
    if not faults:
        return {"": process.uninterrupted(directory)}
    process.trainer.begin_load(0)
    return {fault: process.continued_with(directory, fault) for fault in faults}


def write_log(path: Path, curve: Curve) -> None:
    lines = [
        {"step": step, "loss": loss, "grad_norm": norm}
        for step, (loss, norm) in zip(range(SAVED + 1, LAST + 1), curve, strict=True)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def with_a_scaler(is_lost: bool) -> tuple[Curve, Curve]:
    """A loop with a loss scale, uninterrupted and continued, with the scaler's state or without."""

    def begin() -> tuple[torch.nn.Linear, torch.optim.Optimizer, torch.amp.GradScaler]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        return model, torch.optim.AdamW(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=2.0**126)

    def step(state: tuple, number: int) -> tuple[float, float]:
        model, optimizer, scaler = state
        data = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        loss = 100 * (model(data) - data).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        scaler.step(optimizer)
        scaler.update()
        return loss.item(), norm.item()

    whole = begin()
    for number in range(30):
        step(whole, number)
    saved = [json.loads(json.dumps(whole[2].state_dict())), whole[0].state_dict(), whole[1].state_dict()]
    buffer = Path(sys.argv[1], "scaler.pt")
    torch.save(saved, buffer)
    expected = [step(whole, number) for number in range(30, 33)]
    scales, weights, moments = torch.load(buffer)
    again = begin()
    again[0].load_state_dict(weights)
    again[1].load_state_dict(moments)
    if not is_lost:
        again[2].load_state_dict(scales)
    return expected, [step(again, number) for number in range(30, 33)]


def main() -> None:
    directory = Path(sys.argv[1])
    continuations.RECIPE |= {"DROPOUT": "0.1"}
    leave_out_compiler()
    import_deepspeed()
    gc.freeze()
    data = prepared(directory, "t5")
    for name in (ZERO, PIPELINE):
        own = directory / name
        words = words_of(SETUPS[name], "t5", "fp32", data)
        faults = [fault for fault, setup in FAULTS.items() if setup == name]
        whole = forked(SETUPS[name], own, partial(rank_of, words, own, []))
        write_log(directory / f"uninterrupted of {name}.jsonl", whole[""])
        for fault, curve in forked(SETUPS[name], own, partial(rank_of, words, own, faults)).items():
            write_log(directory / f"{fault}.jsonl", curve)
    for fault, is_lost in (("none with a scaler", False), ("the scaler's state", True)):
        expected, curve = with_a_scaler(is_lost)
        write_log(directory / "uninterrupted of a scaler.jsonl", expected)
        write_log(directory / f"{fault}.jsonl", curve)


if __name__ == "__main__":
    main()
