"""Learnt energies and forces: small networks, smooth at their cutoff, and forces of any module."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_number, as_positive, as_whole
from adjsim.core.typing import Array, Positions
from adjsim.potentials.base import ForceField
from adjsim.potentials.evaluated import as_module
from adjsim.potentials.learnt.precision import refuse_other_dtype
from adjsim.potentials.pairs.base import PairPotential


class RadialBasis(nn.Module):
    """Describe squared distances s by smooth functions that vanish at the cutoff.

    With x = s / cutoff^2 and n centres c_k spread over [0, 1] the functions are
    ``(1 - x)^3 exp(-(n (x - c_k))^2)``, ``(..., n)`` for ``(...)``. No square root is taken, so
    every derivative is finite where two atoms coincide.

    Args:
        number: n.
        cutoff: the distance at which they vanish, with their first two derivatives.
    """

    centres: Tensor

    def __init__(self, number: int, cutoff: float) -> None:
        super().__init__()
        self.number, self.cutoff = as_whole("number", number, least=1), as_number("cutoff", cutoff)
        self.register_buffer("centres", torch.linspace(0, 1, self.number, dtype=torch.float64))
        self.validate()

    def validate(self) -> None:
        """Refuse another number than that of the centres, and a cutoff that is not positive."""
        if self.number != len(self.centres):
            raise ValueError(
                f"number is {self.number}, and there are {len(self.centres)} centres: make the "
                "basis again."
            )
        as_positive("cutoff", self.cutoff)

    def forward(self, s: Tensor) -> Tensor:
        x = s.unsqueeze(-1) / self.cutoff**2
        scaled = self.number * (x - self.centres.to(s))
        return (1 - x).clamp(min=0) ** 3 * torch.exp(-scaled * scaled)


class PairNetwork(PairPotential):
    """A learnt pair energy, ``u(s) = w^T tanh(B b(s))``, with b the radial basis.

    The energy vanishes at the cutoff, with its first two derivatives. All atoms are alike; for
    species, or for energies that are no sums over pairs, use :class:`MessagePassing`.

    Args:
        hidden: width of the hidden layer.
        cutoff: the distance at which the energy ends.
        box, skin: as for :class:`PairPotential`.
        basis: number of radial functions.
    """

    def __init__(
        self,
        hidden: int,
        cutoff: float,
        box: Array | None = None,
        *,
        basis: int = 8,
        skin: float | None = None,
    ) -> None:
        super().__init__(cutoff=cutoff, box=box, skin=skin)
        self.network = nn.Sequential(
            RadialBasis(basis, cutoff),
            nn.Linear(basis, hidden, bias=False, dtype=torch.float64),
            nn.Tanh(),
            nn.Linear(hidden, 1, bias=False, dtype=torch.float64),
        )

    def validate(self) -> None:
        """Refuse a cutoff that is not that of the basis."""
        super().validate()
        basis = self.network[0]
        if isinstance(basis, RadialBasis) and basis.cutoff != self.cutoff:
            raise ValueError(
                f"the basis of the network ends at {basis.cutoff:g} and the cutoff is "
                f"{self.cutoff}: set network[0].cutoff too."
            )

    def pair_energy(self, s: Tensor) -> Tensor:
        refuse_other_dtype(self, s)
        return self.network(s).squeeze(-1)


class MessagePassing(nn.Module):
    """A small message-passing model, for :class:`~adjsim.GraphPotential`.

    With features h_i (one row for each species at first), radial basis b and squared lengths s_ij,
    each layer sums messages and updates the features, and the last features give the energies::

        m_i = sum over j of (F b(s_ij)) * (A h_j)
        h_i <- h_i + C silu(B m_i)
        e_i = w . silu(D h_i)

    This is SchNet's continuous-filter convolution (Schuett et al., J. Chem. Phys. 148, 241722
    (2018)) with a linear filter. Energies are invariant, and smooth at the cutoff; from two layers
    on they depend on angles. For accuracy use an equivariant model, such as MACE.

    Args:
        cutoff: the distance at which messages vanish: that of the graph.
        species: number of species.
        hidden: number of features.
        layers: number of layers.
        basis: number of radial functions.
        dtype: of the parameters.
    """

    def __init__(
        self,
        cutoff: float,
        *,
        species: int = 1,
        hidden: int = 16,
        layers: int = 2,
        basis: int = 8,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.basis = RadialBasis(basis, cutoff)
        self.embedding = nn.Embedding(as_whole("species", species), hidden, dtype=dtype)
        self.layers = nn.ModuleList(
            _Interaction(hidden, basis, dtype) for _ in range(as_whole("layers", layers))
        )
        self.readout = nn.Sequential(
            nn.Linear(hidden, hidden, dtype=dtype), nn.SiLU(), nn.Linear(hidden, 1, dtype=dtype)
        )

    def forward(
        self, position: Tensor, edges: Tensor, shifts: Tensor, species: Tensor | None
    ) -> Tensor:
        if species is None:
            species = edges.new_zeros(len(position))
        sender, receiver = edges
        d = position.index_select(0, receiver) - position.index_select(0, sender) + shifts
        radial = self.basis((d * d).sum(-1))
        features = self.embedding(species)
        for layer in self.layers:
            features = layer(features, sender, receiver, radial)
        return self.readout(features).squeeze(-1)


class _Interaction(nn.Module):
    def __init__(self, hidden: int, basis: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.filter = nn.Linear(basis, hidden, bias=False, dtype=dtype)
        self.mix = nn.Linear(hidden, hidden, bias=False, dtype=dtype)
        first, second = (nn.Linear(hidden, hidden, dtype=dtype) for _ in range(2))
        self.update = nn.Sequential(first, nn.SiLU(), second)

    def forward(self, features: Tensor, sender: Tensor, receiver: Tensor, radial: Tensor) -> Tensor:
        messages = self.filter(radial) * self.mix(features).index_select(0, sender)
        return features + self.update(torch.zeros_like(features).index_add(0, receiver, messages))


class ForceModel(ForceField):
    """A force from any module, which need not come from an energy.

    A force that is not conservative heats or cools the system, and samples no known density.

    Args:
        model: maps position ``(*batch, atoms, dim)`` to a force of the same shape, as
            ``model(position)``, or ``model(t, position)`` if its ``forward`` has two required
            arguments. Give the energy of a model whose forces are derivatives to the dynamics, see
            :class:`GraphForce`.
        dtype: the precision of the model, as for :class:`InPrecision`. None: that of the run.

    Raises:
        TypeError: not a module, or a ``forward`` of other arguments.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        model = as_module("model", model)
        found = inspect.signature(model.forward).parameters.values()
        positional = [x for x in found if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
        required = sum(x.default is x.empty for x in positional)
        if required not in (1, 2) and not any(x.kind is x.VAR_POSITIONAL for x in found):
            raise TypeError(
                f"{type(model).__name__}.forward takes {required} required arguments; a force "
                "model takes (position) or (t, position)."
            )
        self.model, self.timed, self.dtype = model, required == 2, dtype

    def forward(self, t: Any, position: Positions) -> Positions:
        q = position if self.dtype is None else position.to(self.dtype)
        value: Tensor = self.model(t, q) if self.timed else self.model(q)
        return value if self.dtype is None else value.to(position.dtype)
