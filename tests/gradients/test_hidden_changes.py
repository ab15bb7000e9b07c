"""Values that change between runs, however a potential reads them: a compiled run and a store
compute with the new value or refuse.
"""

from __future__ import annotations

import array
import importlib
import re
import sys
import threading

import jaxtyping
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

import adjsim
from adjsim import CheckpointAdjoint, ReversibleAdjoint, StoreError
from adjsim.adjoints.loops.loop import Loop, LoopCheck
from adjsim.core.cache_key import cache_key
from adjsim.core.durable.manifest import module_fingerprint
from adjsim.core.libraries import is_library
from tests.problems import parameter, square

FACTOR = 1.0


@pytest.fixture(autouse=True)
def _unchecked():
    """The type checks of the tests cannot be traced."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Modules of a user, one of them named as one of the standard library."""
    (tmp_path / "outer").mkdir()
    for name in ("numbers_of_a_user", "wave", "outer/__init__", "outer/inner"):
        (tmp_path / f"{name}.py").write_text("C = 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("numbers_of_a_user", "wave", "outer", "outer.inner")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = {name: importlib.import_module(name) for name in names}
    monkeypatch.setitem(globals(), "outer", found["outer"])
    yield found
    for name in names:
        del sys.modules[name]
    importlib.invalidate_caches()


class Quartic(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = parameter(1.1)

    def forward(self, position):
        return self.factor() * self.k * (position**4).sum((-1, -2))


class Plain(Quartic):
    def factor(self):
        return 1.0


class Imports(Quartic):
    def factor(self):
        import numbers_of_a_user

        return numbers_of_a_user.C


class ImportsFrom(Quartic):
    def factor(self):
        from numbers_of_a_user import C

        return C


class ImportsByName(Quartic):
    def factor(self):
        return importlib.import_module("numbers_of_a_user").C


class ImportsNamesake(Quartic):
    def factor(self):
        import wave

        return wave.C


class GetsAttribute(Quartic):
    def factor(self):
        return getattr(outer, "inner").C  # noqa: B009


class NamesGlobal(Quartic):
    def factor(self):
        return globals()["FACTOR"]


class ComputesName(Quartic):
    """Reads a global whose name no inspection finds."""

    def factor(self):
        return globals()["_".join(["FAC", "TOR"]).replace("_", "")]


def set_number(modules, value):
    globals()["FACTOR"] = value
    for module in modules.values():
        module.C = value


@pytest.mark.parametrize(
    "kind", [Imports, ImportsFrom, ImportsByName, ImportsNamesake, GetsAttribute, NamesGlobal]
)
def test_what_a_function_names_is_part_of_keys_and_fingerprints(kind, modules):
    dynamics = adjsim.Hamiltonian(kind())
    found = []
    for value in (1.0, 1.0, 2.0):
        set_number(modules, value)
        found.append((cache_key(dynamics), module_fingerprint(dynamics)))
    set_number(modules, 1.0)
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]
    assert found[0][1] != found[2][1]


def test_a_module_is_of_a_library_by_its_file(modules):
    assert not is_library("wave")
    assert not is_library("__main__")
    assert all(map(is_library, ("os", "math", "json.decoder", "torch.nn", "numpy", "adjsim")))


def run(dynamics, compile=False, adjoint=CheckpointAdjoint(), **options):  # noqa: B008
    return adjsim.simulate(
        dynamics,
        dynamics.init(*square()),
        [0.0, 0.12],
        solver=adjsim.VelocityVerlet(0.01),
        adjoint=adjoint,
        compile=compile,
        **options,
    )


def end(dynamics, compile):
    made = run(dynamics, compile)
    loss = (made.final.position**2).sum()
    return loss.detach(), *torch.autograd.grad(loss, list(dynamics.parameters()))


def close(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        # Sums of a dozen steps in another order.
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.slow
def test_a_change_that_no_inspection_finds_compiles_again(monkeypatch):
    dynamics = adjsim.Hamiltonian(ComputesName())
    close(end(dynamics, True), end(dynamics, False))
    before = cache_key(dynamics)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2.0)
    assert cache_key(dynamics) == before
    close(end(dynamics, True), end(dynamics, False))
    # The new loops are kept.
    assert run(dynamics, True).stats["compile_seconds"] == 0.0


@pytest.mark.slow
def test_a_change_before_the_backward_pass_is_refused(monkeypatch):
    """The loops of an earlier run would give the gradient of the new value for a run of the old."""
    dynamics = adjsim.Hamiltonian(ComputesName())
    end(dynamics, True)
    made = run(dynamics, True)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2.0)
    with pytest.raises(RuntimeError, match="has changed since"):
        made.final.position.sum().backward()
    close(end(dynamics, True), end(dynamics, False))


