"""The secret of a run: given, or the one in the user's home directory."""

import threading
from pathlib import Path

import pytest

from t5bench.plan.channel import run_secret as secret


def test_a_given_secret_wins_over_the_one_in_the_home_directory(tmp_path: Path):
    home = {"HOME": str(tmp_path)}
    path = tmp_path / ".config" / "t5-parallelism" / "secret"
    assert secret(home | {"T5_RUN_SECRET": "given"}) == b"given"
    assert not path.exists()
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(secret(home))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {path.read_bytes().strip()} and len(found[0]) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]
    assert secret(home | {"T5_RUN_SECRET": ""}) == found[0]


def test_a_secret_that_others_can_read_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert secret({"HOME": str(tmp_path)})
    (tmp_path / ".config" / "t5-parallelism" / "secret").chmod(0o644)
    assert secret({"HOME": str(tmp_path)}) == b""
    assert "chmod 600" in capsys.readouterr().err
    assert secret({}) == secret({"HOME": "/dev/null"}) == b""
