"""Shows the examples of docstrings as code in the reference.

The examples stand bare in the docstrings, as doctest reads them. Markdown would take
``>>>`` for a quotation in a quotation in a quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# An example ends at an empty line, as it does for doctest.
_EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


def fenced(text: str) -> str:
    """Puts each example of a docstring between fences."""
    return _EXAMPLE.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```", text)


class Examples(griffe.Extension):
    """What mkdocstrings calls for every object it reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
