"""MinerU's client with this library's engine answers as MinerU's own for MLX. Skipped where MinerU's is not installed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

FIXTURES = Path(__file__).parent.parent / "fixtures"
FILES = [
    FIXTURES / "images" / name
    for name in ("red_circle.png", "yellow_triangle_left_of_green_cross.png")
]
QUESTIONS = ["describe the picture", "how many shapes are there?"]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def clients() -> Iterator[tuple[Any, Any]]:
    """(MinerU's client with its own engine, with ours)."""
    package = pytest.importorskip(
        "mineru_vl_utils", reason="MinerU's client is not installed"
    )
    from vlm_batch import VLMBatcher
    from vlm_batch.integrations.mineru import mineru_client

    path = str(FIXTURES / "checkpoints" / "qwen2_vl")
    options = {"system_prompt": "", "use_tqdm": False}
    theirs = package.MinerUClient("mlx-engine", model_path=path, **options)
    with VLMBatcher(path) as batcher:
        yield theirs, mineru_client(batcher, **options)


def pictures() -> list[Image.Image]:
    return [Image.open(file).convert("RGB") for file in FILES]


def test_batches_have_the_texts_of_mineru_s(clients: tuple[Any, Any]) -> None:
    theirs, ours = (one.client for one in clients)
    for most in (3, None):
        sampling = sampling_of(max_new_tokens=most, temperature=0.0)
        right = theirs.batch_predict(pictures(), QUESTIONS, sampling)
        assert ours.batch_predict(pictures(), QUESTIONS, sampling) == right
        later = ours.aio_batch_predict(
            pictures(), QUESTIONS, sampling, semaphore=asyncio.Semaphore(1)
        )
        assert asyncio.run(later) == right and all(right)


def sampling_of(**fields: Any) -> Any:
    from mineru_vl_utils.vlm_client.base_client import SamplingParams

    return SamplingParams(**fields)


def test_one_page_by_path_and_bytes(clients: tuple[Any, Any]) -> None:
    theirs, ours = (one.client for one in clients)
    sampling = sampling_of(max_new_tokens=20)
    right = theirs.predict(str(FILES[1]), QUESTIONS[0], sampling)
    assert right == "a yellow triangle left of a green cross"
    assert ours.predict(FILES[1].read_bytes(), QUESTIONS[0], sampling) == right
    later = ours.aio_predict(str(FILES[1]), QUESTIONS[0], sampling)
    assert asyncio.run(later) == right


def test_mineru_reads_a_page_in_its_two_steps(clients: tuple[Any, Any]) -> None:
    """Its prompts, sizes and parameters go through; this model finds no blocks, in either."""
    theirs, ours = clients
    (page, _) = pictures()
    assert list(ours.two_step_extract(page)) == list(theirs.two_step_extract(page))
    assert ours.content_extract(page) == theirs.content_extract(page)


def test_a_request_that_fails_says_why(clients: tuple[Any, Any]) -> None:
    from mineru_vl_utils.vlm_client.base_client import ServerError

    ours = clients[1].client
    with pytest.raises(ServerError, match="nothing"):
        ours.batch_predict([FILES[0].read_bytes(), "nothing.png"], QUESTIONS[0])
    with pytest.raises(ValueError, match="1 prompts for 2 images"):
        ours.batch_predict(pictures(), QUESTIONS[:1])
