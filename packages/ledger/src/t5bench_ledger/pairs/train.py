"""Trains one case in each process, and compares it with plain PyTorch in one process. Prints both curves as JSON.

    torchrun --nproc_per_node 2 train.py '{"base": "zero2", "choices": {"overlap_comm": true, "tied": true}}'

The last number of a curve is the loss after the last update. Every sample has equally many targets, so the gradient
is the mean over all micro-batches of all processes.
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from t5bench.text import guard_streams
from t5bench_ledger.pairs.settings import BY_NAME, PROCESSES, ZERO_STAGES, Case
from t5bench_ledger.shapes import Empty

VOCABULARY = 11
SAMPLES = 2
LENGTH = 3
RATE = 0.02
# Large enough that rounding in a small gradient moves no weight by much.
EPSILON = 1e-2
INITIAL_SCALE_POWER = 8
Batch = tuple[Tensor, Tensor]
Curve = tuple[list[float], list[float]]
"""The losses, then that after the last update; the gradient norms."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp16 with a fixed scale": torch.float16}


class Model(nn.Module):
    """An embedding, three layers, a norm and a head, and what the case adds; its forward pass is the loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(1234)
        self.choices = case.choices
        inner = 2 * case.width + 1
        if self.choices.get("no elements") == "first":
            self.empty = Empty()
        self.embed = nn.Embedding(VOCABULARY, case.width)
        self.first = nn.Linear(case.width, inner)
        self.middle = nn.Linear(inner, inner)
        self.extra = nn.Linear(inner, inner) if "unused" in self.choices else None
        self.norm = nn.LayerNorm(inner)
        self.last = nn.Linear(inner, case.width)
        self.head = nn.Linear(case.width, VOCABULARY, bias=False)
        if self.choices.get("no elements") == "last":
            self.empty = Empty()
        if "tied" in self.choices:
            self.head.weight = self.embed.weight
        frozen = self.choices.get("frozen")
        if frozen:
            getattr(self, str(frozen)).requires_grad_(requires_grad=False)
        self.is_last_micro_batch = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.embed(tokens)))
        for _ in range(2 if "used twice" in self.choices else 1):
            hidden = hidden + torch.tanh(self.through_middle(hidden))
        if self.extra is not None and self.choices["unused"] != "always" and not self.is_last_micro_batch:
            hidden = hidden + self.extra(hidden)
        if "no elements" in self.choices:
            hidden = self.empty(hidden)
        logits = self.head(self.last(self.norm(hidden)))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def through_middle(self, hidden: Tensor) -> Tensor:
        recomputes = self.choices.get("recomputes")
        if recomputes and torch.is_grad_enabled():
            return checkpoint(self.middle, hidden, use_reentrant=recomputes == "reentrant")
        output: Tensor = self.middle(hidden)
        return output


def batches(rank: int) -> Iterator[Batch]:
    """Tokens and targets of each micro-batch of a process, [SAMPLES, LENGTH] each."""
    generator = torch.Generator().manual_seed(5678 + rank)
    while True:
        tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        targets = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        yield tokens, targets


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def groups(case: Case, named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """The optimizer's: one, or two with rates and decays of their own."""
    pairs = list(named)
    if "groups" not in case.choices:
        return [{"params": [parameter for _, parameter in pairs]}]
    slow = [parameter for name, parameter in pairs if name.startswith(("embed", "norm"))]
    fast = [parameter for name, parameter in pairs if not name.startswith(("embed", "norm"))]
    made = [{"params": slow, "lr": RATE / 4, "weight_decay": 0.0}, {"params": fast, "lr": RATE}]
    return [group for group in made if group["params"]]


