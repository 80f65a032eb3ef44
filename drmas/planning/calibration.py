"""From timed pieces of work to a cluster description: the shares of the peaks that this machine reaches, and its overheads.

    drmas plan --calibrate mine.toml --model SPEC    ->   drmas plan RECIPE --cluster mine.toml

Each quantity is fitted to what `measuring` timed, by least squares of relative errors without negative terms. An engine's steps
take

    steps x (weights x1 + s) + sequences x steps x (products x2 + q) + context x (KV bytes x1 + attention x2) + prompt x x3 + e

where reads and products add up (a CPU), or the shorter hides behind the longer (a GPU): the better of both is taken. Two models
tell the overheads s, q and e from the rates: the one asked for and a tiny one. What isn't measured (disks, links between
GPUs and nodes) is assumed and says so in the file. Called by `drmas plan --calibrate` and `validation`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import date
from itertools import combinations
from pathlib import Path

import numpy

from drmas.config.section import Name
from drmas.core.peaks import data_sheet
from drmas.planning.cluster import load_cluster
from drmas.planning.growth import CALL_SECONDS
from drmas.planning.measuring import EngineRun, Machine, Note, UpdateWork, measure
from drmas.planning.types import Cluster

LINK = 0.7
"""Assumption: what of a copy's rate a push of weights reaches."""
STEP_SECONDS = 0.05
"""Assumption: of a training step beside its phases; where nothing is sampled and nothing trained."""

HOST_LINKS = """\
intra_bytes_per_second = {copies}  # half of the memory's rate: a copy reads and writes
host_bytes_per_second = {copies}
latency_seconds = 1e-4  # assumption"""
GPU_LINKS = (
    "intra_bytes_per_second = 4.5e11  # assumption: NVLink 4, one direction; a card without it has 3.2e10 to 6.4e10",
    "host_bytes_per_second = 5e10  # assumption: PCIe 5 x16; PCIe 4 has half of it",
    "latency_seconds = 1e-5  # assumption",
)
"""Between the GPUs of a node, and to its host: not measured."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What the measurements say. The names are those of `cluster.EfficiencySection`; `*_error`: mean relative error of the
    pieces, as a share."""

    train: float
    score: float
    prefill: float
    decode_flops: float
    decode_bandwidth: float
    overlap: float
    link: float
    engine_step_seconds: float
    engine_sequence_seconds: float
    request_seconds: float
    step_seconds: float
    microbatch_seconds: float
    sync_seconds: float
    engine_error: float
    update_error: float


@dataclass(frozen=True, slots=True)
class _Engine:
    """Rates, as seconds per byte and FLOP, and overheads."""

    byte: float
    flop: float
    prompt_flop: float
    step: float
    sequence: float
    advance: float
    error: float


