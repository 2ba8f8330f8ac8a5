"""Command lines and runs of the native engine, for its tests."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from harness import REPO_ROOT

from native import arguments
from t5bench.plan.ports import free_port
from t5bench.record.log import Iteration, PeakMemory, iterations, peak_memory

TIME_LIMIT = 240
TOKENIZER = REPO_ROOT / "megatron_data" / "sample" / "tokenizer"
# (processes, tensor parallel, pipeline parallel, the file of ds_configs/); every further process is data parallel.
LAYOUTS = {
    "ddp": (2, 1, 1, None),
    "zero1": (2, 1, 1, "megatron_zero1.json"),
    "zero2": (2, 1, 1, "megatron_zero2.json"),
    "zero3": (2, 1, 1, "megatron_zero3.json"),
    "zero3_offload": (2, 1, 1, "megatron_zero3_offload.json"),
    "tensor": (2, 2, 1, None),
    "pipeline": (2, 1, 2, None),
    "hybrid": (4, 2, 2, None),
    "hybrid on 8": (8, 2, 2, None),
    "alone": (1, 1, 1, None),
}
CLIP = 2.0


@dataclass
class Trained:
    """A finished run."""

    directory: Path
    output: str

    @property
    def iterations(self) -> list[Iteration]:
        return list(iterations(self.output.splitlines()))

    @property
    def losses(self) -> list[float]:
        return [line.lm_loss for line in self.iterations]

    @property
    def norms(self) -> list[float]:
        return [line.grad_norm for line in self.iterations]

    @property
    def memory(self) -> list[PeakMemory]:
        return peak_memory(self.output.splitlines())


def command_line(layout: str, data: Path, directory: Path, iterations: int = 20, precision: str = "") -> list[str]:
    """What a launcher passes for a tiny T5 in float32 without dropout, clipped in some iterations and not in others."""
    _, tp, pp, ds_config = LAYOUTS[layout]
    flags = f"""
        --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}
        --encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 64 --num-attention-heads 4 --kv-channels 16
        --ffn-hidden-size 128 --encoder-seq-length 64 --decoder-seq-length 32 --max-position-embeddings 64
        --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 8 --train-iters {iterations}
        --lr 0.001 --min-lr 0 --lr-decay-style cosine --lr-warmup-iters 0 --weight-decay 0.01 --clip-grad {CLIP}
        --seed 1234 --data-impl mmap --split 949,50,1 --num-workers 0 --tokenizer-type HFTokenizer
        --make-vocab-size-divisible-by {128 // tp} --log-interval 1 --eval-interval 1000 --eval-iters 0
        --distributed-backend gloo --distributed-timeout-minutes 4 --DDP-impl local --no-gradient-accumulation-fusion
        --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --layout-independent-init {precision}
    """.split()
    flags += ["--data-path", str(data), "--tokenizer-model", str(TOKENIZER), "--tensorboard-dir", str(directory / "tb")]
    if pp > 1:
        flags += ["--pipeline-model-parallel-split-rank", "1"]
    if ds_config:
        config = json.loads((REPO_ROOT / "ds_configs" / ds_config).read_text()) | {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": CLIP,
            "bf16": {"enabled": precision == "--bf16"},
            "fp16": {"enabled": False},
            "steps_per_print": 10**9,
        }
        path = directory / "ds_config.json"
        path.write_text(json.dumps(config))
        stage = str(config["zero_optimization"]["stage"])
        flags += ["--deepspeed", "--deepspeed_config", str(path), "--zero-stage", stage, "--no-pipeline-parallel"]
        flags += ["--cpu-optimizer"] if "offload" in ds_config else []
    return flags


def torchrun(processes: int, script: Path, flags: list[str], **environment: str) -> subprocess.CompletedProcess:
    """Runs a script in `processes` processes on a free loopback port, one thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", str(processes)]
    command += [
        "--node_rank",
        "0",
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        str(free_port()),
        str(script),
        *flags,
    ]
    base = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "PYTHONPATH"))}
    base |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, env=base | environment, capture_output=True, text=True, timeout=TIME_LIMIT, check=False
    )


def parsed(*flags: str, layout: str = "alone", data: Path = Path("data"), directory: Path = Path()) -> object:
    """The native engine's arguments for a command line, parsed in this process."""
    return arguments.parse([*command_line(layout, data, directory), *flags])


def largest_difference(first: list[float], second: list[float]) -> float:
    assert len(first) == len(second) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(first, second, strict=True))
