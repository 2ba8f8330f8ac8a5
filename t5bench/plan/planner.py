"""``plan(environ, strategy, argv)``: from the environment to the plan of a run. It starts nothing and writes nothing.

It imports nothing beyond the standard library: a launcher plans without packages, and quickly.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from t5bench import Problem
from t5bench.costmodel.layout import Layout
from t5bench.plan import node_checks, topology, torchrun_command
from t5bench.plan.described_model import FOLLOWING, with_model
from t5bench.plan.draft import Draft
from t5bench.plan.engine import SERIES, check_engine, check_locks, check_packages, effective_config, offload_device
from t5bench.plan.engine_arguments import check_arguments
from t5bench.plan.environment import child_environment
from t5bench.plan.families import check_family
from t5bench.plan.interpreter import interpreter, path_of_programs
from t5bench.plan.launchers import declared
from t5bench.plan.layout import choose_processes, divide
from t5bench.plan.settings import check_values, take_engine_arguments, values_from
from t5bench.plan.toolkit import check_curand
from t5bench.record import wandb
from t5bench.record.hosts import without_dot
from t5bench.record.plan import Plan, Strategy, by_name


def plan(
    environ: Mapping[str, str], strategy: Strategy | str, argv: Sequence[str] = (), directory: str | None = None
) -> Plan:
    """The plan of a run on this node.

    environ: the user's environment, with the settings, HOSTS, MASTER_ADDR and NODE_RANK. argv: the engine arguments
    that a user gives after ``--``. directory: where relative paths begin, by default the current directory.
    A plan that cannot run says why in its obstacles. Raises Problem if there is no such strategy.
    """
    draft = begin_draft(environ, strategy, argv, directory or str(Path.cwd()))
    refused = _refusal(draft)
    if refused:
        return refused
    ds_config = effective_config(draft)
    device, per_node, gpus_shared = choose_processes(draft)
    zero_stage = ds_config["zero_optimization"]["stage"] if ds_config else 0
    layout = divide(draft, per_node, zero_stage)
    if draft.is_refused or not layout:
        return _refused(draft)
    if draft.is_on("EVAL_ONLY"):  # its record has its own directory, so that the training's stays unchanged
        draft.values["OUTPUT_DIR"] = str(Path(draft.value("OUTPUT_DIR")) / "evaluation")
    if device == "cpu" or gpus_shared:
        topology.check_own_name(draft)
    topology.check_interfaces(draft, device)
    last = layout.nnodes - 1
    if int(draft.node) != last:
        where = f" ({draft.hosts[last]})" if len(draft.hosts) > last else ""
        draft.notes.append(f"iterations are printed on the last node: node {last}{where}")
    patches, ledger = _check_software(draft, device, gpus_shared, ds_config, layout)
    flash_attention = node_checks.choose_attention(draft, device)
    tokenizer = node_checks.choose_tokenizer(draft)
    data_prefix = node_checks.check_data(draft, tokenizer)
    wandb_mode, wandb_config = _choose_wandb(draft)
    choices = torchrun_command.Choices(
        layout=layout,
        device=device,
        gpus_shared=gpus_shared,
        data_prefix=data_prefix,
        tokenizer=tokenizer,
        tokenizer_type=node_checks.tokenizer_type(draft, data_prefix),
        flash_attention=flash_attention,
        engine_has_all_patches=patches == SERIES,
        zero_stage=zero_stage if ds_config else None,
        offloads_optimizer=bool(ds_config) and offload_device(ds_config, "offload_optimizer") == "cpu",
        load=_checkpoints(draft),
        wandb_mode=wandb_mode,
        wandb_config=wandb_config,
        threads=max(1, len(os.sched_getaffinity(0)) // layout.nproc_per_node),
    )
    added, removed = child_environment(draft, torchrun_command.environment(draft, choices))
    if draft.is_refused:
        return _refused(draft)
    planned = Plan(
        strategy=draft.strategy,
        settings_by_role=draft.values_by_role,
        chosen=draft.chosen,
        obstacles=draft.obstacles,
        notes=draft.notes,
        node=int(draft.node),
        hosts=draft.hosts,
        master_address=draft.master_address,
        engine=draft.value("ENGINE"),
        engine_directory=draft.value("MEGATRON_DIR") if draft.value("ENGINE") == "megatron" else "",
        engine_patches=patches,
        device=device,
        gpus_shared=gpus_shared,
        data_prefix=data_prefix,
        tokenizer=tokenizer,
        output_dir=draft.value("OUTPUT_DIR"),
        layout=layout,
        ds_config=ds_config,
        ledger=ledger,
        environment=added,
        removed_environment=removed,
        python=interpreter(environ),
        rendezvous=torchrun_command.rendezvous(draft, layout),
        program=torchrun_command.program(draft),
        arguments=torchrun_command.engine_arguments(draft, choices),
    )
    return replace(planned, obstacles=[*planned.obstacles, *node_checks.check_output_directory(planned)])


def begin_draft(environ: Mapping[str, str], strategy: Strategy | str, argv: Sequence[str], directory: str) -> Draft:
    """What was asked. The launchers resolve hosts, master and rank; a program names them in the environment."""
    if isinstance(strategy, str):
        strategy = declared(strategy)
    wrong_model = None
    try:
        environ = with_model(environ, directory)
    except Problem as problem:
        wrong_model = Problem(problem.found, problem.remedy, "model")
        environ = {name: value for name, value in environ.items() if name != "MODEL"}
    values, defaults = values_from(environ, strategy)
    if values["MODEL"]:  # which says them
        defaults = defaults | {name: values[name] for name in FOLLOWING if name in values}
    hosts = [without_dot(host) for host in values["HOSTS"].split()]
    if not values["NNODES"]:
        values["NNODES"] = str(len(hosts) or environ.get("SLURM_JOB_NUM_NODES") or 1)
    master_address = without_dot(environ.get("MASTER_ADDR") or (hosts[0] if hosts else ""))
    node = environ.get("NODE_RANK") or environ.get("SLURM_NODEID") or ""
    if values["NNODES"] == "1":
        master_address = master_address or "127.0.0.1"
        node = node or "0"
    return Draft(
        strategy=strategy,
        environ=environ,
        directory=directory,
        values=values,
        defaults=defaults,
        extra=list(argv),
        hosts=hosts,
        master_address=master_address,
        node=node,
        obstacles=[wrong_model] if wrong_model else [],
    )


def _refusal(draft: Draft) -> Plan | None:
    """Checks the request as far as it does not depend on this machine's GPUs; a plan if it is refused."""
    check_values(draft)
    if draft.is_refused:
        return _refused(draft)
    take_engine_arguments(draft)
    if not draft.is_refused:
        topology.find_own_rank(draft)
    if draft.is_refused:
        return _refused(draft)
    check_family(draft)
    check_numbers(draft)
    return None


