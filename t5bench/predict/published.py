"""Turns published measurements, in the format of docs/published_training_measurements.json, into jobs and machines.

What a source does not state is filled in by rules over what it does state; no rule names a point.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from t5bench import Problem
from t5bench.model.job import SOFTWARE, Architecture, Job, Parallel, Zero, padded, usual_ffn
from t5bench.model.machine import DEVICES, GB, Device, Link, Machine

Count = Annotated[int, msgspec.Meta(ge=0)]
Figure = Annotated[float, msgspec.Meta(gt=0)]
T = TypeVar("T")
USES = {"memory", "activation", "bound", "throughput", "ratio"}
# Fields for people, which are not read.
NOTES = {"line", "config", "note", "caveats", "confidence", "parameters_stated", "decoder_pp"}


def _form(name: str, *required: tuple[str, type], **optional: Any) -> type[msgspec.Struct]:
    """A form with required fields and optional ones, whose names, separated by blanks, are given by kind."""
    kinds = {"text": str, "whole": Count, "size": Count | str, "switch": bool, "stage": Literal[0, 1, 2, 3]}
    kinds["layers"] = Annotated[int, msgspec.Meta(ge=0, le=100_000)]  # which the model lists one by one
    kinds |= {"share": Annotated[float, msgspec.Meta(ge=0, le=1)], "figure": Figure}
    kinds["by_tensor"] = dict[Annotated[int, msgspec.Meta(gt=0, lt=10**6)], Figure]
    fields = [(field, kinds[kind] | None, None) for kind, names in optional.items() for field in names.split()]
    return msgspec.defstruct(name, [*required, *fields])


Source = _form("Source", text="repo commit path url date")
Model = _form(
    "Model", ("architecture", str), text="name activation position", layers="encoder_layers decoder_layers",
    whole="hidden ffn heads kv_channels vocab query_groups", switch="gated tied",
)  # fmt: skip
Lengths = _form("Lengths", whole="encoder decoder")
Layout = _form(
    "Layout", size="tp", whole="pp dp cp ep layers_per_virtual_stage encoder_pp", stage="zero_stage", switch="sp",
    text="offload other",
)  # fmt: skip
Hardware = _form("Hardware", text="gpu interconnect", whole="count nodes")
LAYER = "encoder_layer_{0} decoder_layer_{0}"
# What the model predicts; other figures are for people. mb: mebibytes, by tensor-parallel size.
Measured = _form(
    "Measured",
    figure="memory_allocated_bytes peak_memory_allocated_bytes peak_minus_allocated_bytes memory_in_use_mib"
    " samples_per_second samples_per_second_derived sequences_per_second_derived tokens_per_second"
    " seconds_per_iteration_median seconds_per_iteration seconds_per_iteration_derived"
    f" {LAYER.format('model_states_mib')} {LAYER.format('activation_mib')}",
    by_tensor=LAYER.format("activation_mb"),
)
# One published measurement. use: what it can be compared with.
Point = _form(
    "Point",
    *{"id": str, "source": Source, "model": Model, "lengths": Lengths, "precision": str, "parallel": Layout}.items(),
    *{"hardware": Hardware, "measured": Measured, "use": Sequence[str]}.items(),
    text="how_counted optimizer attention_kernel activation_checkpointing software",
    whole="micro_batch global_batch global_batch_inferred",
    share="dropout",
)


def read(path: Path) -> tuple[list[Point], list[str], list[str]]:
    """The points of a file, and a sentence for each invalid entry and each unknown field. Raises Problem."""
    try:
        entries = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise Problem(f"cannot read {path}: {error}", "Give a file of published measurements") from error
    if not isinstance(entries, list):
        raise Problem(f"{path} holds no list of measurements", "See docs/published_training_measurements.json")
    points, invalid, unknown = [], [], []
    for number, entry in enumerate(entries, 1):
        name = entry.get("id", f"entry {number}") if isinstance(entry, dict) else f"entry {number}"
        try:
            points.append(point := msgspec.convert(entry, Point, str_keys=True))
            fields = list(_unknown(entry, Point))
            ways = [field for field in fields if field.startswith("parallel.") and _is_used(entry, field)]
            point.parallel.other = ", ".join(filter(None, [point.parallel.other, *ways]))
            unknown += [f"{name}: the field {field} is unknown and ignored" for field in fields if field not in ways]
            unknown += [f"{name}: the use {use} is unknown and ignored" for use in sorted(set(point.use) - USES)]
        except msgspec.ValidationError as error:
            invalid.append(f"{name} is invalid and left out: {error}")
    return points, invalid, unknown


def _unknown(entry: Mapping[str, Any], form: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    known = {field.name: field.type for field in msgspec.structs.fields(form)}
    for name, value in entry.items():
        if name not in known.keys() | NOTES:
            yield prefix + name
        elif name in ("source", "model", "lengths", "parallel", "hardware"):
            yield from _unknown(value, known[name], f"{name}.")


def _is_used(entry: Mapping[str, Any], field: str) -> bool:
    """Whether a field of a point's layout says more than that something is off or not divided."""
    return entry["parallel"][field.removeprefix("parallel.")] not in (None, 0, 1, "", "none")


