"""A plan as files."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from replicax.errors import MissingDependencyError
from replicax.plan.forecast import ScalingPoint
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
    plain = to_json(plan)
    try:
        draw_memory(plan, paths[1])
        if plan.scaling is not None and plan.target.devices > 1:
            paths.append(folder / "scaling.png")
            draw_scaling(plan, paths[2])
    except MissingDependencyError as error:
        del paths[1:]
        plain["notes"].append(f"no pictures: {error}")
    text = json.dumps(plain, indent=2, allow_nan=False)
    paths[0].write_text(f"{text}\n", encoding="utf-8")
    return paths


def to_json(plan: Plan) -> dict[str, Any]:
    """The whole plan and what follows from it, as strict JSON has it: what is no number is null."""
    plain: dict[str, Any] = _strict(plan.to_json())
    formula, traffic, scaling = plan.formula, plan.traffic, plan.scaling
    plain["formula"] |= {
        "state": formula.state,
        "temporaries": formula.temporaries,
        "total": formula.total,
    }
    if traffic is not None:
        plain["traffic"] |= _strict({"wire_bytes": traffic.wire_bytes, "share": traffic.share})
    if scaling is not None:
        for name, points in (("weak", scaling.weak), ("strong", scaling.strong)):
            plain["scaling"][name] = [_point(each) for each in points]
    return plain


def _point(point: ScalingPoint) -> Any:
    follows = {
        "batch_size": point.batch_size,
        "efficiency": point.efficiency,
        "rows_per_second": point.rows_per_second,
    }
    return _strict({**dataclasses.asdict(point), **follows})


def _strict(value: Any) -> Any:
    """`value` of what JSON has, keys of several parts joined by commas."""
    if isinstance(value, Mapping):
        return {_key(key): _strict(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_strict(each) for each in value]
    if isinstance(value, np.ndarray | np.generic):
        return _strict(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _key(key: Any) -> str:
    return ",".join(map(str, key)) if isinstance(key, tuple) else str(key)
