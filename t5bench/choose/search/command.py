"""``python -m t5bench search``: measures short runs of the most promising layouts until the fastest is known.

scripts/search.sh calls it. The decisions are in next_run.py.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from t5bench import Problem, note, raise_on_signals
from t5bench.choose.asked import asked_model, asked_size, default_batch, device_for, host_of, link_of
from t5bench.choose.search import parity
from t5bench.choose.search.next_run import Expected, Option, Search, SearchRun, Standing, steps
from t5bench.choose.search.picture import draw
from t5bench.choose.search.runs import Moment, Runner, SearchState, name_of, remembered
from t5bench.choose.space import MOST_AS_FAST, Candidate, Space, first_of_ties
from t5bench.costmodel.job import Job
from t5bench.costmodel.parameters import parameters
from t5bench.costmodel.prediction import with_link
from t5bench.costmodel.ties import TIES
from t5bench.plan import run_lock
from t5bench.plan.launchers import ENGINES, LAYOUT_SETTINGS, accepted
from t5bench.record.plan import Plan
from t5bench.sweep.launch import BASELINE, Launch, PlannedRun
from t5bench.unread import never_wait

CHOSEN = ("TP_SIZE", "PP_SIZE", "MICRO_BATCH_SIZE", "RECOMPUTE", "TRAIN_ITERS", "LOG_INTERVAL")
PICTURE = "search.svg"
SHOWN = 10
EXIT_NOT_CERTAIN = 3
MOST_SAID = 1.0
"""A bound on a regret that is larger says nothing: twice as slow may be anything."""
PYTHON = 450 * 10**6
"""Bytes of a worker's Python with PyTorch on a CPU, before it has a model."""


def run(args: argparse.Namespace) -> int:
    """Raises Problem if nothing can run."""
    never_wait("stdout", "stderr")
    raise_on_signals()
    os.environ.setdefault("ENGINE", ENGINES[0])
    tensor = asked_size("TENSOR_PARALLEL_SIZE", "TP_SIZE")
    pipeline = asked_size("PIPELINE_PARALLEL_SIZE", "PP_SIZE")
    for name in (*LAYOUT_SETTINGS, *CHOSEN):  # each run has its layout's
        os.environ.pop(name, None)
    planned = plan_of_hosts(args)
    candidates = that_may_be_fastest(launchable(args, planned, tensor, pipeline))
    by_name = {name_of(candidate): candidate for candidate in candidates}
    options = [option_of(name, candidate) for name, candidate in by_name.items()]
    memory = remembered(args.runs_dir, question(args, planned, candidates[0]))
    search = Search(options, dict(memory.outcomes), set(memory.failed), set(memory.ran_out))
    if args.dry_run:
        print_left(search.standing(), by_name)
        return 0
    try:
        args.runs_dir.mkdir(parents=True, exist_ok=True)
        run_lock.take(args.runs_dir, "search", os.getpid())
    except OSError as error:
        raise Problem(f"cannot write to {args.runs_dir}: {error.strerror}", "Choose another RUNS_DIR") from error
    run_lock.keep(args.runs_dir, "search")
    runner = Runner(args.runs_dir, args.launch == "ssh", args.iterations, memory)
    standing = found(search, by_name, runner, budget(args, memory))
    report(standing, by_name, memory, args.runs_dir)
    return 0 if standing.is_certain else EXIT_NOT_CERTAIN


def plan_of_hosts(args: argparse.Namespace) -> Plan:
    """DDP's plan on all hosts: the processes, their device and the backend. Raises Problem."""
    launch = Launch({"MICRO_BATCH_SIZE": "1"}, over_ssh=args.launch == "ssh")
    planned = accepted(launch.ask(PlannedRun(BASELINE, BASELINE), args.runs_dir / "plan"))
    if planned.obstacles or not planned.layout:
        obstacle = planned.obstacles[0]
        raise Problem(f"no layout can run here: {obstacle.found}", obstacle.remedy)
    return planned


