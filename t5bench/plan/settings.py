"""Engine arguments that the user gives after ``--``, and how they combine with the settings."""

import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from t5bench import REPOSITORY
from t5bench.plan.request import Findings, Request
from t5bench.record.plan import ROLES, Setting, by_name

# These decide a run's directory, data and processes; an argument that changed them would make the plan wrong.
DECIDED_ELSEWHERE = {
    "--data-path": "MEGATRON_DATA_DIR sets the one dataset of a run; python -m t5bench merge-data makes one of several",
    "--tokenizer-model": "TOKENIZER_MODEL sets the tokenizer",
    "--tokenizer-type": "the data determine it",
    "--deepspeed": "choose a ZeRO strategy",
    "--deepspeed_config": "edit the strategy's file in ds_configs/",
    "--zero-stage": "choose another ZeRO strategy",
    "--distributed-backend": "DEVICE and SHARE_GPUS determine it",
    "--pipeline-model-parallel-split-rank": "PIPELINE_PARALLEL_SIZE determines it",
    "--tensorboard-dir": "OUTPUT_DIR sets the run's directory",
    "--save": "OUTPUT_DIR sets the run's directory",
    "--save-interval": "SAVE_INTERVAL sets it",
    "--load": "RESUME=1 continues a run; a new one begins with another's weights with --finetune --load",
    "--skip-train": "EVAL_ONLY=1 evaluates a checkpoint",
    "--recompute-granularity": "use RECOMPUTE=selective or RECOMPUTE=full",
    "--recompute-activations": "use RECOMPUTE=selective",
    "--checkpoint-activations": "it breaks the engine; use RECOMPUTE=full",
    "--rampup-batch-size": "use RAMPUP_BATCH_SIZE",
    "--train-samples": "a run has TRAIN_ITERS x GLOBAL_BATCH_SIZE samples",
    "--vocab-file": "TOKENIZER_MODEL sets the tokenizer",
    "--merge-file": "TOKENIZER_MODEL sets the tokenizer",
    "--make-vocab-size-divisible-by": "every layout must pad the vocabulary to the same size",
}


# Of engine arguments that no setting owns: of all, and of the one that the record reads.
_TEXT, _INTERVAL = (Setting(kind, *[""] * 5) for kind in ("text?", "whole:0?"))


def effective_settings(request: Request) -> dict[str, Setting]:
    """The settings with the values that engine arguments after ``--`` give them; argparse lets the last one win."""
    given, goes_on = by_name(request.extra), "1" in (request.value("RESUME"), request.value("EVAL_ONLY"))
    finetunes = {"--load"} if "--finetune" in given and not goes_on else set()
    for name in given:
        if name in DECIDED_ELSEWHERE.keys() - finetunes:
            found = f"{name} cannot be given after --: the launcher passes it itself"
            request.findings.refuse("launcher-argument", found, DECIDED_ELSEWHERE[name])
    own = [_TEXT.fault("an engine argument", word) for word in request.extra]
    own.append(_INTERVAL.fault("--exit-interval", given.get("--exit-interval", "")))
    for wrong in filter(None, own):
        request.findings.refuse("engine-argument", *wrong)
    owned = {argument for setting in request.settings.values() for argument in setting.argument.split(",")}
    owned |= DECIDED_ELSEWHERE.keys()
    for name in given.keys() - owned:
        if meant := sorted(argument for argument in owned if argument.startswith(name)):
            found = f"{name} could be short for {' or '.join(meant)}"
            request.findings.refuse("abbreviated-argument", found, "Write engine arguments in full")
    return {name: _effective(name, setting, given, request.findings) for name, setting in request.settings.items()}


def _effective(name: str, setting: Setting, given: Mapping[str, str], findings: Findings) -> Setting:
    if setting.argument == "=":
        choices = setting.kind.partition(":")[2].rstrip("?").split("|")
        chosen = [argument for argument in given if argument in choices]
        return replace(setting, value=chosen[-1]) if chosen else setting
    arguments = setting.argument.split(",")
    if not any(argument in given for argument in arguments):
        return setting
    values = [given.get(argument, setting.value) for argument in arguments]
    for argument, value in zip(arguments, values, strict=True):
        if wrong := setting.fault(argument, value):
            findings.refuse("engine-argument", *wrong)
            return setting
    value = values[0] if len(values) == 1 else max(values, key=float)
    if omitted := [argument for argument in arguments if argument not in given and value != setting.value]:
        found = f"{name} is the larger of {' and '.join(arguments)}, and {omitted[0]} is not given"
        findings.refuse("engine-argument", found, f"Give both, or set {name}")
    return replace(setting, value=value)


def checked_settings(settings: Mapping[str, Setting], directory: str, findings: Findings) -> dict[str, Setting]:
    """The settings with paths made absolute, relative to the caller's directory; an invalid value is refused."""
    found = {}
    for name, setting in settings.items():
        if wrong := setting.fault(name, setting.value):
            findings.refuse("setting-value", *wrong)
        is_path = setting.value and setting.kind.rstrip("?") == "path"
        value = str(Path(directory, setting.value)) if is_path else setting.value
        found[name] = replace(setting, value=value)
    return found


def shown(default: str) -> str:
    """The settings with paths relative to the repository."""
    return default.replace(f"{REPOSITORY}/../", "../").replace(f"{REPOSITORY}/", "./")


def help_text(settings: Mapping[str, Setting]) -> str:
    """The settings by role, at most 100 columns wide; settings without a role come first."""
    lines = []
    for role in ("-", *ROLES):
        own = {name: setting for name, setting in settings.items() if setting.role == role}
        lines += [f"\n{ROLES[role].heading}"] if own and role in ROLES else []
        for name, setting in own.items():
            default = shown(setting.default) or "(unset)"
            first, *rest = textwrap.wrap(setting.meaning, 47)
            if len(default) > 22:
                first, rest = "", [first, *rest]
            lines += [f"  {name:<27} {default:<22} {first}".rstrip(), *(f"{'':<53}{line}" for line in rest)]
    return "\n".join(lines)
