"""The planning process that every launcher starts, before torchrun and anything else.

    python -m t5bench.plan make     reads a launcher's request from standard input, answers with NAME=VALUE words
    python -m t5bench.plan check    reads the settings of a script, answers with paths made absolute
    python -m t5bench.plan settings reads the settings of a script, prints them for --help
    python -m t5bench.plan print    reads what ``plan_words`` of a launcher prints, prints the plan as JSON

It imports nothing beyond the standard library: a launcher may use 0.30 s of CPU in all, and plans without packages.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from t5bench import Problem
from t5bench.plan import claim
from t5bench.plan.complete import completed
from t5bench.plan.deepspeed import check_release, effective_config
from t5bench.plan.engine import check_engine
from t5bench.plan.layout import Processes, check_own_name, divide
from t5bench.plan.place import (
    check_data,
    check_output_directory,
    check_packages,
    choose_attention,
    choose_tokenizer,
    prepare_directory,
    threads_per_process,
)
from t5bench.plan.request import Findings, Request, groups, read_request, read_settings
from t5bench.plan.settings import checked_settings, effective_settings, help_text
from t5bench.plan.toolkit import completions
from t5bench.record import wandb
from t5bench.record.plan import SECRET_GIVEN, Arguments, Plan, Setting

EXIT_CONFIGURATION = 2


def public(settings: dict[str, Setting]) -> dict[str, Setting]:
    """The settings as they may be printed and recorded."""
    return {
        name: replace(setting, value=SECRET_GIVEN if setting.value else "") if setting.is_secret else setting
        for name, setting in settings.items()
    }


def refused(request: Request) -> Plan:
    return Plan(request.strategy, public(dict(request.settings)), request.findings.obstacles)


def make(request: Request) -> tuple[Plan, dict[str, str]]:
    """The plan, and what the shell needs of it besides; no layout and nothing besides where the request is refused."""
    findings = request.findings
    request = replace(request, settings=checked_settings(request.settings, request.directory, findings))
    request = replace(request, settings=effective_settings(request))
    if findings.refused:
        return refused(request), {}
    iteration, last = request.number("PROFILE_ITERATION"), request.number("TRAIN_ITERS")
    if iteration and not 2 <= iteration <= last:
        found = f"PROFILE_ITERATION must be from 2 to TRAIN_ITERS={last}, found {iteration}"
        findings.refuse("profile-iteration", found, "The first iteration is all warm-up; 0 profiles none")
    processes = Processes(request)
    layout, ds_config = divide(request, processes), effective_config(request)
    if layout is None or findings.refused:
        return refused(request), {}
    check_output_directory(request)
    engine_directory = Path(request.value("MEGATRON_DIR"))
    check_own_name(request, processes)
    patches = check_engine(request, engine_directory, processes.device, processes.shared)
    zero_stage = ds_config["zero_optimization"]["stage"] if ds_config else 0
    if ds_config:
        check_release(request, zero_stage, layout)
    check_packages(request)
    attention = choose_attention(request, processes.device)
    tokenizer = choose_tokenizer(request, request.facts["default_tokenizer"])
    mode = wandb.mode(os.environ | {"WANDB_API_KEY": request.value("WANDB_API_KEY")}, request.value("WANDB_MODE"))
    if mode == "offline" and not request.value("WANDB_MODE"):
        runs = f"'{request.value('OUTPUT_DIR')}'/wandb/offline-run-*"
        findings.notes.append(f"W&B: no WANDB_API_KEY, logging offline; upload later with: wandb sync {runs}")
    plan = Plan(
        strategy=request.strategy,
        settings=public(dict(request.settings)),
        obstacles=findings.obstacles,
        node=int(request.facts["node"]),
        hosts=request.hosts,
        master_address=request.facts["master_address"],
        engine=request.value("ENGINE"),
        engine_directory=str(engine_directory) if request.value("ENGINE") == "megatron" else "",
        engine_patches=patches,
        device=processes.device,
        gpus_shared=processes.shared,
        data_prefix=check_data(request, tokenizer),
        tokenizer=tokenizer,
        output_dir=request.value("OUTPUT_DIR"),
        layout=layout,
        ds_config=ds_config,
        arguments=Arguments(fixed=request.fixed, extra=request.extra),
    )
    # A sweep's agent has a file of its own.
    wandb_file = "" if mode == "disabled" or os.environ.get("WANDB_SWEEP_PARAM_PATH") else f"node{plan.node}.wandb.yaml"
    return plan, {
        "wandb_config": str(Path(plan.output_dir) / wandb_file) if wandb_file else "",
        "zero_stage": str(zero_stage),
        "flash_attention": str(int(attention)),
        "wandb_mode": mode,
        "threads": str(threads_per_process(layout.nproc_per_node)),
        "ds_config": json.dumps(ds_config, indent=2) + "\n" if ds_config else "",
        **(completions(os.environ) if processes.device == "cuda" else {}),
    }


def check(group: Mapping[str, Sequence[str]]) -> int:
    given, findings = read_settings(group), Findings()
    settings = checked_settings(given, group["directory"][0], findings)
    tell(findings, is_dry_run=False)
    say([f"{name}={setting.value}" for name, setting in settings.items() if setting != given[name]])
    return EXIT_CONFIGURATION if findings.refused else 0


def say(words: Sequence[str]) -> None:
    """To the shell."""
    sys.stdout.write("".join(f"{word}\0" for word in words))


def resume(plan: Plan, request: Request) -> Plan:
    """With RESUME=1: the checkpoint from which the run goes on, which all nodes agree on unless this is a dry run."""
    if request.value("RESUME") != "1" or (request.findings.obstacles and not request.dry_run):
        return plan
    from t5bench.plan.resume import checkpoint

    try:
        iteration = checkpoint(plan, agree=not request.dry_run)
    except ValueError as error:
        request.findings.lack("resume", str(error), getattr(error, "remedy", ""))
        return plan
    request.findings.notes.append(f"resuming from the checkpoint of iteration {iteration}")
    return replace(plan, resume_from=iteration)


def begin(plan: Plan, besides: Mapping[str, str], request: Request) -> Plan:
    """Claims the run directory and prepares it, unless this is a dry run or something stops the run."""
    findings, layout = request.findings, plan.layout
    assert layout
    try:
        if not findings.obstacles and not request.dry_run:
            run = f"{plan.strategy.name} on {layout.nnodes} nodes at port {plan.value('MASTER_PORT')}"
            claim.take(Path(plan.output_dir), f"node{plan.node}", run, int(request.facts["launcher"]))
        plan = resume(plan, request)
        if not findings.obstacles and not request.dry_run:
            prepare_directory(plan, besides, request.facts["launcher"])
    except Problem as problem:
        findings.lack("running", str(problem), problem.remedy)
    except OSError as error:
        found = f"cannot write to the run directory {plan.output_dir}: {error.strerror or error}"
        remedy = "Free space and inodes there (df -h, df -i), or choose another OUTPUT_DIR"
        findings.lack("output-directory", found, remedy)
    return plan


def tell(findings: Findings, *, is_dry_run: bool) -> bool:
    """Says on standard error what was found; whether to go on, which a dry run does whatever the machine lacks."""
    if not findings.obstacles or is_dry_run:
        print("\n".join(findings.notes), end="\n" if findings.notes else "", file=sys.stderr)
    for obstacle in findings.obstacles:
        stops = obstacle.fatal or not is_dry_run
        print("error" if stops else "a real run would stop here", obstacle.found, sep=": ", file=sys.stderr)
        if obstacle.remedy:
            print(f"       {obstacle.remedy}", file=sys.stderr)
        if stops:
            break  # what follows often follows from it
    return not findings.refused and (is_dry_run or not findings.obstacles)


def answer(plan: Plan, besides: dict[str, str], request: Request) -> list[str]:
    """What the shell hears: settings that were changed by name, the rest by the keys of its array PLAN."""
    words = [f"PLAN[json]={json.dumps(plan.to_json())}"]
    if plan.layout is None:
        return words
    changed = {name for name, s in plan.settings.items() if not s.is_secret and s.value != request.settings[name].value}
    words += [f"{name}={plan.settings[name].value}" for name in sorted(changed)]
    named = {
        "device": plan.device,
        "gpus_shared": str(int(plan.gpus_shared)),
        "patches": plan.engine_patches,
        "tokenizer": plan.tokenizer,
        "data_prefix": plan.data_prefix,
        "resume_from": str(plan.resume_from),
        **{key: str(value if value is not None else "") for key, value in vars(plan.layout).items()},
        **besides,
    }
    return words + [f"PLAN[{key}]={value}" for key, value in named.items()]


def main() -> int:
    words = sys.stdin.buffer.read().decode(errors="surrogateescape").split("\0")[:-1]
    match sys.argv[1]:
        case "print":
            print(json.dumps(completed(words), indent=2))
            return 0
        case "settings":
            print(help_text(read_settings(groups(words))))
            return 0
        case "check":
            return check(groups(words))
    request = read_request(words)
    plan, besides = (refused(request), {}) if request.findings.refused else make(request)
    if plan.layout:
        plan = begin(plan, besides, request)
    if plan.layout and (request.dry_run or plan.device == "cuda"):
        from t5bench.plan.forecast import forecast

        request.findings.notes += forecast(plan, is_dry_run=request.dry_run)
    goes_on = tell(request.findings, is_dry_run=request.dry_run)
    say(answer(plan, besides, request))
    return 0 if goes_on else EXIT_CONFIGURATION


if __name__ == "__main__":
    sys.exit(main())