def test_a_store_refuses_a_change_that_no_inspection_finds(monkeypatch, tmp_path):
    dynamics = adjsim.Hamiltonian(ComputesName())
    first = run(dynamics, store=tmp_path).final.position
    assert torch.equal(run(dynamics, store=tmp_path).final.position, first)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 1.001)
    with pytest.raises(StoreError, match="the force at the start differs by"):
        run(dynamics, store=tmp_path)


def test_the_store_of_an_estimate_refuses_it_too(monkeypatch, tmp_path):
    dynamics = adjsim.OverdampedLangevin(ComputesName())

    def estimate():
        return adjsim.Pathwise()(
            adjsim.Simulation(
                dynamics,
                lambda n, generator: dynamics.init(torch.ones(n, 1, 1)),
                [0.0, 0.1],
                solver=adjsim.EulerMaruyama(0.05),
            ),
            adjsim.Final(lambda state: state.position[:, 0, 0]),
            replicas=2,
            chunks=2,
            generator=1,
            store=tmp_path,
        ).value

    assert torch.equal(estimate(), estimate())
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 1.001)
    with pytest.raises(StoreError, match="the force at the start differs by"):
        estimate()


class Holds(Quartic):
    """Holds a lock that it never reads, and a number inside an object without attributes."""

    def __init__(self):
        super().__init__()
        self.name = re.match("[a-z]+", "quartic-1").group()
        self.lock, self.number = threading.Lock(), memoryview(array.array("d", [1.0]))

    def factor(self):
        return self.number[0]


def test_an_object_that_cannot_be_inspected_is_checked_in_every_run(tmp_path):
    """The runs are too short for a check in every run that the time of the runs would allow."""
    dynamics = adjsim.Hamiltonian(Holds())
    assert [name.split()[0] for name in cache_key(dynamics).opaque] == [
        "Holds.lock",
        "Holds.number",
    ]
    run(dynamics, store=tmp_path)
    for value in (1.0, 2.0, 1.0):
        dynamics.potential.number[0] = value
        with torch.no_grad():
            close(run(dynamics, True).final, run(dynamics).final)
    dynamics.potential.number[0] = 2.0
    with pytest.raises(StoreError, match="the force at the start differs by"):
        run(dynamics, store=tmp_path)


class BranchesOnTracing(Quartic):
    def factor(self):
        return 2.0 if isinstance(self.k, FakeTensor) else 1.0


@pytest.mark.usefixtures("own_loops")
def test_a_step_that_is_another_one_while_it_is_traced_is_refused():
    dynamics = adjsim.Hamiltonian(BranchesOnTracing())
    wrong = pytest.raises(RuntimeError, match="from the same step without compilation")
    with torch.no_grad(), wrong:
        run(dynamics, True)


class Network(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), *layers, nn.Tanh(), nn.Linear(8, 2))

    def forward(self, *arguments):
        """Of a position, or of a time and a state."""
        return self.layers(arguments[-1])


class NetworkEnergy(Network):
    def forward(self, position):
        return super().forward(position).float().sum((-1, -2))


def in_single(potential, adjoint):
    """Return the end of a run in float32, and its gradient."""
    dynamics = adjsim.Hamiltonian(potential.float())
    start = adjsim.PhaseState(*(x.float() for x in dynamics.init(*square())))

    def simulated(compile):
        made = adjsim.simulate(
            dynamics,
            start,
            [0.0, 0.4],
            solver=adjsim.VelocityVerlet(0.05),
            adjoint=adjoint,
            compile=compile,
        )
        return made.final.position

    return simulated


def test_a_backward_pass_has_the_autocast_of_its_run():
    """Steps that were undone without autocast were 4e-3 off, which the adjoint refuses."""
    torch.manual_seed(0)
    potential = NetworkEnergy().float()
    found = []
    for adjoint in (ReversibleAdjoint(tol=1e-5), CheckpointAdjoint()):
        with torch.autocast("cpu", torch.bfloat16):
            position = in_single(potential, adjoint)(False)
        found.append(torch.autograd.grad(position.sum(), potential.layers[0].weight)[0])
    # bfloat16 rounds to 4e-3; states that differ in their last bits may be rounded differently.
    torch.testing.assert_close(*found, rtol=2e-2, atol=1e-4)


