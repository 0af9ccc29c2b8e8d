// ops: the mathematics of a GPT's layers, forward and backward, and of its optimizer, on device memory and a stream.
//
// Each op has one meaning here and one implementation per machine (ops_cpu.c, ops_cuda.cu). Names of sizes:
//
//     B sequences, T tokens each, N rows (usually B·T), C channels, OC output channels, NH heads of HS = C/NH channels,
//     V tokens in the vocabulary, Vp the same padded.
//
// Tensors are dense and row-major; `dtype` is the storage of activations and weights. Gradients of weights, statistics
// and losses are always fp32, and so is every sum. What is read and what is written never overlap unless said.
//
// Numbers do not depend on the number of threads: work is cut into fixed tiles and blocks, each computed by one thread,
// and their results are combined in a fixed order. Nor on what was done before: gradients of weights are written, not
// added to, unless said.
//
// Rehearsal: on a planning device an op does nothing but find out what scratch it will need, so planning a run is
// running its code once without memory.
#ifndef FSDP_OPS_H
#define FSDP_OPS_H

#include "device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Ops Ops;

Ops *ops_open(Device *device, int threads);
void ops_close(Ops *ops);
bool ops_native_bf16(void);        // the processor multiplies bf16 itself
const char *ops_description(void); // library or instruction set, for the report
double ops_flops(const Ops *ops);  // floating-point operations of all matrix products so far (2 per multiply-add)

// out (B·T, C) = wte[token] + wpe[position];  tokens (B, T), wte (Vp, C), wpe (≥T, C)
void embedding_forward(Ops *ops, void *out, const int *tokens, const void *wte, const void *wpe, int B, int T,
                       int C, DType dtype);
// dwte (Vp, C) += , dwpe (T, C) = ;  dout (B·T, C). Rows are added in the order of their tokens.
void embedding_backward(Ops *ops, float *dwte, float *dwpe, const int *tokens, const void *dout, int B, int T,
                        int C, DType dtype);

// out = (x - mean) · rstd · w + b over each row of C;  rstd = 1/√(variance + 1e-5);  mean, rstd (N) or NULL both
void layernorm_forward(Ops *ops, void *out, float *mean, float *rstd, const void *x, const void *w, const void *b,
                       int N, int C, DType dtype);
// sum = x + y, then out = layernorm(sum)
void residual_layernorm_forward(Ops *ops, void *sum, void *out, float *mean, float *rstd, const void *x,
                                const void *y, const void *w, const void *b, int N, int C, DType dtype);
// dx += , dw = , db =
void layernorm_backward(Ops *ops, void *dx, float *dw, float *db, const void *dout, const void *x, const void *w,
                        const float *mean, const float *rstd, int N, int C, DType dtype);

// out = x + y, n elements; out may be x or y
void residual_forward(Ops *ops, void *out, const void *x, const void *y, size_t n, DType dtype);

// out (N, OC) = x (N, C) · w (C, OC) + b (OC)
void linear_forward(Ops *ops, void *out, const void *x, const void *w, const void *b, int N, int C, int OC,
                    DType dtype);
// dx (N, C) = dout · wᵀ unless NULL;  dw (C, OC) = xᵀ · dout;  db (OC) = column sums of dout
void linear_backward(Ops *ops, void *dx, float *dw, float *db, const void *dout, const void *x, const void *w,
                     int N, int C, int OC, DType dtype);

// GELU in its tanh form: x/2 · (1 + tanh(√(2/π)·(x + 0.044715 x³))), always from the stored (rounded) x
void gelu_forward(Ops *ops, void *out, const void *x, size_t n, DType dtype);
void gelu_backward(Ops *ops, void *dx, const void *dout, const void *x, size_t n, DType dtype); // dx may be dout

// Causal attention: out (B, T, C) = softmax(mask(q·kᵀ/√HS)) · v per head;  qkv (B, T, 3, NH, HS);
// lse (B, NH, T): log of each row's softmax denominator, all that is kept for backward. No T × T matrix is stored.
void attention_forward(Ops *ops, void *out, float *lse, const void *qkv, int B, int T, int C, int NH, DType dtype);
// dqkv like qkv;  dout, out like out
void attention_backward(Ops *ops, void *dqkv, const void *dout, const void *out, const float *lse, const void *qkv,
                        int B, int T, int C, int NH, DType dtype);

