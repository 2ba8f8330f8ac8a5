"""Planners on published trainings."""

# As --peer names them; peers/ has a module for each, those of the second line in sailor.py.
PEERS = (
    "megatron-lm", "deepspeed", "simumax", "calculon",
    "sailor", "piper", "varuna", "galvatron", "amp", "metis", "flashflex",
)  # fmt: skip
