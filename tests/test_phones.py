"""Pictures of phones (HEIC) are read wherever pictures are, whatever was read before, or it is said what is missing."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.serving import serving
from vlm_batch.errors import InvalidImage
from vlm_batch.inputs import heif
from vlm_batch.inputs.images import (
    load_image,
    names_picture,
    own_image,
    picture_suffixes,
    size_of_file,
)
from vlm_batch.jobs import Reading, open_sources
from vlm_batch.jobs.cells import names_media
from vlm_batch.jobs.report import summary_of

#: 64 by 48 pixels, red on the left and blue on the right, to be turned to the right.
PHONE = Path(__file__).parent / "data" / "phone.heic"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pillow as it is at the start of a process: nobody has told it of pillow-heif."""
    pytest.importorskip(
        "pillow_heif",
        reason="pillow-heif is not installed: pip install 'vlm-batch[heic]'",
    )
    Image.init()
    with monkeypatch.context() as patched:
        for name in ("OPEN", "EXTENSION", "MIME", "SAVE", "SAVE_ALL"):
            patched.setattr(
                Image,
                name,
                {
                    key: one
                    for key, one in vars(Image)[name].items()
                    if "HEIF" not in (key, one)
                },
            )
        patched.setattr(Image, "ID", [name for name in Image.ID if name != "HEIF"])
        yield


def turned() -> np.ndarray:
    """The same picture, as Pillow turns a PNG."""
    picture = Image.new("RGB", (64, 48), "red")
    picture.paste("blue", (32, 0, 64, 48))
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    picture.save(file, "PNG", exif=exif)
    return np.asarray(load_image(file.getvalue()))


@pytest.mark.parametrize("brand", sorted(heif._BRANDS))
def test_it_goes_by_what_a_file_holds(brand: bytes, tmp_path: Path) -> None:
    data = PHONE.read_bytes()
    path = tmp_path / "renamed.jpg"
    path.write_bytes(data[:8] + brand + data[12:])
    assert size_of_file(str(path)) == (48, 64)
    found = np.asarray(load_image(path), np.int16)
    assert found.shape == (64, 48, 3)
    assert np.abs(found - turned()).max() < 16


def test_every_source_gives_the_same() -> None:
    data = PHONE.read_bytes()
    uri = "data:application/octet-stream;base64," + base64.b64encode(data).decode()
    sources = [PHONE, str(PHONE), data, own_image(io.BytesIO(data)), uri]  # type: ignore[arg-type]
    found = [np.asarray(load_image(source)) for source in sources]
    assert all(np.array_equal(one, found[0]) for one in found)


def test_folders_tables_and_reports_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.HEIC").write_bytes(PHONE.read_bytes())
    (tmp_path / "b.jpg").write_bytes(PHONE.read_bytes())
    coded = base64.b64encode(PHONE.read_bytes()).decode()
    assert {".heic", ".heif", ".hif"} <= picture_suffixes() and names_picture("x.HEIC")
    assert (
        names_media(coded, "")
        and names_media(PHONE.read_bytes(), "")
        and names_media("a.HEIC", "")
    )
    sources, _ = open_sources(["."], Reading())
    assert [row.id for source in sources for row in source.rows()] == [
        "./a.HEIC",
        "./b.jpg",
    ]
    summary = summary_of(
        lambda: [{"id": "b.jpg", "text": "a picture", "images": ["b.jpg"]}]
    )
    (sample,) = summary.samples
    assert (
        sample.jpeg is not None and Image.open(io.BytesIO(sample.jpeg)).format == "JPEG"
    )


def test_the_server_reads_it() -> None:
    """A browser that knows no HEIC sends it under a type of its own."""
    coded = base64.b64encode(PHONE.read_bytes()).decode()
    with serving() as server:
        for kind in ("image/heic", "image/jpeg", "application/octet-stream"):
            url = f"data:{kind};base64,{coded}"
            reply = server.chat(
                [{"type": "image_url", "image_url": {"url": url}}], max_tokens=2
            )
            assert reply.status == 200, reply


def test_without_pillow_heif_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heif, "INSTALLED", False)
    with pytest.raises(
        InvalidImage,
        match=r"a HEIC picture, and pillow-heif is not installed: pip install 'vlm-batch",
    ) as said:
        load_image(PHONE)
    # the server leaves advice out, and this is for its operator, too
    assert heif.REMEDY in said.value.reason
    assert ".heic" not in picture_suffixes()


def test_a_damaged_one_says_so() -> None:
    with pytest.raises(InvalidImage, match="a HEIC picture that is damaged"):
        load_image(PHONE.read_bytes()[:200])
