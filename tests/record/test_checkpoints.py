"""Which files a checkpoint has, intact and damaged ones, and what metrics.jsonl says about a resumed run."""

import json
import random
import re
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_runs import cut_off, made_checkpoints, write_checkpoint

from t5bench import Problem
from t5bench.checkpoint_form import INDEX, SEAL, read_seal
from t5bench.record.checkpoints import damage, iteration_in
from t5bench.record.records import mark_resume, read_metrics

# What the engines wrote, listed from real runs: (engine, ZeRO stage, precision, TP, PP, DP) and the files of all ranks.
WRITTEN = {
    ("megatron", 3, "--bf16", 1, 1, 2): "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt "
    "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt "
    "zero_pp_rank_0_mp_rank_00_model_states.pt zero_pp_rank_1_mp_rank_00_model_states.pt",
    ("megatron", 0, "", 1, 2, 1): "mp_rank_00_000/model_optim_rng.pt mp_rank_00_001/model_optim_rng.pt",
    ("megatron", 1, "", 1, 1, 2): "mp_rank_00_model_states.pt zero_pp_rank_0_mp_rank_00_optim_states.pt "
    "zero_pp_rank_1_mp_rank_00_optim_states.pt",
}


@pytest.mark.parametrize("shape", WRITTEN, ids=str)
def test_the_files_of_a_checkpoint(shape: tuple):
    engine, stage, precision, tp, pp, dp = shape
    made = made_checkpoints(engine=engine, stage=stage, precision=precision, tp=tp, pp=pp, dp=dp)
    assert made.files(range(tp * pp * dp)) == sorted(WRITTEN[shape].split())
    assert made.folder(20).name == ("global_step20" if engine == "megatron" and stage else "iter_0000020")


def test_the_layers_of_deepspeed_s_pipeline():
    """As a GPT of four layers left them: the embedding is layer 1, the last norm layer 6."""
    shape = {"engine": "megatron", "stage": 1, "precision": "--bf16", "tp": 2, "pp": 2, "dp": 1}
    made = made_checkpoints(**shape, family="gpt", layers=4)
    layers = {f"layer_0{layer}-model_0{tp}-model_states.pt" for layer in range(1, 7) for tp in (0, 1)}
    optimizers = {f"bf16_zero_pp_rank_0_mp_rank_0{rank}_optim_states.pt" for rank in range(4)}
    assert set(made.files(range(4))) == layers | optimizers | {f"mp_rank_0{rank}_model_states.pt" for rank in range(4)}
    second_stage = [name for name in made.files([2]) if name.startswith("layer")]
    assert second_stage == [f"layer_0{layer}-model_00-model_states.pt" for layer in (4, 5, 6)]
    # 2 x 2 x 2: rank 5 is TP 1, DP 0, stage 1; its neighbour in data parallelism is rank 7.
    cube = made_checkpoints(engine="megatron", tp=2, pp=2, dp=2)
    assert cube.files([5]) == cube.files([7]) == ["mp_rank_01_001/model_optim_rng.pt"]


