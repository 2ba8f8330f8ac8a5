"""``python -m t5bench COMMAND``: a command is a module with ``run(arguments)``; command_lines.py says what it takes.

``run`` returns the exit status. A Problem that it raises is printed with its remedy, and the exit status is 2.
"""

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from t5bench import EXIT_CONFIGURATION, Problem, discard, need_checkout, note
from t5bench.command_lines import ARGUMENTS
from t5bench.packages import imported, missing_packages_named

# What --help shows: the groups, and of each command its module and its line. Only the chosen command's module is
# imported: the recorder starts with every launch and must not wait for the libraries that draw pages.
GROUPS = {
    "run and compare": {
        "strategies": ("t5bench.plan.launchers", "list the strategies, in the order of their ports"),
        "sweep": ("t5bench.sweep.sweep", "run strategies one after another, then compare them"),
        "compare": ("t5bench.report.compare", "compare runs: a table and a page"),
        "explain": (
            "t5bench.profile.explain",
            "show where a profiled iteration's time went, and what slows a run down",
        ),
        "parity": ("t5bench.compare.parity", "check whether runs trained the same model: pass or fail for each"),
        "parity-check": ("t5bench.sweep.parity_check", "train every strategy with one recipe, then check parity"),
        "judge": ("t5bench_judge.command", "say whether two trainings of any trainer are the same, by their logs"),
        "history": ("t5bench_verify.history", "compare results across commits, library releases and drivers"),
        "pack": (
            "t5bench_verify.pack",
            "pack a comparison with its records into one file that others can verify",
        ),
        "verify": ("t5bench_verify.verify", "recompute every figure of a packed comparison from its logs"),
        "wandb": ("t5bench.report.wandb_report", "upload a comparison to its W&B project"),
    },
    "before you run": {
        "ledger": (
            "t5bench_ledger.command",
            "say whether a release of DeepSpeed, torch or transformers trains correctly",
        ),
        "predict": ("t5bench.choose.predict", "predict what each strategy will cost in memory, bytes and time"),
        "layouts": (
            "t5bench.choose.layouts",
            "rank every layout of a model on a number of GPUs by predicted time",
        ),
        "layout-bench": (
            "t5bench_evidence.layout_bench.command",
            "hold planners beside each other, on trainings that others published",
        ),
        "prove": (
            "t5bench_prove.prove",
            "prove, without training, that every gradient is summed over the right ranks once",
        ),
        "search": ("t5bench.choose.search.command", "measure the most promising layouts until the fastest is known"),
        "ranks": ("t5bench.choose.ranks", "show which rank is where, and every process group"),
        "cluster": ("t5bench.tools.nodes.check", "check whether the nodes can run together"),
        "prepare-data": ("t5bench.corpus.prepare", "prepare the corpus (scripts/prepare_xsum_megatron.sh calls this)"),
        "merge-data": ("t5bench.corpus.merge", "merge several indexed datasets into one"),
    },
    "what you trained": {
        "generate": (
            "t5bench.tools.convert.generate",
            "let a run's model continue a prompt (GPT) or fill its gaps (T5)",
        ),
        "evaluate": (
            "t5bench.tools.convert.evaluate",
            "compute a run's validation loss; for a GPT also perplexity on WikiText and accuracy on LAMBADA",
        ),
        "reshape": (
            "t5bench.tools.convert.reshape",
            "convert a checkpoint to another tensor- or pipeline-parallel size, or to the other engine",
        ),
        "export": ("t5bench.tools.convert.export", "export a run's model for Hugging Face's libraries"),
        "import": ("t5bench.tools.convert.importing", "turn a Hugging Face model into a Megatron-DeepSpeed checkpoint"),
    },
    "for maintainers": {
        "gate-score": ("gate_score.command", "count the public defects that each gate catches, and its false alarms"),
        "support": ("t5bench.choose.support", "print docs/generated/support.md: which strategies combine with what"),
        "settings": ("t5bench.plan.help", "print docs/generated/settings.md, the page of all settings"),
        "record": ("t5bench.run.recorder", "write a node's record of a run (the launchers call this)"),
        "collect": ("t5bench.record.collect", "gather the parts of a run from its nodes"),
    },
}
COMMANDS = {name: command for commands in GROUPS.values() for name, command in commands.items()}
# Those that take a launcher's settings from the environment. The others are called by scripts that have looked at it.
READ_SETTINGS = ("predict", "layouts", "ranks", "prove", "search", "sweep")
NEED_A_CHECKOUT = ("sweep", "parity-check", "search", "cluster", "prepare-data", "support")
NEAR = 0.65  # of two names: that share so much
# These still work.
FORMER_NAMES = {"merge": "reshape", "plan": "layouts", "layout": "ranks"}


