"""Chunks that are shared among ranks: bits, stores, and faults."""

import os
import re
import shutil
import signal
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import adjsim
from adjsim.core.durable.ranks import RankError, Ranks
from adjsim.core.durable.store import StoreError
from adjsim.estimators.fit.fit import fit
from tests.flows import Lorenz
from tests.problems import slow_but
from tests.reach.ranks import AVERAGE, ESTIMATORS, bits, estimate, on_ranks, simulation, square


@pytest.mark.parametrize(
    ("name", "size"),
    slow_but(
        lambda name, size: (name, size) == ("reweighting", 2),
        [(name, size) for name in ESTIMATORS for size in (2, 3, 8)],
        # How chunks are shared does not depend on the estimator.
        marathon=lambda *row: row not in {("pathwise", 3), ("pathwise", 8), ("score", 2)},
    ),
)
def test_the_bits_do_not_depend_on_the_ranks(name, size, tmp_path):
    """Eleven replicas in five uneven chunks; of eight ranks three have nothing to do."""
    expected, _ = estimate(name, 11, 5, 3)
    for store in (None, str(tmp_path)):
        found = on_ranks(size, estimate, name, 11, 5, 3, store)
        assert [x[0] for x in found] == [expected] * size
        assert all(x[1]["ranks"] == size for x in found)
        assert all(x[1]["energy_evaluations"] == found[0][1]["energy_evaluations"] for x in found)
    # Chunks of another number of ranks.
    assert estimate(name, 11, 5, 3, str(tmp_path))[0] == expected


def scored(estimator, seed, store=None):
    """The score of chunks of one or two replicas, whose starts differ from chunk to chunk."""
    found = estimator(simulation(), AVERAGE, replicas=12, chunks=8, generator=seed, store=store)
    return bits(found)


@pytest.mark.slow
def test_a_score_does_not_depend_on_which_chunk_comes_first(tmp_path):
    expected, used = scored(adjsim.ScoreFunction(), 1), adjsim.ScoreFunction()
    assert scored(used, 2) != expected
    assert scored(used, 1) == expected
    assert scored(used, 1, tmp_path) == expected
    for path in sorted(tmp_path.glob("chunk-*"))[:5]:
        path.unlink()
    assert scored(adjsim.ScoreFunction(), 1, tmp_path) == expected


def shadowed(store):
    """A chaotic flow and a network, seven replicas in uneven chunks."""
    lorenz = Lorenz()
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for number, p in enumerate(network.parameters()):
            p.copy_(torch.linspace(-0.1, 0.2, p.numel()).roll(number).reshape(p.shape))
    ode = adjsim.ODE(Field(lorenz, network))

    def initial(replicas, generator):
        near = torch.randn(replicas, 3, generator=generator, dtype=torch.float64)
        return ode.init(near + torch.tensor([1.0, 1.0, 20.0], dtype=torch.float64))

    made = adjsim.Simulation(ode, initial, [0.0, 4.0], adjsim.RungeKutta("rk4", 0.02))
    height = adjsim.TimeAverage(lambda s: s.y[..., 2])
    return bits(
        adjsim.Shadowing(2, 1.0)(made, height, replicas=7, chunks=3, generator=1, store=store)
    )


class Field(nn.Module):
    """The sum of an equation and a network of the state."""

    def __init__(self, equation, network):
        super().__init__()
        self.equation, self.network = equation, network

    def forward(self, t, y):
        return self.equation(t, y) + self.network(y)


@pytest.mark.marathon
def test_shadowing_has_the_same_bits(tmp_path):
    """Ranks and a store sweep chunks, and one process all replicas at once.

    A product of one or two rows can be rounded in another way than that of many, which the chaos of
    four units of time amplifies by a hundred.
    """
    expected = shadowed(str(tmp_path))
    assert on_ranks(2, shadowed, None) == [expected] * 2
    for one, known in zip(shadowed(None), expected, strict=True):
        torch.testing.assert_close(*map(numbers, (one, known)), rtol=1e-10, atol=1e-12)


def numbers(data):
    return torch.frombuffer(bytearray(data), dtype=torch.float64)


def both(store):
    """Two estimates without a seed, from default generators that differ between the ranks."""
    return [estimate("pathwise", 4, 2, None, store)[0] for _ in range(2)]


@pytest.mark.slow
def test_ranks_draw_from_one_generator():
    first, second = on_ranks(2, both, None)
    assert first == second
    assert first[0] != first[1]


def train(size):
    """Three steps of an optimiser on estimates by a part of the default group."""
    made = simulation()
    group = dist.new_group(list(range(size))) if dist.is_initialized() else None
    optimiser = torch.optim.Adam(made.dynamics.parameters(), 0.1)
    for seed in range(3):
        optimiser.zero_grad()
        found = adjsim.Pathwise()(made, AVERAGE, replicas=6, chunks=3, generator=seed, group=group)
        found.accumulate(made.dynamics)
        optimiser.step()
    return [p.detach().numpy().tobytes() for p in made.dynamics.parameters()]


