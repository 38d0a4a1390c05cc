"""Checkpoints in one process: exact, whole, and on another number of replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_strategy
from flax import nnx

import mirrored
import mirrored.nnx
from mirrored.checkpoint import Checkpoint


def model(strategy):
    with strategy.scope():
        weights = mirrored.Variable(np.arange(3, dtype="f4"), name="weights")
        optimizer = mirrored.Optimizer(optax.adam(0.1))
    return weights, optimizer


def train_step(strategy, weights, optimizer):
    def replica(x):
        gradients = mirrored.grad(lambda: mirrored.mean(((x - weights) ** 2).sum(-1)), [weights])
        optimizer.apply_gradients(zip(gradients, [weights]))

    return mirrored.function(lambda x: strategy.run(replica, args=(x,)))


def bits(weights, optimizer):
    leaves = jax.tree.leaves(optimizer.state, is_leaf=lambda leaf: hasattr(leaf, "assign"))
    return [weights.numpy().tobytes(), *(leaf.numpy().tobytes() for leaf in leaves)]


DATA = np.random.default_rng(0).normal(size=(22, 3)).astype("f4")


def run(directory, strategy, epochs, stop_after=None):
    weights, optimizer = model(strategy)
    dataset = strategy.distribute_dataset(DATA, 4, shuffle=True)
    step = train_step(strategy, weights, optimizer)
    checkpoint = Checkpoint(directory, {"weights": weights, "optimizer": optimizer}, every=1)
    for batch in checkpoint.batches(dataset, epochs):
        step(batch)
        if stop_after is not None and checkpoint.step + 1 == stop_after:
            checkpoint.completed()
            checkpoint.wait()
            return None
    checkpoint.wait()
    return checkpoint.step, bits(weights, optimizer)


@pytest.mark.parametrize("stop_after", [1, 6, 8])
def test_resumes_within_the_epoch_bit_for_bit(tmp_path, stop_after):
    whole = run(tmp_path / "whole", make_strategy(2), 2)
    assert whole[0] == 12
    assert run(tmp_path / "parts", make_strategy(2), 2, stop_after) is None
    assert run(tmp_path / "parts", make_strategy(2), 2) == whole


def test_restores_on_another_number_of_replicas(tmp_path):
    run(tmp_path, make_strategy(2), 1)
    before = Checkpoint(tmp_path, {})
    weights, optimizer = model(make_strategy(4))
    dataset = make_strategy(4).distribute_dataset(DATA, 4, shuffle=True)
    state = {"weights": weights, "optimizer": optimizer, "data": dataset}
    assert Checkpoint(tmp_path, state).restore() == 6
    assert before.step == 0
    assert dataset.get_state()["epoch"] == 0
    restored = weights.numpy()
    optimizer.build([weights])
    weights2, optimizer2 = model(make_strategy(2))
    dataset2 = make_strategy(2).distribute_dataset(DATA, 4, shuffle=True)
    optimizer2.build([weights2])
    Checkpoint(tmp_path, {"weights": weights2, "optimizer": optimizer2, "data": dataset2}).restore()
    assert restored.tobytes() == weights2.numpy().tobytes()
    assert bits(weights, optimizer) == bits(weights2, optimizer2)


@pytest.mark.conformance(33)
@pytest.mark.parametrize("replicas", [2, 4])
def test_on_read_sum_keeps_its_total(tmp_path, replicas):
    def variable(strategy):
        with strategy.scope():
            return mirrored.Variable(0.0, synchronization="on_read", aggregation="sum")

    two = make_strategy(2)
    before = variable(two)
    two.run(
        lambda: before.assign(1.0 + 2.0 * mirrored.get_replica_context().replica_id_in_sync_group)
    )
    checkpoint = Checkpoint(tmp_path, {"total": before})
    checkpoint.save()
    checkpoint.wait()
    strategy = make_strategy(replicas)
    after = variable(strategy)
    Checkpoint(tmp_path, {"total": after}).restore()
    assert float(after) == 4.0
    parts = strategy.local_results(strategy.run(lambda: after.value))
    assert [float(part) for part in parts] == [4.0 / replicas] * replicas


def test_on_read_without_aggregation_wants_the_same_replicas(tmp_path):
    two = make_strategy(2)
    with two.scope():
        before = mirrored.Variable(0, synchronization="on_read")
    two.run(lambda: before.assign(mirrored.get_replica_context().replica_id_in_sync_group + 1))
    checkpoint = Checkpoint(tmp_path, {"own": before})
    checkpoint.save()
    two.run(lambda: before.assign(0))
    checkpoint.restore()
    assert [int(part) for part in two.local_results(two.run(lambda: before.value))] == [1, 2]
    with make_strategy(4).scope():
        after = mirrored.Variable(0, synchronization="on_read")
    with pytest.raises(mirrored.CheckpointError, match="2 components"):
        Checkpoint(tmp_path, {"own": after}).restore()


def test_pytrees_keys_generators_and_numbers(tmp_path):
    params = {"w": jnp.arange(4, dtype=jnp.bfloat16), "none": jnp.zeros((0, 3))}
    generator = np.random.default_rng(3)
    generator.random(5)
    state = {"params": params, "key": jax.random.key(5), "rng": generator, "epoch": 7, "x": None}
    checkpoint = Checkpoint(tmp_path, state)
    checkpoint.save(12)
    checkpoint.wait()
    expected = generator.random()
    fresh = {
        "params": {"w": jnp.zeros(4, jnp.bfloat16), "none": jnp.ones((0, 3))},
        "key": jax.random.key(0),
        "rng": np.random.default_rng(0),
        "epoch": 0,
        "x": None,
    }
    assert Checkpoint(tmp_path, fresh).restore() == 12
    assert fresh["params"]["w"].dtype == jnp.bfloat16
    assert fresh["params"]["w"].tolist() == [0, 1, 2, 3]
    assert fresh["params"]["none"].shape == (0, 3)
    assert jax.random.uniform(fresh["key"]) == jax.random.uniform(jax.random.key(5))
    assert fresh["rng"].random() == expected
    assert fresh["epoch"] == 7


def test_what_is_saved_is_what_was_there_when_save_was_called(tmp_path):
    weights = mirrored.Variable(np.ones(1 << 16, "f4"))
    add = mirrored.function(lambda: [weights.assign_add(jnp.ones(1 << 16))][1:])
    checkpoint = Checkpoint(tmp_path, {"weights": weights}, keep=10)
    for step in range(5):
        checkpoint.save(step)
        add()
    checkpoint.wait()
    for step in range(5):
        checkpoint.restore(step)
        assert np.unique(weights.numpy()).tolist() == [step + 1]


def sharded(replicas, steps):
    """An optimizer whose state is divided, after some steps; 5 elements leave padding."""
    strategy = make_strategy(replicas)
    with strategy.scope():
        weights = mirrored.Variable(np.arange(5, dtype="f4"), name="weights")
        optimizer = mirrored.Optimizer(optax.adam(0.1), shard_state=True)
    step = train_step(strategy, weights, optimizer)
    data = np.random.default_rng(1).normal(size=(8 * steps, 5)).astype("f4")
    for batch in strategy.distribute_dataset(data, 8) if steps else ():
        step(batch)
    return weights, optimizer, lambda x: step(next(iter(strategy.distribute_dataset(x, 8))))


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_optimizer_state_in_shards_is_restored_on_any_number_of_replicas(tmp_path, replicas):
    weights, optimizer, step = sharded(2, 3)
    checkpoint = Checkpoint(tmp_path, {"weights": weights, "optimizer": optimizer})
    checkpoint.save(3)
    checkpoint.wait()
    weights2, optimizer2, step2 = sharded(replicas, 0)
    Checkpoint(tmp_path, {"weights": weights2, "optimizer": optimizer2}).restore()
    batch = np.ones((8, 5), "f4")
    step(batch)
    step2(batch)
    np.testing.assert_allclose(weights2.numpy(), weights.numpy(), rtol=1e-6)
    fresh, _, step3 = sharded(replicas, 0)
    fresh.assign(weights.numpy())
    step3(batch)
    assert np.abs(fresh.numpy() - weights.numpy()).max() > 0.01


def test_an_optimizer_that_has_moved_on_is_not_left_as_it_is(tmp_path):
    weights, optimizer = model(make_strategy(2))
    checkpoint = Checkpoint(tmp_path, {"weights": weights, "optimizer": optimizer})
    checkpoint.save(0)
    checkpoint.wait()
    optimizer.build([weights])
    with pytest.raises(mirrored.CheckpointError, match="had not taken a step"):
        checkpoint.restore()


def test_nnx_objects_are_restored_in_place(tmp_path):
    strategy = make_strategy(2)

    def make(seed):
        with strategy.scope():
            module = nnx.Sequential(
                nnx.Linear(3, 4, rngs=nnx.Rngs(seed)),
                nnx.BatchNorm(4, rngs=nnx.Rngs(0)),
                nnx.Dropout(0.5, rngs=nnx.Rngs(seed)),
            )
            return module, mirrored.nnx.Optimizer(module, optax.adam(0.1), wrt=nnx.Param)

    def replica(module, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(module)
        optimizer.update(module, gradients)
        return loss

    @mirrored.function
    def train_step(module, optimizer, x):
        return strategy.run(replica, args=(module, optimizer, x))

    batch = next(iter(strategy.distribute_dataset(DATA[:8], 8)))
    module, optimizer = make(0)
    train_step(module, optimizer, batch)
    checkpoint = Checkpoint(tmp_path, {"module": module, "optimizer": optimizer})
    checkpoint.save(1)
    checkpoint.wait()
    module2, optimizer2 = make(7)
    resumed = Checkpoint(tmp_path, {"module": module2, "optimizer": optimizer2})
    assert resumed.restore() == 1
    assert resumed.state["module"] is module2
    for pair in ((module, optimizer), (module2, optimizer2)):
        train_step(*pair, batch)

    def all_bits(pair):
        leaves = jax.tree.leaves(nnx.state(pair))
        keys = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
        arrays = [jax.random.key_data(a) if key else a for a, key in zip(leaves, keys)]
        return [np.asarray(array).tobytes() for array in arrays]

    assert all_bits((module, optimizer)) == all_bits((module2, optimizer2))


def test_steps_may_be_left_out(tmp_path):
    checkpoint = Checkpoint(tmp_path, {"x": 1}, every=10)
    for step in (4, 12, 19, 35, 39):
        checkpoint.completed(step)
    checkpoint.wait()
    assert [int(p.name[-10:]) for p in sorted(tmp_path.iterdir())] == [12, 35]


def test_a_run_taken_back_leaves_no_later_checkpoint(tmp_path):
    checkpoint = Checkpoint(tmp_path, {"x": 0}, keep=1)
    for step in (10, 20):
        checkpoint.state["x"] = step
        checkpoint.save(step)
        checkpoint.wait()
        checkpoint._keep = 2
    checkpoint._keep = 1
    assert checkpoint.restore(10) == 10
    checkpoint.state["x"] = 15
    checkpoint.save(15)
    resumed = {"x": 0}
    checkpoint.wait()
    assert Checkpoint(tmp_path, resumed).restore() == 15
    assert resumed["x"] == 15


def test_a_run_that_forgot_to_restore_loses_nothing_and_is_told(tmp_path):
    earlier = Checkpoint(tmp_path, {"x": 7})
    earlier.save(70)
    earlier.wait()
    other = Checkpoint(tmp_path, {"x": 1}, keep=1)
    with pytest.warns(UserWarning, match=r"later steps \(\[70\]\) than the step 1 saved now"):
        other.save(1)
    other.wait()
    assert [int(p.name[-10:]) for p in sorted(tmp_path.iterdir())] == [1, 70]


def test_killed_before_the_directory_had_its_name(tmp_path):
    checkpoint = Checkpoint(tmp_path, {"x": 5})
    checkpoint.save(3)
    checkpoint.wait()
    (tmp_path / "step_0000000003").rename(tmp_path / ".partial_3_abcd")
    (tmp_path / ".partial_9_abcd").mkdir()
    resumed = {"x": 0}
    assert Checkpoint(tmp_path, resumed).restore() == 3
    assert resumed["x"] == 5


def damage_flip(path):
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def damage_truncate(path):
    for file in path.rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-1])


def damage_unfinished(path):
    (path / "mirrored.json").unlink()


def damage_missing(path):
    next(p for p in path.rglob("d/*") if p.is_file()).unlink()


def damage_manifest(path):
    text = (path / "mirrored.json").read_text()
    (path / "mirrored.json").write_text(text.replace("variable", "aggregate", 1))


@pytest.mark.parametrize(
    "damage",
    [damage_flip, damage_truncate, damage_unfinished, damage_missing, damage_manifest],
)
def test_a_damaged_checkpoint_is_never_loaded(tmp_path, damage):
    weights = mirrored.Variable(np.zeros(1000, "f4"))
    checkpoint = Checkpoint(tmp_path, {"weights": weights})
    for step in (1, 2):
        weights.assign(np.full(1000, step, "f4"))
        checkpoint.save(step)
    checkpoint.wait()
    damaged = tmp_path / "step_0000000002"
    damage(damaged)
    with pytest.warns(UserWarning, match="step_0000000002 is not used"):
        assert checkpoint.restore() == 1
    assert weights.numpy()[0] == 1
    weights.assign(np.full(1000, 5, "f4"))
    checkpoint.save(2)
    assert checkpoint.restore() == 2
    assert weights.numpy()[0] == 5


def test_keeps_the_newest(tmp_path):
    checkpoint = Checkpoint(tmp_path, {"x": 1}, keep=2, every=2)
    (tmp_path / ".partial_0_dead").mkdir()
    for _ in range(9):
        checkpoint.completed()
    checkpoint.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_0000000006", "step_0000000008"]


def test_errors_name_what_does_not_fit(tmp_path):
    checkpoint = Checkpoint(tmp_path, {"w": mirrored.Variable([1.0, 2.0]), "old": 1})
    checkpoint.save(3)
    checkpoint.wait()
    with pytest.raises(mirrored.CheckpointError, match=r"'w' has shape \(3,\)"):
        Checkpoint(tmp_path, {"w": mirrored.Variable([1.0, 2.0, 3.0]), "old": 1}).restore()
    with pytest.raises(mirrored.CheckpointError, match="does not hold 'new'"):
        Checkpoint(tmp_path, {"new": mirrored.Variable(1.0)}).restore()
    with pytest.raises(mirrored.CheckpointError, match=r"also holds \['old'\]"):
        Checkpoint(tmp_path, {"w": mirrored.Variable([1.0, 2.0])}).restore()
    with pytest.raises(mirrored.CheckpointError, match="no whole checkpoint of step 9"):
        checkpoint.restore(9)
    with pytest.raises(mirrored.CheckpointError, match="which cannot be saved"):
        Checkpoint(tmp_path, {"x": object()}).save()
    with pytest.raises(mirrored.ArgumentError, match="every=-1"):
        Checkpoint(tmp_path, {}, every=-1)


def test_a_restored_optimizer_that_took_no_step_is_saved_whole(tmp_path):
    strategy = make_strategy(2)
    run(tmp_path, strategy, 1)
    weights, optimizer = model(strategy)
    state = {"weights": weights, "optimizer": optimizer}
    state["data"] = strategy.distribute_dataset(DATA, 4, shuffle=True)
    checkpoint = Checkpoint(tmp_path, state)
    assert checkpoint.restore() == 6
    checkpoint.save(7)
    checkpoint.wait()
    optimizer.build([weights])
    after_first = bits(weights, optimizer)
    weights2, optimizer2 = model(strategy)
    Checkpoint(tmp_path, state | {"weights": weights2, "optimizer": optimizer2}).restore(7)
    optimizer2.build([weights2])
    assert bits(weights2, optimizer2) == after_first
