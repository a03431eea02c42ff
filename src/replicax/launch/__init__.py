"""Launch, outside the processes: start them, on this host or through an engine, and supervise them.

Read `job_spec.py`, `supervisor.py` (restarts), `attempt.py` (all processes until the last is gone),
`process.py` with `guard.py` (nothing is left running), `cause.py` (who failed first); `scripts.py`
and `on_ray.py` are for other engines. It imports `cluster`, and no other command. Tests:
`tests/launch/`, and `tests/engines/`. Public: `replicax launch` (`docs/processes.md`).
"""
