"""AdamW on one tensor and on the slots of flat buffers, with both implementations."""

from decimal import Decimal, localcontext

import pytest
import torch

from drmas_kernels import adamw, numerics
from drmas_kernels.adamw import AdamBuffers, StepState, adamw_slots, adamw_step, slot_constants
from drmas_kernels.grad_norm import SKIP
from drmas_kernels.tile_table import TILE, Span, TileTable
from tests.kernels.memory import far_buffer

SETTINGS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr("drmas_kernels.adamw._TILE", 1000)


def scalar(value, device, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype, device=device)


def case(size, device, *, seed=0, scale=1.0):
    """(param, grad, exp_avg, exp_avg_sq) as after some steps."""
    generator = torch.Generator().manual_seed(seed)
    param, grad, first = (torch.randn(size, generator=generator) for _ in range(3))
    second = torch.rand(size, generator=generator) + 1e-3
    return [tensor.to(device) for tensor in (param * scale, grad, first * 0.1, second)]


def oracle(param, grad, first, second, taken, *, coefficient, lr, beta1, beta2, eps, weight_decay):
    """The new (param, exp_avg, exp_avg_sq) by the book in float64, and for each the sum of the magnitudes that make it."""
    p, g, m, v = (tensor.double() for tensor in (param, grad, first, second))
    g = g * coefficient
    size = lr / (1 - beta1**taken)
    new_m = beta1 * m + (1 - beta1) * g
    new_v = beta2 * v + (1 - beta2) * g**2
    root = (new_v / (1 - beta2**taken)).sqrt() + eps
    m_terms = beta1 * m.abs() + (1 - beta1) * g.abs()
    new_p = p * (1 - lr * weight_decay) - size * new_m / root
    return (new_p, new_m, new_v), (p.abs() + size * m_terms / root, m_terms, new_v)


@pytest.fixture
def check_step(check):
    def check_step(actual, expected, terms):
        for tensor, value, magnitude in zip(actual, expected, terms, strict=True):
            check(tensor / magnitude, value / magnitude, numerics.ADAMW_STEP)

    return check_step


@pytest.mark.parametrize("copies", [False, True])
def test_steps_agree_with_torch_on_clipped_gradients(copies, check, backend, device):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(37, 111, generator=generator)
    ours, theirs = start.to(device), torch.nn.Parameter(start.double())
    optimizer = torch.optim.AdamW([theirs], lr=3e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1, foreach=False, fused=False)
    first, second = torch.zeros_like(ours), torch.zeros_like(ours)
    step = scalar(0, device, torch.int64)
    copy = torch.zeros_like(ours, dtype=torch.bfloat16) if copies else None
    for coefficient in (1.0, 0.25, SKIP, 1.0, 0.01, 0.5):
        grad = torch.randn(37, 111, generator=generator)
        kept = grad.to(device)
        if coefficient >= 0:
            theirs.grad = grad.double() * coefficient
            optimizer.step()
        adamw_step(ours, kept, first, second, step, coefficient=scalar(coefficient, device), copy=copy, **SETTINGS)
        check(ours.cpu(), theirs, numerics.ADAMW)
        assert torch.equal(kept.cpu(), grad)
        assert copy is None or torch.equal(copy, ours.bfloat16())
    assert step.item() == 5
    check(first.cpu(), optimizer.state[theirs]["exp_avg"], numerics.ADAMW)
    check(second.cpu(), optimizer.state[theirs]["exp_avg_sq"], numerics.ADAMW)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize(("taken", "beta1", "beta2"), [(0, 0.9, 0.999), (3, 0.0, 0.0), (3, 0.5, 0.9999), (40_000, 0.9, 0.98)])
def test_one_step_is_right_to_four_ulp(scale, taken, beta1, beta2, check_step, backend, device):
    """Scale 0: the new parameter is nothing but the step."""
    param, grad, first, second = case(5_000, device, scale=scale)
    settings = SETTINGS | {"beta1": beta1, "beta2": beta2, "coefficient": 0.37}
    expected, terms = oracle(param, grad, first, second, taken + 1, **settings)
    settings["coefficient"] = scalar(0.37, device)
    adamw_step(param, grad, first, second, scalar(taken, device, torch.int64), **settings)
    check_step((param, first, second), expected, terms)


SPANS = [
    Span(0, 0, 3_000, 0),
    Span(0, 3_000, 1_001, 1),
    Span(0, 4_010, 77, 2, replicated=True),
    Span(1, 5, 2_100, 1),
    Span(1, 2_105, 8, 3),
]
LENGTHS = [4_100, 2_120]


