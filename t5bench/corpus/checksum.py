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

CHECKSUMS, DIGITS = Path("~/.cache/t5-parallelism/checksums"), 64
PIECES, CONFIG = "spiece.model", "tokenizer_config.json"
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
    digest = hashlib.sha256()
    files = [directory / name for name in VOCABULARIES if (directory / name).exists()]
    try:
        for path in files:
            digest.update(b"" if path.name == PIECES else path.name.encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        # The library of release 5 reads the last one.
        for name in (CONFIG, "special_tokens_map.json", "added_tokens.json", "tokenizer.json"):
            path = directory / name
            content = json.loads(path.read_bytes()) if path.exists() else {}
            if name == CONFIG:
                content = content if files and files[0].name != PIECES else DEFAULTS | content
                content = {key: value for key, value in content.items() if key not in _NOT_OF_THE_IDS}
            if content:
                digest.update(json.dumps([name, content], sort_keys=True).encode())
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise Problem(f"cannot read the tokenizer in {directory}: {error}", "Copy or download it again") from None
    if not files and not (directory / "tokenizer.json").exists():
        raise Problem(f"{directory} has neither {PIECES} nor another tokenizer file", "Set another TOKENIZER_MODEL")
    return digest.hexdigest()


def cached_tokenizer(name: str) -> Path | None:
    """The directory with the hub's files of that name on this machine; None if they are not here."""
    variables = ("TRANSFORMERS_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = next(filter(None, map(os.environ.get, variables)), None) or Path(home, "hub")
    repository = Path(os.path.expandvars(cache)).expanduser() / f"models--{name.replace('/', '--')}"
    try:
        found = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return found if any((found / name).exists() for name in (*VOCABULARIES, "tokenizer.json")) else None


def describes(record: Mapping[str, Any], prefix: str) -> bool:
    """Whether a dataset's record has the checksums of the files `<prefix>.bin` and `<prefix>.idx`."""
    try:
        return all(_digest(path) == record["files"][path.name]["sha256"] for path in dataset_paths(prefix))
    except (OSError, LookupError, TypeError):
        return False


def _digest(path: Path) -> str:
    """The file's sha256, which takes a second per GB and is therefore remembered until the file changes."""
    status, kept = path.stat(), None
    place = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # no home directory, or none that can be written
        kept = CHECKSUMS.expanduser() / "-".join(map(str, place))
        if len(known := kept.read_text()) == DIGITS:
            return known
    with path.open("rb") as file:
        found = digest(file)
    with contextlib.suppress(OSError):
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(found)
    return found
