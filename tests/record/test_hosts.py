"""What may be a host, and what is refused before any program sees it."""

import pytest
from support import REPO_ROOT, Project

from t5bench import Problem
from t5bench.__main__ import main
from t5bench.record import hosts
from t5bench.record.host_names import MOST_NAMED, check_list, checked
from t5bench.record.hosts import Host, own_name_fault, ssh

HOSTS = (
    *("node0", "ws-l4-007.cluster.example.", "n_1", "_node", "a", "7node", "gpu-a100--1.hpc", "Node0", "a" * 70),
    *("10.0.0.7", "127.1", "::1", "2001:db8::7", "fe80::1%eth0", "fe80::1%enp0s31f6.4", "::ffff:10.0.0.7", "cafe::"),
)
NOT_HOSTS = ("-oProxyCommand=id", "--", "a b", "a;b", "$(id)", "a/b", "", "node\n0", "no:colon:x", "-a::1", "me@a")
# What people paste into HOSTS, what it is called, and what the remedy has them write.
PASTED = {
    "http://node0:29500/ http://node1:29500/": ("is a URL", "node0 node1"),
    "tcp://10.0.0.7:29500": ("is a URL", "10.0.0.7"),
    "root@node0 root@node1": ("names a user", "node0 node1"),
    "node0:29500 node1:29500": ("names a port", "node0 node1"),
    "cafe:29500": ("names a port", "cafe"),
    "10.0.0.7:29500": ("names a port", "10.0.0.7"),
    "node0:4,node1:4": ("has ',' in it", "node0 node1"),
    "[2001:db8::7]:29500": ("is an address in brackets", "2001:db8::7"),
    "[::1]": ("is an address in brackets", "::1"),
    "node0,node1": ("has ',' in it", "node0 node1"),
    "node0, node1": ("has ',' in it", "node0 node1"),
    "node0;node1": ("has ';' in it", "node0 node1"),
    "node0,,node1,": ("has ',' in it", "node0 node1"),
    "node[01-03]": ("as SLURM writes it", "node01 node02 node03"),
    "gpu[1,9-11]-ib,login": ("as SLURM writes it", "gpu1-ib gpu9-ib gpu10-ib gpu11-ib login"),
    "rack[1-2]node[8-9]": ("as SLURM writes it", "rack1node8 rack1node9 rack2node8 rack2node9"),
    "node{0..2}": ("has braces", "node0 node1 node2"),
    "node{a,b}.hpc": ("has braces", "nodea.hpc nodeb.hpc"),
    "'node0' 'node1'": ("has a quotation mark", "node0 node1"),
    '"node0 node1"': ("has a quotation mark", "node0 node1"),
    '["node0", "node1"]': ("has a quotation mark", "node0 node1"),
    "node0 '' node1": ("has a quotation mark", "node0 node1"),
    "node0 slots=4 node1 slots=4": ("gives a value", "node0 node1"),
    "node0 4 node1 4": ("is a number", "node0 node1"),
    "node0 0": ("is a number", "node0"),
    "2130706433": ("is a number", ""),
    "10.0.0.7-9": ("is a range of addresses", "10.0.0.7 10.0.0.8 10.0.0.9"),
    "10.0.0.9-10.0.0.10": ("is a range of addresses", "10.0.0.9 10.0.0.10"),
    "10.0.0.7-10.0.1.9": ("is a range of addresses", ""),
    "node0 -oProxyCommand=id": ("begins with a dash", ""),
    "--hosts node0": ("begins with a dash", ""),
    "node-": ("has a dash beside a dot or at its end", ""),
    "/etc/hosts": ("is a path", ""),
    "10.0.0.0/24": ("is a network", ""),
    "$HOSTS": ("is a variable of the shell", ""),
    "${HOSTS}": ("is a variable of the shell", ""),
    "<master-host>": ("is a placeholder", ""),
    "node*": ("is a pattern", ""),
    "10.0.0.256": ("is not an IPv4 address", ""),
    "010.0.0.7": ("is not an IPv4 address", ""),
    "fe80::1::2": ("is not an IPv6 address", ""),
    "fe80::1%": ("is not an IPv6 address", ""),
    "node..hpc": ("has a part without letters", ""),
    "node0 # master": ("has a character that no name has: '#'", ""),
    "n\u00f6de": ("has a character that no name has", ""),
    "node0\u200b": ("has a character that no name has: '\\u200b'", ""),
    "node0\rnode1": ("has a character that no name has: '\\r'", "node0 node1"),
}


@pytest.mark.parametrize("name", [*HOSTS, *NOT_HOSTS])
def test_valid_host_names(name: str):
    if name in HOSTS:
        assert ssh(name, "id")[-3:] == ["--", name, "id"]
    else:
        with pytest.raises(Problem, match="is not a host name or address"):
            checked(name)


@pytest.mark.parametrize("pasted", PASTED)
def test_what_else_is_pasted_into_hosts_is_named_and_put_right(pasted: str):
    what, meant = PASTED[pasted]
    with pytest.raises(Problem) as raised:
        check_list(pasted.split(" "))
    assert what in raised.value.found
    if meant:
        assert f'Write HOSTS="{meant}"' in raised.value.remedy
        check_list(meant.split(" "))
    else:
        assert 'HOSTS="' not in raised.value.remedy


def test_a_long_list_of_slurm_is_left_to_slurm():
    with pytest.raises(Problem, match="as SLURM writes it") as raised:
        check_list(["node[0-99999999]"])
    assert "scontrol show hostnames 'node[0-99999999]' | xargs" in raised.value.remedy
    with pytest.raises(Problem) as raised:
        check_list([f"node[1-{MOST_NAMED}]"])
    assert f'node{MOST_NAMED}"' in raised.value.remedy


def test_two_names_of_one_host():
    short, long, other = (Host.of(name) for name in ("node0", "Node0.cluster.", "node0.elsewhere"))
    assert short.may_be(long) and short.surely_is(long)
    assert long.may_be(other) and not long.surely_is(other)
    assert not Host("10.0.0.7").may_be(Host("10.example")) and not Host("10").surely_is(Host("10.0.0.7"))


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
    monkeypatch.setattr(hosts, "addresses_of", lambda name: addresses)
    assert bool(own_name_fault(Host("me"), {"GLOO_SOCKET_IFNAME": interface})[0]) == is_wrong


def test_the_launcher_detects_an_own_name_that_others_cannot_reach(project: Project):
    fault = "import socket\nsocket.getaddrinfo = lambda *_, **__: [(0, 0, 0, '', ('127.0.1.1', 0))]\n"
    (project.stubs / "site" / "sitecustomize.py").write_text(fault)
    settings = {"NNODES": "2", "GLOO_SOCKET_IFNAME": None}
    result = project.launch("ddp", "192.0.2.7", "1", **settings)
    assert result.returncode == 2 and not project.was_started()
    assert "resolves to 127.0.1.1 here, which other nodes cannot reach" in result.stderr
    assert "GLOO_SOCKET_IFNAME" in result.stderr
    assert project.launch("ddp", "192.0.2.7", "1", "--dry-run", **settings | {"DEVICE": "cuda"}).returncode == 0
