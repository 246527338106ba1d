"""Verification of a folder's prompts: the ids, ends and pixels that transformers makes of the same requests.

No model runs. transformers answers in a process of its own (``oracle.py``), since mlx-vlm replaces classes of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
from mlx_vlm.prompt_utils import apply_chat_template
from mlx_vlm.utils import (
    get_model_and_args,
    get_model_type,
    prepare_inputs,
    should_add_special_tokens,
)

from vlm_batch.adapters.base import Adapter
from vlm_batch.cli import oracle
from vlm_batch.errors import InvalidRequest, UnsupportedModel
from vlm_batch.inputs.checking import ModelFacts
from vlm_batch.inputs.prepare import Preparer
from vlm_batch.inputs.processing import Processing
from vlm_batch.inputs.processors import with_pillow
from vlm_batch.loading.checkpoints import read_config, read_processor
from vlm_batch.loading.folders import folder_facts
from vlm_batch.loading.recommended import RecommendedSampling
from vlm_batch.loading.unread import UnreadSetting, unread_settings
from vlm_batch.models import package_of, spec_for
from vlm_batch.registry import ModelSpec
from vlm_batch.types import Message, Request, Template

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
#: A pixel's largest difference that rounding explains: transformers may resize with torch.
LEVELS = 1.0


@dataclass(frozen=True)
class Case:
    """A request that both sides are asked; ``images`` are sizes (width, height)."""

    name: str
    messages: list[Message] | None = None
    text: str | None = None
    images: tuple[tuple[int, int], ...] = ()
    tools: list[dict[str, Any]] | None = None
    continue_final_message: bool = False

    def request(self) -> Request:
        """Return the request as a user submits it."""
        images = tuple(
            oracle.picture(*size, seed) for seed, size in enumerate(self.images)
        )
        if self.text is not None:
            return Request(prompt=self.text, images=images, template=None)
        options = Template(
            tools=self.tools, continue_final_message=self.continue_final_message
        )
        return Request(messages=self.messages, images=images, template=options)


def _user(text: str, pictures: int = 0) -> Message:
    return {
        "role": "user",
        "content": [*[{"type": "image"}] * pictures, {"type": "text", "text": text}],
    }


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": [{"type": "text", "text": text}]}


_CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Cardiff"}},
}
CASES = (
    Case("text", [_user("What is the capital of Wales?")]),
    Case("picture", [_user("What is this?", 1)], images=((320, 240),)),
    Case(
        "two pictures", [_user("What has changed?", 2)], images=((320, 240), (224, 448))
    ),
    Case(
        "turns",
        [
            _said("system", "Be brief."),
            _user("What is this?", 1),
            _said("assistant", "A ramp."),
            _user("Of what?"),
        ],
        images=((320, 240),),
    ),
    Case(
        "turns of text",
        [
            {"role": "user", "content": "Count to two."},
            {"role": "assistant", "content": "1 2"},
            {"role": "user", "content": "Go on."},
        ],
    ),
    Case(
        "tools",
        [
            {"role": "user", "content": "Rain in Cardiff?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "rain"},
        ],
        tools=[WEATHER],
    ),
    Case(
        "prefix",
        [_user("Count to four."), _said("assistant", "1 2")],
        continue_final_message=True,
    ),
    Case("plain text", text="Once upon a time"),
)


#: Whether transformers reads a setting that mlx-vlm does not -> who reads it.
READERS = {True: "transformers reads and mlx-vlm does not", False: "nobody reads"}
#: (family, case) -> why transformers' prompt is none to follow.
NOT_FOLLOWED = {
    (
        "mllama",
        "plain text",
    ): "transformers writes a beginning into the text, and its tokenizer adds another "
    "(processing_mllama.py, build_string_from_input): here there is one",
}


@dataclass(frozen=True)
class Made:
    """One side's prompt of a case; ``arrays`` holds all outputs but the ids."""

    ids: tuple[int, ...] = ()
    text: str | None = None
    arrays: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Compared:
    """One case.

    Attributes:
        differs: What of ours is not transformers'; empty if all is.
        upstream: The same of mlx-vlm's prompt.
        reason: Why there is nothing to compare.
    """

    name: str
    tokens: int = 0
    differs: tuple[str, ...] = ()
    upstream: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class PromptVerification:
    """A folder's outcome.

    Attributes:
        ends: Ids at which answers end here; ``published_ends`` by the folder's files, ``upstream_ends`` in mlx-vlm.
        unread: Settings of config.json that nobody reads.
        unread_error: Why that is unknown; None if it is known.
        missing: Tensors that the index names and the folder lacks.
        faults: Why the folder cannot be loaded, beside ``missing``.
        recommended: Sampling that the publisher recommends.
    """

    model: str
    family: str
    processor: str
    oracle: str
    cases: tuple[Compared, ...]
    ends: tuple[int, ...]
    published_ends: tuple[int, ...]
    upstream_ends: tuple[int, ...]
    unread: tuple[UnreadSetting, ...]
    unread_error: str | None
    missing: tuple[str, ...]
    faults: tuple[str, ...]
    recommended: RecommendedSampling

    @property
    def compared(self) -> int:
        """The number of cases of which both sides made a prompt."""
        return sum(one.reason is None for one in self.cases)

    @property
    def ok(self) -> bool:
        """Whether prompts are transformers' and answers end where the folder says."""
        return not any(one.differs for one in self.cases) and set(
            self.published_ends
        ) <= set(self.ends)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}

    def text(self) -> str:
        said = "as transformers makes them"
        if not self.ok:
            said = f"NOT {said}"
        elif not self.compared:
            said = "not compared: transformers cannot read this folder"
        lines = [
            f"**{self.model}** ({self.family}): prompts {said}",
            "",
            f"- here: {self.processor}; transformers: {self.oracle}",
            f"- an answer ends at {_listed(self.ends)}; the folder names {_listed(self.published_ends)}, mlx-vlm takes "
            f"{_listed(self.upstream_ends)}",
        ]
        lines += [
            f"- the folder recommends {self.recommended} (`--sampling recommended` takes it)"
        ]
        for is_read, what in READERS.items():
            unread = [one for one in self.unread if one.read_by_transformers == is_read]
            if unread:
                lines.append(
                    f"- config.json has what {what}: {', '.join(map(_setting, unread))}"
                )
        if self.unread_error is not None:
            lines.append(
                f"- not known what of config.json nobody reads: {self.unread_error}"
            )
        if self.missing:
            lines.append(
                f"- {len(self.missing):,} tensors of the index are not in the folder: {_few(self.missing)}"
            )
        lines += [f"- {fault}" for fault in self.faults]
        lines += [
            "",
            "| | tokens | here : transformers | mlx-vlm : transformers |",
            "|---|---|---|---|",
        ]
        for one in self.cases:
            if one.reason is not None:
                lines.append(f"| {one.name} | - | {one.reason} | |")
                continue
            ours, theirs = (
                "; ".join(part) or "equal" for part in (one.differs, one.upstream)
            )
            lines.append(f"| {one.name} | {one.tokens or '-'} | {ours} | {theirs} |")
        return "\n".join(lines)


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids)) or "nothing"


