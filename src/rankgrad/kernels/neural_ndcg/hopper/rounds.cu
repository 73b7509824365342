// All rounds of Sinkhorn, the backward pass through them and d/d scores of lists of up to N documents in one launch: see `rankgrad.kernels.neural_ndcg.hopper.launch`.
//
// Compiled with TRANSPOSED (0 or 1). A block holds 128 rows of K in registers; lists of more than 128 documents have two, a cluster. A
// warp has 16 rows, its lanes 2 x 16 tiles of 8 rows and N / 16 columns: row sums end inside a warp, column sums go through
// shared memory, and then to the list's other block, straight into its shared memory. The vectors of all rounds stay in shared
// memory. Row i's number is kept by lanes 2 i and 2 i + 1 of its warp, column j's by thread j.

constexpr int BLOCKS = N / 128;
constexpr int R = 8;          // rows of a thread
constexpr int M = 2 * R * WARPS;  // rows of a block
constexpr int G = N / 64;     // groups of four columns of a thread: 64 g + 4 (lane % 16) + 0..3
constexpr double LOG2_E = 1.4426950408889634;
constexpr float LOWEST = -64.0 * LOG2_E;  // logits below are left out

enum Reduction { NONE, SUM, MEAN };

struct Place {  // of a thread
    int thread, warp, lane, block;
    __device__ int row() const { return warp * 2 * R + lane / 2; }  // whose number it keeps, of the block's rows
    __device__ int rank() const { return block * M + row(); }
    __device__ int rows() const { return (warp * 2 + lane / 16) * R; }  // the first it holds
    __device__ int columns(int g) const { return g * 64 + lane % 16 * 4; }
};

struct Shared {  // what is in shared memory
    double *prefix;   // [2, N + 1] A and W of the list; at the end sums of columns
    u64 *arrived;     // [2] barriers, by parity of the exchange
    float *inbox;     // [2, N] what the other block sent, likewise
    float *partial;   // [2, WARPS, N] sums of columns by warp
    float *by_warp;   // [WARPS]
    float *by_row, *by_column;   // [M], [N] what the last matrix is multiplied by
    float *left;                 // [2, M] row sums
    float *edges;                // [N] the first plus the last rank of the same score
    float *row_a, *row_b;        // [iters + 1, M] p before and after each round; [iters, M] what goes with it in dK
    float *column_a, *column_b;  // the same of q, [iters + 1, N] and [iters, N]
};

__device__ __forceinline__ float inverse(float x, bool real) {
    const float y = reciprocal(real ? x : 1.0f);
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

// Rows' sums over sixteen lanes: each of the first exchanges halves the rows that a lane continues with.
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
    return over_lanes(me, part);
}

// Sums over a warp's rows of eight columns, two groups of four, from the lanes that hold eight rows each: to, or added to, `partial`.
template <bool MORE>
__device__ __forceinline__ void over_rows(const Place &me, const float *part, int g, float *partial) {
    const bool upper = me.lane & 16;  // continues with the second group
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

// A caller must put a barrier between two calls: `partial` is read after the barrier in here.
__device__ __forceinline__ float column_sums(const Place &me, const float (&K)[R][4 * G], const float (&p)[R], float *partial) {
    float part[4 * G];
#pragma unroll
    for (int c = 0; c < 4 * G; ++c) {
        part[c] = K[0][c] * p[0];
#pragma unroll
        for (int r = 1; r < R; ++r) part[c] = fmaf(K[r][c], p[r], part[c]);
    }
#pragma unroll
    for (int g = 0; g < G; g += 2) over_rows<false>(me, part + 4 * g, g, partial);
    __syncthreads();
    return over_warps(me, partial);
}

// What thread j of the other block gives for `part`. A phase of a barrier cannot be missed: the other block sends twice more only after
// all of this block have sent once more.
__device__ __forceinline__ float swapped(const Place &me, float part, u32 &number, const Shared &shared) {
    const float *inbox = shared.inbox + (number % 2) * N + me.thread;
    u64 *barrier = shared.arrived + number % 2;
    send(part, inbox, barrier, 1 - me.block);  // the same place in the other block
    if (me.thread == 0) expect<4 * N>(barrier);
    await(barrier, (number - 1) / 2 % 2);
    ++number;
    return *static_cast<const volatile float *>(inbox);
}

// Both blocks' sums. Adding commutes, so both get the same bits.
__device__ __forceinline__ float over_blocks(const Place &me, float part, u32 &number, const Shared &shared) {
    return BLOCKS == 2 ? part + swapped(me, part, number, shared) : part;
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
            K[r][c] = power_of_two(z);
            if (!kept) K[r][c] = 0.0f;
        }
    }
}

