"""``python -m t5bench parity-check``: trains strategies in the same way on this machine, and compares them with DDP."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from t5bench import REPOSITORY, Problem, note, raise_on_signals
from t5bench.compare.parity import NATIVE, SEEDS
from t5bench.compare.sensitivity import MARGIN
from t5bench.costmodel.schedule import INTERLEAVED, ZERO_BUBBLE
from t5bench.plan.launchers import accepted, declarations, tell_left_out
from t5bench.record.plan import Plan
from t5bench.record.records import load
from t5bench.sweep.clipping import with_clip_among
from t5bench.sweep.launch import BASELINE, Launch, PlannedRun, choose, plan_runs
from t5bench.sweep.sweep import run_all, t5bench
from t5bench.unread import never_wait
from training_comparison.curves import TOLERANCE
from training_comparison.verdict import EXIT_DIFFERENT, EXIT_NOT_SHOWN

MEGATRON = "megatron"
# Numbers that have no setting. With an epsilon as large as the gradients and a short memory of their squares, mistakes
# show after a few updates; with larger initial weights GELU's two forms differ by more than rounding.
ARGUMENTS = ("--adam-beta1", "0.9", "--adam-beta2", "0.9", "--adam-eps", "0.01", "--init-method-std", "0.1")
TRACE = ("--trace",)
SEVEREST_FIRST = (EXIT_DIFFERENT, 2, EXIT_NOT_SHOWN)  # of parity's exit statuses
PERCENT = 0.01
# Settings, or engine arguments for numbers that have none.
NUMBERS = {
    "learning rate": "LR",
    "final learning rate": "MIN_LR",
    "weight decay": "WEIGHT_DECAY",
    "clipping": "CLIP_GRAD",
    "Adam's epsilon": "--adam-eps",
    "standard deviation of the weights": "--init-method-std",
}


def run(args: argparse.Namespace) -> int:
    """Raises Problem if the check cannot run."""
    never_wait("stdout", "stderr")
    raise_on_signals()
    unset = [name for name in ("DROPOUT", "SEED") if name not in os.environ]
    if unset:
        said = f"{' and '.join(unset)} must be set, which the script does that calls this"
        raise Problem(said, "Run: bash scripts/check_parity.sh")
    strategies = list(dict.fromkeys([BASELINE, *choose(args.strategies)]))
    if not args.strategies:
        tell_left_out()
    if args.engine == NATIVE and strategies == [BASELINE] and not args.sensitivity:
        raise Problem(f"{BASELINE} is the baseline and needs another strategy to compare", "Name one, or none for all")
    # Runs of an engine that has changed since would be mistaken for runs of this one.
    if args.runs_dir.exists():
        raise Problem(f"{args.runs_dir} already exists, but the check needs new runs", "Choose another RUNS_DIR")
    unsupported = why_unsupported(args.runs_dir)
    if args.sensitivity:
        curves = measure_launched(args.runs_dir) if unsupported else measure(args.runs_dir)
        return t5bench("parity", "--sensitivity", curves)
    if args.locate and args.engine != NATIVE:
        raise Problem("only the native engine writes what --locate reads", "Set ENGINE=native")
    if not args.bf16:
        return check(args, strategies, unsupported)
    # Rounding to bf16 hides what is smaller than itself; in fp32 the same mistakes show.
    note("in fp32 first, where no mistake hides behind the rounding of bf16")
    of_fp32 = check(with_runs_in(args, args.runs_dir / "fp32"), strategies, unsupported)
    note("and in bf16")
    os.environ["PRECISION_FLAG"] = "--bf16"
    args.blind_spots = False  # they were measured
    of_bf16 = check(args, strategies, unsupported)
    if of_fp32 == EXIT_DIFFERENT != of_bf16:
        note("the rounding of bf16 hides what the check in fp32, above, found")
    return next(status for status in (*SEVEREST_FIRST, 0) if status in (of_fp32, of_bf16))


def with_runs_in(args: argparse.Namespace, runs_dir: Path) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | {"runs_dir": runs_dir})


def check(args: argparse.Namespace, strategies: list[str], unsupported: str) -> int:
    """Trains the strategies in the environment's precision and compares them; parity's exit status.

    unsupported: why the native engine cannot train this model family. Raises Problem.
    """
    has_dropout = float(os.environ["DROPOUT"]) > 0
    is_fp32 = not os.environ.get("PRECISION_FLAG")
    # In bf16 a run is also judged by its own numbers, because its curves may differ by more than small mistakes.
    is_traced = args.engine == NATIVE and not has_dropout and (args.locate or not is_fp32)
    is_traced = is_traced and can_be_traced(needed=args.locate)
    if os.environ.get("MODEL"):
        clip_among_norms(args.engine, args.runs_dir)
    train(args.engine, strategies, args.runs_dir, further=TRACE if is_traced else ())
    # A strategy that could not run has no run directory, and therefore fails.
    runs = [args.runs_dir / args.engine / name for name in strategies]
    options: list[str | Path] = ["--baseline", args.runs_dir / args.engine / BASELINE]
    if unsupported:
        note(f"{unsupported}: mistakes that all strategies share, and those that these settings hide, go unnoticed")
    elif args.engine == MEGATRON and not has_dropout:  # the engines draw other masks
        train(NATIVE, [BASELINE], args.runs_dir)
        options += ["--reference", args.runs_dir / NATIVE / BASELINE]
    if args.engine == NATIVE and not has_dropout and is_fp32:
        if os.environ.get("MODEL"):
            note("MODEL is compared with DDP alone: docs/generated/kinds.md compares its kind with Transformers")
        elif os.environ.get("MODEL_FAMILY", "t5") == "t5":
            options += ["--outside", train_outside(args.runs_dir)]
        else:
            note("the outside reference is a T5: mistakes that all strategies of a GPT share go unnoticed")
    if has_dropout:
        runs += train_seeds(args.engine, strategies, args.runs_dir)
    if args.blind_spots and not unsupported:
        options += ["--sensitivity", measure(args.runs_dir, until_seen=True)]
    if args.locate:
        options.append("--locate")
    note(f"run directories: {args.runs_dir}")
    return t5bench("parity", *runs, *options)


def clip_among_norms(engine: str, runs_dir: Path) -> None:
    """The recipe's norm lies among those of the launchers' own models; another model has others. Raises Problem."""

    def train_ddp(clip: str) -> Path:
        own = runs_dir / f"clip-{clip}"
        train(engine, [BASELINE], own, CLIP_GRAD=clip)
        return own / engine / BASELINE

    os.environ["CLIP_GRAD"], _ = with_clip_among(train_ddp, os.environ["CLIP_GRAD"])


def can_be_traced(*, needed: bool) -> bool:
    """Whether these settings allow a trace. Raises Problem if not, where one is needed."""
    setting = what_cannot_be_traced()
    if setting and needed:
        raise Problem(f"--locate reads traces, and a run with {setting} cannot have one", "Leave one of them out")
    if setting:
        note(f"a run with {setting} cannot be traced: runs are judged by their curves alone")
    return not setting


def what_cannot_be_traced() -> str:
    """The setting of the environment with which the native engine cannot trace a run; "" if there is none."""
    if os.environ.get("SEQUENCE_PARALLEL", "0") not in ("", "0"):
        return "SEQUENCE_PARALLEL=1"
    schedule = os.environ.get("PIPELINE_SCHEDULE", "")
    return f"PIPELINE_SCHEDULE={schedule}" if schedule in (INTERLEAVED, ZERO_BUBBLE) else ""


def why_unsupported(runs_dir: Path) -> str:
    """Why the native engine cannot train this model family; "" if it can."""
    for obstacle in native_plan(runs_dir).obstacles:
        if obstacle.code == "native-engine":
            return obstacle.found
    return ""


def native_plan(runs_dir: Path) -> Plan:
    """The native engine's plan for one process, with what would stop it."""
    changes = {"ENGINE": NATIVE, "NNODES": "1", "NPROC_PER_NODE": "1", "PRECISION_FLAG": "", "DROPOUT": "0"}
    return Launch(changes, arguments=ARGUMENTS).ask(PlannedRun(BASELINE, BASELINE), runs_dir / "plan")


