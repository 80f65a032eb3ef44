"""Runs the command of an MCP server and ends all of it when drmas is gone: `python -I -S mcp_guard.py PARENT_PID COMMAND...`

It leads the server's process group and does nothing but wait. Where the server ends, or the parent dies by whatever hand, it
kills the group, itself included, so that no child of a server is left behind. Started by path by `mcp_stdio`, with nothing but
the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    watched = select.poll()
    try:
        watched.register(os.pidfd_open(parent), select.POLLIN)
        server = subprocess.Popen(command)
    except OSError as error:
        sys.exit(f"{command[0]} can't be started: {error}")
    try:
        # the pipes belong to the server alone: each end closes with it
        os.close(0)
        os.close(1)
        watched.register(os.pidfd_open(server.pid), select.POLLIN)
        watched.poll()
        status = server.poll()
        if status is not None:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            os.write(2, f"[it {how}]\n".encode())  # raises where the reader is gone as well
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
