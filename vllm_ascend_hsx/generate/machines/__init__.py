"""Runs on many machines: the ranks of launchers, and tasks of a Ray cluster."""
