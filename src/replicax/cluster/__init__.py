"""Cluster, inside each process: detect its rank, join the others, compare values, watch for hangs.

Read `join.py` (`initialize`), `place.py` with `engines.py` (rank and coordinator, from a launcher;
`jax_engines.py` asks JAX for the launchers that it does not know),
`rendezvous.py`, `hub.py` and `link.py` (process 0, and connections to it), and `cluster_job.py`,
the `Job` that the core is handed. `same_system.py` tells whether a process of this host is gone.
It imports `errors`, `text`, `net`, and of the core only `core.ground`, which imports nothing here.
Tests: `tests/cluster/`, and real launchers in `tests/engines/`. Public: `rx.initialize`,
`rx.Patience` (`docs/processes.md`).
"""
