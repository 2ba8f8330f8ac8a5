"""The parity gate itself, scripts/check_parity.sh, over real trainings of the native engine."""

import re
import subprocess
from pathlib import Path

import pytest
from harness import REPO_ROOT, STRATEGIES
from real_runs import environment, make_clone, verdicts


def gate(*strategies: str, root: Path = REPO_ROOT, **settings: str) -> subprocess.CompletedProcess[str]:
    """scripts/check_parity.sh with the native engine, from a directory that is not the project's."""
    return subprocess.run(
        ["bash", str(root / "scripts" / "check_parity.sh"), *strategies],
        env=environment(DEVICE="cpu", ENGINE="native") | settings,
        cwd=root.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the project whose engine a test may change, in a path with a space."""
    return make_clone(tmp_path / "a copy")


def test_help_names_all_strategies():
    result = gate("--help")
    assert result.returncode == 0
    assert set(STRATEGIES) <= set(re.findall(r"\w+", result.stdout))


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
        (["zero1"], {"ENGINE": "megatron", "MEGATRON_DIR": "nowhere"}, "the megatron engine's DDP cannot run here"),
    ],
    ids=["strategy", "alone", "option", "engine", "iterations", "runs", "python", "no engine"],
)
def test_what_cannot_be_checked(copy: Path, strategies: list[str], settings: dict[str, str], says: str):
    result = gate(*strategies, root=copy, **settings)
    assert result.returncode == 2
    assert says in result.stderr and result.stderr.count("error: ") == 1
    assert ("there is no Megatron-DeepSpeed checkout at " in result.stderr) == ("MEGATRON_DIR" in settings)


@pytest.mark.slow
def test_the_native_engines_strategies_pass(copy: Path):
    result = gate("pipeline", root=copy, RUNS_DIR="relative runs", TRAIN_ITERS="8")
    assert result.returncode == 0, result.stdout + result.stderr
    assert verdicts(result.stdout) == {("ddp", "native"): "PASS", ("pipeline", "native"): "PASS"}
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
    result = gate("zero2", "tensor", root=copy, TRAIN_ITERS="8")
    assert result.returncode == 1, result.stdout + result.stderr
    found = {name: verdict for (name, _), verdict in verdicts(result.stdout).items()}
    assert found == {"ddp": "PASS", "zero2": "FAIL", "tensor": "FAIL"}
    assert result.stdout.count("iteration 1's loss agrees, its gradient norm does not") == 2
