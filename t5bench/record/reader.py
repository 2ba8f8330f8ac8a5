"""The one reader of a record: every file is checked for what its parts may be before anything is computed from it.

Types and ranges are checked in every run. Of a complete run it is checked too that all its iterations are there, that
its clocks can be true, and that metrics.jsonl says what the last node's log says: the log is the raw source. Checksums
(files.py) show whether a file was changed since, and spare that last check. RecordError names file, line and reason.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
from msgspec import Meta

from t5bench.record import log
from t5bench.record.files import METRICS, RecordError, read
from t5bench.record.log import Iteration
from t5bench.record.plan import FORMAT, ROLES, Plan, by_name
from t5bench.record.status import CANCELLED, EXIT_CODES, RUNNING, iterations_expected

# Numbers that a record can hold, as large as those of fp32. Clocks: 2001 to 2103, in seconds since 1970.
MOST = 2.0**128
_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Amount = Annotated[float, Meta(ge=0, le=MOST)]
_Clock = Annotated[float, Meta(ge=1e9, le=4.2e9)]
_Moment = Annotated[str, Meta(pattern=r"^20[0-9]{2}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z$")]

_KIND = re.compile(r"(path|text|secret|decimal|whole:[0-9]{1,18}(:[0-9]{1,18})?|one-of:.+)\??")

# Clocks are set while a run goes on, in small steps; samples are taken before and after what is logged.
STEP_SECONDS, SAMPLES_SECONDS = 5, 60
# What may pass between two lines besides the iterations: an evaluation, a checkpoint.
PAUSE_SECONDS, PAUSE_WITH_EVENTS_SECONDS = 3600, 86400


class _Cause(TypedDict):
    status: str
    strength: _Count
    reason: str
    remedy: str
    time: _Clock
    line: str
    rank: _Count | None


class _Ending(TypedDict):
    """How a node ended, as it tells the others."""

    node: _Count
    nnodes: _Count
    host: str
    status: Literal[(*EXIT_CODES, CANCELLED, RUNNING)]
    reason: str
    remedy: str
    cause: _Cause | None
    signal: str | None
    ended: _Moment | None


class _Device(TypedDict):
    name: str


class _Gpu(TypedDict):
    index: _Count
    utilization: _Amount | None
    power_w: _Amount | None


class _Counter(TypedDict):
    sent: _Amount


class _Peak(TypedDict):
    rank: _Count
    device_mib: _Amount | None
    host_mib: _Amount


class _Required(_Ending):
    format: Literal[FORMAT]
    exit_status: int | None
    started: _Moment
    plan: dict[str, Any]
    data: dict[str, str | int | None]
    versions: dict[str, str | None]
    commits: dict[str, str | bool | None]
    patches: dict[str, str | None]
    devices: list[_Device]
    network: dict[str, dict[str, _Count | None]]
    peak_memory: list[_Peak]
    padded_vocab_size: Annotated[int, Meta(ge=1, le=2**31)] | None


class Part(_Required, total=False):
    """The content of node<R>.json, as far as it is read."""

    heard: list[_Ending]
    differences: list[str]


class Sample(TypedDict):
    time: _Clock
    gpus: list[_Gpu]
    network: dict[str, _Counter]


def _checked(place: object, content: Any, kind: Any, *, strict: bool = True) -> Any:
    try:
        return msgspec.convert(content, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise RecordError(f"{place} cannot be right: {error}") from error


def decoded(place: object, text: bytes, kind: Any = dict[str, Any]) -> Any:
    """A JSON object of this type. Raises RecordError."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RecordError(f"{place} cannot be read: {error}") from error


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in a file of JSON lines, and where each stands. Raises RecordError.

    A line that was cut off at the end of an attempt, as a full disk or a death leaves it, is passed over.
    """
    lines = read(path).split(b"\n")
    for number, text in enumerate(lines, 1):
        place = f"{path} line {number}"
        try:
            content = decoded(place, text)
        except RecordError:
            if number == len(lines) or lines[number].startswith(b'{"resumed_from"'):
                continue
            raise
        yield place, content


# ---- node<R>.json ----------------------------------------------------------------------------------------------------


def seconds(moment: str) -> float:
    """Since 1970, of a time as records have it. Raises ValueError."""
    return datetime.fromisoformat(f"{moment[:-1]}+00:00").timestamp()


def read_part(path: Path) -> dict[str, Any]:
    """A node's part. Raises RecordError."""
    content = decoded(path, read(path))
    if content.get("format") != FORMAT:
        raise RecordError(f"{path} is not a record of format {FORMAT}")
    _checked(path, content, Part)
    plan = _checked(path, content["plan"], Plan)
    if wrong := _fault_of_plan(content["plan"], plan) or _fault_of_part(path, content, plan):
        raise RecordError(f"{path} cannot be right: {wrong}")
    return content


