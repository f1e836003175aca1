"""The checks of `hsx doctor`: software, patch points, storage and target, each as findings with what to do about them."""
