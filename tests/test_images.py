"""Pictures from every kind of source and in every awkward form; each failure says what was wrong."""

from __future__ import annotations

import base64
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from vlm_batch.errors import InvalidImage
from vlm_batch.inputs.images import (
    MAX_PIECES,
    count_pixels,
    load_image,
    own_image,
)

FIXTURES = Path(__file__).parent.parent / "fixtures" / "images"
AWKWARD = FIXTURES / "awkward"
GOOD = sorted(path for path in FIXTURES.glob("*") if path.suffix in (".png", ".jpg"))


def red(width: int = 4, height: int = 3, mode: str = "RGB") -> Image.Image:
    return Image.new("RGB", (width, height), (255, 0, 0)).convert(mode)


def png(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name)
def test_the_fixture_pictures_are_read(path: Path) -> None:
    image = load_image(path)
    assert image.mode == "RGB"
    assert min(image.size) > 0


def test_sources_of_every_kind_give_the_same_picture(tmp_path: Path) -> None:
    picture = red()
    data = png(picture)
    path = tmp_path / "red.png"
    path.write_bytes(data)
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    array = np.asarray(picture)
    sources: list[Any] = [
        path, str(path), data, bytearray(data), BytesIO(data), uri, picture, array, array / 255.0, mx.array(array)
    ]  # fmt: skip
    for source in sources:
        assert np.array_equal(np.asarray(load_image(source)), array), type(source)


def test_exif_orientation_is_applied() -> None:
    with Image.open(AWKWARD / "exif_turned.jpg") as stored:
        width, height = stored.size
        assert stored.getexif()[0x0112] in (5, 6, 7, 8)
    assert load_image(AWKWARD / "exif_turned.jpg").size == (height, width)


def test_transparent_pictures_are_laid_on_white() -> None:
    image = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    assert [load_image(image).getpixel((x, 0)) for x in (0, 1)] == [
        (255, 255, 255),
        (10, 20, 30),
    ]


def test_sixteen_bit_grey_is_scaled_not_clipped() -> None:
    values = np.array([[0, 256 * 64, 65535]], dtype=np.uint16)
    image = load_image(Image.fromarray(values))
    assert [image.getpixel((x, 0))[0] for x in range(3)] == [0, 64, 255]  # type: ignore[index]


@pytest.mark.parametrize(
    ("kind", "values", "shown"),
    [
        (np.float32, [0, 0.25, 1], [0, 64, 255]),
        (np.float32, [-0.02, 0.5, 1.04], [0, 128, 255]),  # as resampling leaves it
        (np.float32, [0, 64, 255], [0, 64, 255]),
        (np.float32, [0, 1024, 4096], [0, 64, 255]),
        (np.float32, [-500, 0, 500], [0, 128, 255]),
        (np.int32, [0, 64, 255], [0, 64, 255]),
        (np.int32, [0, 16448, 65535], [0, 64, 255]),
        (np.int32, [0, 2**29, 2**30], [0, 128, 255]),
        (np.int32, [-100, 0, 100], [0, 128, 255]),
        (np.float32, [7, 7, 7], [7, 7, 7]),
        (np.float32, [-7, -7, -7], [0, 0, 0]),
    ],
)
def test_wide_grey_is_scaled_by_its_numbers(
    kind: Any, values: list[float], shown: list[int]
) -> None:
    file = BytesIO()
    Image.fromarray(np.array([values], kind)).save(file, format="TIFF")
    image = np.asarray(load_image(file.getvalue()))
    assert image[0].tolist() == [[grey] * 3 for grey in shown]


def test_transparent_grey_of_sixteen_bits_is_laid_on_white() -> None:
    file = BytesIO()
    Image.fromarray(np.array([[0, 65535, 257]], np.uint16)).save(
        file, format="PNG", transparency=0
    )
    assert np.asarray(load_image(file.getvalue()))[0, :, 0].tolist() == [255, 255, 1]


@pytest.mark.parametrize("mode", ["La", "RGBa"])
def test_premultiplied_pictures_are_laid_on_white(mode: str) -> None:
    assert load_image(Image.new(mode, (2, 1))).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    "mode", ["L", "P", "1", "CMYK", "LA", "YCbCr", "HSV", "F", "I"]
)
def test_other_modes_become_rgb(mode: str) -> None:
    picture = (
        Image.new("L", (3, 2), 200).convert("RGB").convert(mode)
        if mode != "HSV"
        else red().convert("HSV")
    )
    assert load_image(picture).mode == "RGB"


def test_truth_values_are_black_and_white() -> None:
    image = load_image(np.array([[False, True]]))
    assert [image.getpixel((x, 0)) for x in (0, 1)] == [(0, 0, 0), (255, 255, 255)]


