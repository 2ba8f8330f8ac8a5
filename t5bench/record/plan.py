"""The plan of a run: everything that is decided before a process starts. ``t5bench.plan`` makes it, all others read it.

``--dry-run=json`` prints it, and a record contains it. Its classes are plain dataclasses, so that a launcher can make a
plan without any package; ``Plan.read`` checks every type of a plan that comes from elsewhere.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from t5bench.record.files import RecordError

FORMAT = 2
MOST_RAMP_ITERATIONS = 1_000_000
# Of a setting: so that the product of two whole numbers fits into the 64 bits of shell and engines, and fp32's range.
MOST = {"whole": 10**9 - 1, "decimal": 1e38}
PRECISIONS = ("--bf16", "--fp16")  # values of PRECISION_FLAG, which are arguments themselves


@dataclass(frozen=True)
class Role:
    """What a setting means for comparing and resuming runs. heading: what --help prints above its settings.

    compared: runs that differ in it are not compared unless that is allowed. trains: another value gives another loss
    curve. kept: a resumed run must keep it. local: the nodes of one run may differ in it. told: a comparison reports
    that runs differ in it.
    """

    heading: str
    compared: bool = False
    trains: bool = False
    kept: bool = False
    local: bool = False
    told: bool = False


# In the order of --help.
ROLES: Mapping[str, Role] = {
    "model": Role(
        "The model and its data: only runs with equal values are compared", compared=True, trains=True, kept=True
    ),
    "recipe": Role("The recipe: another value gives another loss curve", trains=True, kept=True, told=True),
    "load": Role("The load per process: only runs with equal values are compared", compared=True, kept=True),
    "method": Role("The method: another way to the same loss", kept=True, told=True),
    "layout": Role("Processes and devices"),
    "place": Role("Hosts and paths, which may differ between nodes", local=True),
    "watch": Role("Watching, saving, ending", told=True),
    "label": Role("Names, and Weights & Biases", local=True),
}


@dataclass(frozen=True)
class Setting:
    """One setting as scripts/megatron_common.sh declares it, with the value in effect.

    kind: ``whole:MINIMUM[:MAXIMUM]``, ``decimal[:MINIMUM]``, ``one-of:A|B``, ``path``, ``text`` or ``secret``, with a
    ``?`` where it may be empty. argument: the engine's argument for it, several separated by commas, ``=`` where the
    value is the argument itself, ``-`` for a setting that the engine does not see. An engine argument after ``--`` that
    a setting owns changes the setting's value here.
    """

    kind: str
    role: Literal[(*ROLES,)]
    argument: str
    default: str
    meaning: str
    value: str

    @property
    def is_secret(self) -> bool:
        return self.kind.rstrip("?") == "secret"

    def fault(self, name: str, value: str) -> tuple[str, str] | None:
        """What is wrong with a value for this kind of setting, and what to do about it."""
        if re.search("[\ud800-\udfff]", value):  # how Python reads other bytes, which no record can hold
            return f"{name} is not UTF-8 text, found {value!a}", ""
        if not value and self.kind.endswith("?"):
            return None
        what, _, bounds = self.kind.rstrip("?").partition(":")
        least, _, most = bounds.partition(":")
        if what == "whole" and not (re.fullmatch("0|[1-9][0-9]*", value) and float(value) >= float(least)):
            return f"{name} must be a whole number of at least {least}, found '{value}'", ""
        is_decimal = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", value)
        if what == "decimal" and not (is_decimal and float(value) >= float(least or 0)):
            return f"{name} must be a number of at least {least or 0}, found '{value}'", ""
        if what in MOST and float(value) > float(most or MOST[what]):
            return f"{name} must be at most {most or MOST[what]}, found {value}", ""
        if what == "one-of" and value not in bounds.split("|"):
            return f"{name} is '{value}'", f"It may be one of: {bounds.replace('|', ' ')}"
        if not value:
            return f"{name} is empty", "Unset it, or give it a value"
        return None


@dataclass(frozen=True)
class Strategy:
    """A launcher's declaration: ds_config names the file in ds_configs/ of a ZeRO strategy, else it is empty.

    families: the model families that it serves. engines: the engines that have it.
    """

    name: str
    title: str
    port: int
    tp: int
    pp: int
    ds_config: str
    colour: str
    flags: Sequence[str]
    families: Sequence[str] = ("t5", "gpt")
    engines: Sequence[str] = ("megatron", "native")

    @property
    def has_fsdp2(self) -> bool:
        return "--fsdp2" in self.flags


@dataclass(frozen=True)
class Layout:
    """micro_batches: per iteration on one data-parallel rank; split_rank: the decoder's first stage."""

    nnodes: int
    nproc_per_node: int
    world_size: int
    tp: int
    pp: int
    dp: int
    micro_batches: int
    split_rank: int | None = None

    def ranks_of(self, node: int) -> range:
        return range(node * self.nproc_per_node, (node + 1) * self.nproc_per_node)