def flat_case(device, copies=True):
    buffers = [case(length, device, seed=i) for i, length in enumerate(LENGTHS)]
    copy = [param.bfloat16() for param, *_ in buffers] if copies else []
    return AdamBuffers(*(list(column) for column in zip(*buffers, strict=True)), copy)


def cloned(buffers):
    return AdamBuffers(*([tensor.clone() for tensor in column] for column in buffers))


def stretch(buffers, span, names=("param", "exp_avg", "exp_avg_sq")):
    return [getattr(buffers, name)[span.buffer][span.start :][: span.length] for name in names]


def test_slots_take_their_own_steps(check_step, backend, device):
    """Each with its coefficient, rate, decay and count; a skipped one keeps every bit and counts it.

    On rank 1, so that replicated spans are seen to be updated there too. What lies in no span stays.
    """
    table = TileTable.build(SPANS, LENGTHS, 4, tile=2048, tp_rank=1, device=device)
    buffers, state = flat_case(device), StepState.zeros(4, device)
    untouched = cloned(buffers)
    rates, decays = [3e-3, 1e-3, 0.0, 1e-2], [0.1, 0.0, 0.1, 0.0]
    counts = [0] * 4
    for factors in (
        [1.0, 0.5, 1.0, SKIP],
        [0.01, SKIP, 1.0, 0.3],
        [SKIP, SKIP, SKIP, SKIP],
        [0.7, 1.0, 0.1, 1.0],
        [0.0, 1.0, 1.0, 0.5],
    ):
        before = cloned(buffers)
        coefficient = scalar(factors, device)
        per_slot = {"lr": scalar(rates, device), "weight_decay": scalar(decays, device)}
        adamw_slots(buffers, state, table, coefficient=coefficient, **{**SETTINGS, **per_slot})
        counts = [count + (factor >= 0) for count, factor in zip(counts, factors, strict=True)]
        for span in SPANS:
            new, old = stretch(buffers, span), stretch(before, span)
            if factors[span.slot] < 0:
                assert all(torch.equal(one, other) for one, other in zip(new, old, strict=True))
                continue
            own = {"lr": rates[span.slot], "weight_decay": decays[span.slot], "coefficient": factors[span.slot]}
            inputs = stretch(before, span, ("param", "grad", "exp_avg", "exp_avg_sq"))
            check_step(new, *oracle(*inputs, counts[span.slot], **{**SETTINGS, **own}))
            assert torch.equal(*stretch(buffers, span, ("copy",)), new[0].bfloat16())
    assert state.step.tolist() == counts == [4, 3, 4, 3]
    assert state.skipped.tolist() == [1, 2, 1, 2]
    for name in AdamBuffers._fields:
        now, then = getattr(buffers, name), getattr(untouched, name)
        for buffer, places in ((0, slice(4_001, 4_010)), (0, slice(4_087, None)), (1, slice(0, 5)), (1, slice(2_113, None))):
            assert torch.equal(now[buffer][places], then[buffer][places])


@pytest.mark.parametrize("coefficient", [SKIP, torch.nan, torch.inf])
def test_a_skipped_step_changes_no_bit(coefficient, backend, device):
    parameter = torch.randn(5, device=device)
    first, second, step = torch.rand(5, device=device), torch.rand(5, device=device), scalar(3, device, torch.int64)
    copy = parameter.bfloat16()
    tensors = (parameter, first, second, step, copy)
    before = [tensor.clone() for tensor in tensors]
    grad = torch.full((5,), torch.nan, device=device)
    adamw_step(parameter, grad, first, second, step, coefficient=scalar(coefficient, device), copy=copy, **SETTINGS)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_what_is_not_finite_spoils_its_own_element_only(backend, device):
    param, grad, first, second = case(2_000, device)
    grad[7], grad[1_500] = torch.nan, torch.inf
    adamw_step(param, grad, first, second, scalar(3, device, torch.int64), coefficient=scalar(1.0, device), **SETTINGS)
    for tensor in (param, first, second):
        assert (~tensor.isfinite()).nonzero().flatten().tolist() == [7, 1_500]


def test_a_repeated_step_and_other_tiles_give_the_same_bits(triton_backend, device):
    coefficient = scalar([0.3, 1.0, 0.2, 0.5], device)
    results = []
    for tile in (64, 2048, 2048, TILE):
        buffers, state = flat_case(device), StepState.zeros(4, device)
        table = TileTable.build(SPANS, LENGTHS, 4, tile=tile, device=device)
        adamw_slots(buffers, state, table, coefficient=coefficient, **SETTINGS)
        results.append(buffers)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert all(map(torch.equal, one, two))


