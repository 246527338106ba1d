"""Shared parts of model families."""
