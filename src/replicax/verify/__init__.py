"""Verify that a step gives the same numbers on any number of devices."""
