"""The commands predict, plan and layout, and what a dry run says."""

import json
import os
import re
import resource
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from made_runs import LARGE, RTX_5000_ADA, make_run
from support import Project

from t5bench import __main__ as program
from t5bench.__main__ import FORMER_NAMES, main
from t5bench.choose.space import Candidate, losers
from t5bench.compare.comparison import build
from t5bench.costmodel import traffic
from t5bench.costmodel.job import Architecture, Job, Parallel, Zero
from t5bench.costmodel.machine import DEVICES, Link, Machine
from t5bench.costmodel.parameters import parameters
from t5bench.costmodel.presets import PRESETS
from t5bench.plan.launchers import ALONE
from t5bench.plan.planner import plan
from t5bench.record.network import COMPUTING_SECONDS
from t5bench.record.records import load
from t5bench.report.tables import columns

SETTINGS = ("MODEL_PRESET", "HOSTS", "NNODES", "NPROC_PER_NODE", "SLURM_JOB_NODELIST", "DEVICE")
GPT = Architecture(0, 24, 1024, 16, 64, 4096, 0, 1024, 50304, family="gpt", head_bias=False)
ENGINES = pytest.mark.parametrize("engine", ["megatron", "native"])


@pytest.fixture(autouse=True)
def plain_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEGATRON_DATA_DIR", str(tmp_path))  # the checkout's data may have another vocabulary


def t5bench(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        status = program.main([str(word) for word in arguments])
    except SystemExit as end:  # argparse's
        status = end.code
    return (status, *capsys.readouterr())


def test_the_groups_are_shown(capsys: pytest.CaptureFixture[str]):
    _, shown, _ = t5bench(capsys, "ranks", "--tp", 2, "--pp", 2, "--dp", 2)
    assert "Tensor groups:     [0, 1] [2, 3] [4, 5] [6, 7]" in shown
    assert "Pipeline groups:   [0, 4] [1, 5] [2, 6] [3, 7]" in shown
    assert "  Stage 1 (decoder): GPU 6 (tp=0, node 1, local rank 2), GPU 7 (tp=1, node 1, local rank 3)" in shown


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("plan --gpus 2 --device rtx5000", "the model does not fit on 2 x rtx5000: even "),
        ("plan --gpus 8 --device h101", "the device 'h101' is unknown"),
        ("plan --gpus 8 --device RTX5000_Ada", "Did you mean rtx5000-ada?"),
        ("plan --gpus 8 --device h100 --model t5-v1.1-xll", "Did you mean t5-v1.1-xl?"),
        ("plan --gpus 3 --tp 2 --device h100", "no layout of 3 GPUs with TP=2"),
        ("plan --gpus 8,² --device h100", "--gpus must be numbers of GPUs, found '8,²'"),
        ("plan --gpus 8 --device h100 --link nan", "argument --link: must be at least 1e-06, found nan"),
        ("plan --gpus 8 --device h100 --latency -1", "argument --latency: must be at least 0, found -1"),
        ("plan --gpus 8 --device h100 --tp 0", "argument --tp: must be at least 1, found 0"),
        ("layout --dp 1000000000", "1000000000 GPUs are more than 100000"),
        ("layout --tp 2 --per-node 3", "2 ranks do not fill nodes of 3"),
        ("layout --split-rank 1", "It must be more than 0 and less than --pp, which is 1"),
        ("predict /nowhere", "there is no run directory /nowhere"),
    ],
)
def test_bad_input_is_answered_with_a_problem(capsys: pytest.CaptureFixture[str], monkeypatch, words: str, found: str):
    monkeypatch.setenv("HIDDEN_SIZE", "131072")
    status, _, error = t5bench(capsys, *words.split())
    assert (status, found in error) == (2, True), error


# GiB in use on the fullest GPU, seconds of an iteration, MB that both nodes send in one.
COSTS = {
    "ddp": (12.733, 3.163, 4903.988), "zero1": (9.294, 3.468, 3677.991), "zero2": (8.723, 10.248, 20841.950),
    "zero3": (8.557, 8.548, 21313.995), "zero3_offload": (3.989, 9.313, 21313.995),
    "pipeline": (7.742, 1.475, 300.941), "tensor": (6.877, 3.206, 5329.027), "hybrid": (4.331, 1.476, 338.690),
}  # fmt: skip


