"""
Cookbook: models, losses and optimisers
=======================================

Each section is a recipe that checks its result. A recipe needs the imports and
definitions at the top of this page, and names any other recipe that it builds on. Units
are reduced, with energies in epsilon, lengths in sigma and masses in the mass of an
atom.
"""

# sphinx_gallery_thumbnail_number = 1

import matplotlib.pyplot as plt
import torch
from torch import nn

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # these systems are too small to share between threads

# Four atoms near the minimum of their energy, and small momenta.
corners = [[0.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
TETRAHEDRON = 0.85 * torch.tensor(corners)
MOMENTA = 0.3 * torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
MOMENTA -= MOMENTA.mean(0)


def parameter(value):
    return nn.Parameter(torch.tensor(value))


# %%
# A neural network as the potential
# ---------------------------------
#
# Any module that maps positions ``(*batch, atoms, dim)`` to energies ``(*batch,)`` is a
# potential. The output of a network of pair distances does not change under rotations.
# The activation must have a continuous derivative, because the network's derivative
# gives the force. One backward pass gives the gradient with respect to all weights. A
# difference quotient along the direction of the gradient checks this gradient.


class PairNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1, bias=False)
        )

    def forward(self, position):
        distance = adjsim.pair_distances(position)
        return self.layers(distance.unsqueeze(-1)).sum((-1, -2))


torch.manual_seed(0)
network = PairNetwork()
dynamics = adjsim.Hamiltonian(network)


def size_at_the_end():
    run = adjsim.simulate(
        dynamics,
        dynamics.init(TETRAHEDRON, MOMENTA),
        [0.0, 1.0],
        solver=adjsim.VelocityVerlet(0.01),
        adjoint=adjsim.ReversibleAdjoint(),
    )
    return adjsim.radius_of_gyration(run.final.position)


size_at_the_end().backward()
weights = list(network.parameters())
gradient = [w.grad for w in weights]
squared_norm = sum(float((g**2).sum()) for g in gradient)
h, values = 1e-4, []
for shift in (h, -2 * h):  # to +h, then to -h
    with torch.no_grad():
        for w, g in zip(weights, gradient, strict=True):
            w += shift * g
        values.append(size_at_the_end().item())
quotient = (values[0] - values[1]) / (2 * h)
print(f"squared norm of the gradient {squared_norm:.9f}, by differences {quotient:.9f}")
assert abs(quotient / squared_norm - 1) < 1e-6

# %%
# Fitting a distribution
# ----------------------
#
# The data are the distribution of a bond length, as a histogram. The observable is the
# histogram of the simulated bond length: :class:`~adjsim.Reweighting` differentiates
# the weights of samples, so an observable may be discontinuous. The gradients of all
# bins are the Jacobian of a Gauss-Newton step. Stored samples are used again until
# their effective share at the new parameters falls below a threshold.

KT, EDGES = 0.1, torch.linspace(0.2, 2.2, 25)
middle = (EDGES[1:] + EDGES[:-1]) / 2


class Bond(nn.Module):
    """U = k/2 (r - length)^2 of two atoms."""

    def __init__(self, k, length):
        super().__init__()
        self.k, self.length = parameter(k), parameter(length)

    def forward(self, position):
        r = adjsim.pair_distances(position)[..., 0]
        return self.k / 2 * (r - self.length) ** 2


def density(state):
    """Return the histogram of the bond length of each replica, (*batch, bins)."""
    r = adjsim.pair_distances(state.position)
    inside = (EDGES[:-1] <= r) & (r < EDGES[1:])
    return inside.to(r) / (EDGES[1] - EDGES[0])


data = middle**2 * torch.exp(-4.0 / 2 * (middle - 1.2) ** 2 / KT)  # k = 4, length = 1.2
data /= data.sum() * (EDGES[1] - EDGES[0])

bond = Bond(k=2.0, length=1.0)
langevin = adjsim.Langevin(bond, kT=KT, friction=1.0)
simulation = adjsim.Simulation(
    langevin,
    lambda replicas, generator: langevin.init(
        torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]).repeat(replicas, 1, 1),
        generator=generator,
    ),
    ts=[0.0, 30.0],
    solver=adjsim.BAOAB(0.1),
)
reweighting = adjsim.Reweighting(every=1.0, burn_in=10.0)
estimates = []
for iteration in range(6):
    estimate = reweighting(
        simulation,
        adjsim.TimeAverage(density),
        replicas=512,
        chunks=8,
        generator=iteration,
    )
    estimates.append(estimate)
    jacobian = torch.stack(list(estimate.grad.values()), 1)
    residual = data - estimate.value
    with torch.no_grad():
        change = torch.linalg.lstsq(jacobian, residual[:, None]).solution[:, 0]
        for bond_parameter, step in zip(bond.parameters(), change, strict=True):
            bond_parameter += step
sampled = sum(estimate.diagnostics["sampled"] for estimate in estimates)
print(f"k = {bond.k.item():.2f}, length = {bond.length.item():.3f}, sampled {sampled}x")
assert abs(bond.k.item() - 4) < 0.3
assert abs(bond.length.item() - 1.2) < 0.02
assert sampled < len(estimates)

