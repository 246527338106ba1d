// The gated delta rule, position by position. A block has one head of values of one row, a thread one row of that head's
// state, in registers. Sums are made in an order that depends on the widths alone: a row's answer is a function of the row,
// and a prompt in parts gives the bits of a prompt in one. Compiled by NVRTC, and as C++ by the tests (tests/kernels/block.h).

namespace delta {

// An array (rows, positions, heads, numbers), and what lies between two of each.
template <typename T>
struct View {
  const T* begin;
  long long row, position, head, number;
  __device__ float at(long long r, long long t, long long h, long long i) const {
    return float(begin[r * row + t * position + h * head + i * number]);
  }
};

// Block (., head of values, row), DV threads. `state` and what follows it: (rows, heads, DV, DK); `kept` has the states
// after the first `most` positions (rows, most, heads, DV, DK). A position that the mask hides leaves the state, and answers 0.
// Building takes seconds, so that the sizes of layers alone are constants.
template <typename T, int DK, int DV, bool BY_NUMBER>
__device__ void run(
    const View<T> queries,
    const View<T> keys,
    const View<T> values,
    const View<float> decays,
    const View<float> rates,
    const View<float> state,
    const View<bool> mask,
    int positions,
    int heads,
    int share,
    int most,
    T* out,
    float* last,
    float* kept) {
  constexpr int PER = (DK + DV - 1) / DV;  // numbers of a key that a thread fetches
  __shared__ float key[2][DK], query[2][DK], decay[2][BY_NUMBER ? DK : 1];
  const int thread = threadIdx.x, head = blockIdx.y, row = blockIdx.z;
  float own[DK];
#pragma unroll
  for (int i = 0; i < DK; i++) own[i] = state.at(row, head, thread, i);

  float next_key[PER], next_query[PER], next_decay[PER], next_value = 0, next_rate = 0, next_all = 1;
  bool is_next = true;
  const auto fetch = [&](int t) {
#pragma unroll
    for (int j = 0; j < PER; j++) {
      const int i = thread + j * DV;
      if (i >= DK) break;
      next_key[j] = keys.at(row, t, head / share, i);
      next_query[j] = queries.at(row, t, head / share, i);
      if constexpr (BY_NUMBER) next_decay[j] = decays.at(row, t, head, i);
    }
    if constexpr (!BY_NUMBER) next_all = decays.at(row, t, head, 0);
    is_next = mask.at(row, t, 0, 0) != 0;
    next_value = values.at(row, t, head, thread);
    next_rate = rates.at(row, t, head, 0);
  };
  fetch(0);
  for (int t = 0; t < positions; t++) {
    const int side = t & 1;  // the other threads may still read the other
#pragma unroll
    for (int j = 0; j < PER; j++) {
      const int i = thread + j * DV;
      if (i >= DK) break;
      key[side][i] = next_key[j], query[side][i] = next_query[j];
      if constexpr (BY_NUMBER) decay[side][i] = next_decay[j];
    }
    const float value = next_value, rate = next_rate, all = next_all;
    const bool is_seen = is_next;
    __syncthreads();
    if (t + 1 < positions) fetch(t + 1);
    float told[4] = {0, 0, 0, 0};
    if (is_seen) {
      float known[4] = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < DK; i++) {
        own[i] *= BY_NUMBER ? decay[side][BY_NUMBER ? i : 0] : all;
        known[i % 4] += own[i] * key[side][i];
      }
      const float change = (value - ((known[0] + known[1]) + (known[2] + known[3]))) * rate;
#pragma unroll
      for (int i = 0; i < DK; i++) {
        own[i] += key[side][i] * change;
        told[i % 4] += own[i] * query[side][i];
      }
    }
    out[((long long)(row * positions + t) * heads + head) * DV + thread] = T((told[0] + told[1]) + (told[2] + told[3]));
    if (t < most) {
      float* to = kept + (((long long)(row * most + t) * heads + head) * DV + thread) * DK;
#pragma unroll
      for (int i = 0; i < DK; i++) to[i] = own[i];
    }
  }
  float* to = last + ((long long)(row * heads + head) * DV + thread) * DK;
#pragma unroll
  for (int i = 0; i < DK; i++) to[i] = own[i];
}

}  // namespace delta
