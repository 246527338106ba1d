"""A family that another package adds: its adapter, and its tiny model. ``tests/test_third_party.py`` uses copies of both."""
