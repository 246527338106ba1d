"""The model of a command: its options, and opening it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_batch.assets import default_checkpoint
from vlm_batch.jobs.runner import Batcher

if TYPE_CHECKING:
    from vlm_batch.caches.quantisation import KVQuantisation

EMBEDDED = "the embedded test piece (0.9 million parameters)"

#: Options that go to the batcher by their own names, where they are said.
BATCHER_OPTIONS = (
    "trust_remote_code",
    "look_ahead",
    "look_ahead_bytes",
    "max_bytes",
    "max_prompt_tokens",
    "max_image_pixels",
    "max_video_pixels",
    "min_pixels",
    "max_pixels",
    "cache_bytes",
    "cache_dir",
    "cache_dir_bytes",
    "kv_bits",
    "kv_group_size",
    "kv_quant_scheme",
    "quantized_kv_start",
    "reproducible",
    "policy",
)
_UNSAID = object()


class UsageError(Exception):
    """The command line asks for something that cannot be done; the message goes to the user as it is."""


OpenBatcher = Callable[[argparse.Namespace], AbstractContextManager[Batcher]]


def load_model(args: argparse.Namespace) -> AbstractContextManager[Batcher]:
    """The real batcher. Imported here: ``--version`` and usage errors should not wait for MLX. Raises UsageError."""
    model = str(args.model or default_checkpoint())
    if args.model is None:
        print(f"vlm-batch: no --model: {EMBEDDED} answers; it knows coloured shapes only", file=sys.stderr)
    if model.startswith((".", "/", "~")) and not Path(model).expanduser().exists():
        raise UsageError(
            f"there is no model at {model}; give a folder that holds config.json, or a hub id like org/name"
        )
    from vlm_batch.batcher import VLMBatcher

    try:
        return VLMBatcher(str(Path(model).expanduser()), max_rows=args.batch, **said_options(args))
    except Exception as error:  # whatever the loader raises, the user needs one line of it
        raise UsageError(f"cannot load the model {model}: {type(error).__name__}: {error}") from error


def said_options(args: argparse.Namespace) -> dict[str, Any]:
    """The batcher's options that the command line says something of."""
    return {name: value for name in BATCHER_OPTIONS if (value := vars(args).get(name, _UNSAID)) is not _UNSAID}


def said_quantisation(args: argparse.Namespace) -> KVQuantisation | None:
    """The settings of keys and values in few bits that the command line names. Raises UsageError."""
    from vlm_batch.caches.quantisation import quantisation_of

    names = {
        "kv_bits": "bits",
        "kv_group_size": "group_size",
        "kv_quant_scheme": "scheme",
        "quantized_kv_start": "start",
    }
    said = {names[name]: value for name, value in said_options(args).items() if name in names}
    try:
        return quantisation_of(**{"bits": None, **said})
    except ValueError as error:
        raise UsageError(str(error)) from error


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options that name a model."""
    parser.add_argument(
        "--model", default=None, metavar="PATH|HUB_ID", help="the model (default: the embedded tiny checkpoint)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="allow code that comes with the model")


def add_batcher(group: argparse._ArgumentGroup) -> None:
    """Options that the batcher takes. What is not said is the library's own default."""
    group.add_argument(
        "--batch",
        "--max-rows",
        type=at_least(1),
        default=None,
        metavar="N",
        help="most rows in the batch (default: as many as pay, by measured steps)",
    )
    say = partial(group.add_argument, default=argparse.SUPPRESS)
    say("--look-ahead", type=at_least(1), metavar="N", help="requests that are read ahead of the batch (default: 16)")
    say(
        "--look-ahead-bytes",
        type=amount_of_bytes,
        metavar="N",
        help="memory for what is read ahead, as 2G (default: 1.07G)",
    )
    say(
        "--max-bytes",
        type=amount_of_bytes,
        metavar="N",
        help="memory for keys and values of the batch, as 4GB (default: what the device has beside weights and caches)",
    )
    say(
        "--max-prompt-tokens",
        type=at_least(1),
        metavar="N",
        help="longest prompt, pictures included (default: the model's)",
    )
    say("--max-image-pixels", type=_amount, metavar="N", help="largest picture, as 40M; none lifts it (default: 89.5M)")
    say(
        "--max-video-pixels", type=_amount, metavar="N", help="likewise, all frames of a video together (default: 500M)"
    )
    say(
        "--min-pixels",
        type=amount_of_bytes,
        metavar="N",
        help="least that the model sees of a picture (default: the model's)",
    )
    say(
        "--max-pixels",
        type=amount_of_bytes,
        metavar="N",
        help="most that the model sees of a picture, as 1M: fewer tokens (likewise)",
    )
    say(
        "--cache-bytes",
        type=amount_of_bytes,
        metavar="N",
        help="memory kept for later rows, as 2G; 0 keeps nothing (default: 1.07G)",
    )
    say("--cache-dir", metavar="FOLDER", help="where what memory cannot keep goes (default: nowhere)")
    say("--cache-dir-bytes", type=amount_of_bytes, metavar="N", help="most bytes of that folder")
    add_speed(group)


def add_speed(group: argparse._ActionsContainer) -> None:
    """The batcher's options that change how fast a model answers, and nothing of what it is asked."""
    say = partial(group.add_argument, default=argparse.SUPPRESS)
    say("--kv-bits", type=float, metavar="BITS", help="keys and values in so many bits (default: exact)")
    say("--kv-group-size", type=at_least(1), metavar="N", help="values that share a scale (default: 64)")
    say("--kv-quant-scheme", choices=("uniform", "turboquant"), help="default: uniform")
    say("--quantized-kv-start", type=at_least(0), metavar="N", help="tokens that stay exact (default: 0)")
    say("--reproducible", action="store_true", help="the same answers, bit for bit, whoever else is in the batch")
    add_policy(group)


def add_policy(group: argparse._ActionsContainer) -> None:
    """The option for the settings of the device."""
    group.add_argument(
        "--policy",
        type=_policy,
        default=argparse.SUPPRESS,
        metavar="tuned|device|NAME=VALUE,...",
        help="settings of the device: what bench --tune found here (default), the table's, or these over the table's",
    )


def _policy(text: str) -> Mapping[str, Any] | str:
    """``tuned``, ``device``, or settings as NAME=VALUE with commas between them."""
    from vlm_batch.policy import check_policy

    try:
        if "=" not in text:
            return check_policy(text)
        pairs = (part.partition("=") for part in text.split(","))
        return check_policy({name.strip(): _plain_value(value.strip()) for name, _, value in pairs})
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _plain_value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _amount(text: str) -> int | None:
    """A count such as 40M; None for "none"."""
    return None if text.lower() == "none" else amount_of_bytes(text)


def amount_of_bytes(text: str) -> int:
    """A number with a decimal K, M, G or T, and a B or none behind it: 500M, 4GB."""
    factors = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
    number = text.lower().removesuffix("b")
    factor = factors.get(number[-1:], 1)
    try:
        value = float(number[:-1] if number[-1:] in factors else number) * factor
        if not 0 <= value < 2**62:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount such as 500M or 2G") from None
    return int(value)


def at_least(least: int) -> Callable[[str], int]:
    """A reader of whole numbers for argparse."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return number