// The tied head. logits (N, Vp) = x (N, C) · wteᵀ
void unembed_forward(Ops *ops, void *logits, const void *x, const void *wte, int N, int C, int Vp, DType dtype);
// dx (N, C) = dlogits · wte;  dwte (Vp, C) = dlogitsᵀ · x, or += when accumulate
void unembed_backward(Ops *ops, void *dx, float *dwte, const void *dlogits, const void *x, const void *wte, int N,
                      int C, int Vp, bool accumulate, DType dtype);
// losses (N) = -log softmax(logits[:V])[target];  logits become their gradient, (softmax - onehot) · scale, 0 from V to
// Vp. A target of -1: loss 0, gradient 0. With scale 0 logits are left as they are (evaluation).
void softmax_cross_entropy(Ops *ops, float *losses, void *logits, const int *targets, int N, int V, int Vp,
                           float scale, DType dtype);

// sums[0] = all losses (B, T), added up in their order; sums[1] = those from position T/2 on
void losses_sum(Ops *ops, double sums[2], const float *losses, int B, int T);

// ---------------------------------------------------------------------------------------------------------------------
// over slices: n is a multiple of 64

// AdamW with decoupled decay (Loshchilov and Hutter, arXiv 1711.05101), bias-corrected, eps outside the root:
//     g = scale·grad;  m = β1·m + (1-β1)·g;  v = β2·v + (1-β2)·g²;
//     w -= lr·( (m/correction1) / (√(v/correction2) + eps) + decay·w )
// low, unless NULL, gets w rounded to bf16. With a scale that is not finite nothing is changed.
typedef struct {
    float lr, beta1, beta2, eps, decay;
    float correction1, correction2; // 1 - β^step
} AdamW;
void adamw(Ops *ops, float *w, float *m, float *v, void *low, const float *grad, size_t n, const float *scale,
           AdamW settings);

// The largest |x| as the bits of a float, joined into *bits. Not-a-number is larger than infinity, infinity than all
// else, so it also tells whether every element is finite; combining by integer maximum is exact in any order.
void absmax(Ops *ops, uint32_t *bits, const float *x, size_t n);
void largest(Ops *ops, uint32_t *most, const uint32_t *bits, int n); // *most = the largest of n such bits

// Sum of squares that does not depend on the order or on how x is cut: with 2^e the power of two at or above the largest
// |x| of all (bits, from absmax), each (x/2^e)² is split at fixed binary places into multiples of 2^-26 and of 2^-53,
// which add up exactly in 64-bit integers. sums[0] += , sums[1] += .  Good for 2^36 elements.
void sumsq(Ops *ops, int64_t sums[2], const float *x, size_t n, const uint32_t *bits);
// √ of what the sums stand for
double sumsq_root(const int64_t sums[2], uint32_t bits);

// *scale = min(1, limit / (norm + 1e-6)), or 1 when limit is 0, or not-a-number when the norm is; *norm as sumsq_root
void clip_scale(Ops *ops, float *scale, float *norm, const int64_t sums[2], const uint32_t *bits, float limit);
// *scale = not-a-number unless all of x (n) are finite
void scale_guard(Ops *ops, float *scale, const double *x, size_t n);

// sum = terms[count-1] + ( … + (terms[0] + sum)): how a binary counter carries
void accumulate(Ops *ops, float *sum, const float *const *terms, int count, size_t n);

// x = x rounded to bf16: kept as fp32, or packed, when the first half of its memory holds the n results afterwards
void round_to_bf16(Ops *ops, float *x, size_t n);
void pack_to_bf16(Ops *ops, float *x, size_t n);

void cast_from_f32(Ops *ops, void *out, const float *x, size_t n, DType dtype);
void cast_to_f32(Ops *ops, float *out, const void *x, size_t n, DType dtype);

// Elements first … first+n-1 of tensor number `tensor`: normal with deviation std, from a counter-based generator (Philox
// 4x32-10 and Box-Muller) keyed by seed and tensor, so that every element is the same wherever it is computed.
void fill_normal(Ops *ops, float *out, uint64_t seed, uint32_t tensor, size_t first, size_t n, float std);
void fill_constant(Ops *ops, float *out, float value, size_t n);
void fill_zero(Ops *ops, void *out, size_t n, DType dtype);

#ifdef __cplusplus
}
#endif
#endif
