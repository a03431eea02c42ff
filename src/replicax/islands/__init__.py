"""Islands: jobs that each hold a replica of the state, and exchange sums between programs.

After `docs/islands.md`, read in this order:

    island_variables.py   environment variables, and
    island_place.py       what they say: index, addresses, secret
    messages.py           everything that travels between two islands
    parts.py              which island computes which parts, and the tree that adds them
    agreement.py          who lives, and which exchanges are complete; without threads or sockets
    local_parts.py        the parts of one exchange: computed, sent, combined
    local_arrays.py       arrays that each island has for itself, in place of parts
    group_changes.py      who joined and left, and what a new one receives
    founding.py           which islands begin, and whether they fit together
    group.py              this island among the others: enters, exchanges, gives the state
    frames.py             arrays on a channel, with lengths checked
    handshake.py          both sides say who they are, and prove that they know the secret
    island_listener.py    the listening port
    peer.py               the two connections to one other island
    island_network.py     connections to all of them, again and again
    shared_parts.py       the same parts in the other processes of an island
    island_job.py         the jobs that the core and a run are handed
    initialize.py         `rx.initialize`

It imports `errors`, `text`, `net`, `cluster`, and of the core only `core.ground`. Tests:
`tests/islands/`; faults with processes in `tests/chaos/islands/`. Public: `rx.initialize`.
"""
