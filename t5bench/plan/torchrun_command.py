"""The command of a run: torchrun's arguments, the engine's, and the environment that both get.

This is the one place where the command is built. Each of the engine's arguments can be held against its ``--help``.
"""

from dataclasses import dataclass
from pathlib import Path

from t5bench import REPOSITORY
from t5bench.corpus.index import SPLIT
from t5bench.costmodel.layout import Layout
from t5bench.costmodel.schedule import INTERLEAVED, ONE_F_ONE_B
from t5bench.plan.draft import Draft
from t5bench.plan.families import family_of
from t5bench.plan.interpreter import path_of_programs
from t5bench.record.plan import Arguments
from t5bench.record.settings import BY_NAME

# The same in every run; arguments after -- win over these.
FIXED_ARGUMENTS = (
    *("--lr-decay-style", "cosine"),
    *("--data-impl", "mmap"),
    *("--split", SPLIT),
    *("--num-workers", "2"),
)
# Apex's fused kernels are optional, and accumulate gradients in another way than the strategies without them.
FIXED_LAST = ("--DDP-impl", "local", "--no-gradient-accumulation-fusion")
# DeepSpeed's, so that every strategy starts from the same one.
INITIAL_LOSS_SCALE = "65536"


@dataclass(frozen=True)
class Choices:
    """What planning has decided beyond the settings, and the command needs."""

    layout: Layout
    device: str
    gpus_shared: bool
    data_prefix: str
    tokenizer: str
    tokenizer_type: str
    """The engine's name for it."""
    flash_attention: bool
    engine_has_all_patches: bool
    zero_stage: int | None
    """None without DeepSpeed."""
    offloads_optimizer: bool
    load: str
    """The directory of the checkpoints to load; empty if none is loaded."""
    wandb_mode: str
    wandb_config: str
    """The file from which W&B reads the run's configuration; empty if it reads none of ours."""
    threads: int
    """OMP_NUM_THREADS of a process on a CPU."""


def setting_arguments(draft: Draft) -> list[str]:
    """The engine arguments of the settings, as declared. A run whose batch grows is counted in samples."""
    words = []
    counts_samples = bool(draft.value("RAMPUP_BATCH_SIZE"))
    for name, value in draft.values.items():
        declaration = BY_NAME[name]
        if declaration.argument == "=" and value:
            words.append(value)
        for argument in declaration.arguments:
            if not value:
                continue
            if counts_samples and argument in ("--train-iters", "--lr-warmup-iters", "--lr-decay-iters"):
                samples = int(value) * draft.number("GLOBAL_BATCH_SIZE")
                words += [argument.replace("iters", "samples"), str(samples)]
            else:
                words += [argument, value]
    return words


def fixed_arguments(draft: Draft) -> list[str]:
    family = family_of(draft)
    tokenizer = ["--tokenizer-type", "HFTokenizer"] if family.has_encoder else []
    return [*FIXED_ARGUMENTS, *tokenizer, *FIXED_LAST]


