"""The gate that trains nothing: one step executed without arithmetic, in which prove follows each gradient."""

from collections.abc import Sequence
from typing import Any

import torch

from gate_score.layouts import LAYOUTS
from gate_score.processes import RANKS
from gate_score.trainer import Batch, Recipe, Trainer
from t5bench_prove.any_model import StepProof, prove_step

AXES = {"tensor": "tensor", "sequence": "tensor", "context": "context", "pipeline": "pipeline"}
DATA = "data"
SCALES = {"fsdp2": 1 / RANKS}  # which averages a loss that was multiplied; the others add up
NO_LOSSES = 0.0


def said_by_prove(kind: type[Trainer], recipe: Recipe) -> str:
    """What prove finds on any rank, the first finding; "" if there is none, or the step cannot be followed."""
    for rank in range(RANKS):
        for said in proof_of(kind, recipe, rank).findings:
            return f"rank {rank}: {said}"
    return ""


def proof_of(kind: type[Trainer], recipe: Recipe, rank: int) -> StepProof:
    watched = type("Watched", (Watched, kind), {})
    made: list[Any] = []

    def make_model() -> torch.nn.Module:
        made[:] = [watched(recipe)]
        return made[0].model

    axis = AXES.get(kind.layout, DATA)
    has_stages = kind.layout == "pipeline"
    return prove_step(
        make_model=make_model,
        wrap=lambda model, mesh: made[0],
        make_batch=lambda: made[0].samples_of_the_step(),
        step=lambda trainer, optimizer, batches: trainer.step_on(batches),
        make_optimizer=lambda trainer: None,
        mesh={axis: RANKS},
        samples=(axis,) if axis in (DATA, "context") else (),
        slices=lambda name: axis if made[0].is_slice(name) else "",
        tied_over=lambda name: axis if has_stages and name == "embedding.weight" else "",
        has_stages=axis if has_stages else "",
        rank=rank,
        scale=SCALES.get(kind.layout, 1.0),
    )


class Watched(LAYOUTS["one"]):  # type: ignore[misc, valid-type]
    """A trainer whose samples come from outside, and whose update PyTorch's hook of optimizers sees."""

    given: Sequence[Batch] = ()

    def samples_of_the_step(self) -> list[Batch]:
        return super().micro_batches(self.done + 1)

    def micro_batches(self, step: int) -> list[Batch]:
        return list(self.given)

    def step_on(self, batches: Sequence[Batch]) -> None:
        self.given = batches
        self.step(lambda own, norm: None)

    def update(self, step: int) -> None:
        Hooked([parameter for _, parameter in self.parameters()], {}).step()
        super().update(step)


class Hooked(torch.optim.Optimizer):
    """Calls PyTorch's hooks of optimizers, and leaves the update to the trainer."""

    def step(self) -> None:
        pass
