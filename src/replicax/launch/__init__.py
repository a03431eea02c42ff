"""Launch, outside the processes: start them, on this host or through an engine, and supervise them.

Read `job_spec.py`, `supervisor.py` (restarts), `island_supervisor.py` (islands, each restarted by
itself), `attempt.py` (all processes until the last is gone), `event_loop.py` (outputs, signals and
times), `process.py` with `guard.py` (nothing is left running), `cause.py` (who failed first);
`scripts.py` and `on_ray.py` are for other engines, the latter with `ray_placed.py` (which process
runs where) and `ray_actors.py` (the part on a node). It imports `net`, `cluster` and the variables
of `islands`, and no other command. Tests: `tests/launch/`, and `tests/engines/`. Public:
`replicax launch` (`docs/processes.md`).
"""
