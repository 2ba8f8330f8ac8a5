"""Importing another project's package from where the reader has it."""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def imported_from(checkout: Path, name: str) -> ModuleType:
    """A module of a package that lies in the checkout. Raises ImportError and OSError."""
    package = name.partition(".")[0]
    if package not in sys.modules:
        directory = checkout / package
        if directory.is_dir() and not (directory / "__init__.py").exists():
            namespace = ModuleType(package)
            namespace.__path__ = [str(directory)]
            sys.modules[package] = namespace
            return import_module(name)
        spec = spec_from_file_location(package, directory / "__init__.py", submodule_search_locations=[str(directory)])
        if not spec or not spec.loader:
            raise ImportError(f"{directory} is no package")
        module = module_from_spec(spec)
        sys.modules[package] = module
        spec.loader.exec_module(module)
    return import_module(name)
