// Causal attention on a CPU. Each head of each sequence is one thread's work, a tile of queries at a time against all
// keys up to the tile's end:
//
//                 keys ──►
//     queries   ┌───┐
//        │      │ 0 │            scores  S = Q_tile · Kᵀ          (tile, keys)
//        ▼      ├───┴───┐        softmax P, row by row, causal
//               │   1   │        out     O = P · V                (tile, HS)
//               ├───────┴───┐
//               │     2     │    so at most (tile × T) of the (T × T) probabilities exist at a time.
//               └───────────┘
//
// Backward computes a tile's probabilities again from the scores and the stored log of the denominator, lse. With D the
// row sums of dO ∘ O (Dao et al., "FlashAttention", arXiv 2205.14135, appendix B):
//     dV += Pᵀ·dO    dP = dO·Vᵀ    dS = P ∘ (dP - D) / √HS    dQ = dS·K    dK += dSᵀ·Q
#include "ops_cpu_common.h"
#include <math.h> // sqrt, logf
#include <omp.h>  // omp_get_thread_num

enum { TILE = 128, MAX_TILES = 512 }; // longer sequences than the two allow take larger tiles

// The products of each tile, by number.
typedef struct {
    int tile, tiles;
    // (tile, HS) · (keys, HS)ᵀ → (tile, keys) fp32: scores and dP
    int by_keys[MAX_TILES];
    // (tile, keys) · (keys, HS) → (tile, HS): out and dQ
    int over_keys[MAX_TILES];
    // (tile, keys)ᵀ · (tile, HS) → (keys, HS) fp32, added but for the last tile: dK and dV
    int over_rows[MAX_TILES];
    size_t scratch;
    double flops; // of one product of either kind over all tiles
} Plan;

static int tile_find(Ops *ops, Plan *plan, Product product) {
    int number = products_find(ops->products, product);
    size_t scratch = product_scratch(ops->products, number);
    if (scratch > plan->scratch) plan->scratch = scratch;
    return number;
}

static Plan attention_plan(Ops *ops, int T, int HS, bool backward, DType dtype) {
    Plan plan = {.tile = TILE};
    while (plan.tile * MAX_TILES < T) plan.tile *= 2;
    plan.tiles = blocks_of((size_t)T, plan.tile);
    for (int i = 0; i < plan.tiles; i++) {
        int rows = least(plan.tile, T - i * plan.tile), keys = i * plan.tile + rows;
        plan.by_keys[i] = tile_find(
            ops, &plan, (Product){.M = rows, .N = keys, .K = HS, .b_transposed = true, .in = dtype, .out = F32});
        plan.over_keys[i] =
            tile_find(ops, &plan, (Product){.M = rows, .N = HS, .K = keys, .in = dtype, .out = dtype});
        plan.flops += 2.0 * rows * keys * HS;
        if (!backward) continue;
        plan.over_rows[i] = tile_find(ops, &plan,
                                      (Product){.M = keys,
                                                .N = HS,
                                                .K = rows,
                                                .a_transposed = true,
                                                .accumulate = i + 1 < plan.tiles,
                                                .in = dtype});
    }
    return plan;
}

// A thread's scratch. Heads are (T, HS); what is of type dtype has void pointers.
typedef struct {
    void *q, *k, *v, *dout, *out; // one head each
    float *scores, *dprob;        // (tile, T)
    void *prob, *dscores;         // (tile, T)
    void *tile;                   // (tile, HS)
    float *dk, *dv;               // one head each
    float *delta;                 // D (T)
    void *product;                // for product_run
} Scratch;

// Lays the pieces out from base on; returns their bytes. With base NULL only counts.
static size_t scratch_lay(Scratch *s, char *base, const Plan *plan, int T, int HS, bool backward, DType dtype) {
    size_t head = aligned((size_t)T * (size_t)HS * dtype_size(dtype)), used = 0;
    size_t wide_head = aligned((size_t)T * (size_t)HS * sizeof(float));
    size_t square = aligned((size_t)plan->tile * (size_t)T * dtype_size(dtype));
    size_t wide_square = aligned((size_t)plan->tile * (size_t)T * sizeof(float));
    size_t tile = aligned((size_t)plan->tile * (size_t)HS * dtype_size(dtype));
    struct {
        void **piece;
        size_t bytes;
        bool wanted;
    } pieces[] = {
        {&s->q, head, true},
        {&s->k, head, true},
        {&s->v, head, true},
        {(void **)&s->scores, wide_square, true},
        {&s->prob, square, true},
        {&s->tile, tile, true},
        {&s->product, plan->scratch, true},
        {&s->dout, head, backward},
        {&s->out, head, backward},
        {(void **)&s->dprob, wide_square, backward},
        {&s->dscores, square, backward},
        {(void **)&s->dk, wide_head, backward},
        {(void **)&s->dv, wide_head, backward},
        {(void **)&s->delta, aligned((size_t)T * sizeof(float)), backward},
    };
    for (size_t i = 0; i < sizeof pieces / sizeof pieces[0]; i++) {
        if (!pieces[i].wanted) continue;
        if (base) *pieces[i].piece = base + used;
        used += pieces[i].bytes;
    }
    return used;
}

