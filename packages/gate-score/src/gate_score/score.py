"""Asks every gate about every defect and every honest pair, and counts."""

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gate_score.defect import DEFECTS, Defect
from gate_score.gates import GATES, REGRESSION, first_step_alone, shows
from gate_score.plan import Trial, honest_trials, later, set_aside, trial_of
from gate_score.processes import run, say
from gate_score.runs import distance


@dataclass
class Score:
    """Of a gate."""

    caught: dict[str, str] = field(default_factory=dict)
    """What it says, by defect."""
    missed: list[str] = field(default_factory=list)
    alarms: dict[str, str] = field(default_factory=dict)
    """What it says, by honest pair."""
    alarms_in_the_same_layout: int = 0
    """Of pairs of one layout that differ in PyTorch's seed alone."""
    seconds: float = 0.0
    """Of CPU time, a pair, without the trainings."""


@dataclass
class Result:
    defects: list[dict[str, Any]]
    scores: dict[str, Score]
    honest: int
    """Pairs without a mistake."""
    same_layout: int
    before_the_first_update: dict[str, str]
    """Defects that the traces' first step shows; and by what."""
    training_seconds: float
    """Of this command; 0 where all trainings were there."""
    seconds: float
    """Of this command in all."""
    software: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(root: Path, chosen: Sequence[str] = (), with_honest: bool = True) -> Result:
    """chosen: words in the names of defects; () for all."""
    defects = [one for one in DEFECTS if not chosen or any(word in one.name for word in chosen)]
    trials = {one.name: trial_of(one) for one in defects}
    pairs = honest_trials() if with_honest else []
    begin = time.perf_counter()
    run(list(dict.fromkeys(job for trial in (*trials.values(), *pairs) for job in trial.jobs)), root)
    training_seconds = time.perf_counter() - begin
    scores = {}
    for name in GATES:
        say(f"{name} is asked about {len(trials)} defects and {len(pairs)} honest pairs")
        scores[name] = score(name, trials, pairs, root)
    early = {name: first_step_alone(trial.pair(root)) for name, trial in trials.items()}
    return Result(
        [described(one, trials[one.name], root) for one in defects],
        scores,
        len(pairs),
        sum(is_same_layout(trial) for trial in pairs),
        {name: said for name, said in early.items() if said},
        training_seconds,
        time.perf_counter() - begin,
        f"Python {platform.python_version()}, PyTorch {torch.__version__}",
    )


def score(name: str, trials: dict[str, Trial], pairs: Sequence[Trial], root: Path) -> Score:
    gate = GATES[name]
    found = Score()
    begin = time.process_time()
    for defect, trial in trials.items():
        said = gate(trial.pair(root))
        if said:
            found.caught[defect] = said
        else:
            found.missed.append(defect)
    for trial in pairs:
        said = gate(trial.pair(root))
        is_again = is_same_layout(trial)
        if said and is_again:
            found.alarms_in_the_same_layout += 1
        if name in REGRESSION and not is_again:
            said = gate(other_layout(trial).pair(root))
        if said:
            found.alarms[trial.name] = said
    found.seconds = (time.process_time() - begin) / max(len(trials) + len(pairs), 1)
    return found


def is_same_layout(trial: Trial) -> bool:
    """Whether what was before differs in PyTorch's seed alone."""
    return bool(trial.tried.recipe.global_seed)


def other_layout(trial: Trial) -> Trial:
    """For gates that compare with the training before: here it was in one process."""
    return replace(trial, before=trial.reference)


def described(defect: Defect, trial: Trial, root: Path) -> dict[str, Any]:
    return {
        "name": defect.name,
        "kind": defect.kind,
        "layout": defect.layout,
        "source": defect.source,
        "seen": defect.seen,
        "needs": defect.needs,
        "shows": shows(trial.pair(root)),
        "distance": distance(root / trial.tried.directory, root / trial.before.directory),
        "aside": defect.name in set_aside(),
        "later": defect.name in later(),
    }
