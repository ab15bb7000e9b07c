"""Loops whose threads wait for other processes go on with one thread, and try again."""

import ctypes

import pytest
import torch

import adjsim
from adjsim.compiler import compiled
from adjsim.compiler.teams import declaration

THREADS = 4


@pytest.fixture
def team():
    """Tell the team of a fresh library how long iterations take by all threads and by one.

    Its clock is that of the test. The numbers of threads that iterations had are returned.
    """
    # Libraries are not unloaded, so that of an earlier test has a team that knows its times.
    source = f"""#define omp_get_wtime adjsim_clock_of_test
    {declaration(THREADS)}
    double present = 0;
    extern "C" double omp_get_wtime() noexcept {{ return present; }}
    extern "C" void renew() {{ team = Team(), team.begun = present; }}
    extern "C" int iterate(double all, double one) {{
      const int threads = team.threads;
      present += threads == 1 ? one : all;
      team.iterated();
      return threads;
    }}"""
    library = compiled(source, threads=False)
    library.iterate.argtypes = [ctypes.c_double] * 2
    library.renew()
    return lambda count, all_, one: [library.iterate(all_, one) for _ in range(count)]


def test_all_threads_go_on_where_they_are_faster(team):
    """One thread is tried for less than twice as long as all of them, and ever less often."""
    counts = [team(500, 1.0, 3.0).count(1) for _ in range(8)]
    assert counts[0] > 0
    assert counts[-1] <= 3
    assert team(5, 1.0, 3.0) == [THREADS] * 5


def test_one_thread_goes_on_where_all_wait(team):
    numbers = team(2000, 8.0, 2.0)
    waiting = 8.0 * numbers.count(THREADS)
    assert waiting < 0.1 * (waiting + 2.0 * numbers.count(1))
    # The core is free again: all threads are found again after a while.
    later = team(2000, 1.0, 2.0)
    assert later[-100:].count(THREADS) >= 95


def test_threads_that_begin_to_wait_are_noticed(team):
    team(5000, 1.0, 3.0)
    assert team(200, 10.0, 3.0)[-100:].count(1) >= 95


def test_runs_have_the_same_bits_whatever_number_is_tried():
    """Some of 40 iterations are by one thread: forward, backward, with a list and without."""
    before = torch.get_num_threads()
    potential = adjsim.LennardJones(torch.nn.Parameter(torch.tensor(1.0)), 1.0)
    grid = 1.2 * torch.cartesian_prod(*[torch.arange(3.0)] * 3)
    start = grid + 0.05 * torch.randn(40, 27, 3, generator=torch.Generator().manual_seed(0))
    dynamics, results = adjsim.Hamiltonian(potential), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            found = adjsim.simulate(
                dynamics, dynamics.init(start, torch.zeros_like(start)), [0.0, 0.2],
                solver=adjsim.VelocityVerlet(0.005), adjoint=adjsim.ReversibleAdjoint(),
                compile=True,
            ).final.position  # fmt: skip
            (slope,) = torch.autograd.grad((found**2).sum(), [potential.epsilon])
        finally:
            torch.set_num_threads(before)
        results.append((found.detach(), slope))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
