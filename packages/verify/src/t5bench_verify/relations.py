"""The relations that an honest record obeys, as one table: what each figure follows from, and how closely.

A record tells most things more than once: an engine prints a rate beside the time and the batch from which it
follows, and the recorder's clock runs beside the engine's. ``RELATIONS`` lists every such relation within a run, and
``copies`` compares runs with each other. ``t5bench verify`` checks all of them; RELATIONS.md shows the table.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache, cached_property
from itertools import combinations, islice, pairwise
from pathlib import PurePosixPath
from statistics import fmean
from typing import Any

import msgspec

from t5bench.compare.statistics import event_within
from t5bench.costmodel.flops import flops_per_iteration
from t5bench.costmodel.parameters import parameters
from t5bench.record import log
from t5bench.record.command_script import script
from t5bench.record.files import METRICS, PROFILE, RecordError, read
from t5bench.record.log import Iteration
from t5bench.record.plan import FORMAT, Plan, by_name, same_value
from t5bench.record.reader import STEP_SECONDS, UNFORESEEN, decoded, log_lines, seconds
from t5bench.record.records import ENDING, read_parts
from t5bench.record.run import Run
from t5bench.record.settings import BY_NAME
from t5bench.record.status import CANCELLED, COMPLETE
from t5bench_verify import implied

# Tolerances. Those of printed figures are their last digit, and a little more where two of them are multiplied.
RATE = 0.0006
LEARNING_RATE = 0.0006  # the engines print four digits
PERPLEXITY = 2e-5
CLOCK = 0.02  # of the time between two lines; honest runs stay below 0.004
CLOCK_SECONDS = 0.05  # a busy machine's lines come late
LINES_AT_ONCE = 4  # of which one is in time
MOST_COMPARED = 20  # groups of lines
LEAST_HOST_MIB = 50
SAMPLED_SECONDS = 120  # a run that took longer has samples
SAMPLED_SHARE = 0.1  # of those that are due
PROFILED_SHARE = 0.5
SILENT_SECONDS = 3600  # before the first line, while nodes wait for each other and extensions compile, and at the end
SAMPLE_SECONDS = 60  # a sample that is due when a run ends may come later
LINK = 1.1
COPY_LINES = 10

MOST_FAULTS_OF_A_RELATION = 2

_NATIVE = re.compile(
    r"native engine: ([\d,]+) parameters, TP=(\d+) PP=(\d+) DP=(\d+), (\d+) micro-batches of (\d+),"
    r" vocabulary padded to (\d+), (?:torch\.)?(\w+) on (\w+), from iteration (\d+)"
)
_WORLD = re.compile(
    r"using world size: (\d+), data-parallel-size: (\d+), sequence-parallel size: \d+,"
    r" tensor-model-parallel size: (\d+), pipeline-model-parallel size: (\d+)"
)
_ARGUMENT = re.compile(r"\s+(\w+) \.{3,} (\S+)\s*")
_NATIVE_ARGUMENTS = re.compile(r"native engine's arguments: (.*)")
_VOCABULARY = re.compile(r"padded vocab \(size: (\d+)\) with (\d+) dummy tokens \(new size: (\d+)\)")
_PARAMETERS = re.compile(r"number of parameters on \(tensor, pipeline\) model parallel rank \(0, 0\): (\d+)")
_PEAK = re.compile(
    r"peak memory \| rank (\d+) \| host (\S+) \| device (cpu|cuda)\S* \|"
    r" allocated MiB ([\d.]+) \| reserved MiB ([\d.]+) \| host rss MiB ([\d.]+)"
)
_EVALUATED = re.compile(r"loss at iteration (\d+)")
_LOCAL_TIME = re.compile(r"datetime: (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class LogLine:
    """A line of a node's log. place: its file's name and its number."""

    place: str
    time: float
    text: str


@dataclass(frozen=True)
class Printed:
    """An iteration's line in the log, with every figure that the engine printed there, by its name."""

    place: str
    line: Iteration
    figures: Mapping[str, float]


