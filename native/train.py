"""A run from its arguments to its last line: data, the loop, evaluations, checkpoints, and a clean end.

A checkpoint is <directory>/iter_0000020/..., and latest_checkpointed_iteration.txt once it is complete. Weights and
optimizer states are written once per tensor- and pipeline-parallel rank, by the first data-parallel rank (the others'
are the same); DeepSpeed writes its own shards. Every process writes its dropout state.
"""

import gc
import math
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from native.data import Batch, TokenFile, Vocabulary, open_data, open_test
from native.data_parallel import TorchTrainer
from native.metrics import Metrics, say
from native.parallel import Layout
from native.trainers import make_trainer
from t5bench import Problem
from t5bench.imports import import_deepspeed, leave_out_compiler

TRACKER = "latest_checkpointed_iteration.txt"


def learning_rate(args: Namespace, iteration: int) -> float:
    """The rate after `iteration` updates: linear warm-up, then the decay to --min-lr at --train-iters."""
    warmup = args.lr_warmup_iters
    if warmup > 0 and iteration <= warmup:
        return args.lr * iteration / warmup
    if args.lr_decay_style == "constant":
        return args.lr
    done = (iteration - warmup) / (args.train_iters - warmup)
    left = 1.0 - done if args.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
    return args.min_lr + left * (args.lr - args.min_lr)


def share_vocabulary(args: Namespace, file: TokenFile) -> Vocabulary:
    """Rank 0 reads the tokenizer and sends it to every rank, so that only one process imports transformers.

    Raises Problem on every rank for a tokenizer that cannot be read or that lacks a token of the data.
    """
    answer: list[Vocabulary | Problem | None] = [None]
    if args.rank == 0:
        try:
            vocabulary = Vocabulary.of(args)
            answer = [vocabulary]
            if (largest := int(file.tokens.max())) >= (size := vocabulary.size):
                raise Problem(f"{args.data_path}.bin has token {largest}, {args.tokenizer_model} has {size} tokens")
        except Problem as problem:
            answer = [problem]
    dist.broadcast_object_list(answer, device=args.device)
    if isinstance(answer[0], Problem):
        raise answer[0]
    return answer[0]


def pad_vocabulary(args: Namespace, vocabulary: Vocabulary) -> None:
    multiple = args.make_vocab_size_divisible_by * args.tp
    args.padded_vocab_size, args.pad_token = -(-vocabulary.size // multiple) * multiple, vocabulary.pad


def evaluate(
    trainer: TorchTrainer, args: Namespace, batches: Iterator[Batch], metrics: Metrics, iteration: int
) -> None:
    """The validation loss over the samples of --eval-iters iterations; its time does not count as training."""
    with metrics:
        metrics.validation(iteration, evaluated_loss(trainer, args, batches))


def evaluated_loss(trainer: TorchTrainer, args: Namespace, batches: Iterator[Batch]) -> Tensor:
    """The mean loss of --eval-iters batches on this process, []."""
    trainer.model.eval()
    losses = torch.stack([trainer.evaluate(next(batches)) for _ in range(args.eval_iters)])
    trainer.model.train()
    return losses.mean()


def dropout_states(directory: str, iteration: int, args: Namespace, layout: Layout) -> tuple[Path, dict]:
    """The file of this process's dropout state in a checkpoint, and what its masks are drawn from."""
    generators = {"cpu": torch.default_generator, "tp": layout.tp.rng}
    if args.device.type == "cuda":
        generators["cuda"] = torch.cuda.default_generators[args.device.index]
    return Path(directory, f"iter_{iteration:07d}", f"random_{args.rank:05d}.pt"), generators


def save(trainer: TorchTrainer, args: Namespace, layout: Layout, iteration: int) -> None:
    path, generators = dropout_states(args.save, iteration, args, layout)
    trainer.save(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: generator.get_state() for name, generator in generators.items()}, path)
    dist.barrier()
    if args.local_rank == 0:
        written = Path(args.save, f"{TRACKER}.{args.rank}")
        written.write_text(str(iteration))
        written.replace(Path(args.save, TRACKER))
    dist.barrier()


def load(trainer: TorchTrainer, args: Namespace, layout: Layout, iteration: int) -> None:
    path, generators = dropout_states(args.load, iteration, args, layout)
    trainer.load(path.parent)
    states = torch.load(path, weights_only=True)
    for name, generator in generators.items():
        generator.set_state(states[name])


