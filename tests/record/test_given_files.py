"""What is no file, or no JSON object, is a Problem at once, for every reader of given files alike.

tests/docs/test_first_words.py lets every command meet two of these, and every night all.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from docs.first_words import make_files

from t5bench import Problem
from t5bench.given_files import read_json, read_object


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """A form that no file below has."""

    value: int


def read_as_form(path: Path, remedy: str) -> Any:
    return read_json(path, Nothing, remedy)


@pytest.mark.parametrize("read", [read_object, read_as_form], ids=["object", "form"])
def test_whatever_is_given_is_read_or_a_problem(tmp_path: Path, read: Callable[[Path, str], Any]):
    for file in make_files(tmp_path / "files"):
        began = time.monotonic()
        with pytest.raises(Problem) as caught:
            read(file, "Name another file")
        assert caught.value.remedy == "Name another file" and file.name in str(caught.value), file
        assert time.monotonic() - began < 5, file
    good = tmp_path / "good.json"
    good.write_text('{"value": 5}')
    assert read(good, "") in ({"value": 5}, Nothing(5))
