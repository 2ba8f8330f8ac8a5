"""``python -m t5bench settings``: docs/settings.md, all settings of a launcher as tables."""

import argparse
import os

from t5bench import REPOSITORY
from t5bench.plan.launchers import ask, declarations
from t5bench.record.plan import ROLES

INTRODUCTION = """# Settings

`python -m t5bench settings` writes this page. Set them in the environment; `--help` of a launcher has its defaults."""
PER_STRATEGY = {"MASTER_PORT", "TENSOR_PARALLEL_SIZE", "PIPELINE_PARALLEL_SIZE"}


def add_arguments(_: argparse.ArgumentParser) -> None:
    """None: it prints the page."""


def run(_: argparse.Namespace) -> int:
    baseline = declarations()[0].name
    settings = ask(baseline, environment={"PATH": os.environ["PATH"]}).settings
    lines = [INTRODUCTION]
    for name, role in ROLES.items():
        lines += [f"\n## {role.heading}\n", "| Setting | Default | Meaning |", "|---|---|---|"]
        for setting_name, setting in settings.items():
            if setting.role == name:
                shown = setting.default.replace(f"{REPOSITORY}/../", "../").replace(f"{REPOSITORY}/", "./")
                default = f"`{shown.replace(baseline, '<strategy>')}`" if shown else "(unset)"
                default = "strategy-specific" if setting_name in PER_STRATEGY else default
                lines.append(f"| `{setting_name}` | {default} | {setting.meaning} |")
    print("\n".join(lines))
    return 0
