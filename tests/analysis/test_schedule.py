"""Schedules written by hand, against sums by hand."""

import pytest

from replicax.analysis.schedule import Kernel, Schedule, Wait, WhileLoop, read_schedule

# A loop over 5 stacked layers: it reads one layer of the stack, and writes one of another.
LOOP = """\
%product (w: f32[5,16,8], i: s32[], x: f32[4,16]) -> f32[4,8] {
  %w = f32[5,16,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,16,8]{2,1,0} dynamic-slice(%w, %i, %zero, %zero), dynamic_slice_sizes={1,16,8}
  %layer = f32[16,8]{1,0} bitcast(%slice)
  %x = f32[4,16]{1,0} parameter(2)
  ROOT %dot.1 = f32[4,8]{1,0} dot(%x, %layer), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%keep (all: f32[5,4,8], one: f32[4,8], i.1: s32[]) -> (f32[5,4,8], f32[4,8]) {
  %all = f32[5,4,8]{2,1,0} parameter(0)
  %one = f32[4,8]{1,0} parameter(1)
  %row = f32[1,4,8]{2,1,0} bitcast(%one)
  %i.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %update = f32[5,4,8]{2,1,0} dynamic-update-slice(%all, %row, %i.1, %zero.1, %zero.1)
  %sine = f32[4,8]{1,0} sine(%one)
  ROOT %both = (f32[5,4,8]{2,1,0}, f32[4,8]{1,0}) tuple(%update, %sine)
}

%body (t: (s32[], f32[5,16,8], f32[4,16], f32[5,4,8])) -> (s32[], f32[5,16,8]) {
  %t = (s32[], f32[5,16,8]{2,1,0}, f32[4,16]{1,0}, f32[5,4,8]{2,1,0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%t), index=0
  %w.2 = f32[5,16,8]{2,1,0} get-tuple-element(%t), index=1
  %x.2 = f32[4,16]{1,0} get-tuple-element(%t), index=2
  %all.2 = f32[5,4,8]{2,1,0} get-tuple-element(%t), index=3
  %fused = f32[4,8]{1,0} fusion(%w.2, %i.2, %x.2), kind=kOutput, calls=%product, \
metadata={op_name="jit(step)/layer/dot_general"}
  %kept = (f32[5,4,8]{2,1,0}, f32[4,8]{1,0}) fusion(%all.2, %fused, %i.2), kind=kLoop, calls=%keep
  ROOT %next = (s32[], f32[5,16,8]{2,1,0}) tuple(%i.2, %w.2)
}

%less (t.1: (s32[])) -> pred[] {
  %t.1 = (s32[]) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (p: f32[4,16]) -> f32[4,16] {
  %p = f32[4,16]{1,0} parameter(0)
  %state = (s32[], f32[5,16,8]{2,1,0}) tuple(%p, %p)
  %loop = (s32[], f32[5,16,8]{2,1,0}) while(%state), condition=%less, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  ROOT %end = f32[4,16]{1,0} negate(%p)
}
"""


def entry(*lines: str, before: str = "") -> Schedule:
    body = "\n".join(f"  {line}" for line in lines)
    return read_schedule(
        f"{before}\nENTRY %main (p: f32[8]) -> f32[8] {{\n"
        f"  %p = f32[8]{{0}} parameter(0)\n{body}\n}}\n"
    )


def test_a_loop_over_layers_touches_one_layer_each_time() -> None:
    schedule = read_schedule(LOOP)
    fused, kept, end = schedule.kernels
    assert (fused.name, fused.runs, fused.flops) == ("fused", 5, 2 * 4 * 16 * 8)
    # One layer of weights, the index, the input; the result.
    assert fused.bytes == 4 * (16 * 8 + 1 + 4 * 16 + 4 * 8)
    # The row and the index; the row in its place, and its sine.
    assert kept.bytes == 4 * (4 * 8 + 1 + 4 * 8 + 4 * 8)
    assert (end.runs, end.flops, end.bytes) == (1, 0, 2 * 4 * 4 * 16)
    assert schedule.flops == 5 * fused.flops
    assert schedule.bytes == 5 * (fused.bytes + kept.bytes) + end.bytes
    assert (fused.op_name, fused.dtype) == ("jit(step)/layer/dot_general", "f32")
    assert (kept.op_name, kept.dtype) == ("", "")


def test_a_loop_keeps_its_body_once_and_in_order() -> None:
    loop, end = read_schedule(LOOP).steps
    assert isinstance(loop, WhileLoop)
    assert loop.trips == 5
    assert [each.name for each in loop.steps if isinstance(each, Kernel)] == ["fused", "kept"]
    assert isinstance(end, Kernel)


