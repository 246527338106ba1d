"""A command's model and batcher options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from vlm_batch.assets import sample_model
from vlm_batch.jobs.runner import Batcher
from vlm_batch.runtime.imports import deferred_import, without_gc

EMBEDDED = "the embedded sample (11.8 million parameters)"
KNOWS = "it reads short printed pages, receipts, tables and bar charts, knows coloured shapes, and is no model for work"

#: The record of each option, and its field there. Those of None are the batcher's own.
BATCHER_OPTIONS: Mapping[str | None, Mapping[str, str]] = {
    None: {name: name for name in ("trust_remote_code", "max_bytes", "reproducible")},
    "limits": {
        "max_prompt_tokens": "prompt_tokens",
        "max_image_pixels": "image_pixels",
        "max_video_pixels": "video_pixels",
        "max_request_pixels": "request_pixels",
        "max_audio_seconds": "audio_seconds",
        "min_pixels": "min_pixels",
        "max_pixels": "max_pixels",
    },
    "caches": {
        "cache_bytes": "max_bytes",
        "cache_dir": "directory",
        "cache_dir_bytes": "directory_bytes",
    },
    "kv": {
        "kv_bits": "bits",
        "kv_group_size": "group_size",
        "kv_quant_scheme": "scheme",
        "quantized_kv_start": "start",
    },
    "policy": {name: name for name in ("look_ahead", "look_ahead_bytes")},
}


#: Packages that others import for what most runs do not do: requests to a hub, pictures that mlx-vlm fetches, recordings.
UNUSED = ("requests", "httpcore2", "httpcore", "soundfile", "soxr", "sentencepiece")


class UsageError(Exception):
    """The command line asks for the impossible; users see the message."""


OpenBatcher = Callable[[argparse.Namespace], AbstractContextManager[Batcher]]


def load_model(args: argparse.Namespace) -> AbstractContextManager[Batcher]:
    """Open the batcher. Imports MLX only here, so that ``--version`` is quick."""
    model = str(args.model or sample_model())
    if args.model is None:
        print(f"vlm-batch: no --model: {EMBEDDED} answers; {KNOWS}", file=sys.stderr)
    place = place_of(model)
    with without_gc(), deferred_import(*UNUSED):
        from vlm_batch.batcher import VLMBatcher

    options = said_options(args)
    with in_one_line(f"cannot load the model {model}"):
        return VLMBatcher(str(place), max_rows=args.batch, **options)


@contextmanager
def checked() -> Iterator[None]:
    """Raise UsageError for values that settings refuse."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


@contextmanager
def in_one_line(said: str) -> Iterator[None]:
    """Raise UsageError for whatever a loader or a model's files raise: users need one line of it."""
    try:
        yield
    except Exception as error:
        raise UsageError(f"{said}: {type(error).__name__}: {error}") from error


def place_of(model: str) -> Path | str:
    """Return a model's folder, or else its id on the hub. Raises UsageError for a folder that is not there."""
    folder = Path(model).expanduser()
    if folder.exists():
        return folder
    if model.startswith((".", "/", "~")):
        raise UsageError(
            f"there is no model at {model}; give a folder that holds config.json, or a hub id like org/name"
        )
    return model


def said_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the command line's batcher options."""
    from vlm_batch.batcher import Caches, KVQuantisation, Limits

    given = vars(args)
    said = {
        record: {field: given[name] for name, field in names.items() if name in given}
        for record, names in BATCHER_OPTIONS.items()
    }
    said["policy"] |= given.get("policy", {})
    if "bits" not in said["kv"]:
        said["kv"] = {}  # settings of what nobody asked for
    kinds: Mapping[str, Callable[..., Any]] = {
        "limits": Limits,
        "caches": Caches,
        "kv": KVQuantisation,
        "policy": dict,
    }
    with checked():
        return said[None] | {
            record: kind(**said[record])
            for record, kind in kinds.items()
            if said[record]
        }


def add_model(
    parser: argparse._ActionsContainer, default: str = "default: the embedded sample"
) -> None:
    parser.add_argument(
        "--model",
        default=None,
        metavar="PATH|HUB_ID",
        help=f"a folder, or an id of Hugging Face's hub ({default})",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="allow code that comes with the model",
    )


