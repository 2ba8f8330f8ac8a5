"""step_trace.py as a file alone in loops that are not ours, on two processes, and what judge says of its lines."""

import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from t5bench_judge.__main__ import main
from training_comparison.first_difference import first_difference
from training_comparison.problem import Problem
from training_comparison.traces import read_trace

torch = pytest.importorskip("torch")
step_trace = importlib.import_module("training_comparison.step_trace")  # which imports torch
OwnPart = step_trace.OwnPart

LOOPS = Path(__file__).with_name("loops.py")
EQUAL = ("ddp", "fsdp2", "tensor", "sliced", "zero1", "zero2", "zero3")
WRONG = ("ddp=scale", "ddp=one rank", "ddp=no reduction", "ddp=forward", "fsdp2=scale", "zero2=scale")
STEP_TRACE = Path(__file__).parents[1] / "src" / "training_comparison" / "step_trace.py"


def train(directory: Path, *words: str, processes: int = 2, seconds: int = 200) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command += [str(LOOPS), str(directory), *words]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of honest and wrong loops, by kind and mistake; `one` is of one process."""
    directory = tmp_path_factory.mktemp("traces")
    train(directory, "one", processes=1)
    train(directory, *EQUAL, *WRONG)
    return directory


def judged(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = main([*map(str, arguments)])
    said = capsys.readouterr()
    return status, said.out + said.err


@pytest.mark.slow
@pytest.mark.parametrize("kind", EQUAL)
def test_any_layout_trains_as_one_process(traces: Path, kind: str, capsys: pytest.CaptureFixture[str]):
    status, said = judged(capsys, traces / kind, traces / "one", "--locate")
    assert status == 0, said
    assert said.startswith("EQUAL: 6 steps") and said.endswith("nothing differs beyond rounding\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("ddp=scale", "step 2, gradient reduced over the ranks, second.weight, ranks 0, 1: by 1.0e+00 of its size;"),
        ("fsdp2=scale", "step 2, gradient reduced over the ranks, second.weight, ranks 0, 1: by 1.0e+00 of its size;"),
        ("zero2=scale", "step 1, gradient reduced over the ranks, head.bias, ranks 0, 1: by 5.0e-01 of its size, and"),
        ("ddp=no reduction", "step 3, gradient reduced over the ranks, head.bias, ranks 0, 1: by "),
        ("ddp=forward", "step 2, forward pass, norm, rank 1: by "),
    ],
)
def test_a_mistake_is_located(traces: Path, kind: str, place: str, capsys: pytest.CaptureFixture[str]):
    status, said = judged(capsys, traces / kind, traces / "one", "--locate")
    assert status == 1 and f"\nfirst differs at {place}" in said, said


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["ddp", "one"])
def test_one_rank_is_named(traces: Path, reference: str, capsys: pytest.CaptureFixture[str]):
    status, said = judged(capsys, traces / "ddp=one rank", traces / reference, "--locate")
    assert status == 1
    assert "likely: one rank: rank 1 of ddp=one rank has other parameters than the rest at step 4" in said
    copies = "different copies of weights from step 4 on: embedding.weight (1 of 9 parameters), rank 1"
    assert f"\nthe ranks of ddp=one rank have {copies}\n" in said


def test_the_file_needs_pytorch_alone():
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", STEP_TRACE.read_text(), re.MULTILINE))
    assert imported - {"step_trace", "torch", "deepspeed"} <= sys.stdlib_module_names


def test_a_copy_is_the_same_file_elsewhere(tmp_path: Path):
    """In one process, without a process group, beside nothing of ours."""
    shutil.copy(STEP_TRACE, tmp_path / "step_trace.py")
    program = (
        "import torch\nfrom step_trace import StepTrace\n"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))\n"
        "model[0].weight.data.fill_(3.0)\n"
        "trace = StepTrace('lines', model)\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "trace.step(1, 6.0)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=100)
    trace = read_trace(tmp_path / "lines")
    assert trace.losses == {1: 6.0} and trace.norms == {1: pytest.approx(2**0.5)}
    (weights,) = trace.values(1, "weights", "0.weight")[0]
    (gradient,) = trace.values(1, "reduced", "0.weight")[0]
    assert [3 * product for product in gradient.sketch] == weights.sketch != [0.0] * len(weights.sketch)


@pytest.mark.parametrize("shape", [(96,), (24, 40), (6, 8, 10)])
def test_sketches_of_parts_add_up_to_the_wholes(shape: tuple[int, ...]):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for dim, length in enumerate(shape):
        half = length // 2
        stretches = [[(0, 1), (half, 1)], [(1, half - 1), (half + 1, length - half - 1)]]
        places = [[*range(begin, begin + count)] for begin, count in (*stretches[0], *stretches[1])]
        indices = [places[0] + places[1], places[2] + places[3]]
        parts = [tensor.index_select(dim, torch.tensor(chosen)) for chosen in indices]
        sums = sum(step_trace.sketch(part, OwnPart(dim, own)) for part, own in zip(parts, stretches, strict=True))
        assert torch.allclose(sums, step_trace.sketch(tensor), rtol=1e-12, atol=1e-9)


def test_a_sketch_estimates_a_tensors_size():
    """Of many, the estimates' median is the size, and nine of ten are within a half of it."""
    ratios = []
    for seed in range(200):
        tensor = torch.randn(24, 40, generator=torch.Generator().manual_seed(seed))
        estimate = step_trace.sketch(tensor).square().mean().sqrt()
        ratios.append(float(estimate / tensor.norm()))
    assert 0.9 < statistics.median(ratios) < 1.1
    assert sum(0.5 < ratio < 1.5 for ratio in ratios) >= 180


