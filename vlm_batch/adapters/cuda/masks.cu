// What a mask says of a column: bool, or a number that is added to its score, which hides it if far below zero.

namespace masks {

__device__ inline bool is_seen(bool mask) { return mask; }
template <typename M>
__device__ inline bool is_seen(M mask) {
  return float(mask) > (sizeof(M) == 2 && float(M(1e5f)) > 1e6f ? -60000.0f : -1e30f);
}
__device__ inline float added(bool) { return 0.0f; }
template <typename M>
__device__ inline float added(M mask) {
  return float(mask);
}

}  // namespace masks
