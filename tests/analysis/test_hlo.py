"""HLO text: the instructions that run, how often, and with which shapes."""

import pytest

from replicax.analysis.hlo import instructions, shape_bytes


def runs(text: str, opcode: str) -> list[int]:
    return sorted(each.runs for each in instructions(text) if each.opcode == opcode)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("f32[8,16]{1,0}", 512),
        ("bf16[10]{0}", 20),
        ("f8e4m3fn[6]", 6),
        ("pred[3]", 3),
        ("u8[5]{0}", 5),
        ("s4[6]", 3),
        ("c64[2]", 16),
        ("f32[0,4]", 0),
        ("token[]", 0),
        ("(f32[2]{0}, s32[], /*index=2*/f64[3]{0})", 36),
        ("((f32[2], f32[3]), (f32[1]))", 24),
        ("f32[8,128]{1,0:T(8,128)}", 4096),
    ],
)
def test_bytes_of_a_shape(shape: str, size: int) -> None:
    assert shape_bytes(shape) == size


# As TPU compilers write a loop: without its trip count.
COUNTER = """\
%less (t: (s32[], f32[4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  %t = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%body (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%s), index=1
  %sine = f32[4]{0} sine(%x)
  %j = s32[] get-tuple-element(%s), index=0
  %same = s32[] copy(%j)
  %one = s32[] constant(1)
  %next = s32[] add(%same, %one)
  ROOT %r = (s32[], f32[4]{0}) tuple(%next, %sine)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %first = s32[] copy(%zero)
  %state = (s32[], f32[4]{0}) tuple(%first, %p)
  ROOT %w = (s32[], f32[4]{0}) while(%state), condition=%less, body=%body
}
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", 12),
        ("%zero = s32[] constant(0)", "%zero = s32[] constant(2)", 10),
        ("%zero = s32[] constant(0)", "%zero = s32[] constant(20)", 0),
        ("%zero = s32[] constant(0)", "%zero = s32[] sine(%p)", 1),
        ("%one = s32[] constant(1)", "%one = s32[] constant(2)", 1),
        ("add(%same, %one)", "multiply(%same, %one)", 1),
        ("%j = s32[] get-tuple-element(%s), index=0", "%j = s32[] sine(%x), index=0", 1),
        ("direction=LT", "direction=NE", 1),
        ("compare(%i, %limit)", "compare(%limit, %i)", 1),
        ("tuple(%next, %sine)", "tuple(%same, %sine)", 1),
    ],
)
def test_a_counter_tells_how_often_a_loop_runs(old: str, new: str, expected: int) -> None:
    assert runs(COUNTER.replace(old, new), "sine")[-1:] == [expected]
