"""Measurements of speed and memory; each file says how it is run."""
