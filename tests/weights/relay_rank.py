"""One rank of test_relay: rank 0 has the engines, ranks 1 and 2 a policy. Rank 0 says what it found."""

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from drmas.errors import SyncError
from drmas.weights.relay import relayed
from drmas.weights.source import CheckedSource

CPU = torch.device("cpu")
TENSORS = [
    ("embed", torch.arange(12.0).view(4, 3)),
    ("norm", torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16)),
    ("transposed", torch.arange(6.0).view(2, 3).t()),
    ("scale", torch.tensor(7.0, dtype=torch.float64)),
]


class Shared:
    """A source whose every tensor is a collective of the policy's ranks, each of which holds a half."""

    def __init__(self, group, breaks_at=None, lies_at=None):
        self.group, self.breaks_at, self.lies_at, self.given = group, breaks_at, lies_at, 0

    def metadata(self):
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS]

    def __iter__(self):
        for name, tensor in TENSORS:
            if name == self.breaks_at:
                raise RuntimeError("the gather failed")
            whole = tensor.float() / 2
            dist.all_reduce(whole, group=self.group)
            self.given += 1
            yield name, whole.to(torch.float16 if name == self.lies_at else tensor.dtype).reshape(tensor.shape)


def trouble(action):
    try:
        action()
    except SyncError as error:
        return str(error)
    return None


def is_right(found):
    return [name for name, _ in found] == [name for name, _ in TENSORS] and all(
        torch.equal(tensor, expected) and tensor.dtype == expected.dtype
        for (_, tensor), (_, expected) in zip(found, TENSORS, strict=True)
    )


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    policy, pair = dist.new_group([1, 2]), dist.new_group([0, 1])
    mine = None if rank == 0 else Shared(policy)
    ours = relayed(mine, pair if rank < 2 else None, device=CPU)
    found = {"same": ours is mine, "metadata": len(ours.metadata())}

    checked = CheckedSource(ours)
    found["whole"] = is_right(list(checked)) if rank == 0 else None
    checked.settle(1)
    if rank == 0:  # gives up after two tensors; the others must not notice
        iterator = iter(checked)
        next(iterator), next(iterator)
    checked.settle(1)
    found["after a break"] = is_right(list(checked)) if rank == 0 else None
    checked.settle(1)
    found["given"] = mine and mine.given

    for what in ("breaks_at", "lies_at"):
        broken = relayed(mine and Shared(policy, **{what: "transposed"}), pair if rank < 2 else None, device=CPU)
        seen = []
        found[what] = trouble(lambda source=broken, seen=seen: seen.extend(name for name, _ in source)) if rank < 2 else None
        found[f"{what} seen"] = seen
        if rank == 2 and what == "lies_at":
            list(broken)
        elif rank == 2:
            iterator = iter(broken)
            next(iterator), next(iterator)
    checked = CheckedSource(ours)
    found["after an error"] = is_right(list(checked)) if rank == 0 else None
    checked.settle(1)

    apart = relayed(None, None, device=CPU)
    found["outside"] = [list(apart), list(apart.metadata())]
    sys.stdout.write(json.dumps({"rank": rank, **found}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
