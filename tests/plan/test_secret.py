"""The secret of a run, given or in the user's home directory, and the key that sends a run to W&B."""

import threading
from pathlib import Path

import pytest
from wandb.sdk.lib import wbauth

from t5bench.plan.channel import run_secret
from t5bench.record import wandb

KEY = "0123456789abcdef0123456789abcdef01234567"


def test_a_given_secret_wins_over_the_one_in_the_home_directory(tmp_path: Path):
    home = {"HOME": str(tmp_path)}
    path = tmp_path / ".config" / "t5-parallelism" / "secret"
    assert run_secret(home | {"T5_RUN_SECRET": "given"}) == b"given"
    assert not path.exists()
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(run_secret(home))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {path.read_bytes().strip()} and len(found[0]) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_a_secret_that_others_can_read_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_secret({"HOME": str(tmp_path)})
    (tmp_path / ".config" / "t5-parallelism" / "secret").chmod(0o644)
    assert run_secret({"HOME": str(tmp_path)}) == b""
    assert "chmod 600" in capsys.readouterr().err
    assert run_secret({}) == run_secret({"HOME": "/dev/null"}) == b""


@pytest.mark.parametrize(
    ("environment", "given", "expected"),
    [
        ({}, "", "offline"),
        ({"WANDB_API_KEY": KEY}, "", "online"),
        ({"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "", "offline"),
        ({"WANDB_MODE": "online"}, "", "online"),
        ({"WANDB_API_KEY": KEY, "WANDB_MODE": "online"}, "disabled", "disabled"),
    ],
)
def test_a_mode_overrides_a_key(tmp_path: Path, environment: dict, given: str, expected: str):
    assert wandb.mode({"HOME": str(tmp_path)} | environment, given) == expected


@pytest.mark.parametrize(("machine", "expected"), [("wandb.example.org:80", "online"), ("api.wandb.ai", "offline")])
def test_a_key_in_the_netrc_file_counts_for_its_own_server(tmp_path: Path, monkeypatch, machine: str, expected: str):
    """W&B itself agrees."""
    netrc, server = tmp_path / ".netrc", {"WANDB_BASE_URL": "https://wandb.example.org:80"}
    netrc.write_text(f"machine {machine}\n  login user\n  password {KEY}\n")
    assert wandb.mode({"NETRC": str(netrc)} | server) == wandb.mode({"HOME": str(tmp_path)} | server) == expected
    monkeypatch.setenv("NETRC", str(netrc))
    assert (wbauth.read_netrc_auth(host=server["WANDB_BASE_URL"]) == KEY) == (expected == "online")
