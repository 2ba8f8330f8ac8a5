"""Whether a run is sent to W&B."""

from pathlib import Path

import pytest
from wandb.sdk.lib import wbauth

from t5bench import Problem
from t5bench.record import wandb

KEY = "0123456789abcdef0123456789abcdef01234567"


def test_a_mode_overrides_a_key(tmp_path: Path):
    home, key = {"HOME": str(tmp_path)}, {"WANDB_API_KEY": KEY}
    assert wandb.mode(home) == "offline" and wandb.mode(home | key) == "online"
    assert wandb.mode(home | key | {"WANDB_MODE": "offline"}) == "offline"
    assert wandb.mode(home | {"WANDB_MODE": "online"}) == "online"
    assert wandb.mode(home | key | {"WANDB_MODE": "online"}, "disabled") == "disabled"
    with pytest.raises(Problem, match="WANDB_MODE is 'dry'") as problem:
        wandb.mode({"WANDB_MODE": "dry"})
    assert "online offline disabled" in problem.value.remedy


@pytest.mark.parametrize(
    ("machine", "url", "expected"),
    [
        ("api.wandb.ai", None, "online"),
        ("api.wandb.ai", "https://wandb.example.org", "offline"),
        ("localhost:8080", "http://localhost:8080", "online"),
        ("localhost", "http://localhost:8080", "offline"),
    ],
)
def test_a_key_in_the_netrc_file_counts_for_its_own_server(tmp_path: Path, monkeypatch, machine, url, expected: str):
    """W&B itself agrees."""
    netrc = tmp_path / ".netrc"
    netrc.write_text(f"machine {machine}\n  login user\n  password {KEY}\n")
    server = {"WANDB_BASE_URL": url} if url else {}
    assert wandb.mode({"NETRC": str(netrc)} | server) == wandb.mode({"HOME": str(tmp_path)} | server) == expected
    monkeypatch.setenv("NETRC", str(netrc))
    assert (wbauth.read_netrc_auth(host=url or wandb.SERVER) == KEY) == (expected == "online")
    netrc.write_bytes(b"\xff\x00")
    assert wandb.mode({"NETRC": str(netrc)}) == "offline"
