"""Texts with gaps, as a T5 fills them: <extra_id_0>, <extra_id_1> and so on stand for what is missing."""

import re
from collections.abc import Sequence

from t5bench import Problem

GAP = re.compile(r"<extra_id_(\d+)>")


def check_gaps(text: str) -> None:
    """Raises Problem unless the text has the gaps 0, 1, 2 ... in this order, as in training."""
    gaps = [int(number) for number in GAP.findall(text)]
    if gaps != list(range(len(gaps))) or not gaps:
        names = " ".join(f"<extra_id_{number}>" for number in gaps) or "none"
        remedy = "For example: 'The <extra_id_0> walks in <extra_id_1> park.'"
        raise Problem(f"a T5 fills gaps that are named <extra_id_0>, <extra_id_1> ... in order, found {names}", remedy)


def fillings(output: str) -> dict[int, str]:
    """What a model's output has after each gap's name; of a gap that is named twice, the first."""
    _, *parts = GAP.split(output)
    pieces: dict[int, str] = {}
    for number, text in zip(parts[::2], parts[1::2], strict=True):
        pieces.setdefault(int(number), text.strip())
    return pieces


def filled(text: str, pieces: dict[int, str]) -> str:
    """The text with its gaps filled, each filling in brackets; a gap that the model left out stays as it is."""

    def replacement(match: re.Match[str]) -> str:
        number = int(match[1])
        return f"[{pieces[number] or 'nothing'}]" if number in pieces else match[0]

    return GAP.sub(replacement, text)


def without_special(output: str, special_tokens: Sequence[str]) -> str:
    """Without special tokens but those of gaps."""
    for token in special_tokens:
        if not GAP.fullmatch(token):
            output = output.replace(token, " ")
    return output
