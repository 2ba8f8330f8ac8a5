"""CLIP_GRAD=among: DDP trains until some of its iterations are clipped and others are not."""

import os
from pathlib import Path

import pytest

from t5bench.sweep import clipping, parity_check
from t5bench.sweep.clipping import with_clip_among


@pytest.mark.parametrize(
    ("norms", "clips"),
    [
        ([[0.5, 2.0]], ["1.0"]),
        ([[2.0, 8.0], [2.0, 8.0]], ["1.0", "4"]),
        ([[0.1, 0.4], [0.1, 0.4]], ["1.0", "0.2"]),
        ([[2.0, 8.0], [5.0, 8.0], [5.0, 7.0]], ["1.0", "4", "6.32"]),
        ([[2.0, 8.0], [5.0, 8.0], [7.0, 8.0]], ["1.0", "4", "6.32"]),
        ([[3.0, 3.0]], ["1.0"]),
        ([[]], ["1.0"]),
    ],
    ids=["the first", "above", "below", "moved by clipping", "moved again: no endless search", "all equal", "no run"],
)
def test_ddp_trains_once_more_until_the_number_is_among_its_norms(
    monkeypatch: pytest.MonkeyPatch, norms: list[list[float]], clips: list[str]
):
    trained: list[str] = []

    def train(clip: str) -> Path:
        trained.append(clip)
        return Path(f"run-{len(trained) - 1}")

    monkeypatch.setattr(clipping, "norms_of", lambda directory: norms[int(directory.name.removeprefix("run-"))])
    assert with_clip_among(train, "1.0") == (clips[-1], Path(f"run-{len(clips) - 1}"))
    assert trained == clips


def test_the_parity_check_of_a_model_of_ones_own_clips_among_its_norms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    trained: list[str] = []
    monkeypatch.setattr(parity_check, "train", lambda *_, CLIP_GRAD: trained.append(CLIP_GRAD))
    monkeypatch.setattr(clipping, "norms_of", lambda directory: [4.0, 9.0])
    monkeypatch.setenv("CLIP_GRAD", "1.3")
    parity_check.clip_among_norms("native", tmp_path)
    assert trained == ["1.3", "6"] and os.environ["CLIP_GRAD"] == "6"
