// The few functions of cuBLAS that fiec-cuda calls, on the host's memory, in another order than ours:
// from the end of the inner dimension to its beginning, without fused operations.
#include <cstddef>
#include <dlfcn.h>

static void handles(int change) {
    static auto count = (void (*)(int))dlsym(dlopen("libcuda.so", RTLD_NOW), "fiec_emulator_handles");
    if (count) count(change);
}

extern "C" {
int cublasCreate_v2(void** handle) { static char it; *handle = &it; handles(1); return 0; }
int cublasDestroy_v2(void*) { handles(-1); return 0; }
int cublasSetStream_v2(void*, void*) { return 0; }
int cublasSetWorkspace_v2(void*, void* at, size_t bytes) { return at && bytes ? 0 : 7; }
int cublasDgemm_v2(void*, int turned_a, int turned_b, int m, int n, int k, const double* alpha,
                   const double* a, int lda, const double* b, int ldb, const double* beta, double* c,
                   int ldc) {
    if (turned_b || lda < (turned_a ? k : m) || ldb < k || ldc < m) return 7;
    for (int j = 0; j < n; j++)
        for (int i = 0; i < m; i++) {
            double sum = 0;
            for (int p = k - 1; p >= 0; p--)
                sum += (turned_a ? a[p + (size_t)i * lda] : a[i + (size_t)p * lda]) *
                       b[p + (size_t)j * ldb];
            double* to = &c[i + (size_t)j * ldc];
            *to = *beta == 0 ? *alpha * sum : *alpha * sum + *beta * *to;
        }
    return 0;
}
int cublasDtrsm_v2(void*, int side, int half, int turned, int unit, int m, int n, const double* alpha,
                   const double* a, int lda, double* x, int ldx) {
    if (side != 0 || half != 0 || turned != 0 || unit != 1 || *alpha != 1.0) return 7;
    for (int j = 0; j < n; j++)
        for (int i = 0; i < m; i++)
            for (int p = i - 1; p >= 0; p--)
                x[i + (size_t)j * ldx] -= a[i + (size_t)p * lda] * x[p + (size_t)j * ldx];
    return 0;
}
}
