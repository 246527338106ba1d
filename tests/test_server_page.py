"""The page at / in a headless Chromium, on the test checkpoint and the sample.

``VLM_BATCH_SCREENSHOTS=docs/images`` writes the documentation's picture of it.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import chromium
from tests.serving import Running, data_uri, serving
from vlm_batch import VLMBatcher
from vlm_batch.assets import sample_model

BINARY = chromium.find()
pytestmark = pytest.mark.skipif(
    BINARY is None and "VLM_BATCH_BROWSER" not in os.environ,
    reason="no Chromium here; VLM_BATCH_BROWSER=1 scripts/setup installs one where it can",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def page(server: Running) -> Iterator[chromium.Browser]:
    assert BINARY is not None, (
        "VLM_BATCH_BROWSER asks for this test, and there is no Chromium"
    )
    with chromium.browser(BINARY) as opened:
        opened.size(1200, 900)
        opened.open(server.url)
        yield opened


def drop(page: chromium.Browser, *names: str) -> None:
    """Drop sample pictures onto the page, as a file manager does."""
    drop_files(page, "image/png", [(name, data_uri(name)) for name in names])


def drop_files(page: chromium.Browser, kind: str, files: list[tuple[str, str]]) -> None:
    """Drop data URIs as files of one type."""
    before = page.run("document.querySelectorAll('#pictures li').length")
    page.run(
        f"""(async () => {{
        const transfer = new DataTransfer();
        for (const [name, uri] of {json.dumps(files)}) {{
            const bytes = Uint8Array.from(atob(uri.split(",")[1]), (one) => one.charCodeAt(0));
            transfer.items.add(new File([bytes], name, {{ type: "{kind}" }}));
        }}
        const event = new DragEvent("drop", {{ dataTransfer: transfer, bubbles: true, cancelable: true }});
        document.getElementById("drop").dispatchEvent(event);
        }})()"""
    )
    page.wait(
        f"document.querySelectorAll('#pictures li').length === {before + len(files)}"
    )


def clear(page: chromium.Browser) -> None:
    page.run("document.getElementById('clear').click()")
    page.run(
        "for (let one; (one = document.querySelector('#pictures button')); ) one.click()"
    )
    page.run(
        "document.getElementById('times').value = 1; document.getElementById('each').checked = false;"
    )
    page.run("document.getElementById('question').value = 'describe the picture'")


def answers(page: chromium.Browser) -> list[str]:
    page.wait(
        "document.querySelectorAll('.answer').length && !document.querySelector('.answer.running')"
    )
    found: list[str] = page.run(
        "[...document.querySelectorAll('.answer .text')].map((one) => one.textContent)"
    )
    return found


def test_dropped_pictures_are_asked_about_in_several_streams(
    page: chromium.Browser,
) -> None:
    clear(page)
    names = (
        "red_circle.png",
        "digits_728.png",
        "red_circle_above_blue_triangle.png",
        "black_circle_left_of_blue_square.png",
    )
    drop(page, *names)
    page.run("document.getElementById('each').checked = true")
    page.run("document.getElementById('send').click()")
    assert sorted(answers(page)) == [
        "a black circle left of a blue square",
        "a red circle",
        "a red circle above a blue triangle",
        "the digits 728",
    ]
    facts = page.run("document.querySelector('.answer .facts').textContent")
    assert "first token after" in facts
    assert "tokens/s" not in facts  # of eight tokens
    page.wait(
        "Number(document.getElementById('cache-now').textContent.replace(/\\D/g, '')) >= 0"
    )
    page.wait("document.querySelectorAll('#speed rect').length > 0")
    assert page.run("document.getElementById('model').textContent") == "qwen2_vl: ready"


def test_the_sample_reads_what_is_dropped(tmp_path: Path) -> None:
    """As the documentation shows it."""
    assert BINARY is not None
    asked = {
        "short_letter.png": ("Read the text.", "the parcel left on Monday"),
        "supermarket_receipt.jpg": ("What is the total?", "16.45"),
        "sales_by_city.png": ("Which bar is the highest?", "Rome"),
    }
    with (
        serving(
            lambda: VLMBatcher(str(sample_model())), served_names=("reader",)
        ) as running,
        chromium.browser(BINARY) as page,
    ):
        page.size(1200, 900)
        page.open(running.url)
        for number, (name, (question, right)) in enumerate(asked.items(), 1):
            page.run(
                "for (let one; (one = document.querySelector('#pictures button')); ) one.click()"
            )
            drop(page, name)
            page.run(
                f"document.getElementById('question').value = {json.dumps(question)}"
            )
            page.run("document.getElementById('send').click()")
            page.wait(f"document.querySelectorAll('.answer').length === {number}")
            assert right in answers(page)[0], answers(page)
        shot = (
            Path(os.environ.get("VLM_BATCH_SCREENSHOTS", tmp_path)) / "server-page.png"
        )
        page.screenshot(shot)
        assert shot.stat().st_size > 10_000


def test_by_keyboard_alone(page: chromium.Browser) -> None:
    """Typed and sent from the keyboard, stopped by Escape; everything that can be used can be reached by Tab."""
    clear(page)
    page.run(
        "const box = document.getElementById('question'); box.value = ''; box.focus()"
    )
    page.type("count to 7")
    page.press("Enter", code=13, control=True)
    assert answers(page) == ["1 2 3 4 5 6 7"]
    reached = set()
    page.run("document.activeElement.blur()")
    for _ in range(20):
        page.press("Tab", code=9)
        reached.add(page.run("document.activeElement.id"))
    assert {
        "files",
        "question",
        "max-tokens",
        "temperature",
        "times",
        "each",
        "send",
        "clear",
    } <= reached


def test_a_stream_can_be_stopped(page: chromium.Browser, server: Running) -> None:
    clear(page)
    page.run(
        "document.getElementById('question').value = 'repeat: ' + 'a b c d '.repeat(60)"
    )
    page.run("document.getElementById('temperature').value = 2")
    page.run(
        "document.getElementById('times').value = 16; document.getElementById('max-tokens').value = 1500"
    )
    page.run("document.getElementById('send').click()")
    page.wait("document.querySelectorAll('.answer').length === 16")
    page.press("Escape", code=27)
    page.wait("!document.querySelector('.answer.running')")
    page.run("document.getElementById('temperature').value = 0")
    stats = server.server.service.stats()
    assert stats is not None
    page.wait(
        "fetch('/stats').then((r) => r.json()).then((s) => s.batch.decoding + s.batch.prefilling === 0)"
    )


def test_a_pasted_picture(page: chromium.Browser) -> None:
    clear(page)
    page.run(
        f"""(async () => {{
        const bytes = Uint8Array.from(atob({json.dumps(data_uri("red_circle.png"))}.split(",")[1]), (c) => c.charCodeAt(0));
        const clipboard = new DataTransfer();
        clipboard.items.add(new File([bytes], "", {{ type: "image/png" }}));
        document.dispatchEvent(new ClipboardEvent("paste", {{ clipboardData: clipboard, bubbles: true }}));
        }})()"""
    )
    page.wait("document.querySelectorAll('#pictures li').length === 1")
    page.run("document.getElementById('send').click()")
    assert answers(page) == ["a red circle"]


def test_a_refusal_is_shown_in_words(page: chromium.Browser) -> None:
    clear(page)
    drop(page, "red_circle.png")
    page.run(
        "pictures.push({ name: 'broken $&.png', url: 'data:image/png;base64,aGVsbG8=' })"
    )
    for each in (False, True):
        page.run(f"document.getElementById('each').checked = {json.dumps(each)}")
        page.run("document.getElementById('send').click()")
        answers(page)
        said = page.run("document.getElementById('problem').textContent")
        assert said == "broken $&.png is not a picture that Pillow can read"
    page.run("pictures.length = 0")


def test_files_that_are_no_pictures_are_refused_before_they_are_sent(
    page: chromium.Browser,
) -> None:
    clear(page)
    files = [
        ["drawing.svg", "image/svg+xml", "<svg/>"],
        ["notes.txt", "text/plain", "x"],
        ["none.png", "image/png", ""],
    ]
    made = "(([name, type, text]) => new File([text], name, { type }))"
    page.run(f"addFiles({json.dumps(files)}.map({made}))")
    assert page.run("document.getElementById('problem').textContent") == (
        "drawing.svg is an SVG drawing: save it as PNG first; notes.txt is not a picture; none.png is empty"
    )
    assert page.run("pictures.length") == 0


def test_a_picture_that_browsers_do_not_show_is_sent(page: chromium.Browser) -> None:
    """Chromium gives a HEIC file no type, and has no picture of it."""
    pytest.importorskip(
        "pillow_heif",
        reason="pillow-heif is not installed: pip install 'vlm-batch[heic]'",
    )
    clear(page)
    coded = base64.b64encode(
        (Path(__file__).parent / "data" / "phone.heic").read_bytes()
    ).decode()
    drop_files(page, "", [("phone.HEIC", f"data:;base64,{coded}")])
    page.wait("document.querySelectorAll('#pictures .unseen').length === 1")
    page.run("document.getElementById('answers').replaceChildren()")
    page.run("document.getElementById('send').click()")
    assert answers(page)[0]
    assert page.run("document.getElementById('problem').textContent") == ""
    shown = page.run(
        "[...document.querySelectorAll('.answer img, .answer .unseen')].map((one) => one.textContent)"
    )
    assert shown == ["phone.HEIC (no preview in this browser)"]


def test_the_speed_of_long_answers_is_shown(page: chromium.Browser) -> None:
    clear(page)
    page.run("document.getElementById('question').value = 'count to 20'")
    page.run("document.getElementById('send').click()")
    answers(page)
    assert "tokens/s" in page.run(
        "document.querySelector('.answer .facts').textContent"
    )


def test_what_a_model_writes_is_text_and_never_markup(page: chromium.Browser) -> None:
    clear(page)
    page.run(
        "document.getElementById('question').value = '<img src=x onerror=window.caught=1>'"
    )
    page.run("document.getElementById('send').click()")
    answers(page)
    assert page.run("document.querySelector('.answer h2').textContent").startswith(
        "<img"
    )
    assert page.run("window.caught") is None


def test_on_a_phone(page: chromium.Browser, tmp_path: Path) -> None:
    clear(page)
    page.size(360, 740, mobile=True)
    try:
        assert page.run("document.documentElement.scrollWidth") <= 360
        low = page.run(
            "Math.min(...[...document.querySelectorAll('#ask button')].map((one) => one.offsetHeight))"
        )
        assert low >= 36
        shot = tmp_path / "phone.png"
        page.screenshot(shot)
        assert struct.unpack(">II", shot.read_bytes()[16:24]) == (360, 740)
    finally:
        page.size(1200, 900)


def test_nothing_is_fetched_from_elsewhere_and_nothing_is_complained_about(
    page: chromium.Browser, server: Running
) -> None:
    sent = [
        event["params"]["request"]["url"]
        for event in page.events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert any(url.endswith("/v1/chat/completions") for url in sent)
    assert [
        url
        for url in sent
        if not url.startswith((server.url, "data:", "blob:", "about:"))
    ] == []
    logged = [
        event["params"]["entry"]
        for event in page.events
        if event["method"] == "Log.entryAdded"
    ]
    assert [entry["text"] for entry in logged if "400" not in entry["text"]] == []
    thrown = [
        event for event in page.events if event["method"] == "Runtime.exceptionThrown"
    ]
    assert thrown == []


def test_a_key_is_asked_for_when_one_is_needed() -> None:
    assert BINARY is not None
    with serving(api_key="open sesame") as server, chromium.browser(BINARY) as page:
        page.open(server.url)
        page.wait("!document.getElementById('key-row').hidden")
        page.run("document.getElementById('key').focus()")
        page.type("open sesame")
        page.press("Tab", code=9)
        page.wait("document.getElementById('model').textContent === 'qwen2_vl: ready'")
        page.run(
            "document.getElementById('question').value = 'count to 3'; document.getElementById('send').click()"
        )
        assert answers(page) == ["1 2 3"]


def test_the_page_travels_in_the_package() -> None:
    from importlib.resources import files

    page = files("vlm_batch.server") / "page"
    assert {one.name for one in page.iterdir()} == {
        "index.html",
        "app.js",
        "style.css",
        "icon.svg",
    }
