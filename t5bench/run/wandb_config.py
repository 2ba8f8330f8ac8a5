"""A run's configuration in W&B, for either engine: all that its record says when it starts.

W&B adds what stands in the file that WANDB_SWEEP_PARAM_PATH names to the configuration of the next run, whatever the
program gives it; its agent passes a sweep's parameters in this way. Without a sweep's id the run belongs to no sweep.
WANDB_CONFIG_PATHS, which would be meant for this, stops W&B 0.31: it does not take its text for a list.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "WANDB_SWEEP_PARAM_PATH"
KEYS = (
    "strategy", "title", "engine", "engine_patches", "device", "settings", "layout", "ds_config", "versions", "commits",
    "data",
)  # fmt: skip


def write(path: Path, part: Mapping[str, Any]) -> bool:
    """Writes those of KEYS that a node's part has; whether it could, which is so wherever W&B is installed.

    Raises OSError. The part has no secrets: the recorder hides them.
    """
    try:
        import yaml
    except ImportError:
        return False
    content = {"wandb_version": 1} | {key: {"value": part[key]} for key in KEYS if part.get(key) is not None}
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(yaml.safe_dump(content, sort_keys=False))
    beside.replace(path)
    return True
