"""The checkpoint that a run resumes from: the newest that is intact on every node, if this run may continue it."""

import contextlib
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from t5bench import Problem, note
from t5bench.checkpoint_form import SEAL
from t5bench.plan.channel import (
    OTHER_PURPOSE,
    SECRET_REMEDY,
    Alive,
    Channel,
    Endpoint,
    Message,
    StrangerError,
)
from t5bench.plan.ports import peer_port
from t5bench.record import machine
from t5bench.record.checkpoints import RESHAPED_FROM, WEIGHTS_ONLY, Checkpoints
from t5bench.record.files import RecordError
from t5bench.record.plan import Plan, same_value, spelled
from t5bench.record.reader import read_part
from t5bench.record.records import mark_resume
from t5bench.record.settings import RESUMABLE_CHANGES, micro_batches_leave_the_curve

HOW_TO_SAVE = "A run saves checkpoints with SAVE_INTERVAL=<iterations>; without RESUME a new run starts"
HOW_TO_SHARE = (
    "Every node needs the files that its processes read: put OUTPUT_DIR on a shared file system,"
    " or copy the checkpoint's directory to that node from the one that has them"
)
LOOK_THERE = (
    "See the output of its launcher. Start one on every node with RESUME=1 and the same settings, master and port;"
    " RENDEZVOUS_TIMEOUT sets how long each waits"
)
STRATEGY = "the strategy"
LAYOUT = "the layout"
ENGINE = "the engine"
ONE_RUN = (
    "They are of two runs, or of two attempts: copy the checkpoint's directory from the node that has the right one"
    " to the others, or name another OUTPUT_DIR"
)
KEEP_MICRO_BATCHES = (
    "The loss depends on MICRO_BATCH_SIZE: for other processes, take as many that the data-parallel size times it"
    " divides GLOBAL_BATCH_SIZE"
)
LEAVE_SECONDS = 10.0
# Engine arguments that decide where a run begins and how far an attempt goes, but not what a resumed run trains.
BEGIN_OR_END = {"--finetune", "--load", "--exit-interval", "--exit-duration-in-mins"}
DECAY = "LR_DECAY_ITERS"
DECAY_ARGUMENT = "--lr-decay-iters"  # compared as the setting


def resumed(planned: Plan, *, agree: bool) -> Plan:
    """The plan with the iteration of the checkpoint to resume from or evaluate. agree: with the other nodes."""
    evaluates = planned.value("EVAL_ONLY") == "1"
    home = Path(planned.output_dir).parent if evaluates else Path(planned.output_dir)
    try:
        iteration = checkpoint(replace(planned, output_dir=str(home)), agree=agree)
        found = changes(replace(planned, output_dir=str(home)), iteration)
    except ValueError as error:
        remedy = getattr(error, "remedy", "")
        return planned.stopped_by(Problem(str(error), remedy, "resume", fatal=False))
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


def checkpoint(plan: Plan, *, agree: bool) -> int:
    """The iteration of the checkpoint that a planned run resumes from or evaluates. Raises Problem.

    0 if no node has one yet: every job that is queued again sets RESUME=1, also one that died before its first.
    Without `agree` it looks only at this node and changes nothing; with several nodes the answer may be 0. With `agree`
    all nodes take the same checkpoint, and the engines' pointers, the directory and metrics.jsonl are prepared for it.
    Each skipped checkpoint is named on stderr.
    """
    assert plan.layout
    checkpoints = Checkpoints(plan)
    is_evaluated = plan.value("EVAL_ONLY") == "1"
    has_any = bool(checkpoints.iterations())
    if not has_any:
        _begin_anew(plan, checkpoints.directory, agree=agree)
        if plan.layout.nnodes == 1:
            return 0
    wrong = list(misfits(plan)) if has_any else []
    if wrong:
        sentences = "; ".join(each.sentence for each in wrong)
        found = f"the run in {plan.output_dir} cannot be resumed with these settings: {sentences}"
        raise Problem(found, _how_to_continue(plan, wrong))
    own = look(checkpoints, None)
    if plan.layout.nnodes == 1:
        _refuse_without({0: own})
    if own.iteration >= plan.iterations and not is_evaluated:
        own = before_the_end(plan, checkpoints, own.iteration)
    if not agree:
        return own.iteration
    endpoint = Endpoint.of(plan, peer_port(plan.number("MASTER_PORT")))
    if endpoint.nodes > 1 and not endpoint.secret:
        raise Problem("the nodes have no common secret, so they cannot agree on a checkpoint", SECRET_REMEDY)
    iteration = agreed(endpoint, own, partial(look, checkpoints), plan.decimal("RENDEZVOUS_TIMEOUT"))
    if own.iteration > iteration:
        _passed_over(own.iteration, f"it is not intact on every node, but that of iteration {iteration} is")
    if not iteration and is_evaluated:
        raise Problem(f"EVAL_ONLY=1 but no node has a checkpoint in {checkpoints.directory}", HOW_TO_SAVE)
    if not iteration:
        return 0
    try:
        checkpoints.point_to(iteration)
        if plan.node == plan.layout.nnodes - 1 and not is_evaluated:  # it has the last rank, which logs
            mark_resume(Path(plan.output_dir, "metrics.jsonl"), iteration)
    except OSError as error:
        raise Problem(f"{plan.output_dir} cannot be prepared for resuming: {error}") from error
    return iteration


