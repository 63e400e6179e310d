// The kernels of fiec-cuda: the order of operations of fiec-kernels, element by element.
//
// Everything that decides bits is written out: products and sums are __fma_rn, __dadd_rn,
// __dsub_rn, __dmul_rn, __ddiv_rn and __dsqrt_rn, one rounding each, so that no compiler fuses or
// splits anything. Matrices lie by columns; indices of elements are 64 bits wide.
//
// The same text is compiled as C++ and run on a CPU by the tests (tests/emulator); it uses nothing
// but threadIdx, blockIdx, gridDim, __shared__ and __syncthreads.

typedef unsigned long long u64;
typedef unsigned int u32;

// ---- C = A·B, C + A·B, C − A·B in the order chain512 (fiec_kernels::dense::gemm) ----
//
// A block of 256 threads makes 128 × 64 elements, each thread 8 × 4 of them: the pairs of rows
// 2x, 2x + 1 of each 32, for x = t mod 16, and of columns 2y, 2y + 1 of each 32, for y = t / 16.
// Each element is one chain, ascending in the inner dimension, begun anew every 512. m, n and k are
// at least 1 and, as the strides, at most 2³¹; products of two of them are made of 64 bits.

#define GEMM_ROWS 128
#define GEMM_COLS 64
#define GEMM_STEP 8
#define GEMM_DEPTH 512
#define GEMM_REPLACE 0
#define GEMM_ADD 1
#define GEMM_SUBTRACT 2

// Two more than needed: an even number, so that pairs stay aligned, which spreads the banks.
#define GEMM_ROWS_HELD (GEMM_ROWS + 2)
#define GEMM_COLS_HELD (GEMM_COLS + 2)

// What a thread fetches of the next step: 4 elements of A and 2 of B, zero beyond the border.
template <int TRANSPOSED>
__device__ __forceinline__ void gemm_fetch(
    u32 t, u32 row, u32 col, u32 m, u32 n, u32 from, u32 to,
    const double* __restrict__ a, u32 lda, const double* __restrict__ b, u32 ldb,
    double* next_a, double* next_b)
{
#pragma unroll
    for (int s = 0; s < 4; s++) {
        // Neighbouring threads read neighbouring addresses: down a column of what is stored.
        const u32 i = TRANSPOSED ? row + t / 8 + 32 * s : row + t % 128;
        const u32 p = TRANSPOSED ? from + t % 8 : from + t / 128 + 2 * s;
        double value = 0.0;
        if (i < m && p < to) value = TRANSPOSED ? a[p + (u64)i * lda] : a[i + (u64)p * lda];
        next_a[s] = value;
    }
#pragma unroll
    for (int s = 0; s < 2; s++) {
        const u32 p = from + t % 8, j = col + t / 8 + 32 * s;
        double value = 0.0;
        if (p < to && j < n) value = b[p + (u64)j * ldb];
        next_b[s] = value;
    }
}

template <int TRANSPOSED>
__device__ __forceinline__ void gemm_put(
    u32 t, const double* next_a, const double* next_b,
    double (*held_a)[GEMM_ROWS_HELD], double (*held_b)[GEMM_COLS_HELD])
{
#pragma unroll
    for (int s = 0; s < 4; s++) {
        if (TRANSPOSED) held_a[t % 8][t / 8 + 32 * s] = next_a[s];
        else held_a[t / 128 + 2 * s][t % 128] = next_a[s];
    }
#pragma unroll
    for (int s = 0; s < 2; s++) held_b[t % 8][t / 8 + 32 * s] = next_b[s];
}