ASYNCHRONOUS = (
    "%start = f32[8]{0} all-reduce-start(%p), replica_groups={{0,1,2,3}}, to_apply=%add",
    "%sine = f32[8]{0} sine(%p)",
    "%cosine = f32[8]{0} cosine(%sine)",
    "%done = f32[8]{0} all-reduce-done(%start)",
    "ROOT %end = f32[8]{0} negate(%done)",
)


def test_a_start_that_does_not_wait_in_the_background_is_synchronous() -> None:
    """XLA's GPU backend writes every collective as a pair."""
    first, *rest = ASYNCHRONOUS
    schedule = entry(f'{first}, backend_config={{"is_sync":true}}', *rest)
    (collective,) = schedule.collectives
    assert not collective.asynchronous
    assert collective.between == ()
    assert schedule.steps[1] == Wait("start")
    assert sum(isinstance(each, Wait) for each in schedule.steps) == 1


def test_a_collective_that_nothing_waits_for_ends_with_its_computation() -> None:
    schedule = entry(*ASYNCHRONOUS[:3])
    (collective,) = schedule.collectives
    assert len(collective.between) == 2
    assert schedule.steps[-1] == Wait("start")


def test_a_collective_wrapped_into_an_asynchronous_call() -> None:
    schedule = entry(
        "%start = ((f32[8]{0}), f32[64]{0}) async-start(%p), calls=%wrapped",
        "%sine = f32[8]{0} sine(%p)",
        "%done = f32[64]{0} async-done(%start)",
        before="%wrapped (q: f32[8]) -> f32[64] {\n"
        "  %q = f32[8]{0} parameter(0)\n"
        "  ROOT %gather = f32[64]{0} all-gather(%q), dimensions={0}\n}\n",
    )
    (collective,) = schedule.collectives
    assert (collective.kind, collective.bytes, collective.asynchronous) == ("all-gather", 256, True)
    assert [each.name for each in collective.between] == ["sine"]


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("replica_groups={{0,1},{2,3}}", 2),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['a'=2,'b'=8] {'b'}", 8),
        ("replica_groups=mesh['a'=2,'b'=8] {'a','b'}", 16),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", 4),
        ("replica_groups={}", None),
    ],
)
def test_how_many_devices_take_part(groups: str, devices: int | None) -> None:
    (collective,) = entry(f"%r = f32[8]{{0}} all-reduce(%p), {groups}, to_apply=%add").collectives
    assert collective.devices == devices


ATTENTION = """\
  %q = bf16[2,128,4,64]{3,2,1,0} parameter(1)
  %f = (bf16[2,4,128,64]{3,1,2,0}, f32[2,4,128]{2,1,0}, u8[1024]{0}) custom-call(%q, %q, %q), \
custom_call_target="TARGET", backend_config={"cudnn_fmha_backend_config": \
{"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "4", "128", "128"], \
"tuple_shapes": []}, "mask_type": "MASK"}}
"""
FORWARD = 4 * 2 * 4 * 128 * 128 * 64


@pytest.mark.parametrize(
    ("target", "mask", "flops"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", FORWARD),
        ("__cudnn$fmhaSoftmax", "CAUSAL", FORWARD / 2),
        ("__cudnn$fmhaSoftmax", "PADDING_CAUSAL", FORWARD / 2),
        ("__cudnn$fmhaSoftmaxBackward", "NO_MASK", 2.5 * FORWARD),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 1.25 * FORWARD),
    ],
)
def test_attention_in_one_call(target: str, mask: str, flops: float) -> None:
    schedule = entry(ATTENTION.replace("TARGET", target).replace("MASK", mask))
    (kernel,) = schedule.kernels
    assert kernel.flops == flops
    assert kernel.query == 2 * 128 * 4 * 64
    assert kernel.attends == ("backward" if target.endswith("Backward") else "forward")
    array = 2 * 2 * 128 * 4 * 64
    assert kernel.bytes == 4 * array + 4 * 2 * 4 * 128  # but for the 1024 it works in
    assert schedule.unknown_calls == ()


FLASH3 = """\
  %q = bf16[2,128,4,64]{3,2,1,0} parameter(1)
  %f = (bf16[2,128,4,64]{3,2,1,0}, f32[2,4,128]{2,1,0}) custom-call(%q, %q, %q), \
custom_call_target="TARGET", api_version=API_VERSION_TYPED_FFI, \
backend_config={is_causal = CAUSAL, softmax_scale = 1.250000e-01 : f64}
"""


