"""Fields of vLLM's that are honoured on the wire: token ids, running usage, echo, salts, priorities, frames."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving import Reply, Running, serving
from vlm_batch import Request, VLMBatcher
from vlm_batch.assets import default_checkpoint
from vlm_batch.server.config import Key, ServerConfig
from vlm_batch.server.doors.chat import ChatRequest, chat_ask
from vlm_batch.server.errors import ApiError

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
    refused = server.chat(
        "count to 5", stream=True, stream_options={"continuous_usage_stats": True}
    )
    assert refused.error["param"] == "stream_options.continuous_usage_stats"


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
        assert "prompt_logprobs" not in choice


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
    assert complete(server, PROMPT, echo=True, stream=True).error["param"] == "echo"
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


def test_frames_that_cannot_be_said(server: Running) -> None:
    said = {
        "messages": [{"role": "user", "content": "x"}],
        "media_io_kwargs": {"video": {"num_frames": -1}},
    }
    with pytest.raises(ApiError, match="num_frames -1 takes every frame"):
        chat_ask(ChatRequest.model_validate(said), ServerConfig(model="model"))
    assert "min_pixels" in server.chat("x", resize_shape=[64, 64]).error["message"]
    assert (
        server.chat(
            "count to 3", resize_shape=None, media_io_kwargs={"image": {}}
        ).status
        == 200
    )
