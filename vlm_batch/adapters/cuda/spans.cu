// What blocks found of a row's columns, added up in the columns' order. Compiled by NVRTC, and as C++ by the tests.

namespace spans {

// Block: a row and head of queries. Returns number `threadIdx.x` of its DEPTH to the first threads, and 0 to others. `stats` (rows, heads, spans, 2) has the highest score of each
// span, in powers of 2, and the sum of weights; `sums` (rows, heads, spans, DEPTH) the sum of values by weights. Spans are added
// up by SIDES sides, each in their order.
template <int DEPTH, int SIDES>
__device__ float merged(const float* sums, const float* stats, int spans) {
  constexpr int LANES = (DEPTH + 31) / 32 * 32;  // whole warps
  __shared__ float parts[2][SIDES][LANES];
  const int number = threadIdx.x % LANES, side = threadIdx.x / LANES;
  const long long head = blockIdx.x;
  const float* const own = stats + head * spans * 2;
  float highest = -1e30f;
#pragma unroll 8
  for (int s = 0; s < spans; s++) highest = fmaxf(highest, own[2 * s]);
  float sum = 0.0f, total = 0.0f;
#pragma unroll 8
  for (int s = side; s < spans; s += SIDES) {
    const float weights = own[2 * s + 1];
    const bool is_there = weights != 0.0f;
    const float by = is_there ? exp2f(own[2 * s] - highest) : 0.0f;
    const float value = is_there && number < DEPTH ? sums[(head * spans + s) * DEPTH + number] : 0.0f;
    total = fmaf(by, weights, total);
    sum = fmaf(by, value, sum);
  }
  parts[0][side][number] = sum, parts[1][side][number] = total;
  __syncthreads();
  if (side > 0 || number >= DEPTH) return 0.0f;
#pragma unroll
  for (int i = 1; i < SIDES; i++) sum += parts[0][i][number], total += parts[1][i][number];
  return total == 0.0f ? 0.0f : sum / total;  // a place without a row sees nothing
}

// `out` (rows, heads, DEPTH).
template <typename T, int DEPTH, int SIDES>
__device__ void merge(const float* sums, const float* stats, int spans, T* out) {
  const float found = merged<DEPTH, SIDES>(sums, stats, spans);
  if (threadIdx.x < DEPTH) out[(long long)blockIdx.x * DEPTH + threadIdx.x] = T(found);
}

}  // namespace spans
