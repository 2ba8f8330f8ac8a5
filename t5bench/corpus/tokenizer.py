"""Tokenizers from a directory or the hub, and the ids of documents."""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from t5bench import Problem
from t5bench.corpus.checksum import CONFIG, DEFAULTS, PIECES, VOCABULARIES
from t5bench.imports import FASTER_TRANSFORMERS

GPT2_FILES = ("vocab.json", "merges.txt")
OTHER_FILES = ["tokenizer.json", CONFIG, "special_tokens_map.json", "added_tokens.json", "config.json"]
TOKENIZER_FILES = VOCABULARIES + OTHER_FILES
# Upstream's tool adds those that a tokenizer lacks.
UPSTREAM_SPECIALS = {"pad_token": "[PAD]", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
NAME_ANOTHER = {
    "t5": "Set TOKENIZER_MODEL to a T5 tokenizer, for example google-t5/t5-large",
    "gpt": "Set another TOKENIZER_MODEL, or unset it to use GPT-2's from the engine's checkout",
}
# Megatron's own limit for 16-bit token ids; it leaves some room below 65536.
UINT16_VOCABULARY_LIMIT = 65500
# Texts on which SentencePiece must agree with the tokenizer before it is used instead.
PROBES = [
    "The price rose by 12.5% in Q3, to $1,234 (see page 7); nobody's happy.",
    "  Two  spaces,\na line\tand a tab ",
    "na\u00efve caf\u00e9, \ufb01ne, \u6771\u4eac, \U0001f600 \u2581 x",
    "It'LL cost 1234567 \u00bd\u2167 e\u0301\r\n\n  _x_  ",
    "",
]
# What Unicode counts as white space, as the engine's `regex` does; Python's `re` has four characters more.
WHITE = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
GPT2_WORD = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# Pieces that BytePairs keeps, at about 200 bytes each.
MOST_PIECES = 1 << 18
LONGEST_PIECE = 32
MOST_SPECIAL_TOKENS = 1000


def one_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__


class BytePairs(dict[str, bytes]):
    """GPT-2's byte-level BPE, and `end` after each document that has tokens.

    No token reaches beyond a piece of text, a word with the white space before it, and most pieces have come before:
    this holds their ids, int32. Looking them up takes a tenth of the time.
    """

    def __init__(self, directory: Path, end: int) -> None:
        import regex
        from tokenizers import Tokenizer, models, pre_tokenizers

        vocabulary, merges = (str(directory / name) for name in GPT2_FILES)
        self._bpe = Tokenizer(models.BPE.from_file(vocabulary, merges))
        self._bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._end = np.int32(end).tobytes()
        self._words = regex.compile(GPT2_WORD)
        self._pieces = re.compile(f"[{WHITE}]*[^{WHITE}]+|[{WHITE}]+")

    def __missing__(self, piece: str) -> bytes:
        tokens: list[int] = []
        for word in self._words.findall(piece):
            tokens += self._bpe.encode(word).ids
        ids = np.array(tokens, np.int32).tobytes()
        if len(self) < MOST_PIECES and len(piece) <= LONGEST_PIECE:
            self[piece] = ids
        return ids

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        documents = []
        for text in texts:
            ids = b"".join(map(self.__getitem__, self._pieces.findall(text)))
            if ids:
                ids += self._end
            documents.append(np.frombuffer(ids, np.int32))
        return documents


class DocumentEncoder:
    """Token ids as Megatron's own tool gets them from its tokenizer, in about a tenth of the time where possible.

    Its GPT2BPETokenizer, of a directory that has nothing but GPT-2's two files, is GPT-2's byte pairs alone. Its
    HFTokenizer is transformers' slow tokenizer, for which SentencePiece or BytePairs speak, but not in documents with
    the text of a special token such as `</s>` or `<s>`.
    """

    kind: str
    """The engine's name of the tokenizer."""
    vocabulary: int
    """The number of ids, sentinels and `<s>` included."""
    dtype: str
    """numpy's name of an id's type in the dataset."""
    exact: bool
    """Whether another way than transformers' is taken at all."""

    def __init__(self, directory: Path, family: str = "t5") -> None:
        """family: t5, whose tokenizers end each document with `</s>`, or gpt, whose end of text is appended.

        Raises anything when the directory is not the tokenizer of such a family: see readable().
        """
        files = {path.name for path in directory.iterdir()}.intersection(TOKENIZER_FILES)
        self._is_t5 = family == "t5"
        if files == set(GPT2_FILES):
            self._use_byte_pairs(directory)
        else:
            self._use_transformers(directory, family, files)
        self.dtype = "uint16" if self.vocabulary < UINT16_VOCABULARY_LIMIT else "int32"

    def _use_byte_pairs(self, directory: Path) -> None:
        """Raises ValueError for a directory of which a file is incomplete."""
        vocabulary = json.loads((directory / "vocab.json").read_bytes())
        merges_path = directory / "merges.txt"
        merges = merges_path.read_text(encoding="utf-8").splitlines()
        merged = {"".join(line.split()) for line in merges}
        # Special tokens have no merge either.
        lost = {token for token in vocabulary if len(token) > 1} - merged
        if len(lost) > MOST_SPECIAL_TOKENS:
            reason = f"{len(lost)} tokens of the vocabulary have no merge"
            raise ValueError(f"{merges_path.name} is incomplete: {reason}")
        self.kind = "GPT2BPETokenizer"
        self.exact = True
        self.vocabulary = len(vocabulary)
        self._special = None
        self._fast = BytePairs(directory, vocabulary["<|endoftext|>"]).encode

    def _use_transformers(self, directory: Path, family: str, files: Collection[str]) -> None:
        self.kind = "HFTokenizer"
        self.exact = False
        self._tokenizer = load_tokenizer(directory, family)
        self.vocabulary = 1 + max(self._tokenizer.get_vocab().values())
        self._special = re.compile("|".join(map(re.escape, sorted(self._tokenizer.added_tokens_encoder))))
        self._end = self._tokenizer.eos_token_id
        self._fast = None
        if PIECES in files:
            import sentencepiece

            pieces = sentencepiece.SentencePieceProcessor(model_file=str(directory / PIECES))
            self._fast = partial(pieces.encode, return_type="numpy", add_eos=True, num_threads=1)
        elif files.issuperset(GPT2_FILES):
            self._fast = BytePairs(directory, self._end).encode
        # Without `legacy`, the tokenizer treats leading blanks and U+2581 in its own way.
        is_legacy = getattr(self._tokenizer, "legacy", True) is not False
        if self._fast and is_legacy:
            fast_ids = [ids.tolist() for ids in self._fast(PROBES)]
            self.exact = fast_ids == [self._slowly(text) for text in PROBES]

    def has_special_text(self, text: str) -> bool:
        """Whether the text contains the text of a special token."""
        return self._special is not None and self._special.search(text) is not None

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, int32, with the end of the document."""
        if not self.exact:
            return [np.array(self._slowly(text), np.int32) for text in texts]
        are_special = [self.has_special_text(text) for text in texts]
        fast_texts = ["" if is_special else text for text, is_special in zip(texts, are_special, strict=True)]
        ids = list(self._fast(fast_texts))
        for number, is_special in enumerate(are_special):
            if is_special:
                ids[number] = np.array(self._slowly(texts[number]), np.int32)
        return ids

    def _slowly(self, text: str) -> list[int]:
        if not self._is_t5:
            ids = self._tokenizer.encode(text)
            return [*ids, self._end] if ids else []
        # The slow tokenizer adds no second `</s>` to a text that ends in one; transformers 5 would.
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return ids if ids[-1:] == [self._end] else [*ids, self._end]


def load_tokenizer(name: str | Path, family: str = "t5") -> Any:
    """transformers' tokenizer of a directory or of the hub, with what the engine adds to it. See readable()."""
    os.environ.update(FASTER_TRANSFORMERS | os.environ)
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(name, use_fast=False, local_files_only=Path(name).is_dir())
    if isinstance(tokenizer, bool):  # its answer to a file that is no SentencePiece model
        raise TypeError(f"{PIECES} is damaged")
    if family == "t5" and ("<extra_id_0>" not in tokenizer.added_tokens_encoder or tokenizer.eos_token_id is None):
        raise ValueError("it lacks <extra_id_0> or an end-of-sequence token")
    lacking = {name: token for name, token in UPSTREAM_SPECIALS.items() if getattr(tokenizer, name) is None}
    tokenizer.add_special_tokens(lacking)
    return tokenizer


@contextmanager
def readable(name: str, family: str = "t5") -> Iterator[None]:
    """Makes a Problem of whatever a damaged tokenizer raises."""
    try:
        yield
    except Exception as error:
        problem = f"{name} cannot be loaded as a tokenizer ({one_line(error)})"
        raise Problem(problem, NAME_ANOTHER[family]) from error


def find_tokenizer(name: str, family: str = "t5") -> Path:
    """The directory of a tokenizer: `name` itself, or where the hub's files of that name are now.

    Raises Problem when there is no such tokenizer, or when the hub is needed and does not answer.
    """
    directory = Path(name)
    if not directory.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise Problem(f"there is no tokenizer directory {name}", "Correct TOKENIZER_MODEL")
        remedy = "Check the name and the network, or set TOKENIZER_MODEL to a directory that holds its files"
        with hub(f"the tokenizer {name}", remedy) as client:
            directory = Path(client.snapshot_download(name, allow_patterns=TOKENIZER_FILES))
    if family == "t5" and not (directory / PIECES).is_file():
        raise Problem(f"{name} has no {PIECES}, so it is not a SentencePiece T5 tokenizer", NAME_ANOTHER[family])
    return directory


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies a tokenizer's files into the directory `target`, so that it can be loaded from there alone.

    The engine's checkout has GPT-2's two files with `gpt2-` before their names.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for name in TOKENIZER_FILES:
        for path in (source / name, source / f"gpt2-{name}"):
            if path.is_file():
                shutil.copyfile(path, target / name)
                break
    config_path = target / CONFIG
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
    if (target / PIECES).exists() and not DEFAULTS.keys() <= config.keys():
        config_path.write_text(json.dumps(DEFAULTS | config, indent=2) + "\n", encoding="utf-8")


@contextmanager
def hub(what: str, remedy: str) -> Iterator[Any]:
    """The huggingface_hub package; its errors become a Problem that says why `what` could not be fetched."""
    import huggingface_hub
    from huggingface_hub import constants, errors, utils

    # They would steer the terminal with the names of files.
    utils.disable_progress_bars()
    try:
        yield huggingface_hub
    except Exception as error:  # network, hub and cache errors have no common base class
        why = f"{constants.ENDPOINT}: {one_line(error)}"
        if isinstance(error, errors.RepositoryNotFoundError):
            why = "it does not exist, or it is not public"
        raise Problem(f"cannot fetch {what} from the Hugging Face hub ({why})", remedy) from error
