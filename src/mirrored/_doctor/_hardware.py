"""What an all-reduce should reach on hardware that is known, and what that means.

Owns the table and the judgement. The figures are the makers' own: bytes a second that
one device can send over its links while it receives as many.
"""

from __future__ import annotations

import dataclasses
from typing import final

from mirrored._doctor._findings import Finding

GB = 1e9
# A link that is used well reaches more than half of its figure. Less than this share means that
# it is not used at all: transfers go over PCIe or through the host's memory.
_USED_SHARE = 0.25
# Small all-reduces take longer by a few times where the host is slow; not by this much.
_LATENCY_FACTOR = 20
# In-process collectives on CPU devices read and write each device's buffer in turn.
_CPU_SHARE = 0.05


@final
@dataclasses.dataclass(frozen=True)
class Link:
    """What joins the devices of a kind inside one machine."""

    name: str
    bytes_per_second: float
    seconds: float


# The first entry whose words all stand in the device's name counts, so exact names come first.
_LINKS: tuple[tuple[tuple[str, ...], Link], ...] = (
    (("h100", "pcie"), Link("PCIe 5 x16", 63 * GB, 30e-6)),
    (("a100", "pcie"), Link("PCIe 4 x16", 31 * GB, 30e-6)),
    (("v100", "pcie"), Link("PCIe 3 x16", 15 * GB, 30e-6)),
    (("b200",), Link("NVLink 5", 900 * GB, 15e-6)),
    (("b300",), Link("NVLink 5", 900 * GB, 15e-6)),
    (("h200",), Link("NVLink 4", 450 * GB, 15e-6)),
    (("h100",), Link("NVLink 4", 450 * GB, 15e-6)),
    (("h800",), Link("NVLink 4, 8 links", 200 * GB, 15e-6)),
    (("a100",), Link("NVLink 3", 300 * GB, 20e-6)),
    (("v100",), Link("NVLink 2", 150 * GB, 20e-6)),
    (("rtx", "3090"), Link("PCIe 4 x16", 31 * GB, 30e-6)),
    (("rtx", "4090"), Link("PCIe 4 x16", 31 * GB, 30e-6)),
    (("rtx", "5090"), Link("PCIe 5 x16", 63 * GB, 30e-6)),
    (("l40",), Link("PCIe 4 x16", 31 * GB, 30e-6)),
    (("a10",), Link("PCIe 4 x16", 31 * GB, 30e-6)),
    (("l4",), Link("PCIe 4 x8", 15 * GB, 30e-6)),
    (("t4",), Link("PCIe 3 x16", 15 * GB, 30e-6)),
    (("tpu", "v6"), Link("ICI", 224 * GB, 10e-6)),
    (("tpu", "v5p"), Link("ICI", 300 * GB, 10e-6)),
    (("tpu", "v5"), Link("ICI", 100 * GB, 10e-6)),
    (("tpu", "v4"), Link("ICI", 150 * GB, 10e-6)),
)


def link_of(device_kind: str) -> Link | None:
    """Looks a device's name (``device.device_kind``) up; None for one that is not known."""
    spelled = device_kind.lower()
    return next((link for words, link in _LINKS if all(word in spelled for word in words)), None)


def carried_per_device(byte_count: int, replica_count: int) -> float:
    """Bytes each device must send in the best all-reduce there is (a ring)."""
    return 2 * (replica_count - 1) / replica_count * byte_count


def judge_link(link: Link, device_kind: str, bandwidth: float, latency: float) -> list[Finding]:
    """Compares what was measured between accelerators with what their links can do."""
    findings = []
    if bandwidth < _USED_SHARE * link.bytes_per_second:
        findings.append(
            Finding(
                fact=f"an all-reduce moves {bandwidth / GB:.1f} GB/s between devices of kind "
                f"{device_kind}; {link.name} is made for {link.bytes_per_second / GB:.0f} GB/s.",
                hint="see `nvidia-smi topo -m` for how the devices are joined; NCCL_DEBUG=INFO "
                "makes a run print the path it takes (P2P over NVLink, or SHM through the host), "
                "and NCCL_P2P_DISABLE, if set, must go."
                if device_kind.lower().find("tpu") < 0
                else "see that no other program uses the TPUs.",
            )
        )
    if latency > _LATENCY_FACTOR * link.seconds:
        findings.append(
            Finding(
                fact=f"a small all-reduce takes {latency * 1e6:.0f} us; {link.name} should need "
                f"about {link.seconds * 1e6:.0f}.",
                hint="see whether other programs keep the devices or the host's cores busy.",
            )
        )
    return findings


def judge_memory_copies(bandwidth: float, memcpy: float, replica_count: int) -> list[Finding]:
    """Compares an all-reduce between CPU devices with copies of the same bytes."""
    # Every device's buffer is read and written once, and all share one memory.
    share = replica_count * bandwidth / memcpy
    if share >= _CPU_SHARE:
        return []
    return [
        Finding(
            fact=f"the all-reduce between {replica_count} CPU devices runs at {share:.1%} of what "
            f"this machine copies ({memcpy / GB:.1f} GB/s).",
            hint="other programs keep the cores busy, or there are many more devices than cores.",
            is_wrong=False,
        )
    ]
