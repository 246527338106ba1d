"""``vlm-batch verify``: check that a model answers alike alone and in company, at its serving precision."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_batch.assets import AUDIO_SUFFIXES, default_checkpoint, sample_images
from vlm_batch.cli.console import beside
from vlm_batch.cli.model import OpenBatcher, UsageError, in_one_line, place_of
from vlm_batch.errors import InvalidRequest
from vlm_batch.inputs.images import picture_suffixes
from vlm_batch.types import Request

if TYPE_CHECKING:
    from vlm_batch.cli.prompts import PromptVerification
    from vlm_batch.cli.verifying import Verification

#: Precisions of the embedded checkpoint: the type to load, and bits to quantise to.
PRECISIONS: tuple[tuple[str, int | None], ...] = (
    ("float32", None),
    ("bfloat16", None),
    ("float16", None),
    ("bfloat16", 8),
    ("bfloat16", 4),
)
MOST_PICTURES = 8
TEXTS = ("count to 12", "repeat: a a a a")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=None,
        metavar="PATH|HUB_ID",
        help="the model (default: the embedded one, in five precisions)",
    )
    parser.add_argument(
        "--dtype",
        default="checkpoint",
        choices=("checkpoint", "auto", "float32", "bfloat16", "float16"),
        help="what the model's weights are loaded in (default: as they are stored)",
    )
    parser.add_argument(
        "--images",
        metavar="DIR",
        help=f"your pictures, {MOST_PICTURES} at most (default: the sample pictures)",
    )
    parser.add_argument(
        "--audios",
        metavar="DIR",
        help=f"your recordings, {MOST_PICTURES} at most, for a model that hears (default: none)",
    )
    parser.add_argument(
        "--prompt",
        default="describe the picture",
        help="the question (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=24,
        metavar="N",
        help="tokens of each answer (default: %(default)s)",
    )
    parser.add_argument(
        "--prompts",
        action="store_true",
        help="compare prompts, ends and pixels with transformers' instead, in seconds and without running the model",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write what was found as JSON; - is standard output",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw it (needs matplotlib)")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="allow code that comes with the model",
    )


def run(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    """Verify a model, or the embedded one in several precisions; return 0 if as promised."""
    if args.max_tokens < 1:
        raise UsageError(f"--max-tokens {args.max_tokens}: at least 1")
    if args.prompts:
        return _run_prompts(args)
    requests = [
        Request(prompt=args.prompt, images=(str(path),))
        for path in pictures(args.images)
    ]
    requests += [
        Request(prompt=args.prompt, audios=(str(path),))
        for path in recordings(args.audios)
    ]
    requests += [Request(prompt=text) for text in TEXTS]
    found: list[Verification] = []
    table = beside(args.json)
    for one in _verified(args, requests):
        print(("\n" if found else "") + one.text(), file=table, flush=True)
        found.append(one)
    status = _status(args.json, found)  # before a picture, which may fail
    if args.plot is not None and not draw(Path(args.plot), found):
        print(
            "no picture: matplotlib is not installed (pip install 'vlm-batch[bench]')",
            file=sys.stderr,
        )
    return status


def _status(
    target: str | None, found: Sequence[Verification | PromptVerification]
) -> int:
    """Write what was found, if that is asked for; return 0 if all is as promised."""
    is_ok = all(one.ok for one in found)
    if target is not None:
        whole = {"ok": is_ok, "models": [one.as_json() for one in found]}
        _write(target, json.dumps(whole, indent=2) + "\n")
    return 0 if is_ok else 1


def _run_prompts(args: argparse.Namespace) -> int:
    """Compare a folder's prompts; return 0 if they are transformers'."""
    # --help should not wait for MLX
    from vlm_batch.cli.prompts import Folder, verify_prompts
    from vlm_batch.loading import find_checkpoint

    name = args.model or str(default_checkpoint())
    place = place_of(name)
    with in_one_line(f"cannot read the folder {name}"):
        path = place if isinstance(place, Path) else find_checkpoint(place)
        found = verify_prompts(
            Folder(path), name=args.model or "the embedded checkpoint"
        )
    print(found.text(), file=beside(args.json), flush=True)
    return _status(args.json, [found])


def pictures(folder: str | None) -> list[Path]:
    if folder is None:
        return sample_images()
    return _found("--images", "picture", folder, picture_suffixes())


def recordings(folder: str | None) -> list[Path]:
    if folder is None:
        return []
    return _found("--audios", "recording", folder, AUDIO_SUFFIXES)


def _found(
    option: str, noun: str, folder: str, suffixes: Collection[str]
) -> list[Path]:
    where = Path(folder).expanduser()
    found = sorted(
        path
        for path in where.rglob("*")
        if path.suffix.lower() in suffixes and path.is_file()
    )
    if not found:
        raise UsageError(
            f"{option} {folder}: no {noun} there; looked for files that end in {' '.join(sorted(suffixes))}"
        )
    return found[:MOST_PICTURES]


def _verified(
    args: argparse.Namespace, requests: Sequence[Request]
) -> Iterator[Verification]:
    from vlm_batch.adapters.precision import quantised  # --help should not wait for MLX
    from vlm_batch.cli.verifying import verify
    from vlm_batch.loading import load_model

    name = args.model or str(default_checkpoint())
    place = place_of(name)
    called = args.model or "the embedded checkpoint"
    asked = ((args.dtype, None),) if args.model else PRECISIONS
    for dtype, bits in asked:
        with in_one_line(f"cannot load the model {name}"):
            model, processor = load_model(
                place, dtype=dtype, trust_remote_code=args.trust_remote_code
            )
        if bits is not None and not quantised(model, bits):
            continue
        taken = requests
        if not _takes_pictures(model):
            taken = [one for one in requests if not one.images]
        try:
            found = verify(
                model,
                processor,
                taken,
                name=called,
                max_tokens=args.max_tokens,
                progress=_say,
            )
        except InvalidRequest as error:
            raise UsageError(f"a request cannot be read: {error}") from error
        yield found


def _say(said: str) -> None:
    print(f"  {said} ...", file=sys.stderr, flush=True)


def _takes_pictures(model: Any) -> bool:
    from vlm_batch.models import spec_for

    spec = spec_for(str(model.config.model_type))
    return spec is None or spec.images


def _write(target: str, text: str) -> None:
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from error


def draw(path: Path, found: Sequence[Verification]) -> bool:
    """Plot shares of requests with equal bits and equal tokens."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(found), 1, figsize=(9, 0.6 + 2.3 * len(found)), squeeze=False
    )
    for axis, one in zip(axes[:, 0], found, strict=True):
        names = [comparison.name for comparison in one.comparisons]
        equal = [100 * each.equal / max(each.requests, 1) for each in one.comparisons]
        same = [
            100 * each.identical / max(each.requests, 1) for each in one.comparisons
        ]
        axis.barh(names, equal, color="lightsteelblue", label="same tokens")
        axis.barh(names, same, color="tab:blue", label="same bits")
        axis.bar_label(
            axis.containers[0],
            [comparison.verdict[:32] for comparison in one.comparisons],
            fontsize=7,
        )
        axis.set_xlim(0, 125)
        axis.invert_yaxis()
        axis.tick_params(labelsize=7)
        axis.set_title(f"{one.model}: {one.family}, {one.precision}", fontsize=8)
    # no bar or label is there
    axes[-1][0].legend(
        fontsize=7, loc="upper right", bbox_to_anchor=(1.0, -0.12), ncols=2
    )
    axes[-1][0].set_xlabel("% of the requests", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
