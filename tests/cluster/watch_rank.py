"""A rank that watches and waits, as one does in a collective that notices nothing: what `test_watch.py` starts with torchrun.

Usage: watch_rank.py FOLDER SECONDS. It writes its process number to FOLDER/pid-RANK, and ends when there is FOLDER/end, or with
an error when there is FOLDER/fail-RANK.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from drmas.policy.broadcast import Broadcast
from drmas.policy.groups import destroy, init_distributed
from drmas.runtime.watch import watched


def main(folder: Path, seconds: float) -> None:
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a run's ranks do: torchrun can't end them by it
    init_distributed(timeout_seconds=120)
    with watched(Broadcast(), rank=rank, timeout=seconds, run_dir=folder):
        (folder / f"pid-{rank}").write_text(str(os.getpid()))
        while not (folder / "end").exists():
            if (folder / f"fail-{rank}").exists():
                raise ValueError("17 is odd")
            time.sleep(0.05)
    destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
