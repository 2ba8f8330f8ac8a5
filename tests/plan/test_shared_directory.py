"""A run directory that several nodes share: whose run it belongs to, and that no other run changes it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import make_run
from support import Project, nightly, wait_for

from t5bench.plan import run_lock
from t5bench.plan.ports import free_port
from t5bench.record.files import RecordError
from t5bench.record.records import load

TWO_HOSTS = "127.0.0.1 127.0.0.2"


@pytest.fixture
def two_nodes(project: Project, tmp_path: Path) -> Iterator["TwoNodes"]:
    with contextlib.ExitStack() as at_end:
        yield TwoNodes(project, tmp_path / "shared", at_end)


class TwoNodes:
    """Launchers of one run of two nodes in one directory, all on this machine."""

    def __init__(self, project: Project, directory: Path, at_end: contextlib.ExitStack) -> None:
        self.project = project
        self.directory = directory
        self.at_end = at_end
        self.chosen = {"HOSTS": TWO_HOSTS, "T5_RUN_SECRET": "of both", "MASTER_PORT": str(free_port())}
        self.chosen |= {"OUTPUT_DIR": str(directory), "RENDEZVOUS_TIMEOUT": "5"}

    def start(self, node: int, strategy: str = "ddp", **settings: str) -> subprocess.Popen[str]:
        words = ["bash", str(self.project.script(f"run_megatron_t5_{strategy}.sh")), "127.0.0.1", str(node)]
        environment = self.project.environment_with(self.chosen | settings)
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        launcher = subprocess.Popen(words, env=environment, **streams)
        self.at_end.callback(launcher.communicate)
        self.at_end.callback(launcher.terminate)
        return launcher

    def content(self) -> dict[str, bytes]:
        """All files but the claims and what grows during a run."""
        growing = ("samples.jsonl", "status", "stack")
        paths = [path for path in self.directory.iterdir() if path.is_file() and ".claim." not in path.name]
        return {path.name: path.read_bytes() for path in paths if not path.name.endswith(growing)}

    def settled(self) -> dict[str, bytes]:
        """The content, as soon as the recorder has written all that the engine said."""
        while True:
            before = self.content()
            time.sleep(1.5)
            if self.content() == before:
                return before

    def record(self) -> dict:
        return json.loads((self.directory / "run.json").read_text())


def end_of(launcher: subprocess.Popen[str]) -> tuple[int, str]:
    said = launcher.communicate(timeout=60)[1]
    return launcher.returncode, said


FINISHED = {
    "one node": lambda run: None,
    "collected, without the launchers' files": lambda run: (run / "node0.status").unlink(),
    "of a node that is not this one": lambda run: [
        path.rename(path.with_name(path.name.replace("node0", "node3"))) for path in run.glob("node0.*")
    ],
    "its part was damaged": lambda run: (run / "node0.json").write_text("[" * 100_000),
}


@pytest.mark.parametrize("name", FINISHED)
@pytest.mark.parametrize("node", [0, *nightly(1)])
def test_every_node_leaves_a_finished_run_alone(two_nodes: TwoNodes, name: str, node: int):
    alone = {"HOSTS": "127.0.0.1", "NNODES": "1"}
    assert end_of(two_nodes.start(0, **alone))[0] == 0
    FINISHED[name](two_nodes.directory)
    before = two_nodes.content()
    status, said = end_of(two_nodes.start(node))
    assert status == 2 and "already holds a finished run, which is never overwritten" in said
    assert two_nodes.content() == before


@pytest.mark.parametrize(
    ("first", "seconds"),
    [(1, 2), *nightly((0, 0), (0, 2), (1, 0))],
)
def test_nodes_of_one_run_share_a_directory(two_nodes: TwoNodes, first: int, seconds: int):
    """Also after a crash, when other nodes' parts of the earlier attempt lie there."""
    for attempt in (1, 2):
        settings = {"STUB_WAIT": "4", "STUB_STATUS": "7" if attempt == 1 else "0"}
        launchers = [two_nodes.start(first, **settings)]
        time.sleep(seconds)
        launchers.append(two_nodes.start(1 - first, **settings))
        ends = [end_of(launcher) for launcher in launchers]
        assert [status for status, _ in ends] == ([1, 1] if attempt == 1 else [0, 0]), ends
        record = two_nodes.record()
        assert [part["node"] for part in record["nodes"]] == [0, 1]
        assert record["status"] == ("crashed" if attempt == 1 else "complete")
    run = load(two_nodes.directory)
    assert run.status == "complete" and len(run.iterations) == 50


OTHERS = {
    "another seed": ({"SEED": "5"}, "SEED is '1234' there and '5' here"),
    "another strategy": ({"strategy": "zero1"}, "strategy is 'ddp' there and 'zero1' here"),
    "more nodes": ({"NNODES": "4"}, "NNODES is '2' there and '4' here"),
    "another port": ({"MASTER_PORT": "31999"}, "MASTER_PORT is "),
    "one node": ({"NNODES": "1", "HOSTS": "127.0.0.1"}, "NNODES is '2' there and '1' here"),
    "the same place": ({}, "process"),
}


