"""Names that people bring from other libraries are answered with the right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vlm_batch import InvalidParameters, Request, SamplingParams, VLMBatcher
from vlm_batch.assets import default_checkpoint


@pytest.fixture(scope="module")
def batcher() -> Iterator[VLMBatcher]:
    with VLMBatcher(default_checkpoint()) as made:
        yield made


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ({"image": "a.png"}, "write images="),
        ({"audio": "a.wav"}, "write audios="),
        ({"max_tokens": 5}, 'write params={"max_tokens": ...}'),
        ({"temp": 0.5}, 'write params={"temperature": ...}'),
        ({"max_new_tokens": 5}, 'write params={"max_tokens": ...}'),
        ({"system": "be brief"}, "write messages="),
        ({"tools": []}, 'write template={"tools": ...}'),
        ({"mesages": []}, "('messages' is probably meant)"),
        ({"stream": True}, "iterate over the handle"),
    ],
)
def test_submit_and_request_say_the_right_name(
    batcher: VLMBatcher, given: dict[str, Any], right: str
) -> None:
    calls: tuple[Callable[..., Any], ...] = (batcher.submit, Request)
    for call in calls:
        with pytest.raises(TypeError) as raised:
            call(prompt="say hello", **given)
        assert f"has no argument {next(iter(given))!r}" in str(raised.value)
        assert right in str(raised.value)


def test_sampling_says_the_right_name() -> None:
    with pytest.raises(
        TypeError, match=r"SamplingParams\(\) .*'temp' .write temperature="
    ):
        SamplingParams(temp=0.5)  # type: ignore[call-arg]
    with pytest.raises(
        InvalidParameters, match=r"no max_new_tokens .write max_tokens="
    ):
        Request(prompt="a", params={"max_new_tokens": 5})  # type: ignore[arg-type]


def test_the_batcher_and_generate_say_the_right_name(batcher: VLMBatcher) -> None:
    with pytest.raises(
        TypeError, match=r"VLMBatcher\(\) .*'batch_size' .write max_rows="
    ):
        VLMBatcher(default_checkpoint(), batch_size=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"generate\(\[Request\(images=\.\.\., prompt="):
        batcher.generate(prompts=["a"], images=["b.png"])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        batcher.generate()  # type: ignore[call-arg]


def test_a_name_like_no_other_is_named_alone(batcher: VLMBatcher) -> None:
    with pytest.raises(TypeError) as raised:
        batcher.submit(prompt="a", zzz=1)  # type: ignore[call-arg]
    assert str(raised.value) == "VLMBatcher.submit() has no argument 'zzz'"
