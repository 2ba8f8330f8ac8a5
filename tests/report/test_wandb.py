"""What reaches W&B and TensorBoard, read back with their own tools: training runs of both engines, and comparisons."""

import json
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import unquote

import pytest
from made_runs import make_run
from real_runs import WATCHED

from t5bench.__main__ import main
from t5bench.compare.comparison import build
from t5bench.record import records
from t5bench.report import wandb_report
from t5bench.report.tables import named_rows
from t5bench.run import recorder

KEY = WATCHED["WANDB_API_KEY"]
README_METRICS = {"lm loss", "samples per second", "elapsed time per iteration", "learning rate", "loss scale"}


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Nothing of the user's W&B, and a data directory that the command may set goes away with the test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))


# ---- reading what W&B wrote ------------------------------------------------------------------------------------------


@cache
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


def test_a_comparison_is_a_separate_run_in_the_runs_group(sweep: Path, capsys: pytest.CaptureFixture):
    place = sweep / "comparison"
    assert main(["compare", str(sweep), "--output", str(place)]) == 0
    assert main(["wandb", str(sweep), "--comparison", str(place)]) == 0
    (directory,) = place.glob("wandb/offline-run-*")
    assert f"wandb sync {directory}" in capsys.readouterr().out
    (start,) = entries(place, "run")
    keys = "project", "run_group", "display_name", "job_type"
    assert [start[key] for key in keys] == ["physics", "trial", "trial", "comparison"]
    shown = overview(place)
    config, summary = shown["config"], shown["summary"]
    assert config["baseline"] == "ddp" and config["not a measurement on GPUs"] == "CPU"
    assert config["settings"]["GLOBAL_BATCH_SIZE"] == "16"
    assert "NPROC_PER_NODE" not in config["settings"], "it differs between the runs"
    assert "zero1 was fastest in this run" in shown["notes"]
    expected = {
        "sound": True,
        "zero1/samples per second": 200.0,  # 16 in 80 ms
        "zero1/throughput relative to the baseline": 1.25,
        "zero1/peak memory MiB": 250,
        "ddp (4 processes)/samples per second": 320.0,
        "hybrid/throughput relative to the baseline": 0.25,  # of the ddp with as many processes
        "hybrid/status": "complete",
    }
    assert {name: summary[name] for name in expected} == expected
    assert "zero1/MFU" not in summary, "a CPU has none"
    rows = {row["name"]: row for row in table(place, "comparison")}
    labels = ["ddp (2 processes)", "zero1", "ddp (4 processes)", "hybrid"]
    assert list(rows) == labels
    assert [rows["hybrid"][field] for field in ("world_size", "ms_per_iteration", "mfu")] == [4, 200.0, None]
    assert logged(place, "page") == (place / "index.html").read_bytes()
    assert not entries(place, "stats") and not entries(place, "output_raw")

    panels = {}
    for change in entries(place, "config"):
        panels |= {k.removeprefix("_wandb.visualize."): v["panel_config"] for k, v in change["update"].items()}
    expected = {f"{title} against iteration": title for title in ("samples per second", "lm loss")}
    expected |= {f"{title} by strategy": title for title in wandb_report.BARS}
    del expected["bytes sent per iteration by strategy"]  # there are no samples
    titles = {key: panel["stringSettings"]["title"].removesuffix(" (CPU)") for key, panel in panels.items()}
    assert titles == expected
    title = "elapsed time per iteration"
    times = {row["name"]: row[title] for row in table(place, f"{title} by strategy_table")}
    assert times["zero1"] == 80.0
    assert not [name for name in times if name.endswith(", predicted")], "they share one CPU machine"
    lines = table(place, "samples per second against iteration_table")
    assert list(dict.fromkeys(row["lineKey"] for row in lines)) == labels
    own = [(row["step"], row["lineVal"]) for row in lines if row["lineKey"] == "zero1"]
    assert own == [(iteration, 200.0) for iteration in range(1, 31)]


