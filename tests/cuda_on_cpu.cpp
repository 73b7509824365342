// CUDA C++ on a CPU, for tests. Stands in for kernels/ptx.cu and the compiler's own functions; the kernel's sources follow.
//
// Every thread of a cluster is a fiber that runs until it has to wait. Who goes on after a wait, and when a number sent to another
// block arrives, is drawn at random, and one warp lags behind the others as far as it can: a missing barrier shows in the results.
// A wait without end is reported.

#include <math.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __cluster_dims__(...)
#define __launch_bounds__(...)

typedef unsigned int u32;
typedef unsigned long long u64;
using std::max;

struct float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Index {
    int x;
};
static Index threadIdx, blockIdx;

// Fibers and what they wait for

struct Gate {  // lets all through when `expected` have come
    int expected = 0, come = 0, passed = 0;
    std::vector<struct Fiber *> waiting;
    int votes[2] = {0, 0};     // of even and odd passes
    u64 numbers[2][32] = {};  // likewise, by lane
};

struct Block {
    Gate gate;
    std::vector<Gate> warps;
    std::vector<double> memory;
};

struct Fiber {
    ucontext_t context;
    Index thread, block;
    Block *home;
    bool done = false, lags = false;
};

struct Barrier {
    int pending = 1, phase = 0;
    long bytes = 0;
    std::vector<Fiber *> waiting;
};

struct Letter {
    float x, *to;
    Barrier *barrier;
};

static ucontext_t scheduler;
static std::vector<Fiber *> ready;
static std::vector<Letter> letters;
static std::map<const void *, Barrier> barriers;
static std::vector<Block> blocks;
static Gate cluster;
static Fiber *current;
static std::mt19937 dice;

static void wake(std::vector<Fiber *> &waiting) {
    ready.insert(ready.end(), waiting.begin(), waiting.end());
    waiting.clear();
}

static void yield() { swapcontext(&current->context, &scheduler); }

static void pass(Gate &gate) {
    gate.waiting.push_back(current);
    if (++gate.come == gate.expected) {
        gate.come = 0;
        gate.votes[++gate.passed % 2] = 0;
        wake(gate.waiting);
    }
    yield();
}

static void complete(Barrier &barrier) {
    if (barrier.pending || barrier.bytes) return;
    ++barrier.phase, barrier.pending = 1;
    wake(barrier.waiting);
}

// Functions of CUDA C++

inline void __syncthreads() { pass(current->home->gate); }
inline int __syncthreads_count(bool yes) {
    Gate &gate = current->home->gate;
    int &votes = gate.votes[gate.passed % 2];
    votes += yes;
    pass(gate);
    return votes;
}
inline bool __syncthreads_and(bool yes) { return __syncthreads_count(yes) == current->home->gate.expected; }
inline bool __syncthreads_or(bool yes) { return __syncthreads_count(yes) > 0; }

inline Gate &warp() { return current->home->warps[current->thread.x / 32]; }
inline void __syncwarp() { pass(warp()); }
static u64 *told(u64 number) {  // what all lanes tell
    Gate &gate = warp();
    u64 *numbers = gate.numbers[gate.passed % 2];
    numbers[current->thread.x % 32] = number;
    pass(gate);
    return numbers;
}
template <typename To, typename From> To as(From x) {
    To y = {};
    memcpy(&y, &x, std::min(sizeof x, sizeof y));
    return y;
}
template <typename Number> Number __shfl_xor_sync(u32, Number x, int away) {
    return as<Number>(told(as<u64>(x))[current->thread.x % 32 ^ away]);
}
template <typename Number> Number __shfl_up_sync(u32, Number x, int away) {
    return as<Number>(told(as<u64>(x))[max(current->thread.x % 32 - away, 0)]);
}
inline u32 __ballot_sync(u32, bool yes) {
    const u64 *numbers = told(yes);
    u32 bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= static_cast<u32>(numbers[lane]) << lane;
    return bits;
}
inline int __ffs(u32 x) { return __builtin_ffs(x); }
inline int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
inline u32 __float_as_uint(float x) { return as<u32>(x); }
inline float __uint_as_float(u32 x) { return as<float>(x); }
inline int __float_as_int(float x) { return as<int>(x); }
inline float __int_as_float(int x) { return as<float>(x); }
inline long long __double_as_longlong(double x) { return as<long long>(x); }
inline double __longlong_as_double(long long x) { return as<double>(x); }
inline float __ldcg(const float *at) { return *at; }
inline void __threadfence() {}
inline int atomicAdd(int *at, int x) { return (*at += x) - x; }

