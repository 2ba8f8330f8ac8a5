"""Leaves out nightly tests unless NIGHTLY=1, also where these tests run without the repository around them."""

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "1" in (os.environ.get("NIGHTLY"), os.environ.get("LONG_TESTS")):
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    if nightly:
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]
