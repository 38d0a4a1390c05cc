"""Training that is not in lockstep learns as much as training that is."""

from __future__ import annotations

import pathlib
import runpy

import pytest
import yaml

import mirrored

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def main_of(name):
    return runpy.run_path(str(EXAMPLES / name))["main"]


@pytest.fixture(scope="module")
def main():
    return main_of("parameter_server.py")


def test_tables_on_servers_learn_beside_a_part_in_lockstep(capsys):
    losses = main_of("embeddings_lockstep.py")(batches=60)
    assert losses[0] > 0.69
    assert sum(losses[-5:]) / 5 < 0.62
    assert "in the end" in capsys.readouterr().out


def test_the_manifest_for_kubernetes_is_one_that_ray_understands():
    """By what KubeRay's RayJob asks for; the program it names is there and takes its arguments."""
    manifest = yaml.safe_load((EXAMPLES / "cluster" / "kuberay.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    python, program, *arguments = manifest["spec"]["entrypoint"].split()
    assert (python, arguments) == ("python", ["--address", "auto"])
    assert '"--address"' in (EXAMPLES.parent / program).read_text()
    cluster = manifest["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            assert {"name", "image", "resources"} <= container.keys()
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_digits_are_read_as_well_out_of_step(main, capsys):
    """An MLP, seeded: within one point of the synchronous accuracy, in as many gradients."""
    synchronous = main("sync")
    assert synchronous > 0.85
    for staleness in ("async", mirrored.bounded(4)):
        assert main(staleness) > synchronous - 0.01
    assert "images are read correctly" in capsys.readouterr().out
