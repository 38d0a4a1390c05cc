"""What was found: lines to read, and findings that say what to do.

Owns the form of a report and how it is written. What is found is others' work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import final


@final
@dataclasses.dataclass(frozen=True)
class Finding:
    """Something to know, and what to do about it.

    Args:
      fact: what is so, with its values.
      hint: what to do.
      is_wrong: whether training fails, hangs or crawls because of it; else it is a note.
    """

    fact: str
    hint: str
    is_wrong: bool = True


@final
@dataclasses.dataclass(frozen=True)
class Section:
    """One heading of the report, its rows, and what was found under it."""

    title: str
    rows: Sequence[Sequence[str]]
    findings: Sequence[Finding] = ()


@final
@dataclasses.dataclass(frozen=True)
class Examination:
    """All sections, in the order they are read."""

    sections: Sequence[Section]

    @property
    def wrong(self) -> list[Finding]:
        """What must be mended."""
        return [finding for finding in self._findings() if finding.is_wrong]

    @property
    def notes(self) -> list[Finding]:
        """What is good to know."""
        return [finding for finding in self._findings() if not finding.is_wrong]

    def __str__(self) -> str:
        parts = [_block(section.title, _columns(section.rows)) for section in self.sections]
        if self.notes:
            parts.append(_block("Good to know", _sentences(self.notes)))
        parts.append(_block("What is wrong", _sentences(self.wrong) or ["nothing was found."]))
        return "\n\n".join(parts)

    def _findings(self) -> list[Finding]:
        return [finding for section in self.sections for finding in section.findings]


def _block(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns the cells of rows; the last cell of a row may be as long as it likes."""
    widths: dict[int, int] = {}
    for row in rows:
        for column, cell in enumerate(row[:-1]):
            widths[column] = max(widths.get(column, 0), len(cell))
    return [
        "  ".join(
            [*(cell.ljust(widths[column]) for column, cell in enumerate(row[:-1])), row[-1]]
        ).rstrip()
        for row in rows
    ]


def _sentences(findings: Sequence[Finding]) -> list[str]:
    return [line for found in findings for line in (f"- {found.fact}", f"  hint: {found.hint}")]
