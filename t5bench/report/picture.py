"""The picture of a comparison: how long an iteration of each row takes, and where it goes.

The page draws it as SVG, a terminal as text. A bar is as long as the median iteration, and divided as the profiled one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from t5bench.compare.comparison import Comparison
from t5bench.compare.rows import Row
from t5bench.compare.statistics import Estimate
from t5bench.profile.parts import AXES, BACKWARD, BUBBLE, FORWARD, HOST, RECOMPUTATION, SENDING, STEP, WAITING, shares
from t5bench.report.figures import Rows, best
from t5bench.report.tables import duration_text, estimate_text, mark, profile_of
from t5bench.text import WAITING_FOR_HOST

MOST_BARS = 24
LONGEST_INTERVAL = 1.5  # times the longest median: an interval may have no end to speak of
NARROWEST = 10  # characters of the longest bar in a terminal
CAPTION = "Each bar is a median iteration, divided as the profiled iteration was (the mean of all ranks)."
WITHOUT_PROFILE = " A row without a profile is not divided (PROFILE_ITERATION takes one)."


class TimeKind(NamedTuple):
    """A kind of time, which several parts of a profile may have in common."""

    name: str
    parts: Sequence[str]
    colour: str
    block: str
    """What a terminal fills its piece of a bar with."""
    letter: str
    """The same in ASCII."""


COMPUTING = TimeKind("computing", (FORWARD, BACKWARD, RECOMPUTATION, STEP), "#0072b2", "\N{FULL BLOCK}", "#")
REST = TimeKind("rest", (), "#9a9a9a", "-", "-")
UNDIVIDED = TimeKind("not profiled", (), "#9a9a9a", "\N{MEDIUM SHADE}", "?")
KINDS = (
    COMPUTING,
    TimeKind(WAITING_FOR_HOST, (HOST,), "#e69f00", "\N{LIGHT SHADE}", ":"),
    TimeKind("sending: data parallel", (SENDING[AXES[0]],), "#d55e00", "d", "d"),
    TimeKind("sending: tensor parallel", (SENDING[AXES[1]],), "#aa4466", "t", "t"),
    TimeKind("sending: pipeline", (SENDING[AXES[2]],), "#cc79a7", "p", "p"),
    TimeKind("sending: ZeRO's gathers", (SENDING[AXES[3]],), "#7766cc", "g", "g"),
    TimeKind("sending: all ranks", (SENDING[AXES[4]],), "#a0783c", "a", "a"),
    TimeKind("pipeline bubble", (BUBBLE,), "#56b4e9", "\N{MIDDLE DOT}", "."),
    TimeKind("waiting for slower ranks", (WAITING,), "#b9a400", "w", "w"),
    REST,
)


@dataclass(frozen=True)
class Bar:
    """A row of the picture."""

    name: str
    """As the figures and the page's table call the row."""
    label: str
    """What is written at the bar: the name, with the marks that remarks refer to."""
    milliseconds: Estimate
    """Of an iteration."""
    pieces: Mapping[TimeKind, float]
    """Milliseconds by kind, none of them 0."""

    def told(self, kind: TimeKind) -> str:
        """A piece in words."""
        size = self.pieces[kind]
        return f"{kind.name}: {duration_text(size)} ({size / self.milliseconds.median:.0%})"


class BarPiece(NamedTuple):
    """A piece of a bar as the page draws it; start and length are in per cent of the width."""

    kind: TimeKind
    start: float
    length: float
    title: str


@dataclass(frozen=True)
class PicturePanel:
    """The rows with one number of processes, the fastest first."""

    title: str
    """The verdict about them."""
    bars: Sequence[Bar]

    @property
    def longest(self) -> float:
        """Milliseconds of the longest bar."""
        return max(bar.milliseconds.median for bar in self.bars)

    @property
    def end(self) -> float:
        """Milliseconds that the page's whole width stands for, with room for intervals."""
        ends = [bar.milliseconds.high or 0.0 for bar in self.bars]
        return max(self.longest, min(max(ends), LONGEST_INTERVAL * self.longest))

    def time(self, bar: Bar) -> str:
        """A bar's time with its interval, all of a panel in milliseconds or all in seconds."""
        if round(self.longest) < 1000:
            return f"{estimate_text(bar.milliseconds)} ms"
        return f"{estimate_text(bar.milliseconds.over(Estimate(1000.0, 1000.0, 1000.0)))} s"

    def description(self, bar: Bar) -> str:
        """A bar for someone who does not see it."""
        return f"{bar.label}: {self.time(bar)}; {', '.join(bar.told(kind) for kind in bar.pieces)}"

    def pieces(self, bar: Bar) -> Iterator[BarPiece]:
        """Where the pieces of a bar lie, in per cent of the width."""
        start = 0.0
        for kind, size in bar.pieces.items():
            yield BarPiece(kind, 100 * start / self.end, 100 * size / self.end, f"{bar.label}, {bar.told(kind)}")
            start += size

    def interval(self, bar: Bar) -> tuple[float, float] | None:
        """Where the interval of a bar's time begins and ends, in per cent of the width, as far as there is room."""
        low = bar.milliseconds.low
        high = bar.milliseconds.high
        if low is None or high is None:
            return None
        return 100 * min(1.0, low / self.end), 100 * min(1.0, high / self.end)


