"""Trains a recipe in this process, which is one of several, and writes what gates read."""

import json
from pathlib import Path

from gate_score.trainer import Recipe, Trainer
from training_comparison.step_trace import OwnPart, StepTrace


def train(kind: type[Trainer], recipe: Recipe, directory: Path) -> None:
    """Each rank writes directory/trace/rank<R>.jsonl, for `judge`, and directory/log<R>.jsonl, as trainers print it."""
    trainer = kind(recipe)
    rank = trainer.rank
    directory.mkdir(parents=True, exist_ok=True)
    trace = trace_of(trainer, directory)
    with (directory / f"log{rank}.jsonl").open("w") as file:
        for number in range(1, recipe.steps + 1):
            if recipe.resume_after and number == recipe.resume_after + 1:
                saved = trainer.save()
                trainer = kind(recipe)
                trainer.load(saved)
                trace = trace_of(trainer, directory, is_continued=True)

            def observe(
                own: float, norm: float, trainer: Trainer = trainer, trace: StepTrace = trace, number: int = number
            ) -> None:
                line = {"step": number, "loss": trainer.reported(own), "own_loss": own, "grad_norm": norm}
                file.write(json.dumps(line) + "\n")
                trace.step(number, trainer.own_loss(own))

            trainer.step(observe)


def trace_of(trainer: Trainer, directory: Path, *, is_continued: bool = False) -> StepTrace:
    lengths = {name: tuple(parameter.shape) for name, parameter in trainer.model.named_parameters()}

    def part(name: str) -> OwnPart | None:
        if not trainer.is_slice(name):
            return None
        dim = trainer.dim(name)  # type: ignore[attr-defined]
        blocks = 3 if "qkv" in name else 1  # each rank has its part of q, of k and of v
        length = lengths[name][dim] // blocks
        begins = [block * trainer.world * length + trainer.rank * length for block in range(blocks)]
        return OwnPart(dim, [(begin, length) for begin in begins])

    place = (trainer.rank, trainer.world)  # a training in one process has a part of the group
    return StepTrace(directory / "trace", trainer.model, part, place=place, is_continued=is_continued)
