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
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from native.arguments import start
from native.data import Batch, TokenFile, Vocabulary, open_data
from native.data_parallel import TorchTrainer
from native.parallel import Layout
from native.train import learning_rate, pad_vocabulary

PERCENT = 0.01
# Groups of parameters, by patterns of their names.
GROUPS = {
    "word embeddings": r"\.word_embeddings\.",
    "position embeddings": r"\.position_embeddings\.",
    "encoder": r"\.encoder\.",
    "decoder": r"\.decoder\.",
    "self-attention": r"\.self_attention\.",
    "cross-attention": r"\.inter_attention\.",
    "feed-forward": r"\.mlp\.",
    "layer norms": r"layernorm\.",
    "biases": r"(?<!layernorm)\.bias$",
    "output bias": r"^lm_head\.",
}


LACKING = {"t5": (), "gpt": ("decoder", "cross-attention", "output bias")}  # its layers are called the encoder


class Change(NamedTuple):
    """One change of the recipe: arguments, or `what` else changes, by PERCENT where it can, for the parameters whose
    names match `of`."""

    number: str
    change: str = "1 %"
    arguments: dict[str, Any] | None = None
    what: str = ""
    of: str = ""


def changes(args: Namespace) -> Iterator[Change]:
    """A change for each number of the recipe; the first changes nothing."""
    yield Change("the recipe", "nothing")
    numbers = {"learning rate": "lr", "final learning rate": "min_lr", "weight decay": "weight_decay"}
    for number, name in (numbers | {"Adam's epsilon": "adam_eps", "clipping": "clip_grad"}).items():
        yield Change(number, arguments={name: getattr(args, name) * (1 + PERCENT)})
    for number, name in (("Adam's beta 1", "adam_beta1"), ("Adam's beta 2", "adam_beta2")):
        yield Change(number, "1 % of 1 - beta", {name: 1 - (1 - getattr(args, name)) * (1 + PERCENT)})
    yield Change("warm-up", "1 iteration", {"lr_warmup_iters": args.lr_warmup_iters + 1})
    yield Change("length of the decay", "1 iteration", {"train_iters": args.train_iters + 1})
    yield Change("schedule", "1 iteration late", what="late")
    yield Change("seed of the weights", "+1", {"seed": args.seed + 1})
    yield Change("initial weights", what="initial")
    yield Change("GELU", "its other form", {"no_bias_gelu_fusion": not args.no_bias_gelu_fusion})
    yield Change("loss scale", what="gradient")
    yield Change("accumulation", "1 % of one micro-batch", what="micro-batch")
    yield Change("order of the data", "two samples", what="order")
    if args.family == "t5":
        yield Change("encoder's length", "1 token", what="encoder")
    yield Change("decoder's length", "1 token", what="decoder")
    for group, pattern in GROUPS.items():
        if group in LACKING[args.family]:
            continue
        for number in ("learning rate", "weight decay", "gradient"):
            yield Change(f"{number} of {group}", what=number, of=pattern)


def changed_data(batches: list[Batch], what: str, pad: int) -> list[Batch]:
    """Swaps two samples of neighbouring iterations, or shortens one sample by a token."""
    changed = [tuple(tensor.clone() for tensor in batch) for batch in batches]
    labels = changed[0][-1]
    if what == "order":
        for tensor, its in zip(changed[0], changed[1], strict=True):
            tensor[0], its[0] = its[0].clone(), tensor[0].clone()
    elif what == "encoder":
        encoder = changed[0][0]
        encoder[0, int((encoder[0] != pad).sum()) - 1] = pad
    elif what == "decoder":
        last = int((labels[0] >= 0).sum()) - 1
        labels[0, last] = -1
    return changed


def prepare(trainer: TorchTrainer, change: Change, args: Namespace) -> None:
    """Changes weights, gradients, weight decay or learning rate of the chosen parameters by PERCENT."""
    factor, optimizer = 1 + PERCENT, trainer.optimizer
    chosen = {p for name, p in trainer.model.named_parameters() if re.search(change.of, name)}
    micro_batches = {"gradient": 1, "micro-batch": args.micro_batches}.get(change.what)
    for parameter in chosen:
        if change.what == "initial":
            parameter.data.mul_(factor)
        elif micro_batches:
            factors = itertools.cycle([factor, *[1.0] * (micro_batches - 1)])
            parameter.register_hook(lambda gradient, factors=factors: gradient * next(factors))
    for group in list(optimizer.param_groups):
        own = [p for p in group["params"] if p in chosen]
        group["params"] = [p for p in group["params"] if p not in chosen]
        # Parameters without weight decay get a hundredth of the others'.
        decay = group["weight_decay"] + PERCENT * args.weight_decay * (change.what == "weight decay")
        optimizer.add_param_group({**group, "params": own, "weight_decay": decay, "chosen": True})

    def set_rates(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= factor if "chosen" in group else 1.0

    if change.what == "learning rate":
        optimizer.register_step_pre_hook(set_rates)


def run(args: Namespace) -> None:
    """Trains with each change, until a curve differs enough from the recipe's, and prints its line."""
    file, vocabulary = TokenFile(args.data_path), Vocabulary.of(args)
    pad_vocabulary(args, vocabulary)
    args.num_workers = 0
    samples, _ = open_data(args, 0, file, vocabulary)
    batches = list(itertools.islice(samples, args.train_iters))
    recipe: list[list[float]] = []
    enough = [float(word) for word in os.environ.get("SENSITIVITY_ENOUGH", "inf inf").split()]
    for change in changes(args):
        own, found = Namespace(**vars(args) | (change.arguments or {})), []
        trainer = TorchTrainer(own, Layout())
        prepare(trainer, change, own)
        for number, batch in enumerate(changed_data(batches, change.what, args.pad_token)):
            rate = learning_rate(own, max(0, number - (change.what == "late")))
            found.append([float(v) for v in trainer.step(batch, rate)])
            its = recipe[number] if recipe else found[-1]
            if any(abs(v - w) >= least * abs(w) > 0 for v, w, least in zip(found[-1], its, enough, strict=True)):
                break
        recipe = recipe or found
        curves = dict(zip(("losses", "norms"), zip(*found, strict=True), strict=True))
        print(json.dumps({"number": change.number, "change": change.change} | curves), flush=True)


if __name__ == "__main__":
    start(run, family=sys.argv.pop(1))
