"""Checkpoints for another layout: weights without the engine, and runs that continue."""

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from real_runs import EXACT, WATCHED, finish, start, train
from support import REPO_ROOT

from docs import across_engines
from native.pieces import KINDS, WEIGHTS
from t5bench import Problem
from t5bench.__main__ import main
from t5bench.checkpoint_form import read_seal
from t5bench.record.records import load
from t5bench.record.run import Run
from t5bench.tools.convert.checkpoint_file import read_checkpoint_file as read
from t5bench.tools.convert.reshape import write
from t5bench.tools.convert.shards import HEAD, WORDS, Sharding, Weights, whole_weights
from t5bench.tools.convert.stored import StoredTensors
from t5bench.tools.convert.trained import TrainedModel, settings_of
from t5bench.tools.convert.training_state import Shard, TrainingState, optimizer_of
from t5bench_verify.relations import contradictions

HEADS, WIDTH, LAYERS = 4, 8, 4


def arguments(t5: bool, **changes: object) -> Namespace:
    """As a checkpoint of one process holds them."""
    engine = {
        "encoder_num_layers": LAYERS, "num_layers": LAYERS, "decoder_num_layers": 2 * LAYERS if t5 else None,
        "num_attention_heads": HEADS, "padded_vocab_size": 16, "make_vocab_size_divisible_by": 16,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "deepspeed": False,
        "swiglu": False, "num_key_value_heads": HEADS, "untie_embeddings_and_output_weights": False,
        "ffn_hidden_size": 32, "params_dtype": torch.float32, "ds_pipeline_enabled": False, "zero_stage": 0,
    }  # fmt: skip
    return Namespace(**engine | changes)


def model(t5: bool) -> Weights:
    """Every parameter whole, each number once."""
    shapes = {"embedding.word_embeddings.weight": (16, WIDTH), "embedding.position_embeddings.weight": (6, WIDTH)}
    for kind, count in {"encoder": LAYERS, **({"decoder": 2 * LAYERS} if t5 else {})}.items():
        for number in range(count):
            layer = f"{kind}.layers.{number}"
            shapes |= {f"{layer}.self_attention.query_key_value.{end}": (3 * WIDTH, *more) for end, more in ENDS}
            shapes |= {f"{layer}.inter_attention.key_value.{end}": (2 * WIDTH, *more) for end, more in ENDS}
            shapes |= {f"{layer}.mlp.dense_4h_to_h.weight": (WIDTH, 32), f"{layer}.mlp.dense_4h_to_h.bias": (WIDTH,)}
        shapes[f"{kind}.final_layernorm.weight"] = (WIDTH,)
    weights, begin = {}, 0
    for name, shape in ({f"language_model.{name}": s for name, s in shapes.items()} | {"lm_head.bias": (16,)}).items():
        if t5 or ("inter_" not in name and "lm_head" not in name):
            size = torch.Size(shape).numel()
            weights[name], begin = torch.arange(begin, begin + size).float().view(shape), begin + size
    return weights


ENDS = (("weight", (WIDTH,)), ("bias", ()))
Q_K_V = "language_model.encoder.layers.3.self_attention.query_key_value.bias"


def cut_for(t5: bool, directory: Path, tp: int, pp: int) -> Path:
    whole = model(t5)
    head = {"args": arguments(t5), "iteration": 7, "tokens": 1, "checkpoint_version": 3.0}
    complete = whole | {HEAD: whole["language_model.embedding.word_embeddings.weight"]}
    write(head, complete, directory, Sharding.of(head["args"], tp, pp))
    return directory / "iter_0000007"


@pytest.mark.parametrize("t5", [True, False])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (1, 4), (2, 2)])
def test_a_model_that_is_cut_can_be_joined_again(tmp_path: Path, t5: bool, tp: int, pp: int):
    folder, whole = cut_for(t5, tmp_path, tp, pp), model(t5)
    found = whole_weights(folder, read(min(folder.rglob("*.pt")))["args"])
    assert len(list(folder.glob("*/model_optim_rng.pt"))) == tp * pp
    assert found[HEAD].equal(whole[WORDS])
    assert {*found} - {HEAD} == whole.keys() and all(found[name].equal(whole[name]) for name in whole)


