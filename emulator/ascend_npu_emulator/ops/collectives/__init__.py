"""References for kernels that communicate themselves."""