def _fault_of_part(path: Path, part: Mapping[str, Any], plan: Plan) -> str:
    assert plan.layout
    node, nodes, planned = part["node"], part["nnodes"], plan.layout.nnodes
    if path.name.split(".")[0] != f"node{node}" or node != plan.node or not node < nodes == planned:
        return f"it is of node {node} of {nodes}, planned as node {plan.node} of {planned}"
    if (part["ended"] is None) != (part["status"] == RUNNING):
        return f"it is {part['status']} and ended {part['ended'] or 'not yet'}"
    try:
        if seconds(part["started"]) > seconds(part["ended"] or part["started"]) + STEP_SECONDS:
            return f"it began {part['started']} and ended {part['ended']}"
    except ValueError as error:
        return str(error)
    ranks = [peak["rank"] for peak in part["peak_memory"]]
    if len(set(ranks)) < len(ranks):
        return f"it has the peak memory of ranks {ranks}"
    return ""


def _fault_of_plan(content: Mapping[str, Any], plan: Plan) -> str:
    layout, given = plan.layout, by_name(plan.arguments.words)
    if not layout:
        return "there is no layout"
    if unknown := content.keys() - {entry.name for entry in fields(Plan)}:
        return f"a plan has no {min(unknown)}"
    sizes = layout.nnodes * layout.nproc_per_node, layout.tp * layout.pp * layout.dp
    if min(asdict(layout).values(), key=lambda size: size or 0) == 0 or set(sizes) != {layout.world_size}:
        return f"a layout of {asdict(layout)}"
    for name, setting in plan.settings.items():
        if setting.role not in ROLES or not _KIND.fullmatch(setting.kind):
            return f"{name} has the role {setting.role} and the kind {setting.kind}"
        if wrong := setting.fault(name, setting.value):
            return wrong[0]
        passed = [given[argument] for argument in setting.argument.split(",") if argument in given]
        if passed and setting.value not in passed:
            return f"{name} is '{setting.value}', but the engine was given {setting.argument} {' '.join(passed)}"
    if missing := Counter(plan.arguments.words) - Counter(plan.command):
        return f"the command lacks {next(iter(missing))}"
    return ""


# ---- metrics.jsonl ---------------------------------------------------------------------------------------------------


_ITERATION_FIELDS = {entry.name for entry in fields(Iteration)} - {"begin"}


_Lines = Sequence[tuple[str, Iteration]]


class Attempt(NamedTuple):
    """What one attempt at a run logged after iteration `begin`, in order, and where each line stands."""

    begin: int
    lines: list[tuple[str, Iteration]]


def read_attempts(path: Path) -> list[Attempt]:
    """All that was logged, by attempt: at least one, without lines where there is no file. Raises RecordError."""
    found = [Attempt(0, [])]
    for place, content in json_lines(path) if path.exists() or path.is_symlink() else ():
        if "resumed_from" in content:
            mark = _checked(place, content, dict[Literal["resumed_from"], _Count])
            found.append(Attempt(mark["resumed_from"], []))
            continue
        if unknown := content.keys() - _ITERATION_FIELDS:
            raise RecordError(f"{place} cannot be right: there is no {min(unknown)}")
        # Numbers that are not finite are written as text.
        line = _checked(place, {"lm_loss": None} | content | {"begin": found[-1].begin}, Iteration, strict=False)
        if wrong := _fault_of_line(line):
            raise RecordError(f"{place} cannot be right: {wrong}")
        found[-1].lines.append((place, line))
    return found


