"""Bringing together what nodes without a shared file system keep."""

import json
import shutil
from pathlib import Path

import pytest
from made_runs import change
from support import MEMORY, engine_output, record

from t5bench.__main__ import main
from t5bench.record.records import load


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, Path]:
    """The run directories of two nodes of one run."""
    first = tmp_path / "on node 0"
    second = tmp_path / "on node 1"
    record(first, MEMORY.format(0), nodes=2, TRAIN_ITERS="1", OUTPUT_DIR=str(first))
    record(second, engine_output(1, 1, ranks=[1]), nodes=2, node=1, TRAIN_ITERS="1", OUTPUT_DIR=str(second))
    change(second, 1, started=load(first).record["started"])  # at the same time, not one after another
    (second / "checkpoints").mkdir()
    (second / "checkpoints" / "huge").write_text("x")
    return first, second


def collect(*arguments: object) -> int:
    return main(["collect", *map(str, arguments)])


def test_two_directories_become_one_run(nodes: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture):
    first, second = nodes
    assert load(first).status == "incomplete"
    assert collect(first, second) == 0
    assert "nodes 0, 1 of 2, complete" in capsys.readouterr().out
    assert collect(first, first, second) == collect(tmp_path / "elsewhere", first, second) == 0
    for place in (first, tmp_path / "elsewhere"):
        run = load(place)
        assert (run.status, run.record["differences"], list(run.remarks)) == ("complete", [], [])
        assert [line.iteration for line in run.iterations] == [1]
        assert [peak.rank for peak in run.peak_memory] == [0, 1]
        assert not (place / "checkpoints").exists()


def test_a_run_that_was_resumed_is_collected_again(nodes: tuple[Path, Path], tmp_path: Path, capsys):
    resumed = [json.loads((place / f"node{node}.json").read_text()) for node, place in enumerate(nodes)]
    earlier = {"status": "crashed", "started": "2020-01-01T00:00:00.000Z", "ended": "2020-01-01T01:00:00.000Z"}
    for node, place in enumerate(nodes):
        change(place, node, **earlier)
    assert collect(*nodes) == 0 and collect(tmp_path / "elsewhere", *nodes) == 0
    for node, place in enumerate(nodes):
        shutil.copy(place / f"node{node}.json", place / f"node{node}.json.1")
        plan = resumed[node]["plan"] | {"resume_from": 1}
        change(place, node, plan=plan, **{name: resumed[node][name] for name in earlier})
    new, newer, before = (tmp_path / name for name in ("new", "newer", "elsewhere"))
    for into, *sources in ((new, *nodes), (newer, *nodes[::-1]), (before, *nodes), nodes):
        assert collect(into, *sources) == 0
        assert "nodes 0, 1 of 2, complete" in capsys.readouterr().out.splitlines()[-1]
        assert load(into).iterations == load(nodes[1]).iterations


@pytest.mark.parametrize(
    ("stub", "status", "said"),
    [
        ('echo Welcome; printf "%s\\n" "$@" >"$0.arguments"; exec bash -c "${@: -1}"', 0, ""),
        ("echo 'Permission denied.' >&2; exit 255", 2, "cannot fetch node1:/somewhere: Permission denied."),
    ],
)
def test_over_ssh(nodes: tuple[Path, Path], tmp_path: Path, monkeypatch, capsys, stub: str, status: int, said: str):
    """The real tar on the other side of a stand-in for ssh, which runs the command here."""
    first, second = nodes
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/usr/bin/env bash\n{stub}\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:/usr/bin:/bin")
    assert collect(first, f"node1:{'/somewhere' if status else second}") == status
    assert said in capsys.readouterr().err
    assert load(first).status == ("incomplete" if status else "complete")
    assert not (first / "checkpoints").exists()
    words = Path(f"{ssh}.arguments").read_text() if not status else "BatchMode=yes --exclude=./checkpoints"
    assert "BatchMode=yes" in words and "--exclude=./checkpoints" in words


def test_parts_of_different_runs_do_not_mix(nodes: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture):
    first, second = nodes
    other = tmp_path / "other"
    record(other, engine_output(1, 1, ranks=[1]), nodes=2, node=1, TRAIN_ITERS="1", LR="0.5")
    assert collect(first, other) == 2
    said = capsys.readouterr().err
    assert "settings.LR is '0.5' on node 1 (" in said and "), '0.0001' on node 0" in said
    assert not (first / "node1.json").exists()

    began, ended = (load(second).record[name] for name in ("started", "ended"))
    change(second, 1, started="2099-01-01T00:00:00.000Z", ended="2099-01-01T01:00:00.000Z")
    assert collect(first, second) == collect(first, tmp_path / "nowhere") == 2
    said = capsys.readouterr().err
    assert "it ran from 2099" in said and "nowhere" in said
    # Other software does not make it another run, but is named.
    change(second, 1, started=began, ended=ended, versions={"torch": "2.4.0"})
    assert collect(first, second) == 0
    assert "versions.torch is '2.4.0'" in capsys.readouterr().err


def test_clocks_that_differ_by_a_day(nodes: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture):
    """The recorders told each other the name of their attempt; where they could not, the user knows."""
    first, second = nodes
    times = {"started": "2020-01-01T00:00:00.000Z", "ended": "2020-01-01T01:00:00.000Z"}
    for place, attempts, options, status in (
        ("unknown", ("a", None), [], 2),
        ("same", ("a", None), ["--same-run"], 0),
        ("another", ("a", "b"), ["--same-run"], 2),
        ("known", ("a", "a"), [], 0),
    ):
        change(first, 0, attempt=attempts[0], **times)
        change(second, 1, attempt=attempts[1])
        assert collect(tmp_path / place, first, second, *options) == status
    said = capsys.readouterr().err
    assert "If the nodes' clocks differ, add --same-run" in said and "a different attempt from this one" in said
    assert load(tmp_path / "known").status == "complete"
    # Of a run that was resumed, too.
    shutil.copy(first / "node0.json", first / "node0.json.1")
    plan = json.loads((first / "node0.json").read_text())["plan"] | {"resume_from": 1}
    change(first, 0, plan=plan)
    change(second, 1, plan=plan | {"node": 1})
    assert collect(tmp_path / "resumed", first, second) == 0
    assert load(tmp_path / "resumed").status == "complete"
