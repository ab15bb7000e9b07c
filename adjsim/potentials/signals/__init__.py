"""Functions of time, and what they drive: actuators and controls."""
