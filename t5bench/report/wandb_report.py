"""``python -m t5bench wandb``: a comparison as a run of its own in the W&B project and group of the runs it compares.

It is written offline first and uploaded from there, so that neither a missing key nor a dead network can hold it up or
lose it.
"""

import argparse
import csv
import io
import math
import netrc
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from t5bench.compare.comparable import setting
from t5bench.compare.comparison import Comparison, Row
from t5bench.record.log import Iteration
from t5bench.report import tables
from t5bench.report.command import UsageError, add_run_arguments, compare, default_output, usage_error

if TYPE_CHECKING:
    import wandb

JOB_TYPE = "comparison"
PAGE = "index.html"
UPLOAD_SECONDS = 60
# W&B draws at most 10,000 rows of a custom chart's table.
CHART_ROWS = 10_000
MODES = ("online", "offline")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--project", metavar="P", help="the W&B project (default: that of the runs)")
    parser.add_argument(
        "--comparison",
        type=Path,
        metavar="DIR",
        help="where `compare` left its page, and where the W&B files go (default: 'comparison' beside the runs)",
    )


def names(comparison: Comparison) -> list[str]:
    """What to call each row, each differently: its label, the number of processes where it needs that, or a number."""
    found: list[str] = []
    for row in comparison.rows:
        places = {other.run.world_size for other in comparison.rows if other.label == row.label}
        name = f"{row.label} ({row.run.world_size} processes)" if len(places) > 1 else row.label
        earlier = sum(other.split(" #")[0] == name for other in found)
        found.append(f"{name} #{earlier + 1}" if earlier else name)
    return found


# ---- where it goes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """project and group in W&B, the directory of the local files, and whether it is uploaded."""

    project: str
    group: str
    directory: Path
    online: bool


def place_of(comparison: Comparison, places: Sequence[str], project: str | None, directory: Path | None) -> Place:
    """Where the runs are. Raises UsageError."""
    found = _values(comparison, "WANDB_PROJECT")
    if not project and len(found) != 1:
        raise UsageError(
            f"the runs name {len(found)} W&B projects: {', '.join(found) or 'none'}\nChoose one: --project P"
        )
    if directory is not None and not directory.is_dir():
        remedy = f"Make it: python -m t5bench compare --output {shlex.quote(str(directory))}"
        raise UsageError(f"there is no directory {directory}\n{remedy}")
    directory = directory or default_output(places, comparison.runs)
    groups = _values(comparison, "WANDB_RUN_GROUP")
    # As the sweep calls its group: by the directory that holds the runs and the comparison.
    group = groups[0] if len(groups) == 1 else directory.resolve().parent.name
    return Place(project or found[0], group, directory, is_online(os.environ))


def _values(comparison: Comparison, name: str) -> list[str]:
    return sorted({value for run in comparison.runs if (value := setting(run, name))})


def is_online(environment: Mapping[str, str]) -> bool:
    """As the launchers decide it: WANDB_MODE, else whether there is a key. Raises UsageError."""
    mode = environment.get("WANDB_MODE") or ("online" if _has_key(environment) else "offline")
    if mode not in MODES:
        raise UsageError(f"WANDB_MODE is '{mode}'\nTo put a comparison into W&B it may be one of: {' '.join(MODES)}")
    return mode == "online"