def panels(comparison: Comparison, rows: Rows) -> list[PicturePanel]:
    """One for each number of processes of which a row has a time. rows: by the names that figures have for them."""
    timed = {name: row for name, row in rows.items() if row.milliseconds}
    drawn = best(timed, MOST_BARS)
    found = []
    for group in comparison.groups:
        of_size = [name for name, row in drawn.items() if row.run.world_size == group.world_size]
        of_size.sort(key=lambda name: drawn[name].milliseconds.median)
        if of_size:
            found.append(PicturePanel(group.verdict, [_bar(name, drawn[name]) for name in of_size]))
    return found


def _bar(name: str, row: Row) -> Bar:
    profile = profile_of(row)
    median = row.milliseconds.median
    label = name.partition(" (")[0] + mark(row)
    if not profile:
        return Bar(name, label, row.milliseconds, {UNDIVIDED: median})
    share_of = shares(profile.ranks)
    pieces = {}
    for kind in KINDS:
        pieces[kind] = median * sum(share_of[part] for part in kind.parts)
    # Rounded parts may add up to a little more than the iteration.
    pieces[REST] = max(0.0, median - sum(pieces.values()))
    return Bar(name, label, row.milliseconds, {kind: size for kind, size in pieces.items() if size > 0})


def kinds(of: Sequence[PicturePanel]) -> list[TimeKind]:
    """Those that occur, in their order."""
    found = set()
    for panel in of:
        for bar in panel.bars:
            found.update(bar.pieces)
    return [kind for kind in (*KINDS, UNDIVIDED) if kind in found]


def caption(of: Sequence[PicturePanel]) -> str:
    """What one has to know to read it."""
    return CAPTION + (WITHOUT_PROFILE if UNDIVIDED in kinds(of) else "")


# ---- as text ---------------------------------------------------------------------------------------------------------


def text(of: Sequence[PicturePanel], width: int, encoding: str) -> list[str]:
    """Lines of at most so many characters, but for the titles, in blocks that this encoding has or else in ASCII."""
    in_ascii = not _has_blocks(encoding)
    lines: list[str] = []
    drawn_pieces = ""
    for panel in of:
        names = max(len(bar.label) for bar in panel.bars)
        times = max(len(panel.time(bar)) for bar in panel.bars)
        room = max(NARROWEST, width - names - times - 4)
        lines.append(panel.title)
        for bar in panel.bars:
            drawn = _drawn(bar, room / panel.longest, in_ascii)
            drawn_pieces += drawn
            lines.append(f"  {bar.label:<{names}} {drawn} {panel.time(bar)}")
        lines.append("")
    shown = [kind for kind in kinds(of) if _fill(kind, in_ascii) in drawn_pieces]
    legend = [f"{_fill(kind, in_ascii)} {kind.name}" for kind in shown]
    return [*lines, *_wrapped(legend, width)]


def _has_blocks(encoding: str) -> bool:
    try:
        "".join(kind.block for kind in KINDS).encode(encoding)
    except (UnicodeError, LookupError):
        return False
    return True


def _fill(kind: TimeKind, in_ascii: bool) -> str:
    return kind.letter if in_ascii else kind.block


def _drawn(bar: Bar, scale: float, in_ascii: bool) -> str:
    """scale: characters per millisecond. Ends are rounded and not lengths, so that no error adds up."""
    drawn = ""
    end = 0.0
    for kind, size in bar.pieces.items():
        end += size
        drawn += _fill(kind, in_ascii) * (round(scale * end) - len(drawn))
    return drawn


def _wrapped(words: Sequence[str], width: int) -> list[str]:
    """Lines of words that stay whole, two spaces apart."""
    lines = [""]
    for word in words:
        joined = f"{lines[-1]}  {word}"
        if lines[-1] and len(joined) > width:
            lines.append(f"  {word}")
        else:
            lines[-1] = joined
    return lines if words else []
