"""``mirrored doctor``: looks at this machine and says in plain words what is wrong.

Owns looking and judging. It changes nothing, and whatever may hang (a backend that
starts, a collective, another machine) happens in a child process with a deadline.
"""

from mirrored._doctor._examination import DEFAULT_SECONDS, examine

__all__ = ["DEFAULT_SECONDS", "examine"]
