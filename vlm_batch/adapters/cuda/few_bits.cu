// Attention of one query a row over keys and values in few bits, in two kernels: `attend_span` for a span of columns of one
// row and one head of keys, `merge` in spans.cu for what the spans of a row and head of queries found.
//
// A span begins at a multiple of SPAN columns and is worked on by one block; sums are made in an order that depends on SPAN
// and the widths alone. So a row's answer is a function of the row: of no other row, and of no column behind its own.
//
// Codes are a stream of BITS each, lowest bits first. What a code means is said by the kind of keys and of values: `Quantized` or
// `Coded`. Keys and values are read once for all heads of queries that share them. Sums are float32. Compiled by NVRTC, and as C++ by the tests: nothing of
// CUDA's but the names in tests/block.h.

namespace few_bits {

struct alignas(16) Four {
  float at[4];
};

// Where a quantised array (rows, heads, columns, width) begins, and what lies between two rows, heads and columns.
template <typename T>
struct View {
  const T* begin;
  long long row, head, column;
  __device__ const T* at(long long r, long long h, long long c) const { return begin + r * row + h * head + c * column; }
};

// A number is code * scale + bias, by groups of GROUP_.
template <typename S, int BITS_, int GROUP_>
struct Quantized {
  static constexpr int BITS = BITS_, GROUP = GROUP_;
  struct By {
    float scale, bias;
  };
  View<unsigned int> packed;
  View<S> scales, biases;
  // What the group of a number in a column is multiplied by.
  __device__ By by(long long r, long long h, long long c, int number) const {
    return {float(scales.at(r, h, c)[number / GROUP]), float(biases.at(r, h, c)[number / GROUP])};
  }
  __device__ float number(unsigned int code, const By& by) const { return fmaf(float(code), by.scale, by.bias); }
};

// A number is the code's in a book in shared memory, times the column's norm.
template <typename S, int BITS_>
struct Coded {
  static constexpr int BITS = BITS_, GROUP = 32;
  struct By {
    float norm;
  };
  View<unsigned int> packed;
  View<S> norms;
  const float* book;
  __device__ By by(long long r, long long h, long long c, int number) const { return {float(*norms.at(r, h, c))}; }
  __device__ float number(unsigned int code, const By& by) const { return book[code] * by.norm; }
};

// Code `j` of consecutive codes in words of 32 bits.
template <int BITS>
__device__ inline unsigned int code_of(const unsigned int* words, int j) {
  const int bit = j * BITS, word = bit / 32, shift = bit % 32;
  unsigned int found = words[word] >> shift;
  if (shift + BITS > 32) found |= words[word + 1] << (32 - shift);
  return found & ((1u << BITS) - 1u);
}

// COUNT words; the address is a multiple of their bytes, up to 16, wherever those are a power of two.
template <int COUNT>
__device__ inline void load_words(unsigned int* words, const unsigned int* from) {
  if constexpr (COUNT % 4 == 0) {
    struct alignas(16) Words {
      unsigned int at[4];
    };
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++) {
      const Words four = reinterpret_cast<const Words*>(from)[i];
#pragma unroll
      for (int j = 0; j < 4; j++) words[4 * i + j] = four.at[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i++) words[i] = from[i];
  }
}

// The eight codes that begin BITS bytes times `unit` behind `row`: (BITS + 3) / 4 words.
template <int BITS>
__device__ inline void load_eight(unsigned int* words, const unsigned int* row, int unit) {
  const unsigned char* from = reinterpret_cast<const unsigned char*>(row) + unit * BITS;
  if constexpr (BITS == 8) {
    struct alignas(8) Words {
      unsigned int at[2];
    };
    const Words two = *reinterpret_cast<const Words*>(from);
    words[0] = two.at[0], words[1] = two.at[1];
  } else if constexpr (BITS == 4) {
    words[0] = *reinterpret_cast<const unsigned int*>(from);
  } else if constexpr (BITS == 2) {
    words[0] = *reinterpret_cast<const unsigned short*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < (BITS + 3) / 4; i++) words[i] = 0;
#pragma unroll
    for (int i = 0; i < BITS; i++) words[i / 4] |= (unsigned int)from[i] << (8 * (i % 4));
  }
}

