"""``plan(environ, strategy, argv)``: from the environment to the plan of a run. It starts nothing and writes nothing.

It imports nothing beyond the standard library: a launcher plans without packages, and quickly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from t5bench import Problem
from t5bench.costmodel.layout import Layout
from t5bench.plan import node_checks, run_directory, topology
from t5bench.plan.described_model import FOLLOWING, with_model
from t5bench.plan.draft import Draft
from t5bench.plan.engine import SERIES, check_engine, check_locks, check_packages, effective_config, offload_device
from t5bench.plan.engine_arguments import check_arguments
from t5bench.plan.families import check_family
from t5bench.plan.interpreter import path_of_programs
from t5bench.plan.launchers import declared
from t5bench.plan.layout import choose_processes, divide
from t5bench.plan.settings import check_values, take_engine_arguments, values_from
from t5bench.plan.toolkit import check_curand
from t5bench.plan.torchrun_command import Choices, with_command
from t5bench.record import wandb
from t5bench.record.hosts import Hosts
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
    check_request(draft)
    planned = None if draft.is_refused else on_this_machine(draft)
    if not planned or draft.is_refused:
        return refused(draft)
    return replace(planned, obstacles=[*planned.obstacles, *run_directory.check(planned)])


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
    names = values["HOSTS"].split()
    master = environ.get("MASTER_ADDR") or ""
    node = environ.get("NODE_RANK") or environ.get("SLURM_NODEID") or ""
    if not values["NNODES"]:
        values["NNODES"] = str(len(names) or environ.get("SLURM_JOB_NUM_NODES") or 1)
    if values["NNODES"] == "1":
        node = node or "0"
        if not names:
            master = master or "127.0.0.1"
    return Draft(
        strategy=strategy,
        environ=environ,
        directory=directory,
        values=values,
        defaults=defaults,
        extra=list(argv),
        hosts=Hosts.of(names, master),
        node=node,
        obstacles=[wrong_model] if wrong_model else [],
    )


def check_request(draft: Draft) -> None:
    """Checks what was asked, as far as this machine's GPUs do not matter; completes it with this node's rank."""
    check_values(draft)
    if not draft.is_refused:
        take_engine_arguments(draft)
    if not draft.is_refused:
        topology.find_own_rank(draft)
    if not draft.is_refused:
        check_family(draft)
        check_numbers(draft)


def on_this_machine(draft: Draft) -> Plan | None:
    """Divides the work, and looks for all that the run needs here; None if it cannot be divided."""
    ds_config = effective_config(draft)
    device, per_node, gpus_shared = choose_processes(draft)
    layout = divide(draft, per_node, ds_config["zero_optimization"]["stage"] if ds_config else 0)
    if draft.is_refused or not layout:
        return None
    if draft.is_on("EVAL_ONLY"):  # its record has its own directory, so that the training's stays unchanged
        draft.values["OUTPUT_DIR"] = str(Path(draft.value("OUTPUT_DIR")) / "evaluation")
    topology.check_network(draft, device, uses_gloo=device == "cpu" or gpus_shared)
    tell_where_iterations_are_printed(draft, layout)
    patches, ledger = check_software(draft, device, gpus_shared, ds_config, layout)
    flash_attention = node_checks.choose_attention(draft, device)
    tokenizer = node_checks.choose_tokenizer(draft)
    data_prefix = node_checks.check_data(draft, tokenizer)
    choices = Choices(flash_attention, node_checks.tokenizer_type(draft, data_prefix), choose_wandb(draft))
    planned = Plan(
        strategy=draft.strategy,
        settings_by_role=draft.values_by_role,
        chosen=draft.chosen,
        obstacles=draft.obstacles,
        node=int(draft.node),
        hosts=draft.hosts.names,
        master_address=draft.hosts.master.name,
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
    )
    return with_command(planned, draft, choices)


def refused(draft: Draft) -> Plan:
    return Plan(draft.strategy, draft.values_by_role, draft.chosen, draft.obstacles, draft.notes)


def tell_where_iterations_are_printed(draft: Draft, layout: Layout) -> None:
    last = layout.nnodes - 1
    if int(draft.node) != last:
        where = f" ({draft.hosts.names[last]})" if len(draft.hosts.nodes) > last else ""
        draft.notes.append(f"iterations are printed on the last node: node {last}{where}")


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


def check_software(
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


def choose_wandb(draft: Draft) -> str:
    """W&B's mode."""
    try:
        mode = wandb.mode(draft.environ, draft.value("WANDB_MODE"))
    except Problem as problem:
        draft.refuse("setting-value", str(problem), problem.remedy)
        return "disabled"
    if mode == "offline" and not draft.value("WANDB_MODE"):
        runs = f"'{draft.value('OUTPUT_DIR')}'/wandb/offline-run-*"
        draft.notes.append(f"W&B: no WANDB_API_KEY, logging offline; upload later with: wandb sync {runs}")
    return mode