// One head out of rows of `stride` elements, from element `first` on, as a dense (T, HS) matrix, and back.
static void head_out_of(void *head, const void *rows, size_t first, size_t stride, int T, int HS, DType dtype) {
    for (int t = 0; t < T; t++)
        memcpy(at_mutable(head, (size_t)t * HS, dtype), at(rows, first + (size_t)t * stride, dtype),
               (size_t)HS * dtype_size(dtype));
}
static void head_into(void *rows, const void *head, size_t first, size_t stride, int T, int HS, DType dtype) {
    for (int t = 0; t < T; t++)
        memcpy(at_mutable(rows, first + (size_t)t * stride, dtype), at(head, (size_t)t * HS, dtype),
               (size_t)HS * dtype_size(dtype));
}

// The same from fp32.
static void head_rounded_into(void *rows, const float *head, size_t first, size_t stride, int T, int HS,
                              DType dtype) {
    for (int t = 0; t < T; t++) {
        const float *row = head + (size_t)t * HS;
        if (dtype == F32)
            memcpy((float *)rows + first + (size_t)t * stride, row, (size_t)HS * sizeof(float));
        else
            row_stored(rows, first + (size_t)t * stride, HS, dtype, row);
    }
}

// Probabilities of one row from its first `valid` scores, into prob (0 from there to keys); returns the row's lse.
static float softmax_row(void *prob, size_t first, float *scores, int valid, int keys, float scale, DType dtype) {
    float max = row_max(scores, valid);
    for (int j = 0; j < valid; j++) scores[j] = exp_float(scale * (scores[j] - max));
    float total = row_sum(scores, valid), inverse = 1.0f / total;
    float *p = dtype == F32 ? (float *)prob + first : scores;
    for (int j = 0; j < valid; j++) p[j] = scores[j] * inverse;
    for (int j = valid; j < keys; j++) p[j] = 0;
    row_stored(prob, first, keys, dtype, p);
    return scale * max + logf(total);
}

static void head_forward(Ops *ops, const Plan *plan, Scratch *s, float *lse, int T, int HS, DType dtype, void *out,
                         size_t first, size_t stride) {
    float scale = 1.0f / sqrtf((float)HS);
    int thread = omp_get_thread_num();
    for (int i = 0; i < plan->tiles; i++) {
        int begin = i * plan->tile, rows = least(plan->tile, T - begin), keys = begin + rows;
        product_run(ops->products, plan->by_keys[i], thread, s->scores, at(s->q, (size_t)begin * HS, dtype), s->k,
                    NULL, s->product);
        for (int r = 0; r < rows; r++)
            lse[begin + r] = softmax_row(s->prob, (size_t)r * keys, s->scores + (size_t)r * keys, begin + r + 1,
                                         keys, scale, dtype);
        product_run(ops->products, plan->over_keys[i], thread, s->tile, s->prob, s->v, NULL, s->product);
        head_into(out, s->tile, first + (size_t)begin * stride, stride, rows, HS, dtype);
    }
}

void attention_forward(Ops *ops, void *out, float *lse, const void *qkv, int B, int T, int C, int NH, DType dtype) {
    int HS = C / NH;
    Plan plan = attention_plan(ops, T, HS, false, dtype);
    size_t each = scratch_lay(&(Scratch){0}, NULL, &plan, T, HS, false, dtype);
    char *scratch = ops_scratch(ops, (size_t)ops->threads * each);
    ops->flops += 2 * plan.flops * B * NH;
    if (ops->rehearsal) return;
    PARALLEL_FOR_DYNAMIC
    for (int head = 0; head < B * NH; head++) {
        Scratch s;
        scratch_lay(&s, scratch + (size_t)omp_get_thread_num() * each, &plan, T, HS, false, dtype);
        size_t b = (size_t)(head / NH), h = (size_t)(head % NH), wide = 3 * (size_t)C;
        size_t first = b * (size_t)T * wide + h * (size_t)HS;
        head_out_of(s.q, qkv, first, wide, T, HS, dtype);
        head_out_of(s.k, qkv, first + (size_t)C, wide, T, HS, dtype);
        head_out_of(s.v, qkv, first + 2 * (size_t)C, wide, T, HS, dtype);
        head_forward(ops, &plan, &s, lse + (size_t)head * T, T, HS, dtype, out, b * (size_t)T * C + h * (size_t)HS,
                     (size_t)C);
    }
}