def test_signs_are_the_same_in_every_release():
    """Traces of two machines and releases are compared, so nobody's generator may make them."""
    cpu = torch.device("cpu")
    random = int.from_bytes(hashlib.shake_128(b"axis 0").digest(6), "little")
    assert step_trace.signs(0, 3, cpu).flatten().tolist() == [1 - 2 * (random >> number & 1) for number in range(48)]
    assert torch.equal(step_trace.signs(1, 5, cpu), step_trace.signs(1, 9, cpu)[:5])
    assert not torch.equal(step_trace.signs(0, 9, cpu), step_trace.signs(1, 9, cpu))


HEADER = {"trace": 2, "rank": 0, "world": 1}


def write(directory: Path, *lines: dict[str, object] | str) -> Path:
    directory.mkdir(exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (directory / "rank0.jsonl").write_text("".join(f"{text}\n" for text in texts))
    return directory


def test_nan_and_missing_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    gradients = [{"step": n, "phase": "reduced", "name": "a", "square": 1.0, "sketch": [1.0]} for n in range(1, 5)]
    for name, loss in (("right", 2.0), ("wrong", float("nan"))):
        losses = [{"step": step, "phase": "loss", "value": loss / step} for step in range(1, 5)]
        write(tmp_path / name, HEADER, *gradients, *losses)
    write(tmp_path / "without", HEADER, *gradients)
    status, said = judged(capsys, tmp_path / "wrong", tmp_path / "right")
    assert status == 1 and "the loss of wrong is not a number at step 1" in said
    status, said = judged(capsys, tmp_path / "without", tmp_path / "right")
    assert status == 2 and "has no loss" in said
    status, said = judged(capsys, tmp_path / "right", __file__, "--locate")
    assert status == 2


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([""], "is no readable trace"),
        ([HEADER | {"rank": "x"}], "rank is no int"),
        ([HEADER | {"trace": 3}], "its format is 3, and this release reads 2"),
        ([HEADER | {"world": 2}], "has traces of the ranks [0], but of a training on 2"),
        ([HEADER, {"step": "one", "phase": "forward"}], "step is no int"),
        ([HEADER, {"step": 1, "phase": "forward", "sketch": ["x"]}], "a sketch is no list of numbers"),
        ([HEADER, {"step": 1, "phase": "forward", "skatch": []}], "is no readable trace"),
        (["{}"], "is no readable trace"),
        (['{"audit": 1, "step": 1}'], "an older release wrote the trace in"),
        (['{"phase": "layout", "tp": 0}'], "an older release wrote the trace in"),
    ],
)
def test_a_damaged_trace_is_named(tmp_path: Path, lines: list[dict[str, object] | str], words: str):
    with pytest.raises(Problem, match=re.escape(words)):
        read_trace(write(tmp_path / "trace", *lines))


def test_a_training_without_a_trace_is_named(tmp_path: Path):
    with pytest.raises(Problem, match="there is no trace in"):
        read_trace(tmp_path)


def test_a_training_that_went_on_from_an_earlier_step(tmp_path: Path):
    losses = [
        {"step": step, "phase": "loss", "value": value} for step, value in ((1, 3.0), (2, 9.0), (3, 9.0), (2, 2.0))
    ]
    assert read_trace(write(tmp_path / "trace", HEADER, *losses)).losses == {1: 3.0, 2: 2.0}


def test_what_is_no_number_is_a_difference(tmp_path: Path):
    """Infinities of both signs, whose sum is no number either, in two parts of a parameter."""
    infinite = float("inf")
    for name, values in (("right", (1.0, 2.0)), ("wrong", (infinite, -infinite))):
        parts = [
            {"step": 1, "phase": "reduced", "name": "a", "part": str(number), "sketch": [value]}
            for number, value in enumerate(values)
        ]
        write(tmp_path / name, HEADER, *parts)
    right, wrong = (read_trace(tmp_path / name) for name in ("right", "wrong"))
    assert first_difference(right, right) is None
    found = first_difference(wrong, right)
    assert found is not None and (found.name, found.difference) == ("a", infinite)


