"""What the ledger says of a release: yes or no first, then why. Reads data/releases.json; of the standard library."""

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, NamedTuple

from t5bench_ledger.modes import LIBRARY, MODES, NAMES, OF_NO_LAUNCHER, TRAINERS, Mode, library_of
from t5bench_ledger.spans import DATA, public, published, releases_in
from t5bench_ledger.words import mended_in_words, size_in_words

ALL_RIGHT = 0
NOT_RIGHT = 1
NOT_TRIED = 3
WRONG = "wrong"
# What is no other model; and whose decision it is.
NOTED = {
    "rounds more than asked": "no other model is trained",
    "weighs a short last window by its share": "accelerate divides each micro-batch's loss by the number of a full"
    " window, as its guide says; whoever writes the loop decides",
    "logs another loss": "the gradient norms of all iterations are right",
}
RELEASE = re.compile(r"\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)?(\+.*)?")
NO_REPORT = "no report that we know of"
MODE = {mode.name: mode for mode in MODES}


class NoAnswer(ValueError):
    """What somebody asked cannot be answered."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(found)
        self.found = found
        self.remedy = remedy


def chosen(text: str, known: Sequence[str], what: str) -> list[str]:
    """Raises NoAnswer."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if known and name not in known]
    if unknown:
        raise NoAnswer(f"there is no {what} '{unknown[0]}'", f"Choose from: {', '.join(known)}")
    if not names:
        raise NoAnswer(f"no {what} is given", "Leave the option out for all")
    return names


@cache
def read() -> Mapping[str, Any]:
    """The verdicts. Raises NoAnswer."""
    path = DATA / "releases.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise NoAnswer(f"the ledger cannot be read: {error}", f"Restore {path}") from error
    return content


def named(text: str) -> dict[str, str]:
    """The release that somebody asks about: 0.18.2, v0.18.2, torch==2.8.0, "torch 2.8.0". Raises NoAnswer."""
    first, *rest = re.split(r"[\s=@]+", text.strip())
    library = "deepspeed" if not rest else first.lower()
    release = (rest[0] if rest else first).removeprefix("v")
    newest = newest_tried("deepspeed")
    remedy = f"Name a release of DeepSpeed, such as {newest}, or torch==2.8.0, transformers==4.45.2, accelerate==1.2.1"
    if not rest and first.lower() in LIBRARY:
        raise NoAnswer(f"no release of {first} is named", f"Name one, such as {first}=={newest_tried(first.lower())}")
    if library not in LIBRARY:
        near = difflib.get_close_matches(library, LIBRARY, n=1)
        meant = f"Did you mean {near[0]}=={release}? " if near else ""
        raise NoAnswer(f"the ledger has no '{library}'", f"{meant}{remedy}")
    if len(rest) > 1 or not RELEASE.fullmatch(release):
        raise NoAnswer(f"'{release or text}' is not a release", remedy)
    return {library: release}


def newest_tried(library: str) -> str:
    return [release for release in published()[library] if release in releases_tried(library)][-1]


def releases_tried(library: str) -> set[str]:
    own = [measured["releases"] for measured in read()["measured"] if measured["software"] == library]
    return set().union(*own)


def installed() -> dict[str, str]:
    """The releases in this Python's environment, by library, without importing them."""
    found = {}
    for name in LIBRARY:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Found:
    """What was measured of one release of one library."""

    library: str
    release: str
    torch: str
    """Beside the release; "" where the library is PyTorch."""
    right: Mapping[str, Sequence[str]]
    """By strategy the names of modes."""
    faults: Sequence[Mapping[str, Any]]

    @property
    def name(self) -> str:
        """As somebody asks for it: 0.19.8 of DeepSpeed, transformers 5.2.0."""
        return self.release if self.library == "deepspeed" else f"{self.library} {self.release}"

    def tried(self, strategy: str) -> list[Mode]:
        names = set(self.right.get(strategy, ()))
        for fault in self.faults:
            if fault["strategy"] == strategy:
                names.update(fault["modes"])
        return [mode for mode in MODES if mode.name in names]

    @property
    def strategies(self) -> list[str]:
        return list(dict.fromkeys([*self.right, *(fault["strategy"] for fault in self.faults)]))


