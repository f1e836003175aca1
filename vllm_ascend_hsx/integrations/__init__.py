"""Integrations with tools that consume hidden states.

Each module needs its tool and is imported only on request.
"""
