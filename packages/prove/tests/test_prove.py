"""Whether every gradient is summed once over the right ranks: correct layouts raise no alarm, planted mistakes do."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import REPO_ROOT
from torch import Tensor
from torch import distributed as dist

from native import data_parallel, fsdp2, layers, parallel, sequence_parallel, tensor_parallel
from t5bench.__main__ import main
from t5bench.costmodel.job import Architecture, FullySharded, Job, Parallel, Zero
from t5bench_prove import execution, proof, prove

T5 = prove.small(Job(Architecture(2, 2, 64, 8, 8, 128, 32, 32, 1024), engine="native", attention="fused"))
GPT = replace(
    T5, architecture=replace(T5.architecture, encoder_layers=0, encoder_length=0, family="gpt", head_bias=False)
)


def job_of(parallel: Parallel, job: Job = T5, **fields: Any) -> Job:
    found = prove.on_ranks(replace(job, parallel=parallel, **fields), parallel.world)
    assert found
    return found


def findings(job: Job, rank: int) -> list[str]:
    """In a process of its own, which has what a test has changed here."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        report, differences = pool.apply(execution.watched, (job, rank))
    assert report.settled
    return report.findings + differences


RIGHT = {
    "ddp": job_of(Parallel(data=4)),
    "sequence parallelism": job_of(Parallel(2, 2, 2, sequence_parallel=True)),
    "zero2": job_of(Parallel(data=4), zero=Zero(2)),
    "zero3": job_of(Parallel(data=4), zero=Zero(3)),
    "hsdp with slices": job_of(Parallel(2, 1, 4, shards=2), fully_sharded=FullySharded()),
    "gpt": job_of(Parallel(2, 2, 1), GPT),
    "gpt's replicas": job_of(Parallel(data=8), GPT),
    "fsdp2 on as many ranks as there are words": job_of(Parallel(data=1024), fully_sharded=FullySharded()),
    "zero-bubble": job_of(Parallel(1, 2, 2, schedule="zero-bubble")),
}


@pytest.mark.parametrize("layout", RIGHT)
def test_a_right_layout_raises_no_alarm(layout: str):
    job = RIGHT[layout]
    assert findings(job, job.parallel.world - 1) == []


def test_a_parameter_names_the_collectives_that_settle_its_gradient():
    report, _ = execution_of(RIGHT["sequence parallelism"], 0)
    by_name = {one.name: one for one in report.settled}
    positions = by_name["language_model.embedding.position_embeddings.weight"]
    assert positions.copies == ("data", "tensor", "pipeline")
    assert [text.partition(" over ")[2] for text in positions.by] == [
        "data (2 ranks: 0, 2)",
        "pipeline (2 ranks: 0, 4)",
        "tensor (2 ranks: 0, 1)",
    ]
    slice_of_weight = by_name["language_model.encoder.layers.0.mlp.dense_h_to_4h.weight"]
    assert slice_of_weight.copies == ("data",)


def execution_of(job: Job, rank: int) -> tuple[proof.Report, list[str]]:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(execution.watched, (job, rank))


def reduced_twice(function: Callable[..., Any]) -> Callable[..., Any]:
    def twice(tied: Any) -> None:
        function(tied)
        function(tied)

    return twice


def tied_reduced_by(operation: dist.ReduceOp.RedOpType) -> Callable[..., None]:
    """sum_tied_gradients with another kind of reduction."""

    def reduce(tied: Any) -> None:
        for embedding in tied:
            for copy in embedding.copies[:1]:
                embedding.axis.all_reduce(copy.grad, operation)

    return reduce


