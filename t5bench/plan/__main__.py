"""The planning process that scripts start before anything else, and its one answer, on standard output.

    python -m t5bench.plan DIRECTORY launch DECLARATION LAUNCHER -- ...   prepares a run, prints the file of its command
    python -m t5bench.plan DIRECTORY dry-run DECLARATION -- ...           prints the command as a script
    python -m t5bench.plan DIRECTORY json DECLARATION -- ...              prints the whole plan, for programs
    python -m t5bench.plan DIRECTORY help DECLARATION [all]               prints a launcher's settings
    python -m t5bench.plan DIRECTORY script NAME                          prints a script's settings as assignments
    python -m t5bench.plan DIRECTORY script-help NAME                     prints a script's settings for people

DIRECTORY is where the user typed the command. DECLARATION is a launcher's, LAUNCHER its process id; engine arguments
follow ``--``. Settings, hosts and the rank are in the environment. This process ends with the script that started it.
"""

import ctypes
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence

from t5bench import EXIT_CONFIGURATION, Problem, inherited, note
from t5bench.plan.launchers import declaration
from t5bench.plan.misspelt import TOLD, settings_read_by, warnings_of_misspelt
from t5bench.plan.planner import plan
from t5bench.plan.prepare import prepared, previewed
from t5bench.plan.run_directory import command_file
from t5bench.plan.scripts import SCRIPTS, script_defaults, script_values
from t5bench.plan.settings import values_from
from t5bench.record.command_script import script
from t5bench.record.plan import Plan
from t5bench.record.settings import DEFAULT_TOKENIZER, declarations_of
from t5bench.text import guard_streams, visible
from t5bench.unread import never_wait

PR_SET_PDEATHSIG = 1
ANSWER = 1


def answer(text: str) -> None:
    """To the script; the user may read only the first lines."""
    try:
        with os.fdopen(ANSWER, "w", errors="surrogateescape", closefd=False) as stream:
            stream.write(text)
    except BrokenPipeError:
        sys.exit(128 + signal.SIGPIPE)


def end_with_script() -> None:
    """Lets the kernel end this process, which may be waiting long for other nodes, if the script is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback


def keep_the_answer_apart() -> int:
    """The descriptor of the answer. What a site's own start-up code has printed goes to standard error."""
    descriptor = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout.flush()
    # The first object still asks where in its file it is, which nothing but a file answers.
    sys.stdout = open(sys.stdout.fileno(), "w", encoding=sys.stdout.encoding, closefd=False)  # noqa: SIM115
    return descriptor


# ---- launchers -------------------------------------------------------------------------------------------------------


def tell(planned: Plan, *, is_dry_run: bool) -> bool:
    """Prints notes and obstacles on standard error; returns whether to continue, which a dry run does on a machine that
    lacks something."""
    if not planned.obstacles or is_dry_run:
        for text in planned.notes:
            note(text)
    stops = [obstacle for obstacle in planned.obstacles if obstacle.fatal or not is_dry_run]
    if stops:
        note(stops[0].report)  # the next ones are often its consequences
        return False
    if planned.obstacles:
        note("A real run would refuse to start:")
    for obstacle in planned.obstacles:
        note(f"  - {obstacle.found}")
        if obstacle.remedy:
            note(f"       {obstacle.remedy}")
    return True


def headline(planned: Plan) -> str:
    layout = planned.layout
    assert layout
    return (
        f"{planned.strategy.title}: node {planned.node} of {layout.nnodes},"
        f" master {planned.master_address}:{planned.value('MASTER_PORT')}, world size {layout.world_size}"
        f" (TP={layout.tp} PP={layout.pp} DP={layout.dp}, {layout.micro_batches} micro-batches),"
        f" {planned.device}, engine {planned.engine}"
    )


def launch(planned: Plan, launcher: int) -> int:
    """Prepares the run and answers with the file of its command. launcher: its process id."""
    if os.getppid() != launcher:
        return 128 + signal.SIGTERM  # it is gone since before the kernel would have told this process
    planned = prepared(planned, launcher)
    if not tell(planned, is_dry_run=False):
        return EXIT_CONFIGURATION
    note(headline(planned))
    answer(f"{command_file(planned)}\n")
    return 0


def dry_run(planned: Plan, *, as_json: bool) -> int:
    planned = previewed(planned)
    goes_on = tell(planned, is_dry_run=True)
    if as_json:
        content = {**planned.to_json(), "command": planned.command}
        answer(f"{json.dumps(content, indent=2)}\n")
    elif goes_on:
        answer(script(planned))
    return 0 if goes_on else EXIT_CONFIGURATION


def launcher_help(strategy_line: str, *, shows_all: bool) -> int:
    from t5bench.plan.help import full_help, short_help

    strategy = declaration(strategy_line)
    _, defaults = values_from(os.environ, strategy)
    if shows_all:
        known = []
        for family in ("t5", "gpt"):
            for entry in declarations_of(family):
                if entry.name in defaults and entry not in known:
                    known.append(entry)
        text = full_help(known, defaults)
    else:
        text = short_help(strategy, defaults)
    answer(visible(text, "\n") + "\n")
    return 0


# ---- other scripts ---------------------------------------------------------------------------------------------------


def script_settings(name: str, directory: str) -> int:
    values, faults = script_values(name, os.environ, directory)
    for problem, remedy in faults[:1]:
        note(Problem(problem, remedy).report)
        return EXIT_CONFIGURATION
    tell_of_misspelt(name)
    values["DEFAULT_TOKENIZER"] = DEFAULT_TOKENIZER
    assignments = [f"{setting}={shlex.quote(value)}\n" for setting, value in values.items()]
    answer("".join([*assignments, f"export {TOLD}=1\n"]))
    return 0


def script_help(name: str) -> int:
    from t5bench.plan.help import help_lines

    answer(visible(help_lines(SCRIPTS[name], script_defaults(name, os.environ)), "\n") + "\n")
    return 0


def tell_of_misspelt(script: str = "") -> None:
    """Once for all that a script starts."""
    if not os.environ.get(TOLD):
        for warning in warnings_of_misspelt(os.environ, settings_read_by(script)):
            note(warning)


def main(words: Sequence[str]) -> int:
    directory, task, subject, *rest = words
    match task:
        case "help":
            return launcher_help(subject, shows_all=rest == ["all"])
        case "script":
            return script_settings(subject, directory)
        case "script-help":
            return script_help(subject)
    separator = rest.index("--")
    tell_of_misspelt()
    planned = plan(os.environ, declaration(subject), rest[separator + 1 :], directory)
    if task == "launch":
        return launch(planned, int(rest[0]))
    return dry_run(planned, as_json=task == "json")


if __name__ == "__main__":
    ANSWER = keep_the_answer_apart()
    guard_streams()
    inherited.put_right()
    never_wait("stderr")
    end_with_script()
    sys.exit(main(sys.argv[1:]))
