"""How far a prediction may be off: intervals that should hold 90 % of what new sources measure.

Each is a factor: a figure lies between predicted / factor and predicted x factor. ``python -m t5bench predict
--intervals`` computes them from published measurements, says how many others they hold, and a test compares
(t5bench/costmodel/evidence/intervals.py, docs/prediction.md).
"""

LEVEL = 0.90
TIME = 1.412
"""Of an iteration's absolute time."""
RATIO = 1.212
"""Of the ratio of two times on the same machine with the same software: of two layouts, or of a calibrated time."""
MEMORY = 1.054
"""Of the fullest GPU's memory."""


def around(value: float, factor: float) -> tuple[float, float]:
    return value / factor, value * factor
