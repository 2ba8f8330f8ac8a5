"""``python -m t5bench wandb``: logs a comparison as a separate run in the W&B project and group of the compared runs.

It is written offline first and uploaded from there, so that neither a missing key nor a dead network can delay or lose
it.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import wandb

from t5bench import Problem
from t5bench.compare.comparable import differing
from t5bench.compare.comparison import Comparison
from t5bench.record.records import Run
from t5bench.record.wandb import mode
from t5bench.report import tables
from t5bench.report.command import PAGE, add_run_arguments, compare, default_output
from t5bench.report.drawing import styles
from t5bench.report.figures import INK, Points, series, thin

JOB_TYPE = "comparison"
UPLOAD_SECONDS = 60
CHART_ROWS = 10_000  # W&B draws no more of a custom chart's table
# By the names that training runs have for them: a field of Iteration.
LINES = {"samples per second": "samples_per_second", "lm loss": "lm_loss"}
INK_THERE = "#1a1c20"
# Of the table: what was measured, and what the cost model says.
BARS = {
    "samples per second": ("samples_per_second",),
    "peak memory MiB": ("peak_memory_mib", "memory_mib_predicted"),
    "bytes sent per iteration": ("bytes_sent_per_iteration", "bytes_predicted"),
    "elapsed time per iteration": ("ms_per_iteration", "ms_predicted"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--project", metavar="P", help="the W&B project (default: that of the runs)")
    place = "directory of `compare`'s page, and for the W&B files (default: 'comparison' next to the runs)"
    parser.add_argument("--comparison", type=Path, metavar="DIR", help=place)


def summary(comparison: Comparison) -> dict[str, Any]:
    """`<strategy>/<metric>` for what was measured, each row's status, and the answer."""
    values: dict[str, Any] = {"sound": comparison.sound}
    for name, row in tables.named_rows(comparison):
        values[f"{name}/status"] = row.run.status
        for column in tables.all_columns(comparison):
            if column.metric and (value := next(iter(column.parts(row).values()))) is not None:
                values[f"{name}/{column.metric}"] = value
    return values


def configuration(comparison: Comparison) -> dict[str, Any]:
    """What is the same in all runs, and what is said about them."""

    def settings(run: Run) -> dict[str, str]:
        return {name: setting.value for name, setting in run.plan.settings.items()}

    different = differing(settings, comparison.runs)
    return {name: value for name, value in comparison.to_json().items() if name != "groups"} | {
        "caption": tables.caption(comparison),
        "not a measurement on GPUs": comparison.not_of_gpus,
        "runs": [str(run.directory) for run in comparison.runs],
        "settings": {name: v for name, v in settings(comparison.runs[0]).items() if name not in different},
    }


def curves(comparison: Comparison, name: str) -> dict[str, Points]:
    """By row the numbers of the first of its repeats, as many as a chart has room for."""
    rows = tables.named_rows(comparison)
    most = CHART_ROWS // len(rows) - 1
    return {title: thin(points, most) for title, row in rows if (points := series(row.run, name))}


def charts(comparison: Comparison, table: wandb.Table) -> dict[str, Any]:
    """Ready charts by the key that they are logged under; one without anything to draw is left out."""
    remark = f" ({comparison.not_of_gpus})" if comparison.not_of_gpus else ""
    drawn: dict[str, Any] = {}
    for title, name in LINES.items():
        if lines := curves(comparison, name):
            xs, ys = ([[point[axis] for point in points] for points in lines.values()] for axis in (0, 1))
            chart = wandb.plot.line_series(xs, ys, list(lines), title + remark, "iteration")
            drawn[f"{title} against iteration"] = chart
    for title, fields in BARS.items():
        bars = wandb.Table(columns=["name", title])
        for name, measured, *predicted in zip(*map(table.get_column, ("name", *fields)), strict=True):
            if measured is not None:
                bars.add_data(name, measured)
            if predicted and None not in (measured, *predicted):
                bars.add_data(f"{name}, predicted", *predicted)
        if bars.data:
            drawn[f"{title} by strategy"] = wandb.plot.bar(bars, "name", title, title + remark)
    return drawn


def write(comparison: Comparison, project: str, group: str, directory: Path) -> Path:
    """Writes the run offline, in the directory; its own directory there. Raises OSError, ValueError, wandb.Error."""
    directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):  # W&B would put it into the system's temporary directory
        raise PermissionError(f"no permission to write in {directory}")
    # Until it is uploaded W&B keeps the tables' content in the user's home, which another machine may lack.
    os.environ.setdefault("WANDB_DATA_DIR", str(directory / "wandb"))
    # Without what belongs to training runs alone: system metrics, console output, code, the git remote.
    settings = wandb.Settings(
        silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True, x_save_requirements=False
    )
    notes, config = "\n".join(comparison.verdicts), configuration(comparison)
    names = {"project": project, "group": group, "name": group, "job_type": JOB_TYPE}
    with wandb.init(**names, dir=directory, notes=notes, config=config, mode="offline", settings=settings) as run:
        rows = tables.data(comparison)
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        page = {"page": wandb.Html(directory / PAGE, inject=False)} if (directory / PAGE).is_file() else {}
        run.log({"comparison": table} | charts(comparison, table) | page)
        run.summary.update(summary(comparison))
        return Path(run.settings.sync_dir)


