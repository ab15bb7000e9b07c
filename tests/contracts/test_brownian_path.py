"""A Brownian path is one function of time, whatever reads it."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from scipy import stats

import adjsim
from adjsim.core.brownian_path import TOP, _dyadic

DTYPE = torch.float64
TOL = 2.0**-12
PATH = adjsim.BrownianPath(3, TOL)


class Growth(torch.nn.Module):
    """The equation dy = a y dt + s y dW."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(0.3, dtype=DTYPE))
        self.s = torch.nn.Parameter(torch.tensor(0.5, dtype=DTYPE))

    def drift(self, t, y):
        return self.a * y

    def diffusion(self, t, y):
        return self.s * y


def growth():
    field = Growth()
    sde = adjsim.SDE(field.drift, field.diffusion)
    return field, sde, sde.init(torch.ones(20, 3, dtype=DTYPE))


def grid(begin, end, size):
    return torch.arange(round((end - begin) / size) + 1, dtype=torch.float64) * size + begin


@pytest.mark.parametrize("ratio", [16, 3, 7])
def test_an_increment_is_the_sum_of_its_parts(ratio):
    fine = PATH.increments(grid(-1, -1 + 96 * ratio * TOL, TOL), (5,))
    coarse = PATH.increments(grid(-1, -1 + 96 * ratio * TOL, ratio * TOL), (5,))
    # Sums of a hundred numbers of size TOL^(1/2), with the rounding of longer intervals.
    assert float((fine.unflatten(0, (-1, ratio)).sum(1) - coarse).abs().max()) < 1e-14
    back = PATH.increments(grid(-1, -1 + 96 * ratio * TOL, ratio * TOL).flip(0), (5,))
    assert torch.equal(-back.flip(0), coarse)


@pytest.mark.parametrize("size", [TOL, 16 * TOL, 21 * TOL, 2.0 ** (TOP + 1) * TOL])
def test_increments_are_independent_gaussians(size):
    increments = PATH.increments(grid(-8 * size, 56 * size, size), (300,)) / math.sqrt(size)
    assert stats.kstest(increments.flatten().numpy(), "norm").pvalue > 1e-3
    products = (increments[1:] * increments[:-1]).flatten()
    # The mean of independent products has the error 1/sqrt(n).
    assert abs(float(products.mean())) * math.sqrt(len(products)) < 3.5


def test_a_path_that_runs_back_twice_is_itself():
    back = PATH.reversed()
    assert torch.equal(back.increments([-1.0, -0.5], (3,)), PATH.increments([1.0, 0.5], (3,)))
    assert back.reversed() == PATH
    # A ratio of 10^12 has no digits left for a part of 10^-6.
    assert adjsim.BrownianPath(0, 1e-9).increments([1000.3, 1000.7]).shape == (1,)


def test_entries_do_not_depend_on_how_many_there_are():
    few, many = (PATH.increments([0.0, 0.5, 1.0], (n, 7)) for n in (2, 90))
    assert torch.equal(few, many[:, :2])
    assert len(many.unique()) == many.numel()
    other = adjsim.BrownianPath(4, TOL).increments([0.0, 0.5, 1.0], (2, 7))
    assert not torch.isin(other, few).any()


@pytest.mark.parametrize("path", [PATH, PATH.reversed()], ids=["path", "reversed"])
@pytest.mark.parametrize("ratio", [16, 7])
def test_a_span_draws_ahead_with_the_bits_of_its_steps(path, ratio):
    """As a GPU draws: all numbers of a span at once, those that its steps ask for."""
    steps = list(pairwise(range(-9 * ratio, 9 * ratio, ratio)))
    read, asked = path.reader(300), []
    host = read._normal
    read._normal = lambda *place: asked.append(place[:2]) or host(*place)
    for part in (steps, steps[::-1], steps[3:]):
        asked.clear()
        intervals = [x for step in part for x in _dyadic(*step)]
        if path is not PATH:
            intervals = [x for a, b in part for x in _dyadic(-b, -a)]
        needed = read._needed(intervals)
        read.rows(part)
        assert set(asked) == set(needed)
        for place, row in read._drawn_on_device(needed).items():
            assert torch.equal(row, host(*place, {}))


@pytest.mark.parametrize(
    ("solver", "order"),
    [
        (adjsim.EulerMaruyama, 0.5),
        (adjsim.Milstein, 1.0),
        (adjsim.StochasticHeun, 1.0),
        (adjsim.ReversibleHeun, 1.0),
        (lambda dt: adjsim.SDESolver("milstein", dt=dt), 1.0),
        (lambda dt: adjsim.SDESolver("midpoint", dt=dt), 1.0),
    ],
    ids=["euler", "milstein", "heun", "reversible", "torchsde-milstein", "torchsde-midpoint"],
)
def test_strong_orders_on_one_path(solver, order):
    field, sde, start = growth()
    W = PATH.increments([0.0, 1.0], (20, 3))[0]
    errors = []
    for dt in (2.0**-3, 2.0**-7):
        with torch.no_grad():
            run = adjsim.simulate(sde, start, [0.0, 1.0], solver=solver(dt), generator=PATH)
        ito = field.s**2 / 2 if solver(dt).of_ito else 0.0
        exact = torch.exp(field.a - ito + field.s * W).detach()
        errors.append(float((run.final.y - exact).square().mean().sqrt()))
    # 60 paths of one realisation determine an order to about a tenth.
    assert math.log2(errors[0] / errors[1]) / 4 == pytest.approx(order, abs=0.15)


