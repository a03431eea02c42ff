"""Pipeline: the layers of a model, split over the devices of the mesh axis `stage`.

Read in this order:

    split_at_scan.py      cut the user's loss at its scan over layers: before, scan, rest
    stage_ticks.py        the forward and backward passes of one stage, tick by tick
    staged_objective.py   `Staged`: the objective of all stages, which the step uses as any other

It imports `errors` and the rooms up to `step`; no room imports it, only `program.py`. The
schedules, which layouts name, are in `placement/pipeline_schedules.py`. Tests:
`tests/core/pipeline/`. Public: nothing but `rx.layout` with stages (`docs/layouts.md`).
"""
