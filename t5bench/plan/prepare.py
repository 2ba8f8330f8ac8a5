"""From a plan to a run that can begin: what costs seconds, or writes to the run directory."""

import errno
import os
from dataclasses import replace
from pathlib import Path

from t5bench import Problem
from t5bench.plan import run_directory, run_lock
from t5bench.plan.interpreter import path_of_programs, with_plain_paths
from t5bench.record.command_script import script
from t5bench.record.plan import Plan
from t5bench.record.status import SPACE_REMEDY, remedy_of_writing


def prepared(planned: Plan, launcher: int) -> Plan:
    """The plan of a run that can begin, or whose obstacles say why not. launcher: its process id."""
    if not planned.obstacles:
        planned = with_plain_paths(planned)
    if not planned.obstacles:
        planned = begin(with_toolkit(planned), launcher)
    return with_forecast(planned, is_dry_run=False)


def previewed(planned: Plan) -> Plan:
    """The same without writing anything."""
    if not planned.layout:
        return planned
    planned = with_plain_paths(planned)
    if "output-directory" not in [obstacle.code for obstacle in planned.obstacles]:
        planned = with_checkpoint(with_toolkit(planned), agree=False)
        planned = with_forecast(planned, is_dry_run=True)
    return planned


def begin(planned: Plan, launcher: int) -> Plan:
    """Claims and prepares the run directory. launcher: its process id."""
    directory = Path(planned.output_dir)
    try:
        killed = run_directory.killed_launcher(planned)
        run_lock.take_for_run(directory, planned.node, launcher, run_directory.run_facts(planned))
        planned = replace(planned, notes=[*planned.notes, *killed])
        planned = with_checkpoint(planned, agree=True)
        if not planned.obstacles:
            run_directory.prepare(planned, launcher, script(planned))
    except Problem as problem:
        planned = planned.stopped_by(Problem(problem.found, problem.remedy, "running", fatal=False))
    except OSError as error:
        found = f"cannot write to the run directory {planned.output_dir}: {error.strerror or error}"
        otherwise = SPACE_REMEDY if error.errno == errno.ENOSPC else "Choose another OUTPUT_DIR"
        remedy = remedy_of_writing(error, otherwise)
        planned = planned.stopped_by(Problem(found, remedy, "output-directory", fatal=False))
    if planned.obstacles:
        run_lock.release(directory, f"node{planned.node}", launcher)
    return planned


def with_checkpoint(planned: Plan, *, agree: bool) -> Plan:
    """The plan with the iteration of the checkpoint to resume from or evaluate. agree: with the other nodes."""
    if planned.value("RESUME") == "0" and planned.value("EVAL_ONLY") == "0":
        return planned
    from t5bench.plan.resume import resumed  # it needs packages

    return resumed(planned, agree=agree)


def with_toolkit(planned: Plan) -> Plan:
    """The plan with the variables with which CUDA's compiler finds all that it needs; asking it takes a second."""
    if planned.device != "cuda":
        return planned
    from t5bench.plan.toolkit import completions

    environment = {**os.environ, "PATH": path_of_programs(os.environ)}
    return replace(planned, environment={**planned.environment, **completions(environment)})


def with_forecast(planned: Plan, *, is_dry_run: bool) -> Plan:
    if not planned.layout or (not is_dry_run and planned.device != "cuda"):
        return planned
    from t5bench.plan.forecast import forecast

    return replace(planned, notes=[*planned.notes, *forecast(planned, is_dry_run=is_dry_run)])
