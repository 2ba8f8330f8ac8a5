"""The exact parameters of every rank: which layers a pipeline stage has, and how tensor parallelism divides them.

Every tensor-parallel rank holds all norms, the positions, and the biases that are added after an all-reduce. Tests
compare the counts with both engines' own models (tests/costmodel).
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

from t5bench.costmodel.job import Architecture, Parallel
from t5bench.costmodel.layout import share

WHOLE = Parallel()
Shape = tuple[int, ...]


class Stage(NamedTuple):
    """What one pipeline stage holds."""

    encoder_layers: int
    decoder_layers: int
    embeddings: int
    """Two if a stage's chunks begin the encoder and the decoder."""
    head: bool
    """And with it the end of the decoder, if there is one."""
    encoder_end: bool
    """The encoder's last layer."""

    @property
    def embedding(self) -> bool:
        return self.embeddings > 0


@lru_cache(maxsize=65536)
def stage_of(a: Architecture, parallel: Parallel, stage: int = 0) -> Stage:
    """Layers are spread evenly: an encoder's over the stages before decoder_stage, a decoder's over the rest.

    The first stage has an embedding, the decoder's first too, and the last has the head with its own copy of the words.
    """
    chunks = parallel.chunks
    begin = parallel.decoder_stage if a.cross_attention and chunks > 1 else 0
    if a.cross_attention and chunks > 1 and not 0 < begin < chunks:
        raise ValueError(f"a pipeline of {chunks} stages cannot begin its decoder at stage {begin}")
    own = parallel.chunks_of(stage)

    def held(layers: int, among: range) -> int:
        return sum(len(share(layers, among, chunk)) for chunk in own if chunk in among)

    return Stage(
        encoder_layers=held(a.encoder_layers, range(begin or chunks)),
        decoder_layers=held(a.decoder_layers, range(begin, chunks)),
        embeddings=sum(chunk in (0, begin) for chunk in own),
        head=stage == parallel.pipeline - 1,
        encoder_end=a.encoder_layers > 0 and (begin or chunks) - 1 in own,
    )


