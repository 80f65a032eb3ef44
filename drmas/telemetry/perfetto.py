"""The ranks' recordings as one picture: `trace.json`, in Chrome's trace event format, which Perfetto (ui.perfetto.dev) opens.

A process is a rank, a thread is a policy, or the phase where a span has none. `time_shares` says the same in numbers. The files
are written by `drmas.telemetry.trace`. A rank that died leaves one that can be read: a span that never ended is closed at its
rank's last sign of life and marked. Called by `trace.Profile` and, for the numbers, by whoever reports them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from drmas.telemetry.sinks import replace_text

FILE = "trace.json"

_Track = tuple[int, str, int]
"""A row of the picture: rank, thread, and which of the thread's lanes."""


@dataclass(slots=True)
class Span:
    """One span of one rank. Times are nanoseconds of the host's clock. `finished` is False where its rank died in it."""

    rank: int
    id: int
    name: str
    policy: str | None
    parent: int | None
    start: int
    end: int = 0
    finished: bool = False
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def thread(self) -> str:
        return self.policy or self.name


class Counter(NamedTuple):
    rank: int
    name: str
    ns: int
    value: float


@dataclass(slots=True)
class Recorded:
    """What the ranks wrote. `hosts` names each rank's host."""

    hosts: dict[int, str] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)


def read(folder: Path, num_ranks: int | None = None) -> Recorded:
    """What ranks 0 to `num_ranks` - 1 (or all that are found) wrote; a line half written is left out."""
    recorded = Recorded()
    for path in folder.glob("rank_*.jsonl"):
        rank = int(path.stem.removeprefix("rank_"))
        if num_ranks is None or rank < num_ranks:
            _read_rank(recorded, rank, path)
    recorded.spans.sort(key=lambda span: (span.start, span.rank, span.id))
    recorded.counters.sort(key=lambda counter: counter.ns)
    return recorded


def _read_rank(recorded: Recorded, rank: int, path: Path) -> None:
    spans: dict[int, Span] = {}
    last = 0
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        last = max(last, line.get("ns", 0))
        if "host" in line:
            recorded.hosts[rank] = line["host"]
        elif "begin" in line:
            start = {"start": line["ns"], "parent": line["parent"], "args": line["args"]}
            spans[line["begin"]] = Span(rank, line["begin"], line["name"], line["policy"], **start)
        elif "end" in line and line["end"] in spans:
            ended = spans[line["end"]]
            ended.end, ended.finished = line["ns"], True
            if "error" in line:
                ended.args["error"] = line["error"]
        elif "counter" in line:
            recorded.counters.append(Counter(rank, line["counter"], line["ns"], line["value"]))
    for span in spans.values():
        if not span.finished:
            span.end = last
            span.args["unfinished"] = True
    recorded.spans += spans.values()


def merge(folder: Path, num_ranks: int | None = None) -> Path:
    """Write `trace.json` from the ranks' files, and return its path. Can be called again, also while ranks still write."""
    recorded = read(folder, num_ranks)
    starts = [span.start for span in recorded.spans] + [counter.ns for counter in recorded.counters]
    epoch = min(starts, default=0)
    lanes = _lanes(recorded.spans)
    tracks = {track: number for number, track in enumerate(dict.fromkeys(lanes), start=1)}
    events = [*_names(recorded, tracks), *_complete(recorded.spans, lanes, tracks, epoch)]
    events += (
        {"ph": "C", "name": each.name, "pid": each.rank, "ts": (each.ns - epoch) / 1e3, "args": {"value": each.value}}
        for each in recorded.counters
    )
    about = {"started_ns": epoch, "ranks": sorted(recorded.hosts)}
    path = folder / FILE
    replace_text(path, json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}))
    return path


def _names(recorded: Recorded, tracks: Mapping[_Track, int]) -> Iterator[dict[str, Any]]:
    """Metadata: what processes and threads are called, and their order."""
    for rank, host in sorted(recorded.hosts.items()):
        for kind, value in (("process_name", {"name": f"rank {rank} ({host})"}), ("process_sort_index", {"sort_index": rank})):
            yield {"ph": "M", "name": kind, "pid": rank, "tid": 0, "args": value}
    for (rank, thread, lane), number in tracks.items():
        name = thread if lane == 0 else f"{thread} ({lane + 1})"
        for kind, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": number})):
            yield {"ph": "M", "name": kind, "pid": rank, "tid": number, "args": value}


def _complete(
    spans: Iterable[Span], lanes: Sequence[_Track], tracks: Mapping[_Track, int], epoch: int
) -> Iterator[dict[str, Any]]:
    """Complete events, in microseconds since `epoch`, nanoseconds as decimals."""
    for span, track in zip(spans, lanes, strict=True):
        policy = {"policy": span.policy} if span.policy else {}
        yield {
            "ph": "X",
            "name": span.name,
            "cat": "drmas",
            "pid": span.rank,
            "tid": tracks[track],
            "ts": (span.start - epoch) / 1e3,
            "dur": (span.end - span.start) / 1e3,
            "args": policy | span.args,
        }


def _lanes(spans: Sequence[Span]) -> list[_Track]:
    """The track of each span, in the order of their starts: a track holds spans inside their parents or one after the other.

    Spans that overlap otherwise, as those of concurrent episodes do, get further lanes of their thread.
    """
    known = {(span.rank, span.id): span for span in spans}
    open_on: dict[tuple[int, str], list[list[Span]]] = defaultdict(list)
    tracks = []
    for span in spans:
        lanes = open_on[span.rank, span.thread]
        for stack in lanes:
            while stack and stack[-1].end <= span.start:
                stack.pop()
        around = {id(each) for each in _ancestors(span, known)}
        fits = (i for i, stack in enumerate(lanes) if not stack or (id(stack[-1]) in around and span.end <= stack[-1].end))
        lane = next(fits, len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(span)
        tracks.append((span.rank, span.thread, lane))
    return tracks


def _ancestors(span: Span, known: Mapping[tuple[int, int], Span]) -> Iterator[Span]:
    while span.parent is not None and (parent := known.get((span.rank, span.parent))) is not None:
        yield parent
        span = parent


def time_shares(spans: Iterable[Span]) -> dict[str, dict[str, float]]:
    """{policy, or "" for none: {name: share of the traced time in which such a span was open}}, over all ranks.

    Spans that overlap count once, those inside others in both: shares of names that contain each other don't add up.

    Example: {"": {"step": 1.0, "rollout": 0.6}, "main": {"forward": 0.1, "backward": 0.2}}
    """
    parts: dict[tuple[str, str], dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    everything: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        parts[span.policy or "", span.name][span.rank].append(span)
        everything[span.rank].append(span)
    whole = _covered(everything)
    shares: dict[str, dict[str, float]] = defaultdict(dict)
    for (policy, name), by_rank in parts.items():
        shares[policy][name] = _covered(by_rank) / whole if whole else 0.0
    return dict(shares)


def _covered(by_rank: Mapping[int, Iterable[Span]]) -> int:
    """Nanoseconds in which at least one of a rank's spans was open, summed over ranks."""
    total = 0
    for spans in by_rank.values():
        until = 0
        for span in sorted(spans, key=lambda span: span.start):
            total += max(0, span.end - max(span.start, until))
            until = max(until, span.end)
    return total
