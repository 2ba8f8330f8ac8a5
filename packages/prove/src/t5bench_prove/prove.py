"""``python -m t5bench prove``: whether every gradient is summed over the right ranks exactly once, before training.

Proved is: over the ranks that share the parameter, once, as a sum or a mean, and times 1 / replicas as far as the
program's own numbers say. How the loss is scaled, and arithmetic within a rank, is not seen.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from t5bench import Problem
from t5bench.arguments import at_least
from t5bench.choose.predict import planned
from t5bench.choose.support import ADDITIONS, MACHINE, Addition
from t5bench.costmodel.job import Job
from t5bench.imports import import_deepspeed
from t5bench.plan.launchers import all_declarations, declared
from t5bench.plan.planner import plan
from t5bench.printed_table import text_table
from t5bench.record.plan import Plan

EXIT_NOT_PROVED = 1
RANKS = (2, 8, 1024)
MOST_OF_ZERO3 = 64  # ranks by default: DeepSpeed divides every parameter in Python, for all of them
# With --all: additions are proved on so many ranks, and these change no layout.
RANKS_OF_ADDITIONS = (8,)
SAME_LAYOUT = ("fp16", "fp32", "gradients reduced in fp32", "overlapped communication", "growing batch")
VOCABULARY = 1024
RED = "\033[31m"
PLAIN = "\033[0m"


@dataclass(frozen=True)
class ProvedLayout:
    """One layout of a strategy."""

    family: str
    strategy: str
    addition: str
    """What one adds to the strategy, in words."""
    job: Job


@dataclass(frozen=True)
class Proof:
    """What the step of some ranks of a layout did with its gradients."""

    family: str
    strategy: str
    addition: str
    layout: str
    """TP/PP/DP."""
    ranks: int
    parameters: list[dict[str, Any]]
    """Of the executed ranks: name, the axes along which others have a copy, and the collectives that settle it."""
    findings: list[str]

    @property
    def is_proved(self) -> bool:
        return not self.findings

    @property
    def title(self) -> str:
        return f"{self.family} {self.strategy}, {self.addition}" if self.addition else f"{self.family} {self.strategy}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Whether every gradient is summed over the right ranks exactly once: executes the native engine's step for a "
        "few ranks of each layout, without arithmetic, on one core."
    )
    parser.epilog = (
        "Proved is: summed over the ranks that share the parameter, once, as a sum or a mean, and scaled by "
        "1 / replicas where the program's own numbers show it. How the loss is scaled, and arithmetic within a rank, "
        "is not seen. "
        "Exit status: 0 proved, 1 something is missing, doubled, no sum or over the wrong ranks, 2 nothing to prove."
    )
    parser.add_argument("strategies", nargs="*", metavar="STRATEGY", help="default: all of the native engine")
    parser.add_argument(
        "--ranks", type=at_least(1), nargs="+", default=RANKS, help="how many (default: 2, 8, 1,024; ZeRO-3: 64)"
    )
    everything = "both model families, with each setting that changes a layout, instead of your settings"
    parser.add_argument("--all", action="store_true", dest="has_everything", help=everything)
    parser.add_argument("--parameters", action="store_true", help="list each parameter and what settles its gradient")
    parser.add_argument("--json", action="store_true", help="for programs")


def small(job: Job) -> Job:
    """The same layout of a model that takes seconds, since groups and sums do not depend on sizes."""
    a = job.architecture
    depth = max(2, job.parallel.chunks)
    architecture = replace(
        a,
        encoder_layers=depth if a.encoder_layers else 0,
        decoder_layers=depth if a.decoder_layers else 0,
        hidden=64,
        heads=8,
        head_size=8,
        ffn=128,
        encoder_length=32 if a.encoder_layers else 0,
        decoder_length=32,
        padded_vocabulary=VOCABULARY,
        kv_heads=2 if a.keys_apart else 8,
        position_rows=32,
        rotary_columns=0,
    )
    return replace(job, architecture=architecture, micro_batch=1)


def on_ranks(job: Job, ranks: int) -> Job | None:
    """The job with as many replicas as fill so many ranks; None if none do."""
    replica = job.parallel.tensor * job.parallel.pipeline
    if ranks % replica:
        return None
    data = ranks // replica
    if job.parallel.shards and data % job.parallel.shards:
        return None
    if job.fully_sharded:  # every tensor has two rows for each rank: the cost model leaves out the root's empty ones,
        rows = max(64, 2 * data)  # and what has one element is taken for a number that is computed from gradients
        sizes = {
            "hidden": rows,
            "head_size": rows // 8,
            "ffn": 2 * rows,
            "position_rows": rows,
            "padded_vocabulary": max(VOCABULARY, rows),
        }
        job = replace(job, architecture=replace(job.architecture, **sizes))
    batch = data * max(2, job.parallel.pipeline)
    return replace(job.on(data=data, devices_per_node=min(8, ranks)), global_batch=batch)


def plans(has_everything: bool) -> Iterator[tuple[Addition, Plan]]:
    """What is to be proved: the environment's settings, or every addition to every strategy that has one."""
    if not has_everything:
        family = os.environ.get("MODEL_FAMILY") or "t5"
        own = [
            strategy for strategy in all_declarations() if "native" in strategy.engines and family in strategy.families
        ]
        for its_plan in planned(strategies=own, engine="native"):
            yield Addition("", {}), its_plan
        return
    for family in ("t5", "gpt"):
        for addition in (one for one in ADDITIONS if one.title not in SAME_LAYOUT):
            for strategy in all_declarations():
                environment = {**MACHINE, "ENGINE": "native", "MODEL_FAMILY": family, **addition.settings}
                yield addition, plan(environment, strategy)


