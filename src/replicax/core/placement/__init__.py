"""Placement: where arrays lie, and around which devices a step is traced.

Read in this order:

    mesh.py                 meshes, their axes, and the shardings of rows and of whole arrays
    sharding_rules.py       rules of a path's regex and a `PartitionSpec`
    pipeline_schedules.py   in which tick the backward passes begin
    matrix_slots.py         whole matrices are dealt to owners, each in a slot
    matrix_owners.py        an optimizer by owners, and how gradients get to them and updates back
    layout.py               `Layout` and the table of layouts: the sharding of each leaf of a state
    fsdp_gather.py          whole parameters where the loss uses them, of those that `fsdp` shards
    dispatch_context.py     a step runs in its own mesh, whatever the caller's, one thread at a time

A layout is asked, and its name is compared nowhere else: a new one is an entry in the table.
The room imports `errors`, `arguments`, `ground`, `data` and `jaxprs`. Tests:
`tests/core/placement/`; `tests/core/test_layout_parity.py` compares the layouts with one device.
Public: `rx.layout`, `rx.make_mesh`.
"""
