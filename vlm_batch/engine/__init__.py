"""Turns processed requests into tokens, on one thread."""
