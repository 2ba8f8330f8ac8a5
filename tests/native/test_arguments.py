"""The native engine's command line: what it refuses, in one sentence, and which device a process takes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_lines import parsed, plan

Refusal = Callable[..., str]


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Refusal:
    """refusal(*flags, world_size=1, gpus=0): the one sentence with which a process ends that takes these flags."""

    def get(*flags: str, world_size: int = 1, gpus: int = 0, **settings: str) -> str:
        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        plan(**settings)
        for local_rank in ("1", "0"):
            monkeypatch.setenv("LOCAL_RANK", local_rank)
            with pytest.raises(SystemExit) as end:
                parsed(*flags, **settings)
            assert end.value.code == 2
            said = capfd.readouterr().err
            assert said.count("error: ") == said.count("\n") == int(local_rank == "0"), "one process of a node speaks"
        return said

    return get


@pytest.mark.parametrize(
    ("flags", "world_size", "says"),
    [
        (["--frobnicate"], 1, "--frobnicate"),
        (["--lr", "fast"], 1, "--lr"),
        (["--fp16"], 1, "fp16"),
        (["--split", "1,x"], 1, "--split"),
        (["--tensor-model-parallel-size", "4"], 2, "2 processes do not divide"),
        (["--tensor-model-parallel-size", "2", "--num-attention-heads", "3"], 2, "attention heads"),
        (["--tensor-model-parallel-size", "2", "--ffn-hidden-size", "129"], 2, "feed-forward"),
        (["--pipeline-model-parallel-size", "4"], 4, "two pipeline stages"),
        (["--pipeline-model-parallel-size", "2", "--global-batch-size", "2"], 2, "micro-batches"),
        (["--global-batch-size", "9"], 2, "--global-batch-size 9 is not"),
        (["--encoder-seq-length", "65"], 1, "position embeddings"),
        (["--encoder-seq-length", "64", "--decoder-seq-length", "8"], 1, "decoder"),
        (["--save", "somewhere"], 1, "--save-interval"),
        (["--deepspeed", "--deepspeed_config", "/nowhere.json"], 1, "/nowhere.json"),
        (["--distributed-backend", "nccl"], 1, "no GPU"),
        (["--share-gpus"], 1, "PyTorch sees 0"),
        (["--share-gpus", "--distributed-backend", "nccl"], 1, "--distributed-backend gloo"),
        (["--share-gpus", "--deepspeed"], 1, "no --deepspeed"),
    ],
)
def test_a_wrong_command_line(refusal: Refusal, flags: list[str], world_size: int, says: str):
    assert says in refusal(*flags, world_size=world_size)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train_micro_batch_size_per_gpu": 1}, "train_micro_batch_size_per_gpu"),
        ({"gradient_clipping": 1.0}, "gradient_clipping"),
        ({"bf16": {"enabled": True}}, "precision"),
        ({"zero_optimization": {"stage": 1}}, "stage"),
        ({"zero_optimization": None}, "cannot be used"),
    ],
)
def test_a_json_that_contradicts_the_arguments(refusal: Refusal, tmp_path: Path, change: dict, says: str):
    config, path = plan("zero2").ds_config, tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    flags = "--deepspeed_config", str(path)
    assert parsed(*flags, strategy="zero2").deepspeed_json["zero_optimization"]["stage"] == 2
    path.write_text(json.dumps(config | change))
    assert says in refusal(*flags, strategy="zero2")


@pytest.mark.parametrize(
    ("gpus", "local_rank", "flags", "chosen"),
    [
        (1, "1", ["--share-gpus"], "cuda:0"),
        (2, "3", ["--share-gpus"], "cuda:1"),
        (2, "1", ["--distributed-backend", "nccl"], "cuda:1"),
        (2, "1", [], "cpu"),
    ],
)
def test_which_gpu_a_process_takes(
    monkeypatch: pytest.MonkeyPatch, gpus: int, local_rank: str, flags: list[str], chosen: str
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert parsed(*flags).device == torch.device(chosen)
