"""MinerU's client with this library's engine.

::

    from vlm_batch.integrations.mineru import mineru_client

    client = mineru_client(VLMBatcher(model))
    blocks = client.two_step_extract(page)

``MinerUClient`` (mineru-vl-utils 2.0) makes its client from a closed list of back ends and keeps it in the attribute
``client``; ``mineru_client`` assigns one of the same class there. MinerU's ``mlx-engine`` answers groups of eight, each until
its longest answer has ended; here all pages or blocks of a call share the batch, and so do calls of several threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import vlm_batch  # noqa: F401  (before mlx.core: it chooses the BLAS)

# isort: split
from mineru_vl_utils import MinerUClient
from mineru_vl_utils.vlm_client.base_client import SamplingParams as Sampling
from mineru_vl_utils.vlm_client.base_client import ServerError
from mineru_vl_utils.vlm_client.mlx_client import MlxVlmClient
from tqdm import tqdm

from vlm_batch.batcher import VLMBatcher
from vlm_batch.handle import Handle
from vlm_batch.types import Request, Result, SamplingParams

__all__ = ["BatchedMlxClient", "mineru_client"]

#: Parameters of MinerU's that have the same name here. Its ``mlx-engine`` passes over ``no_repeat_ngram_size``.
SAME = (
    "temperature",
    "top_p",
    "top_k",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "no_repeat_ngram_size",
)


def mineru_client(batcher: VLMBatcher, **options: Any) -> MinerUClient:
    """Return MinerU's client above a batcher, which stays open.

    Args:
        options: of ``MinerUClient``, but for ``backend``, ``model`` and ``processor``.
    """
    adapter: Any = batcher._loop.generator.adapter
    model = adapter.model
    processor = batcher.processing.processor
    client = MinerUClient("mlx-engine", model=model, processor=processor, **options)
    theirs = client.client
    client.client = BatchedMlxClient(
        batcher,
        model=model,
        processor=processor,
        prompt=theirs.prompt,
        system_prompt=theirs.system_prompt,
        sampling_params=theirs.sampling_params,
        text_before_image=theirs.text_before_image,
        allow_truncated_content=theirs.allow_truncated_content,
        use_tqdm=theirs.use_tqdm,
    )
    return client


class BatchedMlxClient(MlxVlmClient):
    """MinerU's client for MLX. Its chats and parameters are kept; ``VLMBatcher`` answers.

    An image is a path, a URL, bytes or a PIL image. A request that fails raises ServerError once the others have ended.
    """

    def __init__(self, batcher: VLMBatcher, **options: Any) -> None:
        super().__init__(**options)
        self._batcher = batcher

    def predict(
        self,
        image: Any,
        prompt: str = "",
        sampling_params: Sampling | None = None,
        priority: int | None = None,
    ) -> str:
        return _text(self._submit(image, prompt, sampling_params).result())

    def batch_predict(
        self,
        images: Sequence[Any],
        prompts: Sequence[str] | str = "",
        sampling_params: Sequence[Sampling | None] | Sampling | None = None,
        priority: Sequence[int | None] | int | None = None,
    ) -> list[str]:
        handles = self._submit_all(images, prompts, sampling_params)
        shown = tqdm(handles, disable=not self.use_tqdm)
        results = [handle.result() for handle in shown]
        return [_text(result) for result in results]

    async def aio_predict(
        self,
        image: Any,
        prompt: str = "",
        sampling_params: Sampling | None = None,
        priority: int | None = None,
    ) -> str:
        return _text(await self._submit(image, prompt, sampling_params))

    async def aio_batch_predict(
        self,
        images: Sequence[Any],
        prompts: Sequence[str] | str = "",
        sampling_params: Sequence[Sampling | None] | Sampling | None = None,
        priority: Sequence[int | None] | int | None = None,
        semaphore: asyncio.Semaphore | None = None,
        use_tqdm: bool = False,
        tqdm_desc: str | None = None,
    ) -> list[str]:
        place: AbstractAsyncContextManager[Any] = semaphore or nullcontext()
        async with place:
            handles = self._submit_all(images, prompts, sampling_params)
            results = await asyncio.gather(*handles)
        return [_text(result) for result in results]

    def _submit_all(
        self,
        images: Sequence[Any],
        prompts: Sequence[str] | str,
        sampling_params: Sequence[Sampling | None] | Sampling | None,
    ) -> list[Handle]:
        each_prompt = _one_each("prompts", prompts, len(images))
        each_params = _one_each("sampling_params", sampling_params, len(images))
        given = zip(images, each_prompt, each_params, strict=True)
        return [self._submit(*one) for one in given]

    def _submit(self, image: Any, prompt: str, given: Sampling | None) -> Handle:
        request = Request(
            messages=self.build_messages(prompt, has_image=image is not None),
            images=image,
            params=self._params(given),
        )
        return self._batcher.submit_request(request)

    def _params(self, given: Sampling | None) -> SamplingParams:
        merged = self.build_sampling_params(given)
        said = {name: getattr(merged, name) for name in SAME}
        params = {name: value for name, value in said.items() if value is not None}
        most = merged.max_new_tokens
        return SamplingParams(
            max_tokens=self.model_max_length if most is None else most,
            # boxes and kinds of blocks are special tokens
            skip_special_tokens=False,
            **params,
        )


def _one_each(name: str, given: Any, count: int) -> list[Any]:
    is_one = isinstance(given, str) or not isinstance(given, Sequence)
    each = [given] * count if is_one else list(given)
    if len(each) != count:
        raise ValueError(f"there are {len(each)} {name} for {count} images")
    return each


def _text(result: Result) -> str:
    if result.error is not None:
        raise ServerError(result.error)
    return result.text
