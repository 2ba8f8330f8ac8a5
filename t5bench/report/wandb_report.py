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
from typing import Any, NamedTuple

import wandb

from t5bench import Problem
from t5bench.compare.comparable import differing
from t5bench.compare.comparison import Comparison
from t5bench.record.run import Run
from t5bench.record.wandb import mode
from t5bench.report import tables
from t5bench.report.compare import PAGE, compare, default_output
from t5bench.report.drawing import styles
from t5bench.report.figures import INK, Points, series, thin

JOB_TYPE = "comparison"
UPLOAD_SECONDS = 60
CHART_ROWS = 10_000  # W&B draws no more of a custom chart's table
# By the names that training runs have for them: a field of Iteration.
LINES = {"samples per second": "samples_per_second", "lm loss": "lm_loss"}
INK_THERE = "#1a1c20"


class Bars(NamedTuple):
    """A chart's columns of the comparison's table."""

    measured: str
    predicted: str = ""
    """What the cost model says, where it says something."""

    def lengths(self, title: str, table: wandb.Table) -> wandb.Table:
        """A bar for each row with a measurement, and below it one for its prediction."""
        names = table.get_column("name")
        all_measured = table.get_column(self.measured)
        no_predictions = [None] * len(names)
        all_predicted = table.get_column(self.predicted) if self.predicted else no_predictions
        bars = wandb.Table(columns=["name", title])
        for name, measured, predicted in zip(names, all_measured, all_predicted, strict=True):
            if measured is None:
                continue
            bars.add_data(name, measured)
            if predicted is not None:
                bars.add_data(f"{name}, predicted", predicted)
        return bars


BARS = {
    "samples per second": Bars("samples_per_second"),
    "peak memory MiB": Bars("peak_memory_mib", "memory_mib_predicted"),
    "bytes sent per iteration": Bars("bytes_sent_per_iteration", "bytes_predicted"),
    "elapsed time per iteration": Bars("ms_per_iteration", "ms_predicted"),
}


def summary(comparison: Comparison) -> dict[str, Any]:
    """`<strategy>/<metric>` for what was measured, each row's status, and the answer."""
    values: dict[str, Any] = {"sound": comparison.sound}
    with_metric = [column for column in tables.all_columns(comparison) if column.metric]
    for name, row in tables.named_rows(comparison):
        values[f"{name}/status"] = row.run.status
        for column in with_metric:
            # Of an estimate the median, without its interval.
            value, *_ = column.parts(row).values()
            if value is not None:
                values[f"{name}/{column.metric}"] = value
    return values


def configuration(comparison: Comparison) -> dict[str, Any]:
    """What is the same in all runs, and what is said about them."""

    def settings(run: Run) -> dict[str, str]:
        return {name: setting.value for name, setting in run.plan.settings.items()}

    different = differing(settings, comparison.runs)
    settings_of_first = settings(comparison.runs[0])
    content = comparison.to_json()
    del content["groups"]
    return content | {
        "caption": tables.caption(comparison),
        "not a measurement on GPUs": comparison.not_of_gpus,
        "runs": [str(run.directory) for run in comparison.runs],
        "settings": {name: value for name, value in settings_of_first.items() if name not in different},
    }


def curves(comparison: Comparison, name: str) -> dict[str, Points]:
    """By row the numbers of the first of its repeats, as many as a chart has room for."""
    rows = tables.named_rows(comparison)
    most = CHART_ROWS // len(rows) - 1
    points_of = {title: series(row.run, name) for title, row in rows}
    return {title: thin(points, most) for title, points in points_of.items() if points}


def charts(comparison: Comparison, table: wandb.Table) -> dict[str, Any]:
    """Ready charts by the key that they are logged under; one without anything to draw is left out."""
    remark = f" ({comparison.not_of_gpus})" if comparison.not_of_gpus else ""
    charts: dict[str, Any] = {}
    for title, name in LINES.items():
        lines = curves(comparison, name)
        if lines:
            iterations: list[list[float]] = []
            values: list[list[float]] = []
            for points in lines.values():
                iterations.append([x for x, _ in points])
                values.append([y for _, y in points])
            charts[f"{title} against iteration"] = wandb.plot.line_series(
                iterations, values, list(lines), title + remark, "iteration"
            )
    for title, bars in BARS.items():
        lengths = bars.lengths(title, table)
        if lengths.data:
            chart = wandb.plot.bar(lengths, "name", title, title + remark)
            charts[f"{title} by strategy"] = chart
    return charts


