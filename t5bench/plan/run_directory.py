"""The directory of a run before it starts: whether it may be used, and what the run needs in it."""

import contextlib
import json
import re
import shlex
import socket
import stat
from pathlib import Path

from t5bench import Problem
from t5bench.plan import run_lock, shared_facts
from t5bench.record.command_script import ds_config_text
from t5bench.record.files import RecordError, read
from t5bench.record.plan import Plan
from t5bench.record.status import RUNNING

_CHECKPOINT = re.compile(r"(?:iter_|global_step)(\d+)")


def run_facts(plan: Plan) -> dict[str, str]:
    """What a run's claim on a directory says of it. A restarted node may resume what the others still hold."""
    facts = shared_facts.facts_of(plan) | {
        run_lock.MASTER: plan.master_address,
        "MASTER_PORT": plan.value("MASTER_PORT"),
    }
    del facts["RESUME"]
    return facts


def check(plan: Plan) -> list[Problem]:
    """Refuses to overwrite a run, whichever node it was on, or to start one where another is in progress."""
    directory = Path(plan.output_dir)
    fault = _fault_of_path(directory)
    if fault:
        found = f"cannot write to the run directory {directory}: {fault}"
        return [Problem(found, "Choose another OUTPUT_DIR", "output-directory", fatal=False)]
    facts = run_facts(plan)
    try:
        run_lock.check_run(directory, facts)
        run_lock.check(directory, f"node{plan.node}")
    except Problem as problem:
        return [Problem(problem.found, problem.remedy, "running", fatal=False)]
    if plan.value("RESUME") == "1":
        return []
    if _holds_a_finished_run(directory):
        return [_finished_run(plan, directory)]
    checkpoints = [_CHECKPOINT.fullmatch(path.name) for path in (directory / "checkpoints").glob("*")]
    newest = max((int(match[1]) for match in checkpoints if match), default=0)
    if newest:
        found = f"{directory} holds checkpoints of an earlier run (up to iteration {newest})"
        remedy = "Choose another OUTPUT_DIR, continue the run with RESUME=1, or delete the directory"
        told = f"{found}, which are never overwritten"
        return [Problem(told, remedy, "earlier-checkpoints", fatal=False)]
    return []


def killed_launcher(plan: Plan) -> list[str]:
    """What to tell of an earlier launcher of this node that left the directory without a word."""
    with contextlib.suppress(OSError, ValueError, RecordError):
        word, host, pid = read(Path(plan.output_dir, f"node{plan.node}.status")).decode().split()
        if word == RUNNING and host == socket.gethostname():
            return [f"the earlier run in {plan.output_dir} has no end: its launcher (process {int(pid)}) was killed"]
    return []


def _finished_run(plan: Plan, directory: Path) -> Problem:
    """The one command after which this run can start, and that keeps the finished one."""
    found = f"{directory} already holds a finished run, which is never overwritten"
    iterations = _iterations_of(directory)
    name = f"{directory.name}-{iterations}-iterations" if iterations else f"{directory.name}-finished"
    kept = directory.with_name(name)
    number = 1
    while kept.exists():
        number += 1
        kept = directory.with_name(f"{name}-{number}")
    move = f"mv {shlex.quote(str(directory))} {shlex.quote(str(kept))}"
    which = "that run"
    if iterations and iterations != plan.value("TRAIN_ITERS"):
        which = f"that run of {iterations} iterations and start this one of {plan.value('TRAIN_ITERS')}"
    remedy = f"To keep {which}: {move}, on every node that has it; then this again. Or choose another OUTPUT_DIR"
    return Problem(found, remedy, "finished-run", fatal=False)


def _iterations_of(directory: Path) -> str:
    """TRAIN_ITERS of the run in a directory; "" where no readable record says it."""
    from t5bench.record.reader import read_part  # it needs packages

    for part in sorted(directory.glob("node*.json")):
        with contextlib.suppress(RecordError, ValueError):
            iterations = Plan.read(read_part(part)["plan"]).value("TRAIN_ITERS", "")
            if re.fullmatch("[1-9][0-9]{0,8}", iterations):
                return iterations
    return ""


