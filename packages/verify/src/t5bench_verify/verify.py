"""``python -m t5bench verify``: reads a package's logs again, and compares every figure to the last digit."""

import argparse
import gzip
import io
import re
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import matplotlib

from t5bench import REPOSITORY, Problem
from t5bench.record.files import MOST_BYTES, RecordError, open_file, read, sha256
from t5bench.record.machine import FIRST_DIGITS, commit
from t5bench.record.reader import decoded
from t5bench.record.records import SWEEP, looks_like_run, read_list
from t5bench.record.run import Run
from t5bench.report.compare import PAGE, UNFORESEEN, write
from t5bench.text import visible
from t5bench_verify.pack import (
    CONTENTS,
    PUBLISHED,
    RUNS,
    Contents,
    packed_files,
    packed_runs,
    publish,
    working_in,
    write_file,
)
from training_comparison import given_files

_CURVE = re.compile(r'<path d="([^"]*)"[^>]*style="fill: none[^"]*stroke[^"]*"')
_TEXT = re.compile(r"<(?:text|title)\b[^>]*>([^<]*)</(?:text|title)>")
_NUMBERS = re.compile(r"[\d\s.,:+\u2212\u00d7^%-]*[kMG]?")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
LEAST_OF_A_CURVE = 6  # numbers: three points; a shorter line is an axis, a tick or an entry of the legend
SAME_POINT = 1.44  # points, of which an inch has 72
ANEW = Path("anew")  # where the comparison is made again
FIGURES = "comparison.json"
OWN = (str(CONTENTS), str(RUNS), str(PUBLISHED))
DEEPEST = 100  # levels of directories in a package: Python looks through them recursively
# As matplotlib draws, with our titles: no other element, and no program. The picture above is ours, the same with each.
_ATTRIBUTES = r'(?:\s+(?!(?i:on))[\w:-]+="[^"<>]*")*\s*'
_ELEMENT = rf"</?(?:g|path|text|title|use|defs|clipPath|rect){_ATTRIBUTES}/?>"
_STYLE = r'<style type="text/css">\*{[^<>{}]*}</style>'
_DRAWING = re.compile(rf"<svg(?=[^<>]*version=){_ATTRIBUTES}>(?:[^<]|{_STYLE}|{_ELEMENT})*</svg>")


def unpack(package: Path, root: Path) -> Iterator[str]:
    """The files of a package below root; yields what should not be in it. Raises RecordError."""
    seen: set[PurePosixPath] = set()
    try:
        with open_file(package) as file, gzip.GzipFile(fileobj=file) as compressed:
            content = compressed.read(MOST_BYTES)
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for entry in tar:
                name = PurePosixPath(entry.name)
                if entry.isdir():  # tar adds them where a person packs again what he has unpacked
                    continue
                if not _belongs(entry):
                    yield f"{entry.name} is not a plain file of a package"
                elif name in seen:
                    yield f"{name} is in the package twice"
                else:
                    seen.add(name)
                    write_file(root / name, tar.extractfile(entry).read())
    except RecordError:
        raise
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
        raise RecordError(f"{package} cannot be read: {error}") from error


def _belongs(entry: tarfile.TarInfo) -> bool:
    """Whether it is a plain file of a package, in one of its own directories.

    Nothing else is unpacked: Python may look for modules in the directory where the package is read.
    """
    name = PurePosixPath(entry.name)
    is_own = str(name).partition("/")[0] in OWN
    is_plain = entry.isreg() and not entry.issparse()  # a sparse file is as large as it says it is
    is_within = ".." not in name.parts and len(name.parts) <= DEEPEST
    return is_own and is_plain and is_within and entry.size <= MOST_BYTES


