"""Turns published measurements into jobs and machines of the model.

What a source does not state is filled in by rules over what it does state; no rule names a point.
"""

import re
from collections.abc import Sequence

from t5bench.costmodel.job import Architecture, Job, Parallel, Zero, padded, usual_ffn
from t5bench.costmodel.machine import DEVICES, GB, Link, Machine
from t5bench_evidence import words
from t5bench_evidence.points import Point, PublishedModel
from t5bench_evidence.words import device_of, precision_of, require, software, stated

# Vocabularies of tokenizers, where a source does not state its own: bert-base-uncased, GPT-2, T5; mT5 by name.
VOCABULARIES = {"bert": 30522, "gpt": 50257, "t5": 32128, "bart": 50265}
MT5_VOCABULARY = 250_112
# Architectures as sources call them. mT5 and UL2 are T5 v1.1 in shape; a llama is a GPT with RMS norms, rotary
# positions, a gated FFN, no biases and a head of its own.
FAMILY_WORDS = {
    r"(t5|(flan-)?t5(-v1\.1)?|u?mt5)(-(small|base|large|xl|xxl|3b|11b))?|(flan-)?ul2(-20b)?": "t5",
    r"bart(-base|-large)?": "bart",
    r"bert(-base|-large)?": "bert",
    r"gpt(-?[23])?|llama(-?[123](\.\d)?)?(-\d+b)?": "gpt",
}
T5_V1_1 = r"\bu?mt5|\b(flan-)?ul2|flan-t5|t5-v?1\.1"  # names of the shapes that Google published after T5
# Names whose shapes are no GPT's of the kind that is meant where a source states nothing else.
OTHER_DECODERS = r"llama|mistral|mixtral|qwen|gemma|falcon|\bopt\b|bloom|neox|gpt-j|deepseek|\bphi\b"
NOT_MODELLED = r"t5gemma|byt5|longt5|codet5|switch|moe\b"  # other attention, vocabularies or experts
GATED = r"glu|silu|swish|(?<!un)(?<!not )gated?\b"  # activations; models with SiLU gate it, though few sources say so
MEGATRON = ("megatron-core", "megatron-core-softmax", "transformer-engine")
HEAD_SIZE = 64  # of all these models
DROPOUT = 0.1  # the default of Megatron and of Hugging Face's configurations
PADDING_MULTIPLE = 128  # of Megatron's vocabularies


def architecture_of(point: Point, tensor: int) -> Architecture:
    """Raises Unpredictable."""
    model = point.model
    engine = software(point)
    name = _plain(model.architecture)
    full_name = f"{name} {_plain(model.name or '')}"
    is_llama = name.startswith("llama")
    is_t5_v1_1 = re.search(T5_V1_1, full_name) is not None
    family = _family(name)
    is_called_llama = family == "gpt" and re.search(r"\bllama", full_name) is not None
    require(family, f"the architecture {name} is not known")
    require(model.vocab or not is_llama, "the vocabulary of a llama is not stated")
    _check_shape(model, full_name, family)
    hidden = stated(model.hidden, "the hidden size is not stated")
    require(point.lengths.encoder or point.lengths.decoder, "the sequence length is not stated")
    layers = (model.encoder_layers or 0, model.decoder_layers or 0)
    if engine.startswith("galvatron") and family == "t5" and model.encoder_layers is None:
        layers = (1, 1)  # its figures are of one layer
    has_layers = layers[0] if family == "bert" else layers[1]
    require(has_layers, "the number of layers is not stated")
    encoder_length, decoder_length = _lengths(point, layers)

    if model.gated is not None:
        gated = model.gated
    else:
        gated = bool(re.search(GATED, (model.activation or "").lower())) or is_llama or is_t5_v1_1
    require(model.ffn or not gated or engine in MEGATRON, "the FFN size of a gated model is not stated")
    usual_heads = hidden // (model.kv_channels or HEAD_SIZE)
    heads = stated(model.heads or usual_heads, "the number of attention heads is not stated")

    positions = model.position or _usual_positions(is_llama, is_t5_v1_1)
    as_published = positions == "relative" or is_called_llama  # T5 or Llama: RMS norms and no biases
    tied = model.tied if model.tied is not None else not (is_llama or is_t5_v1_1)
    vocabulary = model.vocab or _vocabulary(model, family)
    return Architecture(
        encoder_layers=layers[0],
        decoder_layers=layers[1],
        hidden=hidden,
        heads=heads,
        head_size=model.kv_channels or hidden // heads,
        ffn=model.ffn or usual_ffn(hidden, gated),
        kv_heads=model.query_groups or heads,
        encoder_length=encoder_length,
        decoder_length=decoder_length,
        padded_vocabulary=vocabulary if as_published else padded(vocabulary, PADDING_MULTIPLE, tensor),
        family=family,
        gated=gated,
        activation=model.activation or "gelu",
        tied=tied,
        positions=positions,
        biases=not as_published,
        head_bias=not as_published and family != "gpt",
        norm="rms" if as_published or engine == "galvatron" else "layer",
        predicted=words.predicted_tokens(point, encoder_length),
    )


