"""Thermodynamic observables, and response functions from equilibrium fluctuations."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adjsim.core.arguments import as_number, as_positive, as_tensor, wrong_shape
from adjsim.core.box import volume
from adjsim.core.parameters import check_count
from adjsim.core.typing import Array, Energies, Number, PositionsLike
from adjsim.potentials.base import Potential
from adjsim.potentials.evaluated import terms_of
from adjsim.potentials.strained import strained_force, stretched_copies


@runtime_checkable
class Moving(Protocol):
    """The interface of a state with positions and momenta."""

    @property
    def position(self) -> Tensor: ...
    @property
    def momentum(self) -> Tensor: ...


@runtime_checkable
class Massive(Protocol):
    """The interface of dynamics with masses and a potential."""

    @property
    def potential(self) -> nn.Module: ...
    @property
    def mass(self) -> Tensor: ...


@runtime_checkable
class HoldingDistances(Protocol):
    """The interface of dynamics whose constraints pull at atoms."""

    def constraint_virial(self, state: Any) -> Tensor: ...


@runtime_checkable
class MovingBox(Massive, Protocol):
    """The interface of dynamics at constant pressure."""

    @property
    def piston(self) -> Any: ...
    def volume(self, state: Any) -> Tensor: ...


def kinetic_temperature(
    momentum: PositionsLike, mass: Number = 1.0, dof: float | int | None = None
) -> Energies:
    """Compute the kinetic temperature ``sum p^2/m / dof``, an energy (kT), ``(*batch,)``.

    The mass is one number, ``(atoms,)`` or ``(atoms, 1)``. The degrees of freedom, ``dof``, are
    atoms x dim by default. Subtract dim if the total momentum is zero and stays zero. Under
    constraints they are :meth:`adjsim.Constrained.dof`.
    """
    p = as_tensor("momentum", momentum)
    m = _masses(as_tensor("mass", mass), p)
    count = p.shape[-1] * p.shape[-2] if dof is None else as_number("dof", dof)
    return (p**2 / m).sum((-1, -2)) / count


def pressure(dynamics: Massive, state: Moving) -> Energies:
    """Compute the instantaneous pressure of a periodic box, ``(*batch,)``::

        P = (sum p^2/m + sum over i<j of d_ij . F_ij) / (dim V)

    The pulls of constraints (:class:`~adjsim.Constrained`) are among the forces.
    Its mean at equilibrium is the pressure. At constant volume a tail correction is not included,
    see :func:`adjsim.potentials.tail_corrections`.

    Args:
        dynamics: dynamics with masses, whose potential has a box and a virial, or a sum of such
            potentials with one box. Terms within molecules (bonds, angles, torsions, scaled pairs)
            need no box if the positions are those of whole molecules.
        state: a state with positions and momenta, or a trajectory. A state that carries its box,
            as that of :class:`~adjsim.LangevinPiston`, has the pressure in its own box, with the
            tail correction of a dynamics that has one.

    Raises:
        ValueError: no box, or two different ones.
        TypeError: a potential without a virial.
    """
    if hasattr(state, "strain"):
        return _pressure_at(dynamics, state)
    found = stress(dynamics, state)
    return -found.diagonal(dim1=-2, dim2=-1).mean(-1)


def _pressure_at(dynamics: Any, state: Any) -> Energies:
    """Compute the pressure in the box of a state, from the force along its strain."""
    moving, q, p = _moving(dynamics), state.position, state.momentum
    size = moving.volume(state)
    _, along = strained_force(moving.potential, q, moving.piston.strain(state))
    work = (p**2 / _masses(moving.mass, p)).sum((-1, -2)) + along.sum((-1, -2))
    if isinstance(dynamics, HoldingDistances):
        work = work + dynamics.constraint_virial(state).diagonal(dim1=-2, dim2=-1).sum(-1)
    found = work / (q.shape[-1] * size)
    tail = moving.piston.numbers(state).get("tail")
    return found if tail is None else found + tail / size**2


def _moving(dynamics: Any) -> MovingBox:
    """Return dynamics that move the box of a state, and refuse others."""
    if not isinstance(dynamics, MovingBox):
        raise TypeError(
            f"the state carries its box, and {type(dynamics).__name__} does not move one: give the "
            "dynamics at constant pressure that made the state."
        )
    return dynamics


def stress(dynamics: Massive, state: Moving) -> Tensor:
    """Compute the instantaneous stress of a periodic box, ``(*batch, dim, dim)``::

        stress = -(sum p p / m + sum over i<j of d_ij F_ij) / V

    Tension is positive, so the pressure is minus the mean of the diagonal. Arguments and errors are
    those of :func:`pressure`, and a state that carries its box needs a virial too. Such states are
    evaluated one after another.
    """
    q, p = state.position, state.momentum
    size = _volume(dynamics.potential)
    if not isinstance(dynamics.potential, Potential):
        raise TypeError(
            f"{type(dynamics.potential).__name__} has no virial(position), which the pressure and "
            "the stress need. Pair potentials and sums of them have one."
        )
    twice = (p / _masses(dynamics.mass, p)).transpose(-1, -2) @ p
    if hasattr(state, "strain"):
        return _stress_at(dynamics, state, twice)
    virial = dynamics.potential.virial(q)
    if isinstance(dynamics, HoldingDistances):
        virial = virial + dynamics.constraint_virial(state)
    return -(twice + virial) / size


def _stress_at(dynamics: Massive, state: Any, twice: Tensor) -> Tensor:
    """Compute the stress in the box of a state, with the kinetic energy's part."""
    moving, q = _moving(dynamics), state.position
    strain, copy_at = moving.piston.strain(state), stretched_copies(moving.potential)
    systems = zip(*(x.reshape(-1, *x.shape[-2:]) for x in (q, strain.value)), strict=True)
    virials = [copy_at(strain._replace(value=e)).virial(x) for x, e in systems]
    size = moving.volume(state)[..., None, None]
    virial = torch.stack(virials).reshape(twice.shape)
    if isinstance(dynamics, HoldingDistances):
        virial = virial + dynamics.constraint_virial(state)
    found = -(twice + virial) / size
    tail = moving.piston.numbers(state).get("tail")
    if tail is None:
        return found
    return found - torch.eye(q.shape[-1]).to(q) * (tail / size**2)


