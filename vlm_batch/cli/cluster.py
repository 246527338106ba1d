"""``vlm-batch run --ray``: options, and the cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from vlm_batch.cli.model import at_least, said_options
from vlm_batch.jobs.ray import Cluster


def add_cluster(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="have the machines of a Ray cluster answer: auto for the one that this machine belongs to, an address, or "
        "local for all devices of this machine; this process reads the rows and writes the answers",
    )
    group.add_argument(
        "--ray-workers",
        type=at_least(1),
        metavar="N",
        help="engines (default: one a GPU, or one a machine where there are none)",
    )
    group.add_argument(
        "--ray-gpus",
        type=float,
        metavar="N",
        help="GPUs of an engine, 0 to 1 (default: 1, if any)",
    )
    group.add_argument(
        "--ray-cpus",
        type=float,
        default=1.0,
        metavar="N",
        help="CPUs set aside for an engine (default: 1)",
    )
    group.add_argument(
        "--ray-shared-files",
        action="store_true",
        help="workers read pictures by the same paths themselves; otherwise they are read here and sent",
    )


def open_cluster(args: argparse.Namespace) -> Cluster:
    model = args.model
    if model is not None and Path(model).expanduser().exists():
        model = str(Path(model).expanduser().absolute())
    return Cluster(
        model,
        address=args.ray,
        workers=args.ray_workers,
        num_gpus=args.ray_gpus,
        num_cpus=args.ray_cpus,
        shared_files=args.ray_shared_files,
        options={"max_rows": args.batch, **said_options(args)},
    )
