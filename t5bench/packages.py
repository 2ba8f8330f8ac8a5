"""The packages that stand alone: which module lies in which, and importing one where it may not be installed.

Nothing in this package imports them by an import statement: they know the harness, and it need not know them.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from t5bench import IS_CHECKOUT, REPOSITORY, Problem

# The folder in packages/ of what is imported by this name.
FOLDERS = {
    "t5bench_judge": "judge",
    "training_comparison": "judge",
    "t5bench_ledger": "ledger",
    "t5bench_evidence": "costmodel-evidence",
    "t5bench_prove": "prove",
    "t5bench_planner_page": "planner-page",
    "t5bench_verify": "verify",
    "gate_score": "gate-score",
}


def imported(name: str) -> ModuleType:
    """The module of this name. Raises Problem where its package, or one that it needs, is missing."""
    with missing_packages_named():
        return import_module(name)


@contextmanager
def missing_packages_named() -> Iterator[None]:
    """A package that this Python lacks is a Problem in this block, with what installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in FOLDERS:
            folder = FOLDERS[name]
            remedy = f"In a clone of this repository, run: pip install . packages/{folder}"
            raise Problem(f"this needs a package of its own, {folder}, which is not installed", remedy) from error
        remedy = "Install the package with its extra [train]: in a clone of the repository, pip install '.[train]'"
        if IS_CHECKOUT:
            remedy = f"Run: pip install -r '{REPOSITORY}/requirements.txt', or activate the environment that has it"
        raise Problem(f"{sys.executable} lacks a package: {error}", remedy) from error
