"""Every setup of the native engine continues every other's checkpoint: trains all pairs, and compares the curves.

    python tests/native/continuations.py MODEL PRECISION [--ring | --seed N] [--mistake NAME] [--store FILE]
        [--setups SETUP...]

MODEL is one of the launchers' families, or a kind of tests/described.py. It prints one JSON object: for each pair, the
largest relative difference of a loss and of a gradient norm after the change from the uninterrupted run of the new
setup. Without names of setups, all of them. With --ring each continues the one that is named before it; of a kind, six
setups drawn by its name. With --seed, four setups drawn by the model's name and this number continue each other. With
--mistake something is changed after it was loaded: a kind of tensor, or the step.

The processes are forked from this one, so that torch is imported once. A setup's processes continue all checkpoints in
turn, and before each everything that they hold is made nan, so that nothing can be left from the one before.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

import described
import torch
import torch._dynamo
import torch.distributed as dist
from real_runs import environment
from support import REPO_ROOT

from native import checkpoint
from native.arguments import parse
from native.data import open_data
from native.model import mesh_of
from native.parallel import local_part
from native.schedule import learning_rate
from native.token_file import TokenFile, pad_vocabulary
from native.train import share_vocabulary
from native.trainers import make_trainer
from t5bench.checkpoint_form import folder_of, read_seal
from t5bench.costmodel.schedule import ZERO_BUBBLE
from t5bench.imports import import_deepspeed, leave_out_compiler
from t5bench.plan import planner
from t5bench.plan.ports import free_port

# The launchers' T5 is another model.
KINDS = {"t5 v1.0" if kind == "t5" else kind: config for kind, config in described.CONFIGS.items()}
SAMPLED = 6
"""Setups of a ring of a kind."""
DRAWN = 4
"""Setups of a seed."""
WORDS = 4224
"""More than the sample's tokenizer has."""
SAMPLE = REPO_ROOT / "megatron_data" / "sample"
SAVED = 3
LAST = 6
# With GPT's short sequences and a rate of 0.01, rounding alone moves norms of uninterrupted runs by 7e-5.
SIZES = {
    "t5": {"ENCODER_SEQ_LENGTH": "32", "DECODER_SEQ_LENGTH": "16"},
    "gpt": {"SEQ_LENGTH": "64", "LR": "0.001", "MIN_LR": "0.0001"},
}
LENGTHS = {"t5": SIZES["t5"], "gpt": SIZES["gpt"] | {"SEQ_LENGTH": "32"}}
RECIPE = {
    "ENGINE": "native", "DEVICE": "cpu", "MODEL_PRESET": "tiny", "TRAIN_ITERS": str(LAST), "GLOBAL_BATCH_SIZE": "12",
    "MICRO_BATCH_SIZE": "1", "LR": "0.01", "MIN_LR": "0.001", "LR_WARMUP_ITERS": "2", "WEIGHT_DECAY": "1",
    "CLIP_GRAD": "1.3", "DROPOUT": "0", "WANDB_MODE": "disabled", "DATALOADER_WORKERS": "0",
}  # fmt: skip


class Setup(NamedTuple):
    strategy: str
    processes: int
    settings: dict[str, str] = {}  # noqa: RUF012


SETUPS = {
    "DDP, 1 process": Setup("ddp", 1),
    "DDP, 3": Setup("ddp", 3),
    "ZeRO-1, 2": Setup("zero1", 2),
    "ZeRO-2, 3": Setup("zero2", 3),
    "ZeRO-3, 3": Setup("zero3", 3),
    "ZeRO-3 offload, 2": Setup("zero3_offload", 2),
    "FSDP2, 3": Setup("fsdp2", 3),
    "HSDP, 2 x 2": Setup("fsdp2", 4, {"FSDP_SHARD_SIZE": "2"}),
    "FSDP2 with TP, 2 x 2": Setup("fsdp2", 4, {"TENSOR_PARALLEL_SIZE": "2"}),
    "TP, 2": Setup("tensor", 2),
    "TP with sequence parallelism, 2": Setup("tensor", 2, {"SEQUENCE_PARALLEL": "1"}),
    "pipeline 1F1B, 2": Setup("pipeline", 2),
    "pipeline GPipe, 4": Setup("pipeline", 4, {"PIPELINE_PARALLEL_SIZE": "4", "PIPELINE_SCHEDULE": "gpipe"}),
    "pipeline interleaved, 2": Setup("pipeline", 2, {"PIPELINE_SCHEDULE": "interleaved"}),
    "pipeline zero-bubble, 3": Setup("pipeline", 3, {"PIPELINE_PARALLEL_SIZE": "3", "PIPELINE_SCHEDULE": ZERO_BUBBLE}),
    "hybrid, TP 2 x PP 2 x DP 2": Setup("hybrid", 8),
}  # fmt: skip
# The page has none of them: of a T5, whose samples have different numbers of target tokens, they have other curves.
OTHER_MICRO_BATCHES = {
    "DDP, 2, micro-batches of 3": Setup("ddp", 2, {"MICRO_BATCH_SIZE": "3"}),
    "ZeRO-2, 3, micro-batches of 2": Setup("zero2", 3, {"MICRO_BATCH_SIZE": "2"}),
}
EVERY_SETUP = SETUPS | OTHER_MICRO_BATCHES


