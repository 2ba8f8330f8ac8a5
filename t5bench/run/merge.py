"""Converts the weights of a Megatron-DeepSpeed checkpoint, of any strategy, to another layout.

Every shard is read under the names that its parameters have in a model of one process. The complete parameters are then
cut for the wanted tensor- and pipeline-parallel ranks, and written as Megatron writes a checkpoint. Optimizer states
are left out: such a checkpoint is for evaluation, zero-shot tasks and --finetune.
"""

import argparse
import math
import pickle
import re
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from t5bench import Problem
from t5bench.record.checkpoints import TRACKER, Checkpoints, damage
from t5bench.record.files import write_whole
from t5bench.record.records import load

COLUMNS = re.compile(r".*(query_key_value|query|key_value|dense_h_to_4h|word_embeddings\w*|lm_head)\.(weight|bias)")
ROWS = re.compile(r".*\.(dense|dense_4h_to_h)\.weight")
LAYER = re.compile(r"(language_model\.(encoder|decoder)\.layers)\.(\d+)\.(.*)")
EMBEDDING, HEAD = "language_model.embedding.", "word_embeddings_for_head.weight"
Weights = dict[str, Any]  # tensors by name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run directory with checkpoints, including the files of all its nodes")
    parser.add_argument("--tp", type=int, default=1, help="new tensor-parallel size (default: 1)")
    parser.add_argument("--pp", type=int, default=1, help="new pipeline-parallel size (default: 1)")
    parser.add_argument("--output", type=Path, help="the new directory; default: RUN-tpN-ppM")


def run(arguments: argparse.Namespace) -> int:
    # The directory may have been moved, or copied to this machine.
    plan, tp, pp = replace(load(arguments.run).plan, output_dir=str(arguments.run)), arguments.tp, arguments.pp
    if plan.engine != "megatron":
        raise Problem(f"{arguments.run} is a run of the {plan.engine} engine", "Choose a run of Megatron-DeepSpeed")
    output = arguments.output or arguments.run.with_name(f"{arguments.run.name}-tp{tp}-pp{pp}")
    if output.exists():
        raise Problem(f"{output} exists", "Remove it, or name another --output")
    checkpoints = Checkpoints(plan)
    iteration, _ = checkpoints.newest()
    if not iteration:
        raise Problem(f"{arguments.run} has no intact checkpoint", "Train with SAVE_INTERVAL=100, for example")
    folder = checkpoints.folder(iteration)
    head = read(min([*folder.glob("mp_rank_00*/*.pt"), *folder.glob("*mp_rank_00_model_states.pt")]))
    write(head, whole_weights(folder, head["args"]), output / "checkpoints", Cut.of(head["args"], tp, pp))
    print(f"{output}: the weights of iteration {iteration} for TP {tp} and PP {pp}")
    return 0


def read(path: Path) -> Any:
    if fault := damage(path):
        raise Problem(f"{path} {fault}", "Copy the checkpoint's files of every node to this directory")
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=sys.modules[__name__])


