// Attention of one query a row over a slab's keys and values: `attend` for a row and some heads of queries that share keys.
//
// The columns up to the last one that a row sees are cut among the blocks of a row and head, and among groups of threads
// within a block. A group reads a column's key and value once for all of the heads; each of its threads has some numbers of
// them. With several blocks, `merge` in spans.cu adds up what they found. Compiled by NVRTC, and as C++ by the tests.

namespace one_query {

constexpr int WARP = 32;
constexpr int THREADS = 128;
constexpr int AHEAD = 4;                 // columns that a group loads at once
constexpr unsigned int ALL = 0xffffffffu;  // threads of a warp
constexpr float LEAST = -1e30f;

// Where an array (rows, heads, columns, numbers) begins, and what lies between two of each.
template <typename T>
struct View {
  const T* begin;
  long long row, head, column, number;
};

template <typename T>
struct alignas(16) Pack {
  T at[16 / sizeof(T)];
};

__device__ constexpr int lanes_of(int units) {
  int lanes = 1;
  while (lanes < units && lanes < WARP) lanes *= 2;
  return lanes;
}

// A thread's numbers of one column: PARTS packs, `step` packs apart, of which the first `count` are there.
template <typename T, int PARTS>
__device__ inline void load(Pack<T> (&into)[PARTS], const T* from, int lane, int step, int count, bool is_packed, long long stride) {
  constexpr int SIZE = 16 / sizeof(T);
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const int unit = lane + p * step;
    if (unit >= count) {
#pragma unroll
      for (int j = 0; j < SIZE; j++) into[p].at[j] = T(0.0f);
    } else if (is_packed) {
      into[p] = *reinterpret_cast<const Pack<T>*>(from + unit * SIZE);
    } else {
#pragma unroll
      for (int j = 0; j < SIZE; j++) into[p].at[j] = from[(unit * SIZE + j) * stride];
    }
  }
}

template <typename T, int PARTS>
__device__ inline void widen(float (&into)[PARTS * 16 / sizeof(T)], const Pack<T> (&packs)[PARTS]) {
  constexpr int SIZE = 16 / sizeof(T);
#pragma unroll
  for (int p = 0; p < PARTS; p++)
#pragma unroll
    for (int j = 0; j < SIZE; j++) into[p * SIZE + j] = float(packs[p].at[j]);
}

template <typename T>
__device__ inline bool is_packed(const View<T>& view) {
  constexpr int SIZE = 16 / sizeof(T);
  return view.number == 1 && (unsigned long long)view.begin % 16 == 0 && view.row % SIZE == 0 && view.head % SIZE == 0 &&
      view.column % SIZE == 0;
}

