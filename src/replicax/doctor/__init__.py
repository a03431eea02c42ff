"""Checks of a machine, an installation and a job: findings, verdicts and fixes."""