def launchable(args: argparse.Namespace, planned: Plan, tensor: int | None, pipeline: int | None) -> list[Candidate]:
    """All layouts that fit and that the launchers can start, by predicted time. Raises Problem if there are none."""
    assert planned.layout
    model = asked_model(argparse.Namespace(model=None, vocabulary=None))
    per_node = planned.layout.nproc_per_node
    link = link_of(args.network, args.link, args.latency)
    machine = with_link(device_for(planned, args.device), link, per_node, host_of(args.host))
    space = Space(
        engines=model.engines,
        gpus=planned.layout.world_size,
        machine=machine,
        batch=default_batch(),
        tensor=tensor,
        pipeline=pipeline,
        given=model.given,
        is_launchable=model.is_launchable,
        backend=planned.backend,
    )
    ranked = [each for each in space.ranked() if each.fits and each.start]
    if not ranked:
        raise Problem("the launchers can start none of the layouts that fit", "See: python -m t5bench layouts")
    return ranked


def option_of(name: str, candidate: Candidate) -> Option:
    """On CPUs, where nothing else is known of a process' memory, what it needs is what torch allocates and Python; what
    is offloaded takes the same memory."""
    if candidate.machine.device.memory:
        needed = candidate.memory.needed
    else:
        memory = replace(candidate, job=touched(candidate.job)).memory
        needed = memory.peak + sum(memory.cpu.values()) + PYTHON
    return Option(name, candidate.job, candidate.machine, candidate.backend, needed)


def touched(job: Job) -> Job:
    """With a bucket for reductions that is no larger than the gradients: of the rest, a CPU's kernel has no pages."""
    gradients = max(parameters(job.architecture, job.parallel, stage) for stage in range(job.parallel.pipeline))
    return replace(job, zero=replace(job.zero, reduce_bucket=min(job.zero.reduce_bucket, gradients)))


def that_may_be_fastest(ranked: Sequence[Candidate]) -> list[Candidate]:
    """Without those that are far slower whatever is not known."""
    fastest = ranked[0]
    candidates = [
        each
        for each in ranked
        if each.seconds <= MOST_AS_FAST * fastest.seconds or not each.surely_slower_than(fastest)
    ]
    return without_needless_recomputation(candidates)


