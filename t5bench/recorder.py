"""Stands where ``tee`` would: passes a node's output on, keeps it with its times, and writes the node's record.

The launcher starts it beside torchrun and tells it, in a file that is read at the end of the output, how torchrun
ended. So one process sees all of a run and outlives whatever dies in it; a launcher that is killed leaves no such file.
"""

import argparse
import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from t5bench import environment as machine
from t5bench import wandb_config
from t5bench.guard import Guard, Stacks
from t5bench.log import Iteration, PeakMemory, iteration, peak_memory
from t5bench.peers import Peers, peer_port
from t5bench.records import FORMAT, RecordError, metrics_line, write_json, write_run
from t5bench.sampler import Sampler, link_speeds
from t5bench.status import (
    CANCELLED,
    COMPLETE,
    CRASHED,
    DIVERGED,
    EXIT_CODES,
    INCOMPLETE,
    OUT_OF_MEMORY,
    RUNNING,
    SIGNALS,
    TIMEOUT,
    Cause,
    CauseFinder,
    Status,
    Strength,
    iterations_expected,
    of_run,
    strongest,
)

REPOSITORY = Path(__file__).resolve().parent.parent
BLOCK = 1 << 16
KILLED = 128 + 9
# Megatron-DeepSpeed's line, and the native engine's.
PADDED_VOCABULARY = re.compile(r"padded vocab \(size: \d+\).*\(new size: (\d+)\)|vocabulary padded to (\d+)")
# How long a node that only lost its connection waits to hear why: torchrun takes 2 s to report a worker's end.
OTHERS_SECONDS = 10
# SLURM ends a job somewhat after its time is over, and tells its processes so by TERM alone.
SLURM_MARGIN_SECONDS = 90


def timestamp(seconds: float) -> str:
    """UTC to the millisecond, as the log's lines begin: 2026-11-21T04:43:36.123Z."""
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"


