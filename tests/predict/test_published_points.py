"""Published measurements against the model: the targets, what is damaged, and that no point is named in the rules."""

import json
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
from harness import REPO_ROOT

from t5bench import Problem
from t5bench.__main__ import main
from t5bench.predict import check, published

FILE = REPO_ROOT / "docs" / "published_training_measurements.json"


@pytest.fixture(scope="module")
def compared() -> list[check.Comparison | check.Missing]:
    points, *sentences = published.read(FILE)
    assert sentences == [[], []]
    return check.compare_all(points)


# Of the absolute errors, where 0.01 is 1 %: how many figures at least, mean, median, worst.
TARGETS = {
    "memory": (18, 0.015, 0.02, 0.05),
    "peak": (24, 0.02, 0.02, 0.05),
    "states": (4, 0.01, 0.01, 0.01),
    "activation": (31, 0.03, 0.03, 0.08),
    "ratio": (14, 0.10, 0.06, 0.26),
}


@pytest.mark.parametrize("use", TARGETS)
def test_the_targets_are_met(compared, use: str):
    errors = [abs(row.error) for row in compared if isinstance(row, check.Comparison) and row.use == use]
    count, *bounds = TARGETS[use]
    assert len(errors) >= count
    assert all(found <= bound for found, bound in zip((mean(errors), median(errors), max(errors)), bounds, strict=True))


def test_every_point_is_compared_or_has_a_reason(compared):
    points, *_ = published.read(FILE)
    for point in points:
        for use in point.use:
            mine = [entry for entry in compared if point.id in entry.point.split(" / ")]
            uses = {"peak" if entry.use == "states" else entry.use for entry in mine}
            assert {"memory": uses & {"memory", "peak"}}.get(use, uses & {use}), (point.id, use)
    assert all(entry.reason for entry in compared if isinstance(entry, check.Missing))


def test_rules_name_no_point():
    names = {point.id for point in published.read(FILE)[0]}
    sources = [
        path.read_text() for room in ("model", "predict") for path in (REPO_ROOT / "t5bench" / room).glob("*.py")
    ]
    assert not [name for name in names for source in sources if name in source]


def altered(tmp_path: Path, **changes: Any) -> Path:
    """A file with one point, of which fields are replaced."""
    points = json.loads(FILE.read_text())
    point = next(point for point in points if "memory_allocated_bytes" in point["measured"])
    path = tmp_path / "points.json"
    path.write_text(json.dumps([point | changes]))
    return path


@pytest.mark.parametrize(
    ("changes", "said", "status"),
    [
        ({"micro_batch": "four"}, "is invalid and left out: Expected `int | null`, got `str` - at `$.micro_batch`", 1),
        ({"humidity": 3}, "the field humidity is unknown and ignored", 0),
        ({"micro_batch": None}, "the micro-batch size is not stated", 0),
        ({"precision": "int4"}, "the precision int4 is not known", 0),
        ({"source": {"repo": "somebody/else"}}, "it is not known what somebody/else keeps in memory", 0),
    ],
)
def test_unreadable_or_unpredictable_points_are_reported(tmp_path, capsys, changes, said, status):
    path = str(altered(tmp_path, **changes))
    assert main(["predict", "--check", path]) == status
    assert said in capsys.readouterr().out
    assert main(["predict", "--check", path, "--json"]) == status
    answer = json.loads(capsys.readouterr().out)
    assert said in str(answer["notes"] or answer["missing"]).replace("\\", "")
    assert all(row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1) for row in answer["rows"])


def test_a_file_that_holds_no_points(tmp_path):
    for content, said in ((b"{", "cannot read"), (b"{}", "holds no list")):
        (tmp_path / "points.json").write_bytes(content)
        with pytest.raises(Problem, match=said):
            published.read(tmp_path / "points.json")
