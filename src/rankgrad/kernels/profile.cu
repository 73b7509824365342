// All rounds of Sinkhorn, the walk back and d/d scores of lists of up to N documents in one launch: see `rankgrad.kernels.clusters`.
//
// Compiled with N (128 or 256) and TRANSPOSED (0 or 1). A block of 256 threads holds 128 rows of K in registers; lists of more than
// 128 documents have two, a cluster. A warp has 16 rows, its lanes 2 x 16 tiles of 8 rows and N / 16 columns: row sums end inside a
// warp, column sums go through shared memory and then, as words that carry their own number, into the shared memory of the
// list's other block. The vectors of all rounds stay in shared memory. Row i's number is kept by lanes 2 i and 2 i + 1 of its
// warp, column j's by thread j.

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ long long stamps[128];
#ifdef PROF
#define STAMP(i) do { if ((threadIdx.x == 5 || threadIdx.x == 229) && blockIdx.x == 6) stamps[(i) + (threadIdx.x == 229 ? 64 : 0)] = clock64(); } while (0)
#else
#define STAMP(i)
#endif
constexpr int BLOCKS = N / 128;
constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int R = 8;          // rows of a thread
constexpr int M = 2 * R * WARPS;  // rows of a block
constexpr int G = N / 64;     // groups of four columns of a thread: 64 g + 4 (lane % 16) + 0..3
constexpr int HEAD = 4;       // words of the workspace: see `rankgrad.kernels.workspace`
constexpr int COUNT = 0, VALUE_SCALE = 3, GRAD_SCALE = 4, WEIGHS = 5, VALUE = 6;
constexpr double LOG2_E = 1.4426950408889634;
constexpr float LOWEST = -64.0 * LOG2_E;  // logits below are left out
constexpr u32 ALL = 0xffffffffu;

enum Reduction { NONE, SUM, MEAN };

struct Place {  // of a thread
    int thread, warp, lane, block;
    __device__ int row() const { return warp * 2 * R + lane / 2; }  // whose number it keeps, of the block's rows
    __device__ int rank() const { return block * M + row(); }
    __device__ int rows() const { return (warp * 2 + lane / 16) * R; }  // the first it holds
    __device__ int columns(int g) const { return g * 64 + lane % 16 * 4; }
};

struct Room {  // in shared memory
    double *prefix;   // [2, N + 1] A and W of the list; at the end sums of columns
    u64 *mail;        // [2, N] by parity of the exchange
    float *partial;   // [2, WARPS, N] sums of columns by warp
    float *few;       // [WARPS]
    float *by_row, *by_column;   // [M], [N] what the last matrix is multiplied by
    float *left;                 // [2, M] row sums
    float *edges;                // [N] the first plus the last rank of the same score
    float *row_a, *row_b;        // [iters + 1, M] p before and after each round; [iters, M] what goes with it in dK
    float *column_a, *column_b;  // the same of q, [iters + 1, N] and [iters, N]
};

__device__ __forceinline__ float inverse(float x, bool real) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(real ? x : 1.0f));
    return real ? y : 0.0f;
}

