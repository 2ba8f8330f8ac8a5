"""MODEL: a config.json or a published name becomes a run's settings and the engine's description."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from real_runs import environment
from support import REPO_ROOT, write_indexed_dataset

from t5bench import Problem
from t5bench.corpus.index import write_record
from t5bench.costmodel.job import Architecture
from t5bench.costmodel.published import PUBLISHED
from t5bench.plan.described_model import with_model
from t5bench.plan.planner import plan
from t5bench.plan.scripts import script_defaults

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 4400, "max_position_embeddings": 256,
}  # fmt: skip
LAUNCHER = ["bash", str(REPO_ROOT / "scripts" / "run_megatron_t5_tensor.sh"), "--dry-run=json"]


def written(folder: Path, **more: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | more))
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_described_once(name: str):
    """A record's description is a value of MODEL, which means the same again."""
    settings = with_model({"MODEL": name}, "/")
    assert with_model(settings, "/elsewhere") == settings
    assert settings["ENGINE"] == "native"


def test_a_plan_has_the_models_sizes(tmp_path: Path):
    written(tmp_path)
    planned = plan(environment(MODEL=".", SEQ_LENGTH="64"), "ddp", directory=str(tmp_path))
    model = Architecture.of_arguments(planned.named_arguments, 0)
    assert (model.kind, model.kv_heads, model.padded_vocabulary, model.decoder_length) == ("llama", 2, 4400, 64)
    assert planned.value("HIDDEN_SIZE") == "64" and "HIDDEN_SIZE" not in planned.chosen
    assert Path(planned.program[-1]).name == "pretrain_gpt.py"


def test_a_preset_has_lengths_for_it_too(tmp_path: Path):
    planned = plan(environment(MODEL=str(written(tmp_path)), MODEL_PRESET="tiny"), "ddp")
    assert (planned.value("SEQ_LENGTH"), planned.value("HIDDEN_SIZE")) == ("128", "64")


@pytest.mark.parametrize(("words", "fits"), [(4400, True), (4401, False)])
def test_a_tokenizer_with_more_words_than_the_model_has_rows_is_said_before_anything_runs(
    tmp_path: Path, words: int, fits: bool
):
    (tmp_path / "data").mkdir()
    write_indexed_dataset(tmp_path / "data" / "xsum_text_document", [[1, 2, 3]])
    write_record(tmp_path / "data" / "xsum_text_document", {"source": "a test", "vocabulary": words})
    settings = {"MODEL": str(written(tmp_path)), "SEQ_LENGTH": "64", "MEGATRON_DATA_DIR": str(tmp_path / "data")}
    found = [obstacle.found for obstacle in plan(environment(**settings), "ddp").obstacles]
    said = f"the data's tokenizer has {words} words, and the model has rows for 4400"
    assert (said in found) != fits, found


def test_the_quick_start_has_a_place_for_each_model(tmp_path: Path):
    """So that a second one does not meet the first one's runs."""
    places = set()
    for words in (4400, 4401):
        model = with_model({"MODEL": str(written(tmp_path, vocab_size=words))}, "/")
        places.add(script_defaults("quickstart", model)["RUNS_DIR"])
    places |= {script_defaults("quickstart", {"MODEL_FAMILY": family})["RUNS_DIR"] for family in ("t5", "gpt")}
    assert len(places) == 4, places


def test_a_launcher_takes_it_from_where_it_is_typed_and_twice(tmp_path: Path):
    """What a sweep starts has the description in its environment."""
    written(tmp_path)

    def described(model: str, folder: Path) -> str:
        settings = environment(MODEL=model, SEQ_LENGTH="64", DEVICE="cpu")
        answer = subprocess.run(LAUNCHER, env=settings, cwd=folder, capture_output=True, text=True, check=False)
        (role,) = [of_role for of_role in json.loads(answer.stdout)["settings_by_role"].values() if "MODEL" in of_role]
        return role["MODEL"]

    once = described("config.json", tmp_path)
    assert described(once, REPO_ROOT) == once


@pytest.mark.parametrize(
    ("config", "settings", "found"),
    [
        ({}, {"HIDDEN_SIZE": "32"}, "HIDDEN_SIZE=64"),
        ({}, {"SEQ_LENGTH": "512"}, "takes 256 tokens"),
        ({}, {"ENGINE": "megatron"}, "needs ENGINE=native"),
        ({}, {"TENSOR_PARALLEL_SIZE": "3", "NPROC_PER_NODE": "3"}, "tensor-parallel size 3"),
        ({"model_type": "mistral", "sliding_window": 32}, {"SEQ_LENGTH": "64"}, "sliding window of 32"),
        ({"num_experts": 8}, {}, "num_experts"),
        ({"state_size": 16}, {}, "state_size"),
        ({"model_type": "gemma"}, {}, "gemma"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {}, "yarn"),
    ],
)
def test_what_is_not_trained_is_refused_by_name(
    tmp_path: Path, config: Mapping[str, Any], settings: Mapping[str, str], found: str
):
    model = str(written(tmp_path, **config))
    planned = plan(environment(**{"MODEL": model, "SEQ_LENGTH": "64", **settings}), "tensor")
    fatal = [str(obstacle) for obstacle in planned.obstacles if obstacle.fatal]
    assert any(found in each for each in fatal), fatal


def test_a_tensor_parallel_size_that_does_not_divide_says_which_do(tmp_path: Path):
    """As SmolLM2-135M's: 9 heads in 3 groups."""
    heads = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 144}
    sizes = {"TENSOR_PARALLEL_SIZE": "2", "NPROC_PER_NODE": "2", "SEQ_LENGTH": "64"}
    planned = plan(environment(MODEL=str(written(tmp_path, **heads)), **sizes), "tensor")
    remedies = {obstacle.remedy for obstacle in planned.obstacles if obstacle.fatal}
    assert remedies == {"TENSOR_PARALLEL_SIZE may be 1 3 9 for this model"}


@pytest.mark.parametrize("value", ["no-such-model", "{", "[1]", '{"kind": "llama"}', '{"kind": "llama", "x": 1}'])
def test_a_value_that_is_no_model_says_what_would_be(value: str):
    with pytest.raises(Problem) as problem:
        with_model({"MODEL": value}, "/")
    assert "config.json" in problem.value.remedy
