"""Which checkpoint a run goes on from: the newest that is whole on every node. Imports no torch.

A checkpoint needs no list beside it. Its files follow from engine, strategy and layout, and each is a zip archive, as
torch.save writes them: its directory comes last, so a file that was cut off has none, and every tensor in it has its
CRC-32. So a checkpoint counts as whole when every file that this node's processes will read is there and agrees with
its own checksums, however the run that wrote it ended.

``check`` looks at this node alone. ``choose`` agrees with the other nodes on one iteration and prepares the directory:
the engines' pointers to that checkpoint, newer ones set aside, a mark in metrics.jsonl.
"""

import argparse
import contextlib
import json
import re
import socket
import sys
import time
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from t5bench.record import machine as machine
from t5bench.record.records import RecordError, read_part, resume_mark

# Megatron's pointer, which the native engine has too, and DeepSpeed's.
TRACKER, DEEPSPEED_TRACKER = "latest_checkpointed_iteration.txt", "latest"
_NAME = re.compile(r"(?:iter_|global_step)(\d+)")
PASSED_OVER = "passed-over"
READERS = 4  # files at once: zlib computes CRC-32 without Python's lock

# What a run must have in common with the one that wrote the checkpoint, for its curve to be the same curve. TRAIN_ITERS
# is among them: the decay of the learning rate and the shuffling of the samples depend on it.
FIXED_SETTINGS = (
    "ENCODER_NUM_LAYERS", "DECODER_NUM_LAYERS", "HIDDEN_SIZE", "NUM_ATTENTION_HEADS", "FFN_HIDDEN_SIZE",
    "ENCODER_SEQ_LENGTH", "DECODER_SEQ_LENGTH", "DROPOUT", "FLASH_ATTENTION", "TRAIN_ITERS", "GLOBAL_BATCH_SIZE",
    "MICRO_BATCH_SIZE", "PRECISION_FLAG", "LR", "MIN_LR", "LR_WARMUP_ITERS", "WEIGHT_DECAY", "CLIP_GRAD",
    "GRADIENT_REDUCTION", "SEED", "LOG_INTERVAL",
)  # fmt: skip
FIXED_LAYOUT = ("tp", "pp", "dp")
HOW_TO_SAVE = "A run saves checkpoints with SAVE_INTERVAL=<iterations>; without RESUME a new run starts"


class CheckpointError(ValueError):
    """A run that cannot go on; the message is for people, and so is the remedy."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.remedy = remedy


@dataclass(frozen=True)
class Shape:
    """What decides which files a checkpoint has: zero_stage 0 stands for no DeepSpeed."""

    engine: str
    zero_stage: int
    precision: str
    tp: int
    pp: int
    dp: int

    def directory(self, iteration: int) -> str:
        """The name of a checkpoint's directory. DeepSpeed inside Megatron gives it its own."""
        by_deepspeed = self.zero_stage and self.engine == "megatron"
        return f"global_step{iteration}" if by_deepspeed else f"iter_{iteration:07d}"

    def files(self, ranks: Sequence[int]) -> list[str]:
        """The files in a checkpoint's directory that these ranks read, sorted.

        Ranks count tensor parallelism fastest, then data, then pipeline parallelism, in both engines.
        """
        return sorted({name for rank in ranks for name in self._files_of(rank)})

    def _files_of(self, rank: int) -> Iterator[str]:
        tp, dp, pp = rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)
        if self.zero_stage:
            bf16 = "bf16_" if self.precision == "--bf16" else ""
            yield f"{bf16}zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt"
            own = f"zero_pp_rank_{dp}_" if self.zero_stage == 3 else ""
            yield f"{own}mp_rank_{tp:02d}_model_states.pt"
        else:
            stage = f"_{pp:03d}" if self.pp > 1 else ""
            yield f"mp_rank_{tp:02d}{stage}/model_optim_rng.pt"
        if self.engine == "native":
            yield f"random_{rank:05d}.pt"


# ---- one node -------------------------------------------------------------------------------------------------------