@pytest.mark.parametrize("copies", [False, True])
def test_tensors_anywhere_in_memory_are_updated_right(copies, backend, device):
    """Only one of them off its 16 bytes, and all of them."""
    aligned = case(2_500, device)
    expected = [tensor.clone() for tensor in aligned]
    settings = SETTINGS | {"coefficient": scalar(0.5, device)}
    adamw_step(*expected, scalar(2, device, torch.int64), **settings)
    for shifted in ({1}, {0, 1, 2, 3}):
        tensors = [torch.cat([x[:1], x])[1:] if i in shifted else x.clone() for i, x in enumerate(aligned)]
        copy = torch.zeros(2_501, dtype=torch.bfloat16, device=device)[1:] if copies else None
        adamw_step(*tensors, scalar(2, device, torch.int64), copy=copy, **settings)
        for tensor, value in zip(tensors, expected, strict=True):
            torch.testing.assert_close(tensor, value, rtol=0, atol=0 if backend == "triton" else 1e-7)
        assert copy is None or torch.equal(copy, tensors[0].bfloat16())


def test_a_tensor_longer_than_a_tile(check_step, triton_backend, device):
    param, grad, first, second = case(TILE + 1_030, device)
    settings = SETTINGS | {"coefficient": 0.5}
    expected, terms = oracle(param, grad, first, second, 1, **settings)
    settings["coefficient"] = scalar(0.5, device)
    adamw_step(param, grad, first, second, scalar(0, device, torch.int64), **settings)
    check_step((param, first, second), expected, terms)


def test_offsets_beyond_32_bits_reach_their_elements(check_step, backend, device):
    spans = [Span(0, place, 1_500, 0) for place in (2**31 - 100, 2**32 - 100)]
    length = 2**32 + 2_000
    buffers = AdamBuffers(*([far_buffer(length, device)] for _ in range(4)))
    for seed, span in enumerate(spans):
        for name, values in zip(AdamBuffers._fields, case(1_500, device, seed=seed), strict=False):
            stretch(buffers, span, (name,))[0].copy_(values)
    inputs = [[x.clone() for x in stretch(buffers, span, AdamBuffers._fields[:4])] for span in spans]
    table = TileTable.build(spans, [length], 1, device=device)
    adamw_slots(buffers, StepState.zeros(1, device), table, coefficient=scalar([0.5], device), **SETTINGS)
    for span, given in zip(spans, inputs, strict=True):
        check_step(stretch(buffers, span), *oracle(*given, 1, coefficient=0.5, **SETTINGS))


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.9, 0.99999), (0.0, 0.5)])
def test_bias_corrections_are_right_to_the_last_bit(beta1, beta2):
    """1 - beta^t of the first steps and of late ones, against decimal numbers of 50 digits."""
    counts, lr, epsilon = [1, 2, 7, 1_000, 100_000], 1e-3, 1e-8
    ones = torch.ones(len(counts), dtype=torch.float64)
    found = slot_constants(torch.tensor(counts), ones, ones * lr, ones * 0.1, beta1, beta2, epsilon)
    with localcontext(prec=50):
        roots = [(1 - Decimal(beta2) ** count).sqrt() for count in counts]
        sizes = [Decimal(lr) * root / (1 - Decimal(beta1) ** count) for root, count in zip(roots, counts, strict=True)]
        epsilons = [Decimal(epsilon) * root for root in roots]
    expected = torch.tensor([[1.0, float(size), float(eps), 1e-4] for size, eps in zip(sizes, epsilons, strict=True)])
    torch.testing.assert_close(found, expected, rtol=2**-23, atol=0)


def test_the_host_waits_for_nothing(triton_backend, device, monkeypatch):
    buffers, state = flat_case(device), StepState.zeros(4, device)
    table = TileTable.build(SPANS, LENGTHS, 4, device=device)
    coefficient = scalar([0.3, SKIP, 0.2, 0.5], device)

    def refuse(*_):
        raise AssertionError("a number was read on the host")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    adamw_slots(buffers, state, table, coefficient=coefficient, **SETTINGS)
    monkeypatch.undo()
    assert state.step.tolist() == [1, 0, 1, 1]


def test_nothing_to_update_still_counts(backend, device):
    empty = [torch.zeros(0, device=device) for _ in range(4)]
    step = scalar(1, device, torch.int64)
    adamw_step(*empty, step, coefficient=scalar(1.0, device), **SETTINGS)
    assert step.item() == 2


