"""What reaches W&B and TensorBoard, read back with their own tools: training runs of both engines, and comparisons."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from harness import REPO_ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import make_run

from t5bench.__main__ import main
from t5bench.compare.comparison import build
from t5bench.plan.ports import free_port
from t5bench.record import records
from t5bench.record.log import iterations
from t5bench.report import wandb_report
from t5bench.report.wandb_report import CHART_ROWS, curves, is_online, names
from t5bench.run import wandb_config

KEY = "0123456789abcdef0123456789abcdef01234567"
README_METRICS = {"lm loss", "samples per second", "elapsed time per iteration", "learning rate", "loss scale"}
EFFECTIVE = ["strategy", "title", "engine", "engine_patches", "device", "settings", "layout", "ds_config", "versions"]


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Nothing of the user's W&B, and a data directory that the command may set goes away with the test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))


# ---- reading what W&B wrote ------------------------------------------------------------------------------------------


def inspect(directory: Path, *options: str) -> str:
    (file,) = directory.glob("wandb/offline-run-*/*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *options, str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def entries(directory: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in inspect(directory).splitlines()]
    return [line[kind] for line in lines if line["type"] == kind]


def overview(directory: Path) -> dict[str, Any]:
    """The run's configuration, summary and notes."""
    return json.loads(inspect(directory, "--summary"))


def logged(directory: Path, key: str) -> bytes:
    """The file of a table or page that was logged under this key."""
    (run,) = directory.glob("wandb/offline-run-*")
    return (run / "files" / overview(directory)["summary"][key]["path"]).read_bytes()


def table(directory: Path, key: str) -> list[dict[str, Any]]:
    content = json.loads(logged(directory, key))
    return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]


