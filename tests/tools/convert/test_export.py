"""Exports against the engines' own processes, and what is refused."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from real_runs import EXACT, environment, train
from support import NATIVE_STRATEGIES, REPO_ROOT, STRATEGIES
from tools.convert.convert_commands import FP32_ROUNDING, MISTAKE, check_logits, script, t5bench

from t5bench import Problem
from t5bench.tools.convert.export import check_shard_size


def check_exports(runs: Path, directory: Path) -> None:
    """With noise on every parameter, so that no bias and no norm can hide; the same with two parameters swapped."""
    found = script("every_strategy.py", directory, *(runs / name for name in NATIVE_STRATEGIES))
    assert found.keys() == set(NATIVE_STRATEGIES)
    for strategy, differences in found.items():
        assert differences["difference"] < FP32_ROUNDING, (strategy, differences)
        assert differences["swapped"] > MISTAKE, (strategy, differences)


@pytest.mark.nightly
def test_logits_of_every_strategys_export_are_the_engines(native_runs: Path, tmp_path: Path):
    check_exports(native_runs, tmp_path)


@pytest.mark.nightly
def test_logits_of_a_gpts_export_are_the_engines_with_every_strategy(tmp_path: Path):
    """The tokenizer is the sample's: there may be no checkout with GPT-2's."""
    sample = REPO_ROOT / "megatron_data" / "sample"
    family = {"MODEL_FAMILY": "gpt", "ENGINE": "native", "MEGATRON_DATA_DIR": str(tmp_path / "data")}
    prepare = ["bash", str(REPO_ROOT / "scripts" / "prepare_xsum_megatron.sh")]
    source = {"XSUM_SOURCE": str(sample / "articles.jsonl"), "TOKENIZER_MODEL": str(sample / "tokenizer")}
    subprocess.run(prepare, env=environment(**family, **source), check=True, timeout=120, capture_output=True)
    for strategy in NATIVE_STRATEGIES:
        processes = {"NPROC_PER_NODE": "8"} if strategy == "hybrid" else {}
        train(strategy, tmp_path / strategy, **EXACT, **family, **processes, TRAIN_ITERS="2", SAVE_INTERVAL="2")
    (tmp_path / "exports").mkdir()
    check_exports(tmp_path, tmp_path / "exports")


@pytest.mark.nightly
def test_logits_of_every_strategys_export_are_megatrons(megatron_runs: Path, megatron_dir: Path, tmp_path: Path):
    """Of GPTs too: tests/engines/test_gpt.py, which trains some."""
    check_logits(tmp_path, megatron_dir, *(megatron_runs / name for name in STRATEGIES))


@pytest.mark.parametrize("size", ["", "0", "banana", "5", "0MB", "1 GB", "-1GB", "nanGB"])
def test_a_size_of_files_that_is_none_is_refused(size: str):
    with pytest.raises(Problem, match="must be a size"):
        check_shard_size(size)
    check_shard_size("1.5gb")


@pytest.mark.nightly
def test_the_memory_of_an_export_does_not_grow_with_the_model(tmp_path: Path):
    found = script("export_memory.py", tmp_path)
    assert found["model"] > 150 and found["files"] > 10
    # A file of 10 MB, the largest parameters on the way, and what malloc keeps of them.
    assert found["taken"] < 60, found


@pytest.fixture(scope="module")
def exported(native_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hybrid's run, moved, and its export; two processes never write into the shared run."""
    moved = tmp_path_factory.mktemp("moved") / "hybrid"
    shutil.copytree(native_runs / "hybrid", moved)
    result = t5bench("export", moved, moved.parent / "export")
    assert result.returncode == 0, result.stderr
    return moved.parent


@pytest.mark.nightly
def test_an_export_says_what_it_is(exported: Path):
    card = (exported / "export" / "README.md").read_text()
    for part in ("TP 2, PP 2", "bundled sample", "of iteration 20", "Validation loss", "`T5ForConditionalGeneration`"):
        assert part in card
    config = json.loads((exported / "export" / "config.json").read_text())
    assert (config["activation_function"], config["vocab_size"]) == ("gelu", 4224)
    generation = json.loads((exported / "export" / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == list(range(4101, 4224)), "rows that no token has"


@pytest.mark.nightly
def test_what_cannot_be_exported_is_refused_in_a_sentence(exported: Path, tmp_path: Path):
    run = exported / "hybrid"
    refused = t5bench("export", run, exported / "export")
    assert refused.returncode == 2 and "exists" in refused.stderr
    refused = t5bench("export", run, tmp_path / "new", "--tokenizer", tmp_path / "nowhere")
    assert refused.returncode == 2 and "--tokenizer DIR" in refused.stderr
    refused = t5bench("export", run, tmp_path / "new", "--iteration", "15")
    assert refused.returncode == 2 and "20, 10" in refused.stderr
    incomplete = shutil.copytree(run, tmp_path / "incomplete")
    shard = incomplete / "checkpoints" / "iter_0000020" / "__3_0.distcp"
    os.truncate(shard, shard.stat().st_size // 2)
    older = t5bench("export", incomplete, tmp_path / "older")
    assert older.returncode == 0 and "iteration 10" in older.stdout, older.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["incomplete", "older"], "nothing half done is left"
