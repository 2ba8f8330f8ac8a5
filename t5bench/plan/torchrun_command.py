"""The command of a run: torchrun's arguments, the engine's, and the environment that both get.

This is the one place where the command is built. Each of the engine's arguments can be held against its ``--help``.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from t5bench import REPOSITORY
from t5bench.corpus.index import SPLIT
from t5bench.costmodel.layout import Layout
from t5bench.costmodel.schedule import INTERLEAVED, ONE_F_ONE_B
from t5bench.plan.draft import Draft
from t5bench.plan.engine import SERIES
from t5bench.plan.environment import child_environment
from t5bench.plan.families import family_of
from t5bench.plan.interpreter import interpreter, path_of_programs
from t5bench.record.plan import Arguments, Plan
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
    """What planning has decided for the command alone; everything else is in the plan."""

    flash_attention: bool
    tokenizer_type: str
    """The engine's name for it."""
    wandb_mode: str


def with_command(planned: Plan, draft: Draft, choices: Choices) -> Plan:
    """The plan with its command, which a plan of a draft with these choices lacks."""
    variables = environment(draft, planned, choices)
    added, removed = child_environment(draft, variables)
    return replace(
        planned,
        notes=draft.notes,
        environment=added,
        removed_environment=removed,
        python=interpreter(draft.environ),
        rendezvous=rendezvous(draft, planned),
        program=program(draft),
        arguments=Arguments(
            settings=setting_arguments(draft),
            fixed=fixed_arguments(draft),
            own=own_arguments(draft, planned, choices),
            extra=draft.extra,
        ),
    )


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


