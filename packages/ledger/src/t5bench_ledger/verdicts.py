"""The ledger for its answers and for other projects: data/releases.json, written from the cells."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from t5bench.record.files import write_whole
from t5bench_ledger import costs, tables
from t5bench_ledger.changes import CHANGES, ISSUES, standing
from t5bench_ledger.modes import MODES
from t5bench_ledger.releases import (
    MeasuredReleases,
    ReleaseFault,
    ReleaseVerdicts,
    TrainedMode,
)
from t5bench_ledger.spans import DATA, spans_of

FORMAT = "t5bench-releases-3"
RELEASES = DATA / "releases.json"
SCHEMA = DATA / "releases.schema.json"
RIGHT = "right"


def shorten(measured_cells: Sequence[tables.Cell], counted: Path = costs.COUNTED) -> ReleaseVerdicts:
    """What other projects need of the ledger's cells, and of the page of costs if it is there.

    What is wrong and not shown by a file that needs none of this project is left out here, whoever asks.
    """
    cells = standing(measured_cells)
    measured = []
    faults: list[ReleaseFault] = []
    upstream: dict[str, list[str]] = {}
    for section in tables.sections(cells):
        releases = tables.releases_of(section.cells)
        right: dict[str, dict[str, str]] = {}
        for strategy, mode, row in tables.matrix(section.cells):
            named = [cell["release"] for cell in row if cell and cell["verdict"] == RIGHT]
            if named:
                right.setdefault(strategy, {})[mode.name] = spans_of(named, section.software)
        measured.append(MeasuredReleases(section.software, section.torch, releases, right))
        faults += tables.release_faults(section)
    for change in CHANGES:
        for name in change.names:
            if any(name in fault.upstream for fault in faults):
                upstream[name] = [change.address(name), change.what]
    increases = costs.increases(costs.read(counted))
    for name, report in costs.REPORTS.items():
        if any(name in increase.upstream for increase in increases):
            upstream[name] = [f"{ISSUES}/{name.partition('#')[2]}", report]
    modes = [
        TrainedMode(
            mode.name, mode.precision, mode.micro_batches, mode.clipping, mode.offload, mode.resumes,
            mode.is_of_launchers, mode.meaning,
        )
        for mode in MODES
    ]  # fmt: skip
    return ReleaseVerdicts(FORMAT, modes, measured, faults, increases, upstream)


def in_lines(verdicts: ReleaseVerdicts) -> str:
    """As JSON with a line for each mode, fault and strategy, so that a difference can be read."""
    content = msgspec.to_builtins(verdicts)
    measured = []
    for each in content["measured"]:
        right = ",\n".join(f"{json.dumps(name)}: {json.dumps(modes)}" for name, modes in each.pop("right").items())
        measured.append(f'{json.dumps(each)[:-1]}, "right": {{\n{right}\n}}}}')
    said = ",\n".join(f"{json.dumps(name)}: {json.dumps(words)}" for name, words in content["upstream"].items())
    parts = [
        f'"format": {json.dumps(content["format"])}',
        _lines("modes", map(json.dumps, content["modes"])),
        _lines("measured", measured),
        _lines("faults", map(json.dumps, content["faults"])),
        _lines("costs", map(json.dumps, content["costs"])),
        f'"upstream": {{\n{said}\n}}',
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(name: str, values: Iterator[str] | Sequence[str]) -> str:
    return f'"{name}": [\n' + ",\n".join(values) + "\n]"


def write(cells: Sequence[tables.Cell], path: Path = RELEASES) -> None:
    """Raises OSError."""
    write_whole(path, in_lines(shorten(cells)))


def write_schema(path: Path = SCHEMA) -> None:
    """Writes the JSON schema of the file. Raises OSError."""
    write_whole(path, json.dumps(msgspec.json.schema(ReleaseVerdicts), indent=1) + "\n")
