"""What an installed wheel has to do outside the tree: one gradient by two adjoints, and the files
that go with the code.
"""

from importlib.metadata import version
from importlib.resources import files

import torch

import adjsim
from adjsim.io.systems import cluster

assert version("adjsim") == adjsim.__version__
assert (files("adjsim") / "py.typed").is_file()
system = cluster()
dynamics = adjsim.Hamiltonian(system.potential)
start = dynamics.init(system.position * 1.01, torch.zeros_like(system.position))
gradients = []
for adjoint in (adjsim.DirectAdjoint(), adjsim.ReversibleAdjoint()):
    run = adjsim.simulate(
        dynamics, start, [0.0, 0.1], solver=adjsim.VelocityVerlet(0.005), adjoint=adjoint
    )
    gradients.append(
        torch.autograd.grad(run.final.position.square().sum(), list(dynamics.parameters()))
    )
for direct, reversible in zip(*gradients, strict=True):
    torch.testing.assert_close(direct, reversible, rtol=1e-9, atol=1e-12)
print(f"adjsim {adjsim.__version__} at {files('adjsim')}")
