"""The gate that executes nothing: what each rank begins with, before the first step and after a resume."""

from typing import Any

import torch

from gate_score.layouts import LAYOUTS
from gate_score.processes import RANKS
from gate_score.trainer import Recipe, Trainer, local
from t5bench_prove.beginnings import (
    ALL,
    SOME_SAMPLES,
    SOME_TOKENS,
    Beginning,
    compare_beginnings,
    on_every_rank,
)
from training_comparison.step_trace import OwnPart

READS = {"data": SOME_SAMPLES, "zero1": SOME_SAMPLES, "fsdp2": SOME_SAMPLES, "context": SOME_TOKENS}


def said_of_beginnings(kind: type[Trainer], recipe: Recipe, reference: Recipe) -> str:
    """What is wrong first, in words; "" if nothing is. reference: of one process."""
    ranks = on_every_rank(lambda: beginning_of(kind, recipe), {"rank": RANKS})
    whole = beginning_of(LAYOUTS["one"], reference)
    return next(iter(compare_beginnings(ranks, whole, READS.get(kind.layout, ALL))), "")


def beginning_of(kind: type[Trainer], recipe: Recipe) -> Beginning:
    own = type("Begun", (Begun, kind), {})(recipe)
    names = dict(own.parameters())
    parts = {name: OwnPart(*own.part_of(name)) for name in names if own.is_slice(name)}
    steps = range(1, recipe.steps + 1)
    batches = [[vars_of(batch) for batch in own.micro_batches(step)] for step in steps]
    saved, restored = both_sides_of_a_checkpoint(kind, recipe) if recipe.resume_after else ({}, {})
    weights = {name: own.initial_weights[name] for name in names}
    return Beginning(weights, parts, batches, [numbers_in(own, step) for step in steps], saved, restored)


def vars_of(batch: Any) -> dict[str, torch.Tensor]:
    return {"tokens": batch.tokens, "labels": batch.labels, "positions": batch.positions}


def numbers_in(own: Trainer, step: int) -> dict[str, dict[str, Any]]:
    """Of a step, as an optimizer's groups would have them."""
    own.done = step - 1
    usual = {"lr": own.rate(step), "betas": own.betas, "eps": own.epsilon}
    return {name: usual | {"weight_decay": own.decay(name, one)} for name, one in own.parameters()}


class Begun(LAYOUTS["one"]):  # type: ignore[misc, valid-type]
    """A trainer that keeps its weights as they were before FSDP2 divided them."""

    def wrap(self) -> None:
        self.initial_weights = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        super().wrap()


def both_sides_of_a_checkpoint(kind: type[Trainer], recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a training has that saves, and what one has that loads it. The gradients before it are made up."""
    first = kind(recipe)
    generator = torch.Generator().manual_seed(recipe.seed)
    for step in range(1, recipe.resume_after + 1):
        for _, parameter in first.parameters():
            parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).normal_(generator=generator)
        first.draw_masks()
        first.update(step)
        first.done = step
    second = kind(recipe)
    second.load(first.save())
    return content(first), content(second)


def content(own: Trainer) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in own.parameters()}
    found: dict[str, Any] = {"the count of steps": own.done, "the state of random numbers": own.rng.get_state()}
    for name, parameter in own.parameters():
        found[name] = local(parameter.detach()).clone()
    for key, state in own.optimizer.state.items():
        name = names.get(id(key), str(key))
        found |= {f"{what} of {name}": value for what, value in state.items()}
    return found