class Evidence:
    """A run with the lines of its logs, read once for all relations. Raises RecordError."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.logs: dict[int, list[LogLine]] = {}
        for part in run.nodes:
            path = run.directory / f"node{part['node']}.log"
            lines = [LogLine(PurePosixPath(place).name, time, text) for place, time, text in log_lines(path)]
            self.logs[part["node"]] = lines

    @property
    def texts(self) -> Iterator[LogLine]:
        for lines in self.logs.values():
            yield from lines

    def matches(self, pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
        for entry in self.texts:
            for match in pattern.finditer(entry.text):
                yield entry.place, match

    @cached_property
    def printed(self) -> list[Printed]:
        """Without the lines in pieces, of which nothing can be said."""
        lines = []
        for entry in self.texts:
            line = log.iteration(entry.text, entry.time)
            if line:
                lines.append(Printed(entry.place, line, log.figures(entry.text)))
        return lines


@dataclass(frozen=True)
class Relation:
    """What an honest record tells twice."""

    quantity: str
    """What is checked."""
    follows_from: str
    """Where the record tells it again."""
    tolerance: str
    """How far the two may lie apart."""
    faults: Callable[[Evidence], Iterator[str]]
    """One sentence for each contradiction."""


def _is_near(value: float, expected: float, relative: float, absolute: float = 0.0) -> bool:
    return abs(value - expected) <= relative * abs(expected) + absolute


# ---- what the engine printed of its plan -----------------------------------------------------------------------------


def _native_header(evidence: Evidence) -> Iterator[str]:
    run = evidence.run
    layout = evidence.run.layout
    plan = run.plan
    if not run.padded_vocab_size:  # the run has not ended
        return
    for place, match in evidence.matches(_NATIVE):
        planned = {
            "parameters": f"{parameters(run.architecture):,}",
            "TP": layout.tp,
            "PP": layout.pp,
            "DP": layout.dp,
            "micro-batches": layout.micro_batches,
            "samples of a micro-batch": plan.number("MICRO_BATCH_SIZE"),
            "padded vocabulary": run.padded_vocab_size,
            "data type": _DTYPES[plan.precision],
            "device": plan.device,
            "first iteration": plan.resume_from,
        }
        if run.engine != "native":
            yield f"{place} shows another run than the plan: the native engine instead of {run.engine}"
        for (name, value), told in zip(planned.items(), match.groups(), strict=True):
            if str(value) != told:
                yield f"{place} shows another run than the plan: {name} {told} instead of {value}"


def _megatron_header(evidence: Evidence) -> Iterator[str]:
    layout = evidence.run.layout
    planned = (layout.world_size, layout.dp, layout.tp, layout.pp)
    for place, match in evidence.matches(_WORLD):
        if tuple(map(int, match.groups())) != planned:
            yield f"{place} shows another layout than the plan: {match[0]}"


def _printed_arguments(evidence: Evidence) -> Iterator[tuple[str, str, str]]:
    """Place, name and value: Megatron's lines ``seed ......... 1234``, or the native engine's numbers in one."""
    for place, match in evidence.matches(_ARGUMENT):
        yield place, match[1], match[2]
    for place, match in evidence.matches(_NATIVE_ARGUMENTS):
        for word in match[1].split():
            name, _, value = word.partition("=")
            yield place, name, value


def _engine_arguments(evidence: Evidence) -> Iterator[str]:
    arguments = evidence.run.plan.arguments
    settings = by_name([*arguments.settings, *arguments.extra])
    given = by_name(arguments.words)
    for place, name, value in _printed_arguments(evidence):
        argument = f"--{name.replace('_', '-')}"
        if argument in settings and given[argument] and not same_value(given[argument], value):
            yield f"{place} has {argument} {value}, and the plan '{given[argument]}'"


@cache
def _settings_by_argument() -> Mapping[str, list[str]]:
    """The names of the settings that become an argument."""
    names: dict[str, list[str]] = {}
    for name, declaration in BY_NAME.items():
        for argument in declaration.arguments:
            names.setdefault(argument, []).append(name)
    return names


def _settings(evidence: Evidence) -> Iterator[str]:
    """What the engine was given for a setting needs one."""
    plan = evidence.run.plan
    for argument in by_name(plan.arguments.settings):
        names = _settings_by_argument().get(argument)
        if names and not any(name in plan.settings for name in names):
            yield f"the engine was given {argument}, but the plan has no setting {' or '.join(names)}"


def _command(evidence: Evidence) -> Iterator[str]:
    """Of every node, whose plans may differ in places and names."""
    for part in read_parts(evidence.run.directory):
        plan = Plan.read(part["plan"])
        if not plan.layout:
            continue
        yield from implied.contradictions_of_command(plan)
        yield from implied.contradictions_of_ds_config(plan)
        yield from implied.contradictions_of_environment(plan)
        yield from implied.contradictions_of_choices(plan)
        yield from implied.contradictions_of_defaults(plan)


def _copies_of_the_plan(evidence: Evidence) -> Iterator[str]:
    """What the recorder wrote down of its plan, and where its attempt began."""
    for part in read_parts(evidence.run.directory):
        of_node = {"changed_at": 0, "recipe_changed_at": 0, "trained_samples": 0, **part["plan"]}
        data = part.get("data") or {}
        name = f"node{part['node']}"
        pairs = {
            "format": (part["format"], of_node["format"]),
            "data": (data.get("prefix"), of_node["data_prefix"]),
            "tokenizer": (data.get("tokenizer"), of_node["tokenizer"]),
        }
        for what, (recorded, planned) in pairs.items():
            if recorded is not None and recorded != planned:
                yield f"{name} was recorded with the {what} {recorded}, and planned with {planned}"
        for what in ("resume_from", "changed_at", "recipe_changed_at", "trained_samples"):
            if of_node[what] != getattr(evidence.run.plan, what):
                yield f"{name} has the {what} {of_node[what]}, the run {getattr(evidence.run.plan, what)}"
        if of_node["hosts"] and len(of_node["hosts"]) != evidence.run.layout.nnodes:
            yield f"{name} names the hosts {' '.join(of_node['hosts'])}, of {evidence.run.layout.nnodes} nodes"
    plan = evidence.run.plan
    if plan.changed_at > plan.resume_from:
        yield f"the layout changed at iteration {plan.changed_at}, but the run continues from {plan.resume_from}"
    if plan.recipe_changed_at > plan.resume_from:
        yield f"the recipe changed at iteration {plan.recipe_changed_at}, but the run continues from {plan.resume_from}"
    lines = evidence.run.iterations
    if lines and lines[-1].begin != plan.resume_from and plan.value("EVAL_ONLY", "0") != "1":
        yield f"the last attempt begins after iteration {lines[-1].begin}, planned was {plan.resume_from}"


def _vocabulary(evidence: Evidence) -> Iterator[str]:
    run = evidence.run
    arguments = run.plan.named_arguments
    if arguments.get("model_description"):  # which says how many rows there are, whatever divides them
        rows = run.architecture.padded_vocabulary
        if run.padded_vocab_size and run.padded_vocab_size != rows:
            yield f"the padded vocabulary is {run.padded_vocab_size}, and the model's description has {rows}"
        return
    given = arguments.get("make_vocab_size_divisible_by")
    if not given:
        return
    multiple = int(given) * run.layout.tp
    if run.padded_vocab_size and run.padded_vocab_size % multiple:
        yield f"the padded vocabulary {run.padded_vocab_size} is not a multiple of {multiple}"
    for place, match in evidence.matches(_VOCABULARY):
        size, dummies, padded = map(int, match.groups())
        if size + dummies != padded or dummies >= multiple:
            yield f"{place} pads {size} tokens with {dummies} to {padded}, where multiples of {multiple} are needed"


def _parameters(evidence: Evidence) -> Iterator[str]:
    run = evidence.run
    if run.layout.tp * run.layout.pp > 1 or run.plan.zero_stage == 3 or not run.padded_vocab_size:
        return
    for place, match in evidence.matches(_PARAMETERS):
        if int(match[1]) != parameters(run.architecture):
            yield f"{place} counts {match[1]} parameters, but the plan's model has {parameters(run.architecture)}"


# ---- an iteration's line ---------------------------------------------------------------------------------------------


def _samples(evidence: Evidence) -> Iterator[str]:
    plan = evidence.run.plan
    for printed in evidence.printed:
        iteration = printed.line.iteration
        samples = plan.samples_until(iteration)
        counted = printed.figures.get("consumed samples")
        if counted not in (None, samples):
            yield f"{printed.place} counts {counted:g} samples after {iteration} iterations, which have {samples}"
        batch = plan.samples(iteration - 1, iteration)
        told = printed.figures.get("global batch size")
        if told not in (None, batch):
            yield f"{printed.place} has a global batch of {told:g} samples at iteration {iteration}, planned is {batch}"


def _tokens_of_a_sample(run: Run) -> int:
    return run.architecture.encoder_length + run.architecture.decoder_length


def _tokens(evidence: Evidence) -> Iterator[str]:
    run = evidence.run
    length = _tokens_of_a_sample(run)
    for printed in evidence.printed:
        samples, tokens = (printed.figures.get(f"consumed {what}") for what in ("samples", "tokens"))
        if samples is not None and tokens is not None and tokens != samples * length:
            yield f"{printed.place} counts {tokens:g} tokens in {samples:g} samples of {length}"


def _throughput(evidence: Evidence) -> Iterator[str]:
    """Of every attempt. The batch of an iteration is the one before its line, as the engines count."""
    for line in evidence.run.iterations:
        if line.iteration <= evidence.run.plan.recipe_changed_at:
            continue  # of another batch, perhaps
        batch = evidence.run.plan.samples(line.iteration - 1, line.iteration)
        speed = line.samples_per_second
        took = line.elapsed_ms / 1000
        if abs(speed * took - batch) > 0.00006 * speed + RATE * took + 1e-9 * batch:
            what = f"iteration {line.iteration} in {METRICS} has {speed} samples/s and took {took} s"
            yield f"{what}, which do not give {batch} samples"


def _token_rate(evidence: Evidence) -> Iterator[str]:
    run = evidence.run
    for printed in evidence.printed:
        speed = printed.figures.get("tokens per gpu per second (tgs)")
        expected = printed.line.samples_per_second * _tokens_of_a_sample(run) / run.world_size
        if speed is not None and not _is_near(speed, expected, RATE, 0.0006 * _tokens_of_a_sample(run)):
            rate = f"{printed.line.samples_per_second:g} samples/s"
            yield f"{printed.place} has {speed:g} tokens/s per process, but {rate} give {expected:.6g}"


def _flops(evidence: Evidence) -> Iterator[str]:
    run = evidence.run
    if not run.padded_vocab_size or run.plan.value("RECOMPUTE", "none") != "none":
        return
    of_a_sample = flops_per_iteration(run.architecture, 1)
    # Another layout, of perhaps other processes, trained the iterations before the run changed its strategy.
    own = [line for line in run.iterations if line.iteration > run.plan.changed_at]
    for line in own:
        expected = line.samples_per_second * of_a_sample / run.world_size / 1e12
        if not _is_near(line.tflops, expected, 0.002, 0.006):
            rate = f"{line.samples_per_second:g} samples/s"
            yield f"iteration {line.iteration} has {line.tflops} TFLOP/s, but {rate} give {expected:.3g}"


def learning_rate(samples: int, batch: int, arguments: Mapping[str, str]) -> float:
    """The rate after so many samples: both engines count in samples, of which an iteration has `batch`."""
    highest = float(arguments["lr"])
    lowest = float(arguments.get("min_lr") or 0)
    warm_up = int(arguments.get("lr_warmup_iters") or 0) * batch
    end = int(arguments.get("lr_decay_iters") or arguments["train_iters"]) * batch
    if warm_up and samples <= warm_up:
        return highest * samples / warm_up
    if arguments.get("lr_decay_style") == "constant":
        return highest
    done = min(1.0, (samples - warm_up) / max(1, end - warm_up))
    remaining = 1 - done if arguments.get("lr_decay_style") == "linear" else (math.cos(math.pi * done) + 1) / 2
    return lowest + remaining * (highest - lowest)


_SCHEDULE = {"lr", "min_lr", "lr_warmup_iters", "lr_decay_iters", "lr_decay_style", "lr_warmup_samples"}


def _learning_rates(evidence: Evidence) -> Iterator[str]:
    run = evidence.run
    plan = evidence.run.plan
    arguments = plan.named_arguments | {"train_iters": plan.value("TRAIN_ITERS")}
    arguments["lr_warmup_iters"] = plan.value("LR_WARMUP_ITERS", "0")
    others = {name for name in arguments if name.startswith("lr_") or "opt_param_scheduler" in name} - _SCHEDULE
    style = arguments.get("lr_decay_style", "linear")
    if others or style not in ("constant", "linear", "cosine"):
        return
    batch = plan.number("GLOBAL_BATCH_SIZE")
    skipped = 0
    if run.iterations and run.iterations[0].begin and plan.precision == "fp16":
        return  # what was skipped before is in another record
    for line in run.iterations:
        skipped += line.skipped  # which do not advance the schedule
        if line.iteration <= plan.recipe_changed_at:
            continue  # of another schedule, perhaps
        expected = learning_rate(plan.samples(0, line.iteration) - skipped * batch, batch, arguments)
        if not _is_near(line.learning_rate, expected, LEARNING_RATE, 1e-6 * float(arguments["lr"])):
            what = f"iteration {line.iteration} has the learning rate {line.learning_rate:.4g}"
            yield f"{what}, but the schedule of {plan.value('TRAIN_ITERS')} iterations gives {expected:.4g}"


def _loss_scale(evidence: Evidence) -> Iterator[str]:
    precision = evidence.run.plan.precision
    for line in evidence.run.iterations:
        scale = line.loss_scale
        if scale is None:
            continue
        if precision != "fp16" and scale != 1:
            yield f"iteration {line.iteration} has a loss scale of {scale:g}, but {precision} needs none"
        if not scale or not math.isfinite(scale):
            yield f"iteration {line.iteration} has a loss scale of {scale:g}"


def _skipped(evidence: Evidence) -> Iterator[str]:
    interval = evidence.run.plan.number("LOG_INTERVAL")
    for line in evidence.run.iterations:
        for what, count in (("skipped", line.skipped), ("without a finite loss", line.nan)):
            if count > interval:
                yield f"iteration {line.iteration} has {count} iterations {what} in an interval of {interval}"
        if line.skipped and evidence.run.plan.precision == "fp32":
            yield f"iteration {line.iteration} skipped updates, which fp32 never does"
        if line.lm_loss is not None and not math.isfinite(line.lm_loss) and not line.nan:
            yield f"iteration {line.iteration} has the loss {line.lm_loss}, but counts no iteration that has none"


def _norms(evidence: Evidence) -> Iterator[str]:
    """An update by gradients whose norm is nan leaves no finite weight, so that no later loss is finite."""
    lines = evidence.run.iterations
    for number, line in enumerate(lines):
        if line.grad_norm is None or not math.isnan(line.grad_norm) or line.skipped:
            continue
        later = [after.lm_loss for after in lines[number:] if after.lm_loss is not None]
        if all(map(math.isfinite, later)):
            yield f"iteration {line.iteration} has the gradient norm nan, but its loss and all later ones are finite"


def _evaluations(evidence: Evidence) -> Iterator[str]:
    plan = evidence.run.plan
    every = plan.number("EVAL_INTERVAL")
    last = evidence.run.plan.iterations
    for found in evidence.run.evaluations:
        expected = math.exp(min(20.0, found.lm_loss))
        if not _is_near(found.perplexity, expected, PERPLEXITY):
            what = f"the evaluation at iteration {found.iteration} has the perplexity {found.perplexity:g}"
            yield f"{what}, but its loss {found.lm_loss:g} gives {expected:.6g}"
        is_due = every and found.iteration % every == 0
        if not is_due and found.iteration not in (last, plan.last_iteration, plan.resume_from):
            yield f"iteration {found.iteration} was evaluated, where every {every} of {last} are"
    if evidence.run.status != COMPLETE or not every or not plan.number("EVAL_ITERS"):
        return
    told = {found.iteration for found in evidence.run.evaluations}
    told |= {int(match[1]) for _, match in evidence.matches(_EVALUATED)}  # also in pieces
    for iteration in range(every, plan.last_iteration, every):
        if iteration > plan.resume_from and iteration not in told:
            yield f"iteration {iteration} was not evaluated, where every {every} of {last} are"


# ---- clocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Passed:
    """How much time has passed until a line, without evaluations, checkpoints and profiles."""

    iteration: int
    by_lines: float
    """Seconds, by the recorder's clock."""
    by_metrics: float
    """By the engine's."""

    @property
    def delay(self) -> float:
        return self.by_lines - self.by_metrics