def own_arguments(draft: Draft, planned: Plan, choices: Choices) -> list[str]:
    """The engine arguments that the strategy, the machine and the run's place decide."""
    value = draft.value
    layout = planned.layout
    assert layout
    output_dir = Path(value("OUTPUT_DIR"))
    longest = max(draft.number(name) for name in family_of(draft).lengths)
    model = draft.model
    head_size = model.head_size if model else draft.number("HIDDEN_SIZE") // draft.number("NUM_ATTENTION_HEADS")
    words = [
        *("--kv-channels", str(head_size)),
        *("--max-position-embeddings", str(model.position_rows if model else longest)),
        # The engine multiplies the vocabulary's multiple by the tensor-parallel size.
        *("--make-vocab-size-divisible-by", str(draft.number("VOCABULARY_MULTIPLE") // layout.tp)),
        *("--data-path", planned.data_prefix),
        *tokenizer_arguments(draft, planned.tokenizer, choices.tokenizer_type),
        *("--tensorboard-dir", str(output_dir / "tensorboard")),
        *("--tensorboard-log-interval", value("LOG_INTERVAL")),
    ]
    if layout.split_rank is not None:
        words += ["--pipeline-model-parallel-split-rank", str(layout.split_rank)]
    words += device_arguments(draft, planned)
    if value("PRECISION_FLAG") == "--fp16":
        words += ["--initial-loss-scale", INITIAL_LOSS_SCALE]
    if choices.flash_attention:
        words += ["--use-flash-attn-v2"]
    if planned.engine_patches == SERIES:
        words += ["--layout-independent-init"]
    words += wandb_arguments(draft, choices)
    words += checkpoint_arguments(draft)
    return [*words, *method_arguments(draft, planned)]


def method_arguments(draft: Draft, planned: Plan) -> list[str]:
    """The engine arguments that follow from the strategy and its settings alone, on any machine."""
    value = draft.value
    layout = planned.layout
    assert layout
    words = recomputation_arguments(draft)
    if value("RAMPUP_BATCH_SIZE"):
        words += ["--rampup-batch-size", *value("RAMPUP_BATCH_SIZE").split()]
    if draft.is_on("SEQUENCE_PARALLEL") and layout.tp > 1:
        words += ["--sequence-parallel"]
    words += zero_arguments(draft, planned)
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


def checkpoint_arguments(draft: Draft) -> list[str]:
    """What is saved and loaded, and whether the run only evaluates; then its directory is inside the training's."""
    output_dir = Path(draft.value("OUTPUT_DIR"))
    if draft.is_on("EVAL_ONLY"):
        return ["--load", str(output_dir.parent / "checkpoints"), "--skip-train"]
    checkpoints = str(output_dir / "checkpoints")
    words: list[str] = []
    if draft.number("SAVE_INTERVAL"):
        words += ["--save", checkpoints, "--save-interval", draft.value("SAVE_INTERVAL")]
    if draft.is_on("RESUME"):
        words += ["--load", checkpoints]
    return words


def recomputation_arguments(draft: Draft) -> list[str]:
    granularity = draft.value("RECOMPUTE")
    if granularity == "none":
        return []
    words = ["--recompute-granularity", granularity]
    if granularity == "full":
        words += ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
    return words


def zero_arguments(draft: Draft, planned: Plan) -> list[str]:
    if not planned.ds_config:
        return []
    assert planned.layout
    words = ["--deepspeed", "--deepspeed_config", str(Path(draft.value("OUTPUT_DIR")) / "ds_config.json")]
    words += ["--zero-stage", str(planned.zero_stage)]
    if planned.layout.pp == 1:
        # DeepSpeed's pipeline engine is not Megatron's; without pipeline stages ZeRO must not use it.
        words += ["--no-pipeline-parallel"]
    if planned.offloads_optimizer:
        words += ["--cpu-optimizer"]
    if draft.is_on("ZERO_REDUCE_ONCE") and planned.zero_stage > 1:
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


def tokenizer_arguments(draft: Draft, tokenizer: str, tokenizer_type: str) -> list[str]:
    if family_of(draft).has_encoder:
        return ["--tokenizer-model", tokenizer]
    kind = ["--tokenizer-type", tokenizer_type]
    if tokenizer_type != "GPT2BPETokenizer":
        return [*kind, "--tokenizer-model", tokenizer]
    files = Path(tokenizer)
    return [*kind, "--vocab-file", str(files / "vocab.json"), "--merge-file", str(files / "merges.txt")]


def device_arguments(draft: Draft, planned: Plan) -> list[str]:
    if planned.gpus_shared:
        shares = ["--share-gpus"] if draft.value("ENGINE") == "native" else []
        return ["--distributed-backend", "gloo", *shares]
    if planned.device == "cuda":
        return ["--distributed-backend", "nccl"]
    # The fused kernels are CUDA's.
    fusions = ["--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-dropout-fusion"]
    return ["--distributed-backend", "gloo", *fusions]


def rendezvous(draft: Draft, planned: Plan) -> list[str]:
    """torchrun's own arguments. The static rendezvous: with c10d torchrun ignores --node_rank, and the encoder would
    not be on node 0."""
    layout = planned.layout
    assert layout
    return [
        *("--nnodes", str(layout.nnodes)),
        *("--nproc_per_node", str(layout.nproc_per_node)),
        *("--node_rank", draft.node),
        *("--master_addr", planned.master_address),
        *("--master_port", draft.value("MASTER_PORT")),
        *("--rdzv_conf", f"timeout={draft.value('RENDEZVOUS_TIMEOUT')}"),
    ]


def program(draft: Draft) -> list[str]:
    """What torchrun starts in each process."""
    home = REPOSITORY / "native" if draft.value("ENGINE") == "native" else Path(draft.value("MEGATRON_DIR"))
    stacks = Path(draft.value("OUTPUT_DIR"), f"node{draft.node}.stack")
    return [str(REPOSITORY / "t5bench" / "run" / "worker.py"), str(stacks), str(home / family_of(draft).program)]


def environment(draft: Draft, planned: Plan, choices: Choices) -> dict[str, str]:
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
    # From this file W&B reads the run's configuration; the recorder writes it while torch is loading. A W&B sweep's
    # agent has its own.
    if choices.wandb_mode != "disabled" and not draft.environ.get("WANDB_SWEEP_PARAM_PATH"):
        variables["WANDB_SWEEP_PARAM_PATH"] = str(output_dir / f"node{draft.node}.wandb.yaml")
    if draft.number("PROFILE_ITERATION"):
        variables["T5_PROFILE"] = f"{draft.value('PROFILE_ITERATION')}:{output_dir / 'profile.json'}"
    if planned.device == "cpu":
        assert planned.layout
        processes = planned.layout.nproc_per_node
        threads = max(1, len(os.sched_getaffinity(0)) // processes)
        variables["CUDA_VISIBLE_DEVICES"] = ""
        variables["DS_ACCELERATOR"] = "cpu"
        variables["LOCAL_SIZE"] = str(processes)
        variables["OMP_NUM_THREADS"] = draft.environ.get("OMP_NUM_THREADS") or str(threads)
    return variables
