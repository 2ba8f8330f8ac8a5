"""The arithmetic against numbers that were found elsewhere: by hand, from the engine's own models, from data sheets."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from native.model import T5
from native.parallel import Axis, Layout
from t5bench.model import flops, parallel, peaks

LARGE = flops.Shape(24, 24, 1024, 16, 64, 2816, 512, 128, 32128)
UPSTREAM = replace(LARGE, padded_vocabulary=32256)  # how the unpatched engine pads at TP=2
ODD = flops.Shape(2, 4, 48, 3, 8, 80, 40, 56, 256)  # heads narrower than the hidden size, a decoder that is longer


def test_parameters_of_the_default_model():
    assert flops.parameters(LARGE) == 612_998_528
    assert flops.components(LARGE) == {
        "encoder": 24 * 9_973_504 + 2048,
        "embedding": (32128 + 512) * 1024,
        "decoder": 24 * 14_173_952 + 2048,
        "head": 32128,
    }


@pytest.mark.parametrize(
    ("tp", "pp", "shape", "by_stage"),
    [
        (2, 1, UPSTREAM, [307_013_376]),
        (1, 2, LARGE, [272_789_504, 373_632_384]),
        (2, 2, UPSTREAM, [136_797_184, 187_255_552]),
    ],
)
def test_parameters_of_a_rank(tp, pp, shape, by_stage):
    assert [flops.parameters(shape, tp, pp, stage) for stage in range(pp)] == by_stage


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("shape", [LARGE, replace(ODD, heads=4)])
def test_a_rank_has_the_parameters_that_the_native_engine_builds(shape, tp, pp):
    args = SimpleNamespace(
        encoder_num_layers=shape.encoder_layers,
        decoder_num_layers=shape.decoder_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        kv_channels=shape.kv_channels,
        ffn_hidden_size=shape.ffn,
        padded_vocab_size=shape.padded_vocabulary,
        max_position_embeddings=max(shape.encoder_length, shape.decoder_length),
        **{"attention_dropout": 0, "hidden_dropout": 0, "no_bias_gelu_fusion": False, "dtype": None, "pad_token": 0},
    )
    for stage in range(pp):
        with torch.device("meta"):
            model = T5(args, Layout(pp=Axis(pp, stage), tp=Axis(tp)))
        assert sum(p.numel() for p in model.parameters()) == flops.parameters(shape, tp, pp, stage)


def test_a_pipeline_of_more_stages_is_refused():
    with pytest.raises(ValueError, match="found 4"):
        flops.parameters(LARGE, pp=4)


def test_multiply_adds_by_hand():
    assert {name: round(macs / 1e9, 2) for name, macs in flops.multiply_adds(LARGE).items()} == {
        "encoder": 135.29,
        "decoder": round(13.69 + 35.43 + 17.72, 2),  # self-attention, cross-attention, MLP
        "head": 4.21,
    }
    assert flops.flops_per_iteration(LARGE, 16) / 1e12 == pytest.approx(19.809, abs=0.0005)
    h, p, f, s, d = 48, 24, 80, 40, 56
    decoder = (
        d * 4 * h * p  # self-attention's projections
        + 2 * p * d * d  # its scores and values
        + d * 2 * h * p  # cross-attention's query and output
        + s * 2 * h * p  # its keys and values
        + 2 * p * d * s
        + d * 2 * h * f
    )
    assert flops.multiply_adds(ODD) == {
        "encoder": 2 * (s * 4 * h * p + 2 * p * s * s + s * 2 * h * f),
        "decoder": 4 * decoder,
        "head": d * h * 256,
    }


def test_a_shape_from_settings():
    settings = {
        "ENCODER_NUM_LAYERS": 1, "DECODER_NUM_LAYERS": 2, "HIDDEN_SIZE": 12, "NUM_ATTENTION_HEADS": 4,
        "FFN_HIDDEN_SIZE": 5, "ENCODER_SEQ_LENGTH": 6, "DECODER_SEQ_LENGTH": 7,
    }  # fmt: skip
    assert flops.Shape.of_settings(settings.__getitem__, 8) == flops.Shape(1, 2, 12, 4, 3, 5, 6, 7, 8)


# Layout; by stage GB of states, activations and gathered parameters on a GPU; by stage GB that it sends.
PREDICTED = {
    "ddp": ({"dp": 2}, [(11.03, 1.24, 0)], [2.452]),
    "zero1": ({"dp": 2, "zero": 1}, [(7.36, 1.24, 0)], [1.839]),
    "zero2": ({"dp": 2, "zero": 2}, [(6.74, 1.24, 0)], [10.421]),
    "zero3": ({"dp": 2, "zero": 3}, [(5.52, 1.24, 1.0)], [10.712]),
    "zero3_offload": ({"dp": 2, "zero": 3, "offload": True}, [(0, 1.24, 1.0)], [10.712]),
    "pipeline": ({"pp": 2}, [(4.91, 1.74, 0), (6.73, 0.37, 0)], [0.150, 0.150]),
    "tensor": ({"tp": 2}, [(5.53, 0.71, 0)], [2.686]),
    "hybrid": ({"tp": 2, "pp": 2}, [(2.46, 1.00, 0), (3.37, 0.21, 0)], [1.756, 1.144]),
}


@pytest.mark.parametrize("strategy", PREDICTED)
def test_memory_and_traffic_of_a_strategy(strategy):
    layout, memory, sent = PREDICTED[strategy]
    job = parallel.Training(LARGE, 16, **layout)
    for stage, (states, activations, gathered) in enumerate(memory):
        found = job.memory_bytes(stage)
        assert found.pop("activations") / 1e9 == pytest.approx(activations, abs=0.006)
        assert found.pop("gathered", 0) / 1e9 == gathered
        assert sum(found.values()) / 1e9 == pytest.approx(states, abs=0.006)
        assert sum(job.sent_bytes(stage).values()) / 1e9 == pytest.approx(sent[stage], abs=0.0005)


def test_offloaded_states_are_in_cpu_memory():
    job = parallel.Training(LARGE, 16, dp=2, zero=3, offload=True)
    assert sum(job.state_bytes().values()) == 9 * 612_998_528


def test_traffic_by_what_is_sent():
    zero2 = parallel.Training(LARGE, 32, micro_batch=2, dp=4, zero=2).sent_bytes()  # four micro-batches
    assert zero2["gradients"] == 4 * 4 * 612_998_528 * 3 / 4
    assert zero2["gathered"] == 2 * 612_998_528 * 3 / 4
    pipeline = parallel.Training(LARGE, 16, micro_batch=2, pp=2).sent_bytes()
    assert pipeline == {
        "gradients": 0,
        "gathered": 0,
        "layers": 0,
        "masks": 0,
        "stages": 16 * 2 * 512 * 1024,
        "tied embedding": 4 * (32128 + 512) * 1024,
    }


def test_activations_by_layer():
    """Megabytes of a layer, against the formula of arXiv 2205.05198 with this model's FFN and cross-attention."""
    kept = parallel.activation_bytes(LARGE)
    assert kept["encoder"] / 24 / 1e6 == pytest.approx(36.18, abs=0.005)
    assert kept["decoder"] / 24 / 1e6 == pytest.approx(13.63, abs=0.005)
    assert kept["head"] == 10 * 128 * 32128


def test_one_forward_one_backward():
    assert parallel.one_f_one_b((2, 1), 2) == [
        (0, "F", 0, 0, 2),
        (1, "F", 0, 2, 3),
        (1, "B", 0, 3, 5),
        (0, "F", 1, 2, 4),
        (0, "B", 0, 5, 9),
        (1, "F", 1, 5, 6),
        (1, "B", 1, 6, 8),
        (0, "B", 1, 9, 13),
    ]


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA RTX 5000 Ada Generation", "bf16", 261.1),
        ("Quadro RTX 5000", "fp16", 89.2),
        ("Quadro RTX 5000", "bf16", None),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("Tesla T4", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "fp16", 312.0),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40", "bf16", 181.05),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA RTX 5000 Ada Generation Laptop GPU", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("", "bf16", None),
    ],
)
def test_peaks(name, precision, expected):
    assert peaks.peak_tflops(name, precision) == expected
