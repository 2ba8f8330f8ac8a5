"""``gate-score``: how many public defects each gate catches, and how often it is wrong about honest trainings."""

import argparse
import json
from pathlib import Path

DESCRIPTION = (
    "How many defects from public threads each gate catches, and how often it raises an alarm about two honest "
    "trainings: trains a small model with and without each defect on two CPU processes."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    place = "of the trainings, which are kept and not repeated (default: %(default)s)"
    parser.add_argument("--directory", type=Path, default=Path("gate-score"), help=place)
    parser.add_argument("--only", nargs="*", default=(), metavar="WORD", help="defects with this word in their name")
    parser.add_argument("--no-honest", action="store_true", help="leave out the honest pairs")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="write the page and its picture there")


def run(arguments: argparse.Namespace) -> int:
    from gate_score.page import table, write_page
    from gate_score.processes import leave_out_future_warnings
    from gate_score.score import measure

    leave_out_future_warnings()
    if arguments.page:
        arguments.page.mkdir(parents=True, exist_ok=True)  # before what takes long
    result = measure(arguments.directory, arguments.only, not arguments.no_honest)
    (arguments.directory / "score.json").write_text(json.dumps(result.to_json(), indent=1))
    print(table(result))
    if arguments.page:
        write_page(result, arguments.page)
    return 0
