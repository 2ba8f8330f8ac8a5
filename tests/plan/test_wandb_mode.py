"""Whether a run is sent to W&B."""

from pathlib import Path

import pytest
from wandb.sdk.lib import wbauth

from t5bench import Problem
from t5bench.record import wandb

KEY = "0123456789abcdef0123456789abcdef01234567"


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
def test_a_mode_wins_over_a_key(tmp_path: Path, environment: dict[str, str], given: str, expected: str):
    assert wandb.mode({"HOME": str(tmp_path)} | environment, given) == expected


def test_another_mode_is_a_problem_with_a_remedy():
    with pytest.raises(Problem, match="WANDB_MODE is 'dry'") as problem:
        wandb.mode({"WANDB_MODE": "dry"})
    assert "online offline disabled" in problem.value.remedy


@pytest.mark.parametrize(
    ("machine", "url", "expected"),
    [
        ("api.wandb.ai", None, "online"),
        ("api.wandb.ai", "https://wandb.example.org", "offline"),
        ("wandb.example.org", "https://wandb.example.org", "online"),
        ("localhost:8080", "http://localhost:8080", "online"),
        ("localhost", "http://localhost:8080", "offline"),
    ],
)
def test_a_key_in_the_netrc_file_counts_for_its_own_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, url: str | None, expected: str
):
    """W&B itself agrees."""
    netrc = tmp_path / ".netrc"
    netrc.write_text(f"machine {machine}\n  login user\n  password {KEY}\n")
    server = {"WANDB_BASE_URL": url} if url else {}
    assert wandb.mode({"NETRC": str(netrc)} | server) == wandb.mode({"HOME": str(tmp_path)} | server) == expected
    monkeypatch.setenv("NETRC", str(netrc))
    assert (wbauth.read_netrc_auth(host=url or wandb.SERVER) == KEY) == (expected == "online")


@pytest.mark.parametrize("content", ["machine api.wandb.ai login user password", "\xff\x00", "machine api.wandb.ai\n"])
def test_a_netrc_file_without_a_key_is_none(tmp_path: Path, content: str):
    (tmp_path / ".netrc").write_bytes(content.encode("latin-1"))
    assert wandb.mode({"HOME": str(tmp_path)}) == "offline"
