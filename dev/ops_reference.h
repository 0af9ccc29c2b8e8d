// ops_reference: every op of ops.h once more, slow and obvious, in double.
//
// The tests of each machine's ops compare with these. Arguments are in the order of ops.h; inputs and outputs are all
// double, the inputs holding values as they are stored (rounded to bf16 where the op reads bf16), so that nothing but
// the op's own arithmetic is between the two. What ops.h adds to (+=) is added to here. Backward passes recompute the
// statistics that the real ones are handed.
#ifndef OPS_REFERENCE_H
#define OPS_REFERENCE_H

#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

void reference_embedding_forward(double *out, const int *tokens, const double *wte, const double *wpe, int B, int T,
                                 int C);
void reference_embedding_backward(double *dwte, double *dwpe, const int *tokens, const double *dout, int B, int T,
                                  int C);

void reference_layernorm_forward(double *out, double *mean, double *rstd, const double *x, const double *w,
                                 const double *b, int N, int C);
void reference_layernorm_backward(double *dx, double *dw, double *db, const double *dout, const double *x,
                                  const double *w, int N, int C);

void reference_linear_forward(double *out, const double *x, const double *w, const double *b, int N, int C, int OC);
void reference_linear_backward(double *dx, double *dw, double *db, const double *dout, const double *x,
                               const double *w, int N, int C, int OC);

void reference_gelu_forward(double *out, const double *x, size_t n);
void reference_gelu_backward(double *dx, const double *dout, const double *x, size_t n);

void reference_attention_forward(double *out, double *lse, const double *qkv, int B, int T, int C, int NH);
void reference_attention_backward(double *dqkv, const double *dout, const double *qkv, int B, int T, int C, int NH);

void reference_unembed_forward(double *logits, const double *x, const double *wte, int N, int C, int Vp);
void reference_unembed_backward(double *dx, double *dwte, const double *dlogits, const double *x, const double *wte,
                                int N, int C, int Vp, bool accumulate);

// logits stay as they are; dlogits are written for any scale, 0 included
void reference_softmax_cross_entropy(double *losses, double *dlogits, const double *logits, const int *targets,
                                     int N, int V, int Vp, double scale);

void reference_adamw(double *w, double *m, double *v, const double *grad, size_t n, double scale, AdamW settings);

#ifdef __cplusplus
}
#endif
#endif
