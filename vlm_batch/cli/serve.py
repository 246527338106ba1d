"""``vlm-batch serve``: the flags of the HTTP server. Those of ``mlx_vlm.server`` keep their names."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_batch.assets import default_checkpoint
from vlm_batch.cli.model import add_speed, amount_of_bytes, said_options

if TYPE_CHECKING:
    from vlm_batch.server.config import ServerConfig
    from vlm_batch.server.service import Batcher

API_KEY = "VLM_BATCH_API_KEY"


class MissingExtra(Exception):
    """The server's own dependencies are not installed."""


def run(args: argparse.Namespace) -> bool:
    """Serve until told to stop. False if the server could not begin. Raises MissingExtra, InvalidConfig."""
    try:
        from vlm_batch.server.run import serve
    except ModuleNotFoundError as error:
        raise MissingExtra(f"the server needs {error.name}: pip install 'vlm-batch[serve]'") from error
    return serve(config_of(args, os.environ), lambda: open_batcher(args))


def config_of(args: argparse.Namespace, environment: Mapping[str, str]) -> ServerConfig:
    """The server's configuration. Raises InvalidConfig."""
    from vlm_batch.server.config import MEGABYTE, ServerConfig

    return ServerConfig(
        model=str(args.model or default_checkpoint()),
        served_name=args.served_model_name,
        host=args.host,
        port=args.port,
        api_key=args.api_key or environment.get(API_KEY) or None,
        no_auth=args.no_auth,
        allowed_hosts=tuple(args.allowed_host),
        allow_urls=args.allow_urls,
        allow_dirs=tuple(Path(folder).expanduser() for folder in args.allow_dir),
        max_body=args.max_body_mb * MEGABYTE,
        max_images=args.max_images,
        max_videos=args.max_videos,
        default_max_tokens=args.max_tokens,
        max_queue=args.max_queue,
        max_memory=_memory_limit(args.max_memory_gb),
        request_seconds=args.request_timeout,
        idle_unload=args.idle_unload,
        shutdown_seconds=args.shutdown_timeout,
        enable_thinking=args.enable_thinking,
        tool_parser=args.tool_parser,
    )


def _memory_limit(gigabytes: float | None) -> int | None:
    """Bytes that arrays may take before nobody may wait any more: what was said (0 for no limit), or what the device bears."""
    if gigabytes is not None:
        return round(gigabytes * 2**30) or None
    from vlm_batch.runtime.memory import usual_limit

    return usual_limit()


def open_batcher(args: argparse.Namespace) -> Batcher:
    """Load the model. The batcher itself reads no path and no URL: the server hands it bytes and data URIs."""
    from vlm_batch.batcher import VLMBatcher
    from vlm_batch.inputs.fetch import FetchPolicy

    return VLMBatcher(
        str(args.model or default_checkpoint()),
        max_rows=args.max_num_seqs,
        warm_up=args.warm_up,
        fetch=FetchPolicy(allow_http=False, allow_files=False),
        **said_options(args),
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``vlm-batch serve``."""
    _add_model(parser.add_argument_group("model"))
    _add_network(parser.add_argument_group("network"))
    _add_media(parser.add_argument_group("what requests may bring"))
    _add_limits(parser.add_argument_group("limits"))


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", metavar="PATH|HUB_ID", help="the model (default: the embedded tiny checkpoint)")
    group.add_argument("--served-model-name", metavar="NAME", help="its name on the wire (default: the last part)")
    group.add_argument("--trust-remote-code", action="store_true", help="allow code that comes with the model")
    group.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="most rows in the batch (default: as many as pay, by measured steps)",
    )
    add_speed(group)
    group.add_argument("--cache-dir", metavar="FOLDER", help="keep what the prefix cache cannot hold on disk")
    group.add_argument("--enable-thinking", action="store_true", help="think unless a request says otherwise")
    group.add_argument("--tool-parser", metavar="NAME", help="mlx_vlm.tools' parser (default: by chat template)")
    group.add_argument(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute shapes that requests will bring while nobody asks (default: yes)",
    )
    group.add_argument("--idle-unload", type=float, metavar="SECONDS", help="let go of the model when nobody asks")


def _add_network(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8080, help="default: %(default)s; 0 takes a free one")
    group.add_argument("--api-key", metavar="KEY", help=f"the key that clients must send; better in {API_KEY}")
    group.add_argument("--no-auth", action="store_true", help="need no key although others can reach the server")
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that clients may use for this server",
    )


def _add_media(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--allow-urls", action="store_true", help="fetch http(s) pictures and videos, public hosts only")
    group.add_argument(
        "--allow-dir", action="append", default=[], metavar="FOLDER", help="let requests name files in this folder"
    )
    group.add_argument("--max-images", type=int, default=32, metavar="N", help="in one request (default: %(default)s)")
    group.add_argument("--max-videos", type=int, default=4, metavar="N", help="in one request (default: %(default)s)")
    group.add_argument(
        "--max-image-pixels", type=int, default=89_478_485, metavar="N", help="of a picture (default: %(default)s)"
    )
    group.add_argument(
        "--min-pixels", type=int, metavar="N", help="show the model smaller pictures larger, if a request does not say"
    )
    group.add_argument(
        "--max-pixels", type=int, metavar="N", help="show the model larger pictures smaller, whatever a request says"
    )
    group.add_argument("--max-body-mb", type=int, default=64, metavar="MB", help="of a body (default: %(default)s)")


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="of an answer, unless it says so (default: %(default)s)",
    )
    group.add_argument("--max-prompt-tokens", type=int, metavar="N", help="of a prompt, pictures included")
    group.add_argument(
        "--max-bytes",
        type=amount_of_bytes,
        metavar="N",
        help="memory for keys and values of the batch, as 4GB (default: what the device has beside weights and caches)",
    )
    group.add_argument(
        "--max-queue", type=int, default=256, metavar="N", help="requests that may wait (default: %(default)s)"
    )
    group.add_argument(
        "--max-memory-gb",
        type=float,
        metavar="GB",
        help="refuse to let requests wait while arrays take more (default: nine tenths of the device's; 0: no limit)",
    )
    group.add_argument(
        "--request-timeout", type=float, default=600.0, metavar="SECONDS", help="of a request (default: %(default)s)"
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="that answers have to end in when the server stops (default: %(default)s)",
    )