// Leaves queries as they are.
struct AsGiven {
  template <int HEADS, int WIDTH>
  __device__ void apply(float*) const {}
};

constexpr int WARP = 32;
constexpr int WARPS = 4;
constexpr int THREADS = WARP * WARPS;
constexpr int SPAN = 128;  // columns of a block
constexpr int SLICE = 32;  // numbers of a key that a warp takes at a time: never of two groups

__device__ constexpr int up(int value, int step) { return (value + step - 1) / step * step; }

// The sizes of a span's work for HEADS heads of queries at a time, over heads of WIDTH_K and WIDTH_V numbers, filled.
template <int HEADS, int WIDTH_K, int WIDTH_V>
struct Sizes {
  static constexpr int FOURS = (HEADS + 3) / 4;           // a column's weights, by fours of heads
  static constexpr int SLICES = WIDTH_K / SLICE;
  static constexpr int BLOCKS = SLICES >= 3 ? 1 : SLICES == 2 ? 2 : 4;  // of columns that warps share among them
  static constexpr int SHARING = WARPS / BLOCKS;          // warps that share a block of columns by slices
  static constexpr int PARTS = SLICES < SHARING ? SLICES : SHARING;
  static constexpr int COLUMNS = SPAN / WARP / BLOCKS;    // of a thread
  static constexpr int UNITS = WIDTH_V / 8;               // of eight numbers of a value, one a thread
  static constexpr int SIDES = THREADS / UNITS;           // columns that are added up side by side
  static constexpr int SCORES = PARTS * SPAN * FOURS * 4;
  static constexpr int SUMS = SIDES * HEADS * WIDTH_V;
  static constexpr int ROOM = SCORES > SUMS ? SCORES : SUMS;
  static constexpr int TEAM = HEADS <= 1 ? THREADS : HEADS <= 2 ? THREADS / 2 : HEADS <= 4 ? THREADS / 4 : THREADS / 8;
};

// Block (span, head of keys and tile of its heads of queries, row). `queries` (rows, heads, numbers), on which `turn` works;
// `mask` over the columns of a
// row, if IS_MASKED. Leaves, for each head of queries and span, the highest score, in powers of 2, and the sum of weights in
// `stats` (rows, heads, spans, 2), and the sum of values by weights in `sums` (rows, heads, spans, DEPTH_V); a span of which a
// row sees nothing has a sum of weights of 0, and no sum of values.
template <
    typename T,
    typename Turn,
    typename K,
    typename V,
    typename M,
    int DEPTH_K,
    int DEPTH_V,
    int SHARE,
    int HEADS,
    bool IS_MASKED>
