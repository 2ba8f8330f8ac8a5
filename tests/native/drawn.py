"""Models that nobody chose: configurations drawn at random of every kind, and strategies that can divide them.

    PYTHONPATH=.:tests:packages/judge/src python tests/native/drawn.py [KIND ...]

trains each under up to four strategies beside Transformers' own model, as kinds.py does those of described.py. Without
a kind it trains all, some ten minutes on two cores, and writes docs/generated/drawn_models.md.
"""

import random
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import described
import strategies
import torch
from described import LENGTH, arguments_of, description_of
from strategies import Strategy, largest_difference
from support import REPO_ROOT

from t5bench.costmodel.job import Architecture
from t5bench.costmodel.schedule import SCHEDULES, interleaving_fault
from t5bench.plan.layout import has_tensor_size

KINDS = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "t5", "mt5")
SEEDS = range(2, 8)
STEPS = 5
ROWS = 4  # micro-batches of an iteration, of all data-parallel ranks together
MOST_PROCESSES = 6
ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu", "swish")
PAGE = REPO_ROOT / "docs" / "generated" / "drawn_models.md"
BEGINNING = [
    "# Models drawn at random, beside Transformers",
    "",
    "Tiny models whose configurations and strategies a random number chose, five steps in fp32 without dropout, on a"
    " CPU with gloo; `tests/native/drawn.py` draws and trains them.",
    "After each strategy: the largest relative difference of a loss or a gradient norm from Transformers' own model"
    " with the same weights, samples and optimizer.",
    "The parity gate allows 5e-6.",
    "Heads are those of queries, in groups if these are fewer, and the columns of each; a strategy ends with its number"
    " of processes, a pipeline with stages x tensor-parallel x data-parallel ones.",
    "Where a ReLU's input is 0 but for rounding, one order of sums opens it and another does not, and the gradient norm"
    " of that step jumps.",
    "",
    "| model | layers | heads | hidden size | vocabulary | tied | activation | largest differences |",
    "|---|---|---|---|---|---|---|---|",
]


def config_of(kind: str, seed: int) -> dict[str, Any]:
    """A config.json. Widths are odd where Transformers lets them."""
    draw = random.Random(f"{kind} {seed}")
    if kind in ("t5", "mt5"):
        return {"model_type": kind} | _encoder_decoder(draw)
    if kind == "gpt2":
        return {"model_type": kind} | _gpt2(draw)
    return {"model_type": kind} | _decoder(kind, draw)


def _vocabulary(draw: random.Random) -> int:
    return draw.randint(described.WORDS, described.WORDS + 60)


def _epsilon(draw: random.Random) -> float:
    return draw.choice((1e-6, 1e-5, 1e-4, 1e-3, 1e-2))


