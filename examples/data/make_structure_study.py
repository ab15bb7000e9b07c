"""Make structure_study.json: the runs behind the page plot_network_from_structure.py.

Run: python examples/data/make_structure_study.py. It takes about five minutes on one
core.

The known fluid is Lennard-Jones in reduced units. One network is trained on its g(r)
through simulation, and one on its forces. Each is simulated in three
states: that of the training, a hotter one and a denser one.
"""

import json
import time
from importlib.metadata import version
from pathlib import Path

import torch
from studies import commit

import adjsim
from adjsim.core.durable.files import replacing
from adjsim.potentials import ForceShifted, PairNetwork, Switched

HERE = Path(__file__).resolve().parent
FILE = HERE / "structure_study.json"
ATOMS, CUTOFF, HIDDEN, BASIS = 64, 2.0, 8, 8
# Density, kT and time step. The first is that of the training.
STATES = {
    "training": (0.7, 1.2, 0.01),
    "hot": (0.7, 5.0, 0.005),
    "dense": (0.85, 1.2, 0.01),
}
R, WIDTH = torch.arange(0.7, 2.01, 0.03, dtype=torch.float64), 0.03
REPLICAS, ROUNDS, NOISE = 16, 13, 0.01
LENGTHS = [0.05, 0.1, 0.2, 0.4]


def box(state):
    return torch.full((3,), (ATOMS / STATES[state][0]) ** (1 / 3))


def known(state):
    return adjsim.LennardJones(
        1.0, 1.0, cutoff=CUTOFF, truncation=Switched(1.6), box=box(state)
    )


def network(state, seed=0, weights=None):
    """Return the prior plus a network, from a seed or with given weights."""
    torch.manual_seed(seed)
    prior = adjsim.SoftSphere(
        1.0, 0.9, 12.0, cutoff=CUTOFF, truncation=ForceShifted(), box=box(state)
    )
    potential = prior + PairNetwork(HIDDEN, CUTOFF, box(state), basis=BASIS)
    if weights is not None:
        put(potential, weights)
    return potential


def weights(potential):
    return torch.nn.utils.parameters_to_vector(potential.parameters()).detach()


def put(potential, values):
    values = torch.as_tensor(values, dtype=torch.float64)
    torch.nn.utils.vector_to_parameters(values, potential.parameters())


def bath(potential, state):
    return adjsim.Langevin(potential, 1.0, STATES[state][1], friction=1.0)


def structure(position, state):
    return adjsim.smooth_radial_distribution(position, R, box(state), width=WIDTH)


def run(potential, state, start, times, seed):
    with torch.no_grad():
        dynamics = bath(potential, state)
        return adjsim.simulate(
            dynamics,
            dynamics.init(start, generator=seed),
            times,
            solver=adjsim.BAOAB(STATES[state][2]),
            generator=seed,
            compile=not any(True for _ in potential.parameters()),
        )


def frames(potential, state, start, settle, duration, every, seed):
    """Return a run's frames after it has settled, (frames, replicas, ...)."""
    times = settle + every * torch.arange(round(duration / every) + 1)
    made = run(potential, state, start, torch.cat([torch.zeros(1), times]), seed)
    return made.position[2:], made.momentum[2:]


def measure(potential, state, start, settle, duration, every, seed):
    """Return the positions and an entry of the file: means and their errors."""
    position, momentum = frames(potential, state, start, settle, duration, every, seed)
    dynamics = bath(potential, state)
    series = {"pressure": [], "energy": [], "g": []}
    with torch.no_grad():
        for q, p in zip(position, momentum, strict=True):
            series["pressure"].append(adjsim.pressure(dynamics, dynamics.init(q, p)))
            series["energy"].append(potential(q) / ATOMS)
            series["g"].append(structure(q, state))
    entry = {"replicas": len(start), "duration": duration}
    for name, x in series.items():
        each = torch.stack(x).mean(
            0
        )  # of each replica, since its frames are correlated
        entry[name] = each.mean(0)
        entry[name + " error"] = each.std(0) / len(each) ** 0.5
    entry["closest"] = distances(position, state).min()
    return position, entry


