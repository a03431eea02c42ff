"""Islands: jobs that each hold a replica of the state, and exchange sums between programs."""
