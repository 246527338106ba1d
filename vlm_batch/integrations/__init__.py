"""Doors into other projects' programs."""
