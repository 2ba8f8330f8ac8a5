"""Converts a checkpoint of any strategy to another layout or engine, in which RESUME=1 continues the run.

The native engine has one form for all layouts (native/form.py): whatever is converted for it is written in that form,
and what has it already is copied. For Megatron-DeepSpeed the complete parameters are cut for the wanted tensor- and
pipeline-parallel ranks, and so are the optimizer's states, and written as the engine writes a checkpoint without ZeRO;
the data-parallel size does not matter. What dropout draws cannot be converted: it begins anew from the run's seed and
the iteration.
"""

import argparse
import random
import re
import shutil
import struct
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from native.checkpoint import SCHEDULE
from t5bench import Problem
from t5bench.checkpoint_form import TRACKER
from t5bench.record.checkpoints import RESHAPED_FROM, WEIGHTS_ONLY
from t5bench.record.files import write_whole
from t5bench.tools.convert import for_megatron
from t5bench.tools.convert.checkpoint_file import Absent
from t5bench.tools.convert.foreign import of_this_model
from t5bench.tools.convert.shards import Sharding, Weights, in_order
from t5bench.tools.convert.stored import is_stored, write_stored
from t5bench.tools.convert.trained import IMPORTED, TrainedModel, settings_of
from t5bench.tools.convert.training_state import KINDS, MASTERS, TrainingState, masters_of, optimizer_of

NO_RECORD = "it was imported, and has no record of a training"


def run(arguments: argparse.Namespace) -> int:
    model = TrainedModel.of_run(arguments.run, arguments.iteration)
    engine = arguments.engine or model.engine
    is_wanted = arguments.output is not None or arguments.iteration is not None
    if engine == "native" and is_stored(model.folder) and not is_wanted:
        print(f"{arguments.run} has the form that every strategy of the native engine continues; nothing was written")
        print(f"Start any launcher with RESUME=1, OUTPUT_DIR={arguments.run} and the run's other settings.")
        print("--output DIRECTORY makes a copy, --iteration N one of an earlier checkpoint.")
        return 0
    ending = "native" if engine == "native" else f"tp{arguments.tp}-pp{arguments.pp}"
    output = arguments.output or arguments.run.with_name(f"{arguments.run.name}-{ending}")
    if output.exists():
        raise Problem(f"{output} exists", "Remove it, or name another --output")
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with of_this_model(model.folder):
            if engine == "native":
                told = write_for_native(model, partial)
            else:
                told = write_for_megatron(model, partial, Sharding.of(model.args, arguments.tp, arguments.pp))
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{output}: iteration {model.iteration} of {arguments.run} {told}")
    return 0


CARRIED = """Carried over: weights, the optimizer's states, and the iteration, which gives the next samples and rates.
Not carried over: dropout's random numbers.
To continue, start a launcher {of_what} with RESUME=1, this OUTPUT_DIR and the run's other settings."""
OF_THIS_LAYOUT = "without ZeRO of this layout, on any data-parallel size,"


def write_for_native(model: TrainedModel, output: Path) -> str:
    """Writes or copies the form that every strategy reads; what to say about it. Raises Problem."""
    folder = output / "checkpoints" / f"iter_{model.iteration:07d}"
    if is_stored(model.folder):
        shutil.copytree(model.folder, folder)
    else:
        state, reason = training_state(model)
        if state is None:
            raise Problem(f"{model.directory} cannot be reshaped: {reason}", "Name the run that was trained")
        updates = int(state.example.step)
        write_stored(folder, state.values, model.iteration, updates, samples_until(model), schedule_of(model.args))
    write_whole(output / "checkpoints" / TRACKER, str(model.iteration))
    keep_record(model.directory, output)
    return f"for any layout of the native engine\n{CARRIED.format(of_what='of the native engine')}"


def schedule_of(args: Namespace) -> dict[str, Any] | None:
    """Megatron's schedule in the native engine's words; None for the native engine's earlier releases."""
    if not hasattr(args, "lr_decay_style"):
        return None
    schedule = {name: getattr(args, name) for name in SCHEDULE}
    return {**schedule, "lr_decay_iters": args.lr_decay_iters or args.train_iters}


def samples_until(model: TrainedModel) -> int:
    """The samples that were trained on. Raises Problem where the native engine would not find the next one."""
    settings = settings_of(model.directory)
    batch = settings.plan.number("GLOBAL_BATCH_SIZE") if settings else model.args.global_batch_size
    samples = model.iteration * batch
    consumed = getattr(model.args, "consumed_train_samples", samples)
    if consumed != samples:
        found = f"the run had trained on {consumed} samples, not on {model.iteration} batches of {batch}"
        raise Problem(found, "The native engine has no growing batch: continue it in Megatron-DeepSpeed")
    return samples


def write_for_megatron(model: TrainedModel, output: Path, sharding: Sharding) -> str:
    """Writes the files of this layout; what to say about them. Raises Problem."""
    head = model.head
    settings = settings_of(model.directory)
    if model.engine == "native":
        assert settings  # or its arguments would not be known
        for_megatron.check(model)
        head = for_megatron.head_of(model, settings)
        state, reason = for_megatron.state_of(model, head["args"]), ""
    else:
        state, reason = training_state(model)
    write(head, model.weights, output / "checkpoints", sharding, state)
    layout = f"for TP {sharding.tp} and PP {sharding.pp}"
    if state is None:
        return f"{layout}\nOnly the weights, for EVAL_ONLY=1 and -- --finetune --load: {reason}"
    keep_record(model.directory, output)
    return f"{layout}\n{CARRIED.format(of_what=OF_THIS_LAYOUT)}"


