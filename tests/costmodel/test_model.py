"""The arithmetic against numbers that were found elsewhere: by hand, from engines' models, data sheets."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from native.data_parallel import TorchTrainer
from native.model import build, make
from native.parallel import Axis, Mesh
from t5bench.costmodel import flops
from t5bench.costmodel.achievable_rates import BY_FAMILY, START
from t5bench.costmodel.job import Architecture, FullySharded, Job, Parallel, Zero, padded
from t5bench.costmodel.layout import decoder_stage, share
from t5bench.costmodel.machine import DEVICES, device_of, peak_tflops
from t5bench.costmodel.memory import (
    MIB,
    SURE,
    activation_bytes,
    chance_to_fit,
    in_flight,
    layer_bytes,
    logits_bytes,
    memory_of,
    model_states,
    slack,
)
from t5bench.costmodel.parameters import parameters, stage_of
from t5bench.costmodel.schedule import GPIPE, ZERO_BUBBLE, idle_share, order, steps
from t5bench.costmodel.time import CPU

LARGE = Architecture(24, 24, 1024, 16, 64, 2816, 512, 128, 32128)
ODD = Architecture(2, 4, 48, 8, 8, 80, 40, 56, 256)  # heads narrower than the hidden size, a decoder that is longer


def native_arguments(a: Architecture, **more: object) -> SimpleNamespace:
    own: dict[str, object] = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "dtype": torch.bfloat16}
    own |= {"pipeline_model_parallel_split_rank": 1, "virtual_pipeline_stages": 1}
    return SimpleNamespace(
        encoder_num_layers=a.encoder_layers, decoder_num_layers=a.decoder_layers, hidden_size=a.hidden,
        num_attention_heads=a.heads, kv_channels=a.head_size, ffn_hidden_size=a.ffn, seed=1, pad_token=0,
        padded_vocab_size=a.padded_vocabulary, max_position_embeddings=a.position_rows, no_bias_gelu_fusion=False,
        init_method_std=0.02, compile=False, family="t5", num_layers=a.encoder_layers, recompute_granularity=None,
        encoder_seq_length=a.encoder_length, decoder_seq_length=a.decoder_length,
        **own | more,
    )  # fmt: skip


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (8, 1), (4, 2)])
@pytest.mark.parametrize("architecture", [LARGE, ODD])
def test_a_rank_has_the_parameters_that_the_native_engine_builds(architecture, tensor, pipeline):
    for stage in range(pipeline):
        with torch.device("meta"):
            model = make(native_arguments(architecture), Mesh(pp=Axis(pipeline, stage), tp=Axis(tensor)))
        built = sum(parameter.numel() for parameter in model.parameters())
        assert built == parameters(architecture, Parallel(tensor, pipeline), stage)


@pytest.mark.parametrize(("stages", "chunks", "split"), [(3, 1, 1), (3, 1, 2), (4, 1, 3), (2, 2, 2), (3, 2, 3)])
def test_a_stage_of_a_deep_pipeline_has_the_parameters_that_the_native_engine_builds(stages, chunks, split):
    """With layers that do not divide evenly, and with several parts of the model on each stage."""
    architecture = replace(LARGE, encoder_layers=5, decoder_layers=4)
    parallel = Parallel(1, stages, split_rank=split, virtual_stages=chunks)
    args = native_arguments(architecture, pipeline_model_parallel_split_rank=split, virtual_pipeline_stages=chunks)
    layers = []
    for stage in range(stages):
        with torch.device("meta"):
            model = build(args, Mesh(pp=Axis(stages, stage)))
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters(architecture, parallel, stage)
        names = [model.whole_name(name) for name, _ in model.named_parameters()]
        layers += [name for name in names if ".layers." in name]
    assert (
        len(layers)
        == len(set(layers))
        == sum(".layers." in name for name, _ in make(native_arguments(architecture), Mesh()).named_parameters())
    )


def test_the_decoder_begins_where_the_busiest_stage_has_least_to_do():
    assert [list(share(5, range(2, 4), stage)) for stage in (2, 3)] == [[0, 1, 2], [3, 4]]
    assert decoder_stage([2] * 24, [1] * 24, 2) == 1
    assert decoder_stage([2] * 24, [1] * 24, 3) == 2  # 24, 24, 24
    assert decoder_stage([1] * 4, [1] * 4, 4) == 2
    assert decoder_stage([9] * 2, [1] * 6, 8) == 2  # every stage has a layer


def test_schedules():
    """GPipe and 1F1B wait equally long, (p - 1) / (m + p - 1); two chunks on each stage nearly halve it."""
    assert [step[:2] for step in order(0, 2, 3, kind=GPIPE)] == [(way, k) for way in "FB" for k in range(3)]
    p = 4
    m = 8
    shares = [
        idle_share([1.0] * p, [2.0] * p, m, chunks, kind)
        for chunks, kind in ((1, "1f1b"), (1, GPIPE), (2, "interleaved"))
    ]
    assert shares == pytest.approx([3 / 11, 3 / 11, 3 / 19])
    deep = Job(LARGE, Parallel(1, p), 1, m)
    assert [in_flight(deep, stage) for stage in range(p)] == [4, 3, 2, 1]
    assert [in_flight(deep.on(schedule=GPIPE), stage) for stage in range(p)] == [m] * p


def test_the_zero_bubble_schedule():
    """ZB-H1 of the paper: its order (figure 3), its bubble (section 2.3), the micro-batches of 1F1B's first stage."""
    names = [f"{way}{k}" for way, k, _ in order(1, 2, 3, kind=ZERO_BUBBLE)]
    assert names == ["F0", "B0", "F1", "B1", "W0", "F2", "B2", "W1", "W2"]
    names = [f"{way}{k}" for way, k, _ in order(0, 2, 3, kind=ZERO_BUBBLE)]
    assert names == ["F0", "F1", "B0", "W0", "F2", "B1", "W1", "B2", "W2"]
    for p, m, (forward, inputs, weights) in ((2, 4, (1, 1, 1)), (4, 8, (1, 1.3, 0.7)), (8, 16, (2, 2, 1))):
        working = m * (forward + inputs + weights)
        waiting = (p - 1) * (forward + inputs - weights)
        share = idle_share([forward] * p, [inputs + weights] * p, m, kind=ZERO_BUBBLE, weights=[weights] * p)
        assert share == pytest.approx(waiting / (working + waiting))
        for stage in range(p):
            done = order(stage, p, m, kind=ZERO_BUBBLE)
            assert tuple(step for step in done if step[0] != "W") == order(stage, p, m), "1F1B but for the weights"
            assert all(done.index(("B", k, 0)) < done.index(("W", k, 0)) for k in range(m)) and len(done) == 3 * m
            found = steps(stage, p, 100, kind=ZERO_BUBBLE)
            assert max(sum(step.kept) for step in found) == p - stage
            assert max(sum(step.kept) + sum(step.put_off) for step in found) == p
            assert set(steps(stage, p, 3 * p, kind=ZERO_BUBBLE)) == set(found), "later micro-batches bring nothing new"


