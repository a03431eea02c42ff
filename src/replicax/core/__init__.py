"""The mathematics of a step and its way onto devices: jax, numpy and optax, nothing else."""
