"""Models drawn at random (drawn.py), beside Transformers' own."""

from pathlib import Path

import drawn
import pytest
import torch
from described import arguments_of, batch_of, description_of, logits_of, reference_of

from native import gpt, t5
from native.data_parallel import TorchTrainer
from native.parallel import Mesh
from t5bench.costmodel.transformers_config import architecture_of
from t5bench.tools.convert.parameter_map import described_configuration
from training_comparison.curves import TOLERANCE

MOST_OF_LOGITS = 1e-6  # of the largest one
SPECIAL_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1)


@pytest.mark.parametrize("kind", drawn.KINDS)
@pytest.mark.parametrize("seed", [3, 6])  # of which GPT-2s have a head of their own, and GPT-NeoXs another base
def test_one_process_computes_what_transformers_does(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch):
    config = drawn.config_of(kind, seed)
    args = arguments_of(config)
    batch = batch_of(config, 2, seed)
    caught = []
    for module in (gpt, t5):
        monkeypatch.setattr(module, "vocab_cross_entropy", lambda logits, *_: caught.append(logits) or logits)
    with torch.no_grad():
        TorchTrainer(args, Mesh()).model(*batch)
        expected = logits_of(reference_of(config, args.seed).eval(), batch)
    is_real = batch[-1] >= 0
    off = (caught[0] - expected)[is_real].abs().max() / expected[is_real].abs().max()
    assert off <= MOST_OF_LOGITS


@pytest.mark.parametrize("kind", drawn.KINDS)
def test_an_exported_configuration_describes_the_same_model(kind: str):
    for seed in range(40):
        model = description_of(drawn.config_of(kind, seed))
        lengths = [length for length in (model.encoder_length, model.decoder_length) if length]
        exported = described_configuration(model, SPECIAL_TOKENS).to_dict()
        assert architecture_of(exported, *lengths) == model, seed


def test_an_exported_qwen_has_its_window():
    config = drawn.config_of("qwen2", 2) | {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 40}
    types = 2 * ["sliding_attention", "full_attention"]
    model = description_of(config | {"layer_types": types, "max_window_layers": 0})
    exported = described_configuration(model, SPECIAL_TOKENS).to_dict()
    assert exported["layer_types"] == types
    assert architecture_of(exported, model.decoder_length) == model


@pytest.mark.nightly
@pytest.mark.parametrize("kind", drawn.KINDS)
@pytest.mark.parametrize("seed", [20, 21])
def test_strategies_train_a_drawn_model_as_transformers_does(kind: str, seed: int, tmp_path: Path):
    off = drawn.differences(kind, seed, tmp_path)
    assert max(off.values()) <= TOLERANCE["fp32"].loss, off