fig, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
ax.plot(middle, data, "k", lw=1, label="data")
ax.step(middle, estimates[0].value, "C3--", where="mid", label="first guess")
ax.errorbar(
    middle,
    estimates[-1].value,
    2 * estimates[-1].value_stderr,
    fmt="C0.",
    capsize=2,
    label="fit, with two standard errors",
)
ax.set(
    xlabel="bond length (units of sigma)",
    ylabel="density (1/sigma)",
    ylim=(0, None),
    title="distribution of a bond length",
)
ax.legend(loc="upper right", fontsize="small")
plt.show()

# %%
# A record and a loss of your own
# -------------------------------
#
# A record is any function that maps the state to a tensor; ``torch.stack`` puts several
# numbers into one tensor. A loss is any function of the recorded tensors. Here a bond
# (class ``Bond`` of the previous recipe) should vibrate at a given frequency. The
# record holds the length and the energy of the bond. torch's FFT gives the mean
# frequency of the length's spectrum. Newton's method finds the stiffness from the
# frequency and its gradient.


def vibration(k):
    """Return the mean frequency of the length, the drift of the energy, and k."""
    bond = adjsim.Hamiltonian(Bond(k, 1.0))
    position = torch.tensor([[0.0, 0.0, 0.0], [1.1, 0.0, 0.0]])

    def record(state):
        return torch.stack(
            [adjsim.pair_distances(state.position)[0], bond.invariant(state)]
        )

    run = adjsim.simulate(
        bond,
        bond.init(position, torch.zeros_like(position)),
        torch.linspace(0, 12.8, 129),
        solver=adjsim.VelocityVerlet(0.05),
        adjoint=adjsim.ReversibleAdjoint(),
        record=record,
    )
    length, energy = run.record[:-1].unbind(1)
    window = torch.hann_window(128)
    power = torch.fft.rfft((length - length.mean()) * window).abs() ** 2
    frequency = (torch.fft.rfftfreq(128, 0.1) * power).sum() / power.sum()
    return frequency, (energy - energy[0]).abs().max() / energy[0], bond.potential.k


stiffness, wanted = 10.0, 1.0
for _ in range(4):
    frequency, drift, k = vibration(stiffness)
    (slope,) = torch.autograd.grad(frequency, k)
    stiffness += (wanted - frequency.item()) / slope.item()
exact = (2 * torch.pi * wanted) ** 2 / 2  # with reduced mass 1/2
print(f"stiffness {stiffness:.3f}, of a harmonic bond {exact:.3f}; drift {drift:.1e}")
assert abs(stiffness / exact - 1) < 0.02

# %%
# L-BFGS through compiled runs
# ----------------------------
#
# :class:`torch.optim.LBFGS` calls a closure several times a step. With ``compile=True``
# each call runs in compiled loops, forward and backward. The loops are compiled at the
# first call. New values of the parameters do not compile them again.

model = adjsim.LennardJones(parameter(1.0), parameter(1.0))
newton = adjsim.Hamiltonian(model)


def path():
    return adjsim.simulate(
        newton,
        newton.init(TETRAHEDRON, MOMENTA),
        torch.linspace(0, 1, 11),
        solver=adjsim.VelocityVerlet(0.005),
        adjoint=adjsim.ReversibleAdjoint(),
        compile=True,
    ).position


target = path().detach()
with torch.no_grad():
    model.epsilon.fill_(0.8)
    model.sigma.fill_(1.04)
optimiser = torch.optim.LBFGS(
    model.parameters(),
    max_iter=40,
    tolerance_grad=1e-12,
    tolerance_change=1e-16,
    line_search_fn="strong_wolfe",
)
losses = []


def closure():
    optimiser.zero_grad()
    loss = ((path() - target) ** 2).mean()
    loss.backward()
    losses.append(loss.item())
    return loss


optimiser.step(closure)
found = [model.epsilon.item(), model.sigma.item()]
print(f"{len(losses)} evaluations: epsilon {found[0]:.8f}, sigma {found[1]:.8f}")
assert max(abs(x - 1) for x in found) < 1e-5

# %%
# Clipping and hooks
# ------------------
#
# The backward pass of a run leaves ordinary gradients in the parameters, so the tools
# of torch apply. In chaos the gradient of a long run is large, and
# ``clip_grad_norm_`` bounds the step of an optimiser. A hook of a parameter changes the
# gradient as it arrives. The hook here gives the gradient with respect to log sigma.

potential = adjsim.LennardJones(parameter(1.0), parameter(1.1))
newton = adjsim.Hamiltonian(potential)


def backward():
    potential.zero_grad()
    run = adjsim.simulate(
        newton,
        newton.init(TETRAHEDRON, 2 * MOMENTA),
        [0.0, 5.0],
        solver=adjsim.VelocityVerlet(0.01),
        adjoint=adjsim.ReversibleAdjoint(),
    )
    adjsim.radius_of_gyration(run.final.position).backward()
    return potential.sigma.grad.clone()


plain = backward()
sigma_now = potential.sigma.detach().clone()
handle = potential.sigma.register_hook(lambda gradient: gradient * sigma_now)
hooked = backward()
handle.remove()
assert torch.equal(hooked, plain * sigma_now)

norm = nn.utils.clip_grad_norm_(potential.parameters(), max_norm=1.0)
clipped = torch.stack([p.grad for p in potential.parameters()]).norm()
print(f"norm of the gradient {norm.item():.2f}, clipped {clipped.item():.6f}")
assert norm > 1
assert abs(clipped - 1) < 1e-5
