"""Public faults, trained again: judge finds each, and names its class as cases.py says."""

from pathlib import Path

import pytest
from cases import CASES, Case, train

from t5bench.__main__ import main

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_judge_finds_it(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    logs = [tmp_path / "bad.jsonl", tmp_path / "good.jsonl"]
    missing = case.missing()
    if missing:
        pytest.skip(f"needs {missing}")
    for log in logs:
        train(case, log.stem, log)
    status = main(["judge", *map(str, logs), "--precision", case.precision])
    said = capsys.readouterr().out
    assert status == 1 and said.startswith("DIFFERENT"), said
    assert case.likely in said.splitlines()[-1], said
