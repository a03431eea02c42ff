"""The same step in every mode: time, scaling, memory; tables and plots."""
