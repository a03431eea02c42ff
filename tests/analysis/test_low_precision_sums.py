"""Sums in 16-bit floats, read from small programs."""

import pytest

from replicax.analysis.low_precision_sums import sums_in_16_bits

ADD = """
%add (a: T[], b: T[]) -> T[] {
  %a = T[] parameter(0)
  %b = T[] parameter(1)
  ROOT %sum = T[] add(%a, %b)
}
"""
MAX = ADD.replace(" add(", " maximum(")
ENTRY = """
ENTRY %main (p0: T[8192,64], p1: s32[8192,1]) -> T[64] {
  %p0 = T[8192,64]{1,0} parameter(0)
  %p1 = s32[8192,1]{1,0} parameter(1)
  %zero = T[] constant(0)
  %table = T[512,64]{1,0} broadcast(%zero), dimensions={}
BODY
}
"""
LOOKUP = (
    "  ROOT %found = T[512,64]{1,0} scatter(%table, %p1, %p0), update_window_dims={1}, "
    "inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, "
    'to_apply=%add, metadata={op_name="jit(step)/scatter-add"}'
)
BIAS = (
    "  ROOT %found = T[64]{0} reduce(%p0, %zero), dimensions={0}, to_apply=%add, "
    'metadata={op_name="jit(step)/reduce_sum" stack_frame_id=2}'
)
ALL_REDUCE = (
    "  ROOT %found = T[8192,64]{1,0} all-reduce(%p0), replica_groups={{0,1,2,3}}, to_apply=%add, "
    'metadata={op_name="jit(step)/dot_general"}'
)
FRAMES = """
FileNames
1 "/lib/python3.11/site-packages/flax/linear.py"
2 "/home/someone/model.py"

FunctionNames
1 "apply"

FileLocations
1 {file_name_id=2 function_name_id=1 line=12 end_line=12 column=4 end_column=8}
2 {file_name_id=1 function_name_id=1 line=99 end_line=99 column=4 end_column=8}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""


def module(body: str, dtype: str = "bf16", add: str = ADD) -> str:
    text = "HloModule jit_step, num_partitions=8\n" + FRAMES + add
    return (text + ENTRY.replace("BODY", body)).replace("T[", f"{dtype}[")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (LOOKUP, ("scatter", "bf16[512,64]", 8192, "jit(step)/scatter-add", "")),
        (BIAS, ("reduce", "bf16[64]", 8192, "jit(step)/reduce_sum", "model.py:12")),
        (ALL_REDUCE, ("all-reduce", "bf16[8192,64]", 4, "jit(step)/dot_general", "")),
    ],
)
def test_a_sum_in_bfloat16_and_not_in_float32(body: str, expected: tuple[object, ...]) -> None:
    (found,) = sums_in_16_bits(module(body))
    assert (found.kind, found.shape, found.terms, found.op_name, found.source) == expected
    assert found.dtype == "bfloat16"
    assert sums_in_16_bits(module(body, "f16"))[0].dtype == "float16"
    assert sums_in_16_bits(module(body, "f32")) == ()
    assert sums_in_16_bits(module(body, add=MAX)) == ()


def test_few_terms_are_no_matter() -> None:
    few = BIAS.replace("reduce(%p0", "reduce(%few")
    few = "  %few = T[255,64]{1,0} slice(%p0), slice={[0:255], [0:64]}\n" + few
    assert sums_in_16_bits(module(few)) == ()


def test_a_reduction_in_two_parts_is_one() -> None:
    """As XLA has them on a GPU: 128 of 64 terms, and then one of these 128."""
    split = (
        "  %parts = T[64,128,64]{2,1,0} bitcast(%p0)\n"
        "  %first = T[128,64]{1,0} reduce(%parts, %zero), dimensions={0}, to_apply=%add, "
        'metadata={op_name="jit(step)/reduce_sum" stack_frame_id=2}\n'
    ) + BIAS.replace("reduce(%p0", "reduce(%first")
    (found,) = sums_in_16_bits(module(split))
    assert (found.terms, found.count) == (8192, 1)


def test_an_index_with_rows_of_its_own_adds_nothing_up() -> None:
    """The gradient of `scores[arange(rows), labels]`: one number of each row."""
    picked = (
        "  %pairs = s32[8192,2]{1,0} concatenate(%p1, %p1), dimensions={1}\n"
        "  %ones = T[8192]{0} broadcast(%zero), dimensions={}\n"
        "  ROOT %found = T[8192,64]{1,0} scatter(%p0, %pairs, %ones), update_window_dims={}, "
        "inserted_window_dims={0,1}, scatter_dims_to_operand_dims={0,1}, index_vector_dim=1, "
        "to_apply=%add"
    )
    assert sums_in_16_bits(module(picked)) == ()
    assert sums_in_16_bits(module(LOOKUP + ", unique_indices=true")) == ()


def test_a_loop_is_multiplied_out() -> None:
    loop = (
        "%body (p: T[8192,64]) -> T[8192,64] {\n  %p = T[8192,64]{1,0} parameter(0)\n"
        "  ROOT %each = T[8192,64]{1,0} all-reduce(%p), to_apply=%add\n}\n"
        "%condition (p: T[8192,64]) -> pred[] {\n  ROOT %go = pred[] constant(true)\n}\n"
    )
    start = (
        "  ROOT %loop = T[8192,64]{1,0} while(%p0), condition=%condition, body=%body, "
        'backend_config={"known_trip_count":{"n":"12"}}'
    )
    (found,) = sums_in_16_bits(module(start, add=ADD + loop))
    assert (found.count, found.terms, found.group) == (12, 8, None)