def _masses(mass: Tensor, p: Tensor) -> Tensor:
    """Return masses to divide momenta by, in their dtype."""
    check_count("mass", mass, p.shape[-2])
    return mass.to(p).reshape(-1, 1) if mass.numel() > 1 else mass.to(p)


def _volume(potential: nn.Module) -> Tensor:
    """Return the volume of the box of a potential, which terms within molecules need not have."""
    boxes, bare = list[Tensor](), list[nn.Module]()
    for part in terms_of(potential):
        box: Tensor | None = getattr(part, "box", None)
        if box is not None:
            boxes.append(box)
        elif not (isinstance(part, Potential) and part.within_molecules):
            bare.append(part)
    if bare or not boxes:
        name = type(bare[0] if bare else potential).__name__
        raise ValueError(
            f"pressure and stress need a potential with a periodic box, and {name} has none: make "
            "it, or its nonbonded parts, with box=."
        )
    return volume(boxes[0])


def heat_capacity(
    energy: Float[Tensor, "time *batch"] | Array, kT: Number, *, dof: float | int
) -> Energies:
    """Compute the heat capacity at constant volume from fluctuations of the energy, ``(*batch,)``::

        C_V = var(U) / kT^2 + dof / 2

    It is in units of the Boltzmann constant. The series must be sampled at constant temperature
    (Langevin, Nose-Hoover chains). At constant energy the fluctuations are different (Lebowitz,
    Percus and Verlet, Phys. Rev. 153, 250 (1967)), and Berendsen's thermostat samples neither.

    For frames that are correlated over tau frames, the variance, divided by ``frames - 1``, is too
    small by a factor of about ``1 - tau / frames``. The relative error of a Gaussian variance is
    ``sqrt(2 tau / frames)``. Compute it by :func:`adjsim.mean_with_error` of ``(U - mean)^2``.

    Args:
        energy: ``(time, *batch)``, the potential energy U; or the total energy, with ``dof=0``.
        kT: the temperature, energy; one number or ``(*batch,)``. It may carry a gradient.
        dof: the degrees of freedom with a kinetic energy that is not in ``energy``: atoms x dim,
            and less dim if the total momentum is zero, or :meth:`adjsim.Constrained.dof`.

    Raises:
        ValueError: fewer than two frames, another shape, kT that is not positive, negative dof.
    """
    u, count = _series("energy", energy), as_number("dof", dof)
    temperature = checked_temperature(kT, u, u.shape[1:])
    if not count >= 0:
        raise ValueError(f"dof must be zero or positive; got {count:g}.")
    return u.var(0, correction=1) / temperature**2 + count / 2


