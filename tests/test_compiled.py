"""Compiled programs are read as XLA describes them."""

from __future__ import annotations

import types

import pytest

from mirrored._compiled import Collective, collectives_of, facts_of, is_collective

MEMORY = types.SimpleNamespace(
    argument_size_in_bytes=100,
    alias_size_in_bytes=60,
    output_size_in_bytes=64,
    temp_size_in_bytes=7,
)


def test_results_that_take_over_donated_memory_need_none_of_their_own():
    facts = facts_of("step", "", MEMORY, None)
    sizes = (facts.arguments, facts.donated, facts.outputs, facts.temporaries)
    assert sizes == (100, 60, 64, 7)
    assert facts.peak == 111
    assert facts_of("step", "", None, None).peak == 0


@pytest.mark.parametrize(
    ("cost", "flops"),
    [
        ({"flops": 8.0}, 8.0),
        ([{"flops": 8.0}], 8.0),
        ({"flops": -1.0}, None),  # XLA's word for "not counted"
        ({}, None),
        ([], None),
        (None, None),
    ],
)
def test_flops_where_xla_counts_them(cost, flops):
    assert facts_of("step", "", MEMORY, cost).flops == flops


def test_products_in_a_library_are_not_counted():
    text = '%dot = f32[8,8] custom-call(%a, %b), custom_call_target="__cublas$gemm"'
    assert facts_of("step", text, MEMORY, {"flops": 8.0}).flops is None


def test_the_collectives_of_a_program_as_text():
    text = """
  %all-reduce.1 = (f32[10,4]{1,0}, /*index=1*/bf16[8]{0}, pred[]) all-reduce(%a, %b, %c)
  %s = f32[16]{0} all-reduce-start(%x), channel_id=1
  %d = f32[16]{0} all-reduce-done(%s)
  %n = ((f32[32]{0}), f32[32]{0}) all-reduce-start(%x), channel_id=1
  %m = ((f32[2]{0}, s8[3]), (f32[2]{0}, s8[3])) all-reduce-start(%x, %y), channel_id=1
  %g = (f32[2,3], f32[4,3]) all-gather-start(%x), dimensions={0}
  %h = ((f32[2], s8[3]), (f32[4], s8[6])) all-gather-start(%x, %y)
  %p = (f32[5], f32[5], u32[], u32[]) collective-permute-start(%x)
  %q = f8e4m3fn[7] reduce-scatter(%x)
  ROOT %t = s4[6] all-to-all(%x)
  %fusion = f32[99] fusion(%x), calls=%all-reduce.fused
"""
    assert collectives_of(text) == (
        Collective("all-reduce", 4, 160 + 16 + 1 + 64 + 128 + 11),
        Collective("all-gather", 2, 48 + 16 + 6),
        Collective("collective-permute", 1, 20),
        Collective("reduce-scatter", 1, 7),
        Collective("all-to-all", 1, 3),
    )
    assert is_collective("all-reduce.7")
    assert is_collective("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)")
    assert not is_collective("multiply_all-reduce_fusion")