def _setting(unread: UnreadSetting) -> str:
    return f"{unread.path} {json.dumps(unread.value)}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


class Folder:
    """A model's folder, read as the engine reads it but for the weights.

    Raises:
        UnsupportedModel: It is of no known family.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: dict[str, Any] = json.loads(
            (path / "config.json").read_text(encoding="utf-8")
        )
        read = read_config(path)
        model_type = str(get_model_type(read))
        spec = spec_for(model_type)
        if spec is None or spec.adapter is None:
            raise UnsupportedModel(
                f"model type {model_type!r} has no adapter; prompts of it are not compared"
            )
        self.spec: ModelSpec = spec
        self.package = package_of(model_type) or get_model_and_args(read)[0]
        self.config = self.package.ModelConfig.from_dict(
            {"text_config": {}, "vision_config": {}, **read}
        )
        self.config.model_type = model_type
        self.config.eos_token_id = read.get("eos_token_id")
        without_weights: Any = SimpleNamespace(config=self.config)
        self.processor = read_processor(path, without_weights)
        adapter: type[Adapter] = spec.adapter
        self.processing = Processing(
            adapter.processor(with_pillow(self.processor)), self.config
        )
        self.preparer = Preparer(self.processing, ModelFacts(spec=spec))

    def make(self, case: Case) -> Made:
        """Return what the engine's own way makes of a case."""
        try:
            question = self.preparer.check(case.request())
            inputs = dict(self.preparer.prepare(question).inputs)
        except InvalidRequest as error:
            return Made(error=" ".join(str(error).split()))
        ids = np.array(inputs.pop("input_ids"))[0]
        return Made(tuple(map(int, ids)), question.prompt, inputs)

    def make_upstream(self, case: Case) -> Made:
        """Return what mlx-vlm's own functions make of a case."""
        request = case.request()
        images: list[Any] = list(request.images)
        more: dict[str, Any] = {} if case.tools is None else {"tools": case.tools}
        if case.continue_final_message:
            more |= {"continue_final_message": True, "add_generation_prompt": False}
        try:
            text = case.text
            if text is None:
                text = apply_chat_template(
                    self.processor,
                    self.config,
                    case.messages,
                    num_images=len(images),
                    **more,
                )
            text = text.get("content", "") if isinstance(text, Mapping) else text
            adds = should_add_special_tokens(self.config.model_type, self.processor)
            marker = vars(self.config).get("image_token_index")
            found = prepare_inputs(
                self.processor,
                images=images or None,
                prompts=text,
                image_token_index=marker,
                add_special_tokens=adds,
            )
        except Exception as error:  # whatever upstream's path raises, it is the finding
            return Made(
                error=f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            )
        ids = np.array(found["input_ids"])[0]
        return Made(
            tuple(map(int, ids)),
            text,
            {name: value for name, value in found.items() if name != "input_ids"},
        )

    @property
    def published_ends(self) -> tuple[int, ...]:
        """The ends that the folder names: generation_config.json's, or else config.json's, as in transformers."""
        path = self.path / "generation_config.json"
        said = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        text = self.written.get("text_config") or {}
        named = (
            said.get("eos_token_id"),
            self.written.get("eos_token_id"),
            text.get("eos_token_id"),
        )
        found = next((ends for ends in named if ends is not None), ())
        return (found,) if isinstance(found, int) else tuple(found)


