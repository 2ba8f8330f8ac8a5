"""What a run finds on its node: data, tokenizer, attention kernels and W&B."""

import contextlib
import json
import math
from itertools import accumulate, pairwise
from pathlib import Path

from t5bench import Problem
from t5bench.corpus.checksum import cached_tokenizer, describes, tokenizer_checksum
from t5bench.corpus.index import SPLIT, Index, command_for, lacks_validation, read_index, read_record, record_path
from t5bench.plan.draft import Draft
from t5bench.plan.families import family_of
from t5bench.plan.toolkit import import_fault
from t5bench.record import wandb
from t5bench.record.machine import installed_version
from t5bench.record.settings import DEFAULT_TOKENIZER

CORPUS = "xsum_text_document"


def check_data(draft: Draft, tokenizer: str) -> str:
    """The prefix of the indexed dataset, which must be complete and made with the run's tokenizer."""
    prefix = str(Path(draft.value("MEGATRON_DATA_DIR")) / CORPUS)
    try:
        index = read_index(prefix, draft.value("MODEL_FAMILY"))
        if family_of(draft).has_encoder and "--mask-prob" not in draft.given:
            _check_decoder_length(draft, index)
        if draft.number("EVAL_ITERS") and not draft.is_on("EVAL_ONLY"):
            lacking = lacks_validation(len(index.doc_idx) - 1, draft.given.get("--split", SPLIT))
            if lacking:
                draft.lack("validation", str(lacking), lacking.remedy)
        _check_tokenizer(draft, prefix, tokenizer)
        _check_vocabulary(draft, prefix)
    except Problem as problem:
        draft.lack("data", str(problem), problem.remedy)
    return prefix


def _check_vocabulary(draft: Draft, prefix: str) -> None:
    """A tokenizer with more words than MODEL has rows, which the engine would refuse once every process has begun."""
    words = read_record(Path(prefix)).get("vocabulary")
    model = draft.value("MODEL")
    rows = json.loads(model)["padded_vocabulary"] if model else None
    if isinstance(words, int) and rows and words > rows:
        found = f"the data's tokenizer has {words} words, and the model has rows for {rows}"
        draft.lack("vocabulary", found, "Prepare the data with the model's own tokenizer: TOKENIZER_MODEL")


def _check_decoder_length(draft: Draft, index: Index) -> None:
    """T5's decoder reads what is masked, with a sentinel before each span. The engines stop at the first sample that is
    too long for it, perhaps after hours."""
    encoder = draft.number("ENCODER_SEQ_LENGTH")
    decoder = draft.number("DECODER_SEQ_LENGTH")
    tokens = max(0, encoder - 2)  # room that the engines keep
    if _decoder_tokens(tokens) <= decoder:
        return
    ends = [0, *accumulate(index.sizes)]
    tokens = min(tokens, max(ends[end] - ends[begin] for begin, end in pairwise(index.doc_idx)))
    needed = _decoder_tokens(tokens)
    if needed > decoder:
        found = f"DECODER_SEQ_LENGTH={decoder} is too short for the data: with ENCODER_SEQ_LENGTH={encoder} they have "
        found += f"samples of {tokens} tokens, of which the decoder may get {needed} with sentinels"
        draft.lack("decoder-length", found, f"Set DECODER_SEQ_LENGTH={needed} or more, or a shorter encoder")


def _decoder_tokens(tokens: int) -> int:
    """What hardly one in a million samples of so many tokens exceeds. A span has 4.2 tokens on average, and the
    variance of their number is 0.13 times the masked tokens (measured for samples of 126 to 2,046 tokens)."""
    masked = 0.15 * tokens
    return 1 + int(masked + min(masked, masked / 4.2 + 5 * math.sqrt(0.13 * masked)))