// Block (span, head of keys and tile of its heads of queries, row). With one span the answer goes to `out` (rows, heads, 1,
// DEPTH). Otherwise each head's highest score, in powers of 2, and sum of weights go to `stats` (rows, heads, spans, 2), and
// the sum of values by weights to `sums` (rows, heads, spans, DEPTH).
template <typename T, typename M, int DEPTH, int SHARE, int HEADS>
__device__ void attend(
    const View<T> queries,
    const View<T> keys,
    const View<T> values,
    const M* mask,
    long long mask_row,
    long long mask_column,
    int columns,
    float scale,
    T* out,
    float* sums,
    float* stats) {
  constexpr int SIZE = 16 / sizeof(T), UNITS = DEPTH / SIZE;
  constexpr int LANES = lanes_of(UNITS), PARTS = (UNITS + LANES - 1) / LANES, NUMBERS = PARTS * SIZE;
  constexpr int GROUPS = THREADS / LANES;
  constexpr int TILES = (SHARE + HEADS - 1) / HEADS;
  __shared__ float highest_of[GROUPS][HEADS], total_of[GROUPS][HEADS];
  __shared__ float sum_of[GROUPS][HEADS][DEPTH];
  __shared__ int last;  // the columns up to the last one of this span that the row sees

  const int thread = threadIdx.x, lane = thread % LANES, group = thread / LANES;
  const int span = blockIdx.x, spans = gridDim.x, row = blockIdx.z;
  const int key_head = blockIdx.y / TILES, tile = blockIdx.y % TILES;
  const int first = key_head * SHARE + tile * HEADS;  // head of queries
  const int share = SHARE - tile * HEADS < HEADS ? SHARE - tile * HEADS : HEADS;
  const int all_heads = gridDim.y / TILES * SHARE;
  const int per_span = (columns + spans - 1) / spans, begin = span * per_span;
  const int end = begin + per_span < columns ? begin + per_span : columns;
  const M* const own_mask = mask + row * mask_row;

  if (thread == 0) last = begin;
  __syncthreads();
  int mine = begin;
  for (int c = begin + thread; c < end; c += THREADS)
    if (masks::is_seen(own_mask[c * mask_column])) mine = c + 1;
  if (mine > begin) atomicMax(&last, mine);
  __syncthreads();
  const int stop = last;

  const bool keys_packed = is_packed(keys), values_packed = is_packed(values);
  const T* const own_keys = keys.begin + row * keys.row + key_head * keys.head;
  const T* const own_values = values.begin + row * values.row + key_head * values.head;
  float query[HEADS][NUMBERS], sum[HEADS][NUMBERS], highest[HEADS], total[HEADS];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    highest[h] = LEAST, total[h] = 0.0f;
    const T* const from = queries.begin + row * queries.row + (first + (h < share ? h : 0)) * queries.head;
    Pack<T> packs[PARTS];
    load<T, PARTS>(packs, from, lane, LANES, UNITS, false, queries.number);
    widen<T, PARTS>(query[h], packs);
#pragma unroll
    for (int j = 0; j < NUMBERS; j++) query[h][j] *= scale * 1.4426950408889634f, sum[h][j] = 0.0f;
  }

  for (int base = begin; base < stop; base += GROUPS * AHEAD) {  // all threads take the same number of turns
    Pack<T> key[AHEAD][PARTS], value[AHEAD][PARTS];
    float offset[AHEAD], score[HEADS][AHEAD];
    bool sees[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      const int column = base + k * GROUPS + group;
      sees[k] = column < stop;
      offset[k] = 0.0f;
      if (sees[k]) {
        const M hidden = own_mask[column * mask_column];
        sees[k] = masks::is_seen(hidden);
        offset[k] = sees[k] ? masks::added(hidden) * 1.4426950408889634f : 0.0f;
      }
      const int count = sees[k] ? UNITS : 0;  // what is not seen is not read
      load<T, PARTS>(key[k], own_keys + column * keys.column, lane, LANES, count, keys_packed, keys.number);
      load<T, PARTS>(value[k], own_values + column * values.column, lane, LANES, count, values_packed, values.number);
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      float numbers[NUMBERS];
      widen<T, PARTS>(numbers, key[k]);
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        score[h][k] = 0.0f;
#pragma unroll
        for (int j = 0; j < NUMBERS; j++) score[h][k] = fmaf(query[h][j], numbers[j], score[h][k]);
#pragma unroll
        for (int apart = LANES / 2; apart > 0; apart /= 2) score[h][k] += __shfl_xor_sync(ALL, score[h][k], apart);
        score[h][k] += offset[k];
      }
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      float top = highest[h];
#pragma unroll
      for (int k = 0; k < AHEAD; k++)
        if (sees[k]) top = fmaxf(top, score[h][k]);
      const float by = exp2f(highest[h] - top);
      highest[h] = top, total[h] *= by;
#pragma unroll
      for (int j = 0; j < NUMBERS; j++) sum[h][j] *= by;
#pragma unroll
      for (int k = 0; k < AHEAD; k++) {
        score[h][k] = sees[k] ? exp2f(score[h][k] - top) : 0.0f;  // its weight
        total[h] += score[h][k];
      }
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      float numbers[NUMBERS];
      widen<T, PARTS>(numbers, value[k]);
#pragma unroll
      for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int j = 0; j < NUMBERS; j++) sum[h][j] = fmaf(score[h][k], numbers[j], sum[h][j]);
    }
  }

#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    if (lane == 0) highest_of[group][h] = highest[h], total_of[group][h] = total[h];
#pragma unroll
    for (int p = 0; p < PARTS; p++)
      if (lane + p * LANES < UNITS)
#pragma unroll
        for (int j = 0; j < SIZE; j++) sum_of[group][h][(lane + p * LANES) * SIZE + j] = sum[h][p * SIZE + j];
  }
  __syncthreads();
  for (int i = thread; i < share * DEPTH; i += THREADS) {
    const int head = i / DEPTH, number = i % DEPTH;
    float top = LEAST, whole = 0.0f, found = 0.0f;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) top = fmaxf(top, highest_of[g][head]);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      const float by = exp2f(highest_of[g][head] - top);
      whole = fmaf(by, total_of[g][head], whole);
      found = fmaf(by, sum_of[g][head][number], found);
    }
    const long long at = (long long)row * all_heads + first + head;
    if (spans == 1) {
      out[at * DEPTH + number] = T(whole == 0.0f ? 0.0f : found / whole);  // a place without a row sees nothing
    } else {
      sums[(at * spans + span) * DEPTH + number] = found;
      if (number == 0) stats[2 * (at * spans + span)] = top, stats[2 * (at * spans + span) + 1] = whole;
    }
  }
}

}  // namespace one_query
