"""Data: from the user's rows to batches on devices.

Read in this order:

    batch.py         `Batch`, rows with mask and index, of one size; `Replicated`, `ExtraRows`
    host_arrays.py   arrays of other libraries as NumPy arrays
    rows.py          `OpenedRows`: what a user passed, opened, to be counted and padded
    grain_elements.py   whether the elements of a Grain dataset are rows
    loader_state.py  the state of a loader, from which it goes on, as JSON
    sources.py       arrays, Grain data sets and iterables, opened for an epoch by one process
    per_row.py       `ByRow`: values with an entry for each row, next to means
    merged.py        `Merged` and `HostMetric`: metrics that are no means
    share.py         the rows that a process holds, on its devices; `Batches` of several steps
    feed.py          `Feed`, one epoch of batches: padded, split over devices, prefetched
    given.py         the batches of any source, to evaluate; its first rows, to plan and verify

It imports `errors` and `ground`, and may import `jaxprs`. Tests: `tests/core/data/`. Public:
`rx.Batch`, `rx.Replicated`, `rx.ExtraRows`, `rx.ByRow`, `rx.ProcessLocal`, `rx.HostMetric`,
`rx.types.Merged`, `rx.types.Feed` (from `dp.feed`).
"""
