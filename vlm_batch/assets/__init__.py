"""The sample model, a tiny test checkpoint and pictures: here in wheels, in ``fixtures/`` in checkouts."""

from __future__ import annotations

from pathlib import Path

PACKAGED = Path(__file__).resolve().parent
CHECKOUT = PACKAGED.parent.parent / "fixtures"

#: File suffixes of videos and recordings, for the command line and file pickers.
VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg")
AUDIO_SUFFIXES = (
    *(
        ".wav",
        ".flac",
        ".mp3",
        ".ogg",
        ".oga",
        ".opus",
        ".aif",
        ".aiff",
        ".aifc",
        ".caf",
    ),
    *(".m4a", ".m4b", ".mka", ".aac"),  # read by PyAV
)


#: Sample pictures in the wheel (pyproject.toml lists them, too).
SAMPLES = (
    "black_circle_left_of_blue_square.png",
    "digits_728.png",
    "receipt.jpg",
    "red_circle.png",
    "red_circle_above_blue_triangle.png",
    "yellow_triangle_left_of_green_cross.png",
)


class MissingAssets(FileNotFoundError):
    """The installation lacks a library file."""


def sample_model() -> Path:
    """Return the sample model's folder: a qwen2_5_vl of 11.8 M parameters that reads short printed pages, for
    demonstration only. Raises MissingAssets."""
    return _find("reader", marker="config.json")


def default_checkpoint() -> Path:
    """Return the test checkpoint's folder: a qwen2_vl of 0.9 M parameters that describes coloured shapes, for quick
    tests. Raises MissingAssets."""
    return _find("checkpoints/qwen2_vl", marker="config.json")


def sample_images() -> list[Path]:
    """Return the sample pictures, by name. Raises MissingAssets."""
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
    """Whether a picture comes with the library."""
    path = Path(picture).resolve()
    return any(path.is_relative_to(root / "images") for root in (PACKAGED, CHECKOUT))
