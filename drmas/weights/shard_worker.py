"""The engine's side of a shard sync: a worker gets from every trainer rank what it needs, and nothing else.

On a CPU, what arrives is held until all ends agree that everything did; then vLLM's own loaders take it, as `Part`s of whole
tensors. So a failure on the way leaves the model as it was. It costs one copy of this worker's part of the model during the
update, and the messages of two rounds. On a GPU there is no such room, and tensors are loaded as they are complete. Lives in
vLLM's workers, behind `worker`; imports torch, never vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from drmas.core.resharding import Message, Region, worker_regions
from drmas.weights.meeting import Meeting, Parcel
from drmas.weights.part import part_of
from drmas.weights.shard_way import shard_way
from drmas.weights.shard_wire import ShardInit, Terms, content, empty, unpack
from drmas.weights.staged import Staged, given_away
from drmas.weights.wire import Named, address_towards, store_at

Check = Callable[[Iterable[Named]], None]
META = torch.device("meta")


class ShardReceiver:
    """One worker, in its meeting with the trainer and all other workers of the policy's engines."""

    def __init__(self, init: ShardInit, number: int, device: torch.device) -> None:
        """Join the meeting as its end `number`. `device`: the one of the worker's model.

        RuntimeError: an end didn't come within the timeout.
        """
        terms = self._terms = Terms.from_json(init.terms)
        self._ends = terms.ends
        worker, plan = number - self._ends.worker(0), terms.plan()
        self._digest = plan.digest
        self._rounds = [[message for message in messages if message.destination == worker] for messages in plan.rounds]
        self._regions = worker_regions(terms.tensors, terms.workers.tp, worker % terms.workers.tp)
        store = store_at(init.master_address, init.master_port, init.timeout_seconds)
        own = address_towards(init.master_address)
        self._meeting = Meeting(store, self._ends, number, address=own, timeout_seconds=init.timeout_seconds)
        self._device = torch.device("cpu") if init.device == "cpu" else device
        self._way = shard_way(self._meeting, self._device)
        self._staged: Staged[list[Named]] = Staged(self._meeting)

    def stage(self, said: dict[str, Any]) -> None:
        """Take an update in the background, until `receive` is told that it was staged."""
        self._staged.begin(lambda: list(self._arriving(check=None)))

    def receive(self, said: dict[str, Any], check: Check) -> Iterator[Named]:
        """An update, as what vLLM's `load_weights` takes: Hugging Face names, and tensors that look whole.

        `check` gets the same without data, and raises ValueError where the model can't take it. Refused: an end found a fault,
        or makes another plan. RuntimeError: an end is gone or silent.
        """
        if said.get("staged"):
            held = self._staged.taken()
            self._meeting.agree(self._fault(check), content="what was staged")
            return given_away(held)
        arriving = self._arriving(check)
        return given_away(list(arriving)) if self._device.type == "cpu" else arriving

    def close(self) -> None:
        self._way.close()
        self._meeting.close()

    def _arriving(self, check: Check | None) -> Iterator[Named]:
        """Every tensor once it is complete; the last ones only when all ends have everything."""
        self._meeting.agree("" if check is None else self._fault(check), plan=self._digest)
        tensors: dict[int, torch.Tensor] = {}
        missing = {number: region.size for number, region in enumerate(self._regions)}
        fault, arrived = "", []
        for messages in self._rounds:
            self._meeting.agree(fault)
            buffers = [empty(message, self._terms.dtype, self._device) for message in messages]
            arriving = list(zip(messages, buffers, strict=True))
            wait = self._way.exchange([], [self._parcel(*each) for each in arriving])
            fault = fault or self._placed(arrived, tensors, missing)
            wait()
            arrived = arriving
            if not fault:
                yield from self._complete(tensors, missing)
        self._meeting.agree(fault or self._placed(arrived, tensors, missing))
        yield from self._complete(tensors, missing)

    def _parcel(self, message: Message, buffer: torch.Tensor) -> Parcel:
        return Parcel(self._ends.trainer(message.source), buffer, content(message, self._terms.tensors))

    def _fault(self, check: Check) -> str:
        try:
            check(self._named(number, self._room(number, META)) for number in range(len(self._regions)))
        except ValueError as error:
            return str(error)
        return ""

    def _room(self, number: int, device: torch.device) -> torch.Tensor:
        """[rows, columns] for what this worker needs of a tensor."""
        region = self._regions[number]
        shape = region.bottom - region.top, region.right - region.left
        return torch.empty(shape, dtype=self._terms.dtype, device=device)

    def _placed(
        self, arrived: list[tuple[Message, torch.Tensor]], tensors: dict[int, torch.Tensor], missing: dict[int, int]
    ) -> str:
        """Put what messages brought in its place, for which a tensor has room from its first piece on. Returns what is wrong
        with the first bad message."""
        for message, buffer in arrived:
            try:
                for piece, values in unpack(message, buffer, self._terms.dtype):
                    if piece.tensor not in tensors:
                        tensors[piece.tensor] = self._room(piece.tensor, self._device)
                    _within(tensors[piece.tensor], self._regions[piece.tensor], piece.region).copy_(values)
                    missing[piece.tensor] -= piece.region.size
            except ValueError as error:
                source = self._ends.called(self._ends.trainer(message.source))
                return f"{content(message, self._terms.tensors)} from {source} {error}"
        return ""

    def _complete(self, tensors: dict[int, torch.Tensor], missing: dict[int, int]) -> Iterator[Named]:
        """The tensors that lack nothing any more; they are kept no longer."""
        for number in [number for number, elements in missing.items() if not elements]:
            del missing[number]
            yield self._named(number, tensors.pop(number) if number in tensors else self._room(number, self._device))

    def _named(self, number: int, values: torch.Tensor) -> Named:
        name, shape = self._terms.tensors.names[number], self._terms.tensors.shapes[number]
        return name, part_of(name, shape, self._regions[number], values if len(shape) > 1 else values.view(-1))


def _within(tensor: torch.Tensor, region: Region, part: Region) -> torch.Tensor:
    """`part` of a tensor that is `region` of the whole."""
    rows = slice(part.top - region.top, part.bottom - region.top)
    return tensor[rows, part.left - region.left : part.right - region.left]
