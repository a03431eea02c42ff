"""The loop around the step: epochs, evaluation, records, progress."""
