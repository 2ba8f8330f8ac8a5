"""Which trainings are run: a wrong and two honest ones for each defect, and the honest pairs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gate_score.defect import Defect
from gate_score.gates import Pair
from gate_score.layouts import LAYOUTS
from gate_score.processes import Job
from gate_score.trainer import Recipe, Trainer

PARALLEL = [name for name in LAYOUTS if name != "one"]


@dataclass(frozen=True)
class Trial:
    """What a gate is asked about."""

    name: str
    tried: Job
    reference: Job
    before: Job
    kind: type[Trainer]

    @property
    def jobs(self) -> tuple[Job, ...]:
        return self.tried, self.reference, self.before

    def pair(self, root: Path) -> Pair:
        tried, reference, before = (root / job.directory for job in self.jobs)
        return Pair(self.kind, self.tried.recipe, tried, reference, before, self.reference.recipe)


def set_aside() -> set[str]:
    """The names of a third of the first 163 defects, by random.Random(69).sample(), drawn before any gate was tried."""
    return set(Path(__file__).with_name("set_aside.txt").read_text().splitlines())


def later() -> set[str]:
    """The names of defects that were found, and written down, when the gates were finished."""
    return set(Path(__file__).with_name("later.txt").read_text().splitlines())


def trial_of(defect: Defect) -> Trial:
    wrong = Job(f"wrong/{defect.name.replace(' ', '-')}", defect.layout, defect.recipe, defect.name)
    return Trial(defect.name, wrong, reference_of(defect.recipe), honest(defect.layout, defect.recipe), defect.trainer)


def honest(layout: str, recipe: Recipe) -> Job:
    return Job(f"honest/{layout}-{words_of(recipe)}", layout, recipe)


def reference_of(recipe: Recipe) -> Job:
    """In one process, uninterrupted, in two micro-batches, and without what must not matter."""
    usual = Recipe()
    plain = {"resume_after": 0, "recompute": False, "global_seed": 0, "micro_batches": usual.micro_batches}
    return honest("one", replace(recipe, **plain))


def words_of(recipe: Recipe) -> str:
    """What is not usual in a recipe, for a directory's name."""
    usual = vars(Recipe())
    unusual = {name: value for name, value in vars(recipe).items() if value != usual[name]}
    return "-".join(f"{name}={value}" for name, value in unusual.items()) or "usual"


def honest_trials() -> list[Trial]:
    """300 pairs without a mistake."""
    return [
        Trial(job.directory, job, reference_of(job.recipe), again(job), LAYOUTS[job.layout]) for job in honest_jobs()
    ]


def again(job: Job) -> Job:
    """The same layout with PyTorch's usual seed."""
    return honest(job.layout, replace(job.recipe, global_seed=0))


def honest_jobs() -> Iterator[Job]:
    for layout in PARALLEL:
        for precision in ("fp32", "bf16"):
            for seed in range(1, 7):
                for width in (16, 32):
                    yield honest(layout, Recipe(seed=seed, width=width, precision=precision))
            for seed in (1, 2, 3):
                yield honest(layout, Recipe(seed=seed, precision=precision, resume_after=4))
        for seed in range(1, 5):
            yield honest(layout, Recipe(seed=seed, global_seed=7))
        for micro_batches in (1, 4):
            for seed in (1, 2):
                yield honest(layout, Recipe(seed=seed, micro_batches=micro_batches))
        yield honest(layout, Recipe(uneven=True))
        yield honest(layout, Recipe(dropout=0.2))
        yield honest(layout, Recipe(smoothing=0.1))
        yield honest(layout, Recipe(short=True))
        if layout != "pipeline":
            yield honest(layout, Recipe(recompute=True))