def _check_tokenizer(draft: Draft, prefix: str, tokenizer: str) -> None:
    """Checks the tokenizer: with another one the same ids mean other words, and the run would still train.

    Raises Problem if the tokenizer cannot be read.
    """
    record = read_record(Path(prefix))
    file = record_path(Path(prefix))
    named = draft.value("TOKENIZER_MODEL") and f"TOKENIZER_MODEL='{tokenizer}' "
    # Without FORCE=1, which would replace the data with whatever source the command names, or the hub's.
    command = command_for(file.parent, draft.value("MODEL_FAMILY"), named)
    again = f"prepare the data again, with their source ({record.get('source', 'unknown')}) and FORCE=1: {command}"
    own = f"Set TOKENIZER_MODEL to that tokenizer or copy it to '{file.parent / 'tokenizer'}', or {again}"
    recorded = record.get("tokenizer_checksum")
    name = record.get("tokenizer")
    made = f"the data in {file.parent} were made with the tokenizer {name}, checksum {recorded}"
    directory = Path(tokenizer) if _exists(Path(tokenizer)) else cached_tokenizer(tokenizer)
    if not record and not directory and not draft.value("TOKENIZER_MODEL"):
        # torchrun would start, and every process ask the hub for a tokenizer that may be another one.
        alone = f"{prefix}.bin and .idx are here without {file.name} and tokenizer/, which were prepared with them"
        copy = "Copy these from the node that prepared the data, too (README, step 7)"
        remedy = f"{copy}. If there are none, name the data's tokenizer: TOKENIZER_MODEL={tokenizer}, for example"
        draft.lack("tokenizer", alone, remedy)
    elif not recorded:
        unknown = f"warning: {file} does not record the checksum of the data's tokenizer"
        draft.notes.append(f"{unknown}, so {tokenizer} cannot be compared with it. To compare them, {again}")
    elif not describes(record, prefix):
        found = f"{file} does not have the checksums of the {CORPUS}.bin and .idx next to it"
        draft.lack("data-record", found, f"Copy all data files together, or {again}")
    elif directory and (found := tokenizer_checksum(directory)) != recorded:
        draft.lack("tokenizer", f"{made}, but {tokenizer} has checksum {found}", own)
    elif not directory and tokenizer == name:
        absent = f"warning: the tokenizer {name}, which made the data, is not on this machine yet"
        draft.notes.append(f"{absent}, so the hub's current version is not checked. {own}")
    elif not directory:
        draft.lack("tokenizer", f"{made}, but {tokenizer} is not on this machine, so its checksum is unknown", own)


def choose_tokenizer(draft: Draft) -> str:
    """The tokenizer in TOKENIZER_MODEL, else the copy next to the data, else T5's from the hub."""
    name = draft.value("TOKENIZER_MODEL")
    beside = Path(draft.value("MEGATRON_DATA_DIR")) / "tokenizer"
    if name:
        named = Path(draft.directory, name).expanduser()
        return str(named) if _exists(named) else name
    has_own = beside.is_dir() or draft.value("MODEL_FAMILY") != "t5"
    return str(beside) if has_own else DEFAULT_TOKENIZER


def _exists(path: Path) -> bool:
    """Also for a name on the hub that is too long for a file."""
    with contextlib.suppress(OSError):
        return path.exists()
    return False


def tokenizer_type(draft: Draft, prefix: str) -> str:
    """The engine's name for the kind of the tokenizer that made the data."""
    record = read_record(Path(prefix))
    return record.get("tokenizer_type", "HFTokenizer") if record else family_of(draft).tokenizer_type


def choose_attention(draft: Draft, device: str) -> bool:
    """Whether the engine uses flash-attn, which supports only the decoder's self-attention."""
    wanted = draft.value("FLASH_ATTENTION")
    version = installed_version("flash_attn")
    if draft.value("ENGINE") == "native":
        draft.notes.append("attention: PyTorch scaled_dot_product_attention")
        return False
    reasons = {
        "FLASH_ATTENTION=off": wanted == "off",
        "flash-attn is not installed": not version,
        "fp32": not draft.value("PRECISION_FLAG"),
        "no CUDA": device != "cuda",
    }
    # The last question takes seconds.
    reason = next((reason for reason, holds in reasons.items() if holds), "") or import_fault("flash_attn")
    if reason and wanted == "on":
        found = f"FLASH_ATTENTION=on is not possible: {reason}"
        draft.lack("flash-attention", found, "FLASH_ATTENTION=auto falls back to standard attention")
    used = f"standard ({reason})" if reason else f"flash-attn {version} in {family_of(draft).flash}"
    draft.notes.append(f"attention: {used}")
    return not reason


def choose_wandb(draft: Draft) -> str:
    """W&B's mode."""
    try:
        mode = wandb.mode(draft.environ, draft.value("WANDB_MODE"))
    except Problem as problem:
        draft.refuse("setting-value", str(problem), problem.remedy)
        return "disabled"
    if mode == "offline" and not draft.value("WANDB_MODE"):
        runs = f"'{draft.value('OUTPUT_DIR')}'/wandb/offline-run-*"
        draft.notes.append(f"W&B: no WANDB_API_KEY, logging offline; upload later with: wandb sync {runs}")
    return mode
