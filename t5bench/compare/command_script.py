"""The script that a launcher leaves in node<R>.command.sh: whether it starts what the plan says, and nothing else."""

import re
import shlex

import msgspec

from t5bench.record.plan import Plan

_HERE_DOCUMENT = re.compile(r"<<'JSON'\n(.*?)\nJSON\n", re.DOTALL)
_DOLLAR_QUOTED = re.compile(r"(?<!\\)\$'((?:[^'\\]|\\.)*)'", re.DOTALL)


def is_script_of(plan: Plan, script: str) -> bool:
    """Whether this is what print_command (scripts/megatron_common.sh) writes of a plan."""
    ds_config = _HERE_DOCUMENT.findall(script)
    words = ["mkdir", "-p", plan.output_dir]
    if ds_config:
        words += ["cat", f">{plan.output_dir}/ds_config.json"]
    if wandb_config := plan.environment.get("WANDB_SWEEP_PARAM_PATH"):
        words += ["echo", "wandb_version: 1", f">{wandb_config}"]
    words += ["env", *(f"{name}={value}" for name, value in plan.environment.items()), *plan.command]
    written = [json_of(text.encode(errors="replace")) for text in ds_config]
    planned = [plan.ds_config] if plan.ds_config else []
    return written == planned and _words(_HERE_DOCUMENT.sub("\n", script)) == words


def json_of(content: bytes) -> object:
    """None for what is no JSON."""
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return None


def _words(script: str) -> list[str]:
    """A script's words. Bash alone knows $'...', as it quotes what is not printable where the script is written."""
    try:
        return shlex.split(_DOLLAR_QUOTED.sub(lambda match: shlex.quote(_unescaped(match[1])), script))
    except ValueError:
        return []


def _unescaped(text: str) -> str:
    """Raises ValueError."""
    characters = text.encode(errors="surrogateescape").decode("unicode_escape")  # one for each byte
    return characters.encode("latin-1").decode(errors="surrogateescape")
