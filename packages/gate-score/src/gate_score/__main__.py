"""``gate-score``: how many public defects each gate catches, and how often it is wrong about honest trainings."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gate_score.page import picture, table, write_page
from gate_score.score import measure


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gate-score", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("gate-score"), help="of the trainings, which are kept")
    parser.add_argument("--only", nargs="*", default=(), metavar="WORD", help="defects with this word in their name")
    parser.add_argument("--no-honest", action="store_true", help="leave out the honest pairs")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="write the page and its picture there")
    arguments = parser.parse_args(words)
    result = measure(arguments.directory, arguments.only, not arguments.no_honest)
    (arguments.directory / "score.json").write_text(json.dumps(result.to_json(), indent=1))
    print(table(result))
    if arguments.page:
        write_page(result, arguments.page)
        picture(result, arguments.page / "score.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
