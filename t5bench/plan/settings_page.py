"""``python -m t5bench settings``: docs/settings.md, all settings of a launcher as tables."""

import argparse
import os

from t5bench import REPOSITORY
from t5bench.plan.launchers import ask, declarations
from t5bench.record.plan import ROLES

INTRODUCTION = """# Settings

Set these in the environment; a launcher's `--help` shows its defaults.
`python -m t5bench settings` generates this page."""


def defaults(strategy: str) -> dict[str, str]:
    """By setting, with ``<strategy>`` for its name and paths from the repository."""
    settings = ask(strategy, environment={"PATH": os.environ["PATH"]}).settings
    shown = {name: setting.default.replace(f"{REPOSITORY}/../", "../") for name, setting in settings.items()}
    return {name: text.replace(f"{REPOSITORY}/", "./").replace(strategy, "<strategy>") for name, text in shown.items()}


def add_arguments(_: argparse.ArgumentParser) -> None:
    """None: it prints the page."""


def run(_: argparse.Namespace) -> int:
    first, *_between, last = (strategy.name for strategy in declarations())
    settings = ask(first, environment={"PATH": os.environ["PATH"]}).settings
    own, others = defaults(first), defaults(last)
    lines = [INTRODUCTION]
    for role_name, role in ROLES.items():
        lines += [f"\n## {role.heading}\n", "| Setting | Default | Meaning |", "|---|---|---|"]
        for name, setting in settings.items():
            default = f"`{own[name]}`" if own[name] else "(unset)"
            default = default if own[name] == others[name] else "strategy-specific"
            lines += [f"| `{name}` | {default} | {setting.meaning} |"] if setting.role == role_name else []
    print("\n".join(lines))
    return 0