def findings(problems: list[str], commits: set[str]) -> Iterator[str]:
    """What is wrong with the package that was unpacked here, a sentence each. Raises Problem.

    problems: receives the comparison's own, which are no fault of the package. commits: receives those of this
    repository with which the runs were made.
    """
    contents = decoded(CONTENTS, read(CONTENTS), Contents)
    present = {str(path) for path in Path().rglob("*") if path.is_file() and path != CONTENTS}
    yield from _changed_files(contents, present)
    yield from _wrongly_absent(contents)
    comparison, faults = publish(contents)
    yield from faults
    commits |= {str(run.record["commits"].get("repository") or "") for run in comparison.runs} - {""}
    yield from _in_another_order(comparison.runs)
    problems += comparison.problems
    write(comparison, ANEW)
    computed_files = sorted(path.name for path in ANEW.iterdir())
    belonging = {RUNS / SWEEP, *packed_files(packed_runs())}
    belonging |= {PUBLISHED / name for name in computed_files}
    for name in sorted(present - set(map(str, belonging))):
        yield f"{name} was added: a package has no such file"
    wrong: list[str] = []
    for name in computed_files:
        if name != PAGE:
            wrong += _differences(name)
    # The page has all of it: its differences say nothing new.
    yield from wrong or _page_differences(contents.drawn_by)


def _changed_files(contents: Contents, present: set[str]) -> Iterator[str]:
    """Where the files that are there are not those that package.json lists."""
    for name in sorted(present | contents.files.keys()):
        if name not in present:
            yield f"{name} is missing"
        elif name not in contents.files:
            yield f"{name} was added: {CONTENTS} does not list it"
        elif sha256(Path(name)) != contents.files[name]:
            yield f"{name} was changed: it does not have its checksum"


def _wrongly_absent(contents: Contents) -> Iterator[str]:
    """Where the absent runs are not those that package.json names."""
    absent = [name for name in read_list(RUNS) if not looks_like_run(RUNS / name)]
    for name in dict.fromkeys([*absent, *contents.absent]):
        if name not in contents.absent:
            yield f"{RUNS}/{name} is on the sweep's list of runs but not in the package"
        elif name not in absent:
            yield (f"{RUNS}/{name} is listed as absent, but it is in the package or not on the sweep's list of runs")


def _in_another_order(runs: Sequence[Run]) -> Iterator[str]:
    """Where the sweep's list does not have the order of the runs' starts, except for those that were tried again."""
    by_name = {str(run.directory.relative_to(RUNS)): run for run in runs if run.directory.is_relative_to(RUNS)}
    listed = [name for name in read_list(RUNS) if name in by_name]
    for number, name in enumerate(listed):
        started = by_name[name].record["started"]
        if any((RUNS / name).glob("node*.json.*")):
            continue
        earlier = [after for after in listed[number + 1 :] if by_name[after].record["started"] < started]
        if earlier:
            yield f"{RUNS}/{SWEEP} lists {name} before {earlier[0]}, which started before it"
            return


def _both(name: str) -> tuple[str, str]:
    """A published file, and what the logs give."""
    published = read(PUBLISHED / name).decode(errors="replace")
    computed = read(ANEW / name).decode(errors="replace")
    return published, computed


def _differences(name: str) -> list[str]:
    """Where a published file is not what the logs give."""
    published, computed = _both(name)
    if published == computed:
        return []
    wrong = _different_figures(published, computed) if name == FIGURES else []
    # Two rows may have the same label, an object a key twice, and 1 is 1.0.
    return wrong or [_first_difference(name, published, computed)]


def _different_figures(published: str, computed: str) -> list[str]:
    """Every value of comparison.json that the logs do not give."""
    theirs = dict(_leaves(decoded(FIGURES, published.encode())))
    ours = dict(_leaves(decoded(FIGURES, computed.encode())))
    wrong = []
    for address in ours | theirs:
        published_value = theirs.get(address, "nothing")
        computed_value = ours.get(address, "nothing")
        if published_value != computed_value:
            wrong.append(f"{PUBLISHED}/{FIGURES}: {address} is {published_value}, but the logs give {computed_value}")
    return wrong


def _first_difference(name: str, published: str, computed: str) -> str:
    different = computed.count("\n")  # where one is longer than the other
    pairs = zip(published.split("\n"), computed.split("\n"), strict=False)
    for number, (published_line, computed_line) in enumerate(pairs):
        if published_line != computed_line:
            different = number
            break
    return f"{PUBLISHED}/{name} line {different + 1} does not follow from the logs"


