"""Runs on many machines: launchers' ranks, progress over all ledgers, blocks of rows on Ray."""