def volume_compressibility(volume: Float[Tensor, "time *batch"] | Array, kT: Number) -> Energies:
    """Compute the isothermal compressibility from fluctuations of the volume, ``(*batch,)``::

        -(dV/dP)_T / V = var(V) / (kT <V>)

    It is in volume/energy. The volumes must be sampled at constant pressure and temperature
    (:class:`~adjsim.LangevinPiston`). Volumes are correlated over many frames, which makes the
    variance too small, see :func:`heat_capacity`. At constant volume use :func:`compressibility`.

    Args:
        volume: ``(time, *batch)``, at least two frames.
        kT: the temperature, energy; one number or ``(*batch,)``.

    Raises:
        ValueError: fewer than two frames, another shape, kT that is not positive.
    """
    v = _series("volume", volume)
    return v.var(0, correction=1) / (v.mean(0) * checked_temperature(kT, v, v.shape[1:]))


def thermal_expansion(
    volume: Float[Tensor, "time *batch"] | Array,
    enthalpy: Float[Tensor, "time *batch"] | Array,
    kT: Number,
) -> Energies:
    """Compute the thermal expansion at constant pressure from fluctuations, ``(*batch,)``::

        (dV/d(kT))_P / V = cov(V, H) / (kT^2 <V>)

    It is in 1/energy; times the Boltzmann constant, it is the expansion in 1/temperature. The
    enthalpy H includes the kinetic energy, as that of :meth:`adjsim.LangevinPiston.enthalpy`. See
    :func:`volume_compressibility`.

    Args:
        volume, enthalpy: ``(time, *batch)``, at least two frames.
        kT: the temperature, energy; one number or ``(*batch,)``.

    Raises:
        ValueError: fewer than two frames, different shapes, kT that is not positive.
    """
    v, h = _series("volume", volume), _series("enthalpy", enthalpy)
    if v.shape != h.shape:
        raise wrong_shape("enthalpy", f"{tuple(v.shape)}, as that of volume", h)
    temperature = checked_temperature(kT, v, v.shape[1:])
    covariance = ((v - v.mean(0)) * (h - h.mean(0))).sum(0) / (len(v) - 1)
    return covariance / (temperature**2 * v.mean(0))


def _series(name: str, values: Float[Tensor, "time *batch"] | Array) -> Tensor:
    found = as_tensor(name, values)
    if found.ndim < 1 or len(found) < 2:
        raise wrong_shape(name, "(time, *batch), of at least two frames", found)
    return found