def _begin_anew(plan: Plan, directory: Path, *, agree: bool) -> None:
    """Checks that a run without a checkpoint here may begin, and sets aside what an attempt before it logged.

    directory: of the checkpoints. Raises Problem for an evaluation, and for a run that is complete.
    """
    assert plan.layout
    if plan.value("EVAL_ONLY") == "1" and plan.layout.nnodes == 1:
        raise Problem(f"EVAL_ONLY=1 but there is no checkpoint in {directory}", HOW_TO_SAVE)
    for status in Path(plan.output_dir).glob("node*.status"):
        if status.read_bytes().startswith(b"complete"):
            found = f"the run in {plan.output_dir} is complete, and it saved no checkpoint to resume from"
            raise Problem(found, HOW_TO_SAVE)
    metrics = Path(plan.output_dir, "metrics.jsonl")
    if agree and plan.value("EVAL_ONLY") != "1" and metrics.exists():
        mark_resume(metrics, 0)


def _how_to_continue(plan: Plan, wrong: Sequence["Misfit"]) -> str:
    """wrong: what is not as in the run in its directory."""
    different = {each.name for each in wrong}
    remedy = "Resume with its original settings, or start a new run in another OUTPUT_DIR"
    if not {STRATEGY, LAYOUT, ENGINE}.isdisjoint(different):
        remedy = f"{remedy}. {how_to_reshape(plan)}"
    if "MICRO_BATCH_SIZE" in different:
        remedy = f"{remedy}. {KEEP_MICRO_BATCHES}"
    if different <= set(RESUMABLE_CHANGES):
        remedy = f"{remedy}. {how_to_change(plan, wrong)}"
    return remedy


def how_to_reshape(plan: Plan) -> str:
    """The command after which this plan could continue the run of Megatron-DeepSpeed in its directory."""
    assert plan.layout
    directory = Path(plan.output_dir)
    if plan.engine == "native":
        command = f"python -m t5bench reshape {shlex.quote(str(directory))} --engine native"
        target = directory.with_name(f"{directory.name}-native")
        return f"To continue it in the native engine, run: {command}, then this launcher with OUTPUT_DIR={target}"
    if plan.zero_stage:
        return "A run that began otherwise cannot go on under ZeRO; without ZeRO it can (docs/models.md, Reshape)"
    tp = plan.layout.tp
    pp = plan.layout.pp
    target = directory.with_name(f"{directory.name}-tp{tp}-pp{pp}")
    is_native = any(Checkpoints(plan).directory.glob(f"*/{SEAL}"))
    engine = "--engine megatron " if is_native else ""
    command = f"python -m t5bench reshape {shlex.quote(str(directory))} {engine}--tp {tp} --pp {pp}"
    return (
        f"To continue it in this layout, run: {command}, then this launcher with OUTPUT_DIR={shlex.quote(str(target))}"
    )


def how_to_change(plan: Plan, wrong: Sequence["Misfit"]) -> str:
    """The setting with which a run changes these on purpose."""
    if plan.engine != "native":
        command = f"python -m t5bench reshape {shlex.quote(plan.output_dir)} --engine native"
        return f"In the native engine RESUME_CHANGES allows it: {command}"
    names = [name for name in RESUMABLE_CHANGES if name in {each.name for each in wrong}]
    allowed = plan.value("RESUME_CHANGES", "").split()
    remedy = f"To change them on purpose, add RESUME_CHANGES='{' '.join([*allowed, *names])}'"
    decay = next((each for each in wrong if each.name == DECAY), None)
    if decay and "TRAIN_ITERS" in names:
        remedy += f"; {DECAY}={decay.there} keeps the learning rate as it was planned, and MIN_LR from then on"
    return remedy