__device__ __forceinline__ void four(float *to, const float *from) {
    const float4 x = *reinterpret_cast<const float4 *>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

__device__ __forceinline__ void eight(float (&to)[R], const float *from) { four(to, from), four(to + 4, from + 4); }

// A number per row, kept at `at` [M], to the threads that hold the row.
__device__ __forceinline__ void to_rows(const Place &me, float value, float *at, float (&p)[R]) {
    if (me.lane % 2 == 0) at[me.row()] = value;
    __syncwarp();
    eight(p, at + me.rows());
}

// What was kept at `at` [N] before a barrier, to the threads that hold the columns.
__device__ __forceinline__ void from_columns(const Place &me, const float *at, float (&q)[4 * G]) {
#pragma unroll
    for (int g = 0; g < G; ++g) four(q + 4 * g, at + me.columns(g));
}

// Rows' sums over sixteen lanes: each of the first exchanges halves the rows that a lane goes on with.
__device__ __forceinline__ float over_lanes(const Place &me, const float (&part)[R]) {
    float four[4], two[2];
    bool upper = me.lane & 8;
#pragma unroll
    for (int r = 0; r < 4; ++r)
        four[r] = (upper ? part[r + 4] : part[r]) + __shfl_xor_sync(ALL, upper ? part[r] : part[r + 4], 8);
    upper = me.lane & 4;
#pragma unroll
    for (int r = 0; r < 2; ++r)
        two[r] = (upper ? four[r + 2] : four[r]) + __shfl_xor_sync(ALL, upper ? four[r] : four[r + 2], 4);
    upper = me.lane & 2;
    const float one = (upper ? two[1] : two[0]) + __shfl_xor_sync(ALL, upper ? two[0] : two[1], 2);
    return one + __shfl_xor_sync(ALL, one, 1);
}

__device__ __forceinline__ float row_sums(const Place &me, const float (&K)[R][4 * G], const float (&q)[4 * G]) {
    float part[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        part[r] = K[r][0] * q[0];
#pragma unroll
        for (int c = 1; c < 4 * G; ++c) part[r] = fmaf(K[r][c], q[c], part[r]);
    }
    STAMP(28);
    return over_lanes(me, part);
}

// Sums over a warp's rows of eight columns, two groups of four, from the lanes that hold eight rows each: to, or added to, `partial`.
template <bool MORE>
__device__ __forceinline__ void over_rows(const Place &me, const float *part, int g, float *partial) {
    const bool upper = me.lane & 16;  // goes on with the second group
    float kept[4];
#pragma unroll
    for (int c = 0; c < 4; ++c)
        kept[c] = (upper ? part[c + 4] : part[c]) + __shfl_xor_sync(ALL, upper ? part[c] : part[c + 4], 16);
    float4 *to = reinterpret_cast<float4 *>(partial + me.warp * N + me.columns(g + upper));
    const float4 had = MORE ? *to : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    *to = make_float4(had.x + kept[0], had.y + kept[1], had.z + kept[2], had.w + kept[3]);
}

// Sums over a block's warps, to the thread of each column.
__device__ __forceinline__ float over_warps(const Place &me, const float *partial) {
    if (me.thread >= N) return 0.0f;
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w += 2) even += partial[w * N + me.thread], odd += partial[(w + 1) * N + me.thread];
    return even + odd;
}

__device__ __forceinline__ float column_sums(const Place &me, const float (&K)[R][4 * G], const float (&p)[R], float *partial) {
    float part[4 * G];
#pragma unroll
    for (int c = 0; c < 4 * G; ++c) {
        part[c] = K[0][c] * p[0];
#pragma unroll
        for (int r = 1; r < R; ++r) part[c] = fmaf(K[r][c], p[r], part[c]);
    }
    STAMP(21);
#pragma unroll
    for (int g = 0; g < G; g += 2) over_rows<false>(me, part + 4 * g, g, partial);
    STAMP(22);
    __syncthreads();
    STAMP(23);
    const float w__ = over_warps(me, partial);
    STAMP(24);
    return w__;
}

// Both blocks' sums, and whether thread j of both said yes. Adding commutes, so both get the same bits.
__device__ __forceinline__ float over_blocks(const Place &me, float part, bool &yes, u32 &number, u64 *mail) {
#if VAR == 1
    return part * 2.0f;
#elif VAR == 2
    {
        const u32 slot = number % 2;
        const u32 box = static_cast<u32>(__cvta_generic_to_shared(reinterpret_cast<float *>(mail) + 8 + slot * N + me.thread));
        const u32 bar = static_cast<u32>(__cvta_generic_to_shared(mail + slot));
        u32 theirs, their_bar;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(box), "r"(1 - me.block));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(their_bar) : "r"(bar), "r"(1 - me.block));
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" :: "r"(theirs), "r"(__float_as_uint(part)), "r"(their_bar) : "memory");
        if (me.thread == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(4 * N) : "memory");
        const u32 parity = ((number - 1) >> 1) & 1;
        u32 ok;
        do {
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(ok) : "r"(bar), "r"(parity) : "memory");
        } while (!ok);
        float got;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(got) : "r"(box) : "memory");
        ++number;
        return part + got;
    }
