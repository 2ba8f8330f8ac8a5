"""audit.py as a file alone in loops that are not ours, on two processes, and what judge says of its lines."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from t5bench_judge.__main__ import main

pytest.importorskip("torch")

LOOPS = Path(__file__).with_name("loops.py")
EQUAL = ("ddp", "fsdp2", "tensor", "sliced", "zero1", "zero2", "zero3")
WRONG = ("ddp=scale", "ddp=one rank", "ddp=no reduction", "fsdp2=scale", "zero2=scale")


def train(directory: Path, *words: str, processes: int = 2) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command += [str(LOOPS), str(directory), *words]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def audits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Audits of honest and wrong loops, by kind and mistake; `one` is of one process."""
    directory = tmp_path_factory.mktemp("audits")
    train(directory, "one", processes=1)
    train(directory, *EQUAL, *WRONG)
    return directory


def judged(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = main([*map(str, arguments)])
    said = capsys.readouterr()
    return status, said.out + said.err


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", EQUAL)
def test_any_layout_trains_as_one_process(audits: Path, kind: str, capsys: pytest.CaptureFixture[str]):
    status, said = judged(capsys, audits / kind, audits / "one", "--locate")
    assert status == 0, said
    assert said.startswith("EQUAL: 6 steps") and said.endswith("nothing differs beyond rounding\n")


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("ddp=scale", "first differs at step 2, gradients of second: by "),
        ("fsdp2=scale", "first differs at step 2, gradients of second: by "),
        ("zero2=scale", "first differs at step 1, gradients of all 5 modules: most of all "),
        ("ddp=no reduction", "first differs at step 3, gradients of all 5 modules: most of all "),
        ("ddp=one rank", "the ranks of ddp=one rank first have other parameters at step 4, parameters of embedding: "),
    ],
)
def test_a_mistake_is_located(audits: Path, kind: str, place: str, capsys: pytest.CaptureFixture[str]):
    status, said = judged(capsys, audits / kind, audits / "one", "--locate")
    assert status == 1 and place in said, said


def test_one_rank_is_named(audits: Path, capsys: pytest.CaptureFixture[str]):
    _, said = judged(capsys, audits / "ddp=one rank", audits / "ddp", "--locate")
    assert "likely: one rank: rank 1 of ddp=one rank has other parameters than the rest at step 4" in said
    assert said.rstrip().endswith("rank 1")


def test_the_file_needs_pytorch_alone():
    imported = re.findall(r"^\s*(?:from|import) (\w+)", AUDIT.read_text(), re.MULTILINE)
    assert set(imported) <= {"json", "math", "collections", "pathlib", "typing", "torch", "deepspeed", "audit"}


AUDIT = Path(__file__).parents[1] / "src" / "t5bench_judge" / "audit.py"


def test_a_copy_is_the_same_file_elsewhere(tmp_path: Path):
    """In one process, without a process group, beside nothing of ours."""
    shutil.copy(AUDIT, tmp_path / "audit.py")
    program = (
        "import torch\nfrom audit import audit\n"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))\n"
        "model[0].weight.data.fill_(3.0)\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "audit(model, step=1, loss=6.0, directory='lines')\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=100)
    line = json.loads((tmp_path / "lines" / "rank0.jsonl").read_text())
    assert (line["step"], line["loss"], line["world"]) == (1, 6.0, 1)
    assert line["grad_norm"] == pytest.approx(2**0.5)
    assert line["gradients"] == {"0": pytest.approx(2**0.5)}
    assert line["parameters"]["0"][0] == pytest.approx(3 * 2**0.5)


def test_nan_and_missing_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base = {"audit": 1, "rank": 0, "world": 1, "grad_norm": 1.0, "gradients": {"a": 1.0}, "parameters": {}}
    for name, loss in (("right", 2.0), ("wrong", float("nan")), ("without", None)):
        (tmp_path / name).mkdir()
        lines = [json.dumps(base | {"step": step, "loss": loss and loss / step}) for step in range(1, 5)]
        (tmp_path / name / "rank0.jsonl").write_text("\n".join(lines))
    status, said = judged(capsys, tmp_path / "wrong", tmp_path / "right")
    assert status == 1 and "the loss of wrong is not a number at step 1" in said
    status, said = judged(capsys, tmp_path / "without", tmp_path / "right")
    assert status == 2 and "has no loss" in said
    status, said = judged(capsys, tmp_path / "right", __file__, "--locate")
    assert status == 2


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [2, 4])
def test_honest_pairs_raise_no_alarm(tmp_path: Path, processes: int, capsys: pytest.CaptureFixture[str]):
    """Every kind with several seeds and widths, each against one process."""
    chosen = [f"{seed},{width}" for seed in range(1, 7) for width in (16, 64)]
    train(tmp_path, *(f"one@{each}" for each in chosen), processes=1)
    train(tmp_path, *(f"{kind}@{each}" for kind in EQUAL for each in chosen), processes=processes)
    alarms = []
    for kind in EQUAL:
        for each in chosen:
            status, said = judged(capsys, tmp_path / f"{kind}@{each}", tmp_path / f"one@{each}", "--locate")
            if status or "nothing differs" not in said:
                alarms.append((kind, each, said))
    assert alarms == []


HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None


@pytest.mark.skipif(not HAS_ACCELERATE, reason="accelerate is not installed, without which Trainer does not run either")
def test_trainer_and_accelerate(audits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(tmp_path, "accelerate", "trainer")
    train(tmp_path / "again", "trainer")
    status, said = judged(capsys, tmp_path / "accelerate", audits / "one", "--locate")
    assert status == 0, said
    status, said = judged(capsys, tmp_path / "trainer", tmp_path / "again" / "trainer", "--locate")
    assert status == 0, said
