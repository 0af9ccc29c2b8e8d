// What the sources of ops on a CPU share: the handle, the division of work, and the inner loops over rows.
//
// Every kernel computes on rows of fp32. A row stored as bf16 is widened into a small buffer that stays in the first
// cache, and rounded back when it is stored; a row stored as fp32 is used where it lies. So each kernel is written once.
//
// Sums keep LANES running totals, element i in lane i % LANES, and join them pairwise at the end: the compiler turns the
// lanes into vector registers, and the order of addition is the same on every processor and for every alignment.
#ifndef FSDP_OPS_CPU_COMMON_H
#define FSDP_OPS_CPU_COMMON_H

#include "ops.h"
#include "ops_cpu_products.h"
#include <math.h>   // INFINITY
#include <string.h> // memcpy
#ifdef __AVX512F__
#include <immintrin.h>
#endif

struct Ops {
    Device *device;
    int threads;
    bool rehearsal; // find out the scratch, compute nothing
    double flops;
};

enum {
    LANES = 16,
    VECTOR_BLOCK = 1 << 10, // elements of a buffer for widening
};

// Iterations are dealt to threads in advance, or as they come free; which thread takes one changes no value.
#define PARALLEL_FOR         _Pragma("omp parallel for num_threads(ops->threads) schedule(static)")
#define PARALLEL_FOR_DYNAMIC _Pragma("omp parallel for num_threads(ops->threads) schedule(dynamic, 1)")

// Scratch of at least bytes: the same piece for every op.
static inline char *ops_scratch(Ops *ops, size_t bytes) {
    return (char *)device_scratch(ops->device, "workspace", bytes);
}

static inline size_t aligned(size_t bytes) { return (bytes + DEVICE_ALIGN - 1) / DEVICE_ALIGN * DEVICE_ALIGN; }
static inline int blocks_of(size_t n, int block) { return (int)((n + (size_t)block - 1) / (size_t)block); }
static inline int least(int a, int b) { return a < b ? a : b; }
static inline int block_length(size_t left, int block) { return left < (size_t)block ? (int)left : block; }

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// Round to nearest, ties to even; a not-a-number stays one.
static inline uint16_t bf16_of(float x) {
    uint32_t bits = bits_of(x), rounded = bits + 0x7fff + (bits >> 16 & 1);
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded >> 16);
}

static inline float float_of_bf16(uint16_t x) { return float_of((uint32_t)x << 16); }

// Element `first` of an array of dtype.
static inline const void *at(const void *array, size_t first, DType dtype) {
    return (const char *)array + first * dtype_size(dtype);
}
static inline void *at_mutable(void *array, size_t first, DType dtype) {
    return (char *)array + first * dtype_size(dtype);
}

// n elements from `first` on as fp32: in place, or widened into buffer.
static inline const float *row_in(const void *array, size_t first, int n, DType dtype, float *buffer) {
    if (dtype == F32) return (const float *)array + first;
    const uint16_t *narrow = (const uint16_t *)array + first;
    for (int i = 0; i < n; i++) buffer[i] = float_of_bf16(narrow[i]);
    return buffer;
}

// Where to compute n elements that will be stored from `first` on; row_stored then puts them there.
static inline float *row_out(void *array, size_t first, DType dtype, float *buffer) {
    return dtype == F32 ? (float *)array + first : buffer;
}
static inline void row_stored(void *array, size_t first, int n, DType dtype, const float *buffer) {
    if (dtype == F32) return;
    uint16_t *narrow = (uint16_t *)array + first;
    for (int i = 0; i < n; i++) narrow[i] = bf16_of(buffer[i]);
}

// a·b + c, rounded once: always, on every processor, since it is asked for by name.
static inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// LANES floats at any address, as one value: the compiler makes registers of them.
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

static inline float lanes_joined(float *lane) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++) lane[j] += lane[j + half];
    return lane[0];
}

static inline float row_sum(const float *x, int n) {
    float lane[LANES];
    Lanes sum = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES) sum += *(const Lanes *)(x + i);
    *(Lanes *)lane = sum;
    for (int j = 0; i + j < n; j++) lane[j] += x[i + j];
    return lanes_joined(lane);
}

static inline float row_dot(const float *x, const float *y, int n) {
    float lane[LANES];
    int i = 0;
#ifdef __AVX512F__
    __m512 sum = _mm512_setzero_ps();
    for (; i + LANES <= n; i += LANES) sum = _mm512_fmadd_ps(_mm512_loadu_ps(x + i), _mm512_loadu_ps(y + i), sum);
    _mm512_storeu_ps(lane, sum);
#else
    for (int j = 0; j < LANES; j++) lane[j] = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) lane[j] = fused(x[i + j], y[i + j], lane[j]);
#endif
    for (int j = 0; i + j < n; j++) lane[j] = fused(x[i + j], y[i + j], lane[j]);
    return lanes_joined(lane);
}

static inline float row_max(const float *x, int n) {
    typedef int32_t Bits __attribute__((vector_size(LANES * sizeof(int32_t))));
    float most = x[0];
    int i = 0;
    if (n >= LANES) {
        float lane[LANES];
        Lanes max = *(const Lanes *)x;
        for (i = LANES; i + LANES <= n; i += LANES) {
            Lanes next = *(const Lanes *)(x + i);
            Bits larger = next > max;
            max = (Lanes)(((Bits)next & larger) | ((Bits)max & ~larger));
        }
        *(Lanes *)lane = max;
        for (int j = 0; j < LANES; j++) most = lane[j] > most ? lane[j] : most;
    }
    for (; i < n; i++) most = x[i] > most ? x[i] : most;
    return most;
}

// e^x to about 1 unit in the last place, as arithmetic that vectorises. x = n·ln 2 + r with |r| ≤ ln 2 / 2, ln 2 in two
// pieces so that r is nearly exact (Cody and Waite); e^r by its Taylor polynomial of degree 7, whose rest is below 2^-27;
// 2^n by the exponent's bits. Below -87 the result is 0 instead of a subnormal, above 88.7 it is infinity.
static inline float exp_float(float x) {
    const float magic = 12582912.0f; // 1.5 · 2^23: adding it rounds to an integer, which the lowest bits then are
    // In these words a processor's maximum and minimum do it, and a not-a-number stays one.
    float above = -87.5f > x ? -87.5f : x, clamped = 89.0f < above ? 89.0f : above;
    float shifted = fused(clamped, 1.44269504f, magic), n = shifted - magic;
    float r = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, clamped));
    float p = fused(r, 1.0f / 5040, 1.0f / 720);
    p = fused(p, r, 1.0f / 120);
    p = fused(p, r, 1.0f / 24);
    p = fused(p, r, 1.0f / 6);
    p = fused(p, r, 0.5f);
    p = fused(p, r, 1.0f);
    p = fused(p, r, 1.0f);
    // 2^n as 2 · 2^(n-1), since n may be 128. At n = -126, the least, 2^(n-1) has no bits: 0.
    return 2 * p * float_of((bits_of(shifted) + 126) << 23);
}

#endif
