"""A plan as files."""

import json
from pathlib import Path

from replicax.errors import MissingDependencyError
from replicax.plan.plots import draw_memory, draw_scaling
from replicax.plan.result import Plan


def write_plan(plan: Plan, folder: str | Path) -> list[Path]:
    """Write `plan.json`, `memory.png` and, where there is a forecast, `scaling.png`.

    Without matplotlib there are no pictures, and the notes in `plan.json` say so.

    Args:
        plan: of any kind.
        folder: made where it is not there yet.

    Returns:
        The paths of what was written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "plan.json", folder / "memory.png"]
    plain = plan.to_json()
    try:
        draw_memory(plan, paths[1])
        if plan.scaling is not None:
            paths.append(folder / "scaling.png")
            draw_scaling(plan, paths[2])
    except MissingDependencyError as error:
        del paths[1:]
        plain["notes"].append(f"no pictures: {error}")
    text = json.dumps(plain, indent=2, allow_nan=False)
    paths[0].write_text(f"{text}\n", encoding="utf-8")
    return paths