// One step of the inner dimension for the 8 × 4 elements of a thread.
__device__ __forceinline__ void gemm_multiply(
    const double* held_a, const double* held_b, u32 x, u32 y, double (*acc)[4])
{
    double2 av[4], bv[2];
#pragma unroll
    for (int r = 0; r < 4; r++) av[r] = *(const double2*)&held_a[2 * x + 32 * r];
#pragma unroll
    for (int q = 0; q < 2; q++) bv[q] = *(const double2*)&held_b[2 * y + 32 * q];
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int q = 0; q < 2; q++) {
            acc[2 * r][2 * q] = __fma_rn(av[r].x, bv[q].x, acc[2 * r][2 * q]);
            acc[2 * r + 1][2 * q] = __fma_rn(av[r].y, bv[q].x, acc[2 * r + 1][2 * q]);
            acc[2 * r][2 * q + 1] = __fma_rn(av[r].x, bv[q].y, acc[2 * r][2 * q + 1]);
            acc[2 * r + 1][2 * q + 1] = __fma_rn(av[r].y, bv[q].y, acc[2 * r + 1][2 * q + 1]);
        }
}

// Blocks `first` to below `last` of 512 of the inner dimension. `c` takes them in one after the
// other; or, with `apart`, block s is left in apart + s·m·n, by columns of m.
template <int TRANSPOSED>
__device__ __forceinline__ void gemm_body(
    u32 m, u32 n, u32 k, const double* __restrict__ a, u32 lda,
    const double* __restrict__ b, u32 ldb, int into, double* __restrict__ c, u32 ldc,
    u32 first, u32 last, double* __restrict__ apart)
{
    __shared__ __align__(16) double held_a[2][GEMM_STEP][GEMM_ROWS_HELD];
    __shared__ __align__(16) double held_b[2][GEMM_STEP][GEMM_COLS_HELD];
    const u32 t = threadIdx.x, x = t % 16, y = t / 16;
    const u32 row = blockIdx.x * GEMM_ROWS, col = blockIdx.y * GEMM_COLS;
    double acc[8][4], next_a[4], next_b[2];
    for (u32 block = first; block < last; block++) {
        const u32 from = block * GEMM_DEPTH;
        const u32 to = k - from > GEMM_DEPTH ? from + GEMM_DEPTH : k;
#pragma unroll
        for (int r = 0; r < 8; r++)
#pragma unroll
            for (int q = 0; q < 4; q++) acc[r][q] = 0.0;
        gemm_fetch<TRANSPOSED>(t, row, col, m, n, from, to, a, lda, b, ldb, next_a, next_b);
        // Whichever half the block before ended with: nobody reads it any more.
        __syncthreads();
        gemm_put<TRANSPOSED>(t, next_a, next_b, held_a[0], held_b[0]);
        __syncthreads();
        int half = 0;
        for (u32 at = from; at < to; at += GEMM_STEP) {
            const bool more = at + GEMM_STEP < to;
            if (more)
                gemm_fetch<TRANSPOSED>(t, row, col, m, n, at + GEMM_STEP, to, a, lda, b, ldb,
                                       next_a, next_b);
            // What lies beyond the end is left out, not multiplied as zero: fma(0, 0, −0) is +0.
            if (to - at >= GEMM_STEP) {
#pragma unroll 2
                for (int p = 0; p < GEMM_STEP; p++)
                    gemm_multiply(held_a[half][p], held_b[half][p], x, y, acc);
            } else {
#pragma unroll 1
                for (int p = 0; p < (int)(to - at); p++)
                    gemm_multiply(held_a[half][p], held_b[half][p], x, y, acc);
            }
            if (more) {
                // Nobody reads that half: all have passed the barrier behind its last use.
                gemm_put<TRANSPOSED>(t, next_a, next_b, held_a[1 - half], held_b[1 - half]);
                __syncthreads();
                half = 1 - half;
            }
        }
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const u32 j = col + 2 * y + 32 * (q / 2) + q % 2;
#pragma unroll
            for (int r = 0; r < 8; r++) {
                const u32 i = row + 2 * x + 32 * (r / 2) + r % 2;
                if (i < m && j < n) {
                    if (apart) {
                        apart[((u64)block * n + j) * m + i] = acc[r][q];
                    } else {
                        double* at = &c[i + (u64)j * ldc];
                        if (into == GEMM_SUBTRACT) *at = __dsub_rn(*at, acc[r][q]);
                        else if (into == GEMM_ADD || block > 0) *at = __dadd_rn(*at, acc[r][q]);
                        else *at = acc[r][q];
                    }
                }
            }
        }
    }
}

