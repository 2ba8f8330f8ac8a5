"""Imports models of Transformers for several layouts, exports them again, and compares the logits.

python tests/tools/convert/round_trips.py EMPTY_DIRECTORY; the last line of its output is a JSON object.
"""

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ |= {"USE_TORCH": "1", "HF_HUB_OFFLINE": "1"}

import torch
import transformers
from tools.convert.gpt_scores import make_gpt

from t5bench import REPOSITORY
from t5bench.__main__ import main

LENGTH = 20


def make_t5(directory: Path) -> Any:
    """As export writes one, with as many words as the sample's tokenizer has."""
    torch.manual_seed(2)
    layers = {"encoder_layers": 2, "decoder_layers": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": LENGTH}
    config = transformers.BlenderbotConfig(
        vocab_size=4101, activation_function="gelu", init_std=0.3, pad_token_id=0, eos_token_id=1, **layers, **sizes
    )
    model = transformers.BlenderbotForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        model.final_logits_bias += torch.randn_like(model.final_logits_bias)
        model.model.decoder.embed_positions.weight.copy_(model.model.encoder.embed_positions.weight)
    model.save_pretrained(directory)
    shutil.copytree(REPOSITORY / "megatron_data" / "sample" / "tokenizer", directory, dirs_exist_ok=True)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(10, 10 + 2 * LENGTH).view(2, LENGTH)
    if model.config.is_encoder_decoder:
        return model(input_ids=tokens, decoder_input_ids=tokens).logits
    return model(tokens).logits


def command(*words: object) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = main([str(word) for word in words])
    return status, output.getvalue()


def difference(source: Path, model: Any, tp: int, pp: int) -> dict[str, Any]:
    """Of the logits after an import and an export; and whether an added row of the embedding is ever the likeliest."""
    run = source.with_name(f"{source.name}-{tp}-{pp}")
    status, text = command("import", source, run, "--tp", tp, "--pp", pp, "--precision", "fp32")
    assert status == 0, text
    again = run / "again"
    exported, problem = command("export", run, again)
    assert exported == 0, problem
    _, own_data = command("import", again, run / "imported again", "--precision", "fp32")
    model_class = (
        transformers.AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else transformers.AutoModelForCausalLM
    )
    found = logits(model_class.from_pretrained(again).eval())
    expected = logits(model)
    words = expected.shape[-1]
    files = sorted(path.parent.name for path in (run / "checkpoints" / "release").rglob("*.pt"))
    return {
        "difference": float((found[..., :words] - expected).abs().max() / expected.abs().max()),
        "rows": found.shape[-1],
        "largest argmax": int(found.argmax(-1).max()),
        "words": words,
        "files": len(files),
        "said": text,
        "said of an export": own_data,
    }


def refusals(gpt: Path, t5: Path) -> dict[str, str]:
    """What import says to models that do not fit."""
    said = {}
    changes = {
        "untied": (gpt, {"tie_word_embeddings": False}),
        "activation": (gpt, {"activation_function": "relu"}),
        "vocabulary": (gpt, {"vocab_size": 1000}),
        "family": (gpt, {"model_type": "llama"}),
        "scaled": (t5, {"scale_embedding": True}),
        "layers": (t5, {"decoder_layers": 6}),
        "shape": (gpt, {"n_positions": 3 * LENGTH}),
    }
    for name, (source, change) in changes.items():
        directory = shutil.copytree(source, source.with_name(name))
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        status, said[name] = command("import", directory, directory.with_name(f"{name}-run"))
        assert status == 2, said[name]
        assert not directory.with_name(f"{name}-run").exists()
    return said


def another_head(gpt: Path) -> str:
    """A classifier's, which would be left out unseen."""
    directory = shutil.copytree(gpt, gpt.with_name("classifier"))
    transformers.GPT2ForSequenceClassification.from_pretrained(gpt).save_pretrained(directory)
    return command("import", directory, gpt.with_name("classifier-run"))[1]


def other_positions(model: Any, t5: Path) -> str:
    directory = shutil.copytree(t5, t5.with_name("positions"))
    with torch.no_grad():
        model.model.decoder.embed_positions.weight[0] += 1
    model.save_pretrained(directory)
    return command("import", directory, t5.with_name("positions-run"))[1]


def compare(directory: Path) -> dict[str, Any]:
    gpt, t5 = directory / "gpt", directory / "t5"
    gpt.mkdir()
    gpt_model, _ = make_gpt(gpt)
    t5_model = make_t5(t5)
    found: dict[str, Any] = {}
    for tp, pp in ((1, 1), (2, 2)):
        found[f"gpt {tp} {pp}"] = difference(gpt, gpt_model, tp, pp)
        found[f"t5 {tp} {pp}"] = difference(t5, t5_model, tp, pp)
    found["refusals"] = refusals(gpt, t5)
    found["refusals"]["head"] = another_head(gpt)
    found["refusals"]["positions"] = other_positions(t5_model, t5)
    return found


if __name__ == "__main__":
    print(json.dumps(compare(Path(sys.argv[1]))))