def with_the_name_of_today(words: Sequence[str]) -> list[str]:
    """The command line, in which a command's former name is replaced; a note says so."""
    if not words or words[0] not in FORMER_NAMES:
        return list(words)
    name = FORMER_NAMES[words[0]]
    note(f"note: {words[0]} is now called {name}; both do the same")
    return [name, *words[1:]]


def check_command(name: str) -> None:
    """Raises Problem for a word that is no command, with the one that it resembles."""
    remedy = "python -m t5bench --help lists the commands"
    if name in COMMANDS or name in ("-h", "--help"):
        return
    if name.startswith("-"):
        raise Problem(f"there is no option '{name}' before a command", remedy)
    near = difflib.get_close_matches(name.lower().replace("_", "-"), [*COMMANDS, *FORMER_NAMES], n=1, cutoff=NEAR)
    if near:
        remedy = f"Did you mean {FORMER_NAMES.get(near[0], near[0])}? {remedy}"
    raise Problem(f"there is no command '{name}'", remedy)


def tell_of_misspelt_settings() -> None:
    from t5bench.plan.misspelt import TOLD, settings_read_by, warnings_of_misspelt

    if not os.environ.get(TOLD):
        for warning in warnings_of_misspelt(os.environ, settings_read_by("")):
            note(warning)


def list_of_commands() -> str:
    """The commands in their groups, for --help."""
    width = max(map(len, COMMANDS))
    lines = []
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:"]
        for name, (_, summary) in commands.items():
            lines.append(f"  {name:{width}}  {summary}")
    return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """A command line's parser, whose errors are a Problem like all others."""

    def error(self, message: str) -> NoReturn:
        raise Problem(message, f"{self.prog} --help shows the arguments")


def add_arguments(name: str, module_name: str, parser: argparse.ArgumentParser) -> None:
    """Adds a command's own. Without packages wherever the command can be explained without them. Raises Problem."""
    if name in ARGUMENTS:
        ARGUMENTS[name](parser)
        return
    module = imported(module_name)
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)


def main(arguments: Sequence[str] | None = None) -> int:
    words = with_the_name_of_today(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(
        prog="python -m t5bench",
        usage="python -m t5bench COMMAND [arguments]",
        description=f"Plans, checks and compares training runs.\n{list_of_commands()}",
        epilog="python -m t5bench COMMAND --help explains a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.encoding != "utf-8":  # which lacks some characters
        sys.stdout.reconfigure(errors="replace")
    commands = parser.add_subparsers(
        prog="python -m t5bench", dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS
    )
    try:
        if words:
            check_command(words[0])
        for name, (module_name, summary) in COMMANDS.items():
            command = commands.add_parser(name, description=summary)
            if words[:1] == [name]:
                add_arguments(name, module_name, command)
        chosen, unknown = parser.parse_known_args(words)
        if unknown:
            remedy = f"python -m t5bench {chosen.command} --help shows the arguments"
            raise Problem(f"unrecognized arguments: {' '.join(unknown)}", remedy)
        if chosen.command in READ_SETTINGS:
            tell_of_misspelt_settings()
        if chosen.command in NEED_A_CHECKOUT:
            need_checkout(f"t5bench {chosen.command}")
        module = imported(COMMANDS[chosen.command][0])
        with missing_packages_named():
            status = module.run(chosen)
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
        from t5bench.record.status import remedy_of_writing

        otherwise = "Check what it names; df -h and df -i show whether there is space for the output"
        note(f"error: {error}\n       {remedy_of_writing(error, otherwise)}")
        return EXIT_CONFIGURATION
    return status


if __name__ == "__main__":
    from t5bench import inherited
    from t5bench.text import guard_streams

    guard_streams()
    inherited.put_right()
    os.environ.setdefault("PYTHON", sys.executable)  # for the launchers that a command starts
    if os.environ.get("MODEL"):  # which says some other settings
        from t5bench.plan.described_model import with_model

        try:
            os.environ.update(with_model(os.environ, str(Path.cwd())))
        except Problem as problem:
            note(problem.report)
            sys.exit(EXIT_CONFIGURATION)
    sys.exit(main())
