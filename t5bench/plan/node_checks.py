"""What a run finds on its node: data, tokenizer, attention kernels and its own directory."""

import contextlib
import json
import math
import re
import shlex
import socket
import stat
from itertools import accumulate, pairwise
from pathlib import Path

from t5bench import Problem
from t5bench.corpus.checksum import cached_tokenizer, describes, tokenizer_checksum
from t5bench.corpus.index import SPLIT, Index, command_for, lacks_validation, read_index, read_record, record_path
from t5bench.plan import run_lock, shared_facts
from t5bench.plan.draft import Draft
from t5bench.plan.families import family_of
from t5bench.plan.toolkit import import_fault
from t5bench.record.command_script import ds_config_text
from t5bench.record.files import RecordError, read
from t5bench.record.machine import installed_version
from t5bench.record.plan import Plan, by_name
from t5bench.record.settings import DEFAULT_TOKENIZER
from t5bench.record.status import RUNNING

CORPUS = "xsum_text_document"
_CHECKPOINT = re.compile(r"(?:iter_|global_step)(\d+)")


def check_data(draft: Draft, tokenizer: str) -> str:
    """The prefix of the indexed dataset, which must be complete and made with the run's tokenizer."""
    prefix = str(Path(draft.value("MEGATRON_DATA_DIR")) / CORPUS)
    try:
        index = read_index(prefix, draft.value("MODEL_FAMILY"))
        given = by_name(draft.extra)
        if family_of(draft).has_encoder and "--mask-prob" not in given:
            _check_decoder_length(draft, index)
        if draft.number("EVAL_ITERS") and not draft.is_on("EVAL_ONLY"):
            lacking = lacks_validation(len(index.doc_idx) - 1, given.get("--split", SPLIT))
            if lacking:
                draft.lack("validation", str(lacking), lacking.remedy)
        _check_tokenizer(draft, prefix, tokenizer)
    except Problem as problem:
        draft.lack("data", str(problem), problem.remedy)
    return prefix


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


def run_facts(plan: Plan) -> dict[str, str]:
    """What a run's claim on a directory says of it. A restarted node may resume what the others still hold."""
    facts = shared_facts.facts_of(plan) | {
        run_lock.MASTER: plan.master_address,
        "MASTER_PORT": plan.value("MASTER_PORT"),
    }
    del facts["RESUME"]
    return facts


def check_output_directory(plan: Plan) -> list[Problem]:
    """Refuses to overwrite a run, whichever node it was on, or to start one where another is in progress."""
    directory = Path(plan.output_dir)
    fault = _fault_of_path(directory)
    if fault:
        found = f"cannot write to the run directory {directory}: {fault}"
        return [Problem(found, "Choose another OUTPUT_DIR", "output-directory", fatal=False)]
    try:
        run_lock.check_run(directory, run_facts(plan))
        run_lock.check(directory, f"node{plan.node}")
    except Problem as problem:
        return [Problem(problem.found, problem.remedy, "running", fatal=False)]
    if plan.value("RESUME") == "1":
        return []
    if _holds_a_finished_run(directory):
        return [_finished_run(plan, directory)]
    checkpoints = [_CHECKPOINT.fullmatch(path.name) for path in (directory / "checkpoints").glob("*")]
    newest = max((int(match[1]) for match in checkpoints if match), default=0)
    if newest:
        found = f"{directory} holds checkpoints of an earlier run (up to iteration {newest})"
        remedy = "Choose another OUTPUT_DIR, continue the run with RESUME=1, or delete the directory"
        told = f"{found}, which are never overwritten"
        return [Problem(told, remedy, "earlier-checkpoints", fatal=False)]
    return []


def killed_launcher(plan: Plan) -> list[str]:
    """What to tell of an earlier launcher of this node that left the directory without a word."""
    with contextlib.suppress(OSError, ValueError, RecordError):
        word, host, pid = read(Path(plan.output_dir, f"node{plan.node}.status")).decode().split()
        if word == RUNNING and host == socket.gethostname():
            return [f"the earlier run in {plan.output_dir} has no end: its launcher (process {int(pid)}) was killed"]
    return []


def _finished_run(plan: Plan, directory: Path) -> Problem:
    """The one command after which this run can start, and that keeps the finished one."""
    found = f"{directory} already holds a finished run, which is never overwritten"
    iterations = _iterations_of(directory)
    name = f"{directory.name}-{iterations}-iterations" if iterations else f"{directory.name}-finished"
    kept = directory.with_name(name)
    number = 1
    while kept.exists():
        number += 1
        kept = directory.with_name(f"{name}-{number}")
    move = f"mv {shlex.quote(str(directory))} {shlex.quote(str(kept))}"
    which = "that run"
    if iterations and iterations != plan.value("TRAIN_ITERS"):
        which = f"that run of {iterations} iterations and start this one of {plan.value('TRAIN_ITERS')}"
    remedy = f"To keep {which}: {move}, on every node that has it; then this again. Or choose another OUTPUT_DIR"
    return Problem(found, remedy, "finished-run", fatal=False)


