"""Anybody's model: public recipes are proved or faulted, and mistakes that are planted into them are found."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

from t5bench_prove import recipes
from t5bench_prove.any_model import prove_step
from t5bench_prove.mesh import MeshAxes

pytestmark = pytest.mark.slow
BY_SOURCE = {one.source: one.arguments for one in recipes.RECIPES}
QWEN3 = "Transformers: Qwen3's tp_plan"


def found(source: str, **changed: Any) -> list[str]:
    proof = prove_step(**BY_SOURCE[source] | changed)
    assert proof.not_followed == []
    assert proof.parameters
    return proof.findings


@pytest.mark.parametrize("source", [source for source in BY_SOURCE if source != QWEN3])
def test_a_public_recipe_is_proved(source: str):
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # DeepSpeed keeps the groups of an earlier one
        proof = pool.apply(recipes.proved, (list(BY_SOURCE).index(source),))
    assert proof.is_proved and proof.parameters, str(proof)


def test_qwen3s_norms_of_heads_get_other_gradients_on_each_rank():
    findings = found(QWEN3)
    assert len(findings) == 4
    assert all("self_attn.q_norm" in one or "self_attn.k_norm" in one for one in findings)


def gradients_of_a_rank(rank: int, store: str, kind: str, queue: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    torch.manual_seed(0)
    model = recipes.transformers_plan(recipes.transformers_model(kind)(), mesh)
    tokens = recipes.tokens()
    recipes.loss_of(model(tokens), tokens).backward()
    whole = {name: one.grad for name, one in model.named_parameters() if not hasattr(one, "placements")}
    queue.put((rank, {name: gradient.double().sum().item() for name, gradient in whole.items()}))
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_show_what_is_said_of_qwen3(tmp_path: Any):
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (str(tmp_path / "store"), "Qwen3", queue)
    processes = multiprocessing.spawn(gradients_of_a_rank, arguments, nprocs=2, join=False)
    first, second = (gradients for _, gradients in sorted(queue.get() for _ in range(2)))
    processes.join()
    apart = {name for name in first if abs(first[name] - second[name]) > 1e-6 * (abs(first[name]) + 1e-3)}
    assert apart == {name for name in first if "q_norm" in name or "k_norm" in name}


# ---- planted mistakes ------------------------------------------------------------------------------------------------


def test_a_missing_sum_behind_divided_weights(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recipes.Copy, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))
    findings = found("picotron: tensor and data parallelism by hand")
    assert "embedding.weight: ranks along tensor have a copy, and get different gradients" in findings


def test_a_parameter_that_is_left_out_of_the_reduction():
    def step(model: Any, optimizer: Any, batch: Tensor) -> None:
        recipes.loss_of(model(batch), batch).backward()
        for name, parameter in model.named_parameters():
            parameter.grad /= dist.get_world_size(model.data_group)
            if name != "head.weight":
                dist.all_reduce(parameter.grad, group=model.data_group)
        optimizer.step()
        optimizer.zero_grad()

    findings = found("picotron: tensor and data parallelism by hand", step=step)
    assert "head.weight: its gradient is not summed along data" in findings
    assert all("head.weight" in finding for finding in findings)


def test_a_micro_batch_that_is_lost():
    def step(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            recipes.loss_of(model(batch), batch).backward()
        optimizer.step()

    findings = found("accelerate: FSDP2, reduced with the last micro-batch", step=step)
    assert "norm.weight: its gradient lacks micro-batch 1" in findings


def test_the_first_micro_batch_is_reduced_instead_of_the_last():
    def step(model: Any, optimizer: Any, batches: list[Tensor]) -> None:
        for number, batch in enumerate(batches):
            model.require_backward_grad_sync = number == 0
            recipes.loss_of(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    findings = found("nanoGPT: DDP, reduced with the last micro-batch", step=step)
    assert "norm.weight: ranks along data have a copy, and get different gradients" in findings


def test_gradients_that_are_reduced_in_bf16():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def wrap(model: Any, mesh: Any) -> nn.Module:
        return recipes.titan_fully_shard(model, mesh["data"], mp_policy=MixedPrecisionPolicy(torch.bfloat16))

    findings = found("torchtitan: FSDP2 in bf16, reduced in fp32", wrap=wrap)
    assert "norm.weight: its gradient is summed in bfloat16, though the parameter is not" in findings


def test_an_optimizer_that_has_other_parameters():
    other = nn.Linear(2, 2)
    findings = found("torchtitan: HSDP", make_optimizer=lambda model: torch.optim.AdamW(other.parameters()))
    assert findings == ["no gradient of any parameter reaches the optimizer"]


class LeavesTheFirst(torch.optim.SGD):
    """Has the gradients of all parameters, and updates all but the first."""

    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0]
        gradient = first.grad
        first.grad = None
        super().step(closure)
        first.grad = gradient


@pytest.mark.parametrize(
    "source", ["nanoGPT: DDP, reduced with the last micro-batch", "picotron: tensor and data parallelism by hand"]
)
def test_a_step_that_leaves_a_parameter_as_it_was(source: str):
    (finding,) = found(source, make_optimizer=lambda model: LeavesTheFirst(model.parameters(), 0.1))
    assert "the optimizer has its gradient, and the step leaves all or some of it as it was" in finding


def test_groups_of_a_mesh_are_named():
    axes = MeshAxes(0, {"data": 2, "context": 2, "tensor": 2}, frozenset({"data"}))
    assert axes.name((0, 1)) == "tensor"
    assert axes.name((0, 2)) == "context"
    assert axes.name((1, 5)) == "data"
    assert axes.name((0, 2, 4, 6)) == "data+context"
    assert axes.name((0, 3)) == axes.name((0, 1, 2)) == ""
