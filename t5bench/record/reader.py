"""The only reader of a record: it checks every file before anything is computed from it.

It checks types and ranges in every run. In a complete run it also checks that no iteration is missing, that lines are
in order, and that metrics.jsonl agrees with the last node's log, which is the primary source. Checksums (files.py) show
whether a file was changed since, and make that last check unnecessary. RecordError names file, line and reason.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from t5bench.costmodel.job import Architecture, Zero
from t5bench.record import log
from t5bench.record.checkpoints import RESHAPED_FROM
from t5bench.record.files import METRICS, RecordError, exists, read
from t5bench.record.files import lines as lines_of
from t5bench.record.log import Amount, Clock, Count, Evaluation, Iteration, PeakMemory
from t5bench.record.plan import FORMAT, PRECISIONS, READABLE_FORMATS, Layout, Plan, by_name, of_this_format
from t5bench.record.run import Run
from t5bench.record.settings import BY_NAME
from t5bench.record.status import CANCELLED, EXIT_CODES, RUNNING, Cause, iterations_expected

_Moment = Annotated[str, Meta(pattern=r"^20[0-9]{2}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z$")]

STEP_SECONDS = 5  # clocks are adjusted during a run, in small steps
SAME_SECONDS = 0.002  # one time is rounded to milliseconds, the other truncated
# What calculating with a forged value may raise.
UNFORESEEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class _Ending(Struct):
    """How a node ended, as it reports to the others."""

    node: Count
    nnodes: Count
    host: str
    status: Literal[(*EXIT_CODES, CANCELLED, RUNNING)]
    reason: str
    remedy: str
    cause: Cause | None
    signal: str | None
    ended: _Moment | None


class _Device(Struct):
    name: str
    memory_mib: Amount | None = None


class _Cpu(Struct):
    model: str
    cores: Annotated[int, Meta(ge=1, le=2**20)]


class _Part(_Ending):
    """The fields of node<R>.json that are read."""

    exit_status: int | None
    started: _Moment
    plan: Plan
    data: dict[str, str | int | None]
    versions: dict[str, str | None]
    commits: dict[str, str | bool | None]
    patches: dict[str, str | None]
    devices: list[_Device]
    network: dict[str, dict[str, Count | None]]
    peak_memory: list[PeakMemory]
    padded_vocab_size: Annotated[int, Meta(ge=1, le=2**31)] | None
    attempt: str | None = None
    cpu: _Cpu | None = None
    evaluations: list[Evaluation] = []
    heard: list[_Ending] = []
    differences: list[str] = []

    def __post_init__(self) -> None:
        wrong = next(_faults(self), None)
        if wrong:
            raise ValueError(wrong)


class _Gpu(Struct):
    index: Count
    utilization: Amount | None
    power_w: Amount | None
    sm_mhz: Amount | None = None


class _Counter(Struct):
    sent: Amount


class _Sample(Struct):
    time: Clock
    gpus: list[_Gpu]
    network: dict[str, _Counter]


def _checked(place: object, content: Any, kind: Any, *, strict: bool = True) -> Any:
    """Converts with msgspec. Raises RecordError, also where the type's own __post_init__ cannot calculate with it."""
    try:
        return msgspec.convert(content, kind, strict=strict)
    except (msgspec.ValidationError, *UNFORESEEN) as error:
        raise RecordError(f"{place} is inconsistent: {error}") from error


def decoded(place: object, text: bytes, kind: Any = dict[str, Any]) -> Any:
    """A JSON object of this type. Raises RecordError."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RecordError(f"{place} cannot be read: {error}") from error


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in a file of JSON lines with their places; none if there is no file. Raises RecordError.

    A truncated line at the end of an attempt, which a full disk or a killed process leaves, is skipped.
    """
    if not exists(path):
        return
    faulty: RecordError | None = None
    for number, line in enumerate(lines_of(path), 1):
        if faulty and not line.startswith(b'{"resumed_from"'):
            raise faulty
        place = f"{path} line {number}"
        faulty = None
        try:
            content = decoded(place, line)
        except RecordError as error:
            faulty = error
            continue
        yield place, content
    if faulty and line.endswith(b"\n"):
        raise faulty


# ---- node<R>.json ----------------------------------------------------------------------------------------------------


def seconds(moment: str) -> float:
    """Seconds since 1970, from a time as records write it. Raises ValueError."""
    return datetime.fromisoformat(f"{moment[:-1]}+00:00").timestamp()