def layer_shapes(a: Architecture, tensor: int = 1, decoder: bool = False) -> list[tuple[int, ...]]:
    """The size of each parameter of a layer on a tensor-parallel rank, in Megatron's order.

    A decoder layer has cross-attention if there is an encoder, unless that is merged with its self-attention. A weight
    is (outputs, inputs); column parallelism divides the outputs, and the bias with them.
    """
    h = a.hidden
    query = a.query // tensor
    keys_and_values = 2 * a.keys_of_all(tensor) // tensor
    ffn_inputs = a.ffn * (2 if a.gated else 1) // tensor
    own = [(query, h), (keys_and_values, h)] if a.keys_apart else [(query + keys_and_values, h)]
    cross_attention = [(query, h), (keys_and_values, h), (h, query)]
    mlp = [(ffn_inputs, h), (h, a.ffn // tensor)]
    shapes = _attention(a, own, (h, query))
    if decoder and a.cross_attention and not a.merged_attention:
        shapes += _attention(a, cross_attention[:2], cross_attention[2])
    ffn = _block(a, mlp)
    return shapes + (ffn[len(_norm(a, a.hidden)) :] if a.one_norm else ffn)


def _attention(a: Architecture, projections: list[tuple[int, int]], output: tuple[int, int]) -> list[tuple[int, ...]]:
    """Its norm, queries, keys and values with the norms of these, and the output."""
    shapes = _norm(a, a.hidden)
    for weight in projections:
        shapes.append(weight)
        if a.biases or a.query_biases:
            shapes.append(weight[:1])
    if a.query_key_norms:
        shapes += 2 * _norm(a, a.head_size)
    shapes.append(output)
    if a.biases or a.output_biases:
        shapes.append(output[:1])
    return shapes + (_norm(a, a.hidden) if a.post_norms else [])


def _block(a: Architecture, weights: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    """A norm, the weights with their biases, and the norm of the output if it has one."""
    shapes = _norm(a, a.hidden)
    for weight in weights:
        shapes.append(weight)
        if a.biases or a.ffn_biases:
            shapes.append(weight[:1])
    return shapes + (_norm(a, a.hidden) if a.post_norms else [])


def _norm(a: Architecture, width: int) -> list[tuple[int, ...]]:
    """A layer norm has a weight and a bias, an RMS norm has no bias."""
    return [(width,)] * (2 if a.norm == "layer" else 1)


@lru_cache(maxsize=4096)
def tensors(a: Architecture, parallel: Parallel = WHOLE, stage: int = 0) -> dict[str, list[int]]:
    """Elements of every parameter of a rank on pipeline stage `stage`, by component."""
    return {name: [prod(shape) for shape in of_part] for name, of_part in shapes_of(a, parallel, stage).items()}


def shapes_of(a: Architecture, parallel: Parallel = WHOLE, stage: int = 0) -> dict[str, list[Shape]]:
    """The shape of every parameter of a rank on pipeline stage `stage`, by component.

    BART has two tables of positions with two extra rows, and a norm after each; BERT has two segments and, after its
    last layer, a transform, a pooler and two classes.
    """
    part = stage_of(a, parallel, stage)
    last = parallel.chunks - 1
    begin = parallel.decoder_stage if a.cross_attention and last else 0
    return {
        "embedding": part.embeddings * _embedding(a, parallel),
        "encoder": _stack(a, parallel, part.encoder_layers, is_decoder=False, ends=part.encoder_end),
        "decoder": _stack(a, parallel, part.decoder_layers, is_decoder=True, ends=part.head),
        "head": _head(a, parallel, has_embedding=last in (0, begin)) if part.head else [],
    }


def _words(a: Architecture, parallel: Parallel) -> Shape:
    return (-(-a.padded_vocabulary // parallel.tensor), a.hidden)  # of the first ranks, if it does not divide


def _positions(a: Architecture) -> list[Shape]:
    return [(a.position_rows, a.hidden)] if a.positions == "learned" else []


def _embedding(a: Architecture, parallel: Parallel) -> list[Shape]:
    shapes = [_words(a, parallel)]
    if a.family == "bart":
        shapes += 2 * [(a.position_rows + 2, a.hidden), *_norm(a, a.hidden)]
    else:
        shapes += _positions(a)
    if a.family == "bert":
        shapes.append((2, a.hidden))
    shapes += a.special_words * [(a.hidden,)]
    return shapes


def _stack(a: Architecture, parallel: Parallel, layers: int, is_decoder: bool, ends: bool) -> list[Shape]:
    """ends: the stack's last layer is on this stage."""
    if not layers:
        return []
    shapes = [*_relative_table(a, parallel.tensor), *layers * layer_shapes(a, parallel.tensor, is_decoder)]
    if a.final_norm and ends:
        shapes += _norm(a, a.hidden)
    return shapes


def _relative_table(a: Architecture, tensor: int) -> list[Shape]:
    """Of a stack; every pipeline stage with some of its layers has a copy."""
    return [(a.relative_buckets, a.heads // tensor)] if a.positions == "relative" else []


def _head(a: Architecture, parallel: Parallel, has_embedding: bool) -> list[Shape]:
    """Without an embedding on the same stage, the head has a copy of the words, or its own weight if it is not tied."""
    h = a.hidden
    words = _words(a, parallel)
    shapes: list[Shape] = []
    if not has_embedding or not a.tied:
        shapes.append(words)
    if a.head_bias:
        shapes.append(words[:1])
    if parallel.deepspeed and not has_embedding:
        shapes += _positions(a)
    if a.family == "bert":
        shapes += [(h, h), (h,), *_norm(a, h), (h, h), (h,), (2, h), (2,)]
    return shapes


def components(a: Architecture) -> dict[str, int]:
    """Parameters of the whole model by component."""
    return {name: sum(sizes) for name, sizes in tensors(a).items()}


@lru_cache(maxsize=65536)
def parameters(a: Architecture, parallel: Parallel = WHOLE, stage: int = 0) -> int:
    """Of a rank; with the defaults, of the whole model."""
    return sum(sum(sizes) for sizes in tensors(a, parallel, stage).values())