def test_every_stage_has_its_parts_and_every_rank_its_heads(tmp_path: Path):
    folder = cut_for(True, tmp_path, 2, 4)
    parts = [read(folder / f"mp_rank_01_{stage:03d}" / "model_optim_rng.pt")["model"] for stage in range(4)]
    held = [sorted({*part, *part["language_model"]} - {"language_model"}) for part in parts]
    assert held == [
        ["embedding", "encoder"], ["encoder"], ["decoder", "embedding"],
        ["decoder", "lm_head", "word_embeddings_for_head"],
    ]  # fmt: skip
    # Its second layer is the model's fourth. The second half of the heads of query, key and value, each by itself.
    own = parts[1]["language_model"]["encoder"][Q_K_V.replace("language_model.encoder.layers.3", "layers.1")]
    assert own.tolist() == [number for block in model(True)[Q_K_V].chunk(3) for number in block.tolist()[4:]]
    assert not [name for name in parts[0]["language_model"]["encoder"] if "final" in name]


def test_shards_of_zero3_and_of_the_pipeline_module_are_read(tmp_path: Path):
    whole = model(False)
    shapes = [{name: value.shape for name, value in whole.items()}]
    for rank in range(3):  # no size is a multiple of 3
        parts = [torch.nn.functional.pad(v.flatten(), (0, -v.numel() % 3)).chunk(3)[rank] for v in whole.values()]
        state = {"partition_count": 3, "fp32_flat_groups": [torch.cat(parts)]}
        torch.save({"optimizer_state_dict": state}, tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    torch.save({"param_shapes": shapes}, tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    prefixes = ["embedding.", *(f"encoder.layers.{number}." for number in range(LAYERS)), "encoder.final_layernorm."]
    for number, prefix in enumerate((f"language_model.{prefix}" for prefix in prefixes), start=1):
        layer = {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}
        torch.save(layer, tmp_path / f"layer_{number:02d}-model_00-model_states.pt")
    for changes in ({"zero_stage": 3}, {"zero_stage": 1, "ds_pipeline_enabled": True}):
        found = whole_weights(tmp_path, arguments(False, deepspeed=True, **changes))
        assert {*found} - {HEAD} == {*whole} and all(found[name].equal(whole[name]) for name in whole)


def test_the_optimizer_of_the_pipeline_module_is_read(tmp_path: Path):
    """Of two stages under ZeRO-1 with two data-parallel ranks. The last one's copy of the embedding has positions that
    it does not train."""
    whole = model(False)
    embedding = {name: value for name, value in whole.items() if ".embedding." in name}
    stages: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, value in embedding.items():
        tied = name.replace("language_model.embedding.", "tied_modules.embed.")
        stages[0][tied] = value
        stages[1][tied] = value if "word" in name else torch.zeros_like(value)
    for name, value in whole.items():
        match = re.fullmatch(r"language_model\.encoder\.layers\.(\d+)\.(.*)", name)
        if match:
            stages[int(match[1]) >= LAYERS // 2][f"{int(match[1]) + 2}.{match[2]}"] = value
    stages[1][f"{LAYERS + 2}.weight"] = whole["language_model.encoder.final_layernorm.weight"]
    for number, stage in enumerate(stages):
        groups = [{name: value for name, value in stage.items() if (value.dim() > 1) == wanted} for wanted in (1, 0)]
        shapes = [{name: value.shape for name, value in group.items()} for group in groups]
        torch.save({"param_shapes": shapes}, tmp_path / f"mp_rank_{number:02d}_model_states.pt")
        for rank in range(2):
            halves = []
            for group in groups:
                flat = torch.cat([value.flatten() for value in group.values()])
                halves.append(torch.nn.functional.pad(flat, (0, len(flat) % 2)).chunk(2)[rank])
            moments = {at: {"exp_avg": half + 1, "exp_avg_sq": half + 2, "step": 7} for at, half in enumerate(halves)}
            state = {"partition_count": [2, 2], "single_partition_of_fp32_groups": halves}
            state["base_optimizer_state"] = {"state": moments, "param_groups": [{}, {}]}
            name = f"zero_pp_rank_{rank}_mp_rank_{number:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": state}, tmp_path / name)
    pipeline = {"zero_stage": 1, "ds_pipeline_enabled": True, "pipeline_model_parallel_size": 2}
    found = TrainingState.of(tmp_path, arguments(False, deepspeed=True, **pipeline))
    assert found.example.step == 7
    for kind, more in zip(KINDS, range(3), strict=True):
        assert {*found.values[kind]} - {HEAD} == {*whole}
        assert all(found.values[kind][name].equal(value + more) for name, value in whole.items())


@pytest.mark.parametrize(
    ("tp", "pp", "changes"),
    [(3, 1, {}), (1, 5, {}), (1, 3, {}), (0, 1, {}), (4, 1, {"ffn_hidden_size": 30}), (1, 1, {"swiglu": True})],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(tp: int, pp: int, changes: dict[str, int]):
    with pytest.raises(Problem, match=f"cannot be divided for TP {tp} and PP {pp}"):
        Sharding.of(arguments(True, **changes), tp, pp)


def continued(run: Path, directory: Path, strategy: str, tp: int, pp: int, **settings: str) -> Run:
    """A run's second half, in another layout and with another strategy."""
    words = ["reshape", run, "--tp", tp, "--pp", pp, "--output", directory, "--iteration", "10"]
    assert main([str(word) for word in words]) == 0
    return train(strategy, directory, **EXACT, **WATCHED | {"WANDB_MODE": "disabled"}, **settings, RESUME="1")


def check_continues(found: Run, expected: Run) -> None:
    """The same samples, rates, losses and gradient norms as without the change."""
    numbers = {line.iteration: (line.lm_loss, line.grad_norm, line.learning_rate) for line in expected.iterations}
    later = [line for line in found.iterations if line.begin]
    assert [line.iteration for line in later] == list(range(11, 21))
    for line in later:
        assert (line.lm_loss, line.grad_norm, line.learning_rate) == pytest.approx(numbers[line.iteration], rel=5e-6)
    ends = [[each.lm_loss for each in run.evaluations if each.iteration == 20] for run in (found, expected)]
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-6)
    assert not list(contradictions(found))


CHANGES = [
    ("hybrid", "ddp", 1, 1),
    pytest.param("ddp", "tensor", 2, 1, marks=pytest.mark.nightly),
    pytest.param("zero1", "ddp", 1, 1, marks=pytest.mark.nightly),
    pytest.param("tensor", "pipeline", 1, 2, marks=pytest.mark.nightly),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("hybrid", "zero3"),
        pytest.param("zero2", "pipeline", marks=pytest.mark.nightly),
        pytest.param("fsdp2", "tensor", marks=pytest.mark.nightly),
    ],
)
def test_a_run_of_the_native_engine_continues_under_another_strategy(
    native_runs: Path, sample_data: Path, tmp_path: Path, before: str, after: str
):
    """RESUME=1 with the other launcher, and nothing else. Only the second half's iterations are timed as its own."""
    run = shutil.copytree(native_runs / before, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "iter_0000020")
    settings = EXACT | WATCHED | {"WANDB_MODE": "disabled", "ENGINE": "native", "MEGATRON_DATA_DIR": str(sample_data)}
    [said] = finish(start(after, run, **settings, RESUME="1"))
    assert f"the checkpoint of iteration 10: the strategy is '{after}' here and was '{before}'; the layout is" in said
    assert "random numbers" not in said  # without dropout
    found = load(run)
    assert (found.strategy, found.plan.changed_at) == (after, 10)
    check_continues(found, load(native_runs / before))


