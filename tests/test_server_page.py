"""The page at / in a headless Chromium, on the test checkpoint and the sample."""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    """A new conversation, with the options as they come."""
    page.run("document.getElementById('clear').click()")
    page.run(
        "for (let one; (one = document.querySelector('#pictures button')); ) one.click()"
    )
    page.run(
        """{ const set = (id, value) => { document.getElementById(id).value = value; };
        set('times', 1); set('temperature', 0); set('max-tokens', 256); set('system', '');
        set('question', 'describe the picture'); document.getElementById('each').checked = false; }"""
    )


def ask(page: chromium.Browser, question: str) -> str:
    """Type a question, press Enter, and return the last card's answer."""
    count = page.run("document.querySelectorAll('.answer').length")
    page.run(
        "{ const box = document.getElementById('question'); box.value = ''; box.focus(); }"
    )
    page.type(question)
    enter(page)
    page.wait(f"document.querySelectorAll('.answer').length > {count}")
    return answers(page)[-1]


def enter(page: chromium.Browser, *, shift: bool = False) -> None:
    page.press("Enter", code=13, text="\r", shift=shift)


def sent_messages(page: chromium.Browser) -> list[dict[str, Any]]:
    """The messages of the page's last question, as the server got them."""
    bodies = [
        event["params"]["request"]["postData"]
        for event in page.events
        if event["method"] == "Network.requestWillBeSent"
        and event["params"]["request"]["url"].endswith("/v1/chat/completions")
    ]
    found: list[dict[str, Any]] = json.loads(bodies[-1])["messages"]
    return found


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


def test_the_sample_reads_what_is_dropped() -> None:
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
        page.open(running.url)
        for name, (question, right) in asked.items():
            clear(page)
            drop(page, name)
            assert right in ask(page, question)


def test_by_keyboard_alone(page: chromium.Browser) -> None:
    """Enter asks, with Shift it begins a line; everything is reached by Tab, in the order in which it is used."""
    clear(page)
    drop(page, "red_circle.png")
    page.run(
        "{ const box = document.getElementById('question'); box.value = ''; box.focus(); }"
    )
    page.type("count to")
    enter(page, shift=True)
    page.type("7")
    assert page.run("document.getElementById('question').value") == "count to\n7"
    assert page.run("document.querySelectorAll('.answer').length") == 0
    page.run("document.querySelector('#pictures button').click()")
    assert page.run("document.activeElement.id") == "question"
    assert ask(page, "count to 7") == "1 2 3 4 5 6 7"
    assert page.run("document.activeElement.id") == "question"  # for a follow-up
    page.run("document.getElementById('options').open = true")
    reached = []
    page.run("document.getElementById('clear').focus()")
    for _ in range(12):
        page.press("Tab", code=9)
        name = "document.activeElement.id || document.activeElement.textContent"
        reached.append(page.run(name))
    assert reached == [
        *("The batch now", "Copy", "question", "files", "send", "Options"),
        *("system", "max-tokens", "temperature", "times", "each"),
        reached[-1],
    ]
    page.run("document.getElementById('options').open = false")


def test_an_input_methods_enter_does_not_ask(page: chromium.Browser) -> None:
    clear(page)
    page.run(
        """document.getElementById('question').dispatchEvent(
        new KeyboardEvent('keydown', { key: 'Enter', isComposing: true, bubbles: true, cancelable: true }))"""
    )
    assert page.run("document.querySelectorAll('.answer').length") == 0