def optimizer_class(case: Case) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class and what it is made with."""
    match case.choices.get("optimizer", "AdamW"):
        case "SGD":
            return torch.optim.SGD, {"lr": 5 * RATE}
        case "momentum":
            return torch.optim.SGD, {"lr": 5 * RATE, "momentum": 0.9}
        case "Adam":
            return torch.optim.Adam, {"lr": RATE, "eps": EPSILON}
        case "Adagrad":
            return torch.optim.Adagrad, {"lr": RATE, "eps": EPSILON}
    return torch.optim.AdamW, {"lr": RATE, "eps": EPSILON, "weight_decay": 0.1}


def plain(case: Case) -> Curve:
    """Without any wrapper: the batches of all processes in one, weights and sums of gradients in fp32."""
    dtype = DTYPES.get(str(case.choices.get("precision", case.choices.get("mixed precision"))), torch.float32)
    masters = Model(case)
    model = Model(case).to(dtype)
    kind, options = optimizer_class(case)
    optimizer = kind(groups(case, trained(masters)), **options)
    pairs = [(master, model.get_parameter(name)) for name, master in trained(masters)]
    data = [batches(rank) for rank in range(PROCESSES)]
    losses = []
    norms = []
    for _ in range(case.iterations):
        optimizer.zero_grad()
        total = 0.0
        for of_rank in data:
            for number in range(case.micro_batches):
                model.zero_grad()
                model.is_last_micro_batch = number == case.micro_batches - 1
                loss = model(*next(of_rank))
                loss.backward()
                total += float(loss.detach()) / case.micro_batches / PROCESSES
                for master, copy in pairs:
                    if copy.grad is not None:
                        share = copy.grad.float() / case.micro_batches / PROCESSES
                        master.grad = share if master.grad is None else master.grad + share
        norms.append(float(nn.utils.clip_grad_norm_([master for master, _ in pairs], clip_norm(case))))
        optimizer.step()
        model.load_state_dict(masters.state_dict())
        losses.append(total)
    with torch.no_grad():
        after = sum(float(model(*next(of_rank))) for of_rank in data) / PROCESSES
    return [*losses, after], norms


def clip_norm(case: Case) -> float:
    chosen = case.choices.get("clipping", case.choices.get("gradient_clipping", "unset"))
    return float("inf") if chosen == "unset" else float(chosen)


def evaluated(model: nn.Module, batch: Batch) -> float:
    """The loss of a batch, by all processes; what is trained is not to be changed by it."""
    model.eval()
    with torch.no_grad():
        total = model(*batch).detach().float() / PROCESSES
    model.train()
    dist.all_reduce(total)
    return float(total)


# ---- DeepSpeed -------------------------------------------------------------------------------------------------------


def deepspeed_json(case: Case) -> dict[str, Any]:
    by_hand = case.choices.get("scales by hand") == "set_gradient_accumulation_boundary"
    accumulated = 1 if by_hand else case.micro_batches
    config: dict[str, Any] = {
        "train_batch_size": SAMPLES * accumulated * PROCESSES,
        "train_micro_batch_size_per_gpu": SAMPLES,
        "zero_optimization": {"stage": ZERO_STAGES[case.base]},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    config["gradient_clipping"] = case.choices.get("gradient_clipping", 0.0)
    if config["gradient_clipping"] == "unset":  # several releases then clip at 1
        del config["gradient_clipping"]
    for name in ("offload_optimizer", "offload_param"):
        if name in case.choices:
            config["zero_optimization"][name] = {"device": "cpu", "pin_memory": False}
    precision = str(case.choices.get("precision", ""))
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif precision:
        scale = {"loss_scale": 2**INITIAL_SCALE_POWER} if "fixed" in precision else {"loss_scale": 0}
        config["fp16"] = {"enabled": True, "initial_scale_power": INITIAL_SCALE_POWER, **scale}
    if "optimizer in the JSON" in case.choices:
        kind, options = optimizer_class(case)
        config["optimizer"] = {"type": kind.__name__, "params": options}
        if issubclass(kind, torch.optim.Adam):
            config["optimizer"]["params"]["torch_adam"] = True
    for name, value in case.choices.items():
        place = config
        for key in BY_NAME[name].place[:-1]:
            place = place.setdefault(key, {})
        for key in BY_NAME[name].place[-1:]:
            place[key] = value
    return config


def begin_as_plain(model: nn.Module, case: Case) -> None:
    """zero.Init draws a model's first weights in fp16 or bf16, which gives others than in fp32."""
    import deepspeed

    for parameter, first in zip(model.parameters(), Model(case).parameters(), strict=True):
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
            if dist.get_rank() == 0:
                parameter.copy_(first)