@pytest.mark.slow
def test_a_native_run_needs_no_second_checkpoint(native_runs: Path, capsys: pytest.CaptureFixture[str]):
    before = sorted(native_runs.iterdir())
    assert main(["reshape", str(native_runs / "hybrid"), "--tp", "2"]) == 0
    said = capsys.readouterr().out
    assert "nothing was written" in said and f"RESUME=1, OUTPUT_DIR={native_runs / 'hybrid'}" in said
    assert sorted(native_runs.iterdir()) == before


def test_a_reshaped_run_of_the_native_engine_is_the_run_again(native_runs, sample_data: Path, tmp_path: Path):
    """It can be exported and reshaped again before it continues, under the settings that its run had."""
    directory = tmp_path / "reshaped"
    assert main(["reshape", str(native_runs / "hybrid"), "--output", str(tmp_path / "first"), "--iteration", "10"]) == 0
    assert main(["reshape", str(tmp_path / "first"), "--output", str(directory)]) == 0
    found = TrainedModel.of_run(directory)
    expected = TrainedModel.of_run(native_runs / "hybrid", 10)
    assert (found.iteration, found.architecture, found.dtype) == (10, expected.architecture, expected.dtype)
    assert {*found.weights} == {*expected.weights}
    assert all(found.weights[name].equal(expected.weights[name]) for name in found.weights)
    assert settings_of(directory).plan.data_prefix == expected.record.plan.data_prefix
    with pytest.raises(Problem, match="has no checkpoint of iteration 20"):
        TrainedModel.of_run(directory, 20)
    settings = EXACT | WATCHED | {"WANDB_MODE": "disabled", "ENGINE": "native", "MEGATRON_DATA_DIR": str(sample_data)}
    check_continues(train("fsdp2", directory, **settings, RESUME="1"), load(native_runs / "hybrid"))