def _has_key(environment: Mapping[str, str]) -> bool:
    if environment.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(environment.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


# ---- what it holds -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A number of a row, under the name that the runs themselves use where they log it."""

    name: str
    of: Callable[[Row], float | None]


FIGURES = (
    Figure("samples per second", lambda row: row.samples_per_second and row.samples_per_second.median),
    Figure("elapsed time per iteration", lambda row: row.milliseconds and row.milliseconds.median),
    Figure("throughput relative to the baseline", lambda row: row.ratio and row.ratio.median),
    Figure("peak memory MiB", lambda row: max(row.peak_memory.values(), default=None)),
    Figure("TFLOPs", lambda row: row.tflops),
    Figure("MFU", lambda row: row.mfu),
    Figure("lm loss", lambda row: row.final_loss),
)
SAMPLES_PER_SECOND, PEAK_MEMORY = FIGURES[0], FIGURES[3]


def summary(comparison: Comparison) -> dict[str, Any]:
    """`<strategy>/<figure>` for every figure that was measured, each row's status, and the answer."""
    values: dict[str, Any] = {"sound": comparison.sound}
    for name, row in zip(names(comparison), comparison.rows, strict=True):
        values[f"{name}/status"] = row.run.status
        values |= {f"{name}/{figure.name}": value for figure in FIGURES if (value := figure.of(row)) is not None}
    return values


def configuration(comparison: Comparison) -> dict[str, Any]:
    """What is the same in all runs, and what is said about them."""
    first, *others = (dict(run.record["settings"]) for run in comparison.runs)
    return {
        "baseline": comparison.baseline,
        "caption": tables.caption(comparison),
        "not a measurement on GPUs": comparison.not_of_gpus,
        "verdicts": list(comparison.verdicts),
        "problems": list(comparison.problems),
        "notes": list(comparison.notes),
        "runs": [str(run.directory) for run in comparison.runs],
        "settings": {k: v for k, v in first.items() if all(other.get(k) == v for other in others)},
    }


def table_columns(comparison: Comparison) -> tuple[list[str], list[list[Any]]]:
    """The columns and rows of comparison.csv, numbers as numbers, None for what was not measured."""
    header, *lines = csv.reader(io.StringIO(tables.as_csv(comparison)))
    columns = [_typed(column) for column in zip(*lines, strict=True)]
    return header, [list(row) for row in zip(*columns, strict=True)]


def _typed(column: Sequence[str]) -> list[Any]:
    try:
        return [float(text) if text else None for text in column]
    except ValueError:
        return [text or None for text in column]


def curves(comparison: Comparison, of: Callable[[Iteration], float | None]) -> dict[str, list[tuple[int, float]]]:
    """(iteration, value) of the first of each row's repeats; of long runs every second point, or every third, ..."""
    # Each row may have one point more than its share.
    most = max(1, CHART_ROWS - len(comparison.rows))
    stride = max(1, math.ceil(sum(len(row.run.iterations) for row in comparison.rows) / most))
    found = {}
    for name, row in zip(names(comparison), comparison.rows, strict=True):
        points = [(line.iteration, value) for line in row.run.iterations[::stride] if _is_number(value := of(line))]
        if points:
            found[name] = points
    return found


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def charts(comparison: Comparison) -> dict[str, Any]:
    """Ready charts by the key that they are logged under; one without anything to draw is left out."""
    import wandb

    remark = f" ({comparison.not_of_gpus})" if comparison.not_of_gpus else ""
    drawn: dict[str, Any] = {}
    lines: dict[str, Callable[[Iteration], float | None]] = {
        "samples per second": lambda line: line.samples_per_second,
        "lm loss": lambda line: line.lm_loss,
    }
    for title, of in lines.items():
        if series := curves(comparison, of):
            drawn[f"{title} against iteration"] = wandb.plot.line_series(
                xs=[[x for x, _ in points] for points in series.values()],
                ys=[[y for _, y in points] for points in series.values()],
                keys=list(series),
                title=title + remark,
                xname="iteration",
            )
    for figure in (SAMPLES_PER_SECOND, PEAK_MEMORY):
        bars = [
            [name, value]
            for name, row in zip(names(comparison), comparison.rows, strict=True)
            if _is_number(value := figure.of(row))
        ]
        if bars:
            table = wandb.Table(columns=["strategy", figure.name], data=bars)
            drawn[f"{figure.name} by strategy"] = wandb.plot.bar(table, "strategy", figure.name, figure.name + remark)
    return drawn


# ---- writing and uploading -----------------------------------------------------------------------------------------


def write(comparison: Comparison, place: Place) -> Path:
    """Writes the run offline; its directory. Raises OSError, and ValueError or wandb.Error where W&B cannot."""
    import wandb

    place.directory.mkdir(parents=True, exist_ok=True)
    if not os.access(place.directory, os.W_OK):  # W&B would put it into the system's temporary directory
        raise PermissionError(f"no permission to write in {place.directory}")
    page = place.directory / PAGE
    with wandb.init(
        project=place.project,
        group=place.group,
        name=place.group,
        job_type=JOB_TYPE,
        dir=place.directory,
        notes="\n".join(comparison.verdicts),
        config=configuration(comparison),
        mode="offline",
        settings=_settings(),
    ) as run:
        columns, rows = table_columns(comparison)
        logged = {"comparison": wandb.Table(columns=columns, data=rows)} | charts(comparison)
        if page.is_file():
            logged["page"] = wandb.Html(page, inject=False)
        run.log(logged)
        run.summary.update(summary(comparison))
        return Path(run.settings.sync_dir)


def _settings() -> "wandb.Settings":
    """Without what belongs to training runs alone: system metrics, console output, code, the git remote."""
    import wandb

    return wandb.Settings(
        silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True, x_save_requirements=False
    )


def upload(directory: Path) -> str:
    """Uploads a run that was written offline; why it could not be, or "" when it is there."""
    sync = subprocess.Popen(
        [sys.executable, "-m", "wandb", "sync", str(directory)],
        # With the run's own mode it would refuse.
        env={key: value for key, value in os.environ.items() if key != "WANDB_MODE"},
        stdin=subprocess.DEVNULL,  # it could ask for a key
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # with the service that it starts it is one group to end
    )
    try:
        output, _ = sync.communicate(timeout=UPLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(sync.pid, signal.SIGKILL)
        sync.communicate()
        return f"no answer within {UPLOAD_SECONDS} s"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return "" if sync.returncode == 0 else (lines or [f"wandb sync ended with exit status {sync.returncode}"])[-1]


def run(arguments: argparse.Namespace) -> int:
    try:
        import wandb
    except ImportError as error:
        return usage_error(UsageError(f"W&B is not installed: {error}\nRun: pip install -r requirements.txt"))
    try:
        comparison = compare(arguments)
        place = place_of(comparison, arguments.runs, arguments.project, arguments.comparison)
        # Until it is uploaded W&B keeps the tables' content in the user's home, which another machine may lack.
        os.environ.setdefault("WANDB_DATA_DIR", str(place.directory / "wandb"))
    except UsageError as error:
        return usage_error(error)
    try:
        directory = write(comparison, place)
    except (OSError, ValueError, wandb.Error) as error:  # ValueError: a WANDB_ variable that W&B does not take
        return usage_error(
            UsageError(f"the comparison cannot be written: {error}\nName another place: --comparison DIR")
        )
    print(f"W&B: run '{place.group}' ({JOB_TYPE}), group '{place.group}', project '{place.project}': {directory}")
    if not (place.directory / PAGE).is_file():
        print(f"without the page, for there is no {place.directory / PAGE}: python -m t5bench compare makes it")
    for problem in comparison.problems:
        print(f"problem: {problem}", file=sys.stderr)
    uploaded = place.online and not (failure := upload(directory))
    if place.online and not uploaded:
        print(f"warning: it could not be uploaded: {failure}", file=sys.stderr)
    print("uploaded" if uploaded else f"upload it with: wandb sync {shlex.quote(str(directory))}")
    return 0 if comparison.sound and uploaded == place.online else 1
