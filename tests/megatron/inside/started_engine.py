"""The real engine with a tiny model, for the processes of test_engine_fixes.py."""

import os
import sys
import time
from pathlib import Path

from support import REPO_ROOT, write_indexed_dataset

ENCODER_LENGTH = 32
DECODER_LENGTH = 16
VOCABULARY = 4224
HIDDEN = 32
LAYERS = 1
TIME_LIMIT = 7
ARGUMENTS = f"""
    --encoder-num-layers {LAYERS} --decoder-num-layers {LAYERS + 1}
    --hidden-size {HIDDEN} --num-attention-heads 2 --kv-channels 16 --ffn-hidden-size 64
    --encoder-seq-length {ENCODER_LENGTH} --decoder-seq-length {DECODER_LENGTH} --max-position-embeddings 32
    --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4 --train-iters 4
    --lr 0.001 --min-lr 0 --lr-decay-style cosine --weight-decay 0.01 --clip-grad 1.0 --seed 1234
    --data-impl mmap --split 949,50,1 --num-workers 0 --tokenizer-type HFTokenizer --log-interval 1 --eval-iters 0
    --distributed-timeout-minutes {TIME_LIMIT} --DDP-impl local --layout-independent-init
""".split()


def write_data(directory: Path, documents: int = 40) -> str:
    """The prefix of an indexed dataset of 60-token documents that end in </s> (id 1), older than what is built now."""
    prefix = directory / "text"
    directory.mkdir(parents=True, exist_ok=True)
    write_indexed_dataset(prefix, [[3 + (7 * d + 13 * i) % 3000 for i in range(59)] + [1] for d in range(documents)])
    for suffix in (".bin", ".idx"):
        os.utime(prefix.with_suffix(suffix), (time.time() - 100,) * 2)
    return str(prefix)


def set_arguments(directory: Path, *more: str) -> None:
    """The engine's command line becomes this process's."""
    tokenizer = REPO_ROOT / "megatron_data" / "sample" / "tokenizer"
    data = ["--tokenizer-model", str(tokenizer), "--data-path", write_data(directory)]
    sys.argv = ["pretrain_t5.py", *ARGUMENTS, *data, *more]
