"""Records that contradict themselves: tamperings, each sealed with new checksums, and what each is told."""

import json
import re
import shutil
from pathlib import Path

import pytest
from tampering import TAMPERINGS, make_pristine

from t5bench.record import files, records
from t5bench.record.files import RecordError
from t5bench_verify.pack import examined


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pristine(tmp_path_factory.mktemp("honest"))


def told(root: Path) -> list[str]:
    try:
        _, damaged, faults = examined(sorted(path for path in root.iterdir() if path.is_dir()))
    except RecordError as error:
        return [str(error)]
    return [*damaged, *faults]


def test_honest_runs_obey_every_relation(pristine: Path):
    assert told(pristine) == []


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_tampering_is_told(pristine: Path, tmp_path: Path, name: str):
    run, change, expected = TAMPERINGS[name]
    root = tmp_path / "runs"
    shutil.copytree(pristine, root)
    change(root / run)
    for path in (root / run).glob("node*.json"):
        part = json.loads(path.read_text())
        files.seal(root / run, part["node"], part["nnodes"])
    records.write_run(root / run)
    sentences = told(root)
    assert any(re.search(expected, sentence) for sentence in sentences), sentences