def read_part(path: Path) -> dict[str, Any]:
    """A node's part, also that of an earlier attempt (node0.json.1). Raises RecordError."""
    content = decoded(path, read(path))
    if content.get("format") not in READABLE_FORMATS:
        raise RecordError(f"{path} is not a record of format {FORMAT}")
    content["plan"] = of_this_format(content.get("plan"))
    part = _checked(path, content, _Part)
    if path.name.partition(".")[0] != f"node{part.node}":
        raise RecordError(f"{path} is inconsistent: it is of node {part.node}")
    return content


def _faults(part: _Part) -> Iterator[str]:
    """Contradictions within a part, within its plan, or between the two."""
    plan = part.plan
    layout = plan.layout
    if not layout:
        yield "there is no layout"
        return
    yield from _faults_of_layout(part, layout)
    yield from _faults_of_times(part)
    if (plan.device == "cpu") != (plan.environment.get("DS_ACCELERATOR") == "cpu"):
        yield f"its device is {plan.device}, but the command's environment is another one's"
    yield from _faults_of_settings(plan, layout)
    run_name = plan.settings.get("WANDB_RUN_NAME")
    name = run_name.value if run_name and run_name.is_default else plan.strategy.name
    if not plan.strategy.name or not name.endswith(plan.strategy.name):
        yield f"its strategy is '{plan.strategy.name}', but its launcher calls it {name}"
    if plan.iterations < 0 or plan.number("LOG_INTERVAL") < 1:
        yield f"it has {plan.iterations} iterations, of which every {plan.number('LOG_INTERVAL')} are logged"
    if not _describes_a_model(plan):
        yield "its engine's arguments describe no model"
    if not _zero_makes_sense(plan):
        yield "its ds_config makes no sense"


def _faults_of_layout(part: _Part, layout: Layout) -> Iterator[str]:
    processes = layout.nnodes * layout.nproc_per_node
    divided = layout.tp * layout.pp * layout.dp
    if 0 in asdict(layout).values() or not processes == divided == layout.world_size:
        yield f"a layout of {asdict(layout)}"
    planned = part.plan.node
    if not part.node == planned < part.nnodes == layout.nnodes:
        yield f"it says node {part.node} of {part.nnodes} but was planned as node {planned} of {layout.nnodes}"


def _faults_of_times(part: _Part) -> Iterator[str]:
    if (part.ended is None) != (part.status == RUNNING):
        yield f"it is {part.status} and ended {part.ended or 'not yet'}"
    if seconds(part.started) > seconds(part.ended or part.started) + STEP_SECONDS:
        yield f"it began {part.started} and ended {part.ended}"


def _faults_of_settings(plan: Plan, layout: Layout) -> Iterator[str]:
    """Values that are none, or that the engine's arguments or the layout contradict."""
    given = by_name(plan.arguments.words)
    for name, setting in plan.settings.items():
        declaration = BY_NAME.get(name)
        if not declaration:
            continue  # of another version
        fault = declaration.kind.fault(name, setting.value)
        if fault:
            problem, _ = fault
            yield problem
        passed = [given[argument] for argument in declaration.arguments if argument in given]
        if passed and setting.value not in passed:
            yield f"{name} is '{setting.value}', but the engine was given {declaration.argument} {' '.join(passed)}"
    for name, told in _written(plan, layout, given):
        value = plan.value(name, told)
        if value.split() != told.split():
            yield f"{name} is '{value}', but the layout or the command has '{told}'"


def _describes_a_model(plan: Plan) -> bool:
    try:
        model = Architecture.of_arguments(plan.named_arguments, 0)
    except UNFORESEEN:
        return False
    return min(model.hidden, model.heads, model.decoder_layers) > 0


def _zero_makes_sense(plan: Plan) -> bool:
    try:
        zero = Zero.of_config(plan.ds_config)
        return zero.stage == plan.zero_stage and zero.stage in range(4) and zero.reduce_bucket > 0
    except UNFORESEEN:
        return False