def family_of(model: str) -> str:
    return model if model in SIZES else described.family_of(KINDS[model])


def sizes_of(model: str, data: Path) -> dict[str, str]:
    """The settings of a model; a kind's are in a config.json beside the data."""
    if model in SIZES:
        return SIZES[model] | {"MODEL_FAMILY": model}
    config = dict(KINDS[model])
    config["vocab_size"] = WORDS + config["vocab_size"] % 2  # an odd one stays odd
    path = data / f"{model.replace(' ', '-')}.json"
    path.write_text(json.dumps(config))
    return LENGTHS[family_of(model)] | {"MODEL": str(path)}


def words_of(setup: Setup, model: str, precision: str, data: Path) -> list[str]:
    """The engine's command line, as the setup's launcher makes it."""
    recipe = {name: value for name, value in RECIPE.items() if model in SIZES or name != "MODEL_PRESET"}
    chosen = recipe | sizes_of(model, data) | setup.settings | {"NPROC_PER_NODE": str(setup.processes)}
    chosen |= {"PRECISION_FLAG": "--bf16" if precision == "bf16" else "", "MEGATRON_DATA_DIR": str(data)}
    chosen |= {"TOKENIZER_MODEL": str(SAMPLE / "tokenizer"), "MASTER_PORT": str(free_port())}
    plan = planner.plan(environment(**chosen), setup.strategy)
    if plan.obstacles:
        raise SystemExit(f"{setup}: {'; '.join(str(each) for each in plan.obstacles)}")
    if plan.ds_config:
        config = data / f"{setup.strategy}-{precision}.json"
        config.write_text(json.dumps(plan.ds_config))
        return [*plan.arguments.words, "--deepspeed_config", str(config)]
    return list(plan.arguments.words)


def prepared(directory: Path, family: str) -> Path:
    """The bundled articles as an indexed dataset."""
    data = directory / family
    script = ["bash", str(REPO_ROOT / "scripts" / "prepare_xsum_megatron.sh")]
    source = {"XSUM_SOURCE": str(SAMPLE / "articles.jsonl"), "TOKENIZER_MODEL": str(SAMPLE / "tokenizer")}
    settings = environment(MODEL_FAMILY=family, MEGATRON_DATA_DIR=str(data), **source)
    subprocess.run(script, env=settings, check=True, capture_output=True)
    return data


# ---- in one process of a setup ---------------------------------------------------------------------------------------

Curve = list[tuple[float, float]]  # a loss and a gradient norm for each iteration


class Process:
    """A rank of the engine."""

    mistake = ""
    saves: Sequence[int] = (SAVED,)

    def __init__(self, words: Sequence[str], family: str) -> None:
        args = parse(list(words), family)
        args.num_workers = 0
        self.args = args
        dist.init_process_group("gloo")
        self.file = TokenFile(args.data_path)
        self.vocabulary = share_vocabulary(args, self.file)
        pad_vocabulary(args, self.vocabulary)
        self.mesh = mesh_of(args)
        self.trainer = make_trainer(args, self.mesh)

    def train(self, done: int, saver: checkpoint.Saver | None = None) -> Curve:
        """The iterations after `done`; saves after SAVED. Every rank has the whole curve."""
        training, _ = open_data(self.args, self.mesh.dp.rank, self.file, self.vocabulary, done, self.consumed(done))
        curve = []
        for iteration in range(done + 1, LAST + 1):
            loss, norm = self.trainer.step(next(training), self.rate(iteration, done))
            loss = loss / self.args.dp if self.mesh.is_last_stage and self.mesh.tp.rank == 0 else torch.zeros_like(loss)
            dist.all_reduce(loss)
            curve.append((loss.item(), norm.item()))
            if saver and iteration in self.saves:
                saver.save(iteration)
        return curve

    def consumed(self, done: int) -> int:
        """Samples after `done` iterations."""
        return done * self.args.global_batch_size

    def rate(self, iteration: int, done: int) -> float:
        """Of an iteration of a run that continues after `done`."""
        return learning_rate(self.args, iteration - 1)

    def uninterrupted(self, directory: Path) -> Curve:
        self.args.save = str(directory)
        saver = checkpoint.Saver(self.trainer, self.args, self.mesh)
        curve = self.train(0, saver)
        saver.close()
        return curve[SAVED:]

    def continued(self, directory: Path) -> Curve:
        """From another's checkpoint; nothing of what this process holds is left."""
        with torch.no_grad():
            for parameter in self.trainer.model.parameters():
                local_part(getattr(parameter, "ds_tensor", parameter)).fill_(math.nan)
            for piece in self.trainer.pieces():
                piece.tensor.fill_(math.nan)
        self.args.load = str(directory)
        seal = read_seal(folder_of(directory, SAVED))
        checkpoint.load(self.trainer, self.args, self.mesh, seal)
        self.make_mistake()
        return self.train(SAVED)

    def make_mistake(self) -> None:
        """One step more, or a thousandth more of all tensors of a kind."""
        if self.mistake == "step":
            for state in self.trainer.optimizer.state.values():
                state["step"] += 1
        for piece in self.trainer.pieces():
            if self.mistake and piece.key.startswith(f"{self.mistake}."):
                piece.tensor.mul_(1.001)