def own_arguments(draft: Draft, choices: Choices) -> list[str]:
    """The engine arguments that the strategy, the machine and the run's place decide."""
    value = draft.value
    layout = choices.layout
    output_dir = Path(value("OUTPUT_DIR"))
    longest = max(draft.number(name) for name in family_of(draft).lengths)
    model = draft.model
    head_size = model.head_size if model else draft.number("HIDDEN_SIZE") // draft.number("NUM_ATTENTION_HEADS")
    words = [
        *("--kv-channels", str(head_size)),
        *("--max-position-embeddings", str(model.position_rows if model else longest)),
        # The engine multiplies the vocabulary's multiple by the tensor-parallel size.
        *("--make-vocab-size-divisible-by", str(draft.number("VOCABULARY_MULTIPLE") // layout.tp)),
        *("--data-path", choices.data_prefix),
        *tokenizer_arguments(draft, choices),
        *("--tensorboard-dir", str(output_dir / "tensorboard")),
        *("--tensorboard-log-interval", value("LOG_INTERVAL")),
    ]
    if layout.split_rank is not None:
        words += ["--pipeline-model-parallel-split-rank", str(layout.split_rank)]
    words += device_arguments(draft, choices)
    if value("PRECISION_FLAG") == "--fp16":
        words += ["--initial-loss-scale", INITIAL_LOSS_SCALE]
    if choices.flash_attention:
        words += ["--use-flash-attn-v2"]
    if choices.engine_has_all_patches:
        words += ["--layout-independent-init"]
    words += wandb_arguments(draft, choices)
    words += checkpoint_arguments(draft, choices)
    return [*words, *method_arguments(draft, choices)]


def method_arguments(draft: Draft, choices: Choices) -> list[str]:
    """The engine arguments that follow from the strategy and its settings alone, on any machine."""
    value = draft.value
    layout = choices.layout
    words = recomputation_arguments(draft)
    if value("RAMPUP_BATCH_SIZE"):
        words += ["--rampup-batch-size", *value("RAMPUP_BATCH_SIZE").split()]
    if draft.is_on("SEQUENCE_PARALLEL") and layout.tp > 1:
        words += ["--sequence-parallel"]
    words += zero_arguments(draft, choices)
    words += schedule_arguments(draft, layout)
    return [*words, *draft.strategy.flags, *fsdp2_arguments(draft)]


def wandb_arguments(draft: Draft, choices: Choices) -> list[str]:
    if choices.wandb_mode == "disabled":
        return []
    return [
        *("--wandb-project", draft.value("WANDB_PROJECT")),
        *("--wandb-exp-name", draft.value("WANDB_RUN_NAME")),
        *("--wandb-save-dir", str(Path(draft.value("OUTPUT_DIR")))),
    ]


def checkpoint_arguments(draft: Draft, choices: Choices) -> list[str]:
    """What is saved and loaded, and whether the run only evaluates."""
    words: list[str] = []
    only_evaluates = draft.is_on("EVAL_ONLY")
    if draft.number("SAVE_INTERVAL") and not only_evaluates:
        words += ["--save", str(Path(draft.value("OUTPUT_DIR")) / "checkpoints")]
        words += ["--save-interval", draft.value("SAVE_INTERVAL")]
    if choices.load:
        words += ["--load", choices.load]
    if only_evaluates:
        words += ["--skip-train"]
    return words


def recomputation_arguments(draft: Draft) -> list[str]:
    granularity = draft.value("RECOMPUTE")
    if granularity == "none":
        return []
    words = ["--recompute-granularity", granularity]
    if granularity == "full":
        words += ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
    return words


def zero_arguments(draft: Draft, choices: Choices) -> list[str]:
    if choices.zero_stage is None:
        return []
    words = ["--deepspeed", "--deepspeed_config", str(Path(draft.value("OUTPUT_DIR")) / "ds_config.json")]
    words += ["--zero-stage", str(choices.zero_stage)]
    if choices.layout.pp == 1:
        # DeepSpeed's pipeline engine is not Megatron's; without pipeline stages ZeRO must not use it.
        words += ["--no-pipeline-parallel"]
    if choices.offloads_optimizer:
        words += ["--cpu-optimizer"]
    if draft.is_on("ZERO_REDUCE_ONCE") and choices.zero_stage > 1:
        words += ["--zero-reduce-once"]
    return words


def schedule_arguments(draft: Draft, layout: Layout) -> list[str]:
    """The schedule of a pipeline, unless it is 1F1B, for which Megatron-DeepSpeed has no argument."""
    schedule = draft.value("PIPELINE_SCHEDULE")
    words: list[str] = []
    if layout.pp > 1 and schedule == INTERLEAVED and draft.value("ENGINE") != "native":
        layers = draft.number("NUM_LAYERS") // (layout.pp * draft.number("VIRTUAL_PIPELINE_STAGES"))
        return ["--num-layers-per-virtual-pipeline-stage", str(layers)]
    if layout.pp > 1 and schedule != ONE_F_ONE_B:
        words += ["--pipeline-schedule", schedule]
    if layout.pp > 1 and schedule == INTERLEAVED:
        words += ["--virtual-pipeline-stages", draft.value("VIRTUAL_PIPELINE_STAGES")]
    return words


def fsdp2_arguments(draft: Draft) -> list[str]:
    """The settings of FSDP2, for the strategy that has it."""
    words: list[str] = []
    if not draft.strategy.has_fsdp2:
        return words
    if draft.is_on("FSDP_KEEP_PARAMETERS"):
        words += ["--fsdp2-keep-parameters"]
    if draft.number("FSDP_SHARD_SIZE"):
        words += ["--fsdp2-shard-size", draft.value("FSDP_SHARD_SIZE")]
    return words


def tokenizer_arguments(draft: Draft, choices: Choices) -> list[str]:
    if family_of(draft).has_encoder:
        return ["--tokenizer-model", choices.tokenizer]
    kind = ["--tokenizer-type", choices.tokenizer_type]
    if choices.tokenizer_type != "GPT2BPETokenizer":
        return [*kind, "--tokenizer-model", choices.tokenizer]
    files = Path(choices.tokenizer)
    return [*kind, "--vocab-file", str(files / "vocab.json"), "--merge-file", str(files / "merges.txt")]


def device_arguments(draft: Draft, choices: Choices) -> list[str]:
    if choices.gpus_shared:
        shares = ["--share-gpus"] if draft.value("ENGINE") == "native" else []
        return ["--distributed-backend", "gloo", *shares]
    if choices.device == "cuda":
        return ["--distributed-backend", "nccl"]
    # The fused kernels are CUDA's.
    fusions = ["--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-dropout-fusion"]
    return ["--distributed-backend", "gloo", *fusions]


def engine_arguments(draft: Draft, choices: Choices) -> Arguments:
    return Arguments(
        settings=setting_arguments(draft),
        fixed=fixed_arguments(draft),
        own=own_arguments(draft, choices),
        extra=draft.extra,
    )


def rendezvous(draft: Draft, layout: Layout) -> list[str]:
    """torchrun's own arguments. The static rendezvous: with c10d torchrun ignores --node_rank, and the encoder would
    not be on node 0."""
    return [
        *("--nnodes", str(layout.nnodes)),
        *("--nproc_per_node", str(layout.nproc_per_node)),
        *("--node_rank", draft.node),
        *("--master_addr", draft.master_address),
        *("--master_port", draft.value("MASTER_PORT")),
        *("--rdzv_conf", f"timeout={draft.value('RENDEZVOUS_TIMEOUT')}"),
    ]


def program(draft: Draft) -> list[str]:
    """What torchrun starts in each process."""
    home = REPOSITORY / "native" if draft.value("ENGINE") == "native" else Path(draft.value("MEGATRON_DIR"))
    stacks = Path(draft.value("OUTPUT_DIR"), f"node{draft.node}.stack")
    return [str(REPOSITORY / "t5bench" / "run" / "worker.py"), str(stacks), str(home / family_of(draft).program)]


def environment(draft: Draft, choices: Choices) -> dict[str, str]:
    """What torchrun and the engine get besides the user's environment."""
    output_dir = Path(draft.value("OUTPUT_DIR"))
    # The engines and the programs of this repository import its packages from here, not from another checkout.
    paths = [path for path in draft.environ.get("PYTHONPATH", "").split(":") if path]
    if paths[:1] != [str(REPOSITORY)]:
        paths.insert(0, str(REPOSITORY))
    if draft.value("ENGINE") == "megatron":
        paths.insert(0, draft.value("MEGATRON_DIR"))
    variables = {name: draft.value(name) for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "WANDB_RUN_GROUP")}
    path = path_of_programs(draft.environ)
    if path != draft.environ.get("PATH"):
        variables["PATH"] = path
    variables["PYTHONFAULTHANDLER"] = "1"
    # With -m Python looks for modules in the current directory first, where there may be another torch.
    variables["PYTHONSAFEPATH"] = "1"
    variables["PYTHONPATH"] = ":".join(paths)
    variables["WANDB_MODE"] = choices.wandb_mode
    variables["WANDB_JOB_TYPE"] = draft.environ.get("WANDB_JOB_TYPE") or "train"
    if choices.wandb_config:
        # The recorder writes it while torch is loading; see t5bench/run/recorder.py.
        variables["WANDB_SWEEP_PARAM_PATH"] = choices.wandb_config
    if draft.number("PROFILE_ITERATION"):
        variables["T5_PROFILE"] = f"{draft.value('PROFILE_ITERATION')}:{output_dir / 'profile.json'}"
    if choices.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
        variables["DS_ACCELERATOR"] = "cpu"
        variables["LOCAL_SIZE"] = str(choices.layout.nproc_per_node)
        variables["OMP_NUM_THREADS"] = draft.environ.get("OMP_NUM_THREADS") or str(choices.threads)
    return variables