def add_batcher(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch",
        "--max-rows",
        type=at_least(1),
        default=None,
        metavar="N",
        help="most rows in the batch (default: as many as pay, by measured steps)",
    )
    size = amount_of_bytes
    for option, kind, metavar, said in (
        (
            "--look-ahead",
            at_least(1),
            "N",
            "requests that are read ahead of the batch (default: 16)",
        ),
        (
            "--look-ahead-bytes",
            size,
            "N",
            "memory for what is read ahead, as 2G (default: 1.07G)",
        ),
        (
            "--max-bytes",
            size,
            "N",
            "memory for keys and values of the batch, as 4GB (default: what weights and caches leave)",
        ),
        (
            "--max-prompt-tokens",
            at_least(1),
            "N",
            "longest prompt, pictures included (default: the model's)",
        ),
        (
            "--max-image-pixels",
            _amount,
            "N",
            "largest picture, as 40M; none lifts it (default: 89.5M)",
        ),
        (
            "--max-video-pixels",
            _amount,
            "N",
            "likewise, all frames of a video together (default: 500M)",
        ),
        (
            "--max-request-pixels",
            _amount,
            "N",
            "likewise, all pictures and frames of a request (default: 500M)",
        ),
        (
            "--max-audio-seconds",
            float,
            "SECONDS",
            "longest recordings of a request together (default: 1800)",
        ),
        (
            "--min-pixels",
            size,
            "N",
            "least that the model sees of a picture (default: the model's)",
        ),
        (
            "--max-pixels",
            size,
            "N",
            "most that the model sees of a picture, as 1M: fewer tokens (default, and most: the model's)",
        ),
        (
            "--cache-bytes",
            size,
            "N",
            "memory kept for later rows, as 2G; 0 keeps nothing (default: 1.07G)",
        ),
        (
            "--cache-dir",
            str,
            "FOLDER",
            "where what memory cannot keep goes (default: nowhere)",
        ),
        ("--cache-dir-bytes", size, "N", "most bytes of that folder"),
    ):
        group.add_argument(
            option, type=kind, metavar=metavar, help=said, default=argparse.SUPPRESS
        )
    add_speed(group)


def add_speed(group: argparse._ActionsContainer) -> None:
    """Add options that change speed, not questions."""
    say = partial(group.add_argument, default=argparse.SUPPRESS)
    say(
        "--kv-bits",
        type=float,
        metavar="BITS",
        help="keys and values in so many bits (default: exact)",
    )
    say(
        "--kv-group-size",
        type=at_least(1),
        metavar="N",
        help="values that share a scale (default: 64)",
    )
    say("--kv-quant-scheme", choices=("uniform", "turboquant"), help="default: uniform")
    say(
        "--quantized-kv-start",
        type=at_least(0),
        metavar="N",
        help="tokens that stay exact (default: 0)",
    )
    say(
        "--reproducible",
        action="store_true",
        help="the same answers, bit for bit, whoever else is in the batch",
    )
    say(
        "--policy",
        type=_policy,
        metavar="NAME=VALUE,...",
        help="settings of the engine in the place of the device's (docs/tuning.md); bench --tune prints those worth it here",
    )


def _policy(text: str) -> dict[str, Any]:
    from vlm_batch.policy import check_policy

    pairs = (part.partition("=") for part in text.split(","))
    try:
        return check_policy(
            {name.strip(): _plain_value(value.strip()) for name, _, value in pairs}
        )
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _plain_value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _amount(text: str) -> int | None:
    return None if text.lower() == "none" else amount_of_bytes(text)


def amount_of_bytes(text: str) -> int:
    """Parse a number with decimal K, M, G or T, and optional B: 500M, 4GB."""
    factors = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
    number = text.lower().removesuffix("b")
    factor = factors.get(number[-1:], 1)
    try:
        value = float(number[:-1] if number[-1:] in factors else number) * factor
        if not 0 <= value < 2**62:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no amount such as 500M or 2G"
        ) from None
    return int(value)


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number of at least {least}"
            )
        return value

    return number