class Absent:
    """Stands for an object of the engine or of DeepSpeed, which a checkpoint holds besides tensors and plain values."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class Unpickler(pickle.Unpickler):
    """Reads a checkpoint where the engine is not installed: torch.load takes it from this module."""

    def find_class(self, module: str, name: str) -> Any:
        known = module.split(".")[0] in ("argparse", "_codecs", "collections", "numpy", "torch")
        return super().find_class(module, name) if known else Absent


class Cut(NamedTuple):
    """A layout. split: the decoder's first stage, 0 if all layers are of one kind. layers: how many of each kind."""

    tp: int
    pp: int
    split: int
    layers: Mapping[str, int]

    @classmethod
    def of(cls, args: Namespace, tp: int, pp: int) -> "Cut":
        """args: the engine's arguments. Raises Problem if the model cannot be cut in this way."""
        is_t5 = args.decoder_num_layers is not None
        layers = {"encoder": args.encoder_num_layers} | ({"decoder": args.decoder_num_layers} if is_t5 else {})
        cut = cls(tp, pp, pp // 2 if is_t5 else 0, layers)
        sizes = args.num_attention_heads, args.ffn_hidden_size, args.padded_vocab_size
        other = args.swiglu or args.num_key_value_heads != sizes[0] or args.untie_embeddings_and_output_weights
        fits = tp > 0 and pp > 0 and not any(size % tp for size in sizes) and not (is_t5 and pp > 1 and pp % 2)
        if other or not fits or any(count % len(cut.stages(kind)) for kind, count in layers.items()):
            remedy = "Heads, feed-forward size and layers must divide by them, and a T5's PP by 2"
            remedy += "; gated layers, grouped queries and a head of its own are not supported"
            raise Problem(f"the model cannot be cut for TP {tp} and PP {pp}", remedy)
        return cut

    def stages(self, kind: str) -> range:
        both = {"encoder": range(self.split), "decoder": range(self.split, self.pp)}
        return both[kind] if self.split else range(self.pp)

    def place(self, name: str) -> tuple[range, str]:
        """The stages that hold a parameter of the whole model, and its name there: each stage counts layers from 0."""
        if name.startswith(EMBEDDING):
            return range(0, self.split + 1, self.split or 1), name
        if name == HEAD:  # the last stage's copy of the embedding, where it has none
            return range(max(1, self.split + 1, self.pp - 1), self.pp), name
        stages = self.stages("encoder" if ".encoder." in name else "decoder")
        if not (match := LAYER.fullmatch(name)):
            return stages[-1:], name
        stage, layer = divmod(int(match[3]), self.layers[match[2]] // len(stages))
        return stages[stage : stage + 1], f"{match[1]}.{layer}.{match[4]}"

    def whole_name(self, name: str, stage: int) -> str:
        """The name that a stage's parameter has in the whole model."""
        if not (match := LAYER.fullmatch(name)):
            return name
        stages = self.stages(match[2])
        before = (stage - stages.start) * (self.layers[match[2]] // len(stages))
        return f"{match[1]}.{before + int(match[3])}.{match[4]}"

    def pieces(self, name: str, whole: Any) -> list[Any]:
        """Each tensor-parallel rank's part of a parameter; self-attention's query, key and value are cut separately."""
        dim, blocks = cut_along(name)
        if dim is None:
            return [whole] * self.tp
        cut = [block.chunk(self.tp, dim) for block in whole.chunk(blocks, dim)]
        return [torch.cat(parts, dim) for parts in zip(*cut, strict=True)]


def cut_along(name: str) -> tuple[int | None, int]:
    """The dimension along which tensor parallelism cuts a parameter, and how many stacked matrices it holds.

    Cross-attention's key_value is ordered by heads and counts as one.
    """
    dim = 0 if COLUMNS.fullmatch(name) else 1 if ROWS.fullmatch(name) else None
    return dim, 3 if "query_key_value" in name else 1


def whole_weights(folder: Path, args: Namespace) -> Weights:
    """All parameters of a checkpoint, each in one piece. args: the engine's arguments, as the checkpoint has them."""
    cut = Cut.of(args, args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    found: dict[str, dict[int, Any]] = {}  # each rank's part
    for rank in range(cut.tp):
        for stage in range(1 if args.deepspeed else cut.pp):
            for name, value in shard(folder, args, rank, stage).items():
                found.setdefault(cut.whole_name(name, stage), {})[rank] = value
    joined = {}
    for name, parts in found.items():
        dim, blocks = cut_along(name)
        rows = zip(*(part.chunk(blocks, dim or 0) for part in parts.values()), strict=True)
        joined[name] = parts[0] if dim is None else torch.cat([part for row in rows for part in row], dim)
    return joined | {HEAD: joined[f"{EMBEDDING}word_embeddings.weight"]}


def shard(folder: Path, args: Namespace, rank: int, stage: int) -> Weights:
    """A tensor-parallel rank's parameters: of one stage in Megatron's own checkpoints, of all stages in DeepSpeed's."""
    if not args.deepspeed:
        suffix = f"_{stage:03d}" if args.pipeline_model_parallel_size > 1 else ""
        return flat(read(folder / f"mp_rank_{rank:02d}{suffix}" / "model_optim_rng.pt")["model"])
    if args.ds_pipeline_enabled:
        return pipeline_module(folder, rank, args.num_layers + 2)
    if args.zero_stage == 3:
        return gathered(folder, f"_mp_rank_{rank:02d}_", args.params_dtype)
    return flat(read(folder / f"mp_rank_{rank:02d}_model_states.pt")["module"])


def pipeline_module(folder: Path, rank: int, last: int) -> Weights:
    """DeepSpeed's PipelineModule has a file for the embedding (1), for each layer and for the last layer norm."""
    found: Weights = {}
    for number in range(1, last + 1):
        layer = f"language_model.encoder.layers.{number - 2}."
        prefix = {1: EMBEDDING, last: "language_model.encoder.final_layernorm."}.get(number, layer)
        found |= flat(read(folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt"), prefix)
    return found


def gathered(folder: Path, rank: str, dtype: Any) -> Weights:
    """ZeRO-3's fp32 parameters; every data-parallel rank holds an equal part of each, the last part being padded."""
    shapes = read(folder / f"zero_pp_rank_0{rank}model_states.pt")["param_shapes"]
    first = next(folder.glob(f"*zero_pp_rank_0{rank}optim_states.pt"))
    count = read(first)["optimizer_state_dict"]["partition_count"]
    files = [first.with_name(first.name.replace("pp_rank_0", f"pp_rank_{number}")) for number in range(count)]
    parts = [torch.cat(read(file)["optimizer_state_dict"]["fp32_flat_groups"]) for file in files]
    found, begin = {}, 0
    for name, shape in (item for group in shapes for item in group.items()):
        size = math.ceil(shape.numel() / count)
        value = torch.cat([part[begin : begin + size] for part in parts])[: shape.numel()]
        found[name], begin = value.view(shape).to(dtype), begin + size
    return found


def flat(state: Mapping[str, Any], prefix: str = "") -> Weights:
    found: Weights = {}
    for name, value in state.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def write(head: Mapping[str, Any], whole: Weights, directory: Path, cut: Cut) -> None:
    left_out = (torch.Tensor, Absent)  # a mask, and objects of the engine's
    args = Namespace(**{name: value for name, value in vars(head["args"]).items() if not isinstance(value, left_out)})
    args.make_vocab_size_divisible_by = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size // cut.tp
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.deepspeed = cut.tp, cut.pp, False
    kept = {name: head[name] for name in ("checkpoint_version", "iteration", "tokens")} | {"args": args}
    models: dict[tuple[int, int], dict[str, Any]] = {(r, s): {} for r in range(cut.tp) for s in range(cut.pp)}
    for name, value in whole.items():
        stages, local = cut.place(name)
        # As Megatron's modules nest them; below encoder and decoder the names are not split.
        words = local.split(".", 2 if re.match(r"language_model.(en|de)coder", local) else -1)
        for stage in stages:
            for rank, piece in enumerate(cut.pieces(name, value)):
                place = models[rank, stage]
                for word in words[:-1]:
                    place = place.setdefault(word, {})
                place[words[-1]] = piece
    for (rank, stage), model in models.items():
        folder = directory / f"iter_{kept['iteration']:07d}" / f"mp_rank_{rank:02d}{f'_{stage:03d}' * (cut.pp > 1)}"
        folder.mkdir(parents=True)
        torch.save({**kept, "model": model}, folder / "model_optim_rng.pt")
    write_whole(directory / TRACKER, str(kept["iteration"]))
