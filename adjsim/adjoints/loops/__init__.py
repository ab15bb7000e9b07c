"""Compiled loops of steps, forward and backward.

A loop is one function of tensors: many forward steps, or the backward pass over them with the
cotangents. Everything that may differ from run to run is an input
(:class:`~adjsim.adjoints.loops.loop.LoopConstants`), so another number of steps, seed, parameter
value or save time needs no new compilation. Another shape, dtype, scheme or record does. Anything
else is baked in, and part of the key by which a loop is looked up (:mod:`adjsim.core.cache_key`).
Modules are numbered in this key, so a dynamics that is made anew has the loops of the one before.

A backward iteration begins in the middle of a step, with the last move of the position. It finishes
the backward pass over one step and begins the pass over the step before. All moves that need the
force at one position are then in one iteration, so the force and its vector-Jacobian product share
one loop over pairs. The first iteration has no step to finish, and the last none to begin.
"""
