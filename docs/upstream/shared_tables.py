"""Tables are kept for all threads, and only the thread that made one can evaluate it.

`lru_cache` keeps arrays that are not evaluated yet. Another thread that meets the same size before they are ends in an
exception: so do the threads of a processor, and two engines in one process. If the first thread's request ends between,
every later one of that size fails. Right: what the thread gets alone.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import count

import mlx.core as mx
from tiny import attempt, case, report

SIZES = count(211)  # each is met here first


def second_thread(resize, **how):
    """What a second thread gets of a picture of ones, and what it would get alone."""
    size = next(SIZES)
    picture = mx.ones((1, size, size, 1))
    mx.eval(picture)

    def on_thread(work):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    on_thread(lambda: resize(picture, (2, 2), **how))
    return on_thread(
        lambda: attempt(lambda: resize(picture, (2, 2), **how).flatten().tolist())
    ), [1.0] * 4


@case("lfm2_vl", at="models/interpolate.py:190 models/lfm2_vl/vision.py:92")
def lfm2_vl_tables():
    """Two threads resize the tower's positions to one size."""
    from mlx_vlm.models.lfm2_vl.vision import resize_bilinear_nhwc

    return second_thread(resize_bilinear_nhwc, align_corners=False, antialias=True)


@case(
    "nemotron_h_nano_omni",
    at="models/interpolate.py:264 models/nemotron_h_nano_omni/image_processing_nemotron_h_nano_omni.py:114",
)
def nemotron_h_nano_omni_tables():
    """Two threads of its processor resize pictures of one size."""
    from mlx_vlm.models.nemotron_h_nano_omni.image_processing_nemotron_h_nano_omni import (
        resize_bicubic_nhwc,
    )

    return second_thread(resize_bicubic_nhwc, antialias=True)


if __name__ == "__main__":
    report()
