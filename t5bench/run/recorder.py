"""Stands where ``tee`` would: passes a node's output on, keeps it with its times, and writes the node's record.

The launcher starts it beside torchrun and tells it, in a file that is read at the end of the output, how torchrun
ended. So one process sees all of a run and outlives whatever dies in it; a launcher that is killed leaves that file
empty. Whatever it waits for at the end it waits for only so long.
"""

import argparse
import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from t5bench import REPOSITORY
from t5bench.plan.ports import peer_port
from t5bench.record import machine
from t5bench.record.log import Iteration, PeakMemory, iteration, peak_memory
from t5bench.record.records import FORMAT, RecordError, merge, metrics_line, write_json, write_run
from t5bench.record.status import (
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
    weight_of,
)
from t5bench.run import wandb_config
from t5bench.run.guard import GRACE_SECONDS, WENT_AWAY, Guard, Stacks
from t5bench.run.peers import Peers
from t5bench.run.sampler import Sampler, link_speeds

BLOCK = 1 << 16
KILLED = 128 + 9
# Megatron-DeepSpeed's line, and the native engine's.
PADDED_VOCABULARY = re.compile(r"padded vocab \(size: \d+\).*\(new size: (\d+)\)|vocabulary padded to (\d+)")
# How long a node that only lost its connection, or waited in vain, waits to hear why: the others' guards act after
# GRACE_SECONDS, take the stacks of their workers and end them.
OTHERS_SECONDS = GRACE_SECONDS + 20
# Something that left the run behind may hold its output open.
OPEN_SECONDS = 5
# How long a node that trained to its end waits for the others to say so too.
COMPLETE_SECONDS = 10
LOOKING_SECONDS = 30
MOST_DIFFERENCES = 3
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


def pass_on(output: Output, source: int, sink: int, is_over: Callable[[], bool] = lambda: False) -> None:
    """Every block to the sink at once, and to the output, until the source ends.

    Or until nothing has come for OPEN_SECONDS after the run was over. A sink that is gone stops nothing.
    """
    over_since = None
    while True:
        if not select.select([source], [], [], 1)[0]:
            over_since = over_since or (time.monotonic() if is_over() else None)
            if over_since and time.monotonic() - over_since >= OPEN_SECONDS:
                return
            continue
        if not (block := os.read(source, BLOCK)):
            return
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
    guard: Guard,
    exit_status: int | None,
    interrupted_by: str | None,
    killed_by_kernel: int,
) -> tuple[Status, Cause | None]:
    """What became of this node's processes, and what explains it.

    exit_status is None where the launcher was killed before it could tell.
    """
    cause, now = output.finder.cause(), time.time()

    def because(status: Status, strength: Strength = Strength.CAUSE) -> tuple[Status, Cause]:
        return status, Cause(status.name, strength, status.reason, status.remedy, now, status.reason)

    if interrupted_by == "TERM" and _slurm_time_is_up(os.environ):
        remedy = "Ask for more time (--time), or fewer TRAIN_ITERS"
        return because(Status(TIMEOUT, "SLURM's time limit ended the job", remedy))
    if interrupted_by and cause and cause.strength == Strength.CAUSE:
        return Status(cause.status, cause.reason, cause.remedy), cause
    if interrupted_by:
        return Status(CANCELLED, f"{interrupted_by} received"), None
    if exit_status is None and not output.unwritten:
        remedy = "By hand, or by the kernel for want of memory; its processes were ended"
        return because(Status(CRASHED, "the launcher was killed before its run ended", remedy))
    if guard.verdict and guard.cause:
        own_was_first = cause and cause.strength >= Strength.EXCEPTION and cause.time < guard.cause.time
        if not own_was_first:
            return guard.verdict, guard.cause
    if output.diverged_at is not None and (exit_status == 0 or cause is None or cause.strength <= Strength.EXCEPTION):
        reason = f"the loss is not a number at iteration {output.diverged_at}"
        return because(Status(DIVERGED, reason, "Lower LR, or add LR_WARMUP_ITERS"))
    if exit_status == 0:
        status = _completeness(part, output)
        return (status, None) if status.name == COMPLETE else because(status, Strength.EXCEPTION)
    if killed_by_kernel and (cause is None or cause.status == CRASHED or cause.strength == Strength.VICTIM):
        return because(Status(OUT_OF_MEMORY, "the kernel killed a process because the host's memory was full"))
    if output.unwritten and (cause is None or cause.strength < Strength.CAUSE):
        remedy = "Free space there, or choose another OUTPUT_DIR"
        return because(Status(CRASHED, f"the run directory cannot be written: {output.unwritten}", remedy))
    if exit_status == KILLED and (cause is None or cause.strength < Strength.EXCEPTION):
        remedy = "By the kernel when memory ran out, by SLURM, or by hand"
        return because(Status(CRASHED, "torchrun was killed (SIGKILL)", remedy))
    if cause:
        who = f"rank {cause.rank}: " if cause.rank is not None else ""
        return Status(cause.status, who + cause.reason, cause.remedy), cause
    reason = f"torchrun ended with exit status {exit_status} and named no cause"
    return because(Status(CRASHED, reason, "Its output is all that there is"), Strength.VICTIM)


