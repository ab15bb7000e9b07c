r"""
solve_ivp: pouring a drink
==========================

A jug that holds :math:`V_0` is tilted at a steady rate :math:`\omega`. At a tilt
:math:`\theta` the jug can hold :math:`V_0 (1 - \theta/\theta_m)`, where
:math:`\theta_m` is the tilt at which it can hold nothing. Any volume above this
capacity runs out, at a rate k times the excess:

.. math:: \dot V = -k \left( V - V_0 (1 - \theta/\theta_m) \right), \qquad \dot\theta =
   \omega.

After two seconds 0.6 of the jug should be in the cup. Which rate of tilting achieves
this? The rate of tilting is an argument of the equation, the loss is one number at the
end, and one adjoint solve gives the gradient.
"""

# sphinx_gallery_thumbnail_number = 1

import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.optimize import minimize

import adjsim

torch.set_default_dtype(torch.float64)

FULL, FLAT, RATE, END, TARGET = 1.0, math.pi / 2, 5.0, 2.0, 0.6


def pour(t, state, omega):
    """Compute the rates of the volume in the jug and of its tilt."""
    volume, tilt = state
    return torch.stack([-RATE * (volume - FULL * (1 - tilt / FLAT)), omega])


def solve(omega, **options):
    return adjsim.solve_ivp(
        pour, (0, END), [FULL, 0.0], args=(omega,), rtol=1e-9, atol=1e-12, **options
    )


history = []


def loss_and_gradient(x):
    omega = torch.tensor(x[0], requires_grad=True)
    cup = FULL - solve(omega, t_eval=[END]).y[0, -1]
    loss = (cup - TARGET) ** 2
    (gradient,) = torch.autograd.grad(loss, omega)
    history.append((x[0], float(loss.detach())))
    return float(loss.detach()), np.array([float(gradient)])


found = minimize(
    loss_and_gradient, [0.2], jac=True, method="BFGS", options={"gtol": 1e-12}
)
omega = found.x[0]
print(f"tilt it at {omega:.9f} radians a second ({len(history)} solutions)")

# %%
# Pouring starts slowly, since the jug is not tilted at first, and the cup is at 0.6
# after two seconds.

fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
times = torch.linspace(0, END, 100)
for k, (x, _) in enumerate([*history[:4], (omega, 0.0)]):
    with torch.no_grad():
        cup = FULL - solve(torch.tensor(x), dense_output=True).sol(times)[0]
    last = k == len(history[:4])
    axes[0].plot(
        times,
        cup,
        color="C3" if last else f"{0.85 - 0.12 * k:.2f}",
        lw=2 if last else 1.2,
    )
axes[0].axhline(TARGET, color="0.4", lw=0.8, ls=":")
axes[0].set(
    xlabel="time (s)",
    ylabel="in the cup (parts of the jug)",
    title="the first guesses, and the answer",
)
losses = np.array([loss for _, loss in history])
axes[1].semilogy(np.maximum(losses, 1e-32), "o-")
axes[1].set(
    xlabel="solution",
    ylabel="squared distance from the target\n(parts of the jug squared)",
)
axes[1].set_xticks(range(len(losses)))
plt.show()

# %%
# The same by hand
# ----------------
#
# The equation is linear. The volume exceeds the capacity of the jug by :math:`(V_0
# \omega/\theta_m k) (1 - e^{-kt})`. So at the end, t = T, the cup holds :math:`(V_0
# \omega/\theta_m) (T - (1 - e^{-kT})/k)`.

by_hand = TARGET * FLAT / FULL / (END + math.expm1(-RATE * END) / RATE)
print(f"by hand    {by_hand:.9f}")
assert abs(omega - by_hand) < 1e-8
assert abs(omega - 0.523596134) < 1e-8
