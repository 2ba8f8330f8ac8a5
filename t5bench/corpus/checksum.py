"""The checksum of a tokenizer, wherever its files are, over everything that decides the ids of a text.

Launchers compute it before every run, so nothing heavy is imported.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t5bench import Problem, digest
from t5bench.corpus.index import dataset_paths
from training_comparison.given_files import open_file, read_file

CHECKSUMS = Path("~/.cache/t5-parallelism/checksums")
DIGITS = 64  # of a sha256 in hexadecimal
PIECES = "spiece.model"
CONFIG = "tokenizer_config.json"
MOST_BYTES_OF_A_TOKENIZER = 1 << 28  # of one of its files
VOCABULARIES = [PIECES, "tokenizer.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt"]
# Values that hub repositories leave to the model's config.json and to the library's defaults.
DEFAULTS = {"tokenizer_class": "T5Tokenizer", "legacy": True}
# These do not affect a document's ids: names and places, a length to which nothing is truncated, decoding, chats.
_NOT_OF_THE_IDS = {
    "model_max_length", "name_or_path", "tokenizer_file", "vocab_file", "special_tokens_map_file", "chat_template",
    "clean_up_tokenization_spaces", "transformers_version", "padding_side", "truncation_side", "model_input_names",
}  # fmt: skip


def tokenizer_checksum(directory: Path) -> str:
    """The sha256 in hexadecimal. Raises Problem for a directory without a tokenizer."""
    checksum = hashlib.sha256()
    vocabularies = [directory / name for name in VOCABULARIES if (directory / name).is_file()]
    try:
        for path in vocabularies:
            checksum.update(b"" if path.name == PIECES else path.name.encode())
            checksum.update(hashlib.sha256(read_file(path, most=MOST_BYTES_OF_A_TOKENIZER)).digest())
        # The library of release 5 reads the last one.
        for name in (CONFIG, "special_tokens_map.json", "added_tokens.json", "tokenizer.json"):
            path = directory / name
            content = json.loads(read_file(path, most=MOST_BYTES_OF_A_TOKENIZER)) if path.is_file() else {}
            if name == CONFIG:
                is_sentencepiece = not vocabularies or vocabularies[0].name == PIECES
                content = _deciding(content, is_sentencepiece)
            if content:
                checksum.update(json.dumps([name, content], sort_keys=True).encode())
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        problem = f"cannot read the tokenizer in {directory}: {error}"
        raise Problem(problem, "Copy or download it again") from None
    if not vocabularies and not (directory / "tokenizer.json").is_file():
        problem = f"{directory} has neither {PIECES} nor another tokenizer file"
        raise Problem(problem, "Set another TOKENIZER_MODEL")
    return checksum.hexdigest()


def _deciding(config: dict[str, Any], is_sentencepiece: bool) -> dict[str, Any]:
    """What of tokenizer_config.json decides the ids."""
    content = DEFAULTS | config if is_sentencepiece else config
    return {key: value for key, value in content.items() if key not in _NOT_OF_THE_IDS}


def cached_tokenizer(name: str) -> Path | None:
    """The directory with the hub's files of that name on this machine; None if they are not here."""
    repository = _hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / revision
    is_tokenizer = any((snapshot / file).exists() for file in (*VOCABULARIES, "tokenizer.json"))
    return snapshot if is_tokenizer else None


def _hub_cache() -> Path:
    """Where the hub's library keeps what it downloads."""
    for variable in ("TRANSFORMERS_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        cache = os.environ.get(variable)
        if cache:
            break
    else:
        cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        cache = Path(os.environ.get("HF_HOME") or Path(cache_home, "huggingface"), "hub")
    return Path(os.path.expandvars(cache)).expanduser()


def describes(record: Mapping[str, Any], prefix: str) -> bool:
    """Whether a dataset's record has the checksums of the files `<prefix>.bin` and `<prefix>.idx`."""
    try:
        for path in dataset_paths(prefix):
            if _digest(path) != record["files"][path.name]["sha256"]:
                return False
    except (OSError, LookupError, TypeError, Problem):
        return False
    return True


def _digest(path: Path) -> str:
    """The file's sha256, which takes a second per GB and is therefore remembered until the file changes."""
    status = path.stat()
    # Writing to a file, replacing it or restoring its time changes one of these.
    state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    remembered = None
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # no home directory, or none that can be read
        remembered = CHECKSUMS.expanduser() / "-".join(map(str, state))
        known = remembered.read_text()
        if len(known) == DIGITS:
            return known
    with open_file(path) as file:
        checksum = digest(file)
    if remembered:
        with contextlib.suppress(OSError):
            remembered.parent.mkdir(parents=True, exist_ok=True)
            remembered.write_text(checksum)
    return checksum