def damage(path: Path) -> str:
    """What is wrong with a file of torch.save, to follow its name in a sentence; '' for a whole one."""
    try:
        with zipfile.ZipFile(path) as archive:
            torn = archive.testzip()
    except FileNotFoundError:
        return "is missing"
    except (zipfile.BadZipFile, EOFError, zlib.error):
        return f"is cut off (it has {path.stat().st_size:,} bytes)"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return f"is damaged ({torn} in it does not have its checksum)" if torn else ""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in a directory, as one node sees them."""

    directory: Path
    shape: Shape
    ranks: Sequence[int]

    def iterations(self) -> list[int]:
        """The iterations of which there is something, the newest first."""
        names = (_NAME.fullmatch(path.name) for path in self.directory.glob("*") if path.is_dir())
        return sorted({int(name[1]) for name in names if name}, reverse=True)

    def fault(self, iteration: int) -> str:
        """What this node's processes could not read of a checkpoint; '' for a whole one."""
        names = self.shape.files(self.ranks)
        folder = self.directory / self.shape.directory(iteration)
        # Whatever is missing is found before anything is read.
        if absent := [name for name in names if not (folder / name).is_file()]:
            return f"{folder.name}/{absent[0]} is missing"
        with ThreadPoolExecutor(READERS) as pool:
            damages = pool.map(damage, [folder / name for name in names])
            return next((f"{folder.name}/{name} {what}" for name, what in zip(names, damages, strict=True) if what), "")

    def newest(self, limit: int | None = None) -> tuple[int, dict[int, str]]:
        """The newest whole checkpoint of at most `limit` iterations, 0 for none, and what is wrong with newer ones."""
        faults = {}
        for iteration in self.iterations():
            if limit is None or iteration <= limit:
                if not (fault := self.fault(iteration)):
                    return iteration, faults
                faults[iteration] = fault
        return 0, faults

    def point_to(self, iteration: int) -> None:
        """Lets the engines find this checkpoint and no newer one, on a shared file system too. Raises OSError."""
        for newer in self.iterations():
            if newer > iteration:
                _set_aside(self.directory / self.shape.directory(newer))
        _write(self.directory / TRACKER, str(iteration))
        if (name := self.shape.directory(iteration)).startswith("global_step"):
            _write(self.directory / DEEPSPEED_TRACKER, name)


def _set_aside(folder: Path) -> None:
    """A new attempt must not write into what is left of an old one: the mixture could look whole."""
    number = 0
    while (target := folder.with_name(f"{folder.name}.{PASSED_OVER}{f'.{number}' if number else ''}")).exists():
        number += 1
    with contextlib.suppress(FileNotFoundError):  # another node was faster
        folder.rename(target)


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    beside.write_text(text)
    beside.replace(path)


def mark_resume(metrics: Path, iteration: int) -> None:
    """Says in metrics.jsonl that what follows was logged by a run that went on from `iteration`. Raises OSError."""
    with metrics.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            # A run that died can leave half a line.
            file.write(b"" if file.read(1) == b"\n" else b"\n")
        file.write(resume_mark(iteration).encode() + b"\n")


# ---- the run that wrote it ------------------------------------------------------------------------------------------


