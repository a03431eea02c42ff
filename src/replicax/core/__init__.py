"""The math of a training step and its parallelization; depends only on jax, numpy and optax."""