// One block of threads for each 128 × 64 of C; all of the inner dimension.
extern "C" __global__ __launch_bounds__(256, 2) void fiec_gemm(
    u32 m, u32 n, u32 k, const double* a, u32 lda, const double* b, u32 ldb,
    int into, double* c, u32 ldc)
{
    gemm_body<0>(m, n, k, a, lda, b, ldb, into, c, ldc, 0,
                 (k - 1) / GEMM_DEPTH + 1, 0);
}

extern "C" __global__ __launch_bounds__(256, 2) void fiec_gemm_t(
    u32 m, u32 n, u32 k, const double* a, u32 lda, const double* b, u32 ldb,
    int into, double* c, u32 ldc)
{
    gemm_body<1>(m, n, k, a, lda, b, ldb, into, c, ldc, 0,
                 (k - 1) / GEMM_DEPTH + 1, 0);
}

// For small C and long chains: the blocks of 512 side by side (blockIdx.z), each left apart, to be
// taken in by fiec_gemm_take in their order.
extern "C" __global__ __launch_bounds__(256, 2) void fiec_gemm_apart(
    u32 m, u32 n, u32 k, const double* a, u32 lda, const double* b, u32 ldb, double* apart)
{
    gemm_body<0>(m, n, k, a, lda, b, ldb, GEMM_REPLACE, 0, 0, blockIdx.z, blockIdx.z + 1,
                 apart);
}

extern "C" __global__ __launch_bounds__(256, 2) void fiec_gemm_t_apart(
    u32 m, u32 n, u32 k, const double* a, u32 lda, const double* b, u32 ldb, double* apart)
{
    gemm_body<1>(m, n, k, a, lda, b, ldb, GEMM_REPLACE, 0, 0, blockIdx.z, blockIdx.z + 1,
                 apart);
}

// One thread an element of C.
extern "C" __global__ void fiec_gemm_take(
    u64 m, u64 n, u64 blocks, const double* apart, int into, double* c, u64 ldc)
{
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= m * n) return;
    double* to = &c[at % m + at / m * ldc];
    double value = *to;
    for (u64 s = 0; s < blocks; s++) {
        const double acc = apart[s * m * n + at];
        if (into == GEMM_SUBTRACT) value = __dsub_rn(value, acc);
        else if (into == GEMM_ADD || s > 0) value = __dadd_rn(value, acc);
        else value = acc;
    }
    *to = value;
}

// ---- X ← L⁻¹·X for at most 16 rows (the leaf of fiec_kernels::dense::triangular) ----
//
// One thread a column of X. The products with the zeros on and above the diagonal, and with rows
// that do not exist, are made as the CPU makes them: fma(0, x, −0) may be +0.

#define SOLVE_LEAF 16

extern "C" __global__ __launch_bounds__(128) void fiec_solve_leaf(
    u32 rows, u64 cols, const double* l, u64 ldl, double* x, u64 ldx)
{
    __shared__ double negated[SOLVE_LEAF][SOLVE_LEAF];
    for (u32 e = threadIdx.x; e < SOLVE_LEAF * SOLVE_LEAF; e += blockDim.x) {
        const u32 i = e % SOLVE_LEAF, j = e / SOLVE_LEAF;
        negated[j][i] = i > j && i < rows ? -l[i + j * ldl] : 0.0;
    }
    __syncthreads();
    const u64 col = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= cols) return;
    double* column = x + col * ldx;
    double held[SOLVE_LEAF];
#pragma unroll
    for (u32 i = 0; i < SOLVE_LEAF; i++) held[i] = i < rows ? column[i] : 0.0;
#pragma unroll
    for (int j = 0; j < SOLVE_LEAF; j++) {
        const double xj = held[j];
#pragma unroll
        for (u32 i = 0; i < SOLVE_LEAF; i++) held[i] = __fma_rn(negated[j][i], xj, held[i]);
    }
#pragma unroll
    for (u32 i = 0; i < SOLVE_LEAF; i++)
        if (i < rows) column[i] = held[i];
}

// ---- rows i and pivots[i] of X exchanged, by ascending i; one thread a column ----

