r"""
solve_ivp: a bouncing ball aimed at a target
============================================

A ball is thrown against the floor and should hit a target after two bounces. Its
velocity jumps at each bounce, and the time :math:`t_b` of each bounce depends on the
throw. A derivative that ignores the change of this time is wrong. A later bounce means
a longer fall, and the reset of the velocity alone does not contain this effect.

Here a bounce is an event with a reset. Reaching the wall, which is the vertical plane
of the target, is an event that ends the flight. The gradient goes through all events.
"""

# sphinx_gallery_thumbnail_number = 1

import math

import matplotlib.pyplot as plt
import torch

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

GRAVITY, BOUNCE, SPEED, HEIGHT = 9.81, 0.85, 4.0, 1.2
WALL, TARGET = 3.0, 0.6


def flight(t, state):
    """Compute the rates of x, height, and their velocities."""
    return torch.stack([state[2], state[3], torch.zeros(()), torch.tensor(-GRAVITY)])


def floor(t, state):
    return state[1]


def bounce(t, state):
    return state * torch.tensor([1.0, 1.0, 1.0, -BOUNCE])


def wall(t, state):
    return state[0] - WALL


floor.reset, floor.direction, wall.terminal = bounce, -1, True


def throw(angle, **options):
    velocity = SPEED * torch.stack([torch.cos(angle), torch.sin(angle)])
    start = torch.cat([torch.tensor([0.0, HEIGHT]), velocity])
    return adjsim.solve_ivp(
        flight, (0, 10), start, events=[floor, wall], rtol=1e-9, atol=1e-12, **options
    )


# %%
# Aiming
# ------
#
# Newton's method finds the angle at which the ball hits the wall at the height of the
# target. It starts from a throw downward that bounces twice and hits the wall too low.

history, angle = [], math.radians(-56)
for _ in range(6):
    variable = torch.tensor(angle, requires_grad=True)
    hit = throw(variable)
    height = hit.y_events[1][0, 1]
    (slope,) = torch.autograd.grad(height, variable)
    history.append((angle, float(height.detach()), len(hit.t_events[0])))
    print(
        f"{math.degrees(angle):.6f} degrees: {history[-1][2]} bounces, at the wall "
        f"{history[-1][1]:.9f} m high"
    )
    angle -= (history[-1][1] - TARGET) / float(slope)
with torch.no_grad():
    last = throw(torch.tensor(angle))

fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
for k, (x, _, _) in enumerate([*history[:3], (angle, 0, 0)]):
    with torch.no_grad():
        path = throw(torch.tensor(x), dense_output=True)
        position = path.sol(torch.linspace(0, float(path.t[-1]), 400))[:2]
    answer = k == len(history[:3])
    shown = (
        {"color": "C3", "lw": 2, "label": "the answer"}
        if answer
        else {"color": f"{0.85 - 0.15 * k:.2f}", "lw": 1}
    )
    ax.plot(*position, **shown)
ax.plot(WALL, TARGET, "kx", ms=9, mew=2, label="target")
ax.axhline(0, color="0.3", lw=1)
ax.axvline(WALL, color="0.3", lw=1)
ax.set(
    xlabel="x (m)", ylabel="height (m)", title="the first three throws, and the last"
)
ax.legend()
plt.show()

# %%
# The same by hand
# ----------------
#
# Between bounces the ball follows a parabola, so the height at the wall and its
# derivative have a closed form.


def by_hand(angle, bounces=2):
    """Compute the height at the wall after a number of bounces, from the parabolas."""
    vx, vy = SPEED * torch.cos(angle), SPEED * torch.sin(angle)
    left, height = WALL / vx, torch.tensor(HEIGHT)
    for _ in range(bounces):
        fall = (vy + torch.sqrt(vy**2 + 2 * GRAVITY * height)) / GRAVITY
        left, height, vy = left - fall, torch.zeros(()), BOUNCE * (GRAVITY * fall - vy)
    return height + vy * left - GRAVITY * left**2 / 2


for x, _, bounces in history:
    mine, known = (
        torch.tensor(x, requires_grad=True),
        torch.tensor(x, requires_grad=True),
    )
    throw(mine).y_events[1][0, 1].backward()
    by_hand(known, bounces).backward()
    assert abs(float(mine.grad - known.grad)) < 1e-7 * max(1.0, abs(float(known.grad)))
print(
    f"derivative of the last throw {float(mine.grad):.9f} m, by hand "
    f"{float(known.grad):.9f} m per radian"
)
print(
    "height of the last throw by hand "
    f"{float(by_hand(torch.tensor(angle)).detach()):.9f} m"
)
assert len(last.t_events[0]) == 2
assert abs(float(by_hand(torch.tensor(angle))) - TARGET) < 1e-9
