"""Loops that are not ours, which StepTrace traces: DDP, FSDP2, ZeRO, tensor parallelism, Trainer, accelerate.

python -m torch.distributed.run --nproc-per-node 2 loops.py DIRECTORY KIND[=MISTAKE][@SEED,WIDTH] ...
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

FILE = Path(__file__).parents[1] / "src" / "training_comparison" / "step_trace.py"
SPECIFICATION = importlib.util.spec_from_file_location("step_trace", FILE)  # a file alone, as others would copy it
MODULE = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(MODULE)
OwnPart = MODULE.OwnPart
StepTrace = MODULE.StepTrace

STEPS = 6
SAMPLES = 8  # of a step, of all ranks together
CHOSEN = {"seed": 0, "width": 16}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = CHOSEN["width"]
        self.embedding = nn.Embedding(32, width)
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 32)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(input_ids)
        x = self.norm(x + self.second(F.gelu(self.first(x))))
        logits = self.head(x)
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def make_model() -> Model:
    torch.manual_seed(CHOSEN["seed"])
    return Model()


def samples(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step + 1000 * CHOSEN["seed"])
    tokens = torch.randint(32, (SAMPLES, 9), generator=generator)
    own = tokens.chunk(world)[rank]
    return own[:, :-1], own[:, 1:]


def plain(directory: str, mistake: str, wrap: Callable[[Model], nn.Module], replicas: int = 0, **options: Any) -> None:
    """A loop in PyTorch, such as torchtitan's: forward, backward, clipping, update.

    replicas: processes that read other samples; 0 if all do.
    """
    rank = dist.get_rank()
    world = replicas or dist.get_world_size()
    own = rank % world
    inner = make_model()
    modules = {name: getattr(inner, name) for name in ("embedding", "norm", "head")}
    model = wrap(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    trace = StepTrace(directory, model, **options)
    trace.watch(modules, lambda number: own * SAMPLES // world, world)
    for step in range(1, STEPS + 1):
        inputs, labels = samples(step, own, world)
        if mistake == "forward" and step == 2 and rank == world - 1:
            inner.norm.eps = 1e-3
        is_wrong = mistake == "no reduction" and step == 3
        with model.no_sync() if is_wrong and hasattr(model, "no_sync") else nullcontext():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
            loss.backward()
        if mistake == "scale" and step >= 2:
            named = dict(model.named_parameters())
            next(value for name, value in named.items() if name.endswith("second.weight")).grad.mul_(2)
        trace.step(step, loss)
        clip(model, options)
        optimizer.step()
        optimizer.zero_grad()
        if mistake == "one rank" and step == 3 and rank == 1:
            with torch.no_grad():
                next(iter(model.parameters())).add_(1e-3)


def clip(model: nn.Module, options: dict[str, Any]) -> None:
    """To a norm of 1; PyTorch's own knows nothing of slices."""
    divided = options.get("parts", lambda name: None)
    square = torch.zeros(())
    for name, parameter in model.named_parameters():
        own = MODULE.gathered(parameter.grad).square().sum()
        if divided(name):
            dist.all_reduce(own)
        square += own
    factor = min(1.0, 1.0 / (float(square.sqrt()) + 1e-6))
    for parameter in model.parameters():
        parameter.grad.mul_(factor)


def ddp(directory: str, mistake: str) -> None:
    plain(directory, mistake, nn.parallel.DistributedDataParallel)


def one(directory: str, mistake: str) -> None:
    plain(directory, mistake, lambda model: model)


def fsdp2(directory: str, mistake: str) -> None:
    from torch.distributed.fsdp import fully_shard

    def wrap(model: Model) -> nn.Module:
        for part in (model.first, model.second):
            fully_shard(part)
        return fully_shard(model)

    plain(directory, mistake, wrap)


def tensor(directory: str, mistake: str) -> None:
    """DTensor's tensor parallelism: both ranks read the same samples."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    how = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    plain(directory, mistake, lambda model: parallelize_module(model, mesh, how), replicas=1)


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Sliced(Model):
    """Tensor parallelism by hand: the first layer's rows and the second's columns are divided."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(input_ids)
        inner = F.gelu(self.first(Enter.apply(x)))
        x = self.norm(x + Leave.apply(F.linear(inner, self.second.weight)) + self.second.bias)
        return self.head(x)


def sliced(directory: str, mistake: str) -> None:
    def wrap(model: Model) -> nn.Module:
        rank = dist.get_rank()
        world = dist.get_world_size()
        model.__class__ = Sliced
        model.first.weight = nn.Parameter(model.first.weight.detach().chunk(world)[rank].clone())
        model.first.bias = nn.Parameter(model.first.bias.detach().chunk(world)[rank].clone())
        model.second.weight = nn.Parameter(model.second.weight.detach().chunk(world, 1)[rank].clone())
        return model

    inner = 4 * CHOSEN["width"]
    length = inner // dist.get_world_size()
    dim_of = {"first.weight": 0, "first.bias": 0, "second.weight": 1}

    def part(name: str) -> Any:
        return OwnPart(dim_of[name], [(dist.get_rank() * length, length)]) if name in dim_of else None

    plain(directory, mistake, wrap, replicas=1, parts=part)


def zero(stage: int) -> Callable[[str, str], None]:
    def train(directory: str, mistake: str) -> None:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for a minute
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        config = {
            "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        trace = StepTrace(directory, engine)
        for step in range(1, STEPS + 1):
            inputs, labels = samples(step, dist.get_rank(), dist.get_world_size())
            loss = engine(inputs, labels)["loss"]
            engine.backward(loss * (1.5 if mistake == "scale" else 1.0))
            trace.step(step, loss)
            engine.step()

    return train


def trainer(directory: str, mistake: str) -> None:
    """transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

    class Traced(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.trace = StepTrace(directory, model)

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            self.trace.step(state.global_step + 1, losses[-1])

    losses: list[float] = []

    class WithLoss(Trainer):
        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            found = super().compute_loss(*arguments, **options)
            losses.append(float(found[0] if isinstance(found, tuple) else found))
            return found

    set_seed(0)
    rows = [{"input_ids": inputs[0], "labels": labels[0]} for inputs, labels in (samples(n, 0, 8) for n in range(64))]
    options = {"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_grad_norm": 0.0}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "logging_steps": 100}
    arguments = TrainingArguments(output_dir=f"{directory}-trainer", **options, **quiet)
    WithLoss(make_model(), arguments, train_dataset=rows, callbacks=[Traced()]).train()


def accelerate(directory: str, mistake: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))
    trace = StepTrace(directory, model)
    for step in range(1, STEPS + 1):
        inputs, labels = samples(step, accelerator.process_index, accelerator.num_processes)
        loss = model(inputs, labels)["loss"]
        accelerator.backward(loss)
        trace.step(step, loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


KINDS = {
    **{"ddp": ddp, "one": one, "fsdp2": fsdp2, "tensor": tensor, "sliced": sliced},
    **{"zero1": zero(1), "zero2": zero(2), "zero3": zero(3), "trainer": trainer, "accelerate": accelerate},
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["ACCELERATE_USE_CPU"] = "1"
    dist.init_process_group("gloo")
    for word in sys.argv[2:]:
        what, _, chosen = word.partition("@")
        if chosen:
            CHOSEN.update(zip(CHOSEN, map(int, chosen.split(",")), strict=True))
        kind, _, mistake = what.partition("=")
        KINDS[kind](str(Path(sys.argv[1]) / word), mistake)
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # gloo sometimes aborted a process that had trained with DeepSpeed and took its groups down
