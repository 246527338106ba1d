"""The command ``vlm-batch``."""
