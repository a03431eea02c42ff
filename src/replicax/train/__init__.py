"""Train: the loop around the step, which gives batches, evaluates, saves and resumes.

    files/          a file or an object store, written whole, sealed by a digest, held by a lease
    checkpoints/    states in files
    folder/         a run's folder: its checkpoints, what it was started with, time spent
    guarded.py      a step that skips an update that is not finite, or a spike
    dispatched.py   steps that were called, and their results as these arrive
    hooks/          observers of a run; the loop knows none by name
    run/            `Run`, its loop and its result

Each imports those before it. Read `run/loop.py` first, then `open_run.py`. It may import `core`,
`cluster`, `islands` and `analysis`, and no command. Tests: `tests/train/`, and kills in
`tests/chaos/`. Public: `rx.fit`, `rx.Run`, `rx.Hook`, the hooks and loggers (`docs/run.md`,
`docs/hooks.md`).
"""
