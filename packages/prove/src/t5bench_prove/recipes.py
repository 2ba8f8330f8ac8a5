"""Ten recipes as public trainers have them, of small models, each executed and proved or faulted by any_model.py.

    python -m t5bench_prove.recipes

The plans are written anew from what their projects document; Transformers' and DeepSpeed's code is the installed one.
"""

import logging
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from t5bench_prove.any_model import StepProof, prove_step

WORDS = 64
WIDTH = 32
HEADS = 4
LENGTH = 8
MICRO_BATCHES = 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        size = WIDTH // HEADS
        q, k, v = (w(x).unflatten(-1, (-1, size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        scores = (q @ k.transpose(-1, -2)) * size**-0.5
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.ffn_norm = nn.RMSNorm(WIDTH)
        self.feed_forward = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Of torchtitan's shape and names, without rotary positions, which have no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def loss_of(output: Any, tokens: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def tokens() -> Tensor:
    return torch.randint(WORDS, (2, LENGTH))


def two_micro_batches() -> list[Tensor]:
    return [tokens() for _ in range(MICRO_BATCHES)]


def step(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(batch), batch).backward()
    optimizer.step()


def clipped_step(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(batch), batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


# ---- torchtitan ------------------------------------------------------------------------------------------------------


def titan_tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """torchtitan's plan of Llama 3: sequence parallel between the divided weights."""
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        enter = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan = {"attention_norm": SequenceParallel(), "attention": enter, "ffn_norm": SequenceParallel()}
        plan |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {"attention.wo": RowwiseParallel(output_layouts=Shard(1)), "feed_forward": enter}
        plan |= {"feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel()}
        plan |= {"feed_forward.w2": RowwiseParallel(output_layouts=Shard(1))}
        parallelize_module(layer, mesh, plan)


def titan_fully_shard(model: Llama, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def titan_2d(model: Llama, mesh: DeviceMesh) -> nn.Module:
    titan_tensor_parallel(model, mesh["tensor"])
    return titan_fully_shard(model, mesh["data"])


def titan_mixed(model: Llama, mesh: DeviceMesh) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return titan_fully_shard(model, mesh["data"], mp_policy=policy)


def titan_hybrid(model: Llama, mesh: DeviceMesh) -> nn.Module:
    return titan_fully_shard(model, mesh["replica", "shard"])


# ---- nanoGPT, accelerate ---------------------------------------------------------------------------------------------


def ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)


def nanogpt_step(model: DistributedDataParallel, optimizer: Any, batches: list[Tensor]) -> None:
    """Micro-batches are added up, and reduced with the last one."""
    for number, batch in enumerate(batches):
        model.require_backward_grad_sync = number == len(batches) - 1
        (loss_of(model(batch), batch) / len(batches)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def accelerate_step(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> None:
    """FSDP2 in accelerate's gradient accumulation: gradients are exchanged with the last micro-batch."""
    for number, batch in enumerate(batches):
        model.set_requires_gradient_sync(number == len(batches) - 1)
        (loss_of(model(batch), batch) / len(batches)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


# ---- picotron --------------------------------------------------------------------------------------------------------


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class PicotronLayer(nn.Module):
    """A feed-forward layer that ranks divide by hand."""

    def __init__(self, ranks: int = 2) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH // ranks, bias=False)
        self.down = nn.Linear(2 * WIDTH // ranks, WIDTH, bias=False)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(self.up(Copy.apply(self.norm(x), self.group)))
        return x + Reduce.apply(self.down(inner), self.group)


class Picotron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(PicotronLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def picotron(model: Picotron, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers:
        layer.group = mesh.get_group("tensor")
    model.data_group = mesh.get_group("data")
    return model


def picotron_step(model: Any, optimizer: Any, batch: Tensor) -> None:
    loss_of(model(batch), batch).backward()
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size(model.data_group)
        dist.all_reduce(parameter.grad, group=model.data_group)
    optimizer.step()
    optimizer.zero_grad()


def picotron_slices(name: str) -> str:
    return "tensor" if ".up." in name or ".down." in name else ""


# ---- Transformers ----------------------------------------------------------------------------------------------------


def transformers_model(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "vocab_size": WORDS, "head_dim": WIDTH // HEADS}
        heads = {"num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
        config = getattr(transformers, f"{kind}Config")(**sizes, **heads, attn_implementation="eager")
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return make


def transformers_plan(model: Any, mesh: DeviceMesh) -> nn.Module:
    """What from_pretrained(tp_plan="auto") does with each parameter and module."""
    from transformers.integrations.tensor_parallel import distribute_model, shard_and_distribute_module

    own = mesh["tensor"]
    for name, parameter in list(model.named_parameters()):
        arguments = (model, parameter, parameter, name, parameter.dtype, True)
        shard_and_distribute_module(*arguments, own.get_local_rank(), own)
    return distribute_model(model, None, own, own.size())


# ---- DeepSpeed -------------------------------------------------------------------------------------------------------


def zero(stage: int) -> Callable[[nn.Module, DeviceMesh], Any]:
    def wrap(model: nn.Module, mesh: DeviceMesh) -> Any:
        from t5bench.imports import import_deepspeed
        from t5bench_prove.execution import believe_other_ranks

        import_deepspeed()
        import deepspeed

        believe_other_ranks()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return engine

    return wrap


def zero_step(engine: Any, optimizer: Any, batches: list[Tensor]) -> None:
    for batch in batches:
        engine.backward(loss_of(engine(batch), batch))
        engine.step()


# ---- all of them -----------------------------------------------------------------------------------------------------

DATA_AND_TENSOR = {"data": 4, "tensor": 2}


@dataclass(frozen=True)
class Recipe:
    source: str
    """Whose, and what of it."""
    arguments: dict[str, Any]
    """Of prove_step."""


def recipe(source: str, **arguments: Any) -> Recipe:
    usual = {"make_model": Llama, "make_batch": tokens, "step": step, "mesh": {"data": 4}}
    return Recipe(source, usual | arguments)


RECIPES = (
    recipe("torchtitan: Llama, FSDP2 and tensor parallelism", wrap=titan_2d, mesh=DATA_AND_TENSOR, step=clipped_step),
    recipe("torchtitan: FSDP2 in bf16, reduced in fp32", wrap=titan_mixed, step=clipped_step),
    recipe(
        "torchtitan: HSDP", wrap=titan_hybrid, mesh={"replica": 2, "shard": 4}, samples=("replica", "shard"),
        step=clipped_step,
    ),
    recipe(
        "nanoGPT: DDP, reduced with the last micro-batch", wrap=ddp, step=nanogpt_step, make_batch=two_micro_batches
    ),
    recipe(
        "accelerate: FSDP2, reduced with the last micro-batch",
        wrap=lambda model, mesh: titan_fully_shard(model, mesh["data"]), step=accelerate_step,
        make_batch=two_micro_batches,
    ),
    recipe(
        "picotron: tensor and data parallelism by hand", make_model=Picotron, wrap=picotron, mesh=DATA_AND_TENSOR,
        step=picotron_step, slices=picotron_slices,
    ),
    recipe(
        "Transformers: Llama's tp_plan", make_model=transformers_model("Llama"), wrap=transformers_plan,
        mesh={"tensor": 2}, samples=(),
    ),
    recipe(
        "Transformers: Qwen3's tp_plan", make_model=transformers_model("Qwen3"), wrap=transformers_plan,
        mesh={"tensor": 2}, samples=(),
    ),
    recipe(
        "DeepSpeed: ZeRO-1", wrap=zero(1), step=zero_step, make_batch=two_micro_batches,
        make_optimizer=lambda engine: None,
    ),
    recipe(
        "DeepSpeed: ZeRO-2", wrap=zero(2), step=zero_step, make_batch=two_micro_batches,
        make_optimizer=lambda engine: None,
    ),
    recipe(
        "DeepSpeed: ZeRO-3", wrap=zero(3), step=zero_step, make_batch=two_micro_batches,
        make_optimizer=lambda engine: None,
    ),
)  # fmt: skip


def proved(number: int) -> StepProof:
    """In a process that executes nothing else. What ends in an exception is not followed."""
    logging.disable(logging.WARNING)
    try:
        return prove_step(**RECIPES[number].arguments)
    except Exception as error:
        return StepProof(not_followed=[f"the step ends in {type(error).__name__}: {str(error).splitlines()[0]}"])


def main() -> int:
    for number, one in enumerate(RECIPES):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(f"{one.source}: {pool.apply(proved, (number,))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
