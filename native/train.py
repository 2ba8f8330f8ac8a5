"""A run from its arguments to its last line: data, the loop, evaluations, checkpoints, and a clean end.

checkpoint.py says what a checkpoint is.
"""

import gc
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from native import checkpoint
from native.data import Batch, open_data, open_test
from native.data_parallel import TorchTrainer
from native.metrics import Metrics, print_line
from native.model import mesh_of
from native.parallel import Mesh
from native.schedule import learning_rate
from native.token_file import TokenFile, Vocabulary, pad_vocabulary
from native.trainers import make_trainer
from t5bench import Problem
from t5bench.checkpoint_form import Seal
from t5bench.imports import import_deepspeed, leave_out_compiler


def share_vocabulary(args: Namespace, file: TokenFile) -> Vocabulary:
    """Rank 0 reads the tokenizer and sends it to every rank, so that only one process imports transformers.

    Raises Problem on every rank for a tokenizer that cannot be read or that lacks a token of the data.
    """
    answer: list[Vocabulary | Problem | None] = [None]
    if args.rank == 0:
        try:
            vocabulary = Vocabulary.of(args)
            largest = int(file.tokens.max())
            if largest >= vocabulary.size:
                raise Problem(
                    f"{args.data_path}.bin has token {largest}, {args.tokenizer_model} has {vocabulary.size} tokens"
                )
            answer = [vocabulary]
        except Problem as problem:
            answer = [problem]
    dist.broadcast_object_list(answer, device=args.device)
    if isinstance(answer[0], Problem):
        raise answer[0]
    return answer[0]


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
    """Prepares this process's device. Returns it if NCCL is to connect to the others at once, so that a fault shows
    here and not in the first iteration."""
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
    file = TokenFile(args.data_path)
    before = checkpoint.last_saved(args)
    done = before.iteration if before else 0
    device_id = take_device(args)
    import_libraries(args)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    dist.init_process_group(args.distributed_backend, timeout=timeout, device_id=device_id)
    vocabulary = share_vocabulary(args, file)
    pad_vocabulary(args, vocabulary)
    mesh = mesh_of(args)
    trainer = make_trainer(args, mesh)
    consumed = checkpoint.consumed_samples(args, before, done)
    ends = checkpoint.planned_samples(args, before)
    training, validation = open_data(args, mesh.dp.rank, file, vocabulary, done, consumed, ends)
    told = checkpoint.load(trainer, args, mesh, before) if before else ""
    if args.initial_weights and not before:
        checkpoint.load_weights(trainer, Path(args.initial_weights))
    metrics = Metrics(args, mesh, other_samples=consumed - done * args.global_batch_size)
    if args.rank == 0:
        print_line(
            f"native engine: {args.parameters:,} parameters, TP={args.tp} PP={args.pp} DP={args.dp},"
            f" {args.micro_batches} micro-batches of {args.micro_batch_size},"
            f" vocabulary padded to {args.padded_vocab_size},"
            f" {args.dtype} on {args.device.type}, from iteration {done}"
        )
        print_line(f"native engine's arguments: {numbers(args)}")
        if told:
            print_line(f"native engine {told}")
    if args.skip_train:
        metrics.validation(done, evaluated_loss(trainer, args, validation), evaluated_set="validation")
        test = open_test(args, mesh.dp.rank, file, vocabulary)
        if test:
            metrics.validation(done, evaluated_loss(trainer, args, test), evaluated_set="test")
    else:
        with watched(trainer, args, mesh):
            train(trainer, args, mesh, training, validation, metrics, before)
    del training, validation  # ends the processes that prepare samples
    metrics.end()
    dist.destroy_process_group()


def watched(trainer: TorchTrainer, args: Namespace, mesh: Mesh) -> AbstractContextManager[None]:
    """With --trace, what the trainer computes is written down."""
    if not args.trace:
        return nullcontext()
    from native.trace import traced

    return traced(trainer, args, mesh)


def train(
    trainer: TorchTrainer,
    args: Namespace,
    mesh: Mesh,
    training: Iterator[Batch],
    validation: Iterator[Batch],
    metrics: Metrics,
    before: Seal | None,
) -> None:
    """The iterations after those of the checkpoint `before`, with their evaluations and checkpoints."""
    if args.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # of training alone, as Megatron-DeepSpeed counts it
    saver = checkpoint.Saver(trainer, args, mesh, before) if args.save else None
    done = before.iteration if before else 0
    for iteration in range(done + 1, args.train_iters + 1):
        loss, norm = trainer.step(next(training), learning_rate(args, iteration - 1))
        metrics.record(iteration, loss, norm, learning_rate(args, iteration))
        is_last = iteration == args.train_iters
        exits = bool(args.exit_interval) and iteration % args.exit_interval == 0
        if args.eval_iters and (iteration % args.eval_interval == 0 or is_last):
            evaluate(trainer, args, validation, metrics, iteration)
        if saver:
            saver.check()
        if saver and (iteration % args.save_interval == 0 or exits or is_last):
            with metrics:
                saver.save(iteration)
        if exits:
            break
    if saver:
        saver.close()