#endif
    if (BLOCKS == 2) {
        const u32 box = static_cast<u32>(__cvta_generic_to_shared(mail + (number % 2) * N + me.thread));
        u32 theirs;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(box), "r"(1 - me.block));
        u64 word = (static_cast<u64>(2 * number + yes) << 32) | __float_as_uint(part);
        asm volatile("st.relaxed.cluster.shared::cluster.u64 [%0], %1;" ::"r"(theirs), "l"(word) : "memory");
        u32 said;  // 0 or 1, once it is this exchange's word
        do {
            asm volatile("ld.relaxed.cluster.shared::cta.u64 %0, [%1];" : "=l"(word) : "r"(box) : "memory");
            said = static_cast<u32>(word >> 32) - 2 * number;
        } while (said > 1);
        yes = yes && said;
        part += __uint_as_float(static_cast<u32>(word));
        ++number;
    }
    return part;
}

__device__ __forceinline__ void meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The sum over all threads, in an order that does not change.
__device__ __forceinline__ float over_block(const Place &me, float x, float *few) {
#pragma unroll
    for (int away = 16; away; away /= 2) x += __shfl_xor_sync(ALL, x, away);
    __syncthreads();
    if (me.lane == 0) few[me.warp] = x;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += few[w];
    return sum;
}

// K of this thread, before the rows are divided by their sums. `prefix` holds A and -2 W in units of log 2.
__device__ __forceinline__ void weights(const Place &me, const double *prefix, int n, float (&K)[R][4 * G]) {
    const int first = me.block * M + me.rows();
    double a[R], w[R];
#pragma unroll
    for (int r = 0; r < R; ++r) a[r] = prefix[first + r], w[r] = prefix[N + 1 + first + r];
#pragma unroll
    for (int c = 0; c < 4 * G; ++c) {
        const int column = me.columns(c / 4) + c % 4;
        const double a_j = prefix[column], w_j = prefix[N + 1 + column];
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const float z = static_cast<float>((w_j - w[r]) + (2 * (first + r) - 1) * (a_j - a[r]));
            const bool kept = first + r < n && column < n && z > LOWEST;
            asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(K[r][c]) : "f"(z));
            if (!kept) K[r][c] = 0.0f;
        }
    }
}

// Two rows' sums taken from the terms of 8 x 8 entries: p_i q_j.
__device__ __forceinline__ void add(const Place &me, float (&terms)[R][8], const float *by_row, const float *by_column, int g) {
    float p[R], q[8];
    eight(p, by_row + me.rows());
    four(q, by_column + me.columns(g)), four(q + 4, by_column + me.columns(g + 1));
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int c = 0; c < 8; ++c) terms[r][c] = fmaf(p[r], q[c], terms[r][c]);
}

// dz summed over a warp's rows, as it is and times r_i - rho_j, to both halves of `partial`. The row sums of K dK are known, they are
// the adjoints left at the start: taken out first, so that nothing large cancels; what rounding left of them is taken out last.
__device__ __forceinline__ void logits_gradient(const Place &me, const Room &room, const float (&K)[R][4 * G], int done,
                                                float left) {
    const int first = me.block * M + me.rows();
    float rest[R], p[R];
    to_rows(me, left, room.left, p);
#pragma unroll
    for (int r = 0; r < R; ++r) rest[r] = 0.0f;
#pragma unroll
    for (int g = 0; g < G; g += 2) {
        float terms[R][8], column[8], slope[8];
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int c = 0; c < 8; ++c) terms[r][c] = room.left[me.rows() + r];
        add(me, terms, room.by_row, room.by_column, g);
#pragma unroll 1
        for (int t = 0; t < done; ++t) {  // what K was multiplied by, and the adjoint of the product: two products a round
            add(me, terms, room.row_a + (t + TRANSPOSED) * M, room.column_b + t * N, g);
            add(me, terms, room.row_b + t * M, room.column_a + (t + 1 - TRANSPOSED) * N, g);
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const float edges = room.edges[me.columns(g + c / 4) + c % 4];
            column[c] = slope[c] = 0.0f;
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const float z = K[r][4 * g + c] * -terms[r][c];
                rest[r] += z;
                column[c] += z;
                slope[c] = fmaf(edges - 2 * (first + r), z, slope[c]);
            }
        }
        over_rows<false>(me, column, g, room.partial);
        over_rows<false>(me, slope, g, room.partial + WARPS * N);
    }
    to_rows(me, over_lanes(me, rest), room.left + M, p);