def test_the_workspace_of_a_group_is_as_the_page(sweep: Path):
    """As the library would send it; only a real server can show what it looks like."""
    runs = [records.load(path) for path in sorted((sweep / "repeat1").iterdir())]
    made = wandb_report.workspace(build(runs), "me", "physics", "trial")
    section = json.loads(made._to_model().model_dump_json(by_alias=True))["spec"]["section"]
    (shown,) = section["runSets"]
    (only,) = shown["filters"]["filters"]
    assert (only["key"]["name"], only["op"], only["value"]) == ("group", "=", "trial")
    assert [key["name"] for key in shown["grouping"]] == ["strategy.value"]
    colours = {unquote(group).split('"')[-2]: colour for group, colour in section["customRunColors"].items()}
    assert colours == {"ddp": "#1a1c20", "zero1": "#56b4e9", "hybrid": "#cc79a7"}
    said = json.dumps([panel for part in section["panelBankConfig"]["sections"] for panel in part["panels"]])
    assert '"val": "comparison"' in said and all(f'"metrics": ["{title}"]' in said for title in wandb_report.LINES)
    assert all(f'"{title} by strategy_table"' in said for title in wandb_report.BARS)


def test_a_failed_run_is_shown_and_fails_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture):
    make_run(tmp_path / "runs" / "ddp")
    make_run(
        tmp_path / "runs" / "zero1", "zero1", elapsed_ms=[90.0] * 4, losses=[8.0, float("nan"), None, 7.0],
        status="diverged", reason="the loss is not a number",
    )  # fmt: skip
    assert main(["wandb", str(tmp_path / "runs")]) == 1
    captured = capsys.readouterr()
    assert "problem: " in captured.err and "wandb sync" in captured.out and "without the page" in captured.out
    place = tmp_path / "runs" / "comparison"
    summary = overview(place)["summary"]
    assert (summary["sound"], summary["zero1/status"]) == (False, "diverged")
    assert "zero1/samples per second" not in summary
    lines = table(place, "lm loss against iteration_table")
    assert [(row["step"], row["lineVal"]) for row in lines if row["lineKey"] == "zero1"] == [(1, 8.0), (4, 7.0)]
    # The runs have no group: it is called by the directory that holds them.
    assert entries(place, "run")[0]["run_group"] == "runs"


