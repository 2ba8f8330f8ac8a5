"""The norm of gradients on a CPU: as exact as in float64."""

import torch

from native.parallel import norm_of


def test_a_norm_of_many_elements_is_exact():
    """Of large and small tensors, vectors, and what FSDP2 leaves to a process that has no row of a tensor."""
    torch.manual_seed(0)
    words = torch.randn(30_000, 1000) * torch.logspace(0, -4, 30_000).unsqueeze(1)  # an fp32 sum is off by 1e-3
    tensors = [words, torch.randn(40, 8), torch.randn(16), torch.empty(0, 8), torch.empty(0)]
    exact = torch.cat([tensor.flatten().double() for tensor in tensors]).square().sum().sqrt()
    found = norm_of(tensors)
    assert found.dtype == torch.float32 and found.shape == ()
    assert abs(found.double() / exact - 1) < 1e-7