#pragma unroll
    for (int g = 0; g < G; g += 2) {
        float column[8], slope[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const float edges = room.edges[me.columns(g + c / 4) + c % 4];
            column[c] = slope[c] = 0.0f;
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const float z = K[r][4 * g + c] * p[r];
                column[c] -= z;
                slope[c] = fmaf(2 * (first + r) - edges, z, slope[c]);
            }
        }
        over_rows<true>(me, column, g, room.partial);
        over_rows<true>(me, slope, g, room.partial + WARPS * N);
    }
}

// sum_k sign(s_j - s_k) x_k for the thread of column j: all lower scores less all higher ones.
__device__ __forceinline__ float lower_less_higher(const Place &me, float x, int first, int last, int n, double *until) {
    double sum = x;
#pragma unroll
    for (int away = 1; away < 32; away *= 2) {
        const double before = __shfl_up_sync(ALL, sum, away);
        if (me.lane >= away) sum += before;
    }
    double *totals = until + N + 1;  // [WARPS]
    if (me.lane == 31) totals[me.warp] = sum;
    __syncthreads();
    for (int w = 0; w < me.warp; ++w) sum += totals[w];
    if (me.thread == 0) until[0] = 0.0;
    if (me.thread < N) until[me.thread + 1] = sum;
    __syncthreads();
    return me.thread < n ? static_cast<float>(until[n] - until[last + 1] - until[first]) : 0.0f;
}

// How many lists count in the mean, one at least.
__device__ __forceinline__ float weight(const Place &me, const float *pages, size_t page_words, int lists, float *few) {
    float sum = 0.0f;
    for (int b = me.thread; b < lists; b += THREADS) sum += pages[b * page_words + WEIGHS];
    return fmaxf(over_block(me, sum, few), 1.0f);
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    neural_ndcg(float *work, float *gradient, float *loss, int lists, int L, int iters, float tol, float tau, int depth,
                int reduction) {
    extern __shared__ __align__(16) char shared[];
    Room room;
    room.prefix = reinterpret_cast<double *>(shared);
    room.mail = reinterpret_cast<u64 *>(room.prefix + 2 * (N + 1));
    room.partial = reinterpret_cast<float *>(room.mail + 2 * N);
    room.few = room.partial + 2 * WARPS * N;
    room.by_row = room.few + WARPS;
    room.left = room.by_row + M;
    room.by_column = room.left + 2 * M;
    room.edges = room.by_column + N;
    room.row_a = room.edges + N;
    room.row_b = room.row_a + (iters + 1) * M;
    room.column_a = room.row_b + iters * M;
    room.column_b = room.column_a + (iters + 1) * N;

    const int list = blockIdx.x / BLOCKS;
    int thread = threadIdx.x, block = blockIdx.x % BLOCKS;
    asm volatile("" : "+r"(thread), "+r"(block));  // to be kept, not read again in every round
    const Place me = {thread, thread / 32, thread % 32, block};
    const size_t page_words = 12 + 4 * N + max(8 * L, 4 * N) + 2 * L;
    float *pages = work + HEAD;
    float *page = pages + list * page_words;
    const int n = reinterpret_cast<int *>(page)[COUNT];
    const int *order = reinterpret_cast<int *>(page + 12 + 4 * N + max(8 * L, 4 * N));
    const float *gains = reinterpret_cast<const float *>(order + L);
    const bool real_i = me.rank() < n, real_j = thread < n;
    const int word = thread < L ? order[thread] : 0;
    const int first = (word >> 8) & 255, last = (word >> 16) & 255;

    if (thread < N) {
        room.edges[thread] = first + last;
        room.column_a[thread] = 1.0f;
        room.mail[thread] = room.mail[N + thread] = 0;
    }
#if VAR == 2
    __syncthreads();
    if (thread == 0) {
        const u32 bar = static_cast<u32>(__cvta_generic_to_shared(room.mail));
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar));
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar + 8));
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
#endif
    for (int at = thread; at < 2 * (N + 1); at += THREADS)
        room.prefix[at] = reinterpret_cast<const double *>(page + 8)[at] * (at <= N ? LOG2_E : -2.0 * LOG2_E);
    __syncthreads();
    float K[R][4 * G], p8[R], q16[4 * G];
    STAMP(0);
    weights(me, room.prefix, n, K);
