"""A soft body of 2,058 tetrahedra against JAX and Warp: microseconds a step, in one run.

Velocity Verlet of a neo-Hookean cube with 7 cells along each edge (512 vertices), one thread,
float64 and float32. All sides take the same steps of the same energy from the same start. A
gradient is a whole run, forward and backward, with respect to Young's modulus, Poisson's ratio and
the start; before any timing, the sides are checked to have the same derivative by the modulus. JAX
is a jitted scan whose force is the gradient of the energy, checkpointed in about the root of the
steps. Warp has a kernel with the analytic stress and atomic sums, and its tape for the gradient.
Rounds alternate between the sides; the smallest time of each side counts. Last, the growth of the
resident set over 10,000 steps, forward and backward.

Needs ``pip install -c constraints.txt -e ".[bench]"``.
Run: python benchmarks/mechanics.py [float64 float32 memory]
"""

import os

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import torch
import warp as wp
from rounds import Side, measure
from torch import Tensor, nn

import adjsim
from adjsim import meshes
from adjsim.potentials import NeoHookean

jax.config.update("jax_enable_x64", True)
wp.config.quiet = True

MODULUS, RATIO, DENSITY, DT = 1e5, 0.3, 1000.0, 1e-4
STEPS, WARP_STEPS, ROUNDS = 2000, 100, 5
MESH = meshes.box([1.0, 1.0, 1.0], [7, 7, 7])
MASS = MESH.lumped_mass(DENSITY)
# Allowed difference between the sides' derivatives by the modulus, relative.
AGREE = {"float64": 1e-9, "float32": 1e-2}
TARGET_STEP, TARGET_GRADIENT, TARGET_PEER = 500.0, 3.0, 0.5


def start(kind: str) -> tuple[Tensor, Tensor]:
    """A cube that is stretched and sheared, at rest."""
    generator = torch.Generator().manual_seed(0)
    shape = torch.tensor([[1.2, 0.1, 0.0], [0.0, 0.9, 0.1], [0.0, 0.0, 1.0]], dtype=torch.float64)
    noise = 0.01 * torch.randn(MESH.vertices.shape, generator=generator, dtype=torch.float64)
    position = (MESH.vertices @ shape.T + noise).to(getattr(torch, kind))
    return position, torch.zeros_like(position)


