"""Reads runs: log lines, statistics, comparison. It never launches anything."""
