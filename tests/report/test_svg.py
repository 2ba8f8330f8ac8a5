"""Every picture by one drawer: what a page gets is safe in it, and a file stands alone."""

from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure

from t5bench.report import svg


def picture() -> Figure:
    figure = Figure(figsize=(3, 2))
    axes = figure.subplots()
    axes.plot([1, 2, 3], [1.23456, 2, 3], color=svg.INK)
    axes.set_title("a $ sign, a < sign")
    return figure


def test_a_page_gets_its_own_colours_and_ids():
    first, second = (svg.for_page(picture, prefix) for prefix in ("f0", "f1"))
    assert first.startswith("<svg") and "currentColor" in first and "var(--grid)" in first
    assert "a $ sign, a &lt; sign" in first
    assert not [word for word in ("#010203", "#040506", "<?xml", "<metadata", "1.2345") if word in first]
    assert first.replace('"f0-', '"f1-').replace("#f0-", "#f1-") == second


def test_a_file_has_no_variables_of_a_page(tmp_path: Path):
    svg.write(picture, tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert 'xmlns="http://www.w3.org/2000/svg"' in text
    assert "var(" not in text and "currentColor" not in text and "#010203" not in text
    svg.write(picture, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="not supported"):
        svg.write(picture, tmp_path / "picture.nosuch")


def test_the_readers_own_style_changes_nothing():
    before = svg.for_page(picture, "f0")
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30}):
        assert svg.for_page(picture, "f0") == before
