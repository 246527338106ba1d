"""``vlm-batch serve``: the HTTP server's flags, named as in ``mlx_vlm.server`` where both have them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_batch.assets import sample_model
from vlm_batch.cli import launchd
from vlm_batch.cli.model import (
    OpenBatcher,
    UsageError,
    add_model,
    add_speed,
    amount_of_bytes,
    at_least,
    checked,
    said_options,
)
from vlm_batch.server.config import MEGABYTE, SAMPLINGS, ServerConfig, read_keys

if TYPE_CHECKING:
    from vlm_batch.batcher import VLMBatcher

API_KEY = "VLM_BATCH_API_KEY"
#: Everyday options and examples of ``serve``.
EVERYDAY = (
    (
        *(
            "--model",
            "--host",
            "--port",
            "--api-key",
            "--served-model-name",
            "--allow-urls",
            "--allow-dir",
            "--files",
        ),
        *(
            "--max-num-seqs",
            "--max-tokens",
            "--max-pixels",
            "--cache-dir",
            "--reproducible",
        ),
    ),
    (
        "vlm-batch serve --model MODEL",
        f"{API_KEY}=secret vlm-batch serve --model MODEL --host 0.0.0.0 --port 8000",
        "vlm-batch serve --model MODEL --allow-dir photos/ --max-pixels 1000000",
    ),
)


def run(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    """Serve until told to stop; return 2 if it could not begin."""
    if args.launchd:
        return _print_agent(args, os.environ)
    try:
        from vlm_batch.server.run import serve
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the server needs {error.name}: pip install 'vlm-batch[serve]'"
        ) from error
    with checked():
        is_served = serve(config_of(args, os.environ), lambda: load_batcher(args))
    return 0 if is_served else 2


def _print_agent(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Print launchd's property list for this command. Raises UsageError."""
    if args.api_key or environment.get(API_KEY):
        raise UsageError(
            f"a property list is no place for a key, and launchd does not know {API_KEY}: "
            "write the key into a file that only you can read, and name it with --keys FILE"
        )
    with checked():
        port = config_of(args, environment).port
    listed = launchd.property_list(args.words, port, environment)
    sys.stdout.write(listed.decode())
    file = f"~/Library/LaunchAgents/{launchd.label_of(port)}.plist"
    print(
        f"vlm-batch: as {file}, this begins with: launchctl bootstrap gui/$(id -u) {file}",
        file=sys.stderr,
    )
    return 0


def config_of(args: argparse.Namespace, environment: Mapping[str, str]) -> ServerConfig:
    from vlm_batch.runtime.memory import default_limit

    said = {
        one.name: vars(args)[one.name]
        for one in fields(ServerConfig)
        if one.name in vars(args)
    }
    said["model"] = str(args.model or sample_model())
    said["api_key"] = args.api_key or environment.get(API_KEY) or None
    said["keys"] = read_keys(args.keys) if args.keys else ()
    said["allow_dirs"] = tuple(Path(folder).expanduser() for folder in args.allow_dirs)
    said["served_names"] = tuple(args.served_names)
    said["allowed_hosts"] = tuple(args.allowed_hosts)
    said["proxies"] = (
        tuple(map(str.strip, args.proxies.split(","))) if args.proxies else ()
    )
    limit = args.max_memory_gb  # 0 is no limit
    said["max_memory"] = (
        default_limit() if limit is None else round(limit * 2**30) or None
    )
    return ServerConfig(**said)


