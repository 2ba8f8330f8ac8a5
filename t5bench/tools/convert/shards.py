"""The parameters of a checkpoint, whole, from the files of any strategy and layout.

Every shard is read under the names that its parameters have in a model of one process. A parameter is put together
when it is asked for, so a model of any size takes the memory of its largest parameter.
"""

import math
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from t5bench import Problem
from t5bench.costmodel.layout import share
from t5bench.tools.convert.checkpoint_file import read_checkpoint_file

COLUMNS = re.compile(r".*(query_key_value|query|key_value|dense_h_to_4h|word_embeddings\w*|lm_head)\.(weight|bias)")
ROWS = re.compile(r".*\.(dense|dense_4h_to_h)\.weight")
LAYER = re.compile(r"(language_model\.(encoder|decoder)\.layers)\.(\d+)\.(.*)")
EMBEDDING = "language_model.embedding."
WORDS = f"{EMBEDDING}word_embeddings.weight"
TIED = "tied_modules.embed."
HEAD = "word_embeddings_for_head.weight"  # the last pipeline stage's copy of the words' embedding
Weights = Mapping[str, Tensor]
# Megatron's order of a model's parts, and of a layer's.
PARTS = ("embedding.word_embeddings", "embedding.position_embeddings", "encoder", "decoder", "lm_head", HEAD)
PARTS_OF_LAYER = (
    *("input_layernorm", "self_attention.query_key_value", "self_attention.dense", "post_attention_layernorm"),
    *("inter_attention.query", "inter_attention.key_value", "inter_attention.dense", "post_inter_attention_layernorm"),
    *("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
)


@dataclass(frozen=True)
class Sharding:
    """How a layout divides the model's parameters."""

    tp: int
    """Tensor-parallel size."""
    pp: int
    """Pipeline-parallel size."""
    split: int
    """The decoder's first stage; 0 if all layers are of one kind."""
    layers: Mapping[str, int]
    """How many layers of each kind: encoder, decoder."""

    @classmethod
    def of(cls, args: Namespace, tp: int, pp: int) -> "Sharding":
        """How Megatron-DeepSpeed cuts it. args: the engine's arguments. Raises Problem if it cannot."""
        is_t5 = args.decoder_num_layers is not None
        layers = {"encoder": args.encoder_num_layers}
        if is_t5:
            layers["decoder"] = args.decoder_num_layers
        sharding = cls(tp, pp, pp // 2 if is_t5 else 0, layers)
        sizes = args.num_attention_heads, args.ffn_hidden_size, args.padded_vocab_size
        other = args.swiglu or args.num_key_value_heads != sizes[0] or args.untie_embeddings_and_output_weights
        fits = tp > 0 and pp > 0 and not any(size % tp for size in sizes) and not (is_t5 and pp > 1 and pp % 2)
        if other or not fits or any(count % len(sharding.stages(kind)) for kind, count in layers.items()):
            remedy = "TP must divide the heads and the feed-forward size, PP the layers, and a T5's PP must be even"
            remedy += "; gated layers, grouped queries and an untied head are not supported"
            raise Problem(f"the model cannot be divided for TP {tp} and PP {pp}", remedy)
        return sharding

    @classmethod
    def of_checkpoint(cls, args: Namespace) -> "Sharding":
        """How the engine that wrote a checkpoint with these arguments has cut it: see native_arguments()."""
        native = getattr(args, "native_sharding", None)
        return native or cls.of(args, args.tensor_model_parallel_size, args.pipeline_model_parallel_size)

    def stages(self, kind: str) -> range:
        """The pipeline stages that hold the encoder's or the decoder's layers."""
        if not self.split:
            return range(self.pp)
        return range(self.split) if kind == "encoder" else range(self.split, self.pp)

    def stage_name(self, name: str) -> tuple[range, str]:
        """The stages that hold a parameter of the whole model, and its name there: each stage counts layers from 0."""
        if name.startswith(EMBEDDING):
            return range(0, self.split + 1, self.split or 1), name
        if name == HEAD:  # the last stage's copy of the embedding, where it has none
            return range(max(1, self.split + 1, self.pp - 1), self.pp), name
        stages = self.stages("encoder" if ".encoder." in name else "decoder")
        match = LAYER.fullmatch(name)
        if not match:
            return stages[-1:], name
        for stage in stages:
            layers = share(self.layers[match[2]], stages, stage)
            if int(match[3]) in layers:
                return range(stage, stage + 1), f"{match[1]}.{layers.index(int(match[3]))}.{match[4]}"
        raise Problem(f"the model has no layer named {name}")

    def whole_name(self, name: str, stage: int) -> str:
        """The name that a stage's parameter has in the whole model."""
        match = LAYER.fullmatch(name)
        if not match:
            return name
        stages = self.stages(match[2])
        first = share(self.layers[match[2]], stages, stage).start
        return f"{match[1]}.{first + int(match[3])}.{match[4]}"

    def pieces(self, name: str, whole: Tensor) -> list[Tensor]:
        """Each tensor-parallel rank's part of a parameter; self-attention's query, key and value are cut separately."""
        dim, blocks = cut_along(name)
        if dim is None:
            return [whole] * self.tp
        cut = [block.chunk(self.tp, dim) for block in whole.chunk(blocks, dim)]
        return [torch.cat(parts, dim) for parts in zip(*cut, strict=True)]


def in_order(name: str) -> tuple[int, ...]:
    """Sorts the parameters of a whole model as Megatron's modules have them; what they lack comes last."""
    own = name.removeprefix("language_model.")
    match = LAYER.fullmatch(name)
    layer = int(match[3]) if match else sys.maxsize  # the final norm follows all layers
    inside = place_of(match[4], PARTS_OF_LAYER) if match else 0
    return place_of(own, PARTS), layer, inside, int(name.endswith(".bias"))


def place_of(name: str, parts: Sequence[str]) -> int:
    """The first part to which a name belongs; their number if there is none."""
    found = (number for number, part in enumerate(parts) if name == part or name.startswith(f"{part}."))
    return next(found, len(parts))


def cut_along(name: str) -> tuple[int | None, int]:
    """The dimension along which tensor parallelism cuts a parameter, and how many stacked matrices it holds.

    Cross-attention's key_value is ordered by heads and counts as one.
    """
    dim = 0 if COLUMNS.fullmatch(name) else 1 if ROWS.fullmatch(name) else None
    return dim, 3 if "query_key_value" in name else 1


def whole_weights(folder: Path, args: Namespace) -> Weights:
    """All parameters of a checkpoint, each in one piece. args: the engine's arguments, as the checkpoint has them."""
    return joined(args, {ranks: shard(folder, args, *ranks) for ranks in model_parallel_ranks(args)})


def model_parallel_ranks(args: Namespace) -> list[tuple[int, int]]:
    """(tensor-parallel rank, pipeline stage) of every shard; DeepSpeed's have all stages."""
    stages = 1 if args.deepspeed else args.pipeline_model_parallel_size
    return [(rank, stage) for rank in range(args.tensor_model_parallel_size) for stage in range(stages)]


def joined(args: Namespace, shards: Mapping[tuple[int, int], Weights]) -> Weights:
    """What the shards hold, each parameter in one piece."""
    sharding = Sharding.of_checkpoint(args)
    parts: dict[str, dict[int, tuple[Weights, str]]] = {}
    for (rank, stage), held in shards.items():
        for name in held:
            parts.setdefault(sharding.whole_name(name, stage), {})[rank] = held, name
    return JoinedTensors(parts)


class JoinedTensors(Mapping[str, Tensor]):
    """Parameters that are put together from the tensor-parallel ranks' parts as they are asked for."""

    def __init__(self, parts: Mapping[str, Mapping[int, tuple[Weights, str]]]) -> None:
        """parts: by a parameter's name and by rank, the shard that holds it, and its name there."""
        self._parts = parts

    def __getitem__(self, name: str) -> Tensor:
        ranks = self._parts[WORDS if name == HEAD else name]
        dim, blocks = cut_along(name)
        if dim is None or len(ranks) == 1:
            shard_of_first, local_name = ranks[0]
            return shard_of_first[local_name]
        chunks = [held[local_name].chunk(blocks, dim) for held, local_name in ranks.values()]
        return torch.cat([part for block in zip(*chunks, strict=True) for part in block], dim)

    def __iter__(self) -> Iterator[str]:
        yield from self._parts
        if HEAD not in self._parts:
            yield HEAD

    def __len__(self) -> int:
        return sum(1 for _ in self)


def shard(folder: Path, args: Namespace, rank: int, stage: int) -> Weights:
    """A tensor-parallel rank's parameters: of one stage in Megatron's own checkpoints, of all stages in DeepSpeed's."""
    if not args.deepspeed:
        suffix = f"_{stage:03d}" if args.pipeline_model_parallel_size > 1 else ""
        return flat(read_checkpoint_file(folder / f"mp_rank_{rank:02d}{suffix}" / "model_optim_rng.pt")["model"])
    if args.ds_pipeline_enabled:
        return pipeline_module(folder, rank, last_pipeline_layer(args))
    if args.zero_stage == 3:
        states, shapes = zero3_states(folder, rank)
        return Gathered([state["fp32_flat_groups"] for state in states], shapes, args.params_dtype)
    return flat(read_checkpoint_file(folder / f"mp_rank_{rank:02d}_model_states.pt")["module"])


def last_pipeline_layer(args: Namespace) -> int:
    """How DeepSpeed's PipelineModule counts: 1 is the embedding, then come the layers, and at last the norm."""
    return args.num_layers + 2


def prefix_in_pipeline(number: int, last: int) -> str:
    """Of the names of a pipeline layer's parameters in the whole model."""
    layer = f"language_model.encoder.layers.{number - 2}."
    return {1: EMBEDDING, last: "language_model.encoder.final_layernorm."}.get(number, layer)


def name_in_pipeline(name: str, last: int) -> str:
    """The name in the whole model of what a stage calls "2.mlp.dense_h_to_4h.bias", or "tied_modules.embed" for the
    embedding, of which the first and the last stage have a copy."""
    if name.startswith(TIED):
        return EMBEDDING + name.removeprefix(TIED)
    number, _, own = name.partition(".")
    return prefix_in_pipeline(int(number), last) + own


def pipeline_module(folder: Path, rank: int, last: int) -> Weights:
    """DeepSpeed's PipelineModule has a file for the embedding (1), for each layer and for the last layer norm."""
    weights: dict[str, Tensor] = {}
    for number in range(1, last + 1):
        prefix = prefix_in_pipeline(number, last)
        content = read_checkpoint_file(folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        weights |= flat(content, prefix)
    return weights


def zero3_states(folder: Path, rank: int) -> tuple[list[Mapping[str, Any]], dict[str, torch.Size]]:
    """Of a tensor-parallel rank: each data-parallel rank's states, and the shapes of all parameters in their order."""
    mark = f"_mp_rank_{rank:02d}_"
    groups = read_checkpoint_file(folder / f"zero_pp_rank_0{mark}model_states.pt")["param_shapes"]
    shapes = {name: shape for group in groups for name, shape in group.items()}
    return zero_states(folder, rank), shapes


def zero_states(folder: Path, rank: int) -> list[Mapping[str, Any]]:
    """Each data-parallel rank's part of ZeRO's states, of a tensor-parallel rank."""
    first = next(folder.glob(f"*zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt"), None)
    if first is None:
        raise Problem(f"{folder} lacks the states of rank 0", "Copy every node's files to this directory")
    count = read_checkpoint_file(first)["optimizer_state_dict"]["partition_count"]
    if isinstance(count, list):  # of every group of parameters
        count = count[0]
    files = [first.with_name(first.name.replace("pp_rank_0", f"pp_rank_{number}")) for number in range(count)]
    return [read_checkpoint_file(file)["optimizer_state_dict"] for file in files]


class Gathered(Mapping[str, Tensor]):
    """ZeRO-3's parameters: every data-parallel rank holds an equal part of each in fp32; the last is padded."""

    def __init__(self, flat: list[list[Tensor]], shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> None:
        """flat: by data-parallel rank, its parts laid end to end. dtype: what is to be returned."""
        self._flat = flat
        self._shapes = shapes
        self._dtype = dtype
        self._begin: dict[str, int] = {}
        begin = 0
        for name in shapes:
            self._begin[name] = begin
            begin += self._size(name)

    def _size(self, name: str) -> int:
        """The elements of a parameter that each data-parallel rank holds."""
        return math.ceil(math.prod(self._shapes[name]) / len(self._flat))

    def __getitem__(self, name: str) -> Tensor:
        begin = self._begin[name]
        parts = [stretch(tensors, begin, begin + self._size(name)) for tensors in self._flat]
        shape = torch.Size(self._shapes[name])
        return torch.cat(parts)[: shape.numel()].view(shape).to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def stretch(tensors: list[Tensor], begin: int, end: int) -> Tensor:
    """The elements [begin, end) of tensors that are laid end to end."""
    parts = []
    for tensor in tensors:
        parts.append(tensor[max(begin, 0) : max(end, 0)])
        begin -= tensor.numel()
        end -= tensor.numel()
    return torch.cat(parts)


def flat(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested state dictionary as one, with dots between the levels."""
    weights: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            weights |= flat(value, f"{prefix}{name}.")
        else:
            weights[prefix + name] = value
    return weights
