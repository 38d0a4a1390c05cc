"""Which versions are installed, and which this library can use.

Owns reading packages' metadata; nothing is imported.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re

from mirrored._doctor._findings import Finding, Section

_REQUIREMENT = re.compile(r"^([\w.-]+)(?:\[[^\]]*\])?\s*(?:>=([\w.]+))?\s*(?:;(.*))?$")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")
# What belongs to the extras' development, and what gathers the others.
_NOT_SHOWN = ("dev", "all")
# Packages that bring an accelerator to JAX; each must be of jaxlib's version.
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm60-plugin", "jax-rocm7-plugin")


def software() -> Section:
    """Compares what is installed with what the installed mirrored asks for."""
    rows = [["Python", platform.python_version(), ""]]
    findings: list[Finding] = []
    rows.append(["mirrored", _version("mirrored") or "none (not installed as a package)", ""])
    for name, lowest, extra in _requirements():
        row, found = _judged(name, lowest, extra)
        rows.append(row)
        findings += found
    rows += [["jaxlib", _version("jaxlib") or "none", ""]]
    plugin_rows, found = _plugins()
    return Section("Versions", [*rows, *plugin_rows], [*findings, *found])


def _requirements() -> list[tuple[str, str, str]]:
    """(package, lowest version, extra or "") of the installed mirrored, core first."""
    try:
        written = importlib.metadata.requires("mirrored") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for text in written:
        match = _REQUIREMENT.match(text.strip())
        if match is None:
            continue
        name, lowest, marker = match.groups()
        extra = _EXTRA.search(marker or "")
        if name != "mirrored" and (extra is None or extra[1] not in _NOT_SHOWN):
            found.append((name, lowest or "", extra[1] if extra else ""))
    return sorted(found, key=lambda row: (row[2] != "", row[2], row[0]))


def _judged(name: str, lowest: str, extra: str) -> tuple[list[str], list[Finding]]:
    version = _version(name)
    needed = f">= {lowest}" if lowest else "any version"
    label = f"mirrored[{extra}]" if extra else "mirrored"
    if version is None and extra:
        return [name, "none", f'{needed} for {label}, if you want it: pip install "{label}"'], []
    if version is None:
        return [name, "none", needed], [
            Finding(f"{name} is not installed.", f'pip install "{name}>={lowest}"')
        ]
    row = [name, version, f"{needed} for {label}"]
    if not lowest or _release(version) >= _release(lowest):
        return row, []
    return row, [
        Finding(
            fact=f"{name} {version} is installed; {label} needs {needed}.",
            hint=f'pip install --upgrade "{name}>={lowest}"',
        )
    ]


def _plugins() -> tuple[list[list[str]], list[Finding]]:
    installed = [(name, version) for name in _PLUGINS if (version := _version(name))]
    jaxlib = _version("jaxlib") or ""
    rows = [[name, version, f"{jaxlib}, as jaxlib"] for name, version in installed]
    findings = [
        Finding(
            fact=f"{name} is {version} and jaxlib {jaxlib}; JAX leaves such a plugin out.",
            hint=f'pip install --upgrade "{name}=={jaxlib}"',
        )
        for name, version in installed
        if _release(version)[:3] != _release(jaxlib)[:3]
    ]
    if len(installed) > 1:
        findings.append(
            Finding(
                fact=f"several plugins are installed: {', '.join(name for name, _ in installed)}.",
                hint="keep the one of your driver, and pip uninstall the others.",
            )
        )
    return rows, findings


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version: 0.11.2 of 0.11.2.dev3+cuda."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