def calibrate(
    path: Path, model: str, *, dtype: str = "float32", name: str = "calibrated", note: Note = lambda line: None
) -> Cluster:
    """Measure this machine and write its description to `path`, replacing it. The cluster that `path` now describes.

    ModelError, EngineStartError: the model can't be had, or served.
    """
    machine = measure(model, dtype=dtype, note=note)
    fit = fitted(machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(description(machine, fit, name=name), encoding="utf-8")
    note(
        f"{path}: measured in {machine.seconds:.0f} s; the fit is off by {fit.engine_error:.0%} for engine steps and "
        f"{fit.update_error:.0%} for updates, on the mean"
    )
    return load_cluster(str(path))


def fitted(machine: Machine) -> Fit:
    """The efficiencies that explain the measurements best."""
    overlap, rates = min(((each, _fit_engine(machine, each)) for each in (0.0, 1.0)), key=lambda found: found[1].error)
    share = _share(machine.memory_bytes_per_second, rates.byte)
    train, microbatch, error = _fit_updates(machine, rates.byte)
    score = _fit_scores(machine, microbatch)
    copied = machine.sync_bytes / (_copy_rate(machine) * LINK)
    checked = 2 * machine.sync_bytes / (machine.memory_bytes_per_second * share)
    return Fit(
        train=_share(machine.product, train),
        score=_share(machine.product, score),
        prefill=_share(machine.product, rates.prompt_flop),
        decode_flops=_share(machine.product, rates.flop),
        decode_bandwidth=share,
        overlap=overlap,
        link=LINK,
        engine_step_seconds=rates.step,
        engine_sequence_seconds=rates.sequence,
        request_seconds=rates.advance + CALL_SECONDS,
        step_seconds=STEP_SECONDS,
        microbatch_seconds=microbatch,
        sync_seconds=max(0.0, machine.sync_seconds - copied - checked),
        engine_error=rates.error,
        update_error=error,
    )


def _fit_engine(machine: Machine, overlap: float) -> _Engine:
    """Where reads and products overlap, the longer of both counts, which depends on the rates that are sought: tried is every
    place at which the pieces, in the order of their reads over their products, may change sides."""
    least = numpy.array([1 / machine.memory_bytes_per_second, 1 / machine.product, 1 / machine.product, 0.0, 0.0, 0.0])
    seconds = numpy.array([one.seconds for run in machine.engines for one in run.work])
    work = numpy.concatenate([_work(run) for run in machine.engines])
    ratios = work[:, 0] / work[:, 1]
    best, error = least, math.inf
    for ratio in (*numpy.unique(ratios), math.inf) if overlap else (0.0,):
        terms = _seen(work, ratios >= ratio, overlap)
        found = least + nonnegative(terms / seconds[:, None], 1 - terms @ least / seconds)
        predicted = _seen(work, work[:, 0] * found[0] >= work[:, 1] * found[1], overlap) @ found
        off = float(numpy.abs(predicted / seconds - 1).mean())
        if off < error:
            best, error = found, off
    return _Engine(*best.tolist(), error)


def _work(run: EngineRun) -> numpy.ndarray:
    """What every piece of work has of what takes time: [pieces, bytes, FLOPs, FLOPs of prompts, steps, sequences, advances]."""
    return numpy.array(
        [
            [
                one.steps * (run.weight_bytes + run.kv_token_bytes * one.context),
                one.steps * (run.token_flops * one.sequences + run.pair_flops * one.context),
                run.prompt_token_flops * one.prompt_tokens + run.pair_flops * one.prompt_pairs,
                one.steps,
                one.steps * one.sequences,
                1.0,
            ]
            for one in run.work
        ]
    )


def _seen(work: numpy.ndarray, reads_longer: numpy.ndarray, overlap: float) -> numpy.ndarray:
    """`work`, of the shorter of reads and products only what the longer doesn't hide."""
    seen = work.copy()
    seen[~reads_longer, 0] *= 1 - overlap
    seen[reads_longer, 1] *= 1 - overlap
    return seen


def _fit_updates(machine: Machine, byte: float) -> tuple[float, float, float]:
    """(seconds per FLOP, seconds per microbatch, mean relative error)."""
    seconds = numpy.array([one.seconds for one in machine.updates])
    known = numpy.array([one.optimiser_bytes * byte for one in machine.updates])
    terms = numpy.array([[one.flops, one.microbatches] for one in machine.updates], dtype=float)
    least = numpy.array([1 / machine.product, 0.0])
    found = least + nonnegative(terms / seconds[:, None], 1 - (known + terms @ least) / seconds)
    error = float(numpy.abs((known + terms @ found) / seconds - 1).mean())
    return float(found[0]), float(found[1]), error


def _fit_scores(machine: Machine, microbatch: float) -> float:
    """Seconds per FLOP of a forward pass."""

    def rate(one: UpdateWork) -> float:
        return max(1 / machine.product, (one.seconds - one.microbatches * microbatch) / one.flops)

    return sum(map(rate, machine.scores)) / len(machine.scores)


def nonnegative(terms: numpy.ndarray, values: numpy.ndarray) -> numpy.ndarray:
    """The x >= 0 that minimises |terms x - values|, float64 [columns]: the best of the least squares over all subsets of the
    columns whose solutions have no negative part. For a handful of columns.

    Example: nonnegative(numpy.array([[1.0], [1.0]]), numpy.array([1.0, 3.0])) -> [2.0]
    """
    columns = terms.shape[1]
    scale = numpy.maximum(numpy.abs(terms).max(axis=0), 1e-300)
    best, least = numpy.zeros(columns), float(values @ values)
    for size in range(1, columns + 1):
        for chosen in map(list, combinations(range(columns), size)):
            part = terms[:, chosen] / scale[chosen]
            found = numpy.linalg.lstsq(part, values, rcond=None)[0]
            off = float(((part @ found - values) ** 2).sum())
            if found.min() >= 0 and off < least:
                best, least = numpy.zeros(columns), off
                best[chosen] = found / scale[chosen]
    return best


def _share(peak: float, seconds: float) -> float:
    """Of a peak, where a byte or a FLOP takes so many seconds; where it takes none, all of it."""
    return min(1.0, 1 / (peak * seconds)) if seconds else 1.0


def _copy_rate(machine: Machine) -> float:
    return machine.memory_bytes_per_second / 2


def description(machine: Machine, fit: Fit, *, name: Name = "calibrated") -> str:
    """The TOML text of the machine as a cluster of one node."""
    copies = f"{_copy_rate(machine):.4g}"
    known = machine.gpu and data_sheet(machine.device) is not None
    product = "bfloat16" if machine.dtype == "bfloat16" else "float32"
    flops = [f"{product} = {machine.product:.4g}"]
    if product == "bfloat16":
        flops.insert(0, f"float32 = {machine.product:.4g}  # assumption: as bfloat16")
    lines = [
        f"# {machine.device}, measured on {date.today()} with {machine.model} in {machine.dtype}: drmas plan --calibrate",
        f"name = {json.dumps(name)}",
        "nodes = 1",
        f"gpus_per_node = {machine.gpus}",
        f"host_memory_bytes = {machine.host_memory_bytes:.6g}",
        "",
        "[device]",
        f"name = {json.dumps(machine.device)}",
        f"gpu = {json.dumps(machine.gpu)}",
        *([] if known else flops),
        f"memory_bytes = {machine.memory_bytes:.6g}",
        f"memory_bytes_per_second = {machine.memory_bytes_per_second:.4g}",
        *([] if machine.gpu else ["reserved_bytes = 2.6e9  # assumption: two processes with torch loaded and no model"]),
        "",
        "[links]",
        *(GPU_LINKS if machine.gpu else HOST_LINKS.format(copies=copies).splitlines()),
        "disk_bytes_per_second = 1e9  # assumption",
        "",
        f"[efficiencies]  # mean error of the fit: {fit.engine_error:.1%} of engine steps, {fit.update_error:.1%} of updates",
        *(f"{key} = {getattr(fit, key):.4g}" for key in Fit.__slots__ if not key.endswith("_error")),
    ]
    return "\n".join(lines) + "\n"