def distances(position, state):
    """Return the distances of all pairs."""
    i, j = torch.triu_indices(ATOMS, ATOMS, 1)
    d, edges = position[..., i, :] - position[..., j, :], box(state)
    return (d - edges * torch.round(d / edges)).norm(dim=-1)


def reference(state, seed):
    """Run the known fluid. Return the file's entry and frames as starts and data."""
    side = (torch.arange(4) + 0.5) / 4
    lattice = torch.cartesian_prod(side, side, side) * box(state)
    start = lattice.repeat(32, 1, 1)
    position, entry = measure(known(state), state, start, 20.0, 60.0, 1.0, seed)
    kept = position[9::10].flatten(0, 1)
    print(state, entry["pressure"], entry["closest"], flush=True)
    return {"seed": seed, **entry}, kept


def train_on_forces(position, seed, many=16):
    """Fit the forces on all atoms of a few frames by least squares."""
    data, potential = position[:many], network("training", seed)
    wanted = known("training").force(data)
    optimiser = torch.optim.LBFGS(
        potential.parameters(),
        max_iter=200,
        history_size=50,
        line_search_fn="strong_wolfe",
    )

    def loss():
        optimiser.zero_grad()
        value = (potential.force(data) - wanted).square().mean()
        value.backward()
        return value

    optimiser.step(loss)
    return {
        "seed": seed,
        "frames": many,
        "closest": distances(data, "training").min(),
        "rms": loss().detach().sqrt(),
        "weights": weights(potential),
    }


def start_from_mean_force(potential, wanted):
    """Fit the potential of mean force, -kT ln g(r), where g is not small."""
    kT = STATES["training"][1]
    use = wanted > 0.05
    s, mean_force = R[use] ** 2, -kT * wanted[use].log()
    optimiser = torch.optim.LBFGS(
        potential.parameters(), max_iter=200, line_search_fn="strong_wolfe"
    )

    def loss():
        optimiser.zero_grad()
        u = sum(part.truncated_energy(s) for part in potential.parts)
        # Few pairs are at short distances, where the energy is large.
        value = (wanted[use].clamp(max=1) * (u - mean_force).square()).mean()
        value.backward()
        return value

    optimiser.step(loss)


def simulation(potential, position, duration):
    """Return runs from frames drawn at random."""
    dynamics = bath(potential, "training")

    def initial(count, generator):
        chosen = torch.randperm(len(position), generator=generator)[:count]
        return dynamics.init(position[chosen], generator=generator)

    solver = adjsim.BAOAB(STATES["training"][2])
    return adjsim.Simulation(dynamics, initial, [0.0, duration], solver=solver)


def slopes(potential, position):
    """Return dU/dweights of each frame, divided by kT, (frames, weights)."""
    rows = [
        torch.autograd.grad(potential(q), list(potential.parameters()))
        for q in position
    ]
    flat = [torch.cat([x.flatten() for x in row]) for row in rows]
    return torch.stack(flat) / STATES["training"][1]


