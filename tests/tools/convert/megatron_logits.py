"""Exports checkpoints of Megatron-DeepSpeed, and compares the logits with those of the engine itself, in one process.

python tests/tools/convert/megatron_logits.py EMPTY_DIRECTORY RUN..., with the engine on PYTHONPATH; the last line
of its
output is a JSON object. The runs train the same model. A run's weights, from any layout, are first reshaped for one
process, and noise is added to them.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ |= {"USE_TORCH": "1"}

import torch
import transformers
from megatron import get_args
from megatron.arguments import core_transformer_config_from_args
from megatron.core.enums import ModelType
from megatron.initialize import initialize_megatron
from megatron.model import GPTModel, T5Model

from t5bench.__main__ import main
from t5bench.tools.convert import export as exporting
from t5bench.tools.convert.parameter_map import parameter_map
from t5bench.tools.convert.reshape import write
from t5bench.tools.convert.shards import Sharding
from t5bench.tools.convert.trained import TrainedModel

SAMPLES = 2


def add_noise(state: Mapping[str, Any]) -> None:
    for value in state.values():
        if isinstance(value, Mapping):
            add_noise(value)
        else:
            value.data += 0.05 * torch.sin(997 * value.data)


def inputs(model: TrainedModel) -> list[torch.Tensor]:
    """A GPT's tokens, or a T5's for encoder and decoder."""
    architecture = model.architecture
    random = torch.Generator().manual_seed(5)
    lengths = [length for length in (architecture.encoder_length, architecture.decoder_length) if length]
    return [torch.randint(3, 4000, (SAMPLES, length), generator=random) for length in lengths]


@torch.no_grad()
def engine_logits(state: Mapping[str, Any], tokens: list[torch.Tensor]) -> torch.Tensor:
    args = get_args()
    args.model_type = ModelType.encoder_and_decoder if len(tokens) == 2 else ModelType.encoder_or_decoder
    config = core_transformer_config_from_args(args)
    # Masks are true where nothing is attended to.
    causal = torch.ones(1, 1, tokens[-1].shape[1], tokens[-1].shape[1]).triu(1).bool()
    if len(tokens) == 1:
        model = GPTModel(config, num_tokentypes=0, parallel_output=True)
        positions = torch.arange(tokens[0].shape[1]).expand_as(tokens[0])
        given = tokens[0], positions, causal
    else:
        model = T5Model(config)
        encoder, decoder = (side.shape[1] for side in tokens)
        open_masks = [torch.zeros(SAMPLES, length, encoder).bool() for length in (encoder, decoder)]
        given = *tokens, open_masks[0], causal[0], open_masks[1]
    model.load_state_dict(state)
    output = model.eval()(*given)
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def exported_logits(directory: Path, tokens: list[torch.Tensor]) -> torch.Tensor:
    if len(tokens) == 1:
        return transformers.AutoModelForCausalLM.from_pretrained(directory).eval()(tokens[0]).logits
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    return loaded(input_ids=tokens[0], decoder_input_ids=tokens[1]).logits


def with_two_biases_swapped(architecture: object) -> dict:
    pairs = parameter_map(architecture)
    first, second = [name for name in pairs if name.endswith((".ln_1.bias", ".fc1.bias"))][:2]
    return pairs | {first: pairs[second], second: pairs[first]}


def for_one_process(model: TrainedModel) -> list[str]:
    """The engine's arguments of a run, without what is its layout's."""
    words = list(model.record.plan.arguments.words)
    own = {"--deepspeed", "--deepspeed_config", "--zero-stage", "--no-pipeline-parallel", "--cpu-optimizer"}
    own |= {"--pipeline-model-parallel-split-rank", "--load", "--save"}
    kept: list[str] = []
    is_kept = True
    for word in words:
        if word.startswith("--"):
            is_kept = word not in own
        if is_kept:
            kept.append(word)
    multiple = model.args.make_vocab_size_divisible_by * model.args.tensor_model_parallel_size
    kept += ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
    return [*kept, "--make-vocab-size-divisible-by", str(multiple)]


def compare(run: Path, work: Path) -> dict[str, float | str]:
    """The largest difference of a logit in multiples of the largest logit: of the export, of its import, and with a
    mistake planted."""
    trained = TrainedModel.of_run(run)
    write(trained.head, trained.weights, work / "one" / "checkpoints", Sharding.of(trained.args, 1, 1))
    (path,) = (work / "one").rglob("*.pt")
    content = torch.load(path, weights_only=False)
    add_noise(content["model"])
    torch.save(content, path)
    one = TrainedModel.of_run(work / "one")
    tokens = inputs(one)
    expected = engine_logits(content["model"], tokens)

    def difference(name: str) -> float:
        exporting.export(one, work / name, trained.tokenizer)
        return float((exported_logits(work / name, tokens) - expected).abs().max() / expected.abs().max())

    found = {"difference": difference("export"), "activation": one.activation}
    # The export imported again, in the engine.
    assert main(["import", str(work / "export"), str(work / "imported"), "--precision", "fp32"]) == 0
    (path,) = (work / "imported").rglob("*.pt")
    imported = engine_logits(torch.load(path, weights_only=False)["model"], tokens)
    found["imported"] = float((imported - expected).abs().max() / expected.abs().max())
    right = exporting.parameter_map
    exporting.parameter_map = with_two_biases_swapped
    found["swapped"] = difference("swapped")
    exporting.parameter_map = right
    return found


if __name__ == "__main__":
    target = Path(sys.argv[1])
    runs = [Path(word) for word in sys.argv[2:]]
    sys.argv = ["pretrain", *for_one_process(TrainedModel.of_run(runs[0]))]
    initialize_megatron(args_defaults={})
    print(json.dumps({run.name: compare(run, target / run.name) for run in runs}))