# ---- the comparison's run --------------------------------------------------------------------------------------------


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three strategies as a sweep leaves them, hybrid with the 4 processes that it needs."""
    runs = tmp_path / "trial" / "repeat1"
    group = {"settings": {"WANDB_RUN_GROUP": "trial", "WANDB_PROJECT": "physics"}}
    make_run(runs / "ddp", elapsed_ms=[100.0] * 30, memory_mib=[400, 300], **group)
    make_run(runs / "zero1", "zero1", elapsed_ms=[80.0] * 30, memory_mib=[200, 250], **group)
    make_run(runs / "ddp-4", elapsed_ms=[50.0] * 30, world_size=4, **group)
    make_run(runs / "hybrid", "hybrid", elapsed_ms=[200.0] * 30, **group)
    (tmp_path / "trial" / "comparison").mkdir()
    return tmp_path / "trial"


def test_a_comparison_is_a_run_of_its_own_in_its_runs_group(sweep: Path, capsys: pytest.CaptureFixture):
    assert main(["compare", str(sweep), "--output", str(sweep / "comparison")]) == 0
    capsys.readouterr()
    assert main(["wandb", str(sweep), "--comparison", str(sweep / "comparison")]) == 0
    said = capsys.readouterr().out
    place = sweep / "comparison"
    (directory,) = place.glob("wandb/offline-run-*")
    assert str(directory) in said and f"wandb sync {directory}" in said

    (start,) = entries(place, "run")
    assert (start["project"], start["run_group"]) == ("physics", "trial")
    assert (start["display_name"], start["job_type"]) == ("trial", "comparison")
    shown = overview(place)
    assert shown["config"]["baseline"] == "ddp"
    assert shown["config"]["settings"]["GLOBAL_BATCH_SIZE"] == "16"
    assert "NPROC_PER_NODE" not in shown["config"]["settings"], "it differs between the runs"
    assert shown["config"]["not a measurement on GPUs"] == "CPU"
    assert "zero1 is the fastest" in shown["notes"]

    summary = shown["summary"]
    assert summary["sound"] is True
    assert summary["zero1/samples per second"] == 200.0  # 16 in 80 ms
    assert summary["zero1/elapsed time per iteration"] == 80.0
    assert summary["zero1/throughput relative to the baseline"] == 1.25
    assert summary["zero1/peak memory MiB"] == 250
    assert summary["ddp (2 processes)/samples per second"] == 160.0
    assert summary["ddp (4 processes)/samples per second"] == 320.0
    assert summary["hybrid/throughput relative to the baseline"] == 0.25  # of the ddp with as many processes
    assert "zero1/MFU" not in summary, "a CPU has none"

    rows = table(place, "comparison")
    assert [(row["label"], row["world_size"], row["ms_per_iteration"]) for row in rows] == [
        ("ddp", 2, 100.0), ("zero1", 2, 80.0), ("ddp", 4, 50.0), ("hybrid", 4, 200.0),
    ]  # fmt: skip
    assert {row["mfu"] for row in rows} == {None}
    assert logged(place, "page") == (place / "index.html").read_bytes()
    assert b"<table" in logged(place, "page")
    assert not entries(place, "stats") and not entries(place, "output_raw")


def test_its_charts_are_ready(sweep: Path):
    assert main(["wandb", str(sweep), "--comparison", str(sweep / "comparison")]) == 0
    place = sweep / "comparison"
    panels = {}
    for change in entries(place, "config"):
        panels |= {k.removeprefix("_wandb.visualize."): v for k, v in change["update"].items()}
    kinds = {title: panel["panel_config"]["panelDefId"] for title, panel in panels.items()}
    assert kinds == {
        "samples per second against iteration": "wandb/lineseries/v0",
        "lm loss against iteration": "wandb/lineseries/v0",
        "samples per second by strategy": "wandb/bar/v0",
        "peak memory MiB by strategy": "wandb/bar/v0",
    }
    titles = {panel["panel_config"]["stringSettings"]["title"] for panel in panels.values()}
    assert titles == {"samples per second (CPU)", "lm loss (CPU)", "peak memory MiB (CPU)"}

    labels = ["ddp (2 processes)", "zero1", "ddp (4 processes)", "hybrid"]
    lines = table(place, "samples per second against iteration_table")
    assert list(dict.fromkeys(row["lineKey"] for row in lines)) == labels
    assert [(row["step"], row["lineVal"]) for row in lines if row["lineKey"] == "zero1"] == [
        (iteration, 200.0) for iteration in range(1, 31)
    ]
    losses = table(place, "lm loss against iteration_table")
    assert next(row["lineVal"] for row in losses if row["lineKey"] == "hybrid") == pytest.approx(6 + 2 / 1.01)
    bars = table(place, "peak memory MiB by strategy_table")
    assert [(row["strategy"], row["peak memory MiB"]) for row in bars] == [
        (labels[0], 400), (labels[1], 250), (labels[2], 403), (labels[3], 403),
    ]  # fmt: skip
    speeds = {
        row["strategy"]: row["samples per second"] for row in table(place, "samples per second by strategy_table")
    }
    assert speeds == dict(zip(labels, (160.0, 200.0, 320.0, 80.0), strict=True))


def test_a_failed_run_is_there_with_its_status_and_the_answer_is_no(tmp_path: Path, capsys: pytest.CaptureFixture):
    make_run(tmp_path / "runs" / "ddp")
    make_run(
        tmp_path / "runs" / "zero1", "zero1", elapsed_ms=[90.0] * 4, losses=[8.0, float("nan"), None, 7.0],
        status="diverged", reason="the loss is not a number",
    )  # fmt: skip
    assert main(["wandb", str(tmp_path / "runs")]) == 1
    captured = capsys.readouterr()
    assert "problem: " in captured.err and "wandb sync" in captured.out
    assert "without the page" in captured.out
    place = tmp_path / "runs" / "comparison"
    summary = overview(place)["summary"]
    assert summary["sound"] is False
    assert summary["zero1/status"] == "diverged"
    assert "zero1/samples per second" not in summary
    lines = table(place, "lm loss against iteration_table")
    assert [(row["step"], row["lineVal"]) for row in lines if row["lineKey"] == "zero1"] == [(1, 8.0), (4, 7.0)]
    # The runs have no group: it is called by the directory that holds them.
    assert entries(place, "run")[0]["run_group"] == "runs"


def test_the_key_is_in_no_file(sweep: Path):
    environment = {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline", "WANDB_DATA_DIR": str(sweep / "data")}
    command = [sys.executable, "-m", "t5bench", "wandb", str(sweep), "--comparison", str(sweep / "comparison")]
    result = subprocess.run(
        command, cwd=REPO_ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert KEY not in result.stdout + result.stderr
    files = [path for path in sweep.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_without_a_network_it_is_kept_and_ends_in_time(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(wandb_report, "UPLOAD_SECONDS", 2)
        started = time.monotonic()
        assert main(["wandb", str(sweep), "--comparison", str(sweep / "comparison")]) == 1
    assert time.monotonic() - started < 30
    captured = capsys.readouterr()
    assert "could not be uploaded: no answer within 2 s" in captured.err
    assert "wandb sync" in captured.out
    assert overview(sweep / "comparison")["summary"]["zero1/samples per second"] == 200.0


def test_with_a_key_it_is_uploaded(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """A stub stands in for `wandb sync`, which needs an account."""
    stub, seen = tmp_path / "python", tmp_path / "seen"
    stub.write_text(f'#!/bin/sh\necho "$@" mode=$WANDB_MODE key=$WANDB_API_KEY >"{seen}"\n')
    stub.chmod(0o755)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(wandb_report.sys, "executable", str(stub))
    assert main(["wandb", str(sweep), "--comparison", str(sweep / "comparison")]) == 0
    (directory,) = (sweep / "comparison").glob("wandb/offline-run-*")
    assert seen.read_text() == f"-m wandb sync {directory} mode= key={KEY}\n"
    assert "uploaded" in capsys.readouterr().out
    stub.write_text("#!/bin/sh\necho starting\necho permission denied >&2\nexit 1\n")
    assert main(["wandb", str(sweep), "--comparison", str(sweep / "comparison")]) == 1
    assert "could not be uploaded: permission denied" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "arguments", "says"),
    [
        ({"WANDB_MODE": "disabled"}, [], "WANDB_MODE is 'disabled'"),
        ({}, ["--comparison", "{root}/nowhere"], "there is no directory"),
        ({}, ["--comparison", "{root}/trial/repeat1/ddp/node0.json"], "there is no directory"),
        ({}, ["--baseline", "zero9"], "zero9"),
        ({}, ["--allow", "everything"], "--allow everything"),
    ],
)
def test_wrong_use_is_said_with_a_remedy(
    sweep: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    environment: dict[str, str],
    arguments: list[str],
    says: str,
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = [word.replace("{root}", str(sweep.parent)) for word in arguments]
    assert main(["wandb", str(sweep), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") >= 2


def test_runs_of_two_projects_need_one_to_be_named(tmp_path: Path, capsys: pytest.CaptureFixture):
    make_run(tmp_path / "ddp", settings={"WANDB_PROJECT": "one"})
    make_run(tmp_path / "zero1", "zero1", settings={"WANDB_PROJECT": "two"})
    assert main(["wandb", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "one, two" in error and "--project" in error
    assert main(["wandb", str(tmp_path), "--project", "both"]) == 0
    assert entries(tmp_path / "comparison", "run")[0]["project"] == "both"


def test_a_place_that_cannot_be_written_to(tmp_path: Path, capsys: pytest.CaptureFixture):
    make_run(tmp_path / "ddp")
    (tmp_path / "comparison").write_text("a file")
    assert main(["wandb", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_rows_are_called_differently(tmp_path: Path):
    """Two failed runs of one strategy have one label where a third differs from both in a setting."""
    runs = [
        make_run(tmp_path / "ddp"),
        make_run(tmp_path / "ddp-4", world_size=4),
        make_run(tmp_path / "a", "zero1", status="crashed", reason="r"),
        make_run(tmp_path / "b", "zero1", status="crashed", reason="r"),
        make_run(tmp_path / "c", "zero1", settings={"FLASH_ATTENTION": "off"}),
    ]
    assert sorted(names(build([records.load(run) for run in runs]))) == [
        "ddp (2 processes)", "ddp (4 processes)",
        "zero1 (FLASH_ATTENTION auto)", "zero1 (FLASH_ATTENTION auto) #2", "zero1 (FLASH_ATTENTION off)",
    ]  # fmt: skip


def test_online_is_decided_as_the_launchers_do(tmp_path: Path):
    assert not is_online({"NETRC": str(tmp_path / "none")})
    assert is_online({"WANDB_API_KEY": KEY})
    assert not is_online({"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"})
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    netrc.chmod(0o600)
    assert is_online({"NETRC": str(netrc)})
    assert not is_online({"NETRC": str(netrc), "WANDB_BASE_URL": "https://wandb.example.org"})


@pytest.mark.parametrize(("lengths", "limit"), [((50, 50), CHART_ROWS), ((50, 50), 100), ((70, 3), 20), ((99, 100), 7)])
def test_long_runs_are_thinned_out_to_what_a_chart_can_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int], limit: int
):
    monkeypatch.setattr(wandb_report, "CHART_ROWS", limit)
    runs = [
        make_run(tmp_path / name, name, elapsed_ms=[100.0] * length)
        for name, length in zip(("ddp", "zero1"), lengths, strict=True)
    ]
    comparison = build([records.load(run) for run in runs])
    found = curves(comparison, lambda line: line.samples_per_second)
    assert list(found) == names(comparison) == ["ddp", "zero1"]
    assert sum(len(points) for points in found.values()) <= limit
    if sum(lengths) <= limit - 2:
        assert [len(points) for points in found.values()] == list(lengths)
    assert all(points[0][0] == 1 for points in found.values())


# ---- the configuration of training runs ------------------------------------------------------------------------------

plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=("Cs",)))
values = st.recursive(plain | texts, lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3))


@settings(max_examples=60, deadline=None)
@given(ds_config=values, text=texts)
def test_wandb_reads_the_file_as_it_was_meant(tmp_path_factory: pytest.TempPathFactory, ds_config: Any, text: str):
    """By its own reader; a JSON file would not do, for its 1e-05 is a text there."""
    from wandb.sdk.lib.config_util import dict_from_config_file

    path = tmp_path_factory.mktemp("config") / "node0.wandb.yaml"
    part = {"strategy": text, "settings": {"LR": "1e-05"}, "ds_config": ds_config, "host": "not for W&B"}
    assert wandb_config.write(path, part)
    expected = {key: part[key] for key in ("strategy", "settings", "ds_config") if part[key] is not None}
    assert dict_from_config_file(str(path)) == expected
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def start_run(directory: Path, **environment: str) -> None:
    """A program that knows nothing of the file begins a run."""
    program = "import wandb; wandb.init(project='p', dir='.', config={'lr': 1, 'device': 'x'}).finish()"
    base = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    subprocess.run(
        [sys.executable, "-c", program],
        env=base | {"WANDB_MODE": "offline"} | environment,
        cwd=directory,
        capture_output=True,
        timeout=60,
        check=True,
    )


def test_the_file_reaches_a_run_whose_program_does_not_know_it(tmp_path: Path):
    path = tmp_path / "node0.wandb.yaml"
    wandb_config.write(path, {"strategy": "zero1", "device": "cpu", "ds_config": {"eps": 1e-08}})
    start_run(tmp_path, WANDB_SWEEP_PARAM_PATH=str(path), WANDB_RUN_GROUP="", WANDB_JOB_TYPE="train")
    config = overview(tmp_path)["config"]
    assert config == {"lr": 1, "strategy": "zero1", "device": "cpu", "ds_config": {"eps": 1e-08}}
    (start,) = entries(tmp_path, "run")
    assert start.get("run_group", "") == "" and start["job_type"] == "train"
    assert not start.get("sweep_id")


# ---- real training runs ----------------------------------------------------------------------------------------------


def launch(strategy: str, directory: Path, data: Path, **chosen: str) -> records.Run:
    """A launcher's run of five iterations, as a sweep starts it."""
    base = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "WANDB_"))}
    given: Mapping[str, str] = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHON": sys.executable,
        "MASTER_PORT": str(free_port()),
        "MEGATRON_DATA_DIR": str(data), "OUTPUT_DIR": str(directory), "DEVICE": "cpu", "OMP_NUM_THREADS": "1",
        "MODEL_PRESET": "tiny", "TRAIN_ITERS": "5", "LOG_INTERVAL": "1", "MICRO_BATCH_SIZE": "2", "PRECISION_FLAG": "",
        "WANDB_RUN_GROUP": "trial", "WANDB_MODE": "offline",
    }  # fmt: skip
    result = subprocess.run(
        ["bash", str(REPO_ROOT / "scripts" / f"run_megatron_t5_{strategy}.sh")],
        env=base | given | chosen,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert result.returncode == 0, result.stderr + result.stdout[-4000:]
    return records.load(directory)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "megatron"])
