"""Models that a config.json describes; Transformers' own model with the same weights is every strategy's reference."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import described
import pytest
import strategies
import torch
from described import CONFIGS, arguments_of, batch_of, logits_of, reference_of
from strategies import STRATEGIES, Curve, curve_of, in_processes, largest_difference

from native import data_parallel, gpt, layers, positions, sequence_parallel, t5
from native.data_parallel import TorchTrainer, mean_loss
from native.parallel import Mesh
from native.trace import traced
from training_comparison.curves import TOLERANCE
from training_comparison.first_difference import first_difference
from training_comparison.traces import trace_of_run

STEPS = 5
MOST = TOLERANCE["fp32"].loss  # of a gate in fp32, as of a norm
MOST_OF_LOGITS = 1e-6  # of the largest one

# Each way to divide a model once, with kinds that differ; the nightly matrix has all of both.
FEW = {
    "llama": ("tensor of 4, sequence", "pipeline, zero-bubble"),
    "qwen2": ("zero3",),
    "qwen3": ("tensor, fsdp2",),
    "gpt2": ("hybrid, sequence",),
    "t5 v1.1": ("pipeline of 4",),
    "mt5": ("recompute, full",),
}


@cache
def reference(kind: str) -> Curve:
    torch.set_num_threads(1)
    return described.train(CONFIGS[kind], arguments_of(CONFIGS[kind]), STEPS)


@pytest.mark.parametrize("kind", CONFIGS)
def test_one_process_computes_what_transformers_does(kind: str, monkeypatch: pytest.MonkeyPatch):
    config = CONFIGS[kind]
    args = arguments_of(config)
    trainer = TorchTrainer(args, Mesh())
    batch = batch_of(config, 2, seed=0)
    caught = []
    for module in (gpt, t5):
        loss = module.vocab_cross_entropy
        monkeypatch.setattr(
            module,
            "vocab_cross_entropy",
            lambda logits, *more, loss=loss: caught.append(logits.clone()) or loss(logits, *more),
        )
    with torch.no_grad():
        trainer.model(*batch)
        expected = logits_of(reference_of(config, args.seed).eval(), batch)
    is_real = batch[-1] >= 0
    off = (caught[0] - expected)[is_real].abs().max() / expected[is_real].abs().max()
    assert off <= MOST_OF_LOGITS
    curve = [
        tuple(figure.item() for figure in trainer.step(batch_of(config, 8, step), args.lr)) for step in range(STEPS)
    ]
    assert largest_difference(curve, reference(kind)) <= MOST


def test_grouped_heads_are_repeated_where_pytorch_has_none(monkeypatch: pytest.MonkeyPatch):
    """As in PyTorch 2.4, whose attention refuses the option."""
    config = CONFIGS["mistral"]
    attention = layers.F.scaled_dot_product_attention
    batch = batch_of(config, 2, seed=0)
    curves = []
    for has_groups in (True, False):
        monkeypatch.setattr(layers, "HAS_GROUPED_HEADS", has_groups)
        if not has_groups:
            monkeypatch.setattr(
                layers.F, "scaled_dot_product_attention", lambda *words, **named: attention(*words, **of_2_4(named))
            )
        trainer = TorchTrainer(arguments_of(config), Mesh())
        curves.append([tuple(figure.item() for figure in trainer.step(batch, 1e-3)) for _ in range(2)])
    assert largest_difference(curves[0], curves[1]) <= MOST


def of_2_4(named: dict[str, Any]) -> dict[str, Any]:
    """The options of attention that PyTorch 2.4 has."""
    assert "enable_gqa" not in named
    return named


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_padding_behind_a_document_changes_nothing(kind: str):
    """As --document-samples pads: the loss is that of Transformers' model, whatever the padding's token is."""
    config = CONFIGS[kind]
    args = arguments_of(config)
    model = TorchTrainer(args, Mesh()).model.eval()
    tokens, labels = batch_of(config, 4, seed=1)
    labels[1, 20:] = -1
    labels[3, 3:] = -1
    losses = []
    with torch.no_grad():
        for token in (0, 7):
            padded = torch.where(labels >= 0, tokens, token)
            losses.append(mean_loss(model(padded, labels), labels).item())
        logits = logits_of(reference_of(config, args.seed).eval(), (tokens, labels))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1).item()
    assert losses[0] == losses[1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FEW.items() for name in names])
def test_a_strategy_trains_as_transformers_does(kind: str, name: str, tmp_path: Path):
    curve = strategies.train(CONFIGS[kind], STRATEGIES[name], tmp_path, STEPS)
    assert largest_difference(curve, reference(kind)) <= MOST


@pytest.mark.nightly
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_strategy_trains_every_kind_as_transformers_does(kind: str, tmp_path: Path):
    off = {}
    for number, (name, strategy) in enumerate(STRATEGIES.items()):
        curve = strategies.train(CONFIGS[kind], strategy, tmp_path / str(number), STEPS)
        off[name] = largest_difference(curve, reference(kind))
    assert max(off.values()) <= MOST, off


# ---- planted mistakes ------------------------------------------------------------------------------------------------


def keys_one_position_late(rank: int) -> None:
    rotate = positions.rotate

    def late(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        is_key = x.size(2) < 2  # of one group, where there are two heads of queries
        return rotate(x, rotation.roll(1, 1) if is_key else rotation)

    layers.rotate = late


def groups_in_another_order(rank: int) -> None:
    core = layers.Attention.core

    def repeated(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
        times = query.size(2) // key.size(2)
        return core(self, query, key.repeat(1, 1, times, 1), value.repeat(1, 1, times, 1), mask)

    layers.Attention.core = repeated


def no_relative_positions_on_the_second_stage(rank: int) -> None:
    forward = positions.RelativePositions.forward
    if rank == 1:
        positions.RelativePositions.forward = lambda *words: 0 * forward(*words)


def another_epsilon(rank: int) -> None:
    init = layers.RMSNorm.__init__
    layers.RMSNorm.__init__ = lambda self, width, epsilon: init(self, width, 1.1 * epsilon)


def not_summed_in_pairs(rank: int) -> None:
    together = sequence_parallel.sum_together
    sequence_parallel.sum_together = lambda own, axis: None if axis.size == 2 else together(own, axis)


def no_norms_of_queries_and_keys(rank: int) -> None:
    forward = layers.RMSNorm.forward

    def skipped(self: Any, x: torch.Tensor) -> torch.Tensor:
        is_of_heads = hasattr(self.weight, "is_partial")
        return x + 0 * self.weight if is_of_heads else forward(self, x)

    layers.RMSNorm.forward = skipped


def copies_of_words_not_summed(rank: int) -> None:
    data_parallel.sum_tied_gradients = lambda tied: None


def one_residual_after_the_other(rank: int) -> None:
    init = layers.Layer.__init__

    def sequential(self: Any, *words: Any, **named: Any) -> None:
        init(self, *words, **named)
        self.parallel_residual = False

    layers.Layer.__init__ = sequential


def gate_and_input_swapped(rank: int) -> None:
    def swapped(self: Any, x: torch.Tensor) -> torch.Tensor:
        inner, gate = self.dense_h_to_4h(x).chunk(2, -1)
        return self.dense_4h_to_h(layers.activate(gate, self.activation) * inner)

    layers.FeedForward.forward = swapped


def every_column_turned(rank: int) -> None:
    rotation_of = positions.rotation_of
    layers.rotation_of = lambda model, *words: rotation_of(replace(model, rotary_columns=0), *words)


def waves_not_stretched(rank: int) -> None:
    rotation_of = positions.rotation_of
    layers.rotation_of = lambda model, *words: rotation_of(replace(model, rotary_scaling=()), *words)


def scores_scaled(rank: int) -> None:
    init = layers.Attention.__init__
    layers.Attention.__init__ = lambda self, args, model, tp: init(self, args, replace(model, scaled_scores=True), tp)


def head_not_scaled(rank: int) -> None:
    init = layers.Head.__init__
    layers.Head.__init__ = lambda self, model, tp: init(self, replace(model, scaled_head=False), tp)


FIRST_ATTENTION = (1, "forward", "encoder.layers.0.self_attention")
MISTAKES: Mapping[str, tuple[str, str, Callable[[int], None], tuple[int, str, str]]] = {
    "rotary angles": ("mistral", "tensor", keys_one_position_late, FIRST_ATTENTION),
    "groups": ("mistral", "pipeline", groups_in_another_order, FIRST_ATTENTION),
    "relative positions": (
        "t5 v1.1", "pipeline of 4", no_relative_positions_on_the_second_stage,
        (1, "forward", "encoder.layers.1.self_attention"),
    ),
    "epsilon": ("llama", "tensor", another_epsilon, (1, "forward", "encoder.layers.0.input_layernorm")),
    "keys that several ranks hold": (
        "mistral", "tensor of 4", not_summed_in_pairs,
        (1, "reduced", "encoder.layers.0.self_attention.key_value.weight"),
    ),
    "norms of each head": (
        "qwen3", "tensor", not_summed_in_pairs, (1, "reduced", "encoder.layers.0.self_attention.query_layernorm.weight")
    ),
    "norms of queries and keys": ("qwen3", "hybrid", no_norms_of_queries_and_keys, FIRST_ATTENTION),
    "tied words": (
        "qwen2", "pipeline", copies_of_words_not_summed, (1, "reduced", "embedding.word_embeddings.weight")
    ),
    "parallel residual": (
        "gpt_neox", "tensor", one_residual_after_the_other,
        (1, "forward", "encoder.layers.0.post_attention_layernorm"),
    ),
    "gate": ("t5 v1.1", "pipeline", gate_and_input_swapped, (1, "forward", "encoder.layers.0.mlp")),
    "rotary columns": ("gpt_neox", "pipeline", every_column_turned, FIRST_ATTENTION),
    "rotary scaling": ("llama with biases", "tensor", waves_not_stretched, FIRST_ATTENTION),
    "scale of scores": ("mt5", "tensor", scores_scaled, FIRST_ATTENTION),
    "scale of the head": ("t5", "pipeline", head_not_scaled, (1, "forward", "loss")),
}  # fmt: skip


MISTAKES_DAILY = ("rotary angles", "keys that several ranks hold")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in MISTAKES_DAILY)) for name in MISTAKES]
)
def test_a_mistake_in_a_new_part_is_seen_and_placed(name: str, tmp_path: Path):
    kind, strategy, mistake, place = MISTAKES[name]
    config = CONFIGS[kind]

    def watched(trainer: TorchTrainer) -> Curve:
        with traced(trainer, trainer.args, trainer.mesh):
            return curve_of(trainer, config, range(2))

    def run(name: str, strategy: str, mistake: Callable[[int], None]) -> Curve:
        folder = tmp_path / name
        # With the gate's large epsilon: the gradient of keys' biases is rounding alone.
        flags = ("--trace", "--adam-eps", "0.01", "--tensorboard-dir", str(folder / "tensorboard"))
        return in_processes(config, STRATEGIES[strategy], folder, watched, *flags, mistake=mistake)[0]

    baseline = run("baseline", "ddp", lambda _: None)
    curve_of_honest = run("honest", strategy, lambda _: None)
    curve_of_wrong = run("wrong", strategy, mistake)
    assert largest_difference(curve_of_honest, baseline) <= MOST < largest_difference(curve_of_wrong, baseline)
    honest, wrong, right = (trace_of_run(tmp_path / name) for name in ("honest", "wrong", "baseline"))
    assert first_difference(honest, right) is None
    found = first_difference(wrong, right)
    assert found is not None
    assert (found.step, found.phase, found.name) == place
