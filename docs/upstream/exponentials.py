"""Exponentials of MLX's x86 wheel take 20 to 50 times as long as numpy's.

mlx 0.32.4 (PyPI's mlx-cpu), `mx.exp` of float32: 11 to 25 ns a number on an AMD EPYC, 84 to 88 on an Intel Xeon; numpy's takes
0.5 and 3.7. Softmax, logsumexp, sigmoid, erf, sin, cos, SiLU, GELU and attention are slow by the same cause:

1. `max_size` is 1 on x86 (simd/base_simd.h), so a loop handles one number at a time.
2. The wheel is built without FMA, so `std::fma` is a call: libmlx.so has 221 calls of `fmaf@plt` and no `vfmadd`. Where the
   C library finds no FMA it emulates it: `GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX2,-FMA` takes 488 ns a number on the Xeon.
3. The numbers wait in memory across each call (54 % of the time is in `__fmaf_fma3`, 39 % in `simd::exp<float, 1>`).

Right: vectors of 8 or 16 numbers, as on arm64, or at least multiply and add where the build has no FMA. arm64 and Metal are
not concerned.
"""

import shutil
import subprocess
import time
from pathlib import Path

import mlx.core as mx
import numpy as np

SIZE = 2**20


def best(call):
    """Nanoseconds a number: the fastest of seven calls."""
    found = []
    for _ in range(7):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return 1e9 * min(found) / SIZE


def calls_of_fmaf():
    """How often libmlx.so calls the C library's fmaf, and has an instruction for it; None without objdump."""
    library = Path(mx.__file__).parent / "lib" / "libmlx.so"
    if shutil.which("objdump") is None or not library.exists():
        return None
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True
    ).stdout
    return code.count("<fmaf@plt>\n"), code.count("vfmadd")


def main():
    mx.set_default_device(mx.cpu)
    numbers = mx.array(np.linspace(-20, 0, SIZE, dtype=np.float32))
    own, out = np.array(numbers), np.empty(SIZE, np.float32)
    rows = numbers.reshape(-1, 1024)
    print("nanoseconds a number")
    for name in ("exp", "sigmoid", "erf", "sin", "cos", "tanh"):
        print(
            f"  mx.{name:<10}{best(lambda name=name: mx.eval(getattr(mx, name)(numbers))):8.2f}"
        )
    print(
        f"  mx.{'softmax':<10}{best(lambda: mx.eval(mx.softmax(rows, axis=-1))):8.2f}"
    )
    print(f"  mx.{'multiply':<10}{best(lambda: mx.eval(numbers * numbers)):8.2f}")
    print(f"  np.{'exp':<10}{best(lambda: np.exp(own, out=out)):8.2f}")
    counts = calls_of_fmaf()
    if counts is not None:
        print(
            f"calls of fmaf in libmlx.so: {counts[0]}, instructions vfmadd: {counts[1]}"
        )


if __name__ == "__main__":
    main()
