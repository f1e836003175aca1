"""The `hsx` command."""
