"""A run's configuration in W&B, for either engine: all that its record says when it starts.

W&B adds the content of the file that WANDB_SWEEP_PARAM_PATH names to the configuration of the next run, whatever the
program gives it; its agent passes a sweep's parameters in this way. Without a sweep's id the run belongs to no sweep.
WANDB_CONFIG_PATHS, which would be meant for this, stops W&B 0.31: it does not take its text for a list.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t5bench.record.files import write_whole

_OF_PLAN = ("engine", "engine_patches", "device", "layout", "ds_config")
_OF_PART = ("versions", "commits", "data")


def config(part: Mapping[str, Any]) -> dict[str, Any]:
    """What W&B shows of a node's part, which has no secrets: the recorder hides them."""
    plan = part["plan"]
    found = {"strategy": plan["strategy"]["name"], "title": plan["strategy"]["title"]}
    found |= {key: plan[key] for key in _OF_PLAN}
    found["settings"] = {name: setting["value"] for name, setting in plan["settings"].items()}
    return found | {key: part.get(key) for key in _OF_PART}


def write(path: Path, values: Mapping[str, Any]) -> bool:
    """Writes those of the values that are known; whether it could, which is so wherever W&B is installed.

    Raises OSError.
    """
    try:
        import yaml
    except ImportError:
        return False
    content = {"wandb_version": 1} | {key: {"value": value} for key, value in values.items() if value is not None}
    write_whole(path, yaml.safe_dump(content, sort_keys=False))
    return True
