"""The generated pages are what the programs write today."""

from pathlib import Path

import pytest

from docs import make_generated


@pytest.mark.slow
@pytest.mark.nightly
def test_the_courses_answers_are_what_its_commands_print():
    """After a change of what they say: python -m docs.make_generated"""
    page = make_generated.COURSE.read_text()
    assert len(make_generated.ANSWERED.findall(page)) == 7
    assert make_generated.with_answers(page) == page


def test_writing_all_pages_again_changes_nothing(tmp_path: Path):
    """After a change of what they say: python -m docs.make_generated"""
    make_generated.write_all(tmp_path)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == [
        "across_engines.md",
        "continuations.md",
        "layouts.html",
        "llama_choice.svg",
        "published.md",
        "settings.md",
        "support.md",
    ]
    changed = []
    for name in written:
        if (tmp_path / name).read_bytes() != (make_generated.FOLDER / name).read_bytes():
            changed.append(name)
    assert changed == [], "write them again: python -m docs.make_generated"


def test_the_readmes_table_is_what_layouts_says():
    """After a change of what it says: python -m docs.make_generated"""
    page = make_generated.README.read_text()
    assert len(make_generated.TABLE.findall(page)) == 1
    assert make_generated.with_table(page) == page


def test_the_table_of_relations_is_written_again():
    """After a change of what `verify` checks: python -m docs.make_generated"""
    page = make_generated.RELATIONS_PAGE.read_text()
    assert len(make_generated.RELATIONS_TABLE.findall(page)) == 1
    assert make_generated.with_relations(page) == page
