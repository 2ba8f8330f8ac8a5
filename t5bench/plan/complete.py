"""A plan and what the shell built from it: the argument list, the environment and the command, as one plan."""

import json
from collections.abc import Sequence
from typing import Any


def completed(words: Sequence[str]) -> dict[str, Any]:
    """The plan as JSON, from what ``plan_words`` in scripts/megatron_common.sh prints.

    words: the plan as ``t5bench.plan`` answered it, then groups of a name, a count and as many words: the four groups of
    Arguments, ``environment`` (NAME=VALUE) and ``command``.
    """
    plan, rest = json.loads(words[0]), list(words[1:])
    groups: dict[str, list[str]] = {}
    while rest:
        name, count = rest[0], int(rest[1])
        groups[name], rest = rest[2 : 2 + count], rest[2 + count :]
    plan["environment"] = dict(entry.partition("=")[::2] for entry in groups.pop("environment", []))
    plan["command"] = groups.pop("command", [])
    plan["arguments"] |= groups
    return plan
