"""The fit: machines that are exactly as the formulas say come out as they are, and the file reads back."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas.planning.calibration import CALL_SECONDS, LINK, description, fitted, nonnegative
from drmas.planning.cluster import load_cluster
from drmas.planning.measuring import EngineRun, EngineWork, Machine, UpdateWork

BANDWIDTH, PRODUCT = 20e9, 400e9
PIECES = ((12, 1, 54), (4, 4, 200), (8, 3, 170), (7, 12, 620), (5, 11, 640), (2, 32, 1560), (3, 31, 1600), (9, 20, 1100))
"""Steps, sequences, context."""


def engine(weight: float, flops: float, *, overlap: float, share=(0.6, 0.3, 0.25), over=(3e-3, 2e-4, 4e-3)) -> EngineRun:
    run = EngineRun(weight, 4e4, flops, 0.8 * flops, 1e5, ())
    work = []
    for number, (steps, sequences, context) in enumerate(PIECES):
        reads = (run.weight_bytes + run.kv_token_bytes * context) / (BANDWIDTH * share[0])
        products = (run.token_flops * sequences + run.pair_flops * context) / (PRODUCT * share[1])
        step = max(reads, products) + (1 - overlap) * min(reads, products) + over[0] + over[1] * sequences
        prompt = 48 * sequences if number % 2 else 0
        pairs = 24.0 * prompt
        prefill = (run.prompt_token_flops * prompt + run.pair_flops * pairs) / (PRODUCT * share[2])
        work.append(EngineWork(steps * step + prefill + over[2], steps, sequences, context, prompt, pairs))
    return replace(run, work=tuple(work))


def machine(overlap: float, *, small: bool = True) -> Machine:
    engines = [engine(5e6, 2.4e6, overlap=overlap)] if small else []
    optimiser = 34 * 1.3e8

    def seconds(flops: float, microbatches: int) -> float:
        return flops / (PRODUCT * 0.45) + 0.03 * microbatches

    updates = [
        UpdateWork(seconds(flops, count) + optimiser / (BANDWIDTH * 0.6), flops, count, optimiser)
        for flops, count in ((4e11, 1), (9e11, 1), (9e11, 2), (1.4e12, 3))
    ]
    scores = [UpdateWork(flops / (PRODUCT * 0.35) + 0.03 * count, flops, count) for flops, count in ((2e11, 1), (4e11, 2))]
    copied, checked = 5e8 / (BANDWIDTH / 2 * LINK), 1e9 / (BANDWIDTH * 0.6)
    return Machine(
        model="a-model",
        dtype="float32",
        gpu=False,
        gpus=1,
        device="2 cores",
        cores=2,
        product=PRODUCT,
        memory_bytes=16e9,
        memory_bytes_per_second=BANDWIDTH,
        host_memory_bytes=16e9,
        engines=(*engines, engine(5e8, 2.7e8, overlap=overlap)),
        updates=tuple(updates),
        scores=tuple(scores),
        sync_seconds=0.25 + copied + checked,
        sync_bytes=5e8,
        seconds=100.0,
    )


@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_a_machine_that_is_as_the_formulas_say_comes_out_as_it_is(overlap):
    fit = fitted(machine(overlap))
    assert fit.overlap == overlap
    assert fit.engine_error < 1e-6
    assert fit.update_error < 1e-6
    assert (fit.decode_bandwidth, fit.decode_flops, fit.prefill) == pytest.approx((0.6, 0.3, 0.25))
    assert (fit.engine_step_seconds, fit.engine_sequence_seconds) == pytest.approx((3e-3, 2e-4))
    assert fit.request_seconds == pytest.approx(4e-3 + CALL_SECONDS)
    assert (fit.train, fit.score, fit.microbatch_seconds) == pytest.approx((0.45, 0.35, 0.03))
    assert fit.sync_seconds == pytest.approx(0.25)


def test_noise_moves_the_fit_by_about_as_much():
    exact = machine(0.0)
    draw = numpy.random.default_rng(0)
    noisy = tuple(
        replace(run, work=tuple(replace(one, seconds=one.seconds * float(draw.normal(1, 0.03))) for one in run.work))
        for run in exact.engines
    )
    fit = fitted(replace(exact, engines=noisy))
    assert 0.005 < fit.engine_error < 0.05
    assert fit.decode_bandwidth == pytest.approx(0.6, rel=0.15)
    assert fit.prefill == pytest.approx(0.25, rel=0.15)


def test_no_share_is_more_than_all():
    quick = machine(0.0)
    faster = tuple(
        replace(run, work=tuple(replace(one, seconds=one.seconds / 50) for one in run.work)) for run in quick.engines
    )
    fit = fitted(replace(quick, engines=faster, updates=tuple(replace(one, seconds=1e-3) for one in quick.updates)))
    assert max(fit.decode_bandwidth, fit.decode_flops, fit.prefill, fit.train, fit.score) <= 1.0
    assert min(fit.engine_step_seconds, fit.engine_sequence_seconds, fit.microbatch_seconds, fit.sync_seconds) >= 0.0


def test_the_description_reads_back_as_the_machine(tmp_path):
    fit = fitted(machine(0.0))
    path = tmp_path / "mine.toml"
    path.write_text(description(machine(0.0), fit, name="mine"))
    cluster = load_cluster(str(path))
    assert (cluster.name, cluster.gpus, cluster.gpu) == ("mine", 1, False)
    assert cluster.device.flops == {"float32": PRODUCT}
    assert cluster.device.memory_bytes_per_second == BANDWIDTH
    for name in ("train", "score", "prefill", "decode_flops", "decode_bandwidth", "overlap", "link", "request_seconds"):
        assert getattr(cluster.efficiencies, name) == pytest.approx(getattr(fit, name), rel=1e-3)
    assert cluster.efficiencies.engine_sequence_seconds == pytest.approx(2e-4, rel=1e-3)


def test_a_bfloat16_machine_says_what_it_assumes(tmp_path):
    narrow = replace(machine(0.0), dtype="bfloat16")
    path = tmp_path / "mine.toml"
    path.write_text(description(narrow, fitted(narrow)))
    assert load_cluster(str(path)).device.flops == {"float32": PRODUCT, "bfloat16": PRODUCT}
    assert "# assumption: as bfloat16" in path.read_text()


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 5090"])
def test_a_gpu_reads_back_with_its_data_sheet_or_what_was_measured(tmp_path, device):
    """Links within the node aren't measured: they aren't the memory's rate."""
    card = replace(machine(1.0), gpu=True, gpus=4, device=device, dtype="bfloat16", memory_bytes_per_second=3e12)
    path = tmp_path / "mine.toml"
    path.write_text(description(card, fitted(card)))
    cluster = load_cluster(str(path))
    assert cluster.device.flops["bfloat16"] == (989e12 if "H100" in device else PRODUCT)
    assert (cluster.intra_bytes_per_second, cluster.host_bytes_per_second) == (4.5e11, 5e10)
    assert path.read_text().count("# assumption: NVLink") == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 5), min_size=4, max_size=4), st.integers(0, 10**6))
def test_a_nonnegative_solution_is_found_and_no_better_one_is_near(solution, seed):
    draw = numpy.random.default_rng(seed)
    terms = numpy.abs(draw.normal(size=(9, 4))) * [1e9, 1.0, 1e-6, 1e3]
    exact = terms @ (numpy.array(solution) / [1e9, 1.0, 1e-6, 1e3])
    assert terms @ nonnegative(terms, exact) == pytest.approx(exact, rel=1e-6, abs=1e-9)
    values = draw.normal(size=9)
    found = nonnegative(terms, values)
    assert found.min() >= 0
    off = ((terms @ found - values) ** 2).sum()
    for column in range(4):
        for change in (-1e-3, 1e-3):
            other = found.copy()
            other[column] = max(0.0, other[column] + change / terms[:, column].max())
            assert ((terms @ other - values) ** 2).sum() >= off - 1e-9
