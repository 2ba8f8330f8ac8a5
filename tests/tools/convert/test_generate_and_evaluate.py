"""Generating and evaluating: spans, options, and scores against the plainest computation."""

import argparse
import json
import math
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import REPO_ROOT
from tools.convert.convert_commands import script, t5bench
from transformers import GPT2Config, MT5Config, PretrainedConfig, T5Config

from t5bench import Problem
from t5bench.record.records import load
from t5bench.tools.convert import spans
from t5bench.tools.convert.exported import ExportedModel, usable_device
from t5bench.tools.convert.generate import generation_options, read_prompts
from t5bench.tools.convert.scores import ordinary_spaces, windows
from t5bench.tools.convert.tokenizer import tokenizer_of

PROMPT = "The <extra_id_0> walks in <extra_id_1> park."


def test_gaps_are_filled_by_their_names():
    spans.check_gaps(PROMPT)
    pieces = spans.fillings("<extra_id_0> cute dog <extra_id_1> the <extra_id_0> again <extra_id_2>")
    assert spans.filled(PROMPT, pieces) == "The [cute dog] walks in [the] park."
    assert spans.filled(PROMPT, {1: ""}) == "The <extra_id_0> walks in [nothing] park."
    text = spans.without_special("<pad><extra_id_0> a</s>", ["<pad>", "</s>", "<extra_id_0>"])
    assert spans.fillings(text) == {0: "a"}


@pytest.mark.parametrize("is_t5", [True, False])
def test_a_gpt_continues_a_prompt_that_does_not_end(is_t5: bool):
    """A T5's tokenizer ends each text in `</s>`, with which a GPT that was trained with it begins a new document."""
    tokenizer = tokenizer_of(REPO_ROOT / "megatron_data" / "sample" / "tokenizer", "t5")
    config = argparse.Namespace(is_encoder_decoder=is_t5)
    model = ExportedModel(REPO_ROOT, argparse.Namespace(config=config), tokenizer, usable_device("cpu"))
    tokens = model.tokens("The man")
    assert len(tokens) > 1 and (tokens[-1] == tokenizer.eos_token_id) is is_t5


@pytest.mark.parametrize("name", ["banana", "meta", "cuda:99"])
def test_a_device_on_which_nothing_can_be_computed_is_named(name: str):
    with pytest.raises(Problem, match=f"--device {name} cannot be used"):
        usable_device(name)


def test_a_file_that_is_no_text_has_no_prompts(tmp_path: Path):
    file = tmp_path / "prompts"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(Problem, match="is no text"):
        read_prompts(argparse.Namespace(prompt=[], prompts=file))


@pytest.mark.parametrize("prompt", ["no gap", "<extra_id_1>", "<extra_id_0> <extra_id_0>", "<extra_id_1> <extra_id_0>"])
def test_other_prompts_are_refused_for_a_t5(prompt: str):
    with pytest.raises(Problem, match="fills gaps"):
        spans.check_gaps(prompt)


def options(**given: object) -> dict[str, object]:
    none = dict.fromkeys(("temperature", "top_k", "top_p", "max_new_tokens"))
    return generation_options(argparse.Namespace(**none | {"samples": 1, "seed": 1234} | given))


def test_any_drawing_option_draws():
    assert "do_sample" not in options()
    assert options(top_p=0.9) == {"top_p": 0.9, "do_sample": True, "top_k": 0, "num_return_sequences": 1}


@pytest.mark.parametrize(
    "given",
    [
        *({"temperature": value} for value in (0, math.inf, math.nan)),
        *({"seed": value} for value in (-1, 2**64)),
        *({"top_k": 0}, {"top_p": 1.5}, {"max_new_tokens": 0}, {"samples": 2}),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, float]):
    with pytest.raises(Problem):
        options(**given)


@pytest.mark.parametrize(("length", "stride"), [(4, 4), (4, 1), (4, 3), (100, 100)])
def test_windows_score_every_token_once_with_the_most_context(length: int, stride: int):
    tokens = list(range(11))
    scored = []
    for piece, count in windows(tokens, length, stride):
        assert len(piece) <= length + 1
        assert len(piece) == length + 1 or piece[0] == 0
        scored += piece[-count:]
    assert scored == tokens[1:]


