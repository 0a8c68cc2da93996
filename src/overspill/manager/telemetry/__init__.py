"""Measurements of the machine and its engines, every second."""