def without_needless_recomputation(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Without those that recompute what would fit as well."""
    jobs = {each.job for each in candidates}
    return [
        each for each in candidates if each.job.recompute == "none" or replace(each.job, recompute="none") not in jobs
    ]


def question(args: argparse.Namespace, planned: Plan, candidate: Candidate) -> dict[str, str]:
    """What must be the same when a search continues."""
    assert planned.layout
    return {
        **candidate.given,
        "hosts": " ".join(planned.hosts),
        "nodes": str(planned.layout.nnodes),
        "processes of a node": str(planned.layout.nproc_per_node),
        "device": planned.device,
        "ENGINE": os.environ["ENGINE"],
        "GLOBAL_BATCH_SIZE": str(candidate.job.global_batch),
        "iterations": str(args.iterations),
    }


def budget(args: argparse.Namespace, memory: SearchState) -> Callable[[Search], bool]:
    """Whether another run may begin: one is expected to take as long as those before it.

    Runs that failed count. Where nothing but failures is known, no number of runs ends the search without an answer.
    """

    def may_go_on(search: Search) -> bool:
        runs = search.runs + memory.lost
        if args.runs and runs >= args.runs and search.measured:
            return False
        each = memory.seconds / runs if runs else 0.0
        return not args.minutes or memory.seconds + each <= 60 * args.minutes

    return may_go_on


def found(
    search: Search, by_name: Mapping[str, Candidate], runner: Runner, may_go_on: Callable[[Search], bool]
) -> Standing:
    """Searches until the check finds no difference between the named layout and DDP. Raises Problem and Interrupted."""
    memory = runner.memory

    def measure(option: Option) -> SearchRun | None:
        outcome = runner.measure(option.name, by_name[option.name])
        if option.name in memory.ran_out:
            search.ran_out.add(option.name)
        return outcome

    while True:
        try:
            for standing in steps(search, measure, may_go_on):
                note(progress(standing, by_name, memory))
                named = standing.named.option.name
                moment = Moment(memory.seconds / 60, named, standing.possible_regret)
                if standing.named.is_measured and moment not in memory.moments:
                    memory.moments.append(moment)
        except ValueError as error:
            reasons = dict.fromkeys(memory.failed.values())
            raise Problem(str(error), "\n".join(reasons)) from error
        name = name_to_run(standing, by_name)
        if not standing.named.is_measured or name in memory.parity:
            break
        note(f"checking whether {by_name[name].title} trains as DDP does")
        fault = parity.fault_of(name, by_name[name], runner)
        if not fault:
            memory.parity.append(name)
            break
        note(f"{by_name[name].title} is left out: {fault}")
        memory.failed[name] = fault
        search.failed.add(name)
    memory.write(runner.runs_dir)
    titles = {name: candidate.title for name, candidate in by_name.items()}
    draw(memory.moments, titles, runner.runs_dir / PICTURE)
    return standing


def name_to_run(standing: Standing, by_name: Mapping[str, Candidate]) -> str:
    """Of the named layout and those that cannot be called slower, the one that the rule for ties names."""
    if not standing.equals:
        return standing.named.option.name
    equal = {each.option.name: by_name[each.option.name] for each in (standing.named, *standing.equals)}
    chosen = first_of_ties(list(equal.values()))
    return next(name for name, candidate in equal.items() if candidate is chosen)


def progress(standing: Standing, by_name: Mapping[str, Candidate], memory: SearchState) -> str:
    """One line."""
    named = by_name[standing.named.option.name].title
    if not standing.runs:
        return f"layouts that may be the fastest: {len(standing.left)}; that are surely slower: {standing.dropped}"
    return (
        f"after run {standing.runs}, {memory.seconds / 60:.1f} min: {named} takes {standing.named.seconds:.4g} s; "
        f"{bound(standing)}; layouts left: {len(standing.left)}"
    )


def bound(standing: Standing) -> str:
    """How much slower than the fastest layout the named one may be, as far as the runs can say."""
    if not standing.has_repeats:
        return "no bound yet, because no layout ran twice"
    if standing.possible_regret <= MOST_SAID:
        return f"at most {standing.possible_regret:.1%} slower than the fastest"
    if standing.largest_difference > 1 + MOST_SAID / 2:
        times = f"{standing.largest_difference:.1f} times"
        return f"runs of one layout differ by {times} on this machine, so nothing can be said yet"
    return "nothing can be said yet, because too little ran"


def print_left(standing: Standing, by_name: Mapping[str, Candidate]) -> None:
    print(f"{len(standing.left)} layouts may be the fastest, {standing.dropped} are surely slower. First would run:")
    for each in standing.left[:SHOWN]:
        print(f"  {by_name[each.option.name].title}, predicted {each.seconds:.4g} s")


def report(standing: Standing, by_name: Mapping[str, Candidate], memory: SearchState, runs_dir: Path) -> None:
    name = name_to_run(standing, by_name)

    def line(each: Expected) -> str:
        return f"{by_name[each.option.name].title}: {each.seconds:.4g} s an iteration"

    if not standing.named.is_measured:
        print("The budget allowed no run.")
        return
    if standing.equals:
        print("Too close to call:")
        for each in (standing.named, *standing.equals):
            print(f"  {line(each)}")
        print(f"Of these, take the one with {TIES}: {by_name[name].title}")
    else:
        print(f"The fastest is {line(standing.named)}")
    if not standing.is_certain:
        print("The budget ended before this was certain.")
    print(f"With 95 % certainty: {bound(standing)}.")
    made = standing.runs + memory.lost
    lost = f", of which {memory.lost} gave no time" if memory.lost else ""
    print(f"{made} runs took {memory.seconds / 60:.1f} minutes{lost}; {runs_dir / PICTURE} shows their course.")
    print(f"On a small model its curves agree with DDP's. Start it with:\n  {by_name[name].start}")