#pragma unroll
    for (int c = 0; c < 4 * G; ++c) q16[c] = 1.0f;
    to_rows(me, inverse(row_sums(me, K, q16), real_i), room.by_row, p8);
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int c = 0; c < 4 * G; ++c) K[r][c] *= p8[r];

    float p = real_i ? 1.0f : 0.0f, q = real_j ? 1.0f : 0.0f;
    to_rows(me, p, room.row_a, p8);
    STAMP(1);
    meet();  // the other block is there, and its mailbox empty

    STAMP(2);
    u32 number = 1;  // of the next exchange
    int done = 0;
    bool yes = true;
    for (; done < iters; ++done) {
        float new_p = p, *next_p = room.row_a + (done + 1) * M, *next_q = room.column_a + (done + 1) * N;
        bool near = done > 0 && tol > 0.0f;
        if (TRANSPOSED) {
            const float sums = row_sums(me, K, q16);
            near = near && (!real_i || fabsf(p * sums - 1.0f) < tol);
            new_p = inverse(sums, real_i);
            to_rows(me, new_p, next_p, p8);
        }
        STAMP(20);
        const float sums = over_blocks(me, column_sums(me, K, p8, room.partial), near, number, room.mail);
        STAMP(25);
        if (!TRANSPOSED) near = near && (!real_j || fabsf(q * sums - 1.0f) < tol);
        const float new_q = inverse(sums, real_j);
        if (thread < N) next_q[thread] = new_q;
#if VAR == 3 || VAR == 2
        __syncthreads();
#else
        if (__syncthreads_and(near)) break;
#endif
        STAMP(26);
        from_columns(me, next_q, q16);
        STAMP(27);
        q = new_q;
        if (!TRANSPOSED) {
            new_p = inverse(row_sums(me, K, q16), real_i);
            STAMP(29);
            to_rows(me, new_p, next_p, p8);
            STAMP(30);
        }
        p = new_p;
#ifdef PROF
        if (done == 6) { done = iters; break; }
#endif
    }

    STAMP(3);
    // the result is sum_ij r_i p_i K_ij q_j d_j; from here on adjoints of log p and log q
    const float r = real_i && me.rank() < depth ? -1.0f / log2f(me.rank() + 2.0f) : 0.0f;
    const float d = real_j ? gains[thread] : 0.0f;
    if (thread < N) room.by_column[thread] = -q * d;
    __syncthreads();
    from_columns(me, room.by_column, q16);
    float p_bar = -r * p * row_sums(me, K, q16);
    const float part = over_block(me, p_bar, room.few) * 0.5f;
    to_rows(me, p * r, room.by_row, p8);
    float q_bar = d * q * over_blocks(me, column_sums(me, K, p8, room.partial), yes, number, room.mail);
    for (int t = done - 1; t >= 0; --t) {
        float *row_b = room.row_b + t * M, *column_b = room.column_b + t * N;
        if (TRANSPOSED) {
            p = room.row_a[(t + 1) * M + me.row()];
            if (thread < N) column_b[thread] = q * q_bar;
            __syncthreads();
            from_columns(me, column_b, q16);
            p_bar = p * (p_bar - p * row_sums(me, K, q16));
            to_rows(me, p_bar, row_b, p8);
            q = thread < N ? room.column_a[t * N + thread] : 0.0f;
            q_bar = -q * over_blocks(me, column_sums(me, K, p8, room.partial), yes, number, room.mail);
            p_bar = 0.0f;
        } else {
            q = thread < N ? room.column_a[(t + 1) * N + thread] : 0.0f;
            to_rows(me, p * p_bar, row_b, p8);
            q_bar = q * (q_bar - q * over_blocks(me, column_sums(me, K, p8, room.partial), yes, number, room.mail));
            if (thread < N) column_b[thread] = q_bar;
            __syncthreads();
            from_columns(me, column_b, q16);
            p = room.row_a[t * M + me.row()];
            p_bar = -p * row_sums(me, K, q16);
            q_bar = 0.0f;
        }
    }
    STAMP(4);
    const float value = over_blocks(me, part, yes, number, room.mail);
    __syncthreads();  // every vector of every round is there

    logits_gradient(me, room, K, done, p_bar);
    __syncthreads();
    STAMP(5);
    const float by_column = over_blocks(me, over_warps(me, room.partial), yes, number, room.mail);
    float by_slope = over_blocks(me, over_warps(me, room.partial + WARPS * N), yes, number, room.mail);
    if (me.block == 0) {
        by_slope -= lower_less_higher(me, by_column, first, last, n, room.prefix);
        float scale = page[GRAD_SCALE];
        if (reduction == MEAN) scale /= weight(me, pages, page_words, lists, room.few);
        if (thread == 0) page[VALUE] = value * page[VALUE_SCALE];
        if (thread < L) gradient[static_cast<size_t>(list) * L + (word & 255)] = real_j ? by_slope / tau * scale : 0.0f;
    }
    STAMP(6);
    meet();  // nobody writes into a block that is gone
    STAMP(7);
