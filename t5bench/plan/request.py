"""A launcher's request to the planning process, and its answer: NUL-separated words, because a shell has no JSON.

A request is groups of a name, a count and as many words, as ``request`` in scripts/megatron_common.sh prints them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from t5bench.record.plan import Obstacle, Setting, Strategy

FIELDS_OF_A_SETTING = 7  # name, kind, role, argument, default, meaning, value


def groups(words: Sequence[str]) -> dict[str, list[str]]:
    """The words of each group, by the group's name."""
    found: dict[str, list[str]] = {}
    position = 0
    while position < len(words):
        name, count = words[position], int(words[position + 1])
        found[name] = list(words[position + 2 : position + 2 + count])
        position += 2 + count
    return found


def declaration(words: Sequence[str]) -> Strategy:
    """A strategy from what its launcher prints for ``--declaration``."""
    name, title, port, tp, pp, ds_config, colour, families, *flags = words
    return Strategy(name, title, int(port), int(tp), int(pp), ds_config, colour, flags, families.split())


@dataclass
class Findings:
    """What stops the run, and what the user should know, in the order found."""

    obstacles: list[Obstacle] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self, code: str, found: str, remedy: str = "") -> None:
        """The request is wrong."""
        self.obstacles.append(Obstacle(code, found, remedy, fatal=True))

    def lack(self, code: str, found: str, remedy: str = "") -> None:
        """The machine lacks something: a dry run reports it and continues."""
        self.obstacles.append(Obstacle(code, found, remedy, fatal=False))

    @property
    def refused(self) -> bool:
        return any(obstacle.fatal for obstacle in self.obstacles)


@dataclass(frozen=True)
class Request:
    """What a launcher was asked to run, from a directory.

    facts, as text: launcher (its process id), node, master_address, dry_run and default_tokenizer.
    """

    strategy: Strategy
    settings: Mapping[str, Setting]
    extra: Sequence[str]
    hosts: Sequence[str]
    directory: str
    facts: Mapping[str, str]
    findings: Findings = field(default_factory=Findings)
    fixed: Sequence[str] = ()

    def value(self, name: str) -> str:
        return self.settings[name].value

    def number(self, name: str) -> int:
        return int(self.settings[name].value)

    @property
    def dry_run(self) -> bool:
        return self.facts["dry_run"] != "0"


def read_settings(group: Mapping[str, Sequence[str]]) -> dict[str, Setting]:
    words = iter(group["settings"])
    return {name: Setting(*rest) for name, *rest in zip(*[words] * FIELDS_OF_A_SETTING, strict=True)}


def read_request(words: Sequence[str]) -> Request:
    """Reads a request. Raises KeyError or ValueError for words that no launcher prints."""
    group = groups(words)
    facts = dict(word.partition("=")[::2] for word in group["facts"])
    strategy, directory = declaration(group["declaration"]), group["directory"][0]
    extra, fixed, hosts = group["extra"], group["fixed"], group["hosts"]
    return Request(strategy, read_settings(group), extra, hosts, directory, facts, fixed=fixed)


def completed(words: Sequence[str]) -> dict[str, Any]:
    """The plan as JSON, with what the shell built from it: what ``plan_words`` in scripts/megatron_common.sh prints.

    words: the plan as the planning process answered it, then the four groups of Arguments, ``environment`` (NAME=VALUE)
    and ``command``.
    """
    plan, built = json.loads(words[0]), groups(words[1:])
    plan["environment"] = dict(entry.partition("=")[::2] for entry in built.pop("environment", []))
    plan["command"] = built.pop("command", [])
    plan["arguments"] |= built
    return plan
