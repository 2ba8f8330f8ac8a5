"""Trains a recipe in this process, which is one of several, and writes what gates read."""

import json
from pathlib import Path

import torch.distributed as dist

from gate_score.trainer import Recipe, Trainer
from t5bench_judge.audit import audit


def train(kind: type[Trainer], recipe: Recipe, directory: Path) -> None:
    """Each rank writes directory/audit/rank<R>.jsonl, for `judge`, and directory/log<R>.jsonl, as trainers print it."""
    trainer = kind(recipe)
    rank = trainer.rank
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"log{rank}.jsonl").open("w") as file:
        for number in range(1, recipe.steps + 1):
            if recipe.resume_after and number == recipe.resume_after + 1:
                saved = trainer.save()
                trainer = kind(recipe)
                trainer.load(saved)

            def observe(own: float, norm: float, trainer: Trainer = trainer, number: int = number) -> None:
                line = {"step": number, "loss": trainer.reported(own), "own_loss": own, "grad_norm": norm}
                file.write(json.dumps(line) + "\n")
                record(trainer, number, own, directory / "audit")

            trainer.step(observe)


def record(trainer: Trainer, step: int, own: float, directory: Path) -> None:
    group = dist.group.WORLD if trainer.world > 1 else None
    audit(
        trainer.model,
        trainer.optimizer,  # type: ignore[arg-type]
        step=step,
        directory=directory,
        loss=trainer.own_loss(own),
        slices=lambda name: group if trainer.is_slice(name) else None,
    )
