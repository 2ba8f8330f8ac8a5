"""What a plan's settings imply, by the functions with which the planner makes a plan, beside the recorded.

A record may claim a method in its settings that the engine was never told to use. So arguments, environment and
DeepSpeed's options are planned anew and compared. What the machine decided (the kind of attention, W&B) is taken from
the record, and so is what a user gave after ``--``. RELATIONS.md lists the settings of which no record says more.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from t5bench.plan import torchrun_command
from t5bench.plan.draft import Draft
from t5bench.plan.engine import config_of_settings
from t5bench.plan.settings import values_from
from t5bench.plan.torchrun_command import Choices
from t5bench.record.hosts import Hosts
from t5bench.record.plan import Plan, by_name, same_value
from t5bench.record.settings import BY_NAME, PRECISIONS

# Whose values are paths, which a run that was moved has kept.
PATHS = ("--deepspeed_config",)
# Defaults that differ from machine to machine.
_PLACES = re.compile("{(repository|run|family_data|gpus_per_node)}")
# Variables that the user's own environment decides as well.
USERS_VARIABLES = {"PATH", "PYTHONPATH", "WANDB_MODE", "WANDB_JOB_TYPE", "WANDB_SWEEP_PARAM_PATH", "OMP_NUM_THREADS"}


def said_again(plan: Plan, name: str) -> str | None:
    """What else a plan says of a setting, in the words of its value; None if it does not."""
    layout = plan.layout
    rendezvous = by_name(plan.rendezvous)
    match name:
        case "NNODES":
            return str(layout.nnodes) if layout else None
        case "NPROC_PER_NODE":
            return str(layout.nproc_per_node) if layout else None
        case "ENGINE":
            return plan.engine
        case "DEVICE":
            return plan.device
        case "HOSTS":
            return " ".join(plan.hosts)
        case "MASTER_PORT":
            return rendezvous.get("--master_port")
        case "RENDEZVOUS_TIMEOUT" if "--rdzv_conf" in rendezvous:
            return rendezvous["--rdzv_conf"].removeprefix("timeout=")
        case "OUTPUT_DIR":
            return plan.output_dir
        case "MEGATRON_DIR" if plan.engine == "megatron":
            return plan.engine_directory
        case "MEGATRON_DATA_DIR" if plan.data_prefix:
            return str(Path(plan.data_prefix).parent)
        case "TOKENIZER_MODEL":
            return plan.tokenizer
    return None


def draft_of(plan: Plan) -> Draft:
    """What was asked for: the recorded settings, and today's defaults for those that an earlier version lacked."""
    values, defaults = values_from({"MODEL_FAMILY": plan.value("MODEL_FAMILY", "")}, plan.strategy)
    values |= {name: setting.value for name, setting in plan.settings.items() if name in BY_NAME}
    return Draft(
        strategy=plan.strategy,
        environ={},
        directory="/",
        values=values,
        defaults=defaults,
        extra=plan.arguments.extra,
        hosts=Hosts.of(plan.hosts, plan.master_address),
        node=str(plan.node),
    )


def choices_of(plan: Plan) -> Choices:
    """What planning decided for the command alone, as far as the record says so."""
    own = by_name(plan.arguments.own)
    return Choices(
        flash_attention="--use-flash-attn-v2" in own,
        tokenizer_type=own.get("--tokenizer-type", "HFTokenizer"),
        wandb_mode="online" if "--wandb-project" in own else "disabled",
    )


def contradictions_of_command(plan: Plan) -> Iterator[str]:
    """Arguments that the settings imply and the engine was not given, and those that it was given without a reason."""
    draft = draft_of(plan)
    choices = choices_of(plan)
    settings = by_name(torchrun_command.setting_arguments(draft))
    method = by_name(torchrun_command.method_arguments(draft, plan))
    own = by_name(torchrun_command.own_arguments(draft, plan, choices))
    given = by_name([*plan.arguments.settings, *plan.arguments.own])
    for name, value in (settings | own).items():
        if name not in given:
            if name in method or _was_recorded(plan, name) or (name in own and is_of_today(plan)):
                yield f"the settings imply {_shown(name, value)}, which the engine was not given"
        elif name not in PATHS and not same_value(given[name], value):
            yield f"the settings imply {_shown(name, value)}, but the engine was given {_shown(name, given[name])}"
    possible = settings | own
    for name, value in given.items():
        if name not in possible:
            yield f"the engine was given {_shown(name, value)}, which no setting of the plan implies"
    wanted = plan.value("FLASH_ATTENTION", "auto")
    has_flash = choices.flash_attention
    if (plan.engine == "megatron" and (wanted == "on") > has_flash) or ((wanted == "off") and has_flash):
        was = "was" if has_flash else "was not"
        yield f"FLASH_ATTENTION is '{wanted}', but the engine {was} given --use-flash-attn-v2"


