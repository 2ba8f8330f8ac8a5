"""The results of the steps: README.md for people, results.json with every figure, and the packed records."""

import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tabulate import tabulate

from t5bench.profile import parts as profile

PASSED, FAILED, OUT_OF_TIME, NOT_RUN = "passed", "failed", "out of time", "not run"
# The text files of the steps. TensorBoard's files only repeat them.
ARCHIVED = (".json", ".jsonl", ".log", ".out", ".sh", ".html")


def module(name: str, *arguments: object) -> list[str]:
    """The command that runs a module of this package."""
    return [sys.executable, "-m", name, *map(str, arguments)]


def name_of(gpus: Sequence[str]) -> str:
    """A directory's name for the machine's devices, for example nvidia-h100-80gb-hbm3 or 2x-nvidia-h200."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpus[0].lower()).strip("-")
    return f"{len(gpus)}x-{slug}" if len(gpus) > 1 else slug


def gather(work: Path, outcomes: Mapping[str, Mapping[str, Any]], **asked: Any) -> dict[str, Any]:
    """All results in the steps' files. asked: whether it is a ``rehearsal``, and the ``batch``."""
    points = [point(row) for row in rows_of(compare(work / "runs" / "throughput", "engine", "MICRO_BATCH_SIZE"))]
    devices = sorted(work.glob("device*.json"), key=lambda path: path.stem)
    plain = [line for path in work.glob("baseline-*.jsonl") for line in path.read_text().splitlines()]
    return asked | {
        "made": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "devices": {path.stem: json.loads(path.read_text()) for path in devices},
        "large": compare(work / "runs" / "large", "engine"),
        "throughput": [*points, *map(json.loads, plain)],
        "parity": {path.stem: path.read_text() for path in sorted(work.glob("logs/parity-*.out"))},
        "steps": dict(outcomes),
    }


def compare(runs: Path, *allowed: str) -> dict[str, Any]:
    """``t5bench compare`` over the runs in a directory: its comparison.json, and comparison.md as ``markdown``."""
    output = runs.with_name(f"{runs.name}-comparison")
    file = output / "comparison.json"
    file.unlink(missing_ok=True)  # of an earlier call
    options = [word for name in allowed for word in ("--allow", name)]
    command = module("t5bench", "compare", runs, "--output", output, *options)
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    if not file.exists():
        return {"groups": [], "markdown": said}
    return json.loads(file.read_text()) | {"markdown": (output / "comparison.md").read_text("utf-8")}


def rows_of(comparison: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for group in comparison["groups"] for row in group["rows"]]


def point(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the comparison, with what its profile says of it."""
    run = row["runs"][0]
    file, micro_batch = Path(run["directory"], "profile.json"), int(run["settings"]["MICRO_BATCH_SIZE"])
    limits = profile.limits(profile.read_profile(file).ranks) if file.exists() else ""
    return {**row, "engine": f"{row['engine']} engine", "micro_batch": micro_batch, "limits": limits}


def write(found: Mapping[str, Any], work: Path, directory: Path) -> None:
    """Writes the files, including the records in ``work``; earlier ones are replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(found, indent=2) + "\n")
    (directory / "README.md").write_text("\n\n".join(filter(None, summary(found))) + "\n", "utf-8")
    with tarfile.open(directory / "records.tar.xz", "w:xz") as tar:
        for path in sorted(work.rglob("*")):
            if path.suffix in ARCHIVED and path.is_file() and directory not in path.parents:
                tar.add(path, arcname=str("records" / path.relative_to(work)))


def verdict(found: Mapping[str, Any]) -> str:
    """One sentence for the terminal and the top of the summary."""
    others = [f"{name}: {step['result']}" for name, step in found["steps"].items() if step["result"] != PASSED]
    count = len(found["steps"])
    return "; ".join([f"{count - len(others)} of {count} steps passed", *others]) + "."


def table(header: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    return tabulate(list(rows), header, tablefmt="github", floatfmt=".4g", missingval="-")


def summary(found: Mapping[str, Any]) -> Iterable[str]:
    """The paragraphs of README.md."""
    device = found["devices"]["device"]
    yield "# A rehearsal on the CPU" if found["rehearsal"] else f"# T5-Large on {'; '.join(device['facts']['GPUs'])}"
    yield f"Made by `bash scripts/gpu_acceptance.sh`, {found['made']}. {verdict(found)}"
    if found["rehearsal"]:
        yield "**At tiny size: this shows that the steps work; the figures mean nothing.**"
    yield table(["what", "found"], device["facts"].items())
    yield "## The device at its best"
    rates = [measured["rates"] for measured in found["devices"].values()]
    yield table(["", *found["devices"]], [[name, *(of.get(name) for of in rates)] for name in rates[0]])
    yield "## Every strategy"
    yield found["large"]["markdown"].removeprefix("# Comparison").strip().replace("\n#", "\n##")
    if found["throughput"]:
        yield "## Throughput of one device"
        yield f"{found['batch']} samples an iteration in every row, including AdamW's update; bf16, with dropout."
        header = ["what", "micro-batch", "ms/iteration", "95 %", "samples/s", "TFLOP/s", "MFU", "of the rate above",
                  "GPU MiB", "what limits it"]  # fmt: skip
        yield table(header, throughput(found["throughput"], rates[0]["matmul_tflops"]))
    if found["parity"]:
        yield "## Do they train the same model?"
        yield ("`scripts/check_parity.sh` on this device, at tiny size. A strategy with more processes than devices "
               "shares one, over gloo.")  # fmt: skip
        yield from (f"```\n{text.strip()}\n```" for text in found["parity"].values())
    yield "## Steps"
    yield table(["step", "result", "seconds"], [(n, s["result"], s["seconds"]) for n, s in found["steps"].items()])
    yield "The records, outputs and profiles of all runs are in `records.tar.xz`, all figures in `results.json`."


def throughput(points: Iterable[Mapping[str, Any]], rate: float) -> Iterable[list[Any]]:
    """The engines and the plain loop, one micro-batch size after another; rate: TFLOP/s of a large product."""
    for row in sorted(points, key=lambda row: -row["micro_batch"]):
        start, time = [row["engine"], row["micro_batch"]], row.get("milliseconds_per_iteration")
        if not time:
            yield [*start, row["status"], *[None] * 6, row["reason"]]
            continue
        tflops, memory = row["tflops_per_gpu"], max(row["peak_memory_mib"].values(), default=None)
        interval = "" if time["low"] is None else f"{time['low']:.1f} to {time['high']:.1f}"
        yield [*start, f"{time['median']:.1f}", interval, row["samples_per_second"]["median"], tflops, row["mfu"],
               tflops and tflops / rate, memory, row["limits"]]  # fmt: skip
