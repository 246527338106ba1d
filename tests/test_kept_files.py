"""Files in cache folders: what is no regular, small file of our form counts as none, and folders are private."""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vlm_batch.caches import Placement
from vlm_batch.errors import InvalidCache
from vlm_batch.proofs.classes import COUNTS
from vlm_batch.proofs.proving import Proof
from vlm_batch.proofs.shared import SharedCall
from vlm_batch.store.directory import RowFiles
from vlm_batch.store.files import FORMAT, VERSION, Identity, read_row
from vlm_batch.store.prompt import PromptCache
from vlm_batch.store.proofs import FOLDER, read_proof, write_proof
from vlm_batch.store.saved import SavedRow

KEY = {"device": "x"}
GOOD: dict[str, Any] = {
    "classes": [[1, 2, 4]],
    "how": "it was tried",
    "graphs": False,
    "products": [["a product", [2, 4]]],
    "widths": [256, 512],
}
COUNTS_HERE = COUNTS[Placement.ROWS]


def special(path: Path, kind: str) -> None:
    """Put something that is no file, or no end of one, in a file's place."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        with open(path, "wb") as file:
            file.truncate(40 * 10**9)  # sparse
    else:
        path.symlink_to("nothing")


SPECIAL = ["pipe", "endless", "folder", "large", "dangling"]


@pytest.fixture
def proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    path = write_proof(KEY, GOOD)
    assert path is not None
    return path


def test_a_proof_is_read_as_it_was_written(proof: Path) -> None:
    found = read_proof(KEY, partial(Proof.kept, counts=COUNTS_HERE))
    assert found == Proof(
        ((1, 2, 4),), "it was tried", False, (("a product", (2, 4)),), (256, 512)
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"classes": "abc"},
        {"classes": [[0, -1]]},
        {"classes": [[1, 2, 1_000_000]]},
        {"classes": [[2, 1]]},
        {"classes": [[1, 1]]},
        {"classes": [[True, 2]]},
        {"classes": [[1.0, 2.0]]},
        {"classes": [[]]},
        {"classes": None},
        {"classes": [None]},
        {"graphs": "yes"},
        {"products": [["a product"]]},
        {"products": [["a product", [3_000]]]},
        {"products": [["a product", []]]},
        {"widths": [100]},
        {"widths": "256"},
        {"widths": [512, 256]},
    ],
    ids=str,
)
def test_a_proof_of_another_form_is_as_none(
    proof: Path, changed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write_proof(KEY, GOOD | changed)
    assert read_proof(KEY, partial(Proof.kept, counts=COUNTS_HERE)) is None
    assert f"{proof} is left out" in caplog.text


@pytest.mark.parametrize("field", sorted(GOOD))
def test_a_proof_that_lacks_something_is_as_none(
    proof: Path, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_proof(KEY, {name: value for name, value in GOOD.items() if name != field})
    assert (
        read_proof(KEY, partial(Proof.kept, counts=COUNTS_HERE)) is None
        and "is left out" in caplog.text
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        "[" * 100_000,
        '{"key": {"device": "x"}}',
        "\0" * 99,
        "\xff",
    ],
    ids=range(9),
)
def test_a_file_that_is_no_proof_is_as_none(
    proof: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    proof.write_bytes(text.encode("latin-1"))
    assert read_proof(KEY, dict) is None and "is left out" in caplog.text


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_small_file_in_a_proofs_place_is_as_none(
    proof: Path, kind: str
) -> None:
    special(proof, kind)
    assert read_proof(KEY, dict) is None


def test_no_proof_is_no_line_in_the_log(
    proof: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proof.unlink()
    assert read_proof(KEY, dict) is None and not caplog.records


@pytest.mark.parametrize(
    "found",
    [
        {"count": 3, "is_apart": False, "against": ""},
        {"count": "4", "is_apart": False, "against": ""},
        {"count": 4, "is_apart": 1, "against": ""},
        {"count": 4},
        {"count": 4, "is_apart": False, "against": "", "more": 1},
    ],
    ids=str,
)
def test_shared_calls_are_checked_as_well(proof: Path, found: Any) -> None:
    write_proof(KEY, found)
    read = read_proof(KEY, partial(SharedCall.kept, most=4))
    assert read is None or ("more" in found and read == SharedCall(4))


def row(length: int = 9) -> SavedRow:
    keys = np.arange(3 * length, dtype=np.int64).reshape(length, 3)
    return SavedRow(keys, 0, {}, {})


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A row's file in a folder of kept rows."""
    files = RowFiles(tmp_path / "rows", 10**6, Identity("m"))
    files.put(row())
    assert files.find(row().keys, 0) is not None
    (path,) = (tmp_path / "rows").iterdir()
    return path


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


