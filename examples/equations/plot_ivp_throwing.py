r"""
solve_ivp: throwing with drag, as far as possible
=================================================

A ball is thrown from the ground at 10 m/s. Air brakes it in proportion to its velocity,
:math:`\dot v = -k v - g` with k = 0.5/s and g = 9.81 m/s². Without air the best angle
would be 45 degrees. With air the best angle is lower, since drag shortens the range
more in a longer flight.

The ball lands when its height is zero again. Landing is an event whose time depends on
the angle, and the gradient of the range goes through this time.
"""

# sphinx_gallery_thumbnail_number = 1

import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.optimize import brentq, minimize

import adjsim

torch.set_default_dtype(torch.float64)

SPEED, DRAG, GRAVITY = 10.0, 0.5, 9.81


def flight(t, state):
    """Compute the rates of x, height, and their velocities."""
    return torch.stack(
        [state[2], state[3], -DRAG * state[2], -DRAG * state[3] - GRAVITY]
    )


def ground(t, state):
    return state[1]


ground.terminal, ground.direction = True, -1


def throw(angle, **options):
    velocity = SPEED * torch.stack([torch.cos(angle), torch.sin(angle)])
    start = torch.cat([torch.zeros(2), velocity])
    return adjsim.solve_ivp(
        flight,
        (0, 10),
        start,
        "DOP853",
        events=ground,
        rtol=1e-10,
        atol=1e-12,
        **options,
    )


# %%
# The best angle
# --------------
#
# The last state of the solution is the state at the landing. Its gradient with respect
# to the angle has two parts: the path changes, and so does the time at which the path
# ends.

history = []


def loss_and_gradient(x):
    angle = torch.tensor(x[0], requires_grad=True)
    reach = throw(angle).y[0, -1]
    history.append((math.degrees(x[0]), float(reach.detach())))
    (gradient,) = torch.autograd.grad(-reach, angle)
    return -float(reach.detach()), np.array([float(gradient)])


found = minimize(
    loss_and_gradient,
    [math.radians(60)],
    jac=True,
    method="BFGS",
    options={"gtol": 1e-9},
)
best, reach = math.degrees(found.x[0]), -found.fun
print(
    f"best angle {best:.5f} degrees, range {reach:.8f} m, after {len(history)} throws"
)

fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for degrees in (20, 30, best, 50, 60, 70):
    with torch.no_grad():
        path = throw(torch.tensor(math.radians(degrees)), dense_output=True)
        x, height = path.sol(torch.linspace(0, float(path.t[-1]), 100))[:2]
    chosen = degrees == best
    axes[0].plot(
        x,
        height,
        color="C3" if chosen else "0.7",
        lw=2 if chosen else 1,
        label=f"{degrees:.1f}°" if chosen else None,
    )
axes[0].set(xlabel="x (m)", ylabel="height (m)", title="20 to 70 degrees")
axes[0].legend()
axes[1].plot(*zip(*history, strict=True), "o-")
axes[1].annotate("start", history[0], textcoords="offset points", xytext=(-28, 4))
axes[1].set(
    xlabel="angle (degrees)", ylabel="range (m)", title="the steps of the optimiser"
)
plt.show()

# %%
# The same by hand
# ----------------
#
# Linear drag has a closed solution. The time of landing is the root of one equation,
# and the range follows from it. The best angle is the zero of a difference quotient of
# the range.


def reach_by_hand(angle):
    vx, vy = SPEED * math.cos(angle), SPEED * math.sin(angle)

    def height(t):
        return (vy + GRAVITY / DRAG) / DRAG * -math.expm1(
            -DRAG * t
        ) - GRAVITY * t / DRAG

    landing = brentq(height, 0.1, 10, xtol=1e-15)
    return vx / DRAG * -math.expm1(-DRAG * landing)


h = 1e-4
by_hand = brentq(
    lambda a: reach_by_hand(a + h) - reach_by_hand(a - h), 0.5, 0.9, xtol=1e-12
)
print(
    f"by hand    {math.degrees(by_hand):.5f} degrees, range "
    f"{reach_by_hand(by_hand):.8f} m"
)
assert abs(best - math.degrees(by_hand)) < 1e-4
assert abs(reach - reach_by_hand(by_hand)) < 1e-8
