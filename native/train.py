"""A run from its arguments to its last line: data, the loop, evaluations, checkpoints, and a clean end."""

import gc
import math
import os
from argparse import Namespace
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from native import checkpoint
from native.arguments import start
from native.data import SpanCorruption, TokenFile, Vocabulary, batches, split_documents
from native.metrics import Metrics, say
from native.parallel import Layout
from native.trainers import Batch, PipelineTrainer, TorchTrainer, ZeroTrainer
from t5bench import Problem
from t5bench.imports import import_deepspeed, leave_out_compiler


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
            answer = [vocabulary := Vocabulary.load(args.tokenizer_model)]
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


class Data:
    """The batches of this process's data-parallel rank, from wherever the run continues."""

    def __init__(self, args: Namespace, layout: Layout, file: TokenFile, vocabulary: Vocabulary, done: int) -> None:
        self.device = args.device
        train, validation, _ = split_documents(args.split, len(file.documents) - 1)
        size, evaluation = args.global_batch_size, args.global_batch_size * args.eval_iters  # samples of each
        dataset = SpanCorruption(args, file, train, args.train_iters * size, vocabulary)
        self.train, self.validation = batches(dataset, args, layout.dp.rank, done * size), iter(())
        if args.eval_iters:
            count = (args.train_iters // args.eval_interval + 1) * evaluation  # one more comes at the end
            dataset = SpanCorruption(args, file, validation, count, vocabulary)
            self.validation = batches(dataset, args, layout.dp.rank, done // args.eval_interval * evaluation)

    def next(self, which: Iterator[Batch]) -> Batch:
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in next(which))


def evaluate(
    trainer: TorchTrainer | ZeroTrainer, args: Namespace, layout: Layout, data: Data, metrics: Metrics, iteration: int
) -> None:
    """The validation loss over the samples of --eval-iters iterations; its time does not count as training."""
    with metrics:
        trainer.model.eval()
        losses = torch.stack([trainer.evaluate(data.next(data.validation)) for _ in range(args.eval_iters)])
        trainer.model.train()
        metrics.validation(iteration, (layout.dp.all_reduce(losses.mean()) / layout.dp.size).item())


def announce(args: Namespace, done: int) -> None:
    """Prints what is about to be trained."""
    if args.rank == 0:
        say(
            f"native engine: {args.parameters:,} parameters, TP={args.tp} PP={args.pp} DP={args.dp},"
            f" {args.micro_batches} micro-batches of {args.micro_batch_size}, vocabulary padded to"
            f" {args.padded_vocab_size}, {args.dtype} on {args.device.type}, from iteration {done}"
        )


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


def run(args: Namespace) -> None:
    """Trains from the first or the last saved iteration to --train-iters. Raises Problem for unsuitable data."""
    done, file = checkpoint.latest(args.load), TokenFile(args.data_path)
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import_libraries(args)
    dist.init_process_group(args.distributed_backend, timeout=timedelta(minutes=args.distributed_timeout_minutes))
    vocabulary = share_vocabulary(args, file)
    pad_vocabulary(args, vocabulary)
    layout = Layout.build(args.pp, args.dp, args.tp, args.device, args.seed)
    trainer = (ZeroTrainer if args.deepspeed else PipelineTrainer if args.pp > 1 else TorchTrainer)(args, layout)
    data = Data(args, layout, file, vocabulary, done)
    if done:
        checkpoint.load(trainer, args, layout, done)
    metrics = Metrics(args, layout)
    announce(args, done)

    for iteration in range(done + 1, args.train_iters + 1):
        loss, norm = trainer.step(data.next(data.train), learning_rate(args, iteration - 1))
        metrics.record(iteration, loss, norm, learning_rate(args, iteration))
        last = iteration == args.train_iters
        leaving = bool(args.exit_interval) and iteration % args.exit_interval == 0
        if args.eval_iters and (iteration % args.eval_interval == 0 or last):
            evaluate(trainer, args, layout, data, metrics, iteration)
        if args.save and (iteration % args.save_interval == 0 or leaving or last):
            with metrics:
                checkpoint.save(trainer, args, layout, iteration)
        if leaving:
            break
    del data  # ends the processes that prepare samples
    metrics.end()
    dist.destroy_process_group()


def main() -> None:
    start(run)
