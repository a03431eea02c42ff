"""Benchmark a training step in every mode: time, scaling and memory, as tables and plots."""
