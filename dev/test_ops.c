// test_ops: every op of ops.h against its reference in double, and the promises of ops.h that are about bits.
//
// An op is tested by a table entry: `make` lists the buffers of a call with their contents and expected results, `run`
// makes the call. Each entry is run for all its shapes, in fp32 and bf16, first on a planning device and then on a
// device with that plan, with 1, 2, 3 and 16 threads and twice each. Every time
//   - outputs begin as not-a-number and must be all written; what lies behind them, and inputs, must stay as they are;
//   - results must have the bits of the very first run, and be within the tolerance of the reference.
//
// TOLERANCE. A result that sums K terms in fp32 takes K roundings of at most 2^-24 of a partial sum. Partial sums are
// no larger than the largest results, and roundings add up like a random walk, so with S the largest |expected|
//
//     |result - expected| ≤ 4 · √K · 2^-24 · S          four standard deviations and more
//                         + 2^-8 · |expected|           when it is stored in bf16: one rounding
//                         + r · 2^-8 · S                with bf16, where r intermediate values have to be rounded
//
// r is 1 for attention's forward pass (the probabilities, to be multiplied with v) and 3 for its backward pass (the
// probabilities, the scores' gradient, and `out`, which is handed in rounded). It is 0 everywhere else. Elementwise
// functions count as K = 16, four units in the last place, since libraries approximate tanh and exp.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ops.h"
#include "ops_reference.h"

enum { MAX_BUFFERS = 10, MAX_SHAPES = 8, ELEMENTWISE = 16 };

static const int THREADS[] = {1, 2, 3, 16};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
static const double PI = 3.14159265358979323846;

// ---------------------------------------------------------------------------------------------------------------------
// numbers

static uint64_t random_state;

