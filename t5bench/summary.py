"""One row a run, from its directory: what ran, whether it trained as DDP does, how long an iteration took."""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tabulate import tabulate

from t5bench.log import Iteration, PeakMemory, iterations, peak_memory

# fp32 rounding alone moves the loss by about 1e-6 over 20 iterations, a wrong gradient scale by far more.
LOSS_TOLERANCE = 1e-4
# First iterations allocate and warm caches; in runs this short a quarter is left out.
WARM_UP_SHARE = 0.25


@dataclass(frozen=True)
class Run:
    """What the files of one run directory say; the layout is None when its command was never written."""

    name: str
    status: str
    layout: dict[str, int] | None
    iterations: list[Iteration]
    memory: list[PeakMemory]

    @property
    def timed(self) -> list[Iteration]:
        return self.iterations[int(len(self.iterations) * WARM_UP_SHARE) :]


def read_run(directory: Path) -> Run:
    """Read the logs of all nodes that left theirs in this directory."""
    lines = [
        line for log in sorted(directory.glob("node*.log")) for line in log.read_text(errors="replace").splitlines()
    ]
    statuses = [path.read_text().split()[0] for path in sorted(directory.glob("node*.status"))]
    status = next((s for s in statuses if s != "complete"), "complete") if statuses else "not started"
    command = directory / "node0.command.sh"
    layout = _layout(command.read_text()) if command.exists() else None
    return Run(directory.name, status, layout, list(iterations(lines)), peak_memory(lines))


def _layout(command: str) -> dict[str, int]:
    words = shlex.split(command.splitlines()[-1])

    def value(option: str) -> int:
        return int(words[words.index(option) + 1])

    world = value("--nnodes") * value("--nproc_per_node")
    tp, pp = value("--tensor-model-parallel-size"), value("--pipeline-model-parallel-size")
    return {"processes": world, "tp": tp, "pp": pp, "dp": world // (tp * pp)}


def largest_loss_difference(run: Run, baseline: Run) -> float | None:
    """Largest relative difference of the loss over the iterations that both logged; None when they share none.

    Not a number when one of the losses is not: max() alone would pass over it.
    """
    reference = {line.iteration: line.lm_loss for line in baseline.iterations}
    differences = [
        abs(line.lm_loss - reference[line.iteration]) / abs(reference[line.iteration])
        for line in run.iterations
        if line.iteration in reference
    ]
    return next((d for d in differences if math.isnan(d)), None) or max(differences, default=None)


def _row(run: Run, baseline: Run | None) -> list[str]:
    layout = run.layout
    shape = f"{layout['tp']}/{layout['pp']}/{layout['dp']}" if layout else "-"
    row = [run.name, str(layout["processes"]) if layout else "-", shape]
    if run.iterations:
        difference = largest_loss_difference(run, baseline) if baseline else None
        if run is baseline:
            verdict = "baseline"
        elif difference is None:
            verdict = "-"
        else:
            verdict = f"{'yes' if difference <= LOSS_TOLERANCE else 'NO'} ({difference:.0e})"
        row += [
            f"{run.iterations[-1].lm_loss:.6f}",
            verdict,
            f"{median(line.elapsed_ms for line in run.timed):.1f}",
            f"{median(line.samples_per_second for line in run.timed):.1f}",
        ]
    else:
        row += ["-", "-", "-", "-"]
    peaks = [rank.device_mib or rank.host_mib for rank in run.memory]
    return [*row, f"{max(peaks):.0f}" if peaks else "-", run.status]


def table(directories: Sequence[Path]) -> tuple[str, bool]:
    """The comparison of these runs as text, and whether all are complete and train as DDP does."""
    runs = [read_run(directory) for directory in directories]
    baseline = next((run for run in runs if run.name == "ddp" and run.iterations), None)
    memory = "device MiB" if any(rank.device_mib for run in runs for rank in run.memory) else "host MiB"
    rows = [_row(run, baseline) for run in runs]
    header = [
        "strategy",
        "processes",
        "TP/PP/DP",
        "final loss",
        "equal to DDP",
        "ms/iteration",
        "samples/s",
        f"peak {memory}",
        "status",
    ]
    sound = baseline is not None and all(
        run.status == "complete" and re.match(r"yes|baseline", row[4]) for run, row in zip(runs, rows, strict=True)
    )
    alignment = ("left", "right", "center", "right", "left", "right", "right", "right", "left")
    return tabulate(rows, header, colalign=alignment, disable_numparse=True), sound