def make_engine(case: Case, config: dict[str, Any]) -> Any:
    import deepspeed

    with contextlib.ExitStack() as stack:
        if "zero.Init" in case.choices:
            stack.enter_context(deepspeed.zero.Init(config_dict_or_path=config))
        model = Model(case)
    if "zero.Init" in case.choices:
        begin_as_plain(model, case)
    grouped = groups(case, trained(model))
    optimizer = None
    if "optimizer in the JSON" not in case.choices:
        kind, options = optimizer_class(case)
        optimizer = kind(grouped, **options)
    own = deepcopy(config)  # some releases take out of it what they have read
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=own, model_parameters=grouped)
    return engine


def backward(engine: Any, case: Case, loss: Tensor, *, is_last: bool) -> None:
    """And the step, after each micro-batch or the last one."""
    match case.choices.get("scales by hand"):
        case "set_gradient_accumulation_boundary":
            engine.set_gradient_accumulation_boundary(is_last)
            engine.backward(loss / case.micro_batches)
            if is_last:
                engine.step()
        case "scale_wrt_gas":
            engine.backward(loss / case.micro_batches, scale_wrt_gas=False)
            engine.step()
        case _:
            engine.backward(loss)
            engine.step()


def with_deepspeed(case: Case) -> Curve:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # Its all-reduce on a CPU is for inference alone, and would first be compiled.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # A CPU without instructions for fp16 computes it all the same, only slower.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo", verbose=False)
    config = deepspeed_json(case)
    engine = make_engine(case, config)
    data = batches(dist.get_rank())
    others = batches(PROCESSES)
    losses = []
    norms = []
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)  # every process must name the same directory
        for iteration in range(case.iterations):
            total = torch.zeros(())
            if "zero_grad" in case.choices:
                engine.zero_grad()
            for number in range(case.micro_batches):
                is_last = number == case.micro_batches - 1
                engine.module.is_last_micro_batch = is_last
                loss = engine(*next(data))
                total += loss.detach().float() / case.micro_batches / PROCESSES
                backward(engine, case, loss, is_last=is_last)
                if case.choices.get("evaluates") == "between micro-batches":
                    evaluated(engine, next(others))
                if case.choices.get("saves") == "between micro-batches" and not is_last:
                    engine.save_checkpoint(names[0])
            dist.all_reduce(total)
            losses.append(float(total))
            norm = engine.get_global_grad_norm()
            norms.append(float("nan") if norm is None else float(norm))
            if case.choices.get("evaluates") == "between steps":
                evaluated(engine, next(others))
            if case.choices.get("saves") == "between steps":
                engine.save_checkpoint(names[0])
            if "resumes" in case.choices and iteration == 0:
                engine.save_checkpoint(names[0])
                dist.barrier()
                engine = make_engine(case, config)
                engine.load_checkpoint(names[0])
        engine.module.is_last_micro_batch = True
        losses.append(evaluated(engine, next(data)))
        dist.barrier()
    return losses, norms


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def wrapped_by_ddp(case: Case, model: Model) -> nn.Module:
    names = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters", "broadcast_buffers")
    options: dict[str, Any] = {name: case.choices[name] for name in names if name in case.choices}
    made = nn.parallel.DistributedDataParallel(model, **options)
    if "allreduce_hook" in case.choices:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        made.register_comm_hook(None, allreduce_hook)
    return made