def write(comparison: Comparison, project: str, group: str, directory: Path) -> Path:
    """Writes the run offline, in the directory; its own directory there. Raises OSError, ValueError, wandb.Error."""
    directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):  # W&B would put it into the system's temporary directory
        raise PermissionError(f"no permission to write in {directory}")
    # Until it is uploaded W&B keeps the tables' content in the user's home, which another machine may lack.
    os.environ.setdefault("WANDB_DATA_DIR", str(directory / "wandb"))
    # Without what belongs to training runs alone: system metrics, console output, code, the git remote.
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        save_code=False,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    comparison_run = wandb.init(
        project=project,
        group=group,
        name=group,
        job_type=JOB_TYPE,
        dir=directory,
        notes="\n".join(comparison.verdicts),
        config=configuration(comparison),
        mode="offline",
        settings=settings,
    )
    with comparison_run as run:
        rows = tables.data(comparison)
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        logged = {"comparison": table} | charts(comparison, table)
        page = directory / PAGE
        if page.is_file():
            logged["page"] = wandb.Html(page, inject=False)
        run.log(logged)
        run.summary.update(summary(comparison))
        return Path(run.settings.sync_dir)


def workspace(comparison: Comparison, entity: str, project: str, group: str) -> Any:
    """A view of the project on the runs of this group: the comparison's table and charts, and the runs' curves, by
    strategy in the colours and the order of the page."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    def bars(title: str) -> wr.CustomChart:
        table = {"summaryTable": {"tableKey": f"{title} by strategy_table"}}
        fields = {"label": "name", "value": title}
        return wr.CustomChart(table, "wandb/bar/v0", fields, {"title": title})

    shown = [wr.WeavePanelSummaryTable(table_name="comparison"), *map(bars, BARS)]
    curves = [wr.LinePlot(title=title, x="Step", y=[title]) for title in LINES]
    colours = {}
    for strategy, look in styles(comparison).items():
        colours[strategy] = INK_THERE if look.colour == INK else look.colour
    runs = ws.RunsetSettings(
        filters=[ws.Metric("Group") == group],
        groupby=[ws.Config("strategy")],
        order=[ws.Ordering(ws.Config("settings.MASTER_PORT"))],
        group_colors=colours,
    )
    sections = [
        ws.Section("Comparison", shown, is_open=True),
        ws.Section("Curves", curves, is_open=True),
    ]
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
    environment = dict(os.environ)
    environment.pop("WANDB_MODE", None)  # in which it would refuse
    sync = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,  # it could ask for a key
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if sync.returncode == 0:
        return ""
    if sync.returncode == -signal.SIGKILL:
        return f"no answer within {UPLOAD_SECONDS} s"
    last_line = sync.stdout.strip().rpartition("\n")[2]
    return last_line or f"wandb sync ended with exit status {sync.returncode}"


def _values(comparison: Comparison, setting: str) -> list[str]:
    """The values that the runs have for a setting, each once."""
    values = {run.plan.value(setting) for run in comparison.runs}
    return sorted(value for value in values if value)


def project_of(comparison: Comparison, arguments: argparse.Namespace) -> str:
    """The W&B project, which is that of the runs. Raises Problem."""
    if arguments.project:
        return arguments.project
    projects = _values(comparison, "WANDB_PROJECT")
    if len(projects) != 1:
        names = ", ".join(projects) or "none"
        raise Problem(f"the runs name the W&B projects: {names}", "Choose one: --project P")
    return projects[0]


def directory_of(comparison: Comparison, arguments: argparse.Namespace) -> Path:
    """Of the comparison's files and W&B's. Raises Problem."""
    if not arguments.comparison:
        return default_output(arguments.runs, comparison.runs)
    directory = arguments.comparison
    if not directory.is_dir():
        remedy = f"Make it: python -m t5bench compare --output {shlex.quote(str(directory))}"
        raise Problem(f"there is no directory {directory}", remedy)
    return directory


def run(arguments: argparse.Namespace) -> int:
    wandb_mode = mode(os.environ)
    if wandb_mode == "disabled":
        remedy = "Unset it, or set it to online or offline, to log a comparison"
        raise Problem("WANDB_MODE is 'disabled'", remedy)
    comparison = compare(arguments)
    project = project_of(comparison, arguments)
    directory = directory_of(comparison, arguments)
    groups = _values(comparison, "WANDB_RUN_GROUP")
    # As the sweep calls its group: by the directory that holds the runs and the comparison.
    group = groups[0] if len(groups) == 1 else directory.resolve().parent.name
    try:
        offline_run = write(comparison, project, group, directory)
    except (OSError, ValueError, wandb.Error) as error:  # ValueError: a WANDB_ variable that W&B does not take
        remedy = "Name another place: --comparison DIR"
        raise Problem(f"the comparison cannot be written: {error}", remedy) from error
    print(f"W&B: run '{group}' ({JOB_TYPE}), group '{group}', project '{project}': {offline_run}")
    page = directory / PAGE
    if not page.is_file():
        print(f"logged without the page, because there is no {page}: python -m t5bench compare creates it")
    for problem in comparison.problems:
        print(f"problem: {problem}", file=sys.stderr)
    failure = upload(offline_run) if wandb_mode == "online" else ""
    if failure:
        print(f"warning: it could not be uploaded: {failure}", file=sys.stderr)
    if failure or wandb_mode == "offline":
        print(f"upload it with: wandb sync {shlex.quote(str(offline_run))}")
    else:
        print("uploaded")
        print(save_workspace(comparison, project, group))
    return 0 if comparison.sound and not failure else 1
