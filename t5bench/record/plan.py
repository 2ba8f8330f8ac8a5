"""The plan of a run: everything that is decided before a process starts. ``t5bench.plan`` makes it, all others read it.

``--dry-run=json`` prints it, and a record contains it. Its classes are plain dataclasses, so that a launcher can make a
plan without any package; ``Plan.read`` checks every type of a plan that comes from elsewhere.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from t5bench import Problem
from t5bench.costmodel.layout import Layout
from t5bench.record.files import RecordError
from t5bench.record.settings import PRECISIONS, ROLES, TOGETHER, RoleName

FORMAT = 3
READABLE_FORMATS = (2, 3)
MOST_RAMP_ITERATIONS = 1_000_000


class Setting(NamedTuple):
    """A setting's value in effect. t5bench/record/settings.py declares the settings.

    An engine argument after ``--`` that a setting owns changes the setting's value here.
    """

    role: RoleName
    value: str
    is_default: bool


@dataclass(frozen=True)
class Strategy:
    """A launcher's declaration."""

    name: str
    title: str
    """One line for people."""
    port: int
    """The default rendezvous port, unique to the strategy."""
    tp: int
    """The tensor-parallel size."""
    pp: int
    """The pipeline-parallel size."""
    ds_config: str
    """The file in ds_configs/ of a ZeRO strategy, else empty."""
    colour: str
    """Of its lines and bars in every picture."""
    flags: Sequence[str]
    """Further engine arguments."""
    families: Sequence[str] = ("t5", "gpt")
    """The model families that it serves."""
    engines: Sequence[str] = ("megatron", "native")
    """The engines that have it."""

    @property
    def has_fsdp2(self) -> bool:
        return "--fsdp2" in self.flags


@dataclass(frozen=True)
class Arguments:
    """The engine's argument list in the order in which it is passed, by where the words come from.

    settings: from the settings. fixed: the same in every run of an engine. own: decided by the strategy, the machine
    or the run's place. extra: what the user gave after ``--``. A later argument wins over an earlier one.
    """

    settings: Sequence[str] = ()
    fixed: Sequence[str] = ()
    own: Sequence[str] = ()
    extra: Sequence[str] = ()

    @property
    def words(self) -> list[str]:
        return [*self.settings, *self.fixed, *self.own, *self.extra]


def by_name(words: Iterable[str]) -> dict[str, str]:
    """The values of an argument list by argument; the last of several counts, and a switch has the value ''.

    ``--name value``, ``--name=value`` and several values of one argument are understood as argparse does.
    """
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = value
        elif name:
            found[name] = f"{found[name]} {word}".strip()
    return found


def spelled(value: str) -> str:
    """A number in the one spelling that equal numbers share, any other text as it is."""
    try:
        return str(int(value)) if value.isdecimal() else repr(float(value)).removesuffix(".0")
    except ValueError:
        return value


def same_value(one: str, other: str) -> bool:
    """Whether two texts are the same number or the same text."""
    return spelled(one) == spelled(other)


