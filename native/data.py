"""Who trains which samples; t5_samples.py and gpt_samples.py make the samples."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from native.gpt_samples import DocumentSamples, GPTSamples
from native.t5_samples import SpanCorruption
from native.token_file import TokenFile, Vocabulary
from t5bench.corpus.index import split_documents

# A T5's encoder input, decoder input and labels; a GPT's tokens and labels. int64, [samples, length] each.
Batch = tuple[torch.Tensor, ...]


def step_indices(args: Namespace, dp_rank: int, consumed: int, end: int) -> Iterator[list[int]]:
    """For each iteration, the samples of one data-parallel rank: its share of every micro-batch, in turn."""
    size = args.global_batch_size
    for start in range(consumed, end - size + 1, size):
        samples = np.arange(start, start + size).reshape(-1, args.dp, args.micro_batch_size)
        yield samples[:, dp_rank].flatten().tolist()


def batches(dataset: torch.utils.data.Dataset, args: Namespace, dp_rank: int, consumed: int) -> Iterator[Batch]:
    """One batch per iteration on its device, [micro_batches * micro_batch_size, length] each."""
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=list(step_indices(args, dp_rank, consumed, len(dataset))),
        num_workers=args.num_workers,
        pin_memory=args.device.type == "cuda",
        generator=torch.Generator(),  # its own, or starting the workers would take a number from dropout's
    )
    for batch in loader:
        yield tuple(tensor.to(args.device, non_blocking=True) for tensor in batch)


def samples_of(
    args: Namespace, file: TokenFile, documents: tuple[int, int], count: int, vocabulary: Vocabulary
) -> torch.utils.data.Dataset:
    """At least `count` samples of the run's model. Raises Problem when no document can be used."""
    if args.family == "gpt":
        kind = DocumentSamples if args.document_samples else GPTSamples
        return kind(args, file, documents, count)
    return SpanCorruption(args, file, documents, count, vocabulary)


def samples_in_turn(
    args: Namespace, file: TokenFile, documents: tuple[int, int], ends: Sequence[int], vocabulary: Vocabulary
) -> torch.utils.data.Dataset:
    """Several orders of the same documents, one after the other. ends: the samples until the end of each.

    The first is that of a run which was planned so long; the others have other seeds. Raises Problem.
    """
    first, *others = ends
    parts = [samples_of(args, file, documents, first, vocabulary)]
    if not others:
        return parts[0]
    parts = [torch.utils.data.Subset(parts[0], range(first))]
    for begin, end in pairwise(ends):
        own = Namespace(**vars(args) | {"seed": args.seed + begin})
        samples = samples_of(own, file, documents, end - begin, vocabulary)
        parts.append(torch.utils.data.Subset(samples, range(end - begin)))
    return torch.utils.data.ConcatDataset(parts)


def open_data(
    args: Namespace,
    dp_rank: int,
    file: TokenFile,
    vocabulary: Vocabulary,
    done: int = 0,
    consumed: int = 0,
    ends: Sequence[int] = (),
) -> tuple[Iterator[Batch], Iterator[Batch]]:
    """A data-parallel rank's batches for training after `done` iterations and `consumed` samples, and for
    its evaluations. ends: of the orders of samples, see samples_in_turn(); by default there is one for the run."""
    train, validation, _ = split_documents(args.split, len(file.documents) - 1)
    size = args.global_batch_size
    training: Iterator[Batch] = iter(())
    evaluation: Iterator[Batch] = iter(())
    if not args.skip_train:
        needed = consumed + (args.train_iters - done) * size
        dataset = samples_in_turn(args, file, train, ends or [needed], vocabulary)
        training = batches(dataset, args, dp_rank, consumed)
    if args.eval_iters:
        evaluations = args.train_iters // args.eval_interval + 1  # one more comes at the end
        done_evaluations = done // args.eval_interval
        samples = args.eval_iters * size  # of one evaluation
        dataset = samples_of(args, file, validation, evaluations * samples, vocabulary)
        evaluation = batches(dataset, args, dp_rank, consumed=done_evaluations * samples)
    return training, evaluation


def open_test(args: Namespace, dp_rank: int, file: TokenFile, vocabulary: Vocabulary) -> Iterator[Batch] | None:
    """A data-parallel rank's batches of the test set, if that has documents."""
    _, _, test = split_documents(args.split, len(file.documents) - 1)
    first, end = test
    if first == end:
        return None
    dataset = samples_of(args, file, test, args.global_batch_size * args.eval_iters, vocabulary)
    return batches(dataset, args, dp_rank, consumed=0)
