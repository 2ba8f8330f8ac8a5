"""The planning process that every launcher starts, before torchrun and anything else.

    python -m t5bench.plan make     reads a launcher's request from standard input, answers with NAME=VALUE words
    python -m t5bench.plan check    reads the settings of a script, answers with paths made absolute
    python -m t5bench.plan settings reads the settings of a script, prints them for --help
    python -m t5bench.plan print    reads what ``plan_words`` of a launcher prints, prints the plan as JSON

It imports nothing beyond the standard library: a launcher may use 0.30 s of CPU in all, and plans without packages.
"""

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from t5bench import Problem, note
from t5bench.plan import claim, place
from t5bench.plan.engine import SERIES, check_engine, check_locks, check_packages, effective_config, offload_device
from t5bench.plan.families import check_family
from t5bench.plan.launchers import Findings, Request, completed, groups, read_request, read_settings
from t5bench.plan.layout import choose_processes, divide
from t5bench.plan.settings import checked_settings, effective_settings, help_text
from t5bench.plan.toolkit import completions
from t5bench.plan.topology import check_own_name, placed
from t5bench.record import wandb
from t5bench.record.plan import Arguments, Plan, by_name

EXIT_CONFIGURATION = 2


def make(request: Request) -> tuple[Plan, dict[str, Any]]:
    """The plan, and what else the shell needs, which is empty if the request is refused."""
    findings = request.findings
    request = replace(request, settings=checked_settings(request.settings, request.directory, findings))
    request = replace(request, settings=effective_settings(request))
    refused = Plan(request.strategy, request.settings, findings.obstacles)
    request = request if findings.refused else placed(request)
    if findings.refused:
        return refused, {}
    check_family(request)
    check_numbers(request)
    device, per_node, gpus_shared = choose_processes(request)
    ds_config = effective_config(request)
    layout = divide(request, per_node, ds_config["zero_optimization"]["stage"] if ds_config else 0)
    if findings.refused or not layout:
        return refused, {}
    if request.value("EVAL_ONLY") == "1":  # its record has its own directory, so that the training's stays unchanged
        moved = replace(request.settings["OUTPUT_DIR"], value=str(Path(request.value("OUTPUT_DIR")) / "evaluation"))
        request = replace(request, settings={**request.settings, "OUTPUT_DIR": moved})
    engine, directory = request.value("ENGINE"), Path(request.value("MEGATRON_DIR"))
    place.check_output_directory(request)
    if device == "cpu" or gpus_shared:
        check_own_name(request)
    patches = SERIES
    if engine == "megatron":
        patches = check_engine(request, directory, device, gpus_shared)
        check_locks(request, directory)
    check_packages(request, ds_config, layout)
    attention = place.choose_attention(request, device)
    tokenizer = place.choose_tokenizer(request)
    plan = Plan(
        strategy=request.strategy,
        settings=request.settings,
        obstacles=findings.obstacles,
        node=int(request.facts["node"]),
        hosts=request.hosts,
        master_address=request.facts["master_address"],
        engine=engine,
        engine_directory=str(directory) if engine == "megatron" else "",
        engine_patches=patches,
        device=device,
        gpus_shared=gpus_shared,
        data_prefix=place.check_data(request, tokenizer),
        tokenizer=tokenizer,
        output_dir=request.value("OUTPUT_DIR"),
        layout=layout,
        ds_config=ds_config,
        arguments=Arguments(fixed=request.fixed, extra=request.extra),
    )
    return plan, {
        **choose_wandb(request, plan),
        "load": str(checkpoint_home(plan) / "checkpoints") if loads(plan) else "",
        "tokenizer_type": place.tokenizer_type(request, plan.data_prefix),
        "zero_stage": plan.zero_stage,
        "cpu_optimizer": bool(ds_config) and offload_device(ds_config, "offload_optimizer") == "cpu",
        "flash_attention": attention,
        "threads": max(1, len(os.sched_getaffinity(0)) // layout.nproc_per_node),
        "ds_config": json.dumps(ds_config, indent=2) + "\n" if ds_config else "",
        **(completions(os.environ) if device == "cuda" else {}),
    }


def check_numbers(request: Request) -> None:
    """Refuses numbers that are valid alone but do not fit together, or that no engine accepts."""
    refuse, value, last = request.findings.refuse, request.value, request.number("TRAIN_ITERS")
    iteration, warm_up = request.number("PROFILE_ITERATION"), request.number("LR_WARMUP_ITERS")
    if iteration and not 2 <= iteration <= last:
        found = f"PROFILE_ITERATION must be between 2 and TRAIN_ITERS={last}, found {iteration}"
        refuse("profile-iteration", found, "The first iteration is only warm-up; 0 profiles none")
    if warm_up >= last and "--lr-decay-iters" not in by_name(request.extra):
        found = f"LR_WARMUP_ITERS={warm_up} leaves none of TRAIN_ITERS={last} for the learning rate's decay"
        refuse("learning-rate", found, "Lower LR_WARMUP_ITERS, or raise TRAIN_ITERS")
    if float(value("MIN_LR")) > float(value("LR")):
        refuse("learning-rate", f"MIN_LR={value('MIN_LR')} is more than LR={value('LR')}", "Lower MIN_LR, or raise LR")
    if float(value("DROPOUT")) >= 1:
        refuse("dropout", f"DROPOUT must be less than 1, found {value('DROPOUT')}")
    if value("EVAL_ONLY") == "1" and value("EVAL_ITERS") == "0":
        refuse("eval-iters", "EVAL_ONLY=1 but EVAL_ITERS is 0", "Set EVAL_ITERS to the number of validation batches")
    if request.number("LOG_INTERVAL") > last and not value("RAMPUP_BATCH_SIZE") and value("EVAL_ONLY") == "0":
        silent = f"warning: LOG_INTERVAL={value('LOG_INTERVAL')} is more than TRAIN_ITERS={last}"
        request.findings.notes.append(f"{silent}, so this run will log neither loss nor time. Set LOG_INTERVAL=1")


def loads(plan: Plan) -> bool:
    return "1" in (plan.value("RESUME"), plan.value("EVAL_ONLY"))


def checkpoint_home(plan: Plan) -> Path:
    """The run directory whose checkpoint is loaded."""
    return Path(plan.output_dir).parent if plan.value("EVAL_ONLY") == "1" else Path(plan.output_dir)


def choose_wandb(request: Request, plan: Plan) -> dict[str, str]:
    """W&B's mode, and the file from which it reads the run's configuration; a W&B sweep's agent has its own file."""
    mode = wandb.mode(os.environ | {"WANDB_API_KEY": request.value("WANDB_API_KEY")}, request.value("WANDB_MODE"))
    if mode == "offline" and not request.value("WANDB_MODE"):
        runs = f"'{plan.output_dir}'/wandb/offline-run-*"
        request.findings.notes.append(f"W&B: no WANDB_API_KEY, logging offline; upload later with: wandb sync {runs}")
    has_file = mode != "disabled" and not os.environ.get("WANDB_SWEEP_PARAM_PATH")
    file = str(Path(plan.output_dir) / f"node{plan.node}.wandb.yaml") if has_file else ""
    return {"wandb_mode": mode, "wandb_config": file}


def begin(plan: Plan, besides: Mapping[str, Any], request: Request) -> Plan:
    """Claims and prepares the run directory, unless this is a dry run or something stops the run."""
    findings = request.findings
    try:
        if not findings.obstacles and not request.dry_run:
            claim.take(Path(plan.output_dir), f"node{plan.node}", int(request.facts["launcher"]))
        if loads(plan) and (request.dry_run or not findings.obstacles):
            plan = resume(plan, request)
        if not findings.obstacles and not request.dry_run:
            place.prepare_directory(plan, besides, request.facts["launcher"])
    except Problem as problem:
        findings.lack("running", str(problem), problem.remedy)
    except OSError as error:
        found = f"cannot write to the run directory {plan.output_dir}: {error.strerror or error}"
        remedy = "Free space and inodes there (df -h, df -i), or choose another OUTPUT_DIR"
        findings.lack("output-directory", found, remedy)
    return plan


def resume(plan: Plan, request: Request) -> Plan:
    """The iteration of the checkpoint to resume from or evaluate; all nodes agree on it unless this is a dry run."""
    from t5bench.plan.resume import checkpoint

    try:
        iteration = checkpoint(replace(plan, output_dir=str(checkpoint_home(plan))), agree=not request.dry_run)
    except ValueError as error:
        request.findings.lack("resume", str(error), getattr(error, "remedy", ""))
        return plan
    doing = "evaluating" if plan.value("EVAL_ONLY") == "1" else "resuming from"
    request.findings.notes.append(f"{doing} the checkpoint of iteration {iteration}")
    return replace(plan, resume_from=iteration)


def tell(findings: Findings, *, is_dry_run: bool) -> bool:
    """Prints the findings on standard error; returns whether to continue. A dry run continues on a lacking machine."""
    if not findings.obstacles or is_dry_run:
        for text in findings.notes:
            note(text)
    for obstacle in findings.obstacles:
        stops = obstacle.fatal or not is_dry_run
        note(f"{'error' if stops else 'a real run would stop here'}: {obstacle.found}")
        if obstacle.remedy:
            note(f"       {obstacle.remedy}")
        if stops:
            return False  # the next ones are often its consequences
    return True


def answer(plan: Plan, besides: Mapping[str, Any], request: Request) -> list[str]:
    """The answer to the shell: changed settings by name, the rest by the keys of its array PLAN."""
    words = [f"PLAN[json]={json.dumps(plan.to_json())}"]
    if plan.layout is None:
        return words
    changed = {name: s.value for name, s in plan.settings.items() if s.value != request.settings[name].value}
    words += [f"NODE_RANK={plan.node}", *(f"{name}={value}" for name, value in changed.items())]
    for key, value in {**vars(plan), **vars(plan.layout), **besides}.items():
        if isinstance(value, str | int | None):
            words.append(f"PLAN[{key}]={'' if value is None else int(value) if isinstance(value, bool) else value}")
    return words


def say(text: str) -> None:
    """For a shell that may just have gone, or a user who reads only the first lines."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.stdout.write(text)


def end_with_shell() -> None:
    """Ends this process, which may be waiting long for other nodes, once nobody can read its answer any more."""
    answer = select.poll()
    answer.register(sys.stdout, 0)
    answer.poll()
    os._exit(EXIT_CONFIGURATION)


def check(group: Mapping[str, Sequence[str]]) -> bool:
    given, findings = read_settings(group), Findings()
    settings = checked_settings(given, group["directory"][0], findings)
    say("".join(f"{name}={setting.value}\0" for name, setting in settings.items() if setting != given[name]))
    return tell(findings, is_dry_run=False)


def plan_run(request: Request) -> bool:
    threading.Thread(target=end_with_shell, daemon=True).start()
    plan, besides = make(request)
    if plan.layout:
        plan = begin(plan, besides, request)
    if plan.layout and (request.dry_run or plan.device == "cuda"):
        from t5bench.plan.forecast import forecast

        flash, notes = besides["flash_attention"], request.findings.notes
        notes += forecast(plan, has_flash_attention=flash, is_dry_run=request.dry_run)
    goes_on = tell(request.findings, is_dry_run=request.dry_run)
    say("".join(f"{word}\0" for word in answer(plan, besides, request)))
    return goes_on


def main() -> int:
    words = sys.stdin.buffer.read().decode(errors="surrogateescape").split("\0")[:-1]
    goes_on = True
    match sys.argv[1]:
        case "print":
            say(f"{json.dumps(completed(words), indent=2)}\n")
        case "settings":
            say(f"{help_text(read_settings(groups(words)))}\n")
        case "check":
            goes_on = check(groups(words))
        case "make":
            goes_on = plan_run(read_request(words))
    return 0 if goes_on else EXIT_CONFIGURATION


if __name__ == "__main__":
    sys.exit(main())