extern "C" __global__ void fiec_exchange(u64 cols, u64 count, const u32* pivots, double* x, u64 ldx)
{
    const u64 col = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= cols) return;
    double* column = x + col * ldx;
    for (u64 i = 0; i < count; i++) {
        const u32 other = pivots[i];
        if (other != i) {
            const double held = column[i];
            column[i] = column[other];
            column[other] = held;
        }
    }
}

// ---- conjugate gradients (fiec_kernels::cg and passes) ----
//
// An iteration is five launches and no word to the host: product, alpha, residual, beta, direction.
// The scalars stay on the device; a status other than 0 makes all further launches do nothing.

#define LEAF 1024
#define LANES 8

#define CG_RUNNING 0
#define CG_CONVERGED 1
#define CG_MAXED 2
#define CG_NOT_FINITE 3
#define CG_INDEFINITE 4

struct CgScalars {
    double rz, rr, bb, tolerance;
    double alpha, beta, value;
    u64 iteration, most;
    // The number that was not finite (0 p·Ap, 1 alpha, 2 r·z, 3 r·r, 4 beta); 1 while the residual
    // is exhausted and an iteration changes nothing but the count.
    u32 status, what, exhausted, unused;
};

// One lane of the leaf v·z in shared memory: a chain.
__device__ __forceinline__ double leaf_lane(const double* v, const double* z, u32 count, u32 lane)
{
    double acc = 0.0;
    for (u32 i = lane; i < count; i += LANES) acc = __fma_rn(v[i], z[i], acc);
    return acc;
}

__device__ __forceinline__ double combine(const double* l)
{
    return __dadd_rn(__dadd_rn(__dadd_rn(l[0], l[4]), __dadd_rn(l[2], l[6])),
                     __dadd_rn(__dadd_rn(l[1], l[5]), __dadd_rn(l[3], l[7])));
}

// q = A·p, and p·q of one leaf. One block of threads a leaf; a row is one chain.
extern "C" __global__ __launch_bounds__(256) void fiec_cg_product(
    u64 n, const u32* row_ptr, const u32* col_idx, const double* values,
    const double* p, double* q, double* partial, const CgScalars* s)
{
    __shared__ double held_p[LEAF], held_q[LEAF], lanes[LANES];
    if (s->status != CG_RUNNING) return;
    const u64 from = (u64)blockIdx.x * LEAF;
    const u32 count = n - from < LEAF ? (u32)(n - from) : LEAF;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        const u64 row = from + i;
        double acc = 0.0;
        const u32 end = row_ptr[row + 1];
        for (u32 e = row_ptr[row]; e < end; e++) acc = __fma_rn(values[e], p[col_idx[e]], acc);
        q[row] = acc;
        held_p[i] = p[row];
        held_q[i] = acc;
    }
    __syncthreads();
    if (threadIdx.x < LANES) lanes[threadIdx.x] = leaf_lane(held_p, held_q, count, threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) partial[blockIdx.x] = combine(lanes);
}

// The leaves added pairwise, level by level; in `partial`, which has room for twice as many. One
// block of threads. `width` numbers a leaf; where the sums lie is returned.
__device__ __forceinline__ const double* tree(double* partial, u64 leaves, u32 width)
{
    double *from = partial, *to = partial + leaves * width;
    for (u64 len = leaves; len > 1; len = (len + 1) / 2) {
        const u64 half = len / 2;
        for (u64 e = threadIdx.x; e < half * width; e += blockDim.x) {
            const u64 i = e / width, k = e % width;
            to[e] = __dadd_rn(from[2 * i * width + k], from[(2 * i + 1) * width + k]);
        }
        if (len % 2 == 1 && threadIdx.x < width)
            to[half * width + threadIdx.x] = from[(len - 1) * width + threadIdx.x];
        __syncthreads();
        double* other = from;
        from = to;
        to = other;
    }
    return from;
}

__device__ __forceinline__ bool is_finite(double v)
{
    return (__double_as_longlong(v) & 0x7ff0000000000000ll) != 0x7ff0000000000000ll;
}

__device__ __forceinline__ void not_finite(CgScalars* s, u32 what, double value)
{
    s->status = CG_NOT_FINITE;
    s->what = what;
    s->value = value;
}

