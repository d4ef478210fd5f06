"""`python -m runtime COMMAND ...`, or `python PATH/runtime COMMAND ...` from any folder.

The exit code is 0 when all is well, 1 for a fault told in a sentence, 2 for wrong usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import sys

CTRL_C = 130
BROKEN_PIPE = 141

try:
    if not __package__:  # started by its path: what is imported here must find its package
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        import runpy

        runpy.run_module("runtime", run_name="__main__", alter_sys=True)

    import argparse
    import logging

    from . import commands
    from .errors import ResidentError
except KeyboardInterrupt:
    sys.exit(CTRL_C)

log = logging.getLogger(__name__)

PROG = "python -m runtime"


def main(argv: list[str]) -> int:
    """Run one command; return the exit code."""
    try:
        code = _run(argv)
        if sys.stdout is not None:  # a shell may have closed it
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return CTRL_C
    except (ResidentError, ValueError) as error:
        log.debug("the fault came from here", exc_info=True)
        print(error, file=sys.stderr)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:  # a file that is not there, a full disk
        log.debug("the fault came from here", exc_info=True)
        print(f"{error.filename}: {error.strerror}." if error.filename else f"{error}.", file=sys.stderr)
    return 1


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(overview(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    name, *rest = argv
    if name not in commands.names():
        print(f"There is no command {name!r}. Commands are: {', '.join(commands.names())}.", file=sys.stderr)
        return 2
    command = commands.load(name)
    parser = argparse.ArgumentParser(prog=f"{PROG} {name}", description=command.HELP)
    parser.add_argument("-v", "--verbose", action="store_true", help="log to stderr, with the trace of a fault")
    command.add_arguments(parser)
    args = parser.parse_args(rest)
    logging.basicConfig(level=logging.DEBUG if args.verbose else logging.ERROR, format="%(name)s: %(message)s")
    return command.run(args)


def overview() -> str:
    """All commands with their sentence."""
    width = max(map(len, commands.names()))
    rows = [f"  {name:{width}}  {commands.load(name).HELP}" for name in commands.names()]
    return "\n".join([f"usage: {PROG} COMMAND ... (COMMAND --help tells its options)", "", *rows])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
