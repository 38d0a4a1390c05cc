"""mirrored.function: when it traces, what it donates, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_strategy

import mirrored


def test_buffers_are_donated(two):
    with two.scope():
        v = mirrored.Variable(np.ones(4, "f"))

    @mirrored.function
    def step():
        two.run(lambda: v.assign_add(1.0))

    step()
    stored = v.storage
    step()
    assert stored.is_deleted()


def test_variables_in_plain_jit_are_refused(two):
    with two.scope():
        v = mirrored.Variable(1.0, name="v")
    with pytest.raises(RuntimeError, match=r"mirrored\.function"):
        jax.jit(lambda: v + 1)()
    with pytest.raises(RuntimeError, match=r"mirrored\.function"):
        jax.jit(lambda: v.assign(2.0))()


def test_function_retraces_only_when_it_must(two):
    with two.scope():
        v = mirrored.Variable(0.0)
    traces = []

    @mirrored.function
    def step(x, scale=1.0, *, flag=True):
        traces.append(1)
        v.assign_add(x.sum() * scale)
        return flag

    step(np.ones(3, "f"))
    step(jnp.ones(3))
    step(np.ones(3))
    assert len(traces) == 1
    assert step(np.ones(3, "f"), 2.0) is True
    assert step(np.ones(3, "f"), 3.0) is True
    assert len(traces) == 2
    assert step(np.ones(3, "f"), 3.0, flag=False) is False
    step(np.ones(4, "f"))
    assert len(traces) == step.trace_count == 4
    assert "float32[3]" in step.retrace_reasons[-1] or "structure" in step.retrace_reasons[-1]
    assert float(v) == 9.0 + 6.0 + 9.0 + 9.0 + 4.0


def test_rebinding_a_captured_variable_retraces(two):
    with two.scope():
        v = mirrored.Variable(0.0)

    def add():
        v.assign_add(1.0)

    @mirrored.function
    def step():
        two.run(add)

    step()
    first = v
    with two.scope():
        v = mirrored.Variable(10.0)
    step()
    assert float(first) == 1.0
    assert float(v) == 11.0
    assert "'v' was rebound" in step.retrace_reasons[-1]


def test_function_on_methods_and_nested(two):
    class Counter:
        def __init__(self):
            with two.scope():
                self.v = mirrored.Variable(0)

        @mirrored.function
        def add(self, n):
            self.v.assign_add(n)
            return self.v.value

    one, other = Counter(), Counter()
    assert int(one.add(2)) == 2
    assert int(one.add(3)) == 5
    assert int(other.add(7)) == 7

    @mirrored.function
    def both():
        one.add(1)
        return other.add(1)

    assert int(both()) == 8
    assert int(one.v) == 6


def test_two_strategies_in_one_function_are_refused(two):
    other = make_strategy(4)
    with two.scope():
        v = mirrored.Variable(1.0, name="v")
    with other.scope():
        w = mirrored.Variable(1.0, name="w")

    @mirrored.function
    def mixed():
        v.assign_add(1.0)
        w.assign_add(1.0)

    with pytest.raises(mirrored.OwnershipError, match=r"'v'.*'w'|'w'.*'v'"):
        mixed()


def test_an_exception_in_a_step_leaves_variables_alone(two):
    with two.scope():
        v = mirrored.Variable(1.0)

    @mirrored.function
    def step():
        v.assign(5.0)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        step()
    assert float(v) == 1.0