def _written(plan: Plan, layout: Layout, given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Settings that no argument has as they are, with the values that the rest of the plan tells."""
    yield "ENGINE", plan.engine
    yield "TENSOR_PARALLEL_SIZE", str(layout.tp)
    yield "PIPELINE_PARALLEL_SIZE", str(layout.pp)
    yield "GLOBAL_BATCH_SIZE", str(plan.number("MICRO_BATCH_SIZE") * layout.dp * layout.micro_batches)
    yield "PRECISION_FLAG", next((name for name in PRECISIONS if name in given), "")
    yield "RECOMPUTE", given.get("--recompute-granularity", "none")
    yield "RAMPUP_BATCH_SIZE", given.get("--rampup-batch-size", "")
    yield "PROFILE_ITERATION", plan.environment.get("T5_PROFILE", "0").partition(":")[0]
    yield "EVAL_ONLY", str(int("--skip-train" in given))
    if "--skip-train" not in given:
        yield "SAVE_INTERVAL", given.get("--save-interval", "0")


# ---- files of lines --------------------------------------------------------------------------------------------------


class Attempt(NamedTuple):
    """The lines that one attempt logged after iteration `begin`, in order, with their places."""

    begin: int
    lines: list[tuple[str, Iteration]]


def read_attempts(path: Path) -> list[Attempt]:
    """Everything logged, by attempt; without a file, one attempt without lines. Raises RecordError."""
    found = [Attempt(0, [])]
    for place, content in json_lines(path):
        if "resumed_from" in content:
            mark = _checked(place, content, dict[Literal["resumed_from"], Count])
            found.append(Attempt(mark["resumed_from"], []))
            continue
        # Numbers that are not finite are written as text.
        values = {"lm_loss": None} | content | {"begin": found[-1].begin}
        found[-1].lines.append((place, _checked(place, values, Iteration, strict=False)))
    return found


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The samples of one node in the order of time; none if there is no file. Raises RecordError."""
    found = list(json_lines(path))
    for place, content in found:
        _checked(place, content, _Sample)
    return sorted((content for _, content in found), key=lambda sample: sample["time"])


def log_lines(path: Path) -> Iterator[tuple[str, float, str]]:
    """A line's place, time and text. Raises RecordError."""
    for number, line in enumerate(lines_of(path), 1):
        place = f"{path} line {number}"
        moment, _, text = line.removesuffix(b"\n").decode(errors="replace").partition(" ")
        try:
            time = seconds(moment)
        except ValueError as error:
            raise RecordError(f"{place} does not begin with a time") from error
        yield place, time, text


def that_count(attempts: Iterable[Attempt]) -> list[Iteration]:
    """The iterations in order, without those that an attempt logged after the iteration from which the next resumed.

    If an attempt began anew instead of resuming, what it logged up to that iteration does not count.
    """
    found: dict[int, Iteration] = {}
    for begin, lines in attempts:
        found = {number: line for number, line in found.items() if number <= begin}
        found |= {line.iteration: line for _, line in lines if line.iteration > begin}
    return [found[number] for number in sorted(found)]


# ---- a complete run --------------------------------------------------------------------------------------------------


def check_complete(run: Run, attempts: Sequence[Attempt], with_logs: bool) -> None:
    """Checks a complete run's iterations, times and, if asked, logs, as also where only these have some lines, in
    pieces. Raises RecordError."""
    last_node = run.nodes[-1]
    final = attempts[-1]
    _check_intervals(run, attempts)
    is_in_pieces = _check_all_are_there(run, began_at(run, attempts))
    for place, line in final.lines[:1]:
        if line.iteration <= final.begin:
            here = f"{place} is of iteration {line.iteration}"
            raise RecordError(f"{here}, in a run that resumed from iteration {final.begin}")
    _check_order(attempts)
    started = last_node["started"]
    ended = last_node["ended"]
    for place, line in final.lines:
        if line.time and not seconds(started) - STEP_SECONDS <= line.time <= seconds(ended) + STEP_SECONDS:
            raise RecordError(f"{place} is outside the time of the run, {started} to {ended}")
    if with_logs or is_in_pieces:
        for node in run.nodes:
            _check_log(run.directory, node, final.lines if node is last_node else None)
    if with_logs:
        _check_earlier(run.directory, [line for line in run.iterations if line.begin != final.begin])


def _check_intervals(run: Run, attempts: Sequence[Attempt]) -> None:
    """Each line is of an iteration that the plan logs."""
    total = run.plan.iterations
    interval = run.plan.number("LOG_INTERVAL")
    for attempt in attempts:
        for place, line in attempt.lines:
            may_have_other_end = run.plan.recipe_changed_at and attempt is not attempts[-1]
            has_other_end = line.total != total and not may_have_other_end
            if has_other_end or line.iteration % interval:
                here = f"{place} is of iteration {line.iteration} of {line.total}"
                raise RecordError(f"{here}, where every {interval} of {total} are logged")


def began_at(run: Run, attempts: Sequence[Attempt]) -> int:
    """The iteration of the reshaped checkpoint with which the record begins; 0 for a run that began here."""
    if len(attempts) < 2 or attempts[0].lines or not (run.directory / RESHAPED_FROM).is_dir():
        return 0
    return attempts[1].begin


def _check_all_are_there(run: Run, began: int) -> bool:
    """Whether some iterations are only in the log, in pieces: what two processes printed at the same time."""
    interval = run.plan.number("LOG_INTERVAL")
    reached = {line.iteration for line in run.iterations}
    last = iterations_expected(run.plan.last_iteration, interval)
    missing = {number for number in range(interval, last + 1, interval) if number > began} - reached
    if not missing:
        return False
    in_pieces: set[int] = set()
    for line in lines_of(run.directory / f"node{run.nodes[-1]['node']}.log"):
        in_pieces.update(int(number) for number in re.findall(rb"\biteration\s+([0-9]{1,15})/", line))
    lacking = missing - in_pieces
    if lacking:
        where = " after its last line" if min(lacking) > max(reached, default=0) else ""
        count = f"{min(lacking)} of {run.plan.iterations}, and {len(lacking)} in all, though the run is complete"
        raise RecordError(f"{run.directory / METRICS}{where} lacks iteration {count}")
    return True


def _check_order(attempts: Sequence[Attempt]) -> None:
    """Iterations and times rise within an attempt."""
    for attempt in attempts:
        for (_, earlier), (place, later) in pairwise(attempt.lines):
            passed = later.time - earlier.time if later.time and earlier.time else 0
            if later.iteration <= earlier.iteration or passed < -STEP_SECONDS:
                what = f"iteration {later.iteration} comes {passed:.0f} s after iteration {earlier.iteration}"
                raise RecordError(f"{place} cannot follow: {what}")


def _check_earlier(directory: Path, lines: Sequence[Iteration]) -> None:
    """Lines of earlier attempts that count must be in one of the logs that these left."""
    logged: dict[str, list[float]] = {}
    paths = directory.glob("node*.log.*") if lines else ()
    for path in paths:
        for text in lines_of(path):
            moment, _, printed = text.decode(errors="replace").partition(" ")
            with suppress(ValueError):  # a run that was killed may leave anything
                iteration = log.iteration(printed)
                if iteration:
                    logged.setdefault(str(iteration), []).append(seconds(moment))
    for line in lines:
        times = logged.get(str(replace(line, begin=0, time=None)), ())
        if not any(line.time is None or abs(line.time - time) < SAME_SECONDS for time in times):
            where = directory / METRICS
            raise RecordError(f"{where} has an iteration {line.iteration} that no earlier attempt's log has")


def _check_log(directory: Path, part: Mapping[str, Any], lines: Sequence[tuple[str, Iteration]] | None) -> None:
    """A node's log must agree with its part, and with the last attempt's lines, None if the node logs no iterations."""
    path = directory / f"node{part['node']}.log"
    logged = list(log_lines(path))
    printed = [(place, found) for place, time, text in logged if (found := log.iteration(text, time))]
    texts = [text for _, _, text in logged]
    told = {
        "peak_memory": [asdict(peak) for peak in log.peak_memory(texts)],
        "evaluations": [asdict(found) for found in map(log.evaluation, texts) if found],
        "padded_vocab_size": next(filter(None, map(log.padded_vocabulary, reversed(texts))), None),
    }
    for name, value in told.items():
        if value is not None and value != part.get(name, value):
            raise RecordError(f"{path} and node{part['node']}.json disagree about {name.replace('_', ' ')}")
    if lines is None:
        return
    for (place, line), (there, its) in zip(lines, printed, strict=False):
        for name, value in vars(replace(line, begin=its.begin)).items():
            found = getattr(its, name)
            # As text, nan is equal to nan.
            is_same_time = name == "time" and (value is None or abs(value - found) < SAME_SECONDS)
            if not is_same_time and str(value) != str(found):
                raise RecordError(f"{place} has {name} {value}, {there.rpartition('/')[2]} has {found}")
    if len(lines) != len(printed):
        numbers = f"{len(lines)} iteration lines of its last attempt, {path.name} {len(printed)}"
        raise RecordError(f"{directory / METRICS} has {numbers}")
