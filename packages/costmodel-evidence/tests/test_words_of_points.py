"""How the words of a point are read: what the model has is modelled, everything else is refused with the word."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from t5bench.costmodel.flops import multiply_adds
from t5bench_evidence import check, points
from t5bench_evidence.jobs import architecture_of
from t5bench_evidence.words import device_of

BASE: dict[str, Any] = {
    "id": "made",
    "source": {"repo": "made/up"},
    "model": {
        "architecture": "GPT", "decoder_layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "vocab": 50257,
    },
    "lengths": {"decoder": 1024},
    "precision": "bf16",
    "parallel": {"tp": 1, "pp": 1, "dp": 8},
    "hardware": {"gpu": "A100", "count": 8, "nodes": 1},
    "micro_batch": 16,  # so many that the host does not limit it
    "global_batch": 128,
    "use": ["throughput", "ratio"],
    "measured": {"samples_per_second": 100.0},
    "software": "megatron-core",
    "attention_kernel": "flash",
}  # fmt: skip
ENCODER = {"model": {"encoder_layers": 12}, "lengths": {"encoder": 512}}


def made(**fields: Any) -> dict[str, Any]:
    point = json.loads(json.dumps(BASE))
    for name, value in fields.items():
        point[name] = {**point.get(name, {}), **value} if isinstance(value, dict) else value
    return point


def compared(tmp_path: Path, *entries: dict[str, Any]) -> list[check.PredictedFigure | check.Missing]:
    path = tmp_path / "points.json"
    path.write_text(json.dumps(entries))
    found, invalid, unknown = points.read(path)
    assert not invalid and not unknown
    return check.compare_all(found)


def throughput(tmp_path: Path, **fields: Any) -> float:
    """The predicted one of a point that must not be refused."""
    (row,) = (row for row in compared(tmp_path, made(**fields)) if row.use == "throughput")
    assert isinstance(row, check.PredictedFigure), row
    return row.predicted


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"parallel": {"cp": 2}}, "context and expert parallelism are not modelled: cp 2"),
        ({"parallel": {"ep": 4}}, "context and expert parallelism are not modelled: ep 4"),
        ({"activation_checkpointing": "uniform 1 of 4 layers"}, "the recomputation uniform 1 of 4 layers is not known"),
        ({"activation_checkpointing": "full, uniform 1 of 4 layers"}, "which layers are recomputed"),
        ({"activation_checkpointing": "full: half of the layers"}, "which layers are recomputed"),
        ({"activation_checkpointing": "full, encoder only"}, "which layers are recomputed"),
        ({"activation_checkpointing": "full except the last"}, "which layers are recomputed"),
        ({"activation_checkpointing": "selective core_attn and mlp"}, "is more than attention's core"),
        ({"activation_checkpointing": "nonexistent"}, "the recomputation nonexistent is not known"),
        ({"optimizer": "AdamW, HSDP"}, "how 'AdamW, HSDP' divides its states is not modelled"),
        ({"optimizer": "_HYBRID_SHARD_ZERO2", "parallel": {"zero_stage": 2}}, "divides its states is not modelled"),
        ({"optimizer": "AdamW, FSDP"}, "the ZeRO stage that 'AdamW, FSDP' stands for is not stated"),
        ({"optimizer": "FSDP SHARD_GRAD_OP", "parallel": {"zero_stage": 3}}, "means ZeRO-2, but the layout states 3"),
        ({"optimizer": "NO_SHARD", "parallel": {"zero_stage": 3}}, "means ZeRO-0, but the layout states 3"),
        ({"optimizer": "ZeRO-3 AdamW"}, "means ZeRO-3, but the layout states no stage"),
        ({"optimizer": "zero++", "parallel": {"zero_stage": 3}}, "how 'zero++' divides its states is not modelled"),
        ({"optimizer": "distributed_fused_adam", "parallel": {"zero_stage": 3}}, "but the layout states ZeRO-3"),
        ({"model": {"architecture": "llama"}}, "how many heads of keys and values a llama has is not stated"),
        ({"model": {"name": "llama-7b"}}, "llama-7b is no GPT-2, and its positions"),
        ({"model": {"name": "Qwen2.5"}}, "Qwen2.5 is no GPT-2, and its positions"),
        ({"model": {"architecture": "T5", "name": "T5Gemma 2", **ENCODER["model"]}}, "shape of T5Gemma 2 is not mod"),
        ({"model": {"architecture": "T5", "name": "byt5-base", **ENCODER["model"]}}, "shape of byt5-base is not mod"),
        ({"software": "Megatron-LM"}, "the software Megatron-LM is not known"),
        ({"attention_kernel": "FlashAttention-3"}, "the attention kernel FlashAttention-3 is not modelled"),
        ({"attention_kernel": "not flash"}, "the attention kernel not flash is not known"),
        ({"attention_kernel": "flash (encoder), eager (cross)"}, "which attention runs in which kernel"),
        ({"attention_kernel": "ring attention"}, "the attention kernel ring attention is not modelled"),
    ],
)
def test_what_is_not_modelled_is_refused_and_not_paired(tmp_path: Path, fields: dict[str, Any], reason: str):
    entries = compared(tmp_path, made(id="plain"), made(**fields), made(id="wide", parallel={"tp": 2, "dp": 4}))
    refused = [entry for entry in entries if isinstance(entry, check.Missing) and entry.point == "made"]
    assert len(refused) == 2 and all(reason in entry.reason for entry in refused), refused
    pairs = [entry.point for entry in entries if isinstance(entry, check.PredictedFigure) and entry.use == "ratio"]
    assert pairs == ["wide / plain"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"model": {"architecture": "mT5-base"}}, {"model": {"architecture": "mt5"}}),
        ({"model": {"architecture": "UL2 20B"}}, {"model": {"architecture": "ul2"}}),
        ({"model": {"architecture": "flan-ul2"}}, {"model": {"architecture": "ul2"}}),
        ({"model": {"architecture": "T5 v1_1"}}, {"model": {"architecture": "t5-v1.1"}}),
        ({"model": {"architecture": "T5", "name": "ul2"}}, {"model": {"architecture": "ul2"}}),
        ({"model": {"architecture": "T5", "name": "google/t5-v1_1-base"}}, {"model": {"architecture": "t5-v1.1"}}),
        ({"model": {"architecture": "T5", "name": "google/flan-t5-xl"}}, {"model": {"architecture": "t5-v1.1"}}),
        ({"model": {"architecture": "BART large"}}, {"model": {"architecture": "bart-large"}}),
    ],
)
def test_names_of_one_shape_are_read_alike(tmp_path: Path, first: dict[str, Any], second: dict[str, Any]):
    def predicted(fields: dict[str, Any]) -> float:
        return throughput(tmp_path, model=ENCODER["model"] | fields["model"], lengths=ENCODER["lengths"])

    assert predicted(first) == predicted(second)
    plain = {"model": {"architecture": "T5"}}
    is_bart = "bart" in str(second)
    assert is_bart or predicted(first) != predicted(plain)  # gated, relative positions, no biases


def test_a_llamas_shape_is_read_from_its_name(tmp_path: Path):
    names = ("llama", "Llama-2-7b", "llama 3", "Llama-3.1")
    predicted = {throughput(tmp_path, model={"architecture": name, "query_groups": 4}) for name in names}
    gpt = throughput(tmp_path, model={"query_groups": 4})
    assert len(predicted) == 1 and gpt not in predicted


@pytest.mark.parametrize(
    ("kernel", "same"), [("sdpa math", "eager"), ("fused softmax", "eager"), ("FA2", "flash"), ("SDPA", "cudnn")]
)
def test_kernels_are_read_by_what_they_keep(tmp_path: Path, kernel: str, same: str):
    def predicted(name: str) -> float:
        return throughput(tmp_path, attention_kernel=name)

    assert predicted(kernel) == predicted(same)
    assert predicted("eager") < predicted("flash")


def test_a_compiled_model_is_faster_than_hugging_faces_modules(tmp_path: Path):
    model = {"architecture": "t5-v1.1", **ENCODER["model"]}
    kernel = "unfused (plain PyTorch T5 attention)"

    def predicted(words: str, precision: str) -> float:
        fields = {"software": None, "attention_kernel": words, "precision": precision}
        return throughput(tmp_path, model=model, lengths=ENCODER["lengths"], **fields)

    gain = {name: predicted(f"{kernel}; torch.compile", name) / predicted(kernel, name) for name in ("bf16", "fp32")}
    assert predicted("unfused (HF eager)", "bf16") == predicted(kernel, "bf16")
    assert gain["bf16"] > gain["fp32"] > 1


def test_a_bert_of_deep_learning_examples_has_logits_of_masked_tokens_alone(tmp_path: Path):
    model = {"architecture": "bert", "encoder_layers": 24, "decoder_layers": None}
    point = msgspec.convert(made(model=model, lengths={"encoder": 512, "decoder": None}), points.Point)
    other = msgspec.structs.replace(point, source=points.Publication(repo="NVIDIA/DeepLearningExamples"))
    found, selected = (architecture_of(each, 1) for each in (point, other))
    assert (found.output_length, selected.output_length) == (512, 80)
    assert multiply_adds(found)["head"] / multiply_adds(selected)["head"] == 512 / 80
    gpt = msgspec.structs.replace(other, model=points.PublishedModel("GPT", decoder_layers=2, hidden=64, heads=4))
    assert architecture_of(gpt, 1).predicted == 0


def test_autocast_is_part_of_a_stated_software(tmp_path: Path):
    plain = throughput(tmp_path, software="huggingface", precision="fp16")
    assert throughput(tmp_path, software="huggingface", precision="fp16 autocast") < plain


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("8x NVIDIA H20", "h20"), ("H200 141GB", "h200"), ("H800 SXM", "h800"), ("A800-80G", "a800"),
        ("GB200 NVL72", "gb200"), ("B200", "b200"), ("GB300", "gb300"), ("B300", "b300"), ("A10G", "a10g"),
        ("A10", "a10"), ("RTX 2080 Ti", "rtx2080ti"), ("RTX 2080", None), ("RTX 3090 Ti", None),
        ("AMD MI250X", "mi250x"), ("MI250", None), ("8x AMD Instinct MI300X", "mi300x"), ("MI325X", None),
        ("RTX 5000", "rtx5000"), ("RTX 5000 Ada", "rtx5000-ada"),
    ],
)  # fmt: skip
def test_gpus_as_sources_call_them(text: str, name: str | None):
    point = msgspec.convert(made(hardware={"gpu": text}), points.Point)
    found = device_of(point)
    assert (found.name if found else None) == name


def test_a_sources_address_says_whose_software_it_is(tmp_path: Path):
    """NeMo's collectives are sent while the GPU computes; its softmax is fused."""
    layout = {"tp": 4, "dp": 2, "sp": True}
    fields = {"software": None, "precision": "fp8 + bf16", "parallel": layout, "attention_kernel": "cudnn"}
    unknown = throughput(tmp_path, **fields, hardware={"gpu": "H100"})
    nemo = throughput(tmp_path, **fields, hardware={"gpu": "H100"}, source={"repo": "NVIDIA-NeMo/Megatron-Bridge"})
    assert nemo > 1.02 * unknown
    fields = {"software": None, "attention_kernel": "unfused"}
    assert throughput(tmp_path, **fields, source={"repo": "NVIDIA/NeMo"}) > throughput(tmp_path, **fields)


def test_a_compiled_model_has_a_fused_softmax_and_memory_that_is_not_known(tmp_path: Path):
    fields = {"software": None, "measured": {"peak_memory_allocated_bytes": 1e10}, "use": ["memory", "throughput"]}
    eager = throughput(tmp_path, **fields, attention_kernel="unfused")
    compiled = throughput(tmp_path, **fields, attention_kernel="unfused; torch.compile")
    assert compiled > eager
    rows = compared(tmp_path, made(**fields, attention_kernel="unfused; torch.compile"))
    assert any(isinstance(row, check.Missing) and "keeps in memory" in row.reason for row in rows)


def test_a_llama_by_name_has_rms_norms(tmp_path: Path):
    path = tmp_path / "points.json"
    shape = {"name": "Llama 3.1 8B", "gated": True, "tied": False, "position": "rotary", "query_groups": 4}
    path.write_text(json.dumps([made(model=shape), made(model=shape | {"name": "Nemotron"})]))
    (llama, other), _, _ = points.read(path)
    assert (architecture_of(llama, 1).norm, architecture_of(other, 1).norm) == ("rms", "layer")
