"""Trains a recipe in this process, which is one of several, and writes what gates read."""

import json
from pathlib import Path

import torch

from gate_score.trainer import Recipe, Trainer, local
from training_comparison.step_trace import OwnPart, StepTrace, trained_parameters

TRACE = "trace"
WEIGHTS = "weights"


def train(kind: type[Trainer], recipe: Recipe, directory: Path) -> None:
    """Each rank writes directory/trace/rank<R>.jsonl, for `judge`, directory/log<R>.jsonl, as trainers print it, and
    directory/weights<R>.pt, its part of the final weights."""
    trainer = kind(recipe)
    directory.mkdir(parents=True, exist_ok=True)
    place = (0, 1) if trainer.layout == "one" else None
    trace = StepTrace(directory / TRACE, trainer.model, lambda name: own_part(trainer, name), place=place)
    with (directory / f"log{trainer.rank}.jsonl").open("w") as file:
        for number in range(1, recipe.steps + 1):
            if recipe.resume_after and number == recipe.resume_after + 1:
                saved = trainer.save()
                trainer = kind(recipe)
                trainer.load(saved)
                trace.parameters = dict(trained_parameters(trainer.model))

            def observe(own: float, norm: float, trainer: Trainer = trainer, number: int = number) -> None:
                line = {"step": number, "loss": trainer.reported(own), "own_loss": own, "grad_norm": norm}
                file.write(json.dumps(line) + "\n")
                trace.step(number, trainer.own_loss(own))

            trainer.step(observe)
    weights = {name: local(parameter.detach()) for name, parameter in trainer.parameters()}
    torch.save(weights, directory / f"{WEIGHTS}{trainer.rank}.pt")


def distance(directory: Path, other: Path) -> float:
    """Of the final weights on all ranks, relative to the other's: 0 where every bit is equal, infinite where ranks have
    other parts."""
    squares, whole = 0.0, 0.0
    for path in sorted(other.glob(f"{WEIGHTS}*.pt")):
        mine, its = (torch.load(place / path.name, weights_only=True) for place in (directory, other))
        for name, weight in its.items():
            if mine[name].shape != weight.shape:
                return float("inf")
            squares += float((mine[name].double() - weight.double()).square().sum())
            whole += float(weight.double().square().sum())
    return (squares / whole) ** 0.5


def own_part(trainer: Trainer, name: str) -> OwnPart | None:
    found = trainer.part_of(name)
    return OwnPart(*found) if found else None
