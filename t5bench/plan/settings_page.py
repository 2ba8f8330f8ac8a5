"""``python -m t5bench settings``: docs/settings.md, all settings of a launcher as tables."""

import argparse
import os

from t5bench.plan.launchers import ask, declarations
from t5bench.plan.settings import shown
from t5bench.record.plan import ROLES, Setting

INTRODUCTION = """# Settings

Set these in the environment; a launcher's `--help` shows its defaults.
`python -m t5bench settings` generates this page."""


def settings_of(strategy: str) -> dict[str, tuple[Setting, str]]:
    """Each setting, and its default with ``<strategy>`` for the strategy's name."""
    settings = ask(strategy, environment={"PATH": os.environ["PATH"]}).settings
    return {name: (s, shown(s.default).replace(strategy, "<strategy>")) for name, s in settings.items()}


def add_arguments(_: argparse.ArgumentParser) -> None:
    """Takes no arguments: it prints the page."""


def run(_: argparse.Namespace) -> int:
    first, *_between, last = (strategy.name for strategy in declarations())
    own, others = settings_of(first), settings_of(last)
    lines = [INTRODUCTION]
    for role_name, role in ROLES.items():
        lines += [f"\n## {role.heading}\n", "| Setting | Default | Meaning |", "|---|---|---|"]
        for name, (setting, default) in own.items():
            default = f"`{default}`" if default else "(unset)"
            default = default if own[name][1] == others[name][1] else "strategy-specific"
            lines += [f"| `{name}` | {default} | {setting.meaning} |"] if setting.role == role_name else []
    print("\n".join(lines))
    return 0