// Whether another iteration is to be made; and alpha = rz / p·q.
extern "C" __global__ __launch_bounds__(256) void fiec_cg_alpha(
    u64 leaves, double* partial, double smallest, CgScalars* s)
{
    __shared__ u32 go;
    if (threadIdx.x == 0) {
        go = 0;
        if (s->status == CG_RUNNING) {
            const double relative = s->bb == 0.0 ? 0.0 : __dsqrt_rn(__ddiv_rn(s->rr, s->bb));
            s->exhausted = s->rr <= __dmul_rn(smallest, s->bb) || s->rz == 0.0 ? 1 : 0;
            if (relative <= s->tolerance) s->status = CG_CONVERGED;
            else if (s->iteration >= s->most) s->status = CG_MAXED;
            else if (s->exhausted) s->iteration += 1;
            else go = 1;
        }
    }
    __syncthreads();
    if (!go) return;
    const double* sum = tree(partial, leaves, 1);
    if (threadIdx.x != 0) return;
    const double pq = leaves ? sum[0] : 0.0;
    if (!is_finite(pq)) return not_finite(s, 0, pq);
    if (pq <= 0.0) {
        s->status = CG_INDEFINITE;
        s->value = pq;
        return;
    }
    const double alpha = __ddiv_rn(s->rz, pq);
    if (!is_finite(alpha)) return not_finite(s, 1, alpha);
    s->alpha = alpha;
}

// r −= alpha·q, and r·z and r·r of one leaf with z = D⁻¹r. `inverse` null: all are `constant`.
extern "C" __global__ __launch_bounds__(256) void fiec_cg_residual(
    u64 n, const double* q, double* r, const double* inverse, double constant, double* partial,
    const CgScalars* s)
{
    __shared__ double held_r[LEAF], held_z[LEAF], lanes[2][LANES];
    if (s->status != CG_RUNNING || s->exhausted) return;
    const double minus = -s->alpha;
    const u64 from = (u64)blockIdx.x * LEAF;
    const u32 count = n - from < LEAF ? (u32)(n - from) : LEAF;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        const double v = __fma_rn(minus, q[from + i], r[from + i]);
        r[from + i] = v;
        held_r[i] = v;
        held_z[i] = __dmul_rn(v, inverse ? inverse[from + i] : constant);
    }
    __syncthreads();
    // The two sums by threads of two warps, side by side.
    const u32 which = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (which < 2 && lane < LANES)
        lanes[which][lane] = leaf_lane(held_r, which ? held_r : held_z, count, lane);
    __syncthreads();
    if (which < 2 && lane == 0) partial[2 * blockIdx.x + which] = combine(lanes[which]);
}

// beta = rz′ / rz, and the scalars of the iteration that is being made.
extern "C" __global__ __launch_bounds__(256) void fiec_cg_beta(
    u64 leaves, double* partial, CgScalars* s)
{
    if (s->status != CG_RUNNING || s->exhausted) return;
    // All have read the status before one of them may change it.
    __syncthreads();
    const double* sums = tree(partial, leaves, 2);
    if (threadIdx.x != 0) return;
    const double rz = leaves ? sums[0] : 0.0, rr = leaves ? sums[1] : 0.0;
    if (!is_finite(rz)) return not_finite(s, 2, rz);
    if (!is_finite(rr)) return not_finite(s, 3, rr);
    const double beta = __ddiv_rn(rz, s->rz);
    if (!is_finite(beta)) return not_finite(s, 4, beta);
    s->beta = beta;
    s->rz = rz;
    s->rr = rr;
    s->iteration += 1;
}

// x += alpha·p, then p = D⁻¹r + beta·p.
extern "C" __global__ __launch_bounds__(256) void fiec_cg_direction(
    u64 n, const double* r, const double* inverse, double constant, double* x, double* p,
    const CgScalars* s)
{
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || s->status != CG_RUNNING || s->exhausted) return;
    const double old = p[i];
    x[i] = __fma_rn(s->alpha, old, x[i]);
    p[i] = __fma_rn(s->beta, old, __dmul_rn(r[i], inverse ? inverse[i] : constant));
}
