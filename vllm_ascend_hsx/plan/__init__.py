"""Cost of extraction in memory, disk and bandwidth, computed without a server.

Used by `hsx plan`.
"""
