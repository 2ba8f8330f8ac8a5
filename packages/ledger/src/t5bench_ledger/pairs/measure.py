"""Pairs of settings, drawn at random: each is equal to plain PyTorch, refused, or reduced to its smallest form.

``ledger --pairs 2000 --seed 1`` trains the cases 0 to 1999 of that seed; finished ones are kept, so the same command
continues after an interruption. A case that is neither equal nor refused is shrunk by hypothesis: settings are left
out, micro-batches, iterations and the model made fewer and smaller, as long as the verdict stays.
"""

import argparse
import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from t5bench import REPOSITORY, Problem, note, raise_on_signals
from t5bench.plan.ports import free_port
from t5bench_ledger import environments, judge
from t5bench_ledger.measure import PATIENCE_SECONDS, Worker, logs, printed_curves
from t5bench_ledger.pairs import page
from t5bench_ledger.pairs.settings import Case, drawn
from t5bench_ledger.spans import public

PROGRAM = Path(__file__).with_name("train.py")
CODE = ("train.py", "settings.py")
LIMIT_SECONDS = 60.0
MOST_TRIALS = 60  # of hypothesis, to reduce one case
EQUAL = "equal"
REFUSED = "refused"
CRASHES = "crashes"
# Errors by which no library refuses anything on purpose. An assertion without words says as little.
_CRASH = re.compile(r"(Type|Attribute|Key|Index|UnboundLocal|ZeroDivision)Error\b|AssertionError$|.*INTERNAL ASSERT")


@dataclass(frozen=True)
class Trial:
    """What came out of a case."""

    verdict: str
    """equal, refused, crashes, hangs, or wrong."""
    said: str
    """The error's last line; of a wrong one, the quantity that first differs."""
    seconds: float

    @property
    def is_finding(self) -> bool:
        return self.verdict not in (EQUAL, REFUSED)


@dataclass(frozen=True)
class Pair:
    """One line of pairs.jsonl."""

    library: str
    release: str
    torch: str
    python: str
    seed: int
    number: int
    code: str
    case: dict[str, Any]
    verdict: str
    said: str
    seconds: float
    """With the reduction of a finding."""
    smallest: dict[str, Any] | None = None
    """The smallest case with a finding's verdict."""

    @property
    def key(self) -> tuple[str, str, str, int, int, str]:
        return self.library, self.release, self.torch, self.seed, self.number, self.code


def code_digest() -> str:
    """Of what decides what a case trains."""
    found = hashlib.sha256()
    for name in CODE:
        found.update(Path(__file__).with_name(name).read_bytes())
    return found.hexdigest()[:16]


def tried(worker: Worker, case: Case, directory: Path) -> Trial:
    """Trains a case."""
    directory.mkdir(parents=True, exist_ok=True)
    for log in directory.glob("rank*.log"):
        log.unlink()
    cell = {
        "directory": str(directory),
        "program": str(PROGRAM),
        "processes": 2,
        "poisons_memory": False,
        "counts": "",
        "limit": LIMIT_SECONDS,
        "patience": PATIENCE_SECONDS,
        "words": [json.dumps(case.to_json())],
        "port": str(free_port()),
    }
    answer = worker.train(cell)
    seconds = round(answer.get("seconds", 0.0), 2)
    if answer.get("failed"):
        raise Problem(f"the process that trains has ended: {answer['failed']}", f"See {directory.parent}")
    if answer["hangs"]:
        return Trial(judge.HANGS, f"it did not end within {LIMIT_SECONDS:.0f} s", seconds)
    if any(answer["statuses"]):
        error = judge.why(logs(directory))
        return Trial(CRASHES if _CRASH.match(error) else REFUSED, error, seconds)
    measured, expected, _ = printed_curves(directory)
    verdict = judge.judge(measured, expected, case.precision)
    if verdict.verdict == judge.RIGHT:
        return Trial(EQUAL, "", seconds)
    return Trial(verdict.verdict, f"{verdict.quantity} of iteration {verdict.iteration}", seconds)


