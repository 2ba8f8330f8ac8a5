"""``python -m t5bench verify``: reads a package's logs again, and compares every figure to the last digit."""

import argparse
import gzip
import io
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import matplotlib

from t5bench import Problem
from t5bench.record.files import MOST_BYTES, RecordError, open_file, read, sha256
from t5bench.record.reader import decoded
from t5bench.record.records import SWEEP, looks_like_run, read_list
from t5bench.record.text import visible
from t5bench.report.command import PAGE, UNFORESEEN, write
from t5bench.report.package import (
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

_CURVE = re.compile(r'<path d="([^"]*)"[^>]*style="fill: none[^"]*stroke[^"]*"')
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
LEAST_OF_A_CURVE = 6  # numbers: three points; a shorter line is an axis, a tick or an entry of the legend
SAME_POINT = 1.44  # points, of which an inch has 72
ANEW, FIGURES = Path("anew"), "comparison.json"
DEEPEST = 100  # levels of directories in a package: Python looks through them recursively
# As matplotlib draws: no other element, and no program.
_ATTRIBUTES = r'(?:\s+(?!(?i:on))[\w:-]+="[^"<>]*")*\s*'
_ELEMENT = rf"</?(?:g|path|text|use|defs|clipPath|rect){_ATTRIBUTES}/?>"
_STYLE = r'<style type="text/css">\*{[^<>{}]*}</style>'
_DRAWING = re.compile(rf"<svg{_ATTRIBUTES}>(?:[^<]|{_STYLE}|{_ELEMENT})*</svg>")


def unpack(package: Path, root: Path) -> Iterator[str]:
    """The files of a package below root; yields what should not be in it. Raises RecordError."""
    seen: set[PurePosixPath] = set()
    try:
        with open_file(package) as file, gzip.GzipFile(fileobj=file) as compressed:
            content = compressed.read(MOST_BYTES)
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for entry in tar:
                name = PurePosixPath(entry.name)
                # Nothing else: Python may look for modules in the directory where the package is read.
                is_own = str(name).partition("/")[0] in map(str, (CONTENTS, RUNS, PUBLISHED))
                is_plain = entry.isreg() and not entry.issparse()  # a sparse file is as large as it says it is
                is_within = ".." not in name.parts and len(name.parts) <= DEEPEST
                if entry.isdir():  # tar adds them where a person packs again what he has unpacked
                    continue
                if not is_plain or not is_own or not is_within or entry.size > MOST_BYTES:
                    yield f"{entry.name} is not a plain file of a package"
                elif name in seen:
                    yield f"{name} is in the package twice"
                elif content := tar.extractfile(entry):
                    seen.add(name)
                    write_file(root / name, content.read())
    except RecordError:
        raise
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
        raise RecordError(f"{package} cannot be read: {error}") from error


def findings(problems: list[str]) -> Iterator[str]:
    """What is wrong with the package that was unpacked here, a sentence each. Raises Problem.

    problems: receives the comparison's own, which are no fault of the package.
    """
    contents = decoded(CONTENTS, read(CONTENTS), Contents)
    present = {str(path) for path in Path().rglob("*") if path.is_file() and path != CONTENTS}
    for name in sorted(present | contents.files.keys()):
        if name not in present:
            yield f"{name} is missing"
        elif name not in contents.files:
            yield f"{name} was added: {CONTENTS} does not list it"
        elif sha256(Path(name)) != contents.files[name]:
            yield f"{name} was changed: it does not have its checksum"
    absent = [name for name in read_list(RUNS) if not looks_like_run(RUNS / name)]
    for name in dict.fromkeys([*absent, *contents.absent]):
        if name not in contents.absent:
            yield f"{RUNS}/{name} is on the sweep's list of runs but not in the package"
        elif name not in absent:
            yield f"{RUNS}/{name} is listed as absent, but it is in the package or not on the sweep's list of runs"
    comparison, faults = publish(contents)
    yield from faults
    problems += comparison.problems
    write(comparison, ANEW)
    belong = {RUNS / SWEEP, *packed_files(packed_runs()), *(PUBLISHED / path.name for path in ANEW.iterdir())}
    yield from (f"{name} was added: a package has no such file" for name in sorted(present - set(map(str, belong))))
    files = sorted(path.name for path in ANEW.iterdir() if path.name != PAGE)
    wrong = [fault for name in files for fault in _differences(name)]
    # The page has all of it: its differences say nothing new.
    yield from wrong or _page_differences(contents.drawn_by)


def _both(name: str) -> tuple[str, str]:
    """A published file, and what the logs give."""
    published, computed = (read(directory / name).decode(errors="replace") for directory in (PUBLISHED, ANEW))
    return published, computed


def _differences(name: str) -> list[str]:
    """Where a published file is not what the logs give."""
    published, computed = _both(name)
    if published == computed:
        return []
    wrong = []
    if name == FIGURES:
        theirs, ours = (dict(_leaves(decoded(name, text.encode()))) for text in (published, computed))
        for place in ours | theirs:
            one, other = theirs.get(place, "nothing"), ours.get(place, "nothing")
            if one != other:
                wrong.append(f"{PUBLISHED}/{name}: {place} is {one}, but the logs give {other}")
    # Two rows may have the same label, an object a key twice, and 1 is 1.0.
    return wrong or [_first_difference(name, published, computed)]


def _first_difference(name: str, published: str, computed: str) -> str:
    pairs = zip(published.split("\n"), computed.split("\n"), strict=False)
    line = next((number for number, (one, other) in enumerate(pairs) if one != other), computed.count("\n"))
    return f"{PUBLISHED}/{name} line {line + 1} does not follow from the logs"


def _page_differences(drawn_by: str) -> list[str]:
    """Where the page is not what the logs give. Another matplotlib draws other letters, but the same curves."""
    published, computed = _both(PAGE)
    if published == computed:
        return []
    if drawn_by == matplotlib.__version__:
        return [_first_difference(PAGE, published, computed)]
    texts = [_DRAWING.sub("<svg/>", text) for text in (published, computed)]
    if texts[0] != texts[1]:
        return [_first_difference(PAGE, *texts)]
    drawings = zip(_DRAWING.findall(published), _DRAWING.findall(computed), strict=True)
    for number, (drawing, expected) in enumerate(drawings, 1):
        if not _has_the_curves(drawing, expected):
            by = f"matplotlib {drawn_by}, and {matplotlib.__version__} draws other curves from the logs"
            return [f"{PUBLISHED}/{PAGE}: drawing {number} is said to be by {by}"]
    return []


def _curves(drawing: str) -> list[list[float]]:
    """The coordinates of every line that is drawn in a drawing, with the strokes that show it."""
    curves = []
    for path in _CURVE.findall(drawing):
        points = [float(number) for number in _NUMBER.findall(path)]
        if len(points) >= LEAST_OF_A_CURVE:
            curves.append(points)
    return curves


def _has_the_curves(drawing: str, expected: str) -> bool:
    ours, theirs = _curves(expected), _curves(drawing)
    if [len(curve) for curve in ours] != [len(curve) for curve in theirs]:
        return False
    for curve, other in zip(ours, theirs, strict=True):
        if any(abs(one - another) > SAME_POINT for one, another in zip(curve, other, strict=True)):
            return False
    return True


def _leaves(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its place; a row's by the row's label."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _leaves(value, f"{name}.{key}" if name else key)
    elif isinstance(content, list):
        for number, value in enumerate(content):
            label = value.get("label") if isinstance(value, dict) else None
            yield from _leaves(value, f"{name}[{label or number}]")
    else:
        yield name, content


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("package", type=Path, metavar="PACKAGE", help="what `pack` wrote")
    parser.add_argument("--sha256", default="", metavar="CHECKSUM", help="the checksum that was published with it")


def run(arguments: argparse.Namespace) -> int:
    package, published = arguments.package, arguments.sha256.lower()
    sentences: list[str] = []
    problems: list[str] = []
    figures = ""
    try:  # what is found before an exception stays in the list
        if published and sha256(package) != published:
            sentences.append(f"{package} is not the package that was published: its checksum is {sha256(package)}")
        with tempfile.TemporaryDirectory() as directory:
            sentences.extend(unpack(package, Path(directory)))
            with working_in(directory):
                sentences.extend(findings(problems))
                figures = (PUBLISHED / FIGURES).read_text(errors="replace")
    except UNFORESEEN as error:
        why = error if isinstance(error, Problem) else f"its records lack what a comparison needs: {error!r}"
        sentences.append(str(why))
    for sentence in sentences:
        print(f"finding: {visible(sentence)}")  # it may quote the package
    for problem in problems:
        if problem not in sentences:
            print(f"problem of the comparison: {visible(problem)}")
    if not sentences:
        numbers = re.findall(r"(?<![\w\"])-?\d[\d.e+-]*", figures)
        print(f"{package}: all {len(numbers)} numbers of the comparison follow from the logs")
    return int(bool(sentences))