@pytest.mark.parametrize(
    ("target", "causal", "flops"),
    [
        ("dew_flash3_mha_fwd", "false", FORWARD),
        ("dew_flash3_mha_fwd", "true", FORWARD / 2),
        ("dew_flash3_mha_bwd", "true", 1.25 * FORWARD),
    ],
)
def test_flash_attention_3_has_no_bound_of_cudnn(target: str, causal: str, flops: float) -> None:
    schedule = entry(FLASH3.replace("TARGET", target).replace("CAUSAL", causal))
    (kernel,) = schedule.kernels
    assert (kernel.flops, kernel.dtype) == (flops, "bf16")
    assert (kernel.attends, kernel.query, kernel.product) == ("", 0, None)  # nor its rates
    assert schedule.unknown_calls == ()


def test_a_product_of_cublas() -> None:
    schedule = entry(
        "%a = f32[6,16]{1,0} parameter(1)",
        "%b = f32[16,8]{1,0} parameter(2)",
        "%c = (f32[6,8]{1,0}, s8[4096]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"]}}}',
    )
    (kernel,) = schedule.kernels
    assert kernel.flops == 2 * 6 * 16 * 8
    assert (kernel.product, kernel.attends) == ((6, 16, 8), "")
    assert kernel.bytes == 4 * (6 * 16 + 16 * 8 + 6 * 8)


CONVOLUTION = 2 * (16 * 14 * 14 * 64) * (3 * 3 * 32)


@pytest.mark.parametrize(
    ("target", "first", "second", "result"),
    [
        ("__cudnn$convForward", "16,16,16,32", "64,3,3,32", "16,14,14,64"),
        ("__cudnn$convBackwardInput", "16,14,14,64", "64,3,3,32", "16,16,16,32"),
        ("__cudnn$convBackwardFilter", "16,16,16,32", "16,14,14,64", "64,3,3,32"),
    ],
)
def test_a_convolution_of_cudnn(target: str, first: str, second: str, result: str) -> None:
    """Its gradients cost what it costs itself."""
    schedule = entry(
        f"%a = f32[{first}]{{3,2,1,0}} parameter(1)",
        f"%b = f32[{second}]{{3,2,1,0}} parameter(2)",
        f"%c = (f32[{result}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), window={{size=3x3}}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="{target}"',
    )
    assert schedule.flops == CONVOLUTION


def test_calls_that_nobody_knows_are_named() -> None:
    line = '%c = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call"'
    schedule = entry(line, line.replace("%c", "%d"))
    assert schedule.unknown_calls == ("tpu_custom_call",)
    assert schedule.flops == 0
    assert schedule.bytes == 2 * 64
    assert {each.dtype for each in schedule.kernels} == {""}


