"""What must stay as it is while code is moved or rewritten: stored from one checkout, then compared with another.

    python tests/unchanged store DIR [PART...] [--tree PATH]     writes what the checkout does into DIR, as text
    python tests/unchanged compare DIR [PART...] [--tree PATH]   prints what it does otherwise; exit status 1 if it does

--tree is the checkout that is looked at (default: this one), so that an old one and a new one are asked the same. It is
asked only through its commands, scripts and tests. The parts:

    help         --help of every command and script
    plans        --dry-run and --dry-run=json of every launcher, engine and family in twelve settings
    predictions  predict and layouts on forty machines
    records      what compare, parity, explain, pack, verify and history say about stored records
    faults       what a user sees of the failures of docs/failure_table.md that one machine can play
    digits       losses and gradient norms of a short training under every strategy and engine
    hosts        the failures on two hosts of the test cluster; needs root

Without names, all parts but hosts run. DIR/made holds the records that every checkout reads; only ``store`` makes them.
What varies by nature (paths, times, process ids, ports) has a name in angle brackets instead.
"""

import argparse
import difflib
import shutil
import sys
import tempfile
import time
from pathlib import Path

from look import Look
from parts import PARTS, make_records

REPO_ROOT = Path(__file__).resolve().parent.parent.parent
ON_REQUEST = ("hosts",)


def write(look: Look, part: str, folder: Path) -> None:
    """Writes the part's texts into the folder, in place of what is there."""
    began = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    count = 0
    for name, text in PARTS[part](look):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(look.normal(text))
        count += 1
    print(f"{part}: {count} files in {time.monotonic() - began:.0f} s", file=sys.stderr)


def texts(folder: Path) -> dict[str, list[str]]:
    """The lines of every file below the folder, by its path there."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text().splitlines(keepends=True) for path in paths}


def print_differences(part: str, stored: Path, found: Path) -> int:
    """Prints a unified diff for each file that differs; returns how many do."""
    before = texts(stored)
    after = texts(found)
    count = 0
    for name in sorted(before.keys() | after.keys()):
        names = (f"stored/{part}/{name}", f"now/{part}/{name}")
        lines = list(difflib.unified_diff(before.get(name, []), after.get(name, []), *names))
        sys.stdout.writelines(line if line.endswith("\n") else f"{line}\n" for line in lines)
        count += bool(lines)
    print(f"{part}: {count} of {len(before.keys() | after.keys())} files differ", file=sys.stderr)
    return count


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/unchanged", description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("store", "compare"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {' '.join(PARTS)} (default: all but hosts)")
    parser.add_argument("--tree", type=Path, default=REPO_ROOT, help="checkout to look at (default: this one)")
    args = parser.parse_args()
    parts = args.parts or [name for name in PARTS if name not in ON_REQUEST]
    for name in parts:
        if name not in PARTS:
            parser.error(f"there is no part '{name}'; choose from {', '.join(PARTS)}")
    directory = args.directory.resolve()
    if args.task == "compare":
        for name in parts:
            if not (directory / name).is_dir():
                parser.error(f"{directory} has no {name}; store it first, from the checkout that is right")
    made = directory / "made"
    with tempfile.TemporaryDirectory(prefix="unchanged-") as scratch:
        look = Look(args.tree.resolve(), Path(scratch))
        if args.task == "store" and "records" in parts:
            make_records(look, made)
        if made.is_dir():
            shutil.copytree(made, look.made)
        if args.task == "store":
            for name in parts:
                write(look, name, directory / name)
            return 0
        count = 0
        for name in parts:
            found = look.scratch / "found" / name
            write(look, name, found)
            count += print_differences(name, directory / name, found)
    print(f"{count} files differ" if count else "nothing differs")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
