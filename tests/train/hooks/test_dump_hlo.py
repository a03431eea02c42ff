"""`DumpHLO`: the programs that a run's step compiles to."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import only

import replicax as rx
from replicax.train.hooks import dump_hlo

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)


def loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.tanh(batch["x"] @ model["w"]) ** 2


@pytest.mark.parametrize(
    ("mode", "per_call"), only([("jit", 2), ("exact", 1)], [("jit", 2), ("jit", 1), ("exact", 1)])
)
def test_the_programs_of_the_step_are_written_and_named(
    mode: str, per_call: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dp = rx.DataParallel(loss, optax.sgd(0.1), mode=mode, mesh=rx.make_mesh(2))
    state = dp.init({"w": jnp.ones(4)})
    more = {} if mode == "exact" else {"steps_per_call": per_call}
    hook = rx.hooks.DumpHLO(tmp_path / "hlo")
    result = rx.fit(dp, state, {"x": X}, batch_size=8, epochs=1, hooks=[hook], **more)
    assert result.failed_hooks == ()
    found = {path.name: path.read_text() for path in (tmp_path / "hlo").iterdir()}
    marks, texts = zip(*(text.split("\n", 1) for text in found.values()), strict=True)
    assert set(marks) == {dump_hlo._MARK.strip()}
    found = dict(zip(found, texts, strict=True))
    assert "stablehlo.tanh" in found.pop("step.mlir")
    assert all(text.startswith("HloModule") for text in found.values())
    assert "tanh" in "".join(found.values())
    if mode == "jit":
        assert "all-reduce" in found["step.hlo"]
        assert len(found) == 1
    else:
        assert set(found) == {f"step.{number}.hlo" for number in range(len(found))}
        assert len(found) > 1
    (said,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("hlo "))
    assert said.split()[1] == f"{tmp_path / 'hlo'}:"
    assert "8 rows" in said
