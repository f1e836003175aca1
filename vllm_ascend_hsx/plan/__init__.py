"""What extraction costs before a server is started: memory, disk, bandwidth. Arithmetic; used by `hsx plan`."""