SHAPE = {"num_layers": 3, "num_decoder_layers": 2, "d_model": 48, "num_heads": 6, "d_kv": 8, "d_ff": 80}
BART = {"d_model": 48, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 6, "encoder_ffn_dim": 80}
BART |= {"decoder_attention_heads": 6, "decoder_ffn_dim": 80, "max_position_embeddings": 60}
BERT = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 80}
FAMILIES = {
    "T5ForConditionalGeneration": (
        transformers.T5Config(**SHAPE, vocab_size=256, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        {"gated": True, "tied": False, "positions": "relative", "biases": False, "head_bias": False, "norm": "rms"},
    ),
    "BartForConditionalGeneration": (
        transformers.BartConfig(**BART, vocab_size=256),
        {"family": "bart", "position_rows": 60, "head_bias": False, "final_norm": False},
    ),
    "BertForPreTraining": (
        transformers.BertConfig(**BERT, vocab_size=256, max_position_embeddings=60),
        {"family": "bert", "decoder_layers": 0, "position_rows": 60},
    ),
    "GPT2LMHeadModel": (
        transformers.GPT2Config(vocab_size=256, n_embd=48, n_layer=2, n_head=6, n_inner=80),
        {"family": "gpt", "encoder_layers": 0, "position_rows": 1024, "head_bias": False},
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_have_the_parameters_of_hugging_faces_models(name):
    config, fields = FAMILIES[name]
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    plain = Architecture(3, 2, 48, 6, 8, 80, 40, 56, 256)
    assert parameters(replace(plain, **fields)) == sum(parameter.numel() for parameter in model.parameters())


def test_sizes_by_hand():
    assert (padded(32101, 128), padded(32101, 128, 2), padded(32101, 64, 2)) == (32128, 32256, 32128)
    named = {"num_layers": "2", "hidden_size": "8", "num_attention_heads": "2", "max_position_embeddings": "5"}
    learned, none = (Architecture.of_arguments(named | more, 16) for more in ({}, {"no_position_embedding": ""}))
    assert parameters(learned) - parameters(none) == 5 * 8
    stages = [stage_of(LARGE, Parallel(pipeline=4, split_rank=1), stage) for stage in range(4)]
    assert [(*part[:2], part.embedding) for part in stages] == [
        (24, 0, True), (0, 8, True), (0, 8, False), (0, 8, False),
    ]  # fmt: skip


def test_multiply_adds_by_hand():
    assert {name: round(macs / 1e9, 2) for name, macs in flops.multiply_adds(LARGE).items()} == {
        "encoder": 135.29,
        "decoder": round(13.69 + 35.43 + 17.72, 2),  # self-attention, cross-attention, MLP
        "head": 4.21,
    }
    assert flops.flops_per_iteration(LARGE, 16) / 1e12 == pytest.approx(19.809, abs=0.0005)
    gated = replace(ODD, encoder_layers=0, gated=True, kv_heads=2)
    assert flops.multiply_adds(gated)["decoder"] == 4 * (56 * 48 * (2 * 64 + 2 * 16 + 3 * 80) + 2 * 64 * 56 * 56)


# What a job has; bytes of a parameter's weights, gradients, optimizer states on one of four GPUs; in CPU memory.
STATES = [
    ({}, (2, 4, 12), 0), ({"precision": "fp32"}, (4, 4, 8), 0), ({"precision": "fp16"}, (2, 2, 12), 0),
    ({"distributed_optimizer": True}, (2, 4, 3), 0), ({"zero": Zero(1)}, (2, 2, 3), 0),
    ({"zero": Zero(2)}, (2, 0.5, 3), 0), ({"zero": Zero(3)}, (0.5, 0.5, 3), 0), ({"zero": Zero(3, True, True)}, (), 5),
    ({"engine": "native"}, (4, 4, 8), 0),  # its copies in 16 bits are there during an iteration alone
    ({"moments": ()}, (2, 4, 4), 0), ({"moments": (1, 1)}, (2, 4, 6), 0),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "states", "cpu"), STATES, ids=str)
def test_states(fields, states, cpu):
    gpu, host = model_states(Job(LARGE, Parallel(data=4), **fields), 1000)
    assert tuple(gpu.values()) == tuple(1000 * each for each in states)
    assert sum(host.values()) == 1000 * cpu


def test_buffers_of_deepspeeds_pipeline():
    """Outputs but in the last stage, inputs but in the first; under tensor parallelism slices of outputs alone."""
    gpt = replace(LARGE, encoder_layers=0, encoder_length=0, decoder_length=512, family="gpt")
    job = Job(gpt, Parallel(pipeline=3, deepspeed=True), zero=Zero(1), global_batch=8, micro_batch=2)
    each = 1 << 21
    for tensor, expected in ((1, [3 * each, 2 * 2 * each, each]), (2, [3 * each / 2, 2 * each / 2, 0])):
        assert [activation_bytes(job.on(tensor=tensor), at)["pipeline's buffers"] for at in range(3)] == expected


def test_activations_of_a_layer():
    """Korthikanti et al., equation 2, with this FFN and cross-attention; by kernel, recomputation and parallelism."""
    job = Job(LARGE, micro_batch=2)
    n = 1024
    m = 256
    h = 1024
    f = 2816
    a = 16
    encoder = 18 * n * h + 4 * n * f + 5 * a * 512 * n + 2 * 8 * n
    cross = 9 * m * h + 4 * n * h + 5 * a * m * 512 + 8 * m
    assert layer_bytes(job) == encoder
    assert layer_bytes(job, decoder=True) == 18 * m * h + 4 * m * f + 5 * a * 128 * m + 2 * 8 * m + cross
    again = [activation_bytes(replace(job, recompute=way))["recomputed layer"] for way in ("full", "selective")]
    assert again == [encoder, 5 * a * 512 * n], "of the larger stack's layer"
    halves = layer_bytes(job.on(tensor=2)), layer_bytes(job.on(tensor=2, sequence_parallel=True))
    assert (2 * halves[0] - encoder, halves[1]) == (10 * n * h + 2 * 8 * n, encoder / 2)
    assert layer_bytes(replace(job, dropout=0.0)) == encoder - 2 * n * h - 3 * a * 512 * n
    assert logits_bytes(job)[0] == 10 * m * 32128


def test_micro_batches_in_flight():
    job = Job(LARGE, Parallel(pipeline=4), global_batch=16)
    assert [in_flight(job, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(job.on(virtual_stages=3), stage) for stage in (0, 3)] == [2 * 3 + 2 * 4 + 1, 2 * 4 + 1]
    assert in_flight(replace(job, global_batch=2), 0) == 2


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_a_stage_keeps_as_many_micro_batches_as_the_schedules_steps_say(stage: int, chunks: int):
    """In flight: the paper's formulas. Whatever a stage keeps, it has forgotten by the end of its last step."""
    job = Job(LARGE, Parallel(pipeline=4, virtual_stages=chunks), global_batch=100)
    found = steps(stage, 4, 100, chunks)
    assert max(sum(step.kept) for step in found) == in_flight(job, stage)
    assert min(sum(step.kept) for step in found) == 1
    assert set(steps(stage, 4, 12, chunks)) == set(found), "later micro-batches bring nothing new"
    assert max(sum(step.kept) for step in steps(stage, 4, 100, 1, GPIPE)) == 100


def test_what_the_allocator_adds():
    assert slack([512, 1000, 2 * MIB - 512]) == 24
    assert slack([19 * MIB]) == MIB  # too little is left over for another block
    assert slack([10 * MIB + 1]) == 511  # 2 MiB less a few bytes are left, and split off
    assert slack([9 * MIB, 9 * MIB, MIB + 512]) == MIB - 512


TRACED = [
    (Architecture(2, 2, 256, 4, 64, 704, 128, 128, 8192), 1, 1, "copies"),
    (Architecture(2, 2, 512, 8, 64, 704, 512, 128, 4096), 4, 2, "start of backward"),
]


@pytest.mark.parametrize(("architecture", "micro_batch", "tensor", "moment"), TRACED, ids=["copies", "head"])
def test_the_native_engines_own_allocations(architecture, micro_batch, tensor, moment):
    """With fake tensors. Without replicas its gradients come with the first micro-batch and go with the update."""
    micro_batches = 2
    own = options_of_native(micro_batches, micro_batch)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tensor)
    try:
        with FakeTensorMode():
            trainer = TorchTrainer(native_arguments(architecture, **own), Mesh(tp=Axis(tensor, 0, dist.group.WORLD)))
            peak, stays = second_iteration(trainer, architecture, micro_batches * micro_batch)
    finally:
        dist.destroy_process_group()
    sizes = (micro_batch, micro_batches * micro_batch)
    job = Job(architecture, Parallel(tensor), *sizes, attention="fused", dropout=0.0, engine="native")
    found = memory_of(job)
    beyond = found.states["workspace"] + found.states["allocator"]  # a GPU's
    assert found.moment == moment
    assert found.peak - beyond == pytest.approx(peak, rel=0.02)
    assert found.allocated - found.states["gradients"] - beyond == pytest.approx(stays, rel=0.01)


def options_of_native(micro_batches: int, micro_batch: int) -> dict[str, object]:
    own = {"device": torch.device("cpu"), "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.9, "adam_eps": 1e-8}
    return own | {"lr": 1e-4, "clip_grad": 1.0, "micro_batches": micro_batches, "micro_batch_size": micro_batch}


def second_iteration(trainer: TorchTrainer, architecture: Architecture, samples: int) -> tuple[int, int]:
    """The most bytes that are there during a trainer's second iteration, and those after it."""
    from torch.distributed._tools.mem_tracker import MemTracker  # it imports torch's compiler

    lengths = architecture.encoder_length, architecture.decoder_length, architecture.decoder_length
    batch = tuple(torch.ones(samples, length, dtype=torch.int64) for length in lengths)
    trainer.step(batch, 1e-4)
    tracker = MemTracker()
    forward = trainer.forward

    def forward_again(part: tuple[torch.Tensor, ...]) -> torch.Tensor:
        tracker.reset_mod_stats()  # or it refuses a second forward pass
        return forward(part)

    trainer.forward = forward_again
    tracker.track_external(trainer.model, trainer.optimizer)
    with tracker:
        trainer.step(batch, 1e-4)
    peak, stays = (tracker.get_tracker_snapshot(kind)[trainer.args.device]["Total"] for kind in ("peak", "current"))
    return peak, stays


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_fsdp2s_own_allocations(micro_batches: int):
    """Of one rank of four."""
    from native.fsdp2 import FSDP2Trainer

    ranks = 4
    architecture = TRACED[0][0]
    own = options_of_native(micro_batches, 1)
    args = native_arguments(architecture, **own, fsdp2_shard_size=0, fsdp2_keep_parameters=False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        trainer = FSDP2Trainer(args, Mesh.build(1, ranks, 1, args.device, 1))
        peak, stays = second_iteration(trainer, architecture, micro_batches)
    finally:
        dist.destroy_process_group()
    sharding = FullySharded()
    parallel = Parallel(data=ranks)
    options = {"attention": "fused", "dropout": 0.0, "engine": "native", "fully_sharded": sharding}
    job = Job(architecture, parallel, 1, micro_batches * ranks, **options)
    found = memory_of(job)
    assert found.peak - found.states["workspace"] == pytest.approx(peak, rel=0.05)
    assert found.allocated - found.states["workspace"] == pytest.approx(stays, rel=0.01)


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA RTX 5000 Ada Generation", "bf16", 261.1), ("Quadro RTX 5000", "fp16", 89.2),
        ("Quadro RTX 5000", "bf16", None), ("NVIDIA A100 80GB PCIe", "fp16", 312.0), ("", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "fp32", None), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA A10G", "bf16", 70.0), ("NVIDIA H20", "bf16", 148.0), ("NVIDIA H800", "bf16", 989.4),
        ("NVIDIA A800-SXM4-80GB", "bf16", 312.0), ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA B300 SXM6 AC", "bf16", 2250.0),
        ("NVIDIA GB300", "bf16", 2500.0), ("NVIDIA GeForce RTX 2080 Ti", "fp16", 53.8), ("NVIDIA H20-3e", "bf16", None),
        ("NVIDIA GeForce RTX 2080 Ti", "bf16", None), ("AMD Instinct MI250X", "bf16", 191.5), ("MI250", "bf16", None),
        ("NVIDIA RTX 5000 Ada Generation Laptop GPU", "bf16", None),
    ],
)  # fmt: skip
def test_peaks(name, precision, expected):
    assert peak_tflops(name, precision) == expected


def test_rates_of_a_device():
    h100 = device_of("h100")
    v100 = device_of("V100")
    assert (h100.peak("tf32"), h100.peak("fp8"), v100.peak("tf32")) == (494.7e12, 1978.8e12, None)
    assert device_of("NVIDIA H100 80GB HBM3") is h100
    names = ("h20", "h800", "a800", "gb200", "gb300", "b300", "a10g", "RTX 2080 Ti", "mi250x", "RTX 5000", "MI300X")
    found = [device_of(name) for name in names]
    assert [each.memory // 2**30 for each in found] == [96, 80, 80, 186, 279, 270, 24, 11, 64, 16, 192]
    assert [each.nvlink / 1e9 for each in found] == [450, 200, 200, 900, 900, 900, 0, 0, 50, 0, 448]
    assert [each.hopper for each in found] == [True, True, *[False] * 9]
    assert [device_of(name).vector for name in ("b200", "b300", "gb200")] == [75.0, 75.0, 80.0]


def test_every_gpu_has_what_its_family_attains():
    assert {device.family for device in DEVICES.values()} | {CPU.family} == BY_FAMILY.keys()
    sxm = DEVICES["a100"].achievable
    pcie = DEVICES["a100-pcie"].achievable
    b200 = DEVICES["b200"].achievable
    assert 1 > sxm.products > pcie.products > b200.products > 0.4
    assert CPU.achievable.start == 0 and all(device.achievable.start == START for device in DEVICES.values())


def test_a_chance_to_fit_falls_with_what_is_needed():
    size = 80 * 2**30
    chances = [chance_to_fit(share * size, size) for share in (0.5, 0.8, 0.932, 1.1, 1.5)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.99 and chances[-1] < 0.01
    assert chances[2] == pytest.approx(0.5)
    assert chances[1] > SURE > 1 - SURE > chances[3]


def test_a_layout_needs_more_than_is_in_use_while_its_iteration_adds_to_the_states():
    memory = memory_of(Job(LARGE, micro_batch=8))
    assert memory.in_use < memory.needed < 1.1 * memory.in_use


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_of_separate_operators_keep_more(sequence_parallel: bool):
    """Without sequence parallelism, every tensor-parallel rank keeps all of it."""
    parallel = Parallel(tensor=4, sequence_parallel=sequence_parallel)
    model = replace(LARGE, norm="rms")
    fused = Job(model, parallel, engine="unknown", norm_kernel="fused")
    more = layer_bytes(replace(fused, norm_kernel="eager")) - layer_bytes(fused)
    assert more == 2 * 8 * model.encoder_length * model.hidden / (4 if sequence_parallel else 1)
    assert layer_bytes(replace(fused, norm_kernel="")) == layer_bytes(replace(fused, norm_kernel="eager"))


def test_a_head_that_is_not_divided_keeps_all_logits_on_every_rank():
    undivided = Job(LARGE, Parallel(tensor=4), engine="unknown")
    alone = Job(LARGE, Parallel(tensor=1), engine="unknown")
    gathered = 2 * LARGE.output_length * LARGE.padded_vocabulary / 4
    assert logits_bytes(undivided)[0] == logits_bytes(alone)[0] + gathered
