"""The process that compiles for a target: `python -m replicax.plan.compile_process DESCRIPTOR`.

It is started with its own environment and never has the code of the step, so that neither planning
nor a compiler that crashes can disturb who plans. It reads a `Description`, answers `Ready` or
`Failed`, then answers each `Program` with a `Compilation`, a `TooLarge` or a `Failed`.
"""

import sys
from multiprocessing.connection import Connection
from typing import Any

import jax
from jax.experimental import topologies

from replicax.plan.compilation import NOT_INSTALLED, WRONG_VERSION, Description, Failed, Ready
from replicax.plan.compile import answer
from replicax.plan.installed import (
    NotInstalledError,
    WrongVersionError,
    check_installed,
    check_libraries,
    compiler_name,
)
from replicax.plan.program import Program
from replicax.wording import first_line


def main(connection: Connection) -> None:
    """Answer until nobody asks any more."""
    description: Description = connection.recv()
    try:
        check_installed(description.platform)
        devices = _devices(description)
        check_libraries(description.platform)
    except NotInstalledError as missing:
        connection.send(Failed(str(missing), NOT_INSTALLED))
        return
    except WrongVersionError as wrong:
        connection.send(Failed(str(wrong), WRONG_VERSION))
        return
    except Exception as error:  # whatever a compiler raises, who asked decides
        connection.send(Failed(first_line(error)))
        return
    connection.send(Ready(compiler_name(description.platform)))
    while True:
        try:
            program: Program = connection.recv()
        except EOFError:
            return
        connection.send(answer(program, devices))


def _devices(description: Description) -> list[Any]:
    if description.platform == "cpu":
        return list(jax.devices("cpu"))
    topology = topologies.get_topology_desc(platform=description.platform, **description.topology)
    if len(topology.devices) != description.devices:
        raise ValueError(
            f"the compiler describes {len(topology.devices)} devices, not {description.devices}"
        )
    return list(topology.devices)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
