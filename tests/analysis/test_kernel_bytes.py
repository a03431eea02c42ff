"""Bytes that fusions touch, by hand."""

import pytest

from replicax.analysis.hlo import read_module
from replicax.analysis.kernels import kernel_bytes

ARRAY, ROW, INDEX = 8 * 4 * 4, 4 * 4, 4
FUSION = """\
%inner (s: f32[8,4], j: s32[]) -> f32[1,4] {
  %s = f32[8,4]{1,0} parameter(0)
  %j = s32[] parameter(1)
  ROOT %piece = f32[1,4]{1,0} dynamic-slice(%s, %j, %j), dynamic_slice_sizes={1,4}
}

%put (t: f32[8,4], v: f32[1,4], k: s32[]) -> f32[8,4] {
  %t = f32[8,4]{1,0} parameter(0)
  %v = f32[1,4]{1,0} parameter(1)
  %k = s32[] parameter(2)
  ROOT %there = f32[8,4]{1,0} dynamic-update-slice(%t, %v, %k, %k)
}

%fused (p: f32[8,4], u: f32[1,4], i: s32[]) -> RESULT {
  %p = f32[8,4]{1,0} parameter(0)
  %u = f32[1,4]{1,0} parameter(1)
  %i = s32[] parameter(2)
  BODY
}

ENTRY %main (a: f32[8,4], b: f32[1,4], c: s32[]) -> RESULT {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[1,4]{1,0} parameter(1)
  %c = s32[] parameter(2)
  ROOT %kernel = RESULT fusion(%a, %b, %c), kind=kLoop, calls=%fused
}
"""
WHOLE = "f32[8,4]{1,0}"
UPDATE = "dynamic-update-slice(%p, %u, %i, %i)"


def touched(result: str, *body: str) -> int:
    module = read_module(FUSION.replace("RESULT", result).replace("BODY", "\n  ".join(body)))
    kernel = module.root("main")
    assert kernel is not None
    return kernel_bytes(module, kernel)


@pytest.mark.parametrize(
    ("result", "body", "size"),
    [
        (WHOLE, ["ROOT %r = f32[8,4]{1,0} sine(%p)"], 2 * ARRAY),
        (
            "bf16[1,4]{1,0}",
            [
                "%half = bf16[8,4]{1,0} convert(%p)",
                "ROOT %r = bf16[1,4]{1,0} dynamic-slice(%half, %i, %i), dynamic_slice_sizes={1,4}",
            ],
            ROW + INDEX + ROW / 2,
        ),
        (
            "f32[1,4]{1,0}",
            ["ROOT %r = f32[1,4]{1,0} fusion(%p, %i), kind=kLoop, calls=%inner"],
            ROW + INDEX + ROW,
        ),
        (WHOLE, [f"ROOT %r = f32[8,4]{{1,0}} {UPDATE}"], 2 * ROW + INDEX),
        (
            "f32[32]{0}",
            [f"%new = f32[8,4]{{1,0}} {UPDATE}", "ROOT %r = f32[32]{0} bitcast(%new)"],
            2 * ROW + INDEX,
        ),
        (
            WHOLE,
            ["ROOT %r = f32[8,4]{1,0} fusion(%p, %u, %i), kind=kLoop, calls=%put"],
            2 * ROW + INDEX,
        ),
        (
            WHOLE,
            ["ROOT %r = f32[8,4]{1,0} scatter(%p, %i, %u), to_apply=%add"],
            3 * ROW + INDEX,  # the operand of an add is read
        ),
        (
            WHOLE,
            [f"%new = f32[8,4]{{1,0}} {UPDATE}", "ROOT %r = f32[8,4]{1,0} sine(%new)"],
            2 * ARRAY + ROW + INDEX,
        ),
        (
            WHOLE,
            [
                "%zero = f32[] constant(0)",
                "%made = f32[8,4]{1,0} broadcast(%zero), dimensions={}",
                "ROOT %r = f32[8,4]{1,0} dynamic-update-slice(%made, %u, %i, %i)",
            ],
            ARRAY + ROW + INDEX,
        ),
        ("f32[32]{0}", ["ROOT %r = f32[32]{0} bitcast(%p)"], 0),
        ("f32[4,8]{1,0}", ["ROOT %r = f32[4,8]{1,0} transpose(%p), dimensions={1,0}"], 2 * ARRAY),
        (
            "(f32[8,4]{1,0}, f32[8,4]{1,0})",
            [
                "%sine = f32[8,4]{1,0} sine(%p)",
                "ROOT %r = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%sine, %p)",
            ],
            2 * ARRAY,
        ),
        (
            "(f32[8,4]{1,0:T(8,128)S(1)}, f32[8,4]{1,0})",
            [
                "%sine = f32[8,4]{1,0} sine(%p)",
                "%cosine = f32[8,4]{1,0} cosine(%p)",
                "ROOT %r = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%sine, %cosine)",
            ],
            2 * ARRAY,
        ),
        (
            "((f32[8,4]{1,0}, f32[8,4]{1,0}), f32[8,4]{1,0})",
            [
                "%sine = f32[8,4]{1,0} sine(%p)",
                "%two = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%sine, %sine)",
                "ROOT %r = ((f32[8,4]{1,0}, f32[8,4]{1,0}), f32[8,4]{1,0}) tuple(%two, %sine)",
            ],
            4 * ARRAY,
        ),
    ],
    ids=[
        "all",
        "slice of a conversion",
        "slice in a fusion",
        "update",
        "update under another shape",
        "update in a fusion",
        "scatter",
        "update that goes on",
        "update of what is made",
        "bitcast",
        "transpose",
        "passed through",
        "one result on the chip",
        "tuple in a tuple",
    ],
)
def test_bytes_of_a_fusion(result: str, body: list[str], size: float) -> None:
    assert touched(result, *body) == size
