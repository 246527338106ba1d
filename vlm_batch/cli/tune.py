"""``vlm-batch bench --tune``: measure engine settings for one model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from PIL import Image
from rich import box
from rich.table import Column, Table

from vlm_batch.assets import default_checkpoint
from vlm_batch.cli.console import beside, open_console
from vlm_batch.cli.model import in_one_line, said_options
from vlm_batch.errors import VLMBatchError
from vlm_batch.types import Request

if TYPE_CHECKING:
    from vlm_batch.cli.measuring import Measured

#: Most pictures in one call, and their sides in pixels.
PICTURES, SIDE = 16, 336
#: Seconds after which nothing new is measured.
SECONDS = 120.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("settings of the device")
    group.add_argument(
        "--tune",
        action="store_true",
        help="measure rows, chunks, pictures and prompts together, and layout for this model here, and print the line that "
        "passes what is found; the machine should be idle",
    )
    group.add_argument(
        "--tune-seconds",
        type=float,
        default=SECONDS,
        metavar="S",
        help="begin nothing new after this (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the model, print settings, and return the figures."""
    from vlm_batch.adapters.quantisation import check_quantisation
    from vlm_batch.cli.measuring import measure, settings_of
    from vlm_batch.loading import adapt, load_model
    from vlm_batch.runtime.device import device

    out = beside(args.json)
    kv = said_options(args).get("kv")
    with in_one_line("cannot measure the model"):
        model, processor = load_model(
            args.model or default_checkpoint(), trust_remote_code=args.trust_remote_code
        )
        adapter = adapt(model)
        if kv is not None:
            check_quantisation(adapter, kv)
        pictures = _pictures(adapter, model, processor)
        measured = measure(adapter, kv, pictures, seconds=args.tune_seconds, say=_say)
    found = settings_of(measured)
    show(measured, found, out)
    figures = {"device": device().value, "family": adapter.spec.family}
    return figures | {"settings": found, "measured": asdict(measured)}


def show(measured: Measured, found: Mapping[str, Any], out: TextIO) -> None:
    """Print the measurements, the settings, and the line to pass."""
    from vlm_batch.policy import describe_policy, policy_of

    console = open_console(out)
    curves = [
        *(
            (f"a decode step, {layout}: ms by rows", times)
            for layout, times in measured.decode.items()
        ),
        ("a prompt's token: ms by tokens of a chunk", measured.chunks),
        ("a prompt: ms by prompts in one array", measured.prompts),
        ("a picture: ms by pictures in one call", measured.pictures),
    ]
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for title, times in curves:
        if times:
            table.add_row(
                title,
                "  ".join(
                    f"{count}: {1000 * seconds:.3g}" for count, seconds in times.items()
                ),
            )
    console.print(table)
    table = Table(
        "setting",
        Column("here", justify="right"),
        Column("table", justify="right"),
        "the table's source",
        box=box.SIMPLE_HEAD,
    )
    for name, one in describe_policy(policy_of({}), {}).items():
        table.add_row(name, str(found.get(name, "")), str(one["value"]), one["source"])
    console.print(table)
    if found:
        said = ",".join(f"{name}={value}" for name, value in found.items())
        console.print(
            f"VLMBatcher(..., policy={found})\nvlm-batch ... --policy {said}",
            markup=False,
            soft_wrap=True,
        )


def _say(said: str) -> None:
    print(f"vlm-batch: measuring {said}", file=sys.stderr, flush=True)


def _pictures(adapter: Any, model: Any, processor: Any) -> Sequence[Mapping[str, Any]]:
    """Return processor outputs of different pictures; none if calls cannot be shared."""
    from vlm_batch.arrays import as_mlx
    from vlm_batch.cli.verifying import prepared

    if not adapter.spec.images:
        return ()
    random = np.random.default_rng(4)
    noise = [
        Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        for _ in range(PICTURES)
    ]
    requests = [
        Request(prompt="describe the picture", images=(one.resize((SIDE, SIDE)),))
        for one in noise
    ]
    try:
        given = [
            as_mlx(dict(inputs))
            for inputs in prepared(adapter, model, processor, requests)
        ]
        alike = adapter.encode_together(given[:2])
    except (VLMBatchError, ValueError):  # its template wants more than this, say
        return ()
    return () if alike[0] is given[0] else given
