"""HLO text: the instructions that run, how often, and with which shapes."""

import pytest

from replicax.analysis.hlo import (
    Instruction,
    arrays,
    elements,
    elements_in,
    instructions,
    memory_bytes,
    shape_bytes,
)

LOOPS = """\
HloModule step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p: f32[8,16]) -> f32[8,8] {
  %p = f32[8,16]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%inner (t: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %t = (s32[], f32[8,8]{1,0}) parameter(0)
  %x = f32[8,8]{1,0} get-tuple-element(%t), index=1
  %inner-reduce = f32[8,8]{1,0} all-reduce(%x), channel_id=1, to_apply=%add
  ROOT %out = (s32[], f32[8,8]{1,0}) tuple(%t)
}

%less (t: (s32[], f32[8,8])) -> pred[] {
  %t.1 = (s32[], f32[8,8]{1,0}) parameter(0)
  ROOT %lt = pred[] constant(true)
}

%outer (t: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %t.2 = (s32[], f32[8,8]{1,0}) parameter(0)
  %f = f32[8,8]{1,0} fusion(%t.2), kind=kOutput, calls=%fused
  ROOT %w = (s32[], /*index=1*/f32[8,8]{1,0}) while(%t.2), condition=%less, body=%inner, \
backend_config={"known_trip_count":{"n":"5"}}
}

ENTRY %main (x: f32[8,16]) -> f32[8,8] {
  %x.1 = f32[8,16]{1,0} parameter(0), metadata={op_name="x"}
  %loop = (s32[], f32[8,8]{1,0}) while(%x.1), condition=%less, body=%outer, \
backend_config={"known_trip_count":{"n":"3"}}
  %once = f32[8,8]{1,0} fusion(%x.1), kind=kOutput, calls=%fused
  ROOT %result = f32[8,8]{1,0} get-tuple-element(%loop), index=1
}
"""

ENTRY = "ENTRY %main (p: f32[4]) -> f32[4] {{\n  %p = f32[4]{{0}} parameter(0)\n  {}\n}}\n"


def runs(text: str, opcode: str) -> list[int]:
    return sorted(each.runs for each in instructions(text) if each.opcode == opcode)


def only(line: str, opcode: str) -> Instruction:
    (found,) = (each for each in instructions(ENTRY.format(line)) if each.opcode == opcode)
    return found


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("all-reduce", [15]),  # a loop in a loop: 3 x 5
        ("dot", [1, 3]),  # one fusion called from a loop and from the entry
        ("while", [1, 3]),
        ("add", [15]),
        ("get-tuple-element", [1, 15]),
    ],
)
def test_known_trip_counts_multiply(opcode: str, expected: list[int]) -> None:
    assert runs(LOOPS, opcode) == expected


def test_a_loop_of_unknown_length_counts_once() -> None:
    text = LOOPS.replace('"known_trip_count":{"n":"3"}', '"other":{"n":"3"}')
    assert runs(text, "all-reduce") == [5]


def test_what_nothing_calls_does_not_run() -> None:
    text = "%dead (a: f32[2]) -> f32[2] {\n  ROOT %d = f32[2] dot(%a, %a)\n}\n\n" + LOOPS
    assert runs(text, "dot") == [1, 3]


def test_operands_have_their_shapes() -> None:
    (dot,) = (each for each in instructions(LOOPS) if each.name == "dot.1" and each.runs == 1)
    assert dot.shape == "f32[8,8]{1,0}"
    assert dot.operands == ("f32[8,16]{1,0}", "f32[8,16]{1,0}")
    assert "lhs_contracting_dims={1}" in dot.attributes


BRANCHES = """\
%left (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  ROOT %sine = f32[4]{0} sine(%a)
}

%right (b: f32[4]) -> f32[4] {
  %b = f32[4]{0} parameter(0)
  ROOT %cosine = f32[4]{0} cosine(%b)
}

ENTRY %main (i: s32[], p: f32[4]) -> f32[4] {
  %i = s32[] parameter(0)
  %p = f32[4]{0} parameter(1)
  ROOT %c = f32[4]{0} conditional(%i, %p, %p), CALLED
}
"""


@pytest.mark.parametrize(
    "called",
    [
        "branch_computations={%left, %right}",
        "true_computation=%left, false_computation=%right",  # how a predicate's branches are named
    ],
)
def test_every_branch_of_a_conditional_counts(called: str) -> None:
    text = BRANCHES.replace("CALLED", called)
    assert runs(text, "sine") == [1]
    assert runs(text, "cosine") == [1]


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


def test_arrays_of_a_tuple() -> None:
    shape = "(f32[8,16]{1,0}, s32[], /*index=2*/bf16[0])"
    assert arrays(shape) == [("f32", (8, 16)), ("s32", ()), ("bf16", (0,))]


@pytest.mark.parametrize(
    ("line", "opcode", "size"),
    [
        ("ROOT %r = (f32[4]{0}, f32[]) all-reduce(%p, %p), to_apply=%add", "all-reduce", 20),
        ("%s = ((f32[4]), f32[32]) all-gather-start(%p), dimensions={0}", "all-gather-start", 144),
        ("%t = f32[4]{0:T(128)} copy(%p)", "copy", 16),
        ("%t = (f32[4]{0:T(128)}, f32[2]{0:T(128)}) custom-call(%p)", "custom-call", 24),
    ],
)
def test_shapes_of_any_kind_are_read(line: str, opcode: str, size: int) -> None:
    assert only(line, opcode).bytes == size


def test_text_without_an_entry_has_no_instructions() -> None:
    assert list(instructions("")) == []


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


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[8]{0}", 32),
        ("f32[8]{0:T(8,128)(2,1)}", 32),
        ("f32[8]{0:T(128)S(1)}", 0),
        ("(f32[8]{0:T(128)S(1)}, f32[2]{0:T(128)}, u32[]{:S(2)})", 8),
        ("f32[8]", 32),
    ],
)
def test_bytes_in_main_memory(shape: str, size: int) -> None:
    assert memory_bytes(shape) == size


def test_elements_of_a_tuple_keep_their_layouts() -> None:
    shape = "((f32[8]{0:T(128)S(1)}), s32[], /*index=2*/bf16[2,3]{1,0})"
    assert elements(shape) == ["f32[8]{0:T(128)S(1)}", "s32[]", "bf16[2,3]{1,0}"]
    assert elements_in(shape) == 8 + 1 + 6


def test_what_an_instruction_reads_and_where_it_was_traced() -> None:
    (product,) = (each for each in instructions(LOOPS) if each.name == "dot.1" and each.runs == 1)
    assert len(product.inputs) == 2
    found = only('ROOT %r = f32[4] sine(%p), metadata={op_name="jit(f)/sin" line=3}', "sine")
    assert (found.inputs, found.op_name, found.is_root) == (("p",), "jit(f)/sin", True)
    parameter = only("ROOT %r = f32[4] sine(%p)", "parameter")
    assert (parameter.argument, parameter.op_name, parameter.is_root) == ("0", "", False)
