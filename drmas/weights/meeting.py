"""Where all ends of a weight sync meet: faults are settled together, and messages go from end to end.

    number in the group: 0 the job's rank 0 · then the policy's ranks (rank 0 among them, if it is one) · then the workers

Before every step all ends vote. Who found something wrong has written what it is into the rendezvous store, so everybody stops
at the same place and everybody knows the first fault. Where the group itself breaks, because an end died or hangs, no vote can
be held any more: each end then writes what it was waiting for, and number 0, which has the store, sees who wrote nothing.
Used on the trainer's ranks (`buckets`, `shards`) and in the workers (`receiver`, `shard_worker`); imports torch, never vLLM. A
fault ends a meeting: make a new one.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

_NO_WORD = 2**63 - 1

SOON_SECONDS = 1.0
"""How long an end that is missed by others may take to say that it is there."""
LAST_SECONDS = 5.0
"""What number 0 waits for the others' reports beyond the end of their timeouts."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Who is who. `trainers`: the job's ranks that have the policy, in its order; `engine_workers`: of one engine."""

    trainers: tuple[int, ...]
    engine_workers: int
    engines: int

    @property
    def _first(self) -> int:
        return 0 if self.trainers[0] == 0 else 1

    @property
    def size(self) -> int:
        return self._first + len(self.trainers) + self.engine_workers * self.engines

    def trainer(self, rank: int) -> int:
        """The number of the policy's rank `rank`."""
        return self._first + rank

    def worker(self, worker: int) -> int:
        return self._first + len(self.trainers) + worker

    def called(self, number: int) -> str:
        """In words."""
        if number < self.worker(0):
            return f"trainer rank {self.trainers[number - self._first] if number >= self._first else 0}"
        engine, rank = divmod(number - self.worker(0), self.engine_workers)
        return f"worker {rank} of engine {engine}"


class Parcel(NamedTuple):
    """`buffer` (uint8) for, or from, end number `peer`; `content` says what is in it."""

    peer: int
    buffer: torch.Tensor
    content: str


class Refused(Exception):
    """An end found a fault; all ends raise this at the same place, with the same words."""


class Broken(RuntimeError):
    """An end is gone or silent; what this end was waiting for is written down."""


