"""mirrored: train a Keras, Flax NNX or JAX model on every device there is, in lockstep.

The public API, and nothing else.
"""

from mirrored._accumulation import accumulated_value_and_grad
from mirrored._claims import as_mirrored
from mirrored._cluster import Cluster
from mirrored._context import add_companion as _add_companion
from mirrored._context import has_strategy
from mirrored._data import DistributedDataset, InputContext
from mirrored._errors import (
    ArgumentError,
    ArgumentTypeError,
    CancelledError,
    CheckpointError,
    ClusterError,
    ContextError,
    DataError,
    DeviceError,
    GradientError,
    MirroredError,
    MissingDependencyError,
    NonFiniteError,
    OwnershipError,
    PaddingError,
    ServerError,
    ShapeError,
    TracingError,
    VariableError,
    WorkerError,
)
from mirrored._explanation import Explanation
from mirrored._function import Function, function
from mirrored._functional_state import shard_state
from mirrored._gradients import grad, mean, value_and_grad
from mirrored._objects import add_adapter as _add_adapter
from mirrored._optimizer import Optimizer
from mirrored._parameter_server import (
    ClusterCoordinator,
    ClusterStatus,
    EmbeddingTable,
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    ParameterServerStrategy,
    Partitioner,
    PerWorkerDataset,
    PerWorkerValues,
    RemoteValue,
    ServerStatus,
    Staleness,
    TableRows,
    WorkerStatus,
    bounded,
    current_worker_index,
)
from mirrored._profile import profile
from mirrored._progress import progress
from mirrored._replica import ReplicaContext, get_replica_context, in_cross_replica_context
from mirrored._reproducible import reproducible_value_and_grad
from mirrored._sparse import IndexedSlices
from mirrored._strategies import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    get_strategy,
)
from mirrored._strategy import Strategy, ValueContext
from mirrored._types import ReduceOp, VariableAggregation, VariableSynchronization
from mirrored._values import PerReplica
from mirrored._variable import Variable

# Keras models made in a scope learn of it if Keras has been imported.
_add_companion("keras", "mirrored.keras")
# Flax NNX objects among the arguments of a program are taken apart and written back.
_add_adapter("flax", "mirrored.nnx")

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CancelledError",
    "CheckpointError",
    "Cluster",
    "ClusterCoordinator",
    "ClusterError",
    "ClusterStatus",
    "ContextError",
    "DataError",
    "DeviceError",
    "DistributedDataset",
    "EmbeddingTable",
    "Explanation",
    "FixedShardsPartitioner",
    "Function",
    "GradientError",
    "IndexedSlices",
    "InputContext",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "MirroredError",
    "MirroredStrategy",
    "MissingDependencyError",
    "MultiWorkerMirroredStrategy",
    "NonFiniteError",
    "OneDeviceStrategy",
    "Optimizer",
    "OwnershipError",
    "PaddingError",
    "ParameterServerStrategy",
    "Partitioner",
    "PerReplica",
    "PerWorkerDataset",
    "PerWorkerValues",
    "ReduceOp",
    "RemoteValue",
    "ReplicaContext",
    "ServerError",
    "ServerStatus",
    "ShapeError",
    "Staleness",
    "Strategy",
    "TableRows",
    "TracingError",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableError",
    "VariableSynchronization",
    "WorkerError",
    "WorkerStatus",
    "__version__",
    "accumulated_value_and_grad",
    "as_mirrored",
    "bounded",
    "current_worker_index",
    "function",
    "get_replica_context",
    "get_strategy",
    "grad",
    "has_strategy",
    "in_cross_replica_context",
    "mean",
    "profile",
    "progress",
    "reproducible_value_and_grad",
    "shard_state",
    "value_and_grad",
]
