"""A small T5 pretraining engine built only on PyPI packages; see README.md in this directory."""