class View(NamedTuple):
    """A node's newest intact checkpoint that the others may have too (0: none), and what is wrong with the newest."""

    iteration: int
    fault: str
    host: str
    content: dict[str, str]
    """As Checkpoints.content()."""


def look(checkpoints: Checkpoints, limit: int | None) -> View:
    """Looks at the checkpoints up to this iteration."""
    iteration, faults = checkpoints.newest(limit)
    for number, fault in faults.items():
        _passed_over(number, fault)
    content = checkpoints.content(iteration) if iteration else {}
    return View(iteration, next(iter(faults.values()), ""), socket.gethostname(), content)


def before_the_end(plan: Plan, checkpoints: Checkpoints, newest: int) -> View:
    """An earlier checkpoint, for a run that died between its last checkpoint and its record. Raises Problem."""
    status = Path(plan.output_dir, f"node{plan.node}.status")
    if status.exists() and not status.read_bytes().startswith(b"complete"):
        earlier = look(checkpoints, plan.iterations - 1)
        if earlier.iteration:
            _passed_over(newest, "the end of the run was not recorded, so its last iterations are trained again")
            return earlier
    raise Problem(
        f"the run in {plan.output_dir} is already at iteration {newest} of {plan.iterations}",
        "In the native engine RESUME_CHANGES=TRAIN_ITERS makes it longer (docs/models.md, Longer). If the end of this"
        " run was not recorded, delete its directory to train it again",
    )


def _passed_over(iteration: int, reason: str) -> None:
    note(f"Skipping the checkpoint of iteration {iteration}: {reason}")


# ---- the run that wrote it -----------------------------------------------------------------------------------------


class Misfit(NamedTuple):
    """A forbidden difference from the run in a plan's directory."""

    name: str
    """A setting's, an argument's, STRATEGY, LAYOUT, or "" for other things."""
    sentence: str
    """ "SEED is '5' here and was '1234'"."""
    there: str = ""
    """The former value."""


def misfits(plan: Plan) -> Iterator[Misfit]:
    """The forbidden differences from the run in this directory."""
    directory = Path(plan.output_dir)
    part = _earlier_part(directory, plan.node)
    may_differ: set[str] = set()
    is_reshaped = part is None
    if is_reshaped:
        part = _earlier_part(directory / RESHAPED_FROM, plan.node)
        may_differ = {STRATEGY, LAYOUT}
        yield from _misfits_of_reshaped(plan, has_record=part is not None)
    if part is None:
        note(f"{plan.output_dir} holds no readable record, so a run's settings cannot be compared.")
        return
    then = Plan.read(part["plan"])
    has_native_form = any(Checkpoints(plan).directory.glob(f"*/{SEAL}"))
    is_of_this_engine = has_native_form == (plan.engine == "native")
    if is_reshaped and then.engine != plan.engine and is_of_this_engine:
        may_differ |= {ENGINE, *methods_of(plan)}
    if then.engine == plan.engine or ENGINE in may_differ:
        may_differ |= free_to_change(plan)
    yield from (each for each in differences(plan, then) if each.name not in may_differ)
    recorded = part.get("data") or {}
    now = machine.data(Path(plan.data_prefix), "")
    for key, suffix in (("bin_bytes", ".bin"), ("idx_sha256", ".idx")):
        if recorded.get(key) and now[key] and recorded[key] != now[key]:
            yield Misfit("", f"{plan.data_prefix}{suffix} is not the file on which the run was trained")


def differences(plan: Plan, then: Plan) -> Iterator[Misfit]:
    """Everything in which a plan differs from the one that its run had before."""
    was = _kept(then)
    arguments = plan.engine_arguments
    earlier_arguments = then.engine_arguments
    pairs = [(name, value, was[name]) for name, value in _kept(plan).items() if name in was]
    pairs += [
        (name, arguments.get(name, "not given"), earlier_arguments.get(name, "not given"))
        for name in sorted((arguments.keys() | earlier_arguments.keys()) - BEGIN_OR_END - {DECAY_ARGUMENT})
    ]
    for name, here, there in pairs:
        if not same_value(here, there):
            yield Misfit(name, f"{name} is '{here}' here and was '{there}'", there)


def free_to_change(plan: Plan) -> set[str]:
    """What may change in the middle of a run: in the native engine's, whatever leaves the curve as it is, and what is
    meant."""
    if plan.engine != "native":
        return set()
    free = {STRATEGY, LAYOUT, *methods_of(plan), *plan.value("RESUME_CHANGES", "").split()}
    if micro_batches_leave_the_curve(plan.value, plan.arguments.extra):
        free.add("MICRO_BATCH_SIZE")
    return free


