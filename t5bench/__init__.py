"""Plans runs, records them, compares them. docs/house.md says which room holds what, and which may import which."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
