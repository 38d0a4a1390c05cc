"""``mirrored doctor`` finds what is wrong: real runs in environments that are."""

from __future__ import annotations

import json
import socket

import jax
import pytest

import mirrored
from mirrored import _cli
from mirrored._doctor import _child, _hardware, _probe, _software, _surroundings, examine

# What is not about hanging must not fail because this machine is busy.
PATIENTLY = ("--timeout", "100")
VARIABLES = ("XLA_FLAGS", "NPROC", "PJRT_NPROC", "TF_CONFIG", "KERAS_BACKEND")


@pytest.fixture
def bare(monkeypatch):
    """The environment of a new shell on a machine without accelerator."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return monkeypatch


def rows(examination, title):
    (section,) = [found for found in examination.sections if found.title.startswith(title)]
    return {row[0]: row[1:] for row in section.rows}


def facts(findings):
    return [finding.fact for finding in findings]


def tf_config(*workers, index):
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})


def test_a_machine_in_order(bare, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    bare.setenv("TF_CONFIG", tf_config(address, "127.0.0.2:1", index=0))
    assert _cli.main(["doctor", *PATIENTLY]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("What is wrong\n  nothing was found.\n")
    # One device has nothing to reduce, so four virtual ones were asked.
    assert "All-reduce over 4 virtual CPU devices" in printed
    assert "this machine copies" in printed
    assert f"worker 0      {address} (free)" in printed
    assert "this process  0 of 2" in printed


def test_much_is_wrong(bare, tmp_path, capsys):
    """An old Keras, too few threads, a port in use, another backend of Keras."""
    old = tmp_path / "keras-2.15.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: keras\nVersion: 2.15.0\n")
    bare.syspath_prepend(str(tmp_path))
    bare.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    bare.setenv("NPROC", "3")
    bare.setenv("KERAS_BACKEND", "torch")
    bare.setenv("JAX_LOG_COMPILES", "1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        bare.setenv("TF_CONFIG", tf_config(address, "127.0.0.2:1", index=0))
        assert _cli.main(["doctor", *PATIENTLY]) == 1
    printed = capsys.readouterr().out
    notes, _, wrong = printed.partition("Good to know")[2].partition("What is wrong")
    assert "JAX_LOG_COMPILES=1: each compilation is written out." in notes
    for words in (
        "keras 2.15.0 is installed; mirrored[keras] needs >= 3.12.",
        "2 virtual CPU devices share a pool of 3 threads",
        "KERAS_BACKEND=torch",
        f"cannot listen at {address}: Address already in use",
    ):
        assert words in wrong
    assert wrong.count("hint:") == 4


def test_a_backend_that_hangs_is_a_finding(bare, tmp_path):
    plugin = tmp_path / "jax_plugins" / "silent"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text("def initialize():\n    import time; time.sleep(600)\n")
    bare.setenv("PYTHONPATH", str(tmp_path))
    bare.delenv("JAX_PLATFORMS")
    # On a busy machine the time may be over before the backend is reached: give it more then.
    for timeout in (6, 12, 24, 48, 96):
        examination = examine(timeout=timeout)
        (fact,) = facts(examination.wrong)
        if "importing JAX" not in fact:
            break
    assert fact.startswith(f"starting JAX's backend did not end within {timeout - 1} s")
    assert rows(examination, "Devices") == {"none seen": []}


def test_a_flag_that_xla_does_not_know(bare):
    bare.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    examination = examine(timeout=100)
    (finding,) = examination.wrong
    assert finding.fact.startswith("starting JAX's backend failed: ")
    assert "--xla_no_such_flag" in finding.fact
    assert finding.hint.startswith("take the flag out of XLA_FLAGS")


def test_a_platform_that_is_not_there_and_a_cluster_that_makes_no_sense(bare):
    bare.setenv("JAX_PLATFORMS", "cuda")
    bare.setenv("TF_CONFIG", "{")
    examination = examine(timeout=100)
    backend, cluster = examination.wrong
    assert backend.fact.startswith("starting JAX's backend with JAX_PLATFORMS='cuda' failed: ")
    assert backend.hint.startswith("unset it")
    assert cluster.fact.startswith("TF_CONFIG is not JSON")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"timeout": 0.5}, "timeout=0.5"), ({"cpu_devices": 0}, "cpu_devices=0")],
)
def test_arguments_that_make_no_sense(arguments, words):
    with pytest.raises(mirrored.ArgumentError, match=words):
        examine(**arguments)


def test_the_last_words_of_a_child_that_dies():
    said = "@ 0x7f frame\nFile a.py\nF0000 Unknown flag in XLA_FLAGS: --x\n*** Check failure"
    assert _child._last_words(said, -6) == (
        "F0000 Unknown flag in XLA_FLAGS: --x | killed by SIGABRT"
    )


def test_whether_worker_0_can_be_reached():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert _probe._reach(address, 1) == {"state": "not listening yet"}
        server.listen()
        assert _probe._reach(address, 1) == {"state": "listening"}
    # 192.0.2.0/24 is kept for documentation: nobody has it.
    assert list(_probe._reach("192.0.2.1:1234", 0)) == ["cannot_listen"]
    assert list(_probe._reach("no-such-host.invalid:1", 1)) == ["unknown_host"]
    for reached in ({"cannot_listen": "x"}, {"unknown_host": "x"}, {"unreachable": "x"}):
        assert len(_surroundings._addresses("h:1", reached)) == 1
    assert _surroundings._addresses("h:1", {"state": "free"}) == []


@pytest.mark.parametrize(
    ("kind", "name", "gigabytes"),
    [
        ("NVIDIA H200", "NVLink 4", 450),
        ("NVIDIA H100 80GB HBM3", "NVLink 4", 450),
        ("NVIDIA H100 PCIe", "PCIe 5 x16", 63),
        ("NVIDIA A100-SXM4-80GB", "NVLink 3", 300),
        ("NVIDIA A10G", "PCIe 4 x16", 31),
        ("NVIDIA L40S", "PCIe 4 x16", 31),
        ("NVIDIA L4", "PCIe 4 x8", 15),
        ("Tesla T4", "PCIe 3 x16", 15),
        ("TPU v5 lite", "ICI", 100),
        ("TPU v6 lite", "ICI", 224),
        ("TPU v5p", "ICI", 300),
    ],
)
def test_known_hardware(kind, name, gigabytes):
    link = _hardware.link_of(kind)
    assert (link.name, link.bytes_per_second) == (name, gigabytes * 1e9)


def test_what_a_link_should_give():
    assert _hardware.link_of("cpu") is None
    # A ring sends 2 (R - 1) / R of the bytes: 1.75 GiB of each GiB with 8 devices.
    assert _hardware.carried_per_device(1 << 30, 8) == 1.75 * (1 << 30)
    link = _hardware.link_of("NVIDIA H100 80GB HBM3")
    assert _hardware.judge_link(link, "NVIDIA H100 80GB HBM3", 360e9, 20e-6) == []
    slow, late = _hardware.judge_link(link, "NVIDIA H100 80GB HBM3", 22e9, 900e-6)
    assert "moves 22.0 GB/s" in slow.fact
    assert "made for 450 GB/s" in slow.fact
    assert "900 us" in late.fact
    # Four devices that each get 0.5 of 8 GB/s use a quarter of the memory's speed.
    assert _hardware.judge_memory_copies(0.5e9, 8e9, 4) == []
    (busy,) = _hardware.judge_memory_copies(0.05e9, 8e9, 4)
    assert "2.5%" in busy.fact
    assert not busy.is_wrong


def test_a_wrong_product_names_its_device(monkeypatch):
    assert _probe._compute(jax.devices()[:2]) == {"wrong": []}
    broken = jax.devices()[1]
    put = jax.device_put
    monkeypatch.setattr(
        _probe.jax, "device_put", lambda value, device: put(value + (device == broken), device)
    )
    assert _probe._compute(jax.devices()[:2]) == {"wrong": ["cpu:1"]}


def test_versions_are_compared_by_their_numbers():
    assert _software._release("0.11.2.dev3+cuda") == (0, 11, 2)
    assert _software._release("0.9") < _software._release("0.10.2")
    needed = {name: (lowest, extra) for name, lowest, extra in _software._requirements()}
    assert needed["keras"][1] == "keras"
    assert needed["jax"][1] == ""
    assert "pytest" not in needed
    row, (finding,) = _software._judged("jax", "99.1", "")
    assert finding.fact.endswith("is installed; mirrored needs >= 99.1.")
    row, none = _software._judged("surely-not-installed", "1.0", "keras")
    assert (row[1], none) == ("none", [])
    _, (missing,) = _software._judged("surely-not-installed", "1.0", "")
    assert missing.hint == 'pip install "surely-not-installed>=1.0"'


def test_plugins_must_be_of_jaxlibs_version(tmp_path, monkeypatch):
    for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"):
        folder = tmp_path / f"{name}-0.4.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.4.0\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    twelve, thirteen, several = facts(_software._plugins()[1])
    assert twelve.startswith("jax-cuda12-plugin is 0.4.0 and jaxlib ")
    assert thirteen.startswith("jax-cuda13-plugin is 0.4.0")
    assert several.startswith("several plugins are installed")
