"""Fields of vLLM's that are honoured on the wire: token ids, running usage, echo, salts, priorities, frames."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tests.serving import Reply, Running, serving
from vlm_batch import Limits, Request, VLMBatcher, families
from vlm_batch.assets import default_checkpoint
from vlm_batch.registry import ModelSpec
from vlm_batch.server.config import Key, ServerConfig
from vlm_batch.server.doors.chat import ChatRequest, chat_ask

PROMPT = "<|im_start|>user\ncount to 5<|im_end|>\n<|im_start|>assistant\n"
ENDS = {"skip_special_tokens": False}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def batcher() -> Iterator[VLMBatcher]:
    with VLMBatcher(str(default_checkpoint())) as running:
        yield running


def complete(server: Running, prompt: Any, **fields: Any) -> Reply:
    return server.ask("POST", "/v1/completions", {"prompt": prompt, **fields})


def events(reply: Reply) -> list[dict[str, Any]]:
    assert reply.status == 200, reply.body
    lines = reply.body.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_token_ids_are_told_as_in_vllm(server: Running) -> None:
    asked = {"return_token_ids": True, "logprobs": True}
    whole = server.chat("count to 5", **asked).json
    (choice,) = whole["choices"]
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert (
        len(choice["token_ids"])
        == whole["usage"]["completion_tokens"]
        == len(choice["logprobs"]["content"])
    )
    again = complete(server, whole["prompt_token_ids"], return_token_ids=True).json[
        "choices"
    ][0]
    assert again["prompt_token_ids"] == whole["prompt_token_ids"]
    assert (again["text"], again["token_ids"]) == (
        choice["message"]["content"],
        choice["token_ids"],
    )
    parts = events(server.chat("count to 5", stream=True, **asked))
    assert [
        part.get("prompt_token_ids") for part in parts if "prompt_token_ids" in part
    ] == [whole["prompt_token_ids"]]
    told = [
        token for part in parts for token in part["choices"][0].get("token_ids", ())
    ]
    assert told == choice["token_ids"]
    assert "token_ids" not in server.chat("count to 5").json["choices"][0]


def test_usage_runs_along(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = events(
        server.chat("count to 5", stream=True, stream_options=options)
    )
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"]
    assert {part["usage"]["prompt_tokens"] for part in parts} == {
        last["usage"]["prompt_tokens"]
    }
    without = {"continuous_usage_stats": True}
    plain = events(server.chat("count to 5", stream=True, stream_options=without))
    assert not any("usage" in part for part in plain)  # as in vLLM


@pytest.mark.parametrize("most", [0, 1, 60])
def test_echo_scores_the_prompt(
    server: Running, batcher: VLMBatcher, most: int
) -> None:
    """As harnesses that go by log-likelihood ask: the prompt's tokens, with their own log-probabilities."""
    params = {"prompt_logprobs": 1, "logprobs": 1, "max_tokens": most}
    request = Request(
        prompt=PROMPT,
        template=None,
        params=params,  # type: ignore[arg-type]
        return_prompt_ids=True,
    )
    (wanted,) = batcher.generate([request])
    assert wanted.prompt_token_ids is not None
    assert wanted.prompt_logprobs is not None
    for prompt in (PROMPT, list(wanted.prompt_token_ids)):
        found = complete(
            server,
            prompt,
            echo=True,
            logprobs=1,
            max_tokens=most,
            skip_special_tokens=False,
        ).json
        (choice,) = found["choices"]
        told = choice["logprobs"]
        assert choice["text"].startswith(PROMPT)
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        scores = [one.logprob for one in wanted.prompt_logprobs if one is not None]
        assert told["token_logprobs"][1 : len(scores) + 1] == pytest.approx(
            scores, abs=1e-4
        )
        assert (
            len(told["tokens"])
            == len(told["text_offset"])
            == found["usage"]["total_tokens"]
        )
        for token, offset in zip(
            told["tokens"][:-1], told["text_offset"], strict=False
        ):
            assert choice["text"].startswith(token, offset), (token, offset)
        assert choice["prompt_logprobs"] is None


