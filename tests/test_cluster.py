"""Which worker am I: recorded environments of each kind of cluster."""

import json
import socket
import sys
import types

import jax
import pytest

import mirrored
from mirrored._cluster import resolve_cluster
from mirrored._rollcall import Member, gather
from mirrored._workers import Workers

WORKERS = ["10.0.0.1:1234", "10.0.0.2:1235", "10.0.0.3:1236"]


def place(cluster):
    return cluster.coordinator, cluster.process_count, cluster.process_id, cluster.source


def tf_config(cluster, kind, index):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


@pytest.fixture
def environment(monkeypatch):
    """Sets recorded variables, and forgets those of the machine that runs the tests."""

    def record(variables):
        for name in (
            *("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"),
            *("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS"),
        ):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return record


def test_tf_config():
    found = resolve_cluster(None, 1, tf_config({"worker": WORKERS}, "worker", 2))
    assert place(found) == ("10.0.0.1:1234", 3, 2, "TF_CONFIG")
    with_chief = {"worker": WORKERS[1:], "chief": WORKERS[:1]}
    assert place(resolve_cluster(None, 1, tf_config(with_chief, "chief", 0)))[2] == 0
    assert place(resolve_cluster(None, 1, tf_config(with_chief, "worker", 1)))[2] == 2
    given = {"cluster": {"worker": WORKERS}, "task": {"type": "worker", "index": 1}}
    assert place(resolve_cluster(given, 1, {})) == ("10.0.0.1:1234", 3, 1, "cluster=")


def test_launcher_comes_before_tf_config():
    variables = tf_config({"worker": WORKERS}, "worker", 2) | {
        "MIRRORED_COORDINATOR": "127.0.0.1:9999",
        "MIRRORED_PROCESS_COUNT": "4",
        "MIRRORED_PROCESS_ID": "3",
    }
    expected = ("127.0.0.1:9999", 4, 3, "mirrored launch")
    assert place(resolve_cluster(None, 1, variables)) == expected


def test_slurm(environment):
    environment(
        {
            "SLURM_JOB_ID": "65534",
            "SLURM_STEP_NODELIST": "node[007-009],other1",
            "SLURM_NTASKS": "8",
            "SLURM_PROCID": "5",
            "SLURM_LOCALID": "1",
            "SLURM_STEP_NUM_NODES": "4",
        }
    )
    found = resolve_cluster(None, 1, {})
    assert place(found) == ("node007:65534", 8, 5, "slurm")
    assert found.local_device_ids == (1,)


