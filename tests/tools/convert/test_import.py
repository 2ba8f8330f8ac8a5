"""Models of Transformers in the engine's layouts, and what does not fit."""

from pathlib import Path

import pytest
from tools.convert.convert_commands import FP32_ROUNDING, script


@pytest.mark.nightly
def test_a_model_that_is_imported_and_exported_is_the_same(tmp_path: Path):
    """Also in the engine itself: test_export.py and tests/engines/test_gpt.py."""
    found = script("round_trips.py", tmp_path)
    refusals = found.pop("refusals")
    assert found.keys() == {"gpt 1 1", "t5 1 1", "gpt 2 2", "t5 2 2"}
    for layout, result in found.items():
        assert result["difference"] < FP32_ROUNDING, layout
        assert result["rows"] % 128 == 0 and result["largest argmax"] < result["words"], "rows that no word has"
        assert result["files"] == (4 if layout.endswith("2 2") else 1)
        assert "--finetune --load" in result["said"]
        assert "leave out TOKENIZER_MODEL" in result["said of an export"]
        assert "leave out TOKENIZER_MODEL" not in result["said"]
        is_noted = "the tokenizer has 501 tokens, the model 500" in result["said"]
        assert is_noted == layout.startswith("gpt")
    for name, part in {
        "untied": "not tied",
        "activation": "activation is relu",
        "vocabulary": "512 rows, but the model's has 1024",
        "family": "is a llama",
        "scaled": "embedding is scaled",
        "layers": "lack model.decoder.layers.4",
        "shape": "but its config.json means",
        "head": "also have score.weight",
        "positions": "different position embeddings",
    }.items():
        assert part in refusals[name]
