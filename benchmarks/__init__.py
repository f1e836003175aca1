"""Benchmarks: the path to the file against what could be at most and against vLLM's own, latency, engine, cost per step."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # where `python -m benchmarks` is found
