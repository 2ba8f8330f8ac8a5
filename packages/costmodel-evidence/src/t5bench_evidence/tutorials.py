"""``python -m t5bench predict --published``: docs/generated/published.md, two tutorials' figures beside the model's.

The tutorials state few layouts. What they leave open is chosen here, and the page names each choice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from t5bench.costmodel import intervals
from t5bench.costmodel.flops import hardware_flops
from t5bench.costmodel.job import Architecture, Job, Parallel, Zero
from t5bench.costmodel.machine import DEVICES, GIB, Machine
from t5bench.costmodel.parameters import parameters
from t5bench.costmodel.prediction import Prediction, machine_of
from t5bench.costmodel.presets import PRESETS, SOURCES, gpt

MICRO_BATCHES = (64, 32, 16, 8, 4, 2, 1)
GPUS_OF_A_DGX2 = 16
ZERO_GPUS = 400
# Billions of parameters, as both tutorials, GPT-3's paper and T5Gemma 2's announcement
# (https://blog.google/technology/developers/t5gemma-2/, without the vision encoder) state them.
SIZES = {
    "gpt-1.5b": 1.5,
    "gpt-8.3b": 8.3,
    "t5-11b": 11,
    "t5gemma2-270m": 0.37,
    "t5gemma2-1b": 1.7,
    "t5gemma2-4b": 7,
    "gpt-13b": 13,
    "gpt-17b": 17,
    "gpt-100b": 100,
    "gpt-170b": 170,
    "gpt-175b": 175,
}

INTRODUCTION = """\
# Predicted against published

