"""Plans runs, records them and compares them. docs/house.md says what each room holds, and what it may import."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