def test_an_animation_gives_its_first_frame() -> None:
    with Image.open(AWKWARD / "animated.gif") as animation:
        assert animation.n_frames > 1  # type: ignore[attr-defined]
        first = np.asarray(animation.convert("RGB"))
    assert np.array_equal(np.asarray(load_image(AWKWARD / "animated.gif")), first)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (AWKWARD / "no_such_file.png", "no_such_file.png does not exist"),
        (AWKWARD, "is not a file"),
        (AWKWARD / "not_a_picture.jpg", "not a picture that Pillow can read"),
        (
            AWKWARD / "truncated.jpg",
            "truncated.jpg cannot be decoded: image file is truncated",
        ),
        (b"", r"is empty \(0 bytes\)"),
        ("data:image/png;base64", "malformed"),
        ("data:image/png;base64,???", "not base64"),
        (np.zeros((2, 2, 2), np.uint8), r"shape \(2, 2, 2\)"),
        (np.zeros((0, 4, 3), np.uint8), "no pixels"),
        (np.full((2, 2), 1.5), "0..1"),
        (np.full((2, 2), 300), "0..255"),
        (print, "no picture"),
        (np.zeros((2, 2), complex), "type complex128 is no picture"),
        (np.zeros((2, 2), "datetime64[s]"), "type datetime64"),
        (np.full((2, 2), "a"), "type <U1 is no picture"),
        (Image.new("F", (2, 2), float("nan")), "values that are no numbers"),
        ("", "'' is not a file"),
        ("http://127.0.0.1:9/x.png", "cannot be fetched"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{type(value).__name__}",
)
def test_what_cannot_be_read_says_why(source: Any, said: str) -> None:
    with pytest.raises(InvalidImage, match=said):
        load_image(source)


def test_no_limit_means_none_whoever_else_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pillow's own limit is a global, which one thread lifts while another reads."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    data = png(red(64, 64))
    with ThreadPoolExecutor(8) as pool:
        read = list(
            pool.map(lambda most: load_image(data, most).size, [None, 4096] * 400)
        )
    assert set(read) == {(64, 64)}
    assert Image.MAX_IMAGE_PIXELS == 4


def test_a_bomb_is_refused_on_its_header() -> None:
    bomb = next(AWKWARD.glob("*bomb*"))
    assert bomb.stat().st_size < 100_000
    with pytest.raises(InvalidImage, match=r"pixels; at most|too large"):
        load_image(bomb)


def piece_of_png(name: bytes) -> bytes:
    return struct.pack(">I", 0) + name + struct.pack(">I", zlib.crc32(name))


def in_pieces(kind: str, count: int) -> bytes:
    """A picture with so many empty pieces before its pixels."""
    buffer = BytesIO()
    red().save(buffer, kind)
    data = buffer.getvalue()
    if kind == "PNG":
        return data[:33] + piece_of_png(b"abCd") * count + data[33:]
    return data[:2] + b"\xff\xe5\0\2" * count + data[2:]


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_header_in_millions_of_pieces_is_not_read_to_its_end(kind: str) -> None:
    """Ten megabytes of them took eight seconds, on the thread of whoever submits."""
    assert load_image(in_pieces(kind, 1_000)).size == red().size
    data = in_pieces(kind, MAX_PIECES)
    assert count_pixels(data) == 0
    with pytest.raises(InvalidImage, match=f"header has over {MAX_PIECES:,} pieces"):
        load_image(data)


def test_a_mapped_array_is_refused_before_it_is_copied() -> None:
    mapped = np.broadcast_to(np.uint8(0), (100_000, 100_000, 3))
    with pytest.raises(InvalidImage, match=r"pixels; at most [0-9,]+ are read"):
        own_image(mapped)
    with pytest.raises(InvalidImage, match="a side may have"):
        own_image(mapped, max_pixels=None)


def test_what_pillow_decodes_in_python_is_bounded() -> None:
    """Such pictures take a microsecond a pixel in which no other thread of Python's runs."""
    grey = Image.new("L", (4096, 2049))
    at_most = b"P2 4096 2048 255\n" + b"0 " * 2**23
    files: list[bytes] = [b"P2 4096 2049 255\n", b"P5 4096 2049 100\n"]
    for format in ("QOI", "PNG"):
        file = BytesIO()
        grey.convert("RGB").save(file, format)
        files.append(file.getvalue())
    *refused, png = files
    for data in refused:
        with pytest.raises(InvalidImage, match="Pillow's decoder is Python code"):
            load_image(data)
    assert load_image(png).size == (4096, 2049)
    assert load_image(at_most).size == (4096, 2048)


