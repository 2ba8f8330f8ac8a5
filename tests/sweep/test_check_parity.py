"""The parity gate itself, scripts/check_parity.sh, over real trainings of the native engine."""

import re
import signal
import subprocess
from pathlib import Path

import pytest
from harness import REPO_ROOT, STRATEGIES, processes_with, wait_for
from parity_gate import copy_project, gate_environment, verdicts


def gate(*strategies: str, root: Path = REPO_ROOT, **settings: str) -> subprocess.Popen:
    """scripts/check_parity.sh with the native engine, from a directory that is not the project's."""
    return subprocess.Popen(
        ["bash", str(root / "scripts" / "check_parity.sh"), *strategies],
        env=gate_environment() | {"ENGINE": "native"} | settings,
        cwd=root.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the project whose engine a test may change, in a path with a space."""
    return copy_project(tmp_path / "a copy")


def test_help_names_all_strategies():
    process = gate("--help", PYTHON="python9")
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert set(STRATEGIES) <= set(re.findall(r"\w+", output))


@pytest.mark.parametrize(
    ("strategies", "settings", "says"),
    [
        (["zero4"], {}, "there is no strategy 'zero4'"),
        (["ddp"], {}, "ddp alone has nothing to be compared with"),
        (["--fast"], {}, "unknown option '--fast'"),
        ([], {"ENGINE": "jax"}, "ENGINE is 'jax'"),
        ([], {"TRAIN_ITERS": "1"}, "TRAIN_ITERS must be a whole number of at least 2"),
        ([], {"RUNS_DIR": "."}, "a check is made of new runs alone"),
        ([], {"PYTHON": "python9"}, "there is no 'python9' on PATH"),
    ],
    ids=["strategy", "alone", "option", "engine", "iterations", "runs", "python"],
)
def test_wrong_use(strategies: list[str], settings: dict[str, str], says: str):
    process = gate(*strategies, **settings)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert says in errors and errors.count("error: ") == 1


def test_an_engine_that_is_not_there(copy: Path, tmp_path: Path):
    process = gate("zero1", root=copy, ENGINE="megatron", MEGATRON_DIR=str(tmp_path / "nowhere"))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"there is no Megatron-DeepSpeed checkout at {tmp_path / 'nowhere'}" in errors
    assert "none of the strategies can run here" in errors


def finish(process: subprocess.Popen) -> tuple[dict[tuple[str, str], str], str]:
    """verdicts() of the gate's output, and all that it said."""
    output, errors = process.communicate(timeout=300)
    return verdicts(output), output + errors


@pytest.mark.slow
def test_the_native_engines_strategies_pass(copy: Path):
    process = gate("pipeline", root=copy, RUNS_DIR="relative runs", TRAIN_ITERS="8")
    found, said = finish(process)
    assert process.returncode == 0, said
    assert found == {("ddp", "native"): "PASS", ("pipeline", "native"): "PASS"}
    assert (copy.parent / "relative runs" / "native" / "pipeline" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_wrong_gradients_of_some_strategies_fail(copy: Path):
    """ZeRO that forgets all micro-batches but the last, and a tensor-parallel norm that counts replicas twice."""
    for name, right, wrong in (
        (
            "trainers.py",
            "self.model.backward(loss)",
            "self.model.backward(loss * (x.data_ptr() == batch[0][-len(x) :].data_ptr()))",
        ),
        ("parallel.py", 'if p not in tied and (hasattr(p, "tp_slice") or layout.tp.rank == 0)', "if p not in tied"),
    ):
        path = copy / "native" / name
        text = path.read_text()
        assert text.count(right) == 1
        path.write_text(text.replace(right, wrong))
    process = gate("zero2", "tensor", root=copy, TRAIN_ITERS="8")
    found, said = finish(process)
    assert process.returncode == 1, said
    assert {name: verdict for (name, _), verdict in found.items()} == {
        "ddp": "PASS", "zero2": "FAIL", "tensor": "FAIL",
    }  # fmt: skip
    assert said.count("iteration 1's loss agrees, its gradient norm does not") == 2


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_running(copy: Path, tmp_path: Path):
    """The shell gets the signal alone, as from `kill`; a terminal gives it to the launcher too."""
    mark = f"PARITY_TEST={tmp_path}"
    process = gate("zero1", root=copy, RUNS_DIR=str(tmp_path / "runs"), PARITY_TEST=str(tmp_path))
    log = tmp_path / "runs" / "native" / "ddp" / "node0.log"
    wait_for(lambda: log.exists() and "iteration" in log.read_text(), 120)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert "INT received: stopped" in errors
    assert not (tmp_path / "runs" / "native" / "zero1").exists()
    assert processes_with(mark) == []
