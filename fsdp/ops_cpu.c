// ops on a CPU. Matrix products are in ops_cpu_products.c; the loops over rows are in ops_cpu_common.h.
//
// Work is cut by the shape alone, never by the number of threads, except for matrix products, where it changes no bit:
//     rows of activations                 in blocks of ROW_BLOCK
//     sums over rows (biases, LayerNorm)  one partial sum a block of rows, joined in the order of the blocks
//     sums over slices                    in blocks of SLICE_BLOCK, joined exactly
#include "error.h"
#include "ops_cpu_common.h"
#include <Random123/philox.h> // philox4x32
#include <assert.h>           // assert
#include <math.h>             // log, sqrt, frexp, ldexp
#include <omp.h>              // omp_get_thread_num
#include <stdlib.h>           // calloc, free
#include <string.h>           // memcpy, memset

enum {
    ROW_BLOCK = 64,
    SLICE_BLOCK = 1 << 14, // elements
};

Ops *ops_open(Device *device, int threads) {
    Ops *ops = (Ops *)calloc(1, sizeof *ops);
    if (!ops) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    ops->device = device;
    ops->threads = threads;
    ops->rehearsal = device_planning(device);
    products_open();
    ops_scratch(ops, 1); // under a plan the whole of it, before the first step
    return ops;
}

void ops_close(Ops *ops) { free(ops); }

double ops_flops(const Ops *ops) { return ops->flops; }

// ---------------------------------------------------------------------------------------------------------------------
// embedding

void embedding_forward(Ops *ops, void *out, const int *tokens, const void *wte, const void *wpe, int B, int T,
                       int C, DType dtype) {
    if (ops->rehearsal) return;
    PARALLEL_FOR
    for (int row = 0; row < B * T; row++) {
        float token_buffer[VECTOR_BLOCK], position_buffer[VECTOR_BLOCK], out_buffer[VECTOR_BLOCK];
        for (int c = 0; c < C; c += VECTOR_BLOCK) {
            int n = least(VECTOR_BLOCK, C - c);
            size_t first = (size_t)row * C + c;
            const float *token = row_in(wte, (size_t)tokens[row] * C + c, n, dtype, token_buffer);
            const float *position = row_in(wpe, (size_t)(row % T) * C + c, n, dtype, position_buffer);
            float *y = row_out(out, first, dtype, out_buffer);
            for (int i = 0; i < n; i++) y[i] = token[i] + position[i];
            row_stored(out, first, n, dtype, y);
        }
    }
}

