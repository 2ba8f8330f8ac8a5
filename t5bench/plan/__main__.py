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
import errno
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from t5bench import EXIT_CONFIGURATION, Problem, inherited, note
from t5bench.plan import node_checks, run_lock
from t5bench.plan.engine import offload_device
from t5bench.plan.interpreter import is_plain, needs_link, path_of_programs, plain_caches, plain_link, torch_elsewhere
from t5bench.plan.launchers import declaration
from t5bench.plan.misspelt import TOLD, settings_read_by, warnings_of_misspelt
from t5bench.plan.planner import plan
from t5bench.plan.scripts import SCRIPTS, script_defaults, script_values
from t5bench.plan.settings import full_help, help_lines, short_help, values_from
from t5bench.record.command_script import script
from t5bench.record.plan import Plan
from t5bench.record.settings import DEFAULT_TOKENIZER, declarations_of
from t5bench.record.status import SPACE_REMEDY, remedy_of_writing
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


def begin(planned: Plan, launcher: int) -> Plan:
    """Claims and prepares the run directory. launcher: its process id."""
    directory = Path(planned.output_dir)
    try:
        killed = node_checks.killed_launcher(planned)
        run_lock.take_for_run(directory, planned.node, launcher, node_checks.run_facts(planned))
        planned = replace(planned, notes=[*planned.notes, *killed])
        planned = choose_checkpoint(planned, agree=True)
        if not planned.obstacles:
            node_checks.prepare_directory(planned, launcher, script(planned))
    except Problem as problem:
        planned = stopped(planned, Problem(problem.found, problem.remedy, "running", fatal=False))
    except OSError as error:
        found = f"cannot write to the run directory {planned.output_dir}: {error.strerror or error}"
        otherwise = SPACE_REMEDY if error.errno == errno.ENOSPC else "Choose another OUTPUT_DIR"
        remedy = remedy_of_writing(error, otherwise)
        planned = stopped(planned, Problem(found, remedy, "output-directory", fatal=False))
    if planned.obstacles:
        run_lock.release(directory, f"node{planned.node}", launcher)
    return planned


def stopped(planned: Plan, obstacle: Problem) -> Plan:
    return replace(planned, obstacles=[*planned.obstacles, obstacle])


def choose_checkpoint(planned: Plan, *, agree: bool) -> Plan:
    """The plan with the iteration of the checkpoint to resume from or evaluate. agree: with the other nodes."""
    if planned.value("RESUME") == "0" and planned.value("EVAL_ONLY") == "0":
        return planned
    from t5bench.plan.resume import changes, checkpoint

    evaluates = planned.value("EVAL_ONLY") == "1"
    home = Path(planned.output_dir).parent if evaluates else Path(planned.output_dir)
    try:
        iteration = checkpoint(replace(planned, output_dir=str(home)), agree=agree)
        found = changes(replace(planned, output_dir=str(home)), iteration)
    except ValueError as error:
        return stopped(planned, Problem(str(error), getattr(error, "remedy", ""), "resume", fatal=False))
    doing = "evaluating" if evaluates else "resuming from"
    told = f"{doing} the checkpoint of iteration {iteration}{found.told}"
    if not iteration and not evaluates:
        told = f"RESUME=1: there is no checkpoint in {planned.output_dir} yet, so this run begins with iteration 1"
    changed_at = iteration if found.told else min(found.changed_at, iteration)
    return replace(
        planned,
        resume_from=iteration,
        changed_at=changed_at,
        recipe_changed_at=found.recipe_changed_at,
        trained_samples=found.trained_samples,
        notes=[*planned.notes, told],
    )


def what_is_compiled(planned: Plan) -> str:
    """What a run compiles with PyTorch's headers and libraries; "" if nothing."""
    if "--compile" in planned.arguments.extra:
        return "what --compile makes of the layers"
    if planned.engine != "megatron":
        return ""
    if planned.device == "cuda":
        return "the engine's kernels"
    offloads = planned.ds_config and offload_device(planned.ds_config, "offload_optimizer") == "cpu"
    return "DeepSpeed's cpu_adam" if offloads else ""


