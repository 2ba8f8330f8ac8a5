"""Variables of the environment that are no settings, but look as if they were meant to be one.

A misspelt setting would be ignored without a word, and its default used. The environment also belongs to others, whose
variables may resemble ours, so this only warns, and only of a near miss: a letter too many, too few or elsewhere,
another case, a word that is missing at the end.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping

from t5bench.plan.scripts import SCRIPTS
from t5bench.record.settings import BY_NAME

# What the launchers read beside their settings (scripts/common.sh), and what tests and torchrun call so.
_READ_TOO = {"MASTER_ADDR", "NODE_RANK", "GPUS_PER_NODE", "WORLD_SIZE", "LOCAL_RANK"}
# Of twelve letters, one or two may differ. Two names of one program differ in more.
_NEAR = 0.88
_SHORTEST = 6  # letters; HOST is one of every shell, and no slip of HOSTS
_LONG = 8  # letters of a single word that is a setting's first
# What people who know other launchers put before a setting's name.
_PREFIXES = ("T5_", "T5BENCH_", "MEGATRON_", "NATIVE_")
# Set by a script that has told all of this.
TOLD = "T5_SETTINGS_TOLD"


def settings_read_by(script: str) -> set[str]:
    """The settings that a script reads, or passes on to the launchers that it starts. "" stands for a launcher."""
    if not script:
        return set(BY_NAME)
    own = {declaration.name for declaration in SCRIPTS[script]}
    return own | set(BY_NAME) if "RUNS_DIR" in own else own


def warnings_of_misspelt(environ: Mapping[str, str], settings: Collection[str]) -> list[str]:
    """A sentence for each variable that looks like one of the settings, which is not set itself."""
    known = {*BY_NAME, *_READ_TOO}.union(*({entry.name for entry in entries} for entries in SCRIPTS.values()))
    warnings = []
    for name, value in sorted(environ.items()):
        if name in known or not value:
            continue
        meant = next((setting for setting in _near(name, settings) if not environ.get(setting)), "")
        if meant:
            said = "is ignored: there is no such setting, but there is"
            warnings.append(f"warning: {name}='{value[:40]}' {said} {meant}")
    return warnings


def _near(name: str, settings: Iterable[str]) -> list[str]:
    """The settings that the name may be a slip of, the nearest first."""
    of_case = [setting for setting in settings if setting == name.upper()]
    if of_case:
        return of_case
    if len(name) < _SHORTEST:
        return []
    of_words = [setting for setting in settings if "_" in setting]
    near = [setting for setting in of_words if setting.replace("_", "") == name.upper().replace("_", "")]
    # A word more makes another name: MEGATRON_LM_DIR.
    as_many_words = [setting for setting in of_words if setting.count("_") >= name.count("_")]
    near += difflib.get_close_matches(name, as_many_words, n=1, cutoff=_NEAR)
    prefixed = {f"{prefix}{setting}": setting for prefix in _PREFIXES for setting in of_words}
    if name in prefixed:
        near.append(prefixed[name])
    if "_" in name or len(name) >= _LONG:
        near += sorted(setting for setting in of_words if setting.startswith(f"{name}_"))
    # Of a single word a letter more makes another word: DEVICES.
    slips = {f"{name}S", f"{name[:-1]}IES"}
    single = [setting for setting in settings if "_" not in setting]
    near += [setting for setting in single if sorted(setting) == sorted(name) or setting in slips]
    return near
