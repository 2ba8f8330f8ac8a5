"""A ``tee`` that understands what it sees, and the parent of a node's torchrun.

It starts torchrun, passes its output on, logs it with times, ends it when a signal or the guard says so, writes the
record, and says in one sentence how the run ended. If it is killed, the kernel ends torchrun, and this the workers.
Every wait at the end of a run is limited.
"""

import argparse
import contextlib
import errno
import functools
import glob
import json
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from t5bench import REPOSITORY, note
from t5bench.plan import run_lock, shared_facts
from t5bench.plan.channel import Endpoint
from t5bench.plan.ports import peer_port
from t5bench.record import machine
from t5bench.record import status as ends
from t5bench.record.files import METRICS, RecordError, seal, write_json, write_whole
from t5bench.record.plan import Plan
from t5bench.record.records import FORMAT, write_run
from t5bench.record.status import PROCESSES_REMEDY, Status, now, remedy_of_writing
from t5bench.run import guard as guards
from t5bench.run import processes
from t5bench.run.agreement import COMMON, PATIENCE
from t5bench.run.ending import Ending, KernelCounts
from t5bench.run.guard import Guard, Stacks
from t5bench.run.output import Output, pass_on, timestamp
from t5bench.run.peers import Peers
from t5bench.run.reports import Reports, reports_prefix
from t5bench.run.sampler import Sampler, link_speeds
from t5bench.run.training import Training
from t5bench.text import pass_by
from t5bench.unread import never_wait

LOOKING_SECONDS = 30


class Part:
    """This node's part of the record, and the files that hold it; recorded: the plan without secrets."""

    def __init__(self, plan: Plan, recorded: Mapping[str, Any], hidden: Sequence[str]) -> None:
        assert plan.layout
        self.plan = plan
        self.hidden = hidden
        self.is_described = False
        self.position = {"node": plan.node, "nnodes": plan.layout.nnodes, "host": socket.gethostname()}
        unknown = dict.fromkeys(("cause", "exit_status", "signal", "ended", "attempt", "padded_vocab_size"))
        self.content: dict[str, Any] = {"format": FORMAT, **self.position, "pid": os.getpid()}
        self.content |= {"started": timestamp(now()), "plan": recorded, "peak_memory": []}
        self.content |= {"status": ends.RUNNING, "reason": "", "remedy": "", **unknown}

    def file(self, suffix: str) -> Path:
        return Path(self.plan.output_dir, f"node{self.plan.node}.{suffix}")

    def look_around(self, on_seen: Callable[[dict[str, Any]], None]) -> None:
        """Describes the machine in a thread, because this takes up to a second; then on_seen gets the part."""

        def look() -> None:
            # W&B reads this in a few seconds, and describing the machine may take as long: what is known goes first.
            self._write_wandb_config()
            self.content |= self._machine()
            self._write_wandb_config()
            self.write()
            self.is_described = True
            on_seen(dict(self.content))

        self.looking = threading.Thread(target=look, daemon=True)
        self.looking.start()

    def _machine(self) -> dict[str, Any]:
        engine = Path(self.plan.engine_directory) if self.plan.engine_directory else None
        return {
            "data": machine.data(Path(self.plan.data_prefix), self.plan.tokenizer),
            "versions": machine.versions(),
            "commits": machine.commits(REPOSITORY, engine),
            "patches": machine.patches(REPOSITORY) if engine else {},
            "environment": machine.hide(machine.recorded_variables(os.environ), self.hidden),
            "devices": machine.gpus(os.environ) if self.plan.device == "cuda" else [],
            "cpu": machine.cpu(),
            "kernel": os.uname().release,
            "network": link_speeds(),
        }

    def _write_wandb_config(self) -> None:
        with contextlib.suppress(OSError, ImportError):
            if self.file("wandb.yaml").exists():
                write_wandb_config(self.file("wandb.yaml"), wandb_config(self.content))

    def write(self) -> None:
        with contextlib.suppress(OSError):
            write_json(self.file("json"), self.content)

    def say(self, text: str) -> None:
        """Writes to the file that the next launcher reads before it starts."""
        with contextlib.suppress(OSError):
            overwrite(self.file("status"), text)

    def end(self, changes: Mapping[str, Any], known: Status) -> Status:
        """Finishes the record. known: how the run ended, as far as this node knows. Only a recorded run is complete."""
        self.looking.join(LOOKING_SECONDS)
        self.content |= changes
        try:
            self._finish()
        except (OSError, RecordError) as error:
            remedy = remedy_of_writing(error) if isinstance(error, OSError) else error.remedy
            unwritten = Status(ends.CRASHED, f"the record of this run could not be written: {error}", remedy)
            if known.name == ends.COMPLETE:
                known = unwritten
                self.content |= {"status": known.name, "reason": known.reason, "remedy": known.remedy}
            warn(unwritten.reason)
            with contextlib.suppress(OSError, RecordError):
                # The existing file says "running"; the space that it takes is enough.
                self.file("json").unlink(missing_ok=True)
                self._finish()
        self.say(f"{known.name} {known.reason}\n{known.remedy}\n")
        return known

    def _finish(self) -> None:
        self._set_aside_what_is_no_file()
        write_json(self.file("json"), self.content)
        seal(Path(self.plan.output_dir), self.plan.node, self.position["nnodes"])
        write_run(Path(self.plan.output_dir), self.plan.node)

    def look(self, output: Output) -> None:
        """Restores what it can if somebody has removed the run directory or files in it, or replaced them."""
        self._set_aside_what_is_no_file()
        was_removed = not Path(self.plan.output_dir).exists()
        restored = output.restore()
        if was_removed and restored:
            warn(f"{self.plan.output_dir} was removed during the run; its log and metrics start again")
        elif restored:
            names = " and ".join(path.name for path in restored)
            warn(f"{names} in {self.plan.output_dir} was removed or cut short during the run, and was restored")
        if self.is_described and not self.file("json").exists():
            self.write()
        if not self.file("status").exists():
            self.say(f"{ends.RUNNING} {self.content['host']} {self.content['pid']}\n")
        if output.log.lost:
            warn(f"{output.log.path} was cut short during the run: {output.log.lost} bytes are lost")
            output.log.lost = 0

    def _set_aside_what_is_no_file(self) -> None:
        """A directory or a pipe under the name of a file of the record would end the run, or make its launcher wait."""
        own = [self.file(suffix) for suffix in ("log", "json", "samples.jsonl", "status", "sha256")]
        for path in (*own, *(Path(self.plan.output_dir, name) for name in (METRICS, "run.json"))):
            if os.path.lexists(path) and not path.is_file():
                aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.aside")
                with contextlib.suppress(OSError):
                    path.rename(aside)
                    warn(f"{path} was replaced by something that is not a file, which is now {aside.name}")


