"""How far each number of a recipe moves the curves: python -m native.sensitivity t5|gpt FLAGS, of a one-process run.

It trains the recipe, and again with each number changed by a hundredth, or by the smallest possible step. It prints a
line of JSON for each training: what was changed, how, and the losses and gradient norms of all iterations. With
SENSITIVITY_ENOUGH="LOSS NORM" a training ends when one of its curves is so far from the recipe's, relatively.
"""

import itertools
import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from native.arguments import start
from native.data import Batch, open_data
from native.data_parallel import TorchTrainer
from native.parallel import Mesh
from native.schedule import learning_rate
from native.token_file import TokenFile, Vocabulary, pad_vocabulary

PERCENT = 0.01
# Groups of parameters, by patterns of their names; a model lacks some.
GROUPS = {
    "word embeddings": r"\.word_embeddings\.",
    "position embeddings": r"\.position_embeddings\.",
    "relative positions": r"\.relative_positions\.",
    "encoder": r"\.encoder\.",
    "decoder": r"\.decoder\.",
    "self-attention": r"\.self_attention\.",
    "cross-attention": r"\.inter_attention\.",
    "feed-forward": r"\.mlp\.",
    "layer norms": r"layernorm\.",
    "biases": r"(?<!layernorm)\.bias$",
    "head": r"^lm_head\.weight$",
    "output bias": r"^lm_head\.bias$",
}
# Arguments that grow by PERCENT, and their names in a sentence.
SCALED = {
    "lr": "learning rate",
    "min_lr": "final learning rate",
    "weight_decay": "weight decay",
    "adam_eps": "Adam's epsilon",
    "clip_grad": "clipping",
}
BETAS = {"adam_beta1": "Adam's beta 1", "adam_beta2": "Adam's beta 2"}


class Perturbation(NamedTuple):
    """One change of the recipe."""

    number: str
    """What the recipe's number is called."""
    change: str = "1 %"
    """How it changes, in words."""
    arguments: dict[str, Any] | None = None
    """The arguments that change."""
    what: str = ""
    """What changes that is no argument, by PERCENT where it can: see changed_data() and prepare()."""
    of: str = ""
    """A pattern of the names of the parameters that it concerns."""


def changes(args: Namespace, names: Collection[str]) -> Iterator[Perturbation]:
    """A change for each number of the recipe; the first changes nothing. names: of the model's parameters."""
    yield Perturbation("the recipe", "nothing")
    for name, number in SCALED.items():
        yield Perturbation(number, arguments={name: getattr(args, name) * (1 + PERCENT)})
    for name, number in BETAS.items():
        yield Perturbation(number, "1 % of 1 - beta", {name: 1 - (1 - getattr(args, name)) * (1 + PERCENT)})
    yield Perturbation("warm-up", "1 iteration", {"lr_warmup_iters": args.lr_warmup_iters + 1})
    yield Perturbation("length of the decay", "1 iteration", {"lr_decay_iters": args.lr_decay_iters + 1})
    yield Perturbation("schedule", "1 iteration late", what="late")
    yield Perturbation("seed of the weights", "+1", {"seed": args.seed + 1})
    yield Perturbation("initial weights", what="initial")
    if not args.model_description:  # which says its activation
        yield Perturbation("GELU", "its other form", {"no_bias_gelu_fusion": not args.no_bias_gelu_fusion})
    yield Perturbation("loss scale", what="gradient")
    yield Perturbation("accumulation", "1 % of one micro-batch", what="micro-batch")
    yield Perturbation("order of the data", "two samples", what="order")
    if args.family == "t5":
        yield Perturbation("encoder's length", "1 token", what="encoder")
    yield Perturbation("decoder's length", "1 token", what="decoder")
    for group, pattern in GROUPS.items():
        if not any(re.search(pattern, name) for name in names):
            continue
        for number in ("learning rate", "weight decay", "gradient"):
            yield Perturbation(f"{number} of {group}", what=number, of=pattern)