@pytest.mark.parametrize(
    ("left", "right", "dtype"),
    [("bf16", "bf16", "bf16"), ("bf16", "f32", "f32"), ("f32", "bf16", "f32")],
)
def test_a_product_is_as_slow_as_its_wider_operand(left: str, right: str, dtype: str) -> None:
    (kernel,) = entry(
        f"%a = {left}[8,8]{{1,0}} parameter(1)",
        f"%b = {right}[8,8]{{1,0}} parameter(2)",
        "%c = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    ).kernels
    assert (kernel.dtype, kernel.product) == (dtype, (8, 8, 8))


def test_what_a_tpu_keeps_on_its_chip_is_not_in_its_memory() -> None:
    schedule = entry(
        "%a = f32[8]{0:T(128)S(1)} sine(%p)",
        "%b = f32[8]{0:T(128)} cosine(%a)",
        '%c = f32[8]{0:T(128)S(1)} custom-call(%a), custom_call_target="ConcatBitcast"',
        "%start = (f32[8]{0:T(128)S(1)}, f32[8]{0:T(128)}, u32[]{:S(2)}) copy-start(%p)",
        "%done = f32[8]{0:T(128)S(1)} copy-done(%start)",
        "%part = ((f32[8]{0}), f32[2]{0:S(1)}, s32[]{:S(2)}) slice-start(%p), slice={[0:2]}",
        "%there = f32[2]{0:S(1)} slice-done(%part)",
    )
    sizes = {each.name: each.bytes for each in schedule.kernels}
    assert sizes == {"a": 32, "b": 32, "start": 32, "part": 8}


# A TPU takes a collective through the fusions that run meanwhile.
CARRIED = """\
%begin (b: f32[8]) -> (f32[8], f32[64]) {
  %b = f32[8]{0} parameter(0)
  %gather.1 = f32[64]{0} all-gather(%b), channel_id=7, dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %s = (f32[8]{0}, f32[64]{0}) custom-call(%gather.1), \
custom_call_target="AsyncCollectiveStart"
}

%middle (c: f32[8], d: f32[64], e: f32[8]) -> (f32[8], f32[64], f32[8]) {
  %c = f32[8]{0} parameter(0)
  %d = f32[64]{0} parameter(1)
  %gather.2 = f32[64]{0} all-gather(%c), channel_id=7, dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"15"}}
  %e = f32[8]{0} parameter(2)
  %sine = f32[8]{0} sine(%e)
  ROOT %m = (f32[8]{0}, f32[64]{0}, f32[8]{0}) tuple(%c, %gather.2, %sine)
}

%finish (f: f32[8], g: f32[64]) -> f32[64] {
  %f = f32[8]{0} parameter(0)
  %g = f32[64]{0} parameter(1)
  %gather.3 = f32[64]{0} all-gather(%f), channel_id=7, dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"15"}}
  ROOT %d.1 = f32[64]{0} custom-call(%f, %g, %gather.3), custom_call_target="AsyncCollectiveDone"
}
"""


def test_a_collective_that_goes_through_fusions_is_one() -> None:
    schedule = entry(
        "%start = (f32[8]{0}, f32[64]{0}) fusion(%p), kind=kCustom, calls=%begin",
        "%x = f32[8]{0} get-tuple-element(%start), index=0",
        "%y = f32[64]{0} get-tuple-element(%start), index=1",
        "%on = (f32[8]{0}, f32[64]{0}, f32[8]{0}) fusion(%x, %y, %p), kind=kLoop, calls=%middle",
        "%done = f32[64]{0} fusion(%x, %y), kind=kCustom, calls=%finish",
        before=CARRIED,
    )
    (collective,) = schedule.collectives
    assert (collective.kind, collective.bytes, collective.runs) == ("all-gather", 256, 1)
    assert collective.asynchronous
    (kernel,) = collective.between
    assert (kernel.name, kernel.bytes) == ("on", 64)  # its sine alone
    assert schedule.kernels == (kernel,)


def test_an_all_reduce_that_keeps_a_part_is_a_reduce_scatter() -> None:
    schedule = entry(
        "%part = f32[2]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter",
        before="%all-reduce-scatter (q: f32[8]) -> f32[2] {\n"
        "  %q = f32[8]{0} parameter(0)\n"
        "  %sum = f32[8]{0} all-reduce(%q), replica_groups={{0,1,2,3}}, to_apply=%add\n"
        "  %i = u32[] partition-id()\n"
        "  ROOT %r = f32[2]{0} dynamic-slice(%sum, %i), dynamic_slice_sizes={2}\n}\n",
    )
    (collective,) = schedule.collectives
    assert (collective.kind, collective.bytes, collective.devices) == ("reduce-scatter", 8, 4)
    assert not collective.asynchronous


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%keep, %change}",
        "true_computation=%change, false_computation=%keep",  # as a predicate's are named
    ],
)
def test_of_a_conditional_without_products_the_branch_that_moves_more_counts(branches: str) -> None:
    schedule = entry(
        f"%c = f32[8,8]{{1,0}} conditional(%p, %p, %p), {branches}",
        before="%keep (a: f32[8,8]) -> f32[8,8] {\n  ROOT %a = f32[8,8]{1,0} parameter(0)\n}\n\n"
        "%change (b: f32[8,8]) -> f32[8,8] {\n  %b = f32[8,8]{1,0} parameter(0)\n"
        "  ROOT %sine = f32[8,8]{1,0} sine(%b)\n}\n",
    )
    assert [each.name for each in schedule.kernels] == ["sine"]


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("%r = f32[2]{0} slice(%p), slice={[0:2]}", 2 * 8),
        ("%r = f32[2]{0} dynamic-slice(%p, %p), dynamic_slice_sizes={2}", 2 * 8 + 32),
        ("%r = f32[8]{0} scatter(%p, %i, %u), to_apply=%add", 2 * 8 + 8 + 8),
        ("%r = f32[8]{0} dynamic-update-slice(%p, %u, %i)", 8 + 8 + 8),
        ("%r = f32[8]{0} add(%p, %p)", 3 * 32),
    ],
)
def test_instructions_that_are_not_fused(line: str, size: int) -> None:
    schedule = entry("%u = f32[2]{0} parameter(1)", "%i = s32[2]{0} parameter(2)", line)
    assert schedule.bytes == size
