"""A plan and what the shell built from it: the argument list, the environment and the command, as one plan."""

import json
from collections.abc import Sequence
from typing import Any

from t5bench.plan.request import groups


def completed(words: Sequence[str]) -> dict[str, Any]:
    """The plan as JSON, from what ``plan_words`` in scripts/megatron_common.sh prints.

    words: the plan as the planning process answered it, then groups of a name, a count and as many words: the four
    groups of Arguments, ``environment`` (NAME=VALUE) and ``command``.
    """
    plan, built = json.loads(words[0]), groups(words[1:])
    plan["environment"] = dict(entry.partition("=")[::2] for entry in built.pop("environment", []))
    plan["command"] = built.pop("command", [])
    plan["arguments"] |= built
    return plan
