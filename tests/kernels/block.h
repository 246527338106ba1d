// What our kernels need of CUDA, in C++: a block's threads take turns, from one barrier of the block or of a
// warp to the next.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

#define EMULATED
#define __device__
#define __shared__ static
#define __global__

using Shape = std::array<std::int32_t, 8>;
using Strides = std::array<std::int64_t, 8>;

struct Index {
  int x = 0, y = 0, z = 0;
};
static Index threadIdx, blockIdx, gridDim, blockDim;

inline int atomicMax(int* at, int value) {
  const int old = *at;
  if (value > old) *at = value;
  return old;
}
inline int atomicAdd(int* at, int value) {
  const int old = *at;
  *at += value;
  return old;
}

// bfloat16, rounded to nearest even.
struct __nv_bfloat16 {
  std::uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value) {
    std::uint32_t whole;
    std::memcpy(&whole, &value, 4);
    bits = std::isnan(value) ? 0x7fc0 : (whole + 0x7fff + ((whole >> 16) & 1)) >> 16;
  }
  operator float() const {
    const std::uint32_t whole = (std::uint32_t)bits << 16;
    float value;
    std::memcpy(&value, &whole, 4);
    return value;
  }
};

// float16, rounded to nearest even.
struct __half {
  std::uint16_t bits;
  __half() = default;
  explicit __half(float value) {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const float size = std::fabs(value);
    if (std::isnan(value)) {
      bits = 0x7e00;
    } else if (size >= 65520.0f) {
      bits = sign | 0x7c00;
    } else if (size < 6.103515625e-05f) {
      bits = sign | (std::uint16_t)std::nearbyint(std::ldexp(size, 24));
    } else {
      int exponent;
      const float part = std::frexp(size, &exponent);  // [0.5, 1)
      const int digits = (int)std::nearbyint(std::ldexp(part, 11));  // [1024, 2048]
      bits = sign | (std::uint16_t)(((exponent + 13) << 10) + digits);
    }
  }
  operator float() const {
    const int exponent = (bits >> 10) & 31, digits = bits & 1023;
    const float size = exponent == 31  ? (digits ? NAN : INFINITY)
                       : exponent == 0 ? std::ldexp((float)digits, -24)
                                       : std::ldexp((float)(digits + 1024), exponent - 25);
    return bits & 0x8000 ? -size : size;
  }
};

namespace block {
constexpr int WARP = 32;
static ucontext_t scheduler;
static std::vector<ucontext_t> threads;
static std::vector<std::vector<char>> stacks;
static std::vector<char> ended;
static int current;
static bool moved;  // whether some thread has come farther in this round
static std::function<void()> work;

// Where all threads of a block or a warp wait for each other.
struct Barrier {
  int arrived = 0, round = 0;
};
static Barrier whole;
static std::vector<Barrier> warps;
static std::vector<float> shown;  // what each thread shows to its warp

static void wait(Barrier& at, int count) {
  const int round = at.round;
  moved = true;
  if (++at.arrived == count) at.arrived = 0, at.round++;
  while (at.round == round) swapcontext(&threads[current], &scheduler);
  moved = true;
}

static void begin() {
  work();
  ended[current] = 1;
  moved = true;
  swapcontext(&threads[current], &scheduler);
}

// Runs one block; false if some of its threads ended while others stood at a barrier.
static bool run(int count) {
  threads.resize(count), stacks.resize(count), ended.assign(count, 0), shown.assign(count, 0.0f);
  whole = {}, warps.assign((count + WARP - 1) / WARP, {});
  for (int i = 0; i < count; i++) {
    stacks[i].resize(1 << 16);
    getcontext(&threads[i]);
    threads[i].uc_stack.ss_sp = stacks[i].data();
    threads[i].uc_stack.ss_size = stacks[i].size();
    threads[i].uc_link = nullptr;
    makecontext(&threads[i], begin, 0);
  }
  for (;;) {
    int done = 0;
    moved = false;
    for (int i = 0; i < count; i++) {
      if (ended[i]) {
        done++;
        continue;
      }
      current = i, threadIdx.x = i;
      swapcontext(&scheduler, &threads[i]);
      done += ended[i];
    }
    if (done == count) return true;
    if (!moved) return false;
  }
}
}  // namespace block

inline void __syncthreads() { block::wait(block::whole, blockDim.x); }
// All threads of a warp take part.
inline float __shfl_xor_sync(unsigned int, float value, int apart) {
  const int own = block::current, first = own / block::WARP * block::WARP;
  const int count = std::min(block::WARP, blockDim.x - first);
  block::shown[own] = value;
  block::wait(block::warps[own / block::WARP], count);
  const float found = block::shown[own ^ apart];
  block::wait(block::warps[own / block::WARP], count);
  return found;
}

// Tensor cores, by PTX's m16n8k16: a thread has four numbers of a sum (16, 8), a pair of each of `a`'s quarters (16, 16),
// row by row, and of `b`'s halves (16, 8), column by column.
namespace qmm {
template <typename T>
struct Half {
  static constexpr unsigned int ONES = sizeof(T) == 2 && std::is_same<T, __half>::value ? 0x3c003c00u : 0x3f803f80u;
  static float at(unsigned int pair, int which) {
    T one(0.0f);
    one.bits = (std::uint16_t)(pair >> (16 * which));
    return float(one);
  }
  static unsigned int add(unsigned int pair, unsigned int other) {
    const T low(at(pair, 0) + at(other, 0)), high(at(pair, 1) + at(other, 1));
    return low.bits | ((unsigned int)high.bits << 16);
  }
  static void multiply(float (&sum)[4], const unsigned int (&a)[4], unsigned int b, unsigned int b8) {
    static std::vector<std::array<unsigned int, 6>> held(1024);
    const int own = block::current, first = own / block::WARP * block::WARP, lane = own - first;
    held[own] = {a[0], a[1], a[2], a[3], b, b8};
    block::wait(block::warps[own / block::WARP], block::WARP);
    for (int j = 0; j < 4; j++) {
      const int row = lane / 4 + j / 2 * 8, column = lane % 4 * 2 + j % 2;
      for (int k = 0; k < 16; k++) {
        const auto& of_a = held[first + row % 8 * 4 + k % 8 / 2];
        const auto& of_b = held[first + column * 4 + k % 8 / 2];
        sum[j] += at(of_a[row / 8 + k / 8 * 2], k % 2) * at(of_b[4 + k / 8], k % 2);
      }
    }
    block::wait(block::warps[own / block::WARP], block::WARP);
  }
};
}  // namespace qmm
