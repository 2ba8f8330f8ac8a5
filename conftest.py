"""The fixtures of all tests: those of the harness in tests/, and those of each package beside its code."""

pytest_plugins = ("shared_fixtures",)
