"""Net: how processes of a job, and islands, find each other's ports and prove who they are.

    address.py       `host:port`
    secret.py        the secret of a job, in the environment or in a file
    sockets.py       listening, connecting, and who leaves a port where many strangers wait
    message.py       typed messages, and how they travel
    proof.py         the handshake
    channel.py       one end of a connection, for threads
    stall_clock.py   a clock that knows when this process was frozen

It knows no message of `cluster` or `islands`, which both stand on it, and imports `errors` alone.
Tests: `tests/cluster/` and `tests/islands/`.
"""