def _decoder(kind: str, draw: random.Random) -> dict[str, Any]:
    heads = draw.choice((1, 2, 3, 4, 6, 8))
    head_size = draw.choice((4, 6, 8, 10, 14, 16))
    config: dict[str, Any] = {
        "num_hidden_layers": draw.randint(2, 6),
        "num_attention_heads": heads,
        "hidden_size": heads * head_size,
        "intermediate_size": 12 * draw.randint(2, 9),
        "vocab_size": _vocabulary(draw),
        "max_position_embeddings": draw.randint(LENGTH, 3 * LENGTH),
        "initializer_range": draw.choice((0.05, 0.1, 0.15)),
        "hidden_act": draw.choice(ACTIVATIONS),
        "tie_word_embeddings": draw.random() < 0.5,
        "rope_theta": draw.choice((20.0, 500.0, 10000.0, 1e6)),
    }
    if kind == "gpt_neox":
        columns = 2 * draw.randint(1, head_size // 2)
        return config | {
            "layer_norm_eps": _epsilon(draw),
            "use_parallel_residual": draw.random() < 0.5,
            "attention_bias": draw.random() < 0.5,
            "rotary_pct": (columns + 0.5) / head_size if columns < head_size else 1.0,
            "rotary_emb_base": draw.choice((20, 500, 10000)),
            "rope_scaling": _rotary_scaling(draw),
        }
    groups = draw.choice([size for size in range(1, heads + 1) if heads % size == 0])
    config |= {"num_key_value_heads": groups, "rms_norm_eps": _epsilon(draw)}
    if kind == "qwen3" or draw.random() < 0.6:
        config["head_dim"] = head_size
        config["hidden_size"] = draw.randint(17, 90)
    if kind == "llama":
        config |= {"attention_bias": draw.random() < 0.5, "mlp_bias": draw.random() < 0.5}
    if kind == "qwen3":
        config["attention_bias"] = draw.random() < 0.5
    if kind == "mistral":
        config["sliding_window"] = draw.choice((None, LENGTH, 2 * LENGTH))
    return config | {"rope_scaling": _rotary_scaling(draw)}


def _rotary_scaling(draw: random.Random) -> dict[str, Any] | None:
    way = draw.choice(("", "linear", "llama3"))
    if way == "linear":
        return {"rope_type": "linear", "factor": draw.choice((1.5, 4.0))}
    if way == "llama3":
        low = draw.choice((0.5, 1.0, 2.0))
        return described.LLAMA3 | {"low_freq_factor": low, "factor": draw.choice((2.0, 8.0))}
    return None


def _gpt2(draw: random.Random) -> dict[str, Any]:
    heads = draw.choice((1, 2, 3, 4, 6))
    return {
        "n_layer": draw.randint(2, 6),
        "n_head": heads,
        "n_embd": heads * draw.choice((5, 8, 11, 16)),
        "n_inner": draw.choice((None, 12 * draw.randint(2, 9))),
        "vocab_size": _vocabulary(draw),
        "n_positions": draw.randint(LENGTH, 2 * LENGTH),
        "layer_norm_epsilon": _epsilon(draw),
        "initializer_range": draw.choice((0.05, 0.1, 0.15)),
        "activation_function": draw.choice(ACTIVATIONS),
        "tie_word_embeddings": draw.random() < 0.5,
    }


def _encoder_decoder(draw: random.Random) -> dict[str, Any]:
    buckets = draw.choice((4, 6, 8, 14, 32))
    return {
        "num_layers": draw.randint(1, 4),
        "num_decoder_layers": draw.randint(1, 4),
        "d_model": draw.randint(17, 90),
        "d_kv": draw.choice((4, 5, 8, 11, 16)),
        "num_heads": draw.choice((1, 2, 3, 4, 6)),
        "d_ff": 12 * draw.randint(2, 9),
        "vocab_size": _vocabulary(draw),
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": buckets // 2 + draw.randint(1, 40),
        "feed_forward_proj": draw.choice(("relu", "gelu", "silu", "gated-gelu", "gated-silu", "gated-relu")),
        "tie_word_embeddings": draw.random() < 0.5,
        "layer_norm_epsilon": _epsilon(draw),
        "initializer_factor": draw.choice((0.3, 0.5, 0.8)),
    }


# ---- strategies ------------------------------------------------------------------------------------------------------


def strategies_for(model: Architecture, draw: random.Random) -> dict[str, Strategy]:
    """One that divides data, and where they fit one that divides layers' tensors, one their depth, and one both."""
    found = {}
    for choices in (_of_data(), _of_tensors(model), _pipelines(model, draw), _of_both(model, draw)):
        fitting = list(choices)
        if fitting:
            name, strategy = draw.choice(fitting)
            found[name] = strategy
    return found


def _of_data() -> Iterator[tuple[str, Strategy]]:
    for world in (2, 4):
        yield f"ddp {world}", Strategy(world)
        yield f"fsdp2 {world}", Strategy(world, ["--fsdp2"])
        yield f"fsdp2 kept {world}", Strategy(world, ["--fsdp2", "--fsdp2-keep-parameters"])
        yield f"zero2 {world}", Strategy(world, zero="zero2")
        yield f"zero3 {world}", Strategy(world, zero="zero3")
    yield "hsdp 4", Strategy(4, ["--fsdp2", "--fsdp2-shard-size", "2"])


def tensor_sizes(model: Architecture, most: int = MOST_PROCESSES) -> list[int]:
    return [size for size in range(2, most + 1) if has_tensor_size(size, model.heads, model.kv_heads, model.ffn)]


def _divides_tokens(model: Architecture, size: int) -> bool:
    return model.encoder_length % size == 0 and model.decoder_length % size == 0


def _of_tensors(model: Architecture) -> Iterator[tuple[str, Strategy]]:
    sizes = tensor_sizes(model)
    for size in [size for size in sizes if size > model.kv_heads] or sizes:  # the rarer ones where there are any
        flags = ["--tensor-model-parallel-size", str(size)]
        yield f"tensor {size}", Strategy(size, flags)
        yield f"tensor {size}, recompute", Strategy(size, [*flags, "--recompute-granularity", "full"])
        if _divides_tokens(model, size):
            yield f"tensor {size}, sequence", Strategy(size, [*flags, "--sequence-parallel"])
        if 2 * size <= MOST_PROCESSES:
            yield f"tensor {size}, ddp", Strategy(2 * size, flags)
            yield f"tensor {size}, fsdp2", Strategy(2 * size, [*flags, "--fsdp2"])


def _pipelines(model: Architecture, draw: random.Random, tensor: int = 1) -> Iterator[tuple[str, Strategy]]:
    for stages in range(2, MOST_PROCESSES // tensor + 1):
        for data in (1, 2):
            for schedule in SCHEDULES:
                parts = 2 if schedule == "interleaved" else 1
                chunks = stages * parts
                world = stages * tensor * data
                if world > MOST_PROCESSES or ROWS // data < stages or chunks > model.layers:
                    continue
                if parts > 1 and interleaving_fault(stages, ROWS // data):
                    continue
                flags = ["--pipeline-model-parallel-size", str(stages), "--tensor-model-parallel-size", str(tensor)]
                flags += ["--pipeline-schedule", schedule, "--virtual-pipeline-stages", str(parts)]
                split = 1
                if model.cross_attention:
                    splits = range(max(1, chunks - model.decoder_layers), min(chunks - 1, model.encoder_layers) + 1)
                    split = draw.choice(splits)
                name = f"{schedule} {stages} x {tensor} x {data}"
                yield name, Strategy(world, flags, split=split)


def _of_both(model: Architecture, draw: random.Random) -> Iterator[tuple[str, Strategy]]:
    for tensor in tensor_sizes(model, MOST_PROCESSES // 2):
        yield from _pipelines(model, draw, tensor)


def differences(kind: str, seed: int, directory: Path) -> dict[str, float]:
    """By strategy, the largest relative difference of a loss or a gradient norm from Transformers' model's."""
    config = config_of(kind, seed)
    ways = strategies_for(description_of(config), random.Random(f"{kind} {seed} ways"))
    reference = described.train(config, arguments_of(config), STEPS)
    found = {}
    for number, (name, strategy) in enumerate(ways.items()):
        curve = strategies.train(config, strategy, directory / str(number), STEPS)
        found[name] = largest_difference(curve, reference)
    return found


def row(kind: str, seed: int, found: Mapping[str, float]) -> str:
    a = description_of(config_of(kind, seed))
    layers = f"{a.encoder_layers} + {a.decoder_layers}" if a.encoder_layers else str(a.decoder_layers)
    heads = f"{a.heads} of {a.head_size}" if a.kv_heads == a.heads else f"{a.heads} in {a.kv_heads} of {a.head_size}"
    cells = [f"{kind} {seed}", layers, heads, a.hidden, a.padded_vocabulary, "yes" if a.tied else "no", a.activation]
    cells.append("; ".join(f"{name}: {off:.1e}" for name, off in found.items()))
    return f"| {' | '.join(map(str, cells))} |"


def main(kinds: Sequence[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for kind in kinds or KINDS:
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as directory:
                rows.append(row(kind, seed, differences(kind, seed, Path(directory))))
            print(rows[-1], flush=True)
    if not kinds:
        PAGE.write_text("\n".join([*BEGINNING, *rows]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
