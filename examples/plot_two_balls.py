r"""
Two balls: contact by events, by penalty and by steps
=====================================================

Two balls of radius 0.2 and mass 1 rest at (-2, -2) and (-1, -1). A force u on the first
one should bring the second one close to the origin at T = 1, with little effort. The
balls collide without loss. The cost is

.. math:: J = |x_2(T)|^2 + 0.1 \int_0^T |u|^2 dt .

The force acts on the second ball only through the collision, so its gradient is that of
a contact. This page computes it in three ways. An event finds the time of the collision
and differentiates it. A penalty replaces the collision by a stiff spring. A time
stepping that exchanges velocities at the end of the step of contact is the third, and
its gradient is wrong at any step.

The problem is an example of Zhong, Han, Dey and Brikis, "Improving gradient computation
for differentiable physics simulation with contacts" (L4DC 2023).
"""

# sphinx_gallery_thumbnail_number = 1

import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.animation import FuncAnimation
from scipy.optimize import minimize, root

import adjsim
from adjsim.potentials.contact.particles import ParticleContact
from adjsim.potentials.controls import OpenLoop
from adjsim.potentials.signals import PiecewiseLinear

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # two balls are too few to share between threads

RADIUS, EFFORT = 0.2, 0.1
START = torch.tensor([[-2.0, -2.0], [-1.0, -1.0]])
DIAGONAL = np.array([1.0, 1.0]) / math.sqrt(2)


def optimise(cost, x, **options):
    """Minimise a function of a tensor, and return SciPy's result."""

    def value_and_gradient(flat):
        at = torch.tensor(flat.reshape(x.shape), requires_grad=True)
        value = cost(at)
        (gradient,) = torch.autograd.grad(value, at)
        return float(value.detach()), gradient.numpy().ravel()

    options = {"maxiter": 200, "ftol": 0.0, "gtol": 1e-7, "maxcor": 20, **options}
    return minimize(
        value_and_gradient, x.ravel(), jac=True, method="L-BFGS-B", options=options
    )


# %%
# The answer by hand
# ------------------
#
# The best path is along the diagonal. The first ball has to cover a distance D to the
# contact and arrive at a time :math:`t_c` with a velocity w, which the second ball then
# has. The least effort for this is a force that is linear in time, with the integral
# :math:`4 (3 D^2 - 3 D w t_c + w^2 t_c^2) / t_c^3`, and no force afterwards. So the cost
# is a function of two numbers.

AWAY = math.sqrt(2)
D = AWAY - 2 * RADIUS


def cost_by_hand(x):
    time, velocity = x
    effort = 4 * (3 * D**2 - 3 * D * velocity * time + (velocity * time) ** 2) / time**3
    return (AWAY - velocity * (1 - time)) ** 2 + EFFORT * effort


best = minimize(
    cost_by_hand, [0.5, 3.0], method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 0}
)
time, velocity = best.x
short = AWAY - velocity * (1 - time)
# The force a + b t has the integrals w and D.
force = np.linalg.solve(
    [[time, time**2 / 2], [time**2 / 2, time**3 / 6]], [velocity, D]
)
last_force = force[0] + force[1] * time
print(
    f"cost {best.fun:.8f}: contact at {time:.5f} with velocity {velocity:.5f}, force "
    f"{force[0]:.4f} - {-force[1]:.4f} t, {short:.5f} short of the origin"
)
assert abs(best.fun - 1.39654216) < 5e-9

# %%
# Events
# ------
#
# The contact is an event of :func:`~adjsim.solve_ivp`, whose reset exchanges the
# velocities along the line of centres. The force is a cubic polynomial of time before
# the contact and another one after it. The phase is a state that the reset sets from
# zero to one. The effort is a state too. The optimiser starts from a throw that is off
# the diagonal.

DEGREE = 3


def polynomial(coefficients, t):
    """Evaluate Legendre polynomials on [0, 1], ``(dim, degree + 1)`` coefficients."""
    x = 2 * t - 1
    terms = [torch.ones_like(x), x]
    for n in range(1, DEGREE):
        terms.append(((2 * n + 1) * x * terms[n] - n * terms[n - 1]) / (n + 1))
    return coefficients @ torch.stack(terms)


def motion(t, state, coefficients):
    """Compute the rates of both positions, both velocities, effort and phase."""
    velocities, phase = state[4:8], state[9]
    u = polynomial(torch.lerp(coefficients[0], coefficients[1], phase), t)
    return torch.cat([velocities, u, torch.zeros(2), (u @ u)[None], torch.zeros(1)])


def gap(t, state, coefficients):
    return (state[2:4] - state[:2]).norm() - 2 * RADIUS


def collide(t, state, coefficients):
    line = (state[2:4] - state[:2]) / (2 * RADIUS)
    impulse = line * ((state[4:6] - state[6:8]) @ line)
    positions, first, second = state[:4], state[4:6] - impulse, state[6:8] + impulse
    return torch.cat([positions, first, second, state[8:9], torch.ones(1)])


gap.reset, gap.direction = collide, -1


def by_events(coefficients, t_eval=None):
    """Return the times and states of a run, whose last state is the end."""
    start = torch.cat([START.ravel(), torch.zeros(6)])
    return adjsim.solve_ivp(
        motion,
        (0, 1),
        start,
        "DOP853",
        t_eval,
        events=gap,
        args=(coefficients,),
        rtol=1e-9,
        atol=1e-11,
    )


def cost_by_events(coefficients):
    end = by_events(coefficients).y[:, -1]
    return (end[2:4] ** 2).sum() + EFFORT * end[8]


guess = torch.zeros(2, 2, DEGREE + 1)
guess[..., 0] = torch.tensor([5.0, 4.5])
events = optimise(cost_by_events, guess)
found = torch.tensor(events.x.reshape(guess.shape))
print(f"cost {events.fun:.8f} by events, after {events.nfev} runs")

frames = torch.linspace(0, 1, 41)
with torch.no_grad():
    path = by_events(found, frames)
    contact_time = float(by_events(found).t_events[0])
    before = polynomial(found[0], torch.linspace(0, contact_time, 50)[:, None].T[0])