// SplitMix64
static uint64_t random_bits(void) {
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static double random_uniform(void) { return ((double)(random_bits() >> 11) + 0.5) * 0x1p-53; }

static double random_normal(void) {
    double radius = sqrt(-2 * log(random_uniform()));
    return radius * cos(2 * PI * random_uniform());
}

static uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// To nearest, ties to even.
static uint16_t bf16_round(float x) {
    uint32_t bits = float_bits(x);
    if (isnan(x)) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float bf16_float(uint16_t x) { return bits_float((uint32_t)x << 16); }

static void *allocate(size_t bytes) {
    void *memory = aligned_alloc(DEVICE_ALIGN, (bytes + DEVICE_ALIGN - 1) / DEVICE_ALIGN * DEVICE_ALIGN);
    assert_non_null(memory);
    return memory;
}

static double *allocate_doubles(size_t n) {
    double *x = (double *)calloc(n, sizeof(double));
    assert_non_null(x);
    return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// buffers: the arguments of one call

typedef struct {
    int B, T, C, NH, OC, V, Vp; // of layers
    size_t n;                   // of slices
} Shape;

typedef enum { ACTIVATION, FLOAT, HALF, INT } Storage; // as dtype says, always fp32, always bf16, int32

typedef enum {
    INPUT,    // stays as it is
    OUTPUT,   // begins as not-a-number
    SUM,      // is added to
    REPLACED, // read and then written
} Role;

typedef struct {
    const char *name;
    Storage storage;
    Role role;
    size_t n, spare;  // elements, and as many behind them that belong to others
    double *value;    // (n) before the call, as stored
    double *expected; // (n) after the call
    double terms;     // K
    double roundings; // r
    int slope_of;     // the buffer that this is the gradient of, -1: none
    void *memory;
    size_t bytes;
    void *first; // memory after the first call, NULL before
} Buffer;

typedef struct {
    Shape shape;
    DType dtype;
    Buffer buffers[MAX_BUFFERS];
    int count;
} Case;

static bool stored_in_bf16(const Buffer *b, DType dtype) {
    return b->storage == HALF || (b->storage == ACTIVATION && dtype == BF16);
}

static double round_to_storage(const Buffer *b, DType dtype, double x) {
    if (b->storage == INT) return x;
    return stored_in_bf16(b, dtype) ? bf16_float(bf16_round((float)x)) : (float)x;
}

static Buffer *buffer_add(Case *c, const char *name, Role role, Storage storage, size_t n) {
    assert_true(c->count < MAX_BUFFERS);
    Buffer *b = &c->buffers[c->count++];
    *b = (Buffer){.name = name, .storage = storage, .role = role, .n = n, .slope_of = -1};
    b->value = allocate_doubles(n);
    b->expected = allocate_doubles(n);
    return b;
}

static Buffer *last_buffer(Case *c) { return &c->buffers[c->count - 1]; }

// An input of normal numbers.
static double *input_normal(Case *c, const char *name, Storage storage, size_t n, double mean, double deviation) {
    Buffer *b = buffer_add(c, name, INPUT, storage, n);
    for (size_t i = 0; i < n; i++) {
        b->value[i] = round_to_storage(b, c->dtype, mean + deviation * random_normal());
    }
    return b->value;
}

// An input with these numbers, rounded.
static double *input_values(Case *c, const char *name, Storage storage, size_t n, const double *values) {
    Buffer *b = buffer_add(c, name, INPUT, storage, n);
    for (size_t i = 0; i < n; i++) b->value[i] = round_to_storage(b, c->dtype, values[i]);
    return b->value;
}

// An input of integers below `limit`, both ends among them. Stays in `ints` too, which the caller frees.
static int *input_integers(Case *c, const char *name, size_t n, int limit) {
    Buffer *b = buffer_add(c, name, INPUT, INT, n);
    int *ints = (int *)allocate(n * sizeof(int));
    for (size_t i = 0; i < n; i++)
        ints[i] = i == 0 ? limit - 1 : i == 1 ? 0 : (int)(random_bits() % (uint64_t)limit);
    for (size_t i = 0; i < n; i++) b->value[i] = ints[i];
    return ints;
}

// These three return where `make` puts the expected result. A sum's is what is there before.
static double *output(Case *c, const char *name, Storage storage, size_t n, double terms) {
    Buffer *b = buffer_add(c, name, OUTPUT, storage, n);
    b->terms = terms;
    return b->expected;
}

static double *sum(Case *c, const char *name, Storage storage, size_t n, double terms) {
    const double *value = input_normal(c, name, storage, n, 0, 1);
    Buffer *b = last_buffer(c);
    b->role = SUM;
    b->terms = terms;
    memcpy(b->expected, value, n * sizeof(double));
    return b->expected;
}

static double *replaced(Case *c, const char *name, Storage storage, size_t n, double terms) {
    input_normal(c, name, storage, n, 0, 1);
    last_buffer(c)->role = REPLACED;
    last_buffer(c)->terms = terms;
    return last_buffer(c)->expected;
}

static size_t storage_size(const Buffer *b, DType dtype) { return stored_in_bf16(b, dtype) ? 2 : 4; }

static void buffer_load(Buffer *b, DType dtype) {
    size_t size = storage_size(b, dtype);
    if (b->memory == NULL) {
        b->bytes = ((b->n + b->spare) * size + DEVICE_ALIGN - 1) / DEVICE_ALIGN * DEVICE_ALIGN;
        b->memory = allocate(b->bytes);
    }
    memset(b->memory, 0xff, b->bytes); // not-a-number in either type
    if (b->role == OUTPUT) return;
    for (size_t i = 0; i < b->n; i++) {
        if (b->storage == INT)
            ((int *)b->memory)[i] = (int)b->value[i];
        else if (size == 2)
            ((uint16_t *)b->memory)[i] = bf16_round((float)b->value[i]);
        else
            ((float *)b->memory)[i] = (float)b->value[i];
    }
}

static double buffer_element(const Buffer *b, DType dtype, size_t i) {
    if (b->storage == INT) return ((const int *)b->memory)[i];
    return stored_in_bf16(b, dtype) ? bf16_float(((const uint16_t *)b->memory)[i]) : ((const float *)b->memory)[i];
}

// For messages, which nobody reads two of at a time.
static const char *case_text(const Case *c) {
    static char text[128];
    Shape s = c->shape;
    snprintf(text, sizeof text, "%s, B %d T %d C %d NH %d OC %d V %d Vp %d n %zu",
             c->dtype == BF16 ? "bf16" : "fp32", s.B, s.T, s.C, s.NH, s.OC, s.V, s.Vp, s.n);
    return text;
}

static void buffer_check_untouched(const Buffer *b, const Case *c) {
    for (size_t i = 0; i < b->n; i++) {
        double x = buffer_element(b, c->dtype, i);
        bool same = b->role == OUTPUT ? isnan(x) : x == b->value[i];
        if (!same) fail_msg("%s[%zu] was written: %g (%s)", b->name, i, x, case_text(c));
    }
}

static void buffer_check_behind(const Buffer *b, const Case *c) {
    const unsigned char *bytes = (const unsigned char *)b->memory;
    for (size_t i = b->n * storage_size(b, c->dtype); i < b->bytes; i++) {
        if (bytes[i] != 0xff) fail_msg("%s: byte %zu, behind its end, was written (%s)", b->name, i, case_text(c));
    }
}

static void buffer_check_close(const Buffer *b, const Case *c) {
    double largest = 0;
    for (size_t i = 0; i < b->n; i++) largest = fmax(largest, fabs(b->expected[i]));
    double tolerance = 4 * sqrt(b->terms) * 0x1p-24 * largest;
    if (c->dtype == BF16) tolerance += b->roundings * 0x1p-8 * largest;
    double relative = stored_in_bf16(b, c->dtype) ? 0x1p-8 : 0;
    for (size_t i = 0; i < b->n; i++) {
        double x = buffer_element(b, c->dtype, i), allowed = tolerance + relative * fabs(b->expected[i]);
        if (!(fabs(x - b->expected[i]) <= allowed)) {
            fail_msg("%s[%zu] is %.9g, expected %.9g ± %.2g (%s)", b->name, i, x, b->expected[i], allowed,
                     case_text(c));
        }
    }
}

static void buffer_check_bits(Buffer *b, const Case *c) {
    if (b->first == NULL) {
        b->first = allocate(b->bytes);
        memcpy(b->first, b->memory, b->bytes);
    }
    if (memcmp(b->first, b->memory, b->bytes) != 0)
        fail_msg("%s: not the bits of the first run (%s)", b->name, case_text(c));
}

static void case_load(Case *c) {
    for (int i = 0; i < c->count; i++) buffer_load(&c->buffers[i], c->dtype);
}

static void case_check(Case *c) {
    for (int i = 0; i < c->count; i++) {
        Buffer *b = &c->buffers[i];
        buffer_check_behind(b, c);
        if (b->role == INPUT)
            buffer_check_untouched(b, c);
        else
            buffer_check_close(b, c);
        buffer_check_bits(b, c);
    }
}

static void case_free(Case *c) {
    for (int i = 0; i < c->count; i++) {
        Buffer *b = &c->buffers[i];
        free(b->value), free(b->expected), free(b->memory), free(b->first);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the ops

typedef struct {
    const char *name;
    void (*make)(Case *c);
    void (*run)(Ops *ops, void **m, Shape s, DType dtype); // m: the buffers' memory, in the order of `make`
    double (*objective)(const Case *c);                    // its slopes are the gradients that `make` expects
    const Shape *shapes;                                   // ends with an empty one
    bool fp32_only;
} Op;

// Sizes that divide by nothing, a single row, one that no vector fits, one with room to spare, and two that cross the
// borders of tiles (600 rows) and of the blocks of weight gradients (1500 rows).
static const Shape LAYERS[] = {
    {.B = 2, .T = 17, .C = 48, .NH = 3, .OC = 144, .V = 131, .Vp = 256},
    {.B = 1, .T = 1, .C = 48, .NH = 3, .OC = 144, .V = 131, .Vp = 256},
    {.B = 1, .T = 5, .C = 30, .NH = 3, .OC = 90, .V = 127, .Vp = 128},
    {.B = 3, .T = 65, .C = 128, .NH = 2, .OC = 384, .V = 257, .Vp = 384},
    {.B = 4, .T = 150, .C = 96, .NH = 3, .OC = 200, .V = 400, .Vp = 512},
    {.B = 10, .T = 150, .C = 64, .NH = 2, .OC = 80, .V = 128, .Vp = 128},
    {0},
};

static const Shape ONCE[] = {{.n = 1}, {0}};
static const Shape SLICES[] = {{.n = 64}, {.n = 64 * 37}, {.n = 64 * 4321}, {0}};

static double dot(const double *a, const double *b, size_t n) {
    double total = 0;
    for (size_t i = 0; i < n; i++) total += a[i] * b[i];
    return total;
}

// --- embedding

static void embedding_forward_make(Case *c) {
    Shape s = c->shape;
    double *out = output(c, "out", ACTIVATION, (size_t)s.B * s.T * s.C, ELEMENTWISE);
    int *tokens = input_integers(c, "tokens", (size_t)s.B * s.T, s.V);
    const double *wte = input_normal(c, "wte", ACTIVATION, (size_t)s.Vp * s.C, 0, 1);
    const double *wpe = input_normal(c, "wpe", ACTIVATION, (size_t)(s.T + 3) * s.C, 0, 1);
    reference_embedding_forward(out, tokens, wte, wpe, s.B, s.T, s.C);
    free(tokens);
}

static void embedding_forward_run(Ops *ops, void **m, Shape s, DType dtype) {
    embedding_forward(ops, m[0], m[1], m[2], m[3], s.B, s.T, s.C, dtype);
}

static void embedding_backward_make(Case *c) {
    Shape s = c->shape;
    double *dwte = sum(c, "dwte", FLOAT, (size_t)s.Vp * s.C, s.B * s.T);
    double *dwpe = output(c, "dwpe", FLOAT, (size_t)s.T * s.C, s.B);
    last_buffer(c)->spare = (size_t)3 * s.C;
    int *tokens = input_integers(c, "tokens", (size_t)s.B * s.T, s.V / 16); // most tokens come more than once
    const double *dout = input_normal(c, "dout", ACTIVATION, (size_t)s.B * s.T * s.C, 0, 1);
    reference_embedding_backward(dwte, dwpe, tokens, dout, s.B, s.T, s.C);
    free(tokens);
}

static void embedding_backward_run(Ops *ops, void **m, Shape s, DType dtype) {
    embedding_backward(ops, m[0], m[1], m[2], m[3], s.B, s.T, s.C, dtype);
}

// --- layernorm

static void layernorm_forward_make(Case *c) {
    Shape s = c->shape;
    int N = s.B * s.T;
    double *out = output(c, "out", ACTIVATION, (size_t)N * s.C, s.C);
    double *mean = output(c, "mean", FLOAT, N, s.C), *rstd = output(c, "rstd", FLOAT, N, s.C);
    const double *x = input_normal(c, "x", ACTIVATION, (size_t)N * s.C, 0.5, 1);
    const double *w = input_normal(c, "w", ACTIVATION, s.C, 1, 0.3),
                 *b = input_normal(c, "b", ACTIVATION, s.C, 0, 1);
    reference_layernorm_forward(out, mean, rstd, x, w, b, N, s.C);
}

static void layernorm_forward_run(Ops *ops, void **m, Shape s, DType dtype) {
    layernorm_forward(ops, m[0], m[1], m[2], m[3], m[4], m[5], s.B * s.T, s.C, dtype);
}

// Rows whose deviation is that of eps, where its place matters, on top of a mean far larger.
static void layernorm_small_make(Case *c) {
    Shape s = c->shape;
    int N = s.B * s.T;
    double *out = output(c, "out", ACTIVATION, (size_t)N * s.C, s.C), *statistics = allocate_doubles(2 * (size_t)N);
    const double *x = input_normal(c, "x", ACTIVATION, (size_t)N * s.C, 0.004, 0.003);
    const double *w = input_normal(c, "w", ACTIVATION, s.C, 1, 0.3),
                 *b = input_normal(c, "b", ACTIVATION, s.C, 0, 1);
    reference_layernorm_forward(out, statistics, statistics + N, x, w, b, N, s.C);
    free(statistics);
}

static void layernorm_small_run(Ops *ops, void **m, Shape s, DType dtype) {
    layernorm_forward(ops, m[0], NULL, NULL, m[1], m[2], m[3], s.B * s.T, s.C, dtype);
}

static void residual_layernorm_forward_make(Case *c) {
    Shape s = c->shape;
    int N = s.B * s.T;
    size_t n = (size_t)N * s.C;
    double *total = output(c, "sum", ACTIVATION, n, ELEMENTWISE), *out = output(c, "out", ACTIVATION, n, s.C);
    double *mean = output(c, "mean", FLOAT, N, s.C), *rstd = output(c, "rstd", FLOAT, N, s.C);
    const double *x = input_normal(c, "x", ACTIVATION, n, 0.5, 1), *y = input_normal(c, "y", ACTIVATION, n, 0, 1);
    const double *w = input_normal(c, "w", ACTIVATION, s.C, 1, 0.3),
                 *b = input_normal(c, "b", ACTIVATION, s.C, 0, 1);
    // The norm is that of the sum as stored, so that it is the same when computed again in the backward pass.
    for (size_t i = 0; i < n; i++) total[i] = round_to_storage(&c->buffers[0], c->dtype, x[i] + y[i]);
    reference_layernorm_forward(out, mean, rstd, total, w, b, N, s.C);
}

static void residual_layernorm_forward_run(Ops *ops, void **m, Shape s, DType dtype) {
    residual_layernorm_forward(ops, m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7], s.B * s.T, s.C, dtype);
}

static void layernorm_backward_make(Case *c) {
    Shape s = c->shape;
    int N = s.B * s.T;
    size_t n = (size_t)N * s.C;
    double *dx = sum(c, "dx", ACTIVATION, n, s.C);
    last_buffer(c)->slope_of = 4;
    double *dw = output(c, "dw", FLOAT, s.C, N);
    last_buffer(c)->slope_of = 5;
    double *db = output(c, "db", FLOAT, s.C, N);
    const double *dout = input_normal(c, "dout", ACTIVATION, n, 0, 1);
    const double *x = input_normal(c, "x", ACTIVATION, n, 0.5, 1),
                 *w = input_normal(c, "w", ACTIVATION, s.C, 1, 0.3);
    reference_layernorm_backward(dx, dw, db, dout, x, w, N, s.C);

    double *out = allocate_doubles(n + s.C + 2 * (size_t)N), *zero = out + n, *mean = zero + s.C, *rstd = mean + N;
    reference_layernorm_forward(out, mean, rstd, x, w, zero, N, s.C);
    input_values(c, "mean", FLOAT, N, mean);
    input_values(c, "rstd", FLOAT, N, rstd);
    free(out);
}

static void layernorm_backward_run(Ops *ops, void **m, Shape s, DType dtype) {
    layernorm_backward(ops, m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7], s.B * s.T, s.C, dtype);
}

static double layernorm_objective(const Case *c) {
    Shape s = c->shape;
    int N = s.B * s.T;
    size_t n = (size_t)N * s.C;
    const Buffer *b = c->buffers;
    double *out = allocate_doubles(n + s.C + 2 * (size_t)N), *zero = out + n, *mean = zero + s.C, *rstd = mean + N;
    reference_layernorm_forward(out, mean, rstd, b[4].value, b[5].value, zero, N, s.C);
    double objective = dot(out, b[3].value, n);
    free(out);
    return objective;
}

// --- residual

static void residual_forward_make(Case *c) {
    size_t n = (size_t)c->shape.B * c->shape.T * c->shape.C;
    double *out = output(c, "out", ACTIVATION, n, ELEMENTWISE);
    const double *x = input_normal(c, "x", ACTIVATION, n, 0, 1), *y = input_normal(c, "y", ACTIVATION, n, 0, 1);
    for (size_t i = 0; i < n; i++) out[i] = x[i] + y[i];
}

static void residual_forward_run(Ops *ops, void **m, Shape s, DType dtype) {
    residual_forward(ops, m[0], m[1], m[2], (size_t)s.B * s.T * s.C, dtype);
}

static void residual_in_place_make(Case *c) {
    size_t n = (size_t)c->shape.B * c->shape.T * c->shape.C;
    double *out = sum(c, "out", ACTIVATION, n, ELEMENTWISE);
    const double *y = input_normal(c, "y", ACTIVATION, n, 0, 1);
    for (size_t i = 0; i < n; i++) out[i] += y[i];
}

static void residual_onto_x_run(Ops *ops, void **m, Shape s, DType dtype) {
    residual_forward(ops, m[0], m[0], m[1], (size_t)s.B * s.T * s.C, dtype);
}

static void residual_onto_y_run(Ops *ops, void **m, Shape s, DType dtype) {
    residual_forward(ops, m[0], m[1], m[0], (size_t)s.B * s.T * s.C, dtype);
}

// --- linear

static void linear_forward_make(Case *c) {
    Shape s = c->shape;
    int N = s.B * s.T;
    double *out = output(c, "out", ACTIVATION, (size_t)N * s.OC, s.C + 1);
    const double *x = input_normal(c, "x", ACTIVATION, (size_t)N * s.C, 0, 1);
    const double *w = input_normal(c, "w", ACTIVATION, (size_t)s.C * s.OC, 0, 0.2);
    const double *b = input_normal(c, "b", ACTIVATION, s.OC, 0, 1);
    reference_linear_forward(out, x, w, b, N, s.C, s.OC);
}

static void linear_forward_run(Ops *ops, void **m, Shape s, DType dtype) {
    linear_forward(ops, m[0], m[1], m[2], m[3], s.B * s.T, s.C, s.OC, dtype);
}

static void linear_backward_make(Case *c) {
    Shape s = c->shape;
    int N = s.B * s.T;
    double *dx = output(c, "dx", ACTIVATION, (size_t)N * s.C, s.OC);
    last_buffer(c)->slope_of = 4;
    double *dw = output(c, "dw", FLOAT, (size_t)s.C * s.OC, N);
    last_buffer(c)->slope_of = 5;
    double *db = output(c, "db", FLOAT, s.OC, N);
    const double *dout = input_normal(c, "dout", ACTIVATION, (size_t)N * s.OC, 0, 1);
    const double *x = input_normal(c, "x", ACTIVATION, (size_t)N * s.C, 0, 1);
    const double *w = input_normal(c, "w", ACTIVATION, (size_t)s.C * s.OC, 0, 0.2);
    reference_linear_backward(dx, dw, db, dout, x, w, N, s.C, s.OC);
}

static void linear_backward_run(Ops *ops, void **m, Shape s, DType dtype) {
    linear_backward(ops, m[0], m[1], m[2], m[3], m[4], m[5], s.B * s.T, s.C, s.OC, dtype);
}

static double linear_objective(const Case *c) {
    Shape s = c->shape;
    int N = s.B * s.T;
    const Buffer *b = c->buffers;
    double *out = allocate_doubles((size_t)N * s.OC + s.OC), *zero = out + (size_t)N * s.OC;
    reference_linear_forward(out, b[4].value, b[5].value, zero, N, s.C, s.OC);
    double objective = dot(out, b[3].value, (size_t)N * s.OC);
    free(out);
    return objective;
}

static void linear_weights_backward_make(Case *c) {
    Shape s = c->shape;
    int N = s.B * s.T;
    double *dw = output(c, "dw", FLOAT, (size_t)s.C * s.OC, N), *db = output(c, "db", FLOAT, s.OC, N);
    const double *dout = input_normal(c, "dout", ACTIVATION, (size_t)N * s.OC, 0, 1);
    const double *x = input_normal(c, "x", ACTIVATION, (size_t)N * s.C, 0, 1);
    const double *w = input_normal(c, "w", ACTIVATION, (size_t)s.C * s.OC, 0, 0.2);
    reference_linear_backward(NULL, dw, db, dout, x, w, N, s.C, s.OC);
}

static void linear_weights_backward_run(Ops *ops, void **m, Shape s, DType dtype) {
    linear_backward(ops, NULL, m[0], m[1], m[2], m[3], m[4], s.B * s.T, s.C, s.OC, dtype);
}

// --- GELU

static void gelu_forward_make(Case *c) {
    size_t n = (size_t)c->shape.B * c->shape.T * c->shape.OC;
    double *out =
        output(c, "out", ACTIVATION, n, 4); // less than the rest: the largest results are far from the bend
    const double *x = input_normal(c, "x", ACTIVATION, n, 0, 1);
    reference_gelu_forward(out, x, n);
}

static void gelu_forward_run(Ops *ops, void **m, Shape s, DType dtype) {
    gelu_forward(ops, m[0], m[1], (size_t)s.B * s.T * s.OC, dtype);
}

static void gelu_backward_make(Case *c) {
    size_t n = (size_t)c->shape.B * c->shape.T * c->shape.OC;
    double *dx = output(c, "dx", ACTIVATION, n, ELEMENTWISE);
    last_buffer(c)->slope_of = 2;
    const double *dout = input_normal(c, "dout", ACTIVATION, n, 0, 1),
                 *x = input_normal(c, "x", ACTIVATION, n, 0, 2);
    reference_gelu_backward(dx, dout, x, n);
}

static void gelu_backward_run(Ops *ops, void **m, Shape s, DType dtype) {
    gelu_backward(ops, m[0], m[1], m[2], (size_t)s.B * s.T * s.OC, dtype);
}

static double gelu_objective(const Case *c) {
    const Buffer *b = c->buffers;
    double *out = allocate_doubles(b[2].n);
    reference_gelu_forward(out, b[2].value, b[2].n);
    double objective = dot(out, b[1].value, b[2].n);
    free(out);
    return objective;
}

static void gelu_in_place_make(Case *c) {
    size_t n = (size_t)c->shape.B * c->shape.T * c->shape.OC;
    double *dx = replaced(c, "dx", ACTIVATION, n, ELEMENTWISE);
    const double *x = input_normal(c, "x", ACTIVATION, n, 0, 2);
    reference_gelu_backward(dx, c->buffers[0].value, x, n);
}

static void gelu_in_place_run(Ops *ops, void **m, Shape s, DType dtype) {
    gelu_backward(ops, m[0], m[0], m[1], (size_t)s.B * s.T * s.OC, dtype);
}

// One sign and size at a time, so that the tolerance is that of the numbers around: far out both passes are 0 or 1.
static const double FAR[] = {100, -100, 30000, -30000, 1e-30, -1e-30, 0};

static void gelu_far_make(Case *c) {
    enum { PIECE = 64 };
    double values[COUNT(FAR) * PIECE], ones[COUNT(FAR) * PIECE];
    for (size_t i = 0; i < COUNT(values); i++) values[i] = FAR[i / PIECE], ones[i] = 1;
    for (size_t i = 0; i < COUNT(FAR); i++) output(c, "out", ACTIVATION, PIECE, ELEMENTWISE);
    double *dx = output(c, "dx", ACTIVATION, COUNT(values), ELEMENTWISE);
    const double *x = input_values(c, "x", ACTIVATION, COUNT(values), values);
    const double *dout = input_values(c, "dout", ACTIVATION, COUNT(values), ones);
    for (size_t i = 0; i < COUNT(FAR); i++) reference_gelu_forward(c->buffers[i].expected, x + i * PIECE, PIECE);
    reference_gelu_backward(dx, dout, x, COUNT(values));
}

static void gelu_far_run(Ops *ops, void **m, Shape s, DType dtype) {
    enum { PIECE = 64, DX = COUNT(FAR), X, DOUT };
    (void)s;
    for (size_t i = 0; i < COUNT(FAR); i++) {
        gelu_forward(ops, m[i], (char *)m[X] + i * PIECE * dtype_size(dtype), PIECE, dtype);
    }
    gelu_backward(ops, m[DX], m[DOUT], m[X], COUNT(FAR) * PIECE, dtype);
}

// --- attention

static void attention_forward_make(Case *c) {
    Shape s = c->shape;
    size_t n = (size_t)s.B * s.T * s.C;
    double *out = output(c, "out", ACTIVATION, n, s.T + s.C / s.NH);
    last_buffer(c)->roundings = 1;
    double *lse = output(c, "lse", FLOAT, (size_t)s.B * s.NH * s.T, s.T + s.C / s.NH);
    const double *qkv = input_normal(c, "qkv", ACTIVATION, 3 * n, 0, 1);
    reference_attention_forward(out, lse, qkv, s.B, s.T, s.C, s.NH);
}

static void attention_forward_run(Ops *ops, void **m, Shape s, DType dtype) {
    attention_forward(ops, m[0], m[1], m[2], s.B, s.T, s.C, s.NH, dtype);
}

static void attention_backward_make(Case *c) {
    Shape s = c->shape;
    size_t n = (size_t)s.B * s.T * s.C, rows = (size_t)s.B * s.NH * s.T;
    double *dqkv = output(c, "dqkv", ACTIVATION, 3 * n, s.T + s.C / s.NH);
    last_buffer(c)->roundings = 3;
    last_buffer(c)->slope_of = 4;
    const double *dout = input_normal(c, "dout", ACTIVATION, n, 0, 1);
    Buffer *out = buffer_add(c, "out", INPUT, ACTIVATION, n), *lse = buffer_add(c, "lse", INPUT, FLOAT, rows);
    const double *qkv = input_normal(c, "qkv", ACTIVATION, 3 * n, 0, 1);
    reference_attention_forward(out->value, lse->value, qkv, s.B, s.T, s.C, s.NH);
    for (size_t i = 0; i < n; i++) out->value[i] = round_to_storage(out, c->dtype, out->value[i]);
    for (size_t i = 0; i < rows; i++) lse->value[i] = round_to_storage(lse, c->dtype, lse->value[i]);
    reference_attention_backward(dqkv, dout, qkv, s.B, s.T, s.C, s.NH);
}

static void attention_backward_run(Ops *ops, void **m, Shape s, DType dtype) {
    attention_backward(ops, m[0], m[1], m[2], m[3], m[4], s.B, s.T, s.C, s.NH, dtype);
}

static double attention_objective(const Case *c) {
    Shape s = c->shape;
    size_t n = (size_t)s.B * s.T * s.C;
    double *out = allocate_doubles(n + (size_t)s.B * s.NH * s.T), *lse = out + n;
    reference_attention_forward(out, lse, c->buffers[4].value, s.B, s.T, s.C, s.NH);
    double objective = dot(out, c->buffers[1].value, n);
    free(out);
    return objective;
}

// --- the head

static void unembed_forward_make(Case *c) {
    Shape s = c->shape;
    int N = s.B * s.T;
    double *logits = output(c, "logits", ACTIVATION, (size_t)N * s.Vp, s.C);
    const double *x = input_normal(c, "x", ACTIVATION, (size_t)N * s.C, 0, 1);
    const double *wte = input_normal(c, "wte", ACTIVATION, (size_t)s.Vp * s.C, 0, 0.2);
    reference_unembed_forward(logits, x, wte, N, s.C, s.Vp);
}

static void unembed_forward_run(Ops *ops, void **m, Shape s, DType dtype) {
    unembed_forward(ops, m[0], m[1], m[2], s.B * s.T, s.C, s.Vp, dtype);
}

static void unembed_backward_make_either(Case *c, bool accumulate) {
    Shape s = c->shape;
    int N = s.B * s.T;
    size_t weights = (size_t)s.Vp * s.C;
    double *dx = output(c, "dx", ACTIVATION, (size_t)N * s.C, s.Vp);
    last_buffer(c)->slope_of = 3;
    double *dwte = accumulate ? sum(c, "dwte", FLOAT, weights, N) : output(c, "dwte", FLOAT, weights, N);
    last_buffer(c)->slope_of = 4;
    const double *dlogits = input_normal(c, "dlogits", ACTIVATION, (size_t)N * s.Vp, 0, 1);
    const double *x = input_normal(c, "x", ACTIVATION, (size_t)N * s.C, 0, 1);
    const double *wte = input_normal(c, "wte", ACTIVATION, weights, 0, 0.2);
    reference_unembed_backward(dx, dwte, dlogits, x, wte, N, s.C, s.Vp, accumulate);
}

static void unembed_backward_make(Case *c) { unembed_backward_make_either(c, false); }
static void unembed_accumulate_make(Case *c) { unembed_backward_make_either(c, true); }

static void unembed_backward_run(Ops *ops, void **m, Shape s, DType dtype) {
    unembed_backward(ops, m[0], m[1], m[2], m[3], m[4], s.B * s.T, s.C, s.Vp, false, dtype);
}

static void unembed_accumulate_run(Ops *ops, void **m, Shape s, DType dtype) {
    unembed_backward(ops, m[0], m[1], m[2], m[3], m[4], s.B * s.T, s.C, s.Vp, true, dtype);
}

static double unembed_objective(const Case *c) {
    Shape s = c->shape;
    int N = s.B * s.T;
    const Buffer *b = c->buffers;
    double *logits = allocate_doubles((size_t)N * s.Vp);
    reference_unembed_forward(logits, b[3].value, b[4].value, N, s.C, s.Vp);
    double objective = dot(logits, b[2].value, (size_t)N * s.Vp);
    free(logits);
    return objective;
}

// --- softmax and loss

static const float SOFTMAX_SCALE = 1 / 64.0f;

// Every seventh target is left out. Logits are normal, or for a spread beyond 100 either that or minus that.
static void softmax_make_any(Case *c, double spread, double scale) {
    Shape s = c->shape;
    int N = s.B * s.T;
    double *losses = output(c, "losses", FLOAT, N, s.V);
    Buffer *logits = buffer_add(c, "logits", scale == 0 ? INPUT : REPLACED, ACTIVATION, (size_t)N * s.Vp);
    logits->terms = s.V;
    logits->slope_of = scale == 0 ? -1 : 1;
    for (size_t i = 0; i < logits->n; i++) {
        double x = spread > 100 ? (random_bits() % 3 == 0 ? spread : -spread) : spread * random_normal();
        logits->value[i] = round_to_storage(logits, c->dtype, x);
    }
    int *targets = input_integers(c, "targets", N, s.V);
    for (int i = 3; i < N; i += 7) c->buffers[2].value[i] = targets[i] = -1;
    double *dlogits = scale == 0 ? allocate_doubles(logits->n) : logits->expected;
    reference_softmax_cross_entropy(losses, dlogits, logits->value, targets, N, s.V, s.Vp, scale);
    if (scale == 0) free(dlogits);
    free(targets);
}

static void softmax_make(Case *c) { softmax_make_any(c, 2, SOFTMAX_SCALE); }
static void softmax_extreme_make(Case *c) { softmax_make_any(c, 1e4, SOFTMAX_SCALE); }
static void softmax_evaluation_make(Case *c) { softmax_make_any(c, 2, 0); }

static void softmax_run(Ops *ops, void **m, Shape s, DType dtype) {
    softmax_cross_entropy(ops, m[0], m[1], m[2], s.B * s.T, s.V, s.Vp, SOFTMAX_SCALE, dtype);
}

static void softmax_evaluation_run(Ops *ops, void **m, Shape s, DType dtype) {
    softmax_cross_entropy(ops, m[0], m[1], m[2], s.B * s.T, s.V, s.Vp, 0, dtype);
}

static double softmax_objective(const Case *c) {
    Shape s = c->shape;
    int N = s.B * s.T;
    double *losses = allocate_doubles(N + c->buffers[1].n), total = 0;
    int *targets = (int *)allocate(N * sizeof(int));
    for (int i = 0; i < N; i++) targets[i] = (int)c->buffers[2].value[i];
    reference_softmax_cross_entropy(losses, losses + N, c->buffers[1].value, targets, N, s.V, s.Vp, 1);
    for (int i = 0; i < N; i++) total += losses[i] * SOFTMAX_SCALE;
    free(losses), free(targets);
    return total;
}

// --- optimizer and casts

static AdamW adamw_settings(bool decays) {
    return (AdamW){.lr = 1e-2f,
                   .beta1 = 0.9f,
                   .beta2 = 0.95f,
                   .eps = 1e-8f,
                   .decay = decays ? 0.1f : 0,
                   .correction1 = 0.271f,
                   .correction2 = 0.142625f}; // of step 3
}

static void adamw_make_either(Case *c, bool decays) {
    size_t n = c->shape.n;
    double *w = sum(c, "w", FLOAT, n, ELEMENTWISE);
    double *m = sum(c, "m", FLOAT, n, ELEMENTWISE), *v = sum(c, "v", FLOAT, n, ELEMENTWISE);
    double *grad = input_normal(c, "grad", FLOAT, n, 0, 1), half = 0.5;
    input_values(c, "scale", FLOAT, 1, &half);
    Buffer *b = c->buffers;
    for (size_t i = 0; i < n; i++) {
        double size = i % 5 == 0 ? 1e-8 : 1e-2; // as small as eps, so that its place is seen
        w[i] = b[0].value[i] = (float)(0.05 * b[0].value[i]);
        m[i] = b[1].value[i] = (float)(size * b[1].value[i]);
        v[i] = b[2].value[i] = (float)(size * size * b[2].value[i] * b[2].value[i]);
        grad[i] = (float)(size * grad[i]);
    }
    reference_adamw(w, m, v, grad, n, half, adamw_settings(decays));
    if (!decays) return;
    double *low = output(c, "low", HALF, n, ELEMENTWISE); // test_adamw_low compares its bits
    memcpy(low, w, n * sizeof(double));
}

static void adamw_make(Case *c) { adamw_make_either(c, true); }
static void adamw_undecayed_make(Case *c) { adamw_make_either(c, false); }

static void adamw_run(Ops *ops, void **m, Shape s, DType dtype) {
    (void)dtype;
    adamw(ops, m[0], m[1], m[2], m[5], m[3], s.n, m[4], adamw_settings(true));
}

static void adamw_undecayed_run(Ops *ops, void **m, Shape s, DType dtype) {
    (void)dtype;
    adamw(ops, m[0], m[1], m[2], NULL, m[3], s.n, m[4], adamw_settings(false));
}

static void cast_from_f32_make(Case *c) {
    double *out = output(c, "out", ACTIVATION, c->shape.n, 0);
    const double *x = input_normal(c, "x", FLOAT, c->shape.n, 0, 1);
    memcpy(out, x, c->shape.n * sizeof(double));
}

static void cast_from_f32_run(Ops *ops, void **m, Shape s, DType dtype) {
    cast_from_f32(ops, m[0], m[1], s.n, dtype);
}

static void cast_to_f32_make(Case *c) {
    double *out = output(c, "out", FLOAT, c->shape.n, 0);
    const double *x = input_normal(c, "x", ACTIVATION, c->shape.n, 0, 1);
    memcpy(out, x, c->shape.n * sizeof(double));
}

static void cast_to_f32_run(Ops *ops, void **m, Shape s, DType dtype) { cast_to_f32(ops, m[0], m[1], s.n, dtype); }

static void fill_constant_make(Case *c) {
    double *out = output(c, "out", FLOAT, c->shape.n, 0);
    for (size_t i = 0; i < c->shape.n; i++) out[i] = 0.75;
}

static void fill_constant_run(Ops *ops, void **m, Shape s, DType dtype) {
    (void)dtype;
    fill_constant(ops, m[0], 0.75f, s.n);
}

static const Op OPS[] = {
    {"embedding_forward", embedding_forward_make, embedding_forward_run, NULL, LAYERS, false},
    {"embedding_backward", embedding_backward_make, embedding_backward_run, NULL, LAYERS, false},
    {"layernorm_forward", layernorm_forward_make, layernorm_forward_run, NULL, LAYERS, false},
    {"layernorm_forward, small rows, no statistics", layernorm_small_make, layernorm_small_run, NULL, LAYERS,
     false},
    {"residual_layernorm_forward", residual_layernorm_forward_make, residual_layernorm_forward_run, NULL, LAYERS,
     false},
    {"layernorm_backward", layernorm_backward_make, layernorm_backward_run, layernorm_objective, LAYERS, false},
    {"residual_forward", residual_forward_make, residual_forward_run, NULL, LAYERS, false},
    {"residual_forward onto x", residual_in_place_make, residual_onto_x_run, NULL, LAYERS, false},
    {"residual_forward onto y", residual_in_place_make, residual_onto_y_run, NULL, LAYERS, false},
    {"linear_forward", linear_forward_make, linear_forward_run, NULL, LAYERS, false},
    {"linear_backward", linear_backward_make, linear_backward_run, linear_objective, LAYERS, false},
    {"linear_backward without dx", linear_weights_backward_make, linear_weights_backward_run, NULL, LAYERS, false},
    {"gelu_forward", gelu_forward_make, gelu_forward_run, NULL, LAYERS, false},
    {"gelu_backward", gelu_backward_make, gelu_backward_run, gelu_objective, LAYERS, false},
    {"gelu_backward in place", gelu_in_place_make, gelu_in_place_run, NULL, LAYERS, false},
    {"gelu far out", gelu_far_make, gelu_far_run, NULL, ONCE, false},
    {"attention_forward", attention_forward_make, attention_forward_run, NULL, LAYERS, false},
    {"attention_backward", attention_backward_make, attention_backward_run, attention_objective, LAYERS, false},
    {"unembed_forward", unembed_forward_make, unembed_forward_run, NULL, LAYERS, false},
    {"unembed_backward", unembed_backward_make, unembed_backward_run, unembed_objective, LAYERS, false},
    {"unembed_backward, added", unembed_accumulate_make, unembed_accumulate_run, unembed_objective, LAYERS, false},
    {"softmax_cross_entropy", softmax_make, softmax_run, softmax_objective, LAYERS, false},
    {"softmax_cross_entropy, logits of 1e4", softmax_extreme_make, softmax_run, NULL, LAYERS, false},
    {"softmax_cross_entropy, evaluation", softmax_evaluation_make, softmax_evaluation_run, NULL, LAYERS, false},
    {"adamw", adamw_make, adamw_run, NULL, SLICES, true},
    {"adamw without decay", adamw_undecayed_make, adamw_undecayed_run, NULL, SLICES, true},
    {"cast_from_f32", cast_from_f32_make, cast_from_f32_run, NULL, SLICES, false},
    {"cast_to_f32", cast_to_f32_make, cast_to_f32_run, NULL, SLICES, false},
    {"fill_constant", fill_constant_make, fill_constant_run, NULL, SLICES, true},
};

// ---------------------------------------------------------------------------------------------------------------------
// the test of an op

static bool shape_empty(Shape s) { return s.B == 0 && s.n == 0; }

static int make_cases(const Op *op, Case *cases) {
    int count = 0;
    for (const Shape *s = op->shapes; !shape_empty(*s); s++)
        for (int dtype = F32; dtype <= (op->fp32_only ? F32 : BF16); dtype++) {
            random_state = 1;
            cases[count] = (Case){.shape = *s, .dtype = dtype == F32 ? F32 : BF16};
            op->make(&cases[count++]);
        }
    return count;
}

static void run_case(const Op *op, Ops *ops, Case *c) {
    void *memory[MAX_BUFFERS] = {NULL};
    case_load(c);
    for (int i = 0; i < c->count; i++) memory[i] = c->buffers[i].memory;
    op->run(ops, memory, c->shape, c->dtype);
}

// What the plan needs, the device gets and not a byte more: an op that then asks for more ends the program.
static Device *rehearse(const Op *op, Case *cases, int count, int threads) {
    Device *plan = device_plan();
    Ops *ops = ops_open(plan, threads);
    for (int i = 0; i < count; i++) {
        run_case(op, ops, &cases[i]);
        for (int j = 0; j < cases[i].count; j++) buffer_check_untouched(&cases[i].buffers[j], &cases[i]);
    }
    ops_close(ops);
    return plan;
}

static void test_op(void **state) {
    const Op *op = (const Op *)*state;
    Case cases[2 * MAX_SHAPES];
    int count = make_cases(op, cases);
    for (size_t t = 0; t < COUNT(THREADS); t++) {
        Device *plan = rehearse(op, cases, count, THREADS[t]);
        Device *device = device_open(plan);
        Ops *ops = ops_open(device, THREADS[t]);
        for (int i = 0; i < 2 * count; i++) {
            run_case(op, ops, &cases[i % count]);
            case_check(&cases[i % count]);
        }
        assert_true(device_same_ledger(plan, device));
        ops_close(ops);
        device_close(device);
        device_close(plan);
    }
    for (int i = 0; i < count; i++) case_free(&cases[i]);
}

// The references' own gradients against the slopes of the references' forward passes.
static void check_slope(const Op *op, Case *c, const Buffer *b) {
    enum { SAMPLES = 25 };
    double *x = c->buffers[b->slope_of].value, largest = 0;
    for (size_t i = 0; i < b->n; i++) largest = fmax(largest, fabs(b->expected[i]));
    for (size_t k = 0; k < SAMPLES; k++) {
        size_t i = b->n <= SAMPLES ? k % b->n : (size_t)(random_bits() % b->n);
        double before = x[i], step = 1e-4, gradient = b->expected[i] - (b->role == SUM ? b->value[i] : 0);
        x[i] = before + step;
        double above = op->objective(c);
        x[i] = before - step;
        double below = op->objective(c);
        x[i] = before;
        double slope = (above - below) / (2 * step);
        if (!(fabs(slope - gradient) <= 1e-6 * largest)) {
            fail_msg("%s: %s[%zu] is %.9g, but the slope is %.9g", op->name, b->name, i, gradient, slope);
        }
    }
}

static void test_references(void **state) {
    (void)state;
    for (size_t k = 0; k < COUNT(OPS); k++) {
        if (OPS[k].objective == NULL) continue;
        for (int shape = 0; shape < 3; shape++) {
            Case c = {.shape = OPS[k].shapes[shape], .dtype = F32};
            random_state = 2;
            OPS[k].make(&c);
            for (int i = 0; i < c.count; i++) {
                if (c.buffers[i].slope_of >= 0) check_slope(&OPS[k], &c, &c.buffers[i]);
            }
            case_free(&c);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// tests of what the table cannot say

typedef struct {
    Device *device;
    Ops *ops;
} Machine;

static Machine machine_open(int threads) {
    Machine m = {.device = device_open(NULL), .ops = NULL};
    m.ops = ops_open(m.device, threads);
    return m;
}

static void machine_close(Machine m) {
    ops_close(m.ops);
    device_close(m.device);
}

static float *random_floats(size_t n, double deviation) {
    float *x = (float *)allocate(n * sizeof(float));
    for (size_t i = 0; i < n; i++) x[i] = (float)(deviation * random_normal());
    return x;
}

// Fusion never changes a value.
static void test_fused_norm(void **state) {
    enum { N = 37, C = 96 };
    (void)state;
    Machine machine = machine_open(2);
    for (int i = 0; i < 2; i++) {
        DType dtype = i == 0 ? F32 : BF16;
        size_t bytes = N * C * dtype_size(dtype);
        char *m = (char *)allocate(6 * bytes), *total = m, *out = m + bytes, *fused_total = m + 2 * bytes;
        char *fused_out = m + 3 * bytes, *x = m + 4 * bytes, *y = m + 5 * bytes, *w = y, *b = y + bytes / 2;
        float *random = random_floats(2 * N * C, 1), statistics[4][N];
        cast_from_f32(machine.ops, x, random, 2 * N * C, dtype);
        residual_forward(machine.ops, total, x, y, N * C, dtype);
        layernorm_forward(machine.ops, out, statistics[0], statistics[1], total, w, b, N, C, dtype);
        residual_layernorm_forward(machine.ops, fused_total, fused_out, statistics[2], statistics[3], x, y, w, b, N,
                                   C, dtype);
        assert_memory_equal(m, fused_total, 2 * bytes);
        assert_memory_equal(statistics[0], statistics[2], 2 * sizeof statistics[0]);
        free(m), free(random);
    }
    machine_close(machine);
}

static void test_flops(void **state) {
    enum { N = 32, C = 64, OC = 96 };
    (void)state;
    Machine m = machine_open(1);
    float *x = random_floats(N * C, 1), *w = random_floats(C * OC, 1), *b = random_floats(OC, 1);
    float *out = random_floats(N * OC, 1);
    double before = ops_flops(m.ops);
    linear_forward(m.ops, out, x, w, b, N, C, OC, F32);
    assert_true(ops_flops(m.ops) - before == 2.0 * N * C * OC);
    free(x), free(w), free(b), free(out);
    machine_close(m);
}

static void test_adamw_low(void **state) {
    enum { N = 64 * 50 };
    (void)state;
    Machine machine = machine_open(2);
    float *w = random_floats(N, 1), *m = random_floats(N, 1e-2), *grad = random_floats(N, 1e-2), scale = 1;
    float *v = random_floats(N, 1e-2);
    uint16_t *low = (uint16_t *)allocate(N * sizeof(uint16_t));
    for (int i = 0; i < N; i++) v[i] *= v[i];
    adamw(machine.ops, w, m, v, low, grad, N, &scale, adamw_settings(true));
    for (int i = 0; i < N; i++) assert_int_equal(low[i], bf16_round(w[i]));
    machine_close(machine);
    free(w), free(m), free(v), free(grad), free(low);
}

// Every upper half with lower halves around the tie.
static void test_bf16_rounding(void **state) {
    static const uint32_t LOWER[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    const size_t n = 65536 * COUNT(LOWER);
    (void)state;
    float *x = (float *)allocate(n * sizeof(float)), *back = (float *)allocate(n * sizeof(float));
    uint16_t *out = (uint16_t *)allocate(n * sizeof(uint16_t));
    for (size_t i = 0; i < n; i++) x[i] = bits_float((uint32_t)(i / COUNT(LOWER)) << 16 | LOWER[i % COUNT(LOWER)]);
    Machine m = machine_open(2);
    cast_from_f32(m.ops, out, x, n, BF16);
    cast_to_f32(m.ops, back, out, n, BF16);
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = float_bits(x[i]);
        bool right = isnan(x[i]) ? isnan(bf16_float(out[i])) : out[i] == bf16_round(x[i]);
        if (!right) fail_msg("%08x is rounded to %04x, expected %04x", bits, out[i], bf16_round(x[i]));
        right = isnan(x[i]) ? isnan(back[i]) : float_bits(back[i]) == (uint32_t)out[i] << 16;
        if (!right) fail_msg("%04x is widened to %08x", out[i], float_bits(back[i]));
    }
    machine_close(m);
    free(x), free(back), free(out);
}

// In place: rounded as fp32, and packed into the first half of the memory. Every upper half, around the tie, and sizes
// that end within a block and between two powers of two of blocks.
static void test_rounding_in_place(void **state) {
    static const size_t SIZES[] = {64, 1024, 1088, 5 * 1024, 65536 * 3 + 64};
    (void)state;
    for (size_t t = 0; t < COUNT(THREADS); t++)
        for (size_t s = 0; s < COUNT(SIZES); s++) {
            const size_t n = SIZES[s];
            Machine m = machine_open(THREADS[t]);
            float *x = (float *)allocate(n * sizeof(float)), *packed = (float *)allocate(n * sizeof(float));
            uint16_t *right = (uint16_t *)allocate(n * sizeof(uint16_t));
            for (size_t i = 0; i < n; i++) {
                x[i] = packed[i] = bits_float((uint32_t)(i * 3 % 65536) << 16 | (uint32_t)(0x7fff + i % 3));
                right[i] = bf16_round(x[i]);
            }
            round_to_bf16(m.ops, x, n);
            pack_to_bf16(m.ops, packed, n);
            assert_memory_equal(packed, right, n * sizeof *right);
            for (size_t i = 0; i < n; i++) assert_int_equal(float_bits(x[i]), (uint32_t)right[i] << 16);
            machine_close(m);
            free(x), free(packed), free(right);
        }
}

// As a binary counter carries: the first term is the first to be added.
static void test_accumulate(void **state) {
    const size_t n = 64 * 100;
    const float *terms[3];
    (void)state;
    float *sum = (float *)allocate(n * sizeof(float)), *right = (float *)allocate(n * sizeof(float));
    for (size_t k = 0; k < 3; k++) terms[k] = random_floats(n, 1);
    float *start = random_floats(n, 1);
    for (size_t t = 0; t < COUNT(THREADS); t++)
        for (int count = 0; count <= 3; count++) {
            Machine m = machine_open(THREADS[t]);
            memcpy(sum, start, n * sizeof(float));
            memcpy(right, start, n * sizeof(float));
            for (int k = 0; k < count; k++)
                for (size_t i = 0; i < n; i++) right[i] = terms[k][i] + right[i];
            accumulate(m.ops, sum, terms, count, n);
            assert_memory_equal(sum, right, n * sizeof(float));
            machine_close(m);
        }
    for (size_t k = 0; k < 3; k++) free((void *)terms[k]);
    free(sum), free(right), free(start);
}

static void test_absmax(void **state) {
    const size_t n = 64 * 1000;
    (void)state;
    float *x = random_floats(n, 1);
    float largest = 0;
    for (size_t i = 0; i < n; i++) largest = fmaxf(largest, fabsf(x[i]));
    for (size_t t = 0; t < COUNT(THREADS); t++) {
        Machine m = machine_open(THREADS[t]);
        uint32_t bits = 0, joined = float_bits(1e10f);
        absmax(m.ops, &bits, x, n);
        assert_int_equal(bits, float_bits(largest));
        absmax(m.ops, &joined, x, n);
        assert_int_equal(joined, float_bits(1e10f));
        for (size_t i = 777; i < n; i += 31337) {
            float before = x[i];
            x[i] = -INFINITY;
            absmax(m.ops, &bits, x, n);
            assert_int_equal(bits, float_bits(INFINITY));
            x[i] = -NAN;
            absmax(m.ops, &bits, x, n);
            assert_true(bits > float_bits(INFINITY));
            x[i] = before;
            bits = 0;
        }
        machine_close(m);
    }
    free(x);
}

// Sums over all of x in pieces of a random number of 64s, taken in a random order.
static void sumsq_in_pieces(Ops *ops, int64_t sums[2], const float *x, size_t n, uint32_t bits) {
    size_t blocks = n / 64, pieces = 0;
    size_t *begin = (size_t *)allocate((blocks + 1) * sizeof(size_t)),
           *order = (size_t *)allocate(blocks * sizeof(size_t));
    for (size_t block = 0; block < blocks; block += 1 + random_bits() % 200) begin[pieces++] = block;
    begin[pieces] = blocks;
    for (size_t i = 0; i < pieces; i++) {
        size_t j = random_bits() % (i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    sums[0] = sums[1] = 0;
    for (size_t i = 0; i < pieces; i++) {
        size_t k = order[i];
        sumsq(ops, sums, x + 64 * begin[k], 64 * (begin[k + 1] - begin[k]), &bits);
    }
    free(begin), free(order);
}

static void check_sumsq(float *x, size_t n) {
    long double exact = 0;
    for (size_t i = 0; i < n; i++) exact += (long double)x[i] * x[i];
    int64_t first[2] = {0, 0};
    for (size_t t = 0; t < COUNT(THREADS); t++) {
        Machine m = machine_open(THREADS[t]);
        uint32_t bits = 0;
        absmax(m.ops, &bits, x, n);
        if (t == 0) sumsq(m.ops, first, x, n, &bits);
        double root = sumsq_root(first, bits);
        double error = exact == 0 ? root : (double)(fabsl((long double)root * root - exact) / exact);
        if (!(error <= 1e-12)) fail_msg("sum of squares %g, expected %Lg", root * root, exact);
        int64_t sums[2];
        for (int k = 0; k < 4; k++) {
            sumsq_in_pieces(m.ops, sums, x, n, bits);
            assert_true(sums[0] == first[0] && sums[1] == first[1]);
            for (size_t i = n - 1; i > 0; i--) {
                size_t j = random_bits() % (i + 1);
                float swapped = x[i];
                x[i] = x[j], x[j] = swapped;
            }
        }
        machine_close(m);
    }
}

static void test_sumsq(void **state) {
    const size_t n = 64 * 501;
    (void)state;
    for (double deviation = 1e-42; deviation < 1e37; deviation *= 1e6) { // denormal to nearly infinite
        float *x = random_floats(n, deviation);
        check_sumsq(x, n);
        free(x);
    }
    float *x = random_floats(n, 1); // all sizes at once
    for (size_t i = 0; i < n; i++) x[i] *= i % 3 == 0 ? 1e-30f : i % 3 == 1 ? 1e30f : 1e-40f;
    check_sumsq(x, n);
    memset(x, 0, n * sizeof(float));
    check_sumsq(x, n);
    for (size_t i = 0; i < n; i++) x[i] = 1; // a power of two is its own bound
    check_sumsq(x, n);
    x[123] = 16777215.0f / 8388608;
    check_sumsq(x, n);
    free(x);
}

static void test_clip_scale(void **state) {
    enum { N = 64 };
    (void)state;
    Machine m = machine_open(1);
    float x[N], scale, norm;
    for (int i = 0; i < N; i++) x[i] = 0.5f; // norm 4
    uint32_t bits = 0;
    int64_t sums[2] = {0, 0};
    absmax(m.ops, &bits, x, N);
    sumsq(m.ops, sums, x, N, &bits);
    static const float LIMITS[] = {1, 3.5f, 4, 5, 0};
    for (size_t i = 0; i < COUNT(LIMITS); i++) {
        clip_scale(m.ops, &scale, &norm, sums, &bits, LIMITS[i]);
        double expected = LIMITS[i] == 0 ? 1 : fmin(1, LIMITS[i] / (4 + 1e-6));
        assert_true(norm == 4 && fabs(scale - expected) <= 1e-7);
    }
    bits = float_bits(INFINITY);
    for (size_t i = 0; i < COUNT(LIMITS); i++) {
        clip_scale(m.ops, &scale, &norm, sums, &bits, LIMITS[i]);
        assert_true(isnan(scale) && isnan(norm));
    }
    machine_close(m);
}

static void test_scale_guard(void **state) {
    enum { N = 5 };
    (void)state;
    Machine m = machine_open(1);
    static const double faults[] = {NAN, INFINITY, -INFINITY};
    double x[N] = {1, -2, 0, 1e300, 5e-324};
    float scale = 0.25f;
    scale_guard(m.ops, &scale, x, N);
    assert_true(scale == 0.25f);
    for (size_t i = 0; i < COUNT(faults) * N; i++) {
        double y[N];
        memcpy(y, x, sizeof y);
        y[i % N] = faults[i / N];
        scale = 0.25f;
        scale_guard(m.ops, &scale, y, N);
        assert_true(isnan(scale));
    }
    machine_close(m);
}

// What a faulty gradient would update stays to the bit.
static void test_adamw_without_scale(void **state) {
    enum { N = 64 * 3, ARRAYS = 4 };
    (void)state;
    Machine machine = machine_open(2);
    static const float scales[] = {NAN, INFINITY};
    float *x[ARRAYS], *before[ARRAYS];
    uint16_t low[N];
    memset(low, 0x55, sizeof low);
    for (int i = 0; i < ARRAYS; i++) {
        x[i] = random_floats(N, 1), before[i] = (float *)allocate(N * sizeof(float));
        memcpy(before[i], x[i], N * sizeof(float));
    }
    for (size_t i = 0; i < COUNT(scales); i++)
        adamw(machine.ops, x[0], x[1], x[2], low, x[3], N, &scales[i], adamw_settings(true));
    for (int i = 0; i < ARRAYS; i++) assert_memory_equal(before[i], x[i], N * sizeof(float));
    for (int i = 0; i < N; i++) assert_int_equal(low[i], 0x5555);
    for (int i = 0; i < ARRAYS; i++) free(x[i]), free(before[i]);
    machine_close(machine);
}

static void test_largest(void **state) {
    (void)state;
    Machine m = machine_open(1);
    uint32_t bits[] = {3, 0x7fc00000, 5, 0}, most = 0xffffffff;
    largest(m.ops, &most, bits, 4);
    assert_int_equal(most, 0x7fc00000);
    largest(m.ops, &most, bits + 2, 2);
    assert_int_equal(most, 5);
    largest(m.ops, &most, bits + 3, 1);
    assert_int_equal(most, 0);
    machine_close(m);
}

// A large loss among small ones shows any other order.
static void test_losses_sum(void **state) {
    enum { B = 3, T = 17 };
    (void)state;
    Machine m = machine_open(3);
    float *losses = random_floats(B * T, 1);
    double sums[2] = {-1, -1}, expected[2] = {0, 0};
    losses[5] = 0x1p40f;
    for (int i = 0; i < B * T; i++) {
        expected[0] += (double)losses[i];
        if (i % T >= T / 2) expected[1] += (double)losses[i];
    }
    losses_sum(m.ops, sums, losses, B, T);
    assert_true(sums[0] == expected[0] && sums[1] == expected[1]);
    free(losses);
    machine_close(m);
}

// Mean 0, variance 1 and kurtosis 3 within five standard errors, and neither seed, tensor nor neighbours go together.
static void check_normal(const float *x, const float *others, size_t n) {
    double mean = 0, square = 0, fourth = 0, together = 0, neighbours = 0;
    for (size_t i = 0; i < n; i++) {
        double y = x[i], y2 = y * y;
        mean += y, square += y2, fourth += y2 * y2, together += y * others[i], neighbours += y * x[(i + 1) % n];
    }
    double root = sqrt((double)n);
    assert_true(fabs(mean / n) < 5 / root && fabs(together / n) < 5 / root && fabs(neighbours / n) < 5 / root);
    assert_true(fabs(square / n - 1) < 5 * sqrt(2) / root);
    assert_true(fabs(fourth / n - 3) < 5 * sqrt(96) / root);
}

static void test_fill_normal(void **state) {
    const size_t n = 64 * 8000, far = ((size_t)1 << 33) + 64;
    (void)state;
    float *whole = (float *)allocate(n * sizeof(float)), *other = (float *)allocate(n * sizeof(float));
    for (size_t t = 0; t < COUNT(THREADS); t++) {
        Machine m = machine_open(THREADS[t]);
        if (t == 0) fill_normal(m.ops, whole, 1337, 3, 0, n, 1);
        memset(other, 0xff, n * sizeof(float));
        for (size_t first = 0, piece; first < n; first += piece) {
            piece = 64 * (1 + random_bits() % 500);
            if (piece > n - first) piece = n - first;
            fill_normal(m.ops, other + first, 1337, 3, first, piece, 1);
        }
        assert_memory_equal(whole, other, n * sizeof(float));
        machine_close(m);
    }
    Machine m = machine_open(2);
    fill_normal(m.ops, other, 1337, 4, 0, n, 1);
    check_normal(whole, other, n);
    fill_normal(m.ops, other, 1338, 3, 0, n, 1);
    check_normal(whole, other, n);
    fill_normal(m.ops, other, 1337 + ((uint64_t)1 << 32), 3, 0, n, 1);
    check_normal(whole, other, n);
    fill_normal(m.ops, other, 1337, 3, far, n, 1);
    check_normal(other, whole, n);
    fill_normal(m.ops, other, 1337, 3, 0, n, 0.02f);
    for (size_t i = 0; i < n; i++)
        assert_true(fabs(other[i] - 0.02 * whole[i]) <= 1e-6 * 0.02 * fabs(whole[i]) + 1e-30);
    machine_close(m);
    free(whole), free(other);
}

int main(void) {
    struct CMUnitTest tests[] = {
        cmocka_unit_test(test_references),    cmocka_unit_test(test_fused_norm),
        cmocka_unit_test(test_flops),         cmocka_unit_test(test_adamw_low),
        cmocka_unit_test(test_bf16_rounding), cmocka_unit_test(test_absmax),
        cmocka_unit_test(test_sumsq),         cmocka_unit_test(test_clip_scale),
        cmocka_unit_test(test_scale_guard),   cmocka_unit_test(test_adamw_without_scale),
        cmocka_unit_test(test_largest),       cmocka_unit_test(test_losses_sum),
        cmocka_unit_test(test_fill_normal),   cmocka_unit_test(test_rounding_in_place),
        cmocka_unit_test(test_accumulate),    [11 + COUNT(OPS) - 1] = {0},
    };
    for (size_t i = 0; i < COUNT(OPS); i++) {
        tests[11 + i] = (struct CMUnitTest){OPS[i].name, test_op, NULL, NULL, (void *)(uintptr_t)&OPS[i]};
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
