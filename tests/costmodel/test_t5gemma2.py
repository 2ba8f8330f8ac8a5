"""T5Gemma 2: parameters, activations, FLOPs and collectives, against transformers' own class if that is installed."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from t5bench.costmodel import flops, traffic
from t5bench.costmodel.job import Architecture, Job, Parallel
from t5bench.costmodel.memory import layer_bytes
from t5bench.costmodel.parameters import components, tensors
from t5bench.costmodel.presets import PRESETS

needs_class = pytest.mark.skipif(
    not hasattr(transformers, "T5Gemma2ForConditionalGeneration"), reason="transformers 5 and later have T5Gemma 2"
)
# Layers of each stack, hidden size, heads, heads of keys and values, FFN, window.
DIMENSIONS = {
    "t5gemma2-270m": (18, 640, 4, 1, 2048, 512),
    "t5gemma2-1b": (26, 1152, 4, 1, 6912, 512),
    "t5gemma2-4b": (34, 2560, 8, 4, 10240, 1024),
}
# Parameters of T5Gemma2ForConditionalGeneration in transformers 5.24.0 with these dimensions and 262,144 words, without
# its vision_tower and multi_modal_projector.
BUILT = {
    "t5gemma2-270m": {"embedding": 167_772_800, "encoder": 100_326_016, "decoder": 100_326_016},
    "t5gemma2-1b": {"embedding": 301_991_040, "encoder": 697_896_064, "decoder": 697_896_064},
    "t5gemma2-4b": {"embedding": 671_091_200, "encoder": 3_209_010_688, "decoder": 3_209_010_688},
}
SMALL = replace(
    PRESETS["t5gemma2-1b"], encoder_layers=1, decoder_layers=1, hidden=48, heads=4, kv_heads=2, head_size=16, ffn=80,
    encoder_length=24, decoder_length=40, padded_vocabulary=512, window=16,
)  # fmt: skip


def model_of(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, window: int, **more: int) -> Any:
    """Transformers' model with a small vision encoder."""
    dimensions = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "sliding_window": window,
        "vocab_size": 262144,
        "head_dim": 256,
    }
    text = dimensions | more
    vision = {"num_hidden_layers": 1, "image_size": 896, "patch_size": 14}
    config = transformers.T5Gemma2Config(encoder={"text_config": text, "vision_config": vision}, decoder=text)
    return transformers.T5Gemma2ForConditionalGeneration(config)


def test_it_has_the_parameters_of_transformers_class():
    for name, expected in BUILT.items():
        found = components(PRESETS[name])
        assert found.pop("head") == 0, "it is tied"
        assert found == expected, name


@needs_class
@pytest.mark.parametrize("name", DIMENSIONS)
def test_every_tensor_has_the_size_that_transformers_builds(name: str):
    """Queries, keys and values have one weight here, and so have the two inputs of the FFN."""
    with torch.device("meta"):
        model = model_of(*DIMENSIONS[name])
    built: dict[str, Counter[str]] = {"embedding": Counter(), "encoder": Counter(), "decoder": Counter()}
    for full_name, parameter in model.named_parameters():
        if "vision_tower" in full_name or "multi_modal_projector" in full_name:
            continue
        part = "embedding" if "embed_tokens" in full_name else full_name.split(".")[1]
        fused_name = re.sub("(q|k|v|gate|up)_proj", lambda match: "gu" if len(match[1]) > 1 else "qkv", full_name)
        built[part][fused_name] += parameter.numel()
    expected = tensors(PRESETS[name])
    for part, sizes in built.items():
        assert sorted(sizes.values()) == sorted(expected[part]), part
        assert sizes.total() == BUILT[name][part]


class Norm(torch.autograd.Function):
    """Keeps what a fused norm keeps: its input, its weight and a statistic of every row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32))
        return x.clone()


class Attention(torch.autograd.Function):
    """Keeps what a fused attention keeps: its inputs, its output and a statistic of every query."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(query)
        ctx.save_for_backward(query, key, value, output, torch.empty(query.shape[:-1], dtype=torch.float32))
        return output


def kept_by(layer: torch.nn.Module, known: list[torch.Tensor], **inputs: Any) -> int:
    """Bytes that autograd keeps of a layer's forward pass, besides the known tensors. inputs: of the layer."""
    kept: dict[int, torch.UntypedStorage] = {}
    known_storages = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *known)}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known_storages:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(**inputs)
    return sum(storage.nbytes() for storage in kept.values())


