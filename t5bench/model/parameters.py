"""The exact parameters of every rank: which layers a pipeline stage has, and how tensor parallelism divides them.

Every tensor-parallel rank holds all norms, the positions, and the biases that are added after an all-reduce. Tests
compare the counts with both engines' own models (tests/model).
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

from t5bench.model.job import Architecture, Parallel

WHOLE = Parallel()


class Stage(NamedTuple):
    """What one pipeline stage holds."""

    encoder_layers: int
    decoder_layers: int
    embedding: bool
    head: bool


@lru_cache(maxsize=65536)
def stage_of(a: Architecture, parallel: Parallel, stage: int = 0) -> Stage:
    """Layers are spread evenly: an encoder's over the stages before decoder_stage, a decoder's over the rest.

    The first stage has an embedding, the decoder's first too, and the last has the head with its own copy of the words.
    """
    stages = parallel.pipeline
    begin = parallel.decoder_stage if a.cross_attention and stages > 1 else 0
    if a.cross_attention and stages > 1 and not 0 < begin < stages:
        raise ValueError(f"a pipeline of {stages} stages cannot begin its decoder at stage {begin}")

    def share(layers: int, stages: range) -> int:
        return layers // len(stages) + (stage - stages.start < layers % len(stages)) if stage in stages else 0

    encoder, decoder = share(a.encoder_layers, range(begin or stages)), share(a.decoder_layers, range(begin, stages))
    return Stage(encoder, decoder, embedding=stage in (0, begin), head=stage == stages - 1)


def layer_shapes(a: Architecture, tensor: int = 1, decoder: bool = False) -> list[tuple[int, ...]]:
    """The size of each parameter of a layer on a tensor-parallel rank, in Megatron's order.

    A decoder layer has cross-attention if there is an encoder. A weight is (outputs, inputs); column parallelism
    divides the outputs, and the bias with them.
    """
    h, q, kv, inputs = a.hidden, a.query // tensor, 2 * a.key // tensor, a.ffn * (2 if a.gated else 1) // tensor
    blocks = [[(q + kv, h), (h, q)], [(inputs, h), (h, a.ffn // tensor)]]
    if decoder and a.cross_attention:
        blocks.insert(1, [(q, h), (kv, h), (h, q)])
    found: list[tuple[int, ...]] = []
    for block in blocks:
        found += _norm(a)
        for weight in block:
            found += [weight, weight[:1]] if a.biases else [weight]
    return found


def _norm(a: Architecture) -> list[tuple[int, ...]]:
    return [(a.hidden,)] * (2 if a.norm == "layer" else 1)


def tensors(a: Architecture, parallel: Parallel = WHOLE, stage: int = 0) -> dict[str, list[int]]:
    """Elements of every parameter of a rank on pipeline stage `stage`, by component.

    BART has two tables of positions with two extra rows, and a norm after each; BERT has two segments and, after its
    last layer, a transform, a pooler and two classes.
    """
    part, t, h, last = stage_of(a, parallel, stage), parallel.tensor, a.hidden, parallel.pipeline - 1
    words, bert = (a.padded_vocabulary // t, h), a.family == "bert"
    shapes: dict[str, list[tuple[int, ...]]] = {"embedding": [], "encoder": [], "decoder": [], "head": []}
    positions = [(a.position_rows, h)] * (a.positions == "learned")
    if part.embedding:
        bart = 2 * [(a.position_rows + 2, h), *_norm(a)]
        shapes["embedding"] = [words, *(bart if a.family == "bart" else positions), *([(2, h)] * bert)]
    encoder_end = parallel.decoder_stage - 1 if a.cross_attention and last else last
    for name, layers, end in (("encoder", part.encoder_layers, encoder_end), ("decoder", part.decoder_layers, last)):
        shapes[name] = layers * layer_shapes(a, t, name == "decoder")
        if layers and a.positions == "relative":
            shapes[name].append((a.relative_buckets, a.heads))
        if layers and a.final_norm and stage == end:
            shapes[name] += _norm(a)
    if part.head:
        copy = not part.embedding  # the last stage's own
        shapes["head"] = [words] * (copy or not a.tied) + [words[:1]] * a.head_bias
        shapes["head"] += positions * (parallel.deepspeed and copy)
        shapes["head"] += [(h, h), (h,), *_norm(a), (h, h), (h,), (2, h), (2,)] if bert else []
    return {name: [prod(shape) for shape in each] for name, each in shapes.items()}


def components(a: Architecture) -> dict[str, int]:
    """Parameters of the whole model by component."""
    return {name: sum(sizes) for name, sizes in tensors(a).items()}


@lru_cache(maxsize=65536)
def parameters(a: Architecture, parallel: Parallel = WHOLE, stage: int = 0) -> int:
    """Of a rank; with the defaults, of the whole model."""
    return sum(map(sum, tensors(a, parallel, stage).values()))
