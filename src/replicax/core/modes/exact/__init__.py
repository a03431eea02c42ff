"""Exact: the same bits on any power of two of devices.

A step is traced on one micro-shard, cut where micro-shards are combined, and each segment compiled
once for one device. Read in this order, after `docs/exact.md`:

    micro_shard_primitives.py   `sum_all` and `gather`: they mark, in the trace, where to cut
    fixed_tree.py               the accumulator that calls them; the same step as one program
    ordered_reduction.py        sums over replicas by the rest of the same tree
    split_trace.py              cut the trace into segments
    replica_program.py          compile a segment for one device, and run it on all
    combining_programs.py       add in a fixed order, and gather, between segments
    part_results.py             results of a program by micro-shard, kept or on demand
    exchanged_parts.py          combine micro-shards of which other jobs compute some
    host_executor.py            call these one after the other; loops around sums
    sharded_update.py           layouts that split the optimizer state: update a piece of it
    micro_shard_function.py     a step as a function of one micro-shard
    own_draws.py                random numbers of rows in a step's body, others in each micro-shard
    micro_shard_step.py         all of it, as a function of a state and a batch
    exact_mode.py               the mode: its accumulator, its reduction, and how it builds a step

It imports `errors`, the rooms below, `step_builder` and `mapping`. No other room knows of
micro-shards: `mode_table.py` has the mode, and files above hand on `micro_shards`. Tests:
`tests/core/modes/exact/`; `benchmarks/exact_search.py` searches for counterexamples. Public:
nothing but `mode="exact"` and `micro_shards=`.
"""
