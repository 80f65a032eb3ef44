"""Meetings of ends in threads: one fault stops all, messages cross, and who breaks it is named."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from drmas.weights.meeting import Ends, Meeting, Parcel, Refused
from drmas.weights.wire import LOOPBACK, Store, store_at

TWO_AND_THREE = Ends(trainers=(0, 1), engine_workers=3, engines=1)


def meet(play, ends=TWO_AND_THREE, *, timeout_seconds=20.0, absent=()):
    """Run `play(number, meeting)` at every end, each in a thread; what each returned, or its error."""
    store = Store(timeout_seconds)
    results: dict[int, object] = {}

    def end(number: int) -> None:
        mine = store.store if number == 0 else store_at(LOOPBACK, store.port, timeout_seconds)
        try:
            meeting = Meeting(mine, ends, number, address=LOOPBACK, timeout_seconds=timeout_seconds)
            results[number] = play(number, meeting)
            meeting.close()
        except (Refused, RuntimeError) as error:
            results[number] = error

    threads = [threading.Thread(target=end, args=(number,)) for number in range(ends.size) if number not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_ends_are_numbered_and_named():
    apart = Ends(trainers=(2, 3), engine_workers=2, engines=2)
    assert (apart.size, apart.trainer(0), apart.worker(3)) == (7, 1, 6)
    names = ["trainer rank 0", "trainer rank 2", "trainer rank 3"]
    names += ["worker 0 of engine 0", "worker 1 of engine 0", "worker 0 of engine 1", "worker 1 of engine 1"]
    assert [apart.called(number) for number in range(7)] == names
    together = Ends(trainers=(0, 3), engine_workers=1, engines=1)
    assert (together.size, [together.called(number) for number in range(3)]) == (
        3,
        ["trainer rank 0", "trainer rank 3", "worker 0 of engine 0"],
    )


def test_messages_cross_and_a_fault_stops_everybody_with_the_same_words():
    def play(number, meeting):
        meeting.agree()
        if number < 2:
            buffers = [torch.full((1000,), 10 * number + peer, dtype=torch.uint8) for peer in (2, 3, 4)]
            meeting.exchange([Parcel(peer, buffer, "x") for peer, buffer in zip((2, 3, 4), buffers, strict=True)], [])()
            got = []
        else:
            buffers = [torch.zeros(1000, dtype=torch.uint8) for _ in range(2)]
            meeting.exchange([], [Parcel(peer, buffer, "x") for peer, buffer in enumerate(buffers)])()
            got = [buffer.unique().tolist() for buffer in buffers]
        with pytest.raises(Refused) as refusal:
            meeting.agree({1: "é: NaN", 3: "no room"}.get(number, ""))
        return got, str(refusal.value)

    results = meet(play)
    assert [results[number][0] for number in range(5)] == [[], [], [[2], [12]], [[3], [13]], [[4], [14]]]
    assert {result[1] for result in results.values()} == {"trainer rank 1: é: NaN"}


def test_an_end_that_does_not_come_is_named_to_all():
    results = meet(lambda *_: None, timeout_seconds=2, absent=(3,))
    for error in results.values():
        assert isinstance(error, RuntimeError)
        assert str(error) == "no word from worker 1 of engine 0 within 2 s"


@pytest.mark.parametrize("in_exchange", [True, False])
def test_an_end_that_falls_silent_is_named(in_exchange):
    """Trainer rank 1 stops before its message to worker 0, or before the next vote."""
    release = threading.Event()

    def play(number, meeting):
        try:
            meeting.agree()
            if number == 1:
                release.wait(30)
                return None
            if number == 2 and in_exchange:
                meeting.exchange([], [Parcel(1, torch.zeros(8, dtype=torch.uint8), "layer 7")])()
            meeting.agree()
        except RuntimeError as error:
            if number:
                return str(error)
            started = time.monotonic()
            words = meeting.blame(error, is_over=lambda: False)
            release.set()
            return words, time.monotonic() - started
        return None

    results = meet(play, timeout_seconds=2)
    words, seconds = results[0]
    assert words.startswith("no word from trainer rank 1")
    assert seconds < 2 + 5 + 10
    if in_exchange:
        assert "worker 0 of engine 0 waited for layer 7 from trainer rank 1: Timed out" in words
        assert results[2].startswith("waited for layer 7 from trainer rank 1")
    else:
        assert results[2].startswith("waited for the others' vote")


def test_blame_is_not_waited_for_once_the_engine_has_said_what_happened():
    release = threading.Event()

    def play(number, meeting):
        meeting.agree()
        if number:
            return release.wait(30)
        try:
            meeting.agree()
        except RuntimeError as error:
            words = meeting.blame(error, is_over=lambda: True)
            release.set()
            return words
        return ""

    everybody = "trainer rank 1, worker 0 of engine 0, worker 1 of engine 0, worker 2 of engine 0"
    assert meet(play, timeout_seconds=1)[0] == f"no word from {everybody}"
