// A product of few rows and weights in 4 or 8 bits: `multiply` for 64 rows and some outputs.
//
// A warp has 16 outputs, and every so many groups of their columns. Tensor cores multiply codes, which are exact in half
// precision, by rows; then a group's scale and bias come in, in float32: sum(x * (code * scale + bias)) is
// scale * sum(x * code) + bias * sum(x). The order in which columns are added depends on the weight's shape alone, so a row's
// answer depends on no other row. Compiled by NVRTC, and as C++ by the tests.

namespace qmm {

constexpr int WARP = 32;
constexpr int WARPS = 8;      // of a block
constexpr int OUTPUTS = 16;   // of a warp
constexpr int TILE = 8;       // rows of one product of the tensor cores
constexpr int TILES = 8;      // of a block
constexpr int ROWS = TILE * TILES;
constexpr int AHEAD = 4;      // groups that a warp loads at once
constexpr int BLOCKS = 256;   // up to which more warps share outputs

#ifndef EMULATED
template <typename T>
struct Half;

template <>
struct Half<__nv_bfloat16> {
  static constexpr unsigned int ONES = 0x3f803f80u;
  // Adds two pairs of numbers.
  static __device__ unsigned int add(unsigned int pair, unsigned int other) {
    unsigned int found;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(pair), "r"(ONES), "r"(other));
    return found;
  }
  static __device__ void multiply(float (&sum)[4], const unsigned int (&a)[4], unsigned int b, unsigned int b8) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b8));
  }
};

template <>
struct Half<__half> {
  static constexpr unsigned int ONES = 0x3c003c00u;
  static __device__ unsigned int add(unsigned int pair, unsigned int other) {
    unsigned int found;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(pair), "r"(ONES), "r"(other));
    return found;
  }
  static __device__ void multiply(float (&sum)[4], const unsigned int (&a)[4], unsigned int b, unsigned int b8) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b8));
  }
};
#endif

template <typename T>
constexpr bool IS_WIDE = Half<T>::ONES == 0x3c003c00u;  // float16, whose 10 bits hold any code

// Two codes, 16 bits each, as a pair of numbers. In bfloat16, 128 + code is exact for 7 bits; the eighth is added.
template <typename T, int BITS>
__device__ inline unsigned int numbers(unsigned int codes) {
  if constexpr (IS_WIDE<T>) return Half<T>::add(codes | 0x64006400u, 0xe400e400u);
  if constexpr (BITS == 4) return Half<T>::add(codes | 0x43004300u, 0xc300c300u);
  const unsigned int low = (~codes & 0x00800080u) >> 7;
  return Half<T>::add((codes & 0x007f007fu) | 0x43004300u, low * 0xc300u);
}

// The first or second halves of two words.
__device__ inline unsigned int firsts(unsigned int a, unsigned int b) { return (a & 0xffffu) | (b << 16); }
__device__ inline unsigned int seconds(unsigned int a, unsigned int b) { return (a >> 16) | (b & 0xffff0000u); }

// Eight weights in words -> four pairs of numbers.
template <typename T, int BITS>
__device__ inline void unpack(unsigned int (&pairs)[4], const unsigned int* words) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (BITS == 4)
      pairs[i] = numbers<T, BITS>((words[0] >> (4 * i)) & 0x000f000fu);
    else
      pairs[i] = numbers<T, BITS>((words[i / 2] >> (8 * (i % 2))) & 0x00ff00ffu);
  }
}

// Eight numbers of a row in words -> four pairs, in the order of `unpack`.
template <int BITS>
__device__ inline void pair_up(unsigned int (&pairs)[4], const unsigned int* words) {
  constexpr int APART = BITS == 4 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int at = BITS == 4 ? i : 2 * i;
    pairs[2 * i] = firsts(words[at], words[at + APART]), pairs[2 * i + 1] = seconds(words[at], words[at + APART]);
  }
}

struct alignas(16) Four {
  unsigned int at[4];
};
struct alignas(8) Two {
  unsigned int at[2];
};

// COUNT words, `stride` apart; packed ones lie together, at a multiple of their bytes, or of 16.
template <int COUNT>
__device__ inline void load(unsigned int* into, const unsigned int* from, long long stride, bool is_packed) {
  if (COUNT == 1 || !is_packed) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) into[i] = from[i * stride];
  } else if constexpr (COUNT == 2) {
    const Two two = *reinterpret_cast<const Two*>(from);
    into[0] = two.at[0], into[1] = two.at[1];
  } else if constexpr (COUNT % 4 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      const Four four = *reinterpret_cast<const Four*>(from + i);
#pragma unroll
      for (int j = 0; j < 4; j++) into[i + j] = four.at[j];
    }
  }
}

// Eight numbers of a row, `stride` apart, as four words.
template <typename T>
__device__ inline void load_row(unsigned int (&into)[4], const T* from, long long stride, bool is_packed) {
  if (is_packed) {
    load<4>(into, reinterpret_cast<const unsigned int*>(from), 1, true);
    return;
  }
  const unsigned short* const bits = reinterpret_cast<const unsigned short*>(from);
#pragma unroll
  for (int i = 0; i < 4; i++) into[i] = bits[2 * i * stride] | ((unsigned int)bits[(2 * i + 1) * stride] << 16);
}

