"""lmms-eval's models: ``--model vlm_batch --model_args model=PATH``, found by its group of entry points.

The whole task is one batch: answers are generated together, and the options of a question share its prompt's state. Tasks
of chats and of one turn generate; those with choices take ``--force_simple``, since lmms-eval's chats only generate.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest

from vlm_batch.batcher import VLMBatcher
from vlm_batch.inputs.images import picture_suffixes
from vlm_batch.types import Audio, Request, Result
from vlm_batch.types.options import MOST_OPTIONS

logger = logging.getLogger(__name__)

#: lmms-eval's names of generation, and the library's.
_SAMPLING = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
}
#: What says no more than the above, or is the default of searches that this library does not have.
_UNREAD = {"until", "do_sample", "num_beams", "image_aspect_ratio", "use_cache"}
#: Endings of recordings among a task's files.
_SOUNDS = (".wav", ".mp3", ".m4a", ".aac", ".flac", ".ogg", ".opus")
#: What tasks write where a picture is; the chat template has a word of its own for it.
_MARK = "<image>"


@dataclass
class _Media:
    """A question's media, by kind."""

    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    audios: list[Any] = field(default_factory=list)

    def add(self, one: Any) -> str:
        """Add a picture, a path or a recording. Returns its kind."""
        if isinstance(one, Mapping) and "array" in one:
            sound = np.asarray(one["array"])
            self.audios.append(Audio(sound, rate=one["sampling_rate"]))
            return "audio"
        if not isinstance(one, (str, Path)):
            self.images.append(one)
            return "image"
        suffix = Path(one).suffix.lower()
        if suffix in picture_suffixes():
            self.images.append(one)
            return "image"
        if suffix in _SOUNDS:
            self.audios.append(one)
            return "audio"
        self.videos.append(one)
        return "video"

    @property
    def fields(self) -> dict[str, list[Any]]:
        return {"images": self.images, "videos": self.videos, "audios": self.audios}


class Loss(GenerationResult, tuple):  # type: ignore[misc,type-arg]
    """An option's loss, and whether it is the greedy one.

    lmms-eval 0.7.3 hands on a result's ``text`` as it is; of a plain pair it makes a string, of which no task of choices can
    read the loss (``unwrap_generation_output``).
    """

    def __new__(cls, loss: float, is_greedy: bool) -> Loss:
        return tuple.__new__(cls, (loss, is_greedy))

    def __init__(self, loss: float, is_greedy: bool) -> None:
        super().__init__(text=(loss, is_greedy))