def test_without_a_network_the_run_is_kept(sweep: Path, monkeypatch, capsys: pytest.CaptureFixture):
    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(wandb_report, "UPLOAD_SECONDS", 2)
        assert main(["wandb", str(sweep), "--comparison", str(sweep / "comparison")]) == 1
    captured = capsys.readouterr()
    assert "could not be uploaded: no answer within 2 s" in captured.err
    assert "wandb sync" in captured.out and KEY not in captured.out + captured.err
    assert overview(sweep / "comparison")["summary"]["zero1/samples per second"] == 200.0
    files = [path for path in sweep.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_with_a_key_it_is_uploaded(sweep: Path, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture):
    """A stub stands in for `wandb sync`, which needs an account."""
    stub, seen = tmp_path / "python", tmp_path / "seen"
    stub.write_text(f'#!/bin/sh\necho "$@" mode=$WANDB_MODE key=$WANDB_API_KEY >"{seen}"\n')
    stub.chmod(0o755)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(wandb_report.sys, "executable", str(stub))
    monkeypatch.setattr(wandb_report.wandb, "Api", Mock(side_effect=wandb_report.wandb.Error("there is no server")))
    assert main(["wandb", str(sweep), "--comparison", str(sweep / "comparison")]) == 0
    (directory,) = (sweep / "comparison").glob("wandb/offline-run-*")
    assert seen.read_text() == f"-m wandb sync {directory} mode= key={KEY}\n"
    said = capsys.readouterr().out
    assert "uploaded" in said and "workspace could not be created: there is no server" in said
    stub.write_text("#!/bin/sh\necho starting\necho permission denied >&2\nexit 1\n")
    assert main(["wandb", str(sweep), "--comparison", str(sweep / "comparison")]) == 1
    assert "could not be uploaded: permission denied" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "arguments", "says"),
    [
        ("disabled", ["trial"], "WANDB_MODE is 'disabled'"),
        ("offline", ["trial", "--comparison", "nowhere"], "there is no directory nowhere"),
        ("offline", ["trial", "--baseline", "zero9"], "zero9"),
        ("offline", ["trial", "other"], "W&B projects: biology, physics"),
        ("offline", ["other"], "cannot be written"),
    ],
)
def test_wrong_use_gets_a_remedy(sweep: Path, monkeypatch, capsys, mode: str, arguments: list, says: str):
    monkeypatch.chdir(sweep.parent)
    make_run(Path("other/ddp"), settings={"WANDB_PROJECT": "biology"})
    Path("other/comparison").write_text("a file")
    monkeypatch.setenv("WANDB_MODE", mode)
    assert main(["wandb", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") >= 2


def test_rows_have_different_names(tmp_path: Path):
    """Two failed runs of one strategy have one label where a third differs from both in a setting."""
    failed = [make_run(tmp_path / name, "zero1", status="crashed", reason="r") for name in "ab"]
    runs = [make_run(tmp_path / "ddp"), make_run(tmp_path / "ddp-4", world_size=4), *failed]
    runs.append(make_run(tmp_path / "c", "zero1", settings={"FLASH_ATTENTION": "off"}))
    assert sorted(name for name, _ in named_rows(build([records.load(run) for run in runs]))) == [
        "ddp (2 processes)", "ddp (4 processes)",
        "zero1 (FLASH_ATTENTION auto)", "zero1 (FLASH_ATTENTION auto) #2", "zero1 (FLASH_ATTENTION off)",
    ]  # fmt: skip


# ---- the configuration of training runs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "odd", [None, True, -(2**63), 1e-05, 0.1, "1e-05", "a: 'b'\n#", "\x7f\u2028", [1, "no"], {"": [None]}]
)
def test_wandb_reads_the_file_as_it_was_meant(tmp_path: Path, odd: Any):
    """By its own reader; a JSON file would not do, for its 1e-05 is a text there."""
    from wandb.sdk.lib.config_util import dict_from_config_file

    path, written = tmp_path / "node0.wandb.yaml", {"strategy": str(odd), "settings": {"LR": "1e-05"}, "ds_config": odd}
    recorder.write_wandb_config(path, written)
    assert dict_from_config_file(str(path)) == {k: v for k, v in written.items() if v is not None}
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


# ---- real training runs ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "megatron"])
def test_a_training_run_in_wandb_and_tensorboard(engine: str, request: pytest.FixtureRequest):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    place = request.getfixturevalue(f"{engine}_runs") / "zero3"
    run = records.load(place)

    (start,) = entries(place, "run")
    assert (start["run_group"], start["job_type"], start["display_name"]) == ("trial", "train", "megatron-zero3")
    assert not start.get("sweep_id")
    config = overview(place)["config"]
    recorded = recorder.wandb_config(run.nodes[0] | run.record)
    assert {key: config.get(key) for key in recorded} == recorded
    assert config["settings"]["WANDB_API_KEY"] == "given"
    assert (config["strategy"], config["engine"], config["layout"]["dp"]) == ("zero3", engine, 2)
    assert config["ds_config"]["zero_optimization"]["stage"] == 3
    assert config["train_iters"] == 20, "the engine's own arguments are there as well"

    history = [entry["item"] for entry in entries(place, "history")]
    losses = [item["lm loss"] for item in history if "lm loss" in item]
    assert losses == pytest.approx([line.lm_loss for line in run.iterations], rel=1e-5)
    assert {key for item in history for key in item} >= README_METRICS
    assert any("proc.memory.rssMB" in entry["item"] for entry in entries(place, "stats")), "system metrics are off"

    events = EventAccumulator(str(place / "tensorboard"))
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    assert scalars >= README_METRICS
    if engine == "native":
        in_wandb = {key for item in history for key in item} | overview(place)["summary"].keys()
        assert scalars >= {key for key in in_wandb - {"Samples", "Tokens"} if not key.startswith("_")}
    assert [event.step for event in events.Scalars("lm loss")] == list(range(1, 21))
    assert [event.value for event in events.Scalars("lm loss")] == pytest.approx(losses, rel=1e-5)
    shown = [event.value for event in events.Scalars("samples per second")]
    assert shown == pytest.approx([line.samples_per_second for line in run.iterations], rel=1e-2)
    assert not [path for path in place.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