def _fault_of_path(directory: Path) -> str:
    """Why no directory can be here; empty if there is one, or the nearest one above it may get it."""
    for path in (directory, *directory.parents):
        shown = "it" if path == directory else path
        try:
            return "" if stat.S_ISDIR(path.stat().st_mode) else f"{shown} is not a directory"
        except FileNotFoundError:
            if path.is_symlink():
                return f"{shown} is a link to {path.readlink()}, which does not exist"
        except NotADirectoryError:
            continue
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _holds_a_finished_run(directory: Path) -> bool:
    """Whether a node of a run has completed there, or the record of a complete run was brought there."""
    for part in directory.glob("node*.json"):
        status = part.with_suffix(".status")
        if status.is_file() and status.read_bytes().startswith(b"complete"):
            return True
        with contextlib.suppress(RecordError, ValueError, RecursionError):
            content = json.loads(read(part))
            if isinstance(content, dict) and content.get("status") == "complete":
                return True
    return False


def prepare(plan: Plan, launcher: int, script: str) -> None:
    """Creates the run directory and every file that the run needs in it. Raises OSError.

    launcher: its process id. script: the command as a script.
    """
    directory = Path(plan.output_dir)
    name = f"node{plan.node}"
    assert plan.layout
    directory.mkdir(parents=True, exist_ok=True)
    for suffix in ("log", "json", "samples.jsonl", "sha256", "wandb.yaml"):
        _keep_earlier(directory / f"{name}.{suffix}")
    keeps_metrics = plan.value("RESUME") == "1"
    if not keeps_metrics:
        _keep_earlier_of_run(directory, plan.node, plan.layout.nnodes)
    # What another node left belongs to an earlier run, unless it is here already.
    left = {int(path.stem[4:]) for path in directory.glob("node*.json") if path.stem[4:].isdecimal()}
    for node in (left | {0, plan.layout.nnodes - 1}) - {plan.node}:
        if not run_lock.is_held(directory, node):
            for suffix in ("json", "sha256"):
                _keep_earlier(directory / f"node{node}.{suffix}")
            if not keeps_metrics:
                _keep_earlier_of_run(directory, node, plan.layout.nnodes)
    for stack in directory.glob(f"{name}.stack.*"):  # of a run that was killed
        stack.unlink()
    # Before anything starts, so that a lack of inodes or space shows now and not later.
    for suffix in ("log", "samples.jsonl"):
        (directory / f"{name}.{suffix}").write_text("")
    planned = directory / f"{name}.plan"
    planned.touch(0o600)  # it holds secrets in clear text, until the recorder has read it
    planned.write_text(json.dumps(plan.to_json()))
    command_file(plan).write_text(script)
    wandb_config = plan.environment.get("WANDB_SWEEP_PARAM_PATH", "")
    if wandb_config.startswith(f"{directory}/"):
        # Without the file W&B does not start.
        Path(wandb_config).write_text("wandb_version: 1\n")
    if plan.ds_config:
        # Every node writes the same bytes, perhaps to the same shared file; with a rename nobody reads half of it.
        own = directory / f"{name}.ds_config"
        own.write_text(ds_config_text(plan))
        own.replace(directory / "ds_config.json")
    (directory / f"{name}.status").write_text(f"running {socket.gethostname()} {launcher}\n")


def command_file(plan: Plan) -> Path:
    """The run's command as bash: a launcher reads its arrays, and people can paste it."""
    return Path(plan.output_dir, f"node{plan.node}.command.sh")


def _keep_earlier_of_run(directory: Path, node: int, nodes: int) -> None:
    """The last node writes the metrics, and the first one the profile of an iteration."""
    for name in ("metrics.jsonl",) * (node == nodes - 1) + ("profile.json", "trace.json") * (node == 0):
        _keep_earlier(directory / name)


def _keep_earlier(file: Path) -> None:
    """Earlier attempts keep their files: node0.log becomes node0.log.1 and so on. Another node may have been faster."""
    number = 1
    while (kept := file.with_name(f"{file.name}.{number}")).exists():
        number += 1
    with contextlib.suppress(FileNotFoundError):
        file.rename(kept)
