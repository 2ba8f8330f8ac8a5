"""Small trainings with mistakes that others met in public, and without them. Rank 0 writes each step's loss and norm.

PYTHONPATH=RELEASE python -m torch.distributed.run --nproc-per-node 2 faults.py FAULT good|bad LOG.jsonl

Where a fault is in a release of DeepSpeed, good and bad run the same lines under two releases. Where it is in a
trainer's own lines, `bad` makes the same mistake. cases.py says which is which.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 6
MICRO_BATCHES = 4
SAMPLES = 2  # of a micro-batch of a rank
LENGTH = 8
WIDTH = 16
WORDS = 32
HEADS = 4  # of Heads
PIPELINE_STAGES = 2
LEARNING_RATE = 1e-3

Batch = tuple[Tensor, Tensor]


class Embedding(nn.Embedding):
    """As pipelines need it: words in, vectors out."""


class Head(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return 4 * super().forward(hidden)  # large gradients, which clipping at 1 changes


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    return [Embedding(WORDS, WIDTH), block, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), Head(WIDTH, WORDS)]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def micro_batches(step: int, rank: int, count: int = MICRO_BATCHES) -> list[Batch]:
    """Of one rank and step: words and those that follow them, [SAMPLES, LENGTH] each."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(WORDS, (count, SAMPLES, LENGTH + 1), generator=generator)
    return [(part[:, :-1], part[:, 1:]) for part in tokens]


class Log:
    def __init__(self, path: str) -> None:
        self.path = path

    def write(self, step: int, loss: float, norm: Any) -> None:
        """loss: this rank's, of which the mean is written."""
        mean = torch.tensor(float(loss), dtype=torch.float64)
        dist.all_reduce(mean)
        line = {"step": step, "loss": float(mean) / dist.get_world_size(), "grad_norm": float(norm)}
        if dist.get_rank() == 0:
            with Path(self.path).open("a") as file:
                file.write(json.dumps(line) + "\n")


# ---- DeepSpeed's releases --------------------------------------------------------------------------------------------