// kernels/ptx.cu

inline float reciprocal(float x) { return 1.0f / x; }
inline float power_of_two(float x) { return exp2f(x); }
inline float from_half(unsigned short x) { return as<_Float16>(x); }
inline void keep(int &) {}
inline void make_barrier(u64 *barrier) { barriers[barrier] = Barrier(); }
static void *in_block(u32 block, const void *at) {
    char *mine = reinterpret_cast<char *>(current->home->memory.data());
    return reinterpret_cast<char *>(blocks[block].memory.data()) + (static_cast<const char *>(at) - mine);
}
inline void send(float x, const float *to, const u64 *barrier, u32 block) {
    letters.push_back({x, static_cast<float *>(in_block(block, to)), &barriers.at(in_block(block, barrier))});
}
template <int BYTES> void expect(u64 *barrier) {
    Barrier &here = barriers.at(barrier);
    here.bytes += BYTES, --here.pending;
    complete(here);
}
inline void await(const u64 *barrier, u32 phase) {
    Barrier &here = barriers.at(barrier);
    while (here.phase % 2 == static_cast<int>(phase)) here.waiting.push_back(current), yield();
}
inline void meet() { pass(cluster); }

// Launches: LISTS of ... -> CLUSTER blocks at a time, KERNEL with its arguments

static void (*body)();
static void run_fiber() {
    body();
    current->done = true;
    yield();
}

template <typename... Types, size_t... At>
static void call(void (*kernel)(Types...), void **arguments, std::index_sequence<At...>) {
    kernel(*static_cast<std::remove_const_t<Types> *>(arguments[At])...);
}
template <typename... Types> static void call(void (*kernel)(Types...), void **arguments) {
    call(kernel, arguments, std::index_sequence_for<Types...>());
}
static void **given;
static void call_kernel();

template <typename Thing> static Thing taken(std::vector<Thing> &from) {
    std::swap(from[dice() % from.size()], from.back());
    Thing thing = from.back();
    from.pop_back();
    return thing;
}

// 0, or 1 if all threads wait for each other.
extern "C" int launch(int grid, int threads, int shared, void **arguments, unsigned seed) {
    constexpr size_t STACK = 1 << 17;
    static std::vector<char> stacks;
    stacks.resize(STACK * threads * CLUSTER);
    dice.seed(seed), given = arguments, body = call_kernel;
    for (int first = 0; first < grid; first += CLUSTER) {
        blocks.assign(CLUSTER, Block());
        barriers.clear(), letters.clear(), ready.clear();
        cluster = Gate(), cluster.expected = CLUSTER * threads;
        std::vector<Fiber> fibers(CLUSTER * threads);
        for (int b = 0; b < CLUSTER; ++b) {
            blocks[b].gate.expected = threads;
            blocks[b].warps.resize(threads / 32);
            for (Gate &gate : blocks[b].warps) gate.expected = 32;
            blocks[b].memory.assign(shared / 8 + 1, NAN);
            for (int t = 0; t < threads; ++t) {
                Fiber &fiber = fibers[b * threads + t];
                fiber.thread = {t}, fiber.block = {first + b}, fiber.home = &blocks[b];
                getcontext(&fiber.context);
                fiber.context.uc_stack.ss_sp = stacks.data() + STACK * (b * threads + t);
                fiber.context.uc_stack.ss_size = STACK;
                makecontext(&fiber.context, run_fiber, 0);
                ready.push_back(&fiber);
            }
        }
        const int slow = dice() % (fibers.size() / 32);
        for (int t = 32 * slow; t < 32 * slow + 32; ++t) fibers[t].lags = true;
        while (!ready.empty() || !letters.empty()) {
            if (ready.empty() || (!letters.empty() && dice() % 4 == 0)) {
                const Letter letter = taken(letters);
                *letter.to = letter.x;
                letter.barrier->bytes -= sizeof letter.x;
                complete(*letter.barrier);
                continue;
            }
            current = taken(ready);
            for (int tries = 0; current->lags && !ready.empty() && tries < 64; ++tries) {
                Fiber *other = taken(ready);
                std::swap(current, other);
                ready.push_back(other);
            }
            threadIdx = current->thread, blockIdx = current->block;
            swapcontext(&scheduler, &current->context);
        }
        for (const Fiber &fiber : fibers)
            if (!fiber.done) return 1;
    }
    return 0;
}