def test_echo_without_scores_and_where_it_cannot_be(server: Running) -> None:
    assert (
        complete(server, PROMPT, echo=True, max_tokens=0).json["choices"][0]["text"]
        == PROMPT
    )
    plain = complete(server, PROMPT).json["choices"][0]["text"]
    assert (
        complete(server, [PROMPT, PROMPT], echo=True).json["choices"][1]["text"]
        == PROMPT + plain
    )
    refused = complete(server, PROMPT, echo=True, stream=True, logprobs=0)
    assert refused.error["param"] == "echo"
    assert complete(server, PROMPT, max_tokens=0).error["param"] == "max_tokens"
    assert (
        server.chat("count to 5", max_completion_tokens=0).error["param"]
        == "max_completion_tokens"
    )
    assert server.chat("count to 5", echo=True).error["param"] == "echo"


def test_offsets_count_the_special_tokens_that_are_shown(server: Running) -> None:
    words = "<|im_start|>user\nsay <|im_end|><|im_end|>"
    for skips in (True, False):
        told = complete(
            server,
            words,
            echo=True,
            logprobs=0,
            max_tokens=3,
            skip_special_tokens=skips,
        ).json
        (choice,) = told["choices"]
        pairs = zip(
            choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True
        )
        assert all(
            words.startswith(token, offset) for token, offset in list(pairs)[:-3]
        )


@pytest.mark.parametrize("most", [0, 60])
def test_an_echo_is_streamed_before_its_answer(server: Running, most: int) -> None:
    """The pieces join to the whole answer's text, of each prompt and choice."""
    num = 2 if most else 1
    asked = {"echo": True, "n": num, "max_tokens": most}
    ids = complete(server, PROMPT, return_token_ids=True, max_tokens=1).json
    prompts = [PROMPT, "count to 3"]
    for prompt in (prompts, ids["choices"][0]["prompt_token_ids"]):
        whole = complete(server, prompt, **asked).json["choices"]
        texts = dict.fromkeys(range(len(whole)), "")
        firsts = dict(texts)
        for part in events(complete(server, prompt, stream=True, **asked)):
            (choice,) = part["choices"]
            firsts[choice["index"]] = firsts[choice["index"]] or choice["text"]
            texts[choice["index"]] += choice["text"]
        assert texts == {choice["index"]: choice["text"] for choice in whole}
        if prompt is prompts:
            assert [firsts[0], firsts[num]] == prompts


def test_offsets_of_a_family_that_answers_in_special_tokens(
    monkeypatch: pytest.MonkeyPatch, batcher: VLMBatcher
) -> None:
    """Such a checkpoint shows them unasked, in answers and echoes: offsets count what is shown."""
    spec = next(spec for spec in families() if spec.family == "qwen2_vl")
    assert spec.adapter is not None
    mark = "<|vision_start|>"
    marked = ModelSpec(**{**vars(spec), "special_tokens": ((mark, "a test"),)})
    monkeypatch.setattr(spec.adapter, "spec", marked)
    token = batcher.processing.tokenizer.convert_tokens_to_ids(mark)
    ids = batcher.processing.tokenizer.encode(f"red{mark}1", add_special_tokens=False)
    says = {"allowed_token_ids": [token], "max_tokens": 3, "logprobs": 0}
    with serving() as server:
        for skips, text in ((None, mark * 3), (False, mark * 3), (True, "")):
            asked = {**says, "skip_special_tokens": skips}
            (choice,) = complete(server, PROMPT, **asked).json["choices"]
            length = len(mark) if text else 0
            assert choice["text"] == text
            offsets = choice["logprobs"]["text_offset"]
            assert offsets == [0, length, 2 * length]
            (echoed,) = complete(server, ids, **asked, echo=True).json["choices"]
            prompt = f"red{mark}1" if text else "red1"
            assert echoed["text"] == prompt + text
            assert echoed["logprobs"]["text_offset"][-3:] == [
                len(prompt) + offset for offset in offsets
            ]


