// See ops_reference.h. No loop here is clever, and none should become so.
#include "ops_reference.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---------------------------------------------------------------------------------------------------------------------
// embedding

void reference_embedding_forward(double *out, const int *tokens, const double *wte, const double *wpe, int B, int T,
                                 int C) {
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++)
            for (int c = 0; c < C; c++) {
                int row = b * T + t;
                out[row * C + c] = wte[tokens[row] * C + c] + wpe[t * C + c];
            }
}

void reference_embedding_backward(double *dwte, double *dwpe, const int *tokens, const double *dout, int B, int T,
                                  int C) {
    memset(dwpe, 0, sizeof(double) * T * C);
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++)
            for (int c = 0; c < C; c++) {
                int row = b * T + t;
                dwte[tokens[row] * C + c] += dout[row * C + c];
                dwpe[t * C + c] += dout[row * C + c];
            }
}

// ---------------------------------------------------------------------------------------------------------------------
// layernorm

static void row_statistics(const double *x, int C, double *mean, double *rstd) {
    double sum = 0, squares = 0;
    for (int c = 0; c < C; c++) sum += x[c];
    *mean = sum / C;
    for (int c = 0; c < C; c++) squares += (x[c] - *mean) * (x[c] - *mean);
    *rstd = 1 / sqrt(squares / C + 1e-5);
}

void reference_layernorm_forward(double *out, double *mean, double *rstd, const double *x, const double *w,
                                 const double *b, int N, int C) {
    for (int n = 0; n < N; n++) {
        row_statistics(x + n * C, C, &mean[n], &rstd[n]);
        for (int c = 0; c < C; c++) out[n * C + c] = (x[n * C + c] - mean[n]) * rstd[n] * w[c] + b[c];
    }
}

// With y = (x - mean) · rstd and g = dout · w, dx = rstd · (g - mean(g) - y · mean(g · y)).
void reference_layernorm_backward(double *dx, double *dw, double *db, const double *dout, const double *x,
                                  const double *w, int N, int C) {
    memset(dw, 0, sizeof(double) * C);
    memset(db, 0, sizeof(double) * C);
    for (int n = 0; n < N; n++) {
        double mean, rstd, mean_g = 0, mean_gy = 0;
        row_statistics(x + n * C, C, &mean, &rstd);
        for (int c = 0; c < C; c++) {
            double y = (x[n * C + c] - mean) * rstd, d = dout[n * C + c];
            dw[c] += d * y;
            db[c] += d;
            mean_g += d * w[c] / C;
            mean_gy += d * w[c] * y / C;
        }
        for (int c = 0; c < C; c++) {
            double y = (x[n * C + c] - mean) * rstd, g = dout[n * C + c] * w[c];
            dx[n * C + c] += rstd * (g - mean_g - y * mean_gy);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// matrix products

// out (I, J) += Σk a · b, where a's element (i, k) is a[i·ai + k·ak] and b's (k, j) is b[k·bk + j·bj]
static void add_product(double *out, const double *a, int ai, int ak, const double *b, int bk, int bj, int I, int J,
                        int K) {
    for (int i = 0; i < I; i++)
        for (int k = 0; k < K; k++) {
            double factor = a[(size_t)i * ai + (size_t)k * ak];
            for (int j = 0; j < J; j++) out[(size_t)i * J + j] += factor * b[(size_t)k * bk + (size_t)j * bj];
        }
}

void reference_linear_forward(double *out, const double *x, const double *w, const double *b, int N, int C,
                              int OC) {
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++) out[n * OC + o] = b[o];
    add_product(out, x, C, 1, w, OC, 1, N, OC, C);
}

void reference_linear_backward(double *dx, double *dw, double *db, const double *dout, const double *x,
                               const double *w, int N, int C, int OC) {
    if (dx != NULL) {
        memset(dx, 0, sizeof(double) * N * C);
        add_product(dx, dout, OC, 1, w, 1, OC, N, C, OC);
    }
    memset(dw, 0, sizeof(double) * C * OC);
    add_product(dw, x, 1, C, dout, OC, 1, C, OC, N);
    memset(db, 0, sizeof(double) * OC);
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++) db[o] += dout[n * OC + o];
}

void reference_unembed_forward(double *logits, const double *x, const double *wte, int N, int C, int Vp) {
    memset(logits, 0, sizeof(double) * N * Vp);
    add_product(logits, x, C, 1, wte, 1, C, N, Vp, C);
}

void reference_unembed_backward(double *dx, double *dwte, const double *dlogits, const double *x, const double *wte,
                                int N, int C, int Vp, bool accumulate) {
    memset(dx, 0, sizeof(double) * N * C);
    add_product(dx, dlogits, Vp, 1, wte, C, 1, N, C, Vp);
    if (!accumulate) memset(dwte, 0, sizeof(double) * Vp * C);
    add_product(dwte, dlogits, 1, Vp, x, C, 1, Vp, C, N);
}

// ---------------------------------------------------------------------------------------------------------------------
// GELU

static const double GELU_SCALE = 0.79788456080286535588; // √(2/π)

void reference_gelu_forward(double *out, const double *x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        double inner = GELU_SCALE * (x[i] + 0.044715 * x[i] * x[i] * x[i]);
        out[i] = 0.5 * x[i] * (1 + tanh(inner));
    }
}