def _refused(draft: Draft) -> Plan:
    return Plan(draft.strategy, draft.values_by_role, draft.chosen, draft.obstacles, draft.notes)


def check_numbers(draft: Draft) -> None:
    """Refuses numbers that are valid alone but do not fit together, or that no engine accepts."""
    value = draft.value
    last = draft.number("TRAIN_ITERS")
    given = by_name(draft.extra)
    profiled = draft.number("PROFILE_ITERATION")
    if profiled and not 2 <= profiled <= last:
        problem = f"PROFILE_ITERATION must be between 2 and TRAIN_ITERS={last}, found {profiled}"
        draft.refuse("profile-iteration", problem, "The first iteration is only warm-up; 0 profiles none")
    warm_up = draft.number("LR_WARMUP_ITERS")
    decay = int(value("LR_DECAY_ITERS") or last)
    if warm_up >= decay:
        problem = f"LR_WARMUP_ITERS={warm_up} leaves none of the {decay} iterations for the learning rate's decay"
        draft.refuse("learning-rate", problem, "Lower LR_WARMUP_ITERS, or raise TRAIN_ITERS or LR_DECAY_ITERS")
    if float(value("MIN_LR")) > float(value("LR")):
        problem = f"MIN_LR={value('MIN_LR')} is more than LR={value('LR')}"
        draft.refuse("learning-rate", problem, "Lower MIN_LR, or raise LR")
    if float(value("DROPOUT")) >= 1:
        draft.refuse("dropout", f"DROPOUT must be less than 1, found {value('DROPOUT')}")
    if draft.is_on("EVAL_ONLY") and value("EVAL_ITERS") == "0":
        remedy = "Set EVAL_ITERS to the number of validation batches"
        draft.refuse("eval-iters", "EVAL_ONLY=1 but EVAL_ITERS is 0", remedy)
    for name in ("--exit-interval", "--exit-duration-in-mins"):
        if name in given and not (given[name].isascii() and given[name].isdecimal() and int(given[name]) > 0):
            problem = f"{name} must be a whole number of at least 1, found '{given[name]}'"
            draft.refuse("engine-argument", problem)
    if draft.number("LOG_INTERVAL") > last and not value("RAMPUP_BATCH_SIZE") and not draft.is_on("EVAL_ONLY"):
        silent = f"warning: LOG_INTERVAL={value('LOG_INTERVAL')} is more than TRAIN_ITERS={last}"
        draft.notes.append(f"{silent}, so this run will log neither loss nor time. Set LOG_INTERVAL=1")


def _check_software(
    draft: Draft, device: str, gpus_shared: bool, ds_config: Mapping[str, Any] | None, layout: Layout
) -> tuple[str, str]:
    """The state of the engine's patches, and what the ledger says of DeepSpeed."""
    patches = SERIES
    if draft.value("ENGINE") == "megatron":
        directory = Path(draft.value("MEGATRON_DIR"))
        patches = check_engine(draft, directory, device, gpus_shared)
        check_arguments(draft, directory)
    check_locks(draft, ds_config, device)
    ledger = check_packages(draft, ds_config, layout, device)
    if device == "cuda" and ds_config and offload_device(ds_config, "offload_optimizer") == "cpu":
        try:
            check_curand({**draft.environ, "PATH": path_of_programs(draft.environ)})
        except Problem as problem:
            draft.lack("no-curand", str(problem), problem.remedy)
    return patches, ledger


def _checkpoints(draft: Draft) -> str:
    """The directory of the checkpoints that the run loads; empty for a new run."""
    directory = Path(draft.value("OUTPUT_DIR"))
    if draft.is_on("EVAL_ONLY"):
        return str(directory.parent / "checkpoints")
    return str(directory / "checkpoints") if draft.is_on("RESUME") else ""


def _choose_wandb(draft: Draft) -> tuple[str, str]:
    """W&B's mode, and the file from which it reads the run's configuration; a W&B sweep's agent has its own file."""
    try:
        mode = wandb.mode(draft.environ, draft.value("WANDB_MODE"))
    except Problem as problem:
        draft.refuse("setting-value", str(problem), problem.remedy)
        return "disabled", ""
    output_dir = Path(draft.value("OUTPUT_DIR"))
    if mode == "offline" and not draft.value("WANDB_MODE"):
        runs = f"'{output_dir}'/wandb/offline-run-*"
        draft.notes.append(f"W&B: no WANDB_API_KEY, logging offline; upload later with: wandb sync {runs}")
    has_file = mode != "disabled" and not draft.environ.get("WANDB_SWEEP_PARAM_PATH")
    return mode, str(output_dir / f"node{draft.node}.wandb.yaml") if has_file else ""