def parameter(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


def simulate(made: adjsim.Hamiltonian, state: Any, steps: int) -> Any:
    return adjsim.simulate(
        made,
        state,
        [0.0, steps * DT],
        solver=adjsim.VelocityVerlet(DT),
        # The motion is chaotic after long times; what is measured is the time.
        adjoint=adjsim.ReversibleAdjoint(tol=1e300),
        compile=True,
    )


def in_adjsim(
    kind: str, steps: int = STEPS, gradient: bool = True
) -> tuple[Side, dict[str, float]]:
    body = NeoHookean(MESH, parameter(MODULUS), parameter(RATIO))
    made, found = adjsim.Hamiltonian(body, MASS), {"compiling": 0.0}
    inputs = [x.requires_grad_() for x in start(kind)]

    def run() -> dict[str, float]:
        begun = time.perf_counter()
        with torch.set_grad_enabled(gradient):
            trajectory = simulate(made, made.init(*inputs), steps)
        middle = time.perf_counter()
        assert trajectory.stats["compiled_forward"] == "C++"
        if not gradient:
            return {"forward": (middle - begun) / steps}
        loss = trajectory.final.position.square().sum()
        wanted = [body.youngs_modulus, body.poissons_ratio, *inputs]
        found["slope"] = float(torch.autograd.grad(loss, wanted)[0])
        end = time.perf_counter()
        assert trajectory.stats["compiled_backward"] == "C++"
        found["compiling"] += trajectory.stats["compile_seconds"]
        return {"forward": (middle - begun) / steps, "gradient": (end - begun) / steps}

    return run, found


def in_jax(kind: str) -> tuple[Side, dict[str, float]]:
    real = getattr(jnp, kind)
    index = jnp.asarray(MESH.elements.numpy())
    corners = MESH.vertices[MESH.elements]
    sides = (corners[:, 1:] - corners[:, :1]).transpose(-1, -2)
    inverse = jnp.asarray(torch.linalg.inv(sides).numpy(), real)
    volume = jnp.asarray(MESH.volumes().numpy(), real)
    mass = jnp.asarray(MASS.numpy()[:, None], real)
    length = int(STEPS**0.5)
    while STEPS % length:
        length -= 1

    def energy(x: Any, modulus: Any, ratio: Any) -> Any:
        mu = modulus / (2 * (1 + ratio))
        lam = 2 * mu * ratio / (1 - 2 * ratio)
        y = x[index]
        f = jnp.einsum("eka,ekb->eab", y[:, 1:] - y[:, :1], inverse)
        j = (jnp.cross(f[:, 0], f[:, 1]) * f[:, 2]).sum(-1)
        psi = mu / 2 * ((f * f).sum((1, 2)) - 3) - mu * (j - 1) + (lam + mu) / 2 * (j - 1) ** 2
        return (volume * psi).sum()

    def final(modulus: Any, ratio: Any, x: Any, p: Any) -> Any:
        pull = jax.grad(energy)

        def step(carry: Any, _: Any) -> Any:
            x, p, slope = carry
            p = p - DT / 2 * slope
            x = x + DT * p / mass
            slope = pull(x, modulus, ratio)
            return (x, p - DT / 2 * slope, slope), None

        segment = jax.checkpoint(lambda c, _: jax.lax.scan(step, c, None, length=length))
        carry = (x, p, pull(x, modulus, ratio))
        carry, _ = jax.lax.scan(segment, carry, None, length=STEPS // length)
        return (carry[0] ** 2).sum()

    alone, both = jax.jit(final), jax.jit(jax.grad(final, argnums=(0, 1, 2, 3)))
    given = (
        jnp.asarray(MODULUS, real),
        jnp.asarray(RATIO, real),
        *(jnp.asarray(x.numpy()) for x in start(kind)),
    )
    found: dict[str, float] = {}

    def run() -> dict[str, float]:
        begun = time.perf_counter()
        jax.block_until_ready(alone(*given))
        middle = time.perf_counter()
        found["slope"] = float(jax.block_until_ready(both(*given))[0])
        end = time.perf_counter()
        return {"forward": (middle - begun) / STEPS, "gradient": (end - middle) / STEPS}

    return run, found


def kernels(kind: str) -> tuple[Any, Any, Any]:
    """The kernels of a step in Warp: the force, the update of both fields, and the loss."""
    real: Any = getattr(wp, kind)
    vec: Any = wp.types.vector(3, real)
    mat: Any = wp.types.matrix((3, 3), real)

    @wp.kernel(module="unique")
    def forces(
        x: wp.array(dtype=vec),
        index: wp.array(dtype=wp.vec4i),
        inverse: wp.array(dtype=mat),
        volume: wp.array(dtype=real),
        numbers: wp.array(dtype=real),
        force: wp.array(dtype=vec),
    ):
        e = wp.tid()
        i = index[e]
        one = real(1.0)
        mu = numbers[0] / (real(2.0) * (one + numbers[1]))
        lam = real(2.0) * mu * numbers[1] / (one - real(2.0) * numbers[1])
        x0 = x[i[0]]
        a = x[i[1]] - x0
        b = x[i[2]] - x0
        c = x[i[3]] - x0
        d = mat(a[0], b[0], c[0], a[1], b[1], c[1], a[2], b[2], c[2])
        f = d * inverse[e]
        r0 = vec(f[0, 0], f[0, 1], f[0, 2])
        r1 = vec(f[1, 0], f[1, 1], f[1, 2])
        r2 = vec(f[2, 0], f[2, 1], f[2, 2])
        c0 = wp.cross(r1, r2)
        c1 = wp.cross(r2, r0)
        c2 = wp.cross(r0, r1)
        t = (lam + mu) * (wp.dot(r0, c0) - one) - mu
        s0 = mu * r0 + t * c0
        s1 = mu * r1 + t * c1
        s2 = mu * r2 + t * c2
        p = mat(s0[0], s0[1], s0[2], s1[0], s1[1], s1[2], s2[0], s2[1], s2[2])
        h = -volume[e] * (p * wp.transpose(inverse[e]))
        f1 = vec(h[0, 0], h[1, 0], h[2, 0])
        f2 = vec(h[0, 1], h[1, 1], h[2, 1])
        f3 = vec(h[0, 2], h[1, 2], h[2, 2])
        wp.atomic_add(force, i[1], f1)
        wp.atomic_add(force, i[2], f2)
        wp.atomic_add(force, i[3], f3)
        wp.atomic_add(force, i[0], -(f1 + f2 + f3))

    @wp.kernel(module="unique")
    def update(
        x: wp.array(dtype=vec),
        p: wp.array(dtype=vec),
        force: wp.array(dtype=vec),
        mass: wp.array(dtype=real),
        kick: real,
        dt: real,
        x_new: wp.array(dtype=vec),
        p_new: wp.array(dtype=vec),
    ):
        i = wp.tid()
        p_new[i] = p[i] + kick * force[i]
        x_new[i] = x[i] + dt / mass[i] * p_new[i]

    @wp.kernel(module="unique")
    def square(x: wp.array(dtype=vec), total: wp.array(dtype=real)):
        i = wp.tid()
        wp.atomic_add(total, 0, wp.dot(x[i], x[i]))

    return forces, update, square


def in_warp(kind: str) -> tuple[Side, dict[str, float]]:
    forces, update, square = kernels(kind)
    real: Any = getattr(wp, kind)
    vec: Any = wp.types.vector(3, real)
    mat: Any = wp.types.matrix((3, 3), real)
    vertices, elements, steps = len(MESH.vertices), len(MESH.elements), WARP_STEPS

    def array(x: Tensor, dtype: Any, wanted: bool = False) -> Any:
        values = x.detach().numpy()
        return wp.array(values, dtype=dtype, device="cpu", requires_grad=wanted)

    corners = MESH.vertices[MESH.elements]
    sides = (corners[:, 1:] - corners[:, :1]).transpose(-1, -2)
    index = array(MESH.elements.int(), wp.vec4i)
    inverse, volume = array(torch.linalg.inv(sides), mat), array(MESH.volumes(), real)
    mass = array(MASS, real)
    position, momentum = start(kind)
    numbers = array(torch.tensor([MODULUS, RATIO], dtype=torch.float64), real, True)

    def fields(count: int) -> list[Any]:
        make = lambda: wp.zeros(vertices, dtype=vec, device="cpu", requires_grad=True)  # noqa: E731
        return [make() for _ in range(count)]

    # A tape needs the arrays of all steps.
    xs, ps, fs = (fields(steps + 1) for _ in range(3))
    xs[0], ps[0] = array(position, vec, True), array(momentum, vec, True)
    end = fields(2)
    total = wp.zeros(1, dtype=real, device="cpu", requires_grad=True)

    def force(k: int) -> None:
        fs[k].zero_()
        given = [xs[k], index, inverse, volume, numbers]
        wp.launch(forces, elements, inputs=given, outputs=[fs[k]], device="cpu")

    def forward() -> None:
        # Momenta are those in the middle of steps: two kicks in a row are one.
        for k in range(steps):
            force(k)
            kick = DT / 2 if k == 0 else DT
            given = [xs[k], ps[k], fs[k], mass, kick, DT]
            wp.launch(update, vertices, inputs=given, outputs=[xs[k + 1], ps[k + 1]], device="cpu")
        force(steps)
        given = [xs[steps], ps[steps], fs[steps], mass, DT / 2, 0.0]
        wp.launch(update, vertices, inputs=given, outputs=end, device="cpu")
        total.zero_()
        wp.launch(square, vertices, inputs=[xs[steps]], outputs=[total], device="cpu")

    found: dict[str, float] = {}

    def run() -> dict[str, float]:
        begun = time.perf_counter()
        forward()
        middle = time.perf_counter()
        tape = wp.Tape()
        with tape:
            forward()
        tape.backward(total)
        found["slope"] = float(numbers.grad.numpy()[0])
        last = time.perf_counter()
        tape.zero()
        return {"forward": (middle - begun) / steps, "gradient": (last - middle) / steps}

    return run, found


def check(kind: str) -> None:
    """Compare the derivatives by the modulus of runs of equal length."""
    ours, mine = in_adjsim(kind)
    short, few = in_adjsim(kind, WARP_STEPS)
    for name, make, run, expected in (
        ("JAX", in_jax, ours, mine),
        ("Warp", in_warp, short, few),
    ):
        run()
        peer, found = make(kind)
        peer()
        error = abs(found["slope"] / expected["slope"] - 1)
        print(f"{kind}: derivative by the modulus, {name} over adjsim - 1: {error:.1e}")
        assert error < AGREE[kind], (found, expected)


def compare(kind: str) -> None:
    check(kind)
    ours, found = in_adjsim(kind)
    sides = {"adjsim": ours, "JAX": in_jax(kind)[0], "Warp": in_warp(kind)[0]}
    best = measure(sides, ROUNDS)
    mine = best["adjsim"]
    peer = {what: min(best[x][what] for x in ("JAX", "Warp")) for what in mine}
    print(f"\n{kind}, {len(MESH.elements)} tetrahedra; compiling took {found['compiling']:.1f} s")
    print("| side | forward, us a step | gradient | over its forward |\n|---|---|---|---|")
    for name, times in best.items():
        forward, whole = 1e6 * times["forward"], 1e6 * times["gradient"]
        print(f"| {name:7} | {forward:8.1f} | {whole:8.1f} | {whole / forward:.2f} |")
    step, ratio = 1e6 * mine["forward"], mine["gradient"] / mine["forward"]
    print(
        f"forward {step:.0f} us (target {TARGET_STEP:.0f}), gradient {ratio:.2f} times it (target "
        f"{TARGET_GRADIENT}), over the faster peer {mine['forward'] / peer['forward']:.3f} forward "
        f"and {mine['gradient'] / peer['gradient']:.3f} with the gradient (target {TARGET_PEER})",
        flush=True,
    )


def memory() -> None:
    """Measure the growth of the resident set over 10,000 steps, after one of 1,000."""
    for steps in (1_000, 10_000):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begun = time.perf_counter()
        in_adjsim("float64", steps)[0]()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        seconds = time.perf_counter() - begun
        print(f"{steps} steps and their gradient: {seconds:.1f} s, resident set +{grown:.1f} MB")


def main() -> None:
    torch.set_num_threads(1)
    words = sys.argv[1:] or ["memory", "float64", "float32"]
    for word in words:
        if word == "memory":
            memory()
        else:
            compare(word)


if __name__ == "__main__":
    main()
