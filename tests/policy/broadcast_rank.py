"""One rank of test_broadcast: says what it heard."""

import json
import sys

import torch.distributed as dist

from drmas.errors import DataError, DrmasError
from drmas.policy.broadcast import Broadcast
from drmas.policy.groups import destroy, init_distributed


def rank_zero(value):
    def action():
        assert dist.get_rank() == 0
        if isinstance(value, Exception):
            raise value
        return value

    return action


def main() -> None:
    init_distributed()
    share, heard = Broadcast(), []
    heard.append(share(rank_zero({"rows": [1, "é"], "none": None})))
    for error in (DataError("bad.jsonl:2"), KeyError("a fault of ours")):
        try:
            share(rank_zero(error))
        except DrmasError as caught:
            heard.append([type(caught).__name__, str(caught)])
        except KeyError:
            heard.append(["KeyError", ""])
    heard.append(share(rank_zero(7)))
    sys.stdout.write(json.dumps({"rank": dist.get_rank(), "heard": heard}) + "\n")
    destroy()


if __name__ == "__main__":
    main()