def require(found: T | None, reason: str) -> T:
    """What was found. Raises ValueError with the reason why a point cannot be predicted if it is nothing."""
    if not found:
        raise ValueError(reason)
    return found


# Vocabularies of tokenizers, where a source does not state its own: bert-base-uncased, GPT-2, T5; mT5 by name.
VOCABULARIES = {"bert": 30522, "gpt": 50257, "t5": 32128, "bart": 50265}
MT5_VOCABULARY = 250_112
# Architectures as sources call them. mT5 and UL2 are T5 v1.1 in shape; a llama is a GPT with RMS norms, rotary
# positions, a gated FFN, no biases and a head of its own.
FAMILY_WORDS = {
    r"t5|u?mt5|flan-t5|t5-(small|base|large|xl|xxl|3b|11b)|ul2(-20b)?": "t5",
    r"bart(-base|-large)?": "bart",
    r"bert(-base|-large)?": "bert",
    r"gpt(-?[23])?|llama(-?[23])?": "gpt",
}
GATED = r"glu|silu|swish|(?<!un)(?<!not )gated?\b"  # activations; models with SiLU gate it, though few sources say so
MEGATRON = ("megatron-core", "megatron-core-softmax", "transformer-engine")
HEAD_SIZE, DROPOUT = 64, 0.1  # of all these models, and the default of Megatron and of Hugging Face's configurations
MULTIPLE = 128  # of Megatron's padding


def software(point: Point) -> str:
    """The name in t5bench/model/job.py's SOFTWARE of the software that was measured; "" for other software."""
    repository, kernel = point.source.repo or "", point.attention_kernel or ""
    if point.software:
        return point.software.lower() if point.software.lower() in SOFTWARE else ""
    if repository == "NVIDIA/Megatron-LM":
        if not kernel or "Transformer Engine" in kernel:
            return "transformer-engine"
        return "megatron-core-softmax" if "no-masked-softmax-fusion" in kernel else "megatron-core"
    if repository.startswith("PKU-DAIR/"):
        return "galvatron" if repository.endswith("Galvatron") else "galvatron-1"
    if re.search(r"\bHF\b|Hugging", kernel):
        return "autocast" if re.search(r"autocast|\bamp\b", point.precision, re.I) else "huggingface"
    return ""


