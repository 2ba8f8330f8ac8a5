"""``python -m t5bench ranks``: which rank is where, and every process group with its members."""

import argparse
import itertools
import json
import os

from t5bench import Problem
from t5bench.arguments import at_least
from t5bench.costmodel.job import Parallel
from t5bench.costmodel.layout import coordinates
from t5bench.costmodel.traffic import groups
from t5bench.plan.families import FAMILIES

MEANINGS = {
    "tensor": "a layer's slices: all-reduces in every layer",
    "data": "copies of the same parameters: gradients",
    "pipeline": "the stages, first to last: activations and their gradients",
    "model": "one whole copy of the model: the gradient norm",
    "embedding": "stages that hold the tied word embedding: its gradients",
    "position": "stages that hold the positions' table: its gradients",
}
MOST = 8  # groups of a kind that are listed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, kind in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        parser.add_argument(f"--{name}", type=at_least(1), default=1, help=f"{kind}-parallel size")
    parser.add_argument("--per-node", type=at_least(1), help="GPUs per node (default: all ranks on two nodes)")
    parser.add_argument("--split-rank", type=int, help="the decoder's first stage (default: half of them)")
    alone = not FAMILIES.get(os.environ.get("MODEL_FAMILY", ""), FAMILIES["t5"]).has_encoder
    parser.add_argument("--decoder-only", action="store_true", default=alone, help="a model without an encoder (GPT)")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Raises Problem if the sizes give no layout."""
    if args.split_rank is not None and not 0 < args.split_rank < args.pp:
        problem = f"--split-rank {args.split_rank} leaves no stage for the encoder or the decoder"
        raise Problem(problem, f"It must be more than 0 and less than --pp, which is {args.pp}")
    world = args.tp * args.pp * args.dp
    per_node = args.per_node or -(-world // 2)
    if world % per_node:
        raise Problem(f"{world} ranks do not fill nodes of {per_node}", "Choose a --per-node that divides the ranks")
    parallel = Parallel(args.tp, args.pp, args.dp, args.split_rank, devices_per_node=per_node)
    found = groups(parallel, not args.decoder_only)
    members = [member(parallel, rank, not args.decoder_only) for rank in range(world)]
    if args.json:
        print(json.dumps({"ranks": members, "groups": found}, indent=2))
        return 0
    print(f"TP={args.tp} x PP={args.pp} x DP={args.dp}: {world} ranks on {world // per_node} node(s)\n")
    for data, pipelines in itertools.groupby(sorted(members, key=lambda one: one["DP"]), lambda one: one["DP"]):
        print(f"DP replica {data}:")
        for holds, own in itertools.groupby(pipelines, lambda one: one["holds"]):
            gpus = ("GPU {rank} (tp={TP}, node {node}, local rank {local rank})".format(**one) for one in own)
            print(f"  {holds}: {', '.join(gpus)}")
    print()
    for kind, meaning in MEANINGS.items():
        shown = " ".join(f"[{', '.join(map(str, ranks))}]" for ranks in found[kind][:MOST])
        shown += f" and {len(found[kind]) - MOST} more" if len(found[kind]) > MOST else ""
        print(f"{kind.capitalize() + ' groups:':<18} {shown}   <- {meaning}")
    return 0


def member(parallel: Parallel, rank: int, encoder_decoder: bool) -> dict[str, int | str]:
    """Where a rank is and what it holds."""
    node, local = divmod(rank, parallel.devices_per_node)
    place = coordinates(rank, parallel.tensor, parallel.data)
    holds = f"Stage {place.pp}"
    if encoder_decoder and parallel.pipeline > 1:
        holds += " (encoder)" if place.pp < parallel.decoder_stage else " (decoder)"
    return {
        "rank": rank,
        "node": node,
        "local rank": local,
        "TP": place.tp,
        "PP": place.pp,
        "DP": place.dp,
        "holds": holds,
    }
