"""Planners on published trainings."""

# As --peer names them; peers/ has a module for each.
PEERS = ("megatron-lm", "deepspeed", "simumax", "calculon")
