"""References for int8: quantising rows, and products of what is quantised."""
