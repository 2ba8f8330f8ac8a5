"""Exports checkpoints of the native engine, and compares the logits with those of the engine's own processes.

python tests/tools/convert/every_strategy.py OUTPUT RUN...; prints one JSON object. The processes of all runs are
forked from
this one, so that torch is imported once.
"""

import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ |= {"USE_TORCH": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

import torch
import torch.distributed as dist
import transformers

from native import checkpoint, gpt, t5
from native.arguments import parse
from native.parallel import Mesh
from native.pieces import KINDS, WEIGHTS
from native.trainers import make_trainer
from t5bench.checkpoint_form import read_seal
from t5bench.imports import import_deepspeed, leave_out_compiler
from t5bench.tools.convert import export as exporting
from t5bench.tools.convert.parameter_map import parameter_map
from t5bench.tools.convert.stored import StoredTensors, write_stored
from t5bench.tools.convert.trained import TrainedModel

SAMPLES, PADDING = 4, 9  # samples of a micro-batch, padded tokens at the end of the last one's encoder input


def noisy(value: torch.Tensor) -> torch.Tensor:
    """Depends on the value alone, so that every copy of a parameter stays a copy in any layout."""
    return value + 0.05 * torch.sin(997 * value)


def with_noise(model: TrainedModel, folder: Path) -> None:
    """Writes the checkpoint to a folder with noise in every parameter."""
    values = {kind: StoredTensors(model.folder, kind) for kind in KINDS}
    noisy_weights = {name: noisy(value) for name, value in values[WEIGHTS].items()}
    write_stored(folder, {**values, WEIGHTS: noisy_weights}, model.iteration, model.iteration, 0)


def batch(model: TrainedModel) -> list[torch.Tensor]:
    """A GPT's tokens, or a T5's for encoder and decoder."""
    architecture = model.architecture
    random = torch.Generator().manual_seed(5)
    words = architecture.padded_vocabulary
    lengths = [length for length in (architecture.encoder_length, architecture.decoder_length) if length]
    tokens = [torch.randint(3, words, (SAMPLES, length), generator=random) for length in lengths]
    if len(tokens) == 2:
        tokens[0][-1, -PADDING:] = 0
    return tokens


def catch_logits(caught: list[torch.Tensor]) -> None:
    """Puts what the model gives to the cross entropy into the list."""
    for module in (t5, gpt):
        cross_entropy = module.vocab_cross_entropy

        def catching(logits: torch.Tensor, *others: object, original: Callable = cross_entropy) -> torch.Tensor:
            caught.append(logits.clone())  # the loss overwrites them
            return original(logits, *others)

        module.vocab_cross_entropy = catching


def engine_logits(model: TrainedModel, rank: int, world: int, directory: Path) -> None:
    """One process of the engine, as its launcher starts it: loads its shard and writes its logits, if it has any."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    args = parse(list(model.record.plan.arguments.words), model.architecture.family)
    args.padded_vocab_size = model.architecture.padded_vocabulary
    args.pad_token = 0
    args.micro_batch_size = SAMPLES
    mesh = Mesh.build(args.pp, args.dp, args.tp, args.device, args.seed)
    trainer = make_trainer(args, mesh)
    args.load = str(model.folder.parent)
    checkpoint.load(trainer, args, mesh, read_seal(model.folder))
    trainer.model.eval()
    slices: list[torch.Tensor] = []
    catch_logits(slices)
    tokens = batch(model)
    with torch.no_grad():
        trainer.loss((*tokens, tokens[-1]))
    if mesh.is_last_stage and mesh.dp.rank == 0:
        torch.save(slices[0], directory / f"{mesh.tp.rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def in_processes(model: TrainedModel, directory: Path) -> torch.Tensor:
    """The engine's logits, [samples, decoder length, vocabulary]."""
    directory.mkdir()
    world = model.record.world_size
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=engine_logits, args=(model, rank, world, directory)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return torch.cat([torch.load(directory / f"{rank}.pt") for rank in range(model.record.layout.tp)], dim=-1)


def exported_logits(model: TrainedModel, output: Path) -> torch.Tensor:
    exporting.export(model, output, model.tokenizer, max_shard_size="300KB")
    tokens = batch(model)
    with torch.no_grad():
        if len(tokens) == 1:
            return transformers.AutoModelForCausalLM.from_pretrained(output).eval()(tokens[0]).logits
        loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(output).eval()
        return loaded(input_ids=tokens[0], attention_mask=tokens[0] != 0, decoder_input_ids=tokens[1]).logits


def with_a_swap(architecture: object) -> dict:
    """A T5's keys and values of a layer, or a GPT's two norms, in each other's place."""
    pairs = parameter_map(architecture)
    changed = {}
    for one, other in ((".layers.0.self_attn.k_proj", ".layers.0.self_attn.v_proj"), (".h.0.ln_1", ".h.0.ln_2")):
        for name in pairs:
            if one in name:
                swapped = name.replace(one, other)
                changed |= {name: pairs[swapped], swapped: pairs[name]}
    return pairs | changed


def compare(run: Path, output: Path) -> dict[str, float]:
    """The largest difference of a logit in multiples of the largest logit, as it is and with a mistake planted."""
    copy = shutil.copytree(run, output / run.name)
    model = TrainedModel.of_run(copy)
    untouched = model.folder.rename(model.folder.with_name("without noise"))
    with_noise(replace(model, folder=untouched), model.folder)
    expected = in_processes(model, output / f"{run.name} logits").float()

    def difference(directory: Path) -> float:
        return float((exported_logits(model, directory).float() - expected).abs().max() / expected.abs().max())

    found = {"difference": difference(output / f"{run.name} export")}
    right: Callable = exporting.parameter_map
    exporting.parameter_map = with_a_swap
    found["swapped"] = difference(output / f"{run.name} swapped")
    exporting.parameter_map = right
    return found


if __name__ == "__main__":
    leave_out_compiler()
    import_deepspeed()
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    print(json.dumps({Path(run).name: compare(Path(run), target) for run in sys.argv[2:]}))
