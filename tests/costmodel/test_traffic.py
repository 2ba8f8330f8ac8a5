"""Groups, collectives, schedule and time of the model, against the engines and against arithmetic done by hand."""

import importlib.util
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from t5bench.costmodel import flops, schedule, time, traffic
from t5bench.costmodel.job import Architecture, FullySharded, Job, Parallel, Zero
from t5bench.costmodel.machine import DEVICES, Host, Link, Machine

LARGE = Architecture(24, 24, 1024, 16, 64, 2816, 512, 128, 32128)
PARAMETERS = 612_998_528
TWO_NODES = Job(LARGE, Parallel(data=2, devices_per_node=1), 1, 16)
SLOW = Machine(DEVICES["rtx5000-ada"], Link(24e9), Link(10e9 / 8, 40e-6), 1)


def megatrons_groups(engine: Path, parallel: Parallel, monkeypatch: pytest.MonkeyPatch) -> dict[str, set]:
    """What the engine's own module makes on every rank, with a torch.distributed that only notes it."""
    for name, contents in {"engine": {"__path__": []}, "engine.utils": {"GlobalMemoryBuffer": object}}.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(contents)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: parallel.world)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: tuple(ranks))
    path = engine / "megatron" / "core" / "parallel_state.py"
    found = defaultdict(set)
    for rank in range(parallel.world):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        spec = importlib.util.spec_from_file_location("engine.parallel_state", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        split = parallel.decoder_stage if parallel.pipeline > 1 else None
        module.initialize_model_parallel(parallel.tensor, parallel.pipeline, pipeline_model_parallel_split_rank=split)
        names = {"tensor": "TENSOR_MODEL_PARALLEL", "data": "DATA_PARALLEL", "pipeline": "PIPELINE_MODEL_PARALLEL",
                 "model": "MODEL_PARALLEL", "embedding": "EMBEDDING", "position": "POSITION_EMBEDDING"}  # fmt: skip
        for kind, name in names.items():
            found[kind] |= {group for group in [getattr(module, f"_{name}_GROUP")] if group}
    return found


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 1, 2), (1, 6, 2, 2), (2, 4, 8, 1)], ids=str)
def test_groups_are_megatrons(megatron_dir: Path, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    parallel = Parallel(*sizes)
    made = megatrons_groups(megatron_dir, parallel, monkeypatch)
    assert made == {kind: set(members) for kind, members in traffic.groups(parallel).items() if kind in made}


def sent(job: Job, backend: str = "nccl") -> list[float]:
    return traffic.node_bytes(job, traffic.collectives_of(job), backend)


def test_a_node_sends_what_its_rings_carry_to_other_nodes():
    """TP x PP on two nodes of two GPUs: slices talk inside, the stages across, once for each slice."""
    hybrid = TWO_NODES.on(tensor=2, pipeline=2, data=1, devices_per_node=2)
    token = 2 * 1024
    assert sent(hybrid)[0] == pytest.approx(2 * (16 * 512 * token + 4 * (32128 // 2 + 512) * 1024), rel=1e-5)
    four = TWO_NODES.on(data=4, devices_per_node=2)
    assert sent(four) == pytest.approx([4 * 2 * 3 / 4 * PARAMETERS] * 2, rel=1e-6)
    # gloo scatters by an all-reduce of everything. The first tensor-parallel rank hands out the batch with its masks.
    zero3 = replace(TWO_NODES, zero=Zero(3))
    tensor = TWO_NODES.on(data=1, tensor=2)
    assert sent(zero3, "gloo")[0] - sent(zero3)[0] == pytest.approx(8 * PARAMETERS, rel=0.01)
    masks = 16 * 8 * (512 + 3 * 128 + 512 * 512 + 128 * 128 + 128 * 512)
    assert sent(tensor)[0] == pytest.approx(sent(tensor)[1] + masks)


def test_two_unequal_stages():
    found = schedule.one_f_one_b((2, 1), (4, 2), 2)
    assert [(s.stage, s.way, s.micro_batch, s.start, s.end) for s in found] == [
        (0, "F", 0, 0, 2), (0, "F", 1, 2, 4), (1, "F", 0, 2, 3), (1, "B", 0, 3, 5),
        (0, "B", 0, 5, 9), (1, "F", 1, 5, 6), (1, "B", 1, 6, 8), (0, "B", 1, 9, 13),
    ]  # fmt: skip
    assert schedule.draw(found, 13) == "stage 0   0011.aaaabbbb\nstage 1   ..0aa1bb....."


def test_gradients_of_weights_fill_the_second_stages_bubble():
    """As above, with half of a backward pass for the weights; the first stage gets its gradients sooner."""
    found = schedule.one_f_one_b((2, 1), (4, 2), 2, kind=schedule.ZERO_BUBBLE, weights=(2, 1))
    assert schedule.draw(found, 12) == "stage 0   0011aaAAbbBB\nstage 1   ..0a1bAB...."


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (8, 1), (4, 2), (4, 3)])
def test_equal_stages_have_the_known_bubble(stages: int, chunks: int):
    """(p - 1) / v micro-batches' time (https://arxiv.org/abs/2104.04473)."""
    found = schedule.duration([1.0] * stages, [2.0] * stages, 16, chunks=chunks)
    assert found == pytest.approx(3 * (16 + (stages - 1) / chunks))


@pytest.mark.parametrize("transfer", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("forward", [(1, 2, 1, 3), (5, 1, 1)], ids=str)
def test_long_schedules_are_extrapolated(forward: tuple[float, ...], transfer: float):
    backward = [2 * seconds for seconds in forward]
    whole = max(slot.end for slot in schedule.one_f_one_b(forward, backward, 96, transfer))
    assert schedule.duration(forward, backward, 96, transfer) == pytest.approx(whole)
    options = {"kind": schedule.ZERO_BUBBLE, "weights": forward}
    whole = max(slot.end for slot in schedule.one_f_one_b(forward, backward, 96, transfer, **options))
    assert schedule.duration(forward, backward, 96, transfer, **options) == pytest.approx(whole)


def test_operations_with_recomputation():
    """Full recomputation does the layers a second time, selective recomputation attention's core."""
    none, selective, full = (
        flops.hardware_flops(replace(TWO_NODES, recompute=way)) for way in ("none", "selective", "full")
    )
    assert full - none == pytest.approx(none / 3 - 2 * 32128 * 1024 * 128 * 16)
    assert selective - none == 16 * 24 * 4 * 1024 * (512**2 + 128**2 + 128 * 512)


def test_nothing_hides_the_last_bucket_of_ddp():
    """It holds the tied embedding, whose gradient ends the backward pass."""
    rows = list(traffic.collectives_of(replace(TWO_NODES, engine="native", precision="fp32")))
    (last,) = [row for row in rows if not row.overlap]
    assert last.count == 1 and last.bytes > 4 * LARGE.padded_vocabulary * LARGE.hidden
    assert sum(row.count * row.bytes for row in rows) == 4 * PARAMETERS
    assert sum(row.count for row in rows) > 10


def test_collectives_wait_for_stragglers_as_long_as_chance_delays_add_up():
    """With the root of what is computed in between, so that four times as many wait twice as long in all."""
    fast = replace(SLOW, between=Link(1e15))
    straggling = replace(fast, between=Link(1e15, straggling=0.1))

    def waits(job: Job) -> float:
        return time.iteration(job, straggling, "gloo").total - time.iteration(job, fast, "gloo").total

    ddp = replace(TWO_NODES, engine="native", precision="fp32")
    computing = time.iteration(ddp, fast, "gloo")
    assert waits(ddp) == pytest.approx(0.1 * (computing.computing + computing.host) ** 0.5)
    zero3 = replace(ddp, zero=Zero(3))
    meetings = 1 + sum(row.count for row in traffic.collectives_of(zero3) if row.when.startswith("each"))
    computing = time.iteration(zero3, fast, "gloo")
    assert meetings > 100
    assert waits(zero3) == pytest.approx(0.1 * (meetings * (computing.computing + computing.host)) ** 0.5)
    # A pipeline's messages wait as its schedule says.
    pipeline = replace(TWO_NODES.on(data=1, pipeline=2), engine="native", precision="fp32")
    assert waits(pipeline) < 2 * waits(ddp)
    alone = replace(ddp, parallel=Parallel(devices_per_node=1))
    assert waits(alone) == 0


def test_a_run_calibrates_all_others():
    """A machine that is three times slower at everything but its network is recognised from any strategy."""
    layouts = TWO_NODES.on(data=1, pipeline=2), TWO_NODES.on(data=1, tensor=2)
    for job in (TWO_NODES, replace(TWO_NODES, zero=Zero(3)), *layouts):
        seconds = time.iteration(job, SLOW, slower=3.0).total
        assert time.calibrated(job, SLOW, seconds) == pytest.approx(3.0, rel=1e-6)
    with pytest.raises(ValueError, match="sending alone takes"):
        time.calibrated(TWO_NODES, SLOW, 0.1)


def test_communication_is_hidden_behind_computing():
    """At most as long as it computes, though gathers and gradients share a backward pass; DDP in the native engine."""
    zero3 = time.iteration(replace(TWO_NODES, zero=Zero(3, overlap=True, reuse_distance=0)), SLOW)
    assert 0 < zero3.hidden <= zero3.computing + zero3.host
    native, other = (replace(TWO_NODES, engine=engine, precision="fp32") for engine in ("native", "megatron"))
    hidden = time.iteration(native, SLOW)
    assert hidden.hidden > 0 and hidden.communication < time.iteration(other, SLOW).communication
    # With 16-bit copies and several micro-batches its gradients are there only when backward has ended.
    assert time.iteration(replace(native, precision="bf16"), SLOW).hidden == 0
    assert time.iteration(replace(native, precision="bf16", global_batch=2), SLOW).hidden > 0


def test_a_products_time_is_its_flops_at_what_the_gpu_attains_and_its_start():
    """A layer of a GPT by hand, in 16 bits and fp8: four linear products, attention in one kernel, and their starts."""
    model = Architecture(0, 1, 8192, 64, 128, 32768, 0, 8192, 128, family="gpt", head_bias=False)
    job = Job(model, Parallel(), 1, 1, attention="flash")
    for name, precision, peak in (("b200", "bf16", 2250e12), ("b200", "fp8", 4500e12), ("a100", "bf16", 312e12)):
        device = DEVICES[name]
        share = device.achievable.fp8 if precision == "fp8" else device.achievable.products
        _, core = flops.layer_multiply_adds(model, decoder=True)
        attention = device.achievable.products * device.peak("bf16")
        products = 2 * core / attention + 5 * device.achievable.start
        for inner, columns in ((8192, 3 * 8192), (8192, 8192), (8192, 32768), (32768, 8192)):
            filled = time.Product(8192, inner, columns).filled(device)
            products += 2 * 8192 * inner * columns / (share * peak * filled)
        passes = time.BLOCK_PASSES * 2 * 8192 + time.FFN_PASSES * 32768 + 2 * 3 * 8192
        elements = 8192 * passes * 2 / (device.bandwidth * time.ELEMENTS)
        seconds = time._layer_seconds(replace(job, precision=precision), True, device).forward
        assert seconds == pytest.approx(products + elements), (name, precision)


def test_hugging_faces_modules_take_longer_than_fused_ones():
    """By what T5LayerNorm, gelu_new and softmax add; most in 16 bits, where they convert to fp32 and back."""
    gated = replace(LARGE, gated=True, norm="rms")
    slower = {}
    for precision in ("bf16", "fp32"):
        fused = Job(gated, Parallel(), 16, 16, precision=precision, engine="megatron-core")
        eager = replace(fused, engine="huggingface")
        one, other = (time._layer_seconds(job, False, DEVICES["a100"]).forward for job in (fused, eager))
        slower[precision] = other / one
    assert slower["bf16"] > 1.5 and 1 < slower["fp32"] < slower["bf16"]
    plain = replace(LARGE, norm="rms")  # with a fused activation, and softmax in fp32
    fused = Job(plain, Parallel(), 16, 16, engine="megatron-core")
    more = 16 * 512 * (2 * 16 * 1024 + 9.5 * 16 * 512) * 2 / (DEVICES["a100"].bandwidth * time.ELEMENTS)
    one, other = (
        time._layer_seconds(job, False, DEVICES["a100"]).forward
        for job in (fused, replace(fused, engine="huggingface"))
    )
    assert other - one == pytest.approx(more)


def test_a_cpu_waits_for_what_cuda_streams_hide():
    """FSDP2's collectives. On any device, ZeRO-3's first gather of each pass, as nothing has been computed yet."""
    sharded = replace(TWO_NODES, engine="native", fully_sharded=FullySharded())
    assert time.iteration(sharded, SLOW, "gloo").hidden == 0 < time.iteration(sharded, SLOW, "nccl").hidden
    gathers = [row for row in traffic.collectives_of(replace(TWO_NODES, zero=Zero(3))) if row.what == "parameters"]
    waited_for = {row.when: row.count for row in gathers if not row.overlap}
    assert waited_for == dict.fromkeys(("each forward", "each backward"), TWO_NODES.micro_batches)
    assert all(row.count > TWO_NODES.micro_batches for row in gathers if row.overlap)


def test_a_sender_waits_in_megatrons_pipeline_alone():
    """The busiest stage sends a message for every micro-batch."""
    pipeline = replace(TWO_NODES, parallel=Parallel(pipeline=2, devices_per_node=1))
    (send,) = (row for row in traffic.collectives_of(pipeline) if row.kind == "send")
    message = time.collective_seconds(send, pipeline, SLOW)
    machine = replace(SLOW, measured_host=Host(1e-9))  # as good for either engine
    native, megatron = (time.iteration(replace(pipeline, engine=engine), machine) for engine in ("native", "megatron"))
    assert megatron.communication - native.communication == pytest.approx(pipeline.micro_batches * message)
    assert megatron.total > native.total


def test_gloos_gather_between_two_takes_longer_than_its_bytes():
    def seconds(ranks: int) -> float:
        job = replace(TWO_NODES, parallel=Parallel(data=ranks, devices_per_node=1))
        row = traffic.Collective("parameters", "data", "all-gather", 1, 1e6 * ranks / (ranks - 1), "first forward")
        return time.collective_seconds(row, job, replace(SLOW, between=Link(1e9, is_measured=True)), "gloo")

    assert (seconds(2), seconds(4)) == pytest.approx((1.5e-3, 1e-3))


def test_pieces_that_overlap_have_the_same_bytes_and_one_is_waited_for():
    gpt = Architecture(0, 8, 256, 4, 64, 1024, 0, 128, 8192, family="gpt")
    parallel = Parallel(tensor=4, data=2, sequence_parallel=True)
    whole = Job(gpt, parallel, global_batch=8, distributed_optimizer=True, engine="transformer-engine")
    pieces = replace(whole, overlaps=True)

    def sent(job: Job, group: str) -> tuple[float, float]:
        """All bytes, and those that all ranks wait for."""
        rows = [row for row in traffic.collectives_of(job) if row.group == group]
        return sum(row.count * row.bytes for row in rows), sum(row.count * row.bytes for row in rows if not row.overlap)

    for group, count in (("tensor", 4), ("data", 8)):
        all_bytes, waited_for = sent(pieces, group)
        assert all_bytes == pytest.approx(sent(whole, group)[0])
        rest = sum(
            row.count * row.bytes
            for row in traffic.collectives_of(whole)
            if row.group == group and row.what in ("embedding", "head", "cross entropy")
        )
        assert waited_for - rest == pytest.approx((all_bytes - rest) / count)
    assert time.iteration(pieces, SLOW).total < time.iteration(whole, SLOW).total
