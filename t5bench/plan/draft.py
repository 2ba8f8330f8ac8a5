"""A plan in the making: what was asked, and what the checks found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from t5bench import Problem
from t5bench.costmodel.job import Architecture
from t5bench.record.hosts import Hosts
from t5bench.record.plan import Strategy, by_name
from t5bench.record.settings import BY_NAME, RoleName


@dataclass
class Draft:
    """The plan's steps complete it one after another, and say in it what stops the run."""

    strategy: Strategy
    environ: Mapping[str, str]
    """The user's environment."""
    directory: str
    """Where the user typed the command; relative paths begin there."""
    values: dict[str, str]
    """The settings' values by name."""
    defaults: Mapping[str, str]
    """The settings' defaults by name."""
    extra: Sequence[str]
    """The engine arguments that the user gave after ``--``."""
    hosts: Hosts
    node: str
    """This node's rank; empty until it is known."""
    obstacles: list[Problem] = field(default_factory=list)
    """What stops the run, in the order found."""
    notes: list[str] = field(default_factory=list)
    """What the user should know."""

    def value(self, name: str) -> str:
        return self.values[name]

    def number(self, name: str) -> int:
        return int(self.values[name])

    def is_on(self, name: str) -> bool:
        """Whether a setting that is 0 or 1 is 1."""
        return self.values[name] == "1"

    def refuse(self, code: str, found: str, remedy: str = "") -> None:
        """The request is wrong: nothing more can be planned."""
        self.obstacles.append(Problem(found, remedy, code))

    def lack(self, code: str, found: str, remedy: str = "") -> None:
        """The machine lacks something: a dry run reports it and continues."""
        self.obstacles.append(Problem(found, remedy, code, fatal=False))

    @cached_property
    def given(self) -> dict[str, str]:
        """The values of the engine arguments after ``--``, by argument."""
        return by_name(self.extra)

    @property
    def model(self) -> Architecture | None:
        """What MODEL describes, with the run's lengths; None where the settings have the sizes."""
        if not self.values["MODEL"]:
            return None
        sizes = {name.lower(): value for name, value in self.values.items()}
        return Architecture.of_arguments(sizes | {"model_description": self.values["MODEL"]}, 0)

    @property
    def is_refused(self) -> bool:
        return any(obstacle.fatal for obstacle in self.obstacles)

    @property
    def values_by_role(self) -> dict[RoleName, dict[str, str]]:
        """The settings for the plan; of a secret it says only that it was given."""
        values: dict[RoleName, dict[str, str]] = {}
        for name, value in self.values.items():
            declaration = BY_NAME[name]
            shown = "given" if declaration.is_secret and value else value
            values.setdefault(declaration.role, {})[name] = shown
        return values

    @property
    def chosen(self) -> list[str]:
        """The settings that are not at their default."""
        return [name for name, value in self.values.items() if value != self.defaults[name]]
