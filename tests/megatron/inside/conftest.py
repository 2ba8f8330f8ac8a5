"""Starts the engine in the process that runs the other files of this folder."""

from argparse import Namespace

import pytest
from started_engine import set_arguments


@pytest.fixture(scope="session", autouse=True)
def args(tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    """The started engine's arguments; its data are this process's own."""
    # The tests' own process, which does not have the engine, reads this file too.
    from megatron import get_args
    from megatron.initialize import initialize_megatron

    set_arguments(tmp_path_factory.mktemp("data"))
    initialize_megatron(args_defaults={})
    return get_args()
