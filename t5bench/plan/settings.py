"""The settings of a run: engine arguments after ``--`` that change them, what ``--help`` prints, and docs/settings.md,
which ``python -m t5bench settings`` prints."""

import os
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from t5bench import REPOSITORY
from t5bench.plan.launchers import Findings, Request
from t5bench.record.plan import ROLES, Setting, by_name

# These decide a run's directory, data and processes; an argument that changed them would make the plan wrong.
DECIDED_ELSEWHERE = {
    "--data-path": "MEGATRON_DATA_DIR sets the one dataset of a run; python -m t5bench merge-data makes one of several",
    "--load": "RESUME=1 continues a run; a new one begins with another's weights with --finetune --load",
    "--tokenizer-type": "The data determine it",
    "--make-vocab-size-divisible-by": "Every layout must pad the vocabulary to the same size",
    "--checkpoint-activations": "It breaks the engine; use RECOMPUTE=full",
    **dict.fromkeys(("--tokenizer-model", "--vocab-file", "--merge-file"), "TOKENIZER_MODEL sets the tokenizer"),
    **dict.fromkeys(("--deepspeed", "--deepspeed_config", "--zero-stage"), "Choose a ZeRO strategy"),
    **dict.fromkeys(("--tensorboard-dir", "--save"), "OUTPUT_DIR sets the run's directory"),
    **dict.fromkeys(("--recompute-granularity", "--recompute-activations"), "Use RECOMPUTE"),
    "--distributed-backend": "DEVICE and SHARE_GPUS determine it",
    "--pipeline-model-parallel-split-rank": "PIPELINE_PARALLEL_SIZE determines it",
    "--save-interval": "Use SAVE_INTERVAL",
    "--skip-train": "Use EVAL_ONLY=1",
    "--rampup-batch-size": "Use RAMPUP_BATCH_SIZE",
    "--train-samples": "A run has TRAIN_ITERS x GLOBAL_BATCH_SIZE samples",
}


def effective_settings(request: Request) -> dict[str, Setting]:
    """The settings with the values that engine arguments after ``--`` give them; argparse lets the last one win."""
    given, refuse = by_name(request.extra), request.findings.refuse
    goes_on = "1" in (request.value("RESUME"), request.value("EVAL_ONLY"))
    finetunes = {"--load"} if "--finetune" in given and not goes_on else set()
    owned = {argument for setting in request.settings.values() for argument in setting.argument.split(",")}
    owned |= DECIDED_ELSEWHERE.keys()
    for name in given:
        if name in DECIDED_ELSEWHERE.keys() - finetunes:
            found = f"{name} cannot be given after --: the launcher passes it itself"
            refuse("launcher-argument", found, DECIDED_ELSEWHERE[name])
        elif name not in owned and (meant := sorted(argument for argument in owned if argument.startswith(name))):
            found = f"{name} could be short for {' or '.join(meant)}"
            refuse("abbreviated-argument", found, "Write engine arguments in full")
    return {name: _effective(name, setting, given, request.findings) for name, setting in request.settings.items()}


def _effective(name: str, setting: Setting, given: Mapping[str, str], findings: Findings) -> Setting:
    if setting.argument == "=":
        choices = setting.kind.partition(":")[2].rstrip("?").split("|")
        chosen = [argument for argument in given if argument in choices]
        return replace(setting, value=chosen[-1]) if chosen else setting
    arguments = setting.argument.split(",")
    values = {argument: given[argument] for argument in arguments if argument in given}
    for argument, value in values.items():
        if wrong := setting.fault(argument, value):
            findings.refuse("engine-argument", *wrong)
            return setting
    if 0 < len(values) < len(arguments):
        found = f"{' and '.join(arguments)} must be given together"
        findings.refuse("engine-argument", found, f"Give both, or set {name}")
    elif values:
        return replace(setting, value=max(values.values(), key=float) if len(values) > 1 else values[arguments[0]])
    return setting


def checked_settings(settings: Mapping[str, Setting], directory: str, findings: Findings) -> dict[str, Setting]:
    """The settings with paths made absolute, relative to the caller's directory; an invalid value is refused."""
    found = {}
    for name, setting in settings.items():
        if wrong := setting.fault(name, setting.value):
            findings.refuse("setting-value", *wrong)
        is_path = setting.value and setting.kind.rstrip("?") == "path"
        found[name] = replace(setting, value=str(Path(directory, setting.value))) if is_path else setting
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


def run(_: object) -> int:
    """Prints docs/settings.md: all settings of a launcher as tables."""
    from t5bench.plan.launchers import ask, declarations  # a launcher's planning process need not load it

    first, *_between, last = (strategy.name for strategy in declarations())
    own, other = (ask(strategy, environment={"PATH": os.environ["PATH"]}).settings for strategy in (first, last))
    print("# Settings\n\nSet these in the environment; a launcher's `--help` shows its defaults.")
    print("`python -m t5bench settings` generates this page.")
    for role_name, role in ROLES.items():
        print(f"\n## {role.heading}\n\n| Setting | Default | Meaning |\n|---|---|---|")
        for name, setting in own.items():
            default = shown(setting.default).replace(first, "<strategy>")
            is_common = default == shown(other[name].default).replace(last, "<strategy>")
            default = (f"`{default}`" if default else "(unset)") if is_common else "strategy-specific"
            if setting.role == role_name:
                print(f"| `{name}` | {default} | {setting.meaning} |")
    return 0