def _slurm_time_is_up(environment: Mapping[str, str]) -> bool:
    """Newer releases say in the environment when a job's time is over; an older one is asked."""
    ends = environment.get("SLURM_JOB_END_TIME", "")
    if ends.isdigit():
        return abs(time.time() - int(ends)) < SLURM_MARGIN_SECONDS
    try:
        command = ["scontrol", "show", "job", environment["SLURM_JOB_ID"]]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        days, _, clock = fields["TimeLimit"].rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))  # UNLIMITED has none
        limit = int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
        left = datetime.fromisoformat(fields["StartTime"]).timestamp() + limit - time.time()
    except (OSError, subprocess.SubprocessError, KeyError, ValueError):
        return False
    return left < SLURM_MARGIN_SECONDS


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
    """Exit status and signal as the launcher wrote them; None for both while it has not."""
    try:
        words = path.read_text().split()
        return int(words[0]), words[1] if len(words) > 1 else None
    except (OSError, ValueError, IndexError):
        return None, None


def overwrite(path: Path, text: str) -> None:
    """In the file's own blocks, which a disk that became full still has. Raises OSError."""
    with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
        file.write(text.encode())
        file.truncate()


class Part:
    """This node's part of the record, and the file that holds it."""

    def __init__(self, args: argparse.Namespace, hidden: list[str]) -> None:
        self.path = args.directory / f"node{args.node}.json"
        self.content = first_part(args, hidden)
        self.looking: threading.Thread | None = None

    def look_around(self, args: argparse.Namespace, hidden: list[str], on_seen: Callable[[dict], None]) -> None:
        """In a thread of its own, for it takes a second; then on_seen gets the part."""

        def look() -> None:
            # W&B reads it some seconds from now, and a machine may take as long to look at: what is known goes first.
            self._write_wandb_config(args)
            self.content |= look_around(args, hidden)
            self._write_wandb_config(args)
            with contextlib.suppress(OSError):
                write_json(self.path, self.content)
            on_seen(dict(self.content))

        self.looking = threading.Thread(target=look, daemon=True)
        self.looking.start()

    def _write_wandb_config(self, args: argparse.Namespace) -> None:
        path = args.directory / f"node{args.node}.wandb.yaml"
        with contextlib.suppress(OSError):
            if path.exists():
                wandb_config.write(path, self.content)

    def end(self, changes: Mapping[str, Any]) -> None:
        """Raises OSError."""
        if self.looking:
            self.looking.join(LOOKING_SECONDS)
        self.content |= changes
        write_json(self.path, self.content)


def heard_from(peers: Peers) -> list[dict[str, Any]]:
    """How the other nodes ended, as they said it, or went away without a word."""
    gone = [
        {
            "node": node,
            "host": peers.hosts.get(node, "?"),
            "status": WENT_AWAY.name,
            "reason": WENT_AWAY.reason,
            "remedy": WENT_AWAY.remedy,
            "signal": None,
            "cause": asdict(
                Cause(
                    WENT_AWAY.name, Strength.WAITED, WENT_AWAY.reason, WENT_AWAY.remedy, time.time(), WENT_AWAY.reason
                )
            ),
        }
        for node in sorted(peers.gone)
    ]
    return [peers.ends[node] for node in sorted(peers.ends)] + gone


def of_silence(peers: Peers) -> str:
    """Whom nothing was heard of, for a node that waited in vain."""
    silent = [f"node {node} ({peers.hosts.get(node, '?')}) for {s:.0f} s" for node, s in sorted(peers.silent().items())]
    return f"; nothing was heard of {', '.join(silent)}" if silent else ""