def measure(runs_dir: Path, *, until_seen: bool = False) -> Path:
    """Measures how far each number of the recipe moves the curves, with the native engine in one process; the file.

    until_seen: each curve ends where the change is large enough for the check to see.
    """
    plan = accepted(native_plan(runs_dir))
    if plan.obstacles:
        obstacle = plan.obstacles[0]
        raise Problem(f"the native engine cannot run here: {obstacle.found}", obstacle.remedy)
    if until_seen:
        duration = "20 seconds on a CPU (CHECK_BLIND_SPOTS=0 skips this)"
        enough = " ".join(str(MARGIN * bound) for bound in TOLERANCE["fp32"])
    else:
        duration = "a minute on a CPU"
        enough = "inf inf"
    note(f"measuring how visible a change in each number is: about {duration}")
    path = runs_dir / "sensitivity.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "native.sensitivity", plan.value("MODEL_FAMILY"), *plan.arguments.words]
    environment = os.environ | plan.environment | {"SENSITIVITY_ENOUGH": enough}
    with path.open("wb") as output:
        result = subprocess.run(command, env=environment, cwd=REPOSITORY, stdout=output, check=False)
    if result.returncode:
        raise Problem(f"the measurement ended with exit status {result.returncode}", "The reason is above")
    return path


def train_outside(runs_dir: Path) -> Path:
    """Trains Hugging Face's model from the same weights on the same samples, in one process; the file of its curves."""
    plan = accepted(native_plan(runs_dir))
    note("training Hugging Face's model from the same weights, in one process: seconds on a CPU")
    path = runs_dir / "hugging-face.json"
    command = [sys.executable, "-m", "native.reference", *plan.arguments.words]
    environment = os.environ | plan.environment
    with path.open("wb") as output:
        result = subprocess.run(command, env=environment, cwd=REPOSITORY, stdout=output, check=False)
    if result.returncode:
        raise Problem(f"the reference ended with exit status {result.returncode}", "The reason is above")
    return path


