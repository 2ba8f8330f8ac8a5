"""A small T5 pretraining engine from PyPI packages alone; README.md beside this file is the map of it."""
