"""What the native engine sets up on a GPU, as far as a machine without one can tell."""

from argparse import Namespace
from collections.abc import Iterator

import pytest
import torch

from native.train import take_device

GPU = torch.device("cuda", 1)
FUSED = ("flash_sdp", "mem_efficient_sdp", "cudnn_sdp")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    before = {name: getattr(torch.backends.cuda, f"{name}_enabled")() for name in FUSED}
    yield
    for name, enabled in before.items():
        getattr(torch.backends.cuda, f"enable_{name}")(enabled)


@pytest.mark.parametrize(("dtype", "remain"), [(torch.float32, False), (torch.bfloat16, True)])
def test_fp32_takes_the_exact_attention_kernel(dtype: torch.dtype, remain: bool):
    for name in FUSED:
        getattr(torch.backends.cuda, f"enable_{name}")(True)
    take_device(Namespace(device=GPU, dtype=dtype, distributed_backend="nccl"))
    assert [getattr(torch.backends.cuda, f"{name}_enabled")() for name in FUSED] == [remain] * len(FUSED)
    assert torch.backends.cuda.math_sdp_enabled()


def test_nccl_is_told_its_device_and_gloo_is_not():
    for backend, told in (("nccl", GPU), ("gloo", None)):
        assert take_device(Namespace(device=GPU, dtype=torch.bfloat16, distributed_backend=backend)) == told
    cpu = Namespace(device=torch.device("cpu"), dtype=torch.float32, distributed_backend="gloo")
    assert take_device(cpu) is None
