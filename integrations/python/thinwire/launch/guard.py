"""`python -m thinwire.launch.guard COMMAND...`: runs one rank, and ends it when its standard input
ends.

`thinwire run` holds the other end, on this machine or through ssh. So no rank outlives it, however
it ends, and a remote one needs neither a terminal nor a second connection to be stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 5.0  # from SIGTERM to SIGKILL


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the rank with all processes that it started."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        try:
            child.wait(wait_s)
            return
        except subprocess.TimeoutExpired:
            continue


def _watch(child: subprocess.Popen[bytes]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    _end(child)


def main(command: list[str]) -> int:
    """The command's exit status; 128 and the signal's number if one ended it."""
    # Ctrl-C reaches all processes of a terminal; `thinwire run` decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, restore_signals=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
    except OSError as error:
        print(f"{command[0]} can't be started: {error}", file=sys.stderr)
        return 127
    threading.Thread(target=_watch, args=(child,), daemon=True).start()
    status = child.wait()
    with contextlib.suppress(ProcessLookupError):  # what it left running holds its output open
        os.killpg(child.pid, signal.SIGKILL)
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