def as_an_earlier_release(model: TrainedModel) -> None:
    """Makes a checkpoint what DDP wrote before all strategies had one form."""
    values = {kind: {**StoredTensors(model.folder, kind)} for kind in KINDS}
    for tensors in values.values():
        del tensors[HEAD]
    groups = [{"lr": 0.0, "weight_decay": 0.01}, {"lr": 0.0, "weight_decay": 0.0}]
    example = Shard({}, groups, torch.tensor(float(model.iteration)), has_masters=False)
    shutil.rmtree(model.folder)
    (model.folder / "mp_rank_00").mkdir(parents=True)
    content = {"model": values[WEIGHTS], "optimizer": optimizer_of(values, example)}
    torch.save(content, model.folder / "mp_rank_00" / "model_optim_rng.pt")


@pytest.mark.slow
def test_an_earlier_release_s_checkpoint_is_written_anew(native_runs: Path, tmp_path: Path):
    run = shutil.copytree(native_runs / "ddp", tmp_path / "run")
    expected = TrainedModel.of_run(native_runs / "ddp")
    as_an_earlier_release(TrainedModel.of_run(run))
    assert main(["reshape", str(run)]) == 0
    found = TrainedModel.of_run(tmp_path / "run-native")
    for kind in KINDS:
        carried, stored = (StoredTensors(model.folder, kind) for model in (found, expected))
        assert {*carried} == {*stored} and all(carried[name].equal(stored[name]) for name in stored)
    seals = [read_seal(model.folder) for model in (found, expected)]
    assert len({(seal.iteration, seal.step, seal.consumed_samples) for seal in seals}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("zero3", "tensor"), pytest.param("hybrid", "ddp", marks=pytest.mark.nightly)]
)
def test_a_run_of_megatron_continues_in_the_native_engine(
    megatron_runs: Path, sample_data: Path, tmp_path: Path, before: str, after: str
):
    directory = tmp_path / after
    words = ["reshape", megatron_runs / before, "--engine", "native", "--iteration", "10", "--output", directory]
    assert main([str(word) for word in words]) == 0
    settings = EXACT | WATCHED | {"WANDB_MODE": "disabled", "ENGINE": "native", "MEGATRON_DATA_DIR": str(sample_data)}
    check_continues(train(after, directory, **settings, RESUME="1"), load(megatron_runs / before))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "tp", "pp"),
    [("fsdp2", "hybrid", 2, 2), pytest.param("pipeline", "ddp", 1, 1, marks=pytest.mark.nightly)],
)
def test_a_run_of_the_native_engine_continues_in_megatron(
    native_runs: Path,
    megatron_dir: Path,
    sample_data: Path,
    tmp_path: Path,
    before: str,
    after: str,
    tp: int,
    pp: int,
):
    directory = tmp_path / after
    words = ["reshape", native_runs / before, "--engine", "megatron", "--tp", tp, "--pp", pp, "--iteration", "10"]
    assert main([*map(str, words), "--output", str(directory)]) == 0
    settings = EXACT | WATCHED | {"WANDB_MODE": "disabled", "ENGINE": "megatron", "MEGATRON_DIR": str(megatron_dir)}
    found = train(after, directory, **settings, MEGATRON_DATA_DIR=str(sample_data), RESUME="1")
    check_continues(found, load(native_runs / before))


