"""A plan's command as a piece of bash: for its launcher, for people to paste, and for whoever checks a record."""

import json
import shlex
from collections.abc import Sequence

from t5bench.record.plan import Plan
from t5bench.text import visible

END_OF_ARRAYS = """# A launcher reads this far, and starts the same command with its recorder.
[[ -z ${LAUNCHED:-} ]] || return 0
"""


def quoted(word: str) -> str:
    """A word for bash, without control characters, which would steer the terminal that shows the script."""
    if visible(word) == word:
        return shlex.quote(word)
    shown = ""
    for character in word:
        data = character.encode(errors="surrogateescape")
        is_plain = visible(character) == character and character not in "\\'"
        shown += character if is_plain else "".join(f"\\x{byte:02x}" for byte in data)
    return f"$'{shown}'"


def ds_config_text(plan: Plan) -> str:
    """The contents of the run's ds_config.json."""
    return json.dumps(plan.ds_config, indent=2) + "\n"


def arrays(plan: Plan) -> str:
    """The parts of the command as bash's arrays: what a launcher reads, and what the script below calls."""
    removed = [word for name in plan.removed_environment for word in ("-u", name)]
    added = [f"{name}={value}" for name, value in plan.environment.items()]
    return "".join(
        [
            _array("ENVIRONMENT", [*removed, *added]),
            _array("RENDEZVOUS", plan.rendezvous),
            _array("PROGRAM", plan.program),
            _array("ARGUMENTS", plan.arguments.words),
        ]
    )


def _array(name: str, words: Sequence[str]) -> str:
    """One option a line, with its values."""
    lines = [f"{name}=("]
    for word in words:
        text = quoted(word)
        continues = not word.startswith("-") and len(lines) > 1 and lines[-1].lstrip().startswith("-")
        if continues:
            lines[-1] += f" {text}"
        else:
            lines.append(f"  {text}")
    return "\n".join([*lines, ")\n"])


def script(plan: Plan) -> str:
    """A script that does what the launcher does, to paste or to pipe to bash."""
    output_dir = quoted(plan.output_dir)
    files = [f"mkdir -p {output_dir}\n"]
    if plan.ds_config:
        file = quoted(f"{plan.output_dir}/ds_config.json")
        files.append(f"cat >{file} <<'JSON'\n{ds_config_text(plan)}JSON\n")
    wandb_config = plan.environment.get("WANDB_SWEEP_PARAM_PATH", "")
    if wandb_config:
        files.append(f"echo 'wandb_version: 1' >{quoted(wandb_config)}\n")
    if not plan.python:  # an earlier version's
        return "".join([*files, arrays(plan), _command("torchrun")])
    places = f"OUTPUT_DIR={output_dir} NODE_RANK={plan.node} PYTHON={quoted(plan.python)}\n"
    return "".join([places, arrays(plan), END_OF_ARRAYS, *files, _command('"$PYTHON" -m torch.distributed.run')])


def _command(torchrun: str) -> str:
    return f'env "${{ENVIRONMENT[@]}}" {torchrun} "${{RENDEZVOUS[@]}}" "${{PROGRAM[@]}}" "${{ARGUMENTS[@]}}"\n'
