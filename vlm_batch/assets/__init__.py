"""The files that travel with the library: the tiny trained checkpoint and a few pictures in its language.

An installed wheel has them in this folder; in a source checkout they are found where they are made, in ``fixtures/``.
"""

from __future__ import annotations

from pathlib import Path

PACKAGED = Path(__file__).resolve().parent
CHECKOUT = PACKAGED.parent.parent / "fixtures"

#: Suffixes of the files that the command line and the file pickers take for videos.
VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg")


#: The sample pictures that travel (pyproject.toml puts the same ones into the wheel): what the checkpoint knows, and a
#: receipt, of which it says that it has no shapes.
SAMPLES = (
    "black_circle_left_of_blue_square.png",
    "digits_728.png",
    "receipt.jpg",
    "red_circle.png",
    "red_circle_above_blue_triangle.png",
    "yellow_triangle_left_of_green_cross.png",
)


class MissingAssets(FileNotFoundError):
    """The installation lost a file that travels with the library."""


def default_checkpoint() -> Path:
    """The folder of the embedded checkpoint: a qwen2_vl of 0.9 M parameters that describes coloured shapes.

    Raises MissingAssets without it.
    """
    return _find("checkpoints/qwen2_vl", marker="config.json")


def sample_images() -> list[Path]:
    """The sample pictures, by name. Raises MissingAssets without them."""
    folder = _find("images", marker=SAMPLES[0])
    return [folder / name for name in SAMPLES]


def _find(name: str, marker: str) -> Path:
    for root in (PACKAGED, CHECKOUT):
        if (root / name / marker).exists():
            return root / name
    raise MissingAssets(
        f"neither {PACKAGED / name} nor {CHECKOUT / name} exists; install vlm-batch from its wheel or a full checkout"
    )


def is_sample(picture: str) -> bool:
    """Whether a picture is one of those that come with the library, in the wheel or in a checkout."""
    path = Path(picture).resolve()
    return any(path.is_relative_to(root / "images") for root in (PACKAGED, CHECKOUT))
