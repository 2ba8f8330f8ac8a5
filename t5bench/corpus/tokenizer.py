"""T5 tokenizers: from a directory or the hub, and the ids that they give to documents."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from t5bench import Problem
from t5bench.corpus import common
from t5bench.corpus.checksum import CONFIG, DEFAULTS, PIECES

TOKENIZER_FILES = [PIECES, CONFIG, "special_tokens_map.json", "added_tokens.json", "tokenizer.json", "config.json"]
# Upstream's tool gives a tokenizer what it lacks of these; T5's lacks a beginning of sequence.
UPSTREAM_SPECIALS = {"pad_token": "[PAD]", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
NAME_A_T5 = "Name a T5 tokenizer in TOKENIZER_MODEL, for example google-t5/t5-large"
# Megatron's own limit for 16-bit token ids; it leaves some room below 65536.
UINT16_VOCABULARY_LIMIT = 65500
# Compared once with the tokenizer before SentencePiece is trusted to speak for it.
PROBES = (
    "The price rose by 12.5% in Q3, to $1,234 (see page 7); nobody's happy.",
    "  Two  spaces,\na line\tand a tab ",
    "na\u00efve caf\u00e9, \ufb01ne, \u6771\u4eac, \U0001f600 \u2581 x",
    "",
)


class DocumentEncoder:
    """Token ids as Megatron's own tool gets them from transformers' slow tokenizer, mostly from SentencePiece itself.

    SentencePiece alone takes about a tenth of the tokenizer's time. The tokenizer is left with what it treats
    specially: documents that contain the text of a special token such as `</s>`, `<s>` or `<extra_id_0>`.

    vocabulary: number of ids, sentinels and `<s>` included. dtype: numpy's name of an id's type in the dataset.
    exact: whether SentencePiece is used at all.
    """

    def __init__(self, directory: Path) -> None:
        """directory: of a T5 tokenizer with its spiece.model. Raises Problem when it is not one."""
        self._pieces, self._tokenizer = _load(directory)
        self._eos: int = self._tokenizer.eos_token_id
        specials = sorted(self._tokenizer.added_tokens_encoder)
        self._special = re.compile("|".join(map(re.escape, specials)))
        self.vocabulary = len(self._tokenizer)
        self.dtype = "uint16" if self.vocabulary < UINT16_VOCABULARY_LIMIT else "int32"
        # Without `legacy`, the tokenizer treats leading blanks and U+2581 in its own way.
        self.exact = getattr(self._tokenizer, "legacy", True) is not False and all(
            self._plain([probe])[0].tolist() == self._tokenizer.encode(probe) for probe in PROBES
        )

    def has_special_text(self, text: str) -> bool:
        """Whether the text contains the text of a special token."""
        return self._special.search(text) is not None

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int32, `</s>` at the end of each."""
        special = {i for i, text in enumerate(texts) if not self.exact or self.has_special_text(text)}
        ids = self._plain(["" if i in special else text for i, text in enumerate(texts)])
        for i in special:
            ids[i] = np.array(self._special_case(texts[i]), np.int32)
        return ids

    def _special_case(self, text: str) -> list[int]:
        # The slow tokenizer adds no second `</s>` to a text that ends in one; transformers 5 would.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids if ids[-1:] == [self._eos] else [*ids, self._eos]

    def _plain(self, texts: list[str]) -> list[np.ndarray]:
        return self._pieces.encode(texts, return_type="numpy", add_eos=True, num_threads=1)


def _load(directory: Path) -> tuple[Any, Any]:
    """SentencePiece's processor and transformers' tokenizer."""
    # Without its PyTorch models transformers loads in one second, not in four; release 5 has no such choice.
    os.environ.setdefault("USE_TORCH", "0")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import sentencepiece
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(directory / PIECES))
        tokenizer = AutoTokenizer.from_pretrained(directory, use_fast=False, local_files_only=True)
    except Exception as error:
        # A broken directory shows in many ways.
        raise Problem(f"{directory} cannot be loaded as a tokenizer ({common.one_line(error)})", NAME_A_T5) from error
    if "<extra_id_0>" not in tokenizer.added_tokens_encoder or tokenizer.eos_token_id is None:
        lacks = "it lacks <extra_id_0> or an end-of-sequence token"
        raise Problem(f"{directory} is not a T5 tokenizer: {lacks}", NAME_A_T5)
    lacking = {name: token for name, token in UPSTREAM_SPECIALS.items() if getattr(tokenizer, name) is None}
    tokenizer.add_special_tokens(lacking)
    return pieces, tokenizer


def find_tokenizer(name: str) -> Path:
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
    if not (directory / PIECES).is_file():
        raise Problem(f"{name} has no spiece.model, so it is not a SentencePiece T5 tokenizer", NAME_A_T5)
    return directory


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer's files into the new directory `target`, complete enough to be loaded from there alone."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    path = target / CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not DEFAULTS.keys() <= config.keys():
        path.write_text(json.dumps(DEFAULTS | config, indent=2) + "\n", encoding="utf-8")


@contextmanager
def hub(what: str, remedy: str) -> Iterator[Any]:
    """The huggingface_hub package; what goes wrong with it becomes a Problem that says why `what` did not come."""
    import huggingface_hub
    from huggingface_hub import constants, errors, utils

    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    try:
        yield huggingface_hub
    except Exception as error:
        # Network, hub and cache errors have no common base class.
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        elif isinstance(error, errors.RepositoryNotFoundError):
            why = "it does not exist, or it is not public"
        elif isinstance(error, errors.HfHubHTTPError):
            why = common.one_line(error)
        else:
            why = f"{constants.ENDPOINT} does not answer: {common.one_line(error)}"
        raise Problem(f"{what} could not be fetched from the Hugging Face hub ({why})", remedy) from error
