"""References for kernels that include communication."""
