"""A defect: a few lines that replace a seam of the trainer, where it comes from, and what a user would see."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gate_score.layouts import LAYOUTS
from gate_score.trainer import Recipe, Trainer

OWN = "own"  # a kind of mistake that this project plants, without a public thread
UNCONFIRMED = {"huggingface/transformers#46775", "ISEEKYAN/Megatron-LM#104"}
"""Threads that we were told of, and did not find."""
DEFECTS: list["Defect"] = []


@dataclass(frozen=True)
class Defect:
    name: str
    kind: str
    """Its class: the module of defects/ that has it."""
    layout: str
    source: str
    """A public thread, as OWNER/REPOSITORY#NUMBER, or OWN."""
    seen: str
    """What a user would see, in a sentence."""
    recipe: Recipe
    """In which it shows."""
    patch: type
    """Its methods replace those of the layout's trainer."""

    @property
    def needs(self) -> list[str]:
        """What hides it where it is missing."""
        recipe = self.recipe
        wanted = {
            "bf16": recipe.precision == "bf16",
            "a resume": recipe.resume_after,
            "uneven samples": recipe.uneven,
            "dropout": recipe.dropout,
            "label smoothing": recipe.smoothing,
            "short steps": recipe.short,
        }
        return [name for name, is_needed in wanted.items() if is_needed]

    @property
    def trainer(self) -> type[Trainer]:
        """The layout's trainer with the mistake."""
        return type(f"Broken{self.patch.__name__}", (self.patch, LAYOUTS[self.layout]), {})


def defect(layout: str, source: str, seen: str, **recipe: Any) -> Callable[[type], type]:
    """Adds a class of replaced methods to the list."""

    def add(patch: type) -> type:
        words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in patch.__name__)
        kind = patch.__module__.rpartition(".")[2]
        DEFECTS.append(Defect(words.strip(), kind, layout, source, seen, Recipe(**recipe), patch))
        return patch

    return add
