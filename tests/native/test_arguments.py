"""The native engine's command line: what it refuses, in one sentence, and which device a process takes."""

import pytest
import torch
from command_lines import parsed, plan
from support import REPO_ROOT

from native import arguments

ZERO1 = ["--deepspeed", "--deepspeed_config", str(REPO_ROOT / "ds_configs" / "megatron_zero1.json")]
ZERO_BUBBLE = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zero-bubble"]


@pytest.mark.parametrize(
    ("flags", "world_size", "says"),
    [
        (["--frobnicate"], 1, "--frobnicate"),
        (["--fp16"], 1, "fp16"),
        (["--split", "1,x"], 1, "--split"),
        (["--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-split-rank", "4"], 4, "one of 1 to 3"),
        (["--virtual-pipeline-stages", "2"], 1, "only the interleaved schedule"),
        (["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "interleaved"], 2, "and it needs them"),
        (["--pipeline-model-parallel-size", "2", "--global-batch-size", "2"], 2, "micro-batches"),
        ([*ZERO_BUBBLE, "--tensor-model-parallel-size", "2", "--sequence-parallel"], 4, "gathered once more"),
        ([*ZERO_BUBBLE, "--compile"], 2, "zero-bubble does not work with --compile"),
        ([*ZERO_BUBBLE, "--trace"], 2, "zero-bubble does not work with --trace"),
        (["--encoder-seq-length", "64", "--decoder-seq-length", "8"], 1, "decoder"),
        ([*ZERO1, "--tensor-model-parallel-size", "2"], 2, "shards only over data-parallel ranks"),
        (["--deepspeed"], 1, "needs --deepspeed_config"),
        (["--fsdp2", "--pipeline-model-parallel-size", "2"], 2, "no FSDP2 with pipeline stages"),
        (["--fsdp2", "--fsdp2-shard-size", "3"], 2, "does not divide 2 data-parallel processes"),
        (["--skip-train"], 1, "needs --load"),
        (["--min-lr", "1"], 1, "--min-lr <= --lr"),
        (["--distributed-backend", "nccl"], 1, "no GPU"),
        (["--share-gpus"], 1, "PyTorch sees 0"),
    ],
)
def test_a_wrong_command_line(monkeypatch: pytest.MonkeyPatch, capfd, flags: list[str], world_size: int, says: str):
    """Every process ends, and one of a node says why."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setattr("sys.argv", ["pretrain_t5.py", *plan().arguments.words, *flags])
    for local_rank in ("1", "0"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit) as end:
            arguments.start(lambda args: None)
        assert end.value.code == 2
        said = capfd.readouterr().err
        assert said.count("error: ") == int(local_rank == "0") and bool(said) == (local_rank == "0")
    assert says in said


@pytest.mark.parametrize(
    ("gpus", "local_rank", "flags", "chosen"),
    [
        (2, "3", ["--share-gpus"], "cuda:1"),
        (2, "1", ["--distributed-backend", "nccl"], "cuda:1"),
        (2, "1", [], "cpu"),
    ],
)
def test_which_gpu_a_process_takes(monkeypatch, gpus: int, local_rank: str, flags: list[str], chosen: str):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert parsed(*flags).device == torch.device(chosen)