def test_open_mpi(environment):
    environment(
        {
            "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        }
    )
    found = resolve_cluster(None, 1, {})
    assert place(found)[1:] == (2, 1, "ompi")
    assert found.coordinator.startswith("10.96.0.1:")


def recorded(**fields):
    return types.SimpleNamespace(**fields)


class ApiError(Exception):
    """What the Kubernetes client raises."""

    status, reason = 403, "Forbidden"


@pytest.fixture
def kubernetes(environment, monkeypatch):
    """A pod of an indexed Job with a headless service, as the API describes it."""
    environment({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"})
    metadata = recorded(name="train-2-x7k9p", labels={"job-name": "train"})
    pod = recorded(metadata=metadata, spec=recorded(subdomain="trainers"))
    job = recorded(metadata=recorded(name="train", labels={}), spec=recorded(parallelism=4))
    client = recorded(
        CoreV1Api=recorded,
        BatchV1Api=recorded,
        exceptions=recorded(ApiException=ApiError),
    )
    config = recorded(load_incluster_config=lambda: None)
    monkeypatch.setitem(sys.modules, "kubernetes", recorded(config=config, client=client))
    where = "jax._src.clusters.k8s_cluster.K8sCluster"
    monkeypatch.setattr(f"{where}._pod", lambda: pod)
    monkeypatch.setattr(f"{where}._job", lambda: job)
    monkeypatch.setattr(f"{where}._controller", lambda: recorded(kind="Job"))
    monkeypatch.setattr("socket.gethostbyname", lambda host: "10.1.0.7")
    return job


def test_kubernetes_job(kubernetes):
    expected = ("train-0.trainers:55527", 4, 2, "k8s")
    assert place(resolve_cluster(None, 1, {})) == expected


def test_kubernetes_jobset(kubernetes):
    kubernetes.metadata.labels["jobset.sigs.k8s.io/jobset-name"] = "set"
    expected = ("train-0.set:55527", 4, 2, "k8s")
    assert place(resolve_cluster(None, 1, {})) == expected


def test_kubernetes_that_does_not_tell(kubernetes, monkeypatch):
    monkeypatch.delenv("JOB_COMPLETION_INDEX")
    with pytest.raises(mirrored.ClusterError, match="could not learn who belongs to it"):
        resolve_cluster(None, 1, {})


def test_a_pod_of_a_job_does_not_train_alone(environment, monkeypatch):
    """Without the package kubernetes JAX only warns, and each pod would train by itself."""
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}
    environment(pod)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with (
        pytest.warns(UserWarning, match="kubernetes"),
        pytest.raises(mirrored.ClusterError, match="pod 2 of an indexed Kubernetes Job"),
    ):
        resolve_cluster(None, 1, pod)
    # Any other pod, one with a notebook for instance, is alone.
    with pytest.warns(UserWarning, match="kubernetes"):
        assert resolve_cluster(None, 1, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None


CLOUD_TPU = "jax._src.clusters.cloud_tpu_cluster"


def test_cloud_tpu_on_kubernetes(environment, monkeypatch):
    """Two slices of two hosts each, as GKE describes them."""
    environment(
        {
            "TPU_WORKER_HOSTNAMES": "host-0.svc,host-1.svc",
            "TPU_WORKER_ID": "1",
            "MEGASCALE_COORDINATOR_ADDRESS": "slice-0-host-0.svc:8080",
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": "1",
            # What JAX would otherwise ask the metadata server of the machine.
            "TPU_SKIP_MDS_QUERY": "1",
        }
    )
    monkeypatch.setattr(f"{CLOUD_TPU}.running_in_cloud_tpu_vm", True)
    monkeypatch.setattr("socket.gethostbyname", lambda host: "10.1.0.7")
    found = resolve_cluster(None, 1, {})
    assert place(found)[1:3] == (4, 3)
    assert found.coordinator.startswith("slice-0-host-0.svc:")


def test_cloud_tpu_machine(environment, monkeypatch):
    """A slice of three hosts, as the metadata server describes it."""
    environment({})
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    metadata = {
        "agent-worker-number": "2",
        "worker-network-endpoints": "a:b:10.1.0.7,c:d:10.1.0.8,e:f:10.1.0.9",
        "tpu-env": "ACCELERATOR_TYPE: 'v4-24'\nWORKER_ID: '2'",
    }
    monkeypatch.setattr(f"{CLOUD_TPU}.running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(f"{CLOUD_TPU}.get_metadata", lambda key: (metadata[key], 200))
    found = resolve_cluster(None, 1, {})
    assert place(found)[1:3] == (3, 2)
    assert found.coordinator.startswith("10.1.0.7:")


def test_no_cluster(environment):
    environment({})
    assert resolve_cluster(None, 1, {}) is None
    assert resolve_cluster(None, 1, {"TF_CONFIG": "{}"}) is None


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"TF_CONFIG": "{"}, "not JSON"),
        (tf_config({"worker": WORKERS}, "worker", 3), "worker 0, worker 1, worker 2"),
        (tf_config({"worker": WORKERS}, "evaluator", 0), "MirroredStrategy"),
        (tf_config({"worker": WORKERS, "ps": WORKERS}, "worker", 0), "ParameterServerStrategy"),
        (tf_config({"worker": ["10.0.0.1"]}, "worker", 0), "host:port"),
        (tf_config({"worker": [WORKERS[0]] * 2}, "worker", 0), "more than once"),
        ({"MIRRORED_COORDINATOR": "localhost:1"}, "MIRRORED_PROCESS_COUNT"),
    ],
)
def test_descriptions_that_make_no_sense(variables, words):
    with pytest.raises(mirrored.ClusterError) as caught:
        resolve_cluster(None, 1, variables)
    assert words in str(caught.value)
    assert "hint:" in str(caught.value)


def test_process_id_outside_the_cluster():
    with pytest.raises(mirrored.ClusterError, match="process 2 of 2"):
        mirrored.Cluster("10.0.0.1:1234", process_count=2, process_id=2)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cluster = mirrored.Cluster(address, process_count=2, process_id=0)
        with pytest.raises(mirrored.ClusterError, match=f"could not listen on {address}"):
            gather(cluster, 5)


def test_a_barrier_broken_by_a_death_names_the_dead():
    """What JAX says of it, recorded; it knows numbers only."""
    members = (Member(0, "here", 11), Member(1, "there", 22))
    cluster = mirrored.Cluster(WORKERS[0], process_count=2, process_id=0)

    class Client:
        def wait_at_barrier(self, name, milliseconds):
            raise jax.errors.JaxRuntimeError(
                "INTERNAL: Barrier failed because: task is set to ERROR: UNAVAILABLE: Task 1 "
                f"heartbeat timeout. [...] Barrier Id: {name}::0, Task: 1"
            )

    workers = Workers(cluster, members, 5)
    workers.client = Client()
    with pytest.raises(mirrored.WorkerError) as caught:
        workers.barrier("a save")
    assert "waiting for worker 1 (host there, pid 22) at 'a save' failed" in str(caught.value)


def test_too_late(two):
    """JAX has started in this process: it cannot join others any more."""
    cluster = mirrored.Cluster("127.0.0.1:1", process_count=2, process_id=1)
    with pytest.raises(mirrored.ContextError, match="had already started"):
        mirrored.MultiWorkerMirroredStrategy(cluster, timeout=5)
