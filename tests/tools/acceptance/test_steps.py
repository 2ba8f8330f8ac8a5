"""Which steps there are, in which order; the device's probes; the plain PyTorch loop."""

import json
import os
from pathlib import Path

import pytest
import torch
from made_runs import made_plan
from support import STRATEGIES
from torch.utils.flop_counter import FlopCounterMode

from t5bench import Problem
from t5bench.costmodel import flops
from t5bench.tools.acceptance import device, results
from t5bench.tools.acceptance.steps import FoundMachine, Step, Steps

SETTINGS = {"ENGINES": "both", "STRATEGIES": "", "MICRO_BATCH_SIZES": "64 32 8"}


class Gpus:
    """The driver's library, as far as FoundMachine asks it."""

    def __init__(self, *names: str) -> None:
        self.gpus = self.listed = names

    def names(self) -> list[str]:
        return list(self.listed)


def steps_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, **settings: str) -> tuple[Steps, list[Step]]:
    monkeypatch.setattr("t5bench.tools.acceptance.gpu.visible", lambda environment: Gpus(*["NVIDIA H200"] * gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    directories = {"WORK_DIR": str(tmp_path), "MEGATRON_DIR": str(tmp_path / "engine")}
    environment = os.environ | SETTINGS | directories | settings
    steps = Steps(FoundMachine(environment, rehearsal=False), environment)
    return steps, list(steps.in_order(tmp_path / "call-1"))


def test_the_most_valuable_steps_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps, ordered = steps_of(tmp_path, monkeypatch, gpus=1)
    names = [step.name for step in ordered]
    assert names[:11] == [
        "device",
        *(f"native-ddp-micro-batch-{size}" for size in (64, 32, 8)),
        *(f"huggingface-micro-batch-{size}" for size in (64, 32, 8)),
        *(f"megatron-ddp-micro-batch-{size}" for size in (32, 8)),
        "noise-native",
        "parity-native",
    ]
    assert names[11:14] == ["noise-megatron", "parity-megatron", "megatron-ddp-micro-batch-64"]
    assert names[-1] == "device-after" and len(names) == len(set(names))
    # On one GPU ZeRO shows its overhead; the others need more.
    trained = [step.name for step in ordered[14:-1] if step.name.startswith("native")]
    assert trained == [
        *(f"native-{name}-micro-batch-8" for name in ("zero1", "zero2", "zero3", "zero3_offload")),
        "native-ddp-without-dropout-micro-batch-8",
        *(f"native-{name}-overlapping-micro-batch-8" for name in ("zero2", "zero3")),
    ]
    measured = [step for step in ordered if "MICRO_BATCH_SIZE" in step.environment and "profile" not in step.name]
    assert {step.environment["GLOBAL_BATCH_SIZE"] for step in measured if step.name[:5] != "noise"} == {"64"}
    megatron = next(step for step in ordered if step.name == "megatron-ddp-micro-batch-8")
    assert [step.name for step in megatron.after] == ["data", "compile-megatron"] and 5 in megatron.passes
    assert megatron.after[-1].seconds > 100
    assert set(next(s for s in ordered if s.name == "parity-native").command[2:]) == set(STRATEGIES)
    # Without nvidia-smi a launcher knows its GPUs by this.
    assert steps.common()["CUDA_VISIBLE_DEVICES"] == "0" and steps.common()["MODEL_PRESET"] == "large"


def test_what_an_earlier_call_compiled_takes_less_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kernel = tmp_path / "engine" / "megatron" / "fused_kernels" / "build" / "sm_90" / "softmax" / "softmax.so"
    kernel.parent.mkdir(parents=True)
    kernel.touch()
    steps, _ = steps_of(tmp_path, monkeypatch, gpus=1)
    assert steps.compiled.seconds < 60


def test_several_gpus_train_every_strategy_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, ordered = steps_of(tmp_path, monkeypatch, gpus=2, ENGINES="native", STRATEGIES="zero1 tensor hybrid")
    names = [step.name for step in ordered]
    assert names[-5:-2] == [
        "native-ddp-all-devices-micro-batch-8", "native-zero1-micro-batch-8", "native-tensor-micro-batch-8"
    ]  # fmt: skip
    assert not any("hybrid" in name or "megatron" in name for name in names)


def test_impossible_sizes_and_a_machine_without_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(Problem, match="of at least 1, found '8 x'"):
        steps_of(tmp_path, monkeypatch, gpus=1, MICRO_BATCH_SIZES="8 x")
    with pytest.raises(Problem, match="there is no strategy 'zero9'"):
        steps_of(tmp_path, monkeypatch, gpus=1, STRATEGIES="zero9")
    monkeypatch.setattr("t5bench.tools.acceptance.gpu.visible", lambda environment: None)
    with pytest.raises(Problem, match="there is no GPU here"):
        FoundMachine(os.environ | {"PATH": ""}, rehearsal=False)


def test_attention_is_probed_for_its_kernels_and_its_dropout():
    found = device.probe_attention("cpu", torch.float32, masked=True, dropout=0.0)
    assert found["mean"] == pytest.approx(1.0, abs=1e-5) and found["error"] == ""
    assert any("scaled_dot_product" in kernel for kernel in found["kernels"])


def test_names_of_attention_kernels_are_told_from_others():
    names = ["void pytorch_flash::flash_fwd_kernel<64>", "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEff)",
             "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x64", "ampere_bf16_s16816gemm",
             "aten::scaled_dot_product_attention",
             "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, float, 9>",
             "void scaled_masked_softmax_warp_forward<__nv_bfloat16, __nv_bfloat16, float, 9>"]  # fmt: skip
    assert len(results.attention_kernels(names)) == 4


def test_the_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its matrix products are those that are counted; full memory is a result, and a failure is not."""
    from t5bench.tools.acceptance import baseline  # late: transformers' T5 takes seconds

    sizes = {"DROPOUT": "0.1", "GLOBAL_BATCH_SIZE": "4", "MICRO_BATCH_SIZE": "2", "TRAIN_ITERS": "6"}
    plan = made_plan(settings=sizes | {"VOCABULARY_MULTIPLE": "4352"})
    torch.backends.cuda.enable_cudnn_sdp(True)
    loop = baseline.Loop(plan)
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # it would fail on Hopper with PyTorch 2.11
    with FlopCounterMode(display=False) as counter:
        loop.iterate()
    assert counter.get_total_flops() == pytest.approx(flops.flops_per_iteration(loop.shape, 4), rel=0.02)

    def measure(*_: object) -> dict:
        raise errors.pop(0)

    monkeypatch.setattr(baseline.Loop, "measure", measure)
    monkeypatch.setattr(baseline, "plan", lambda environ, strategy: plan)
    full = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more")
    for second, status in ((full, 0), (RuntimeError("the compiler failed"), 1)):
        errors, output = [full, second], tmp_path / "points.jsonl"
        assert baseline.main(output, ["eager", "compiled"]) == status
        eager, compiled = map(json.loads, output.read_text().splitlines())
        assert eager["status"] == "out-of-memory" and eager["reason"].endswith("Tried to allocate 2.00 GiB")
        assert compiled["status"] == ("crashed" if status else "out-of-memory")