// Each thread takes some columns of all rows, so that rows are added in order without a lock.
void embedding_backward(Ops *ops, float *dwte, float *dwpe, const int *tokens, const void *dout, int B, int T,
                        int C, DType dtype) {
    enum { COLUMNS = 64 };
    if (ops->rehearsal) return;
    PARALLEL_FOR
    for (int c = 0; c < C; c += COLUMNS) {
        int n = least(COLUMNS, C - c);
        float buffer[COLUMNS];
        for (int t = 0; t < T; t++) memset(dwpe + (size_t)t * C + c, 0, (size_t)n * sizeof(float));
        for (int row = 0; row < B * T; row++) {
            const float *d = row_in(dout, (size_t)row * C + c, n, dtype, buffer);
            float *token = dwte + (size_t)tokens[row] * C + c, *position = dwpe + (size_t)(row % T) * C + c;
            for (int i = 0; i < n; i++) token[i] += d[i];
            for (int i = 0; i < n; i++) position[i] += d[i];
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// LayerNorm and residual. A row is needed whole, so its buffers are scratch of C floats a thread.

static const float layernorm_eps = 1e-5f;

static void layernorm_row(float *y, float *mean, float *rstd, const float *x, const float *w, const float *b,
                          int C) {
    float m = row_sum(x, C) / (float)C;
    for (int i = 0; i < C; i++) y[i] = x[i] - m;
    float s = 1.0f / sqrtf(row_dot(y, y, C) / (float)C + layernorm_eps);
    for (int i = 0; i < C; i++) y[i] = y[i] * s * w[i] + b[i];
    *mean = m;
    *rstd = s;
}

// y NULL: no sum.
static void layernorm_any(Ops *ops, void *sum, void *out, float *mean, float *rstd, const void *x, const void *y,
                          const void *w, const void *b, int N, int C, DType dtype) {
    size_t row_bytes = aligned((size_t)C * sizeof(float)), each = 3 * row_bytes;
    char *scratch = ops_scratch(ops, 2 * row_bytes + (size_t)ops->threads * each);
    if (ops->rehearsal) return;
    const float *wf = row_in(w, 0, C, dtype, (float *)scratch),
                *bf = row_in(b, 0, C, dtype, (float *)(scratch + row_bytes));
    PARALLEL_FOR
    for (int row = 0; row < N; row++) {
        char *own = scratch + 2 * row_bytes + (size_t)omp_get_thread_num() * each;
        float *buffer = (float *)own, *buffer2 = (float *)(own + row_bytes),
              *out_buffer = (float *)(own + 2 * row_bytes);
        float m, s;
        size_t first = (size_t)row * C;
        const float *xf = row_in(x, first, C, dtype, buffer);
        if (y) {
            const float *yf = row_in(y, first, C, dtype, buffer2);
            float *sf = row_out(sum, first, dtype, buffer);
            for (int i = 0; i < C; i++) sf[i] = xf[i] + yf[i];
            row_stored(sum, first, C, dtype, sf);
            xf = row_in(sum, first, C, dtype, buffer); // the stored sum, which backward will see
        }
        float *of = row_out(out, first, dtype, out_buffer);
        layernorm_row(of, &m, &s, xf, wf, bf, C);
        row_stored(out, first, C, dtype, of);
        if (mean) mean[row] = m, rstd[row] = s;
    }
}

void layernorm_forward(Ops *ops, void *out, float *mean, float *rstd, const void *x, const void *w, const void *b,
                       int N, int C, DType dtype) {
    layernorm_any(ops, NULL, out, mean, rstd, x, NULL, w, b, N, C, dtype);
}

void residual_layernorm_forward(Ops *ops, void *sum, void *out, float *mean, float *rstd, const void *x,
                                const void *y, const void *w, const void *b, int N, int C, DType dtype) {
    layernorm_any(ops, sum, out, mean, rstd, x, y, w, b, N, C, dtype);
}

void residual_forward(Ops *ops, void *out, const void *x, const void *y, size_t n, DType dtype) {
    if (ops->rehearsal) return;
    PARALLEL_FOR
    for (int block = 0; block < blocks_of(n, VECTOR_BLOCK); block++) {
        float x_buffer[VECTOR_BLOCK], y_buffer[VECTOR_BLOCK], out_buffer[VECTOR_BLOCK];
        size_t first = (size_t)block * VECTOR_BLOCK;
        int count = block_length(n - first, VECTOR_BLOCK);
        const float *xf = row_in(x, first, count, dtype, x_buffer), *yf = row_in(y, first, count, dtype, y_buffer);
        float *of = row_out(out, first, dtype, out_buffer);
        for (int i = 0; i < count; i++) of[i] = xf[i] + yf[i];
        row_stored(out, first, count, dtype, of);
    }
}

// out (columns) = the sum of partial (blocks, columns) over the blocks, in their order.
static void join_partials(Ops *ops, float *out, const float *partial, int blocks, size_t stride, int columns) {
    enum { COLUMNS = 256 };
    PARALLEL_FOR
    for (int c = 0; c < columns; c += COLUMNS) {
        int n = least(COLUMNS, columns - c);
        memcpy(out + c, partial + c, (size_t)n * sizeof(float));
        for (int block = 1; block < blocks; block++)
            for (int i = 0; i < n; i++) out[c + i] += partial[(size_t)block * stride + c + i];
    }
}

// With x̂ = (x - mean)·rstd and g = dout·w:  dx += rstd · (g - mean(g) - x̂·mean(g·x̂)).  buffer: C floats.
static void layernorm_backward_row(float *dx, float *dw, float *db, float *buffer, const float *dout,
                                   const float *x, const float *w, float mean, float rstd, int C) {
    float inverse = 1.0f / (float)C;
    for (int i = 0; i < C; i++) {
        float normed = (x[i] - mean) * rstd;
        db[i] += dout[i];
        dw[i] += dout[i] * normed;
        buffer[i] = dout[i] * w[i];
    }
    float g = row_sum(buffer, C) * inverse, gx = 0;
    // mean(g·x̂) = rstd · (g·x - mean·Σg) / C would cancel; x̂ is cheap to have again.
    float lane[LANES] = {0};
    int i = 0;
    for (; i + LANES <= C; i += LANES)
        for (int j = 0; j < LANES; j++) lane[j] += buffer[i + j] * ((x[i + j] - mean) * rstd);
    for (int j = 0; i + j < C; j++) lane[j] += buffer[i + j] * ((x[i + j] - mean) * rstd);
    gx = lanes_joined(lane) * inverse;
    for (i = 0; i < C; i++) dx[i] += rstd * (buffer[i] - g - (x[i] - mean) * rstd * gx);
}

void layernorm_backward(Ops *ops, void *dx, float *dw, float *db, const void *dout, const void *x, const void *w,
                        const float *mean, const float *rstd, int N, int C, DType dtype) {
    int blocks = blocks_of((size_t)N, ROW_BLOCK);
    size_t row_bytes = aligned((size_t)C * sizeof(float)), each = 4 * row_bytes,
           stride = 2 * row_bytes / sizeof(float);
    char *scratch = ops_scratch(ops, row_bytes + (size_t)ops->threads * each + (size_t)blocks * 2 * row_bytes);
    if (ops->rehearsal) return;
    const float *wf = row_in(w, 0, C, dtype, (float *)scratch);
    float *partials = (float *)(scratch + row_bytes + (size_t)ops->threads * each);
    PARALLEL_FOR
    for (int block = 0; block < blocks; block++) {
        char *own = scratch + row_bytes + (size_t)omp_get_thread_num() * each;
        float *partial_w = partials + (size_t)block * stride, *partial_b = partial_w + stride / 2;
        memset(partial_w, 0, 2 * row_bytes);
        for (int row = block * ROW_BLOCK; row < least(N, (block + 1) * ROW_BLOCK); row++) {
            size_t first = (size_t)row * C;
            const float *df = row_in(dout, first, C, dtype, (float *)own);
            const float *xf = row_in(x, first, C, dtype, (float *)(own + row_bytes));
            float *dxf = (float *)row_in(dx, first, C, dtype, (float *)(own + 2 * row_bytes));
            layernorm_backward_row(dxf, partial_w, partial_b, (float *)(own + 3 * row_bytes), df, xf, wf, mean[row],
                                   rstd[row], C);
            row_stored(dx, first, C, dtype, dxf);
        }
    }
    join_partials(ops, dw, partials, blocks, stride, C);
    join_partials(ops, db, partials + stride / 2, blocks, stride, C);
}

// ---------------------------------------------------------------------------------------------------------------------
// linear

static void multiply(Ops *ops, Target c, Factor a, Factor b, int M, int N, int K) {
    void *scratch = ops_scratch(ops, product_scratch(M, N, K, a.dtype, ops->threads));
    ops->flops += 2.0 * M * N * K;
    if (!ops->rehearsal) product(c, a, b, M, N, K, ops->threads, scratch);
}

// A dense row-major matrix as a factor: its lines are its rows, or its columns.
static Factor rows_of(const void *x, int columns, DType dtype) {
    return (Factor){.x = x, .line = (size_t)columns, .depth = 1, .dtype = dtype};
}
static Factor columns_of(const void *x, int columns, DType dtype) {
    return (Factor){.x = x, .line = 1, .depth = (size_t)columns, .dtype = dtype};
}
static Target dense(void *x, int columns, DType dtype) {
    return (Target){.x = x, .stride = (size_t)columns, .dtype = dtype};
}

// out (columns) = column sums of x (N, columns)
static void column_sums(Ops *ops, float *out, const void *x, int N, int columns, DType dtype) {
    int blocks = blocks_of((size_t)N, ROW_BLOCK);
    float *partials = (float *)ops_scratch(ops, (size_t)blocks * (size_t)columns * sizeof(float));
    if (ops->rehearsal) return;
    PARALLEL_FOR
    for (int block = 0; block < blocks; block++) {
        float buffer[VECTOR_BLOCK], *partial = partials + (size_t)block * (size_t)columns;
        memset(partial, 0, (size_t)columns * sizeof(float));
        for (int row = block * ROW_BLOCK; row < least(N, (block + 1) * ROW_BLOCK); row++)
            for (int c = 0; c < columns; c += VECTOR_BLOCK) {
                int n = least(VECTOR_BLOCK, columns - c);
                const float *xf = row_in(x, (size_t)row * (size_t)columns + (size_t)c, n, dtype, buffer);
                for (int i = 0; i < n; i++) partial[c + i] += xf[i];
            }
    }
    join_partials(ops, out, partials, blocks, (size_t)columns, columns);
}

void linear_forward(Ops *ops, void *out, const void *x, const void *w, const void *b, int N, int C, int OC,
                    DType dtype) {
    Target target = dense(out, OC, dtype);
    target.bias = b;
    multiply(ops, target, rows_of(x, C, dtype), columns_of(w, OC, dtype), N, OC, C);
}

void linear_backward(Ops *ops, void *dx, float *dw, float *db, const void *dout, const void *x, const void *w,
                     int N, int C, int OC, DType dtype) {
    column_sums(ops, db, dout, N, OC, dtype);
    multiply(ops, dense(dw, OC, F32), columns_of(x, C, dtype), columns_of(dout, OC, dtype), C, OC, N);
    if (dx) multiply(ops, dense(dx, C, dtype), rows_of(dout, OC, dtype), rows_of(w, OC, dtype), N, C, OC);
}

void unembed_forward(Ops *ops, void *logits, const void *x, const void *wte, int N, int C, int Vp, DType dtype) {
    multiply(ops, dense(logits, Vp, dtype), rows_of(x, C, dtype), rows_of(wte, C, dtype), N, Vp, C);
}

void unembed_backward(Ops *ops, void *dx, float *dwte, const void *dlogits, const void *x, const void *wte, int N,
                      int C, int Vp, bool accumulate, DType dtype) {
    Target target = dense(dwte, C, F32);
    target.accumulate = accumulate;
    multiply(ops, target, columns_of(dlogits, Vp, dtype), columns_of(x, C, dtype), Vp, C, N);
    multiply(ops, dense(dx, C, dtype), rows_of(dlogits, Vp, dtype), columns_of(wte, C, dtype), N, C, Vp);
}

// ---------------------------------------------------------------------------------------------------------------------
// GELU: x·σ(2u) with u = √(2/π)·(x + 0.044715 x³), since (1 + tanh u)/2 = σ(2u); no difference of near equals.

static const float gelu_linear = 2 * 0.797884561f, gelu_cubic = 2 * 0.797884561f * 0.044715f; // of 2u

void gelu_forward(Ops *ops, void *out, const void *x, size_t n, DType dtype) {
    if (ops->rehearsal) return;
    PARALLEL_FOR
    for (int block = 0; block < blocks_of(n, VECTOR_BLOCK); block++) {
        float x_buffer[VECTOR_BLOCK], out_buffer[VECTOR_BLOCK];
        size_t first = (size_t)block * VECTOR_BLOCK;
        int count = block_length(n - first, VECTOR_BLOCK);
        const float *xf = row_in(x, first, count, dtype, x_buffer);
        float *of = row_out(out, first, dtype, out_buffer);
        for (int i = 0; i < count; i++)
            of[i] = xf[i] / (1.0f + exp_float(-xf[i] * (gelu_linear + gelu_cubic * xf[i] * xf[i])));
        row_stored(out, first, count, dtype, of);
    }
}

// d/dx x·σ(z) = σ·(1 + x·z'·(1 - σ)) with z = 2u
void gelu_backward(Ops *ops, void *dx, const void *dout, const void *x, size_t n, DType dtype) {
    if (ops->rehearsal) return;
    PARALLEL_FOR
    for (int block = 0; block < blocks_of(n, VECTOR_BLOCK); block++) {
        float x_buffer[VECTOR_BLOCK], d_buffer[VECTOR_BLOCK], out_buffer[VECTOR_BLOCK];
        size_t first = (size_t)block * VECTOR_BLOCK;
        int count = block_length(n - first, VECTOR_BLOCK);
        const float *xf = row_in(x, first, count, dtype, x_buffer),
                    *df = row_in(dout, first, count, dtype, d_buffer);
        float *of = row_out(dx, first, dtype, out_buffer);
        for (int i = 0; i < count; i++) {
            float square = xf[i] * xf[i], slope = gelu_linear + 3 * gelu_cubic * square;
            float minus_z = -xf[i] * (gelu_linear + gelu_cubic * square);
            float e = exp_float(minus_z > 80.0f ? 80.0f : minus_z); // finite, for the line after next
            float s = 1.0f / (1.0f + e);
            float other = e * s; // 1 - σ, without a difference of near equals
            of[i] = df[i] * (s + xf[i] * slope * (s * other));
        }
        row_stored(dx, first, count, dtype, of);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// softmax and cross-entropy

// Returns the loss; x (V, a copy of the logits) becomes e^(x - max), *scale what makes probabilities of it.
static float cross_entropy_row(float *x, int V, int target, float *scale) {
    float max = row_max(x, V), target_logit = x[target];
    double total = 0;
    for (int c = 0; c < V; c += VECTOR_BLOCK) {
        int n = least(VECTOR_BLOCK, V - c);
        for (int i = 0; i < n; i++) x[c + i] = exp_float(x[c + i] - max);
        total += (double)row_sum(x + c, n);
    }
    *scale = (float)(1.0 / total);
    return (float)(log(total) + ((double)max - (double)target_logit));
}

void softmax_cross_entropy(Ops *ops, float *losses, void *logits, const int *targets, int N, int V, int Vp,
                           float scale, DType dtype) {
    size_t each = aligned((size_t)Vp * sizeof(float));
    char *scratch = ops_scratch(ops, (size_t)ops->threads * each);
    if (ops->rehearsal) return;
    PARALLEL_FOR
    for (int row = 0; row < N; row++) {
        float *x = (float *)(scratch + (size_t)omp_get_thread_num() * each), inverse;
        void *stored = at_mutable(logits, (size_t)row * Vp, dtype);
        if (targets[row] < 0) {
            losses[row] = 0;
            if (scale != 0) memset(stored, 0, (size_t)Vp * dtype_size(dtype));
            continue;
        }
        const float *read = row_in(stored, 0, V, dtype, x);
        if (read != x) memcpy(x, read, (size_t)V * sizeof(float));
        losses[row] = cross_entropy_row(x, V, targets[row], &inverse);
        if (scale == 0) continue;
        for (int i = 0; i < V; i++) x[i] = x[i] * inverse * scale;
        x[targets[row]] -= scale;
        memset(x + V, 0, (size_t)(Vp - V) * sizeof(float));
        if (dtype == F32)
            memcpy(stored, x, (size_t)Vp * sizeof(float));
        else
            row_stored(stored, 0, Vp, dtype, x);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// over slices

// One block of AdamW; the loop that the compiler turns into vectors.
static void adamw_block(float *w, float *m, float *v, const float *grad, int n, float scale, const AdamW *s) {
    float step = s->lr / s->correction1, shrink = s->lr * s->decay, root = 1.0f / s->correction2;
    float beta1 = s->beta1, beta2 = s->beta2, eps = s->eps, one_less1 = 1.0f - s->beta1,
          one_less2 = 1.0f - s->beta2;
    for (int i = 0; i < n; i++) {
        float g = scale * grad[i];
        m[i] = beta1 * m[i] + one_less1 * g;
        v[i] = beta2 * v[i] + one_less2 * (g * g);
        w[i] = w[i] - (step * m[i] / (sqrtf(v[i] * root) + eps) + shrink * w[i]);
    }
}

void adamw(Ops *ops, float *w, float *m, float *v, void *low, const float *grad, size_t n, const float *scale,
           AdamW settings) {
    if (ops->rehearsal || !isfinite(*scale)) return;
    PARALLEL_FOR
    for (int block = 0; block < blocks_of(n, SLICE_BLOCK); block++) {
        size_t first = (size_t)block * SLICE_BLOCK;
        int count = block_length(n - first, SLICE_BLOCK);
        adamw_block(w + first, m + first, v + first, grad + first, count, *scale, &settings);
        if (low) row_stored(low, first, count, BF16, w + first);
    }
}

void absmax(Ops *ops, uint32_t *bits, const float *x, size_t n) {
    if (ops->rehearsal) return;
    uint32_t most = *bits;
#pragma omp parallel for num_threads(ops->threads) schedule(static) reduction(max : most)
    for (int block = 0; block < blocks_of(n, SLICE_BLOCK); block++) {
        size_t first = (size_t)block * SLICE_BLOCK, end = first + SLICE_BLOCK < n ? first + SLICE_BLOCK : n;
        uint32_t own = 0;
        for (size_t i = first; i < end; i++) {
            uint32_t magnitude = bits_of(x[i]) & 0x7fffffff;
            own = magnitude > own ? magnitude : own;
        }
        most = own > most ? own : most;
    }
    *bits = most;
}

static int exponent_above(uint32_t bits) {
    int exponent;
    frexp((double)float_of(bits), &exponent);
    return exponent;
}

// Eight of a kind, which compilers map to the registers there are.
typedef double Doubles __attribute__((vector_size(8 * sizeof(double))));
typedef float Floats __attribute__((vector_size(8 * sizeof(float)), aligned(4), may_alias));

// The two parts of (x·scale)², added up exactly: adding and taking away 1.5·2^26 rounds a double to a multiple of 2^-26,
// 0.75 to one of 2^-53; what is added up stays below 2^53 units of either.
static void sumsq_block(double parts[2], const float *x, size_t n, double scale) {
    enum { WIDE = 8, VECTORS = 2 };
    Doubles high[VECTORS] = {{0}}, low[VECTORS] = {{0}};
    assert(n % (WIDE * VECTORS) == 0);
    for (size_t i = 0; i < n; i += WIDE * VECTORS)
        for (int j = 0; j < VECTORS; j++) {
            Doubles y = __builtin_convertvector(*(const Floats *)(x + i + j * WIDE), Doubles) * scale;
            Doubles square = y * y, coarse = (square + 0x1.8p26) - 0x1.8p26;
            high[j] += coarse;
            low[j] += ((square - coarse) + 0.75) - 0.75;
        }
    parts[0] = parts[1] = 0;
    for (int j = 0; j < VECTORS; j++)
        for (int k = 0; k < WIDE; k++) parts[0] += high[j][k], parts[1] += low[j][k];
}

void sumsq(Ops *ops, int64_t sums[2], const float *x, size_t n, const uint32_t *bits) {
    if (ops->rehearsal || *bits == 0 || *bits >= 0x7f800000) return;
    double scale = ldexp(1.0, -exponent_above(*bits));
    int64_t high = 0, low = 0;
#pragma omp parallel for num_threads(ops->threads) schedule(static) reduction(+ : high, low)
    for (int block = 0; block < blocks_of(n, SLICE_BLOCK); block++) {
        size_t first = (size_t)block * SLICE_BLOCK;
        double parts[2];
        sumsq_block(parts, x + first, n - first < SLICE_BLOCK ? n - first : SLICE_BLOCK, scale);
        high += (int64_t)(parts[0] * 0x1p26);
        low += (int64_t)(parts[1] * 0x1p53);
    }
    sums[0] += high;
    sums[1] += low;
}

double sumsq_root(const int64_t sums[2], uint32_t bits) {
    if (bits == 0) return 0;
    if (bits >= 0x7f800000) return NAN;
    return ldexp(sqrt((double)sums[0] * 0x1p-26 + (double)sums[1] * 0x1p-53), exponent_above(bits));
}

void clip_scale(Ops *ops, float *scale, float *norm, const int64_t sums[2], const uint32_t *bits, float limit) {
    if (ops->rehearsal) return;
    double root = sumsq_root(sums, *bits), wanted = (double)limit / (root + 1e-6);
    *norm = (float)root;
    *scale = !isfinite(root) ? NAN : limit == 0 || wanted > 1 ? 1.0f : (float)wanted;
}

void scale_guard(Ops *ops, float *scale, const double *x, size_t n) {
    if (ops->rehearsal) return;
    for (size_t i = 0; i < n; i++)
        if (!isfinite(x[i])) *scale = NAN;
}

void largest(Ops *ops, uint32_t *most, const uint32_t *bits, int n) {
    if (ops->rehearsal) return;
    *most = 0;
    for (int i = 0; i < n; i++)
        if (bits[i] > *most) *most = bits[i];
}

void losses_sum(Ops *ops, double sums[2], const float *losses, int B, int T) {
    if (ops->rehearsal) return;
    sums[0] = sums[1] = 0;
    for (int i = 0; i < B * T; i++) {
        sums[0] += (double)losses[i];
        if (i % T >= T / 2) sums[1] += (double)losses[i];
    }
}

void accumulate(Ops *ops, float *sum, const float *const *terms, int count, size_t n) {
    if (ops->rehearsal) return;
    PARALLEL_FOR
    for (int block = 0; block < blocks_of(n, VECTOR_BLOCK); block++) {
        size_t first = (size_t)block * VECTOR_BLOCK;
        int length = block_length(n - first, VECTOR_BLOCK);
        for (int t = 0; t < count; t++)
            for (int i = 0; i < length; i++) sum[first + i] = terms[t][first + i] + sum[first + i];
    }
}

void round_to_bf16(Ops *ops, float *x, size_t n) {
    if (ops->rehearsal) return;
    PARALLEL_FOR
    for (int block = 0; block < blocks_of(n, SLICE_BLOCK); block++) {
        size_t first = (size_t)block * SLICE_BLOCK;
        int length = block_length(n - first, SLICE_BLOCK);
        for (int i = 0; i < length; i++) x[first + i] = float_of_bf16(bf16_of(x[first + i]));
    }
}

// In place, block b goes to where block b/2 was read from: so once all blocks before a power of two are packed, those up
// to the next one can be packed at the same time. Bytes are moved through a buffer because the first block overlaps itself.
void pack_to_bf16(Ops *ops, float *x, size_t n) {
    if (ops->rehearsal) return;
    int blocks = blocks_of(n, VECTOR_BLOCK);
    for (int begin = 0, end = 1; begin < blocks; begin = end, end = least(2 * end, blocks)) {
        PARALLEL_FOR
        for (int block = begin; block < end; block++) {
            uint16_t packed[VECTOR_BLOCK];
            size_t first = (size_t)block * VECTOR_BLOCK;
            int length = block_length(n - first, VECTOR_BLOCK);
            for (int i = 0; i < length; i++) packed[i] = bf16_of(x[first + i]);
            memcpy((char *)x + first * sizeof(uint16_t), packed, (size_t)length * sizeof(uint16_t));
        }
    }
}

void cast_from_f32(Ops *ops, void *out, const float *x, size_t n, DType dtype) {
    if (ops->rehearsal) return;
    PARALLEL_FOR
    for (int block = 0; block < blocks_of(n, SLICE_BLOCK); block++) {
        size_t first = (size_t)block * SLICE_BLOCK;
        int count = block_length(n - first, SLICE_BLOCK);
        if (dtype == F32)
            memcpy((float *)out + first, x + first, (size_t)count * sizeof(float));
        else
            row_stored(out, first, count, dtype, x + first);
    }
}

void cast_to_f32(Ops *ops, float *out, const void *x, size_t n, DType dtype) {
    if (ops->rehearsal) return;
    PARALLEL_FOR
    for (int block = 0; block < blocks_of(n, SLICE_BLOCK); block++) {
        size_t first = (size_t)block * SLICE_BLOCK;
        int count = block_length(n - first, SLICE_BLOCK);
        const float *read = row_in(x, first, count, dtype, out + first);
        if (dtype == F32) memcpy(out + first, read, (size_t)count * sizeof(float));
    }
}

// Four numbers from one counter: two pairs by Box and Muller's transform.
static void normal_four(float four[4], uint64_t seed, uint32_t tensor, uint64_t counter, float std) {
    philox4x32_ctr_t place = {{(uint32_t)counter, (uint32_t)(counter >> 32), tensor, 0}};
    philox4x32_key_t key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
    philox4x32_ctr_t drawn = philox4x32(place, key);
    for (int pair = 0; pair < 2; pair++) {
        double u = ((double)drawn.v[2 * pair] + 0.5) * 0x1p-32,
               angle = (double)drawn.v[2 * pair + 1] * (0x1p-31 * M_PI);
        double radius = (double)std * sqrt(-2.0 * log(u));
        four[2 * pair] = (float)(radius * cos(angle));
        four[2 * pair + 1] = (float)(radius * sin(angle));
    }
}

void fill_normal(Ops *ops, float *out, uint64_t seed, uint32_t tensor, size_t first, size_t n, float std) {
    if (ops->rehearsal || n == 0) return;
    int64_t counter_first = (int64_t)(first / 4), counter_end = (int64_t)((first + n + 3) / 4);
    PARALLEL_FOR
    for (int64_t counter = counter_first; counter < counter_end; counter++) {
        float four[4];
        normal_four(four, seed, tensor, (uint64_t)counter, std);
        for (size_t i = 0; i < 4; i++) {
            size_t element = (size_t)counter * 4 + i;
            if (element >= first && element < first + n) out[element - first] = four[i];
        }
    }
}

void fill_constant(Ops *ops, float *out, float value, size_t n) {
    if (ops->rehearsal) return;
    for (size_t i = 0; i < n; i++) out[i] = value;
}

void fill_zero(Ops *ops, void *out, size_t n, DType dtype) {
    if (ops->rehearsal) return;
    PARALLEL_FOR
    for (int block = 0; block < blocks_of(n, SLICE_BLOCK); block++) {
        size_t first = (size_t)block * SLICE_BLOCK;
        int count = block_length(n - first, SLICE_BLOCK);
        memset(at_mutable(out, first, dtype), 0, (size_t)count * dtype_size(dtype));
    }
}