def start_deepspeed(model: nn.Module, stage: int, options: dict[str, Any], accumulation: int) -> Any:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for a minute
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} | options.pop("zero", {})
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    } | options
    if options.get("gradient_clipping", 0.0) is None:
        del config["gradient_clipping"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def deepspeed_accumulates(stage: int, **options: Any) -> Callable[[Log, bool], None]:
    """DeepSpeed's usual loop: its engine knows how many micro-batches a step has."""

    def train(log: Log, is_bad: bool) -> None:
        engine = start_deepspeed(nn.Sequential(*layers()), stage, dict(options), MICRO_BATCHES)
        for step in range(1, STEPS + 1):
            total = 0.0
            for words, labels in micro_batches(step, dist.get_rank()):
                loss = loss_of(engine(words), labels)
                engine.backward(loss)
                with torch.no_grad():  # releases before 0.19 change views in place
                    engine.step()
                total += float(loss.detach()) / MICRO_BATCHES
            log.write(step, total, engine.get_global_grad_norm())

    return train


def deepspeed_by_hand(marks_boundary: Callable[[bool], bool], **options: Any) -> Callable[[Log, bool], None]:
    """Several backward passes before a step, with an engine whose configuration says one."""

    def train(log: Log, is_bad: bool) -> None:
        engine = start_deepspeed(nn.Sequential(*layers()), 2, dict(options), 1)
        for step in range(1, STEPS + 1):
            total = 0.0
            batches = micro_batches(step, dist.get_rank())
            for index, (words, labels) in enumerate(batches):
                if marks_boundary(is_bad):
                    engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
                loss = loss_of(engine(words), labels) / len(batches)
                engine.backward(loss)
                total += float(loss.detach())
            with torch.no_grad():
                engine.step()
            log.write(step, total, engine.get_global_grad_norm())

    return train


def accelerate_zero2(log: Log, is_bad: bool) -> None:
    """accelerate's own loop with its DeepSpeed plugin."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    del os.environ["ACCELERATE_USE_CPU"]  # it would choose DDP
    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=MICRO_BATCHES, gradient_clipping=0.0)
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = SAMPLES
    plugin.deepspeed_config["train_batch_size"] = SAMPLES * MICRO_BATCHES * dist.get_world_size()
    plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = nn.Sequential(*layers())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    for step in range(1, STEPS + 1):
        total = 0.0
        for words, labels in micro_batches(step, dist.get_rank()):
            with accelerator.accumulate(model):
                loss = loss_of(model(words), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += float(loss.detach()) / MICRO_BATCHES
        log.write(step, total, model.get_global_grad_norm())


def deepspeed_pipeline(log: Log, is_bad: bool) -> None:
    """DeepSpeed's pipeline of two stages; good is plain PyTorch with the same layers and micro-batches."""
    if not is_bad:
        plain(log, lambda model: model, ranks=1)
        return
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    pipe = deepspeed.pipe
    model = pipe.PipelineModule(layers(), num_stages=PIPELINE_STAGES, loss_fn=loss_of, partition_method="uniform")
    engine = start_deepspeed(model, 1, {}, MICRO_BATCHES)

    def endless() -> Iterator[Batch]:
        for step in range(1, STEPS + 1):
            yield from micro_batches(step, 0)

    data = endless()
    for step in range(1, STEPS + 1):
        loss = engine.train_batch(data)
        log.write(step, loss, engine.get_global_grad_norm())


# ---- PyTorch's own, and recipes' own lines ---------------------------------------------------------------------------


def norm_of(model: nn.Module) -> Tensor:
    norm = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def plain(
    log: Log,
    wrap: Callable[[nn.Module], nn.Module],
    ranks: int = 0,
    after: Callable[[nn.Module], None] = lambda model: None,
    scale: float = 1.0,
) -> None:
    """A loop in PyTorch with four micro-batches. ranks: whose data is read, 0 for all. scale: of what is derived."""
    model = wrap(nn.Sequential(*layers()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(1, STEPS + 1):
        total = 0.0
        batches = micro_batches(step, dist.get_rank() if ranks == 0 else 0)
        for index, (words, labels) in enumerate(batches):
            waits = index < len(batches) - 1 and hasattr(model, "no_sync")
            with model.no_sync() if waits else nullcontext():
                loss = loss_of(model(words), labels) / len(batches)
                (loss * scale).backward()
            total += float(loss.detach())
        after(model)
        log.write(step, total, norm_of(model))
        optimizer.step()
        optimizer.zero_grad()


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp1_of_one(log: Log, is_bad: bool) -> None:
    """FSDP1 over a mesh of all ranks x 1, as fsdp_size=1 makes it: bad leaves its strategy at HYBRID_SHARD."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    def wrap(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ddp", "fsdp"))
        options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        if not is_bad:
            return FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy.NO_SHARD, **options)
        strategy = ShardingStrategy.HYBRID_SHARD
        return FullyShardedDataParallel(model, device_mesh=mesh, sharding_strategy=strategy, **options)

    plain(log, wrap)


def averaged_twice(log: Log, is_bad: bool) -> None:
    """A loss divided by all ranks' tokens, whose gradients are to be added up; bad: DDP averages them besides."""
    world = dist.get_world_size()
    plain(log, ddp, scale=1 / world if is_bad else 1.0)


def fsdp2_adds_up(log: Log, is_bad: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    def wrap(model: nn.Module) -> nn.Module:
        sharded = fully_shard(model)
        if is_bad:
            sharded.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
            sharded.set_gradient_divide_factor(1.0)
        return sharded

    plain(log, wrap)


def never_reduced(log: Log, is_bad: bool) -> None:
    """A loop whose own all-reduce of gradients is left out."""

    def reduce(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    plain(log, lambda model: model, after=(lambda model: None) if is_bad else reduce)


def means_of_means(log: Log, is_bad: bool) -> None:
    """Ranks have different numbers of labels; bad averages each rank's mean, good is the mean of all tokens."""
    model = ddp(nn.Sequential(*layers()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    world = dist.get_world_size()
    for step in range(1, STEPS + 1):
        words, labels = micro_batches(step, dist.get_rank(), 1)[0]
        labels = labels.clone()
        labels[:, : 5 * dist.get_rank()] = -100
        count = torch.tensor(float((labels != -100).sum()))
        if not is_bad:
            dist.all_reduce(count)
            count /= world
        loss = F.cross_entropy(model(words).flatten(0, 1), labels.flatten(), reduction="sum") / count
        loss.backward()
        log.write(step, float(loss.detach()), norm_of(model))
        optimizer.step()
        optimizer.zero_grad()


class Enter(torch.autograd.Function):
    """Into a tensor-parallel part: the same on all ranks, whose gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
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


class Heads(nn.Module):
    """Tensor parallelism by hand: each rank has its heads, and the weight of the norm of each head is replicated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        rank = dist.get_rank()
        world = dist.get_world_size()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.into = nn.Linear(WIDTH, WIDTH * HEADS, bias=False)
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.out = nn.Linear(WIDTH * HEADS, WIDTH, bias=False)
        self.head = Head(WIDTH, WORDS)
        self.into.weight = nn.Parameter(self.into.weight.detach().chunk(world)[rank].clone())
        self.out.weight = nn.Parameter(self.out.weight.detach().chunk(world, 1)[rank].clone())

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        heads = self.into(Enter.apply(x)).unflatten(-1, (-1, WIDTH))
        heads = F.rms_norm(heads, (WIDTH,)) * self.norm
        return self.head(x + Leave.apply(self.out(heads.flatten(-2))))


def tensor_parallel(*, sums_norm: Callable[[bool], bool], counts_once: Callable[[bool], bool]) -> Any:
    """sums_norm: the replicated weight's partial gradients are added up. counts_once: in the norm of all gradients."""

    def train(log: Log, is_bad: bool) -> None:
        model = Heads()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        sliced = {"into.weight", "out.weight"}
        for step in range(1, STEPS + 1):
            words, labels = micro_batches(step, 0, 1)[0]
            loss = loss_of(model(words), labels)
            loss.backward()
            if sums_norm(is_bad):
                dist.all_reduce(model.norm.grad)
            square = torch.zeros(())
            for name, parameter in model.named_parameters():
                if name in sliced or dist.get_rank() == 0 or not counts_once(is_bad):
                    square += parameter.grad.square().sum()
            dist.all_reduce(square)
            log.write(step, float(loss.detach()), square.sqrt())
            optimizer.step()
            optimizer.zero_grad()

    return train


ALWAYS = {"sums_norm": lambda is_bad: True, "counts_once": lambda is_bad: True}
OFFLOAD = {"zero": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}
BF16 = {"bf16": {"enabled": True}}

FAULTS: dict[str, Callable[[Log, bool], None]] = {
    "deepspeed-7718": deepspeed_accumulates(2),
    "accelerate-3877": accelerate_zero2,
    "open-instruct-1498": deepspeed_by_hand(lambda is_bad: not is_bad),
    "deepspeed-7985": deepspeed_accumulates(1, **BF16, data_types={"grad_accum_dtype": "fp32"}),
    "deepspeed-8158": deepspeed_accumulates(3, zero={"stage3_use_all_reduce_for_fetch_params": True}),
    "deepspeed-8068": deepspeed_accumulates(2, gradient_clipping=None),
    "deepspeed-7967": deepspeed_accumulates(2, **OFFLOAD),
    "deepspeed-7981": deepspeed_by_hand(lambda is_bad: True, **OFFLOAD),
    "deepspeed-7839": deepspeed_accumulates(0, **BF16),
    "deepspeed-8154": deepspeed_pipeline,
    "deepspeed-7773": deepspeed_pipeline,
    "verl-7493": fsdp1_of_one,
    "torchtitan-2318": averaged_twice,
    "torchtitan-1842": means_of_means,
    "dinov3-250": fsdp2_adds_up,
    "megatron-1685": never_reduced,
    "megatron-7452": tensor_parallel(**ALWAYS | {"sums_norm": lambda is_bad: not is_bad}),
    "nemo-rl-3788": tensor_parallel(**ALWAYS | {"counts_once": lambda is_bad: not is_bad}),
}


def main() -> None:
    fault, which, path = sys.argv[1:]
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["ACCELERATE_USE_CPU"] = "1"
    torch.set_num_threads(1)
    if fault == "deepspeed-8158":  # memory that nobody wrote, as a long training would find it
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    dist.init_process_group("gloo")
    FAULTS[fault](Log(path), which == "bad")
    dist.barrier()
    os._exit(0)  # gloo sometimes aborts a process that trained with DeepSpeed and takes its groups down


if __name__ == "__main__":
    main()
