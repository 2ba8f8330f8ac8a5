"""Whether a run is logged to Weights & Biases online."""

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit


def mode(environment: Mapping[str, str], mode: str = "") -> str:
    """online, offline or disabled: what is asked for, else online where there is a key, else offline."""
    if mode or environment.get("WANDB_API_KEY"):
        return mode or "online"
    host = urlsplit(environment.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    file = environment.get("NETRC") or str(Path(environment.get("HOME", os.sep)) / ".netrc")
    try:
        return "online" if netrc.netrc(file).authenticators(host) else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"
