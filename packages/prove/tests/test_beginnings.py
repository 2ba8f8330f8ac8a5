"""What ranks begin with: a beginning that is right raises no alarm, and each kind of mistake is named."""

from dataclasses import replace
from typing import Any

import torch

from t5bench_prove.beginnings import (
    ALL,
    SOME_SAMPLES,
    SOME_TOKENS,
    Beginning,
    compare_beginnings,
    numbers_of,
    on_every_rank,
)
from training_comparison.step_trace import OwnPart

TOKENS = torch.arange(16).view(4, 4)
NUMBERS = {"a": {"lr": 0.1, "weight_decay": 0.0}, "b": {"lr": 0.1, "weight_decay": 1.0}}
SAVED = {"a": torch.tensor([1.0, float("nan")]), "step of a": 4}


def whole() -> Beginning:
    weights = {"a": torch.arange(3.0), "b": torch.arange(8.0).view(4, 2)}
    return Beginning(weights, {}, [[{"tokens": TOKENS[:2]}, {"tokens": TOKENS[2:]}]], [NUMBERS])


def rank(number: int, **changed: Any) -> Beginning:
    """One of two that read other samples, and divide b: each has a row of its first half and one of its second."""
    own = OwnPart(0, [(number, 1), (2 + number, 1)])
    b = whole().weights["b"][[number, 2 + number]]
    weights = {"a": torch.arange(3.0), "b": b}
    steps = [[{"tokens": TOKENS[2 * number : 2 * number + 2]}]]
    return replace(Beginning(weights, {"b": own}, steps, [NUMBERS], SAVED, dict(SAVED)), **changed)


def said(reads: str = SOME_SAMPLES, **changed: Any) -> list[str]:
    """Of two ranks, the second of which is changed."""
    return compare_beginnings([rank(0), rank(1, **changed)], whole(), reads)


def test_what_is_right_raises_no_alarm():
    assert said() == []


def test_a_copy_and_a_slice_that_differ_are_named():
    first = rank(0).weights
    assert said(weights=first | {"a": torch.ones(3)}) == [
        "a begins with other values on rank 1 than in one process",
        "b begins with other values on rank 1 than in one process",
    ]


def test_samples_that_are_read_twice_are_counted():
    assert said(steps=rank(0).steps) == [
        "step 1: 2 samples are not its own or read twice, 2 of its own are not read",
    ]


def test_parts_of_the_tokens_are_put_together():
    halves = [[[{"tokens": TOKENS[:, :2]}]], [[{"tokens": TOKENS[:, 2:]}]]]
    ranks = [rank(number, steps=steps) for number, steps in enumerate(halves)]
    assert compare_beginnings(ranks, whole(), SOME_TOKENS) == []
    ranks[1] = rank(1, steps=halves[0])
    assert compare_beginnings(ranks, whole(), SOME_TOKENS) == [
        "step 1: 4 samples are not its own or read twice, 4 of its own are not read",
    ]


def test_ranks_that_read_all_read_the_same_micro_batches():
    steps = whole().steps
    ranks = [rank(0, steps=steps), rank(1, steps=steps)]
    assert compare_beginnings(ranks, whole(), ALL) == []
    ranks[1] = rank(1, steps=[steps[0][::-1]])
    assert compare_beginnings(ranks, whole(), ALL) == [
        "step 1: ranks read other samples, or the same in other micro-batches",
    ]


def test_numbers_of_the_optimizer_that_differ_are_named():
    numbers = NUMBERS | {"b": {"lr": 0.1, "weight_decay": 0.5}}
    assert said(numbers=[numbers]) == ["step 1: weight_decay of b is 0.5 on rank 1, not 1.0"]


def test_what_a_checkpoint_does_not_give_back_is_named():
    assert said(restored={"step of a": 0}) == [
        "a does not come back from a checkpoint on rank 1",
        "step of a comes back from a checkpoint as another one on rank 1",
    ]


def test_the_numbers_of_a_group_are_those_of_its_parameters():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": [model.weight], "weight_decay": 0.5}], lr=0.25)
    found = numbers_of(optimizer, dict(model.named_parameters()))
    assert found["weight"]["lr"] == 0.25 and found["weight"]["weight_decay"] == 0.5
    assert found["bias"] == {}


def test_a_seed_that_differs_between_ranks_is_seen():
    def begin() -> Beginning:
        torch.manual_seed(torch.distributed.get_rank())
        return Beginning(dict(torch.nn.Linear(2, 2).named_parameters()))

    ranks = on_every_rank(begin, {"data": 2})
    torch.manual_seed(0)
    one = Beginning(dict(torch.nn.Linear(2, 2).named_parameters()))
    assert compare_beginnings(ranks, one, SOME_SAMPLES) == [
        "weight begins with other values on rank 1 than in one process",
        "bias begins with other values on rank 1 than in one process",
    ]