def axis_reducing_by(operation: dist.ReduceOp.RedOpType, elements: Callable[[int], bool]) -> Callable[..., Tensor]:
    """Axis.all_reduce with another kind of reduction where a sum of so many elements was asked for."""
    right = parallel.Axis.all_reduce

    def all_reduce(axis: Any, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        is_changed = op == dist.ReduceOp.SUM and elements(tensor.numel())
        return right(axis, tensor, operation if is_changed else op)

    return all_reduce


def without_numbers(axis: Any, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Axis.all_reduce that leaves out sums of one number, such as a norm."""
    return tensor if tensor.numel() == 1 else RIGHT_ALL_REDUCE(axis, tensor, op)


RIGHT_SPLIT = data_parallel.split_batch
RIGHT_ALL_REDUCE = parallel.Axis.all_reduce


def tied_then(change: Callable[[Tensor], Any]) -> Callable[..., None]:
    def sum_then_change(tied: Any) -> None:
        tied = list(tied)
        parallel.sum_tied_gradients(tied)
        for embedding in tied:
            for copy in embedding.copies:
                change(copy.grad)

    return sum_then_change


def update_after(trainer: type, change: Callable[[Any], Any]) -> Callable[..., Tensor]:
    """A trainer's update() after a change of each parameter."""
    right = trainer.update

    def update(self: Any) -> Tensor:
        for parameter in self.model.parameters():
            change(parameter)
        return right(self)

    return update


def scattered_by(operation: dist.ReduceOp.RedOpType) -> Callable[..., Any]:
    right = sequence_parallel.reduce_into
    return lambda output, given, group: right(output, given, op=operation, group=group)


MISSING_OVER_STAGES = "word_embeddings.weight: its gradient is not summed over the stages that have a copy"
AGAIN = "word_embeddings.weight: summed again by all-reduce of 262,144 bytes over pipeline (2 ranks: 0, 2)"
DIFFERENT = "input_layernorm.weight: tensor-parallel ranks share it, and get different gradients"
WRONG = {
    "tied embeddings are not summed": (
        Parallel(1, 2, 2),
        (data_parallel, "sum_tied_gradients", lambda _: None),
        MISSING_OVER_STAGES,
    ),
    "tied embeddings are summed twice": (
        Parallel(1, 2, 2),
        (data_parallel, "sum_tied_gradients", reduced_twice(parallel.sum_tied_gradients)),
        AGAIN,
    ),
    "norms are not summed over parts of the sequence": (
        Parallel(2, 1, 1, sequence_parallel=True),
        (data_parallel, "sum_partial_gradients", lambda *_: None),
        DIFFERENT,
    ),
    "the gradient of a block's input is not summed": (
        Parallel(2),
        (tensor_parallel, "enter_tp", lambda x, _: x),
        DIFFERENT,
    ),
    "tied embeddings are combined by MAX": (
        Parallel(1, 2, 1),
        (data_parallel, "sum_tied_gradients", tied_reduced_by(dist.ReduceOp.MAX)),
        "word_embeddings.weight: its gradient is combined by all-reduce (MAX) of 262,144 bytes over pipeline",
    ),
    "tied embeddings are averaged": (
        Parallel(1, 2, 1),
        (data_parallel, "sum_tied_gradients", tied_reduced_by(dist.ReduceOp.AVG)),
        "word_embeddings.weight: its gradient reaches the optimizer times 0.5 instead of 1",
    ),
    "tied embeddings are multiplied as they are summed": (
        Parallel(1, 2, 1),
        (data_parallel, "sum_tied_gradients", tied_reduced_by(dist._make_nccl_premul_sum(0.5))),
        "word_embeddings.weight: its gradient is multiplied by a number that its collective does not show",
    ),
    "tied embeddings are doubled": (
        Parallel(1, 2, 1),
        (data_parallel, "sum_tied_gradients", tied_then(lambda gradient: gradient.mul_(2))),
        "word_embeddings.weight: its gradient reaches the optimizer times 2 instead of 1",
    ),
    "replicas are summed, not averaged": (
        Parallel(data=2),
        (
            data_parallel.TorchTrainer,
            "update",
            update_after(data_parallel.TorchTrainer, lambda parameter: parameter.grad.div_(0.5)),
        ),
        "lm_head.bias: its gradient reaches the optimizer times 1 instead of 0.5",
    ),
    "parts of activations are averaged": (
        Parallel(2),
        (parallel.Axis, "all_reduce", axis_reducing_by(dist.ReduceOp.AVG, lambda elements: elements > 1)),
        "a value is combined by all-reduce (AVG) of 4,096 bytes over tensor (2 ranks: 0, 1), where a sum is needed",
    ),
    "parts of a sequence are scattered by MIN": (
        Parallel(2, 1, 1, sequence_parallel=True),
        (sequence_parallel, "reduce_into", scattered_by(dist.ReduceOp.MIN)),
        "a value is combined by reduce-scatter (MIN) of 4,096 bytes over tensor (2 ranks: 0, 1), where a sum is needed",
    ),
    "the norm is the largest of the ranks'": (
        Parallel(2),
        (parallel.Axis, "all_reduce", axis_reducing_by(dist.ReduceOp.MAX, lambda elements: elements == 1)),
        "a value is combined by all-reduce (MAX) of 4 bytes over tensor (2 ranks: 0, 1), where a sum is needed",
    ),
    "a micro-batch is left out": (
        Parallel(data=2),
        (data_parallel, "split_batch", lambda batch, args: RIGHT_SPLIT(batch, args)[:-1]),
        "lm_head.bias: its gradient lacks micro-batch 2",
    ),
    "gradients are forgotten before the update": (
        Parallel(2),
        (
            data_parallel.TorchTrainer,
            "update",
            update_after(data_parallel.TorchTrainer, lambda parameter: parameter.grad.zero_()),
        ),
        "lm_head.bias: no gradient of it reaches the optimizer",
    ),
}
NIGHTLY = {
    "tied embeddings are doubled", "parts of a sequence are scattered by MIN", "the norm is the largest of the ranks'",
    "gradients are forgotten before the update", "norms are not summed over parts of the sequence",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name for name in WRONG]
)
def test_a_mistake_names_the_parameter(name: str, monkeypatch: pytest.MonkeyPatch):
    layout, (module, function, wrong), expected = WRONG[name]
    monkeypatch.setattr(module, function, wrong)
    assert any(expected in finding for finding in findings(job_of(layout), 0))


@pytest.mark.parametrize(
    ("layout", "ranks"), [(Parallel(2), "all tensor-parallel ranks"), (Parallel(1, 2, 1), "all stages")], ids=str
)
def test_a_missing_sum_of_the_norm_accuses_no_parameter(layout: Parallel, ranks: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parallel.Axis, "all_reduce", without_numbers)
    assert findings(job_of(layout), 0) == [
        f"all gradients are scaled by a number that is not the same on {ranks}",
        "all-reduce of 4 bytes among 2 ranks (0, 1): executed 0 times, predicted 1",
    ]


def test_fsdp2_that_never_synchronises_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    right = fsdp2.FSDPModule.set_requires_gradient_sync
    monkeypatch.setattr(fsdp2.FSDPModule, "set_requires_gradient_sync", lambda module, _: right(module, False))
    report, differences = execution_of(job_of(Parallel(data=2), fully_sharded=FullySharded()), 0)
    (finding,) = report.findings
    assert finding.startswith("the step ends in AttributeError")
    assert "71 of 71 parameters have no gradient then, among them lm_head.bias" in finding
    assert differences == []


def reducing_each_time(right: Callable[..., None]) -> Callable[..., None]:
    """A backward pass after which DDP reduces what it has, also where further micro-batches follow."""

    def backward(self: Any, output: Tensor, gradient: Tensor | None = None, *, is_last: bool, part: int = 0) -> None:
        right(self, output, gradient, is_last=True, part=part)

    return backward


def test_a_reduction_after_each_micro_batch_is_slower_and_not_wrong(monkeypatch: pytest.MonkeyPatch):
    """What is equal already stays as it is in a mean with what is not."""
    trainer = data_parallel.TorchTrainer
    monkeypatch.setattr(trainer, "backward", reducing_each_time(trainer.backward))
    (difference,) = findings(job_of(Parallel(data=2)), 0)
    assert "all-reduce of 945,152 bytes among 2 ranks (0, 1): executed 2 times, predicted 1" in difference


def test_the_mean_of_equal_gradients_changes_none(monkeypatch: pytest.MonkeyPatch):
    group = dist.group

    def average(parameter: Any) -> None:
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=group.WORLD)

    monkeypatch.setattr(data_parallel.TorchTrainer, "update", update_after(data_parallel.TorchTrainer, average))
    found = findings(job_of(Parallel(data=2)), 0)
    assert found and all("predicted 0" in one for one in found)


