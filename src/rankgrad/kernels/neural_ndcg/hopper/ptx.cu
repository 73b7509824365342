// The instructions that have no name in CUDA C++, put before the kernels that use them. `tests/cuda_on_cpu.cpp` has the same functions
// for a CPU, so that the kernels can be tested without a GPU: nothing else in them may be assembly.

typedef unsigned int u32;
typedef unsigned long long u64;

// 1 / x, right to one unit in the last place.
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 2^x, right to two units in the last place; 0 where it would be subnormal.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float from_half(unsigned short x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

// A number to be kept in a register, not to be asked for again.
__device__ __forceinline__ void keep(int &x) { asm volatile("" : "+r"(x)); }

__device__ __forceinline__ u32 shared_address(const void *at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

__device__ __forceinline__ u32 in_block(u32 block, u32 address) {
    u32 theirs;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(address), "r"(block));
    return theirs;
}

// A barrier in shared memory for one thread and the bytes that it expects, once the cluster has met.
__device__ __forceinline__ void make_barrier(u64 *barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)));
    asm volatile("fence.mbarrier_init.release.cluster;");
}

// Store x in the shared memory of another block of the cluster, and count its bytes there when it has arrived.
__device__ __forceinline__ void send(float x, const float *to, const u64 *barrier, u32 block) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                     in_block(block, shared_address(to))),
                 "r"(__float_as_uint(x)), "r"(in_block(block, shared_address(barrier)))
                 : "memory");
}

template <int BYTES> __device__ __forceinline__ void expect(u64 *barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "n"(BYTES) : "memory");
}

// Wait until all that is expected has arrived, for the phase-th time modulo two.
__device__ __forceinline__ void await(const u64 *barrier, u32 phase) {
    u32 there;
    do {
        asm volatile(
            "{\n\t.reg .pred p;\n\t"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
            "selp.u32 %0, 1, 0, p;\n\t}"
            : "=r"(there)
            : "r"(shared_address(barrier)), "r"(phase)
            : "memory");
    } while (!there);
}

// Wait for all threads of the cluster.
__device__ __forceinline__ void meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
