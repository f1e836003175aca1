"""Benchmarks: path to the file compared with limits and vLLM, latency, engine, cost of a step."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # directory for `python -m benchmarks`
