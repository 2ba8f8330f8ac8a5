"""The list of defects, and the gates' own arithmetic: trains nothing."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from gate_score import gates, page
from gate_score.defect import DEFECTS, OWN
from gate_score.layouts import LAYOUTS
from gate_score.plan import honest_trials, later, set_aside, trial_of
from gate_score.processes import all_defects
from gate_score.score import Result, Score

assert all_defects  # fills the list


def test_each_defect_has_a_name_and_a_source():
    names = [one.name for one in DEFECTS]
    assert len(names) == len(set(names)) >= 100
    assert sum(one.source != OWN for one in DEFECTS) >= 100
    for one in DEFECTS:
        assert one.source == OWN or re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", one.source), one
        assert one.seen and one.layout in LAYOUTS


def test_each_defect_replaces_seams_that_its_layout_has():
    for one in DEFECTS:
        replaced = [name for name in vars(one.patch) if not name.startswith("__")]
        assert replaced, one.name
        for name in replaced:
            assert hasattr(LAYOUTS[one.layout], name), (one.name, name)


def test_a_third_is_set_aside():
    first = {one.name for one in DEFECTS} - later()
    assert set_aside() <= first
    assert len(set_aside()) == len(first) // 3


def test_later_defects_are_of_the_list_and_public():
    sources = {one.name: one.source for one in DEFECTS}
    assert later() and OWN not in {sources[name] for name in later()}


def test_each_honest_pair_is_another_one():
    pairs = honest_trials()
    assert len(pairs) == len({pair.tried for pair in pairs}) == 300
    assert all(pair.tried != pair.reference for pair in pairs)


def test_a_resumed_training_is_compared_with_an_uninterrupted_one():
    resumed = next(one for one in DEFECTS if one.recipe.resume_after)
    assert trial_of(resumed).reference.recipe.resume_after == 0
    assert trial_of(resumed).before.recipe.resume_after


def test_slimes_loops_skip_tensor_parallelism_on_two_ranks():
    assert gates.visited_by_slime(2) == {"data", "zero1", "pipeline", "context"}
    assert "tensor" not in gates.visited_by_slime(8)


def made_up() -> Result:
    scores = {name: Score() for name in gates.GATES}
    scores["judge"].caught = {"a": "the norm", "b": "the loss"}
    scores["prove"].caught = {"c": "not summed"}
    scores["judge"].alarms = {"honest/x": "the norm"}
    usual = {"kind": "loss", "layout": "data", "seen": "a loss", "needs": [], "shows": ["loss"]}
    usual |= {"source": "owner/repository#1", "distance": 0.01}
    defects = [usual | {"name": name, "aside": name == "b", "later": name == "c"} for name in "abcd"]
    defects[3] |= {"needs": ["bf16"], "distance": 0.0}
    return Result(defects, scores, 10, 2, {"a": "the norm"}, 1.0, 2.0, "PyTorch")


def test_the_table_counts_unions():
    rows = {row[0]: row[1:] for row in page.rows(made_up())}
    assert rows["judge"][:5] == ("2 of 4", "1 of 1", "0 of 1", "2", "1 of 10")
    assert rows["one of ours"][:5] == ("3 of 4", "1 of 1", "1 of 1", "1", "1 of 10")
    assert rows["before the first step"][0] == "1 of 4"
    assert rows["before the first update"][0] == "2 of 4"


def test_pairs_that_were_left_out_raise_no_alarms():
    rows = {row[0]: row[5] for row in page.rows(replace(made_up(), honest=0))}
    assert rows["judge"] == rows["torchtitan's loss comparison"] == rows["one of ours"] == "not asked"


def test_the_page_explains_what_is_missed_and_has_a_picture(tmp_path: Path):
    page.write_page(made_up(), tmp_path)
    text = (tmp_path / "SCORE.md").read_text()
    assert "| d | data | in bf16 the difference is" in text
    assert "Those of 3 defects do; of the others what is logged alone is wrong: d." in text
    assert "[owner/repository#1](https://github.com/owner/repository/issues/1)" in text
    assert (tmp_path / "score.svg").read_text().startswith("<?xml")
