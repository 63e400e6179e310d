// The few functions of cuSOLVER that fiec-cuda calls, on the host's memory: unblocked and plain.
#include <cmath>
#include <cstddef>
#include <dlfcn.h>
#include <utility>

static void handles(int change) {
    static auto count = (void (*)(int))dlsym(dlopen("libcuda.so", RTLD_NOW), "fiec_emulator_handles");
    if (count) count(change);
}

extern "C" {
int cusolverDnCreate(void** handle) { static char it; *handle = &it; handles(1); return 0; }
int cusolverDnDestroy(void*) { handles(-1); return 0; }
int cusolverDnSetStream(void*, void*) { return 0; }
int cusolverDnSetDeterministicMode(void*, int mode) { return mode == 1 ? 0 : 3; }
int cusolverDnDgetrf_bufferSize(void*, int m, int n, double*, int, int* words) {
    *words = m + n;
    return 0;
}
int cusolverDnDgetrf(void*, int m, int n, double* a, int lda, double* work, int* pivots, int* info) {
    *info = 0;
    work[m + n - 1] = 0;
    for (int j = 0; j < n; j++) {
        int best = j;
        for (int i = j; i < m; i++)
            if (std::fabs(a[i + (size_t)j * lda]) > std::fabs(a[best + (size_t)j * lda])) best = i;
        pivots[j] = best + 1;
        if (a[best + (size_t)j * lda] == 0) {
            if (!*info) *info = j + 1;
            continue;
        }
        for (int p = 0; p < n; p++)
            std::swap(a[j + (size_t)p * lda], a[best + (size_t)p * lda]);
        for (int i = j + 1; i < m; i++) {
            double l = a[i + (size_t)j * lda] /= a[j + (size_t)j * lda];
            for (int p = j + 1; p < n; p++)
                a[i + (size_t)p * lda] -= l * a[j + (size_t)p * lda];
        }
    }
    return 0;
}
int cusolverDnDgeqrf_bufferSize(void*, int m, int, double*, int, int* words) {
    *words = m;
    return 0;
}
int cusolverDnDgeqrf(void*, int m, int n, double* a, int lda, double* tau, double* work, int words,
                     int* info) {
    if (words < m) return 3;
    *info = 0;
    work[words - 1] = 0;
    for (int j = 0; j < n; j++) {
        double* x = &a[j + (size_t)j * lda];
        double rest = 0;
        for (int i = 1; i < m - j; i++) rest += x[i] * x[i];
        tau[j] = 0;
        if (rest == 0) continue;
        double beta = -std::copysign(std::sqrt(x[0] * x[0] + rest), x[0]);
        tau[j] = (beta - x[0]) / beta;
        for (int i = 1; i < m - j; i++) x[i] /= x[0] - beta;
        x[0] = beta;
        for (int p = j + 1; p < n; p++) {
            double* c = &a[j + (size_t)p * lda];
            double share = c[0];
            for (int i = 1; i < m - j; i++) share += x[i] * c[i];
            share *= tau[j];
            c[0] -= share;
            for (int i = 1; i < m - j; i++) c[i] -= share * x[i];
        }
    }
    return 0;
}
}
