// The first launch for lists of up to N documents: a block sorts a list and writes its record. The twin of
// `rankgrad.kernels.neural_ndcg.short.sort`: padding may be anywhere and hold anything, ties keep the input order, gains and the ideal DCG are float64 until stored.

constexpr double WIDEST_GAP = 128.0;
constexpr long long LOWEST = -0x7fffffffffffffffll - 1;

enum Kind { FLOAT, DOUBLE, BFLOAT, HALF, LONG, INT, SHORT, CHAR, BYTE };
enum Gain { EXP2, LINEAR, GIVEN };

__device__ double number_at(const void *numbers, int kind, size_t at) {
    switch (kind) {
        case FLOAT: return static_cast<const float *>(numbers)[at];
        case DOUBLE: return static_cast<const double *>(numbers)[at];
        case BFLOAT: return __uint_as_float(static_cast<u32>(static_cast<const unsigned short *>(numbers)[at]) << 16);
        case HALF: return from_half(static_cast<const unsigned short *>(numbers)[at]);
        case LONG: return static_cast<double>(static_cast<const long long *>(numbers)[at]);
        case INT: return static_cast<const int *>(numbers)[at];
        case SHORT: return static_cast<const short *>(numbers)[at];
        case CHAR: return static_cast<const signed char *>(numbers)[at];
        default: return static_cast<const unsigned char *>(numbers)[at];
    }
}

// Two keys of each thread sorted at once, descending: thread r gets the r-th. Bitonic: neighbours by shuffles, others through memory.
__device__ void sort(long long &one, long long &two, long long *exchange) {
    const int i = threadIdx.x;
    for (int size = 2; size <= THREADS; size *= 2)
        for (int away = size / 2; away; away /= 2) {
            long long other_one, other_two;
            if (away < 32) {
                other_one = __shfl_xor_sync(ALL, one, away), other_two = __shfl_xor_sync(ALL, two, away);
            } else {
                __syncthreads();
                exchange[i] = one, exchange[THREADS + i] = two;
                __syncthreads();
                other_one = exchange[i ^ away], other_two = exchange[THREADS + (i ^ away)];
            }
            const bool larger = ((i & size) == 0) == ((i & away) == 0);
            one = larger == (other_one > one) ? other_one : one;
            two = larger == (other_two > two) ? other_two : two;
        }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sort_lists(const void *scores, int score_kind, const void *labels, int label_kind, const unsigned char *mask,
               const double *given, float *work, int L, float tau, int depth, int gain_kind) {
    __shared__ long long exchange[2 * THREADS];
    __shared__ double gains[THREADS], by_warp[WARPS];
    __shared__ float ordered[THREADS + 1];
    __shared__ u32 ends[WARPS];
    const int i = threadIdx.x, list = blockIdx.x;
    const Records records(work, L);
    float *record = records[list];
    const size_t at = static_cast<size_t>(list) * L + i;

    bool real = i < L && (!mask || mask[at]);
    float s = real ? static_cast<float>(number_at(scores, score_kind, at)) : 0.0f;
    double y = real ? number_at(labels, label_kind, at) : 0.0;
    const bool good = fabsf(s) < __int_as_float(0x7f800000) && y >= 0.0 && y < __longlong_as_double(0x7ff0000000000000ll);
    const bool bad = real && !good;  // NaN fails every comparison
    if (bad) s = 0.0f, y = 0.0;
    double gain = gain_kind == EXP2 ? exp2(y) - 1.0 : y;
    if (gain_kind == GIVEN) gain = i < L ? given[at] : 0.0;
    if (!real) gain = 0.0;
    gains[i] = gain;

    // whole numbers that grow towards the top of the list; -0 becomes 0, and gains equal to 13 digits count as equal
    const int bits = __float_as_int(s + 0.0f);
    const long long place = real ? bits ^ ((bits >> 31) & 0x7fffffff) : -0x7fffffffll - 1;
    const double worth = gain_kind == GIVEN ? gain : y;
    long long by_score = i < L ? place * (1ll << 32) | (255 - i) : LOWEST;
    long long by_gain = i < L ? (real ? __double_as_longlong(worth + 0.0) & ~255ll : 0) | (255 - i) : LOWEST;
    sort(by_score, by_gain, exchange);

    const int n = __syncthreads_count(real);
    const bool relevant = __syncthreads_or(real && y > 0.0), valid = !__syncthreads_or(bad);
    const bool counts = i < depth && i < L;
    const double ideal = over_block(counts ? gains[255 - static_cast<int>(by_gain & 255)] / log2(i + 2.0) : 0.0, by_warp);
    const bool informative = n >= 2 && relevant && !(ideal <= 0.0);  // a NaN is not hidden
    const int document = 255 - static_cast<int>(by_score & 255);
    if (i < L) records.gains(record)[i] = informative ? static_cast<float>(gains[document] / ideal) : 0.0f;

    const int high = static_cast<int>(by_score >> 32);
    const float now = __int_as_float(high ^ ((high >> 31) & 0x7fffffff));  // this rank's score
    ordered[i] = i < n ? now : 0.0f;
    __syncthreads();
    const bool inner = i + 1 < n;
    const float after = inner ? ordered[i + 1] : 0.0f;
    double gap = inner ? (static_cast<double>(now) - after) / tau : 0.0;
    gap = fmin(fmax(gap, 0.0), WIDEST_GAP);
    double *prefix = records.prefix(record);
    const double a = until(gap, by_warp);
    const double w = until(gap * i, by_warp);
    if (i == 0) prefix[0] = prefix[N + 1] = 0.0;
    if (i < N) prefix[i + 1] = a, prefix[N + 2 + i] = w;

    // a bit for each rank that ends a group of equal scores
    const u32 mine = __ballot_sync(ALL, !inner || now > after);
    if (i % 32 == 0) ends[i / 32] = mine;
    __syncthreads();
    int warp = i / 32, last, first = 0;
    u32 found = ends[warp] >> (i % 32) << (i % 32);
    while (!found) found = ends[++warp];
    last = warp * 32 + __ffs(found) - 1;
    for (warp = i / 32, found = ends[warp] & ((1u << (i % 32)) - 1); !found && warp; found = ends[--warp]) {}
    if (found) first = warp * 32 + 32 - __clz(found);
    if (i < L) records.order(record)[i] = document | first << 8 | last << 16;

    if (i == 0) {
        const float one = informative ? 1.0f : 0.0f, nan = __int_as_float(0x7fc00000);
        *records.count(record) = n;
        record[VALUE_SCALE] = valid ? one : nan;
        record[GRAD_SCALE] = valid || !informative ? one : nan;
        record[WEIGHT] = valid ? one : 1.0f;
        if (list == 0) reinterpret_cast<int *>(work)[0] = reinterpret_cast<int *>(work)[1] = 0;
    }
}