def training_state(model: TrainedModel) -> tuple[TrainingState | None, str]:
    """What the run needs besides its weights to continue, or None and why not."""
    if settings_of(model.directory) is None:
        return None, NO_RECORD
    try:
        return TrainingState.of(model.folder, model.args), ""
    except Problem as problem:
        return None, str(problem)


def keep_record(run: Path, output: Path) -> None:
    """Keeps a node's part of the run's record, with which RESUME=1 compares its settings."""
    places = [place for place in (run, run / RESHAPED_FROM) if any(place.glob("node*.json"))]
    part = min(places[0].glob("node*.json"))
    (output / RESHAPED_FROM).mkdir()
    shutil.copy(part, output / RESHAPED_FROM / part.name)


def write(
    head: Mapping[str, Any], whole: Weights, directory: Path, sharding: Sharding, state: TrainingState | None = None
) -> None:
    """Megatron's checkpoint. head: what its file has besides weights, its arguments and its iteration among it."""
    left_out = (torch.Tensor, Absent)  # a mask, and objects of the engine's
    args = Namespace(**{name: value for name, value in vars(head["args"]).items() if not isinstance(value, left_out)})
    args.make_vocab_size_divisible_by = (
        args.make_vocab_size_divisible_by * args.tensor_model_parallel_size // sharding.tp
    )
    args.tensor_model_parallel_size = sharding.tp
    args.pipeline_model_parallel_size = sharding.pp
    args.deepspeed = False
    kept = {name: head[name] for name in ("checkpoint_version", "iteration", "tokens")} | {"args": args}
    name = f"iter_{kept['iteration']:07d}" if kept["iteration"] else IMPORTED
    for rank in range(sharding.tp):
        for stage in range(sharding.pp):
            model = part_of(whole, sharding, rank, stage)
            content = {**kept, "model": nested({name: value.to(args.params_dtype) for name, value in model.items()})}
            if state:
                values = {kind: part_of(state.values[kind], sharding, rank, stage) for kind in KINDS}
                content["optimizer"] = megatron_optimizer(values, state, args)
                content["opt_param_scheduler"] = head.get("opt_param_scheduler") or head["lr_scheduler"]
                content["rng_state"] = [random_states(head, args.seed + kept["iteration"], rank, stage)]
            save_part(content, directory / name, sharding, rank, stage)
    if not state:
        (directory / WEIGHTS_ONLY).touch()
    write_whole(directory / TRACKER, str(kept["iteration"] or IMPORTED))


def save_part(content: Mapping[str, Any], folder: Path, sharding: Sharding, rank: int, stage: int) -> None:
    suffix = f"_{stage:03d}" if sharding.pp > 1 else ""
    path = folder / f"mp_rank_{rank:02d}{suffix}" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch.save(content, path)


def megatron_optimizer(
    values: Mapping[str, Mapping[str, Tensor]], state: TrainingState, args: Namespace
) -> dict[str, Any]:
    adam = optimizer_of(values, state.example)
    if args.params_dtype == torch.float32:
        return adam
    scaler = {"grad_scaler": state.example.scaler} if state.example.scaler else {}
    return {"optimizer": adam, MASTERS: masters_of(values), **scaler}


def random_states(head: Mapping[str, Any], seed: int, rank: int, stage: int) -> dict[str, Any]:
    """Fresh states of every generator, like those that the file has; tensor-parallel ranks draw different numbers."""
    saved = head["rng_state"][0]
    own = seed + 100 * stage
    fresh = {name: generator_state(saved[name], own) for name in ("torch_rng_state", "cuda_rng_state")}
    fresh["random_rng_state"] = random.Random(own).getstate()
    fresh["np_rng_state"] = np.random.RandomState(own % 2**32).get_state()
    tracked = saved["rng_tracker_states"]
    fresh["rng_tracker_states"] = {name: generator_state(like, own + 2718 + rank) for name, like in tracked.items()}
    return fresh


def generator_state(like: Tensor, seed: int) -> Tensor:
    """The state of a generator with this seed: CUDA's are a seed and an offset, the CPU's are larger."""
    generator = torch.Generator().manual_seed(seed)
    state = generator.get_state()
    if like.numel() == state.numel():
        return state
    return torch.frombuffer(bytearray(struct.pack("<qq", seed, 0)), dtype=torch.uint8)


def part_of(whole: Weights, sharding: Sharding, rank: int, stage: int) -> dict[str, Tensor]:
    """What a tensor-parallel rank of a pipeline stage holds, in the engine's order."""
    part: dict[str, Tensor] = {}
    for name in sorted(whole, key=in_order):
        stages, local_name = sharding.stage_name(name)
        if stage in stages:
            # A copy, because a view would be saved together with everything that it is a part of.
            part[local_name] = sharding.pieces(name, whole[name])[rank].detach().clone()
    return part


def nested(part: Mapping[str, Tensor]) -> dict[str, Any]:
    """As Megatron's modules are."""
    model: dict[str, Any] = {}
    for name, value in part.items():
        # Below encoder and decoder, Megatron does not split the names.
        words = name.split(".", 2 if re.match(r"language_model.(en|de)coder", name) else -1)
        module = model
        for word in words[:-1]:
            module = module.setdefault(word, {})
        module[words[-1]] = value
    return model
