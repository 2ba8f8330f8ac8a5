"""``python -m t5bench COMMAND``: every command is a module with ``add_arguments(parser)`` and ``run(arguments)``.

``run`` returns the exit status. A Problem that it raises is printed with its remedy, and the exit status is 2.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from t5bench import REPOSITORY, Problem

# Command, its module, and the line that --help shows. A module is imported when its command is asked for: the recorder
# starts with every launch, and must not wait for what draws pages.
COMMANDS = {
    "record": ("t5bench.run.recorder", "write a node's record of a run from its output (the launchers call this)"),
    "collect": ("t5bench.record.collect", "bring together the parts that the nodes of one run keep"),
    "compare": ("t5bench.report.command", "the table and the page over a set of runs"),
    "explain": ("t5bench.compare.explain", "where a profiled iteration's time went, and what slows the run down"),
    "parity": ("t5bench.compare.parity", "whether the strategies train the same model: pass or fail for each"),
    "parity-check": ("t5bench.sweep.parity_check", "train the strategies alike, and ask parity of them"),
    "strategies": ("t5bench.plan.launchers", "the names of the strategies, in the order of their ports"),
    "settings": ("t5bench.plan.settings_page", "all settings as docs/settings.md has them"),
    "sweep": ("t5bench.sweep.command", "run strategies one after another, and compare them"),
    "merge": ("t5bench.run.merge", "the weights of a run's checkpoint for another tensor or pipeline parallel size"),
    "cluster": ("t5bench.cluster.check", "whether the nodes can run together, before a run finds out"),
    "predict": ("t5bench.predict.command", "what each strategy will cost: memory, bytes, time; before anything runs"),
    "plan": ("t5bench.predict.search", "every layout of a model on so many GPUs, ranked by predicted time"),
    "layout": ("t5bench.predict.layout", "which rank is where, and every process group with its members"),
    "pack": (
        "t5bench.report.package",
        "put a comparison and what it follows from into one file, for others to verify",
    ),
    "verify": ("t5bench.report.verify_command", "compute every figure of such a file again from its logs"),
    "merge-data": ("t5bench.corpus.merge", "several indexed datasets into one"),
    "wandb": ("t5bench.report.wandb_report", "put a comparison into its W&B project"),
}

EXIT_CONFIGURATION = 2


def imported(name: str) -> ModuleType:
    """The module. Raises Problem where a package is missing."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        remedy = f"Run: pip install -r '{REPOSITORY}/requirements.txt', or activate the environment that has it"
        raise Problem(f"{sys.executable} lacks a package: {error}", remedy) from error


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m t5bench", description="Reads runs and compares them.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    try:
        for name, (module_name, summary) in COMMANDS.items():
            command = commands.add_parser(name, help=summary, description=summary)
            if words[:1] == [name]:
                module = imported(module_name)
                module.add_arguments(command)
                command.set_defaults(execute=module.run)
        chosen = parser.parse_args(words)
        return chosen.execute(chosen)
    except Problem as problem:
        lines = [f"error: {problem}", *(f"       {line}" for line in problem.remedy.splitlines())]
        print("\n".join(lines), file=sys.stderr)
        return EXIT_CONFIGURATION


if __name__ == "__main__":
    sys.exit(main())
