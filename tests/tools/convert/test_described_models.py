"""Published checkpoints of described models: imported into the native engine, and given back to Transformers."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from described import CONFIGS, arguments_of, batch_of, description_of, logits_of, reference_of
from support import REPO_ROOT

from native import checkpoint, gpt, t5
from native.data_parallel import TorchTrainer
from native.parallel import Mesh
from t5bench.checkpoint_form import folder_of
from t5bench.imports import import_transformers
from t5bench.tools.convert.export import export
from t5bench.tools.convert.import_described import import_described
from t5bench.tools.convert.trained import TrainedModel

TOKENIZER = REPO_ROOT / "megatron_data" / "sample" / "tokenizer"
WORDS = 4224
SEED = 77  # not the engine's own


def saved(kind: str, folder: Path) -> tuple[dict[str, Any], torch.nn.Module]:
    """Transformers' model of this kind, as save_pretrained writes it."""
    config = {**CONFIGS[kind], "vocab_size": WORDS}
    model = reference_of(config, SEED).eval()
    model.save_pretrained(folder)
    return config, model


def engine_logits(
    config: dict[str, Any], folder: Path, batch: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    trainer = TorchTrainer(arguments_of(config), Mesh())
    checkpoint.load_weights(trainer, folder)
    caught: list[torch.Tensor] = []
    for module in (gpt, t5):
        monkeypatch.setattr(module, "vocab_cross_entropy", lambda logits, *_: caught.append(logits))
    with torch.no_grad():
        trainer.model.eval()(*batch)
    return caught[0]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_checkpoint_is_imported_and_given_back(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, model = saved(kind, tmp_path / "published")
    import_described(tmp_path / "published", tmp_path / "run")
    folder = folder_of(tmp_path / "run" / "checkpoints", 0)
    batch = batch_of(config, 2, seed=3)
    is_real = batch[-1] >= 0
    with torch.no_grad():
        expected = logits_of(model, batch)[is_real]
    found = engine_logits(config, folder, batch, monkeypatch)[is_real]
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()

    trained = TrainedModel(
        tmp_path / "run", "native", 0, folder, Namespace(), {}, description_of(config), torch.float32, TOKENIZER, None
    )
    export(trained, tmp_path / "exported", TOKENIZER)
    transformers = import_transformers()
    again, report = getattr(transformers, type(model).__name__).from_pretrained(
        tmp_path / "exported", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    with torch.no_grad():
        assert torch.equal(logits_of(again.eval(), batch)[is_real], expected)
