"""What people read of the settings: a launcher's ``--help``, and docs/generated/settings.md, which
``python -m t5bench settings`` prints."""

import textwrap
from collections.abc import Mapping, Sequence

from t5bench import REPOSITORY
from t5bench.record.plan import Strategy
from t5bench.record.settings import (
    BY_NAME,
    DEFAULT_FAMILY,
    DEFAULT_PRESET,
    ROLES,
    Declaration,
    declarations_of,
    default_values,
)

STRATEGY_SPECIFIC = "strategy-specific"
# What a launcher's --help shows: the settings that the strategy has, and those that most people set.
HELP_GROUPS: Mapping[str, Sequence[str]] = {
    "How it divides the work": (
        *("TENSOR_PARALLEL_SIZE", "SEQUENCE_PARALLEL", "PIPELINE_PARALLEL_SIZE", "PIPELINE_SCHEDULE"),
        *("VIRTUAL_PIPELINE_STAGES", "ZERO_REDUCE_ONCE", "GRADIENT_REDUCTION", "OVERLAP_COMM"),
        *("FSDP_KEEP_PARAMETERS", "FSDP_SHARD_SIZE", "RECOMPUTE", "FLASH_ATTENTION"),
    ),
    "What it trains": (
        *("MODEL", "MODEL_FAMILY", "MODEL_PRESET", "GLOBAL_BATCH_SIZE", "MICRO_BATCH_SIZE", "PRECISION_FLAG"),
        *("TRAIN_ITERS", "LR", "LOG_INTERVAL"),
    ),
    "Where it runs, and what it leaves there": (
        *("HOSTS", "NNODES", "NPROC_PER_NODE", "MASTER_PORT", "DEVICE", "ENGINE", "MEGATRON_DIR", "MEGATRON_DATA_DIR"),
        *("OUTPUT_DIR", "RESUME", "SAVE_INTERVAL", "PROFILE_ITERATION"),
        *("WANDB_PROJECT", "WANDB_RUN_NAME", "WANDB_API_KEY"),
    ),
}


def shown(default: str) -> str:
    """A default with paths relative to the repository."""
    return default.replace(f"{REPOSITORY}/../", "../").replace(f"{REPOSITORY}/", "./")


def lacks(strategy: Strategy, name: str) -> bool:
    """Whether the strategy has nothing that the setting could change."""
    match name:
        case "TENSOR_PARALLEL_SIZE":
            return strategy.tp == 1 and not (strategy.ds_config or strategy.has_fsdp2)
        case "SEQUENCE_PARALLEL":
            return strategy.tp == 1
        case "PIPELINE_PARALLEL_SIZE" | "PIPELINE_SCHEDULE" | "VIRTUAL_PIPELINE_STAGES":
            return strategy.pp == 1
        case "ZERO_REDUCE_ONCE":
            return not strategy.ds_config.startswith(("megatron_zero2", "megatron_zero3"))
        case "GRADIENT_REDUCTION" | "OVERLAP_COMM":
            return not strategy.ds_config
        case "FSDP_KEEP_PARAMETERS" | "FSDP_SHARD_SIZE":
            return not strategy.has_fsdp2
        case "MEGATRON_DIR":
            return "megatron" not in strategy.engines
    return False


def short_help(strategy: Strategy, defaults: Mapping[str, str]) -> str:
    """A strategy's own settings in three groups."""
    lines = []
    for heading, names in HELP_GROUPS.items():
        of_group = [BY_NAME[name] for name in names if name in defaults and not lacks(strategy, name)]
        lines += [f"\n{heading}", help_lines(of_group, defaults)]
    count = len(defaults)
    lines.append(f"\n--help all shows all {count} settings, most of which are the same for every strategy.")
    return "\n".join(lines)


def full_help(declarations: Sequence[Declaration], defaults: Mapping[str, str]) -> str:
    """All settings of a launcher by role."""
    lines = []
    for heading, of_heading in _by_heading(declarations).items():
        lines += [f"\n{heading}", help_lines(of_heading, defaults)]
    return "\n".join(lines)


def _by_heading(declarations: Sequence[Declaration]) -> dict[str, list[Declaration]]:
    """The settings by the heading of their role, in the order of the roles."""
    groups: dict[str, list[Declaration]] = {role.heading: [] for role in ROLES.values()}
    for name, role in ROLES.items():
        groups[role.heading] += [declaration for declaration in declarations if declaration.role == name]
    return {heading: group for heading, group in groups.items() if group}


def help_lines(declarations: Sequence[Declaration], defaults: Mapping[str, str]) -> str:
    """Name, default and meaning of each, at most 100 columns wide."""
    lines = []
    for declaration in declarations:
        default = shown(defaults[declaration.name]) or "(unset)"
        first, *rest = textwrap.wrap(declaration.meaning, 47)
        if len(default) > 22:
            first, rest = "", [first, *rest]
        lines.append(f"  {declaration.name:<27} {default:<22} {first}".rstrip())
        lines += [f"{'':<53}{line}" for line in rest]
    return "\n".join(lines)


def run(_: object) -> int:
    """Prints docs/generated/settings.md: all settings of a launcher as tables."""
    like = {"strategy": "<strategy>", "port": STRATEGY_SPECIFIC, "tp": STRATEGY_SPECIFIC, "pp": STRATEGY_SPECIFIC}
    defaults = default_values(DEFAULT_FAMILY, DEFAULT_PRESET, gpus_per_node="", **like)
    print("# Settings\n\nSet these in the environment; a launcher's `--help` shows its own, `--help all` all of them.")
    print("`python -m t5bench settings` generates this page.")
    for heading, group in _by_heading(declarations_of(DEFAULT_FAMILY)).items():
        print(f"\n## {heading}\n\n| Setting | Default | Meaning |\n|---|---|---|")
        for declaration in group:
            default = shown(defaults[declaration.name])
            if default != STRATEGY_SPECIFIC:
                default = f"`{default}`" if default else "(unset)"
            print(f"| `{declaration.name}` | {default} | {declaration.meaning} |")
    return 0