@pytest.fixture(scope="module")
def saved_by_torch(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("torch") / "weights.pt"
    torch.save({"weight": torch.arange(300.0), "bias": torch.ones(7), "empty": torch.empty(0), "step": 3}, path)
    assert damage(path) == ""
    return path.read_bytes()


@given(kept=st.floats(0, 1, exclude_max=True))
def test_a_file_with_a_hole_or_truncated_anywhere_is_detected(saved_by_torch: bytes, tmp_path_factory, kept: float):
    """A machine that lost power leaves a hole: zeros where blocks were not written yet."""
    path = tmp_path_factory.getbasetemp() / "cut.pt"
    path.write_bytes(saved_by_torch[: int(kept * len(saved_by_torch))])
    assert damage(path).startswith("is truncated (it has ")
    start = saved_by_torch.index(b"\x00\x00\x80\x3f\x00\x00\x00\x40")  # 1.0 and 2.0 of the tensor
    path.write_bytes(saved_by_torch[:start] + bytes(64) + saved_by_torch[start + 64 :])
    assert "does not match its checksum" in damage(path)


def test_the_newest_intact_checkpoint(tmp_path: Path):
    found = made_checkpoints(tmp_path)
    assert found.newest() == (0, {})
    for iteration in (5, 7, 10, 20, 30, 40):
        write_checkpoint(found, iteration)
    assert found.newest() == (40, {})
    (found.folder(40) / SEAL).unlink()
    cut_off(found.folder(30) / "__0_0.distcp")
    (found.folder(20) / "__1_0.distcp").unlink()
    change_a_bit(found.folder(10) / INDEX)
    (found.folder(7) / SEAL).write_text('{"iteration": 7')
    iteration, faults = found.newest()
    assert iteration == 5
    assert faults[40] == f"iter_0000040/{SEAL} is missing: its saving did not end"
    assert re.fullmatch(r"iter_0000030/__0_0.distcp is truncated \(it has [\d,]+ bytes of [\d,]+\)", faults[30])
    assert faults[20] == "iter_0000020/__1_0.distcp is missing"
    assert faults[10] == f"iter_0000010/{INDEX} is damaged (it does not match its checksum)"
    assert f"{SEAL} cannot be read" in faults[7]
    assert found.newest(limit=6) == (5, {})
    # The first of two nodes does not need the file of rank 1, unless the model is divided anew.
    del faults[10], faults[7]
    assert made_checkpoints(tmp_path, nodes=2).newest() == (20, {each: faults[each] for each in (40, 30)})
    assert made_checkpoints(tmp_path, nodes=2, tp=2, dp=1).fault(20) == faults[20]


def change_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


def test_the_newest_intact_checkpoint_of_megatron(tmp_path: Path):
    found = made_checkpoints(tmp_path, engine="megatron")
    for iteration in (20, 30):
        write_checkpoint(found, iteration)
    cut_off(found.folder(30) / "mp_rank_00" / "model_optim_rng.pt")
    iteration, faults = found.newest()
    assert iteration == 20
    assert re.fullmatch(r"iter_0000030/mp_rank_00/model_optim_rng.pt is truncated \(it has \d+ bytes\)", faults[30])


def test_megatron_s_files_say_their_iteration(tmp_path: Path):
    found = made_checkpoints(tmp_path, engine="megatron")
    for name, iteration in (("iter_0000010", 10), ("iter_0000030", 10)):
        path = found.directory / name / "mp_rank_00" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        args = Namespace(iteration=7, path=Path("a"), kind=re.compile("x"))
        state = {"args": args, "model": OrderedDict(w=torch.ones(3)), "optimizer": {"state": {0: {"step": 3}}}}
        torch.save({**state, "iteration": iteration, "rng": [random.Random(1).getstate()]}, path)
    assert iteration_in(path) == 10
    sentence = "iter_0000030 holds the checkpoint of iteration 10; its name is wrong"
    assert found.newest() == (10, {30: sentence})
    same, other = found.content(10), {**found.content(30)}
    assert same == other
    torch.save({"iteration": 10, "model": {"w": torch.zeros(3)}}, path)
    assert found.content(30) != same


def test_a_list_of_files_names_none_elsewhere(tmp_path: Path):
    found = made_checkpoints(tmp_path)
    write_checkpoint(found, 5)
    seal = found.folder(5) / SEAL
    as_an_earlier_release_sealed(seal)
    seal.write_text(seal.read_text().replace("__1_0.distcp", "../../__1_0.distcp"))
    assert found.fault(5).startswith(f"iter_0000005/{SEAL} is not one that the native engine writes: ")


def as_an_earlier_release_sealed(seal: Path) -> None:
    content = json.loads(seal.read_text())
    del content["checksum"]
    seal.write_text(json.dumps(content | {"form": 2}))


def test_a_seal_covers_itself(tmp_path: Path):
    """Whichever digit is another, it is not continued."""
    found = made_checkpoints(tmp_path)
    write_checkpoint(found, 5)
    path = found.folder(5) / SEAL
    text = path.read_text()
    digits = [match.start() for match in re.finditer("[0-9]", text)]
    assert len(digits) > 50
    for place in digits:
        changed = str((int(text[place]) + 1) % 10)
        path.write_text(text[:place] + changed + text[place + 1 :])
        with pytest.raises(Problem, match=r"checkpoint.json (was changed|cannot be read)"):
            read_seal(found.folder(5))
    for name in json.loads(text):
        without = json.loads(text)
        del without[name]
        path.write_text(json.dumps(without))
        with pytest.raises(Problem):
            read_seal(found.folder(5))


def test_an_earlier_release_s_seal_is_read(tmp_path: Path):
    found = made_checkpoints(tmp_path)
    write_checkpoint(found, 5)
    sealed = read_seal(found.folder(5))
    as_an_earlier_release_sealed(found.folder(5) / SEAL)
    assert read_seal(found.folder(5)) == sealed
    assert found.newest() == (5, {})


@pytest.mark.parametrize("is_old", [False, True])
def test_a_folder_s_name_is_only_a_name(tmp_path: Path, is_old: bool):
    """A backup that was restored under another name is not continued as what it is called."""
    found = made_checkpoints(tmp_path)
    for iteration in (1, 3):
        write_checkpoint(found, iteration)
    if is_old:
        as_an_earlier_release_sealed(found.folder(3) / SEAL)
    found.folder(3).rename(found.folder(6))
    sentence = "iter_0000006 holds the checkpoint of iteration 3; its own name is iter_0000003"
    assert found.newest() == (1, {6: sentence})


def test_the_engines_find_it_and_newer_checkpoints_are_set_aside(tmp_path: Path):
    found = made_checkpoints(tmp_path, engine="megatron", stage=1)
    for iteration in (10, 20):
        write_checkpoint(found, iteration)
    (found.directory / "latest").write_text("global_step20")
    for _ in range(2):  # and again, after an attempt that wrote 20 anew and died
        found.point_to(10)
        assert (found.directory / "latest").read_text() == "global_step10"
        assert (found.directory / "latest_checkpointed_iteration.txt").read_text() == "10"
        assert found.iterations() == [10]
        write_checkpoint(found, 20)
    aside = sorted(path.name for path in found.directory.glob("*.passed-over*"))
    assert aside == ["global_step20.passed-over", "global_step20.passed-over.1"]


@pytest.mark.parametrize("torn", ["", '{"iteration": 9'])
def test_a_later_attempt_supersedes_what_came_after_its_checkpoint(tmp_path: Path, torn: str):
    """One of them began anew instead. torn: half a line at the end of each attempt."""
    path = tmp_path / "metrics.jsonl"
    for begin, before, last, elapsed in ((0, 0, 37, 100), (30, 30, 33, 200), (20, 0, 29, 250), (20, 20, 25, 300)):
        if begin:
            mark_resume(path, begin)
        with path.open("a") as file:
            for number in range(before + 1, last + 1):
                values = {"iteration": number, "total": 100, "elapsed_ms": elapsed, "lm_loss": 8.0}
                values |= {"learning_rate": 1e-4, "samples_per_second": 1.0, "tflops": 0.1}
                file.write(json.dumps(values) + "\n")
            file.write(torn)
    lines = read_metrics(path)
    assert [line.iteration for line in lines] == list(range(1, 26))
    assert [line.elapsed_ms for line in lines] == [100] * 20 + [300] * 5
    assert [line.begin for line in lines] == [0] * 20 + [20] * 5
