"""What a step will cost on machines that are not here yet: formulas alone, without JAX."""
