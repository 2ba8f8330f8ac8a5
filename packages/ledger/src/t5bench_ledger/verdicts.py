"""The ledger in a few kilobytes, for launchers and other projects, and what it says of the installed releases."""

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from t5bench import Problem
from t5bench.record.files import write_whole
from t5bench.record.ledger import (
    FORMAT,
    RIGHT,
    VERDICTS,
    Increase,
    releases_in,
    spans_of,
    version_of,
)
from t5bench_ledger import costs, tables
from t5bench_ledger.changes import CHANGES, ISSUES
from t5bench_ledger.modes import MODES, OF_NO_LAUNCHER
from t5bench_ledger.releases import (
    MeasuredReleases,
    ReleaseFault,
    ReleaseVerdicts,
    TrainedMode,
    read_verdicts,
)

SCHEMA = "releases.schema.json"


def shorten(cells: Sequence[tables.Cell], counted: Path = costs.DATA) -> ReleaseVerdicts:
    """What launchers and other projects need of the ledger's cells, and of the page of costs if it is there."""
    measured = []
    faults: list[ReleaseFault] = []
    upstream: dict[str, list[str]] = {}
    for section in tables.sections(cells):
        releases = tables.releases_of(section.cells)
        right: dict[str, dict[str, str]] = {}
        for strategy, mode, row in tables.matrix(section.cells):
            named = [cell["release"] for cell in row if cell and cell["verdict"] == RIGHT]
            if named:
                right.setdefault(strategy, {})[mode.name] = spans_of(named, releases)
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
            mode.is_of_launchers,
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


def write(cells: Sequence[tables.Cell], path: Path = VERDICTS) -> None:
    """Raises OSError."""
    write_whole(path, in_lines(shorten(cells)))


def write_schema(folder: Path) -> None:
    """Writes the JSON schema of the file. Raises OSError."""
    write_whole(folder / SCHEMA, json.dumps(msgspec.json.schema(ReleaseVerdicts), indent=1) + "\n")


# ---- what it says of some releases -----------------------------------------------------------------------------------


def installed() -> dict[str, str]:
    """The releases in this Python's environment, by library, without importing them."""
    found = {}
    for name in tables.LIBRARY:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def named(text: str) -> dict[str, str]:
    """The release that somebody asks about: 0.18.2, torch==2.8.0, transformers==4.45.2. Raises Problem."""
    library, _, release = text.rpartition("==")
    library = library.strip().lower() or "deepspeed"
    remedy = "Name a release of DeepSpeed, such as 0.18.2, or torch==2.8.0, transformers==4.45.2, accelerate==1.2.1"
    if library not in tables.LIBRARY:
        raise Problem(f"the ledger has no '{library}'", remedy)
    try:
        version_of(release.strip())
    except ValueError as error:
        raise Problem(str(error), remedy) from error
    return {library: release.strip()}


def answer(releases: Mapping[str, str], strategies: Sequence[str]) -> tuple[str, bool]:
    """What the ledger says of these releases, by library, in lines; and whether a launcher's mode is wrong in them.

    Raises Problem.
    """
    try:
        verdicts = read_verdicts()
    except (OSError, ValueError) as error:
        raise Problem(f"the ledger cannot be read: {error}", "Restore t5bench/record/releases.json") from error
    if not releases:
        raise Problem("no library of the ledger is installed here", "Ask about a release: --answer 0.18.2")
    lines: list[str] = []
    is_wrong = False
    for measured in verdicts.measured:
        release = releases.get(measured.software)
        if release is None:
            continue
        name = tables.LIBRARY[measured.software]
        beside = f" with torch {measured.torch}" if measured.torch else ""
        known = [each for each in measured.releases if is_same(each, release)]
        if not known:
            near = ", ".join(measured.releases[-3:])
            lines.append(f"{name} {release}: not measured (the newest that were{beside}: {near})")
            lines.append("  measure it: python -m t5bench ledger --" + _option(measured.software, release))
            continue
        lines.append(f"{name} {release}{beside}, on a CPU:")
        for words, meets in _of_release(verdicts, measured, known[0], strategies):
            lines.append(f"  {words}")
            is_wrong = is_wrong or meets
        if measured.software == "deepspeed":
            lines += [f"  {line}" for line in _costs_of_release(verdicts, known[0], strategies)]
            lines += [f"  cost of {words}" for words in costs.of_release(known[0], strategies)]
    return "\n".join(lines), is_wrong


def is_same(measured: str, release: str) -> bool:
    """Whether a release is the measured one; a pre-release, or one built from source, is none."""
    try:
        return version_of(measured) == version_of(release)
    except ValueError:
        return False


def _option(software: str, release: str) -> str:
    if software == "torch":
        return f"torch {release.partition('+')[0]}"
    return f"releases {release}" if software == "deepspeed" else f"releases {software}=={release}"


def _of_release(
    verdicts: ReleaseVerdicts, measured: MeasuredReleases, release: str, strategies: Sequence[str]
) -> Iterator[tuple[str, bool]]:
    """A line for each strategy and for each of its faults; with it, whether a launcher meets the fault."""
    of_launchers = {mode.name for mode in verdicts.modes if mode.launchers}
    faults = [
        fault
        for fault in verdicts.faults
        if (fault.software, fault.torch) == (measured.software, measured.torch)
        and release in releases_in(fault.releases, measured.releases)
    ]
    names = dict.fromkeys([*measured.right, *(fault.strategy for fault in faults)])
    for strategy in names:
        if strategies and strategy not in strategies:
            continue
        own = [fault for fault in faults if fault.strategy == strategy]
        spans = measured.right.get(strategy, {})
        right = [mode for mode, span in spans.items() if release in releases_in(span, measured.releases)]
        if not right and not own:
            yield f"{strategy}: not measured", False
            continue
        total = len(right) + sum(len(fault.modes) for fault in own)
        yield f"{strategy}: right in {len(right)} of {total} modes ({', '.join(right) or '-'})", False
        for fault in own:
            meets = strategy not in OF_NO_LAUNCHER and not of_launchers.isdisjoint(fault.modes)
            for line in fault_lines(fault, verdicts.upstream):
                yield f"  {line}", meets


def _costs_of_release(verdicts: ReleaseVerdicts, release: str, strategies: Sequence[str]) -> Iterator[str]:
    """A line for each way in which an iteration costs more than in an earlier release."""
    for cost in verdicts.costs:
        if strategies and cost.strategy not in strategies:
            continue
        increase = Increase.of(msgspec.to_builtins(cost))
        if increase.holds_in(release):
            yield f"an iteration of {cost.strategy} has {increase} (counted in {', '.join(cost.modes)})"


def fault_lines(fault: ReleaseFault, upstream: Mapping[str, Sequence[str]]) -> list[str]:
    """A fault, where it begins, what upstream says, and which release mends it."""
    lines = [f"in {', '.join(fault.modes)}: {tables.what_happens(fault)}"]
    lines += [f"  upstream: {upstream[name][1]} ({upstream[name][0]})" for name in fault.upstream]
    if not fault.upstream:
        lines.append(f"  upstream: {tables.NO_REPORT}")
    lines.append(f"  right again in {fault.mended_in or 'no later release that was tried'}")
    return lines
