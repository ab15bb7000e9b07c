"""Functions of time: values, rates and gradients against formulas, SciPy and differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import interpolate
from torch import nn
from torch.func import functional_call

import adjsim
from adjsim.potentials.signals.signals import CubicSpline, Harmonics, PiecewiseLinear, Signal

TIMES = torch.tensor([0.0, 0.3, 0.5, 1.1, 1.4, 2.0, 2.1], dtype=torch.float64)
VALUES = torch.randn(7, 3, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
SLOPES = torch.tensor([[1.0, -2.0], [0.5, 0.3]], dtype=torch.float64).expand(3, 2, 2).movedim(1, 0)
# Times inside of intervals, before the first node and after the last one.
POINTS = (-0.7, 0.11, 0.43, 0.77, 1.3, 1.9, 2.05, 3.0)

SIGNALS = {
    "linear": lambda: PiecewiseLinear(TIMES, VALUES),
    "natural": lambda: CubicSpline(TIMES, VALUES),
    "clamped": lambda: CubicSpline(TIMES, VALUES, slopes=0.0),
    "slopes": lambda: CubicSpline(TIMES, VALUES, slopes=SLOPES),
    "two nodes": lambda: CubicSpline(TIMES[:2], VALUES[:2], slopes=SLOPES),
    "gait": lambda: Harmonics(VALUES[:2], TIMES[1:3], VALUES[2:4], VALUES[5]),
    "sine": lambda: Harmonics(0.7, 1.3),
}


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("slopes", [None, 0.0, SLOPES], ids=["natural", "clamped", "slopes"])
def test_splines_equal_those_of_scipy(count, slopes):
    times, values = TIMES[:count], VALUES[:count]
    ends = {None: "natural", 0.0: "clamped"}.get(
        slopes if not isinstance(slopes, torch.Tensor) else 1.0,
        [(1, x.numpy()) for x in SLOPES],
    )
    spline = CubicSpline(times, values, slopes=slopes)
    expected = interpolate.CubicSpline(times.numpy(), values.numpy(), bc_type=ends)
    for t in np.linspace(0.0, float(times[-1]), 20, endpoint=False):
        # Rounding of slopes of about ten.
        np.testing.assert_allclose(spline(t).numpy(), expected(t), rtol=0, atol=1e-13)
        np.testing.assert_allclose(spline.rate(t).numpy(), expected(t, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [PiecewiseLinear, CubicSpline])
def test_times_of_each_sample(kind):
    """Values and rates are those of a signal for each sample."""
    shifts = torch.tensor([0.0, 0.13, -0.2], dtype=torch.float64)
    times = TIMES.unsqueeze(-1) * (1 + 0.1 * shifts) + shifts
    together = kind(times, VALUES)
    apart = [kind(times[:, k], VALUES[:, k]) for k in range(3)]
    for t in POINTS:
        for read in (kind.forward, kind.rate):
            expected = torch.stack([read(one, t) for one in apart])
            torch.testing.assert_close(read(together, t), expected, rtol=0, atol=1e-13)


def test_lines_equal_those_of_numpy():
    signal = PiecewiseLinear(TIMES, VALUES[:, 0, 0])
    for t in (*POINTS, *TIMES.tolist()):
        expected = np.interp(t, TIMES.numpy(), VALUES[:, 0, 0].numpy())
        assert float(signal(t)) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("name", ["linear", "natural", "slopes"])
def test_nodes_and_ends_are_met_exactly(name):
    signal = SIGNALS[name]()
    for t, value in zip(TIMES, VALUES, strict=True):
        assert torch.equal(signal(float(t)), value)
    assert torch.equal(signal(-5.0), VALUES[0])
    assert torch.equal(signal(9.0), VALUES[-1])
    assert not signal.rate(-5.0).any()
    assert not signal.rate(9.0).any()


def test_harmonics_are_sines():
    amplitude, frequency, phase, offset = (VALUES[:2], TIMES[1:3], VALUES[2:4], VALUES[5])
    found = Harmonics(amplitude, frequency, phase, offset)(0.37)
    expected = offset.clone()
    for a, f, p in zip(amplitude, frequency, phase, strict=True):
        expected += a * torch.sin(2 * torch.pi * f * 0.37 + p)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    assert Harmonics(0.7, 1.3)(0.25).shape == ()


@pytest.mark.parametrize("name", SIGNALS)
def test_rates_against_differences(name):
    signal, h = SIGNALS[name](), 1e-5
    for t in POINTS:
        slope = (signal(t + h) - signal(t - h)) / (2 * h)
        # Truncation h^2 times a third derivative of some hundreds.
        torch.testing.assert_close(signal.rate(t), slope, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", SIGNALS)
def test_gradients_of_every_number(name):
    signal = SIGNALS[name]()
    numbers = {key: x.detach().clone() for key, x in signal.named_buffers()}
    for t in POINTS:

        def evaluated(*values: torch.Tensor, t: float = t) -> torch.Tensor:
            named = dict(zip(numbers, values, strict=True))
            return functional_call(signal, named, (t,))

        inputs = [x.requires_grad_() for x in numbers.values()]
        # Against central differences; the tolerance is that of their truncation.
        assert torch.autograd.gradcheck(evaluated, inputs, rtol=1e-6, atol=1e-7, fast_mode=True)


@pytest.mark.parametrize("kind", [PiecewiseLinear, CubicSpline])
def test_a_derivative_at_a_node_is_that_of_one_interval(kind):
    """Steps of a run meet nodes, and a sum of the derivatives of both sides would be wrong."""
    signal = kind(nn.Parameter(TIMES.clone()), nn.Parameter(VALUES.clone()))
    weight = torch.linspace(1.0, 2.0, 6, dtype=torch.float64).reshape(3, 2)

    def gradient(t: float) -> torch.Tensor:
        return torch.autograd.grad((signal(t) * weight).sum(), signal.times)[0]

    at, behind = gradient(1.1), gradient(1.1 + 1e-9)
    assert float(at.abs().max()) > 0.1
    # The gradient changes by some tens times 1e-9.
    torch.testing.assert_close(at, behind, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SIGNALS)
def test_time_may_be_a_tensor(name):
    signal = SIGNALS[name]()
    for t in POINTS:
        for read in (signal, signal.rate):
            assert torch.equal(read(torch.tensor(t, dtype=torch.float64)), read(t))


def test_numbers_that_make_no_signal_are_refused(unchecked):
    with pytest.raises(ValueError, match=r"times must be at least two increasing numbers"):
        PiecewiseLinear([0.0, 1.0, 1.0], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"times must be at least two increasing numbers"):
        CubicSpline([0.0], [1.0])
    with pytest.raises(ValueError, match=r"times\[2\] of sample \[1\] is 0.5 after 1"):
        CubicSpline([[0.0, 0.0], [1.0, 1.0], [2.0, 0.5]], [[1.0, 1.0]] * 3)
    with pytest.raises(ValueError, match=r"values must be \(2, ...\)"):
        PiecewiseLinear([0.0, 1.0], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"slopes must be one number or \(2, 3, 2\)"):
        CubicSpline(TIMES, VALUES, slopes=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"phase must be one number, \(2,\) or \(2, 3, 2\)"):
        Harmonics(VALUES[:2], 1.0, phase=TIMES)
    with pytest.raises(ValueError, match=r"offset must be one number or \(3, 2\)"):
        Harmonics(VALUES[:2], 1.0, offset=TIMES)
    with pytest.raises(TypeError, match=r"has no value: write forward\(t\)"):
        Signal()(0.0)
    with pytest.raises(TypeError, match=r"has no rate\(t\)"):
        Signal().rate(0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_driven_equation_ends_at_the_last_time(dtype):
    """y' = x'(t) from the first to the last time, whose rounding is on either side of the steps."""
    times = torch.linspace(0.1, 0.7, 5, dtype=torch.float64)
    signal = CubicSpline(times, torch.exp(2 * times)[:, None])
    equation = adjsim.ODE(lambda t, y: signal.rate(t).to(y))
    for ends in ([0.1, 0.7], [0.7, 0.1]):
        start = equation.init(signal(ends[0]).to(dtype))
        run = adjsim.simulate(equation, start, ends, solver=adjsim.RungeKutta("rk4", 0.05))
        # Steps as long as a third of an interval integrate a cubic's rate without error.
        rtol = 1e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(run.final.y, signal(ends[1]).to(dtype), rtol=rtol, atol=0.0)
