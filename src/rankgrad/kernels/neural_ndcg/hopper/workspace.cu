// What sort.cu and rounds.cu share, put before each of them: the workspace, and sums over a block.
//
// Compiled with N (128 or 256), the columns that a list's matrix is padded to. The workspace is one of `rankgrad.kernels.neural_ndcg.short.workspace`
// without vectors: a record for each list.

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int HEAD = 4;  // words before the first record, then words of a record
constexpr int COUNT = 0, VALUE_SCALE = 3, GRAD_SCALE = 4, WEIGHT = 5, VALUE = 6;
constexpr u32 ALL = 0xffffffffu;

struct Records {
    float *first;
    size_t words;  // of a record
    int L;
    __device__ Records(float *work, int L) : first(work + HEAD), words(12 + 4 * N + max(8 * L, 4 * N) + 2 * L), L(L) {}
    __device__ float *operator[](int list) const { return first + list * words; }
    __device__ static int *count(float *record) { return reinterpret_cast<int *>(record) + COUNT; }
    __device__ static double *prefix(float *record) { return reinterpret_cast<double *>(record + 8); }  // A and W, [2, N + 1]
    __device__ int *order(float *record) const { return reinterpret_cast<int *>(record + 12 + 4 * N + max(8 * L, 4 * N)); }  // [L]
    __device__ float *gains(float *record) const { return record + 12 + 4 * N + max(8 * L, 4 * N) + L; }  // by rank, [L]
};

// The sum over all threads, in an order that does not change; `by_warp` is [WARPS] in shared memory.
template <typename Number> __device__ __forceinline__ Number over_block(Number x, Number *by_warp) {
#pragma unroll
    for (int away = 16; away; away /= 2) x += __shfl_xor_sync(ALL, x, away);
    __syncthreads();
    if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = x;
    __syncthreads();
    Number sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += by_warp[w];
    return sum;
}

// The sum over all threads up to this one; `by_warp` is [WARPS] in shared memory.
__device__ __forceinline__ double until(double x, double *by_warp) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int away = 1; away < 32; away *= 2) {
        const double before = __shfl_up_sync(ALL, x, away);
        if (lane >= away) x += before;
    }
    __syncthreads();
    if (lane == 31) by_warp[warp] = x;
    __syncthreads();
    double earlier = 0.0;
    for (int w = 0; w < warp; ++w) earlier += by_warp[w];
    return earlier + x;
}