def _iterations_of(directory: Path) -> str:
    """TRAIN_ITERS of the run in a directory; "" where no readable record says it."""
    from t5bench.record.reader import read_part  # it needs packages

    for part in sorted(directory.glob("node*.json")):
        with contextlib.suppress(RecordError, ValueError):
            iterations = Plan.read(read_part(part)["plan"]).value("TRAIN_ITERS", "")
            if re.fullmatch("[1-9][0-9]{0,8}", iterations):
                return iterations
    return ""


def _fault_of_path(directory: Path) -> str:
    """Why no directory can be here; empty if there is one, or the nearest one above it may get it."""
    for path in (directory, *directory.parents):
        shown = "it" if path == directory else path
        try:
            return "" if stat.S_ISDIR(path.stat().st_mode) else f"{shown} is not a directory"
        except FileNotFoundError:
            if path.is_symlink():
                return f"{shown} is a link to {path.readlink()}, which does not exist"
        except NotADirectoryError:
            continue
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _holds_a_finished_run(directory: Path) -> bool:
    """Whether a node of a run has completed there, or the record of a complete run was brought there."""
    for part in directory.glob("node*.json"):
        status = part.with_suffix(".status")
        if status.is_file() and status.read_bytes().startswith(b"complete"):
            return True
        with contextlib.suppress(RecordError, ValueError, RecursionError):
            content = json.loads(read(part))
            if isinstance(content, dict) and content.get("status") == "complete":
                return True
    return False


def prepare_directory(plan: Plan, launcher: int, script: str) -> None:
    """Creates the run directory and every file that the run needs in it. Raises OSError.

    launcher: its process id. script: the command as a script.
    """
    directory = Path(plan.output_dir)
    name = f"node{plan.node}"
    assert plan.layout
    directory.mkdir(parents=True, exist_ok=True)
    for suffix in ("log", "json", "samples.jsonl", "sha256", "wandb.yaml"):
        _keep_earlier(directory / f"{name}.{suffix}")
    keeps_metrics = plan.value("RESUME") == "1"
    if not keeps_metrics:
        _keep_earlier_of_run(directory, plan.node, plan.layout.nnodes)
    # What another node left belongs to an earlier run, unless it is here already.
    left = {int(path.stem[4:]) for path in directory.glob("node*.json") if path.stem[4:].isdecimal()}
    for node in (left | {0, plan.layout.nnodes - 1}) - {plan.node}:
        if not run_lock.is_held(directory, node):
            for suffix in ("json", "sha256"):
                _keep_earlier(directory / f"node{node}.{suffix}")
            if not keeps_metrics:
                _keep_earlier_of_run(directory, node, plan.layout.nnodes)
    for stack in directory.glob(f"{name}.stack.*"):  # of a run that was killed
        stack.unlink()
    # Before anything starts, so that a lack of inodes or space shows now and not later.
    for suffix in ("log", "samples.jsonl"):
        (directory / f"{name}.{suffix}").write_text("")
    (directory / f"{name}.plan").write_text(json.dumps(plan.to_json()))
    command_file(plan).write_text(script)
    wandb_config = plan.environment.get("WANDB_SWEEP_PARAM_PATH", "")
    if wandb_config.startswith(f"{directory}/"):
        # Without the file W&B does not start.
        Path(wandb_config).write_text("wandb_version: 1\n")
    if plan.ds_config:
        # Every node writes the same bytes, perhaps to the same shared file; with a rename nobody reads half of it.
        own = directory / f"{name}.ds_config"
        own.write_text(ds_config_text(plan))
        own.replace(directory / "ds_config.json")
    (directory / f"{name}.status").write_text(f"running {socket.gethostname()} {launcher}\n")


def command_file(plan: Plan) -> Path:
    """The run's command as bash: a launcher reads its arrays, and people can paste it."""
    return Path(plan.output_dir, f"node{plan.node}.command.sh")


def _keep_earlier_of_run(directory: Path, node: int, nodes: int) -> None:
    """The last node writes the metrics, and the first one the profile of an iteration."""
    for name in ("metrics.jsonl",) * (node == nodes - 1) + ("profile.json", "trace.json") * (node == 0):
        _keep_earlier(directory / name)


def _keep_earlier(file: Path) -> None:
    """Earlier attempts keep their files: node0.log becomes node0.log.1 and so on. Another node may have been faster."""
    number = 1
    while (kept := file.with_name(f"{file.name}.{number}")).exists():
        number += 1
    with contextlib.suppress(FileNotFoundError):
        file.rename(kept)
