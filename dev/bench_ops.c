// bench_ops: how fast each op of ops.h is, in both types, at the shapes of GPT-2 124M (4 sequences of 1024 tokens).
//
//     build/bench_ops [THREADS [WORD]]      WORD: only ops whose name holds it
//
// Prints the best and the median of several runs: GFLOP/s of matrix products, GB/s of all else, counting what an op must
// read and write once. The last lines are oneDNN's own products of three cubes, the measure that a step's speed is a part
// of.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cube.h"
#include "ops.h"

enum { B = 4, T = 1024, N = B * T, C = 768, NH = 12, V = 50257, Vp = 50304, ROWS = 1024, RUNS = 9 };
#define SLICE ((size_t)64 * 100 * 1000)

// What the ops work on: enough for the largest of each.
typedef struct {
    Ops *ops;
    DType dtype;
    void *logits, *wide, *wide2, *x, *y, *z, *w, *wte; // (ROWS, Vp), (N, 4C) twice, (N, C) thrice, (4C, C), (Vp, C)
    float *dw, *dwte, *row, *row2, *m, *v;             // (4C, C), (Vp, C), (N) or (4C) or heads' rows, slices
    int *tokens;                                       // (N), below V
    const char *word;
} Bench;

typedef struct {
    const char *name, *shape;
    void (*run)(Bench *b);
    double work;  // floating-point operations, or bytes for elements of 2 bytes …
    double bytes; // … of which these do not depend on dtype; negative: work is operations
} Entry;

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void embedding_forward_run(Bench *b) {
    embedding_forward(b->ops, b->x, b->tokens, b->wte, b->w, B, T, C, b->dtype);
}
static void embedding_backward_run(Bench *b) {
    embedding_backward(b->ops, b->dwte, b->dw, b->tokens, b->x, B, T, C, b->dtype);
}
static void layernorm_forward_run(Bench *b) {
    layernorm_forward(b->ops, b->x, b->row, b->row2, b->y, b->w, b->w, N, C, b->dtype);
}
static void residual_layernorm_forward_run(Bench *b) {
    residual_layernorm_forward(b->ops, b->wide, b->x, b->row, b->row2, b->y, b->z, b->w, b->w, N, C, b->dtype);
}
static void layernorm_backward_run(Bench *b) {
    layernorm_backward(b->ops, b->x, b->dw, b->dw + C, b->y, b->z, b->w, b->row, b->row2, N, C, b->dtype);
}
static void residual_forward_run(Bench *b) { residual_forward(b->ops, b->x, b->y, b->z, (size_t)N * C, b->dtype); }
static void gelu_forward_run(Bench *b) { gelu_forward(b->ops, b->wide, b->wide2, (size_t)N * 4 * C, b->dtype); }
static void gelu_backward_run(Bench *b) {
    gelu_backward(b->ops, b->wide, b->wide, b->wide2, (size_t)N * 4 * C, b->dtype);
}
static void qkv_forward_run(Bench *b) { linear_forward(b->ops, b->wide, b->x, b->w, b->w, N, C, 3 * C, b->dtype); }
static void proj_forward_run(Bench *b) { linear_forward(b->ops, b->y, b->x, b->w, b->w, N, C, C, b->dtype); }
static void fc_forward_run(Bench *b) { linear_forward(b->ops, b->wide, b->x, b->w, b->w, N, C, 4 * C, b->dtype); }
static void fcproj_forward_run(Bench *b) {
    linear_forward(b->ops, b->x, b->wide, b->w, b->w, N, 4 * C, C, b->dtype);
}
static void qkv_backward_run(Bench *b) {
    linear_backward(b->ops, b->y, b->dw, b->row, b->wide, b->x, b->w, N, C, 3 * C, b->dtype);
}
static void proj_backward_run(Bench *b) {
    linear_backward(b->ops, b->y, b->dw, b->row, b->z, b->x, b->w, N, C, C, b->dtype);
}
static void fc_backward_run(Bench *b) {
    linear_backward(b->ops, b->y, b->dw, b->row, b->wide, b->x, b->w, N, C, 4 * C, b->dtype);
}
static void fcproj_backward_run(Bench *b) {
    linear_backward(b->ops, b->wide, b->dw, b->row, b->y, b->wide2, b->w, N, 4 * C, C, b->dtype);
}
static void attention_forward_run(Bench *b) {
    attention_forward(b->ops, b->x, b->row, b->wide, B, T, C, NH, b->dtype);
}
static void attention_backward_run(Bench *b) {
    attention_backward(b->ops, b->wide2, b->y, b->x, b->row, b->wide, B, T, C, NH, b->dtype);
}
static void unembed_forward_run(Bench *b) {
    unembed_forward(b->ops, b->logits, b->x, b->wte, ROWS, C, Vp, b->dtype);
}
static void unembed_backward_run(Bench *b) {
    unembed_backward(b->ops, b->y, b->dwte, b->logits, b->x, b->wte, ROWS, C, Vp, true, b->dtype);
}
static void softmax_cross_entropy_run(Bench *b) {
    softmax_cross_entropy(b->ops, b->row, b->logits, b->tokens, ROWS, V, Vp, 1e-3f, b->dtype);
}
static void adamw_run(Bench *b) {
    float scale = 1;
    AdamW settings = {.lr = 1e-4f,
                      .beta1 = 0.9f,
                      .beta2 = 0.95f,
                      .eps = 1e-8f,
                      .decay = 0.1f,
                      .correction1 = 0.1f,
                      .correction2 = 0.05f};
    adamw(b->ops, b->dwte, b->m, b->v, b->dtype == BF16 ? b->logits : NULL, b->dwte + SLICE, SLICE, &scale,
          settings);
}
static void absmax_run(Bench *b) {
    uint32_t bits = 0;
    absmax(b->ops, &bits, b->dwte, SLICE);
}
static void sumsq_run(Bench *b) {
    int64_t sums[2] = {0};
    uint32_t bits = 0x42c80000; // 100
    sumsq(b->ops, sums, b->dwte, SLICE, &bits);
}

