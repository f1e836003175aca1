"""Runs on many machines: the ranks of launchers, and tasks of a Ray cluster.

With `--ray` a block of rows is a task. Each task returns ledger lines, so one process writes the
ledger. Ray repeats the tasks of dead nodes. A repeated task compares the first line of the ledger
before it sends a row: a node with another disk under the same path is refused.
"""
