"""What the gate measures before it says that a recipe hides nothing: each change of a number reaches the training."""

from argparse import Namespace

import pytest
from command_lines import parsed
from described import CONFIGS, arguments_of, batch_of
from torch import Tensor

from native.data_parallel import TorchTrainer
from native.parallel import Mesh
from native.sensitivity import changes, train

RECIPE = ("--lr", "0.04", "--min-lr", "0.01", "--lr-warmup-iters", "2", "--lr-decay-style", "cosine")
RECIPE += ("--weight-decay", "5", "--train-iters", "5", "--clip-grad", "1.3", "--adam-eps", "0.01")
ANY_DIFFERENCE = [1e-9, 1e-9]  # relative


def numbers_without_effect(args: Namespace, batches: list[tuple[Tensor, ...]]) -> list[str]:
    names = [name for name, _ in TorchTrainer(args, Mesh()).model.named_parameters()]
    recipe: list[list[float]] = []
    unmoved = []
    for change in changes(args, names):
        points = train(args, change, batches, recipe, ANY_DIFFERENCE)
        if recipe and points == recipe:
            unmoved.append(change.number)
        recipe = recipe or points
    return unmoved


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5 v1.1", None])
def test_every_number_of_a_recipe_moves_the_curves(kind: str | None):
    config = CONFIGS[kind or "t5"]
    args = arguments_of(config, *RECIPE) if kind else parsed(*RECIPE)
    rows = args.micro_batch_size * args.micro_batches
    batches = [batch_of(config, rows, seed) for seed in range(args.train_iters)]
    assert numbers_without_effect(args, batches) == []
