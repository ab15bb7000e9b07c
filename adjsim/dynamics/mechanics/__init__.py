"""Mechanics of bodies, with contact, friction, damping and control."""