@dataclass(frozen=True)
class Obstacle:
    """Why a run cannot start. fatal: the request itself is wrong; otherwise this machine lacks something."""

    code: str
    found: str
    remedy: str
    fatal: bool


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

    engine_patches: the state of the engine's checkout (``series``, ``megatron_t5_fixes``, ...), ``series`` for the
    native engine. environment: what the launcher adds to the environment. ds_config: the effective DeepSpeed JSON.
    resume_from: the iteration of the checkpoint to resume from, 0 for a new run. A plan with a fatal
    obstacle has no layout and no command.
    """

    strategy: Strategy
    settings: Mapping[str, Setting]
    obstacles: Sequence[Obstacle]
    node: int = 0
    hosts: Sequence[str] = ()
    master_address: str = ""
    engine: str = ""
    engine_directory: str = ""
    engine_patches: str = ""
    device: str = ""
    gpus_shared: bool = False
    data_prefix: str = ""
    tokenizer: str = ""
    output_dir: str = ""
    resume_from: int = 0
    layout: Layout | None = None
    ds_config: Mapping[str, Any] | None = None
    arguments: Arguments = field(default_factory=Arguments)
    environment: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    format: int = FORMAT

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
    def zero_stage(self) -> int:
        """ZeRO's stage; 0 without DeepSpeed."""
        return self.ds_config["zero_optimization"]["stage"] if self.ds_config else 0

    @cached_property
    def ramp(self) -> list[int]:
        """The batches of the first iterations, while RAMPUP_BATCH_SIZE lets them grow, as the engine counts them."""
        if not (asked := self.value("RAMPUP_BATCH_SIZE", "")):
            return []
        full, sizes = self.number("GLOBAL_BATCH_SIZE"), [int(word) if word.isdigit() else 0 for word in asked.split()]
        if len(sizes) != 3 or min(sizes) < 1 or sizes[2] > sizes[0] * MOST_RAMP_ITERATIONS:
            raise RecordError(f"RAMPUP_BATCH_SIZE is '{asked}'")
        start, step, samples = sizes
        share, batches, done = samples / max(1, (full - start) // step), [], 0
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
        pairs = [(name, s.value) for s in self.settings.values() for name in s.argument.split(",") if name != "-"]
        settings = [word for name, value in pairs for word in ([value] if name == "=" else [name, value])]
        found = by_name([*settings, *self.arguments.words])
        return {name.removeprefix("--").replace("-", "_"): value for name, value in found.items()}

    @cached_property
    def engine_arguments(self) -> dict[str, str]:
        """What compared runs must share besides settings: arguments whose values no setting has."""
        settings = {name: s.value for s in self.settings.values() for name in s.argument.split(",")}
        found = by_name([*self.arguments.fixed, *self.arguments.extra])
        return {n: value for n, value in sorted(found.items()) if value != settings.get(n) and n not in PRECISIONS}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, content: Any) -> "Plan":
        """A plan from decoded JSON. Raises msgspec.ValidationError, which says what is wrong, and where."""
        import msgspec  # only readers need it

        return msgspec.convert(content, cls)