#ifdef PROF
    __syncthreads();
    if (threadIdx.x == 37 && blockIdx.x == 6) {
        for (int h = 0; h < 128; h += 64) {
        for (int i = 1; i < 8; ++i) printf("p%d:%lld ", i, stamps[h + i] - stamps[h + i-1]);
        printf(" round: down %lld rows+sts %lld bar %lld warps %lld exch %lld q+bar %lld lds %lld fma %lld lanes %lld to_rows %lld\n", stamps[h+21]-stamps[h+20], stamps[h+22]-stamps[h+21], stamps[h+23]-stamps[h+22], stamps[h+24]-stamps[h+23], stamps[h+25]-stamps[h+24], stamps[h+26]-stamps[h+25], stamps[h+27]-stamps[h+26], stamps[h+28]-stamps[h+27],stamps[h+29]-stamps[h+28],stamps[h+30]-stamps[h+29]);
        }
    }
#endif
    if (me.block == 0) {
        if (reduction == NONE) {
            if (thread == 0) loss[list] = page[VALUE];
            return;
        }
        bool final = false;
        if (thread == 0) {
            __threadfence();
            final = atomicAdd(reinterpret_cast<int *>(work) + 1, 1) == lists - 1;
        }
        if (__syncthreads_or(final)) {  // whoever is last adds the values of all lists, in their order
            __threadfence();
            float sum = 0.0f;
            for (int b = thread; b < lists; b += THREADS) sum += __ldcg(pages + b * page_words + VALUE);
            sum = over_block(me, sum, room.few);
            if (reduction == MEAN) sum /= weight(me, pages, page_words, lists, room.few);
            if (thread == 0) *loss = sum;
        }
    }
}
