"""Every field of a record's parts, changed alone and sealed again: something else tells it, or it is named here."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tampering import make_pristine

from t5bench.record import files, records
from t5bench.record.files import RecordError
from t5bench.record.settings import BY_NAME, OneOf
from t5bench_verify.pack import examined

Address = tuple[str | int, ...]
# RELATIONS.md has them in words. MODEL_PRESET is told by its sizes where these were not chosen.
NOTHING_ELSE_TELLS_IT = re.compile(
    r"pid|kernel|oom_kills|cpu\..*|devices\..*|network\..*\.speed_mbit|versions\..*|commits\..*|patches|environment|"
    r"data\.(bin_bytes|idx_sha256)|plan\.(notes|ledger|hosts|master_address|engine_directory)|"
    r"plan\.strategy\.(title|colour|families|engines|ds_config)|"
    r"plan\.settings_by_role\.\w+\.(MODEL_PRESET|MEGATRON_DIR|WANDB_MODE)"
)


def leaves(value: Any, address: Address = ()) -> Iterator[tuple[Address, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not inner or not value:
        yield address, value
    for key, entry in inner:
        yield from leaves(entry, (*address, key))


def another_setting(name: str, value: str) -> str:
    """A value that the setting may have."""
    kind = BY_NAME[name].kind
    if isinstance(kind, OneOf):
        return next(choice for choice in kind.choices if choice != value)
    if value.isdigit():
        return str(int(value) + 1)
    return f"{value}7"


def another(address: Address, value: Any) -> Any:
    if address[-1] in BY_NAME:
        return another_setting(str(address[-1]), value)
    if isinstance(value, bool):
        return not value
    if value is None or isinstance(value, int | float):
        return (value or 0) + 1
    if isinstance(value, str):
        return f"{value}x"
    return ["x"] if isinstance(value, list) else {"x": "1"}


def changed(content: Any, address: Address) -> Any:
    copy = json.loads(json.dumps(content))
    place = copy
    for key in address[:-1]:
        place = place[key]
    place[address[-1]] = another(address, place[address[-1]])
    return copy


def is_noticed(run: Path) -> bool:
    try:
        _, damaged, faults = examined([run])
    except RecordError:
        return True
    return bool(damaged or faults)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pristine(tmp_path_factory.mktemp("honest"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["native", "zero1", "gpus"])
def test_every_field_is_told_again_or_named(pristine: Path, tmp_path: Path, name: str):
    run = tmp_path / name
    shutil.copytree(pristine / name, run)
    assert not is_noticed(run)
    silent = set()
    fields = 0
    for path in sorted(run.glob("node*.json")):
        honest = json.loads(path.read_text())
        for address, _ in leaves(honest):
            path.write_text(json.dumps(changed(honest, address)))
            files.seal(run, honest["node"], honest["nnodes"])
            try:
                records.write_run(run)
                noticed = is_noticed(run)
            except (RecordError, KeyError, TypeError, ValueError):
                noticed = True
            fields += 1
            if not noticed:
                silent.add(".".join(str(key) for key in address if isinstance(key, str)))
        path.write_text(json.dumps(honest))
        files.seal(run, honest["node"], honest["nnodes"])
        records.write_run(run)
    assert fields > 200
    assert not {field for field in silent if not NOTHING_ELSE_TELLS_IT.fullmatch(field)}