#: What clients of vLLM and llama.cpp write that asks for nothing.
ASKS_NOTHING: list[dict[str, Any]] = [
    {"session_id": "agent-7", "truncation_side": "left", "truncate_prompt_tokens": None},
    {"logprob_token_ids": None, "watermarking": False, "stream_interval": 1},
    {"return_prompt_text": False, "return_token_offsets": True, "return_mm_kwargs": False},
    {"cache_prompt": True, "id_slot": 1, "n_predict": -1, "timings_per_token": False},
    {"repeat_penalty": 1.0, "typical_p": 1.0, "top_n_sigma": -1, "min_keep": 0},
    {"dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1},
    {"mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "xtc_probability": 0, "xtc_threshold": 0.1},
    {"sse_ping_interval": 30, "reasoning_format": "auto", "thinking_budget_tokens": -1, "grammar": "", "samplers": None},
]  # fmt: skip


@pytest.mark.parametrize("said", ASKS_NOTHING, ids=lambda said: next(iter(said)))
def test_what_asks_for_nothing_is_taken_from_other_servers_clients(
    server: Running, said: dict[str, Any]
) -> None:
    wanted = server.chat("count to 3").json["choices"]
    found = server.chat("count to 3", **said)
    assert found.status == 200, found.body
    assert found.json["choices"] == wanted
    assert complete(server, PROMPT, **said).status == 200


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("logprob_token_ids", [4], "top_logprobs"),
        ("truncation_side", "middle", "left"),
        ("truncate_prompt_tokens", 5, "null"),
        ("stream_interval", 8, "every token"),
        ("watermarking", True, "false"),
        ("repeat_penalty", 1.1, "repetition_penalty"),
        ("n_predict", 20, "max_tokens"),
        ("dry_multiplier", 0.8, "0"),
        ("mirostat", 2, "0"),
        ("cache_prompt", False, "true"),
        ("samplers", ["top_k"], "null"),
    ],
)
def test_what_would_change_an_answer_is_refused_by_name(
    server: Running, name: str, value: Any, why: str
) -> None:
    refused = server.chat("count to 3", **{name: value})
    assert refused.status == 400
    assert refused.error["param"] == name
    assert why in refused.error["message"]


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object", "schema": {"const": "42"}}},
        {"json_schema": {"const": "42"}},
        {"guided_json": {"const": "42"}},
        {"guided_json": '{"const": "42"}'},
    ],
    ids=str,
)
def test_schemas_in_other_servers_words(server: Running, form: dict[str, Any]) -> None:
    reply = server.chat("count to 3", **form)
    assert reply.json["choices"][0]["message"]["content"] == '"42"', reply.body
    assert complete(server, PROMPT, **form).json["choices"][0]["text"] == '"42"'


def test_names_of_one_thing(server: Running) -> None:
    """One is enough, and errors have the client's."""
    schema = {"type": "integer"}
    both = server.chat("count", json_schema=schema, guided_json=schema)
    assert both.error["param"] == "json_schema"
    assert "guided_json" in both.error["message"]
    wrong = server.chat("count", json_schema={"type": 5})
    assert wrong.error["param"] == "json_schema", wrong.body
    for name in ("thinking_token_budget", "thinking_budget_tokens"):
        refused = server.chat("count", **{name: 5})  # the model does not think
        assert refused.error["param"] == name
        assert server.chat("count", **{name: -1}).status == 200
    goes_on = {"continue_final_message": True, "add_generation_prompt": True}
    assert server.chat("count", **goes_on).error["param"] == "continue_final_message"


def test_tokens_as_their_ids(server: Running) -> None:
    asked = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    (text,) = complete(server, PROMPT, logprobs=1, **asked).json["choices"]
    names = [f"token_id:{token}" for token in text["token_ids"]]
    assert text["logprobs"]["tokens"] == names
    tops = text["logprobs"]["top_logprobs"]
    assert all(name in top for name, top in zip(names, tops, strict=True))
    chat = server.chat("count to 5", logprobs=True, **asked).json["choices"][0]
    told = [one["token"] for one in chat["logprobs"]["content"]]
    assert told == [f"token_id:{token}" for token in chat["token_ids"]]


def test_a_salt_keeps_prefixes_apart(server: Running) -> None:
    words = "count to 7, and say " + "please " * 150

    def cached(**fields: Any) -> int:
        reply = server.chat(words, max_tokens=1, **fields)
        return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    assert cached() > 0
    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="two") == 0
    assert cached(cache_salt="one") > 0
    assert server.chat(words, cache_salt="").error["param"] == "cache_salt"


