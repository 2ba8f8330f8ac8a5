"""The runs of a search, and what it remembers of them: search.json in its directory."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import log, sqrt
from pathlib import Path

from t5bench import Problem, note
from t5bench.choose.search.next_run import SearchRun
from t5bench.choose.space import Candidate
from t5bench.compare.interval import MOST_INDEPENDENT
from t5bench.compare.statistics import timing
from t5bench.given_files import read_json
from t5bench.record.files import RecordError
from t5bench.record.records import load
from t5bench.record.status import COMPLETE, OUT_OF_MEMORY
from t5bench.sweep.launch import UNWATCHED, Launch, PlannedRun
from t5bench.sweep.sweep import run_all

# Of a normal distribution, in its standard deviations: the distance of its quartiles, and the deviation of a median of
# one value per independent one.
BETWEEN_QUARTILES = 1.349
OF_A_MEDIAN = 1.253
STATE = "search.json"
GOES_ON = "Run the same command again to continue."


@dataclass
class Moment:
    """What the search would have said after so many minutes of runs."""

    minutes: float
    named: str
    possible_regret: float


@dataclass
class SearchState:
    """What a search has spent and learnt; an interrupted one continues from it."""

    question: Mapping[str, str]
    """What is searched: another question needs another directory."""
    outcomes: dict[str, SearchRun] = field(default_factory=dict)
    """Of layouts that ran, by name, in the order of their runs."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why a layout cannot run, or does not train as DDP does."""
    ran_out: list[str] = field(default_factory=list)
    """Layouts that ran out of memory, which are among those that failed."""
    parity: list[str] = field(default_factory=list)
    """Layouts in which the check found no difference from DDP."""
    seconds: float = 0.0
    """Spent on all runs."""
    lost: int = 0
    """Runs that say nothing of a time: those that failed, and those before them of a layout that failed later."""
    moments: list[Moment] = field(default_factory=list)

    def write(self, runs_dir: Path) -> None:
        temporary = runs_dir / f"{STATE}.new"
        temporary.write_text(json.dumps(asdict(self), indent=1))
        temporary.rename(runs_dir / STATE)


def remembered(runs_dir: Path, question: Mapping[str, str]) -> SearchState:
    """What an earlier search in this directory learnt. Raises Problem if it had another question."""
    path = runs_dir / STATE
    if not path.exists():
        return SearchState(question)
    earlier: SearchState = read_json(path, SearchState, "Choose another RUNS_DIR")
    other = [name for name in {**question, **earlier.question} if question.get(name) != earlier.question.get(name)]
    if other:
        then = earlier.question.get(other[0], "unset")
        found = f"{runs_dir} holds another search: {other[0]} is '{question.get(other[0], 'unset')}' and was '{then}'"
        raise Problem(found, "Choose another RUNS_DIR")
    return earlier


def name_of(candidate: Candidate) -> str:
    """The name of its run's directory."""
    words = f"{candidate.job.engine} {candidate.title}".replace("ZeRO-", "zero").lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


@dataclass(frozen=True)
class Runner:
    """Makes the runs of a search on its hosts."""

    runs_dir: Path
    over_ssh: bool
    iterations: int
    memory: SearchState

    def measure(self, name: str, candidate: Candidate) -> SearchRun | None:
        """Makes a short run; None if that cannot run. Raises Problem and Interrupted."""
        started = time.monotonic()
        before = self.memory.outcomes.get(name)
        settings = candidate.settings() | {"TRAIN_ITERS": str(self.iterations), "LOG_INTERVAL": "1"}
        outcome = None
        try:
            repeat = f"-{before.repeats + 1}" if before else ""
            directory = self.runs_dir / "runs" / f"{name}{repeat}"
            reason = self.train(directory, candidate.strategy, candidate.job.parallel.world, settings)
            if not reason:
                outcome = outcome_of(directory)
        finally:
            self.memory.seconds += time.monotonic() - started
        if outcome:
            self.memory.outcomes[name] = before.with_another(outcome) if before else outcome
        else:
            made = 1
            if before:
                made += before.repeats
                reason += f" (in run {made} of this layout; it ran before, at {before.seconds:.4g} s an iteration)"
            self.memory.lost += made
            self.memory.outcomes.pop(name, None)
            self.memory.failed[name] = reason
            if reason.startswith(f"{OUT_OF_MEMORY}:"):
                self.memory.ran_out.append(name)
            note(f"{candidate.title} is left out: {reason}")
        self.memory.write(self.runs_dir)
        return outcome

    def train(
        self,
        directory: Path,
        strategy: str,
        processes: int,
        settings: Mapping[str, str],
        arguments: Sequence[str] = (),
    ) -> str:
        """Makes one run; why it failed, or ""."""
        chosen = {name: value for name, value in settings.items() if value or name == "PRECISION_FLAG"}
        launch = Launch({**UNWATCHED, **chosen}, self.over_ssh, arguments)
        row = PlannedRun(directory.name, strategy, processes)
        planned = launch.ask(row, directory)
        if planned.obstacles:
            return planned.obstacles[0].found
        run_all(launch, {directory: replace(row, plan=planned)}, self.runs_dir, goes_on=GOES_ON)
        try:
            record = load(directory)
        except RecordError as error:
            return str(error)
        return "" if record.status == COMPLETE else f"{record.status}: {record.reason}"


def outcome_of(directory: Path) -> SearchRun:
    """What a complete run measured. However many its iterations, they see few states of the machine. Raises Problem."""
    run = load(directory)
    timed = timing(run.iterations, run.plan)
    if not timed:
        raise Problem(f"{directory} has no measured iterations", "Set TRAIN_ITERS to more")
    lower, upper = timed.spread
    deviation = log(upper / lower) / BETWEEN_QUARTILES
    independent = min(len(timed.used), MOST_INDEPENDENT)
    return SearchRun(timed.milliseconds.median / 1000, OF_A_MEDIAN * deviation / sqrt(independent))
