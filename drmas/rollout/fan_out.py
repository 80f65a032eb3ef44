"""Several engines' control channels as one, so that a single broadcast feeds all of them.

    group of the weight transport: rank 0 the trainer, then the workers of engine 0, then those of engine 1, ...

`pool` gives one to the weight transport as its `sync_client`. The calls of one step go out to all engines at the same time,
each in a thread of its own: `update_weights` returns only when the weights have arrived, which they do at all or at none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from itertools import accumulate
from typing import Any

from drmas.errors import EngineDied, EngineError

LOOPBACK = "127.0.0.1"


class FanOut:
    """`clients` as one client of vLLM's control protocol. It is for the life of these engines' processes.

    EngineDied comes as soon as one of them has died, since the others may then wait for what it would have sent. Any other
    error comes when all have answered, with what each said.
    """

    def __init__(self, clients: Sequence[Any]) -> None:
        self.clients = tuple(clients)
        self._workers = [getattr(client, "num_workers", 0) for client in self.clients]
        self.num_workers = sum(self._workers)
        """0 where the engines carry no weights."""
        addresses = [getattr(client, "trainer_address", LOOPBACK) for client in self.clients]
        self.trainer_address: str = next((each for each in addresses if each != LOOPBACK), LOOPBACK)
        """Where all workers can reach this process: engines of this host reach it under the address that others have, too."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """`init_info["rank_offset"]` is the rank of the first worker; each engine gets its own."""
        offsets = accumulate(self._workers[:-1], initial=init_info["rank_offset"])
        infos = [{**init_info, "rank_offset": offset} for offset in offsets]
        self._each(
            *(
                lambda c=client, i=info: c.init_weight_transfer_engine(i)
                for client, info in zip(self.clients, infos, strict=True)
            )
        )

    def stage_weights(self, update_info: dict[str, Any]) -> None:
        self._each(*(partial(client.stage_weights, update_info) for client in self.clients))

    def start_weight_update(self) -> None:
        self._each(*(client.start_weight_update for client in self.clients))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._each(*(partial(client.update_weights, update_info) for client in self.clients))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._each(*(partial(client.finish_weight_update, weight_version) for client in self.clients))

    def get_weight_version(self) -> str:
        """The version of all; where they differ, all that there are."""
        versions = self._each(*(client.get_weight_version for client in self.clients))
        return ", ".join(dict.fromkeys(versions))

    def abort_weight_update(self) -> bool:
        """End a failed update everywhere. True where every engine holds whole weights.

        EngineDied: one is gone; the others have ended the update all the same.
        """
        return all(run_all([client.abort_weight_update for client in self.clients]))

    def _each(self, *calls: Callable[[], Any]) -> list[Any]:
        return run_all(calls, until_death=True)


def run_all(calls: Sequence[Callable[[], Any]], *, until_death: bool = False) -> list[Any]:
    """Run `calls` at the same time; their results, in order.

    Waits for all, with `until_death` only until one raises EngineDied: the rest goes on in the background. EngineDied goes
    before any other error; several EngineErrors become one that has all their messages.
    """
    futures = [_in_background(call) for call in calls]
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        if until_death and (death := _death(done)):
            raise death
    if death := _death(futures):
        raise death
    errors = [error for future in futures if (error := future.exception()) is not None]
    refusals = [error for error in errors if isinstance(error, EngineError)]
    if len(errors) > 1 and len(refusals) == len(errors):
        raise EngineError("; ".join(dict.fromkeys(map(str, refusals))))
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


def _death(futures: Iterable[Future[Any]]) -> BaseException | None:
    return next((error for future in futures if isinstance(error := future.exception(), EngineDied)), None)


def _in_background(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # handed to whoever asks the future
            future.set_exception(error)

    threading.Thread(target=run, name="fan-out", daemon=True).start()
    return future