def compressibility(
    structure: Float[Tensor, "*batch n"] | Array,
    wavenumbers: Float[Tensor, " n"] | Array,
    density: float | int,
    kT: Number,
) -> Energies:
    """Compute the isothermal compressibility, volume/energy, from the structure factor::

        chi = S(0) / (density kT),  S(k) = S(0) + a k^2

    S(0) is the intercept of the least-squares line of S against k^2, in float64. Long density waves
    are fluctuations of the number of particles in a part of the box, so this works at constant
    volume (Hansen and McDonald, Theory of Simple Liquids, section 4.1). Fluctuations of the
    pressure are not offered: they need the hypervirial, which is infinite where the force of a
    truncated potential jumps at the cutoff.

    - Give the mean of :func:`adjsim.structure_factor` over the run, at wavevectors well below the
      first peak of S. The k^4 term of S is a bias: compare two ranges of k.
    - The box must be several times longer than the correlation length of the density.
    - One S(k) of one configuration has a relative error of 100 %. Take the error from independent
      replicas or blocks, by :func:`adjsim.mean_with_error`.

    Args:
        structure: ``(*batch, n)``, S averaged over time, at n wavevectors.
        wavenumbers: ``(n,)``, the lengths k of the wavevectors, positive, at least two different.
        density: atoms/volume.
        kT: as for :func:`heat_capacity`.

    Raises:
        ValueError: another shape, a number that is not positive, equal wavenumbers.
    """
    s, k = as_tensor("structure", structure), as_tensor("wavenumbers", wavenumbers)
    number = as_positive("density", density)
    if k.ndim != 1 or s.ndim < 1 or len(k) != s.shape[-1]:
        raise ValueError(
            f"structure must be (*batch, n) and wavenumbers (n,); got shapes {tuple(s.shape)} and "
            f"{tuple(k.shape)}."
        )
    if not bool((k > 0).all()):
        raise ValueError(
            "wavenumbers must be positive: S(0) = atoms in every configuration and says nothing. "
            f"Got a smallest of {float(k.min()):g}."
        )
    if not bool((k.max() - k.min()) > 1e-6 * k.max()):
        raise ValueError(f"wavenumbers must differ, for a line against k^2; all are {k[0]:g}.")
    # The intercept is a difference of larger numbers, which cancel where the range of k is narrow.
    values = s.double()
    temperature = checked_temperature(kT, values, s.shape[:-1])
    squares = k.to(values) ** 2
    centred = squares - squares.mean()
    slope = (values * centred).sum(-1) / (centred * centred).sum()
    return ((values.mean(-1) - slope * squares.mean()) / (number * temperature)).to(s)


def dielectric_constant(
    dipoles: Float[Tensor, "time *batch dim"] | Array,
    volume: float | int,
    kT: Number,
    constant: float | int = 1.0,
) -> Energies:
    """Compute the static dielectric constant from fluctuations of the dipole of a periodic box::

        epsilon = 1 + 4 pi constant / (3 V kT) (<M^2> - <M>^2)

    This is for electrostatics of a lattice with a conductor around it (Ewald sums, particle mesh
    Ewald). With a reaction field or a cutoff the fluctuations are different (Neumann, Mol. Phys.
    50, 841 (1983)).

    The mean dipole of a fluid is zero, and ``<M>^2`` is its error. The variance is that of
    :func:`heat_capacity`. Dipoles forget their direction slowly (5 to 10 ps in water), so runs of a
    thousand times that are needed. Take the error from independent replicas, by
    :func:`adjsim.mean_with_error`.

    Args:
        dipoles: ``(time, *batch, 3)``, the :func:`adjsim.dipole` of all molecules, which are
            whole and neutral. A molecule may not jump by a box length if it is charged.
        volume: the volume of the box.
        kT: as for :func:`heat_capacity`.
        constant: the Coulomb constant, energy length / charge^2: 14.39964548 in eV and angstrom.

    Raises:
        ValueError: fewer than two frames, another shape, a number that is not positive.
    """
    m = as_tensor("dipoles", dipoles)
    size, strength = as_positive("volume", volume), as_positive("constant", constant)
    if m.ndim < 2 or len(m) < 2 or m.shape[-1] != 3:
        raise wrong_shape("dipoles", "(time, *batch, 3), of at least two frames", m)
    temperature = checked_temperature(kT, m, m.shape[1:-1])
    spread = m.var(0, correction=1).sum(-1)
    return 1 + 4 * math.pi * strength / (3 * size * temperature) * spread


def checked_temperature(kT: Number, like: Tensor, batch: torch.Size) -> Tensor:
    """Convert kT, one number or one for each system of a batch, to the dtype of a tensor."""
    temperature = as_tensor("kT", kT).to(like)
    if temperature.numel() == 1:
        temperature = temperature.reshape(())
    elif temperature.shape != batch:
        several = f" or {tuple(batch)}, one for each system" if batch else ""
        raise ValueError(f"kT must be one number{several}; got shape {tuple(temperature.shape)}.")
    if not bool((temperature > 0).all()):
        raise ValueError(f"kT must be positive; got {temperature.tolist()}.")
    return temperature
