"""What an answer begins and ends with: what was asked, and one command, also where many layouts are equally good."""

import json
import re
from pathlib import Path

import pytest

from t5bench import __main__ as program
from t5bench.choose.search import command as search_command
from t5bench.choose.search.next_run import Option, Search, SearchRun
from t5bench.choose.search.runs import SearchState
from t5bench.choose.space import Space, as_fast, first_of_ties, one_to_run
from t5bench.costmodel.job import Job
from t5bench.costmodel.machine import GIB
from t5bench.costmodel.parameters import parameters
from t5bench.costmodel.ties import TIES
from t5bench.plan.planner import plan

LLAMA = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816,
         "num_hidden_layers": 8, "num_attention_heads": 16, "max_position_embeddings": 8192}  # fmt: skip
T5 = {"model_type": "t5", "d_model": 512, "num_layers": 4}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[str, str]:
    """What a command prints, and what it says beside it."""
    assert program.main([str(word) for word in words]) == 0
    return tuple(capsys.readouterr())


@pytest.mark.parametrize("command", [("layouts", "--gpus", 2), ("predict",)])
def test_an_answer_begins_with_what_was_asked(capsys: pytest.CaptureFixture[str], config: Path, command: tuple):
    shown, _ = answer(capsys, *command, "--device", "a100", "--model", config)
    first, second = shown.splitlines()[:2]
    assert first == f"{config} (LlamaForCausalLM): 168,313,856 parameters, samples of 4,096 tokens, bf16"
    assert second.startswith("2 x a100 (80 GiB), 10 Gbit/s a node, global batch 16")
    shown, _ = answer(capsys, *command, "--device", "h100", "--length", 256)
    assert shown.startswith(
        "the settings' T5: 612,736,384 parameters, samples of 256 + 128 tokens, bf16\n2 x h100 (80 GiB)"
    )


@pytest.mark.parametrize(
    ("model", "words", "settings", "tokens"),
    [
        (LLAMA, ("--length", 8192), {}, "8,192 tokens"),
        (LLAMA, (), {"SEQ_LENGTH": "2048"}, "2,048 tokens"),
        (LLAMA, ("--length", 64), {"SEQ_LENGTH": "2048"}, "64 tokens"),
        (LLAMA, (), {"ENCODER_SEQ_LENGTH": "2048"}, "4,096 tokens"),
        (T5, ("--length", 96, "--decoder-length", 32), {}, "96 + 32 tokens"),
        (T5, (), {"ENCODER_SEQ_LENGTH": "256", "DECODER_SEQ_LENGTH": "64"}, "256 + 64 tokens"),
        ("gpt-1.5b", ("--length", 512), {}, "512 tokens"),
        ("t5-v1.1-base", ("--decoder-length", 512), {}, "512 + 512 tokens"),
        ("small", ("--length", 128), {}, "128 + 128 tokens"),
    ],
)
def test_the_length_of_a_sample_may_be_asked(
    capsys: pytest.CaptureFixture[str],
    monkeypatch,
    tmp_path: Path,
    model: object,
    words: tuple,
    settings: dict,
    tokens: str,
):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(model))
    named = model if isinstance(model, str) else path
    for command in (("layouts", "--gpus", 1), ("predict",)):
        shown, _ = answer(capsys, *command, "--device", "h100", "--model", named, *words)
        assert f"samples of {tokens}" in shown.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--length", 9000), "the model takes 8192 tokens"),
        (("--decoder-length", 8), "--decoder-length is of encoder-decoders"),
        (("--model", "gpt-1.5b", "--length", 2048), "the model takes 1024 tokens, fewer than 2048"),
    ],
)
def test_a_length_that_the_model_has_not_is_refused(
    capsys: pytest.CaptureFixture[str], config: Path, words: tuple, says: str
):
    asked = ["layouts", "--gpus", "1", "--device", "h100", "--model", str(config), *map(str, words)]
    assert program.main(asked) == 2
    assert says in capsys.readouterr().err


def test_a_key_that_nobody_reads_is_named(capsys: pytest.CaptureFixture[str], config: Path):
    config.write_text(json.dumps(LLAMA | {"num_key_value_head": 4}))
    _, said = answer(capsys, "predict", "--device", "h100", "--model", config)
    assert "num_key_value_head" in said