def architecture_of(point: Point, tensor: int) -> Architecture:
    """Raises ValueError."""
    model, whose, named = point.model, software(point), point.model.architecture.lower()
    encoder, decoder = point.lengths.encoder or 0, point.lengths.decoder or 0
    family = next((one for words, one in FAMILY_WORDS.items() if re.fullmatch(words, named)), "")
    require(family, f"the architecture {named} is not known")
    is_llama, is_t5_v1_1 = named.startswith("llama"), bool(re.match("u?mt5|ul2", named))
    require(model.vocab or not is_llama, "the vocabulary of a llama is not stated")
    hidden = require(model.hidden, "the hidden size is not stated")
    require(encoder or decoder, "the sequence length is not stated")
    layers = model.encoder_layers or 0, model.decoder_layers or 0
    if whose.startswith("galvatron") and family == "t5" and model.encoder_layers is None:  # figures of one layer
        layers = 1, 1
    require(layers[family != "bert"], "the number of layers is not stated")
    if all(layers):
        require(encoder and decoder, "the encoder's or the decoder's length is not stated")
    else:  # one stack has one length, whatever a source calls it
        encoder, decoder = ((encoder or decoder) * (own > 0) for own in layers)
    gated, size = bool(re.search(GATED, (model.activation or "").lower())), model.kv_channels
    gated = (gated or is_llama or is_t5_v1_1) if model.gated is None else model.gated
    require(model.ffn or not gated or whose in MEGATRON, "the FFN size of a gated model is not stated")
    heads = require(model.heads or hidden // (size or HEAD_SIZE), "the number of attention heads is not stated")
    is_mt5 = "mt5" in f"{named} {model.name or ''}".lower()
    vocabulary = model.vocab or (MT5_VOCABULARY if is_mt5 else VOCABULARIES[family])
    position = model.position or ("rotary" if is_llama else "relative" if is_t5_v1_1 else "learned")
    original = position == "relative" or is_llama  # as T5 was published: RMS norms and no biases
    tied = model.tied if model.tied is not None else not (is_llama or is_t5_v1_1)
    return Architecture(
        encoder_layers=layers[0], decoder_layers=layers[1],
        hidden=hidden, heads=heads, head_size=size or hidden // heads,
        ffn=model.ffn or usual_ffn(hidden, gated), kv_heads=model.query_groups or heads,
        encoder_length=encoder, decoder_length=decoder,
        padded_vocabulary=vocabulary if original else padded(vocabulary, MULTIPLE, tensor),
        family=family, gated=gated, activation=model.activation or "gelu", tied=tied,
        positions=position, biases=not original, head_bias=not original and family != "gpt",
        norm="rms" if original or whose == "galvatron" else "layer",
    )  # fmt: skip


def job_of(point: Point, tensor: int | None = None) -> Job:
    """What was trained. tensor: for a point with figures for several tensor-parallel sizes. Raises ValueError."""
    layout, optimizer, stated = point.parallel, point.optimizer or "", point.activation_checkpointing or "none"
    t, pipeline, zero, offload = tensor or layout.tp or 1, layout.pp or 1, layout.zero_stage or 0, layout.offload or ""
    require(isinstance(t, int), f"its tensor-parallel size is not one number: '{t}'")
    micro_batch = require(point.micro_batch, "the micro-batch size is not stated")
    precision = require(precision_of(point), f"the precision {point.precision} is not known")
    again = require(re.match("none|full|selective", stated.lower()), f"the recomputation {stated} is not known")
    some = again[0] != "none" and re.search(SOME_LAYERS, stated.lower())
    require(not some, f"which layers are recomputed cannot be told from '{stated}'")
    divided = [f"{name} {size}" for name, size in (("cp", layout.cp), ("ep", layout.ep)) if (size or 1) > 1]
    require(not divided, f"context and expert parallelism are not modelled: {', '.join(divided)}")
    require(not layout.other, f"its layout has something that the model does not know: {layout.other}")
    require(not point.software or software(point), f"the software {point.software} is not known")
    require(not re.search(HYBRID, optimizer.lower()), f"how '{optimizer}' divides its states is not modelled")
    shards = re.search(SHARDED, optimizer.lower())
    require(zero or not shards, f"the ZeRO stage that '{optimizer}' stands for is not stated")
    require(not offload or re.search("optimizer|parameters", offload), f"the offload {offload} is not known")
    architecture = architecture_of(point, t)
    heads, ffn, stacks = architecture.heads, architecture.ffn, architecture.layers
    require(heads % architecture.kv_heads == 0, f"its {heads} attention heads do not divide into its query groups")
    require(heads % t == ffn % t == 0, f"its {heads} heads and {ffn} FFN columns do not divide over {t} GPUs")
    require(pipeline <= stacks, f"its pipeline has {pipeline} stages, more than its {stacks} layers")
    data = layout.dp or (point.hardware.count or 0) // (t * pipeline) or 1
    batch = point.global_batch or point.global_batch_inferred or micro_batch * data
    fills = batch % (micro_batch * data) == 0
    require(fills, f"{data} micro-batches of {micro_batch} do not divide its batch of {batch}")
    distributed = bool(re.search(DISTRIBUTED, optimizer.lower()))
    ranks = layout.dp or point.hardware.count or not (distributed or zero)
    require(ranks, "over how many GPUs its states are divided is not stated")
    layers = max(architecture.encoder_layers, architecture.decoder_layers) // pipeline
    chunk = layout.layers_per_virtual_stage
    divides = not chunk or (layers and layers % chunk == 0)
    require(divides, f"{layers} layers of a stage are not a multiple of {chunk}")
    # Megatron-LM's tests of T5 add up gradients in the kernel, those of GPT and BERT do not (model_config.yaml). Since
    # the second half of 2025 get_dummy_wgrad (core/tensor_parallel/layers.py) keeps what stands for a gradient.
    fused = point.source.repo == "NVIDIA/Megatron-LM" and architecture.family == "t5"
    states = optimizer_states(optimizer)
    return Job(
        architecture=architecture,
        parallel=Parallel(
            t, pipeline, data, layout.encoder_pp, bool(layout.sp), layers // chunk if chunk else 1,
            devices_per_node=max(1, (point.hardware.count or 8) // (point.hardware.nodes or 1)),
        ),
        micro_batch=micro_batch,
        global_batch=batch,
        zero=Zero(0 if distributed else zero, "optimizer" in offload, "parameters" in offload),
        distributed_optimizer=distributed,
        precision=precision,
        recompute=again[0],
        attention=_attention(point),
        dropout=DROPOUT if point.dropout is None else point.dropout,
        engine=software(point) or "megatron-core",
        dummy_gradients=fused and (point.source.date or "") >= "2025-08",
        moments=ADAM if states is None else states,
    )  # fmt: skip


SOME_LAYERS = r"\d+ ?(of|/) ?(the )?\d+|\bblock\b|partial|every (other|second|third|\d)|first \d+|\d+ layers|%"
HYBRID = r"hsdp|hybrid.?shard"  # states divided inside a node and repeated between nodes
SHARDED = r"fsdp|fully.sharded|(full|grad_op).?shard|shard.?grad.?op"
DISTRIBUTED = r"(?<!not )(?<!non-)(?<!no )(?<!without )(?<!without a )distributed(?! data)(?!\w*\W+(?:false|off)\b)"

# Bytes per parameter of each state of an optimizer in fp32, by its name: 8 for Adam, 4 for SGD with momentum, 2 for
# Adam in 8 bits (transformers, docs/source/en/model_memory_anatomy.md). Lion has one moment (arXiv 2302.06675);
# Adafactor without beta1 has a row and a column of each weight, next to nothing (transformers/optimization.py:866).
ADAM = (4, 4)
OPTIMIZERS = {"adafactor": (), r"sgd.*momentum|momentum sgd": (4,), "sgd": (), "lion": (4,), "adam|lamb": ADAM}
OTHER_OPTIMIZERS = r"muon|sophia|shampoo|soap|adagrad|lars|paged|adafactor.*(beta1|momentum)|\b[1-7].?bit"


def optimizer_states(optimizer: str) -> tuple[int, ...] | None:
    """Of an optimizer as a source calls it, Adam's if it does not; None if they are not known."""
    name = optimizer.lower()
    if re.search(OTHER_OPTIMIZERS, name):
        return None
    found = next((states for words, states in OPTIMIZERS.items() if re.search(words, name)), ADAM)
    return tuple(1 for _ in found) if re.search(r"8.?bit", name) else found


# Words for a precision; the first one counts, but fp8 is for linear layers alone and goes with another.
PRECISIONS = {
    r"(?<!no )(?:fp|float)8(?!\W*(?:off|false|disabled))": "fp8", "bf(?:loat)?16": "bf16",
    "(?:fp|float)16|half": "fp16", "tf32": "tf32", "(?:fp|float)32": "fp32",
}  # fmt: skip
OTHER_PRECISIONS = r"fp4|nf4|int\d|\d.?bit|qlora"


def precision_of(point: Point) -> str:
    """A key of model.job.BYTES; "" if the point states none, or one that the model does not have."""
    named = point.precision.lower()
    found = {name: place.start() for word, name in PRECISIONS.items() if (place := re.search(word, named))}
    if re.search(OTHER_PRECISIONS, named):
        return ""
    return "fp8" if "fp8" in found else min(found, key=found.__getitem__, default="")


KERNELS = {"unfused": "unfused", "cudnn": "fused", r"(?<!no )(?<!without )flash": "flash"}
KERNELS["fused|sdpa|scaled_dot"] = "fused"


def _attention(point: Point) -> str:
    """Where no kernel is stated, Transformer Engine's choice: cuDNN's on Hopper, flash-attn before; else unfused."""
    kernel = (point.attention_kernel or "").lower()
    if found := next((name for word, name in KERNELS.items() if re.search(word, kernel)), ""):
        return found
    chosen = software(point) == "transformer-engine" or precision_of(point) == "fp8"
    chosen = "transformer engine" in kernel if kernel else chosen
    plain = chosen or not kernel or re.search("eager|softmax|bmm|plain|native|local", kernel)
    require(plain, f"the attention kernel {point.attention_kernel} is not known")
    if not chosen:
        return "unfused"
    return "fused" if (device := device_of(point)) and device.hopper else "flash"


# What one node sends over all its interfaces: eight of 200 Gbit/s in a DGX A100, eight of 400 in a DGX H100, four of
# 100 in a DGX-1 (data sheets); sources hardly ever say what their nodes have.
BETWEEN = {"a100": 200, "a100-40": 200, "h100": 400, "h200": 400, "b200": 400}
OTHER_BETWEEN = 50


def device_of(point: Point) -> Device | None:
    """The device whose name's parts are all in what the source calls the GPU, the longest name first; else None."""
    called = (point.hardware.gpu or "").lower().replace("_", " ")
    if re.search(r"\b(laptop|max-?q|mig|ti)\b", called):  # less, or more, than the GPU that is named
        return None
    found = [name for name in DEVICES if all(re.search(_pattern(part), called) for part in name.split("-"))]
    return DEVICES[max(found, key=len)] if found else None


def _pattern(part: str) -> str:
    """Of a part of a device's name: 40 is its memory, and RTX5000 may be RTX 5000."""
    spaced = re.sub(r"(?<=[a-z])(?=\d)", r"\\s?", part)
    return rf"\b{spaced}(\s?gb?\b)" if part.isdigit() else rf"\b{spaced}s?\b"


def _gigabits(text: str, devices: int) -> float:
    """What a node sends over all its interfaces, in Gbit/s, if the text states it; else 0.

    "8 x 200 Gb/s" and "4 links of 100 Gb/s" are multiplied; a rate without a number is the node's, unless NVLink's.
    """
    rate, number = r"(\d+)\s?G(?:iga)?b(?:E|its?)?(?:/s(?:ec)?|ps)?\b", r"(\d+)(?: [\w -]*links? of |\s?[x*\xd7]\s?)"
    between = " ".join(part for part in re.split("[;,]", text) if not re.search("NVLink|NVSwitch|PCIe", part))
    if found := re.search(rf"usable {rate}", text):
        return float(found[1])
    if found := re.search(number + rate, text):
        return float(found[1]) * float(found[2])
    found = re.search(rf"{rate}( per GPU)?", between)
    return float(found[1]) * (devices if found[2] else 1) if found else 0.0


def machine_of(point: Point) -> Machine:
    """The machine. An unstated GPU is assumed to be an A100; a ratio within one source hardly depends on it."""
    hardware, device = point.hardware, device_of(point)
    require(device or not hardware.gpu, f"the GPU {hardware.gpu} is not known")
    nodes, interconnect, device = hardware.nodes or 1, hardware.interconnect or "", device or DEVICES["a100"]
    fp8 = precision_of(point) == "fp8"
    require(not fp8 or (hardware.gpu and device.fp8), "fp8 is stated, but no GPU that has it")
    require(hardware.nodes or (hardware.count or 1) <= 8, f"the nodes of its {hardware.count} GPUs are not stated")
    require((hardware.count or nodes) % nodes == 0, f"its {hardware.count} GPUs do not fill {nodes} nodes")
    require(hardware.gpu or interconnect or nodes == 1, "neither the GPU nor what joins its nodes is stated")
    per_node = max(1, (hardware.count or 1) // nodes)
    between = _gigabits(interconnect, per_node) / 8 or BETWEEN.get(device.name, OTHER_BETWEEN)
    return Machine(device, Link(device.nvlink or device.pcie, 5e-6), Link(between * GB, 15e-6), per_node)
