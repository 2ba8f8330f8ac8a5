"""The exception that carries a problem and its remedy."""

from dataclasses import dataclass


@dataclass(unsafe_hash=True)
class Problem(ValueError):
    """Something that the user can fix. `str()` says in one line what is wrong."""

    found: str
    remedy: str = ""
    """What to do about it, perhaps in several lines."""
    code: str = ""
    """The kind of problem in one word, for programs; in a plan, one of docs/failure_table.md."""
    fatal: bool = True
    """Whether the request itself is wrong; otherwise this machine lacks something, which does not stop a dry run."""

    def __post_init__(self) -> None:
        self.found = " ".join(self.found.split())
        super().__init__(self.found)

    @property
    def report(self) -> str:
        """For the terminal: the error, and the remedy below it."""
        return "\n       ".join([f"error: {self}", *self.remedy.splitlines()])