@pytest.mark.slow
def test_over_the_border_and_back_everything_is_the_same(native_runs: Path, tmp_path: Path):
    """Bit for bit: weights, moments, and where the run stands."""
    words = ["reshape", native_runs / "zero3", "--engine", "megatron", "--tp", "2", "--pp", "2"]
    assert main([*map(str, words), "--output", str(tmp_path / "there")]) == 0
    assert main(["reshape", str(tmp_path / "there"), "--engine", "native", "--output", str(tmp_path / "back")]) == 0
    found, expected = TrainedModel.of_run(tmp_path / "back"), TrainedModel.of_run(native_runs / "zero3")
    for kind in KINDS:
        carried, stored = (StoredTensors(model.folder, kind) for model in (found, expected))
        assert {*carried} == {*stored} and all(carried[name].equal(stored[name]) for name in stored)
    seals = [read_seal(model.folder) for model in (found, expected)]
    assert len({(seal.iteration, seal.step, seal.consumed_samples) for seal in seals}) == 1


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_each_engine_continues_the_other_s_run():
    """As docs/generated/across_engines.md has it."""
    command = [sys.executable, str(REPO_ROOT / "tests" / "tools" / "convert" / "across_engines.py")]
    paths = os.pathsep.join([str(REPO_ROOT), str(REPO_ROOT / "tests")])
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-5000:]
    found = json.loads(result.stdout)
    assert len(found) == 10
    for title, pair in found.items():
        assert max(across_engines.differences(pair["uninterrupted"], pair["continued"])) <= across_engines.BOUND, title


def test_the_page_says_of_every_pair_whether_it_is_within_the_bound():
    measured = json.loads(across_engines.MEASURED.read_text())
    assert len(measured) == 10
    assert "**All 10 pairs stay within 1e-06 in every loss and gradient norm.**" in across_engines.page(measured)
    first = next(iter(measured.values()))
    first["continued"][-1][1] *= 1 + 2e-6
    page = across_engines.page(measured)
    assert "**Of 10 pairs, 1 differ by more than 1e-06 somewhere.**" in page and "| 2.0e-06 |" in page


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "tp", "pp"), CHANGES)
def test_a_run_of_megatron_continues_in_another_layout(
    megatron_runs: Path,
    megatron_dir: Path,
    sample_data: Path,
    tmp_path: Path,
    before: str,
    after: str,
    tp: int,
    pp: int,
):
    engine = {"ENGINE": "megatron", "MEGATRON_DIR": str(megatron_dir), "MEGATRON_DATA_DIR": str(sample_data)}
    run = megatron_runs / before
    check_continues(continued(run, tmp_path / after, after, tp, pp, **engine), load(run))


@pytest.mark.slow
@pytest.mark.nightly
def test_a_reshaped_run_of_megatron_can_be_reshaped_again(megatron_runs, megatron_dir, sample_data, tmp_path: Path):
    engine = {"ENGINE": "megatron", "MEGATRON_DIR": str(megatron_dir), "MEGATRON_DATA_DIR": str(sample_data)}
    first = tmp_path / "first"
    words = ["reshape", megatron_runs / "zero2", "--tp", 2, "--pp", 2, "--output", first, "--iteration", "10"]
    assert main([str(word) for word in words]) == 0
    assert main(["reshape", str(first), "--output", str(tmp_path / "again")]) == 0
    settings = EXACT | WATCHED | {"WANDB_MODE": "disabled"} | engine
    check_continues(train("ddp", tmp_path / "again", **settings, RESUME="1"), load(megatron_runs / "zero2"))


@pytest.mark.slow
@pytest.mark.nightly
def test_the_states_of_bf16_and_of_more_replicas_are_carried_over(sample_data: Path, tmp_path: Path):
    """The fp32 masters, not their bf16 copies. From two replicas under ZeRO-2 to four under DDP."""
    settings = {"ENGINE": "native", "MEGATRON_DATA_DIR": str(sample_data), "TRAIN_ITERS": "4", "SAVE_INTERVAL": "2"}
    settings |= {"PRECISION_FLAG": "--bf16", "DROPOUT": "0", "GRADIENT_REDUCTION": "fp32"}
    before = train("zero2", tmp_path / "run", **settings)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "iter_0000004")
    after = train("ddp", tmp_path / "run", **settings, RESUME="1", NPROC_PER_NODE="4")
    expected = [line.lm_loss for line in before.iterations]
    assert [line.lm_loss for line in after.iterations] == pytest.approx(expected, rel=2e-4)