def methods_of(plan: Plan) -> set[str]:
    """The settings that leave the curve as it is."""
    return {name for name, setting in plan.settings.items() if setting.role == "method"}


class Changes(NamedTuple):
    """What a run changes when it continues."""

    told: str
    """How a sentence about the checkpoint ends; "" if nothing changes."""
    changed_at: int
    """As in the plan that the run had before."""
    recipe_changed_at: int = 0
    trained_samples: int = 0
    """As the plan has them."""


def changes(plan: Plan, iteration: int) -> Changes:
    """What is otherwise than in the run that a plan continues with this checkpoint, as far as it may be."""
    assert plan.layout
    directory = Path(plan.output_dir)
    part = _earlier_part(directory, plan.node) or _earlier_part(directory / RESHAPED_FROM, plan.node)
    checkpoints = Checkpoints(plan)
    if part is None or plan.engine != "native" or not iteration:
        return Changes("", 0)
    then = Plan.read(part["plan"])
    found = list(differences(plan, then))
    told = f": {'; '.join(each.sentence for each in found)}" if found else ""
    if "MICRO_BATCH_SIZE" in {each.name for each in found} and not micro_batches_leave_the_curve(
        plan.value, plan.arguments.extra
    ):
        told += " (another curve: each micro-batch has a mean of its own labels, and its own dropout)"
    changes_recipe = any(each.name in RESUMABLE_CHANGES for each in found)
    recipe_changed_at = iteration if changes_recipe else min(then.recipe_changed_at, iteration)
    trained_samples = 0
    with contextlib.suppress(Problem):
        seal = checkpoints.seal(iteration)
        if seal.consumed_samples != plan.samples(0, iteration):
            trained_samples = seal.consumed_samples
        wanted = checkpoints.division
        if seal.division != wanted:
            told += f". It was saved by {seal.division.title}, and is read by {wanted.title}"
        begins_anew = not seal.has_dropout or not seal.division.draws_as(wanted)
        if begins_anew and plan.decimal("DROPOUT"):
            told += ". Dropout's random numbers begin anew"
    return Changes(told, then.changed_at, recipe_changed_at, trained_samples)


def _misfits_of_reshaped(plan: Plan, *, has_record: bool) -> Iterator[Misfit]:
    """What keeps a plan from continuing a checkpoint that was converted from another layout."""
    assert plan.layout
    checkpoints = Checkpoints(plan)
    if (checkpoints.directory / WEIGHTS_ONLY).exists() and plan.value("EVAL_ONLY") != "1":
        yield Misfit("", "its checkpoint has only weights, which are for EVAL_ONLY=1 and -- --finetune --load")
    if not has_record or plan.engine == "native":
        return
    if plan.zero_stage:
        found = f"{STRATEGY} is '{plan.strategy.name}', and ZeRO cannot continue a reshaped checkpoint"
        yield Misfit(STRATEGY, found)
        return
    wanted = set(checkpoints.files(range(plan.layout.world_size)))
    for iteration in checkpoints.iterations()[:1]:
        folder = checkpoints.folder(iteration)
        present = {str(path.relative_to(folder)) for path in folder.glob("mp_rank_*/*.pt")}
        if present != wanted:
            yield Misfit("", f"the checkpoint is of another layout than TP={plan.layout.tp} PP={plan.layout.pp}")