def workspace(comparison: Comparison, entity: str, project: str, group: str) -> Any:
    """A view of the project on the runs of this group: the comparison's table and charts, and the runs' curves, by
    strategy in the colours and the order of the page."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    def bars(title: str) -> wr.CustomChart:
        table = {"summaryTable": {"tableKey": f"{title} by strategy_table"}}
        return wr.CustomChart(table, "wandb/bar/v0", {"label": "name", "value": title}, {"title": title})

    shown = [wr.WeavePanelSummaryTable(table_name="comparison"), *map(bars, BARS)]
    curves = [wr.LinePlot(title=title, x="Step", y=[title]) for title in LINES]
    colours = {name: INK_THERE if colour == INK else colour for name, (colour, _) in styles(comparison).items()}
    runs = ws.RunsetSettings(
        filters=[ws.Metric("Group") == group],
        groupby=[ws.Config("strategy")],
        order=[ws.Ordering(ws.Config("settings.MASTER_PORT"))],
        group_colors=colours,
    )
    sections = [ws.Section("Comparison", shown, is_open=True), ws.Section("Curves", curves, is_open=True)]
    return ws.Workspace(entity, project, group, sections, runset_settings=runs)


def save_workspace(comparison: Comparison, project: str, group: str) -> str:
    """Makes that view; what is to be said of it."""
    try:
        entity = os.environ.get("WANDB_ENTITY") or wandb.Api().default_entity
        return f"workspace: {workspace(comparison, entity, project, group).save().url}"
    except ImportError:
        return "no workspace was created for the group: that needs pip install wandb-workspaces"
    except Exception as error:  # wandb and its transports raise without a common base; the comparison is there
        return f"the group's workspace could not be created: {error}"


def upload(directory: Path) -> str:
    """Uploads a run that was written offline; why it could not be, or "" when it is there."""
    # It ends the service too that W&B starts: they are one process group.
    limit = ["timeout", "--signal=KILL", str(UPLOAD_SECONDS)]
    command = [*limit, sys.executable, "-m", "wandb", "sync", str(directory)]
    environment = {key: value for key, value in os.environ.items() if key != "WANDB_MODE"}  # in which it would refuse
    to = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}  # it could ask for a key
    sync = subprocess.run(command, env=environment, text=True, check=False, **to)
    if sync.returncode == -signal.SIGKILL:
        return f"no answer within {UPLOAD_SECONDS} s"
    last = sync.stdout.strip().rpartition("\n")[2] or f"wandb sync ended with exit status {sync.returncode}"
    return last if sync.returncode else ""


def place_of(comparison: Comparison, arguments: argparse.Namespace) -> tuple[str, str, Path]:
    """W&B's project and group, which are those of the runs, and the directory of the local files. Raises Problem."""
    projects, groups = (
        sorted({value for run in comparison.runs if (value := run.plan.value(name))})
        for name in ("WANDB_PROJECT", "WANDB_RUN_GROUP")
    )
    if not arguments.project and len(projects) != 1:
        raise Problem(f"the runs name the W&B projects: {', '.join(projects) or 'none'}", "Choose one: --project P")
    place = arguments.comparison or default_output(arguments.runs, comparison.runs)
    if arguments.comparison and not place.is_dir():
        remedy = f"Make it: python -m t5bench compare --output {shlex.quote(str(place))}"
        raise Problem(f"there is no directory {place}", remedy)
    # As the sweep calls its group: by the directory that holds the runs and the comparison.
    group = groups[0] if len(groups) == 1 else place.resolve().parent.name
    return arguments.project or projects[0], group, place


def run(arguments: argparse.Namespace) -> int:
    if (chosen := mode(os.environ)) == "disabled":
        raise Problem("WANDB_MODE is 'disabled'", "Unset it, or set it to online or offline, to log a comparison")
    comparison = compare(arguments)
    project, group, place = place_of(comparison, arguments)
    try:
        directory = write(comparison, project, group, place)
    except (OSError, ValueError, wandb.Error) as error:  # ValueError: a WANDB_ variable that W&B does not take
        remedy = "Name another place: --comparison DIR"
        raise Problem(f"the comparison cannot be written: {error}", remedy) from error
    print(f"W&B: run '{group}' ({JOB_TYPE}), group '{group}', project '{project}': {directory}")
    if not (place / PAGE).is_file():
        print(f"logged without the page, because there is no {place / PAGE}: python -m t5bench compare creates it")
    for problem in comparison.problems:
        print(f"problem: {problem}", file=sys.stderr)
    failure = upload(directory) if chosen == "online" else ""
    if failure:
        print(f"warning: it could not be uploaded: {failure}", file=sys.stderr)
    if failure or chosen == "offline":
        print(f"upload it with: wandb sync {shlex.quote(str(directory))}")
    else:
        print("uploaded", save_workspace(comparison, project, group), sep="\n")
    return 0 if comparison.sound and not failure else 1