@pytest.mark.slow
def test_a_fit_runs_as_it_stands_on_every_rank():
    expected = train(1)
    assert on_ranks(2, train, 2) == [expected] * 2


def parts(folder):
    """Use a group of the last two of three ranks."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        try:
            Ranks.of(group)
        except (RankError, TypeError) as error:
            return str(error)
    found = adjsim.Pathwise()(
        simulation(), AVERAGE, replicas=6, chunks=3, generator=1, group=group, store=folder
    )
    return bits(found), found.diagnostics["ranks"]


@pytest.mark.slow
def test_a_part_of_the_ranks(tmp_path):
    alone = adjsim.Pathwise()(simulation(), AVERAGE, replicas=6, chunks=3, generator=1)
    found = on_ranks(3, parts, str(tmp_path))
    assert "group" in found[0]
    assert found[1] == found[2] == (bits(alone), 2)


def compared(store):
    made = simulation()
    strict = adjsim.Pathwise(adjsim.ReversibleAdjoint(tol=1e-30))
    methods = {"path": adjsim.Pathwise(), "bad": strict}
    found = adjsim.compare(made, AVERAGE, methods, replicas=4, chunks=2, generator=1, store=store)
    return {name: bits(x) for name, x in found.estimates.items()}, found.failures


@pytest.mark.slow
def test_a_comparison_has_the_same_rows_and_failures(tmp_path):
    expected = compared(None)
    assert list(expected[1]) == ["bad"]
    assert on_ranks(2, compared, str(tmp_path)) == [expected] * 2
    # Only the failed chunk is computed again.
    assert compared(str(tmp_path)) == expected


def fitted(store, name):
    made = simulation()
    made.dynamics.kT.requires_grad_(False)
    average = adjsim.TimeAverage(lambda s: torch.cat([s.position**2, s.position**4], -1)[:, 0])
    make = (lambda: adjsim.Reweighting(every=0.1)) if name == "reweighting" else adjsim.Pathwise
    found = fit(
        made,
        average,
        [1.0, 1.5],
        make,
        replicas=6,
        chunks=3,
        iterations=3,
        generator=1,
        store=store,
    )
    return [x.numpy().tobytes() for x in (*found.values.values(), found.covariance)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reweighting", "pathwise"])
def test_a_fit_to_a_curve_has_the_same_bits(name, tmp_path):
    expected = fitted(None, name)
    assert on_ranks(2, fitted, str(tmp_path), name) == [expected] * 2
    assert fitted(str(tmp_path), name) == expected


def differing(what):
    made = simulation(kT=0.5 + (0.1 * dist.get_rank() if what == "kT" else 0.0))
    chunks = 2 + (dist.get_rank() if what == "chunks" else 0)
    return adjsim.Pathwise()(made, AVERAGE, replicas=6, chunks=chunks, generator=1)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("kT", r"kT is 0\.5 .* on rank 0 and 0\.6 .* on rank 1\. Give every rank the same"),
        pytest.param(
            "chunks",
            r"the chunks is .* Give every rank the same settings and numbers",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_that_compute_different_things_are_named(what, says):
    for found in on_ranks(2, differing, what):
        with pytest.raises(RankError, match=says):
            raise found


def simulation_from(samples):
    made = simulation()

    def initial(replicas, generator):
        return made.dynamics.init(samples[:replicas], generator=generator)

    return replace(made, initial=initial)


def differing_fit(what):
    rank = dist.get_rank()
    made = simulation_from(torch.ones(6, 1, 1) + rank * (what == "starts"))
    if what == "parameter":
        with torch.no_grad():
            made.dynamics.potential.barrier += rank
    made.dynamics.kT.requires_grad_(False)
    target = [1.0 + rank * (what == "target")]
    average = adjsim.TimeAverage(lambda s: s.position[:, 0] ** 2)
    make = partial(adjsim.Reweighting, every=0.1)
    return fit(made, average, target, make, replicas=6, chunks=3, iterations=1, generator=1)


@pytest.mark.parametrize(
    ("what", "says"),
    slow_but(
        lambda what, _: what == "starts",
        [("parameter", "barrier"), ("target", "the target is"), ("starts", "the starts is")],
    ),
)
def test_ranks_that_fit_different_things_are_named(what, says):
    for found in on_ranks(2, differing_fit, what):
        with pytest.raises(RankError, match=says):
            raise found


def test_a_store_knows_all_starts_of_its_samples(tmp_path):
    samples = torch.ones(6, 1, 1)
    made = simulation_from(samples)

    def estimated():
        reweighted = adjsim.Reweighting(every=0.1)
        return reweighted(made, AVERAGE, replicas=6, chunks=3, generator=1, store=tmp_path)

    first = estimated()
    assert bits(estimated()) == bits(first)
    samples[1:] = -1.0
    with pytest.raises(StoreError, match="position of the starts"):
        estimated()


def failing(rank_of_failure):
    def observe(state):
        if dist.get_rank() == rank_of_failure:
            raise FloatingPointError("chunk of this rank")
        return square(state)

    return adjsim.Pathwise()(simulation(), adjsim.Final(observe), replicas=4, chunks=4, generator=1)


@pytest.mark.slow
def test_an_error_is_that_of_all_ranks():
    for found in on_ranks(3, failing, 1):
        with pytest.raises(FloatingPointError, match="chunk of this rank"):
            raise found


def hanging(how):
    def observe(state):
        if dist.get_rank() == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        return square(state)

    return adjsim.Pathwise()(simulation(), adjsim.Final(observe), replicas=4, chunks=4, generator=1)


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("hang", marks=pytest.mark.slow), "kill"])
def test_a_rank_that_hangs_or_ends_is_named(how):
    # The end of a process is seen at once, a long time before the timeout of the group.
    begun = time.perf_counter()
    found = on_ranks(3, hanging, how, seconds=2.0 if how == "hang" else 1800.0, hanging=(1,))
    assert time.perf_counter() - begun < 300
    assert found[1] is None
    says = "rank 1 has not finished its work" if how == "hang" else "rank 1 has ended before the"
    with pytest.raises(RankError, match=says):
        raise found[0]
    # The first rank ends with its error, and may have ended already.
    also = r"ranks? (0|1|\[0, 1\]) ha(s|ve) ended|another rank hangs|rank 1 has not finished"
    with pytest.raises(RankError, match=also):
        raise found[2]


def disagreeing(name):
    Ranks.of().agree({name: f"{dist.get_rank()}"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("the seeds", "Seed every rank in the same way"),
        pytest.param("torch", "Install the same version", marks=pytest.mark.slow),
    ],
)
def test_the_advice_is_that_of_the_cause(name, says):
    with pytest.raises(RankError, match=f"{name} is 0 on rank 0 and 1 on rank 1. {says}"):
        raise on_ranks(2, disagreeing, name)[0]


def leaving(rank_that_leaves):
    if dist.get_rank() == rank_that_leaves:
        return "left"
    return adjsim.Pathwise()(simulation(), adjsim.Final(square), replicas=4, chunks=4, generator=1)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_that_leaves_early_is_named(rank):
    found = on_ranks(3, leaving, rank, seconds=1800.0)
    assert found[rank] == "left"
    says = f"rank {rank} has ended before the work was finished"
    if rank == 2:
        with pytest.raises(RankError, match=says):
            raise found[0]
        return
    # Of the two ranks that are left, the first to look sees that one alone has ended; it may have
    # ended itself when the other one looks.
    assert all(isinstance(error, RankError) for error in found[1:])
    assert any(says in str(error) for error in found[1:])
    for error in found[1:]:
        assert re.match(r"rank 0 has ended|ranks \[0, [12]\] have ended", str(error))


def slow(store):
    """A rank that is slow: the other one takes its chunks."""
    done = []

    def observe(state):
        done.append(state.position.shape[0])
        if dist.get_rank() == 1:
            time.sleep(0.5)
        return square(state)

    found = adjsim.FiniteDifference()(
        simulation(4), adjsim.Final(observe), replicas=12, chunks=12, generator=1, store=store
    )
    # Each chunk runs five times: as it is, and with two parameters to both sides.
    return len(done) // 5, bits(found)


@pytest.mark.slow
def test_work_is_taken_where_a_store_is_shared(tmp_path):
    (first, a), (second, b) = on_ranks(2, slow, str(tmp_path))
    assert a == b
    assert first + second == 12
    assert second <= 3


def test_an_error_of_the_store_is_that_of_all_ranks(tmp_path):
    estimate("pathwise", 4, 2, 1, str(tmp_path))
    for found in on_ranks(2, estimate, "pathwise", 4, 2, 2, str(tmp_path)):
        with pytest.raises(StoreError, match="of another computation"):
            raise found


def test_a_damaged_chunk_is_named(tmp_path):
    expected, _ = estimate("pathwise", 4, 2, 1, str(tmp_path))
    path = tmp_path / "chunk-00001.pt"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    for found in on_ranks(2, estimate, "pathwise", 4, 2, 1, str(tmp_path)):
        with pytest.raises(StoreError, match=r"chunk-00001\.pt' is damaged.*Remove it"):
            raise found
    path.unlink()
    assert estimate("pathwise", 4, 2, 1, str(tmp_path))[0] == expected


def test_a_chunk_of_another_estimate_is_named(tmp_path):
    """Each has a checksum that fits, and is not the chunk that its name says."""
    ours, other = str(tmp_path / "ours"), str(tmp_path / "other")
    estimate("pathwise", 4, 2, 1, ours)
    estimate("pathwise", 4, 2, 2, other)
    chunks = [tmp_path / name / f"chunk-0000{i}.pt" for name, i in (("other", 0), ("ours", 1))]
    for foreign in chunks:
        shutil.copy(foreign, tmp_path / "ours" / "chunk-00000.pt")
        with pytest.raises(StoreError, match=r"chunk-00000.*is of another computation"):
            estimate("pathwise", 4, 2, 1, ours)


def test_a_value_that_is_no_group_is_refused():
    with pytest.raises(TypeError, match="group must be a process group"):
        adjsim.Pathwise()(simulation(), AVERAGE, replicas=4, group="world")
