"""The checks of `hsx doctor`: software, patch points, storage and target."""