// p_i q_j added to the terms of 8 x 8 entries, those of columns g and g + 1.
__device__ __forceinline__ void add(const Place &me, float (&terms)[R][8], const float *by_row, const float *by_column, int g) {
    float p[R], q[8];
    eight(p, by_row + me.rows());
    four(q, by_column + me.columns(g)), four(q + 4, by_column + me.columns(g + 1));
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int c = 0; c < 8; ++c) terms[r][c] = fmaf(p[r], q[c], terms[r][c]);
}

// entry(r, c) = dz of 8 x 8 entries summed over a warp's rows, as it is and times r_i - rho_j: to, or added to, both halves of `partial`.
template <bool MORE, typename Entry>
__device__ __forceinline__ void sum_entries(const Place &me, const Shared &shared, int g, Entry entry) {
    const int first = me.block * M + me.rows();
    float column[8], slope[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const float edges = shared.edges[me.columns(g + c / 4) + c % 4];
        column[c] = slope[c] = 0.0f;
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const float z = entry(r, c);
            column[c] += z;
            slope[c] = fmaf(edges - 2 * (first + r), z, slope[c]);
        }
    }
    over_rows<MORE>(me, column, g, shared.partial);
    over_rows<MORE>(me, slope, g, shared.partial + WARPS * N);
}

// The sums of dz over a warp's rows. The row sums of K dK are known, they are the adjoints left at the start: taken out first, so
// that nothing large cancels; what rounding left of them is taken out last.
__device__ __forceinline__ void logits_gradient(const Place &me, const Shared &shared, const float (&K)[R][4 * G], int done,
                                                float left) {
    float rest[R], p[R];
    to_rows(me, left, shared.left, p);
#pragma unroll
    for (int r = 0; r < R; ++r) rest[r] = 0.0f;
#pragma unroll
    for (int g = 0; g < G; g += 2) {
        float terms[R][8];
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int c = 0; c < 8; ++c) terms[r][c] = shared.left[me.rows() + r];
        add(me, terms, shared.by_row, shared.by_column, g);
#pragma unroll 1
        for (int t = 0; t < done; ++t) {  // what K was multiplied by, and the adjoint of the product: two products a round
            add(me, terms, shared.row_a + (t + TRANSPOSED) * M, shared.column_b + t * N, g);
            add(me, terms, shared.row_b + t * M, shared.column_a + (t + 1 - TRANSPOSED) * N, g);
        }
        sum_entries<false>(me, shared, g, [&](int r, int c) {
            const float z = K[r][4 * g + c] * -terms[r][c];
            rest[r] += z;
            return z;
        });
    }
    to_rows(me, over_lanes(me, rest), shared.left + M, p);
#pragma unroll
    for (int g = 0; g < G; g += 2) sum_entries<true>(me, shared, g, [&](int r, int c) { return K[r][4 * g + c] * -p[r]; });
}

