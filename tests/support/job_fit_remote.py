"""`fit` in a job with an object store: `OBJECTS STEPS`; compares the end with a run without one."""

import sys
from pathlib import Path
from typing import Any

import optax
from support.job_cases import DATA, loss, model
from support.object_store import register
from support.resumable import bits, told

import replicax as rx


def main() -> None:
    """Train up to `STEPS`, from the newest checkpoint in the store."""
    job = rx.initialize(verbose=False)
    register(Path(sys.argv[1]))
    dp = rx.DataParallel(loss, optax.adamw(1e-3), job=job)

    def fit(**settings: Any) -> rx.types.Fit:
        state, steps = dp.init(model()), int(sys.argv[2])
        settings |= {"batch_size": 16, "steps": steps, "log_every": 1, "progress": False}
        return rx.fit(dp, state, DATA, **settings)

    found = fit(run_dir="s3://bucket/runs/x", saving=rx.Saving(every=4))
    whole = fit()
    same = bits(found.state) == bits(whole.state) and told(found.records) == told(whole.records)
    print(f"{found.steps} steps, {'equal' if same else 'different'}")


if __name__ == "__main__":
    main()
