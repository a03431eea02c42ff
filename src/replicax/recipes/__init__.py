"""Complete training jobs, each in one file."""