def ask_transformers(
    folders: Sequence[Path], cases: Sequence[Case], pixels: Path
) -> list[dict[str, Any]]:
    """Ask ``oracle.py`` in another process; pictures' values lie under ``pixels`` by folder and case."""
    asked = []
    for at, folder in enumerate(folders):
        (pixels / str(at)).mkdir()
        asked.append(
            {
                "folder": str(folder),
                "cases": [asdict(case) for case in cases],
                "pixels": str(pixels / str(at)),
            }
        )
    given = json.dumps(asked)
    run = subprocess.run(
        [sys.executable, oracle.__file__],
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"transformers could not be asked: {run.stderr[-500:]}")
    found: list[dict[str, Any]] = json.loads(run.stdout)
    return found


def verify_prompts(
    folder: Folder, *, name: str | None = None, cases: Sequence[Case] = CASES
) -> PromptVerification:
    """Compare a folder's prompts with transformers'."""
    with TemporaryDirectory(prefix="vlm_batch-") as pixels:
        (answers,) = ask_transformers([folder.path], cases, Path(pixels))
        compared = tuple(
            _compared(folder, case, _theirs(answers, at))
            for at, case in enumerate(cases)
        )
    facts = folder_facts(folder.path)
    unread, unread_error = _unread(folder.path)
    stops = vars(folder.processing.tokenizer)["stopping_criteria"]
    return PromptVerification(
        model=name or str(folder.path),
        family=folder.spec.family,
        processor=f"{type(folder.processor).__name__} of {type(folder.processor).__module__.partition('.')[0]}",
        oracle=str(answers.get("error") or answers["processor"]),
        cases=compared,
        ends=folder.processing.eos_token_ids,
        published_ends=folder.published_ends,
        upstream_ends=tuple(stops.eos_token_ids),
        unread=unread,
        unread_error=unread_error,
        missing=facts.missing_tensors,
        faults=facts.faults,
        recommended=facts.recommended,
    )