class VLMBatch(lmms):
    """A model of lmms-eval that a ``VLMBatcher`` answers.

    Args:
        model: a path, a hub id, or a batcher.
        pretrained: another name of ``model``.
        max_new_tokens: of tasks that say none.
        enable_thinking: argument of the chat template.
        reproducible: as ``VLMBatcher``'s; so are ``max_rows``, ``kv_bits``, ``dtype`` and ``trust_remote_code``.
        batch_size: lmms-eval's, as ``max_batch_size`` and ``device`` are; the batcher chooses its own.
    """

    is_simple = True

    def __init__(
        self,
        model: str | VLMBatcher | None = None,
        pretrained: str | None = None,
        *,
        max_new_tokens: int = 1024,
        enable_thinking: bool | None = None,
        reproducible: bool = False,
        max_rows: int | None = None,
        kv_bits: float | None = None,
        dtype: str = "auto",
        trust_remote_code: bool = False,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        chosen = model or pretrained
        if chosen is None:
            raise ValueError("vlm_batch needs --model_args model=PATH")
        self._is_own = not isinstance(chosen, VLMBatcher)
        if not isinstance(chosen, VLMBatcher):
            chosen = VLMBatcher(
                chosen,
                reproducible=reproducible,
                max_rows=max_rows,
                kv_bits=kv_bits,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
            )
        self.batcher = chosen
        self._max_new_tokens = max_new_tokens
        self._template = {"enable_thinking": enable_thinking}

    def clean(self) -> None:
        """Free the model, as lmms-eval asks for at the end. A batcher that was given stays open."""
        if self._is_own:
            self.batcher.close()

    # Answers

    def generate_until(self, requests: Sequence[Instance]) -> list[Any]:
        """Return each answer's text with its counts of tokens; "" of a request that failed, with an error in the log."""
        asked = map(self._asked, requests)
        return [_generated(result) for result in self._answered(asked)]

    def _asked(self, instance: Instance) -> Request:
        context, given, visual, doc_id, task, split = instance.args
        media = _media_of(visual, self.task_dict[task][split][doc_id])
        return self._request(
            prompt=context.replace(_MARK, "").strip(),
            params=self._params(given),
            **media.fields,
        )

    def _request(self, **fields: Any) -> Request:
        return Request(template=self._template, **fields)  # type: ignore[arg-type]

    def _answered(self, asked: Iterable[Request]) -> list[Result]:
        results = self.batcher.generate(asked, progress=True)
        for result in results:
            if result.error is not None:
                logger.error("a request of lmms-eval failed: %s", result.error)
        return results

    def _params(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return sampling parameters. What has no name here is logged."""
        params: dict[str, Any] = {"max_tokens": self._max_new_tokens}
        for name, value in given.items():
            if name in _SAMPLING:
                params[_SAMPLING[name]] = value
            elif name not in _UNREAD:
                logger.warning("generation_kwargs: %s is not read", name)
        said = {name: value for name, value in params.items() if value is not None}
        if not given.get("do_sample", True):
            said["temperature"] = 0
        return {**said, "stop": _stops(given.get("until"))}

    def generate_until_multi_round(self, requests: Any) -> Any:
        raise NotImplementedError("vlm_batch answers tasks of one round")

    # Options

    def loglikelihood(self, requests: Sequence[Instance]) -> list[Loss]:
        """Return each continuation's loss, and whether it is the greedy one.

        The loss is the negative log-probability, since lmms-eval takes the choice with the least. Infinity for one that
        cannot be scored, with an error in the log.
        """
        places: dict[Any, list[int]] = {}
        for place, instance in enumerate(requests):
            context, _, _, doc_id, task, split = _six(instance.args)
            line = places.setdefault((task, split, doc_id, context), [])
            line.append(place)
        questions: list[list[int]] = []
        for line in places.values():
            for begin in range(0, len(line), MOST_OPTIONS):
                questions.append(line[begin : begin + MOST_OPTIONS])
        results = self._answered(
            self._scored([requests[at] for at in line]) for line in questions
        )
        found = [Loss(math.inf, False)] * len(requests)
        for line, result in zip(questions, results, strict=True):
            for place, score in zip(line, result.options, strict=False):
                if score.error is not None:
                    logger.error("an option could not be scored: %s", score.error)
                found[place] = Loss(-score.logprob, score.is_greedy)
        return found

    def _scored(self, of_one: Sequence[Instance]) -> Request:
        """Return a question with the continuations of its instances as options."""
        context, _, visual, doc_id, task, split = _six(of_one[0].args)
        doc = self.task_dict[task][split][doc_id]
        options = []
        for instance in of_one:
            said = instance.args[1]
            options.append(str(said(doc) if callable(said) else said))
        return self._request(
            prompt=context.replace(_MARK, "").strip(),
            options=options,
            **_media_of(visual, doc).fields,
        )


class VLMBatchChat(VLMBatch):
    """The same for tasks that are chats."""

    is_simple = False

    def _asked(self, instance: Instance) -> Request:
        _, to_messages, given, doc_id, task, split = instance.args
        media = _Media()
        turns: list[dict[str, Any]] = []
        for turn in to_messages(self.task_dict[task][split][doc_id]):
            parts = [_part(part, media) for part in turn["content"]]
            turns.append({"role": turn["role"], "content": parts})
        return self._request(messages=turns, params=self._params(given), **media.fields)


def _stops(until: str | Sequence[str] | None) -> list[str]:
    """Return stop strings, without lmms-eval's default, which would end answers at their first blank line."""
    if until is None:
        return []
    texts = [until] if isinstance(until, str) else until
    return [text for text in texts if text.strip()]


def _part(part: Mapping[str, Any], media: _Media) -> dict[str, Any]:
    """Return a part of a turn; media go to ``media``, in order."""
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    kind = media.add(part["url"])
    return {"type": kind}


def _media_of(visual: Callable[[Any], Any] | None, doc: Any) -> _Media:
    media = _Media()
    for one in _flat(visual(doc) if visual is not None else ()):
        media.add(one)
    return media


def _flat(given: Any) -> Iterator[Any]:
    """Yield one or nested media."""
    if not isinstance(given, (list, tuple)):
        if given is not None:
            yield given
        return
    for one in given:
        yield from _flat(one)


def _six(args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of a continuation behind a question. Raises NotImplementedError for one without."""
    if len(args) != 6:
        raise NotImplementedError(
            "options are scored behind a question; acc_mutual_info asks for them without one"
        )
    return args


def _generated(result: Result) -> GenerationResult:
    usage = result.usage
    counts = TokenCounts(usage.prompt_tokens, usage.completion_tokens)
    return GenerationResult(result.text, counts)


def manifest() -> ModelManifest:
    """Return what lmms-eval registers."""
    return ModelManifest(
        model_id="vlm_batch",
        simple_class_path=f"{__name__}.VLMBatch",
        chat_class_path=f"{__name__}.VLMBatchChat",
    )