__device__ void attend_span(
    const T* queries,
    long long query_row,
    long long query_head,
    long long query_number,
    const Turn turn,
    const K keys,
    const V values,
    const M* mask,
    long long mask_row,
    long long mask_column,
    int columns,
    float scale,
    float* sums,
    float* stats) {
  constexpr int WIDTH_K = up(DEPTH_K, K::GROUP), WIDTH_V = up(DEPTH_V, V::GROUP);
  using Size = Sizes<HEADS, WIDTH_K, WIDTH_V>;
  constexpr int TILES = (SHARE + HEADS - 1) / HEADS;
  constexpr int FOURS = Size::FOURS;
  __shared__ Four query[HEADS * WIDTH_K / 4];
  __shared__ Four weights[SPAN * FOURS];
  __shared__ Four room[Size::ROOM / 4];  // parts of scores, later sums of values
  __shared__ float found[2][THREADS];
  __shared__ unsigned char seen[SPAN];
  __shared__ int bounds[2];  // the columns up to the last one that is seen, and how many are

  const int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;
  const int span = blockIdx.x, spans = gridDim.x, row = blockIdx.z;
  const int key_head = blockIdx.y / TILES, tile = blockIdx.y % TILES;
  const int first = key_head * SHARE + tile * HEADS;  // head of queries
  const int share = SHARE - tile * HEADS < HEADS ? SHARE - tile * HEADS : HEADS;
  const int all_heads = gridDim.y / TILES * SHARE;
  const long long start = (long long)span * SPAN;

  if (thread < 2) bounds[thread] = 0;
  __syncthreads();
  float offset = 0.0f;  // of this thread's column
  bool sees = start + thread < columns;
  if (IS_MASKED && sees) {
    const M value = mask[row * mask_row + (start + thread) * mask_column];
    sees = masks::is_seen(value);
    offset = sees ? masks::added(value) : 0.0f;
  }
  seen[thread] = sees;
  if (sees) {
    atomicMax(&bounds[0], thread + 1);
    atomicAdd(&bounds[1], 1);
  }
  float* const flat = reinterpret_cast<float*>(query);
  for (int i = thread; i < HEADS * WIDTH_K; i += THREADS) {
    const int head = i / WIDTH_K, number = i % WIDTH_K;
    const bool is_there = head < share && number < DEPTH_K;
    flat[i] = is_there ? float(queries[row * query_row + (first + head) * query_head + number * query_number]) * (scale * 1.4426950408889634f) : 0.0f;
  }
  turn.template apply<HEADS, WIDTH_K>(flat);
  __syncthreads();
  const int end = bounds[0];
  const bool has_holes = bounds[1] != end;
  if (end == 0) {  // the same for all threads
    if (thread < share) {
      const long long at = ((long long)row * all_heads + first + thread) * spans + span;
      stats[2 * at] = -1e30f, stats[2 * at + 1] = 0.0f;
    }
    return;
  }

  // Scores: a thread has some columns, and some slices of their keys.
  {
    float score[Size::COLUMNS][HEADS];
#pragma unroll
    for (int k = 0; k < Size::COLUMNS; k++)
#pragma unroll
      for (int h = 0; h < HEADS; h++) score[k][h] = 0.0f;
    const int begin = warp / Size::SHARING * (WARP * Size::COLUMNS) + lane;
#pragma unroll 1
    for (int slice = warp % Size::SHARING; slice < Size::SLICES; slice += Size::SHARING) {
      unsigned int words[Size::COLUMNS][K::BITS];
      typename K::By by[Size::COLUMNS];
#pragma unroll
      for (int k = 0; k < Size::COLUMNS; k++) {
        const int column = begin + k * WARP;
        if (column < end) {
          load_words<K::BITS>(words[k], keys.packed.at(row, key_head, start + column) + slice * K::BITS);
          by[k] = keys.by(row, key_head, start + column, slice * SLICE);
        } else {
#pragma unroll
          for (int i = 0; i < K::BITS; i++) words[k][i] = 0;
          by[k] = {};
        }
      }
#pragma unroll
      for (int unit = 0; unit < SLICE / 4; unit++) {
        float number[Size::COLUMNS][4];
#pragma unroll
        for (int k = 0; k < Size::COLUMNS; k++)
#pragma unroll
          for (int j = 0; j < 4; j++) number[k][j] = keys.number(code_of<K::BITS>(words[k], 4 * unit + j), by[k]);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
          const Four four = query[(h * WIDTH_K + slice * SLICE) / 4 + unit];
#pragma unroll
          for (int k = 0; k < Size::COLUMNS; k++)
#pragma unroll
            for (int j = 0; j < 4; j++) score[k][h] = fmaf(four.at[j], number[k][j], score[k][h]);
        }
      }
    }
    if (warp % Size::SHARING < Size::PARTS) {
#pragma unroll
      for (int k = 0; k < Size::COLUMNS; k++)
#pragma unroll
        for (int f = 0; f < FOURS; f++) {
          Four four;
#pragma unroll
          for (int j = 0; j < 4; j++) four.at[j] = 4 * f + j < HEADS ? score[k][4 * f + j < HEADS ? 4 * f + j : 0] : 0.0f;
          room[(warp % Size::SHARING * SPAN + begin + k * WARP) * FOURS + f] = four;
        }
    }
  }
  __syncthreads();
