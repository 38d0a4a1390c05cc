"""What users can rely on: names, arguments, light imports, errors in one form."""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
import sys

import jax
import public_api
import pytest

import mirrored
import mirrored.testing


def test_the_api_is_the_snapshot():
    """A change of the public API is meant: ``make api`` writes the snapshot anew."""
    assert public_api.written().splitlines() == public_api.SNAPSHOT.read_text().splitlines()


@pytest.mark.parametrize("name", public_api.MODULES)
def test_all_is_complete_and_sorted(name):
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(module.__all__)
    assert all(name in vars(module) for name in module.__all__)
    # What is public here and made here (or below) is in __all__; what is used only is not.
    own = {
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(thing)
        and getattr(thing, "__module__", "").startswith(module.__name__)
    }
    used_by_the_layers_below = {"argument_adapter", "companion_scope"}
    assert own - used_by_the_layers_below <= set(module.__all__)


def test_tf_distributes_spellings():
    strategy = mirrored.Strategy
    assert strategy.experimental_local_results is strategy.local_results
    assert strategy.experimental_distribute_dataset is strategy.distribute_dataset
    assert (
        strategy.experimental_distribute_values_from_function
        is strategy.distribute_values_from_function
    )


# Arguments as TensorFlow 2.21 has them, but for those that have no meaning here (options=,
# cross_device_ops=, communication_options=, bytes_per_string=, use_locking=, read_value=).
TF_ARGUMENTS = {
    "Strategy.run": "fn args kwargs",
    "Strategy.reduce": "reduce_op value axis",
    "Strategy.gather": "value axis",
    "Strategy.scope": "",
    "Strategy.experimental_distribute_dataset": "dataset",
    "Strategy.distribute_datasets_from_function": "dataset_fn",
    "Strategy.experimental_distribute_values_from_function": "value_fn",
    "Strategy.experimental_local_results": "value",
    "ReplicaContext.all_reduce": "reduce_op value",
    "ReplicaContext.all_gather": "value axis",
    "ReplicaContext.merge_call": "merge_fn args kwargs",
    "InputContext": "num_input_pipelines input_pipeline_id num_replicas_in_sync",
    "InputContext.get_per_replica_batch_size": "global_batch_size",
    "MirroredStrategy": "devices",
    "OneDeviceStrategy": "device",
    "Variable": "initial_value trainable",
    "Variable.assign": "value",
    "Variable.assign_add": "delta",
    "Variable.assign_sub": "delta",
    "ClusterCoordinator": "strategy",
    "ClusterCoordinator.schedule": "fn args kwargs",
    "ClusterCoordinator.join": "",
    "ClusterCoordinator.done": "",
    "ClusterCoordinator.fetch": "val",
    "ClusterCoordinator.create_per_worker_dataset": "dataset_fn",
    "MinSizePartitioner": "min_shard_bytes max_shards",
    "MaxSizePartitioner": "max_shard_bytes max_shards",
    "FixedShardsPartitioner": "num_shards",
    "IndexedSlices": "values indices dense_shape",
    "Optimizer.apply_gradients": "grads_and_vars",
    "ValueContext": "replica_id_in_sync_group num_replicas_in_sync",
}


@pytest.mark.parametrize("name", TF_ARGUMENTS)
def test_arguments_are_tf_distributes(name):
    """By position and by name, whatever a program passes today; more may come after."""
    kind, _, method = name.partition(".")
    thing = getattr(mirrored, kind)
    signature = inspect.signature(getattr(thing, method) if method else thing)
    arguments = [argument for argument in signature.parameters if argument != "self"]
    expected = TF_ARGUMENTS[name].split()
    assert arguments[: len(expected)] == expected
    for more in arguments[len(expected) :]:
        assert signature.parameters[more].default is not inspect.Parameter.empty


def test_importing_is_light():
    program = (
        "import sys, mirrored; from jax._src import xla_bridge; "
        "assert not xla_bridge.backends_are_initialized(); "
        "found = {'keras', 'flax', 'orbax', 'ray', 'rich', 'grain', 'tensorflow', 'torch'}"
        " & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_error_is_a_builtin_too_and_survives_pickling():
    kinds = [
        thing for name in mirrored.__all__ if isinstance(thing := getattr(mirrored, name), type)
    ]
    kinds = [kind for kind in kinds if issubclass(kind, mirrored.MirroredError)]
    assert len(kinds) > 10
    for kind in kinds:
        error = kind(fact="2 replicas.", expected="4.", hint="add 2.")
        assert str(error) == "2 replicas.\nexpected: 4.\nhint: add 2."
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (kind, str(error))
        if kind is not mirrored.MirroredError:
            (_, standard) = kind.__bases__
            assert standard.__module__.split(".")[0] in ("builtins", "concurrent"), kind
            assert standard not in (Exception, BaseException)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (["cpu:0", "cpu:0"], "stands twice"),
        (["cpu:99"], "no device 'cpu:99'"),
        (["tpu:0"], "no device 'tpu:0'"),
        (["nonsense"], "no device 'nonsense'"),
        ([], "names no device"),
        ("cpu:0", "single device"),
        ([3], "is not a device"),
    ],
)
def test_devices_that_do_not_fit(devices, words):
    with pytest.raises(mirrored.DeviceError, match=words):
        mirrored.MirroredStrategy(devices)


def test_devices_by_every_name():
    names = ["cpu:2", "/cpu:1", "/device:CPU:0", jax.devices()[4]]
    strategy = mirrored.MirroredStrategy(names)
    assert [device.id for device in strategy.devices] == [2, 1, 0, 4]
    assert mirrored.MirroredStrategy().num_replicas_in_sync == 8
    assert mirrored.OneDeviceStrategy().num_replicas_in_sync == 1
    assert mirrored.MultiWorkerMirroredStrategy().num_replicas_in_sync == 8
    assert mirrored.Strategy.__abstractmethods__ == {"placement"}


def test_strategies_are_not_copied(two):
    with pytest.raises(ValueError, match="pickled or copied"):
        pickle.dumps(two)


def test_devices_outside_the_list_are_never_touched():
    program = """
import mirrored, mirrored.testing
mirrored.testing.use_cpu_devices(4)
import jax, optax, numpy as np
strategy = mirrored.MirroredStrategy(["cpu:1", "cpu:2"])
with strategy.scope():
    v = mirrored.Variable(np.ones(3, "f"))
    optimizer = mirrored.Optimizer(optax.adam(0.1))
@mirrored.function
def step(x):
    def replica_function(x):
        loss, gradient = mirrored.value_and_grad(lambda: mirrored.mean((x * v).sum(axis=1)), v)
        optimizer.apply_gradients([(gradient, v)])
        return loss
    return strategy.run(replica_function, (x,))
for batch in strategy.distribute_dataset(np.ones((7, 3), "f"), batch_size=4):
    step(batch)
used = {device.id for array in jax.live_arrays() for device in array.devices()}
assert used <= {1, 2}, used
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_use_cpu_devices_too_late():
    with pytest.raises(RuntimeError, match="after JAX had started"):
        mirrored.testing.use_cpu_devices(3)
    with pytest.raises(ValueError, match="positive integer"):
        mirrored.testing.use_cpu_devices(0)
    mirrored.testing.use_cpu_devices(8)