class Output:
    """The output so far: its log, its iterations, peak memory and whatever explains a failure."""

    def __init__(
        self,
        log: BinaryIO,
        metrics: Path,
        hidden: list[str],
        *,
        on_iteration: Callable[[int], None] = lambda iteration: None,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.log, self.metrics_path, self.hidden = log, metrics, hidden
        self.on_iteration, self.on_line = on_iteration, on_line
        self.metrics: Any = None
        self.finder = CauseFinder()
        self.last: Iteration | None = None
        self.diverged_at: int | None = None
        self.memory: dict[int, PeakMemory] = {}
        self.unwritten: OSError | None = None
        self.padded_vocab_size: int | None = None
        self.rest = b""

    def take(self, block: bytes, now: float) -> None:
        """Bytes as they came; the last line may go on in the next block."""
        *lines, self.rest = (self.rest + block).split(b"\n")
        for line in lines:
            self._take_line(line, now)
        try:
            self.log.flush()
        except OSError as error:
            self._cannot_write(error)

    def end(self, now: float) -> None:
        if self.rest:
            self._take_line(self.rest, now)
        for file in (self.log, self.metrics):
            with contextlib.suppress(OSError):
                if file:
                    file.close()

    def _cannot_write(self, error: OSError) -> None:
        if not self.unwritten:
            self.unwritten = error
            print(f"warning: the record of this run is not complete: {error}", file=sys.stderr)

    def _take_line(self, line: bytes, now: float) -> None:
        text = machine.hide(line.decode(errors="replace"), self.hidden)
        try:
            self.log.write(f"{timestamp(now)} {text}\n".encode())
        except OSError as error:
            self._cannot_write(error)
        self.finder.read(text, now)
        self.on_line(text)
        if found := iteration(text, time=round(now, 3)):
            self.last = found
            self.on_iteration(found.iteration)
            loss = found.lm_loss
            if self.diverged_at is None and (found.nan or (loss is not None and not abs(loss) < float("inf"))):
                self.diverged_at = found.iteration
            try:
                self.metrics = self.metrics or self.metrics_path.open("a", buffering=1)
                self.metrics.write(metrics_line(found) + "\n")
            except OSError as error:
                self._cannot_write(error)
        elif "peak memory" in text:
            self.memory |= {peak.rank: peak for peak in peak_memory([text])}
        elif match := PADDED_VOCABULARY.search(text):
            self.padded_vocab_size = int(match[1] or match[2])


def pass_on(output: Output, source: int, sink: int) -> None:
    """Until the source ends: every block to the sink at once, and to the output. A sink that is gone stops nothing."""
    while block := os.read(source, BLOCK):
        shown = block
        for secret in output.hidden:
            shown = shown.replace(secret.encode(), machine.HIDDEN.encode())
        with contextlib.suppress(OSError):
            while shown:
                shown = shown[os.write(sink, shown) :]
        output.take(block, time.time())


def end_of(
    part: Mapping[str, Any],
    output: Output,
    verdict: Status | None,
    exit_status: int | None,
    interrupted_by: str | None,
    killed_by_kernel: int,
) -> Status:
    """What became of this node's processes.

    verdict is the guard's, when it ended them; exit_status None where the launcher was killed before it could tell.
    """
    if interrupted_by:
        return _cancelled(interrupted_by, output.finder.cause())
    if exit_status is None:
        return Status(CRASHED, "the launcher was killed before its run ended")
    cause = output.finder.cause()
    if verdict and (cause is None or cause.strength < Strength.CAUSE):
        return verdict
    if output.diverged_at is not None and (exit_status == 0 or cause is None or cause.strength <= Strength.EXCEPTION):
        reason = f"the loss is not a number at iteration {output.diverged_at}"
        return Status(DIVERGED, reason, "Lower LR, or add LR_WARMUP_ITERS")
    if exit_status == 0:
        return _completeness(part, output)
    if killed_by_kernel and (cause is None or cause.status == CRASHED or cause.strength == Strength.VICTIM):
        return Status(OUT_OF_MEMORY, "the kernel killed a process because the host's memory was full")
    if output.unwritten and (cause is None or cause.strength < Strength.CAUSE):
        return Status(CRASHED, f"the run directory cannot be written: {output.unwritten}")
    if cause:
        who = f"rank {cause.rank}: " if cause.rank is not None else ""
        return Status(cause.status, who + cause.reason, cause.remedy)
    if exit_status == KILLED:
        return Status(
            CRASHED, "torchrun was killed (SIGKILL)", "By the kernel when memory ran out, by SLURM, or by hand"
        )
    return Status(CRASHED, f"torchrun ended with exit status {exit_status} and named no cause")


def _cancelled(interrupted_by: str, cause: Cause | None) -> Status:
    ends = os.environ.get("SLURM_JOB_END_TIME", "")
    if interrupted_by == "TERM" and ends.isdigit() and abs(time.time() - int(ends)) < SLURM_MARGIN_SECONDS:
        return Status(TIMEOUT, "SLURM's time limit ended the job", "Ask for more time (--time), or fewer TRAIN_ITERS")
    if cause and cause.strength == Strength.CAUSE:
        return Status(cause.status, cause.reason, cause.remedy)
    return Status(CANCELLED, f"{interrupted_by} received")


def _completeness(part: Mapping[str, Any], output: Output) -> Status:
    """The last rank's node has the iteration lines; every rank that trained to the end prints its peak memory."""
    layout, node = part["layout"], part["node"]
    ranks = range(node * layout["nproc_per_node"], (node + 1) * layout["nproc_per_node"])
    expected = iterations_expected(part["settings"])
    reached = output.last.iteration if output.last else 0
    if node == layout["nnodes"] - 1 and reached < expected:
        return Status(INCOMPLETE, f"it ended after iteration {reached} of {part['settings']['TRAIN_ITERS']}")
    if part["engine_patches"] == "series" and (silent := [rank for rank in ranks if rank not in output.memory]):
        return Status(INCOMPLETE, f"rank {silent[0]} ended before the run did")
    return Status(COMPLETE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--directory", type=Path, required=True, help="the run directory")
    parser.add_argument("--node", type=int, required=True, help="the node's rank")
    parser.add_argument("--end-file", type=Path, required=True, help="where the launcher writes: exit status, signal")
    parser.add_argument("--launcher", type=int, required=True, help="process id of the launcher, whose child this is")
    parser.add_argument("--mark", required=True, help="what the run's processes carry as T5_RUN_MARK")
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--title", required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--engine-directory", type=Path)
    parser.add_argument("--engine-patches", required=True)
    parser.add_argument("--data-prefix", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--ds-config", type=Path, help="the DeepSpeed JSON in effect")
    parser.add_argument("--sample-interval", type=float, required=True, help="seconds")
    parser.add_argument("--watchdog-seconds", type=float, required=True, help="0: no watchdog")
    parser.add_argument("--master-address", required=True)
    parser.add_argument("--master-port", type=int, required=True)
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--layout", action="append", default=[], metavar="NAME=NUMBER")
    parser.add_argument("argv", nargs="+", help="the command that runs, after --")


def first_part(args: argparse.Namespace, hidden: list[str]) -> dict[str, Any]:
    """What is known when the run starts, without looking at the machine."""
    settings = machine.pairs(args.setting)
    settings["WANDB_API_KEY"] = "given" if os.environ.get("WANDB_API_KEY") else ""
    return {
        "format": FORMAT,
        "node": args.node,
        "host": socket.gethostname(),
        "pid": args.launcher,
        "status": RUNNING,
        "reason": "",
        "remedy": "",
        "cause": None,
        "exit_status": None,
        "signal": None,
        "started": timestamp(time.time()),
        "ended": None,
        "strategy": args.strategy,
        "title": args.title,
        "engine": args.engine,
        "engine_patches": args.engine_patches,
        "settings": machine.hide(settings, hidden),
        "layout": {name: int(value) for name, value in machine.pairs(args.layout).items()},
        "device": args.device,
        "command": machine.hide(args.argv, hidden),
        "ds_config": machine.read_json(args.ds_config) if args.ds_config else None,
        "padded_vocab_size": None,
        "peak_memory": [],
    }


def look_around(args: argparse.Namespace, hidden: list[str]) -> dict[str, Any]:
    """What the machine is and has: up to a second, while torchrun loads torch."""
    return {
        "data": machine.data(args.data_prefix, args.tokenizer),
        "versions": machine.versions(),
        "commits": machine.commits(REPOSITORY, args.engine_directory),
        "patches": machine.patches(REPOSITORY) if args.engine_directory else {},
        "environment": machine.hide(machine.recorded_variables(os.environ), hidden),
        "devices": machine.gpus(os.environ) if args.device == "cuda" else [],
        "cpu": machine.cpu(),
        "kernel": os.uname().release,
        "network": link_speeds(),
    }


def read_end(path: Path) -> tuple[int | None, str | None]:
    """Exit status and signal as the launcher wrote them."""
    try:
        words = path.read_text().split()
        path.unlink()
        return int(words[0]), words[1] if len(words) > 1 else None
    except (OSError, ValueError, IndexError):
        return None, None


class Part:
    """This node's part of the record, and the file that holds it."""

    def __init__(self, args: argparse.Namespace, hidden: list[str]) -> None:
        self.path = args.directory / f"node{args.node}.json"
        self.content = first_part(args, hidden)
        self.looking = threading.Thread(target=self._look_around, args=(args, hidden))
        self.looking.start()

    def _look_around(self, args: argparse.Namespace, hidden: list[str]) -> None:
        # W&B reads it some seconds from now, and a machine may take as long to look at: what is known goes first.
        self._write_wandb_config(args)
        self.content |= look_around(args, hidden)
        self._write_wandb_config(args)
        with contextlib.suppress(OSError):
            write_json(self.path, self.content)

    def _write_wandb_config(self, args: argparse.Namespace) -> None:
        path = args.directory / f"node{args.node}.wandb.yaml"
        with contextlib.suppress(OSError):
            if path.exists():
                wandb_config.write(path, self.content)

    def end(self, changes: Mapping[str, Any]) -> None:
        """Raises OSError."""
        self.looking.join()
        self.content |= changes
        write_json(self.path, self.content)


def known_status(part: Mapping[str, Any], peers: Peers) -> Status:
    """The status of the run as far as this node knows: its own part's, or that of a node which failed first."""
    known = [part, *(end for end in peers.ends.values() if end["status"] != COMPLETE)]
    return Status(COMPLETE) if part["status"] == COMPLETE else of_run(known)


def record(args: argparse.Namespace) -> int:
    """From the first block of output to the finished record; the exit code that the launcher passes on."""
    hidden = machine.secrets(os.environ)
    node = args.directory / f"node{args.node}"
    killed_before = machine.oom_kills()
    part = Part(args, hidden)
    layout = part.content["layout"]
    name = f"{args.strategy} {args.master_address}:{args.master_port} {layout}"
    peers = Peers(args.node, layout["nnodes"], args.master_address, peer_port(args.master_port), name)
    stacks = Stacks()
    guard = Guard(args.launcher, args.mark, peers, stacks, args.watchdog_seconds)
    with node.with_name(f"{node.name}.log").open("ab") as log:
        output = Output(
            log,
            args.directory / "metrics.jsonl",
            hidden,
            on_iteration=peers.progressed,
            on_line=stacks.read,
        )
        sampler = Sampler(
            node.with_name(f"{node.name}.samples.jsonl"),
            args.sample_interval,
            has_gpus=args.device == "cuda",
            environment=os.environ,
        )
        pass_on(output, sys.stdin.fileno(), sys.stdout.fileno())
        ended = time.time()
        output.end(ended)
        sampler.end()
    guard.ended.set()

    exit_status, interrupted_by = read_end(args.end_file)
    kills = machine.oom_kills() - killed_before
    status = end_of(part.content, output, guard.verdict, exit_status, interrupted_by, kills)
    cause = strongest(output.finder.cause(), guard.cause) if status.name != COMPLETE else None
    changes = {
        "status": status.name,
        "reason": status.reason,
        "remedy": status.remedy,
        "cause": asdict(cause) if cause else None,
        "exit_status": exit_status,
        "signal": interrupted_by,
        "ended": timestamp(ended),
        "padded_vocab_size": output.padded_vocab_size,
        "peak_memory": [asdict(output.memory[rank]) for rank in sorted(output.memory)],
        "oom_kills": kills,
    }
    end = {key: part.content[key] for key in ("node", "host", "layout")} | changes
    peers.say("end", part=end)
    if status.name not in (COMPLETE, CANCELLED) and (cause is None or cause.strength < Strength.CAUSE):
        peers.wait_for_ends(OTHERS_SECONDS, lambda ends: any(_explains(other) for other in ends.values()))
    known = known_status(end, peers)
    peers.close()
    try:
        node.with_name(f"{node.name}.status").write_text(f"{known.name} {known.reason}\n{known.remedy}\n")
        part.end(changes)
        write_run(args.directory)
    except (OSError, RecordError) as error:
        print(f"warning: the record of this run could not be written: {error}", file=sys.stderr)
    numbers = {name: number for number, name in SIGNALS.items()}
    return 128 + numbers[interrupted_by] if interrupted_by in numbers else EXIT_CODES.get(known.name, 1)


def _explains(end: Mapping[str, Any]) -> bool:
    return bool(end["cause"]) and end["cause"]["strength"] >= Strength.EXCEPTION


def run(args: argparse.Namespace) -> int:
    # A Ctrl-C, a lost terminal and SLURM's TERM end what is recorded; this ends with the output.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return record(args)