def wandb_config(part: Mapping[str, Any]) -> dict[str, Any]:
    """A run's configuration in W&B, for either engine: what a node's part knows, from which secrets are gone."""
    plan = part["plan"]
    config = {"strategy": plan["strategy"]["name"], "title": plan["strategy"]["title"]}
    config |= {key: plan[key] for key in ("engine", "engine_patches", "device", "layout", "ds_config")}
    config["settings"] = {}
    for values in plan["settings_by_role"].values():
        config["settings"] |= values
    return config | {key: part.get(key) for key in ("versions", "commits", "data")}


def write_wandb_config(path: Path, values: Mapping[str, Any]) -> None:
    """Writes the values that are known. Raises OSError, and ImportError without W&B, which has yaml.

    W&B adds the content of the file in WANDB_SWEEP_PARAM_PATH to the configuration of the next run, in addition to what
    the program passes; its agent passes a sweep's parameters in this way. Without a sweep's id the run belongs to none.
    WANDB_CONFIG_PATHS, which is meant for this, makes W&B 0.31 fail, because it does not parse the text as a list.
    """
    import yaml

    content = {"wandb_version": 1} | {key: {"value": value} for key, value in values.items() if value is not None}
    write_whole(path, yaml.safe_dump(content, sort_keys=False))


def overwrite(path: Path, text: str) -> None:
    """Writes to the file's existing blocks, which need no space on a full disk. Raises OSError."""
    with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
        file.write(text.encode())
        file.truncate()


def warn(sentence: str) -> None:
    note(f"warning: {sentence}")


def follow(part: Part, peers: Peers, stacks: Stacks, training: Training) -> Output:
    """Starts torchrun and passes on its output until it ends, while the sampler runs."""
    plan = part.plan
    metrics = Path(part.plan.output_dir, "metrics.jsonl")
    output = Output(part.file("log"), metrics, part.hidden, on_iteration=peers.progressed, stacks=stacks.texts)
    interval = min(plan.decimal("SAMPLE_INTERVAL"), threading.TIMEOUT_MAX)
    sampler = Sampler(part.file("samples.jsonl"), interval, has_gpus=plan.device == "cuda")
    if training.interrupted.is_set():
        training.give_up()
    else:
        compared = {COMMON: json.dumps(shared_facts.facts_of(plan)), PATIENCE: plan.value("RENDEZVOUS_TIMEOUT")}
        training.start(compared if peers.endpoint.nodes > 1 else {})
    show = functools.partial(pass_by, sys.stdout)
    pass_on(output, training.output, show, training.is_over.is_set, lambda: part.look(output))
    training.wait()
    sampler.end()
    return output