def _unread(path: Path) -> tuple[tuple[UnreadSetting, ...], str | None]:
    """Return the settings that nobody reads, or else why they are unknown."""
    try:
        return unread_settings(path), None
    except UnsupportedModel as error:
        return (), str(error)


def _theirs(answers: Mapping[str, Any], at: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = answers if "error" in answers else answers["cases"][at]
    return found


def _compared(folder: Folder, case: Case, theirs: Mapping[str, Any]) -> Compared:
    refused = folder.spec.images is False or (
        len(case.images) > 1 and not folder.spec.multi_image
    )
    if case.images and refused:
        return Compared(case.name, reason=f"{folder.spec.family} takes no such request")
    if case.tools and "tools" not in folder.processing.template.reads:
        return Compared(
            case.name,
            reason="its template reads no tools: refused here, left out by transformers",
        )
    if "error" in theirs:
        return Compared(case.name, reason=f"transformers: {theirs['error']}")
    if (why := NOT_FOLLOWED.get((folder.spec.family, case.name))) is not None:
        return Compared(case.name, reason=why)
    ours, upstream = folder.make(case), folder.make_upstream(case)
    return Compared(
        case.name,
        len(ours.ids),
        tuple(differences(ours, theirs, folder.processing)),
        tuple(differences(upstream, theirs, folder.processing)),
    )


def differences(
    made: Made, theirs: Mapping[str, Any], processing: Processing
) -> Iterator[str]:
    """Yield what is not transformers'."""
    if made.error is not None:
        yield made.error
        return
    ids = tuple(theirs["ids"])
    if made.ids != ids:
        pairs = enumerate(zip(made.ids, ids, strict=False))
        others = (at for at, (a, b) in pairs if a != b)
        at = next(others, min(len(made.ids), len(ids)))
        words = [
            processing.tokenizer.decode(list(side[max(at - 1, 0) : at + 3]))
            for side in (made.ids, ids)
        ]
        yield f"{len(made.ids)} ids for {len(ids)}, others from {at}: {words[0]!r} for {words[1]!r}"
    for name, facts in theirs["arrays"].items():
        given = made.arrays.get(name)
        if (
            facts is None
            or facts["values"] is None
            or given is None
            or name == "attention_mask"
        ):
            continue
        if np.array(given).reshape(-1).tolist() != facts["values"]:
            yield f"{name} is another"
    if theirs.get("pixels") and "pixel_values" in made.arrays:
        yield from _pixel_differences(
            made.arrays["pixel_values"], np.load(theirs["pixels"]), processing
        )


def _pixel_differences(
    ours: Any, theirs: np.ndarray, processing: Processing
) -> Iterator[str]:
    if isinstance(ours, (list, tuple)):
        return  # one array a picture, of a layout of its own
    given = np.array(ours, dtype=np.float32)
    if given.size != theirs.size:
        yield f"pixel_values {given.shape} for {theirs.shape}"
        return
    if given.shape != theirs.shape:
        return  # axes in another order, which the model's class expects
    part = vars(processing.processor).get("image_processor")
    deviations = ({} if part is None else vars(part)).get("image_std") or [1.0]
    apart = float(np.abs(given - theirs).max(initial=0.0)) * max(deviations) * 255
    if apart > LEVELS + 1e-3:
        yield f"pixels up to {apart:.1f} of 255 levels apart"