OTHERS_DAILY = ("another seed", "the same place")


@pytest.mark.parametrize("name", [*OTHERS_DAILY, *nightly(*(name for name in OTHERS if name not in OTHERS_DAILY))])
def test_a_node_of_another_run_leaves_a_running_one_alone(two_nodes: TwoNodes, name: str):
    changes, named = OTHERS[name]
    own = two_nodes.start(0, STUB_SLEEP="60")
    log = two_nodes.directory / "node0.log"
    wait_for(lambda: log.exists() and "peak memory | rank 7" in log.read_text())
    before = two_nodes.settled()
    settings = {setting: value for setting, value in changes.items() if setting.isupper()}
    node = 0 if name in ("one node", "the same place") else 1
    status, said = end_of(two_nodes.start(node, changes.get("strategy", "ddp"), **settings))
    assert status == 2
    assert f"a run is already in progress in {two_nodes.directory} (process {own.pid}" in said and named in said
    assert two_nodes.content() == before
    own.terminate()
    assert own.wait(timeout=60) == 128 + signal.SIGTERM
    record = two_nodes.record()
    assert record["status"] == "cancelled" and [part["node"] for part in record["nodes"]] == [0]


def test_of_two_runs_at_the_same_moment_one_gets_the_directory_with_both_nodes(two_nodes: TwoNodes):
    launchers = []
    for node in (0, 1):
        for seed in ("5", "6"):
            launchers.append((seed, two_nodes.start(node, SEED=seed, STUB_WAIT="4")))
    ends = [(seed, *end_of(launcher)) for seed, launcher in launchers]
    trained = {seed for seed, status, _ in ends if status == 0}
    assert len(trained) == 1, ends
    assert sorted(status for _, status, _ in ends) == [0, 0, 2, 2], ends
    assert load(two_nodes.directory).plan.value("SEED") in trained


def test_what_an_absent_node_left_in_an_earlier_attempt_is_not_merged(two_nodes: TwoNodes):
    launchers = [two_nodes.start(node, STUB_WAIT="3", STUB_STATUS="7") for node in (0, 1)]
    assert [end_of(launcher)[0] for launcher in launchers] == [1, 1]
    assert [part["node"] for part in two_nodes.record()["nodes"]] == [0, 1]
    # Its settings may be others now; the second node is not started.
    end_of(two_nodes.start(0, SEED="5", STUB_STATUS="8"))
    record = two_nodes.record()
    assert [part["node"] for part in record["nodes"]] == [0]
    assert not load(two_nodes.directory).iterations, "they were the earlier attempt's"
    assert (two_nodes.directory / "node1.json.1").exists() and (two_nodes.directory / "metrics.jsonl.1").exists()


def test_parts_of_different_runs_are_no_record(tmp_path: Path):
    run = make_run(tmp_path / "run", nodes=2)
    part = json.loads((run / "node1.json").read_text())
    assert load(run)
    shutil.rmtree(run)
    run = make_run(tmp_path / "run", nodes=2)
    for path in run.glob("*.sha256"):
        path.unlink()
    first = json.loads((run / "node0.json").read_text())
    (run / "node0.json").write_text(json.dumps(first | {"attempt": "a" * 32}))
    (run / "node1.json").write_text(json.dumps(part | {"attempt": "b" * 32}))
    with pytest.raises(RecordError, match="parts of different runs: node 1's part is of another attempt than node 0's"):
        load(run)


DAMAGED = {
    "empty": "",
    "half": '{"host": "x", "boo',
    "a list": "[]",
    "a number": "5",
    "null": "null",
    "no processes": '{"host": "here", "boot": "b"}',
    "processes as text": '{"host": "here", "boot": "b", "processes": "1234"}',
    "a process without its start": '{"host": "here", "boot": "b", "processes": [[1]]}',
    "nested": "[" * 100_000,
    "its run is a list": '{"host": "here", "boot": "b", "processes": [], "run": [1]}',
    "no text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("claimed", ["node0", "run", "node1"])
@pytest.mark.parametrize("age", [0, 600])
def test_a_damaged_claim_counts_until_it_is_old(
    tmp_path: Path, name: str, claimed: str, age: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    text = DAMAGED[name]
    path = tmp_path / f"{claimed}.claim.1"
    path.write_bytes(text if isinstance(text, bytes) else text.replace("here", os.uname().nodename).encode())
    os.utime(path, times=(time.time() - age,) * 2)
    if age:
        run_lock.take_for_run(tmp_path, 0, os.getpid(), {"SEED": "1"})
    else:
        with pytest.raises(run_lock.Problem, match=rf"already in progress in .*{path.name}.* cannot be read"):
            run_lock.take_for_run(tmp_path, 0, os.getpid(), {"SEED": "1"})