def _plain(name: str) -> str:
    """A model's name in small letters, its parts joined by dashes: T5 v1_1 is t5-v1.1."""
    return re.sub(r"(?<=\d)_(?=\d)", ".", name.lower().strip()).replace(" ", "-").replace("_", "-")


def _check_shape(model: PublishedModel, name: str, family: str) -> None:
    """Raises Unpredictable where a name says more of the shape than the source, or something that is not modelled."""
    require(not re.search(NOT_MODELLED, name), f"the shape of {model.name or model.architecture} is not modelled")
    if family != "gpt" or not re.search(OTHER_DECODERS, name):
        return
    is_llama = name.startswith("llama")
    is_stated = is_llama or (model.position and model.gated is not None and model.tied is not None)
    require(is_stated, f"{model.name} is no GPT-2, and its positions, its gate or whether it is tied are not stated")
    has_groups = model.query_groups or not is_llama
    require(has_groups, "how many heads of keys and values a llama has is not stated")


def _family(name: str) -> str:
    for pattern, family in FAMILY_WORDS.items():
        if re.fullmatch(pattern, name):
            return family
    return ""


def _lengths(point: Point, layers: tuple[int, int]) -> tuple[int, int]:
    """Tokens in the encoder and the decoder. A single stack has one length, whatever a source calls it."""
    encoder = point.lengths.encoder or 0
    decoder = point.lengths.decoder or 0
    if all(layers):
        require(encoder and decoder, "the encoder's or the decoder's length is not stated")
        return encoder, decoder
    length = encoder or decoder
    return (length if layers[0] else 0), (length if layers[1] else 0)


def _usual_positions(is_llama: bool, is_t5_v1_1: bool) -> str:
    if is_llama:
        return "rotary"
    return "relative" if is_t5_v1_1 else "learned"


def _vocabulary(model: PublishedModel, family: str) -> int:
    is_mt5 = "mt5" in f"{model.architecture} {model.name or ''}".lower()
    return MT5_VOCABULARY if is_mt5 else VOCABULARIES[family]


