"""Published measurements against the model: its errors, what is damaged, and how sources' words are read."""

import json
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import REPO_ROOT

from t5bench import Problem
from t5bench.__main__ import main
from t5bench.costmodel.job import Job
from t5bench_evidence import check, jobs, points, words

FILE, MORE = (
    REPO_ROOT / "packages/costmodel-evidence/src/t5bench_evidence" / f"{name}.json"
    for name in ("published_training_measurements", "more_published_measurements")
)
POINTS = json.loads(FILE.read_text()) + json.loads(MORE.read_text())


@cache
def compared(file: Path) -> list[check.PredictedFigure | check.Missing]:
    published, *sentences = points.read(file)
    assert sentences == [[], []]
    return check.compare_all(published)


def megatron_core(**fields: Any) -> points.Point:
    """A point of Megatron-LM with other fields."""
    point = next(one for one in points.read(FILE)[0] if words.software(one) == "megatron-core")
    return msgspec.structs.replace(point, **fields)


# How many figures, and mean and largest absolute error, where 0.01 is 1 %: every term of the model that any point needs
# is in one of them. Look at what a change does to them; packages/costmodel-evidence/EVIDENCE.md has the same figures.
ERRORS = [
    (FILE, "memory", 18, 0.002091, 0.0050), (MORE, "memory", 155, 0.009070, 0.3488),
    (FILE, "peak", 24, 0.010510, 0.0461), (MORE, "peak", 162, 0.013058, 0.3604),
    (FILE, "states", 4, 0.004878, 0.0097), (FILE, "bound", 4, 0.0, 0.0),
    (FILE, "activation", 31, 0.018533, 0.0666), (MORE, "activation", 175, 0.020238, 0.4395),
    (FILE, "ratio", 14, 0.041202, 0.1973), (MORE, "ratio", 304, 0.042302, 0.3341),
    (FILE, "throughput", 42, 0.222371, 2.6758), (MORE, "throughput", 265, 0.128033, 1.2127),
]  # fmt: skip


@pytest.mark.parametrize(("file", "use", "count", "average", "worst"), ERRORS)
def test_errors_on_published_points(file: Path, use: str, count: int, average: float, worst: float):
    errors = [abs(row.error) for row in compared(file) if isinstance(row, check.PredictedFigure) and row.use == use]
    assert len(errors) == count
    assert (mean(errors), max(errors)) == (pytest.approx(average, abs=1e-6), pytest.approx(worst, abs=1e-4))


