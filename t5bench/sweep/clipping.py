"""CLIP_GRAD=among: a number among DDP's own gradient norms.

Then gradients are clipped in some iterations and not in others, so that a wrong scale of them shows. Which norms a
model has, only its training says: DDP trains until it has clipped so.
"""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from t5bench import note
from t5bench.record.files import RecordError
from t5bench.record.records import load
from t5bench.record.settings import BY_NAME
from t5bench.sweep.launch import BASELINE, UNWATCHED, Launch, PlannedRun
from t5bench.sweep.micro_batches import MakeRun, tried
from training_comparison.verdict import clip_among, clips_some

AMONG = "among"
TRIALS = ".clipping"  # hidden, so that no comparison takes these runs for its own
TRIAL_LINES = 10  # of a log, each with a norm
MOST_TRIALS = 3


def norms_of(directory: Path) -> list[float]:
    """Of a run's gradients, before clipping; those that are finite. None where there is no run."""
    try:
        norms = [iteration.grad_norm for iteration in load(directory).iterations]
    except RecordError:
        return []
    return [norm for norm in norms if norm is not None and math.isfinite(norm)]


def with_clip_among(train: Callable[[str], Path], clip: str) -> tuple[str, Path]:
    """The number, and the directory of DDP's run with it. It stays as it is where all norms are equal or unknown.

    train: trains DDP with a CLIP_GRAD; the run's directory. clip: the first one, which is the answer if it is among
    the norms.
    """
    directory = train(clip)
    for _ in range(MOST_TRIALS - 1):
        norms = norms_of(directory)
        if len(set(norms)) < 2 or clips_some(norms, float(clip)):
            break
        clip = clip_among(norms)
        note(f"DDP's gradient norms are {min(norms):.4g} to {max(norms):.4g}: once more with CLIP_GRAD={clip}")
        directory = train(clip)
    return clip, directory


def clip_of_sweep(settings: Mapping[str, str], runs_dir: Path, over_ssh: bool, make_run: MakeRun) -> str:
    """A number among the norms of DDP in a sweep, by short runs. Raises Problem and Interrupted.

    settings: of all its runs. The short ones are the beginning of such a run.
    """
    asked = os.environ | settings
    given = {name: int(asked.get(name) or BY_NAME[name].default) for name in ("TRAIN_ITERS", "LOG_INTERVAL")}
    iterations = min(given["TRAIN_ITERS"], TRIAL_LINES * given["LOG_INTERVAL"])
    decay = asked.get("LR_DECAY_ITERS") or str(given["TRAIN_ITERS"])
    shorter = {"TRAIN_ITERS": str(iterations), "LR_DECAY_ITERS": decay, "RAMPUP_BATCH_SIZE": ""}
    said = []

    def train(clip: str) -> Path:
        launch = Launch({**settings, **UNWATCHED, **shorter, "CLIP_GRAD": clip}, over_ssh)
        name = f"{BASELINE}-clip-{clip}"
        said.append(tried(launch, PlannedRun(name, BASELINE), runs_dir / TRIALS, make_run).reason)
        return runs_dir / TRIALS / name

    clip, _ = with_clip_among(train, BY_NAME["CLIP_GRAD"].default)
    unknown = f", because DDP's gradient norms are not known: {said[-1]}" if said[-1] else ""
    note(f"CLIP_GRAD={clip}{unknown}")
    return clip