#define PRODUCT(m, n, k) 2.0 * (m) * (n) * (k), -1
static const Entry ENTRIES[] = {
    {"embedding_forward", "4096x768", embedding_forward_run, 2.0 * N *C * 3, 0},
    {"embedding_backward", "4096x768", embedding_backward_run, 2.0 * N *C, 4.0 * 3 * N *C},
    {"layernorm_forward", "4096x768", layernorm_forward_run, 2.0 * N *C * 2, 0},
    {"residual_layernorm_forward", "4096x768", residual_layernorm_forward_run, 2.0 * N *C * 4, 0},
    {"layernorm_backward", "4096x768", layernorm_backward_run, 2.0 * N *C * 4, 0},
    {"residual_forward", "4096x768", residual_forward_run, 2.0 * N *C * 3, 0},
    {"gelu_forward", "4096x3072", gelu_forward_run, 2.0 * N * 4 * C * 2, 0},
    {"gelu_backward", "4096x3072", gelu_backward_run, 2.0 * N * 4 * C * 3, 0},
    {"linear_forward", "4096x768x2304", qkv_forward_run, PRODUCT(N, 3 * C, C)},
    {"linear_forward", "4096x768x768", proj_forward_run, PRODUCT(N, C, C)},
    {"linear_forward", "4096x768x3072", fc_forward_run, PRODUCT(N, 4 * C, C)},
    {"linear_forward", "4096x3072x768", fcproj_forward_run, PRODUCT(N, C, 4 * C)},
    {"linear_backward", "4096x768x2304", qkv_backward_run, PRODUCT(N, 3 * C, 2 * C)},
    {"linear_backward", "4096x768x768", proj_backward_run, PRODUCT(N, C, 2 * C)},
    {"linear_backward", "4096x768x3072", fc_backward_run, PRODUCT(N, 4 * C, 2 * C)},
    {"linear_backward", "4096x3072x768", fcproj_backward_run, PRODUCT(N, C, 8 * C)},
    {"attention_forward", "48 heads, causal half", attention_forward_run,
     PRODUCT((double)B *NH *T, T / 2, 2 * C / NH)},
    {"attention_backward", "48 heads, causal half", attention_backward_run,
     PRODUCT((double)B *NH *T, T / 2, 5 * C / NH)},
    {"unembed_forward", "1024x768x50304", unembed_forward_run, PRODUCT(ROWS, Vp, C)},
    {"unembed_backward, adding", "1024x768x50304", unembed_backward_run, PRODUCT(ROWS, Vp, 2 * C)},
    {"softmax_cross_entropy", "1024x50304", softmax_cross_entropy_run, 2.0 * ROWS *Vp * 2, 0},
    {"adamw", "6.4 M", adamw_run, 0, 28.0 * (double)SLICE},
    {"absmax", "6.4 M", absmax_run, 0, 4.0 * (double)SLICE},
    {"sumsq", "6.4 M", sumsq_run, 0, 4.0 * (double)SLICE},
};