def _fault_of_line(line: Iteration) -> str:
    for name, value in vars(line).items():
        # A run can diverge to nan and inf, but nothing that is logged can be negative.
        if value is not None and (value < 0 or MOST < value < math.inf):
            return f"{name} is {value}"
    if line.time is not None and not 1e9 <= line.time <= 4.2e9:
        return f"time is {line.time}"
    if not 1 <= line.iteration <= line.total:
        return f"it is iteration {line.iteration} of {line.total}"
    return "" if line.lm_loss is not None or line.skipped else "it has no lm_loss"


def that_count(attempts: Iterable[Attempt]) -> list[Iteration]:
    """The iterations in order, without what an attempt logged beyond the iteration from which the next went on."""
    found: dict[int, Iteration] = {}
    for begin, lines in attempts:
        found = {number: line for number, line in found.items() if number <= begin}
        found |= {line.iteration: line for _, line in lines}
    return [found[number] for number in sorted(found)]


def check_complete(directory: Path, plan: Plan, attempts: Sequence[Attempt], part: Mapping[str, Any]) -> bool:
    """Whether every line of a complete run is there, but for those that its log has in pieces. Raises RecordError.

    part: of the last node.
    """
    total, interval = plan.number("TRAIN_ITERS"), plan.number("LOG_INTERVAL")
    for place, line in (entry for attempt in attempts for entry in attempt.lines):
        if line.total != total or line.iteration % interval:
            raise RecordError(
                f"{place} is of iteration {line.iteration} of {line.total},"
                f" where every {interval} of {total} are logged"
            )
    reached = {line.iteration for line in that_count(attempts)}
    expected = set(range(interval, iterations_expected(total, interval) + 1, interval))
    missing = expected - reached
    if missing and (missing := missing - _mentioned(directory / f"node{part['node']}.log")):
        last = " after its last line" if min(missing) > max(reached, default=0) else ""
        raise RecordError(
            f"{directory / METRICS}{last} lacks iteration {min(missing)} of {total},"
            f" and {len(missing)} in all, though the run is complete"
        )
    for attempt in attempts:
        _check_clocks(plan, attempt.lines)
    _check_span(attempts[-1].lines, plan, part)
    return reached >= expected


def _mentioned(path: Path) -> set[int]:
    """Iterations of which the log has a line, even one that other output runs into."""
    return {int(number) for number in re.findall(rb"\biteration\s+([0-9]{1,15})/", read(path))}


def _seconds_of(line: Iteration, plan: Plan) -> float:
    """What a line is the mean of: fewer iterations where a resumed run logs its first."""
    return line.elapsed_ms * min(plan.number("LOG_INTERVAL"), line.iteration - line.begin) / 1000


def _check_clocks(plan: Plan, lines: _Lines) -> None:
    events = plan.number("SAVE_INTERVAL") or plan.number("EVAL_ITERS")
    pause = PAUSE_WITH_EVENTS_SECONDS if events else PAUSE_SECONDS
    for (_, earlier), (place, later) in pairwise(lines):
        passed = (later.time or 0) - (earlier.time or 0) if later.time and earlier.time else 0
        too_late = passed - _seconds_of(later, plan) > pause
        if later.iteration <= earlier.iteration or passed < -STEP_SECONDS or too_late:
            raise RecordError(
                f"{place} cannot follow: iteration {later.iteration} comes {passed:.0f} s after"
                f" iteration {earlier.iteration}"
            )