def rank_of(words: Sequence[str], family: str, own: Path, others: Sequence[Path]) -> dict[str, Curve]:
    """What a rank of the setup `own` finds: its curve, or those after the others' checkpoints."""
    process = Process(words, family)
    if not others:
        return {own.name: process.uninterrupted(own)}
    process.trainer.begin_load(0)
    return {other.name: process.continued(other) for other in others}


def forked(setup: Setup, own: Path, work: Callable[[], dict[str, Curve]]) -> dict[str, Curve]:
    """Does this in the setup's ranks; what the first one finds. Raises RuntimeError with what a failed one said."""
    port = str(free_port())
    ranks = {}
    answer = own.parent / "answer"
    for rank in range(setup.processes):
        process = os.fork()
        if process:
            ranks[process] = rank
            continue
        status = 1
        try:
            size = str(setup.processes)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            with contextlib.redirect_stdout(sys.stderr):
                found = work()
            if rank == 0:
                answer.write_text(json.dumps(found))
            dist.barrier()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    while ranks:
        process, status = os.wait()
        rank = ranks.pop(process)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            raise RuntimeError(f"rank {rank} of {setup} failed")
    return json.loads(answer.read_text())


def difference(curve: Curve, expected: Curve) -> tuple[float, float]:
    """The largest relative difference of a loss, and of a norm; nan if a value is."""
    losses = [abs(own[0] / other[0] - 1) for own, other in zip(curve, expected, strict=True)]
    norms = [abs(own[1] / other[1] - 1) for own, other in zip(curve, expected, strict=True)]
    return tuple(math.nan if any(map(math.isnan, values)) else max(values) for values in (losses, norms))


def differences(
    model: str, precision: str, pairs: Mapping[str, Sequence[str]], directory: Path
) -> dict[str, dict[str, tuple[float, float]]]:
    """By the setup that continues and the setup that has saved. pairs: whom each setup continues."""
    family = family_of(model)
    data = prepared(directory, family)
    words = {name: words_of(EVERY_SETUP[name], model, precision, data) for name in pairs}
    folders = {name: directory / str(number) for number, name in enumerate(EVERY_SETUP)}
    expected = {}
    for name in pairs:
        found = forked(EVERY_SETUP[name], folders[name], partial(rank_of, words[name], family, folders[name], []))
        expected[name] = found[folders[name].name]
        print(f"{name}: {expected[name]}", file=sys.stderr)
    result: dict[str, dict[str, tuple[float, float]]] = {}
    for name, others in pairs.items():
        there = [folders[other] for other in others]
        found = forked(EVERY_SETUP[name], folders[name], partial(rank_of, words[name], family, folders[name], there))
        result[name] = {other: difference(found[folders[other].name], expected[name]) for other in others}
        print(f"{name}: {result[name]}", file=sys.stderr)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=(*SIZES, *KINDS))
    parser.add_argument("precision", choices=("fp32", "bf16"))
    parser.add_argument("--setups", nargs="+", choices=EVERY_SETUP, default=[*SETUPS])
    parser.add_argument("--ring", action="store_true")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--mistake", default="")
    parser.add_argument("--store", type=Path, help="put the differences into this file, from which docs has a page")
    arguments = parser.parse_args()
    names = arguments.setups
    Process.mistake = arguments.mistake
    pairs = dict.fromkeys(names, names)
    title = f"{arguments.model} {arguments.precision}"
    if arguments.seed is not None:
        title = f"{arguments.model}, seed {arguments.seed} {arguments.precision}"
        names = random.Random(f"{arguments.model} {arguments.seed}").sample(names, min(DRAWN, len(names)))
        pairs = {name: [other for other in names if other != name] for name in names}
    elif arguments.ring:
        if arguments.model in KINDS:  # so that the kinds show different pairs
            names = random.Random(arguments.model).sample(names, min(SAMPLED, len(names)))
        pairs = {name: [before] for before, name in zip([names[-1], *names], names, strict=False)}
    leave_out_compiler()
    import_deepspeed()
    gc.freeze()
    with tempfile.TemporaryDirectory() as directory:
        found = differences(arguments.model, arguments.precision, pairs, Path(directory))
    print(json.dumps(found))
    if arguments.store:
        store(arguments.store, title, found)


def store(path: Path, title: str, found: Mapping[str, Any]) -> None:
    """Puts differences into a file, in place of former ones with this title."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    content[title] = {after: {before: list(pair) for before, pair in pairs.items()} for after, pairs in found.items()}
    path.write_text(json.dumps(dict(sorted(content.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