@dataclass(frozen=True)
class RecipeChange:
    """A change to one number of the recipe that a launcher can make."""

    number: str
    by: str
    name: str
    """Of the setting, or of the engine argument."""
    value: str
    """The new one."""


def recipe_changes() -> Iterator[RecipeChange]:
    given = os.environ | dict(zip(ARGUMENTS[::2], ARGUMENTS[1::2], strict=True))
    yield RecipeChange("the recipe", "nothing", "SEED", given["SEED"])
    for number, name in NUMBERS.items():
        more = float(given[name]) * (1 + PERCENT)
        yield RecipeChange(number, "1 %", name, f"{more:.9g}")
    for number, name in (("Adam's beta 1", "--adam-beta1"), ("Adam's beta 2", "--adam-beta2")):
        less = 1 - (1 - float(given[name])) * (1 + PERCENT)
        yield RecipeChange(number, "1 % of 1 - beta", name, f"{less:.9g}")
    warm_up = int(given["LR_WARMUP_ITERS"]) + 1
    yield RecipeChange("warm-up", "1 iteration", "LR_WARMUP_ITERS", str(warm_up))
    decay = int(given["TRAIN_ITERS"]) + 1
    yield RecipeChange("length of the decay", "1 iteration", "--lr-decay-iters", str(decay))
    seed = int(given["SEED"]) + 1
    yield RecipeChange("seed", "+1", "SEED", str(seed))


def measure_launched(runs_dir: Path) -> Path:
    """The same with Megatron-DeepSpeed, for a model family that the native engine cannot train."""
    note("measuring how visible a change in each number is, with one run of Megatron-DeepSpeed for each")
    path = runs_dir / "sensitivity.jsonl"
    for change in recipe_changes():
        directory = runs_dir / change.number.replace(" ", "-")
        settings = {"ENGINE": MEGATRON}
        arguments = list(ARGUMENTS)
        if change.name.startswith("--"):
            arguments += [change.name, change.value]
        else:
            settings[change.name] = change.value
        run_all(
            Launch(settings, arguments=arguments), {directory: PlannedRun(BASELINE, BASELINE, processes=1)}, runs_dir
        )
        iterations = load(directory).iterations
        curves = {
            "number": change.number,
            "change": change.by,
            "losses": [iteration.lm_loss for iteration in iterations],
            "norms": [iteration.grad_norm for iteration in iterations],
        }
        with path.open("a") as file:
            file.write(json.dumps(curves) + "\n")
    return path


def train_seeds(engine: str, strategies: list[str], runs_dir: Path) -> list[Path]:
    """Trains more seeds of the baseline and of the strategies with other dropout masks; returns their directories."""
    with_other_masks = [
        strategy.name for strategy in declarations() if strategy.name in strategies and strategy.tp * strategy.pp > 1
    ]
    if not with_other_masks:
        return []
    first = int(os.environ["SEED"])
    trained = [BASELINE, *with_other_masks]
    directories: list[Path] = []
    for number in range(2, SEEDS + 1):
        seed = first + number - 1
        note(f"seed {number} of {SEEDS}")
        train(engine, trained, runs_dir / f"seed{seed}", SEED=str(seed))
        directories += [runs_dir / f"seed{seed}" / engine / name for name in trained]
    return directories


def train(engine: str, strategies: list[str], runs_dir: Path, *, further: Sequence[str] = (), **settings: str) -> None:
    """further: engine arguments besides the recipe's."""
    launch = Launch({"ENGINE": engine, **settings}, arguments=[*ARGUMENTS, *further])
    rows = plan_runs(launch, runs_dir, strategies)
    if not rows or rows[0].strategy != BASELINE:
        raise Problem(f"the {engine} engine's DDP, the baseline, cannot run here", "The reason is above")
    runs = {runs_dir / engine / row.name: row for row in rows}
    run_all(launch, runs, runs_dir)
