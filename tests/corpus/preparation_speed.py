"""How fast the preparation is beside the engine's own tool: python -m tests.corpus.preparation_speed MEGATRON_DIR

Both prepare the same JSONL file, documents of three articles of the bundled sample each, in one process. Printed is the
processor time per document without start-up: the difference between many documents and few. The engine's tool needs the
name of a package, nltk, that whole documents do not use; an empty module of that name stands in for it.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from t5bench import REPOSITORY
from t5bench.corpus.source import SAMPLE
from t5bench.text import guard_streams

ARTICLES_EACH = 3
FEW = 10
NLTK = "class tokenize:\n class punkt:\n  PunktLanguageVars = object\n"


def processor_seconds(command: list[str], environment: dict[str, str]) -> float:
    """User and system time of a command and its children."""
    with tempfile.TemporaryFile() as messages:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=messages,
        )
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            messages.seek(0)
            printed = messages.read().decode(errors="replace")
            sys.exit(f"{printed}\nerror: this failed: {shlex.join(command)}")
    return usage.ru_utime + usage.ru_stime


def write_documents(path: Path, count: int) -> None:
    lines = (SAMPLE / "articles.jsonl").read_text().splitlines()
    articles = cycle([json.loads(line)["document"] for line in lines])
    with path.open("w") as file:
        for _ in range(count):
            text = "\n".join(islice(articles, ARTICLES_EACH))
            file.write(json.dumps({"text": text}) + "\n")


@dataclass(frozen=True)
class ComparedTokenizer:
    """A tokenizer, in the words of both tools."""

    name: str
    options: list[str]
    """Of the engine's tool."""
    settings: dict[str, str]
    """Of the preparation here."""


def cases_of(engine: Path) -> list[ComparedTokenizer]:
    pieces = str(SAMPLE / "tokenizer")
    merges = engine / "examples_deepspeed" / "rebase"
    gpt2 = ["--vocab-file", str(merges / "gpt2-vocab.json"), "--merge-file", str(merges / "gpt2-merges.txt")]
    return [
        ComparedTokenizer(
            "T5, SentencePiece",
            ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", pieces],
            {"MODEL_FAMILY": "t5", "TOKENIZER_MODEL": pieces},
        ),
        ComparedTokenizer(
            "GPT, GPT2BPETokenizer",
            ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod", *gpt2],
            {"MODEL_FAMILY": "gpt", "TOKENIZER_MODEL": str(merges)},
        ),
    ]


def seconds_of_the_engine(case: ComparedTokenizer, source: Path, engine: Path) -> float:
    (source.parent / "nltk.py").write_text(NLTK)
    environment = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{source.parent}:{engine}"}
    command = [sys.executable, str(engine / "tools" / "preprocess_data.py"), *case.options]
    command += ["--input", str(source), "--output-prefix", str(source.parent / "theirs")]
    command += ["--workers", "1", "--seq-length", "512"]
    return processor_seconds(command, environment)


def seconds_here(case: ComparedTokenizer, source: Path) -> float:
    command = [sys.executable, "-m", "t5bench", "prepare-data"]
    settings = {
        "MEGATRON_DATA_DIR": str(source.parent / "ours"),
        "XSUM_SOURCE": str(source),
        "WORKERS": "1",
        "FORCE": "1",
    }
    return processor_seconds(command, case.settings | settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("megatron_dir", type=Path, help="an unpatched or patched checkout of Megatron-DeepSpeed")
    parser.add_argument("--documents", type=int, default=12_000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--family", choices=("t5", "gpt"), help="measure only this one")
    arguments = parser.parse_args()
    engine = arguments.megatron_dir.resolve()
    more_documents = arguments.documents - FEW
    with tempfile.TemporaryDirectory() as folder:
        few = Path(folder, "few.jsonl")
        many = Path(folder, "many.jsonl")
        write_documents(few, FEW)
        write_documents(many, arguments.documents)
        for case in cases_of(engine):
            if arguments.family and arguments.family != case.settings["MODEL_FAMILY"]:
                continue
            for _ in range(arguments.repeats):
                theirs = seconds_of_the_engine(case, many, engine) - seconds_of_the_engine(case, few, engine)
                ours = seconds_here(case, many) - seconds_here(case, few)
                engine_ms = 1000 * theirs / more_documents
                our_ms = 1000 * ours / more_documents
                figures = f"engine {engine_ms:.3f} ms, here {our_ms:.3f} ms a document"
                print(f"{case.name}: {figures}, {theirs / ours:.1f} times", flush=True)


if __name__ == "__main__":
    guard_streams()
    main()