def test_a_training_run_in_wandb_and_tensorboard(
    engine: str, sample_data: Path, tmp_path: Path, request: pytest.FixtureRequest
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    chosen = {"ENGINE": engine, "WANDB_API_KEY": KEY}
    if engine == "megatron":
        chosen["MEGATRON_DIR"] = str(request.getfixturevalue("megatron_dir"))
    place = tmp_path / "a run"
    run = launch("zero1", place, sample_data, **chosen)

    (start,) = entries(place, "run")
    assert (start["run_group"], start["job_type"], start["display_name"]) == ("trial", "train", "megatron-zero1")
    config = overview(place)["config"]
    recorded = run.record | {"device": run.nodes[0]["device"]}
    # The engine says it later.
    recorded["layout"] = {key: value for key, value in run.layout.items() if key != "padded_vocab_size"}
    assert {key: config.get(key) for key in EFFECTIVE} == {key: recorded[key] for key in EFFECTIVE}
    assert set(config["settings"]) >= {"LR", "TRAIN_ITERS", "GRADIENT_REDUCTION", "NPROC_PER_NODE", "WANDB_API_KEY"}
    assert config["settings"]["WANDB_API_KEY"] == "given"
    assert (config["engine"], config["ds_config"]["zero_optimization"]["stage"]) == (engine, 1)
    assert (config["layout"]["world_size"], config["layout"]["dp"]) == (2, 2)
    assert config["train_iters"] == 5, "the engine's own arguments are there as well"

    history = [entry["item"] for entry in entries(place, "history")]
    losses = [item["lm loss"] for item in history if "lm loss" in item]
    assert losses == pytest.approx([line.lm_loss for line in run.iterations], rel=1e-5)
    assert {key for item in history for key in item} >= README_METRICS
    assert any("proc.memory.rssMB" in entry["item"] for entry in entries(place, "stats")), "system metrics are off"

    events = EventAccumulator(str(place / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= README_METRICS
    assert [event.step for event in events.Scalars("lm loss")] == [1, 2, 3, 4, 5]
    assert [event.value for event in events.Scalars("lm loss")] == pytest.approx(losses, rel=1e-5)
    shown = [event.value for event in events.Scalars("samples per second")]
    assert shown == pytest.approx([line.samples_per_second for line in run.iterations], rel=1e-2)
    assert not [path for path in place.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@pytest.mark.slow
def test_without_a_group_and_with_wandb_off(sample_data: Path, tmp_path: Path):
    chosen = {"ENGINE": "native", "NPROC_PER_NODE": "1"}
    launch("ddp", tmp_path / "alone", sample_data, WANDB_RUN_GROUP="", **chosen)
    assert entries(tmp_path / "alone", "run")[0].get("run_group", "") == ""
    launch("ddp", tmp_path / "off", sample_data, WANDB_MODE="disabled", **chosen)
    assert not (tmp_path / "off" / "wandb").exists()
    assert not list((tmp_path / "off").glob("*.wandb.yaml"))


@pytest.mark.slow
def test_a_comparison_of_real_runs(sample_data: Path, tmp_path: Path):
    for strategy in ("ddp", "zero1"):
        run = launch(strategy, tmp_path / "trial" / strategy, sample_data, ENGINE="native", DROPOUT="0")
        assert list(iterations((tmp_path / "trial" / strategy / "node0.log").read_text().splitlines()))
    assert main(["wandb", str(tmp_path / "trial")]) == 0
    place = tmp_path / "trial" / "comparison"
    assert entries(place, "run")[0]["run_group"] == "trial"
    lines = [row for row in table(place, "lm loss against iteration_table") if row["lineKey"] == "zero1"]
    assert [(row["step"], row["lineVal"]) for row in lines] == [
        (line.iteration, line.lm_loss) for line in run.iterations
    ]
    (bar,) = [row for row in table(place, "peak memory MiB by strategy_table") if row["strategy"] == "zero1"]
    assert bar["peak memory MiB"] == max(peak.host_mib for peak in run.peak_memory) > 100
