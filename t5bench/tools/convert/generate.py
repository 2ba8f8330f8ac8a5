"""Lets a trained model write: a GPT continues a text, a T5 fills its gaps <extra_id_0>, <extra_id_1> and so on.

Without options the likeliest token is taken each time. Any of --temperature, --top-k and --top-p draws tokens instead;
the same --seed draws the same ones.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch

from t5bench import Problem
from t5bench.text import visible
from t5bench.tools.convert import spans
from t5bench.tools.convert.exported import ExportedModel, open_model
from training_comparison.given_files import read_text


def run(arguments: argparse.Namespace) -> int:
    prompts = read_prompts(arguments)
    options = generation_options(arguments)
    model = open_model(arguments)
    torch.manual_seed(arguments.seed)
    for prompt in prompts:
        for answer in answers(model, prompt, options):
            print(visible(answer, "\t\n"), flush=True)
    return 0


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    prompts = list(arguments.prompt)
    if arguments.prompts:
        is_input = str(arguments.prompts) == "-"
        remedy = "Name a file with a prompt on each line, in UTF-8, or - for standard input"
        try:
            text = sys.stdin.read() if is_input else read_text(arguments.prompts, remedy)
        except UnicodeDecodeError as error:
            raise Problem(f"standard input is no text: {error}", remedy) from error
        prompts += [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise Problem("there is no prompt", "Give one: --prompt 'The'; or a file of them: --prompts FILE")
    return prompts


def generation_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of Transformers' generate(). Raises Problem for values that make no sense."""
    given = {"temperature": arguments.temperature, "top_k": arguments.top_k, "top_p": arguments.top_p}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    limits = [
        ("--temperature", arguments.temperature, "a number above 0", lambda value: 0 < value < math.inf),
        ("--top-k", arguments.top_k, "at least 1", lambda value: value >= 1),
        ("--top-p", arguments.top_p, "above 0 and at most 1", lambda value: 0 < value <= 1),
        ("--max-new-tokens", arguments.max_new_tokens, "at least 1", lambda value: value >= 1),
        ("--samples", arguments.samples, "at least 1", lambda value: value >= 1),
        ("--seed", arguments.seed, "0 to 2**64 - 1", lambda value: 0 <= value < 2**64),
    ]
    for name, value, bounds, is_right in limits:
        if value is not None and not is_right(value):
            raise Problem(f"{name} must be {bounds}, found {value}")
    if options:
        options["do_sample"] = True
        options.setdefault("top_k", 0)  # all tokens, where the library would take 50
    elif arguments.samples > 1:
        raise Problem("--samples needs a way to sample", "Add --temperature 1, --top-k or --top-p")
    if arguments.max_new_tokens:
        options["max_new_tokens"] = arguments.max_new_tokens
    return options | {"num_return_sequences": arguments.samples}


def answers(model: ExportedModel, prompt: str, options: dict[str, Any]) -> Iterator[str]:
    """The prompt with what the model makes of it, once for each sample."""
    if model.is_t5:
        spans.check_gaps(prompt)
    token_ids = model.tokens(prompt) or [model.start]
    options = {"max_new_tokens": model.model.generation_config.max_new_tokens} | options
    check_length(model, len(token_ids), options["max_new_tokens"])
    inputs = torch.tensor([token_ids], device=model.device)
    outputs = model.model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), **options)
    for output in outputs:
        if model.is_t5:
            text = model.tokenizer.decode(output, skip_special_tokens=False)
            text = spans.without_special(text, model.tokenizer.all_special_tokens)
            yield spans.filled(prompt, spans.fillings(text))
        else:
            yield prompt + model.tokenizer.decode(output[len(token_ids) :], skip_special_tokens=True)


def check_length(model: ExportedModel, tokens: int, new_tokens: int) -> None:
    """Raises Problem for more tokens than the model has positions for."""
    needed = max(tokens, new_tokens) if model.is_t5 else tokens + new_tokens
    if needed > model.length:
        together = "" if model.is_t5 else " together"
        found = f"the prompt has {tokens} tokens and the answer up to {new_tokens}"
        raise Problem(f"{found}; the model takes {model.length}{together}", "Shorten it, or lower --max-new-tokens")
