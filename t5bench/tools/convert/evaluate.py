"""Evaluates a trained model: the loss on its run's validation documents; for a GPT, WikiText and LAMBADA too.

The run's settings and layout are read from its record, and one process evaluates a model of any layout. The run itself
is not changed.
"""

import argparse
import json
import math
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from native.data import open_data, split_documents
from native.token_file import TokenFile, Vocabulary
from t5bench import Problem
from t5bench.record.plan import Plan
from t5bench.tools.convert.exported import ExportedModel, open_model
from t5bench.tools.convert.scores import last_words, ordinary_spaces, read_texts, total_loss
from t5bench.tools.convert.trained import settings_of

MOST_PERPLEXITY = math.exp(700)


def run(arguments: argparse.Namespace) -> int:
    model = open_model(arguments)
    figures: dict[str, Any] = {}
    stride = arguments.stride or model.length
    if not 1 <= stride <= model.length:
        raise Problem(f"--stride must be 1 to {model.length}, found {stride}")
    if (arguments.wikitext or arguments.lambada) and model.is_t5:
        raise Problem("WikiText and LAMBADA are for a GPT; this model is a T5", "Leave out --wikitext and --lambada")
    settings = settings_of(arguments.run)
    if settings:
        prefix = arguments.data or settings.plan.data_prefix
        figures |= validation(model, settings.plan, prefix, arguments.samples, stride)
    elif not (arguments.wikitext or arguments.lambada):
        remedy = "Name the run's directory instead, or for a GPT add --wikitext FILE or --lambada FILE"
        raise Problem(f"{arguments.run} is no run with a record, and the validation data belong to a run", remedy)
    if arguments.wikitext:
        figures |= wikitext(model, arguments.wikitext, stride)
    if arguments.lambada:
        words = last_words(model, read_texts(arguments.lambada))
        figures |= {"lambada accuracy": words.accuracy, "lambada perplexity": perplexity(words.loss)}
        figures["lambada passages"] = words.passages
    print(json.dumps(figures) if arguments.json else as_lines(figures))
    return 0


def as_lines(figures: Mapping[str, Any]) -> str:
    width = max(len(name) for name in figures)
    return "\n".join(
        f"{name:<{width}}  {value:,}" if isinstance(value, int) else f"{name:<{width}}  {value:.7g}"
        for name, value in figures.items()
    )


def perplexity(loss: float) -> float:
    return math.exp(min(loss, math.log(MOST_PERPLEXITY)))


def validation(model: ExportedModel, plan: Plan, prefix: str, samples: int | None, stride: int) -> dict[str, Any]:
    if model.is_t5:
        return t5_validation(model, validation_arguments(plan, prefix, samples))
    args = validation_arguments(plan, prefix, None)
    file = TokenFile(prefix)
    first, end = split_documents(args.split, len(file.documents) - 1)[1]
    tokens = [token for number in range(first, end) for token in file[number].tolist()]
    if len(tokens) < 2:
        raise Problem(f"{prefix} has no validation documents", "Name a dataset with more documents: --data PREFIX")
    loss = total_loss(model, tokens, stride) / (len(tokens) - 1)
    return {"validation loss": loss, "validation perplexity": perplexity(loss), "validation tokens": len(tokens) - 1}


def validation_arguments(plan: Plan, prefix: str, samples: int | None) -> Namespace:
    """What the native engine's data need to know, for one process that evaluates as the run does."""
    given = plan.named_arguments
    batch = int(given["global_batch_size"])
    iterations = int(given["train_iters"])
    evaluations = iterations // int(given.get("eval_interval") or iterations) + 1
    # The engine's order of samples depends on their number.
    eval_iters = int(given.get("eval_iters") or 0) * evaluations
    if not eval_iters:
        eval_iters = -(-(samples or batch) // batch)
    return Namespace(
        family="gpt" if plan.value("MODEL_FAMILY", "t5") == "gpt" else "t5",
        data_path=prefix,
        tokenizer_model=plan.tokenizer,
        split=[float(share) for share in given["split"].split(",")],
        encoder_seq_length=int(given.get("encoder_seq_length") or 0),
        decoder_seq_length=int(given.get("decoder_seq_length") or 0),
        seq_length=int(given.get("seq_length") or 0),
        mask_prob=float(given.get("mask_prob") or 0.15),
        short_seq_prob=float(given.get("short_seq_prob") or 0.1),
        seed=int(given["seed"]),
        global_batch_size=batch,
        micro_batch_size=int(given["micro_batch_size"]),
        dp=1,
        train_iters=1,
        skip_train=False,
        eval_interval=2,
        eval_iters=eval_iters,
        samples=samples or int(given.get("eval_iters") or 0) * batch or batch,
        num_workers=0,
        device=torch.device("cpu"),
    )


@torch.no_grad()
def t5_validation(model: ExportedModel, args: Namespace) -> dict[str, Any]:
    """The engine's own samples in its order, and its mean: over micro-batches, of the mean over their tokens."""
    vocabulary = Vocabulary.load(args.tokenizer_model)
    _, batches = open_data(args, 0, TokenFile(args.data_path), vocabulary)
    losses: list[float] = []
    wanted = -(-args.samples // args.micro_batch_size)
    for batch in batches:
        for encoder, decoder, labels in zip(*(part.split(args.micro_batch_size) for part in batch), strict=True):
            if len(losses) < wanted:
                losses.append(micro_batch_loss(model, encoder, decoder, labels, vocabulary.pad))
    if len(losses) < wanted:
        found = f"{args.samples} samples were requested, but the validation documents yield only {len(losses)}"
        raise Problem(found, "Lower --samples")
    loss = sum(losses) / len(losses)
    samples = len(losses) * args.micro_batch_size
    return {"validation loss": loss, "validation perplexity": perplexity(loss), "validation samples": samples}


def micro_batch_loss(
    model: ExportedModel, encoder: torch.Tensor, decoder: torch.Tensor, labels: torch.Tensor, pad: int
) -> float:
    """labels: -1 on padding."""
    encoder, decoder, labels = (tensor.to(model.device) for tensor in (encoder, decoder, labels))
    logits = model.model(input_ids=encoder, attention_mask=encoder != pad, decoder_input_ids=decoder).logits.float()
    return float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1))


def wikitext(model: ExportedModel, path: Path, stride: int) -> dict[str, Any]:
    """Per word of the file as it is published, however many tokens the model needs for them."""
    # A row of the published Parquet files is a line, with its end.
    text = "".join(row if row.endswith("\n") else f"{row}\n" for row in read_texts(path))
    words = len(text.split())
    if not words:
        raise Problem(f"{path} has no words")
    tokens = [model.start, *model.tokens(ordinary_spaces(text))]
    loss = total_loss(model, tokens, stride)
    return {
        "wikitext word perplexity": perplexity(loss / words),
        "wikitext token perplexity": perplexity(loss / (len(tokens) - 1)),
        "wikitext words": words,
    }
