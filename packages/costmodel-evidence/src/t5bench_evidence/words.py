"""How sources' words are read: software, precision, optimizer, attention kernel, GPU and network.

No rule names a point. What a source does not state is filled in by rules over what it does state.
"""

import re
from typing import TypeVar

from t5bench import Problem
from t5bench.costmodel.job import SOFTWARE
from t5bench.costmodel.machine import DEVICES, Device
from t5bench_evidence.points import Point

T = TypeVar("T")


class Unpredictable(Problem):
    """Why a point cannot be predicted, in one sentence."""


def require(condition: object, reason: str) -> None:
    """Raises Unpredictable with the reason unless the condition holds."""
    if not condition:
        raise Unpredictable(reason)


def stated(value: T | None, reason: str) -> T:
    """The value. Raises Unpredictable with the reason if the source does not state it, or if it is 0."""
    if not value:
        raise Unpredictable(reason)
    return value


AUTOCAST = r"autocast|\bamp\b"
HUGGING_FACE = r"\bHF\b|Hugging|plain PyTorch T5"  # or a copy of its modules, as in nanoT5
COMPILED = r"torch\.compile"
NEMO = r"\bnemo\b|nemo-framework"  # in a source's address: NVIDIA's software around Megatron


def software(point: Point) -> str:
    """The name in t5bench/costmodel/job.py's SOFTWARE of the software that was measured; "" for other software."""
    repository = point.source.repo or ""
    kernel = point.attention_kernel or ""
    if point.software:
        name = point.software.lower()
        if name == "huggingface" and re.search(AUTOCAST, point.precision, re.IGNORECASE):
            return "autocast"
        return name if name in SOFTWARE else ""
    if repository == "NVIDIA/Megatron-LM":
        if not kernel or "Transformer Engine" in kernel:
            return "transformer-engine"
        return "megatron-core-softmax" if "no-masked-softmax-fusion" in kernel else "megatron-core"
    if repository.startswith("PKU-DAIR/"):
        return "galvatron" if repository.endswith("Galvatron") else "galvatron-1"
    if is_nemo(point):
        return "transformer-engine" if precision_of(point) == "fp8" else "megatron-core"
    if re.search(COMPILED, kernel):
        return "compiled"
    if re.search(HUGGING_FACE, kernel):
        return "autocast" if re.search(AUTOCAST, point.precision, re.IGNORECASE) else "huggingface"
    return ""


def is_nemo(point: Point) -> bool:
    address = point.source.repo or point.source.url or ""
    return re.search(NEMO, address, re.IGNORECASE) is not None


def overlaps(point: Point) -> bool:
    """Whether collectives are sent while the GPU computes, as NeMo's recipes with Transformer Engine do it
    (NVIDIA/NeMo, docs/source/features/optimizations/communication_overlap.rst)."""
    return is_nemo(point) and software(point) == "transformer-engine"


# Bytes per parameter of each state of an optimizer in fp32, by its name: 8 for Adam, 4 for SGD with momentum, 2 for
# Adam in 8 bits (transformers, docs/source/en/model_memory_anatomy.md). Lion has one moment (arXiv 2302.06675);
# Adafactor without beta1 has a row and a column of each weight, next to nothing (transformers/optimization.py:866).
ADAM = (4, 4)
OPTIMIZERS = {
    r"adafactor": (),
    r"sgd.*momentum|momentum sgd": (4,),
    r"sgd": (),
    r"lion": (4,),
    r"adam|lamb": ADAM,
}
OTHER_OPTIMIZERS = r"muon|sophia|shampoo|soap|adagrad|lars|paged|adafactor.*(beta1|momentum)|\b[1-7].?bit"
EIGHT_BIT = r"8.?bit"


def optimizer_states(optimizer: str) -> tuple[int, ...] | None:
    """Bytes per parameter of each state of an optimizer as a source calls it, Adam's if it does not; None: unknown."""
    name = optimizer.lower()
    if re.search(OTHER_OPTIMIZERS, name):
        return None
    states = next((states for words, states in OPTIMIZERS.items() if re.search(words, name)), ADAM)
    return (1,) * len(states) if re.search(EIGHT_BIT, name) else states


# How an optimizer's states are divided, as sources say it.
HYBRID_SHARDING = r"hsdp|hybrid.?shard"  # inside a node, and repeated between nodes
SHARDING = r"fsdp|fully.sharded|(full|grad_op).?shard|shard.?grad.?op"
# What such words say of the ZeRO stage, if they do.
STAGES = {
    r"(full|hybrid).?shard|optim_grads_params|zero.?3": 3,
    r"shard.?grad.?op|grad_op.?shard|optim_grads\b|zero.?2": 2,
    r"\boptim\b|zero.?1": 1,
    r"no.?shard|zero.?0": 0,
}
OTHER_STAGES = r"zero.?\+\+|zero.?(offload|infinity)"
DISTRIBUTED = r"(?<!not )(?<!non-)(?<!no )(?<!without )(?<!without a )distributed(?! data)(?!\w*\W+(?:false|off)\b)"

# Words for a precision; the first one counts, but fp8 is for linear layers alone and goes with another.
PRECISIONS = {
    r"(?<!no )(?:fp|float)8(?!\W*(?:off|false|disabled))": "fp8",
    r"bf(?:loat)?16": "bf16",
    r"(?:fp|float)16|half": "fp16",
    r"tf32": "tf32",
    r"(?:fp|float)32": "fp32",
}
OTHER_PRECISIONS = r"fp4|nf4|int\d|\d.?bit|qlora"


