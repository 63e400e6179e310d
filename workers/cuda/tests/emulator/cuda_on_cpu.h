// CUDA C as C++ on one CPU thread, for testing kernels without a device.
//
// The threads of a block are fibers (ucontext). Between two barriers they run one after the other
// in an order that is shuffled anew each time, so that a barrier that is missing shows as wrong
// numbers. Shared memory holds NaNs when a block begins. Blocks run in a shuffled order, too.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__
// One block runs at a time, so what it shares may be static; in a section of its own, so that it
// can be found.
#define __shared__ static __attribute__((section("fiec_shared")))

struct alignas(16) double2 { double x, y; };
struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;

static inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return std::sqrt(a); }
static inline long long __double_as_longlong(double v) { long long b; memcpy(&b, &v, 8); return b; }

namespace emulator {

struct Fiber {
    ucontext_t context;
    char* stack;
    bool done;
};

static const size_t STACK = 64 << 10;
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static unsigned current;
static uint64_t seed = 0x9e3779b97f4a7c15ull;
static void (*job)(void*);
static void* job_of;

static inline uint64_t random() {
    seed ^= seed << 13; seed ^= seed >> 7; seed ^= seed << 17;
    return seed;
}

static void shuffle(std::vector<unsigned>& order) {
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random() % i]);
}

static void enter() {
    job(job_of);
    fibers[current].done = true;
    swapcontext(&fibers[current].context, &scheduler);
}

static void barrier() { swapcontext(&fibers[current].context, &scheduler); }

// Runs a block to its end. False: some threads left while others waited at a barrier.
static bool run_block(unsigned threads) {
    while (fibers.size() < threads) {
        Fiber fiber;
        fiber.stack = (char*)malloc(STACK);
        fibers.push_back(fiber);
    }
    std::vector<unsigned> order(threads);
    for (unsigned t = 0; t < threads; t++) {
        order[t] = t;
        Fiber& fiber = fibers[t];
        fiber.done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, enter, 0);
    }
    for (;;) {
        unsigned done = 0;
        shuffle(order);
        for (unsigned t : order) {
            current = t;
            threadIdx = {t, 0, 0};
            swapcontext(&scheduler, &fibers[t].context);
            done += fibers[t].done;
        }
        if (done == threads) return true;
        if (done != 0) return false;
    }
}

template <class... A, size_t... I>
static void call(void (*f)(A...), void** p, std::index_sequence<I...>) {
    f(*(std::remove_const_t<A>*)p[I]...);
}

// A kernel with its arguments as a launch gives them.
template <class... A> struct Kernel {
    static void run(void* f, void** p) {
        call((void (*)(A...))f, p, std::index_sequence_for<A...>{});
    }
};
struct Entry {
    const char* name;
    void* function;
    void (*run)(void*, void**);
    unsigned parameters;
};
template <class... A> static Entry entry(const char* name, void (*f)(A...)) {
    return Entry{name, (void*)f, &Kernel<A...>::run, sizeof...(A)};
}

static void poison_shared();

static bool launch(const Entry& kernel, Index grid, Index block, void** arguments) {
    struct Call { const Entry* kernel; void** arguments; } one = {&kernel, arguments};
    job = [](void* of) {
        Call* call = (Call*)of;
        call->kernel->run(call->kernel->function, call->arguments);
    };
    job_of = &one;
    gridDim = grid;
    blockDim = block;
    std::vector<unsigned> order(size_t(grid.x) * grid.y * grid.z);
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    shuffle(order);
    for (unsigned at : order) {
        blockIdx = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y};
        poison_shared();
        if (!run_block(block.x)) return false;
    }
    return true;
}

}  // namespace emulator

static inline void __syncthreads() { emulator::barrier(); }