@pytest.mark.parametrize(
    ("precision", "later", "differs"), [("fp32", 1.1, True), ("bf16", 1.1, False), ("bf16", 1.5, True)]
)
def test_later_steps_in_bf16_are_compared_by_size(tmp_path: Path, precision: str, later: float, differs: bool):
    """There the direction of an honest gradient differs by as much as it is large."""
    for name, size, sign in (("right", 1.0, 1), ("wrong", later, -1)):
        lines = [{"step": step, "phase": "reduced", "name": "a", "sketch": [1.0], "square": 1.0} for step in (1, 2)]
        write(tmp_path / name, HEADER, *lines, lines[0] | {"step": 3, "sketch": [sign * size], "square": size**2})
    right, wrong = (read_trace(tmp_path / name) for name in ("right", "wrong"))
    assert (first_difference(wrong, right, precision) is not None) == differs


def test_a_gradient_that_is_rounding_alone_is_no_difference(tmp_path: Path):
    """That of attention's key bias is 0 but for rounding, which no two layouts share."""
    for name, noise in (("right", 1e-8), ("other", -1e-8)):
        lines = [
            {"step": 1, "phase": "reduced", "name": name_of, "sketch": [value]}
            for name_of, value in (("key.weight", 1.0), ("key.bias", noise))
        ]
        write(tmp_path / name, HEADER, *lines)
    assert first_difference(read_trace(tmp_path / "other"), read_trace(tmp_path / "right")) is None


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path):
    loss = {"step": 1, "phase": "loss", "value": 2.0}
    assert read_trace(write(tmp_path / "trace", HEADER, loss, '{"step": 2, "pha')).losses == {1: 2.0}


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [2, 4])
def test_honest_pairs_raise_no_alarm(tmp_path: Path, processes: int, capsys: pytest.CaptureFixture[str]):
    """Every kind with several seeds and widths, each against one process."""
    chosen = [f"{seed},{width}" for seed in range(1, 7) for width in (16, 64)]
    train(tmp_path, *(f"one@{each}" for each in chosen), processes=1, seconds=900)
    train(tmp_path, *(f"{kind}@{each}" for kind in EQUAL for each in chosen), processes=processes, seconds=900)
    alarms = []
    for kind in EQUAL:
        for each in chosen:
            status, said = judged(capsys, tmp_path / f"{kind}@{each}", tmp_path / f"one@{each}", "--locate")
            if status or "nothing differs" not in said:
                alarms.append((kind, each, said))
    assert alarms == []


HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None


@pytest.mark.slow
@pytest.mark.skipif(not HAS_ACCELERATE, reason="accelerate is not installed, without which Trainer does not run either")
def test_trainer_and_accelerate(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(tmp_path, "accelerate", "trainer")
    train(tmp_path / "again", "trainer")
    status, said = judged(capsys, tmp_path / "accelerate", traces / "one", "--locate")
    assert status == 0, said
    status, said = judged(capsys, tmp_path / "trainer", tmp_path / "again" / "trainer", "--locate")
    assert status == 0, said


def write_weights(directory: Path, keep: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """A training of six steps whose weights are kept so at each of them."""
    file = step_trace.TraceFile(directory, place=(0, 1))
    torch.manual_seed(0)
    start = {name: torch.randn(8, 8) for name in ("up", "down")}
    for step in range(1, 7):
        for name, values in start.items():
            kept = keep(values + 0.01 * step, step)
            file.add_tensor("weights", name, kept, bits=step_trace.bits(kept))
            file.add_tensor("reduced", name, values / step, square=step_trace.square(values / step))
        file.add("loss", value=3.0 - 0.1 * step)
        file.end_step(step)
    file.close()


def rounded(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def test_weights_that_one_training_rounds_to_bf16_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_weights(tmp_path / "right", lambda values, _: values)
    write_weights(tmp_path / "rounds", lambda values, step: rounded(values) if step >= 4 else values)
    status, said = judged(capsys, tmp_path / "rounds", tmp_path / "right", "--locate", "--precision", "bf16")
    assert status == 1, said
    assert "every weight of rounds is a number of bf16 at step 4" in said
    assert "the weights of rounds are numbers of bf16 at step 4, the other's are not" in said
    status, said = judged(capsys, tmp_path / "right", tmp_path / "rounds", "--precision", "bf16")
    assert status == 1 and "every weight of rounds" in said, said


def test_weights_that_both_or_some_round_to_bf16_are_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_weights(tmp_path / "one", lambda values, _: rounded(values))
    write_weights(tmp_path / "other", lambda values, _: rounded(values))
    assert "of bf16 at" not in judged(capsys, tmp_path / "one", tmp_path / "other", "--precision", "bf16")[1]
    write_weights(tmp_path / "right", lambda values, _: values)
    write_weights(tmp_path / "first", lambda values, _: torch.cat([rounded(values[:1]), values[1:]]))
    assert "of bf16 at" not in judged(capsys, tmp_path / "first", tmp_path / "right", "--precision", "bf16")[1]
