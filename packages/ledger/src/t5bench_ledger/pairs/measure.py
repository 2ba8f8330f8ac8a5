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
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from t5bench import REPOSITORY, Problem, note, raise_on_signals
from t5bench.plan.ports import free_port
from t5bench_ledger import environments, judge
from t5bench_ledger.measure import PATIENCE_SECONDS, Worker, logs, printed_curves
from t5bench_ledger.modes import BESIDE, RELEASES_OF
from t5bench_ledger.pairs import page
from t5bench_ledger.pairs.settings import BASES_OF, Case, drawn, settings_of
from t5bench_ledger.spans import public

# What trains a library's cases; the files decide what a case trains.
PROGRAMS = {
    "deepspeed": ("train.py",),
    "torch": ("train.py",),
    "transformers": ("by_trainer.py", "reference.py"),
    "accelerate": ("by_accelerate.py", "reference.py", "train.py"),
}
CASES_IN_DIGEST = 50
LIMIT_SECONDS = 60.0
MOST_TRIALS = 60  # of hypothesis, to reduce one case
EQUAL = "equal"
REFUSED = "refused"
CRASHES = "crashes"
NOT_AGAIN = "not in a second try"
# The error with which a program says that a library took other samples than it promises: reference.py.
WRONG_SAMPLES = "SamplesError"
# Errors by which no library refuses anything on purpose. An assertion about its own state says as little.
_CRASH = re.compile(
    r"(Type|Attribute|Key|Index|UnboundLocal|ZeroDivision)Error\b"
    r"|AssertionError(: (\{|fragment start)|$)|.*INTERNAL ASSERT"
)
# What PyTorch refuses in C++ and pydantic in Rust, where a traceback has no statement.
_REFUSED_ELSEWHERE = re.compile(
    r"\w+: (Expected to (have finished reduction|mark a variable ready)|Cannot use ReduceOp)|ValidationError: "
)
_STATEMENT = re.compile(r'^ +File ".*", line .*\n +(.*)', re.MULTILINE)


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


@cache
def code_digest(library: str) -> str:
    """Of what decides what a library's cases train: its programs, its settings, and their draw."""
    found = hashlib.sha256()
    for name in PROGRAMS[library]:
        found.update(Path(__file__).with_name(name).read_bytes())
    settings = [[asdict(setting) for setting in settings_of(base)] for base in BASES_OF[library]]
    cases = [drawn(0, number, library).to_json() for number in range(CASES_IN_DIGEST)]
    found.update(json.dumps([settings, cases]).encode())
    return found.hexdigest()[:16]


def is_refusal(error: str, printed: Sequence[str]) -> bool:
    """Whether an error was raised on purpose: by a library's own statement, with words, or by compiled code.

    error: its last line, as judge.why chose it. printed: the logs that have its traceback.
    """
    if _CRASH.match(error):
        return False
    if _REFUSED_ELSEWHERE.match(error):
        return True
    for log in printed:
        before, found, _ = log.partition(error)
        statements = _STATEMENT.findall(before)
        if found and statements:
            return statements[-1].startswith(("raise ", "assert "))
    return False


def tried(worker: Worker, case: Case, directory: Path, program: Path) -> Trial:
    """Trains a case."""
    directory.mkdir(parents=True, exist_ok=True)
    for log in directory.glob("rank*.log"):
        log.unlink()
    cell = {
        "directory": str(directory),
        "program": str(program),
        "processes": case.processes,
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
        printed = logs(directory)
        error = judge.why(printed)
        if error.startswith(WRONG_SAMPLES):
            return Trial(judge.WRONG, error, seconds)
        if 0 in answer["statuses"] and judge.is_by_peer(error):
            return Trial(judge.HANGS, "a process ended, for which the other still waited", seconds)
        return Trial(REFUSED if is_refusal(error, printed) else CRASHES, error, seconds)
    measured, expected, otherwise = printed_curves(directory)
    verdict = judge.noted(judge.judge(measured, expected, case.precision), otherwise, case.precision)
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
        is_installed = self.library == "deepspeed" and self.release == public(metadata.version("deepspeed"))
        if not self.release or is_installed:
            return []
        needed = {self.library: self.release} | BESIDE[self.library]
        python = environments.base_python(None)
        return [environments.release_folder(release, python, None, library) for library, release in needed.items()]


def subjects(text: str) -> list[Subject]:
    """ "torch,0.19.8,transformers==5.24.0"; empty: the installed DeepSpeed and torch. Raises Problem."""
    named = [word.strip() for word in text.split(",") if word.strip()]
    if not named:
        named = [public(metadata.version("deepspeed")), "torch"]
    return [subject_of(word) for word in named]


def subject_of(word: str) -> Subject:
    """Raises Problem."""
    if word == "torch":
        return Subject("torch", "")
    library, _, release = word.rpartition("==")
    library = library or "deepspeed"
    if library not in RELEASES_OF or not re.fullmatch(r"\d+(\.\d+)+", release):
        libraries = "DeepSpeed, torch, transformers and accelerate"
        raise Problem(
            f"pairs are tried of {libraries}, not of '{word}'", "Name them so: 0.19.8,torch,accelerate==1.15.0"
        )
    return Subject(library, release)


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
        self.program = Path(__file__).with_name(PROGRAMS[subject.library][0])

    @property
    def release(self) -> str:
        """Of the library; empty for PyTorch alone."""
        return str(self.worker.versions.get(self.subject.library, "")) if self.subject.library != "torch" else ""

    def attempt(self, case: Case) -> Trial:
        return tried(self.worker, case, self.directory, self.program)

    def pair(self, seed: int, number: int, code: str) -> Pair:
        """Trains a case; of a finding, looks for its smallest form, among those that are known first."""
        begin = time.monotonic()
        case = drawn(seed, number, self.subject.library)
        found = self.attempt(case)
        smallest = None
        if found.is_finding and self.attempt(case).verdict != found.verdict:
            found = replace(found, said=f"{found.said}; {NOT_AGAIN}")
            smallest = case
        elif found.is_finding:
            same = [Case(**pair.smallest) for pair in self.own() if pair.smallest and pair.verdict == found.verdict]
            contained = [each for each in same if case.contains(each)]
            smallest = contained[0] if contained else smallest_form(case, found.verdict, self.attempt)
        versions = self.worker.versions
        pair = Pair(
            self.subject.library, self.release, versions["torch"], versions["python"], seed, number,
            code, case.to_json(), found.verdict, found.said, round(time.monotonic() - begin, 2),
            smallest.to_json() if smallest else None,
        )  # fmt: skip
        self.known.append(pair)
        with self.file.open("a") as file:
            file.write(json.dumps(asdict(pair)) + "\n")
        return pair

    def own(self) -> Iterator[Pair]:
        """The pairs of this subject under these versions."""
        for pair in self.known:
            of_release = pair.library == self.subject.library and pair.release == self.release
            if of_release and pair.torch == self.worker.versions["torch"]:
                yield pair

    def run(self, seed: int, count: int) -> None:
        """Raises Problem."""
        if "failed" in self.worker.versions:
            raise Problem(f"{self.subject.name} cannot be imported: {self.worker.versions['failed']}")
        code = code_digest(self.subject.library)
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
    current = [pair for pair in known if pair.code == code_digest(pair.library)]
    summary = page.summary([asdict(pair) for pair in current])
    if args.publish:
        page.write(summary)
    print(page.in_words(summary))
    return 0
