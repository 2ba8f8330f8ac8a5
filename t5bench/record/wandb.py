"""Whether a run is sent to W&B, for the launchers and the reports; needs only the standard library."""

import netrc
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from t5bench import Problem

MODES = ("online", "offline", "disabled")
SERVER = "https://api.wandb.ai"


def mode(environment: Mapping[str, str], mode: str = "") -> str:
    """One of MODES: the given one, else WANDB_MODE, else online with a key and offline without.

    A key is in WANDB_API_KEY, or in the netrc file for the server (with its port) of WANDB_BASE_URL, where W&B looks
    too. Raises Problem for another mode.
    """
    chosen = mode or environment.get("WANDB_MODE") or ("online" if environment.get("WANDB_API_KEY") else "")
    if chosen and chosen not in MODES:
        raise Problem(f"WANDB_MODE is '{chosen}'", f"Set it to one of: {' '.join(MODES)}")
    file = environment.get("NETRC") or Path(environment.get("HOME") or "~", ".netrc")
    server = urlsplit(environment.get("WANDB_BASE_URL") or SERVER).netloc
    try:
        account = None if chosen else netrc.netrc(Path(file).expanduser()).authenticators(server)
    except (OSError, ValueError, RuntimeError, netrc.NetrcParseError):  # W&B cannot read it either
        account = None
    return chosen or ("online" if account and account[2] else "offline")