// One row of probabilities and of dS, from scores and dP; zero behind the diagonal.
static void backward_row(void *prob, void *dscores, size_t first, float *scores, float *dprob, int valid, int keys,
                         float scale, float lse, float delta, DType dtype) {
    float *p = row_out(prob, first, dtype, scores), *ds = row_out(dscores, first, dtype, dprob);
    for (int j = 0; j < valid; j++) {
        float probability = exp_float(scale * scores[j] - lse);
        float slope = probability * (dprob[j] - delta) * scale;
        p[j] = probability;
        ds[j] = slope;
    }
    for (int j = valid; j < keys; j++) p[j] = ds[j] = 0;
    row_stored(prob, first, keys, dtype, p);
    row_stored(dscores, first, keys, dtype, ds);
}

// D: row sums of dout ∘ out
static void delta_rows(const Scratch *s, int T, int HS, DType dtype) {
    float dout_buffer[VECTOR_BLOCK], out_buffer[VECTOR_BLOCK];
    for (int t = 0; t < T; t++) {
        s->delta[t] = 0;
        for (int c = 0; c < HS; c += VECTOR_BLOCK) {
            int n = least(VECTOR_BLOCK, HS - c);
            size_t first = (size_t)t * (size_t)HS + (size_t)c;
            s->delta[t] += row_dot(row_in(s->dout, first, n, dtype, dout_buffer),
                                   row_in(s->out, first, n, dtype, out_buffer), n);
        }
    }
}

// dQ goes into dqkv tile by tile; dK and dV gather in s. The last tile comes first: its keys are all keys, so it sets
// what the others add to.
static void head_backward(Ops *ops, const Plan *plan, Scratch *s, const float *lse, int T, int HS, DType dtype,
                          void *dqkv, size_t first, size_t stride) {
    float scale = 1.0f / sqrtf((float)HS);
    int thread = omp_get_thread_num();
    Products *products = ops->products;
    for (int i = plan->tiles - 1; i >= 0; i--) {
        int begin = i * plan->tile, rows = least(plan->tile, T - begin), keys = begin + rows;
        const void *q = at(s->q, (size_t)begin * HS, dtype), *dout = at(s->dout, (size_t)begin * HS, dtype);
        product_run(products, plan->by_keys[i], thread, s->scores, q, s->k, NULL, s->product);
        product_run(products, plan->by_keys[i], thread, s->dprob, dout, s->v, NULL, s->product);
        for (int r = 0; r < rows; r++) {
            size_t row = (size_t)r * keys;
            backward_row(s->prob, s->dscores, row, s->scores + row, s->dprob + row, begin + r + 1, keys, scale,
                         lse[begin + r], s->delta[begin + r], dtype);
        }
        product_run(products, plan->over_rows[i], thread, s->dv, s->prob, dout, NULL, s->product);
        product_run(products, plan->over_rows[i], thread, s->dk, s->dscores, q, NULL, s->product);
        product_run(products, plan->over_keys[i], thread, s->tile, s->dscores, s->k, NULL, s->product);
        head_into(dqkv, s->tile, first + (size_t)begin * stride, stride, rows, HS, dtype);
    }
}

void attention_backward(Ops *ops, void *dqkv, const void *dout, const void *out, const float *lse, const void *qkv,
                        int B, int T, int C, int NH, DType dtype) {
    int HS = C / NH;
    Plan plan = attention_plan(ops, T, HS, true, dtype);
    size_t each = scratch_lay(&(Scratch){0}, NULL, &plan, T, HS, true, dtype);
    char *scratch = ops_scratch(ops, (size_t)ops->threads * each);
    ops->flops += 5 * plan.flops * B * NH;
    if (ops->rehearsal) return;
    PARALLEL_FOR_DYNAMIC
    for (int head = 0; head < B * NH; head++) {
        Scratch s;
        scratch_lay(&s, scratch + (size_t)omp_get_thread_num() * each, &plan, T, HS, true, dtype);
        size_t b = (size_t)(head / NH), h = (size_t)(head % NH), wide = 3 * (size_t)C, narrow = (size_t)C;
        size_t first = b * (size_t)T * wide + h * (size_t)HS, first_out = b * (size_t)T * narrow + h * (size_t)HS;
        head_out_of(s.q, qkv, first, wide, T, HS, dtype);
        head_out_of(s.k, qkv, first + narrow, wide, T, HS, dtype);
        head_out_of(s.v, qkv, first + 2 * narrow, wide, T, HS, dtype);
        head_out_of(s.dout, dout, first_out, narrow, T, HS, dtype);
        head_out_of(s.out, out, first_out, narrow, T, HS, dtype);
        delta_rows(&s, T, HS, dtype);
        head_backward(ops, &plan, &s, lse + (size_t)head * T, T, HS, dtype, dqkv, first, wide);
        head_rounded_into(dqkv, s.dk, first + narrow, wide, T, HS, dtype);
        head_rounded_into(dqkv, s.dv, first + 2 * narrow, wide, T, HS, dtype);
    }
}