def test_a_priority_of_the_body_is_advice_within_a_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    submit = VLMBatcher.submit_request

    def noted(self: VLMBatcher, request: Request) -> Any:
        seen.append(request.priority)
        return submit(self, request)

    monkeypatch.setattr(VLMBatcher, "submit_request", noted)
    with serving(keys=(Key("plain"), Key("trusted", has_priority=True))) as server:
        for key, given, header in (
            ("plain", 3, None), ("plain", -3, None), ("plain", 9999, None),
            ("trusted", -3, None), ("trusted", 3, "7"),
        ):  # fmt: skip
            headers = {"Authorization": f"Bearer {key}"} | (
                {} if header is None else {"X-Priority": header}
            )
            assert (
                server.chat(
                    "count to 3", priority=given, max_tokens=1, headers=headers
                ).status
                == 200
            )
    assert seen == [-3, 0, -100, 3, 7]


@pytest.mark.parametrize(
    ("given", "part", "wanted"),
    [
        ({"num_frames": 8}, {}, {"num_frames": 8}),
        ({"fps": 2}, {}, {"fps": 2}),
        ({"fps": 2, "num_frames": 8}, {}, {"fps": 2, "max_frames": 8}),
        ({"fps": 2, "num_frames": -1}, {}, {"fps": 2}),
        ({"fps": -1, "num_frames": 4}, {}, {"num_frames": 4}),
        ({"num_frames": -1}, {}, {"num_frames": -1}),
        ({"fps": -1, "num_frames": -1}, {}, {"num_frames": -1}),
        ({"num_frames": 8}, {"fps": 1}, {"fps": 1}),
    ],
)
def test_frames_of_all_videos(
    given: dict[str, Any], part: dict[str, Any], wanted: dict[str, Any]
) -> None:
    video = {
        "type": "video_url",
        "video_url": {"url": "data:video/mp4;base64,aGVsbG8="},
        **part,
    }
    said = {
        "messages": [{"role": "user", "content": [video]}],
        "media_io_kwargs": {"video": given},
    }
    (prompt,) = chat_ask(
        ChatRequest.model_validate(said), ServerConfig(model="model")
    ).prompts
    (found,) = prompt["messages"][0]["content"]
    assert {
        name: found[name]
        for name in ("fps", "num_frames", "max_frames")
        if name in found
    } == wanted


@pytest.fixture(scope="module")
def bounded() -> Iterator[Running]:
    """A server whose requests have four pictures and frames at most."""
    limits = Limits(request_pictures=4)

    def opened() -> VLMBatcher:
        return VLMBatcher(str(default_checkpoint()), limits=limits)

    with serving(opened) as running:
        yield running


def moving(folder: Path, frames: int) -> str:
    """A video of grey frames, as a data URI."""
    file = folder / "clip.mp4"
    code = cv2.VideoWriter_fourcc(*"mp4v")  # type: ignore[attr-defined]
    writer = cv2.VideoWriter(str(file), code, 4.0, (56, 56))
    for index in range(frames):
        writer.write(np.full((56, 56, 3), 20 * index, np.uint8))
    writer.release()
    return "data:video/mp4;base64," + base64.b64encode(file.read_bytes()).decode()


@pytest.mark.parametrize(("frames", "status"), [(3, 200), (6, 400)])
def test_every_frame_of_a_video_is_taken_within_the_servers_bound(
    bounded: Running, tmp_path: Path, frames: int, status: int
) -> None:
    """What -1 asks for is counted like any other frames."""
    video = {"type": "video_url", "video_url": {"url": moving(tmp_path, frames)}}
    asked = {"media_io_kwargs": {"video": {"num_frames": -1}}, "max_tokens": 1}
    reply = bounded.chat([video, {"type": "text", "text": "x"}], **asked)
    assert reply.status == status, reply.body
    if status == 400:
        assert "pictures and frames" in reply.error["message"]


def test_resize_shape_is_refused_by_name(server: Running) -> None:
    assert "min_pixels" in server.chat("x", resize_shape=[64, 64]).error["message"]
    asked: dict[str, Any] = {"resize_shape": None, "media_io_kwargs": {"image": {}}}
    assert server.chat("count to 3", **asked).status == 200
