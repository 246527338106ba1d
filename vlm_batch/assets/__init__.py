"""The files that travel with the library: the tiny trained checkpoint and a few pictures in its language.

An installed wheel has them in this folder; in a source checkout they are found where they are made, in ``fixtures/``.
"""

from __future__ import annotations

from pathlib import Path

PACKAGED = Path(__file__).resolve().parent
CHECKOUT = PACKAGED.parent.parent / "fixtures"

#: What the command line and the file pickers take for a picture, by suffix.
PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff")


def default_checkpoint() -> Path:
    """The folder of the embedded checkpoint: a qwen2_vl of 0.7 M parameters that describes coloured shapes.

    Raises FileNotFoundError if the installation lost it.
    """
    return _find("checkpoints/qwen2_vl", marker="config.json")


def sample_images() -> list[Path]:
    """The sample pictures of what the embedded checkpoint knows, by name. Raises FileNotFoundError without any."""
    folder = _find("images")
    return sorted(path for path in folder.iterdir() if path.suffix in PICTURE_SUFFIXES)


def _find(name: str, marker: str = ".") -> Path:
    for root in (PACKAGED, CHECKOUT):
        if (root / name / marker).exists():
            return root / name
    raise FileNotFoundError(
        f"neither {PACKAGED / name} nor {CHECKOUT / name} exists; install vlm-batch from its wheel or a full checkout"
    )