def exit_code(status: Status, part: Mapping[str, Any]) -> int:
    """A launcher's own signal stands for itself; one that another node got counts here too."""
    numbers = {name: number for number, name in SIGNALS.items()}
    if part["signal"] in numbers:
        return 128 + numbers[part["signal"]]
    if status.name == CANCELLED:
        signals = (end["signal"] for end in part["heard"] if end["status"] == CANCELLED)
        return 128 + next((numbers[name] for name in signals if name in numbers), signal.SIGTERM)
    return EXIT_CODES.get(status.name, EXIT_CODES[CRASHED])


def warn_of_differences(sentences: Sequence[str]) -> None:
    shown = "; ".join(sentences[:MOST_DIFFERENCES])
    more = f"; and {len(sentences) - MOST_DIFFERENCES} more" if len(sentences) > MOST_DIFFERENCES else ""
    warn(f"the nodes of this run are not the same: {shown}{more}")


def warn(sentence: str) -> None:
    with contextlib.suppress(OSError):
        print(f"warning: {sentence}", file=sys.stderr, flush=True)


def record(args: argparse.Namespace, hurry: threading.Event) -> int:
    """From the first block of output to the finished record; the exit code that the launcher passes on.

    Once hurry is set, nothing more is waited for when the run has ended.
    """
    hidden = machine.secrets(os.environ)
    node = args.directory / f"node{args.node}"
    killed_before = machine.oom_kills()
    part = Part(args, hidden)
    layout = part.content["layout"]
    peers = Peers(
        args.node,
        layout["nnodes"],
        args.master_address,
        peer_port(args.master_port),
        f"{args.strategy} {args.master_address}:{args.master_port} {layout}",
        compare=lambda first, other: merge([first, other])["differences"],
        on_differences=warn_of_differences,
        on_problem=warn,
    )
    peers.hurry = hurry
    part.look_around(args, hidden, peers.introduce)
    stacks = Stacks()
    guard = Guard(
        args.launcher,
        args.mark,
        peers,
        stacks,
        watchdog_seconds=args.watchdog_seconds,
        rendezvous_seconds=float(part.content["settings"].get("RENDEZVOUS_TIMEOUT", 0)),
    )

    def is_over() -> bool:
        return read_end(args.end_file)[0] is not None or os.getppid() != args.launcher

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
        pass_on(output, sys.stdin.fileno(), sys.stdout.fileno(), is_over)
        ended = time.time()
        output.end(ended)
        sampler.end()
    guard.finish()

    exit_status, interrupted_by = read_end(args.end_file)
    args.end_file.unlink(missing_ok=True)
    kills = machine.oom_kills() - killed_before
    status, cause = end_of(part.content, output, guard, exit_status, interrupted_by, kills)
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
    if status.name == COMPLETE:
        peers.wait_for_ends(COMPLETE_SECONDS, lambda ends: any(other["status"] != COMPLETE for other in ends.values()))
    elif knows_little(end) and not interrupted_by:
        peers.wait_for_ends(OTHERS_SECONDS, lambda ends: not all(map(knows_little, ends.values())))
        changes["reason"] += of_silence(peers)
    changes |= {"heard": heard_from(peers), "differences": peers.differences}
    # A node that did all of its own need not have heard of the others.
    all_is_well = all(other["status"] == COMPLETE for other in (end, *changes["heard"]))
    known = Status(COMPLETE) if all_is_well else of_run([end | changes])
    peers.close()
    try:
        overwrite(node.with_name(f"{node.name}.status"), f"{known.name} {known.reason}\n{known.remedy}\n")
        part.end(changes)
        write_run(args.directory)
    except (OSError, RecordError) as error:
        warn(f"the record of this run could not be written: {error}")
    if exit_status is None and os.getppid() != args.launcher:
        # Nobody else is left to say it.
        print(f"error: {args.strategy} on node {args.node}: {known.name}: {known.reason}", file=sys.stderr)
    return exit_code(known, end | changes)


def knows_little(end: Mapping[str, Any]) -> bool:
    """Whether this node ended well, or only lost a connection or waited in vain."""
    return end["status"] == COMPLETE or weight_of(end) in (Strength.VICTIM, Strength.WAITED)


def run(args: argparse.Namespace) -> int:
    # A Ctrl-C, a lost terminal and SLURM's TERM end what is recorded; this ends with the output, and then at once.
    hurry = threading.Event()
    for number in SIGNALS:
        signal.signal(number, lambda *_: hurry.set())
    exit_status = record(args, hurry)
    for number in SIGNALS:
        # A Python that ends sets its handlers back to the default, and would die of a signal with its work done.
        signal.signal(number, signal.SIG_IGN)
    return exit_status
