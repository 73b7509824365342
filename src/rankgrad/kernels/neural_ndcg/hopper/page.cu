// What the two kernels of short lists share: the workspace, and sums over a block. Put before each of them.
//
// Compiled with N (128 or 256), the columns that a list's matrix is padded to. The workspace is one of `rankgrad.kernels.neural_ndcg.short.workspace`
// without vectors: a page for each list.

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int HEAD = 4;  // words before the first page, then words of a page
constexpr int COUNT = 0, VALUE_SCALE = 3, GRAD_SCALE = 4, WEIGHS = 5, VALUE = 6;
constexpr u32 ALL = 0xffffffffu;

struct Pages {
    float *first;
    size_t words;  // of a page
    int L;
    __device__ Pages(float *work, int L) : first(work + HEAD), words(12 + 4 * N + max(8 * L, 4 * N) + 2 * L), L(L) {}
    __device__ float *operator[](int list) const { return first + list * words; }
    __device__ static int *count(float *page) { return reinterpret_cast<int *>(page) + COUNT; }
    __device__ static double *prefix(float *page) { return reinterpret_cast<double *>(page + 8); }  // A and W, [2, N + 1]
    __device__ int *order(float *page) const { return reinterpret_cast<int *>(page + 12 + 4 * N + max(8 * L, 4 * N)); }  // [L]
    __device__ float *gains(float *page) const { return page + 12 + 4 * N + max(8 * L, 4 * N) + L; }  // by rank, [L]
};

// The sum over all threads, in an order that does not change; `few` is [WARPS] in shared memory.
template <typename Number> __device__ __forceinline__ Number over_block(Number x, Number *few) {
#pragma unroll
    for (int away = 16; away; away /= 2) x += __shfl_xor_sync(ALL, x, away);
    __syncthreads();
    if (threadIdx.x % 32 == 0) few[threadIdx.x / 32] = x;
    __syncthreads();
    Number sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += few[w];
    return sum;
}

// The sum over all threads up to this one; `few` is [WARPS] in shared memory.
__device__ __forceinline__ double until(double x, double *few) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int away = 1; away < 32; away *= 2) {
        const double before = __shfl_up_sync(ALL, x, away);
        if (lane >= away) x += before;
    }
    __syncthreads();
    if (lane == 31) few[warp] = x;
    __syncthreads();
    double earlier = 0.0;
    for (int w = 0; w < warp; ++w) earlier += few[w];
    return earlier + x;
}
