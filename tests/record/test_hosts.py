"""What may be a host, and what is refused before any program sees it."""

import pytest
from support import REPO_ROOT, Project

from t5bench import Problem
from t5bench.__main__ import main
from t5bench.record import hosts
from t5bench.record.hosts import checked, own_name_fault, ssh

HOSTS = ("node0", "ws-l4-007.cluster.example.", "n_1", "10.0.0.7", "fe80::1%eth0", "::ffff:10.0.0.7")
NOT_HOSTS = ("-oProxyCommand=id", "--", "a b", "a;b", "$(id)", "a/b", "", "node\n0", "no:colon:x", "-a::1", "me@a")


@pytest.mark.parametrize("name", [*HOSTS, *NOT_HOSTS])
def test_valid_host_names(name: str):
    if name in HOSTS:
        assert ssh(name, "id")[-3:] == ["--", name, "id"]
    else:
        with pytest.raises(Problem, match="is not a host name or address"):
            checked(name)


@pytest.mark.parametrize(
    "setting", [{"HOSTS": "::1 -oProxyCommand=id"}, {"SLURM_JOB_NODELIST": "::1,-oProxyCommand=id"}]
)
def test_a_launcher_refuses_an_invalid_host(project: Project, setting: dict[str, str]):
    result = project.launch("ddp", **setting)
    assert result.returncode == 2 and not project.was_started()
    assert "is not a host name or address" in result.stderr


@pytest.mark.parametrize("words", [["collect", "x", "me@-oProxyCommand=id:/x"], ["cluster", "--", "-oProxyCommand=id"]])
def test_commands_refuse_an_invalid_host(tmp_path, monkeypatch, capsys, words: list[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPO_ROOT))
    assert main(words) == 2
    assert "is not a host name or address" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("addresses", "interface", "is_wrong"),
    [
        (["127.0.1.1"], "eth0", False),
        (["127.0.1.1", "10.0.0.2"], "", True),
        (["10.0.0.2", "127.0.1.1"], "", False),
        (["10.0.0.99"], "", True),
        (["10.0.0.99", "10.0.0.2"], "", False),
    ],
)
def test_an_own_name_that_other_nodes_cannot_reach(
    addresses: list[str], interface: str, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
):
    """gloo would give the other nodes this address. 10.0.0.99 is not an address of this host."""
    monkeypatch.setattr(hosts, "is_own", lambda address: address == "10.0.0.2")
    assert bool(own_name_fault("me", addresses, {"GLOO_SOCKET_IFNAME": interface})[0]) == is_wrong


def test_the_launcher_detects_an_own_name_that_others_cannot_reach(project: Project):
    fault = "import socket\nsocket.getaddrinfo = lambda *_, **__: [(0, 0, 0, '', ('127.0.1.1', 0))]\n"
    (project.stubs / "site" / "sitecustomize.py").write_text(fault)
    settings = {"NNODES": "2", "GLOO_SOCKET_IFNAME": None}
    result = project.launch("ddp", "192.0.2.7", "1", **settings)
    assert result.returncode == 2 and not project.was_started()
    assert "resolves to 127.0.1.1 here, which other nodes cannot reach" in result.stderr
    assert "GLOO_SOCKET_IFNAME" in result.stderr
    assert project.launch("ddp", "192.0.2.7", "1", "--dry-run", **settings | {"DEVICE": "cuda"}).returncode == 0