def found_of(library: str, release: str) -> list[Found]:
    """What was measured of a release, with each PyTorch that it was tried with; empty if it was not tried."""
    made = []
    content = read()
    for measured in content["measured"]:
        if measured["software"] != library or public(release) not in measured["releases"]:
            continue
        right: dict[str, list[str]] = {}
        for strategy, modes in measured["right"].items():
            for mode, spans in modes.items():
                if public(release) in releases_in(spans, library):
                    right.setdefault(strategy, []).append(mode)
        faults = [
            fault
            for fault in content["faults"]
            if (fault["software"], fault.get("torch", "")) == (library, measured["torch"])
            and public(release) in releases_in(fault["releases"], library)
        ]
        made.append(Found(library, public(release), measured["torch"], right, faults))
    return made


def is_used(strategy: str, mode: str) -> bool:
    """Whether it counts: launchers train so, or it is a trainer's, which people use as it is."""
    return strategy in TRAINERS or (strategy not in OF_NO_LAUNCHER and MODE[mode].is_of_launchers)


def used_faults(found: Found, verdict: str = "") -> dict[str, list[Mode]]:
    """By strategy the modes that count and are not right; only those with this verdict if one is given."""
    made: dict[str, list[Mode]] = {}
    for fault in found.faults:
        if verdict in ("", fault["verdict"]) and fault["verdict"] not in NOTED:
            own = [MODE[name] for name in fault["modes"] if is_used(fault["strategy"], name)]
            if own:
                made.setdefault(fault["strategy"], []).extend(own)
    return made


CONDITIONS = {
    "when it is resumed": lambda mode: mode.resumes,
    "in bf16": lambda mode: mode.precision == "bf16",
    "in fp16": lambda mode: mode.precision == "fp16",
    "with an offloaded optimizer": lambda mode: mode.offload,
    "with more than one micro-batch": lambda mode: mode.micro_batches > 1,
}


def condition(faulty: Sequence[Mode], tried: Sequence[Mode]) -> str:
    """When a strategy is not right: all that these modes share, where that names no other mode that was tried; else
    each. "" if they share nothing and are all that was tried."""
    shared = {words: holds for words, holds in CONDITIONS.items() if all(map(holds, faulty))}
    meant = {mode.name for mode in tried if all(holds(mode) for holds in shared.values())}
    if meant == {mode.name for mode in faulty}:
        return " ".join(shared)
    names = list(dict.fromkeys(mode.when or f"in '{mode.name}'" for mode in faulty))
    # "with T5" holds "with T5 on one process", too: both are wrong.
    return listed(name for name in names if not any(name.startswith(f"{other} ") for other in names))