def test_the_operation_is_registered_as_torch_wants_it(backend, device):
    table = TileTable.build(SPANS, LENGTHS, 4, device=device)
    buffers, state = flat_case(device), StepState.zeros(4, device)
    per_slot = (scalar([1.0, SKIP, 0.5, 1.0], device), scalar([1e-3] * 4, device), scalar([0.1] * 4, device))
    tiles = (table.spans, list(table.buffer_tiles), table.offset, table.length, table.slot)
    torch.library.opcheck(adamw._op, (*buffers, *state, *per_slot, *tiles, 0.9, 0.98, 1e-8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"grad": torch.zeros(3).bfloat16()},
            r"grad is torch.bfloat16 \[3\] on cpu; expected a contiguous torch.float32 \[3\]",
        ),
        ({"exp_avg": torch.zeros(2)}, r"exp_avg is torch.float32 \[2\]"),
        ({"exp_avg_sq": torch.zeros(6)[::2]}, r"exp_avg_sq is torch.float32 \[3\] of stride \[2\] on cpu"),
        ({"grad": torch.zeros(3, device="meta")}, r"grad is .* on meta; expected .* on cpu"),
        ({"copy": torch.zeros(2).bfloat16()}, r"copy is torch.bfloat16 \[2\].*; expected a contiguous torch.bfloat16 \[3\]"),
        ({"copy": torch.zeros(3)}, r"copy is torch.float32 \[3\].*; expected a contiguous torch.bfloat16 \[3\]"),
        ({"step": torch.zeros(())}, r"^step is torch.float32 \[\] on cpu; expected one number, torch.int64, on cpu"),
        (
            {"step": torch.zeros(2, dtype=torch.int64)},
            r"^step is torch.int64 \[2\].*; expected one number, torch.int64, on cpu",
        ),
        ({"coefficient": torch.ones(())[None].expand(2)}, r"coefficient is torch.float32 \[2\].*; expected one number"),
        ({"coefficient": torch.ones((), device="meta")}, r"coefficient is .* on meta; expected one number, .*, on cpu"),
        (
            {"coefficient": torch.ones((), dtype=torch.int64)},
            r"^coefficient is torch.int64 \[\] on cpu; expected one number, torch.float32 or torch.float64, on cpu",
        ),
        ({"lr": -1e-3}, r"lr is -0.001; expected a finite number, 0 or more"),
        ({"eps": float("nan")}, r"eps is nan; expected a finite number"),
        ({"weight_decay": -0.1}, r"weight_decay is -0.1"),
        ({"beta1": 1.0}, r"beta1 is 1.0; expected a number in \[0, 1\)"),
        ({"beta2": -0.5}, r"beta2 is -0.5"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    arguments = {name: torch.zeros(3) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    arguments |= {"step": torch.zeros((), dtype=torch.int64), "coefficient": torch.tensor(1.0), **SETTINGS, **changes}
    with pytest.raises(ValueError, match=message):
        adamw_step(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"param": [torch.zeros(4_100)]}, "param has 1 buffers; the table is for 2"),
        ({"grad": [torch.zeros(4_100), torch.zeros(2_119)]}, r"grad\[1\] is torch.float32 \[2119\] .*expected .* \[2120\]"),
        (
            {"copy": [torch.zeros(4_100), torch.zeros(2_120)]},
            r"copy\[0\] is torch.float32 .*expected a contiguous torch.bfloat16",
        ),
        ({"state": StepState.zeros(3)}, r"state.step is torch.int64 \[3\] on cpu; expected torch.int64 \[4\]"),
        ({"coefficient": torch.ones(1)}, r"coefficient is torch.float32 \[1\] .*one per slot"),
        ({"lr": torch.ones(4)}, r"lr is torch.float32 \[4\] on cpu; expected torch.float64 \[4\]"),
    ],
)
def test_what_does_not_fit_the_table_is_named(changes, message):
    table = TileTable.build(SPANS, LENGTHS, 4)
    arguments = {"buffers": flat_case("cpu"), "state": StepState.zeros(4), "coefficient": torch.ones(4), "lr": 1e-3}
    for name, value in changes.items():
        if name in AdamBuffers._fields:
            arguments["buffers"] = arguments["buffers"]._replace(**{name: value})
        else:
            arguments[name] = value
    with pytest.raises(ValueError, match=message):
        adamw_slots(arguments.pop("buffers"), arguments.pop("state"), table, **arguments)
