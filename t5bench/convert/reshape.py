"""Converts the weights of a Megatron-DeepSpeed checkpoint, of any strategy, to another layout.

The complete parameters are cut for the wanted tensor- and pipeline-parallel ranks, and written as Megatron writes a
checkpoint. Optimizer states are left out: such a checkpoint is for evaluation, zero-shot tasks and --finetune.
"""

import argparse
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from t5bench import Problem
from t5bench.convert.checkpoint_file import Absent
from t5bench.convert.shards import Cut, Weights
from t5bench.convert.trained import IMPORTED, TrainedModel
from t5bench.record.checkpoints import TRACKER
from t5bench.record.files import write_whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run directory with checkpoints, including the files of all its nodes")
    parser.add_argument("--tp", type=int, default=1, help="new tensor-parallel size (default: 1)")
    parser.add_argument("--pp", type=int, default=1, help="new pipeline-parallel size (default: 1)")
    parser.add_argument("--output", type=Path, help="the new directory; default: RUN-tpN-ppM")


def run(arguments: argparse.Namespace) -> int:
    tp = arguments.tp
    pp = arguments.pp
    output = arguments.output or arguments.run.with_name(f"{arguments.run.name}-tp{tp}-pp{pp}")
    if output.exists():
        raise Problem(f"{output} exists", "Remove it, or name another --output")
    model = TrainedModel.of_run(arguments.run)
    if not model.head:
        raise Problem(f"{arguments.run} is a run of the {model.engine} engine", "Choose a run of Megatron-DeepSpeed")
    write(model.head, model.weights, output / "checkpoints", Cut.of(model.args, tp, pp))
    print(f"{output}: the weights of iteration {model.iteration} for TP {tp} and PP {pp}")
    return 0


def write(head: Mapping[str, Any], whole: Weights, directory: Path, cut: Cut) -> None:
    """head: what a checkpoint of Megatron's has besides weights, its arguments and its iteration among it."""
    left_out = (torch.Tensor, Absent)  # a mask, and objects of the engine's
    args = Namespace(**{name: value for name, value in vars(head["args"]).items() if not isinstance(value, left_out)})
    args.make_vocab_size_divisible_by = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size // cut.tp
    args.tensor_model_parallel_size = cut.tp
    args.pipeline_model_parallel_size = cut.pp
    args.deepspeed = False
    kept = {name: head[name] for name in ("checkpoint_version", "iteration", "tokens")} | {"args": args}
    name = f"iter_{kept['iteration']:07d}" if kept["iteration"] else IMPORTED
    for rank in range(cut.tp):
        for stage in range(cut.pp):
            suffix = f"_{stage:03d}" if cut.pp > 1 else ""
            folder = directory / name / f"mp_rank_{rank:02d}{suffix}"
            folder.mkdir(parents=True)
            torch.save({**kept, "model": part_of(whole, cut, rank, stage)}, folder / "model_optim_rng.pt")
    write_whole(directory / TRACKER, str(kept["iteration"] or IMPORTED))


def part_of(whole: Weights, cut: Cut, rank: int, stage: int) -> dict[str, Any]:
    """What a tensor-parallel rank of a pipeline stage holds, nested as Megatron's modules are."""
    model: dict[str, Any] = {}
    for name in whole:
        stages, local_name = cut.stage_name(name)
        if stage not in stages:
            continue
        # Below encoder and decoder, Megatron does not split the names.
        words = local_name.split(".", 2 if re.match(r"language_model.(en|de)coder", local_name) else -1)
        module = model
        for word in words[:-1]:
            module = module.setdefault(word, {})
        # A copy, because a view would be saved together with everything that it is a part of.
        module[words[-1]] = cut.pieces(name, whole[name])[rank].clone()
    return model