def _earlier_part(directory: Path, node: int) -> dict[str, Any] | None:
    """What the last attempt recorded: this node's part, else any node's, else an older one; None if nothing is left."""
    found = sorted(directory.glob("node*.json"), key=lambda path: path.name != f"node{node}.json")
    older = sorted(directory.glob("node*.json.*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in (*found, *older):
        with contextlib.suppress(RecordError):
            return read_part(path)
    return None


def _kept(plan: Plan) -> dict[str, str]:
    """What a run must keep so that its curve stays the same, apart from further engine arguments."""
    assert plan.layout
    decay = plan.named_arguments.get("lr_decay_iters") or plan.value("TRAIN_ITERS")
    return {
        STRATEGY: plan.strategy.name,
        ENGINE: plan.engine,
        LAYOUT: f"TP={plan.layout.tp} PP={plan.layout.pp} DP={plan.layout.dp}",
        **plan.with_role("kept"),
        DECAY: spelled(decay),
    }


# ---- all nodes -----------------------------------------------------------------------------------------------------


class Views(Message):
    views: dict[int, View]


class _Agreement(Channel):
    """``inbox`` gets node 0's table of all views (on node 0 the others' views), or the Problem that ends it."""

    kinds = Alive | Views
    purpose = "looks for a checkpoint, with RESUME=1"

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self.inbox: SimpleQueue[dict[int, View] | Problem] = SimpleQueue()
        self.strangers: set[str] = set()
        self.start()

    def hear(self, message: Any) -> None:
        if isinstance(message, Views):
            self.inbox.put({node: view for node, view in message.views.items() if node < self.endpoint.nodes})

    def left(self, node: int) -> None:
        where = f"node {node} ({self.hosts[node]})"
        self.inbox.put(Problem(f"{where} disconnected while the nodes were agreeing on a checkpoint", LOOK_THERE))

    def met_stranger(self, address: str, error: StrangerError) -> None:
        if error.code == OTHER_PURPOSE:
            self.inbox.put(error)
        elif self.endpoint.node == 0:
            self.strangers.add(address)
        else:
            master = f"node 0 ({self.endpoint.address}:{self.endpoint.port})"
            found = f"{master} did not say which checkpoint to resume from: {error}"
            self.inbox.put(Problem(found, error.remedy or LOOK_THERE))

    def cannot_listen(self, error: OSError) -> None:
        remedy = "It belongs to MASTER_PORT: choose another one on every node"
        self.inbox.put(Problem(f"cannot listen on port {self.endpoint.port}: {error.strerror}", remedy))

    def next(self, seconds: float) -> dict[int, View]:
        """Waits this long for absent nodes, and without limit for a connected one, which is reading. Raises Problem."""
        deadline = time.monotonic() + seconds
        expected = set(range(1, self.endpoint.nodes)) if self.endpoint.node == 0 else {0}
        while True:
            with contextlib.suppress(Empty):
                entry = self.inbox.get(timeout=0.2)
                if isinstance(entry, Problem):
                    raise entry
                return entry
            absent = expected - self.connections.keys()
            if absent and time.monotonic() > deadline:
                found = f"node {', '.join(map(str, sorted(absent)))} did not report its checkpoint in time"
                if self.strangers:
                    found += f"; {', '.join(sorted(self.strangers)[:3])} has another secret and was ignored"
                raise Problem(found, SECRET_REMEDY if self.strangers else LOOK_THERE)


def agreed(endpoint: Endpoint, own: View, look_again: Callable[[int], View], seconds: float) -> int:
    """The newest iteration whose checkpoint is intact on all nodes. Raises Problem.

    Each node names its newest one. If they differ, all look again, up to the smallest, so that no node reads more
    checkpoints than it must. Node 0 listens on the recorders' port, so that a node without RESUME=1 is noticed.
    """
    told: dict[int, View] = {}
    table = {0: own} if endpoint.node == 0 else {}
    with contextlib.closing(_Agreement(endpoint)) as others:
        while True:
            known = dict(table) if endpoint.node == 0 else {endpoint.node: own}
            if known != told:
                others.declare(Views(views=known))
                told = known
            iterations = {view.iteration for view in table.values()}
            if len(table) == endpoint.nodes and (len(iterations) == 1 or 0 in iterations):
                break
            entry = others.next(seconds)
            table = table | entry if endpoint.node == 0 else entry
            if own.iteration > (least := min(view.iteration for view in table.values())) > 0:
                own = look_again(least)
            if endpoint.node == 0:
                table[0] = own
        deadline = time.monotonic() + LEAVE_SECONDS
        # The port is free for the recorder when the others close first.
        while endpoint.node == 0 and others.connections and time.monotonic() < deadline:
            time.sleep(0.02)
    if any(view.iteration or view.fault for view in table.values()):
        _refuse_without(table)
    _refuse_others(table)
    return own.iteration


def _refuse_others(table: Mapping[int, View]) -> None:
    """Raises Problem if what two nodes call the same checkpoint is not the same."""
    owners: dict[str, int] = {}
    for node, view in sorted(table.items()):
        for name, content in view.content.items():
            first = table[owners.setdefault(name, node)]
            if first.content[name] != content:
                found = f"node {owners[name]} ({first.host}) and node {node} ({view.host}) have different checkpoints"
                raise Problem(f"{found} of iteration {view.iteration}: {name} is not the same file there", ONE_RUN)


def _refuse_without(table: Mapping[int, View]) -> None:
    """Raises Problem if a node has no checkpoint."""
    for node, view in sorted(table.items()):
        if not view.iteration:
            where = ""
            remedy = HOW_TO_SAVE
            if len(table) > 1:
                where = f" on node {node} ({view.host})"
                remedy = HOW_TO_SHARE
            fault = view.fault or "none was saved"
            raise Problem(f"there is no intact checkpoint to resume from{where}: {fault}", remedy)
