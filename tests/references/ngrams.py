"""Records what other programs' processors against repeated n-grams exclude, for ``tests/test_ngrams.py``.

``python -m tests.references.ngrams DEEPSEEK MINERU`` takes two files: DeepSeek-OCR's
``DeepSeek-OCR-vllm/process/ngram_norepeat.py``, and ``mineru_vl_utils/logits_processor/vllm_v0_no_repeat_ngram.py``. They
read lists of token ids and write into anything with items, so that they run here without torch and vLLM.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RECORDED = Path(__file__).parent.parent / "data" / "ngrams.json"
VOCABULARY = 6
LENGTH = 60


class Scores(dict[int, float]):
    def clone(self) -> Scores:
        return Scores(self)

    @property
    def banned(self) -> list[int]:
        return sorted(token for token, score in self.items() if score == -math.inf)


def class_in(file: str, name: str) -> Any:
    """Return a class of a file, without the imports of torch and transformers."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    source = "\n".join(
        line
        for line in lines
        if not line.startswith(("import torch", "from transformers"))
    )
    space: dict[str, Any] = {
        "LogitsProcessor": object,
        "torch": SimpleNamespace(FloatTensor=object),
    }
    exec(compile(source, file, "exec"), space)
    return space[name]


def cases(deepseek: Any, mineru: Any) -> list[dict[str, Any]]:
    """Return histories, settings, and the excluded tokens after each of a history's beginnings."""
    chance, found = random.Random(11), []
    for size in (2, 3, 5):
        count = VOCABULARY if size < 5 else 2  # sequences come again
        for window, white in ((12, ()), (25, (1, 4)), (LENGTH, ())):
            history = [chance.randrange(count) for _ in range(LENGTH)]
            process = deepseek(size, window, set(white))
            banned = [
                process(history[:end], Scores()).banned for end in range(LENGTH + 1)
            ]
            found.append(_case("DeepSeek-OCR", size, window, white, history, banned))
        history = [chance.randrange(count) for _ in range(LENGTH)]
        process, banned = mineru(size), []
        for end in range(LENGTH + 1):
            scores = Scores()
            process(history[:end], scores)
            banned.append(scores.banned)
        found.append(_case("mineru-vl-utils", size, None, (), history, banned))
    return found


def _case(
    source: str, size: int, window: int | None, white: Any, history: Any, banned: Any
) -> dict[str, Any]:
    settings = {
        "no_repeat_ngram_size": size,
        "window_size": window,
        "whitelist_token_ids": list(white),
    }
    return {
        "source": source,
        "settings": settings,
        "history": history,
        "banned": banned,
    }


def main() -> None:
    deepseek, mineru = sys.argv[1:]
    found = cases(
        class_in(deepseek, "NoRepeatNGramLogitsProcessor"),
        class_in(mineru, "VllmV0NoRepeatNGramLogitsProcessor"),
    )
    RECORDED.write_text(
        "[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