def changed_data(batches: list[Batch], what: str, pad: int) -> list[Batch]:
    """Swaps two samples of neighbouring iterations, or shortens one sample by a token."""
    changed = [tuple(tensor.clone() for tensor in batch) for batch in batches]
    if what == "order":
        for ours, theirs in zip(changed[0], changed[1], strict=True):
            first = ours[0].clone()
            ours[0] = theirs[0]
            theirs[0] = first
    elif what == "encoder":
        encoder_tokens = changed[0][0]
        last = int((encoder_tokens[0] != pad).sum()) - 1
        encoder_tokens[0, last] = pad
    elif what == "decoder":
        labels = changed[0][-1]
        last = int((labels[0] >= 0).sum()) - 1
        labels[0, last] = -1
    return changed


def prepare(trainer: TorchTrainer, change: Perturbation, args: Namespace) -> None:
    """Changes weights, gradients, weight decay or learning rate of the chosen parameters by PERCENT."""
    factor = 1 + PERCENT
    optimizer = trainer.optimizer
    chosen = {p for name, p in trainer.model.named_parameters() if re.search(change.of, name)}
    if change.what == "initial":
        for parameter in chosen:
            parameter.data.mul_(factor)
    elif change.what == "gradient":
        scale_gradients(chosen, [factor])
    elif change.what == "micro-batch":
        scale_gradients(chosen, [factor] + [1.0] * (args.micro_batches - 1))

    for group in list(optimizer.param_groups):
        chosen_here = [p for p in group["params"] if p in chosen]
        group["params"] = [p for p in group["params"] if p not in chosen]
        decay = group["weight_decay"]
        if change.what == "weight decay":
            # Parameters without weight decay get a hundredth of the others'.
            decay += PERCENT * args.weight_decay
        optimizer.add_param_group({**group, "params": chosen_here, "weight_decay": decay, "chosen": True})

    def set_rates(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            if "chosen" in group:
                group["lr"] *= factor

    if change.what == "learning rate":
        optimizer.register_step_pre_hook(set_rates)


def scale_gradients(parameters: Iterable[nn.Parameter], factors: list[float]) -> None:
    """Multiplies the gradients by these factors, which the micro-batches take in turn."""
    for parameter in parameters:
        turns = itertools.cycle(factors)
        parameter.register_hook(lambda gradient, turns=turns: gradient * next(turns))


def run(args: Namespace) -> None:
    """Trains with each change, until a curve differs enough from the recipe's, and prints its line."""
    file = TokenFile(args.data_path)
    vocabulary = Vocabulary.of(args)
    pad_vocabulary(args, vocabulary)
    args.num_workers = 0
    samples, _ = open_data(args, 0, file, vocabulary)
    batches = list(itertools.islice(samples, args.train_iters))
    enough = [float(word) for word in os.environ.get("SENSITIVITY_ENOUGH", "inf inf").split()]
    recipe: list[list[float]] = []
    names = [name for name, _ in TorchTrainer(args, Mesh()).model.named_parameters()]
    for change in changes(args, names):
        points = train(args, change, batches, recipe, enough)
        recipe = recipe or points
        losses, norms = zip(*points, strict=True)
        line = {"number": change.number, "change": change.change, "losses": losses, "norms": norms}
        print(json.dumps(line), flush=True)


def train(
    args: Namespace, change: Perturbation, batches: list[Batch], recipe: list[list[float]], enough: list[float]
) -> list[list[float]]:
    """Loss and gradient norm of each iteration with a change, until one of them is as far from the recipe's as
    `enough` says, relatively. recipe: empty for the recipe itself."""
    changed_args = Namespace(**vars(args) | (change.arguments or {}))
    trainer = TorchTrainer(changed_args, Mesh())
    prepare(trainer, change, changed_args)
    points: list[list[float]] = []
    for iteration, batch in enumerate(changed_data(batches, change.what, args.pad_token)):
        done = max(0, iteration - 1) if change.what == "late" else iteration
        loss, norm = trainer.step(batch, learning_rate(changed_args, done))
        points.append([float(loss), float(norm)])
        if recipe and is_far(points[-1], recipe[iteration], enough):
            break
    return points


def is_far(point: list[float], recipe: list[float], enough: list[float]) -> bool:
    """Whether the loss or the gradient norm differs so much."""
    limits = [least * abs(value) for value, least in zip(recipe, enough, strict=True)]
    differences = [abs(changed - value) for changed, value in zip(point, recipe, strict=True)]
    return any(difference >= limit > 0 for difference, limit in zip(differences, limits, strict=True))


if __name__ == "__main__":
    start(run, family=sys.argv.pop(1))
