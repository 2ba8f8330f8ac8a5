"""Whether two trainings are the same: their curves compared, and the words for it. The standard library alone.

`judge` ships it and the benchmark's parity check uses it; it knows neither.
"""
