"""References for int8 and int4: quantising rows, and products of what is quantised."""