void reference_gelu_backward(double *dx, const double *dout, const double *x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        double inner = GELU_SCALE * (x[i] + 0.044715 * x[i] * x[i] * x[i]);
        double inner_slope = GELU_SCALE * (1 + 3 * 0.044715 * x[i] * x[i]);
        double t = tanh(inner);
        dx[i] = dout[i] * (0.5 * (1 + t) + 0.5 * x[i] * (1 - t * t) * inner_slope);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// attention

// Where query (0), key (1) or value (2) of one position and head begins in qkv (B, T, 3, NH, HS).
static size_t qkv_offset(int part, int b, int t, int head, int T, int C, int HS) {
    return ((size_t)(b * T + t) * 3 + part) * C + (size_t)head * HS;
}

// Row t of the attention matrix of one sequence and head, zero after t. Returns log Σ exp of its scaled scores.
static double attention_row(double *p, const double *qkv, int b, int t, int head, int T, int C, int HS) {
    const double *q = qkv + qkv_offset(0, b, t, head, T, C, HS);
    double largest = -INFINITY, sum = 0;
    for (int s = 0; s <= t; s++) {
        const double *k = qkv + qkv_offset(1, b, s, head, T, C, HS);
        p[s] = 0;
        for (int i = 0; i < HS; i++) p[s] += q[i] * k[i];
        p[s] /= sqrt(HS);
        largest = fmax(largest, p[s]);
    }
    for (int s = 0; s <= t; s++) sum += exp(p[s] - largest);
    double lse = largest + log(sum);
    for (int s = 0; s <= t; s++) p[s] = exp(p[s] - lse);
    for (int s = t + 1; s < T; s++) p[s] = 0;
    return lse;
}

void reference_attention_forward(double *out, double *lse, const double *qkv, int B, int T, int C, int NH) {
    int HS = C / NH;
    double *p = (double *)calloc(T, sizeof(double));
    assert(p != NULL);
    for (int b = 0; b < B; b++)
        for (int head = 0; head < NH; head++)
            for (int t = 0; t < T; t++) {
                lse[(b * NH + head) * T + t] = attention_row(p, qkv, b, t, head, T, C, HS);
                for (int i = 0; i < HS; i++) {
                    double sum = 0;
                    for (int s = 0; s <= t; s++) sum += p[s] * qkv[qkv_offset(2, b, s, head, T, C, HS) + i];
                    out[(size_t)(b * T + t) * C + head * HS + i] = sum;
                }
            }
    free(p);
}

// With dp = dout · vᵀ, the scores' gradient is ds = p · (dp - Σ p · dp).
static void attention_row_backward(double *dqkv, const double *dout, const double *qkv, double *p, double *dp,
                                   int b, int t, int head, int T, int C, int HS) {
    const double *d = dout + (size_t)(b * T + t) * C + head * HS;
    size_t q = qkv_offset(0, b, t, head, T, C, HS);
    double sum = 0;
    attention_row(p, qkv, b, t, head, T, C, HS);
    for (int s = 0; s <= t; s++) {
        size_t v = qkv_offset(2, b, s, head, T, C, HS);
        dp[s] = 0;
        for (int i = 0; i < HS; i++) {
            dp[s] += d[i] * qkv[v + i];
            dqkv[v + i] += p[s] * d[i];
        }
        sum += p[s] * dp[s];
    }
    for (int s = 0; s <= t; s++) {
        size_t k = qkv_offset(1, b, s, head, T, C, HS);
        double ds = p[s] * (dp[s] - sum) / sqrt(HS);
        for (int i = 0; i < HS; i++) {
            dqkv[q + i] += ds * qkv[k + i];
            dqkv[k + i] += ds * qkv[q + i];
        }
    }
}

void reference_attention_backward(double *dqkv, const double *dout, const double *qkv, int B, int T, int C,
                                  int NH) {
    double *p = (double *)calloc(2 * (size_t)T, sizeof(double));
    assert(p != NULL);
    memset(dqkv, 0, sizeof(double) * B * T * 3 * C);
    for (int b = 0; b < B; b++)
        for (int head = 0; head < NH; head++)
            for (int t = 0; t < T; t++) attention_row_backward(dqkv, dout, qkv, p, p + T, b, t, head, T, C, C / NH);
    free(p);
}

// ---------------------------------------------------------------------------------------------------------------------
// loss and optimizer

void reference_softmax_cross_entropy(double *losses, double *dlogits, const double *logits, const int *targets,
                                     int N, int V, int Vp, double scale) {
    for (int n = 0; n < N; n++) {
        const double *x = logits + (size_t)n * Vp;
        double *dx = dlogits + (size_t)n * Vp;
        double largest = -INFINITY, sum = 0;
        for (int v = 0; v < V; v++) largest = fmax(largest, x[v]);
        for (int v = 0; v < V; v++) sum += exp(x[v] - largest);
        bool counts = targets[n] >= 0;
        losses[n] = counts ? largest + log(sum) - x[targets[n]] : 0;
        for (int v = 0; v < Vp; v++) {
            double p = v < V ? exp(x[v] - largest) / sum : 0;
            dx[v] = counts ? (p - (v == targets[n])) * scale : 0;
        }
    }
}

void reference_adamw(double *w, double *m, double *v, const double *grad, size_t n, double scale, AdamW settings) {
    double beta1 = settings.beta1, beta2 = settings.beta2;
    for (size_t i = 0; i < n; i++) {
        double g = scale * grad[i];
        m[i] = beta1 * m[i] + (1 - beta1) * g;
        v[i] = beta2 * v[i] + (1 - beta2) * g * g;
        double step = m[i] / settings.correction1 / (sqrt(v[i] / settings.correction2) + settings.eps);
        w[i] -= settings.lr * (step + settings.decay * w[i]);
    }
}
