"""Where this process stands in its job, and which variables say so."""

from collections.abc import Mapping

from replicax.cluster.place import Place, find_place
from replicax.doctor.row import OK, PROBLEM, Row, parted
from replicax.errors import ConfigError

CHECK = "place"


def check_place(env: Mapping[str, str]) -> tuple[list[Row], Place | None]:
    """The row, and the place where it could be found."""
    try:
        place = find_place(env)
    except ConfigError as error:
        found, fix = parted(str(error))
        return [Row(CHECK, found, PROBLEM, fix)], None
    by = "" if place.engine == "nothing" else f"{place.engine}: "
    figures = {
        "engine": place.engine,
        "process": place.process,
        "processes": place.processes,
        "coordinator": place.coordinator,
        "job": place.job,
        "reasons": dict(place.reasons),
    }
    return [Row(CHECK, f"{by}{place.line()}", OK, figures=figures)], place