def record(directory: Path, node: int, training: Training) -> int:
    """Records a run, from the start of torchrun to the finished record; returns the launcher's exit code."""
    planned = directory / f"node{node}.plan"
    content = json.loads(planned.read_bytes())
    with contextlib.suppress(OSError):
        planned.unlink()  # it holds secrets in clear text
    plan = Plan.read(content)
    hidden = machine.secrets(os.environ)
    before = KernelCounts.now()
    run_lock.keep(directory, f"node{node}")
    part = Part(plan, machine.hide(content, hidden), hidden)
    peers = Peers(Endpoint.of(plan, peer_port(plan.number("MASTER_PORT"))), training.interrupted, warn)
    stacks = Stacks(part.file("stack"))
    part.look_around(peers.introduce)
    reports = Reports(reports_prefix(stacks.prefix), hidden)
    for path in reports.paths():
        path.unlink(missing_ok=True)  # of a run that was killed
    guard = Guard(plan, training.mark, peers, stacks, reports)
    output = follow(part, peers, stacks, training)
    guard.finish()

    kernel = KernelCounts.now().since(before)
    ending = Ending(plan, output, guard, training.exit_status, training.interrupted_by, kernel)
    for path in (*stacks.paths(), *reports.paths()):
        path.unlink(missing_ok=True)
    ending.tell_and_hear(part.position, peers)
    peers.close()
    known = part.end(ending.fields, ending.status)
    remove_shared_memory(plan)
    run_lock.release(directory, f"node{node}", os.getpid())
    exit_code = ending.exit_code(known)
    tell_the_end(plan, known, exit_code)
    return exit_code


def remove_shared_memory(plan: Plan) -> None:
    """On a machine without GPUs DeepSpeed leaves files in memory, 66 MiB for each process."""
    if plan.device == "cpu":
        master = f"{plan.master_address}_{plan.value('MASTER_PORT')}"
        for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_{glob.escape(master)}_*"):
            path.unlink(missing_ok=True)


def tell_the_end(plan: Plan, known: Status, exit_code: int) -> None:
    if known.name == ends.COMPLETE:
        note(f"{plan.strategy.name}: complete; record in {plan.output_dir}")
        return
    note(f"error: {plan.strategy.name} on node {plan.node}: {known.name}: {known.reason}")
    if known.remedy:
        note(f"       {known.remedy}")
    note(f"       exit status {exit_code}; the output is in {Path(plan.output_dir, f'node{plan.node}.log')}")


def cannot_record(directory: Path, node: int, training: Training, error: OSError | RuntimeError) -> int:
    """Ends the run because the run directory cannot be written, or because this process cannot start a thread."""
    processes.end(training.mark, guards.TERM_SECONDS)
    reason = f"the run directory cannot be written: {error}"
    if isinstance(error, RuntimeError) or error.errno == errno.EAGAIN:
        reason = f"the limit on processes or threads is reached here: {error}"
        remedy = PROCESSES_REMEDY
    else:
        remedy = remedy_of_writing(error)
    with contextlib.suppress(OSError):
        overwrite(directory / f"node{node}.status", f"{ends.CRASHED} {reason}\n{remedy}\n")
    note(f"error: node {node}: {ends.CRASHED}: {reason}\n       {remedy}")
    return ends.EXIT_CODES[ends.CRASHED]


def run(args: argparse.Namespace) -> int:
    command = args.words[1:] if args.words[:1] == ["--"] else args.words  # versions of argparse differ
    never_wait("stdout", "stderr")  # neither the training nor its end
    training = Training(command)
    training.listen()
    try:
        exit_status = record(args.directory, args.node, training)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "start new thread" not in str(error):
            raise
        exit_status = cannot_record(args.directory, args.node, training, error)
    finally:
        training.clean_up()
    for number in ends.SIGNALS:
        # At exit Python restores the default handlers, and a signal would kill it although its work is done.
        signal.signal(number, signal.SIG_IGN)
    return exit_status