@pytest.mark.slow
def test_compiled_steps_and_adjoints_read_one_path():
    field, sde, start = growth()
    found = []
    for adjoint, compile in (
        (adjsim.DirectAdjoint(), False),
        (adjsim.CheckpointAdjoint(), True),
        (adjsim.ReversibleAdjoint(), False),
        (adjsim.ReversibleAdjoint(), True),
    ):
        solver = adjsim.ReversibleHeun(2.0**-6)
        settings = {"solver": solver, "adjoint": adjoint, "compile": compile, "generator": PATH}
        run = adjsim.simulate(sde, start, [0.5, 2.0], **settings)
        grads = torch.autograd.grad(run.y[-1].square().sum(), list(field.parameters()))
        found.append(torch.stack([run.y[-1].sum().detach(), *grads]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-10, atol=0)


@pytest.mark.parametrize("solver", [adjsim.StochasticHeun, adjsim.ReversibleHeun])
def test_a_run_back_in_time_returns_on_its_path(solver):
    _, sde, start = growth()
    distances = []
    for dt in (2.0**-5, 2.0**-9):
        with torch.no_grad():
            settings = {"solver": solver(dt), "generator": PATH}
            there = adjsim.simulate(sde, start, [0.0, 1.0], **settings)
            back = adjsim.simulate(sde, there.final, [1.0, 0.5, 0.0], **settings)
        assert back.times.tolist() == [1.0, 0.5, 0.0]
        distances.append(float((back.final.y - 1).abs().max()))
    # The distance has the strong order of the method, one.
    assert distances[1] < min(distances[0] / 8, 1e-3)


def test_gradients_back_in_time():
    field, sde, start = growth()

    def loss(a):
        field.a.data.fill_(a)
        run = adjsim.simulate(
            sde,
            start,
            [1.0, 0.0],
            solver=adjsim.StochasticHeun(2.0**-6),
            adjoint=adjsim.CheckpointAdjoint(),
            generator=PATH,
        )
        return run.final.y.square().mean()

    (grad,) = torch.autograd.grad(loss(0.3), [field.a])
    with torch.no_grad():
        slope = (loss(0.3 + 1e-5) - loss(0.3 - 1e-5)) / 2e-5
    assert float(grad) == pytest.approx(float(slope), rel=1e-7)


@pytest.mark.slow
def test_a_molecule_follows_one_path_with_every_step():
    """Noise of BAOAB on a path: runs with two steps come together, with seeds they do not."""
    dynamics = adjsim.Langevin(adjsim.Harmonic(1.0), 1.0, 1.0, friction=0.5)
    start = dynamics.init(torch.ones(200, 1, 1, dtype=DTYPE), generator=0)

    def distance(dt, generator):
        ends = [
            adjsim.simulate(dynamics, start, [0, 4], solver=adjsim.BAOAB(h), generator=generator)
            for h in (dt, 2.0**-9)
        ]
        return (ends[0].final.position - ends[1].final.position).square().mean().sqrt()

    far, near = (distance(dt, PATH) for dt in (2.0**-4, 2.0**-7))
    assert distance(2.0**-7, 3) > 0.1
    assert near < far / 4 < 0.025


def test_what_a_path_is_not_for():
    _, sde, start = growth()

    def run(solver, ts=(0.0, 1.0), generator=PATH, dynamics=sde, at=start, **more):
        return adjsim.simulate(dynamics, at, ts, solver=solver, generator=generator, **more)

    with pytest.raises(ValueError, match="multiples of its tol"):
        run(adjsim.StochasticHeun(0.1))
    with pytest.raises(ValueError, match=r"ts\[0\] = 0.0001"):
        run(adjsim.StochasticHeun(2.0**-4), (1e-4, 1 + 1e-4))
    with pytest.raises(ValueError, match="Ito"):
        run(adjsim.Milstein(2.0**-4), (1.0, 0.0))
    with pytest.raises(ValueError, match="BrownianPath"):
        run(adjsim.StochasticHeun(2.0**-4), (1.0, 0.0), 3)
    with pytest.raises(TypeError, match="one increment a step"):
        run(adjsim.SDESolver("srk", dt=2.0**-4))
    heavy = adjsim.OverdampedLangevin(adjsim.Harmonic(1.0), 1.0, friction=1.0)
    at = heavy.init(torch.ones(1, 1, dtype=DTYPE))
    with pytest.raises(TypeError, match="one increment a step"):
        run(adjsim.LeimkuhlerMatthews(2.0**-4), dynamics=heavy, at=at)
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"must be a time within 2\^53 tol"):
            PATH.increments([0.0, wrong])
    first = run(adjsim.EulerMaruyama(2.0**-4))
    with pytest.raises(TypeError, match="reads the same path"):
        run(adjsim.EulerMaruyama(2.0**-4), (1.0, 2.0), None, at=None, continues=first)
    with pytest.raises(ValueError, match="seed"):
        adjsim.BrownianPath(-1, 0.1)
    with pytest.raises(ValueError, match="tol"):
        adjsim.BrownianPath(1, 0.0)
    with pytest.raises(TypeError, match="seed"):
        adjsim.BrownianPath(1.5, 0.1)  # pyright: ignore[reportArgumentType]