def test_all_strategies_are_predicted_for_other_hosts(capsys: pytest.CaptureFixture[str], monkeypatch):
    """The benchmark's model on its two nodes."""
    monkeypatch.setenv("HOSTS", "elsewhere-0 elsewhere-1")
    status, shown, _ = t5bench(capsys, "predict", "--device", RTX_5000_ADA, "--json")
    answer = json.loads(shown)
    rows = {row["strategy"]: row for row in answer["rows"]}
    assert (status, answer["refused"], rows.keys()) == (0, {}, COSTS.keys())
    for name, row in rows.items():
        found = row["memory"]["in_use"] / 2**30, row["seconds"]["total"], sum(row["bytes_sent_by_node"]) / 1e6
        assert found == pytest.approx(COSTS[name], abs=6e-4), name
    assert rows["ddp"]["parameters"] == [612_998_528]


def test_measured_values_are_shown_too(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """A run calibrates its own time, and the bytes of another are compared."""
    slow = {"settings": LARGE, "nodes": 2, "padded_vocab_size": 32128}
    ddp = make_run(tmp_path / "ddp", elapsed_ms=[9000.0] * 40, sent_per_iteration=2.452e9, **slow)
    zero2 = make_run(tmp_path / "zero2", "zero2", elapsed_ms=[20000.0] * 40, sent_per_iteration=1.2e10, **slow)
    _, shown, _ = t5bench(capsys, "predict", ddp, zero2, "--calibrate", ddp, "--json")
    first, second = json.loads(shown)["rows"]
    assert first["measured"]["seconds"] == pytest.approx([9.0, 9.0])
    found, predicted = first["measured"]["MB"]
    assert predicted == pytest.approx(found, rel=0.01)
    assert second["measured"]["MB"] == pytest.approx([12_000, 17 * 612_998_528 / 1e6], rel=0.01)
    # The comparison takes the machine's speed from its baseline; the link's is in the record.
    comparison = build([load(ddp), load(zero2)])
    assert "predicted times are based on how fast ddp ran" in comparison.predicted_by
    assert comparison.rows[0].predicted is None
    assert comparison.rows[1].predicted.total == pytest.approx(second["seconds"]["total"])
    status, _, error = t5bench(capsys, "predict", ddp, "--calibrate", ddp, "--link", 1)
    assert status == 2 and "was faster than its link allows" in error
    status, _, error = t5bench(capsys, "predict", "--device", "h100", "--calibrate", ddp)
    assert status == 2 and f"{ddp} ran on CPUs, which says nothing about GPUs" in error
    a100 = make_run(tmp_path / "a100", elapsed_ms=[9000.0] * 40, gpu="NVIDIA A100-SXM4-80GB", **slow)
    found = [t5bench(capsys, "predict", *words, "--calibrate", a100)[1] for words in ((a100,), ("--device", "h100"))]
    factors = [re.search("computing takes (.*) times as long", shown)[1] for shown in found]
    assert factors[0] == factors[1]  # of the A100's figures, not of the H100's


SLOW_PAIR = {"gbit": 0.2, "us": 60.0, "us_computing": 1000.0}
FAST_PAIR = {"gbit": 0.4, "us": 50.0, "us_computing": 800.0}
ALL = {"gbit": 0.19, "us": 55.0, "us_computing": 900.0}
NETWORK = {"hosts": ["node0", "node1", "node2"], "backend": "gloo", "together": None}
NETWORK["pairs"] = {"node1": FAST_PAIR, "node2": SLOW_PAIR}


def test_a_measured_network_is_predicted_with(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """The slowest pair's, or what all measured together. Nothing is taken off the rate that collectives reach."""
    path = tmp_path / "network.json"
    path.write_text(json.dumps(NETWORK))
    settings = {"settings": LARGE, "nodes": 2, "padded_vocab_size": 32128, "elapsed_ms": [900_000.0] * 40}
    tensor = make_run(tmp_path / "tensor", "tensor", **settings)
    words = "predict", tensor, "--calibrate", tensor, "--json"
    measured = json.loads(t5bench(capsys, *words, "--network", path)[1])
    straggling = 2 * (1000 - 60) * 1e-6 / COMPUTING_SECONDS**0.5
    link = {"bandwidth": 0.2e9 / 8, "latency": 60e-6, "is_measured": True, "straggling": straggling}
    assert measured["machine"]["between"] == pytest.approx(link)
    path.write_text(json.dumps(NETWORK | {"pairs": {"node2": SLOW_PAIR | {"us_computing": 60.0}}}))
    together = json.loads(t5bench(capsys, *words, "--network", path)[1])
    stated = json.loads(t5bench(capsys, *words, "--link", 0.2 / 0.97, "--latency", 60)[1])
    assert stated["machine"]["between"]["is_measured"] is False
    waits = [found["rows"][0]["seconds"]["communication"] for found in (measured, together, stated)]
    assert waits[0] > waits[1] == pytest.approx(waits[2])
    slower = "--link", 0.2, "--latency", 60
    (row,) = json.loads(t5bench(capsys, *words, *slower, "--calibrate-network", path)[1])["rows"]
    assert row["seconds"]["total"] > 900  # as the link of the calibration reaches 3 % more
    both = "--calibrate-network", path, "--calibrate-link", 1
    assert "and options state them, too" in t5bench(capsys, *words, *both)[2]
    path.write_text(json.dumps(NETWORK | {"together": ALL}))
    layouts = "layouts", "--gpus", 16, "--device", "h100", "--network", path
    assert "16 x h100 (80 GiB), 0.19 Gbit/s a node" in t5bench(capsys, *layouts)[1]


@pytest.mark.parametrize(
    ("text", "words", "reason"),
    [
        (None, (), "cannot be read: No such file"),
        ("{", (), "cannot be read: Expecting property name"),
        (json.dumps(NETWORK | {"pairs": {}}), (), "has no pair of nodes"),
        (
            json.dumps(NETWORK | {"pairs": {"node1": SLOW_PAIR | {"gbit": 0}}}),
            (),
            "gbit must be a number of 1e-06 to 1e+06, and is 0",
        ),
        (json.dumps(NETWORK), ("--link", 1), "and options state them, too"),
        (json.dumps(NETWORK), ("--latency", 1), "and options state them, too"),
    ],
)
def test_a_file_without_a_network_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, words: tuple, reason: str
):
    path = tmp_path / "network.json"
    if text is not None:
        path.write_text(text)
    for command in (("predict",), ("layouts", "--gpus", 8)):
        status, _, error = t5bench(capsys, *command, "--device", "h100", "--network", path, *words)
        assert status == 2 and reason in error, error


def test_a_batch_that_grew_until_the_end_is_predicted(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    grows = {"GLOBAL_BATCH_SIZE": "32", "RAMPUP_BATCH_SIZE": "8 8 319", "TRAIN_ITERS": "10"}
    run = make_run(tmp_path / "ddp", settings=LARGE | grows, elapsed_ms=[9000.0] * 25, padded_vocab_size=32128)
    (found,) = json.loads(t5bench(capsys, "predict", run, "--json")[1])["rows"]
    assert found["job"]["global_batch"] == 24 and found["micro_batches"] == 12


def test_a_comparison_on_known_gpus_needs_no_run_to_predict_times(tmp_path: Path):
    again = LARGE | {"RECOMPUTE": "full"}
    own = {"settings": again, "gpu": "NVIDIA H100 80GB HBM3", "padded_vocab_size": 32128}
    runs = [make_run(tmp_path / name, name, elapsed_ms=[900.0] * 40, **own) for name in ("ddp", "zero1")]
    comparison = build([load(run) for run in runs])
    assert "predicted times are based on the devices' data sheets" in comparison.predicted_by
    assert all(row.predicted.limit == "host" for row in comparison.rows)  # micro-batches of one sample
    assert all(4 / 3 > row.hardware_tflops / row.tflops > 1.3 for row in comparison.rows)  # the head is done once


def test_no_time_is_predicted_for_processes_that_share_a_cpu_machine(tmp_path: Path):
    """What they cost each other has no rate that a calibrating run or a link could give; their bytes are predicted."""
    own = {"settings": LARGE, "padded_vocab_size": 32128, "elapsed_ms": [9000.0] * 80, "sent_per_iteration": 2e9}
    one_node = [load(make_run(tmp_path / "one" / name, name, **own)) for name in ("ddp", "tensor")]
    two_nodes = [load(make_run(tmp_path / "two" / name, name, nodes=2, **own)) for name in ("ddp", "tensor")]
    for runs, speed in ((one_node, None), (two_nodes, "how fast ddp ran")):
        comparison = build(runs)
        titles = [column.title for column in columns(comparison)]
        assert ("ms predicted (error)" in titles) == (speed is not None)
        assert "bytes predicted (error)" in titles
        assert list(comparison.predicted_by) == ([f"predicted times are based on {speed}"] if speed else [])


@ENGINES
def test_a_plan_has_the_settings_of_a_prediction(capsys: pytest.CaptureFixture[str], monkeypatch, engine: str):
    wanted = {"ENGINE": engine, "PRECISION_FLAG": "", "DROPOUT": "0", "NNODES": "1", "NPROC_PER_NODE": "2"}
    if engine == "megatron":
        wanted |= {"PRECISION_FLAG": "--bf16", "GRADIENT_REDUCTION": "fp32"}  # which ZeRO's JSON has
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    predicted = json.loads(t5bench(capsys, "predict", "--device", "h100", "--json")[1])["rows"]
    options = "--per-node", 4, "--device", "h100", "--global-batch", 16, "--json"
    planned = json.loads(t5bench(capsys, "layouts", "--gpus", "2,4", *options)[1])
    zero1 = next(row for row in predicted if row["strategy"] == "zero1")
    names = "kind", "micro_batch", "recompute"
    found = [one for one in planned["2"] if [one[name] for name in names] == ["ZeRO-1", 1, "none"]]
    assert [one["memory"] for one in found] == pytest.approx([zero1["memory"]["in_use"]])
    assert [one["seconds"] for one in found] == pytest.approx([zero1["seconds"]["total"]])
    assert any(one["kind"] == "TP x ZeRO-1" for one in planned["4"]) == (engine == "megatron")


def test_a_gpt_runs_in_deepspeeds_pipeline():
    job = Job(GPT, Parallel(2, 2, 2, deepspeed=True), 1, 16, Zero(1), recompute="full")
    on = Machine(DEVICES["h100"], Link(1e11), Link(1e10))
    assert Candidate(job.on(devices_per_node=4), on).start == (
        "MODEL_FAMILY=gpt NNODES=2 NPROC_PER_NODE=4 GLOBAL_BATCH_SIZE=16 MICRO_BATCH_SIZE=1 TENSOR_PARALLEL_SIZE=2"
        " PIPELINE_PARALLEL_SIZE=2 RECOMPUTE=full bash scripts/run_megatron_t5_3d.sh <master-host> <node-rank>"
    )
    assert Candidate(job, on).start.endswith("scripts/run_megatron_t5_3d.sh")
    assert {row.what: row.bytes for row in traffic.collectives_of(job)}["tied embedding"] == 2 * 50304 // 2 * 1024
    none, some, full = (Candidate(replace(job, recompute=way), on) for way in ("none", "selective", "full"))
    assert none.memory.peak > some.memory.peak > full.memory.peak
    assert none.time.total < some.time.total < full.time.total
    assert none.to_json()["flops"]["model"] == full.to_json()["flops"]["model"]


def test_models_by_their_published_dimensions(capsys: pytest.CaptureFixture[str]):
    """Their parameters are the published ones. The launchers can start GPTs alone, by their sizes."""
    published = {"gpt-1.5b": 1.5, "gpt-8.3b": 8.3, "t5-11b": 11.3, "gpt-13b": 13, "gpt-17b": 17.2, "ul2-20b": 19.6}
    published |= {"gpt-100b": 101, "gpt-170b": 171, "gpt-175b": 175, "t5-v1.1-xxl": 11.1}
    published |= {"t5gemma2-270m": 0.37, "t5gemma2-1b": 1.7, "t5gemma2-4b": 7}
    for name, billions in published.items():
        assert parameters(PRESETS[name]) / 1e9 == pytest.approx(billions, rel=0.05), name
    options = "--device", "h100", "--link", 3200, "--tp", 8, "--model", "gpt-175b", "--json"
    (best, *_) = json.loads(t5bench(capsys, "layouts", "--gpus", 256, *options)[1])["256"]
    assert best["missing"] == "" and "NUM_LAYERS=96" in best["start"] and "HIDDEN_SIZE=12288" in best["start"]
    assert 0.1 < best["mfu"] < 0.7 and best["tflops"] / 989.4 == pytest.approx(best["mfu"])
    status, _, error = t5bench(capsys, "predict", "--model", "t6", "--device", "h100")
    assert status == 2 and "the model 't6' is unknown" in error
    (row, *_) = json.loads(t5bench(capsys, "predict", "--model", "t5-v1.1-xl", "--device", "h100", "--json")[1])["rows"]
    assert row["parameters"] == [parameters(PRESETS["t5-v1.1-xl"])]
    assert row["mfu"] == pytest.approx(row["tflops_per_gpu"] / 989.4)


def test_a_layout_that_does_not_divide_a_published_model_is_listed_with_the_reason(capsys: pytest.CaptureFixture[str]):
    status, shown, said = t5bench(capsys, "predict", "--model", "t5gemma2-1b", "--device", "h100")
    assert status == 0 and "t5gemma2-1b: the text part, without the vision encoder" in said
    assert "tensor cannot run: TP=2 does not divide the heads of keys and values of t5gemma2-1b: 1" in shown
    for model, expected in (("t5gemma2-1b", {1}), ("t5gemma2-4b", {1, 2, 4})):
        options = "--device", "h100", "--model", model, "--json"
        found = json.loads(t5bench(capsys, "layouts", "--gpus", 8, *options)[1])["8"]
        assert {one["parallel"]["tensor"] for one in found} == expected


def test_a_published_models_own_sizes_are_divided(capsys: pytest.CaptureFixture[str], monkeypatch):
    """Not those of the launchers' default: 16 stages divide 96 layers, not 24. A T5 of 6 heads is none of theirs."""
    sizes = {"TENSOR_PARALLEL_SIZE": "8", "PIPELINE_PARALLEL_SIZE": "16", "NNODES": "16", "NPROC_PER_NODE": "8"}
    for name, size in sizes.items():
        monkeypatch.setenv(name, size)
    shown = json.loads(t5bench(capsys, "predict", "--model", "gpt-175b", "--device", "h100", "--json")[1])["rows"]
    assert [row["strategy"] for row in shown] == ["hybrid", "3d"]
    for name in sizes:
        monkeypatch.delenv(name)
    options = "--device", "h100", "--model", "t5-v1.1-small", "--json"
    (best, *_) = json.loads(t5bench(capsys, "layouts", "--gpus", 2, *options)[1])["2"]
    assert (best["missing"], best["start"]) == ("no: --model", "")


def test_predict_says_what_only_the_other_engine_has(capsys: pytest.CaptureFixture[str], monkeypatch):
    needs = r"fsdp2 needs ENGINE=native, and would take [\d.]+ s and [\d.]+ GiB"
    assert re.search(needs, t5bench(capsys, "predict", "--device", "h100")[1])
    monkeypatch.setenv("ENGINE", "native")
    assert not re.search("fsdp2 needs", t5bench(capsys, "predict", "--device", "h100")[1])


@pytest.mark.parametrize("family", ["t5", pytest.param("gpt", marks=pytest.mark.nightly)])
def test_every_kind_of_layout_is_ranked_and_its_command_plans_it(capsys, monkeypatch, family: str):
    """On both engines: what each command says is the layout that was predicted."""
    monkeypatch.setenv("MODEL_FAMILY", family)
    options = "--per-node", 4, "--global-batch", 64, "--device", "a100", "--json"
    found = json.loads(t5bench(capsys, "layouts", "--gpus", 8, *options)[1])["8"]
    best = {}
    for candidate in found:
        best.setdefault((candidate["engine"], candidate["kind"]), candidate)
    kinds = {kind for _, kind in best}
    assert kinds >= {"DDP", "TP", "TP + SP", "PP", "PP GPipe", "PP interleaved", "PP zero-bubble", "ZeRO-1", "ZeRO-2"}
    assert kinds >= {"ZeRO-2 once", "ZeRO-3", "ZeRO-3 once", "ZeRO-3 offload", "FSDP2", "HSDP", "FSDP2 kept"}
    assert (("megatron", "PP interleaved") in best) == (family == "gpt")
    for (engine, kind), candidate in best.items():
        if candidate["missing"]:
            assert kind.endswith("PP x ZeRO-1") and family == "t5"
            continue
        environment, _, launcher = candidate["start"].partition(" bash scripts/run_megatron_t5_")
        settings = dict(word.split("=") for word in environment.split())
        node = {"MASTER_ADDR": "node0", "NODE_RANK": "0", "DEVICE": "cuda"}
        planned = plan(os.environ | settings | node, launcher.split(".sh")[0])
        fatal = [obstacle.found for obstacle in planned.obstacles if obstacle.fatal]
        assert planned.layout, (engine, kind, fatal)
        job = Job.of_plan(planned, 32128)
        ranked = Parallel(**candidate["parallel"])
        assert job.parallel.decoder_stage == ranked.decoder_stage
        assert replace(job.parallel, split_rank=None) == replace(ranked, split_rank=None), (engine, kind)
        assert asdict(job.zero) == candidate["zero"], (engine, kind)
        assert (job.engine, job.recompute, job.micro_batch) == (
            engine,
            candidate["recompute"],
            candidate["micro_batch"],
        )
        assert (job.fully_sharded is not None) == ("SDP" in kind and kind != "DDP")


def test_what_more_nodes_buy(capsys: pytest.CaptureFixture[str]):
    shown = t5bench(capsys, "layouts", "--gpus", "4,8", "--per-node", 4, "--device", "a100", "--model", "base")[1]
    table = shown.partition("against 4 GPUs")[2].splitlines()
    assert [line.split()[:2] for line in table[2:4]] == [["4", "1"], ["8", "2"]]
    assert " 1.00x " in table[2] and table[2].endswith("100%")


def test_an_environment_may_name_the_layout(capsys: pytest.CaptureFixture[str], monkeypatch):
    """In the launchers' words or those of other projects' scripts; the command says which it follows."""
    for name, size in (("TENSOR_PARALLEL_SIZE", "2"), ("PP_SIZE", "4")):
        monkeypatch.setenv(name, size)
    status, shown, said = t5bench(capsys, "layouts", "--gpus", 16, "--device", "h100", "--json")
    sizes = {(one["parallel"]["tensor"], one["parallel"]["pipeline"]) for one in json.loads(shown)["16"]}
    assert status == 0 and sizes == {(2, 4)}
    assert "TENSOR_PARALLEL_SIZE=2: only such layouts are ranked" in said and "PP_SIZE=4: only" in said
    options = "--tp", 4, "--pp", 2, "--json"
    (candidate, *_) = json.loads(t5bench(capsys, "layouts", "--gpus", 16, "--device", "h100", *options)[1])["16"]
    assert [candidate["parallel"][name] for name in ("tensor", "pipeline")] == [4, 2]
    monkeypatch.setenv("TENSOR_PARALLEL_SIZE", "two")
    status, _, error = t5bench(capsys, "layouts", "--gpus", 16, "--device", "h100")
    assert status == 2 and "TENSOR_PARALLEL_SIZE must be a whole number of at least 1, found 'two'" in error


@pytest.mark.parametrize("option", ["--gpus", "--rank"])
def test_predict_does_not_ignore_what_only_the_execution_knows(capsys: pytest.CaptureFixture[str], option: str):
    status, _, error = t5bench(capsys, "predict", "--device", "h100", option, 8)
    assert status == 2 and "NNODES and NPROC_PER_NODE" in error and "layouts --gpus" in error


@pytest.mark.parametrize("batch", ["", "64"])
def test_predict_and_layouts_have_the_same_batch(capsys: pytest.CaptureFixture[str], monkeypatch, batch: str):
    if batch:
        monkeypatch.setenv("GLOBAL_BATCH_SIZE", batch)
    (row, *_) = json.loads(t5bench(capsys, "predict", "--device", "h100", "--json")[1])["rows"]
    shown = t5bench(capsys, "layouts", "--gpus", 2, "--device", "h100")[1]
    assert row["job"]["global_batch"] == int(batch or 16)
    assert f"global batch {batch or 16}:" in shown


@pytest.mark.parametrize("command", [("predict",), ("layouts", "--gpus", 8)])
def test_every_table_of_times_has_tflops_and_mfu(capsys: pytest.CaptureFixture[str], command: tuple[object, ...]):
    """MFU only where the GPU's peak in this precision is known: Turing has no bf16."""
    for device, has_mfu in (("h100", True), ("rtx5000", False)):
        shown = t5bench(capsys, *command, "--device", device, "--model", "base")[1]
        headings = [line for line in shown.splitlines() if re.match("(seconds|layout) | *GiB +s/iteration", line)]
        assert len(headings) == (1 if command[0] == "predict" else 2)
        assert all("TFLOP/s" in line for line in headings)
        assert all("MFU" in line for line in headings) or not has_mfu
        assert bool(re.search(r" \d+\.\d% ", shown)) == has_mfu


def test_other_schedules_beside_1f1b(capsys: pytest.CaptureFixture[str], monkeypatch):
    """Of equal stages GPipe's idle as long, and keep all micro-batches. Zero-bubble's idle less."""
    for name, value in {"MODEL_FAMILY": "gpt", "MICRO_BATCH_SIZE": "2", "ENGINE": "native"}.items():
        monkeypatch.setenv(name, value)
    shown = t5bench(capsys, "predict", "--device", "a100", "--schedule")[1]
    table = shown.partition("\npipeline\n")[2].partition("\n\n")[2].splitlines()
    rows = {line.split()[0]: re.split(r"\s{2,}", line.strip()) for line in table[2:5]}
    ahead = table[0].split("  ")
    assert "idle" in table[0] and "GiB of activations" in table[0] and ahead[0] == "schedule"
    assert rows.keys() == {"1f1b", "gpipe", "zero-bubble"} and rows["1f1b"][0] == "1f1b (chosen)"
    assert rows["1f1b"][1] == rows["gpipe"][1]  # idle
    assert [float(rows[name][5]) for name in ("1f1b", "gpipe")] == [2, 8]
    assert float(rows["gpipe"][6]) > 3 * float(rows["1f1b"][6])
    idle = {name: float(row[1].rstrip("%")) for name, row in rows.items()}
    assert idle["zero-bubble"] < idle["1f1b"]
    assert float(rows["zero-bubble"][2]) < float(rows["1f1b"][2])  # seconds
    assert float(rows["zero-bubble"][5]) == 2


def test_why_a_layout_is_not_the_winner():
    """What takes longer than the winner's, not what takes longest."""
    on = Machine(DEVICES["a100"], Link(3e11), Link(1e10))
    zero1, ddp = (Candidate(Job(GPT, Parallel(data=8), 8, 64, zero), on) for zero in (Zero(1), Zero()))
    ((kind, reason),) = losers(sorted((zero1, ddp), key=lambda entry: entry.seconds))
    assert (kind, ddp.time.limit) == ("DDP", "computing") and ddp.time.computing == zero1.time.computing
    assert "x the time, mainly more optimizer time: DDP 1/1/8, micro-batch 8" in reason


@pytest.mark.nightly
def test_four_thousand_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    before, picture = resource.getrusage(resource.RUSAGE_SELF).ru_utime, tmp_path / "front.svg"
    words = ["layouts", "--gpus", "8,4096", "--device", "h100", "--link", 3200, "--picture", picture, "--json"]
    status, shown, _ = t5bench(capsys, *words)
    assert status == 0 and "<svg" in picture.read_text()
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 20
    )  # both sizes, with the picture; 8 s when idle
    for candidates in json.loads(shown).values():
        fitting = [entry for entry in candidates if entry["seconds"] is not None]
        assert fitting == sorted(fitting, key=lambda entry: entry["seconds"])
        for place, entry in enumerate(fitting):
            assert entry["pareto"] == all(faster["memory"] > entry["memory"] for faster in fitting[:place])


def test_a_pipeline_is_split_as_the_launcher_splits_it(capsys: pytest.CaptureFixture[str], monkeypatch):
    """The encoder has two thirds of the work, so of three stages it gets two, and of eight five."""
    monkeypatch.setenv("ENGINE", "native")
    options = "--gpus", "3,8", "--device", "h100", "--global-batch", 48, "--model", "large", "--json"
    found = json.loads(t5bench(capsys, "layouts", *options)[1])
    seen = {}
    for gpus, candidates in found.items():
        for candidate in candidates:
            stages = candidate["parallel"]["pipeline"]
            if candidate["kind"] != "PP" or stages in seen:
                continue
            environment, _, launcher = candidate["start"].partition(" bash scripts/run_megatron_t5_")
            settings = dict(word.split("=") for word in environment.split())
            launched = plan(os.environ | ALONE | settings, launcher.removesuffix(".sh"))
            assert launched.layout.split_rank == candidate["parallel"]["split_rank"], (gpus, stages)
            seen[stages] = launched.layout.split_rank
    assert seen == {2: 1, 3: 2, 4: 2, 8: 5}


@ENGINES
def test_the_winners_line_starts_it(project: Project, capsys: pytest.CaptureFixture[str], monkeypatch, engine: str):
    monkeypatch.setenv("ENGINE", engine)
    monkeypatch.setenv("DROPOUT", "0")
    options = "--device", "rtx5000", "--tp", 2, "--model", "base", "--json"
    found = json.loads(t5bench(capsys, "layouts", "--gpus", 16, *options)[1])["16"]
    best = next(entry for entry in found if entry["kind"] == "TP x PP")
    assert engine == "megatron" or not any(entry["missing"] for entry in found)
    settings, _, rest = best["start"].partition(" bash scripts/run_megatron_t5_")
    assert rest.startswith("hybrid.sh")
    environment = dict(word.split("=") for word in settings.split())
    plan = json.loads(project.launch("hybrid", "node0", "0", "--dry-run=json", DEVICE="cpu", **environment).stdout)
    assert plan["engine"] == engine
    assert [plan["settings_by_role"]["model"][name] for name in ("HIDDEN_SIZE", "DROPOUT")] == ["768", "0"]
    sizes = (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data"))
    assert all(plan["layout"][name] == best["parallel"][own] for name, own in sizes)


def test_a_dry_run_predicts_and_a_run_warns(project: Project):
    result = project.launch("ddp", "--dry-run", DEVICE="cpu", MODEL_PRESET="large")
    assert "predicted: 612,998,528 parameters, " in result.stderr
    recomputing = project.launch("ddp", "--dry-run", DEVICE="cpu", MODEL_PRESET="large", RECOMPUTE="full")
    sizes = [float(re.search(r"([\d.]+) GiB per process", each.stderr)[1]) for each in (result, recomputing)]
    assert sizes[1] < sizes[0]
    project.add_stub("nvidia-smi", '#!/bin/bash\necho "GPU 0: Quadro RTX 4000 (UUID: GPU-0)"\n')
    result = project.launch("ddp", DEVICE="cuda", MODEL_PRESET="large", NPROC_PER_NODE="1")
    assert "warning: ddp needs about " in result.stderr and "predicted:" not in result.stderr


@pytest.mark.parametrize(("former", "name"), FORMER_NAMES.items())
def test_a_commands_former_name_works_and_says_the_new_one(capsys: pytest.CaptureFixture[str], former: str, name: str):
    with pytest.raises(SystemExit) as ended:
        main([former, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr()
    assert f"usage: python -m t5bench {name} " in said.out
    assert f"{former} is now called {name}" in said.err


def test_the_regret_of_the_named_run(tmp_path, capsys):
    """How much slower it was than the fastest one measured."""
    ddp = make_run(tmp_path / "ddp", "ddp", nodes=2, gpu="NVIDIA A100-SXM4-80GB")
    slow = make_run(tmp_path / "zero2", "zero2", nodes=2, gpu="NVIDIA A100-SXM4-80GB", elapsed_ms=[200.0] * 30)
    fast = make_run(tmp_path / "fast" / "zero2", "zero2", nodes=2, gpu="NVIDIA A100-SXM4-80GB", elapsed_ms=[80.0] * 30)
    batch = {"GLOBAL_BATCH_SIZE": "64"}
    larger = make_run(tmp_path / "larger", "ddp", nodes=2, gpu="NVIDIA A100-SXM4-80GB", settings=batch)
    as_named = t5bench(capsys, "predict", ddp, slow, "--link", 10)[1]
    assert "Of 2 runs in 2 processes the model names " in as_named and "/ddp: the fastest measured." in as_named
    assert "/ddp: 25.0% slower than fast/zero2." in t5bench(capsys, "predict", ddp, fast, larger, "--link", 10)[1]
    assert "the model names" not in t5bench(capsys, "predict", ddp, larger, "--link", 10)[1]


def test_defaults_leave_the_environment_s_settings_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    one_size = ["--tp", "2", "--pp", "1"]
    for words in (["predict", "--device", "a100"], ["layouts", "--gpus", "4", "--device", "a100", *one_size]):
        words = [*words, "--json"]
        assert main(words) == 0
        expected = capsys.readouterr().out
        with monkeypatch.context() as patch:
            for name, value in {"MODEL_PRESET": "tiny", "GLOBAL_BATCH_SIZE": "48"}.items():
                patch.setenv(name, value)
            assert main([*words, "--defaults"]) == 0
            assert capsys.readouterr().out == expected
            assert os.environ["MODEL_PRESET"] == "tiny"
            assert main(words) == 0
            assert capsys.readouterr().out != expected
