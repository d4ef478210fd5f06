"""What a tool raises when it cannot go on: one sentence with a remedy, shown without a trace."""

from __future__ import annotations

import sys
from collections.abc import Callable


class Fault(Exception):
    """A machine lacks something, or a step failed; the message says what and what to do."""


def told(main: Callable[[], int]) -> int:
    """Run a tool's main; a Fault becomes its sentence on stderr and exit code 1, Ctrl-C becomes 130."""
    try:
        return main()
    except Fault as fault:
        print(fault, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
