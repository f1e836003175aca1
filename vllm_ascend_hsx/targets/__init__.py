"""Targets whose class in vLLM lacks what extraction needs."""
