"""Functions are pickled once, and again as soon as a pickle would say something else."""

from __future__ import annotations

import numpy as np
import optax
import pytest
from ray import cloudpickle

import mirrored
from mirrored._parameter_server._sent_functions import SentFunctions

RATE = 1.0


class Settings:
    """An object of the user's, which may change without anybody noticing."""

    rate = 1.0


def make(captured):
    """A function that captures something; always the same code."""

    def closure():
        return captured

    return closure


def made_twice(function, change=lambda: None):
    """What is sent before and after a change."""
    functions = SentFunctions()
    before = functions.find(function, "a function")
    change()
    return before, functions.find(function, "a function")


def test_a_function_that_stays_the_same_is_pickled_once():
    with mirrored.ParameterServerStrategy(worker_count=1) as strategy:
        with strategy.scope():
            v, optimizer = mirrored.Variable(0.0), mirrored.Optimizer(optax.sgd(0.1))

        @mirrored.function
        def step(x):
            return v + x * RATE

        variables = [v]

        def closure(iterator, count=3):
            for _ in range(count):
                strategy.run(step, args=(len(variables),))
            return optimizer

        before, after = made_twice(closure)
        assert after is before
        # One made anew each time, of the same parts, is the same.
        functions = SentFunctions()
        assert functions.find(make(v), "a function") is functions.find(make(v), "a function")


@pytest.mark.parametrize("kind", ["list", "dict", "array", "object", "inner list", "default"])
def test_what_may_have_changed_in_place_is_pickled_again(kind):
    array, settings, inner = np.zeros(3), Settings(), [1.0]
    captured = {
        "list": [1, 2],
        "dict": {"rate": 1.0},
        "array": array,
        "object": settings,
        "inner list": {"rates": inner},
        "default": None,
    }[kind]
    default = []

    def with_default(found=default):
        return found

    function = make(with_default if kind == "default" else captured)

    def change():
        if kind == "list":
            captured[0] = 7
        elif kind == "dict":
            captured["rate"] = 7
        array[0] = 7
        settings.rate = 7
        inner[0] = 7
        default.append(7)

    before, after = made_twice(function, change)
    assert after.digest != before.digest
    found = cloudpickle.loads(after.content)()
    if callable(found):
        found = found()
    assert "7" in str(getattr(found, "rate", found))


def test_what_was_rebound_is_pickled_again():
    rate = 1.0

    def inner():
        return rate

    def closure():
        return inner()

    functions = SentFunctions()
    before = functions.find(closure, "a function")
    rate = 7.0
    after = functions.find(closure, "a function")
    assert cloudpickle.loads(before.content)() == 1.0
    assert cloudpickle.loads(after.content)() == 7.0
