"""The page of ``history``: its tables, and drawings of throughput over time and over the number of processes."""

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure

from t5bench.report import svg
from t5bench_verify.trends import PackageRow, Scaled, histories, history_rows, scaling, scaling_rows

HERE = Path(__file__).parent


def render(points: Sequence[PackageRow], price: float | None) -> str:
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)
    curves = list(scaling(points))
    draws = [partial(_over_time, history) for history in histories(points) if len(history) > 1]
    if curves:
        draws.append(partial(_over_processes, curves))
    drawings = [svg.for_page(draw, f"f{number}") for number, draw in enumerate(draws)]
    return environment.get_template("history.html.j2").render(
        histories=[(history[0], history_rows(history, price)) for history in histories(points)],
        curves=[(curve[0], scaling_rows(curve)) for curve in curves],
        drawings=[Markup(drawing) for drawing in drawings],
    )


def _colour(point: PackageRow) -> str:
    colour = point.run.plan.strategy.colour
    return svg.INK if colour == "ink" else colour


def _over_time(history: Sequence[PackageRow]) -> Figure:
    """Throughput with its intervals at the times at which the runs began."""
    times = [datetime.fromisoformat(point.started.replace("Z", "+00:00")) for point in history]
    figure, axes = _axes(f"{history[0].row.label}, {history[0].run.world_size} processes: samples/s")
    for time, point in zip(times, history, strict=True):
        if point.speed.low is not None and point.speed.high is not None:
            axes.plot([time, time], [point.speed.low, point.speed.high], color=_colour(point), linewidth=3, alpha=0.4)
    axes.plot(times, [point.speed.median for point in history], color=_colour(history[0]), marker="o")
    locator = AutoDateLocator(maxticks=6)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.set_ylim(bottom=0)
    return figure


def _over_processes(curves: Sequence[Sequence[Scaled]]) -> Figure:
    """The efficiency of every curve."""
    figure, axes = _axes("efficiency over the number of processes")
    for curve in curves:
        sizes = [scaled.point.run.world_size for scaled in curve]
        name = f"{curve[0].point.row.strategy}, {curve[0].kind}"
        dashes = "-" if curve[0].kind == "strong" else "--"
        efficiencies = [scaled.efficiency for scaled in curve]
        axes.plot(sizes, efficiencies, dashes, color=_colour(curve[0].point), marker="o", label=name)
        axes.set_xticks(sizes)
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def _axes(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes
