from dataclasses import replace

import pytest

from t5bench.costmodel import traffic
from t5bench.costmodel.job import Job, Parallel, Zero
from t5bench.costmodel.memory import layer_bytes, memory_of
from t5bench.costmodel.parameters import parameters
from t5bench.costmodel.presets import PRESETS, SOURCES
from t5bench_evidence import tutorials
from t5bench_evidence.tutorials import PublishedFigure, published_figures


@pytest.fixture(scope="module")
def all_figures() -> list[PublishedFigure]:
    return list(published_figures())


def test_every_preset_has_a_source_and_the_published_size():
    assert SOURCES.keys() == PRESETS.keys()
    for name, billions in tutorials.SIZES.items():
        assert parameters(PRESETS[name]) / 1e9 == pytest.approx(billions, rel=0.05), name


def test_what_does_not_fit_has_a_reason(all_figures: list[PublishedFigure]):
    assert {figure.fits for figure in all_figures} == {"yes", "no", "in part"}
    assert all(figure.why for figure in all_figures if figure.fits != "yes")


def test_gpt3s_iteration_is_within_a_tenth(all_figures: list[PublishedFigure]):
    (figure,) = (one for one in all_figures if one.published.endswith("about 32 s an iteration"))
    assert float(figure.predicted.removesuffix(" s")) == pytest.approx(32, rel=0.1)


def test_a_figure_that_is_far_off_does_not_fit():
    assert tutorials._near(34.0, 32.0) == "yes"
    assert tutorials._near(34.0, 20.0) == tutorials._near(34.0, 50.0) == "no"


def test_partitioned_inputs_of_recomputation():
    """Each tensor-parallel rank keeps a slice of a layer's input, and gathers it before computing the layer again."""
    parallel = Parallel(tensor=16, data=25)
    whole = Job(PRESETS["gpt-100b"], parallel, 32, 800, Zero(2), precision="fp16", recompute="full")
    partitioned = replace(whole, partitions_inputs=True)
    inputs = layer_bytes(whole, decoder=True)
    assert layer_bytes(partitioned, decoder=True) * 16 == inputs == 32 * 1024 * 8192 * 2
    saved = memory_of(whole).peak - memory_of(partitioned).peak
    assert saved == pytest.approx((125 * 15 / 16 - 1) * inputs)
    (gather,) = set(traffic.collectives_of(partitioned)) - set(traffic.collectives_of(whole))
    assert (gather.kind, gather.group, gather.count, gather.when) == ("all-gather", "tensor", 125, "each backward")
    assert gather.bytes == inputs
