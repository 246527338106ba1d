"""What families are made of: the ``Adapter`` and its parts. Nothing here knows a family."""