#pragma unroll
  for (int f = 0; f < FOURS; f++) {  // a thread has one column: THREADS == SPAN
    Four four = room[thread * FOURS + f];
#pragma unroll
    for (int part = 1; part < Size::PARTS; part++)
#pragma unroll
      for (int j = 0; j < 4; j++) four.at[j] += room[(part * SPAN + thread) * FOURS + f].at[j];
#pragma unroll
    for (int j = 0; j < 4; j++) four.at[j] = fmaf(offset, 1.4426950408889634f, four.at[j]);
    weights[thread * FOURS + f] = four;
  }
  __syncthreads();

  // Weights: a team of threads has one head.
  {
    const int head = thread / Size::TEAM, member = thread % Size::TEAM;
    float* const own = reinterpret_cast<float*>(weights) + (head < HEADS ? head : 0);
    float highest = -1e30f, total = 0.0f;
    if (head < HEADS)
      for (int c = member; c < end; c += Size::TEAM)
        if (seen[c]) highest = fmaxf(highest, own[c * FOURS * 4]);
    found[0][thread] = highest;
    __syncthreads();
    if (head < HEADS) {
      for (int i = 0; i < Size::TEAM; i++) highest = fmaxf(highest, found[0][head * Size::TEAM + i]);
      for (int c = member; c < end; c += Size::TEAM) {
        const float weight = seen[c] ? exp2f(own[c * FOURS * 4] - highest) : 0.0f;
        own[c * FOURS * 4] = weight;
        total += weight;
      }
    }
    found[1][thread] = total;
    __syncthreads();
    if (head < share && member == 0) {
      total = 0.0f;
      for (int i = 0; i < Size::TEAM; i++) total += found[1][head * Size::TEAM + i];
      const long long at = ((long long)row * all_heads + first + head) * spans + span;
      stats[2 * at] = highest, stats[2 * at + 1] = total;
    }
  }

  // Values: a thread has eight numbers of every SIDES-th column.
  const int unit = thread % Size::UNITS, side = thread / Size::UNITS;
  float* const sides = reinterpret_cast<float*>(room);
  if (side < Size::SIDES) {
    float sum[HEADS][8];
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
      for (int j = 0; j < 8; j++) sum[h][j] = 0.0f;
#pragma unroll 4
    for (int c = side; c < end; c += Size::SIDES) {
      if (has_holes && !seen[c]) continue;
      unsigned int words[(V::BITS + 3) / 4];
      load_eight<V::BITS>(words, values.packed.at(row, key_head, start + c), unit);
      const typename V::By by = values.by(row, key_head, start + c, unit * 8);
      float number[8];
#pragma unroll
      for (int j = 0; j < 8; j++) number[j] = values.number(code_of<V::BITS>(words, j), by);
#pragma unroll
      for (int f = 0; f < FOURS; f++) {
        const Four four = weights[c * FOURS + f];
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (4 * f + i < HEADS)
#pragma unroll
            for (int j = 0; j < 8; j++) {
              float* const into = &sum[4 * f + i < HEADS ? 4 * f + i : 0][j];
              *into = fmaf(four.at[i], number[j], *into);
            }
      }
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
      for (int j = 0; j < 8; j++) sides[(side * HEADS + h) * WIDTH_V + unit * 8 + j] = sum[h][j];
  }
  __syncthreads();
  for (int i = thread; i < share * DEPTH_V; i += THREADS) {
    const int head = i / DEPTH_V, number = i % DEPTH_V;
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < Size::SIDES; s++) sum += sides[(s * HEADS + head) * WIDTH_V + number];
    sums[(((long long)row * all_heads + first + head) * spans + span) * DEPTH_V + number] = sum;
  }
}

}  // namespace few_bits