def precision_of(point: Point) -> str:
    """A key of model.job.BYTES; "" if the point states none, or one that the model does not have."""
    text = point.precision.lower()
    if re.search(OTHER_PRECISIONS, text):
        return ""
    positions: dict[str, int] = {}
    for words, name in PRECISIONS.items():
        match = re.search(words, text)
        if match:
            positions[name] = match.start()
    if "fp8" in positions:
        return "fp8"
    return min(positions, key=lambda name: positions[name], default="")


# A fused softmax is a part of unfused attention, and so is what PyTorch calls its math kernel.
KERNELS = {
    r"unfused|(?<!no-masked-)softmax.?fusion|(fused|masked).?softmax|\bmath\b": "unfused",
    r"cudnn": "fused",
    r"(?<!no )(?<!not )(?<!without )(flash|\bfa2\b)": "flash",
    r"fused|sdpa|scaled_dot": "fused",
}
UNFUSED_KERNELS = r"eager|softmax|bmm|plain|native|local"
OTHER_KERNELS = r"flash.?infer|flash.?attention.?[34]\b|flash.?attn.?[34]\b|\bfa[34]\b|\bring\b|\bpaged\b"


def attention_kernel(point: Point) -> str:
    """ "unfused", "fused" or "flash".

    Where no kernel is stated, it is the choice of Transformer Engine if that was used: cuDNN's on Hopper, flash-attn
    before; else unfused. Raises Unpredictable.
    """
    kernel = (point.attention_kernel or "").lower()
    require(not re.search(OTHER_KERNELS, kernel), f"the attention kernel {point.attention_kernel} is not modelled")
    for words, name in KERNELS.items():
        if re.search(words, kernel):
            is_mixed = name != "unfused" and re.search(UNFUSED_KERNELS, kernel)
            require(
                not is_mixed, f"which attention runs in which kernel cannot be told from '{point.attention_kernel}'"
            )
            return name
    if kernel:
        transformer_engine_chooses = "transformer engine" in kernel
        is_known = transformer_engine_chooses or re.search(UNFUSED_KERNELS, kernel)
        require(is_known, f"the attention kernel {point.attention_kernel} is not known")
    else:
        transformer_engine_chooses = software(point) == "transformer-engine" or precision_of(point) == "fp8"
    if not transformer_engine_chooses:
        return "unfused"
    device = device_of(point)
    return "fused" if device and device.hopper else "flash"


def norm_kernel(point: Point) -> str:
    """ "fused", "eager", or "" for what the software has."""
    if point.norm_kernel:
        require(point.norm_kernel in ("fused", "eager"), f"the norm kernel {point.norm_kernel} is not known")
        return point.norm_kernel
    return ""


def predicted_tokens(point: Point, length: int) -> int:
    """Tokens of a sample that have logits; 0 for all.

    BERT in NVIDIA/DeepLearningExamples selects the masked ones before its head: max_predictions_per_seq is 20 of 128
    tokens and 80 of 512 in its scripts/run_pretraining*.sh.
    """
    selects_masked = point.source.repo == "NVIDIA/DeepLearningExamples" and point.model.architecture == "bert"
    return length * 20 // 128 if selects_masked else 0


# Names of products that have less, or more, than the GPU that is named.
VARIANTS = r"\b(laptop|max-?q|mig)\b"
TI = r"\d\s?ti\b"


def device_of(point: Point) -> Device | None:
    """The device whose name's parts are all in what the source calls the GPU, the longest name first; else None."""
    text = (point.hardware.gpu or "").lower().replace("_", " ")
    if re.search(VARIANTS, text):
        return None
    names = [name for name in DEVICES if all(re.search(_pattern(part), text) for part in name.split("-"))]
    longest = max(names, key=len, default="")
    is_whole = not re.search(TI, text) or longest.endswith("ti")
    return DEVICES[longest] if longest and is_whole else None


def _pattern(part: str) -> str:
    """Of a part of a device's name: 40 is its memory, and RTX5000 may be RTX 5000."""
    spaced = re.sub(r"(?<=[a-z])(?=\d)|(?<=\d)(?=ti$)", r"\\s?", part)
    return rf"\b{spaced}(\s?gb?\b)" if part.isdigit() else rf"\b{spaced}s?\b"


RATE = r"(\d+)\s?G(?:iga)?b(?:E|its?)?(?:/s(?:ec)?|ps)?\b"
LINKS = r"(\d+)(?: [\w -]*links? of |\s?[x*\xd7]\s?)"


def gigabits_of_node(text: str, devices: int) -> float:
    """What a node sends over all its interfaces, in Gbit/s, if the text states it; else 0.

    "8 x 200 Gb/s" and "4 links of 100 Gb/s" are multiplied; a rate without a number is the node's, unless NVLink's.
    """
    usable = re.search(rf"usable {RATE}", text)
    if usable:
        return float(usable[1])
    links = re.search(LINKS + RATE, text)
    if links:
        return float(links[1]) * float(links[2])
    between_nodes = [part for part in re.split("[;,]", text) if not re.search("NVLink|NVSwitch|PCIe", part)]
    rate = re.search(rf"{RATE}( per GPU)?", " ".join(between_nodes))
    if not rate:
        return 0.0
    return float(rate[1]) * (devices if rate[2] else 1)