def _check_span(lines: _Lines, plan: Plan, part: Mapping[str, Any]) -> None:
    """Whether the lines of the last attempt lie within its time, and their iterations fit into it."""
    begin, end = seconds(part["started"]) - STEP_SECONDS, seconds(part["ended"]) + STEP_SECONDS
    for place, line in lines:
        if line.time is not None and not begin <= line.time <= end:
            raise RecordError(f"{place} is not of the time of the run, {part['started']} to {part['ended']}")
    computed = sum(_seconds_of(line, plan) for _, line in lines)
    if computed > end - begin + STEP_SECONDS:
        place = lines[-1][0]
        raise RecordError(f"{place} and those above it took {computed:.0f} s, the whole run {end - begin:.0f} s")


def check_log(directory: Path, part: Mapping[str, Any], lines: _Lines | None) -> None:
    """Whether a node's log says what its part says, and the lines of its last attempt. Raises RecordError.

    lines: None for a node that does not log iterations.
    """
    path = directory / f"node{part['node']}.log"
    printed, others = [], []
    for place, time, text in log_lines(path):
        found = log.iteration(text, time)
        printed += [(place, found)] if found else []
        others += [] if found else [text]
    told = [asdict(peak) for peak in log.peak_memory(text for text in others if "peak memory" in text)]
    if told != sorted(part["peak_memory"], key=lambda peak: peak["rank"]):
        raise RecordError(f"{path} and node{part['node']}.json tell of different peak memory")
    vocabulary = [size for text in others if (size := log.padded_vocabulary(text))]
    if vocabulary and vocabulary[-1] != part["padded_vocab_size"]:
        raise RecordError(f"{path} tells of a vocabulary of {vocabulary[-1]}, node{part['node']}.json of another")
    if lines is not None:
        _check_same(directory / METRICS, lines, path, printed)


def _check_same(path: Path, lines: _Lines, log_path: Path, printed: _Lines) -> None:
    for (place, line), (its_place, its) in zip(lines, printed, strict=False):
        there = its_place.rpartition("/")[2]
        for name in sorted(_ITERATION_FIELDS - {"time"}):
            value, logged = getattr(line, name), getattr(its, name)
            if value != logged and not (value != value and logged != logged):
                raise RecordError(f"{place} has {name} {value}, {there} has {logged}")
        # One is rounded to milliseconds, the other cut off.
        if line.time is not None and its.time is not None and abs(line.time - its.time) > 0.002:
            raise RecordError(f"{place} came at {line.time}, {there} at {its.time}")
    if len(lines) != len(printed):
        raise RecordError(
            f"{path} has {len(lines)} iteration lines of its last attempt, {log_path.name} {len(printed)}"
        )


def log_lines(path: Path) -> Iterator[tuple[str, float, str]]:
    """Where a line stands, when it came and what it says. Raises RecordError."""
    for number, text in enumerate(read(path).removesuffix(b"\n").split(b"\n"), 1):
        place, (moment, _, said) = f"{path} line {number}", text.decode(errors="replace").partition(" ")
        try:
            time = seconds(moment)
        except ValueError as error:
            raise RecordError(f"{place} does not begin with a time") from error
        yield place, time, said


# ---- node<R>.samples.jsonl -------------------------------------------------------------------------------------------


def read_samples(path: Path) -> list[Sample]:
    """The samples of one node in the order of time; none without the file. Raises RecordError."""
    found = []
    for place, content in json_lines(path) if path.exists() or path.is_symlink() else ():
        _checked(place, content, Sample)
        if found and content["time"] < found[-1]["time"] - STEP_SECONDS:
            raise RecordError(f"{place} comes before the line above it")
        found.append(content)
    return sorted(found, key=lambda sample: sample["time"])


def check_samples(directory: Path, samples: Sequence[Sample], part: Mapping[str, Any]) -> None:
    """Whether they are of the run's time. Raises RecordError."""
    begin, end = seconds(part["started"]) - SAMPLES_SECONDS, seconds(part["ended"]) + SAMPLES_SECONDS
    if samples and not begin <= samples[0]["time"] <= samples[-1]["time"] <= end:
        path = directory / f"node{part['node']}.samples.jsonl"
        raise RecordError(f"{path} is not of the time of the run, {part['started']} to {part['ended']}")