def load_batcher(args: argparse.Namespace) -> VLMBatcher:
    """Load the model; it reads no paths or URLs: the server hands it bytes."""
    from vlm_batch.batcher import VLMBatcher
    from vlm_batch.inputs.fetch import FetchPolicy

    return VLMBatcher(
        str(args.model or sample_model()),
        max_rows=args.max_num_seqs,
        warm_up=args.warm_up,
        fetch=FetchPolicy(allow_http=False, allow_files=False),
        **said_options(args),
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    _add_model(parser.add_argument_group("model"))
    _add_network(parser.add_argument_group("network"))
    _add_media(parser.add_argument_group("what requests may bring"))
    _add_files(parser.add_argument_group("files and batches"))
    _add_responses(parser.add_argument_group("responses"))
    _add_limits(parser.add_argument_group("limits"))
    agent = "print a property list by which macOS keeps this command running, and serve nothing"
    parser.add_argument(launchd.FLAG, action="store_true", help=agent)


def _say(
    group: argparse._ArgumentGroup, flag: str, name: str, said: str, **how: Any
) -> None:
    """Add the flag of a ``ServerConfig`` field."""
    default = next(one.default for one in fields(ServerConfig) if one.name == name)
    group.add_argument(flag, dest=name, default=default, help=said, **how)


def _add_model(group: argparse._ArgumentGroup) -> None:
    add_model(group)
    names = "its names for clients; answers have the first (default: its last part)"
    _say(group, "--served-model-name", "served_names", names, metavar="NAME", nargs="+")
    _say(
        group,
        "--any-model",
        "any_model",
        "answer whatever model a request names",
        action="store_true",
    )
    rows = "most rows in the batch (default: as many as pay, by measured steps)"
    group.add_argument("--max-num-seqs", type=int, metavar="N", help=rows)
    add_speed(group)
    group.add_argument(
        "--cache-dir",
        metavar="FOLDER",
        help="keep what the prefix cache cannot hold on disk",
    )
    _say(
        group,
        "--enable-thinking",
        "enable_thinking",
        "think unless a request says otherwise",
        action="store_true",
    )
    plain = "read special tokens' spellings in chats as plain text (default: refuse such chats)"
    _say(
        group,
        "--escape-special-tokens",
        "escape_special_tokens",
        plain,
        action="store_true",
    )
    sampling = "what a request does not say: greedy, or as generation_config.json recommends (default: %(default)s)"
    _say(group, "--sampling", "sampling", sampling, choices=SAMPLINGS)
    parser = "mlx_vlm.tools' parser (default: by chat template)"
    _say(group, "--tool-parser", "tool_parser", parser, metavar="NAME")
    shapes = "compute shapes that requests will bring while nobody asks (default: yes)"
    group.add_argument(
        "--warm-up", action=argparse.BooleanOptionalAction, default=True, help=shapes
    )
    _say(
        group,
        "--idle-unload",
        "idle_unload",
        "let go of the model when nobody asks",
        type=float,
        metavar="SECONDS",
    )


def _add_network(group: argparse._ArgumentGroup) -> None:
    _say(group, "--host", "host", "address to listen on (default: %(default)s)")
    _say(group, "--port", "port", "default: %(default)s; 0 takes a free one", type=int)
    _say(
        group,
        "--api-key",
        "api_key",
        f"the key that clients must send; better in {API_KEY}",
        metavar="KEY",
    )
    keys = "a file with a key for each client, one a line; 'priority' behind one lets it send X-Priority"
    group.add_argument("--keys", type=Path, metavar="FILE", help=keys)
    _say(
        group,
        "--no-auth",
        "no_auth",
        "need no key although others can reach the server",
        action="store_true",
    )
    name = "a name that clients may use for this server"
    group.add_argument(
        "--allowed-host",
        dest="allowed_hosts",
        action="append",
        default=[],
        metavar="NAME",
        help=name,
    )
    proxies = "addresses or networks, with commas, whose X-Forwarded-For says who the client is (default: nobody's)"
    prefix = "the path under which a proxy shows this server, as /models/qwen"
    _say(group, "--root-path", "root_path", prefix, metavar="PATH")
    group.add_argument("--proxies", metavar="ADDRESSES", help=proxies)


def _add_media(group: argparse._ArgumentGroup) -> None:
    urls = "fetch http(s) media, public hosts only"
    _say(group, "--allow-urls", "allow_urls", urls, action="store_true")
    folder = "let requests name files in this folder"
    group.add_argument(
        "--allow-dir",
        dest="allow_dirs",
        action="append",
        default=[],
        metavar="FOLDER",
        help=folder,
    )
    _say(
        group,
        "--max-images",
        "max_images",
        "in one request (default: %(default)s)",
        type=int,
        metavar="N",
    )
    _say(
        group,
        "--max-videos",
        "max_videos",
        "in one request (default: %(default)s)",
        type=int,
        metavar="N",
    )
    _say(
        group,
        "--max-audios",
        "max_audios",
        "in one request (default: %(default)s)",
        type=int,
        metavar="N",
    )
    pixels = "of a picture (default: %(default)s)"
    group.add_argument(
        "--max-image-pixels", type=int, default=89_478_485, metavar="N", help=pixels
    )
    pixels = "of a request's pictures and frames together (default: %(default)s)"
    group.add_argument(
        "--max-request-pixels", type=int, default=500_000_000, metavar="N", help=pixels
    )
    least = "show the model smaller pictures larger, if a request does not say"
    group.add_argument("--min-pixels", type=int, metavar="N", help=least)
    most = "show the model larger pictures smaller, whatever a request says"
    group.add_argument("--max-pixels", type=int, metavar="N", help=most)
    _say(
        group,
        "--max-body-mb",
        "max_body",
        "of a body (default: 64)",
        type=_megabytes,
        metavar="MB",
    )


def _add_files(group: argparse._ArgumentGroup) -> None:
    folder = "keep files and batches in this folder (default: neither is served)"
    group.add_argument("--files", type=_folder, metavar="FOLDER", help=folder)
    most = "of all files (default: 10)"
    upload = "of one file (default: 200)"
    _say(group, "--files-gb", "max_files", most, type=_gigabytes, metavar="GB")
    _say(group, "--max-upload-mb", "max_upload", upload, type=_megabytes, metavar="MB")


def _add_responses(group: argparse._ArgumentGroup) -> None:
    folder = "keep responses in this folder (default: in memory, until the server ends)"
    group.add_argument("--responses", type=_folder, metavar="FOLDER", help=folder)
    most = "of all responses in the folder (default: 10)"
    _say(group, "--responses-gb", "max_responses", most, type=_gigabytes, metavar="GB")
    memory = "of responses in memory (default: 512)"
    flag, name = "--responses-memory-mb", "max_kept"
    _say(group, flag, name, memory, type=_megabytes, metavar="MB")


def _add_limits(group: argparse._ArgumentGroup) -> None:
    answer = "longest answer, where a request does not say (default: %(default)s)"
    seconds = "of a request (default: %(default)s)"
    _say(group, "--max-tokens", "default_max_tokens", answer, type=int, metavar="N")
    group.add_argument(
        "--max-prompt-tokens",
        type=int,
        metavar="N",
        help="of a prompt, pictures included",
    )
    memory = "memory for keys and values of the batch, as 4GB (default: what the device has beside weights and caches)"
    group.add_argument("--max-bytes", type=amount_of_bytes, metavar="N", help=memory)
    _say(
        group,
        "--max-queue",
        "max_queue",
        "requests that may wait (default: %(default)s)",
        type=int,
        metavar="N",
    )
    full = "refuse to let requests wait while arrays take more (default: nine tenths of the device's; 0: no limit)"
    group.add_argument("--max-memory-gb", type=float, metavar="GB", help=full)
    _say(
        group,
        "--request-timeout",
        "request_seconds",
        seconds,
        type=float,
        metavar="SECONDS",
    )
    end = "that answers have to end in when the server stops (default: %(default)s)"
    _say(
        group,
        "--shutdown-timeout",
        "shutdown_seconds",
        end,
        type=float,
        metavar="SECONDS",
    )


def _megabytes(text: str) -> int:
    return at_least(1)(text) * MEGABYTE


def _gigabytes(text: str) -> int:
    return at_least(1)(text) * MEGABYTE * 1024


def _folder(text: str) -> Path:
    return Path(text).expanduser()
