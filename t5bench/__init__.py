"""Plans runs, records them and compares them. docs/house.md says what each room holds, and what it may import."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


class Problem(ValueError):
    """Something that the user can put right: `str()` says in one line what is wrong, `remedy` what to do about it."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(" ".join(problem.split()))
        self.remedy = remedy