// How many warps share 16 outputs: each has every so many groups of columns.
__device__ inline int parts_of(int outputs) {
  int parts = WARPS;
  while (parts > 1 && (outputs * parts + WARPS * OUTPUTS - 1) / (WARPS * OUTPUTS) > BLOCKS) parts /= 2;
  return parts;
}

// A matrix, and what lies between two of its rows and columns.
template <typename T>
struct Matrix {
  const T* begin;
  long long row, column;
  __device__ const T* at(long long r, long long c) const { return begin + r * row + c * column; }
  // Whether 16 bytes of a row can be loaded at once.
  __device__ bool is_packed() const {
    return column == 1 && row * sizeof(T) % 16 == 0 && (unsigned long long)begin % 16 == 0;
  }
};

// Block (outputs, 64 rows): rows (count, width) by weight (outputs, width), packed, with scales and biases (outputs,
// width / GROUP): out (count, outputs). `bias` (outputs) is added unless null.
template <typename T, int BITS, int GROUP>
__device__ void multiply(
    const Matrix<T> rows,
    const Matrix<unsigned int> weight,
    const Matrix<T> scales,
    const Matrix<T> biases,
    const T* bias,
    int count,
    int outputs,
    int width,
    T* out) {
  constexpr int NUMBERS = GROUP / 4;             // of a group, that a thread has
  constexpr int WORDS = NUMBERS * BITS / 32;     // their codes
  constexpr int EIGHTS = NUMBERS / 8;
  __shared__ float sums[WARPS][ROWS][OUTPUTS + 1];

  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, place = lane / 4, quarter = lane % 4;
  const int parts = parts_of(outputs), part = warp % parts, per_block = WARPS / parts * OUTPUTS;
  const int first = blockIdx.x * per_block, own = first + warp / parts * OUTPUTS + place;
  const int first_row = blockIdx.y * ROWS, last_row = count - first_row < ROWS ? count - first_row : ROWS;
  const int groups = width / GROUP;
  const int o0 = own < outputs ? own : outputs - 1, o1 = own + 8 < outputs ? own + 8 : outputs - 1;
  const bool are_packed = rows.is_packed(), is_packed = weight.is_packed();
  const unsigned int ones[4] = {Half<T>::ONES, Half<T>::ONES, Half<T>::ONES, Half<T>::ONES};

  float sum[TILES][4];
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int j = 0; j < 4; j++) sum[t][j] = 0.0f;

  for (int base = part; base < groups; base += parts * AHEAD) {
    unsigned int packed[AHEAD][2][WORDS];
    float scale[AHEAD][2], offset[AHEAD][2];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      const int group = base + k * parts;
      if (group < groups) {
        const int word = (4 * group + quarter) * WORDS;
        load<WORDS>(packed[k][0], weight.at(o0, word), weight.column, is_packed);
        load<WORDS>(packed[k][1], weight.at(o1, word), weight.column, is_packed);
        scale[k][0] = float(*scales.at(o0, group)), scale[k][1] = float(*scales.at(o1, group));
        offset[k][0] = float(*biases.at(o0, group)), offset[k][1] = float(*biases.at(o1, group));
      }
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      const int group = base + k * parts;
      if (group >= groups) break;
      unsigned int codes[EIGHTS][2][4];
#pragma unroll
      for (int e = 0; e < EIGHTS; e++)
#pragma unroll
        for (int o = 0; o < 2; o++) unpack<T, BITS>(codes[e][o], packed[k][o] + e * (WORDS / EIGHTS));
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        if (t * TILE >= last_row) break;
        const int row = t * TILE + place;
        const T* const from = rows.at(first_row + row, group * GROUP + quarter * NUMBERS);
        float products[4] = {0.0f, 0.0f, 0.0f, 0.0f}, whole[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
          unsigned int words[4] = {0u, 0u, 0u, 0u}, pairs[4];
          if (row < last_row) load_row<T>(words, from + 8 * e * rows.column, rows.column, are_packed);
          pair_up<BITS>(pairs, words);
#pragma unroll
          for (int i = 0; i < 4; i += 2) {
            const unsigned int a[4] = {codes[e][0][i], codes[e][1][i], codes[e][0][i + 1], codes[e][1][i + 1]};
            Half<T>::multiply(products, a, pairs[i], pairs[i + 1]);
            Half<T>::multiply(whole, ones, pairs[i], pairs[i + 1]);
          }
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
          sum[t][j] = fmaf(scale[k][j / 2], products[j], fmaf(offset[k][j / 2], whole[j], sum[t][j]));
      }
    }
  }

#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int j = 0; j < 4; j++) sums[warp][t * TILE + 2 * quarter + j % 2][place + j / 2 * 8] = sum[t][j];
  __syncthreads();
  for (int i = threadIdx.x; i < per_block * last_row; i += WARP * WARPS) {
    const int at = i % per_block, row = i / per_block;
    if (first + at >= outputs) continue;
    float found = bias == nullptr ? 0.0f : float(bias[first + at]);
    for (int p = 0; p < parts; p++) found += sums[at / OUTPUTS * parts + p][row][at % OUTPUTS];
    out[(long long)(first_row + row) * outputs + first + at] = T(found);
  }
}

}  // namespace qmm
