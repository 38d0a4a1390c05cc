"""Who reads what in two processes; neither sees the other's data, so nothing is compared."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

import mirrored

PROGRAM = """
import json, sys
import mirrored.testing
mirrored.testing.use_cpu_devices(int(sys.argv[3]))
import grain
import jax
import numpy as np
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), initialization_timeout=60)
import mirrored

strategy = mirrored.MultiWorkerMirroredStrategy()

def local(value):
    rows = [shard.data[0].tolist() for shard in value.stacked.addressable_shards]
    if value.row_counts is None:
        return rows
    counts = [int(shard.data[0]) for shard in value.row_counts.addressable_shards]
    return [part[:count] for part, count in zip(rows, counts)]

def pieces(context):
    first = 10 * context.input_pipeline_id
    return [np.full(2 - number % 2, first + number) for number in range(3)]

def sharded(context):
    return grain.MapDataset.range(14)[context.input_pipeline_id :: context.num_input_pipelines]

def grain_map(context):
    return sharded(context).batch(context.get_per_replica_batch_size(8))

def grain_iter(context):
    return sharded(context).to_iter_dataset().batch(context.get_per_replica_batch_size(8))

def grain_loader(context):
    options = grain.sharding.ShardOptions(
        shard_index=context.input_pipeline_id, shard_count=context.num_input_pipelines
    )
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, 14, 1),
        sampler=grain.samplers.IndexSampler(14, options, num_epochs=1),
        operations=[grain.transforms.Batch(context.get_per_replica_batch_size(8))],
    )

batches = [np.arange(8), np.arange(8, 14)]
datasets = {
    "arrays": strategy.distribute_dataset(np.arange(14), 8),
    "batches": strategy.distribute_dataset(batches, prefetch=0),
    "pieces": strategy.distribute_datasets_from_function(pieces),
}
result = {name: [local(batch) for batch in dataset] for name, dataset in datasets.items()}
for function in (grain_map, grain_iter, grain_loader):
    name = function.__name__
    datasets[name] = strategy.distribute_datasets_from_function(function)
    result[name] = [local(batch) for batch in datasets[name]]
    # Goes on after the first batch, in a new program as far as the data sets know.
    stopped = iter(datasets[name])
    next(stopped)
    resumed = strategy.distribute_datasets_from_function(function)
    resumed.set_state(stopped.get_state())
    result[name + " resumed"] = [local(batch) for batch in resumed]
result["explained"] = datasets["arrays"].explain_input().splitlines()
print("RESULT" + json.dumps(result), flush=True)
"""


GRAIN = ("grain_map", "grain_iter", "grain_loader")


def run_in_two_processes(devices):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(mirrored.__path__[0])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(rank), str(devices)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, outputs):
        assert process.returncode == 0, err
    return [json.loads(out.partition("RESULT")[2]) for out, _ in outputs]


@pytest.mark.conformance(40)
def test_two_workers_with_one_device_each():
    first, second = run_in_two_processes(1)
    for kind in ("arrays", "batches"):
        assert first[kind] == [[[0, 1, 2, 3]], [[8, 9, 10]]]
        assert second[kind] == [[[4, 5, 6, 7]], [[11, 12, 13]]]
    assert first["pieces"] == [[[0, 0]], [[1]], [[2, 2]]]
    assert second["pieces"] == [[[10, 10]], [[11]], [[12, 12]]]
    for kind in GRAIN:
        # Grain's samplers give each worker a block, a slice every second row.
        blocks = kind == "grain_loader"
        evens, odds = [[[0, 2, 4, 6]], [[8, 10, 12]]], [[[1, 3, 5, 7]], [[9, 11, 13]]]
        assert first[kind] == ([[[0, 1, 2, 3]], [[4, 5, 6]]] if blocks else evens)
        assert second[kind] == ([[[7, 8, 9, 10]], [[11, 12, 13]]] if blocks else odds)
        assert first[f"{kind} resumed"] == first[kind][1:]
        assert second[f"{kind} resumed"] == second[kind][1:]
    assert first["explained"][1:] == [
        "process 0 (this one) reads every batch and keeps",
        "  replica 0 on cpu:0: rows 0 to 3 of 8",
        "process 1 reads every batch and keeps",
        second["explained"][4],
    ]
    assert second["explained"][3] == "process 1 (this one) reads every batch and keeps"
    assert second["explained"][4].endswith(": rows 4 to 7 of 8")


def test_two_workers_with_two_devices_each():
    first, second = run_in_two_processes(2)
    for kind in ("arrays", "batches"):
        assert first[kind] == [[[0, 1], [2, 3]], [[8, 9], [10, 11]]]
        assert second[kind] == [[[4, 5], [6, 7]], [[12, 13], []]]
    assert first["pieces"] == [[[0, 0], [1]], [[2, 2], []]]
    assert second["pieces"] == [[[10, 10], [11]], [[12, 12], []]]
    for kind in GRAIN[:2]:
        assert first[kind] == [[[0, 2], [4, 6]], [[8, 10], [12]]]
        assert second[kind] == [[[1, 3], [5, 7]], [[9, 11], [13]]]
        assert second[f"{kind} resumed"] == second[kind][1:]