def listed(names: Iterable[str]) -> str:
    """a, b and c."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def clauses(found: Found, verdict: str, words: str) -> list[str]:
    """For each strategy that is not right, when: "ZeRO-2 trains another model with more than one micro-batch"."""
    made: dict[str, list[str]] = {}
    for strategy, faulty in used_faults(found, verdict).items():
        tried = [mode for mode in found.tried(strategy) if is_used(strategy, mode.name)]
        made.setdefault(condition(faulty, tried), []).append(NAMES[strategy])
    return [
        f"{listed(names)} {words if len(names) == 1 else PLURAL[words]} {when}".strip() for when, names in made.items()
    ]


PLURAL = {"trains another model": "train another model", "does not run": "do not run", "hangs": "hang"}


def instead_of(found: Found) -> str:
    """Which release to take: the newest of those that are right in the most ways, with the same PyTorch.

    Of those that were tried in every way in which this one was.
    """
    own = count_of_faults(found)
    fewest, best = own, ""
    for release in sorted(tried_of(found), key=position(found.library), reverse=True):
        others = [other for other in found_of(found.library, release) if other.torch == found.torch]
        for other in others:
            kept = only(other, found.strategies)
            if used_ways(kept) >= used_ways(found) and count_of_faults(kept) < fewest:
                fewest, best = count_of_faults(kept), release
    if not best:
        return "no release that was tried is right in more ways"
    return f"take {best}" if not fewest else f"take {best}, which is wrong in fewer ways"


def count_of_faults(found: Found) -> int:
    return sum(map(len, used_faults(found).values()))


def used_ways(found: Found) -> set[tuple[str, str]]:
    """The strategies and modes that count and were tried."""
    tried = ((strategy, mode.name) for strategy in found.strategies for mode in found.tried(strategy))
    return {(strategy, mode) for strategy, mode in tried if is_used(strategy, mode)}


def position(library: str) -> Callable[[str], int]:
    """Of a release among those that were published; the last one if it was not."""
    known = published()[library]
    return lambda release: known.index(release) if release in known else len(known)


PLAIN = ("equal targets", "one process")


def untried_ways(found: Found, strategies: Sequence[str]) -> list[tuple[str, str]]:
    """The strategies and modes in which launchers train with the library, of these strategies, and nobody tried."""
    tried = used_ways(found)
    own = [name for name in strategies if library_of(name) == found.library and name not in TRAINERS]
    ways = [(strategy, mode.name) for mode in MODES for strategy in own if strategy in mode.strategies]
    return [way for way in ways if is_used(*way) and way not in tried]


def where_right(found: Found, untried: Sequence[tuple[str, str]]) -> str:
    """Of a release in which nothing that counts is wrong."""
    if found.strategies[0] in TRAINERS:
        return "in every way that was tried"
    if not untried:
        return "in every mode that the launchers use"
    tried = len(used_ways(found))
    missing: dict[str, list[str]] = {}
    for strategy, mode in untried:
        missing.setdefault(mode, []).append(NAMES[strategy])
    named = "; ".join(f"{mode} ({', '.join(names)})" for mode, names in missing.items())
    return f"in {tried} of the {tried + len(untried)} ways in which launchers train; not tried: {named}"


def first_line(found: Found, untried: Sequence[tuple[str, str]]) -> str:
    """Yes or no."""
    of_people = found.strategies[0] in TRAINERS
    if not used_faults(found):
        return f"{found.name}: right {where_right(found, untried)}"
    wrong = clauses(found, WRONG, "trains another model")
    failing = [*clauses(found, "does not run", "does not run"), *clauses(found, "hangs", "hangs")]
    take = instead_of(found)
    is_right_plainly = of_people and any(mode in found.right.get(found.strategies[0], ()) for mode in PLAIN)
    begin = f"do not use {found.name}" if wrong and not is_right_plainly else found.name
    return f"{begin}: {'; '.join([*wrong, *failing])}; {take}"


def nearest(library: str, release: str) -> str:
    """Which releases beside one that was not tried were."""
    tried = releases_tried(library)
    known = published()[library]
    others = [other for other, releases in published().items() if other != library and release in releases]
    if release not in known and others:
        return (
            f"{library} had no such release when this was written, but {others[0]} had: ask for {others[0]}=={release}"
        )
    if release not in known:
        return f"the newest that was: {newest_tried(library)}"
    place = known.index(release)
    older = [each for each in known[:place] if each in tried][-1:]
    newer = [each for each in known[place:] if each in tried][:1]
    return f"the nearest that were: {', '.join(older + newer)}"


def of_fault(fault: Mapping[str, Any], tried: Collection[str], *, in_full: bool) -> Iterator[str]:
    """A fault, which release mends it, and what upstream says."""
    if fault["verdict"] == WRONG:
        size = size_in_words(fault.get("off_by"))
        happens = f"{fault['quantity']} {size} from iteration {fault['iteration']} on"
    elif fault["verdict"] in NOTED:
        size = size_in_words(fault.get("off_by"))
        happens = f"{fault['verdict']}: {fault['quantity']} {size}; {fault.get('sentence') or NOTED[fault['verdict']]}"
    else:
        happens = f"{fault['verdict']}: {fault.get('sentence', '')}"
    last = releases_in(fault["releases"], fault["software"])[-1]
    mended = mended_in_words(fault.get("mended_in", ""), last, fault["software"], tried)
    names = fault.get("upstream", [])
    reported = ", ".join(names) or NO_REPORT
    yield f"{NAMES[fault['strategy']]} ({', '.join(fault['modes'])}): {happens}; right again in {mended}; {reported}"
    if in_full:
        if fault.get("where"):
            yield f"  first in {fault['where']}"
        for name in names:
            address, what = read()["upstream"][name]
            yield f"  {name}: {what} ({address})"


def of_release(found: Found, strategies: Sequence[str], *, in_full: bool) -> Iterator[str]:
    """The lines below the first. in_full: also ways in which no launcher trains, and what is right."""
    beside = f" with torch {found.torch}" if found.torch else ""
    yield f"  (measured on a CPU{beside})"
    hidden = 0
    for fault in found.faults:
        if not in_full and not any(is_used(fault["strategy"], name) for name in fault["modes"]):
            hidden += len(fault["modes"])
            continue
        yield from (f"  {line}" for line in of_fault(fault, tried_of(found), in_full=in_full))
    if hidden:
        ways = "way that no launcher trains in is" if hidden == 1 else "ways that no launcher trains in are"
        yield f"  {hidden} {ways} not right: --modes lists them"
    if not in_full:
        return
    for strategy in found.strategies:
        yield f"  right under {NAMES[strategy]}: {', '.join(found.right.get(strategy, [])) or 'no mode that was tried'}"
    if found.library == "deepspeed":
        yield from (f"  {line}" for line in of_costs(found.release, strategies))


def tried_of(found: Found) -> Collection[str]:
    """The releases that were tried with the same PyTorch."""
    own = [each for each in read()["measured"] if (each["software"], each["torch"]) == (found.library, found.torch)]
    return {release for each in own for release in each["releases"]}


def of_costs(release: str, strategies: Sequence[str]) -> Iterator[str]:
    """What an iteration costs more than under an earlier release, and of which model that was counted."""
    for cost in read()["costs"]:
        if cost["strategy"] in strategies and release in releases_in(cost["releases"], "deepspeed"):
            times = cost["times"]
            more = f"{100 * (times - 1):.0f} % more" if times < 2 else f"{times:g} times as many"
            than = "than" if times < 2 else "as"
            counted = "counted with a tiny T5 and ds_configs/ alone; other models may see none of it"
            modes = ", ".join(cost["modes"])
            yield f"{NAMES[cost['strategy']]} ({modes}): {more} {cost['figure']} {than} in {cost['before']}, {counted}"


class Answer(NamedTuple):
    """Of one release beside one PyTorch."""

    status: int
    lines: list[str]


SEVEREST_FIRST = (NOT_RIGHT, NOT_TRIED, ALL_RIGHT)


def answer(releases: Mapping[str, str], strategies: Sequence[str], *, in_full: bool = False) -> tuple[str, int]:
    """What the ledger says of these releases, in lines, the severest answer first; and the exit status.

    The status is NOT_RIGHT if one is not right in a way that counts, else NOT_TRIED if one was not tried in a way in
    which launchers train. Raises NoAnswer.
    """
    if not releases:
        raise NoAnswer("no library of the ledger is installed here", "Ask about a release: --answer 0.18.2")
    answers: list[Answer] = []
    for library, release in releases.items():
        own = found_of(library, release)
        if not own:
            option = f"torch {public(release)}" if library == "torch" else f"releases {library}=={release}"
            name = Found(library, release, "", {}, ()).name
            first = f"{name}: not tried; {nearest(library, public(release))}"
            how = f"  try it, in a checkout: python -m t5bench ledger --{option.replace('deepspeed==', '')}"
            answers.append(Answer(NOT_TRIED, [first, how]))
        for found in own:
            chosen = only(found, strategies)
            if not chosen.strategies:
                answers.append(Answer(NOT_TRIED, [f"{found.name}: not tried under {', '.join(strategies)}"]))
                continue
            untried = untried_ways(chosen, strategies)
            status = NOT_TRIED if untried else ALL_RIGHT
            if used_faults(chosen):
                status = NOT_RIGHT
            begin = first_line(chosen, untried)
            answers.append(Answer(status, [begin, *of_release(chosen, strategies, in_full=in_full)]))
    answers.sort(key=lambda one: SEVEREST_FIRST.index(one.status))
    return "\n".join(line for one in answers for line in one.lines), answers[0].status


def only(found: Found, strategies: Sequence[str]) -> Found:
    """What was measured under these strategies alone."""
    right = {name: modes for name, modes in found.right.items() if name in strategies}
    faults = [fault for fault in found.faults if fault["strategy"] in strategies]
    return Found(found.library, found.release, found.torch, right, faults)
