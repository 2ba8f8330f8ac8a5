"""The native engine's reading of the command line that a launcher makes for a tiny T5."""

from argparse import Namespace
from functools import cache

from real_runs import EXACT, TINY, environment
from support import REPO_ROOT

from native import arguments
from t5bench.plan import planner
from t5bench.record.plan import Plan

TOKENIZER = REPO_ROOT / "megatron_data" / "sample" / "tokenizer"
LENGTHS = {"ENCODER_SEQ_LENGTH": "64", "DECODER_SEQ_LENGTH": "32"}


@cache
def plan(strategy: str = "ddp", **settings: str) -> Plan:
    """Of one process, in fp32 without dropout."""
    chosen = TINY | EXACT | LENGTHS | {"NPROC_PER_NODE": "1", "ENGINE": "native", "TOKENIZER_MODEL": str(TOKENIZER)}
    return planner.plan(environment(**chosen | settings), strategy)


def parsed(*flags: str, vocabulary: int = 256, **settings: str) -> Namespace:
    """The arguments of the command line and these flags, completed as the engine does with its tokenizer."""
    args = arguments.parse([*plan(**settings).arguments.words, *flags])
    args.padded_vocab_size = vocabulary
    args.pad_token = 0
    return args