def train_on_structure(wanted, position, seed):
    """Minimise the squared difference of g(r) by damped Gauss-Newton steps.

    The derivative of a mean is minus the covariance with dU/kT. Reweighting computes
    the same; here one sweep for each frame serves all distances. A step minimises

        |difference - J step|^2 + NOISE^2 (var(dU/kT) + |step|^2)

    so it leaves alone what changes g(r) less than the noise does. Long steps are
    shortened, since the derivative is that at the frames. Late steps average.
    """
    potential = network("training", seed)
    start_from_mean_force(potential, wanted)
    begin, history, at = weights(potential), [], position[:REPLICAS]
    for i in range(ROUNDS):
        q, _ = frames(potential, "training", at, 0.4, 1.6, 0.1, seed + i)
        at, q = q[-1], q.flatten(0, 1)
        g, u = structure(q, "training"), slopes(potential, q)
        u = (u - u.mean(0)) / len(q) ** 0.5
        jacobian = -(g - g.mean(0)).T @ u / len(q) ** 0.5
        difference = wanted - g.mean(0)
        metric = u.T @ u + torch.eye(u.shape[1])
        left = jacobian.T @ jacobian + NOISE**2 * metric
        step = torch.linalg.solve(left, jacobian.T @ difference)
        change, length = float((u @ step).norm()), float(step.norm())
        shorter = min(1.0, 2 / change, 1.5 / length)
        step = step * shorter / max(1, i - ROUNDS // 2)
        rms = float(difference.square().mean().sqrt())
        history.append([rms, change, length])
        put(potential, weights(potential) + step)
        print(i, history[-1], flush=True)
    return {
        "seed": seed,
        "begin": begin,
        "history": history,
        "frames": len(q),
        "weights": weights(potential),
    }


def gradients(begin, wanted, position, seed, groups=4, each=2):
    """Compare the gradient of the loss at equilibrium and along short runs.

    Both are for the network that starts from the potential of mean force. The loss is
    linear in g(r) with the difference of the first round held fixed.
    """
    potential = network("training", weights=begin)
    settled, _ = frames(potential, "training", position[:32], 1.0, 1.0, 0.5, seed)
    settled = settled.flatten(0, 1)
    with torch.no_grad():
        residual = structure(settled, "training").mean(0) - wanted

    def loss(state):
        return 2 * (structure(state.position, "training") * residual).mean(-1)

    def flat(estimate):
        return torch.cat([x.flatten() for x in estimate.grad.values()])

    average = adjsim.TimeAverage(loss)
    equilibrium = flat(
        adjsim.Reweighting(every=0.1, burn_in=0.4)(
            simulation(potential, settled, 2.0), average, replicas=16, generator=seed
        )
    )
    rows = []
    pathwise = adjsim.Pathwise(adjsim.ReversibleAdjoint())
    for duration in LENGTHS:
        found = torch.stack(
            [
                flat(
                    pathwise(
                        simulation(potential, settled, duration),
                        adjsim.Final(loss),
                        replicas=each,
                        chunks=2,
                        generator=seed + 10 + k,
                    )
                )
                for k in range(groups)
            ]
        )
        shares = found @ equilibrium / equilibrium.square().sum()
        row = {"duration": duration, "shares": shares}
        rows.append(row)
        print(duration, shares.tolist(), flush=True)
    return {"seed": seed, "equilibrium": equilibrium.norm(), "rows": rows}


def short(x, digits=8):
    """Return tensors as lists, and floats with few digits."""
    if isinstance(x, torch.Tensor):
        x = x.tolist()
    if isinstance(x, list | tuple):
        return [short(y, digits) for y in x]
    if isinstance(x, dict):
        return {key: short(y, digits) for key, y in x.items()}
    return float(f"{x:.{digits}g}") if isinstance(x, float) else x


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # a small system
    begun, head = time.process_time(), commit(__file__)
    study = {
        "made_by": "examples/data/make_structure_study.py",
        "commit": head,
        "versions": {"torch": version("torch")},
        "states": STATES,
        "settings": [ATOMS, CUTOFF, HIDDEN, BASIS],
        "r": R,
        "width": WIDTH,
    }

    def keep(name, entry):
        study[name] = entry
        print(name, time.process_time() - begun, flush=True)
        study["seconds"] = time.process_time() - begun
        with replacing(FILE) as temporary:
            text = json.dumps(short(study), separators=(",", ":"))
            temporary.write_text(text + "\n")

    starts = {}
    for i, state in enumerate(STATES):
        entry, starts[state] = reference(state, 100 + i)
        keep(f"known, {state}", entry)
    wanted, data = study["known, training"]["g"], starts["training"]
    keep("forces", train_on_forces(data, 0))
    keep("structure", train_on_structure(wanted, data, 0))
    for i, (state, (_, _, dt)) in enumerate(STATES.items()):
        for name in ("forces", "structure"):
            potential = network(state, weights=study[name]["weights"])
            lengths = [100 * dt, 300 * dt, 10 * dt]
            begin = starts[state][-REPLICAS:]
            _, entry = measure(potential, state, begin, *lengths, 200 + i)
            print(name, state, entry["pressure"], entry["closest"], flush=True)
            keep(f"{name}, {state}", {"seed": 200 + i, **entry})
    keep("gradients", gradients(study["structure"]["begin"], wanted, data, 300))


if __name__ == "__main__":
    main()
