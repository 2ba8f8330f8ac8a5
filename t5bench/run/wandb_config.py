"""A run's configuration in W&B, for either engine: everything in its record when it starts.

W&B adds the content of the file in WANDB_SWEEP_PARAM_PATH to the configuration of the next run, in addition to what the
program passes; its agent passes a sweep's parameters in this way. Without a sweep's id the run belongs to no sweep.
WANDB_CONFIG_PATHS, which is meant for this, makes W&B 0.31 fail, because it does not parse the text as a list.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t5bench.record.files import write_whole

_OF_PLAN = ("engine", "engine_patches", "device", "layout", "ds_config")
_OF_PART = ("versions", "commits", "data")


def config(part: Mapping[str, Any]) -> dict[str, Any]:
    """What W&B shows of a node's part. The part has no secrets, because the recorder hides them."""
    plan = part["plan"]
    found = {"strategy": plan["strategy"]["name"], "title": plan["strategy"]["title"]}
    found |= {key: plan[key] for key in _OF_PLAN}
    found["settings"] = {name: setting["value"] for name, setting in plan["settings"].items()}
    return found | {key: part.get(key) for key in _OF_PART}


def write(path: Path, values: Mapping[str, Any]) -> bool:
    """Writes the values that are known; whether it could, which needs W&B. Raises OSError."""
    try:
        import yaml
    except ImportError:
        return False
    content = {"wandb_version": 1} | {key: {"value": value} for key, value in values.items() if value is not None}
    write_whole(path, yaml.safe_dump(content, sort_keys=False))
    return True