def test_a_question_follows_an_answer(page: chromium.Browser) -> None:
    """Its picture is asked about again without being sent anew by hand; a system prompt stands before all."""
    clear(page)
    page.run("document.getElementById('system').value = 'Be brief.'")
    drop(page, "red_circle.png")
    assert ask(page, "describe the picture") == "a red circle"
    assert page.run("document.querySelectorAll('#pictures li').length") == 0
    assert page.run("document.getElementById('question').value") == ""
    label = page.run("document.getElementById('question-label').textContent")
    assert label == "Follow-up to “a red circle”"
    ask(page, "what colour is the circle?")
    messages = sent_messages(page)
    assert [one["role"] for one in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"] == "Be brief."
    assert [part["type"] for part in messages[1]["content"]] == ["image_url", "text"]
    assert messages[2]["content"] == "a red circle"
    assert messages[3]["content"] == [
        {"type": "text", "text": "what colour is the circle?"}
    ]
    # another answer is followed if one says so
    page.run("document.querySelector('.answer .buttons button:nth-child(2)').click()")
    assert page.run("document.activeElement.id") == "question"
    ask(page, "count to 3")
    assert len(sent_messages(page)) == 4
    assert page.run(
        "document.querySelector('.answer:last-child .follows').textContent"
    ) == ("follows “a red circle”")
    page.run("document.getElementById('clear').click()")
    ask(page, "count to 3")
    assert [one["role"] for one in sent_messages(page)] == ["system", "user"]


def test_an_answer_is_copied(page: chromium.Browser) -> None:
    clear(page)
    kinds = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    page.call("Browser.grantPermissions", permissions=kinds)
    page.call("Page.bringToFront")
    ask(page, "count to 7")
    page.run("document.querySelector('.answer .buttons button').click()")
    page.wait(
        "document.querySelector('.answer .buttons').textContent.startsWith('Copied')"
    )
    assert page.run("navigator.clipboard.readText()") == "1 2 3 4 5 6 7"
    # where the page may not write there, it selects
    page.run("navigator.clipboard.writeText('')")
    page.run("navigator.clipboard.writeText = () => Promise.reject(new Error())")
    page.run("document.querySelector('.answer .buttons button').click()")
    page.wait("getSelection().toString() === '1 2 3 4 5 6 7'")
    page.run("delete navigator.clipboard.writeText")


def test_what_a_reader_of_screens_hears(page: chromium.Browser) -> None:
    """Whole sentences in a live region, and no token by itself; names for everything that can be used."""
    clear(page)
    spoken = "[...document.querySelectorAll('#spoken p')].map((one) => one.textContent)"
    page.run(
        "window.heard = 0; new MutationObserver((all) => { window.heard += all.length; })"
        ".observe(document.getElementById('spoken'), { childList: true })"
    )
    ask(page, "count to 20")
    assert " ".join(page.run(spoken)) == " ".join(map(str, range(1, 21)))
    assert page.run("window.heard") <= 3
    sentences = "{ const card = { turn: { isOnly: true }, unsaid: '' }; document.getElementById('spoken').replaceChildren();"
    sentences += "for (const text of ['One.', ' Tw', 'o. Thr', 'ee']) speak(card, text); speak(card, '', true); }"
    page.run(sentences)
    assert page.run(spoken) == ["One.", "Two.", "Three"]
    drop(page, "red_circle.png")
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    used = (
        "button",
        "textbox",
        "spinbutton",
        "checkbox",
        "img",
        "image",
        "form",
        "log",
    )
    names: dict[str, list[str]] = {}
    for node in tree:
        role, name = node["role"].get("value"), node.get("name", {}).get("value", "")
        if role in used and not node.get("ignored"):
            names.setdefault(role, []).append(name)
    assert all(all(found) for found in names.values()), names
    assert "Remove red_circle.png" in names["button"]
    assert names["log"] == ["Answers as they come"]
    # what changes twice a second is no live region
    live = "[...document.querySelectorAll('#batch output, #batch [aria-live], #batch [role=status]')].length"
    assert page.run(live) == 0
    assert (
        page.run("document.getElementById('problem').getAttribute('role')") == "alert"
    )


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_words_stand_out_from_their_ground(
    page: chromium.Browser, is_dark: bool
) -> None:
    """WCAG's 4.5 : 1 for text, 3 : 1 for the edges of fields."""
    clear(page)
    ask(page, "count to 3")
    page.dark(is_dark)
    try:
        contrasts = page.run(
            """(() => {
            const light = (colour) => {
              const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255);
              const [r, g, b] = parts.map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
              return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const ground = (one) => {
              for (; one; one = one.parentElement) {
                const colour = getComputedStyle(one).backgroundColor;
                if (!colour.startsWith("rgba(0, 0, 0, 0")) return colour;
              }
              return "rgb(255, 255, 255)";
            };
            const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            const found = [];
            const words = "#model, .facts span, .text, h2, label, button:enabled, summary, #keys, figcaption";
            for (const one of document.querySelectorAll(words)) {
              const ink = light(getComputedStyle(one).color);
              found.push([one.id || one.className || one.tagName, ratio(ink, light(ground(one)))]);
            }
            const box = document.getElementById("question");
            found.push(["edge", 1.5 * ratio(light(getComputedStyle(box).borderTopColor), light(ground(box)))]);
            return found;
            })()"""
        )
    finally:
        page.dark(False)
    assert len(contrasts) > 10
    assert [one for one in contrasts if one[1] < 4.5] == []


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
    assert (
        page.run("document.querySelectorAll('.answer.stopped, .answer.done').length")
        == 16
    )
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


def test_an_answer_on_its_way_is_waited_for(page: chromium.Browser) -> None:
    """A question that is sent meanwhile stays where it is; a stopped answer can be followed or asked for again."""
    clear(page)
    page.run("document.getElementById('max-tokens').value = 1500")
    page.run("document.getElementById('temperature').value = 2")
    page.run(
        "document.getElementById('question').value = 'repeat: ' + 'a b c d '.repeat(60)"
    )
    page.run("document.getElementById('times').value = 16")
    page.run("document.getElementById('question').focus()")
    enter(page)
    page.wait("!!document.querySelector('.answer.running')")
    page.type("count to 3")
    enter(page)
    said = page.run("document.getElementById('problem').textContent")
    assert said.startswith("an answer is on its way")
    assert page.run("document.getElementById('question').value") == "count to 3"
    page.press("Escape", code=27)
    page.wait("!document.querySelector('.answer.running')")
    assert page.run("document.activeElement.id") == "question"
    page.run(
        "[...document.querySelectorAll('.stopped button')].find((one) => one.textContent === 'Edit').click()"
    )
    assert page.run("document.getElementById('question').value").startswith(
        "repeat: a b"
    )


def test_a_refusal_is_shown_in_words(page: chromium.Browser) -> None:
    """And what was asked can be edited: the broken picture taken off, the question asked again."""
    for each in (False, True):
        clear(page)
        drop(page, "red_circle.png")
        page.run(
            "pictures.push({ name: 'broken $&.png', url: 'data:image/png;base64,aGVsbG8=' })"
        )
        page.run(f"document.getElementById('each').checked = {json.dumps(each)}")
        page.run("document.getElementById('send').click()")
        answers(page)
        said = page.run("document.getElementById('problem').textContent")
        assert said == "broken $&.png is not a picture that Pillow can read"
        assert page.run("document.querySelectorAll('.failed').length") == 1
        page.run("document.querySelector('.failed button').click()")
        remove = "[...document.querySelectorAll('#pictures button')].at(-1).click()"
        assert (
            page.run("document.getElementById('question').value")
            == "describe the picture"
        )
        page.run(remove)
    assert page.run("document.querySelectorAll('#pictures li').length") == 0
    # pictures are numbered over a conversation
    clear(page)
    drop(page, "red_circle.png", "digits_728.png")
    ask(page, "describe both pictures")
    page.run(
        "pictures.push({ name: 'late.png', url: 'data:image/png;base64,aGVsbG8=' })"
    )
    ask(page, "describe the picture")
    said = page.run("document.getElementById('problem').textContent")
    assert said == "late.png is not a picture that Pillow can read"
    page.run("pictures.length = 0")


def test_a_pasted_table_is_text(page: chromium.Browser) -> None:
    """A spreadsheet's clipboard has a picture of its cells, too."""
    clear(page)
    page.run(
        f"""(async () => {{
        const bytes = Uint8Array.from(atob({json.dumps(data_uri("red_circle.png"))}.split(",")[1]), (c) => c.charCodeAt(0));
        const clipboard = new DataTransfer();
        clipboard.items.add(new File([bytes], "", {{ type: "image/png" }}));
        clipboard.setData("text/plain", "a\\tb");
        document.dispatchEvent(new ClipboardEvent("paste", {{ clipboardData: clipboard, bubbles: true }}));
        }})()"""
    )
    assert page.run("pictures.length") == 0


def test_dropped_pictures_keep_their_order(page: chromium.Browser) -> None:
    clear(page)
    names = [
        "page_of_text.png",
        "red_circle.png",
        "sales_by_city.png",
        "digits_728.png",
    ]
    drop(page, *names)
    assert page.run("pictures.map((one) => one.name)") == names


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
    page.wait("document.querySelectorAll('#pictures .nameless').length === 1")
    page.run("document.getElementById('answers').replaceChildren()")
    page.run("document.getElementById('send').click()")
    assert answers(page)[0]
    assert page.run("document.getElementById('problem').textContent") == ""
    shown = page.run(
        "[...document.querySelectorAll('.answer img, .answer .nameless')].map((one) => one.textContent)"
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


@pytest.mark.parametrize("width", [320, 390])
def test_on_a_phone(page: chromium.Browser, tmp_path: Path, width: int) -> None:
    """Nothing is wider than the screen, what is pressed is large enough, and the question's box leaves room above."""
    page.size(width, 740, mobile=True)
    try:
        clear(page)
        drop(page, "red_circle.png", "digits_728.png")
        page.run("document.getElementById('options').open = true")
        assert page.run("document.documentElement.scrollWidth") <= width
        page.run("document.getElementById('options').open = false")
        ask(page, "describe the picture")
        assert page.run("document.documentElement.scrollWidth") <= width
        low = "Math.min(...[...document.querySelectorAll('#ask button, .answer button, #clear')]"
        assert page.run(f"{low}.map((one) => one.offsetHeight).filter(Boolean))") >= 44
        assert page.run("document.getElementById('ask').offsetHeight") < 370
        shot = tmp_path / "phone.png"
        page.screenshot(shot)
        assert struct.unpack(">II", shot.read_bytes()[16:24]) == (width, 740)
    finally:
        page.size(1200, 900)


@pytest.mark.parametrize("ending", ["", "/"])
def test_behind_a_proxy_at_a_path_of_its_own(ending: str) -> None:
    """With and without the last slash."""
    assert BINARY is not None
    with (
        serving(root_path="/models/own") as server,
        chromium.browser(BINARY) as page,
    ):
        page.open(f"{server.url}/models/own{ending}")
        page.wait("document.getElementById('model').textContent === 'qwen2_vl: ready'")
        assert ask(page, "count to 3") == "1 2 3"
        assert page.run("getComputedStyle(document.body).display") == "flex"
        urls = [
            event["params"]["request"]["url"]
            for event in page.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        made = [url for url in urls if url.startswith("http")]
        assert made and all("/models/own" in url for url in made)


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
        enter(page)
        page.wait("document.getElementById('model').textContent === 'qwen2_vl: ready'")
        assert page.run("document.getElementById('key-row').hidden")
        assert page.run("document.activeElement.id") == "question"
        assert ask(page, "count to 3") == "1 2 3"


def test_the_page_travels_in_the_package() -> None:
    from importlib.resources import files

    page = files("vlm_batch.server") / "page"
    assert {one.name for one in page.iterdir()} == {
        "index.html",
        "app.js",
        "style.css",
        "icon.svg",
    }
