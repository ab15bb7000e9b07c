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
"""

# sphinx_gallery_thumbnail_number = 3

import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.animation import FuncAnimation
from scipy.optimize import minimize

import adjsim
from adjsim.potentials.contact.particles import ParticleContact
from adjsim.potentials.signals.controls import OpenLoop
from adjsim.potentials.signals.signals import PiecewiseLinear

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # two balls are too few to share between threads

RADIUS, EFFORT = 0.2, 0.1
START = torch.tensor([[-2.0, -2.0], [-1.0, -1.0]])
DIAGONAL = np.array([1.0, 1.0]) / math.sqrt(2)


def optimise(value_and_gradient, x):
    """Minimise a function that returns its value and its gradient."""
    options = {"maxiter": 200, "ftol": 1e-13, "gtol": 1e-5, "maxcor": 20}
    return minimize(value_and_gradient, x, jac=True, method="L-BFGS-B", options=options)


# %%
# The answer by hand
# ------------------
#
# The best path is along the diagonal. The first ball has to cover a distance D to the
# contact and arrive at a time :math:`t_c` with a velocity w, which the second ball then
# has. The least effort for this is a force that is linear in time, with the integral
# :math:`4 (3 D^2 - 3 D w t_c + w^2 t_c^2) / t_c^3`, and no force afterwards. So the
# cost is a function of two numbers.

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
        rtol=1e-7,
        atol=1e-9,
        # The balls must not pass through each other within a step.
        max_step=0.2,
    )


def cost_by_events(flat):
    """Return the cost and its gradient by the coefficients."""
    coefficients = torch.tensor(flat.reshape(2, 2, DEGREE + 1), requires_grad=True)
    end = by_events(coefficients).y[:, -1]
    value = (end[2:4] ** 2).sum() + EFFORT * end[8]
    (gradient,) = torch.autograd.grad(value, coefficients)
    return float(value.detach()), gradient.numpy().ravel()


guess = np.zeros((2, 2, DEGREE + 1))
guess[0, :, 0], guess[1, :, 0] = (3.7, 3.4), 0.5
events = optimise(cost_by_events, guess.ravel())
found = torch.tensor(events.x.reshape(guess.shape))
with torch.no_grad():
    contact_time = float(by_events(found).t_events[0])
    grid = torch.linspace(0, contact_time, 50)
    before = torch.stack([polynomial(found[0], t) for t in grid]).numpy()
    after = torch.stack([polynomial(found[1], t) for t in torch.linspace(0.7, 1, 4)])
print(f"cost {events.fun:.8f} by events, after {events.nfev} runs from an offset throw")

# The optimiser stops where the gradient is 1e-5: the cost is then off by its square,
# and the force by a multiple of it.
assert abs(events.fun - best.fun) < 1e-8
assert abs(contact_time - time) < 1e-3
by_hand = (force[0] + force[1] * grid.numpy())[:, None] * DIAGONAL
assert np.abs(before - by_hand).max() < 1e-2
assert after.abs().max() < 1e-2

# %%
# The optimiser finds the diagonal, the linear force before the contact and none after
# it.

# %%
# A penalty
# ---------
#
# Now the balls push each other apart with a force in proportion to their overlap,
# :class:`~adjsim.ParticleContact`, and velocity Verlet integrates the motion. A contact
# of two equal masses lasts :math:`\tau = \pi \sqrt{m/2k}` for a stiffness k. The force
# has a value at every step, and is linear in between. Its values are the parameters.

STEPS = 800
knots = torch.linspace(0, 1, STEPS + 1)


def make_penalty(values, times=knots):
    """Make the two balls with a force through values at given times."""
    push = PiecewiseLinear(times, torch.nn.Parameter(values[:, None]))
    contact = ParticleContact(RADIUS, 1.0)
    return adjsim.Hamiltonian(contact + OpenLoop(push, [0])), contact, push


def end_of_second(dynamics, steps, **options):
    state = dynamics.init(START, torch.zeros(2, 2))
    solver = adjsim.VelocityVerlet(1 / steps)
    return adjsim.simulate(
        dynamics, state, [0.0, 1.0], solver=solver, **options
    ).final.position[1]


def effort(values):
    """Return the integral of the square of a piecewise linear force."""
    a, b = values[:-1], values[1:]
    return (a * a + a * b + b * b).sum() / (3 * (len(values) - 1))


dynamics, contact, push = make_penalty(torch.zeros(STEPS + 1, 2))


def cost_by_penalty(flat):
    """Return the cost and its gradient by the values of the force."""
    with torch.no_grad():
        push.values.copy_(torch.tensor(flat).reshape(-1, 1, 2))
    end = end_of_second(
        dynamics, STEPS, adjoint=adjsim.ReversibleAdjoint(), compile=True
    )
    value = (end**2).sum() + EFFORT * effort(push.values[:, 0])
    (gradient,) = torch.autograd.grad(value, push.values)
    return float(value.detach()), gradient.numpy().ravel()


STIFFNESS = [100.0, 400.0, 1600.0]
initial = np.where(knots.numpy() < time, force[0] + force[1] * knots.numpy(), 0.0)
flat, penalties, forces = (initial[:, None] * DIAGONAL).ravel(), [], []
for stiffness in STIFFNESS:
    with torch.no_grad():
        contact.stiffness.fill_(stiffness)
    fit = optimise(cost_by_penalty, flat)
    penalties.append(fit.fun)
    forces.append(fit.x.reshape(-1, 2) @ DIAGONAL)
durations = np.pi * np.sqrt(1 / (2 * np.array(STIFFNESS)))

# %%
# The cost is larger, and the difference follows from the duration of the contact.
# First, the second ball leaves :math:`\tau/2` later than it would after a collision, so
# it comes :math:`w \tau/2` less far. Second, the force can still push during the
# contact. A push at a phase :math:`\varphi` of the contact, from 0 to :math:`\pi`,
# reaches the second ball with a weight of :math:`\cos^2(\varphi/2)`, so the best force
# falls from its last value :math:`u_c` as this weight does. It saves :math:`0.1 u_c^2
# \int \cos^4 = 0.1 \cdot \frac{3}{8} u_c^2 \tau`. With both,
#
# .. math:: J_k = J + \tau \left( |x_2(T)| \, w - 0.0375 \, u_c^2 \right) + O(\tau^2) .

slope = short * velocity - EFFORT * 3 / 8 * last_force**2
for stiffness, duration, value in zip(STIFFNESS, durations, penalties, strict=True):
    print(
        f"stiffness {stiffness:6.0f}: contact {duration:.4f}, cost {value:.6f}, excess "
        f"by duration {(value - best.fun) / duration:.4f}, first order {slope:.4f}"
    )
ratios = (np.array(penalties) - best.fun) / durations
# Durations halve, so twice the last ratio less the one before has no second order.
limit = 2 * ratios[-1] - ratios[-2]
print(f"extrapolated to no duration {limit:.4f}")
# What is left are the square of the duration, 3e-3, and the error of the step.
assert abs(limit / slope - 1) < 2e-2
assert np.all(np.diff(np.abs(ratios - slope)) < 0)

grid = grid.numpy()
fig, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
axes[0].plot([*grid, time, 1], [*(before @ DIAGONAL), 0, 0], "k", label="events")
for stiffness, values in zip(STIFFNESS, forces, strict=True):
    axes[0].plot(knots, values, lw=1.2, label=f"penalty, k = {stiffness:.0f}")
axes[0].set(xlabel="time", ylabel="force along the diagonal", title="the best force")
axes[0].legend(fontsize="small")
line = np.linspace(0, 1.1 * durations[0], 2)
axes[1].plot(line, slope * line, "k--", lw=1, label="first order, by hand")
axes[1].plot(durations, np.array(penalties) - best.fun, "o", label="penalty")
axes[1].set(
    xlabel="duration of the contact",
    ylabel=f"cost above {best.fun:.4f}",
    title="cost of the penalty",
)
axes[1].legend()
plt.show()

# %%
# The step must resolve the contact. The next run has a constant force of 5 along the
# diagonal and a stiffness of 400. The error of the cost falls as the square of the
# step, relative to the angular frequency :math:`\omega = \sqrt{2k/m}` of the contact,
# with a scatter that comes from where in a step the contact begins.

constant, ends = torch.full((2, 2), 5 / math.sqrt(2)), {}
coarse, coarse_contact, _ = make_penalty(constant, torch.tensor([0.0, 1.0]))
with torch.no_grad():
    coarse_contact.stiffness.fill_(400.0)
    for steps in (50, 100, 200, 400, 3200):
        ends[steps] = (end_of_second(coarse, steps, compile=True) ** 2).sum().item()
for steps in list(ends)[:-1]:
    error = ends[steps] - ends[3200]
    print(
        f"{steps} steps, omega h = {math.sqrt(800) / steps:.3f}: error of |x2|^2 "
        f"{error:+.2e}, by (omega h)^2 {error * steps**2 / 800:+.3f}"
    )
    assert abs(error) < 0.05 * 800 / steps**2

# %%
# Time stepping
# -------------
#
# Many simulators of rigid bodies take the contact into account at the end of the step
# in which it happens, and exchange the velocities there. The time of the exchange is
# then that of a step, and has no derivative. A later contact shortens the way of the
# second ball, but the gradient does not know.
#
# A constant force s along the diagonal shows this. By hand the contact is at
# :math:`t_c = \sqrt{2D/s}`, and the second ball goes :math:`\sqrt{2Ds} - 2D` far, with
# the derivative :math:`t_c/2`. Automatic differentiation of the time stepping returns
# :math:`t_c (1 - t_c)` at any step.


def way_by_steps(s, steps):
    """Return how far the second ball goes along the diagonal, by forces at steps."""
    h = 1 / steps
    gap, v = torch.tensor(D), torch.zeros(2)
    way = torch.zeros(())
    for push in s.expand(steps):
        v = v + h * torch.stack([push, torch.zeros(())])
        gap, way = gap + h * (v[1] - v[0]), way + h * v[1]
        if gap <= 0 and v[0] > v[1]:
            v = v.flip(0)
    return way


def derivative_by_steps(s, steps):
    variable = torch.tensor(s, requires_grad=True)
    way = way_by_steps(variable, steps)
    (slope,) = torch.autograd.grad(way, variable)
    return way.item(), slope.item()


S = 5.0
middle = math.sqrt(2 * D / S)
print(f"by hand: way {middle * S - 2 * D:.5f}, derivative {middle / 2:.5f}")
for steps in (50, 200, 800):
    way, found_slope = derivative_by_steps(S, steps)
    print(f"{steps:3} steps: way {way:.5f}, derivative {found_slope:.5f}")
# The time of contact is known to a step.
assert abs(way - (middle * S - 2 * D)) < 3 * S / 800
assert abs(found_slope - middle * (1 - middle)) < 3 / 800
assert found_slope < 0.8 * middle / 2

# %%
# The way converges with the step, and its derivative converges to another number, 0.23
# in place of 0.32. The way as a function of the force is a saw: its teeth have the
# slope that the derivative reports, and its jumps make up the rest.
#
# Descent along this gradient starts from the best force, held until the contact. It
# believes that a later contact does no harm, so it pushes less and less, and the cost
# rises. In the end the first ball does not reach the second one.

FEW = 40
begins = torch.linspace(0, 1, FEW + 1)[:-1]
pushes = torch.where(begins < time, force[0] + force[1] * begins, 0.0)
descent = []
for _ in range(60):
    variable = pushes.clone().requires_grad_()
    value = (AWAY - way_by_steps(variable, FEW)) ** 2
    value = value + EFFORT * (variable**2).sum() / FEW
    (gradient,) = torch.autograd.grad(value, variable)
    pushes -= 0.3 * FEW * gradient
    descent.append(value.item())
print(f"descent by time stepping: cost {descent[0]:.4f} to {descent[-1]:.4f}")
assert max(descent) > 1.9
assert descent[-1] > best.fun + 0.3

scan = np.linspace(3.5, 6.5, 121)
saw = [derivative_by_steps(s, 40) for s in scan]
fig, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
axes[0].plot(scan, np.sqrt(2 * D * scan) - 2 * D, "k", label="by hand, and events")
axes[0].plot(scan, [way for way, _ in saw], ".", ms=3, label="time stepping, 40 steps")
axes[0].set(xlabel="force", ylabel="way of the second ball", title="the way")
axes[1].plot(scan, np.sqrt(D / (2 * scan)), "k", label="by hand, and events")
axes[1].plot(scan, [found for _, found in saw], ".", ms=3, label="time stepping")
axes[1].set(xlabel="force", ylabel="derivative by the force", title="its derivative")
axes[1].set(ylim=(0, 0.42))
axes[2].plot(descent, label="time stepping")
axes[2].axhline(best.fun, color="k", lw=1, label="the least cost")
axes[2].set(xlabel="update", ylabel="cost", title="descent from the best force")
for ax in axes:
    ax.legend(fontsize="small")
plt.show()

# %%
# The best throw
# --------------

frames = torch.linspace(0, 1, 41)
with torch.no_grad():
    path = by_events(found, frames).y.T.numpy()
fig, ax = plt.subplots(figsize=(4.2, 4.2), layout="constrained")
ax.set(xlim=(-2.4, 0.4), ylim=(-2.4, 0.4), aspect="equal")
ax.plot(0, 0, "k+", ms=12, label="target")
ax.legend(loc="upper left")
balls = [ax.add_patch(plt.Circle((0, 0), RADIUS, color=f"C{i}")) for i in range(2)]
(arrow,) = ax.plot([], [], "C3", lw=3)


def draw(frame):
    """Draw both balls, and the force as a line from the first one."""
    state, t = path[frame], frames[frame]
    u = polynomial(found[int(state[9] > 0.5)], t).numpy()
    for ball, centre in zip(balls, (state[:2], state[2:4]), strict=True):
        ball.set_center(centre)
    arrow.set_data(*np.stack([state[:2], state[:2] + 0.1 * u]).T)
    ax.set_title(f"t = {float(t):.2f}")
    return balls


# The frames keep the layout of the first one.
fig.draw_without_rendering()
fig.set_layout_engine("none")
movie = FuncAnimation(fig, draw, len(frames), interval=80)
plt.show()
