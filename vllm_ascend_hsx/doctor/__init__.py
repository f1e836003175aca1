"""The checks of `hsx doctor`: software, touches, storage and target, each as findings with what to do about them."""
