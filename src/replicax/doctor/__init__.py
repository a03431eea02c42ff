"""Checks of a machine, an installation and a job: what was found, a verdict, and the fix."""