// Small numbers of either sign, the same in both types.
static void *numbers(Device *device, size_t n, DType dtype) {
    void *x = device_alloc(device, "bench", n * dtype_size(dtype));
    uint32_t state = 1;
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        uint32_t bits = (state & 0x807f0000u) | 0x3d000000u; // ± 2^-5 … 2^-4
        if (dtype == BF16)
            ((uint16_t *)x)[i] = (uint16_t)(bits >> 16);
        else
            memcpy((float *)x + i, &bits, sizeof bits);
    }
    return x;
}

static void entry_run(const Entry *entry, Bench *b) {
    double time[RUNS];
    if (b->word && !strstr(entry->name, b->word)) return;
    for (int i = -1; i < RUNS; i++) { // the first one warms up
        double begin = seconds();
        entry->run(b);
        if (i >= 0) time[i] = seconds() - begin;
    }
    qsort(time, RUNS, sizeof time[0], by_size);
    bool product = entry->bytes < 0;
    double work = product ? entry->work : entry->work * (b->dtype == BF16 ? 1 : 2) + entry->bytes;
    printf("%-5s %-27s %-22s %9.3f ms %9.3f ms %8.1f %s\n", b->dtype == BF16 ? "bf16" : "fp32", entry->name,
           entry->shape, time[0] * 1e3, time[RUNS / 2] * 1e3, work / time[0] * 1e-9, product ? "GFLOP/s" : "GB/s");
}

static void bench(int threads, const char *word, DType dtype) {
    Device *device = device_open(NULL);
    Bench b = {.ops = ops_open(device, threads), .dtype = dtype, .word = word};
    b.logits = numbers(device, (size_t)ROWS * Vp, dtype), b.wte = numbers(device, (size_t)Vp * C, dtype);
    b.wide = numbers(device, (size_t)N * 4 * C, dtype), b.wide2 = numbers(device, (size_t)N * 4 * C, dtype);
    b.x = numbers(device, (size_t)N * C, dtype), b.y = numbers(device, (size_t)N * C, dtype);
    b.z = numbers(device, (size_t)N * C, dtype), b.w = numbers(device, (size_t)4 * C * C, dtype);
    b.dw = (float *)numbers(device, (size_t)4 * C * C, F32), b.dwte = (float *)numbers(device, (size_t)Vp * C, F32);
    b.row = (float *)numbers(device, (size_t)B * NH * T, F32), b.row2 = (float *)numbers(device, N, F32);
    b.m = (float *)numbers(device, SLICE, F32), b.v = (float *)device_alloc(device, "bench", SLICE * sizeof(float));
    b.tokens = (int *)device_alloc(device, "bench", N * sizeof(int));
    for (int i = 0; i < N; i++) b.tokens[i] = (int)((uint32_t)i * 2654435761u % V);
    for (size_t i = 0; i < sizeof ENTRIES / sizeof ENTRIES[0]; i++) entry_run(&ENTRIES[i], &b);
    ops_close(b.ops);
    device_close(device);
}

// oneDNN's products, the best of five each.
static void cubes(int threads) {
    for (int dtype = F32; dtype <= BF16; dtype++) {
        printf("%-5s oneDNN, 2048, 3072 and 4096 cubed:", dtype == BF16 ? "bf16" : "fp32");
        for (int size = 2048; size <= 4096; size += 1024) {
            Device *device = device_open(NULL);
            Cube cube = cube_open(device, size, (DType)dtype, threads);
            double best = 0;
            for (int i = 0; i < 6; i++) { // the first one warms up
                double rate = cube_run(&cube);
                if (i > 0 && rate > best) best = rate;
            }
            printf(" %.0f", best / 1e9);
            cube_close(&cube);
            device_close(device);
        }
        printf(" GFLOP/s\n");
    }
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 2;
    const char *word = argc > 2 ? argv[2] : NULL;
    printf("%s, %d threads%36s best %9s median\n", ops_description(), threads, "", "");
    bench(threads, word, BF16);
    bench(threads, word, F32);
    if (!word) cubes(threads);
    return 0;
}
