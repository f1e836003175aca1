"""Benchmarks: the path to the file beside its limits and vLLM's own, latency, engine, step cost."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # where `python -m benchmarks` is found
