"""Training on parameter servers: workers run closures, servers hold the variables.

Owns everything that is asynchronous; nothing in it takes part in a lockstep program.
"""

from mirrored._parameter_server._coordinator import ClusterCoordinator
from mirrored._parameter_server._embedding import EmbeddingTable, TableRows
from mirrored._parameter_server._partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)
from mirrored._parameter_server._per_worker import (
    PerWorkerDataset,
    PerWorkerValues,
    current_worker_index,
)
from mirrored._parameter_server._remote_value import RemoteValue
from mirrored._parameter_server._staleness import Staleness, bounded
from mirrored._parameter_server._status import ClusterStatus, ServerStatus, WorkerStatus
from mirrored._parameter_server._status_door import read_status
from mirrored._parameter_server._strategy import ParameterServerStrategy

__all__ = [
    "ClusterCoordinator",
    "ClusterStatus",
    "EmbeddingTable",
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "ParameterServerStrategy",
    "Partitioner",
    "PerWorkerDataset",
    "PerWorkerValues",
    "RemoteValue",
    "ServerStatus",
    "Staleness",
    "TableRows",
    "WorkerStatus",
    "bounded",
    "current_worker_index",
    "read_status",
]