def wrapped_by_fsdp2(case: Case, model: Model) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (PROCESSES,))}
    if "reshard_after_forward" in case.choices:
        options["reshard_after_forward"] = case.choices["reshard_after_forward"]
    if "mixed precision" in case.choices:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "CPUOffloadPolicy" in case.choices:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    layers = [model.first, model.middle, model.last]
    if "shards the whole" not in case.choices:
        for layer in layers:
            fully_shard(layer, **options)
    made = fully_shard(model, **options)
    if "set_gradient_divide_factor" in case.choices:
        for module in made.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(float(case.choices["set_gradient_divide_factor"]))
    if "prefetches" in case.choices and "shards the whole" not in case.choices:
        model.first.set_modules_to_forward_prefetch([model.middle])
        model.last.set_modules_to_backward_prefetch([model.middle])
    return made


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    kind, options = optimizer_class(case)
    options |= {name: case.choices[name] for name in ("foreach", "fused") if name in case.choices}
    named = [(name.removeprefix("module."), parameter) for name, parameter in trained(model)]
    if "ZeroRedundancyOptimizer" not in case.choices:
        return kind(groups(case, named), **options)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    as_view = case.choices["ZeroRedundancyOptimizer"] == "parameters_as_bucket_view"
    made: torch.optim.Optimizer = ZeroRedundancyOptimizer(
        groups(case, named), optimizer_class=kind, parameters_as_bucket_view=as_view, **options
    )
    return made


@contextlib.contextmanager
def synchronising(case: Case, model: Any, *, is_last: bool) -> Iterator[None]:
    """Gradients are summed over the processes in the last micro-batch, or in each."""
    every = is_last or "synchronises every micro-batch" in case.choices
    if case.base == "ddp":
        with contextlib.nullcontext() if every else model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(every)
    model.set_is_last_backward(is_last)
    if "reshards after the last backward alone" in case.choices:
        model.set_reshard_after_backward(is_last)
    yield


def with_torch(case: Case) -> Curve:
    dist.init_process_group("gloo")
    own = Model(case)
    model = wrapped_by_ddp(case, own) if case.base == "ddp" else wrapped_by_fsdp2(case, own)
    optimizer = optimizer_of(case, model)
    data = batches(dist.get_rank())
    others = batches(PROCESSES)
    is_ddp_in_bf16 = case.base == "ddp" and "mixed precision" in case.choices
    losses = []
    norms = []
    # With set_gradient_divide_factor(1) the sum over the processes is not divided by their number.
    share = case.micro_batches * (PROCESSES if "set_gradient_divide_factor" in case.choices else 1)
    for _ in range(case.iterations):
        optimizer.zero_grad(set_to_none=bool(case.choices.get("set_to_none", True)))
        total = torch.zeros(())
        for number in range(case.micro_batches):
            is_last = number == case.micro_batches - 1
            own.is_last_micro_batch = is_last
            with synchronising(case, model, is_last=is_last):
                with torch.autocast("cpu", torch.bfloat16, enabled=is_ddp_in_bf16):
                    loss = model(*next(data))
                (loss / share).backward()
            total += loss.detach() / case.micro_batches / PROCESSES
            if case.choices.get("evaluates") == "between micro-batches":
                evaluated(model, next(others))
        dist.all_reduce(total)
        losses.append(float(total))
        norm = nn.utils.clip_grad_norm_([parameter for _, parameter in trained(model)], clip_norm(case))
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        if case.choices.get("evaluates") == "between steps":
            evaluated(model, next(others))
    own.is_last_micro_batch = True
    with torch.autocast("cpu", torch.bfloat16, enabled=is_ddp_in_bf16):
        losses.append(evaluated(model, next(data)))
    return losses, norms


def main() -> None:
    case = Case(**json.loads(sys.argv[1]))
    losses, norms = with_deepspeed(case) if case.base in ZERO_STAGES else with_torch(case)
    if os.environ["RANK"] == "0":
        expected, expected_norms = plain(case)
        printed = {"losses": losses, "expected": expected, "norms": norms, "expected_norms": expected_norms}
        print(json.dumps(printed), flush=True)


if __name__ == "__main__":
    guard_streams()
    main()