@needs_class
def test_a_layer_keeps_what_transformers_own_layer_keeps(monkeypatch: pytest.MonkeyPatch):
    """Two functions stand in for the GPU's kernels of norms and attention."""
    from transformers.models.t5gemma2 import modeling_t5gemma2 as theirs

    def attention(module: Any, query: Any, key: Any, value: Any, *others: Any, **options: Any) -> Any:
        return Attention.apply(query, key, value).transpose(1, 2).contiguous(), None

    monkeypatch.setattr(theirs.T5Gemma2RMSNorm, "forward", lambda self, x: Norm.apply(x, self.weight))
    monkeypatch.setattr(theirs.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *_: attention)
    a = SMALL
    model = model_of(1, a.hidden, a.heads, a.kv_heads, a.ffn, a.window, head_dim=a.head_size, vocab_size=512)
    model = model.to(torch.bfloat16)
    batch = 2

    def states(length: int) -> torch.Tensor:
        return torch.randn(batch, length, a.hidden, dtype=torch.bfloat16, requires_grad=True)

    def rotation(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(1, length, a.head_size).bfloat16(), torch.randn(1, length, a.head_size).bfloat16()

    encoded = states(a.encoder_length)
    rotations = {False: rotation(a.encoder_length), True: rotation(a.decoder_length)}
    known = [encoded, *rotations[False], *rotations[True]]
    encoder_input = states(a.encoder_length)
    encoder = model.model.encoder.text_model.layers[0]
    in_encoder = kept_by(encoder, known, hidden_states=encoder_input, position_embeddings=rotations[False])
    decoder_inputs = {"hidden_states": states(a.decoder_length), "encoder_hidden_states": encoded}
    in_decoder = kept_by(model.model.decoder.layers[0], known, position_embeddings=rotations[True], **decoder_inputs)
    job = Job(a, micro_batch=batch, attention="fused", dropout=0.0)
    assert (layer_bytes(job), layer_bytes(job, decoder=True)) == (in_encoder, in_decoder)


@needs_class
def test_multiply_adds_are_those_of_transformers_matrix_products():
    """Which compute all scores, as if there were no window."""
    a = replace(SMALL, encoder_layers=2, decoder_layers=2)
    model = model_of(2, a.hidden, a.heads, a.kv_heads, a.ffn, a.window, head_dim=a.head_size, vocab_size=512)
    model.set_attn_implementation("eager")
    encoded, decoded = (torch.ones(1, length, dtype=torch.int64) for length in (a.encoder_length, a.decoder_length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=encoded, decoder_input_ids=decoded)
    assert counter.get_total_flops() == 2 * sum(flops.multiply_adds(replace(a, window=0)).values())


def test_activations_of_a_layer_by_hand():
    a = SMALL
    job = Job(a, micro_batch=2, dropout=0.0, norm_kernel="fused")
    h = 48
    f = 80
    q = 64
    k = 32
    n = 2 * 24
    m = 2 * 40
    keys = n + m  # in the decoder, of both stacks

    def norms(tokens: int, of_both: int) -> int:
        """Before and after each block, and of queries and keys."""
        return (
            2 * (tokens * (4 * h + 4) + tokens * (2 * h + 4))
            + 2 * (tokens * q + of_both * k)
            + 4 * (tokens * a.heads + of_both * a.kv_heads)
        )

    encoder = norms(n, n) + 2 * (2 * n * q + 2 * n * k) + 2 * a.heads * n * 24 + 2 * 4 * n * f
    decoder = norms(m, keys) + 2 * (2 * m * q + 2 * keys * k) + 2 * a.heads * m * (24 + 40) + 2 * 4 * m * f
    assert (layer_bytes(job), layer_bytes(job, decoder=True)) == (encoder, decoder)


def test_tokens_outside_of_windows_are_not_flops_of_the_model():
    """26 layers, of which four attend to all tokens; the decoder's windows have all of the encoder's."""
    a = replace(PRESETS["t5gemma2-1b"], encoder_length=2048, decoder_length=1024)
    h = 1152
    q = 4 * 256
    k = 256
    f = 6912
    s = 2048
    d = 1024
    encoder = 26 * (3 * s * h * f + 2 * h * (q * s + k * s)) + 2 * q * s * (4 * s + 22 * 512)
    decoder = 26 * (3 * d * h * f + 2 * h * (q * d + k * (s + d))) + 2 * q * d * (4 * (s + d) + 22 * (s + 512))
    assert flops.multiply_adds(a) == {"encoder": encoder, "decoder": decoder, "head": 262144 * h * d}
    every_score = replace(a, window=0)
    job = Job(a, global_batch=4)
    assert flops.hardware_flops(job) == flops.flops_per_iteration(every_score, 4) > flops.flops_per_iteration(a, 4)
    short, every_score = (replace(one, encoder_length=512, decoder_length=512) for one in (a, every_score))
    assert flops.flops_per_iteration(short, 4) == flops.flops_per_iteration(every_score, 4)


def test_a_decoder_layer_has_two_blocks():
    """Two all-reduces under tensor parallelism, where T5's has three."""

    def blocks(a: Architecture) -> int:
        rows = traffic.collectives_of(Job(a, Parallel(tensor=2)))
        (row,) = (row for row in rows if row.what == "decoder blocks" and row.when == "each forward")
        return row.count

    merged = PRESETS["t5gemma2-4b"]
    assert (blocks(merged), blocks(replace(merged, merged_attention=False))) == (2 * 34, 3 * 34)
