"""Dynamics at constant temperature."""
