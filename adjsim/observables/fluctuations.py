"""Response functions from equilibrium fluctuations."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from adjsim.core.arguments import as_number, as_tensor
from adjsim.core.typing import Array, Energies, Number
from adjsim.observables.members import positive


def heat_capacity(
    energy: Float[Tensor, "time *batch"] | Array, kT: Number, *, dof: float | int
) -> Energies:
    """Compute the heat capacity at constant volume from fluctuations of the energy, ``(*batch,)``::

        C_V = var(U) / kT^2 + dof / 2

    It is in units of the Boltzmann constant. The series must be sampled at constant temperature
    (Langevin, Nose-Hoover chains). At constant energy the fluctuations are different (Lebowitz,
    Percus and Verlet, Phys. Rev. 153, 250 (1967)), and Berendsen's thermostat samples neither.

    The variance is divided by ``frames - 1``. For frames that are correlated over a time of tau
    frames, this is too small by a factor of about ``1 - tau / frames``. The relative error of a
    Gaussian variance is ``sqrt(2 tau / frames)``. Compute it by :func:`adjsim.mean_with_error`
    of ``(U - mean)^2``.

    Args:
        energy: ``(time, *batch)``, the potential energy U; or the total energy, with ``dof=0``.
        kT: the temperature, energy; one number or ``(*batch,)``. It may carry a gradient.
        dof: the degrees of freedom with a kinetic energy that is not in ``energy``: atoms x dim,
            and less dim if the total momentum is zero.

    Raises:
        ValueError: fewer than two frames, another shape, kT that is not positive, negative dof.
    """
    u, count = as_tensor("energy", energy), as_number("dof", dof)
    if u.ndim < 1 or len(u) < 2:
        raise ValueError(
            f"energy must be (time, *batch), of at least two frames; got shape {tuple(u.shape)}."
        )
    temperature = checked_temperature(kT, u, u.shape[1:])
    if not count >= 0:
        raise ValueError(f"dof must be zero or positive; got {count:g}.")
    return u.var(0, correction=1) / temperature**2 + count / 2


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
    volume (Hansen and McDonald, Theory of Simple Liquids, section 4.1).

    - Give the mean of :func:`adjsim.structure_factor` over the run, at wavevectors well below the
      first peak of S. The k^4 term of S is a bias: compare two ranges of k.
    - The box must be several times longer than the correlation length of the density.
    - One S(k) of one configuration has a relative error of 100 %. Take the error from independent
      replicas or blocks, by :func:`adjsim.mean_with_error`.

    The fluctuations of the pressure at constant volume are another way. They need the hypervirial,
    which is infinite for a truncated pair potential with a jump of the force at the cutoff, so they
    are not offered.

    Args:
        structure: ``(*batch, n)``, S averaged over time, at n wavevectors.
        wavenumbers: ``(n,)``, the lengths k of the wavevectors, 1/length, positive. At least two
            are different.
        density: atoms/volume.
        kT: the temperature, energy; one number or ``(*batch,)``. It may carry a gradient.

    Raises:
        ValueError: another shape, a number that is not positive, equal wavenumbers.
    """
    s, k = as_tensor("structure", structure), as_tensor("wavenumbers", wavenumbers)
    number = positive("density", density)
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
        kT: the temperature, energy; one number or ``(*batch,)``. It may carry a gradient.
        constant: the Coulomb constant, energy x length / charge^2: 14.39964548 in eV and
            angstrom.

    Raises:
        ValueError: fewer than two frames, another shape, a number that is not positive.
    """
    m = as_tensor("dipoles", dipoles)
    size, strength = positive("volume", volume), positive("constant", constant)
    if m.ndim < 2 or len(m) < 2 or m.shape[-1] != 3:
        raise ValueError(
            f"dipoles must be (time, *batch, 3), of at least two frames; got shape {tuple(m.shape)}"
            "."
        )
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