def test_what_defaults_ignores_is_named(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.delenv("T5_RUN_SECRET", raising=False)
    monkeypatch.setenv("HIDDEN_SIZE", "64")
    monkeypatch.setenv("TP_SIZE", "2")
    for command in (("layouts", "--gpus", 1), ("predict",)):
        shown, said = answer(capsys, *command, "--device", "h100", "--defaults")
        assert "--defaults: ignored, although it is set: HIDDEN_SIZE TP_SIZE" in said
        assert "612,998,528 parameters" in shown
    monkeypatch.delenv("HIDDEN_SIZE")
    monkeypatch.delenv("TP_SIZE")
    assert not answer(capsys, "predict", "--device", "h100", "--defaults")[1]


def test_many_equal_layouts_end_in_one_command(capsys: pytest.CaptureFixture[str], monkeypatch):
    """No fastest is named where several may be it; commands stand in the ranking's order."""
    monkeypatch.delenv("ENGINE", raising=False)
    seen = []
    ranked = program.imported("t5bench.choose.space").Space.ranked

    def remembered(space):
        seen.append(ranked(space))
        return seen[-1]

    monkeypatch.setattr("t5bench.choose.space.Space.ranked", remembered)
    shown, _ = answer(capsys, "layouts", "--gpus", 16, "--device", "a100")
    ties = as_fast(seen[0])
    chosen = one_to_run(seen[0])
    assert len(ties) > 3 and chosen in ties and "The fastest" not in shown
    least = min(round(each.memory_bytes / GIB) for each in ties if each.start)
    assert round(chosen.memory_bytes / GIB) == least
    assert all(
        each.count_of_settings >= chosen.count_of_settings
        for each in ties
        if each.start and round(each.memory_bytes / GIB) == least
    )
    end = shown.strip().splitlines()[-2:]
    assert f"Of the {len(ties)} that are too close to call" in end[0] and chosen.title in end[0]
    assert end[1].strip() == chosen.start
    kinds = re.findall(r"^  (\S.*)\n    \w+=", shown, re.MULTILINE)
    fastest = {}
    for candidate in seen[0]:
        fastest.setdefault(candidate.kind, candidate.seconds)
    assert len(kinds) > 10 and kinds == sorted(kinds, key=lambda kind: fastest[kind])


def test_a_models_file_is_started_by_the_command(capsys: pytest.CaptureFixture[str], monkeypatch, config: Path):
    """The native engine trains what was priced; Megatron-DeepSpeed cannot, and no engine trains every kind."""
    monkeypatch.delenv("ENGINE", raising=False)
    words = ("layouts", "--gpus", 2, "--device", "h100", "--json", "--model", config)
    ranked = json.loads(answer(capsys, *words, "--length", 2048)[0])["2"]
    assert {(each["engine"], each["missing"]) for each in ranked} == {("native", ""), ("megatron", "no: --model")}
    command = next(each["start"] for each in ranked if each["kind"] == "TP")
    settings = dict(word.split("=", 1) for word in command.split() if "=" in word)
    assert settings["MODEL"] == str(config) and settings["SEQ_LENGTH"] == "2048"
    planned = plan({"DEVICE": "cuda", "PATH": "/usr/bin", "HOME": "/nonexistent"} | settings, "tensor")
    job = Job.of_plan(planned, 32000)
    assert parameters(job.architecture) == 168_313_856 and job.architecture.decoder_length == 2048
    config.write_text(json.dumps(LLAMA | {"model_type": "gemma"}))
    ranked = json.loads(answer(capsys, *words)[0])["2"]
    assert {each["missing"] for each in ranked} == {"no: --model"}


def test_the_command_has_a_setting_that_is_chosen_to_be_empty(capsys: pytest.CaptureFixture[str], monkeypatch):
    """PRECISION_FLAG='' trains in fp32; without it the command would train in bf16."""
    words = ("layouts", "--gpus", 2, "--device", "h100", "--json")
    monkeypatch.setenv("PRECISION_FLAG", "")
    starts = [each["start"] for each in json.loads(answer(capsys, *words)[0])["2"] if each["start"]]
    assert starts and all("PRECISION_FLAG='' " in start for start in starts)
    monkeypatch.delenv("PRECISION_FLAG")
    assert "PRECISION_FLAG" not in answer(capsys, *words)[0]


def test_hours_and_money_to_a_number_of_tokens(capsys: pytest.CaptureFixture[str], config: Path):
    asked = ("--device", "h100", "--model", config, "--tokens", "20e9", "--price", 2.5)
    for command in (("layouts", "--gpus", 2), ("predict",)):
        shown = json.loads(answer(capsys, *command, *asked, "--json")[0])
        row = shown["2"][0] if "2" in shown else next(each for each in shown["rows"] if each["seconds"])
        seconds = row["seconds"] if "2" in shown else row["seconds"]["total"]
        found = row["whole_training"]
        assert found["tokens/s"] == pytest.approx(16 * 4096 / seconds)
        hours = 20e9 / found["tokens/s"] / 3600
        assert found["hours to 2e+10 tokens"] == pytest.approx(hours)
        assert found["price at 2.5 an hour"] == pytest.approx(hours * 2 * 2.5)
        text, _ = answer(capsys, *command, *asked)
        assert "hours to 2e+10 tokens" in text and f"{hours:.4g}" in text
    t5, _ = answer(capsys, "predict", "--device", "h100", "--tokens", 16 * (512 + 128), "--json")
    row = json.loads(t5)["rows"][0]
    assert row["whole_training"]["hours to 1.02e+04 tokens"] == pytest.approx(row["seconds"]["total"] / 3600)
    assert program.main(["predict", "--device", "h100", "--price", "2"]) == 2
    assert "without --tokens" in capsys.readouterr().err


def test_a_search_follows_the_same_rule_for_ties(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path):
    seen = []
    ranked = Space.ranked
    monkeypatch.setattr(Space, "ranked", lambda space: seen.append(ranked(space)) or seen[-1])
    answer(capsys, "layouts", "--gpus", 2, "--device", "h100")
    by_name = {str(place): candidate for place, candidate in enumerate(seen[0][:6])}
    options = [Option(name, each.job, each.machine, each.backend) for name, each in by_name.items()]
    search = Search(options, measured={name: SearchRun(1.0 + 0.001 * int(name)) for name in by_name})
    standing = search.standing()
    assert standing.named.option.name == "0" and len(standing.equals) == 5
    name = search_command.name_to_run(standing, by_name)
    assert by_name[name] is first_of_ties(list(by_name.values())) and name != "0"
    search_command.report(standing, by_name, SearchState({}), tmp_path)
    shown = capsys.readouterr().out
    assert f"take the one with {TIES}: {by_name[name].title}" in shown and by_name[name].start in shown
