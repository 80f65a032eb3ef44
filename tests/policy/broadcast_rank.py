"""One rank of test_broadcast: says what it heard. With `alone`, rank 1 has an error while rank 0 is busy elsewhere; with
`after`, rank 0 takes its time after an error that didn't end anything; with `missing`, rank 1 never comes.
"""

import json
import os
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from drmas.errors import ConfigError, DataError, DrmasError
from drmas.policy import broadcast
from drmas.policy.broadcast import Broadcast
from drmas.policy.groups import destroy, init_distributed


def rank_zero(value):
    def action():
        assert dist.get_rank() == 0
        if isinstance(value, Exception):
            raise value
        return value

    return action


def on_rank(values):
    """Each rank's own result, or error."""

    def action():
        value = values[dist.get_rank()]
        if isinstance(value, Exception):
            raise value
        return value

    return action


def heard_by_gather(share, *values):
    try:
        return share.gather(on_rank(values))
    except (DrmasError, KeyError) as error:
        return [type(error).__name__, str(error)]


def alone(share) -> None:
    """Rank 1 leaves with its error, since nobody hears it; rank 0 then finds it gone."""
    broadcast._GRACE = timedelta(seconds=1)
    started = time.monotonic()
    try:
        if dist.get_rank() == 0:
            time.sleep(4)
        share.gather(on_rank((0, DataError("nobody hears it"))))
    except DrmasError as error:
        said = {"rank": dist.get_rank(), "heard": str(error), "seconds": time.monotonic() - started}
        sys.stdout.write(json.dumps(said) + "\n")
    destroy()


def after(share) -> None:
    """A step that takes longer than a rank with an error waits to be heard."""
    broadcast._GRACE = timedelta(seconds=1)
    heard = [heard_by_gather(share, 0, DataError("not saved")), share(lambda: time.sleep(4) or "a step")]
    sys.stdout.write(json.dumps({"rank": dist.get_rank(), "heard": heard}) + "\n")
    destroy()


def missing(rank: int) -> None:
    started = time.monotonic()
    if rank == 1:
        return
    try:
        init_distributed(meeting_seconds=3)
    except ConfigError as error:
        sys.stdout.write(json.dumps({"rank": rank, "heard": str(error), "seconds": time.monotonic() - started}) + "\n")


def main() -> None:
    if sys.argv[1:] == ["missing"]:
        missing(int(os.environ["RANK"]))
        return
    init_distributed()
    share, heard = Broadcast(), []
    if sys.argv[1:]:
        {"alone": alone, "after": after}[sys.argv[1]](share)
        return
    heard.append(share(rank_zero({"rows": [1, "é"], "none": None})))
    for error in (DataError("bad.jsonl:2"), KeyError("a fault of ours")):
        try:
            share(rank_zero(error))
        except DrmasError as caught:
            heard.append([type(caught).__name__, str(caught)])
        except KeyError:
            heard.append(["KeyError", ""])
    heard.append(share(rank_zero(7)))
    heard.append(heard_by_gather(share, {"name": "é" * 300}, [1.5, float("inf")]))
    heard.append(heard_by_gather(share, 1, DataError("row 3")))
    heard.append(heard_by_gather(share, DataError("row 3"), DataError("row 3")))
    heard.append(heard_by_gather(share, ConfigError("a key"), DataError("row 3")))
    heard.append(heard_by_gather(share, 1, KeyError("a fault of ours")))
    heard.append(heard_by_gather(share, 1, 2))
    sys.stdout.write(json.dumps({"rank": dist.get_rank(), "heard": heard}) + "\n")
    destroy()


if __name__ == "__main__":
    main()