def test_an_icon_is_bounded_by_the_picture_within() -> None:
    """Pillow decodes it when it is opened, whatever size its header says."""
    within = png(Image.new("L", (3000, 3000)))
    icon = (
        struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(within), 22)
        + within
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of the size
        with pytest.raises(
            InvalidImage, match="9,000,000 pixels; at most 1,000,000"
        ) as found:
            load_image(icon, max_pixels=1_000_000)
        # before Pillow was asked
        assert not any("ImageFile" in str(entry.path) for entry in found.traceback)
        assert load_image(icon, max_pixels=9_000_000).size == (3000, 3000)


def test_the_pixel_limit_is_the_callers() -> None:
    picture = png(red(40, 30))
    with pytest.raises(InvalidImage, match=r"40 x 30 = 1,200 pixels; at most 1,199"):
        load_image(picture, max_pixels=1199)
    assert load_image(picture, max_pixels=1200).size == (40, 30)
    limit = Image.MAX_IMAGE_PIXELS
    assert load_image(picture, max_pixels=None).size == (40, 30)
    assert limit == Image.MAX_IMAGE_PIXELS


# What is taken when a request is submitted
# ---------------------------------------------------------------------------------------------------------------------


def test_what_can_change_is_copied(tmp_path: Path) -> None:
    """A camera's loop fills one buffer again and again."""
    array, frame = np.full((3, 4, 3), 9, np.uint8), red()
    buffer, stream = bytearray(png(red())), BytesIO(png(red()))
    (tmp_path / "red.png").write_bytes(png(red()))
    file = open(tmp_path / "red.png", "rb")  # noqa: SIM115
    held = [
        own_image(source)
        for source in (
            array,
            frame,
            buffer,
            memoryview(bytearray(buffer)),
            stream,
            file,
        )
    ]
    array[:], buffer[:] = 0, bytes(len(buffer))
    frame.paste((0, 0, 255), (0, 0, 4, 3))
    stream.truncate(0)
    file.close()
    read = [np.asarray(load_image(source)) for source in held]
    assert (read[0] == 9).all()
    for picture in read[1:]:
        assert np.array_equal(picture, np.asarray(red()))


def test_an_undecoded_picture_is_read_and_its_file_may_be_closed() -> None:
    """As a turned JPEG is shown: its file, not what it decodes to, is kept."""
    path = AWKWARD / "exif_turned.jpg"
    with Image.open(path) as picture:
        held = own_image(picture)
        assert held == path.read_bytes()
    assert np.array_equal(np.asarray(load_image(held)), np.asarray(load_image(path)))
    picture = Image.open(path)
    picture.close()
    with pytest.raises(InvalidImage, match="closed before it was decoded"):
        own_image(picture)


def test_another_frame_or_a_draft_stays_what_it_is() -> None:
    with Image.open(AWKWARD / "animated.gif") as picture:
        picture.seek(1)
        assert np.array_equal(
            np.asarray(load_image(own_image(picture))),
            np.asarray(picture.convert("RGB")),
        )
    buffer = BytesIO()
    red(64, 64).save(buffer, "JPEG")
    with Image.open(buffer) as picture:
        picture.draft("RGB", (16, 16))
        size = picture.size
        assert size != (64, 64)
        assert load_image(own_image(picture)).size == size


def test_one_undecoded_picture_from_many_threads() -> None:
    """Pillow decodes and reads one file in one place: two threads at once took each other's bytes."""
    expected = np.asarray(load_image(FIXTURES / "receipt.jpg"))
    for _ in range(8):
        with (
            Image.open(FIXTURES / "receipt.jpg") as picture,
            ThreadPoolExecutor(8) as pool,
        ):
            held = list(pool.map(own_image, [picture] * 8))
            assert all(
                np.array_equal(np.asarray(found), expected)
                for found in pool.map(load_image, held)
            )


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("turned", [1, 6])
def test_transparent_pictures_are_laid_on_white_in_strips_as_they_would_be_whole(
    mode: str, turned: int
) -> None:
    picture = Image.effect_noise((30, 700), 80).convert("RGB").convert(mode)
    if mode == "P":
        picture.info["transparency"] = bytes(range(256))
    else:
        picture.putalpha(Image.effect_noise(picture.size, 80))
    exif = Image.Exif()
    exif[0x112] = turned
    file = BytesIO()
    picture.save(file, "PNG", exif=exif)
    upright = (
        picture.transpose(Image.Transpose.ROTATE_270) if turned == 6 else picture
    ).convert("RGBA")
    whole = Image.alpha_composite(
        Image.new("RGBA", upright.size, "white"), upright
    ).convert("RGB")
    assert np.array_equal(np.asarray(load_image(file.getvalue())), np.asarray(whole))
