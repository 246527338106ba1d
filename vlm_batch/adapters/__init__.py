"""The parts that families are made of: the ``Adapter`` and what adapters share. Nothing here knows a family."""
