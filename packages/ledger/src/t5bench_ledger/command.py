"""``ledger``: which releases of libraries train what they are asked to; ``python -m t5bench ledger`` in a checkout.

Answering needs nothing but Python. Measuring needs a checkout with the native engine: measure.py.
"""

import argparse
import signal
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from t5bench_ledger import answer, show
from t5bench_ledger.answer import NoAnswer, chosen
from t5bench_ledger.modes import MODES, RELEASES_OF, STRATEGIES

UNUSABLE = 2
# A cell takes seconds; importing DeepSpeed too, but a busy machine may be twenty times slower.
LIMIT_SECONDS = 180
EPILOG = """exit status of an answer: 0 right, 1 not right in a way that counts, 3 not tried.
Without --mine, --answer or --show it measures, for which it needs a checkout."""


def listed(names: Iterable[str]) -> str:
    """For --help: quoted, because some names have a blank."""
    return ", ".join(f"'{name}'" for name in names).replace("%", "%%")


def default_releases() -> list[str]:
    """As --releases names them."""
    named = [(library, release) for library, releases in RELEASES_OF.items() for release in releases]
    return [release if library == "deepspeed" else f"{library}=={release}" for library, release in named]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    answers = parser.add_mutually_exclusive_group()
    asked = "yes or no for a release of DeepSpeed, or torch==, transformers== or accelerate==RELEASE"
    answers.add_argument("--answer", metavar="RELEASE", help=asked)
    answers.add_argument("--mine", action="store_true", help="the same for the installed releases; trains nothing")
    shown = "a fault as one file of plain PyTorch and the library, which is printed and run"
    answers.add_argument("--show", nargs=3, metavar=("LIBRARY", "RELEASE", "MODE"), help=shown)
    strategies = f"separated by commas (default: all, {listed(STRATEGIES)})"
    parser.add_argument("--strategies", default=",".join(STRATEGIES), metavar="LIST", help=strategies)
    modes = (
        "of an answer: also ways of training that nobody uses. Measuring: which, separated by commas (default: all, "
    )
    every = ",".join(mode.name for mode in MODES)
    modes_help = f"{modes}{listed(mode.name for mode in MODES)})"
    parser.add_argument("--modes", nargs="?", const=every, metavar="LIST", help=modes_help)
    measuring = parser.add_argument_group("measuring")
    releases = "0.18.2, transformers==4.45.2, accelerate==every, ... (default: those around which something changed)"
    measuring.add_argument("--releases", default=",".join(default_releases()), metavar="LIST", help=releases)
    costs_help = "count what an iteration of ZeRO costs under each release, instead of judging it"
    measuring.add_argument("--costs", action="store_true", help=costs_help)
    measuring.add_argument("--torch", help="releases, each in an environment of its own (default: the running torch)")
    measuring.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="a longer cell hangs (%(default)s s)")
    bisect = "go on until each change of a verdict lies between neighbouring releases"
    measuring.add_argument("--bisect", action="store_true", help=bisect)
    accuse = "run the files of --show in every release that they accuse, or in --releases, and keep what they print"
    measuring.add_argument("--accuse", action="store_true", help=accuse)
    pairs = "try so many pairs of settings, drawn at random, of the installed DeepSpeed and torch, or of --releases"
    measuring.add_argument("--pairs", type=int, default=0, metavar="COUNT", help=pairs)
    measuring.add_argument("--seed", type=int, default=1, help="of the pairs (%(default)s)")
    locate = "train a wrong cell once more with a trace, and say where it first differs"
    measuring.add_argument("--locate", action="store_true", help=locate)
    measuring.add_argument("--output", type=Path, help="directory of the runs (default: outputs/ledger)")
    page = "write the package's data and pages, in which cells that are not measured again stay"
    measuring.add_argument("--publish", action="store_true", help=page)


def run(args: argparse.Namespace) -> int:
    """The exit status."""
    try:
        if args.show:
            return show.show(*args.show)
        if not args.mine and args.answer is None:
            return measured(args)
        releases = answer.installed() if args.mine else answer.named(args.answer)
        said, status = answer.answer(
            releases, chosen(args.strategies, STRATEGIES, "strategy"), in_full=args.modes is not None
        )
    except NoAnswer as problem:
        print(f"error: {problem.found}\n       {problem.remedy}", file=sys.stderr)
        return UNUSABLE
    print(said)
    return status


def measured(args: argparse.Namespace) -> int:
    """Trains. Raises NoAnswer outside of a checkout."""
    if not (find_spec("t5bench") and find_spec("native")):
        remedy = "In a clone of the repository, run: python -m t5bench ledger. Here it answers: ledger --answer 0.19.8"
        raise NoAnswer("measuring trains with the native engine, which is not part of this package", remedy)
    releases = "" if args.releases == ",".join(default_releases()) else args.releases
    if args.pairs:
        from t5bench_ledger.pairs import measure as pairs

        return pairs.run(args, releases)
    if args.accuse:
        from t5bench_ledger import accuse

        return accuse.run(args, releases)
    from t5bench_ledger import measure

    return measure.run(args)


def main() -> int:
    if hasattr(signal, "SIGPIPE"):  # a reader such as head may have read enough
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    parser = argparse.ArgumentParser(prog="ledger", description="Say which releases train what they are asked to.")
    add_arguments(parser)
    return run(parser.parse_args())