def with_plain_engine(planned: Plan) -> Plan:
    """The plan with an engine whose path compilers can read, where it compiles kernels: ninja expands a $ in it.

    Raises OSError.
    """
    if planned.engine != "megatron" or planned.device != "cuda" or is_plain(planned.engine_directory):
        return planned
    link = str(plain_link(planned.engine_directory, name="engine"))
    program = [word.replace(planned.engine_directory, link) for word in planned.program]
    return replace(planned, program=program)


def with_plain_paths(planned: Plan) -> Plan:
    """The plan with paths that compilers can read: PyTorch and DeepSpeed quote none of theirs."""
    try:
        planned = replace(planned, environment={**planned.environment, **plain_caches(os.environ)})
        planned = with_plain_engine(planned)
        can_be_linked = Path(planned.python).is_relative_to(sys.prefix)
        if what_is_compiled(planned) and (place := torch_elsewhere(can_be_linked=can_be_linked)):
            found = (
                f"{what_is_compiled(planned)} cannot be compiled, because compilers cannot read PyTorch's path: {place}"
            )
            remedy = "Use an environment with a PyTorch of its own, or one whose path has no blank, quote or accent"
            return stopped(planned, Problem(found, remedy, "path-of-python", fatal=False))
        if not needs_link() or not can_be_linked:
            return planned
        link = plain_link()
    except OSError as error:
        found = f"nothing can be compiled with the environment {sys.prefix}, because of its path: {error}"
        remedy = "Create it where the path has only letters without accents, digits and .-_"
        return stopped(planned, Problem(found, remedy, "path-of-python", fatal=False))
    path = f"{link}/bin:{planned.environment.get('PATH') or os.environ.get('PATH', os.defpath)}"
    told = f"Python is started through {link}: compilers could not read the path of {sys.prefix}"
    python = str(link / Path(planned.python).relative_to(sys.prefix))
    environment = {**planned.environment, "PATH": path}
    return replace(planned, python=python, environment=environment, notes=[*planned.notes, told])


def with_toolkit(planned: Plan) -> Plan:
    """The plan with the variables with which CUDA's compiler finds all that it needs; asking it takes a second."""
    if planned.device != "cuda":
        return planned
    from t5bench.plan.toolkit import completions

    environment = {**os.environ, "PATH": path_of_programs(os.environ)}
    return replace(planned, environment={**planned.environment, **completions(environment)})


def with_forecast(planned: Plan, *, is_dry_run: bool) -> Plan:
    if not is_dry_run and planned.device != "cuda":
        return planned
    from t5bench.plan.forecast import forecast

    return replace(planned, notes=[*planned.notes, *forecast(planned, is_dry_run=is_dry_run)])


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
    """Prepares the run and answers with the file of its command."""
    if not planned.obstacles:
        planned = with_plain_paths(planned)
    if not planned.obstacles:
        planned = begin(with_toolkit(planned), launcher)
    if planned.layout:
        planned = with_forecast(planned, is_dry_run=False)
    if not tell(planned, is_dry_run=False):
        return EXIT_CONFIGURATION
    note(headline(planned))
    answer(f"{node_checks.command_file(planned)}\n")
    return 0


def dry_run(planned: Plan, *, as_json: bool) -> int:
    if planned.layout:
        planned = with_plain_paths(planned)
    is_readable = "output-directory" not in [obstacle.code for obstacle in planned.obstacles]
    if planned.layout and is_readable:
        planned = with_forecast(choose_checkpoint(with_toolkit(planned), agree=False), is_dry_run=True)
    goes_on = tell(planned, is_dry_run=True)
    if as_json:
        content = {**planned.to_json(), "command": planned.command}
        answer(f"{json.dumps(content, indent=2)}\n")
    elif goes_on:
        answer(script(planned))
    return 0 if goes_on else EXIT_CONFIGURATION


def launcher_help(strategy_line: str, *, shows_all: bool) -> int:
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
            answer(visible(help_lines(SCRIPTS[subject], script_defaults(subject, os.environ)), "\n") + "\n")
            return 0
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