def job_of(point: Point, tensor_size: int | None = None) -> Job:
    """What was trained. tensor_size: for a point with figures for several of them. Raises Unpredictable."""
    layout = point.parallel
    tensor = tensor_size or layout.tp or 1
    pipeline = layout.pp or 1
    optimizer = (point.optimizer or "").lower()
    if not isinstance(tensor, int):
        raise words.Unpredictable(f"its tensor-parallel size is not one number: '{tensor}'")
    micro_batch = stated(point.micro_batch, "the micro-batch size is not stated")
    precision = stated(precision_of(point), f"the precision {point.precision} is not known")
    recomputation = _recomputation(point)
    _check_layout(point)
    architecture = architecture_of(point, tensor)
    _check_divisions(architecture, tensor, pipeline)
    data = layout.dp or (point.hardware.count or 0) // (tensor * pipeline) or 1
    batch = point.batch or micro_batch * data
    is_filled = batch % (micro_batch * data) == 0
    require(is_filled, f"{data} micro-batches of {micro_batch} do not divide its batch of {batch}")
    is_distributed = re.search(words.DISTRIBUTED, optimizer) is not None
    is_divided = is_distributed or bool(layout.zero_stage)
    ranks_are_known = layout.dp or point.hardware.count or not is_divided
    require(ranks_are_known, "over how many GPUs its states are divided is not stated")
    offload = layout.offload or ""
    states = words.optimizer_states(optimizer)
    return Job(
        architecture=architecture,
        parallel=Parallel(
            tensor,
            pipeline,
            data,
            split_rank=layout.encoder_pp,
            sequence_parallel=bool(layout.sp),
            virtual_stages=_virtual_stages(architecture, pipeline, layout.layers_per_virtual_stage),
            devices_per_node=max(1, (point.hardware.count or 8) // (point.hardware.nodes or 1)),
        ),
        micro_batch=micro_batch,
        global_batch=batch,
        zero=Zero(
            0 if is_distributed else layout.zero_stage or 0,
            offload_optimizer="optimizer" in offload,
            offload_parameters="parameters" in offload,
        ),
        distributed_optimizer=is_distributed,
        precision=precision,
        recompute=recomputation,
        attention=words.attention_kernel(point),
        norm_kernel=words.norm_kernel(point),
        dropout=DROPOUT if point.dropout is None else point.dropout,
        engine=software(point) or "unknown",
        dummy_gradients=_keeps_dummy_gradients(point, architecture),
        overlaps=words.overlaps(point),
        moments=words.ADAM if states is None else states,
    )


SOME_LAYERS = (
    r"\d+ ?(of|/) ?(the )?\d+|\bblock\b|partial|every (other|second|third|\d)|first|last|\d+ layers|%"
    r"|half|except|but |only|some\b|alternat"
)
NOT_THE_CORE = (
    r"mlp|norm|moe|linear|ffn|full|layers?\b"  # what selective recomputation repeats, besides attention's core
)


def _recomputation(point: Point) -> str:
    """ "none", "selective" or "full". Raises Unpredictable."""
    text = point.activation_checkpointing or "none"
    match = stated(re.match(r"(none|full|selective)\b", text.lower()), f"the recomputation {text} is not known")
    of_some_layers = match[0] != "none" and re.search(SOME_LAYERS, text.lower())
    require(not of_some_layers, f"which layers are recomputed cannot be told from '{text}'")
    of_more = match[0] == "selective" and re.search(NOT_THE_CORE, text.lower())
    require(not of_more, f"the recomputation {text} is more than attention's core, which alone is modelled")
    return match[0]


def _check_layout(point: Point) -> None:
    """Raises Unpredictable for a division that the model does not have, or that the source does not tell exactly."""
    layout = point.parallel
    optimizer = point.optimizer or ""
    divisions = {"cp": layout.cp or 1, "ep": layout.ep or 1}
    divided = [f"{name} {size}" for name, size in divisions.items() if size > 1]
    require(not divided, f"context and expert parallelism are not modelled: {', '.join(divided)}")
    require(not layout.other, f"its layout has something that the model does not know: {layout.other}")
    require(not point.software or software(point), f"the software {point.software} is not known")
    is_hybrid = re.search(words.HYBRID_SHARDING, optimizer.lower())
    require(not is_hybrid, f"how '{optimizer}' divides its states is not modelled")
    is_sharded = re.search(words.SHARDING, optimizer.lower())
    require(layout.zero_stage or not is_sharded, f"the ZeRO stage that '{optimizer}' stands for is not stated")
    _check_stage(layout.zero_stage, optimizer)
    is_one = not re.search(words.DISTRIBUTED, optimizer.lower()) or (layout.zero_stage or 0) <= 1
    require(
        is_one, f"'{optimizer}' divides the optimizer's states alone, but the layout states ZeRO-{layout.zero_stage}"
    )
    is_known = not layout.offload or re.search("optimizer|parameters", layout.offload)
    require(is_known, f"the offload {layout.offload} is not known")


def _check_stage(stage: int | None, optimizer: str) -> None:
    """Raises Unpredictable where the optimizer's words say another ZeRO stage than the layout, or one that it lacks."""
    name = optimizer.lower()
    is_other = re.search(words.OTHER_STAGES, name)
    require(not is_other, f"how '{optimizer}' divides its states is not modelled")
    meant = next((number for pattern, number in words.STAGES.items() if re.search(pattern, name)), None)
    stated_stage = "no stage" if stage is None else stage
    agrees = meant in (None, stage or 0)
    require(agrees, f"'{optimizer}' means ZeRO-{meant}, but the layout states {stated_stage}")


def _check_divisions(architecture: Architecture, tensor: int, pipeline: int) -> None:
    """Raises Unpredictable for an architecture that the layout does not divide."""
    heads = architecture.heads
    ffn = architecture.ffn
    layers = architecture.layers
    require(heads % architecture.kv_heads == 0, f"its {heads} attention heads do not divide into its query groups")
    is_divided = heads % tensor == 0 and ffn % tensor == 0
    require(is_divided, f"its {heads} heads and {ffn} FFN columns do not divide over {tensor} GPUs")
    require(pipeline <= layers, f"its pipeline has {pipeline} stages, more than its {layers} layers")


def _virtual_stages(architecture: Architecture, pipeline: int, layers_per_virtual_stage: int | None) -> int:
    """Model chunks of a pipeline stage. Raises Unpredictable."""
    if not layers_per_virtual_stage:
        return 1
    layers = max(architecture.encoder_layers, architecture.decoder_layers) // pipeline
    is_multiple = layers > 0 and layers % layers_per_virtual_stage == 0
    require(is_multiple, f"{layers} layers of a stage are not a multiple of {layers_per_virtual_stage}")
    return layers // layers_per_virtual_stage


def _keeps_dummy_gradients(point: Point, architecture: Architecture) -> bool:
    """Megatron-LM's tests of T5 add up gradients in the kernel, those of GPT and BERT do not (model_config.yaml). Since
    the second half of 2025 get_dummy_wgrad (core/tensor_parallel/layers.py) keeps what stands for a gradient."""
    adds_up_in_the_kernel = point.source.repo == "NVIDIA/Megatron-LM" and architecture.family == "t5"
    return adds_up_in_the_kernel and (point.source.date or "") >= "2025-08"


# What one node sends over all its interfaces, in GB/s: eight of 200 Gbit/s in a DGX A100, eight of 400 in a DGX H100,
# four of 100 in a DGX-1 (data sheets); sources hardly ever say what their nodes have.
BETWEEN_NODES = {"a100": 200, "a100-40": 200, "h100": 400, "h200": 400, "b200": 400}
OTHER_BETWEEN_NODES = 50


def machine_of(point: Point) -> Machine:
    """The machine. An unstated GPU is assumed to be an A100; a ratio within one source hardly depends on it.

    Raises Unpredictable.
    """
    hardware = point.hardware
    stated_device = device_of(point)
    require(stated_device or not hardware.gpu, f"the GPU {hardware.gpu} is not known")
    device = stated_device or DEVICES["a100"]
    if precision_of(point) == "fp8":
        require(hardware.gpu and device.fp8, "fp8 is stated, but no GPU that has it")
    nodes = hardware.nodes or 1
    count = hardware.count or nodes
    interconnect = hardware.interconnect or ""
    require(hardware.nodes or count <= 8, f"the nodes of its {hardware.count} GPUs are not stated")
    require(count % nodes == 0, f"its {hardware.count} GPUs do not fill {nodes} nodes")
    require(hardware.gpu or interconnect or nodes == 1, "neither the GPU nor what joins its nodes is stated")
    per_node = count // nodes
    stated_rate = words.gigabits_of_node(interconnect, per_node) / 8
    rate = stated_rate or BETWEEN_NODES.get(device.name, OTHER_BETWEEN_NODES)
    inside = Link(device.nvlink or device.pcie, 5e-6)
    return Machine(device, inside, Link(rate * GB, 15e-6), per_node)


def same_source_and_model(point: Point) -> tuple[Sequence[object], ...]:
    """What two points must share to differ only in layout: everything that is stated except parallelism and batches."""
    source = point.source
    table = (source.repo, source.commit, source.path, source.url, point.how_counted)
    training = (repr(point.model), repr(point.lengths), point.precision, point.optimizer, point.dropout)
    kernels = (point.activation_checkpointing, point.attention_kernel)
    return table, training, kernels, (point.hardware.gpu,)
