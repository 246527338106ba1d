// TurboQuant's rotation and codes: a vector's norm, and a code for each number of its rotated direction. Compiled by NVRTC, and as
// C++ by the tests: nothing of CUDA's but the names in tests/kernels/block.h.
//
// A thread has UNIT numbers of a vector of DEPTH, a power of two of at least 32, and the vector's threads are lanes of one warp.
// So what they find is a function of that vector alone.

namespace turbo {

constexpr int UNIT = 8;
constexpr unsigned int ALL = 0xffffffffu;

template <int DEPTH>
__device__ constexpr int lanes() {
  return DEPTH / UNIT;
}

template <typename T>
struct alignas(16) Unit {
  T at[UNIT];
};

// Loads a lane's numbers of a vector, which lie `stride` apart.
template <typename T>
__device__ void load(float (&number)[UNIT], const T* vector, long long stride, int lane) {
#pragma unroll
  for (int i = 0; i < UNIT; i++) number[i] = float(vector[(UNIT * lane + i) * stride]);
}

// The length of the lanes' vector.
template <int DEPTH>
__device__ float size_of(const float (&number)[UNIT]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < UNIT; i++) sum = fmaf(number[i], number[i], sum);
#pragma unroll
  for (int apart = 1; apart < lanes<DEPTH>(); apart *= 2) sum += __shfl_xor_sync(ALL, sum, apart);
  return sqrtf(sum);
}

// The Hadamard transform of the lanes' vector, which keeps lengths.
template <int DEPTH>
__device__ void hadamard(float (&number)[UNIT], int lane) {
#pragma unroll
  for (int apart = 1; apart < UNIT; apart *= 2)
#pragma unroll
    for (int i = 0; i < UNIT; i++)
      if (!(i & apart)) {
        const float low = number[i], high = number[i + apart];
        number[i] = low + high, number[i + apart] = low - high;
      }
#pragma unroll
  for (int apart = 1; apart < lanes<DEPTH>(); apart *= 2)
#pragma unroll
    for (int i = 0; i < UNIT; i++) {
      const float other = __shfl_xor_sync(ALL, number[i], apart);
      number[i] = lane & apart ? other - number[i] : number[i] + other;
    }
  const float scale = 1.0f / sqrtf(float(DEPTH));
#pragma unroll
  for (int i = 0; i < UNIT; i++) number[i] *= scale;
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

// Writes a lane's codes, BITS bytes: lowest bits first.
template <int BITS>
__device__ void write_codes(const float (&number)[UNIT], const float* bounds, unsigned int* words, int lane) {
  unsigned long long codes = 0;
#pragma unroll
  for (int i = 0; i < UNIT; i++) codes |= (unsigned long long)code_of<BITS>(number[i], bounds) << (BITS * i);
  unsigned char* const bytes = reinterpret_cast<unsigned char*>(words) + BITS * lane;
  if constexpr (BITS == 4) {
    *reinterpret_cast<unsigned int*>(bytes) = (unsigned int)codes;
  } else {
#pragma unroll
    for (int i = 0; i < BITS; i++) bytes[i] = (unsigned char)(codes >> (8 * i));
  }
}

// Rotates the lanes' vector. `signs` may be scaled.
template <int DEPTH>
__device__ void turn(float (&number)[UNIT], const float* signs, int lane) {
#pragma unroll
  for (int i = 0; i < UNIT; i++) number[i] *= signs[UNIT * lane + i];
  hadamard<DEPTH>(number, lane);
}

// The lanes' rotated direction in place of their vector, and its length.
template <int DEPTH>
__device__ float direct(float (&number)[UNIT], const float* signs, int lane) {
  const float size = size_of<DEPTH>(number), divisor = fmaxf(size, 1e-6f);
#pragma unroll
  for (int i = 0; i < UNIT; i++) number[i] /= divisor;
  turn<DEPTH>(number, signs, lane);
  return size;
}

// Undoes it.
template <int DEPTH>
__device__ void turn_back(float (&number)[UNIT], const float* signs, int lane) {
  hadamard<DEPTH>(number, lane);
#pragma unroll
  for (int i = 0; i < UNIT; i++) number[i] *= signs[UNIT * lane + i];
}

template <typename T>
__device__ void store(const float (&number)[UNIT], T* vector, int lane) {
  Unit<T> unit;
#pragma unroll
  for (int i = 0; i < UNIT; i++) unit.at[i] = T(number[i]);
  *reinterpret_cast<Unit<T>*>(vector + UNIT * lane) = unit;
}

// Numbers of the book by a lane's codes, times the vector's norm.
template <int BITS>
__device__ void look_up(float (&number)[UNIT], const unsigned int* words, float norm, const float* book, int lane) {
#pragma unroll
  for (int i = 0; i < UNIT; i++) {
    const int bit = (UNIT * lane + i) * BITS, word = bit / 32, shift = bit % 32;
    unsigned int code = words[word] >> shift;
    if (shift + BITS > 32) code |= words[word + 1] << (32 - shift);
    number[i] = book[code & ((1u << BITS) - 1u)] * norm;
  }
}

// Turns queries in shared memory, HEADS of DEPTH numbers, by all threads of a block.
struct Turned {
  const float* signs;
  template <int HEADS, int DEPTH>
  __device__ void apply(float* queries) const {
    constexpr int LANES = lanes<DEPTH>();
    __syncthreads();
    for (int first = 0; first < HEADS * LANES; first += blockDim.x) {
      const int index = first + threadIdx.x, lane = index % LANES;
      const bool is_there = index < HEADS * LANES;
      float* const own = queries + (is_there ? index / LANES * DEPTH : 0);
      float number[UNIT];
      load(number, own, 1, lane);
      turn<DEPTH>(number, signs, lane);
      if (is_there) store<float>(number, own, lane);
    }
  }
};

// Turns a block's vector back, of which each of the first threads has a number, and stores it.
template <typename T, int DEPTH>
__device__ void store_turned_back(float found, const float* signs, T* vector) {
  __shared__ Unit<float> numbers[DEPTH / UNIT];
  float* const flat = reinterpret_cast<float*>(numbers);
  if (threadIdx.x < DEPTH) flat[threadIdx.x] = found;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x % lanes<DEPTH>();
  float number[UNIT];
  load(number, flat, 1, lane);
  turn_back<DEPTH>(number, signs, lane);
  if (threadIdx.x < lanes<DEPTH>()) store<T>(number, vector, lane);
}

}  // namespace turbo