def _passed(run: Run) -> list[_Passed]:
    begin = run.iterations[0].iteration if run.iterations else 0
    found = [_Passed(begin, 0.0, 0.0)]
    for before, line in pairwise(run.iterations):
        if not before.time or not line.time or before.begin != line.begin:
            continue
        if event_within(before.iteration, line.iteration, run.plan):
            continue
        by_lines = found[-1].by_lines + line.time - before.time
        took = line.elapsed_ms / 1000 * (line.iteration - before.iteration)
        found.append(_Passed(line.iteration, by_lines, found[-1].by_metrics + took))
    return found


def _clock(evidence: Evidence) -> Iterator[str]:
    """The recorder's clock and the engine's are two. Lines may come late, but never early: so of some lines that follow
    each other the one with the least delay is compared with that of others."""
    lines = _passed(evidence.run)
    if len(lines) < LINES_AT_ONCE:
        return
    at_once = max(LINES_AT_ONCE, len(lines) // MOST_COMPARED)
    groups = [lines[start : start + at_once] for start in range(0, len(lines) - at_once + 1, at_once)]
    if len(groups) < 3:
        third = max(1, len(lines) // 3)
        groups = [lines[:third]]
    groups.append(lines[-len(groups[0]) :])
    largest = 0.0
    said = ""
    for first, last in combinations([min(group, key=lambda line: line.delay) for group in groups], 2):
        by_lines = last.by_lines - first.by_lines
        by_metrics = last.by_metrics - first.by_metrics
        too_much = abs(by_lines - by_metrics) - CLOCK * max(by_lines, by_metrics) - CLOCK_SECONDS
        if not too_much <= largest:
            largest = too_much
            told = f"took {by_metrics:.3g} s by {METRICS}, but their lines came {by_lines:.3g} s apart"
            said = f"iterations {first.iteration + 1} to {last.iteration} {told}"
    if said:
        yield said


def _time_of_each_interval(evidence: Evidence) -> Iterator[str]:
    """An interval cannot take longer than the time that passed since the line before it, or since the start."""
    run = evidence.run
    previous: Iteration | None = None
    for line in run.iterations:
        if line.time is None or not math.isfinite(line.elapsed_ms):
            continue
        begin = line.begin if previous is None or previous.begin != line.begin else previous.iteration
        since = previous.time if previous and begin == previous.iteration else seconds(run.record["started"])
        took = line.elapsed_ms / 1000 * (line.iteration - begin)
        previous = line
        if since and line.begin == run.iterations[-1].begin and took > (line.time - since) + STEP_SECONDS:
            passed = f"its line came {line.time - since:.3g} s after the one before"
            yield f"iteration {line.iteration} took {took:.3g} s by {METRICS}, but {passed}"


def _node_times(evidence: Evidence) -> Iterator[str]:
    for part in evidence.run.nodes:
        lines = evidence.logs[part["node"]]
        started = seconds(part["started"])
        ended = seconds(part["ended"]) if part["ended"] else math.inf
        if not lines:
            continue
        first = lines[0].time
        last = max(entry.time for entry in lines)
        if not -STEP_SECONDS <= first - started <= SILENT_SECONDS:
            yield f"node{part['node']}.log begins {first - started:.0f} s after the start, {part['started']}"
        if math.isfinite(ended) and not -STEP_SECONDS <= ended - last <= SILENT_SECONDS:
            yield f"node{part['node']} ended {ended - last:.0f} s after the last line of its log, {part['ended']}"
        for before, line in pairwise(lines):
            if line.time < before.time - STEP_SECONDS:
                yield f"{line.place} came {before.time - line.time:.0f} s before the line above it"


def _local_time(evidence: Evidence) -> Iterator[str]:
    """Megatron prints the local time, in an unknown time zone: zones differ from UTC by quarters of an hour."""
    for entry in evidence.texts:
        match = _LOCAL_TIME.search(entry.text)
        if not match:
            continue
        printed = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc).timestamp()
        apart = printed - entry.time
        zone = round(apart / 900) * 900
        if abs(zone) > 15 * 3600 or abs(apart - zone) > STEP_SECONDS + 1:
            yield f"{entry.place} came at another time than the engine's clock shows: {match[0]}"


# ---- machine, memory, samples ----------------------------------------------------------------------------------------


def _peak_memory(evidence: Evidence) -> Iterator[str]:
    run = evidence.run
    if run.status == COMPLETE:
        ranks = [peak.rank for peak in run.peak_memory]
        if ranks != list(range(run.world_size)):
            yield f"peak memory is of the ranks {ranks}, in a run of {run.world_size} processes"
    for part in run.nodes:
        host = (part.get("cpu") or {}).get("memory_mib")
        device = max((entry.get("memory_mib") or 0 for entry in part["devices"]), default=0)
        for peak in part["peak_memory"]:
            name = f"rank {peak['rank']} of node {part['node']}"
            if peak["host_mib"] < LEAST_HOST_MIB:
                yield f"{name} used {peak['host_mib']:g} MiB of the host, less than an interpreter with torch takes"
            if host and peak["host_mib"] > host:
                yield f"{name} used {peak['host_mib']:g} MiB of the host's {host:g}"
            if device and (peak["device_mib"] or 0) > device:
                yield f"{name} used {peak['device_mib']:g} MiB of a GPU's {device:g}"
            if peak["rank"] not in run.layout.ranks_of(part["node"]):
                yield f"{name} does not run there"


def _peak_lines(evidence: Evidence) -> Iterator[str]:
    run = evidence.run
    counts = Counter(int(match[1]) for _, match in evidence.matches(_PEAK))
    for rank, count in counts.items():
        if count > 1:
            yield f"the logs have {count} lines with the peak memory of rank {rank}, which prints one"
    for part in run.nodes:
        for entry in evidence.logs[part["node"]]:
            for match in _PEAK.finditer(entry.text):
                _, host, device, allocated, reserved, _ = match.groups()
                if host != part["host"]:
                    yield f"{entry.place} is from the host {host}, the record from {part['host']}"
                if device != run.plan.device:
                    yield f"{entry.place} is from the device {device}, the plan is for {run.plan.device}"
                if float(reserved) and float(allocated) > float(reserved):
                    yield f"{entry.place} has more memory allocated than reserved"


def _sample_times(evidence: Evidence) -> Iterator[str]:
    for part in evidence.run.nodes:
        started = seconds(part["started"])
        ended = seconds(part["ended"]) if part["ended"] else math.inf
        name = f"node{part['node']}.samples.jsonl"
        # A run that resumed keeps the samples of earlier attempts.
        began = -math.inf if evidence.run.plan.resume_from else started
        for sample in evidence.run.samples[part["node"]]:
            if not began - STEP_SECONDS <= sample["time"] <= ended + SAMPLE_SECONDS:
                yield f"{name} has a sample of {sample['time']:.0f}, outside the run, {started:.0f} to {ended:.0f}"
        for before, sample in pairwise(evidence.run.samples[part["node"]]):
            if sample["time"] == before["time"]:
                yield f"{name} has two samples of {sample['time']:.3f}"
                break


def _samples_present(evidence: Evidence) -> Iterator[str]:
    interval = evidence.run.plan.decimal("SAMPLE_INTERVAL")
    for part in evidence.run.nodes:
        if part["status"] != COMPLETE or not part["ended"]:
            continue
        took = seconds(part["ended"]) - seconds(part["started"])
        count = len(evidence.run.samples[part["node"]])
        if took > SAMPLED_SECONDS and count < SAMPLED_SHARE * took / interval:
            what = f"node{part['node']}.samples.jsonl has {count} samples of {took:.0f} s"
            yield f"{what}, where one is taken every {interval:g} s"


def _links(evidence: Evidence) -> Iterator[str]:
    """A counter never goes back, and cannot grow faster than its link carries bytes; a buffer may add a little."""
    for part in evidence.run.nodes:
        for before, sample in pairwise(evidence.run.samples[part["node"]]):
            for interface in sample["network"].keys() & before["network"].keys():
                for way in ("sent", "received"):
                    moved = sample["network"][interface][way] - before["network"][interface][way]
                    yield from _moved(part, interface, way, moved, (before["time"], sample["time"]))


def _moved(
    part: Mapping[str, Any], interface: str, way: str, moved: float, times: tuple[float, float]
) -> Iterator[str]:
    """moved: bytes between the times of two samples."""
    name = f"node{part['node']}.samples.jsonl"
    begin, end = times
    # What an earlier attempt counted may be another machine's, or from before it started again.
    if moved < 0 and begin >= seconds(part["started"]) - STEP_SECONDS:
        yield f"{name} has {-moved:.3g} bytes fewer {way} over {interface} than before"
    speed = (part["network"].get(interface) or {}).get("speed_mbit")
    if speed and moved > LINK * speed * 1e6 / 8 * (end - begin + 0.1):
        carries = f"in {end - begin:.3g} s, more than {speed} Mbit/s carry"
        yield f"{name} has {moved:.3g} bytes {way} over {interface} {carries}"


def _gpus(evidence: Evidence) -> Iterator[str]:
    for part in evidence.run.nodes:
        memory = max((entry.get("memory_mib") or 0 for entry in part["devices"]), default=0)
        name = f"node{part['node']}.samples.jsonl"
        for sample in evidence.run.samples[part["node"]]:
            for gpu in sample["gpus"]:
                if (gpu.get("utilization") or 0) > 100:
                    yield f"{name} has a GPU that was busy {gpu['utilization']:g} % of the time"
                if memory and (gpu.get("memory_mib") or 0) > LINK * memory:
                    yield f"{name} has {gpu['memory_mib']:g} MiB used of a GPU's {memory:g}"


# ---- the end, and the files that repeat the record -------------------------------------------------------------------


def _ends(evidence: Evidence) -> Iterator[str]:
    for part in evidence.run.nodes:
        name = f"node{part['node']}"
        status = part["status"]
        if status == COMPLETE:
            told = {key: part.get(key) for key in ("signal", "cause", "reason", "remedy")}
            told["exit_status"] = part["exit_status"]
            wrong = {key: value for key, value in told.items() if value}
            if wrong or part["exit_status"] is None:
                wrong = wrong or {"exit_status": None}
                said = ", ".join(f"{key} {value}" for key, value in wrong.items())
                yield f"{name} is complete, but has {said}"
        elif status == CANCELLED and not part["signal"]:
            yield f"{name} was cancelled, but by no signal"


def _what_others_heard(evidence: Evidence) -> Iterator[str]:
    parts = {part["node"]: part for part in evidence.run.nodes}
    for part in evidence.run.nodes:
        for heard in part.get("heard") or []:
            other = parts.get(heard["node"])
            if other is None:
                continue
            for key in ("host", "status"):
                # A node that completes learns only then that another did not.
                learnt_later = key == "status" and COMPLETE in (heard[key], other[key])
                if heard[key] != other[key] and not learnt_later:
                    what = f"node {part['node']} heard that node {heard['node']} has the {key} {heard[key]}"
                    yield f"{what}, but its record has {other[key]}"


def _command_scripts(evidence: Evidence) -> Iterator[str]:
    for part in read_parts(evidence.run.directory):
        path = evidence.run.directory / f"node{part['node']}.command.sh"
        if not path.exists():
            yield f"{path.name} is missing"
        elif part["format"] != FORMAT:
            continue  # an earlier version's launcher wrote it in another way
        elif read(path).decode(errors="surrogateescape") != script(Plan.read(part["plan"])):
            yield f"{path.name} has another command than the plan"


def _json(content: bytes) -> object:
    """None for what is no JSON."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _merged_record(evidence: Evidence) -> Iterator[str]:
    run = evidence.run
    path = run.directory / "run.json"
    expected = _json(msgspec.json.encode(run.record))
    merged = _json(read(path)) if path.exists() else None
    if merged is None and run.status != COMPLETE and not path.exists():  # some nodes of a failed run never began
        return
    is_older = isinstance(merged, dict) and any(merged.get(key) != run.record[key] for key in ENDING)
    if merged != expected and not is_older:  # that of a run that was killed
        yield f"{path.name} differs from the nodes' parts"


def _deepspeed_options(evidence: Evidence) -> Iterator[str]:
    path = evidence.run.directory / "ds_config.json"
    planned = evidence.run.plan.ds_config
    if planned and path.exists() and _json(read(path)) != planned:
        yield f"{path.name} differs from the plan's"


class _ProfiledRank(msgspec.Struct):
    rank: int
    wall_ms: float
    parts: dict[str, float]
    host: str = ""


class _Profiled(msgspec.Struct):
    ranks: list[_ProfiledRank] = []
    iteration: int | None = None


def _profile(evidence: Evidence) -> Iterator[str]:
    run = evidence.run
    path = run.directory / PROFILE
    profiled = run.plan.number("PROFILE_ITERATION")
    if not path.exists():
        if run.status == COMPLETE and run.plan.resume_from < profiled <= run.plan.last_iteration:
            yield f"{PROFILE} is missing, though iteration {profiled} was to be profiled and the run is complete"
        return
    try:
        content = decoded(path, read(path), _Profiled)
    except RecordError as error:
        yield str(error)
        return
    ranks = content.ranks
    if sorted(entry.rank for entry in ranks) != list(range(run.world_size)):
        yield f"{PROFILE} has {len(ranks)} ranks, in a run of {run.world_size} processes"
    is_of_an_earlier_attempt = (content.iteration or 0) <= run.plan.resume_from
    if content.iteration not in (None, profiled) and not is_of_an_earlier_attempt:
        yield f"{PROFILE} is of iteration {content.iteration}, planned was {profiled}"
    hosts = {rank: part["host"] for part in run.nodes for rank in run.layout.ranks_of(part["node"])}
    for entry in ranks:
        is_elsewhere = bool(entry.host) and entry.host != hosts.get(entry.rank, entry.host)
        if is_elsewhere and not is_of_an_earlier_attempt:
            yield f"{PROFILE} has rank {entry.rank} on {entry.host}, the record on {hosts[entry.rank]}"
        total = sum(entry.parts.values())
        if not _is_near(total, entry.wall_ms, 0.01, 1.0):
            yield f"the parts of rank {entry.rank} in {PROFILE} take {total:.4g} ms, the whole {entry.wall_ms:.4g} ms"
    if profiled and content.iteration == profiled and ranks:
        yield from _time_of_profile(run, profiled, max(entry.wall_ms for entry in ranks))


def _time_of_profile(run: Run, profiled: int, took: float) -> Iterator[str]:
    """The profiled iteration lies between two lines, and a profiler makes none faster. took: milliseconds."""
    lines = [line for line in run.iterations if math.isfinite(line.elapsed_ms)]
    others = [line.elapsed_ms for line in lines]
    if others and took < PROFILED_SHARE * min(others):
        yield f"{PROFILE} takes {took:.4g} ms, but the fastest iteration {min(others):.4g} ms"
    for before, line in pairwise(lines):
        if before.iteration < profiled <= line.iteration and before.begin == line.begin and before.time and line.time:
            passed = 1000 * (line.time - before.time)
            if took > passed * (1 + CLOCK) + 1000 * CLOCK_SECONDS:
                yield f"{PROFILE} takes {took:.4g} ms, but its line came {passed:.4g} ms after the one before"


RELATIONS: tuple[Relation, ...] = (
    Relation("layout, micro-batches, parameters, vocabulary, data type, device, first iteration in the native engine's "
             "first line", "the plan; parameters: its architecture and the vocabulary", "none", _native_header),
    Relation("processes, DP, TP and PP in Megatron's first line", "the plan's layout", "none", _megatron_header),
    Relation("the arguments that an engine prints", "the plan's arguments", "none", _engine_arguments),
    Relation("settings that the engine is given as arguments", "the plan's arguments", "none", _settings),
    Relation("the engine's arguments and variables, DeepSpeed's options, hosts, ports and places",
             "the plan's settings, by the planner's own functions; a setting that nobody chose has its default",
             "none", _command),
    Relation("format, data, tokenizer and first iteration of a record",
             "its plan; a layout changes where a run goes on", "none", _copies_of_the_plan),
    Relation("padded vocabulary", "the tokenizer's size, the multiple and TP", "none", _vocabulary),
    Relation("the parameters that Megatron counts (TP 1, PP 1)", "architecture and vocabulary", "none", _parameters),
    Relation("consumed samples, global batch", "iterations times the planned batch", "none", _samples),
    Relation("consumed tokens", "consumed samples times the sequence lengths", "none", _tokens),
    Relation("samples/s", "the batch over the iteration's time", "their last digits", _throughput),
    Relation("tokens/s per process", "samples/s, the lengths and the processes", "0.06 %", _token_rate),
    Relation("TFLOP/s", "samples/s times the FLOPs of a sample", "0.2 % and 0.006", _flops),
    Relation("learning rate", "peak, minimum, warm-up, shape, planned and skipped iterations", "0.06 %",
             _learning_rates),
    Relation("loss scale", "the precision: 1 except in fp16", "none", _loss_scale),
    Relation("skipped iterations, iterations without a finite loss", "the interval, the precision, the loss", "none",
             _skipped),
    Relation("a gradient norm of nan", "no finite loss follows, unless the update was skipped", "none", _norms),
    Relation("perplexity, iterations of evaluations", "the evaluation's loss; EVAL_INTERVAL", "0.002 %", _evaluations),
    Relation("the iterations' times", "the times at which their lines came, without evaluations, checkpoints "
             "and profiles", "2 % and 0.05 s", _clock),
    Relation("an iteration's time", "at most the time since the line before it", f"{STEP_SECONDS} s",
             _time_of_each_interval),
    Relation("start and end of a node", "the first and the last line of its log, whose times do not decrease",
             f"{STEP_SECONDS} s; {SILENT_SECONDS // 60} minutes without a line", _node_times),
    Relation("the dates that Megatron prints", "the times of their lines, in any time zone", f"{STEP_SECONDS + 1} s",
             _local_time),
    Relation("peak memory", "every rank once, on its node; at most the memory of the host or the GPU; on the "
             f"host at least {LEAST_HOST_MIB} MiB", "none", _peak_memory),
    Relation("host and device of a peak-memory line", "the record's host, the plan's device; one line of a rank",
             "none", _peak_lines),
    Relation("times of samples", "the run's start and end; no two are alike", f"{SAMPLE_SECONDS} s",
             _sample_times),
    Relation("number of samples", "SAMPLE_INTERVAL and the time of the run",
             f"a tenth; runs of {SAMPLED_SECONDS} s", _samples_present),
    Relation("bytes between two samples", "never fewer, and at most what the link carries in that time", "10 %",
             _links),
    Relation("use and memory of GPUs in samples", "at most 100 %, at most the GPU's memory", "10 %", _gpus),
    Relation("exit status, signal, cause and reason of a node", "its status", "none", _ends),
    Relation("what a node heard about another", "the other's host and end", "none", _what_others_heard),
    Relation("`node<R>.command.sh`", "the plan's command, environment and DeepSpeed options", "none", _command_scripts),
    Relation("`run.json`", "the nodes' parts", "none", _merged_record),
    Relation("`ds_config.json`", "the plan's DeepSpeed options", "none", _deepspeed_options),
    Relation("ranks, hosts, iteration and parts of a profile",
             "the processes, their nodes, PROFILE_ITERATION, the iteration's whole", "1 % and 1 ms", _profile),
)  # fmt: skip


def contradictions(run: Run) -> Iterator[str]:
    """Where a run's record contradicts itself, a sentence each; of every relation the first few. Raises RecordError."""
    evidence = Evidence(run)
    for relation in RELATIONS:
        try:
            yield from islice(relation.faults(evidence), MOST_FAULTS_OF_A_RELATION)
        except RecordError:
            raise
        except UNFORESEEN as error:
            yield f"{relation.quantity}: the record has values with which nothing can be calculated: {error!r}"


# ---- runs beside each other ------------------------------------------------------------------------------------------


def copies(runs: Sequence[Run]) -> Iterator[str]:
    """Runs that cannot be two, a sentence for each: no two runs are one process, or have one noise."""
    for number, run in enumerate(runs):
        for other in runs[:number]:
            why = _why_a_copy(run, other)
            if why:
                yield f"{run.directory} is a copy of {other.directory}: {why}"


def _why_a_copy(run: Run, other: Run) -> str:
    processes = _processes(run)
    if processes and processes == _processes(other):
        (host, pid, _), *_ = processes
        return f"both were process {pid} of {host}, started at the same time"
    ours = _counters(run)
    theirs = _counters(other)
    if len(set(ours)) > 2 and ours == theirs:
        return "their network counters are the same in every sample"
    is_same_kind = (run.strategy, run.layout, run.plan.device) == (other.strategy, other.layout, other.plan.device)
    if is_same_kind and _are_one_times_a_factor(run.iterations, other.iterations):
        return "one's times are the other's, all multiplied by the same number"
    return ""


def _processes(run: Run) -> list[tuple[str, Any, str]]:
    parts = [part for part in run.nodes if "pid" in part]
    return [(part["host"], part["pid"], part["started"]) for part in parts]


def _counters(run: Run) -> list[float]:
    """How far the counters moved from sample to sample, whatever they began with."""
    moved = []
    for samples in run.samples.values():
        for before, sample in pairwise(samples):
            for name in sorted(sample["network"].keys() & before["network"].keys()):
                moved.append(sample["network"][name]["sent"] - before["network"][name]["sent"])
    return moved


def _are_one_times_a_factor(lines: Sequence[Iteration], others: Sequence[Iteration]) -> bool:
    """Whether two runs' times differ by rounding alone from one another's multiples; noise never does that."""
    if len(lines) != len(others) or len(lines) < COPY_LINES:
        return False
    pairs = [(line.elapsed_ms, other.elapsed_ms) for line, other in zip(lines, others, strict=True)]
    if not all(0 < time < math.inf for pair in pairs for time in pair):
        return False
    factor = fmean(ours for ours, _ in pairs) / fmean(theirs for _, theirs in pairs)
    rounding = 0.06 * (1 + factor)
    values: Iterable[float] = (theirs for _, theirs in pairs)
    spread = max(values) - min(theirs for _, theirs in pairs)
    is_noisy = spread > 20 * rounding
    return is_noisy and all(abs(ours - factor * theirs) <= rounding for ours, theirs in pairs)