@dataclass(frozen=True)
class Plan:
    """One planned run, as the node ``node`` sees it.

    A plan with a fatal obstacle has no layout and no command.
    """

    strategy: Strategy
    settings_by_role: Mapping[RoleName, Mapping[str, str]]
    """The settings' values in effect: role to name to value. ``settings`` has them by name."""
    chosen: Sequence[str]
    """The settings that are not at their default."""
    obstacles: Sequence[Problem]
    """Why it cannot start."""
    notes: Sequence[str] = ()
    """What the user should know: choices that were made, and warnings."""
    node: int = 0
    hosts: Sequence[str] = ()
    master_address: str = ""
    engine: str = ""
    engine_directory: str = ""
    engine_patches: str = ""
    """The state of the engine's checkout (``series``, ``megatron_t5_fixes``, ...); ``series`` for the native engine."""
    device: str = ""
    gpus_shared: bool = False
    data_prefix: str = ""
    tokenizer: str = ""
    output_dir: str = ""
    resume_from: int = 0
    """The iteration of the checkpoint to resume from; 0 for a new run."""
    changed_at: int = 0
    """The iteration until which the run was trained in another way: by another strategy, layout or method."""
    recipe_changed_at: int = 0
    """The iteration until which the run was trained by another recipe or batch, which RESUME_CHANGES names."""
    trained_samples: int = 0
    """The samples of the iterations until `resume_from`, if a batch of another size trained some of them."""
    layout: Layout | None = None
    ds_config: Mapping[str, Any] | None = None
    """The effective DeepSpeed JSON."""
    ledger: str = ""
    """What the ledger says of the installed DeepSpeed, or without it of torch: the verdict, and why."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the launcher adds to the environment of torchrun."""
    removed_environment: Sequence[str] = ()
    """The variables of the user's environment that torchrun does not get, because they would change the run."""
    python: str = ""
    """The interpreter that runs torchrun and the workers, whose packages are recorded; "" in earlier records."""
    rendezvous: Sequence[str] = ()
    """torchrun's own arguments."""
    program: Sequence[str] = ()
    """What torchrun starts in each process: this project's wrapper of a worker, and the engine's program."""
    arguments: Arguments = field(default_factory=Arguments)
    format: int = FORMAT

    @cached_property
    def settings(self) -> dict[str, Setting]:
        """The settings by name."""
        chosen = set(self.chosen)
        settings = {}
        for role, values in self.settings_by_role.items():
            for name, value in values.items():
                settings[name] = Setting(role, value, name not in chosen)
        return settings

    def stopped_by(self, obstacle: Problem) -> "Plan":
        """This plan with one more obstacle."""
        return replace(self, obstacles=[*self.obstacles, obstacle])

    @property
    def command(self) -> list[str]:
        """The command as the launcher runs it; empty for a refused plan."""
        if not self.program:
            return []
        return [*self.torchrun, *self.rendezvous, *self.program, *self.arguments.words]

    @property
    def torchrun(self) -> list[str]:
        """torchrun, as a module of the interpreter that was planned: one on PATH may be another environment's."""
        return [self.python, "-m", "torch.distributed.run"] if self.python else ["torchrun"]

    def value(self, name: str, default: str | None = None) -> str:
        """A setting's value. default: if plans of earlier versions lack it. Raises RecordError if it has none."""
        found = self.settings[name].value if name in self.settings else default
        if found is None:
            raise RecordError(f"the plan of the run in {self.output_dir} has no setting {name}")
        return found

    def decimal(self, name: str) -> float:
        return self.number(name, float)

    def number(self, name: str, kind: Callable[[str], Any] = int) -> Any:
        """Raises RecordError."""
        value = self.value(name)
        try:
            return kind(value)
        except ValueError as error:
            raise RecordError(f"the plan of the run in {self.output_dir} has '{value}' as its {name}") from error

    def with_role(self, question: str) -> dict[str, str]:
        """The settings whose role has this property (a field of Role): name to value, a number in one spelling."""
        return {name: spelled(s.value) for name, s in self.settings.items() if getattr(ROLES[s.role], question)}

    @property
    def backend(self) -> str:
        """What carries the collectives: NCCL needs a GPU for each process."""
        return "gloo" if self.device == "cpu" or self.gpus_shared else "nccl"

    @property
    def zero_stage(self) -> int:
        """ZeRO's stage; 0 without DeepSpeed."""
        return self.ds_config["zero_optimization"]["stage"] if self.ds_config else 0

    @property
    def offloads_optimizer(self) -> bool:
        """Whether DeepSpeed keeps the optimizer's states in the host's memory."""
        options = self.ds_config["zero_optimization"] if self.ds_config else {}
        return (options.get("offload_optimizer") or {}).get("device") == "cpu"

    @cached_property
    def ramp(self) -> list[int]:
        """The batches of the first iterations, while RAMPUP_BATCH_SIZE lets them grow, as the engine counts them."""
        asked = self.value("RAMPUP_BATCH_SIZE", "")
        if not asked:
            return []
        full = self.number("GLOBAL_BATCH_SIZE")
        sizes = [int(word) if word.isdigit() else 0 for word in asked.split()]
        if len(sizes) != 3 or min(sizes) < 1 or sizes[2] > sizes[0] * MOST_RAMP_ITERATIONS:
            raise RecordError(f"RAMPUP_BATCH_SIZE is '{asked}'")
        start, step, samples = sizes
        share = samples / max(1, (full - start) // step)
        batches = []
        done = 0
        while done <= samples:
            batches.append(min(full, start + int(done / share) * step))
            done += batches[-1]
        return batches

    @property
    def iterations(self) -> int:
        """The iterations of a whole run: with a ramp-up more than TRAIN_ITERS, because the first ones are smaller."""
        full = self.number("GLOBAL_BATCH_SIZE")
        return len(self.ramp) + (self.number("TRAIN_ITERS") * full - sum(self.ramp)) // full

    def samples(self, begin: int, end: int) -> int:
        """The samples of the iterations after `begin`, up to `end`."""
        growing = self.ramp[begin:end]
        return sum(growing) + (end - begin - len(growing)) * self.number("GLOBAL_BATCH_SIZE")

    def samples_until(self, iteration: int) -> int:
        """The samples that were trained when this iteration ends. iteration: of this attempt."""
        if self.trained_samples:
            return self.trained_samples + self.samples(self.resume_from, iteration)
        return self.samples(0, iteration)

    @property
    def last_iteration(self) -> int:
        """The iteration that this attempt should reach, unless --exit-interval ends it sooner; an evaluation: none."""
        if self.value("EVAL_ONLY", "") == "1":
            return 0
        every = int(self.engine_arguments.get("--exit-interval") or 0) or self.iterations
        return min(self.iterations, (self.resume_from // max(every, 1) + 1) * every)

    @property
    def precision(self) -> str:
        return self.value("PRECISION_FLAG").lstrip("-") or "fp32"

    @property
    def named_arguments(self) -> dict[str, str]:
        """The engine's arguments in effect, by name as Python has it (``hidden_size``); a switch has the value ''."""
        given = by_name(self.arguments.words)
        return {name.removeprefix("--").replace("-", "_"): value for name, value in given.items()}

    @cached_property
    def engine_arguments(self) -> dict[str, str]:
        """What compared runs must share besides settings: arguments whose values no setting has."""
        settings = by_name(self.arguments.settings)
        others = by_name([*self.arguments.fixed, *self.arguments.extra])
        return {
            name: value
            for name, value in sorted(others.items())
            if value != settings.get(name) and name not in PRECISIONS
        }

    @property
    def common(self) -> dict[str, str]:
        """What every node of a run must have alike, by name: otherwise its processes wait for each other forever, or
        train something else than the record says. Times, paths and names may differ."""
        assert self.layout
        layout = self.layout
        values = {"strategy": self.strategy.name, "engine": self.engine, "device": self.device}
        values |= {"NNODES": str(layout.nnodes), "NPROC_PER_NODE": str(layout.nproc_per_node)}
        values |= {"layout": f"TP={layout.tp} PP={layout.pp} DP={layout.dp}", "engine's patches": self.engine_patches}
        values |= self.with_role("kept") | {name: self.value(name, "") for name in TOGETHER}
        values |= {f"ds_config.{key}": json.dumps(value) for key, value in (self.ds_config or {}).items()}
        return values | by_name(self.arguments.extra)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, content: Any) -> "Plan":
        """A plan from decoded JSON. Raises msgspec.ValidationError, which says what is wrong, and where."""
        import msgspec  # only readers need it

        return msgspec.convert(of_this_format(content), cls)


def of_this_format(content: Any) -> Any:
    """A stored plan's content in today's format."""
    if isinstance(content, dict) and content.get("format") == 2:
        return _from_format_2(content)
    return content


def _from_format_2(content: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier plan, which kept each setting's declaration and the command as one list."""
    if not isinstance(content.get("settings"), dict):
        return dict(content)
    values: dict[str, dict[str, str]] = {}
    chosen = []
    for name, setting in content["settings"].items():
        if not isinstance(setting, dict):
            return dict(content)
        values.setdefault(str(setting.get("role")), {})[name] = setting.get("value", "")
        if setting.get("value") != setting.get("default"):
            chosen.append(name)
    words = content.get("command")
    arguments = content.get("arguments")
    if isinstance(words, list) and words and isinstance(arguments, dict):
        engine_arguments = sum(len(group) for group in arguments.values() if isinstance(group, list))
        before = words[1 : len(words) - engine_arguments]
        programs = [number for number, word in enumerate(before) if str(word).endswith("worker.py")]
        first = programs[0] if programs else len(before)
        content = {**content, "rendezvous": before[:first], "program": before[first:]}
    return {**content, "settings_by_role": values, "chosen": chosen, "format": FORMAT}
