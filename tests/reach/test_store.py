"""Stores: what they hold, and what they refuse."""

import errno
import json
import math
import os
import random
import resource
import signal
import stat

import numpy as np
import pytest
import torch

from adjsim.core.durable.stateful import Entries, SavedStates
from adjsim.core.durable.store import LOCK, MANIFEST, Store, StoreError, from_bytes, to_bytes

TREE = {
    "plain": [None, True, -3, 0.1, float("inf"), "text", b"bytes", b""],
    "tensor": torch.arange(12.0).reshape(3, 4).T,
    "complex": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128),
    "single": torch.tensor(2.5, dtype=torch.float32),
    "whole": torch.arange(3),
    "empty": torch.empty(0, 2),
    "bool": torch.tensor([True, False]),
    "nested": {"a": [{"b": torch.ones(1)}]},
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_a_tree_comes_back_with_its_layout():
    found = from_bytes(to_bytes(TREE))
    assert same(found, TREE)
    # Sums over a tensor depend on the order of its axes in memory in their last bits.
    assert found["tensor"].stride() == TREE["tensor"].stride()


def test_objects_are_refused():
    with pytest.raises(TypeError, match="no form for object"):
        to_bytes([object()])


def test_changed_bits_are_found():
    data, generator = to_bytes(TREE), random.Random(0)
    for _ in range(300):
        changed = bytearray(data)
        changed[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        try:
            found = from_bytes(bytes(changed))
        except StoreError:
            continue
        # A bit of the padding of the header.
        assert same(found, TREE)


@pytest.mark.parametrize("length", [0, 5, 40, -1])
def test_files_cut_short_and_foreign_files_are_named(tmp_path, length):
    store = Store(tmp_path)
    store.write("part", TREE)
    store.path("part").write_bytes(store.path("part").read_bytes()[:length])
    with pytest.raises(StoreError, match=r"part\.pt' is cut short.*Remove it"):
        store.read("part")
    store.path("part").write_bytes(b"PK\x03\x04 something else, and long enough")
    with pytest.raises(StoreError, match="was not written by adjsim"):
        store.read("part")


def test_no_pickle_is_read(tmp_path):
    store = Store(tmp_path)
    torch.save({"x": torch.ones(2)}, store.path("part"))
    with pytest.raises(StoreError, match="was not written by adjsim"):
        store.read("part")


def test_another_format_is_named(tmp_path, monkeypatch):
    store = Store(tmp_path)
    with store.held({"a": "1"}):
        data = to_bytes(TREE)
    monkeypatch.setattr("adjsim.core.durable.store.FORMAT", "adjsim 9")
    with pytest.raises(StoreError, match="format 'adjsim 4', and this version reads 'adjsim 9'"):
        from_bytes(data)
    named = "the format of the store is adjsim 9 here and adjsim 4 there"
    with pytest.raises(StoreError, match=named), store.held({"a": "1"}):
        pass


def test_numbers_of_numpy_and_empty_bytes_come_back():
    tree = {"x": np.float64(0.5), "n": np.float64("nan"), "b": b"", "high": bytes(range(256))}
    found = from_bytes(to_bytes(tree))
    assert (found["x"], found["b"], found["high"]) == (0.5, b"", bytes(range(256)))
    assert type(found["x"]) is float
    assert math.isnan(found["n"])


def test_a_part_of_a_tensor_is_written_alone():
    whole = torch.zeros(100_000)
    assert len(to_bytes(whole[:10])) < 10_000


class Tape:
    def __init__(self):
        self.rows, self.frames, self.sum = [], [], torch.zeros(2)

    def state(self):
        frames = Entries(self.frames, stacked=True)
        return {"rows": Entries(self.rows), "frames": frames, "sum": self.sum}

    def load_state(self, state):
        self.rows, self.frames, self.sum = state["rows"], state["frames"], state["sum"]

    def add(self, x):
        self.rows.append([x, b"row"])
        self.frames.append((torch.full((2,), x), torch.tensor(x)))
        self.sum = self.sum + x


def test_saves_write_new_entries_and_another_object_goes_on(tmp_path):
    store, tape, other = Store(tmp_path), Tape(), Tape()
    states = SavedStates(store, "run", {"tape": tape})
    for step in range(3):
        tape.add(float(step))
        states.save({"step": step})
    states.save({"step": 3})
    assert len(list(tmp_path.glob("run-*"))) == 3
    assert len(store.read("run-000002")["tape.rows"]) == 1
    again = SavedStates(store, "run", {"tape": other})
    assert again.load(torch.device("cpu")) == {"step": 3}
    assert same(other.rows, tape.rows)
    assert torch.equal(other.sum, tape.sum)
    for found, frame in zip(other.frames, tape.frames, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found, frame, strict=True))
    other.add(3.0)
    again.save({"step": 4})
    assert len(store.read("run-000003")["tape.rows"]) == 1
    store.write("run-000001", {"tape.rows": [], "tape.frames": []})
    with pytest.raises(StoreError, match=r"has 3 of 4 entries of tape\.rows"):
        again.load(torch.device("cpu"))


def test_a_second_user_is_refused(tmp_path):
    first, second = Store(tmp_path), Store(tmp_path)
    with (
        first.held({"a": "1"}),
        pytest.raises(StoreError, match=f"in use by process {os.getpid()} on "),
        second.held({"a": "1"}),
    ):
        pass
    with second.held({"a": "1"}):
        pass


def test_another_computation_is_named(tmp_path):
    store = Store(tmp_path)
    with store.held({"the seed": "1", "steps": "5"}):
        pass
    with (
        pytest.raises(StoreError, match="the seed is 2 here and 1 there"),
        store.held({"the seed": "2", "steps": "5"}),
    ):
        pass
    (tmp_path / MANIFEST).write_text(json.dumps([1, 2]))
    with pytest.raises(StoreError, match="not a manifest"), store.held({"a": "1"}):
        pass
    (tmp_path / MANIFEST).unlink()
    store.write("part", TREE)
    with pytest.raises(StoreError, match="has parts and no"), store.held({"a": "1"}):
        pass


def test_folders_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be made|is a file"):
        Store(tmp_path / "file")
    with pytest.raises(StoreError, match=r"cannot be made|cannot be written"):
        Store("/proc/adjsim-store")


def test_a_full_disk_leaves_whole_files(tmp_path):
    """The limit of a file's size stands for a full disk: a write fails in the middle."""
    store = Store(tmp_path)
    store.write("part", {"x": torch.zeros(10)})
    before, known = store.path("part").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, known[1]))
        with pytest.raises(StoreError, match=r"part.*cannot be written \(File too large\)"):
            store.write("part", {"x": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, known)
        signal.signal(signal.SIGXFSZ, handler)
    assert store.path("part").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["part.pt"]


def test_a_claim_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def full(path, flags):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = Store(tmp_path)
    assert store.claim("part")
    assert not store.claim("part")
    store.release()
    monkeypatch.setattr("adjsim.core.durable.store._private", full)
    with pytest.raises(StoreError, match=r"part.*cannot be written \(No space left on device\)"):
        store.claim("part")
    assert list(tmp_path.iterdir()) == []


def test_files_are_not_world_writable(tmp_path):
    before = os.umask(0)
    try:
        store = Store(tmp_path / "store")
        with store.held({"a": "1"}):
            store.write("part", TREE)
    finally:
        os.umask(before)
    found = [store.folder, *store.folder.iterdir()]
    assert {path.name for path in found} == {"store", "part.pt", MANIFEST, LOCK}
    assert all(not path.stat().st_mode & (stat.S_IWOTH | stat.S_IWGRP) for path in found)
