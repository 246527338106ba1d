// TurboQuant's rotation and codes: a vector's norm, and a code for each number of its rotated direction. Compiled by NVRTC, and as
// C++ by the tests: nothing of CUDA's but the names in tests/kernels/block.h.
//
// Where vectors are turned, a block works on one, and has a thread for each of its DEPTH numbers, a power of two of at least 32.
// So what it finds is a function of that vector alone.

namespace turbo {

// The sum of all threads' values, in the order of a tree.
template <int DEPTH>
__device__ float sum_of(float value, float* room) {
  const int thread = threadIdx.x;
  room[thread] = value;
#pragma unroll
  for (int half = DEPTH / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) room[thread] += room[thread + half];
  }
  __syncthreads();
  const float sum = room[0];
  __syncthreads();
  return sum;
}

// This thread's number of the Hadamard transform of all threads' values, which keeps lengths.
template <int DEPTH>
__device__ float hadamard(float value, float* room) {
  const int thread = threadIdx.x;
  float sum = value;
#pragma unroll
  for (int step = 1; step < DEPTH; step *= 2) {
    room[thread] = sum;
    __syncthreads();
    const float other = room[thread ^ step];
    sum = thread & step ? other - sum : sum + other;
    __syncthreads();
  }
  return sum * (1.0f / sqrtf(float(DEPTH)));
}

// How many of the ascending bounds, one less than 1 << BITS, are below a number.
template <int BITS>
__device__ unsigned int code_of(float number, const float* bounds) {
  unsigned int code = 0;
#pragma unroll
  for (int step = 1 << (BITS - 1); step > 0; step /= 2)
    if (number > bounds[code + step - 1]) code += step;
  return code;
}

// Word `at` of codes of BITS each, lowest bits first.
template <int DEPTH, int BITS>
__device__ unsigned int word_of(int at, const unsigned int* codes) {
  unsigned int word = 0;
  const int first = 32 * at;
  for (int i = first / BITS; i * BITS < first + 32 && i < DEPTH; i++) {
    const int shift = i * BITS - first;
    word |= shift < 0 ? codes[i] >> -shift : codes[i] << shift;
  }
  return word;
}

// Codes the block's vector, whose numbers lie `stride` apart. `signs` (DEPTH) come before the transform.
template <typename T, typename S, int DEPTH, int BITS>
__device__ void code(const T* vector, long long stride, const float* signs, const float* bounds, S* norm, unsigned int* words) {
  __shared__ float room[DEPTH];
  __shared__ unsigned int codes[DEPTH];
  const int thread = threadIdx.x;
  const float number = float(vector[thread * stride]);
  const float size = sqrtf(sum_of<DEPTH>(number * number, room));
  const float turned = hadamard<DEPTH>(number / fmaxf(size, 1e-6f) * signs[thread], room);
  codes[thread] = code_of<BITS>(turned, bounds);
  __syncthreads();
  constexpr int WIDTH = (DEPTH * BITS + 31) / 32;
  if (thread < WIDTH) words[thread] = word_of<DEPTH, BITS>(thread, codes);
  if (thread == 0) *norm = S(fminf(size, 65504.0f));
}

// Rotates the block's vector times `scale`; IS_BACK: undoes it.
template <typename T, typename O, int DEPTH, bool IS_BACK>
__device__ void turn(const T* vector, long long stride, const float* signs, float scale, O* out) {
  __shared__ float room[DEPTH];
  const int thread = threadIdx.x;
  const float number = float(vector[thread * stride]);
  if (IS_BACK) {
    out[thread] = O(hadamard<DEPTH>(number, room) * signs[thread]);
  } else {
    out[thread] = O(hadamard<DEPTH>(number * (scale * signs[thread]), room));
  }
}

// Eight numbers of the book, times a vector's norm, by the codes from number `8 * unit` on.
template <typename T, int BITS>
__device__ void look_up(const unsigned int* words, int unit, float norm, const float* book, T* out) {
  struct alignas(16) Eight {
    T at[8];
  } found;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int bit = (8 * unit + i) * BITS, word = bit / 32, shift = bit % 32;
    unsigned int code = words[word] >> shift;
    if (shift + BITS > 32) code |= words[word + 1] << (32 - shift);
    found.at[i] = T(book[code & ((1u << BITS) - 1u)] * norm);
  }
  *reinterpret_cast<Eight*>(out + 8 * unit) = found;
}

}  // namespace turbo