class Meeting:
    """One end's place in it. Comes to life when all ends are there."""

    def __init__(self, store: dist.Store, ends: Ends, number: int, *, address: str, timeout_seconds: float) -> None:
        """`address` is this host's, as the others see it. RuntimeError: an end didn't come within the timeout."""
        self.store, self._ends, self.number, self.timeout_seconds = store, ends, number, timeout_seconds
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_seconds)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        store.set(f"here/{number}", "")
        try:
            self._group = dist.ProcessGroupGloo(dist.PrefixStore("meeting", store), number, ends.size, options)
        except RuntimeError as error:
            missing = [ends.called(other) for other in range(ends.size) if not store.check([f"here/{other}"])]
            raise RuntimeError(f"no word from {', '.join(missing) or 'some'} within {timeout_seconds:g} s") from error

    def agree(self, fault: str = "", *, plan: int = 0, word: int | None = None, content: str = "") -> int:
        """Go on if no end has a `fault` and all have the same `plan`. Returns the `word` of number 0, the only one to say one.

        Refused: the first fault, and whose it is; or whose plan (0 to 2^63 - 1) isn't that of number 0. RuntimeError: an end is
        gone or hangs. `content` says what is on its way.
        """
        if fault:
            self._report({"fault": fault})
        if plan:
            self.store.set(f"plan/{self.number}", f"{plan:016x}")
        ballot = torch.tensor([self.number if fault else self._ends.size, plan, -plan, _NO_WORD if word is None else word])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        with self.reported(f"the others' vote{content and f' on {content}'}"):
            self._group.allreduce([ballot], options).wait()
            first, least, most, heard = ballot.tolist()
            if first < self._ends.size:
                raise Refused(f"{self._ends.called(first)}: {self._said(first)['fault']}")
            if least != -most:
                raise Refused(self._difference())
        return heard

    def broadcast(self, buffer: torch.Tensor, content: str) -> Callable[[], None]:
        """Begin to bring number 0's `buffer` ([n] uint8) into everybody's; the result waits until it is there.

        RuntimeError: an end is gone, or silent for too long.
        """
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        what = f"{content} {'from' if self.number else 'by'} {self._ends.called(0)}"
        with self.reported(what):
            work = self._group.broadcast([buffer], options)

        def wait() -> None:
            with self.reported(what):
                work.wait()

        return wait

    def exchange(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel]) -> Callable[[], None]:
        """Begin to send and receive, all at the same time; the result waits until everything is there.

        RuntimeError: an end is gone, or silent for longer than the timeout.
        """
        works = []
        for parcels, begin, way in ((incoming, self._group.recv, "from"), (outgoing, self._group.send, "to")):
            for peer, buffer, content in parcels:
                what = f"{content} {way} {self._ends.called(peer)}"
                with self.reported(what, peer=peer):
                    works.append((begin([buffer], peer, 0), what, peer))

        def wait() -> None:
            for work, what, peer in works:
                with self.reported(what, peer=peer):
                    work.wait()

        return wait

    @property
    def size(self) -> int:
        return self._ends.size

    def close(self) -> None:
        """Leave; the others notice when they next wait for this end. Harmless when repeated."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()  # the connections end with the last reference

    def blame(self, broken: RuntimeError, is_over: Callable[[], bool]) -> str:
        """Number 0: who is to blame for a broken meeting. Waits for the others' reports, but no longer once `is_over`."""
        deadline = self._broke_at + LAST_SECONDS
        others, reports = range(1, self._ends.size), {}
        last = False
        while not last:
            last = time.monotonic() >= deadline or is_over()  # who has reported by then is heard
            reports |= {other: self._said(other) for other in others if other not in reports and self._has_said(other)}
            if len(reports) == len(others):
                last = True
            if failed := [f"{self._ends.called(end)} {each['failed']}" for end, each in reports.items() if "failed" in each]:
                return "; ".join(failed)
            if any(report.get("missed", 0) not in {0, *reports} for report in reports.values()):
                deadline = min(deadline, time.monotonic() + SOON_SECONDS)
            time.sleep(0.0 if last else 0.02)
        missed = {report["missed"] for report in reports.values() if "missed" in report}
        silent = [other for other in others if other not in reports and (other in missed or not missed)]
        words = [f"no word from {', '.join(map(self._ends.called, silent))}"] if silent else []
        words += [f"{self._ends.called(end)} {report['waited']}" for end, report in reports.items() if "missed" in report]
        return "; ".join(words) or _brief(broken)

    @contextlib.contextmanager
    def reported(self, what: str, *, peer: int | None = None):
        """Write down what this end was waiting for, if the group breaks meanwhile."""
        self._broke_at = time.monotonic() + self.timeout_seconds  # that is when the others notice, too
        try:
            yield
        except RuntimeError as error:
            waited = f"waited for {what}: {_brief(error)}"
            self._report({"waited": waited} | ({} if peer is None else {"missed": peer}))
            raise Broken(waited) from error

    def failed(self, error: BaseException) -> None:
        """Leave because of `error`, which is this end's own; number 0 will say so. What the meeting itself raised is known."""
        if not isinstance(error, Refused | Broken):
            self._report({"failed": f"{type(error).__name__}: {error}"})
        self.close()

    def _difference(self) -> str:
        """Which ends have another plan than number 0."""
        keys = [f"plan/{end}" for end in range(self._ends.size)]
        own, *plans = (self.store.get(key).decode() if self.store.check([key]) else "none" for key in keys)
        others = ", ".join(f"{self._ends.called(end)} {plan}" for end, plan in enumerate(plans, start=1) if plan != own)
        return f"{self._ends.called(0)} is about to send by plan {own}, but {others}; do all run the same drmas?"

    def _report(self, report: dict[str, object]) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone with number 0
            self.store.set(f"report/{self.number}", json.dumps(report))

    def _has_said(self, number: int) -> bool:
        return self.store.check([f"report/{number}"])

    def _said(self, number: int) -> dict[str, object]:
        return json.loads(self.store.get(f"report/{number}"))


def _brief(error: Exception) -> str:
    """Without the file and line of gloo's source, and without its advice."""
    text = (str(error) or type(error).__name__).split(". This ")[0].splitlines()[0]
    return text.partition("] ")[2] if text.startswith("[/") else text
