"""Tiny, lively models of every family that is verified, requests to them, and the answer each request gets alone.

tiny = family("qwen2_vl")
model = tiny.build()
trace = tiny.greedy(model, tiny.image(seed=1, size=0), 8)
"""

from importlib import import_module
from pkgutil import iter_modules

from ._build import inputs_hash, weights_hash
from ._oracle import generate_alone, to_mx
from ._types import (
    END_OF_TEXT,
    IMPOSSIBLE,
    PLAIN,
    VOCABULARY,
    Inputs,
    TinyFamily,
    Trace,
    apart,
)

#: Every file of this folder without a leading underscore holds one family: adding a file is the whole act of adding it.
FAMILIES: dict[str, TinyFamily] = {
    tiny.name: tiny
    for module in iter_modules(__path__)
    if not module.name.startswith("_")
    for tiny in (import_module(f"{__name__}.{module.name}").FAMILY,)
}


def family(name: str) -> TinyFamily:
    """The family called `name`; KeyError with the known names if there is none."""
    if name not in FAMILIES:
        raise KeyError(
            f"no tiny family {name!r}; there are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]


def requests_of(tiny: TinyFamily) -> dict[str, Inputs]:
    """One request of every kind the family takes, by name."""
    requests = {"short_text": tiny.text(1, 5), "text": tiny.text(2, 14)}
    requests |= {f"image_{size}": tiny.image(3 + size, size) for size in range(3)}
    if tiny.two_images is not None:
        requests["two_images"] = tiny.two_images(9)
    if tiny.video is not None:
        # transformers 5 places the text after a long video elsewhere than the code that came with the models:
        # tests/test_videos.py.
        requests |= {f"video_{size}": tiny.video(5 + size, size) for size in range(2)}
    if tiny.picture_and_video is not None:
        requests["picture_and_video"] = tiny.picture_and_video(6)
    if tiny.audio is not None:
        requests |= {f"audio_{size}": tiny.audio(10 + size, size) for size in range(3)}
    if tiny.two_audios is not None:
        requests["two_audios"] = tiny.two_audios(11)
    if tiny.picture_and_audio is not None:
        requests["picture_and_audio"] = tiny.picture_and_audio(11)
    return requests | {name: make(4) for name, make in tiny.also.items()}


def recorded_requests(tiny: TinyFamily) -> dict[str, Inputs]:
    """Those for which transformers' answers are recorded: all, or texts and recordings where transformers has no tower for
    pictures (MiMo-V2's recordings come as codes, and it has no place for them either); or what published code answers,
    pictures."""
    requests = requests_of(tiny)
    # tests/references/published.py: it answers no text without a picture
    if tiny.points is not None:
        return {
            name: inputs
            for name, inputs in requests.items()
            if "pixel_values" in inputs
        }
    if not tiny.no_pictures_recorded:
        return requests
    heard = (
        "input_ids",
        "input_features",
        "input_audio",
        "audio_feature",
        "audio_bounds",
        "audio_embed",
        "audio_attention",
    )
    return {
        name: inputs
        for name, inputs in requests.items()
        if all(key.startswith(heard) for key in inputs)
    }


__all__ = [
    "END_OF_TEXT",
    "FAMILIES",
    "IMPOSSIBLE",
    "PLAIN",
    "VOCABULARY",
    "Inputs",
    "TinyFamily",
    "Trace",
    "apart",
    "family",
    "generate_alone",
    "inputs_hash",
    "recorded_requests",
    "requests_of",
    "to_mx",
    "weights_hash",
]
