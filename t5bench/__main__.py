"""``python -m t5bench COMMAND``: a command is a module with ``run(arguments)``, perhaps with ``add_arguments(parser)``.

``run`` returns the exit status. A Problem that it raises is printed with its remedy, and the exit status is 2.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from types import ModuleType

from t5bench import EXIT_CONFIGURATION, REPOSITORY, Problem, discard, note

# Each command's module, and the line that --help shows. Only the chosen command's module is imported: the recorder
# starts with every launch and must not wait for the libraries that draw pages.
COMMANDS = {
    "record": ("t5bench.run.recorder", "write a node's record of a run from its output (the launchers call this)"),
    "collect": ("t5bench.record.collect", "gather the parts of a run from its nodes"),
    "compare": ("t5bench.report.command", "compare runs: a table and a page"),
    "explain": ("t5bench.profile.explain", "show where a profiled iteration's time went, and what slows the run down"),
    "parity": ("t5bench.compare.parity", "check whether runs trained the same model: pass or fail for each"),
    "parity-check": ("t5bench.sweep.parity_check", "train every strategy with one recipe, then check parity"),
    "strategies": ("t5bench.plan.launchers", "list the strategies, in the order of their ports"),
    "settings": ("t5bench.plan.settings", "print docs/settings.md, the page of all settings"),
    "sweep": ("t5bench.sweep.command", "run strategies one after another, then compare them"),
    "reshape": ("t5bench.convert.reshape", "convert a run's checkpoint to another tensor- or pipeline-parallel size"),
    "export": ("t5bench.convert.export", "export a run's model for Hugging Face's libraries"),
    "import": ("t5bench.convert.importing", "turn a Hugging Face model into a Megatron-DeepSpeed checkpoint"),
    "generate": ("t5bench.convert.generate", "let a run's model continue a prompt (GPT) or fill its gaps (T5)"),
    "evaluate": ("t5bench.convert.evaluate", "compute a run's validation loss, and a GPT's WikiText and LAMBADA"),
    "ledger": ("t5bench.ledger.command", "train each strategy under many DeepSpeed releases, to see which are right"),
    "cluster": ("t5bench.cluster.check", "check whether the nodes can run together"),
    "predict": ("t5bench.predict.command", "predict what each strategy will cost in memory, bytes and time"),
    "layouts": ("t5bench.predict.layouts", "rank every layout of a model on a number of GPUs by predicted time"),
    "ranks": ("t5bench.predict.ranks", "show which rank is where, and every process group"),
    "pack": ("t5bench.package.pack", "pack a comparison with its records into one file that others can verify"),
    "verify": ("t5bench.package.verify", "recompute every figure of a packed comparison from its logs"),
    "history": ("t5bench.package.history", "show the same rows across commits, releases and drivers, and scaling"),
    "prepare-data": ("t5bench.corpus.prepare", "prepare the corpus (scripts/prepare_xsum_megatron.sh calls this)"),
    "merge-data": ("t5bench.corpus.merge", "merge several indexed datasets into one"),
    "wandb": ("t5bench.report.wandb_report", "upload a comparison to its W&B project"),
}
# These still work.
FORMER_NAMES = {"merge": "reshape", "plan": "layouts", "layout": "ranks"}


def imported(name: str) -> ModuleType:
    """The module. Raises Problem where a package is missing."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        remedy = f"Run: pip install -r '{REPOSITORY}/requirements.txt', or activate the environment that has it"
        raise Problem(f"{sys.executable} lacks a package: {error}", remedy) from error


def with_the_name_of_today(words: Sequence[str]) -> list[str]:
    """The command line, in which a command's former name is replaced; a note says so."""
    if not words or words[0] not in FORMER_NAMES:
        return list(words)
    name = FORMER_NAMES[words[0]]
    note(f"note: {words[0]} is now called {name}; both do the same")
    return [name, *words[1:]]


def main(arguments: Sequence[str] | None = None) -> int:
    words = with_the_name_of_today(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m t5bench", description="Plans, checks and compares training runs.")
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.encoding != "utf-8":  # which lacks some characters
        sys.stdout.reconfigure(errors="replace")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    try:
        for name, (module_name, summary) in COMMANDS.items():
            command = commands.add_parser(name, help=summary, description=summary)
            if words[:1] == [name]:
                module = imported(module_name)
                command.set_defaults(execute=module.run)
                if hasattr(module, "add_arguments"):
                    module.add_arguments(command)
        chosen = parser.parse_args(words)
        status = chosen.execute(chosen)
        if sys.stdout:
            sys.stdout.flush()
    except Problem as problem:
        note(problem.report)
        return EXIT_CONFIGURATION
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # head has read enough
        discard(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        discard(sys.stdout)
        note(f"error: {error}\n       Check what it names; df -h and df -i show whether there is space for the output")
        return EXIT_CONFIGURATION
    return status


if __name__ == "__main__":
    from t5bench.text import guard_streams

    guard_streams()
    sys.exit(main())