def test_without_a_file_the_command_checks_all_of_its_own(capsys: pytest.CaptureFixture[str]):
    assert main(["predict", "--check", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["rows"]) == sum(isinstance(row, check.PredictedFigure) for row in check.compare_all(all_points()))


def all_points() -> list[points.Point]:
    return [point for file in (FILE, MORE) for point in points.read(file)[0]]


def test_every_point_is_compared_or_has_a_reason_and_no_rule_names_one():
    seen = {(name, entry.use) for entry in compared(FILE) for name in entry.point.split(" / ")}
    folders = (REPO_ROOT / "t5bench" / "costmodel", Path(check.__file__).parent)
    rules = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    assert "class Point" in rules
    for point in points.read(FILE)[0]:
        assert point.id not in rules
        for use in point.use:
            kinds = {"memory", "peak", "states"} if use == "memory" else {use}
            assert any((point.id, kind) in seen for kind in kinds), (point.id, use)


GPT = {"architecture": "GPT", "hidden": 64, "heads": 4, "decoder_layers": 2}
PROFILES = {"repo": "PKU-DAIR/Hetu-Galvatron"}
RATED = {"use": ["ratio"], "measured": {"samples_per_second": 1.0}}


@pytest.mark.parametrize(
    ("changes", "said", "status"),
    [
        ({"micro_batch": "four"}, "is invalid and left out: Expected `int | null`, got `str` - at `$.micro_batch`", 1),
        ({"measured": {"peak_memory_allocated_bytes": 0}}, "Expected `float` > 0.0 - at `$.measured.peak_memory_", 1),
        ({"humidity": 3}, "the field humidity is unknown and ignored", 0),
        ({"model": GPT | {"colour": 3}}, "the field model.colour is unknown and ignored", 0),
        ({"use": ["memory", "speed"]}, "the use speed is unknown and ignored", 0),
        ({"micro_batch": None}, "the micro-batch size is not stated", 0),
        ({"source": {"url": "https://example.org"}}, "it is not known what https://example.org keeps in memory", 0),
        ({"activation_checkpointing": "yes"}, "the recomputation yes is not known", 0),
        ({"attention_kernel": "xformers"}, "the attention kernel xformers is not known", 0),
        ({"optimizer": "Muon"}, "the states of the optimizer Muon are not known", 0),
        ({"parallel": {"pp": 99}}, "its pipeline has 99 stages, more than its 24 layers", 0),
        ({"parallel": {"dp": 10**9}, "hardware": {}, "global_batch": None, **RATED}, "GPUs are more than 100000", 0),
        ({"parallel": {"tp": 3}}, "do not divide over 3 GPUs", 0),
        ({"micro_batch": 5, "global_batch": 7}, "micro-batches of 5 do not divide its batch of 7", 0),
        ({"model": GPT | {"activation": "swiglu"}, "source": PROFILES}, "the FFN size of a gated model is not", 0),
        ({"precision": "FP8", "hardware": {"gpu": "A100"}, "parallel": {"dp": 1}, **RATED}, "no GPU that has it", 0),
        ({"parallel": {"zero_stage": 3, "offload": "NVMe"}}, "the offload NVMe is not known", 0),
        ({"parallel": {"zero_stage": 1}, "hardware": {"gpu": "A100"}}, "over how many GPUs its states are divided", 0),
        ({"parallel": {"cp": 2}}, "context and expert parallelism are not modelled: cp 2", 0),
        ({"parallel": {"expert_parallel": 8}}, "the model does not know: parallel.expert_parallel", 0),
        ({"parallel": {"sharding": "HSDP"}}, "the model does not know: parallel.sharding", 0),
        ({"optimizer": "AdamW, FSDP HYBRID_SHARD"}, "divides its states is not modelled", 0),
        ({"optimizer": "AdamW, FSDP"}, "the ZeRO stage that 'AdamW, FSDP' stands for is not stated", 0),
        ({"activation_checkpointing": "full (uniform 1 of 4 layers)"}, "which layers are recomputed cannot be told", 0),
        ({"software": "MaxText"}, "MaxText is not known", 0),
        ({"model": GPT | {"architecture": "llama"}}, "the vocabulary of a llama is not stated", 0),
        ({"parallel": {"dp": 8, "zero_stage": 3}}, "what Megatron-LM's own FSDP keeps in memory is not known", 0),
    ],
)
def test_unreadable_or_unpredictable_points_are_reported(tmp_path, capsys, changes, said, status):
    point = next(point for point in POINTS if "memory_allocated_bytes" in point["measured"])
    path = tmp_path / "points.json"
    path.write_text(json.dumps([point | changes]))
    assert main(["predict", "--check", str(path)]) == status
    assert said in capsys.readouterr().out
    assert main(["predict", "--check", str(path), "--json"]) == status
    answer = json.loads(capsys.readouterr().out)
    assert said in str(answer["notes"]) + str(answer["missing"])


def test_a_file_that_holds_no_points(tmp_path: Path):
    for content, said in ((b"{", "cannot be read"), (b"{}", "holds no list")):
        (tmp_path / "points.json").write_bytes(content)
        with pytest.raises(Problem, match=said):
            points.read(tmp_path / "points.json")


ANYTHING = st.sampled_from([
    None, 0, 1, -1, 7, 10**9, 2.5, True, "", "x", "bf16", "fp8", "full", "flash", "t5", "BERT", "relative", "NVMe",
    "A100", "8 links of 200 Gb/s", "HF eager, autocast", "NVIDIA/Megatron-LM", "PKU-DAIR/Hetu-Galvatron", [], ["x"], {},
    {"1": 5}, {"x": 1},
])  # fmt: skip


@given(st.sampled_from(POINTS), st.data())
def test_no_damaged_point_ends_in_an_exception(tmp_path_factory, point: dict[str, Any], data: st.DataObject):
    """One field of a point, or of a part of it, is replaced."""
    point = json.loads(json.dumps(point)) | {"use": sorted(points.USES)}
    places = [(part, name) for part in (point, *point.values()) if isinstance(part, dict) for name in part]
    part, name = data.draw(st.sampled_from(places))
    part[name] = data.draw(ANYTHING)
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_text(json.dumps([point]))
    check.compare_all(points.read(path)[0])


def job_with(**fields: Any) -> Job:
    return jobs.job_of(megatron_core(**fields))


def gpu_named(text: str) -> str | None:
    device = words.device_of(megatron_core(hardware=points.Hardware(gpu=text)))
    return device and device.name


def gigabits_between_nodes_of_eight(text: str) -> float:
    point = megatron_core(hardware=points.Hardware(gpu="A100", count=16, nodes=2, interconnect=text))
    return jobs.machine_of(point).between.bandwidth * 8 / 1e9


def is_gated(text: str) -> bool:
    model = msgspec.structs.replace(megatron_core().model, gated=None, activation=text)
    return job_with(model=model).architecture.gated


def is_distributed(text: str) -> bool:
    return job_with(optimizer=text).distributed_optimizer


WORDS = [  # how sources' words are read
    (gpu_named, {"NVIDIA A100-SXM4-40GB": "a100-40", "A100 80GB (400 W)": "a100", "8 H100s": "h100", "GH200": "gh200",
                 "DGX-1 V100 16 GB": "v100-16", "RTX 5000 Ada": "rtx5000-ada", "GB200": "gb200", "A10G": "a10g",
                 "nvidia_a100-sxm4-80gb": "a100", "RTX 4090 Laptop GPU": None, "A100 80GB, MIG 3g.40gb": None}),
    (lambda text: job_with(precision=text).precision,
     {"torch.bfloat16": "bf16", "BF16 (no FP8)": "bf16", "mixed precision (fp16)": "fp16", "AMP (fp16, O1)": "fp16",
      "half": "fp16", "bf16+fp8": "fp8", "MXFP8": "fp8", "float32": "fp32"}),
    (lambda text: job_with(attention_kernel=text).attention,
     {"cuDNN flash attention": "fused", "scaled_dot_product_attention": "fused", "flash attention 2": "flash",
      "eager, no flash": "unfused", "Transformer Engine": "fused"}),
    (is_distributed, {"mcore_distributed_optim": True, "use_distributed_optimizer: False": False,
                      "Adam, distributed data parallel": False, "no distributed optimizer": False}),
    (words.optimizer_states,
     {"": (4, 4), "decoupled AdamW, fp32 shards": (4, 4), "LAMB": (4, 4), "SGD": (), "Adafactor": (), "Muon": None,
      "SGD with momentum 0.9": (4,), "8-bit Adam (bitsandbytes)": (1, 1), "4-bit AdamW": None}),
    (gigabits_between_nodes_of_eight,
     {"InfiniBand 100 Gb/sec (4X EDR); NVLink in node": 100, "HDR InfiniBand, 8 x 200 Gb/s per node": 1600,
      "2x100GbE": 200, "10 Gigabit Ethernet": 10, "RDMA, 400 Gb/s per GPU": 3200, "NVLink of 4800 Gb/s in node": 1600,
      "2 x 100 Gb/s Ethernet, usable 120 Gb/s": 120, "4 Omni-Path links of 100 Gb/s per node": 400}),
    (is_gated, {"gelu": False, "gated-gelu": True, "SiLU": True, "SwiGLU": True, "relu (not gated)": False}),
]  # fmt: skip


@pytest.mark.parametrize(("read", "text", "found"), [(read, *pair) for read, all_ in WORDS for pair in all_.items()])
def test_sources_words(read, text: str, found: object):
    assert read(text) == found


def test_families_by_other_names():
    """mT5 and UL2 as T5 v1.1, a llama as a GPT with other norms, positions and FFN; BART by its size."""
    t5 = {"encoder_layers": 2, "decoder_layers": 2, "hidden": 64, "heads": 4, "ffn": 128}
    lengths = points.Lengths(encoder=32, decoder=16)

    def built(name: str, **fields: Any) -> Any:
        return job_with(model=points.PublishedModel(architecture=name, **fields), lengths=lengths).architecture

    for name, vocabulary in (("mt5", 250_112), ("ul2", 32_128)):
        found = built(name, **t5)
        assert (found.family, found.gated, found.tied, found.positions) == ("t5", True, False, "relative")
        assert (found.norm, found.biases, found.padded_vocabulary) == ("rms", False, vocabulary)
    assert built("bart-large", **t5).family == "bart"
    llama = built("llama", decoder_layers=2, hidden=64, heads=4, ffn=128, vocab=32000, query_groups=4)
    assert (llama.family, llama.gated, llama.tied, llama.positions) == ("gpt", True, False, "rotary")
    assert (llama.norm, llama.biases) == ("rms", False)


def test_a_point_may_state_its_software():
    assert words.software(megatron_core(software="galvatron")) == "galvatron"
    assert job_with(software="HuggingFace").engine == "huggingface"


def test_one_stack_has_one_length_whatever_it_is_called():
    model = msgspec.structs.replace(megatron_core().model, architecture="GPT", encoder_layers=0, decoder_layers=2)
    lengths = points.Lengths(encoder=2048), points.Lengths(decoder=2048)
    assert job_with(model=model, lengths=lengths[0]) == job_with(model=model, lengths=lengths[1])