def rewrite(path: Path, header: Any, nbytes: int = 9 * 3 * 8) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * nbytes)


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "flat": lambda header: header["keys"].update(shape=[27]),
    "wide": lambda header: header["keys"].update(shape=[3, 9]),
    "no numbers": lambda header: header["keys"].update(shape=["9", 3]),
    "negative": lambda header: header["keys"].update(shape=[-9, 3]),
    "many": lambda header: header["keys"].update(shape=[10**12, 3]),
    "40 GB": lambda header: header["keys"].update(
        shape=[10**9, 3], data_offsets=[0, 24 * 10**9]
    ),
    "backwards": lambda header: header["keys"].update(data_offsets=[216, 0]),
    "below": lambda header: header["keys"].update(data_offsets=[-8, 216]),
    "another type": lambda header: header["keys"].update(dtype="F64"),
    "no keys": lambda header: header.pop("keys"),
    "nothing": lambda header: header.clear(),
    "no metadata": lambda header: header.update(__metadata__=None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_row_of_another_form_is_as_none(
    kept: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    header = header_of(kept)
    DAMAGES[damage](header)
    rewrite(kept, header)
    files = RowFiles(kept.parent, 10**6, Identity("m"))
    assert not len(files) and files.find(row().keys, 0) is None
    assert not kept.exists() and f"{kept} is left out" in caplog.text


@pytest.mark.parametrize(
    "text", [b"", b"[" * 100_000, b"[]", b"null", b"\xff\xfe"], ids=len
)
def test_a_header_that_is_none_is_as_none(kept: Path, text: bytes) -> None:
    rewrite(kept, text)
    assert not len(RowFiles(kept.parent, 10**6, Identity("m")))


def test_a_header_longer_than_its_file_is_as_none(kept: Path) -> None:
    kept.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    assert not len(RowFiles(kept.parent, 10**6, Identity("m")))


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_small_file_in_a_rows_place_is_as_none(
    kept: Path, kind: str
) -> None:
    """At the start, and where it comes into a known file's place."""
    files = RowFiles(kept.parent, 10**6, Identity("m"))
    special(kept, kind)
    assert files.find(row().keys, 0) is None
    if kind != "folder":
        special(kept, kind)
    assert not len(RowFiles(kept.parent, 10**6, Identity("m")))
    if kind != "folder":
        special(kept, kind)
    with pytest.raises((InvalidCache, OSError)):
        read_row(kept, 10**6)


@pytest.mark.parametrize(
    "structure",
    [
        {
            "num_layers": 10**9,
            "num_pictures": 0,
            "whole": {"7": {"kind": "LostState"}},
            "points": {},
        },
        {"num_layers": "1", "num_pictures": 0, "whole": {}, "points": {}},
        {"num_layers": 1, "num_pictures": -1, "whole": {}, "points": {}},
        {
            "num_layers": 1,
            "num_pictures": 0,
            "whole": {"1": {"kind": "FullState"}},
            "points": {},
        },
        {
            "num_layers": 1,
            "num_pictures": 0,
            "whole": {},
            "points": {"99": {"layers": {}, "logits": None}},
        },
        {"num_layers": 1, "num_pictures": 0, "whole": [], "points": {}},
    ],
    ids=str,
)
def test_a_sealed_row_of_another_form_is_refused(
    tmp_path: Path, structure: Any
) -> None:
    from vlm_batch.store.files import _seal

    tensors = {"keys": mx.zeros((9, 3), dtype=mx.int64)}
    identity = '{"model": "m", "settings": {}}'
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "identity": identity,
        "structure": json.dumps(structure),
    }
    metadata["digest"] = _seal(tensors, metadata)
    mx.save_safetensors(str(tmp_path / "a.safetensors"), tensors, metadata)
    with pytest.raises(InvalidCache):
        read_row(tmp_path / "a.safetensors")


def test_a_prompt_cache_is_not_read_from_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidCache, match="no regular file"):
        PromptCache.load(tmp_path / "pipe")


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077], ids=oct)
def test_folders_are_private_whatever_the_umask(
    tmp_path: Path, mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those on their way, too; a folder that is there stays as it is."""
    tmp_path.chmod(0o755)
    monkeypatch.setenv(FOLDER, str(tmp_path / "a" / "b"))
    before = os.umask(mask)
    try:
        proof = write_proof(KEY, GOOD)
        RowFiles(tmp_path / "c" / "d", 10**6, Identity("m")).put(row())
    finally:
        os.umask(before)
    assert proof is not None
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(made) == 5 and {stat.S_IMODE(path.stat().st_mode) for path in made} == {
        0o700
    }
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 2 and {
        stat.S_IMODE(path.stat().st_mode) for path in files
    } == {0o600}
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
