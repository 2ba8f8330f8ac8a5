"""Which device and how many processes a run takes, and how they divide the work."""

from t5bench import Problem
from t5bench.costmodel.job import Architecture, beyond_native
from t5bench.costmodel.layout import Layout, balanced_split
from t5bench.costmodel.schedule import GATHERED_AGAIN, INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE, interleaving_fault
from t5bench.plan.draft import Draft
from t5bench.plan.families import family_of
from t5bench.record.gpus import GpuInventory, visible_gpus
from t5bench.record.settings import micro_batches_leave_the_curve

LEAST_INTERLEAVED = 3  # pipeline stages; the engine's megatron/arguments.py asserts it


def choose_processes(draft: Draft) -> tuple[str, int, bool]:
    """The device, the number of processes on each node, and whether they share GPUs.

    By default two processes, or as many as the model is divided over; one GPU is enough for DDP.
    """
    strategy = draft.strategy
    inventory = visible_gpus(draft.environ)
    gpus = len(inventory.names)
    device = choose_device(draft, inventory)
    model_parallel = draft.number("TENSOR_PARALLEL_SIZE") * draft.number("PIPELINE_PARALLEL_SIZE")
    # NCCL allows one process per GPU, and so does DeepSpeed with any backend.
    may_share = draft.value("SHARE_GPUS") == "1" and gpus > 0 and not (strategy.ds_config or strategy.has_fsdp2)
    per_node = -(-max(2, model_parallel) // draft.number("NNODES"))
    if device == "cuda" and model_parallel == 1 and gpus and not may_share:
        per_node = min(per_node, gpus)
    per_node = int(draft.value("NPROC_PER_NODE") or per_node)
    lacks_gpus = device == "cuda" and per_node > gpus
    if lacks_gpus and may_share:
        shared = f"warning: {per_node} processes share {gpus} GPU(s) over gloo: results are valid, timings are not"
        draft.notes.append(shared)
    elif lacks_gpus:
        found = f"NPROC_PER_NODE is {per_node} but this node has {gpus} visible GPU(s)"
        needs = f"{strategy.name} needs {model_parallel} GPU(s) in all"
        remedy = f"{needs}: set NNODES and NPROC_PER_NODE to what you have, or DEVICE=cpu"
        draft.lack("too-few-gpus", found, remedy)
    return device, per_node, lacks_gpus and may_share


def choose_device(draft: Draft, inventory: GpuInventory) -> str:
    """The device, and a note that says why. A broken tool must not turn a run on GPUs into one on the CPU."""
    device = draft.value("DEVICE")
    if device != "auto":
        draft.notes.append(f"device: {device} (DEVICE={device})")
        return device
    device = "cuda" if inventory.names else "cpu"
    draft.notes.append(f"device: {device} ({inventory.why})")
    if device == "cpu" and inventory.fault:
        problem = f"the GPUs of this node cannot be listed: {inventory.fault}"
        draft.lack("gpu-tool", problem, "Repair what it names, or set DEVICE=cpu to train on the CPU")
    elif device == "cpu" and draft.value("MODEL_PRESET") == "large" and not draft.model:
        problem = "there is no GPU here, and MODEL_PRESET=large takes minutes for one iteration on a CPU"
        draft.lack("large-on-cpu", problem, "Set MODEL_PRESET=tiny for a first try, or DEVICE=cpu if you mean it")
    return device


def divide(draft: Draft, per_node: int, zero_stage: int) -> Layout | None:
    """The layout; None if the sizes do not divide, and then the draft says why. zero_stage: 0 without DeepSpeed."""
    tp = draft.number("TENSOR_PARALLEL_SIZE")
    pp = draft.number("PIPELINE_PARALLEL_SIZE")
    strategy = draft.strategy
    refuse = draft.refuse
    nnodes = draft.number("NNODES")
    world_size = nnodes * per_node
    # ZeRO and FSDP2 go with any tensor size.
    if tp > 1 and strategy.tp == 1 and not (strategy.ds_config or strategy.has_fsdp2):
        remedy = "Use run_megatron_t5_tensor.sh or run_megatron_t5_hybrid.sh; in a sweep or a check, unset it and name"
        found = f"TENSOR_PARALLEL_SIZE is {tp} but {strategy.name} has no tensor parallelism"
        refuse("no-tensor-parallelism", found, f"{remedy} tensor-tp{tp}")
    if pp > 1 and strategy.pp == 1:
        found = f"PIPELINE_PARALLEL_SIZE is {pp} but {strategy.name} has no pipeline parallelism"
        refuse("no-pipeline-parallelism", found, "Use run_megatron_t5_pipeline.sh or run_megatron_t5_hybrid.sh")
    if world_size % (tp * pp):
        found = f"{strategy.name} needs a multiple of {tp * pp} processes (TP={tp} x PP={pp}), found {world_size}"
        remedy = f"Set NNODES and NPROC_PER_NODE so that their product is divisible by {tp * pp}"
        refuse("world-size", f"{found} ({nnodes} node(s) x {per_node})", remedy)
    parts = pp  # of the model
    if pp > 1 and draft.value("PIPELINE_SCHEDULE") == INTERLEAVED:
        parts *= draft.number("VIRTUAL_PIPELINE_STAGES")
    _check_sizes(draft, tp, pp, parts)
    if draft.is_refused:
        return None
    dp = world_size // (tp * pp)
    global_batch = draft.number("GLOBAL_BATCH_SIZE")
    micro_batch = draft.number("MICRO_BATCH_SIZE")
    if global_batch % (micro_batch * dp):
        found = f"GLOBAL_BATCH_SIZE={global_batch} is not divisible by {micro_batch * dp}"
        found += f" (MICRO_BATCH_SIZE={micro_batch} x data-parallel size {dp})"
        refuse("batch-size", found, _how_to_divide_the_batch(draft))
        return None
    micro_batches = global_batch // (micro_batch * dp)
    split_rank = _decoder_stage(draft, parts) if pp > 1 and family_of(draft).has_encoder else None
    layout = Layout(nnodes, per_node, world_size, tp, pp, dp, micro_batches, split_rank)
    _check_rampup(draft, micro_batch * dp)
    if draft.is_on("SEQUENCE_PARALLEL") and tp > 1:
        _check_sequence_parallel(draft, tp)
    _check_schedule(draft, layout)
    if draft.value("ENGINE") == "native":
        _check_native(draft, layout, zero_stage)
    return layout


def _how_to_divide_the_batch(draft: Draft) -> str:
    """A run that continues keeps its global batch, and where the curve depends on it, its micro-batches."""
    if not draft.is_on("RESUME"):
        return "Change GLOBAL_BATCH_SIZE or MICRO_BATCH_SIZE"
    if micro_batches_leave_the_curve(draft.value, draft.extra):
        return "Change MICRO_BATCH_SIZE, which leaves this run's curve as it is; a resumed run keeps GLOBAL_BATCH_SIZE"
    per_step = draft.number("GLOBAL_BATCH_SIZE") // draft.number("MICRO_BATCH_SIZE")
    return (
        "A resumed run keeps both of them, since its loss depends on them: take as many processes that"
        f" the data-parallel size divides {per_step}, or change them on purpose with RESUME_CHANGES"
    )


def _check_schedule(draft: Draft, layout: Layout) -> None:
    schedule = draft.value("PIPELINE_SCHEDULE")
    if layout.pp == 1 or schedule == ONE_F_ONE_B:
        return
    beyond = _beyond_megatron(draft, layout, schedule) if draft.value("ENGINE") != "native" else ""
    if beyond:
        draft.refuse("pipeline-schedule", beyond, "Set ENGINE=native, or PIPELINE_SCHEDULE=1f1b")
        return
    fault = interleaving_fault(layout.pp, layout.micro_batches)
    if schedule == INTERLEAVED and fault:
        draft.refuse("pipeline-schedule", fault, "Change GLOBAL_BATCH_SIZE or MICRO_BATCH_SIZE, or PIPELINE_SCHEDULE")
    if schedule == ZERO_BUBBLE and layout.tp > 1 and draft.is_on("SEQUENCE_PARALLEL"):
        found = f"PIPELINE_SCHEDULE={schedule} does not go with SEQUENCE_PARALLEL=1: {GATHERED_AGAIN}"
        draft.refuse("pipeline-schedule", found, "Set PIPELINE_SCHEDULE=1f1b, or unset SEQUENCE_PARALLEL")


def _beyond_megatron(draft: Draft, layout: Layout, schedule: str) -> str:
    """Why Megatron-DeepSpeed cannot follow this schedule; "" if it can."""
    if schedule != INTERLEAVED:
        return f"PIPELINE_SCHEDULE={schedule} is the native engine's: Megatron-DeepSpeed has 1f1b and interleaved alone"
    if family_of(draft).has_encoder:
        return "Megatron-DeepSpeed follows the interleaved schedule for GPT alone"
    if draft.strategy.ds_config:
        return f"{draft.strategy.name} runs in DeepSpeed's pipeline, which has 1f1b alone"
    if layout.pp < LEAST_INTERLEAVED:
        least = f"at least {LEAST_INTERLEAVED} pipeline stages"
        return f"Megatron-DeepSpeed's interleaved schedule takes {least}, found {layout.pp}"
    parts = layout.pp * draft.number("VIRTUAL_PIPELINE_STAGES")
    layers = draft.number("NUM_LAYERS")
    if layers % parts:
        return f"NUM_LAYERS={layers} does not divide over {parts} parts of the model, which Megatron-DeepSpeed needs"
    return ""


def _decoder_stage(draft: Draft, parts: int) -> int:
    """The first part of the model that has layers of the decoder; the parts are stages, or several in a stage.

    Megatron-DeepSpeed's stacks get as many stages, the native engine's are balanced.
    """
    if draft.value("ENGINE") != "native":
        return parts // 2
    family = family_of(draft)
    if draft.model:
        return balanced_split(draft.model, parts)
    sizes = {name.lower(): draft.value(name) for name in family.stacks + family.lengths}
    sizes |= {
        "hidden_size": draft.value("HIDDEN_SIZE"),
        "num_attention_heads": draft.value("NUM_ATTENTION_HEADS"),
        "ffn_hidden_size": draft.value("FFN_HIDDEN_SIZE"),
    }
    return balanced_split(Architecture.of_arguments(sizes, family.vocabulary), parts)


def _check_sizes(draft: Draft, tp: int, pp: int, parts: int) -> None:
    """Checks that the model can be divided. parts: into which its layers are, each stage having as many."""
    refuse = draft.refuse
    stacks = family_of(draft).stacks
    hidden = draft.number("HIDDEN_SIZE")
    heads = draft.number("NUM_ATTENTION_HEADS")
    groups = draft.model.kv_heads if draft.model else heads
    ffn = draft.number("FFN_HIDDEN_SIZE")
    sizes = " ".join(str(size) for size in range(1, heads + 1) if has_tensor_size(size, heads, groups, ffn))
    remedy = f"TENSOR_PARALLEL_SIZE may be {sizes} for this model"
    if groups % tp and tp % groups:
        found = f"{groups} groups of heads do not divide over the tensor-parallel size {tp}, nor it over them"
        refuse("tensor-size", found, remedy)
    if hidden % heads and not draft.model:
        refuse("model-size", f"HIDDEN_SIZE={hidden} is not divisible by NUM_ATTENTION_HEADS={heads}")
    for name in ("NUM_ATTENTION_HEADS", "FFN_HIDDEN_SIZE"):
        if draft.number(name) % tp:
            found = f"{name}={draft.number(name)} is not divisible by the tensor-parallel size {tp}"
            refuse("tensor-size", found, remedy)
    if draft.number("VOCABULARY_MULTIPLE") % tp and not draft.model:
        refuse("tensor-size", f"the tensor-parallel size must divide VOCABULARY_MULTIPLE, found {tp}")
    layers = sum(draft.number(name) for name in stacks)
    if draft.value("ENGINE") == "native":
        if parts > layers:
            found = f"PIPELINE_PARALLEL_SIZE={pp} divides the model into {parts} parts, but it has {layers} layers"
            refuse("pipeline-size", found, "Every part needs a layer: choose fewer stages, or a deeper model")
    elif pp > 1 and pp % len(stacks):
        found = f"the pipeline-parallel size must be even (half encoder, half decoder), found {pp}"
        refuse("pipeline-size", found, "ENGINE=native trains with any number of stages")
    elif pp > 1:
        for name in stacks:
            if draft.number(name) % (pp // len(stacks)):
                found = f"{name}={draft.number(name)} does not divide over {pp // len(stacks)} stages"
                refuse("pipeline-size", found, "ENGINE=native gives the first stages a layer more")


def has_tensor_size(size: int, heads: int, groups: int, ffn: int) -> bool:
    """Whether so many tensor-parallel ranks have equal parts. Groups of heads may be fewer than ranks."""
    divides_groups = groups % size == 0 or size % groups == 0
    return divides_groups and heads % size == 0 and ffn % size == 0


def _check_native(draft: Draft, layout: Layout, zero_stage: int) -> None:
    is_fp16 = draft.value("PRECISION_FLAG") == "--fp16"
    has_fsdp2 = draft.strategy.has_fsdp2
    reason = beyond_native(layout.tp, layout.pp, zero_stage > 0, layout.micro_batches, is_fp16, has_fsdp2)
    if reason:
        draft.refuse("native-engine", reason, "Use ENGINE=megatron")
    shards = draft.number("FSDP_SHARD_SIZE")
    if has_fsdp2 and shards and layout.dp % shards:
        found = f"FSDP_SHARD_SIZE={shards} does not divide the data-parallel size {layout.dp}"
        draft.refuse("shard-size", found, "Set FSDP_SHARD_SIZE to a divisor, or to 0 for all")
    if draft.extra:
        from native.arguments import check_compile, check_zero_bubble, make_parser

        try:
            parser = make_parser(draft.value("MODEL_FAMILY"), is_complete=False)
            given = parser.parse_args([*draft.strategy.flags, *draft.extra])
            check_compile(given, zero_stage)
            if layout.pp > 1:
                given.pipeline_schedule = draft.value("PIPELINE_SCHEDULE")
            check_zero_bubble(given)
        except Problem as problem:
            draft.refuse("engine-argument", f"after --: {problem}", problem.remedy)


def _check_sequence_parallel(draft: Draft, tp: int) -> None:
    code = "sequence-parallel"
    if draft.value("ENGINE") == "megatron":
        found = "SEQUENCE_PARALLEL=1 does not work with ENGINE=megatron, where it breaks in several places"
        draft.refuse(code, f"{found} (docs/gpt.md)", "Use ENGINE=native, or unset it")
    elif draft.strategy.has_fsdp2:
        draft.refuse(code, "SEQUENCE_PARALLEL=1 does not go with FSDP2", "Use run_megatron_t5_tensor.sh, or unset it")
    for name in family_of(draft).lengths:
        if draft.number(name) % tp:
            found = f"{name}={draft.number(name)} is not divisible by the tensor-parallel size {tp}"
            draft.refuse(code, f"{found}, as SEQUENCE_PARALLEL=1 needs it", "Change it, or unset SEQUENCE_PARALLEL")


def _check_rampup(draft: Draft, together: int) -> None:
    """Checks RAMPUP_BATCH_SIZE: the first batch size, the step, and the samples over which the batch grows. together:
    samples that all processes train at once."""
    given = draft.value("RAMPUP_BATCH_SIZE")
    full = draft.number("GLOBAL_BATCH_SIZE")
    refuse = draft.refuse
    words = given.split()
    if not given:
        return
    for name in draft.given.keys() & {"--train-iters", "--lr-warmup-iters", "--lr-decay-iters"}:
        found = f"{name} cannot be given after -- with RAMPUP_BATCH_SIZE: the engine counts such a run in samples"
        refuse("rampup", found, "Set TRAIN_ITERS and LR_WARMUP_ITERS, or give --lr-decay-samples")
    if len(words) != 3 or not all(word.isascii() and word.isdigit() and int(word) for word in words):
        refuse("rampup", f"RAMPUP_BATCH_SIZE must be three whole numbers (start, step, samples), found '{given}'")
        return
    (start, step, grows) = map(int, words)
    samples = draft.number("TRAIN_ITERS") * full
    if grows > samples:
        found = f"RAMPUP_BATCH_SIZE='{given}' makes the batch grow for longer than the run, which has {samples} samples"
        refuse("rampup", found, "Raise TRAIN_ITERS; -- --exit-interval 50 tries the first 50 iterations")
    if start > full or (full - start) % step or start % together or step % together:
        found = f"RAMPUP_BATCH_SIZE='{given}' does not reach GLOBAL_BATCH_SIZE={full} in steps of {together} samples"
        remedy = f"Start and step must be multiples of {together} (micro-batch x data-parallel size), and end at {full}"
        refuse("rampup", found, remedy)
