"""References for int8 and int4: quantisation of rows, and products of quantised tensors."""