def smallest_form(case: Case, verdict: str, attempt: Callable[[Case], Trial]) -> Case:
    """The smallest case with this verdict; the case itself if none is found again."""
    try:
        import hypothesis
        from hypothesis import strategies as st
    except ImportError as error:
        raise Problem("hypothesis, which reduces a finding, is not installed", "pip install hypothesis") from error
    names = sorted(case.choices)
    parts = st.fixed_dictionaries(
        {
            "kept": st.tuples(*[st.booleans() for _ in names]),
            "iterations": st.integers(1, case.iterations),
            "micro_batches": st.integers(1, case.micro_batches),
            "width": st.integers(1, case.width),
        }
    )
    known: dict[str, str] = {}
    stopped: list[BaseException] = []

    def made(drawn_parts: Mapping[str, Any]) -> Case:
        kept = {name: case.choices[name] for name, stays in zip(names, drawn_parts["kept"], strict=True) if stays}
        sizes = {name: drawn_parts[name] for name in ("iterations", "micro_batches", "width")}
        return Case(case.base, kept, **sizes)

    def has_it(drawn_parts: Mapping[str, Any]) -> bool:
        smaller = made(drawn_parts)
        name = json.dumps(smaller.to_json())
        if name not in known and not stopped:
            try:
                known[name] = attempt(smaller).verdict
            except BaseException as error:  # a signal's, too: hypothesis would take it for a find and go on
                stopped.append(error)
        return known.get(name) == verdict

    settings = hypothesis.settings(
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        max_examples=MOST_TRIALS,
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    smallest = case
    with contextlib.suppress(hypothesis.errors.NoSuchExample):
        smallest = made(hypothesis.find(parts, has_it, settings=settings))
    if stopped:
        raise stopped[0]
    return smallest


def read_pairs(path: Path) -> list[Pair]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [Pair(**json.loads(line)) for line in lines]


@dataclass(frozen=True)
class Subject:
    """A release whose pairs are tried. release: of DeepSpeed; empty for PyTorch alone."""

    library: str
    release: str

    @property
    def name(self) -> str:
        return f"{self.library} {self.release}".strip()

    def folders(self) -> list[Path]:
        """Before the running Python's packages: none for what is installed."""
        if not self.release or self.release == public(metadata.version("deepspeed")):
            return []
        return [environments.release_folder(self.release, environments.base_python(None), None)]


def subjects(text: str) -> list[Subject]:
    """ "torch,0.19.8"; empty: the installed ones. Raises Problem."""
    named = [word.strip() for word in text.split(",") if word.strip()]
    if not named:
        named = [public(metadata.version("deepspeed")), "torch"]
    unknown = [word for word in named if word != "torch" and not re.fullmatch(r"\d+(\.\d+)+", word)]
    if unknown:
        raise Problem(f"pairs are tried of DeepSpeed and torch, not of '{unknown[0]}'", "Name them so: 0.19.8,torch")
    return [Subject("torch", "") if word == "torch" else Subject("deepspeed", word) for word in named]


class Fuzzer:
    """Tries the cases of a subject, and keeps what came out."""

    def __init__(self, subject: Subject, output: Path, known: Sequence[Pair]) -> None:
        self.subject = subject
        self.output = output
        self.file = output / "pairs.jsonl"
        self.known = list(known)
        runs = output / "runs" / subject.name.replace(" ", "-")
        self.directory = runs / "case"
        python = environments.base_python(None)
        self.worker = Worker(python, subject.folders(), "", runs / "worker.log", subject.library)

    def attempt(self, case: Case) -> Trial:
        return tried(self.worker, case, self.directory)

    def pair(self, seed: int, number: int, code: str) -> Pair:
        """Trains a case; of a finding, looks for its smallest form, among those that are known first."""
        begin = time.monotonic()
        case = drawn(seed, number, self.subject.library)
        found = self.attempt(case)
        smallest = None
        if found.is_finding:
            same = [Case(**pair.smallest) for pair in self.own() if pair.smallest and pair.verdict == found.verdict]
            contained = [each for each in same if case.contains(each)]
            smallest = contained[0] if contained else smallest_form(case, found.verdict, self.attempt)
        versions = self.worker.versions
        pair = Pair(
            self.subject.library, versions.get("deepspeed", ""), versions["torch"], versions["python"], seed, number,
            code, case.to_json(), found.verdict, found.said, round(time.monotonic() - begin, 2),
            smallest.to_json() if smallest else None,
        )  # fmt: skip
        self.known.append(pair)
        with self.file.open("a") as file:
            file.write(json.dumps(asdict(pair)) + "\n")
        return pair

    def own(self) -> Iterator[Pair]:
        """The pairs of this subject under these versions."""
        versions = self.worker.versions
        for pair in self.known:
            of_release = pair.library == self.subject.library and pair.release == versions.get("deepspeed", "")
            if of_release and pair.torch == versions["torch"]:
                yield pair

    def run(self, seed: int, count: int) -> None:
        """Raises Problem."""
        if "failed" in self.worker.versions:
            raise Problem(f"{self.subject.name} cannot be imported: {self.worker.versions['failed']}")
        code = code_digest()
        done = {(pair.seed, pair.number) for pair in self.own() if pair.code == code}
        left = [number for number in range(count) if (seed, number) not in done]
        begin = time.monotonic()
        for position, number in enumerate(left, 1):
            pair = self.pair(seed, number, code)
            an_hour = position / (time.monotonic() - begin) * 3600
            words = Case(**pair.case).words
            if pair.smallest:
                smallest = Case(**pair.smallest)
                words += f"; smallest: {smallest.words}, {smallest.micro_batches} micro-batches"
            note(f"[{number + 1}/{count}] {self.subject.name}: {words}  {pair.verdict}; {an_hour:.0f} pairs an hour")


def run(args: argparse.Namespace, releases: str) -> int:
    """releases: "" for the installed ones. Raises Problem."""
    raise_on_signals()
    output = (args.output or REPOSITORY / "outputs" / "ledger").resolve()
    output.mkdir(parents=True, exist_ok=True)
    known = read_pairs(output / "pairs.jsonl")
    for subject in subjects(releases):
        fuzzer = Fuzzer(subject, output, known)
        try:
            fuzzer.run(args.seed, args.pairs)
        finally:
            fuzzer.worker.end()
        known = fuzzer.known
    current = [pair for pair in known if pair.code == code_digest()]
    summary = page.summary([asdict(pair) for pair in current])
    if args.publish:
        page.write(summary)
    print(page.in_words(summary))
    return 0