def _page_differences(drawn_by: str) -> list[str]:
    """Where the page is not what the logs give. Another matplotlib draws other letters, but the same curves."""
    published, computed = _both(PAGE)
    if published == computed:
        return []
    if drawn_by == matplotlib.__version__:
        return [_first_difference(PAGE, published, computed)]
    published_text = _DRAWING.sub("<svg/>", published)
    computed_text = _DRAWING.sub("<svg/>", computed)
    if published_text != computed_text:
        return [_first_difference(PAGE, published_text, computed_text)]
    drawings = zip(_DRAWING.findall(published), _DRAWING.findall(computed), strict=True)
    for number, (drawing, expected) in enumerate(drawings, 1):
        theirs = _words(drawing) - _words(expected)
        if theirs:
            said = f"drawing {number} says '{next(iter(theirs))}', which does not follow from the logs"
            return [f"{PUBLISHED}/{PAGE}: {said}"]
        if not _has_the_curves(drawing, expected):
            by = f"matplotlib {drawn_by}, and {matplotlib.__version__} draws other curves from the logs"
            return [f"{PUBLISHED}/{PAGE}: drawing {number} claims to be drawn by {by}"]
    return []


def _words(drawing: str) -> Counter[str]:
    """The texts in a drawing; not the numbers at its axes, which another matplotlib may choose otherwise."""
    texts = (text.strip() for text in _TEXT.findall(drawing))
    return Counter(text for text in texts if not _NUMBERS.fullmatch(text))


def _curves(drawing: str) -> list[list[float]]:
    """The coordinates of every line that is drawn in a drawing, with the strokes that show it."""
    curves = []
    for path in _CURVE.findall(drawing):
        points = [float(number) for number in _NUMBER.findall(path)]
        if len(points) >= LEAST_OF_A_CURVE:
            curves.append(points)
    return curves


def _has_the_curves(drawing: str, expected: str) -> bool:
    curves = _curves(drawing)
    expected_curves = _curves(expected)
    if list(map(len, curves)) != list(map(len, expected_curves)):
        return False
    coordinates = zip(chain(*curves), chain(*expected_curves), strict=True)
    return all(abs(one - other) <= SAME_POINT for one, other in coordinates)


def _leaves(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its address; a row's by the row's label."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _leaves(value, f"{name}.{key}" if name else key)
    elif isinstance(content, list):
        for number, value in enumerate(content):
            label = value.get("label") if isinstance(value, dict) else None
            yield from _leaves(value, f"{name}[{label or number}]")
    else:
        yield name, content


def _note_other_commits(commits: set[str]) -> None:
    """A later commit may predict other figures, such as a pipeline's bubble, or put a table in other words."""
    own, _ = commit(REPOSITORY)
    others = sorted(commits - {own})
    if own and others:
        names = ", ".join(visible(name[:FIRST_DIGITS]) for name in others)
        told = f"this is commit {own[:FIRST_DIGITS]} and may predict other figures than the runs' own, {names}"
        print(f"note: {told}. To verify with their code: git checkout {visible(others[-1][:FIRST_DIGITS])}")


def read_start(package: Path) -> None:
    """Raises Problem for what cannot be verified at all, which is no finding: a file that is not there."""
    with given_files.open_file(package, "Name the file that python -m t5bench pack has written"):
        pass


def run(arguments: argparse.Namespace) -> int:
    package = arguments.package
    read_start(package)
    published_checksum = arguments.sha256.lower()
    sentences: list[str] = []
    problems: list[str] = []
    commits: set[str] = set()
    figures = ""
    try:  # what is found before an exception stays in the list
        if published_checksum:
            checksum = sha256(package)
            if checksum != published_checksum:
                sentence = f"{package} is not the package that was published: its checksum is {checksum}"
                sentences.append(sentence)
        with tempfile.TemporaryDirectory() as directory:
            sentences.extend(unpack(package, Path(directory)))
            with working_in(directory):
                sentences.extend(findings(problems, commits))
                figures = (PUBLISHED / FIGURES).read_text(errors="replace")
    except UNFORESEEN as error:
        if isinstance(error, Problem):
            sentences.append(str(error))
        else:
            sentences.append(f"its records lack what a comparison needs: {error!r}")
    for sentence in sentences:
        print(f"finding: {visible(sentence)}")  # it may quote the package
    if sentences:
        _note_other_commits(commits)
    for problem in problems:
        if problem not in sentences:
            print(f"problem of the comparison: {visible(problem)}")
    if not sentences:
        numbers = re.findall(r"(?<![\w\"])-?\d[\d.e+-]*", figures)
        print(f"{package}: all {len(numbers)} numbers of the comparison follow from the logs")
    return int(bool(sentences))
