"""The mean and its gradient over an ensemble of particles in a double well."""

import sys

import torch

import adjsim

torch.set_default_dtype(torch.float64)
well = adjsim.DoubleWell(torch.nn.Parameter(torch.tensor(1.0)))
dynamics = adjsim.Langevin(well, kT=1.0, friction=1.0)


def initial(replicas, generator):
    return dynamics.init(torch.zeros(replicas, 1, 1), generator=generator)


def spread(state):
    return state.position.square().mean((-1, -2))


simulation = adjsim.Simulation(dynamics, initial, [0.0, 5.0], solver=adjsim.BAOAB(0.05))
estimate = adjsim.Pathwise()(
    simulation,
    adjsim.Final(spread),
    replicas=4096,
    chunks=32,
    generator=0,
    store=sys.argv[1] if len(sys.argv) > 1 else None,
)
if estimate.diagnostics.get("ranks") is None or torch.distributed.get_rank() == 0:
    print(estimate)