Two well-known tutorials state what large models need and how fast they train: DeepSpeed's
[Megatron-LM GPT-2](https://www.deepspeed.ai/tutorials/megatron/) and the README of
[Megatron-LM](https://github.com/NVIDIA/Megatron-LM), on GPT-3. This page shows the cost model's predictions for the
same jobs. Nothing here was measured by us, and nothing was fitted to it. `python -m t5bench predict --published`
prints the page, and a test compares it.
[EVIDENCE.md](../../packages/costmodel-evidence/EVIDENCE.md) has 526 published measurements with exact layouts.
"""

SIZES_INTRODUCTION = """\
## Sizes

`predict` and `layouts` take these names after `--model`. In billions of parameters:
"""

CLAIMS_INTRODUCTION = f"""\
## Speed and memory

A time or a rate fits if it lies within the 90 % interval of absolute times, a factor of {intervals.TIME}. TFLOP/s
include recomputation here, as in both tutorials. GiB are those of the fullest GPU. All V100s are those of a DGX-2 with
32 GiB, sixteen to a node with 800 Gbit/s, unless the row says otherwise.
"""


@dataclass(frozen=True)
class PublishedFigure:
    """A published sentence, and what the model says of it."""

    published: str
    predicted: str
    fits: str
    """ "yes", "no" or "in part"."""
    assumed: str
    """What the source leaves open, and how it was chosen; "" if it states everything."""
    why: str = ""
    """Why it does not fit."""


def _on(job: Job, device: str, gigabits: float, per_node: int) -> Prediction:
    machine: Machine = machine_of(DEVICES[device], gigabits, per_node)
    return Prediction(job.on(devices_per_node=per_node), machine)


def _dgx2(architecture: Architecture, tensor: int, gpus: int, micro_batch: int, zero: int) -> Prediction:
    """Full recomputation in fp16, each tensor-parallel rank with a slice of the kept inputs, one micro-batch."""
    data = gpus // tensor
    job = Job(
        architecture,
        Parallel(tensor=tensor, data=data),
        micro_batch=micro_batch,
        global_batch=micro_batch * data,
        zero=Zero(zero),
        precision="fp16",
        recompute="full",
        partitions_inputs=tensor > 1,
    )
    return _on(job, "v100", 800, GPUS_OF_A_DGX2)


def _fullest_batch(architecture: Architecture, tensor: int, gpus: int, zero: int) -> Prediction:
    """With the largest of MICRO_BATCHES that fits; else with one sample."""
    predictions = [_dgx2(architecture, tensor, gpus, size, zero) for size in MICRO_BATCHES]
    return next((prediction for prediction in predictions if not prediction.shortage), predictions[-1])


def teraflops(prediction: Prediction) -> float:
    """TFLOP/s of a GPU with recomputation."""
    assert prediction.time
    return hardware_flops(prediction.job) / prediction.time.total / prediction.job.parallel.world / 1e12


def _near(predicted: float, published: float) -> str:
    low, high = intervals.around(predicted, intervals.TIME)
    return "yes" if low <= published <= high else "no"


def _memory(prediction: Prediction) -> str:
    size = prediction.machine.device.memory / GIB
    return f"{prediction.memory_bytes / GIB:.1f} of {size:.0f} GiB"


def _same(predicted: bool, published: bool) -> str:
    return "yes" if predicted == published else "no"


def published_figures() -> Iterator[PublishedFigure]:
    yield from _gpt3()
    yield from _zero2()
    yield from _without_model_parallelism()
    yield _slow_network()


def _gpt3() -> Iterator[PublishedFigure]:
    job = Job(
        PRESETS["gpt-175b"],
        Parallel(tensor=8, pipeline=16, data=8),
        micro_batch=1,
        global_batch=1536,
        precision="fp16",
        recompute="full",
    )
    found = _on(job, "a100", 1600, 8)
    assert found.time
    seconds = found.time.total
    layout = "1,600 Gbit/s a node; micro-batch 1 and full recomputation as in its `examples/pretrain_gpt3_175B.sh`"
    what = "GPT-3 175B on 1,024 A100, TP 8 x PP 16, batch 1,536"
    yield PublishedFigure(f"{what}: about 32 s an iteration", f"{seconds:.1f} s", _near(seconds, 32), layout)
    rate = teraflops(found)
    share = rate * 1e12 / (found.machine.device.peak("fp16") or 1)
    yield PublishedFigure(
        "the same: 138 TFLOP/s a GPU, 44 % of the peak",
        f"{rate:.0f}, {share * 100:.0f} %",
        _near(rate, 138),
        "as above",
    )
    counted = hardware_flops(found.job) / 32 / found.job.parallel.world / 1e12
    yield PublishedFigure(
        "the same FLOPs: 138 TFLOP/s at 32 s",
        f"{counted:.1f} at 32 s",
        "yes" if abs(counted / 138 - 1) < 0.01 else "no",
        "",
    )


def _zero2() -> Iterator[PublishedFigure]:
    hundred = PRESETS["gpt-100b"]
    model = "TP 16; 32 samples a replica, as in DeepSpeedExamples' `ds_zero2_pretrain_gpt2_model_parallel.sh`"
    found = _dgx2(hundred, 16, ZERO_GPUS, 32, zero=2)
    rate = teraflops(found)
    yield PublishedFigure(
        "ZeRO-2 trains 100B on 400 V100: over 38 TFLOP/s a GPU", f"{rate:.1f}", _near(rate, 38), model
    )
    total = rate * ZERO_GPUS / 1000
    yield PublishedFigure("the same: over 15 PFLOP/s in all", f"{total:.1f}", _near(total, 15), "as above")
    yield PublishedFigure("the same fits", _memory(found), _same(not found.shortage, True), "as above")
    largest = _fullest_batch(PRESETS["gpt-170b"], 16, ZERO_GPUS, zero=2)
    size = largest.job.micro_batch
    assumed = f"400 V100, TP 16, {size} samples a replica, the most that fit of 1, 2, 4, ..."
    yield PublishedFigure("ZeRO-2 runs models of 170B", _memory(largest), _same(not largest.shortage, True), assumed)

    zero1 = _fullest_batch(hundred, 16, ZERO_GPUS, zero=1)
    one_sample = _dgx2(hundred, 16, ZERO_GPUS, 1, zero=1)
    ratio = rate / teraflops(zero1)
    yield PublishedFigure(
        "ZeRO-2 is 5 times as fast as ZeRO-1",
        f"{ratio:.1f} times",
        "yes" if abs(ratio / 5 - 1) <= intervals.RATIO - 1 else "no",
        f"the same 100B and TP 16, ZeRO-1 with {zero1.job.micro_batch} samples a replica, the most that fit",
        f"All that differs is how many samples fit, and the model lets ZeRO-1 have {zero1.job.micro_batch}"
        f" ({_memory(zero1)}). With one sample the ratio would be {rate / teraflops(one_sample):.1f}. The tutorial does"
        " not state the batches that it compares.",
    )
    alone = _fullest_batch(hundred, 64, 384, zero=0)
    one_sample = _dgx2(hundred, 64, 384, 1, zero=0)
    ratio = rate / teraflops(alone)
    yield PublishedFigure(
        "ZeRO-2 is 10 times as fast as Megatron-LM alone",
        f"{ratio:.1f} times",
        "yes" if abs(ratio / 10 - 1) <= intervals.RATIO - 1 else "no",
        f"the same 100B; Megatron-LM with TP 64 on 384 V100 and {alone.job.micro_batch} samples a replica, the"
        " most that fit",
        "The tutorial does not state the model of this comparison, its tensor-parallel size or its batch. TP 64 is the"
        " least with which 100B fit, and the most that 64 heads allow. The model divides the kept inputs of"
        " recomputation for Megatron-LM too, and counts a ring of 64 GPUs on four nodes as fast as its slowest link"
        f" allows. With one sample the ratio would be {rate / teraflops(one_sample):.1f}.",
    )
    sizes = (64, 128, 256, ZERO_GPUS)
    sixty = replace(hundred, decoder_layers=75)
    series = [_fullest_batch(sixty, 16, gpus, zero=2) for gpus in sizes]
    rates = [teraflops(one) for one in series]
    grows = [later > earlier for earlier, later in pairwise(rates)]
    fits = "yes" if all(grows) else "in part" if any(grows) else "no"
    yield PublishedFigure(
        "twice the GPUs train more than twice as fast with ZeRO-2",
        f"TFLOP/s a GPU: {', '.join(f'{one:.1f}' for one in rates)}",
        fits,
        f"75 of the 100B's layers, {parameters(sixty) / 1e9:.0f}B, on {', '.join(map(str, sizes))} V100, TP 16, the"
        f" most samples that fit: {', '.join(str(one.job.micro_batch) for one in series)}",
        "More GPUs leave room for more samples, so each GPU reduces gradients less often. Once no larger micro-batch"
        " of 1, 2, 4, ... fits, the rate no longer grows: the model gives large matrix products the same share of the"
        " peak at any size.",
    )


def _without_model_parallelism() -> Iterator[PublishedFigure]:
    assumed = "128 V100, one sample a GPU, full recomputation"
    thirteen = replace(PRESETS["gpt-13b"], decoder_length=1024, position_rows=1024)
    found = _dgx2(thirteen, 1, 128, 1, zero=2)
    published = "ZeRO-2 trains 13B without model parallelism"
    yield PublishedFigure(published, _memory(found), _same(not found.shortage, True), f"{assumed}, length 1,024")
    six = gpt(30, 4096, 32, 1024)
    found = _dgx2(six, 1, 128, 1, zero=1)
    size = f"{parameters(six) / 1e9:.1f}B as 30 layers of 4,096"
    yield PublishedFigure(
        "ZeRO-1 supports up to 6B", _memory(found), _same(not found.shortage, True), f"{size}; {assumed}"
    )
    found = _dgx2(thirteen, 1, 128, 1, zero=1)
    yield PublishedFigure("the same: not 13B", _memory(found), _same(not found.shortage, False), assumed)
    small = replace(PRESETS["gpt-1.5b"], decoder_layers=43)
    found = _dgx2(small, 1, 128, 1, zero=0)
    several = Job(small, Parallel(data=128), micro_batch=2, global_batch=256, precision="fp16", recompute="none")
    yield PublishedFigure(
        "PyTorch's DDP runs out of memory with 1.4B",
        _memory(found),
        _same(not found.shortage, False),
        f"{parameters(small) / 1e9:.1f}B as 43 of GPT-2's layers; {assumed}",
        "The tutorial states neither batch nor recomputation. Two samples without recomputation take"
        f" {_memory(_on(several, 'v100', 800, GPUS_OF_A_DGX2))}. PyTorch's DDP also has a second copy of the"
        " gradients, in its buckets, unless `gradient_as_bucket_view` is set; the model computes Megatron's DDP.",
    )


def _slow_network() -> PublishedFigure:
    """GPT-2 1.5B on four nodes of four GPUs."""
    samples = 128
    model = gpt(48, 1600, 16, 1024)

    def run(tensor: int, micro_batch: int, zero: int) -> Prediction:
        job = Job(
            model,
            Parallel(tensor=tensor, data=16 // tensor),
            micro_batch=micro_batch,
            global_batch=samples,
            zero=Zero(zero),
            precision="fp16",
            recompute="full",
        )
        return _on(job, "v100-pcie-16", 40, 4)

    def fastest(tensor: int, zero: int) -> float:
        sizes = [size for size in MICRO_BATCHES if samples % (size * 16 // tensor) == 0]
        fitting = [found for found in (run(tensor, size, zero) for size in sizes) if not found.shortage]
        return min(found.time.total for found in fitting if found.time)

    zero2 = fastest(1, zero=2)
    inside = fastest(4, zero=0) / zero2
    across = fastest(16, zero=0) / zero2
    fits = "in part" if inside < 4 < across else _near(inside, 4)
    return PublishedFigure(
        "GPT-2 is nearly 4 times as fast with ZeRO as with model parallelism, on 4 nodes of 4 V100 16GB, 40 Gbit/s",
        f"{inside:.1f} times (TP 4), {across:.0f} times (TP 16)",
        fits,
        f"1.5B with 16 heads, {samples} samples, ZeRO-2, full recomputation, the fastest micro-batch that fits",
        "The direction is right, and the published factor lies between tensor parallelism inside a node and across all"
        " nodes. The tutorial states neither that size nor the batch, and the ratio depends on both.",
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---" for _ in headings], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page() -> str:
    """docs/generated/published.md."""
    sizes = [
        (
            f"`{name}`",
            f"{published:g}",
            _billions(parameters(PRESETS[name])),
            _dimensions(PRESETS[name]),
            SOURCES[name],
        )
        for name, published in SIZES.items()
    ]
    found = list(published_figures())
    rows = [(one.published, one.predicted, one.fits, one.assumed) for one in found]
    reasons = [f"- **{one.published}**: {one.why}\n" for one in found if one.fits != "yes"]
    return (
        "\n".join(
            (
                INTRODUCTION,
                SIZES_INTRODUCTION,
                _table(
                    ("model", "published", "predicted", "layers, width, heads, FFN", "source of the dimensions"), sizes
                ),
                CLAIMS_INTRODUCTION,
                _table(("published", "predicted", "fits", "what the source leaves open"), rows),
                "## What does not fit, and why\n",
                "".join(reasons),
            )
        ).rstrip("\n")
        + "\n"
    )


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f}" if count >= 1e9 else f"{count / 1e9:.2f}"


def _dimensions(architecture: Architecture) -> str:
    layers = f"{architecture.decoder_layers}"
    if architecture.encoder_layers:
        layers = f"{architecture.encoder_layers} + {architecture.decoder_layers}"
    return f"{layers}, {architecture.hidden:,}, {architecture.heads}, {architecture.ffn:,}"
