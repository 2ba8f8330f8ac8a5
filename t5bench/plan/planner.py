"""``plan(environ, strategy, argv)``: from the environment to the plan of a run. It starts nothing and writes nothing.

It imports nothing beyond the standard library: a launcher plans without packages, and quickly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from t5bench import Problem
from t5bench.plan import node_checks, run_directory, topology
from t5bench.plan.described_model import FOLLOWING, with_model
from t5bench.plan.draft import Draft
from t5bench.plan.engine import check_software, effective_config
from t5bench.plan.families import check_family
from t5bench.plan.launchers import declared
from t5bench.plan.layout import choose_processes, divide
from t5bench.plan.settings import check_numbers, check_values, take_engine_arguments, values_from
from t5bench.plan.torchrun_command import Choices, with_command
from t5bench.record.hosts import Hosts
from t5bench.record.plan import Plan, Strategy


def plan(
    environ: Mapping[str, str], strategy: Strategy | str, argv: Sequence[str] = (), directory: str | None = None
) -> Plan:
    """The plan of a run on this node.

    environ: the user's environment, with the settings, HOSTS, MASTER_ADDR and NODE_RANK. argv: the engine arguments
    that a user gives after ``--``. directory: where relative paths begin, by default the current directory.
    A plan that cannot run says why in its obstacles. Raises Problem if there is no such strategy.
    """
    draft = begin_draft(environ, strategy, argv, directory or str(Path.cwd()))
    planned = on_this_machine(draft) if is_understood(draft) else None
    if not planned or draft.is_refused:
        return Plan(draft.strategy, draft.values_by_role, draft.chosen, draft.obstacles, draft.notes)
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


def is_understood(draft: Draft) -> bool:
    """Checks what was asked, as far as this machine's GPUs do not matter, and completes it with this node's rank.

    Values that are valid but do not fit together are understood: what divides the work may find more of them.
    """
    check_values(draft)
    if not draft.is_refused:
        take_engine_arguments(draft)
    if not draft.is_refused:
        topology.find_own_rank(draft)
    if draft.is_refused:
        return False
    check_family(draft)
    check_numbers(draft)
    return True


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
    topology.tell_the_last_node(draft)
    patches, ledger = check_software(draft, device, gpus_shared, ds_config, layout)
    flash_attention = node_checks.choose_attention(draft, device)
    tokenizer = node_checks.choose_tokenizer(draft)
    data_prefix = node_checks.check_data(draft, tokenizer)
    choices = Choices(flash_attention, node_checks.tokenizer_type(draft, data_prefix), node_checks.choose_wandb(draft))
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