def test_autocast_is_part_of_the_key_and_of_the_manifest(tmp_path):
    dynamics = adjsim.Hamiltonian(Plain())
    before = cache_key(dynamics)
    run(dynamics, store=tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        assert cache_key(dynamics) != before
        with pytest.raises(StoreError, match="autocast"):
            run(dynamics, store=tmp_path)


@pytest.mark.slow
def test_compiled_runs_under_and_outside_of_autocast():
    torch.manual_seed(0)
    simulated = in_single(NetworkEnergy(), CheckpointAdjoint())
    with torch.no_grad():
        for enabled in (True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                # Fused operations skip roundings to bfloat16, of 4e-3 of a force of 0.1.
                rtol = 1e-3 if enabled else 1e-6
                torch.testing.assert_close(simulated(True), simulated(False), rtol=rtol, atol=1e-6)


CHANGING = {
    "batch normalisation": (lambda: nn.BatchNorm1d(8), r"layers\.1 \(BatchNorm1d\) writes to"),
    "dropout": (lambda: nn.Dropout(0.3), r"layers\.1 \(Dropout\) draws random numbers"),
}


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("adjoint", [adjsim.DirectAdjoint(), CheckpointAdjoint()], ids=repr)
@pytest.mark.parametrize(("layer", "message"), CHANGING.values(), ids=CHANGING)
def test_modules_that_change_when_they_are_evaluated_are_refused(layer, message, adjoint, compile):
    dynamics = adjsim.ODE(Network(layer()).double())

    def simulated():
        return adjsim.simulate(
            dynamics,
            dynamics.init(torch.ones(3, 2)),
            [0.0, 0.1],
            solver=adjsim.RungeKutta("midpoint", dt=0.05),
            adjoint=adjoint,
            compile=compile,
        )

    with pytest.raises(ValueError, match=rf"fun\.{message}.*\.eval\(\)"):
        simulated()
    if not compile:
        dynamics.eval()
        assert simulated().final[0].shape == (3, 2)


def test_a_potential_with_dropout_is_refused_and_a_lazy_module_is_not():
    dynamics = adjsim.OverdampedLangevin(nn.Sequential(nn.Dropout(0.3), Plain()).double())
    with pytest.raises(ValueError, match=r"potential\.0 \(Dropout\) draws random numbers"):
        adjsim.simulate(
            dynamics,
            dynamics.init(torch.ones(2, 2)),
            [0.0, 0.1],
            solver=adjsim.EulerMaruyama(0.05),
            generator=1,
        )
    lazy = adjsim.ODE(LazyField())
    made = adjsim.simulate(
        lazy, lazy.init(torch.ones(2)), [0.0, 0.1], solver=adjsim.RungeKutta("midpoint", dt=0.05)
    )
    assert made.final[0].shape == (2,)


class LazyField(nn.Module):
    """Draws its weights when it is first evaluated."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(2, dtype=torch.float64)

    def forward(self, t, y):
        return self.layer(y)


@pytest.mark.parametrize("adjoint", [adjsim.DirectAdjoint(), adjsim.CheckpointAdjoint()])
def test_a_record_that_writes_into_the_dynamics_is_refused(adjoint):
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.0)))
    start = torch.ones(1, 1, dtype=torch.float64)

    def record(state):
        dynamics.mass.mul_(1.1)
        return state.position

    with pytest.raises(ValueError, match="writes to its own parameter or buffer 'mass'"):
        adjsim.simulate(
            dynamics,
            dynamics.init(start, start),
            [0.0, 0.1, 0.2],
            solver=adjsim.VelocityVerlet(0.1),
            adjoint=adjoint,
            record=record,
        )


@pytest.mark.parametrize(("rest", "agrees"), [(3e-16, True), (1e-9, False)])
def test_terms_that_cancel_may_differ_by_what_rounding_of_the_carry_changes(rest, agrees):
    """As cotangents along a constraint do: 3 times 10 less 10 times 3."""
    carry = (torch.tensor([10.0, 3.0], dtype=torch.float64), torch.zeros((), dtype=torch.float64))
    loop = Loop()
    loop.function = lambda constants, carry: ((carry[0], carry[1] + rest), ())
    weights = torch.tensor([3.0, -10.0], dtype=torch.float64)
    check = LoopCheck(loop, None, carry, lambda carry: [carry[0].clone(), carry[0] @ weights])
    assert check.agrees() == agrees


@pytest.mark.parametrize("step", [torch.acos, lambda x: torch.where(x > 1, 7.0, 0.0)])
def test_a_jump_by_rounding_of_the_carry_allows_no_difference(step):
    """An angle that rounding makes NaN, and a number that jumps."""
    carry = (torch.ones(1, dtype=torch.float64),)
    loop = Loop()
    loop.function = lambda constants, carry: ((step(carry[0]) + 1e-3,), ())
    assert not LoopCheck(loop, None, carry, lambda carry: [step(carry[0])]).agrees()


@pytest.mark.parametrize(("rest", "agrees"), [(3e-16, True), (1e-3, False)])
def test_a_gradient_that_cancels_may_differ_by_what_rounding_leaves(rest, agrees):
    """The two ways sum terms of order ten in other orders, and the sum is zero by symmetry."""
    carry = (torch.tensor([10.0, 3.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    loop = Loop()
    loop.function = lambda constants, carry: ((carry[0], carry[1] + rest), ())
    check = LoopCheck(loop, None, carry, lambda carry: [x.clone() for x in carry])
    assert not check.agrees()
    if agrees:
        check.learn("a step")
        assert check.agrees()
    else:
        with pytest.raises(RuntimeError, match="a step differs by"):
            check.learn("a step")