def is_of_today(plan: Plan) -> bool:
    """Whether the record has every setting of today: an earlier version planned other arguments and variables."""
    todays, _ = values_from({"MODEL_FAMILY": plan.value("MODEL_FAMILY", "")}, plan.strategy)
    return todays.keys() <= plan.settings.keys()


def contradictions_of_environment(plan: Plan) -> Iterator[str]:
    """Variables that the engine was given, and that the settings do not imply so."""
    if not is_of_today(plan):
        return
    implied = torchrun_command.environment(draft_of(plan), plan, choices_of(plan))
    for name in sorted((implied.keys() | plan.environment.keys()) - USERS_VARIABLES):
        value = implied.get(name)
        given = plan.environment.get(name)
        if value != given:
            yield f"the settings imply {_variable(name, value)}, but the engine was given {_variable(name, given)}"


def _variable(name: str, value: str | None) -> str:
    return f"no {name}" if value is None else f"{name}={value}"


def contradictions_of_choices(plan: Plan) -> Iterator[str]:
    """Settings of which the plan says something else in another place."""
    for name, setting in plan.settings.items():
        again = said_again(plan, name)
        if again is not None and setting.value not in ("", "auto") and setting.value.split() != again.split():
            yield f"{name} is '{setting.value}', but the plan is for '{again}'"
    if plan.gpus_shared and plan.value("SHARE_GPUS", "0") != "1":
        yield "processes share GPUs, but SHARE_GPUS is not 1"


def contradictions_of_defaults(plan: Plan) -> Iterator[str]:
    """Settings that nobody chose, and that have another value than their default: they came into the record later.

    A default that is a place, or that a variable may have set, is none of them.
    """
    for name in plan.chosen:
        if name not in plan.settings:
            yield f"{name} was chosen, but the plan has no such setting"
    if not is_of_today(plan):
        return
    chosen = {name: plan.value(name, "") for name in ("MODEL_FAMILY", "MODEL_PRESET")}
    _, defaults = values_from(chosen, plan.strategy)
    for name, default in defaults.items():
        setting = plan.settings[name]
        if setting.is_default and setting.value != default and not _PLACES.search(BY_NAME[name].default):
            yield f"{name} is '{setting.value}', which nobody chose: its default is '{default}'"
    family = chosen["MODEL_FAMILY"]
    if family not in plan.strategy.families or plan.engine not in plan.strategy.engines:
        yield f"the strategy {plan.strategy.name} has no {family} on the {plan.engine} engine"


def _was_recorded(plan: Plan, argument: str) -> bool:
    """Whether the record has a setting that becomes this argument: an earlier version may have lacked both."""
    if argument in PRECISIONS:
        return True
    return any(argument in BY_NAME[name].arguments for name in plan.settings if name in BY_NAME)


def _shown(name: str, value: str) -> str:
    return f"{name} {value}".strip()


def contradictions_of_ds_config(plan: Plan) -> Iterator[str]:
    """Where DeepSpeed's options are not those that the settings imply; a strategy's own file may add others."""
    if bool(plan.strategy.ds_config) != bool(plan.ds_config):
        has = "has" if plan.ds_config else "lacks"
        yield f"the strategy {plan.strategy.name} {has} DeepSpeed options, its declaration says otherwise"
    if not plan.ds_config:
        return
    draft = draft_of(plan)
    implied: dict[str, Any] = config_of_settings(draft)
    # A strategy's file may overrule how gradients travel; how often DeepSpeed prints changes nothing.
    del implied["steps_per_print"]
    travels_in = implied.pop("communication_data_type", None)
    if travels_in and "communication_data_type" not in plan.ds_config:
        yield f"GRADIENT_REDUCTION is '{travels_in}', but the DeepSpeed options have no communication_data_type"
    for name, value in implied.items():
        if plan.ds_config.get(name) != value:
            yield f"the settings imply the DeepSpeed option {name} {value}, but the plan has {plan.ds_config.get(name)}"
    overlap = draft.value("OVERLAP_COMM")
    if overlap != "default" and plan.ds_config["zero_optimization"].get("overlap_comm") != (overlap == "on"):
        yield f"OVERLAP_COMM is '{overlap}', but the DeepSpeed options do not have it so"
