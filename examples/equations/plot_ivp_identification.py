r"""
solve_ivp: identifying mass, damping and stiffness
==================================================

An oscillator, :math:`m \ddot x + c \dot x + k x = 0`, is released, and its position is
measured with noise. What are its mass, damping and stiffness? The fit finds numbers
that describe the data, from each of two starts. But doubling all three parameters
leaves the motion unchanged, so the data do not determine them. A fit should report
this.

The Jacobian shows whether the data determine the parameters. It holds the derivative of
every predicted point with respect to every parameter, all of them by one adjoint
solve. A direction in parameter space that moves no point is not identified by the data.
"""

# sphinx_gallery_thumbnail_number = 1

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.optimize import minimize

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

TRUTH = np.array([2.0, 0.5, 8.0])
NAMES = ["mass", "damping", "stiffness"]
NOISE = 0.02
GUESSES = [1.0, 0.4, 3.0], [5.0, 0.8, 22.0]
times = torch.linspace(0.5, 8, 16)


def oscillator(t, state, parameters):
    mass, damping, stiffness = parameters
    return torch.stack([state[1], -(damping * state[1] + stiffness * state[0]) / mass])


def positions(parameters, at=times):
    found = adjsim.solve_ivp(
        oscillator,
        (0, 8),
        [1.0, 0.0],
        "DOP853",
        at,
        args=(parameters,),
        rtol=1e-6,
        atol=1e-8,
    )
    return found.y[0]


with torch.no_grad():
    clean = positions(torch.tensor(TRUTH))
data = clean + NOISE * torch.randn(
    len(times), generator=torch.Generator().manual_seed(1)
)

# %%
# The fit
# -------
#
# The fit uses logarithms of the parameters, which keeps the parameters positive and
# makes their relative changes comparable. The gradient of chi squared takes one adjoint
# solve, which stops at every measured point.


def chi_squared(logs):
    x = torch.tensor(logs, requires_grad=True)
    value = (((positions(torch.exp(x)) - data) / NOISE) ** 2).sum()
    (gradient,) = torch.autograd.grad(value, x)
    return float(value.detach()), gradient.numpy()


fits = [
    minimize(
        chi_squared, np.log(guess), jac=True, method="BFGS", options={"gtol": 1e-2}
    )
    for guess in GUESSES
]
for fit in fits:
    listed = ", ".join(
        f"{name} {value:.3f}" for name, value in zip(NAMES, np.exp(fit.x), strict=True)
    )
    print(
        f"{listed}; chi squared {fit.fun:.4f} of {len(times)} points, {fit.nfev} "
        "solutions"
    )

# %%
# Both fits describe the data equally well, with different parameters. The Jacobian
# explains this. It holds the derivatives of every point with respect to every
# parameter, and one of its singular values is zero. One adjoint solve takes the rows of
# all points.


def derivatives(logs):
    x = torch.tensor(logs, requires_grad=True)
    predicted = positions(torch.exp(x)) / NOISE
    rows = torch.eye(len(predicted))
    return torch.autograd.grad(predicted, x, rows, is_grads_batched=True)[0].numpy()


jacobian = derivatives(fits[0].x)
_, singular, directions = np.linalg.svd(jacobian)
blind = directions[-1] * np.sign(directions[-1].sum())
print("singular values:", ", ".join(f"{s:.3g}" for s in singular))
print(
    "not identified: ",
    ", ".join(f"{name} {part:+.4f}" for name, part in zip(NAMES, blind, strict=True)),
    "(logarithms)",
)

fig, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
smooth = torch.linspace(0, 8, 200)
axes[0].plot(times, data, "k.", label="data")
for i, fit in enumerate(fits):
    with torch.no_grad():
        curve = positions(torch.tensor(np.exp(fit.x)), smooth)
    mass, damping, stiffness = np.exp(fit.x[:3])
    label = f"mass {mass:.2f}, damping {damping:.2f}, stiffness {stiffness:.2f}"
    axes[0].plot(smooth, curve, ["-", "--"][i], color=f"C{i}", label=label)
axes[0].set(
    xlabel="time (reduced units)",
    ylabel="position (reduced units)",
    ylim=(-1.2, 1.8),
    title="two fits, one curve",
)
axes[0].legend(loc="upper right", fontsize="small")
axes[1].bar(NAMES, blind, color="C3")
axes[1].axhline(1 / np.sqrt(3), color="0.4", ls=":", lw=1)
axes[1].set(
    ylabel="component of the direction (logarithms)",
    title="the direction that moves no point",
)
plt.show()

# %%
# The direction that moves no point is (1, 1, 1) in logarithms: a common factor of all
# three parameters. The data determine two ratios, which have error bars.

assert singular[-1] < 1e-6 * singular[0] < singular[-2]
assert np.allclose(blind, 1 / np.sqrt(3), atol=1e-6)
assert abs(fits[0].fun - fits[1].fun) < 1e-5 * fits[0].fun
assert not np.allclose(fits[0].x, fits[1].x, atol=0.1)

covariance = np.linalg.pinv(jacobian.T @ jacobian, rcond=1e-10)
for label, way in {
    "damping / mass": [-1, 1, 0],
    "stiffness / mass": [-1, 0, 1],
}.items():
    way = np.array(way)
    for fit in fits:
        value, known = np.exp(way @ fit.x), np.exp(way @ np.log(TRUTH))
        error = value * np.sqrt(way @ covariance @ way)
        print(f"{label}: {value:.4f} +- {error:.4f}, true {known:.4f}")
        assert abs(value - known) < 3 * error

# %%
# The derivatives against the closed solution
# -------------------------------------------
#
# An underdamped oscillator that starts at rest at x = 1 has the position :math:`e^{-at}
# (\cos\omega t + (a/\omega) \sin\omega t)`, with :math:`a = c/2m` and :math:`\omega^2 =
# k/m - a^2`.


def by_hand(logs):
    mass, damping, stiffness = torch.exp(logs)
    a = damping / (2 * mass)
    omega = torch.sqrt(stiffness / mass - a**2)
    return (
        torch.exp(-a * times)
        * (torch.cos(omega * times) + a / omega * torch.sin(omega * times))
        / NOISE
    )


known = torch.autograd.functional.jacobian(by_hand, torch.tensor(fits[0].x)).numpy()
print(
    f"largest difference of a derivative: {np.abs(jacobian - known).max():.1e}, of "
    f"{np.abs(known).max():.0f}"
)
assert np.abs(jacobian - known).max() < 1e-5 * np.abs(known).max()