// sum_k sign(s_j - s_k) x_k for the thread of column j: all lower scores less all higher ones. `sums` is [N + 1 + WARPS].
__device__ __forceinline__ float lower_less_higher(const Place &me, float x, int first, int last, int n, double *sums) {
    const double sum = until(x, sums + N + 1);
    if (me.thread == 0) sums[0] = 0.0;
    if (me.thread < N) sums[me.thread + 1] = sum;
    __syncthreads();
    return me.thread < n ? static_cast<float>(sums[n] - sums[last + 1] - sums[first]) : 0.0f;
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    neural_ndcg(float *work, float *gradient, float *loss, int lists, int L, int iters, float tol, float tau, int depth,
                int reduction) {
    extern __shared__ __align__(16) char memory[];
    Shared shared;
    shared.prefix = reinterpret_cast<double *>(memory);
    shared.arrived = reinterpret_cast<u64 *>(shared.prefix + 2 * (N + 1));
    shared.inbox = reinterpret_cast<float *>(shared.arrived + 2);
    shared.partial = shared.inbox + 2 * N;
    shared.by_warp = shared.partial + 2 * WARPS * N;
    shared.by_row = shared.by_warp + WARPS;
    shared.left = shared.by_row + M;
    shared.by_column = shared.left + 2 * M;
    shared.edges = shared.by_column + N;
    shared.row_a = shared.edges + N;
    shared.row_b = shared.row_a + (iters + 1) * M;
    shared.column_a = shared.row_b + iters * M;
    shared.column_b = shared.column_a + (iters + 1) * N;

    const int list = blockIdx.x / BLOCKS;
    int thread = threadIdx.x, block = blockIdx.x % BLOCKS;
    keep(thread), keep(block);
    const Place me = {thread, thread / 32, thread % 32, block};
    const Records records(work, L);
    float *record = records[list];
    const int n = *records.count(record);
    const bool real_i = me.rank() < n, real_j = thread < n;
    const int word = thread < L ? records.order(record)[thread] : 0;
    const int first = (word >> 8) & 255, last = (word >> 16) & 255;

    const float gain = real_j ? records.gains(record)[thread] : 0.0f;
    const float value_scale = record[VALUE_SCALE];
    float weight = 1.0f;
    if (reduction == MEAN) {  // how many lists count
        weight = 0.0f;
        for (int b = thread; b < lists; b += THREADS) weight += records[b][WEIGHT];
        weight = fmaxf(over_block(weight, shared.by_warp), 1.0f);
    }
    const float grad_scale = record[GRAD_SCALE] / (tau * weight);
    if (thread < N) shared.edges[thread] = first + last, shared.column_a[thread] = 1.0f;
    for (int at = thread; at < 2 * (N + 1); at += THREADS)
        shared.prefix[at] = records.prefix(record)[at] * (at <= N ? LOG2_E : -2.0 * LOG2_E);
    if (thread == 0 && BLOCKS == 2) make_barrier(shared.arrived), make_barrier(shared.arrived + 1);
    __syncthreads();
    float K[R][4 * G], p8[R], q16[4 * G];
    weights(me, shared.prefix, n, K);
#pragma unroll
    for (int c = 0; c < 4 * G; ++c) q16[c] = 1.0f;
    to_rows(me, inverse(row_sums(me, K, q16), real_i), shared.by_row, p8);
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int c = 0; c < 4 * G; ++c) K[r][c] *= p8[r];

    float p = real_i ? 1.0f : 0.0f, q = real_j ? 1.0f : 0.0f;
    to_rows(me, p, shared.row_a, p8);
    meet();  // the other block is there, and its barriers ready

    u32 number = 1;  // of the next exchange
    int done = 0;
    for (; done < iters; ++done) {
        float new_p = p, *next_p = shared.row_a + (done + 1) * M, *next_q = shared.column_a + (done + 1) * N;
        bool near = done > 0 && tol > 0.0f;
        if (TRANSPOSED) {
            const float sums = row_sums(me, K, q16);
            near = near && (!real_i || fabsf(p * sums - 1.0f) < tol);
            new_p = inverse(sums, real_i);
            to_rows(me, new_p, next_p, p8);
        }
        const float part = column_sums(me, K, p8, shared.partial);
        float sums;
        if (TRANSPOSED && BLOCKS == 2) {  // sums are not negative: the sign says what the block's rows say
            const float theirs = swapped(me, copysignf(part, near ? -1.0f : 1.0f), number, shared);
            near = near && signbit(theirs);
            sums = part + fabsf(theirs);
        } else {
            sums = over_blocks(me, part, number, shared);
            if (!TRANSPOSED) near = near && (!real_j || fabsf(q * sums - 1.0f) < tol);
        }
        const float new_q = inverse(sums, real_j);
        if (thread < N) next_q[thread] = new_q;
        if (__syncthreads_and(near)) break;
        from_columns(me, next_q, q16);
        q = new_q;
        if (!TRANSPOSED) {
            new_p = inverse(row_sums(me, K, q16), real_i);
            to_rows(me, new_p, next_p, p8);
        }
        p = new_p;
    }

    // the result is sum_ij r_i p_i K_ij q_j d_j; from here on adjoints of log p and log q
    const float r = real_i && me.rank() < depth ? -1.0f / log2f(me.rank() + 2.0f) : 0.0f;
    if (thread < N) shared.by_column[thread] = -q * gain;
    __syncthreads();
    from_columns(me, shared.by_column, q16);
    float p_bar = -r * p * row_sums(me, K, q16);
    const float part_value = over_block(p_bar, shared.by_warp) * 0.5f;
    to_rows(me, p * r, shared.by_row, p8);
    float q_bar = gain * q * over_blocks(me, column_sums(me, K, p8, shared.partial), number, shared);
    __syncthreads();  // `partial` is read
    for (int t = done - 1; t >= 0; --t) {
        float *row_b = shared.row_b + t * M, *column_b = shared.column_b + t * N;
        if (TRANSPOSED) {
            p = shared.row_a[(t + 1) * M + me.row()];
            if (thread < N) column_b[thread] = q * q_bar;
            __syncthreads();
            from_columns(me, column_b, q16);
            p_bar = p * (p_bar - p * row_sums(me, K, q16));
            to_rows(me, p_bar, row_b, p8);
            q = thread < N ? shared.column_a[t * N + thread] : 0.0f;
            q_bar = -q * over_blocks(me, column_sums(me, K, p8, shared.partial), number, shared);
            p_bar = 0.0f;
        } else {
            q = thread < N ? shared.column_a[(t + 1) * N + thread] : 0.0f;
            to_rows(me, p * p_bar, row_b, p8);
            q_bar = q * (q_bar - q * over_blocks(me, column_sums(me, K, p8, shared.partial), number, shared));
            if (thread < N) column_b[thread] = q_bar;
            __syncthreads();
            from_columns(me, column_b, q16);
            p = shared.row_a[t * M + me.row()];
            p_bar = -p * row_sums(me, K, q16);
            q_bar = 0.0f;
        }
    }
    const float value = over_blocks(me, part_value, number, shared);
    __syncthreads();  // every vector of every round is there

    logits_gradient(me, shared, K, done, p_bar);
    __syncthreads();
    const float by_column = over_blocks(me, over_warps(me, shared.partial), number, shared);
    float by_slope = over_blocks(me, over_warps(me, shared.partial + WARPS * N), number, shared);
    if (me.block == 0) {
        by_slope -= lower_less_higher(me, by_column, first, last, n, shared.prefix);
        if (thread == 0) record[VALUE] = value * value_scale;
        if (thread < L) gradient[static_cast<size_t>(list) * L + (word & 255)] = real_j ? by_slope * grad_scale : 0.0f;
    }
    meet();  // no block may end while the other still writes into it
    if (me.block != 0) return;
    if (reduction == NONE) {
        if (thread == 0) loss[list] = value * value_scale;
        return;
    }
    bool final = false;
    if (thread == 0) {
        __threadfence();
        final = atomicAdd(reinterpret_cast<int *>(work) + 1, 1) == lists - 1;
    }
    if (__syncthreads_or(final)) {  // the last block to finish adds the values of all lists, in their order
        __threadfence();
        float sum = 0.0f;
        for (int b = thread; b < lists; b += THREADS) sum += __ldcg(records[b] + VALUE);
        sum = over_block(sum, shared.by_warp);
        if (thread == 0) *loss = sum / weight;
    }
}