def test_wikitexts_spaces_become_those_of_english():
    text = ' = Robert = \n In 2 @,@ 000 @.@ 5 well @-@ known books ( " all " ) , he didn \'t .\n'
    assert ordinary_spaces(text) == '= Robert =\nIn 2,000.5 well-known books ("all"), he didn\'t.\n'


@pytest.mark.nightly
def test_scores_and_texts_of_a_gpt_are_those_of_the_plainest_computation(tmp_path: Path):
    found = script("gpt_scores.py", tmp_path)
    for stride in ("24", "7"):
        assert found[stride]["wikitext word perplexity"] == pytest.approx(found[f"expected {stride}"], rel=1e-4)
        assert found[stride]["lambada accuracy"] == pytest.approx(found["expected accuracy"])
    assert found["24"]["wikitext word perplexity"] != pytest.approx(found["7"]["wikitext word perplexity"], rel=1e-3)
    assert found["24"]["lambada passages"] == 3 and found["expected accuracy"] > 0
    assert found["parquet"].items() <= found["24"].items(), "a published file's rows are the text's lines"
    greedy, drawn, same, other, likeliest = found["texts"]
    assert greedy.rstrip("\n") == likeliest.rstrip("\n") == found["greedy"]
    assert drawn == same and drawn != greedy and other != drawn


@pytest.mark.nightly
def test_lm_evaluation_harness_reads_an_export_and_agrees(tmp_path: Path):
    program = os.environ.get("LM_EVAL") or shutil.which("lm_eval")
    if not program:
        pytest.skip(
            'no lm_eval: pip install "lm_eval[hf]" in an environment of its own, and set LM_EVAL to its program'
        )
    found = script("harness_scores.py", tmp_path, program)
    assert found["harness"] == pytest.approx([found["lambada perplexity"], found["lambada accuracy"]], rel=1e-5)


@pytest.fixture(scope="module")
def half_trained(native_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hybrid's run as it was after its first evaluation."""
    run = shutil.copytree(native_runs / "hybrid", tmp_path_factory.mktemp("half") / "hybrid")
    shutil.rmtree(run / "checkpoints" / "iter_0000020")
    return run


@pytest.mark.slow
def test_evaluate_prints_the_loss_that_the_run_logged(half_trained: Path):
    result = t5bench("evaluate", half_trained, "--json")
    assert result.returncode == 0, result.stderr
    logged = load(half_trained).evaluations[0]
    figures = json.loads(result.stdout)
    assert logged.iteration == 10 and figures["validation samples"] == 16
    assert figures["validation loss"] == pytest.approx(logged.lm_loss, rel=1e-6)
    refused = t5bench("evaluate", half_trained, "--lambada", "passages.jsonl")
    assert refused.returncode == 2 and "this model is a T5" in refused.stderr


@pytest.mark.slow
def test_a_t5_fills_the_gaps_of_a_file(half_trained: Path, tmp_path: Path):
    (tmp_path / "prompts").write_text(f"{PROMPT}\n\nA <extra_id_0>.\n")
    words = "--prompts", tmp_path / "prompts", "--top-k", "5", "--samples", "2", "--max-new-tokens", "6"
    result = t5bench("generate", half_trained, *words)
    assert result.returncode == 0, result.stderr
    assert [line[:2] for line in result.stdout.splitlines()] == ["Th", "Th", "A ", "A "]
    assert t5bench("generate", half_trained, *words).stdout == result.stdout
    too_long = t5bench("generate", half_trained, "--prompt", PROMPT, "--max-new-tokens", "500")
    assert too_long.returncode == 2 and "the model takes 128" in too_long.stderr


@pytest.mark.parametrize(
    ("config", "length"), [(MT5Config(), sys.maxsize), (T5Config(), sys.maxsize), (GPT2Config(n_positions=40), 40)]
)
def test_relative_positions_take_a_text_of_any_length(config: PretrainedConfig, length: int):
    model = ExportedModel(Path(), SimpleNamespace(config=config), None, torch.device("cpu"))
    assert model.length == length