def earlier_part(directory: Path, node: int) -> dict[str, Any] | None:
    """What the last attempt recorded: this node's part, else any node's, else an older one; None: nothing."""
    found = sorted(directory.glob("node*.json"), key=lambda path: path.name != f"node{node}.json")
    older = sorted(directory.glob("node*.json.*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in (*found, *older):
        with contextlib.suppress(RecordError):
            return read_part(path)
    return None


def _same(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def misfits(
    part: Mapping[str, Any], *, settings: Mapping[str, str], layout: Mapping[str, int], strategy: str, engine: str
) -> list[str]:
    """How a run differs from the recorded one and must not: "SEED is '5' here and was '1234'"."""
    found = [
        f"{name} is '{now}' here and was '{then}'"
        for name, now, then in (("the strategy", strategy, part["strategy"]), ("the engine", engine, part["engine"]))
        if now != then
    ]
    if any(layout[axis] != part["layout"][axis] for axis in FIXED_LAYOUT):
        here, there = (" ".join(f"{a.upper()}={of[a]}" for a in FIXED_LAYOUT) for of in (layout, part["layout"]))
        found.append(f"the layout is {here} here and was {there}")
    recorded = part["settings"]
    found += [
        f"{name} is '{settings[name]}' here and was '{recorded[name]}'"
        for name in FIXED_SETTINGS
        if name in settings and name in recorded and not _same(settings[name], recorded[name])
    ]
    return found


def other_data(part: Mapping[str, Any], prefix: Path) -> str:
    """How the data differ from those of the recorded run; '' where they do not, or cannot be compared."""
    recorded, now = part.get("data") or {}, machine.data(prefix, "")
    for key, name in (("bin_bytes", ".bin"), ("idx_sha256", ".idx")):
        if recorded.get(key) and now.get(key) and recorded[key] != now[key]:
            return f"{prefix}{name} is not what the run was trained on"
    return ""


# ---- all nodes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """This node among all of a run's. `run` tells a run from another that comes to the same port."""

    rank: int
    count: int
    address: str
    port: int
    run: str


Newest = Callable[[int | None], tuple[int, str]]


def agree(node: Node, newest: Newest, seconds: float) -> int:
    """The newest iteration whose checkpoint is whole on all nodes.

    newest(limit) gives this node's newest whole one of at most `limit`, 0 for none, and what is wrong with the others.
    Each node names its newest; where they differ, all look again below the least, so that no node reads older ones than
    it must. Node 0 listens at the rendezvous port, which torchrun takes only later. Raises CheckpointError.
    """
    if node.count == 1:
        answer = _answer(node, newest, None)
        _refuse_without({0: answer}, 1)
        return answer["iteration"]
    deadline = time.monotonic() + seconds
    return _lead(node, newest, deadline) if node.rank == 0 else _follow(node, newest, deadline)


def _answer(node: Node, newest: Newest, limit: int | None) -> dict[str, Any]:
    iteration, fault = newest(limit)
    host = socket.gethostname()
    return {"node": node.rank, "run": node.run, "host": host, "iteration": iteration, "fault": fault}


def _refuse_without(answers: Mapping[int, Mapping[str, Any]], count: int) -> None:
    """Raises CheckpointError where a node has no checkpoint."""
    for rank, answer in sorted(answers.items()):
        if not answer["iteration"]:
            where = f" on node {rank} ({answer['host']})" if count > 1 else ""
            what = f": {answer['fault']}" if answer["fault"] else ""
            remedy = HOW_TO_SAVE
            if count > 1:
                remedy = (
                    "Every node needs the files that its processes read: put OUTPUT_DIR on a shared file system,"
                    " or copy the checkpoint's directory to this node from the one that has them"
                )
            raise CheckpointError(f"there is no whole checkpoint to resume from{where}{what}", remedy)


def _send(stream: Any, content: Mapping[str, Any]) -> None:
    stream.write(json.dumps(content).encode() + b"\n")
    stream.flush()


def _read(stream: Any) -> dict[str, Any]:
    """Raises OSError, ValueError for what is no message."""
    content = json.loads(stream.readline(1 << 16))
    if not isinstance(content, dict):
        raise ValueError("not a message")
    return content


def _lead(node: Node, newest: Newest, deadline: float) -> int:
    streams: dict[int, Any] = {}
    answers = {0: _answer(node, newest, None)}
    with contextlib.ExitStack() as stack:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        listener = socket.create_server(
            ("", node.port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=node.count
        )
        with listener:
            while len(streams) < node.count - 1:
                _take_next(node, listener, deadline, stack, streams, answers)
        try:
            return _decide(node, newest, streams, answers)
        finally:
            # The others close first, so that the port is free for torchrun.
            for stream in streams.values():
                with contextlib.suppress(OSError):
                    stream.readline(1)


def _take_next(
    node: Node,
    listener: socket.socket,
    deadline: float,
    stack: contextlib.ExitStack,
    streams: dict[int, Any],
    answers: dict[int, dict[str, Any]],
) -> None:
    listener.settimeout(max(0.01, deadline - time.monotonic()))
    try:
        connection, _ = listener.accept()
    except TimeoutError as error:
        silent = sorted(set(range(1, node.count)) - streams.keys())
        raise CheckpointError(
            f"node {', '.join(map(str, silent))} did not say in time which checkpoint it has",
            "Start the launcher on every node, each with RESUME=1 and the same master and port;"
            " RENDEZVOUS_TIMEOUT is how long each waits",
        ) from error
    stack.enter_context(connection)
    connection.settimeout(5)
    stream = stack.enter_context(connection.makefile("rwb"))
    try:
        answer = _read(stream)
        rank, run = int(answer["node"]), answer["run"]
        iteration, _ = int(answer["iteration"]), answer["host"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # somebody else's
    if run != node.run or not 0 < rank < node.count or rank in streams or iteration < 0:
        reason = f"node 0 resumes '{node.run}' and expects each of its {node.count} nodes once"
        with contextlib.suppress(OSError):
            _send(stream, {"refused": reason, "remedy": "Start every node with the same settings and its own rank"})
        return
    # Another node's turn to read a checkpoint may take long.
    connection.settimeout(max(60.0, deadline - time.monotonic()))
    streams[rank], answers[rank] = stream, answer


def _decide(node: Node, newest: Newest, streams: Mapping[int, Any], answers: dict[int, dict[str, Any]]) -> int:
    while True:
        try:
            _refuse_without(answers, node.count)
        except CheckpointError as error:
            _tell(streams, {"refused": str(error), "remedy": error.remedy})
            raise
        least = min(answers.values(), key=lambda answer: answer["iteration"])
        limit = least["iteration"]
        if all(answer["iteration"] == limit for answer in answers.values()):
            _tell(streams, {"agreed": limit})
            return limit
        _tell(streams, {"limit": limit})
        answers[0] = _answer(node, newest, limit)
        for rank, stream in streams.items():
            try:
                answers[rank] = _read(stream)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"node {rank} went away while the nodes agreed on a checkpoint") from error


def _tell(streams: Mapping[int, Any], content: Mapping[str, Any]) -> None:
    for stream in streams.values():
        with contextlib.suppress(OSError):
            _send(stream, content)


def _follow(node: Node, newest: Newest, deadline: float) -> int:
    answer = _answer(node, newest, None)
    while True:
        try:
            connection = socket.create_connection((node.address, node.port), timeout=5)
        except OSError as error:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"node 0 ({node.address}:{node.port}) did not answer in time: {error}",
                    "Start the launcher there too, with RESUME=1 and the same port",
                ) from error
            time.sleep(0.2)
            continue
        with connection, connection.makefile("rwb") as stream:
            connection.settimeout(max(60.0, deadline - time.monotonic()))
            try:
                return _obey(node, newest, stream, answer)
            except CheckpointError:
                raise
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"node 0 ({node.address}:{node.port}) did not say which checkpoint to resume from",
                    "Its launcher tells why; it must be started with RESUME=1 too",
                ) from error


def _obey(node: Node, newest: Newest, stream: Any, answer: dict[str, Any]) -> int:
    while True:
        _send(stream, answer)
        order = _read(stream)
        if "refused" in order:
            raise CheckpointError(order["refused"], order.get("remedy", ""))
        if "agreed" in order:
            return int(order["agreed"])
        answer = _answer(node, newest, int(order["limit"]))


# ---- the commands ---------------------------------------------------------------------------------------------------


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _passed_over(iteration: int, reason: str) -> None:
    _say(f"The checkpoint of iteration {iteration} is passed over: {reason}")


def check(args: argparse.Namespace, checkpoints: Checkpoints, settings: Mapping[str, str]) -> int:
    """This node's newest whole checkpoint, of a run that this one can go on with. Raises CheckpointError."""
    if not checkpoints.iterations() and args.nodes == 1:
        raise CheckpointError(f"RESUME=1 but there is no checkpoint in {checkpoints.directory}", HOW_TO_SAVE)
    part = earlier_part(args.directory, args.node)
    if part is None:
        _say(f"There is no record of the run that wrote {checkpoints.directory}: its settings are not compared.")
    else:
        layout = {name: int(value) for name, value in machine.pairs(args.layout).items()}
        wrong = misfits(part, settings=settings, layout=layout, strategy=args.strategy, engine=args.engine)
        wrong += [difference] if (difference := other_data(part, args.data_prefix)) else []
        if wrong:
            raise CheckpointError(
                f"the run in {args.directory} cannot go on like this: {'; '.join(wrong)}",
                "Resume with the settings that it had, or start a new run in another OUTPUT_DIR",
            )
    iteration, faults = checkpoints.newest()
    if not iteration and args.nodes == 1:
        _refuse_without({0: {"iteration": 0, "fault": "; ".join(faults.values())}}, 1)
    for number, fault in faults.items():
        _passed_over(number, fault)
    total = int(settings["TRAIN_ITERS"])
    if iteration >= total:
        raise CheckpointError(
            f"the run in {args.directory} is already at iteration {iteration} of {total}",
            "A longer run is another run, with another decay of the learning rate: choose another OUTPUT_DIR",
        )
    return iteration


def choose(args: argparse.Namespace, checkpoints: Checkpoints) -> int:
    """The iteration that all nodes agree on, with the directory prepared. Raises CheckpointError, OSError."""

    def newest(limit: int | None) -> tuple[int, str]:
        if args.whole and (limit is None or limit >= args.whole):
            return args.whole, ""
        iteration, faults = checkpoints.newest(limit)
        return iteration, "; ".join(faults.values())

    run = f"{args.strategy} with {args.engine}, {' '.join(args.layout)}"
    node = Node(args.node, args.nodes, args.master_address, args.master_port, run)
    iteration = agree(node, newest, args.seconds)
    if args.whole > iteration:
        _passed_over(args.whole, f"not every node has it whole, and all have that of iteration {iteration}")
    checkpoints.point_to(iteration)
    if args.node == args.nodes - 1:  # it has the last rank, which logs
        mark_resume(args.directory / "metrics.jsonl", iteration)
    return iteration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", choices=["check", "choose"])
    parser.add_argument("--directory", type=Path, required=True, help="the run directory")
    parser.add_argument("--node", type=int, required=True, help="the node's rank")
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--ds-config", type=Path, help="the strategy's file in ds_configs/")
    parser.add_argument("--data-prefix", type=Path, required=True)
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--layout", action="append", default=[], metavar="NAME=NUMBER")
    parser.add_argument("--whole", type=int, default=0, help="choose: what check found")
    parser.add_argument("--master-address", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0, help="choose: how long to wait for the other nodes")


def run(args: argparse.Namespace) -> int:
    """Prints the iteration; or, with exit code 2, lines problem=... and remedy=... for the launcher."""
    settings = machine.pairs(args.setting)
    layout = {name: int(value) for name, value in machine.pairs(args.layout).items()}
    args.nodes = layout["nnodes"]
    stage = json.loads(args.ds_config.read_text())["zero_optimization"]["stage"] if args.ds_config else 0
    shape = Shape(args.engine, stage, settings["PRECISION_FLAG"], *(layout[axis] for axis in FIXED_LAYOUT))
    ranks = range(args.node * layout["nproc_per_node"], (args.node + 1) * layout["nproc_per_node"])
    checkpoints = Checkpoints(args.directory / "checkpoints", shape, ranks)
    task = partial(check, settings=settings) if args.task == "check" else choose
    try:
        print(task(args, checkpoints=checkpoints))
    except CheckpointError as error:
        print(f"problem={error}\nremedy={error.remedy}")
        return 2
    except OSError as error:
        print(f"problem={args.directory} cannot be prepared for resuming: {error}\nremedy=")
        return 2
    return 0


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(prog="python -m t5bench.record.checkpoints", description=__doc__)
    add_arguments(arguments)
    sys.exit(run(arguments.parse_args()))
