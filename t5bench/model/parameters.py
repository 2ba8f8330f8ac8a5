"""The parameters of every rank, exactly: which layers a pipeline stage has, and how tensor parallelism divides them.

Every tensor-parallel rank has all of the norms, the positions, and the biases that are added after an all-reduce.
Checked against both engines' own models (tests/model).
"""

from dataclasses import dataclass
from functools import lru_cache

from t5bench.model.job import Architecture, Parallel


@dataclass(frozen=True)
class Stage:
    """What one pipeline stage holds. output_copy: the last stage's own copy of the tied words."""

    encoder_layers: int
    decoder_layers: int
    embedding: bool
    head: bool
    output_copy: bool

    @property
    def layers(self) -> int:
        return self.encoder_layers + self.decoder_layers


@lru_cache(maxsize=65536)
def stage_of(architecture: Architecture, parallel: Parallel, stage: int = 0) -> Stage:
    """Layers are spread evenly: an encoder's over the stages before decoder_stage, a decoder's over the rest.

    The first stage has an embedding, the decoder's first too, and the last has the head with its own copy of the words.
    """
    a, stages = architecture, parallel.pipeline
    begin = parallel.decoder_stage if a.cross_attention and stages > 1 else 0
    if a.cross_attention and stages > 1 and not 0 < begin < stages:
        raise ValueError(f"a pipeline of {stages} stages cannot begin its decoder at stage {begin}")
    encoder, decoder = _share(a.encoder_layers, range(begin or stages)), _share(a.decoder_layers, range(begin, stages))
    embedding, head = stage in (0, begin), stage == stages - 1
    return Stage(encoder.get(stage, 0), decoder.get(stage, 0), embedding, head, head and not embedding)


def _share(layers: int, stages: range) -> dict[int, int]:
    return {stage: len(range(place, layers, len(stages))) for place, stage in enumerate(stages)}


def _norm(a: Architecture) -> list[int]:
    return [a.hidden] * (2 if a.norm == "layer" else 1)


def _linear(a: Architecture, inputs: int, outputs: int, tensor: int, column: bool) -> list[int]:
    """A weight and, where there are biases, a bias, which only a division by columns of outputs divides."""
    bias = [outputs // tensor if column else outputs] if a.biases else []
    return [inputs * outputs // tensor, *bias]


def layer_tensors(a: Architecture, tensor: int = 1, decoder: bool = False) -> list[int]:
    """Elements of each parameter of a layer on a tensor-parallel rank, in Megatron's order.

    A decoder's layer has cross-attention where there is an encoder.
    """
    h, q, kv = a.hidden, a.query, 2 * a.key
    found = [*_norm(a), *_linear(a, h, q + kv, tensor, True), *_linear(a, q, h, tensor, False), *_norm(a)]
    if a.positions == "relative" and a.relative_in_every_layer:
        found.append(a.relative_buckets * a.heads)
    if decoder and a.cross_attention:
        cross = [*_linear(a, h, q, tensor, True), *_linear(a, h, kv, tensor, True), *_linear(a, q, h, tensor, False)]
        found += [*cross, *_norm(a)]
    inputs = a.ffn * (2 if a.gated else 1)
    return [*found, *_linear(a, h, inputs, tensor, True), *_linear(a, a.ffn, h, tensor, False)]


def weight_shapes(a: Architecture, tensor: int = 1) -> set[tuple[int, int]]:
    """The different shapes of the weights that are multiplied by, the head's included."""
    h, q, kv, inputs = a.hidden, a.query // tensor, 2 * a.key // tensor, a.ffn * (2 if a.gated else 1)
    found = {(q + kv, h), (h, q), (inputs // tensor, h), (h, a.ffn // tensor), (a.padded_vocabulary // tensor, h)}
    return found | ({(q, h), (kv, h)} if a.cross_attention else set())


def _embedding_tensors(a: Architecture, tensor: int) -> list[int]:
    """Words, learned positions, BERT's two segments; BART has two tables with two rows more, and a norm after each."""
    found = [a.padded_vocabulary * a.hidden // tensor]
    if a.family == "bart":
        found += 2 * [(a.position_rows + 2) * a.hidden, *_norm(a)]
    elif a.positions == "learned":
        found.append(a.position_rows * a.hidden)
    return [*found, 2 * a.hidden] if a.family == "bert" else found


def _head_tensors(a: Architecture, tensor: int, output_copy: bool) -> list[int]:
    """The words again where they are not shared, a bias for each; BERT: a transform, a pooler and two classes too."""
    h, words = a.hidden, a.padded_vocabulary // tensor
    found = [words * h] if output_copy or not a.tied else []
    if a.head_bias:
        found.append(words)
    return [*found, h * h, h, *_norm(a), h * h, h, 2 * h, 2] if a.family == "bert" else found


def tensors(architecture: Architecture, parallel: Parallel | None = None, stage: int = 0) -> dict[str, list[int]]:
    """Elements of every parameter of a rank on pipeline stage `stage`, by component."""
    a, parallel = architecture, parallel or Parallel()
    part, t, last = stage_of(a, parallel, stage), parallel.tensor, parallel.pipeline - 1
    found = {"embedding": _embedding_tensors(a, t) if part.embedding else []}
    encoder_end = parallel.decoder_stage - 1 if a.cross_attention and last else last
    for name, layers, end in (("encoder", part.encoder_layers, encoder_end), ("decoder", part.decoder_layers, last)):
        found[name] = layers * layer_tensors(a, t, name == "decoder")
        if layers and a.positions == "relative" and not a.relative_in_every_layer:
            found[name].append(a.relative_buckets * a.heads)
        if layers and a.final_norm and stage == end:
            found[name] += _norm(a)
    found["head"] = _head_tensors(a, t, part.output_copy) if part.head else []
    return found


def components(architecture: Architecture, parallel: Parallel | None = None, stage: int = 0) -> dict[str, int]:
    """Parameters of a rank by component; with the defaults, of the whole model."""
    return {name: sum(sizes) for name, sizes in tensors(architecture, parallel, stage).items()}


@lru_cache(maxsize=65536)
def parameters(architecture: Architecture, parallel: Parallel | None = None, stage: int = 0) -> int:
    return sum(components(architecture, parallel, stage).values())