def cases(arguments: argparse.Namespace) -> tuple[list[ProvedLayout], dict[str, str]]:
    """The layouts to prove, each once, and why others cannot be executed. Raises Problem for an unknown strategy."""
    from t5bench_prove import execution

    for name in arguments.strategies:
        declared(name)
    found: dict[Job, ProvedLayout] = {}
    refused: dict[str, str] = {}
    for addition, its_plan in plans(arguments.has_everything):
        name = its_plan.strategy.name
        if arguments.strategies and name not in arguments.strategies:
            continue
        if not its_plan.layout or any(obstacle.fatal for obstacle in its_plan.obstacles if arguments.has_everything):
            continue
        job = small(Job.of_plan(its_plan, VOCABULARY))
        reason = execution.unsupported(job)
        if reason:
            refused[f"{name}, {addition.title}" if addition.title else name] = reason
            continue
        words = "" if addition.title == ADDITIONS[0].title else addition.title
        for ranks in RANKS_OF_ADDITIONS if words and arguments.ranks == RANKS else arguments.ranks:
            if job.zero.stage == 3 and arguments.ranks == RANKS:
                ranks = min(ranks, MOST_OF_ZERO3)
            sized = on_ranks(job, ranks)
            if sized:
                found.setdefault(sized, ProvedLayout(job.architecture.family, name, words, sized))
    return list(found.values()), refused


def prove(case: ProvedLayout) -> Proof:
    """Executes the first and the last rank of every stage."""
    from t5bench_prove import execution, proof

    findings: list[str] = []
    parameters: list[dict[str, Any]] = []
    for rank in proof.representatives(case.job):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            watch, differences = pool.apply(execution.watched, (case.job, rank))
        findings += [f"rank {rank}: {finding}" for finding in watch.findings]
        findings += [f"rank {rank}: {difference}" for difference in differences]
        parameters += [asdict(one) | {"rank": rank} for one in watch.settled]
    world = case.job.parallel.world
    return Proof(case.family, case.strategy, case.addition, str(case.job.parallel), world, parameters, findings)


def run(arguments: argparse.Namespace) -> int:
    """Raises Problem."""
    for name in arguments.strategies:
        strategy = declared(name)
        family = os.environ.get("MODEL_FAMILY") or "t5"
        if family not in strategy.families and not arguments.has_everything:
            raise Problem(f"{name} does not train {family}", f"Set MODEL_FAMILY={strategy.families[0]}")
    to_prove, refused = cases(arguments)
    if not to_prove:
        raise Problem("no strategy's step can be executed", "\n".join(dict.fromkeys(refused.values())) or "Add --ranks")
    if any(case.job.zero.stage for case in to_prove):
        os.environ["DS_ACCELERATOR"] = "cpu"
        import_deepspeed()  # once for all
    proofs = [prove(case) for case in to_prove]
    if arguments.json:
        print(json.dumps(to_json(proofs, refused, with_parameters=arguments.parameters), indent=1))
    else:
        show(proofs, refused, with_parameters=arguments.parameters)
    return 0 if all(proof.is_proved for proof in proofs) else EXIT_NOT_PROVED


def to_json(proofs: Sequence[Proof], refused: Mapping[str, str], *, with_parameters: bool) -> dict[str, Any]:
    rows = []
    for proof in proofs:
        row = asdict(proof)
        if not with_parameters:
            row["parameters"] = len({one["name"] for one in proof.parameters})
        rows.append(row)
    return {"rows": rows, "refused": refused}


def show(proofs: Sequence[Proof], refused: Mapping[str, str], *, with_parameters: bool) -> None:
    cells = []
    for title in dict.fromkeys(proof.title for proof in proofs):
        own = [proof for proof in proofs if proof.title == title]
        counts = ", ".join(f"{proof.ranks:,}" for proof in own)
        parameters = max(len({one["name"] for one in proof.parameters}) for proof in own)
        verdict = "proved" if all(proof.is_proved for proof in own) else "NOT PROVED"
        cells.append((title, own[-1].layout, counts, parameters, verdict))
    print(text_table(cells, ("strategy", "TP/PP/DP", "ranks", "parameters", "each gradient's sum")))
    for proof in proofs:
        for finding in proof.findings:
            line = f"NOT PROVED: {proof.title}, {proof.layout}, {finding}"
            print(f"{RED}{line}{PLAIN}" if sys.stdout.isatty() else line)
    for name, reason in refused.items():
        print(f"note: {name} was not executed: {reason}")
    if with_parameters:
        for proof in proofs:
            print(f"\n{proof.title}, {proof.layout}")
            rows = [
                (one["rank"], one["name"], ", ".join(one["copies"]), "; ".join(one["by"])) for one in proof.parameters
            ]
            print(text_table(rows, ("rank", "parameter", "copies along", "gradient summed by")))