def test_replicas_of_the_wrong_group_are_named(monkeypatch: pytest.MonkeyPatch):
    """DDP over the tensor-parallel ranks: nothing adds up the replicas' gradients, and the slices' are mixed."""
    right = data_parallel.DistributedDataParallel

    def wrong(part: Any, process_group: Any, **options: Any) -> Any:
        del process_group
        ranks = parallel.dist.get_process_group_ranks
        group = next(axis.group for axis in (part.tp,) if ranks(axis.group))
        return right(part, process_group=group, **options)

    monkeypatch.setattr(data_parallel, "DistributedDataParallel", wrong)
    found = findings(job_of(Parallel(2, 1, 2)), 0)
    assert any("lm_head.bias: its gradient is not summed over the data-parallel replicas" in one for one in found)
    assert any("input_layernorm.weight: summed again by all-reduce" in one for one in found)


def test_the_command_proves_or_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("HOSTS", "")
    assert main(["prove", "tensor", "--ranks", "2", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["layout"], row["ranks"], row["parameters"], row["findings"]) == ("2/1/1", 2, 71, [])
    monkeypatch.setattr(layers, "ColumnLinear", entering_nowhere(layers.ColumnLinear))
    assert main(["prove", "tensor", "--ranks", "2"]) == 1
    said = capsys.readouterr().out
    assert "NOT PROVED: t5 tensor, 2/1/1, rank 0: language_model.encoder.layers.0.input_layernorm.weight:" in said


def entering_nowhere(right: type) -> Callable[..., Any]:
    return lambda *sizes, **options: right(*sizes, **options | {"enters": False})


# Of the mistakes of tests/engines/mistakes.txt in the native engine that concern sums over ranks: what each begins
# with, and the beginning of what stands there instead. The last five change no collective, and what they
# multiply is no gradient that autograd gave a parameter, or a number in a tensor.
FOUND = (
    ("native-sequence | tensor", "=> pass"),
    ("native-sequence | hybrid", "and parameter.dim() == 2]"),
    ("native-sequence | hybrid", "part_gradient = own_part("),
    ("native | tensor", "mesh.tp.all_reduce(squared_norm) => pass"),
    ("native | pipeline", "mesh.pp.all_reduce(squared_norm) => pass"),
    ("native | tensor", "=> nn.Parameter(torch.empty(args.padded"),
    ("native | hybrid", "embedding.axis.all_reduce(first) => pass"),
    ("native | pipeline", "if positions else [] => []"),
    ("native | tensor", "blocks=3, enters=False)"),
    ("native | hybrid", "tp, enters=False)"),
    ("native | tensor", "=> mask, encoded)"),
    ("native | fsdp2", "=> self.args.clip_grad)"),
    ("native | fsdp2", "reduce_dtype=torch.bfloat16"),
    ("native-gpt | tensor", "=> F.linear(x, weight)"),
    ("native-gpt | fsdp2", "=> self.args.clip_grad)"),
    ("native-deep | pipeline", "=> Tied({0, split}"),
    ("native-deep | pipeline", "all_reduce(first).mul_(2)"),
    ("native-interleaved | pipeline", "0 * gradient"),
)
NOT_FOUND = (
    ("native | tensor", "== 0) => True"),
    ("native | tensor", "self.linear(x, self.weight, self.bias), self.tp)"),
    ("native-deep | pipeline", "mesh.is_first_stage else 0 => 0"),
    ("native-zero-bubble | pipeline", "(micro_batch != 1)"),
    ("native-zero-bubble | hybrid", "weight.backward(2 * gradient)"),
)
DEEP = {"ENCODER_NUM_LAYERS": "3", "DECODER_NUM_LAYERS": "3"}
SETTINGS = {
    "native": {},
    "native-sequence": {"SEQUENCE_PARALLEL": "1"},
    "native-gpt": {"MODEL_FAMILY": "gpt"},
    "native-deep": DEEP | {"PIPELINE_PARALLEL_SIZE": "4", "NNODES": "1", "NPROC_PER_NODE": "8"},
    "native-zero-bubble": {"PIPELINE_SCHEDULE": "zero-bubble"},
    "native-interleaved": DEEP | {"PIPELINE_SCHEDULE": "interleaved"},
}


@pytest.mark.nightly
@pytest.mark.parametrize("planted", [*FOUND, *NOT_FOUND], ids=" ".join)
def test_planted_mistakes_of_communication(planted: tuple[str, str], tmp_path: Path):
    begin, change = planted
    lines = (REPO_ROOT / "tests" / "engines" / "mistakes.txt").read_text().splitlines()
    (line,) = [each for each in lines if each.startswith(begin) and change in each]
    engine, strategy, file, replacement = line.replace("\\n", "\n").split(" | ", 3)
    right, wrong = replacement.split(" => ")
    for folder in ("native", "t5bench", "packages", "scripts", "ds_configs", "docs", "patches", "megatron_data"):
        shutil.copytree(REPO_ROOT / folder, tmp_path / folder)
    path = tmp_path / file
    assert path.read_text().count(right) == 1
    path.write_text(path.read_text().replace(right, wrong))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "ENGINE": "native", "HOSTS": ""} | SETTINGS[engine]
    command = [sys.executable, "-m", "t5bench", "prove", strategy, "--ranks", "8", "--json"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == (1 if planted in FOUND else 0), result.stderr
    (row,) = json.loads(result.stdout)["rows"]
    assert bool(row["findings"]) == (planted in FOUND)
