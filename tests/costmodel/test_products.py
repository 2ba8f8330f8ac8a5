"""Matrix products in tiles, and what separate operators pass over."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import count_passes
import torch

from t5bench.costmodel import time
from t5bench.costmodel.flops import layer_multiply_adds
from t5bench.costmodel.job import Architecture, Job, Parallel
from t5bench.costmodel.machine import DEVICES
from t5bench.costmodel.time import Product, products_of_layer

A100 = DEVICES["a100"]
LLAMA = Architecture(
    encoder_layers=0,
    decoder_layers=2,
    hidden=1024,
    heads=16,
    head_size=64,
    ffn=2816,
    kv_heads=4,
    encoder_length=0,
    decoder_length=2048,
    padded_vocabulary=32000,
    family="gpt",
    gated=True,
    positions="rotary",
    biases=False,
    norm="rms",
)
T5 = replace(LLAMA, encoder_layers=2, encoder_length=512, decoder_length=128, family="t5", gated=False, kv_heads=16)


@pytest.mark.parametrize("model", [LLAMA, T5, replace(T5, merged_attention=True)])
@pytest.mark.parametrize("tensor", [1, 4])
def test_the_products_are_the_layers_multiply_adds(model: Architecture, tensor: int):
    job = Job(model, Parallel(tensor=tensor), micro_batch=3)
    for is_decoder in (False, True):
        if not model.length(is_decoder):
            continue
        weights, _ = layer_multiply_adds(model, is_decoder)
        products = products_of_layer(job, is_decoder)
        assert sum(each.rows * each.inner * each.columns for each in products) == 3 * weights / tensor
        for product in products:
            for gradient in product.backward:
                assert (
                    gradient.rows * gradient.inner * gradient.columns == product.rows * product.inner * product.columns
                )


def test_the_last_wave_of_tiles_leaves_multiprocessors_idle():
    """512 tiles of 256 x 128 are 4.74 waves of 108."""
    assert Product(4096, 64, 4096).filled(A100) == pytest.approx(512 / (5 * 108))
    assert Product(4096, 64, 4096).filled(DEVICES["b200"]) == 1


def test_tiles_reach_beyond_the_edges():
    whole = Product(108 * 256, 64, 128)
    assert whole.filled(A100) == 1
    assert Product(whole.rows, 64, 129).filled(A100) < 0.6


def test_long_sums_are_divided():
    few_tiles = Product(1024, 2048, 1024)
    assert few_tiles.filled(A100) < 0.6 < few_tiles._replace(inner=32768).filled(A100)


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_separate_operators_pass_over_as_many_tensors_as_they_are_counted(dtype: torch.dtype, width: int):
    """A fused norm's two passes forward and four backward are among BLOCK_PASSES."""
    forward, backward = count_passes.of_norm(dtype)
    assert (round(forward), round(backward)) == (
        time.EAGER_RMS_NORM[width] + 2,
        time.EAGER_RMS_NORM_BACKWARD[width] + 4,
    )
    assert [round(passes) for passes in count_passes.of_rotary(dtype)] == [time.EAGER_ROTARY] * 2


def test_rotary_positions_and_logits_that_every_rank_has_take_time():
    job = Job(LLAMA, Parallel(tensor=4), micro_batch=2, global_batch=8, engine="unknown", attention="flash")
    machine = time.Machine(A100, time.Link(300e9), time.Link(100e9))

    def seconds(of: Job) -> float:
        return time.iteration(of, machine).computing

    assert seconds(job) > seconds(replace(job, architecture=replace(LLAMA, positions="none")))
    small = replace(job, architecture=replace(LLAMA, padded_vocabulary=128))
    megatron = replace(job, engine="megatron-core")
    head = seconds(job) - seconds(small)
    assert head > 1.5 * (seconds(megatron) - seconds(replace(small, engine="megatron-core")))


def test_megatrons_fused_softmax_has_no_fp32():
    job = Job(replace(LLAMA, norm="layer"), micro_batch=2, precision="bf16")
    plain = time._passes(job)
    assert time._passes(replace(job, precision="tf32")).scores_forward > plain.scores_forward
    compiled = replace(job, engine="compiled", precision="tf32")
    assert time._passes(compiled).scores_forward == plain.scores_forward