def import_libraries(args: Namespace) -> None:
    """Imports what takes seconds in all processes at the same time, before they wait for each other."""
    if not args.compile:
        leave_out_compiler()
    import torch._dynamo  # which the first optimizer would import

    if args.deepspeed:
        import_deepspeed()
    if args.tensorboard_dir and args.rank == args.world_size - 1:
        import torch.utils.tensorboard  # noqa: F401
    gc.freeze()  # no collection during training looks at the million objects of the modules
    gc.enable()


def numbers(args: Namespace) -> str:
    """The arguments that are numbers, for the record: `lr=0.0001 seed=1234`."""
    values = sorted(vars(args).items())
    return " ".join(f"{name}={value}" for name, value in values if type(value) in (int, float))


def take_device(args: Namespace) -> torch.device | None:
    """Prepares this process's device. Returns it if NCCL is to connect to the others at once, which names a fault there
    and not in the first iteration."""
    if args.device.type != "cuda":
        os.environ["DS_ACCELERATOR"] = "cpu"
        return None
    torch.cuda.set_device(args.device)
    if args.dtype == torch.float32:
        # fp32 serves to compare strategies, and PyTorch's fused kernels compute its products less exactly (3xTF32).
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    return args.device if args.distributed_backend == "nccl" else None


def run(args: Namespace) -> None:
    """Trains from the first or the last saved iteration to --train-iters. Raises Problem for unsuitable data."""
    tracker, file = Path(args.load or "", TRACKER), TokenFile(args.data_path)
    done = int(tracker.read_text()) if args.load and tracker.is_file() else 0  # which the launcher has checked
    device_id = take_device(args)
    import_libraries(args)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    dist.init_process_group(args.distributed_backend, timeout=timeout, device_id=device_id)
    vocabulary = share_vocabulary(args, file)
    pad_vocabulary(args, vocabulary)
    layout = Layout.build(args.pp, args.dp, args.tp, args.device, args.seed)
    trainer = make_trainer(args, layout)
    training, validation = open_data(args, layout.dp.rank, file, vocabulary, done)
    if done:
        load(trainer, args, layout, done)
    metrics = Metrics(args, layout)
    if args.rank == 0:
        say(
            f"native engine: {args.parameters:,} parameters, TP={args.tp} PP={args.pp} DP={args.dp},"
            f" {args.micro_batches} micro-batches of {args.micro_batch_size}, vocabulary padded to"
            f" {args.padded_vocab_size}, {args.dtype} on {args.device.type}, from iteration {done}"
        )
        say(f"native engine's arguments: {numbers(args)}")
    if args.skip_train:
        metrics.validation(done, evaluated_loss(trainer, args, validation), "validation")
        if test := open_test(args, layout.dp.rank, file, vocabulary):
            metrics.validation(done, evaluated_loss(trainer, args, test), "test")
    else:
        with watched(trainer, args, layout):
            train(trainer, args, layout, training, validation, metrics, done)
    del training, validation  # ends the processes that prepare samples
    metrics.end()
    dist.destroy_process_group()


def watched(trainer: TorchTrainer, args: Namespace, layout: Layout) -> AbstractContextManager[None]:
    """With --trace, what the trainer computes is written down."""
    if not args.trace:
        return nullcontext()
    from native.trace import traced

    return traced(trainer, args, layout)


def train(
    trainer: TorchTrainer,
    args: Namespace,
    layout: Layout,
    training: Iterator[Batch],
    validation: Iterator[Batch],
    metrics: Metrics,
    done: int,
) -> None:
    """The iterations after `done`, with their evaluations and checkpoints."""
    if args.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # of training alone, as Megatron-DeepSpeed counts it
    for iteration in range(done + 1, args.train_iters + 1):
        loss, norm = trainer.step(next(training), learning_rate(args, iteration - 1))
        metrics.record(iteration, loss, norm, learning_rate(args, iteration))
        last = iteration == args.train_iters
        leaving = bool(args.exit_interval) and iteration % args.exit_interval == 0
        if args.eval_iters and (iteration % args.eval_interval == 0 or last):
            evaluate(trainer, args, validation, metrics, iteration)
        if args.save and (iteration % args.save_interval == 0 or leaving or last):
            with metrics:
                save(trainer, args, layout, iteration)
        if leaving:
            return
