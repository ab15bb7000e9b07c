"""The processes among which work is shared, by ``torch.distributed``.

Under ``torchrun`` every process runs the same script, and is a *rank*. Ranks exchange bytes, whose
form is that of a store (:mod:`adjsim.core.durable.store`), without pickle.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from adjsim.core.durable.store import Nested, differing, from_bytes, to_bytes


class RankError(RuntimeError):
    """Raised on every rank that is left when another one hangs, ends or disagrees."""


class Ranks:
    """The ranks of a process group; without one, this process alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def of(cls, group: Any = None) -> Ranks:
        """Return the ranks of a group, or of the default group that ``torchrun`` has started.

        Without a default group it is this process alone.
        """
        if isinstance(group, Ranks):
            return group
        if not dist.is_available():
            return cls(None)
        if group is None:
            started = dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1
            if started and not dist.is_initialized():
                _start()
            group = dist.group.WORLD if dist.is_initialized() else None
        elif group == dist.GroupMember.NON_GROUP_MEMBER:
            raise RankError("group= is a process group without this process.")
        elif not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "group must be a process group of torch.distributed, or None; got "
                f"{type(group).__name__}."
            )
        return cls(group)

    @property
    def first(self) -> bool:
        """Whether this is the first rank, which shows progress and writes files."""
        return self.rank == 0

    def exchange(self, tree: Nested) -> list[Nested]:
        """Return the trees of all ranks, in their order."""
        if self.size == 1:
            return [tree]
        try:
            self._meet()
            found = self._gather(to_bytes(tree))
        except RuntimeError as error:
            reason = str(error)
            # After a timeout the connections are whole, and the group may be used again.
            ended = [] if "imed out" in reason else self._ended()
            raise RankError(_describe(reason, ended)) from None
        return [from_bytes(data) for data in found]

    def agree(self, about: dict[str, str]) -> None:
        """Check that all ranks compute the same."""
        known = self.exchange(about)
        for rank, other in enumerate(known):
            for name, there, here in differing(other, known[0]):
                raise RankError(
                    f"the ranks compute different things: {name} is {here} on rank 0 and {there} "
                    f"on rank {rank}. {_advice(name)}"
                )

    def share(self, count: int, compute: Callable[[int], Nested]) -> list[Nested]:
        """Compute ``count`` trees, each on one rank, and return all; an error is raised on all."""
        return self.collect(count, range(self.rank, count, self.size), compute)

    def collect(
        self, count: int, numbers: Iterable[int], compute: Callable[[int], Nested]
    ) -> list[Nested]:
        """Compute the trees of some numbers on this rank, and return all ``count`` trees.

        The error of the lowest number is raised, on whichever rank it was.
        """
        own: list[Nested] = []
        failed: list[Any] | None = None
        reason: Exception | None = None
        for i in numbers:
            try:
                own.append([i, compute(i)])
            except Exception as error:  # Raised below, on all ranks.
                failed, reason = [i, type(error).__name__, str(error)], error
                break
        found = self.exchange({"own": own, "failed": failed})
        failures = [(part["failed"], r) for r, part in enumerate(found) if part["failed"]]
        if failures:
            (_, kind, text), rank = min(failures, key=lambda failure: failure[0][0])
            if rank == self.rank and reason is not None:
                raise reason
            raise _error_of(kind)(text)
        trees = {i: tree for part in found for i, tree in part["own"]}
        missing = sorted(set(range(count)) - set(trees))
        if missing:
            raise RankError(f"no rank has computed the parts {missing}.")
        return [trees[i] for i in range(count)]

    @property
    def _on_gloo(self) -> bool:
        return "gloo" in dist.get_backend_config(self.group)

    def _meet(self) -> None:
        """Wait for all ranks as long as the group's timeout, and name those that are absent."""
        if self._on_gloo:
            assert self.group is not None
            # Without this argument torch waits for its default, whatever the timeout of the group.
            options = self.group._get_backend(torch.device("cpu")).options
            dist.monitored_barrier(self.group, options._timeout)

    def _ended(self) -> list[int]:
        """List the ranks to which the connection is closed, once an exchange has failed."""
        if not self._on_gloo:
            return []
        ended: list[int] = []
        for rank in set(range(self.size)) - {self.rank}:
            try:
                # Nobody receives this byte: it shows whether the connection still exists.
                dist.isend(torch.zeros(1, dtype=torch.uint8), group=self.group, group_dst=rank)
            except RuntimeError:
                ended.append(rank)
        return ended

    def _gather(self, data: bytes) -> list[bytes]:
        device = "cpu" if self._on_gloo else "cuda"
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(own)], device=device), self.group)
        longest = max(int(size) for size in sizes)
        padded = own.new_zeros(longest)
        padded[: len(own)] = own
        found: list[Tensor] = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded, self.group)
        return [
            x[: int(size)].cpu().numpy().tobytes() for x, size in zip(found, sizes, strict=True)
        ]


def _start() -> None:
    """Make the default group of processes that torchrun has started."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # All ranks are on this host, so gloo's sockets need no other interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    # The store of torchrun outlives the processes that it starts again, which would find the
    # addresses of those that have ended.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus else "gloo",
        store=dist.PrefixStore(f"adjsim {attempt}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    atexit.register(_end)


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # A group that is alive when the interpreter ends aborts the process, whose threads still run.
    gc.collect()


def _describe(reason: str, ended: list[int]) -> str:
    """Say in one sentence which rank is missing."""
    if ended:
        who, where = f"ranks {ended} have", "Their output says which one was the first."
        if len(ended) == 1:
            who, where = f"rank {ended[0]} has", "The output of that rank says more."
        return (
            f"{who} ended before the work was finished: killed, by an error, or since the script "
            f"did something else there. {where}"
        )
    absent = re.search(r"[Rr]anks? ([\d, ]+?) failed to pass", reason)
    if absent is None:
        cause = reason.splitlines()[0].partition(". ")[0]
        return f"another rank hangs or has ended, so the work cannot be finished ({cause})."
    return (
        f"rank {absent[1].strip()} has not finished its work within the timeout of the process "
        "group: it hangs, has ended, or has much more to do. For work that takes longer, call "
        "torch.distributed.init_process_group(timeout=...) first."
    )


def _advice(name: str) -> str:
    """Say how the ranks come to agree about something that a computation depends on."""
    if "seed" in name:
        return "Seed every rank in the same way."
    if name in ("adjsim", "torch"):
        return "Install the same version for every rank."
    return (
        "Give every rank the same settings and numbers: draw the numbers after the same seed, or "
        "read them from one file."
    )


def _error_of(kind: str) -> type[Exception]:
    """Find an error class by its name: a builtin, or one of adjsim's own."""
    known = [Exception]
    for found in known:
        known += [
            sub
            for sub in found.__subclasses__()
            if sub not in known and sub.__module__.partition(".")[0] in ("adjsim", "builtins")
        ]
        if found.__name__ == kind and found is not Exception:
            return found
    return RankError
