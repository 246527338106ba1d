"""Folders with settings that the zoo does not have load by their path, and answer as transformers does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.harness import Ask, run
from tests.test_layouts import TOLERANCE, loaded
from tests.variants import FOLDER, VARIANTS, write_variant
from tests.zoo import apart, family, recorded_requests
from vlm_batch.loading import adapt


@pytest.mark.parametrize("name", VARIANTS)
def test_a_folder_with_other_settings_answers_as_transformers(
    name: str, tmp_path: Path
) -> None:
    """Through the adapter, and two requests in company."""
    adapter = adapt(loaded(write_variant(tmp_path / name, name)))
    requests = recorded_requests(family(VARIANTS[name][0]))
    with np.load(FOLDER / f"{name}.npz") as recorded:
        for answer in run(adapter, requests.__getitem__, [Ask("text"), Ask("image_1")]):
            assert answer.result is not None
            assert answer.result.error is None, answer.result.error
            assert (
                list(answer.result.token_ids)
                == recorded[f"{answer.ask.key}/tokens"].tolist()
            ), answer.ask
            assert (
                apart(np.array(answer.logprobs), recorded[f"{answer.ask.key}/logprobs"])
                < TOLERANCE
            ), answer.ask
