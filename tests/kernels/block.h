// What our kernels need of CUDA, in C++: a block's threads take turns, from one barrier to the next.
#pragma once
#include <ucontext.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

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
static ucontext_t scheduler;
static std::vector<ucontext_t> threads;
static std::vector<std::vector<char>> stacks;
static std::vector<char> ended;
static int current;
static std::function<void()> work;

static void begin() {
  work();
  ended[current] = 1;
  swapcontext(&threads[current], &scheduler);
}

// Runs one block; false if some of its threads ended while others stood at a barrier.
static bool run(int count) {
  threads.resize(count), stacks.resize(count), ended.assign(count, 0);
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
    for (int i = 0; i < count; i++) {
      current = i, threadIdx.x = i;
      swapcontext(&scheduler, &threads[i]);
      done += ended[i];
    }
    if (done == count) return true;
    if (done) return false;
  }
}
}  // namespace block

inline void __syncthreads() { swapcontext(&block::threads[block::current], &block::scheduler); }
