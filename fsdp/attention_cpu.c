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
// What belongs to a whole head (keys, values) is packed for the products once, what belongs to a tile when its turn comes.
//
// Backward computes a tile's probabilities again from the scores and the stored log of the denominator, lse. With D the
// row sums of dO ∘ O (Dao et al., "FlashAttention", arXiv 2205.14135, appendix B):
//     dV += Pᵀ·dO    dP = dO·Vᵀ    dS = P ∘ (dP - D) / √HS    dQ = dS·K    dK += dSᵀ·Q
#include "ops_cpu_common.h"
#include <math.h> // sqrt, logf
#include <omp.h>  // omp_get_thread_num

enum { TILE = 128 };

// A thread's scratch.
typedef struct {
    float *scores, *dprob; // (TILE, T)
    void *prob, *dscores;  // (TILE, T) of type dtype: where it is fp32, scores and dprob themselves
    float *dk, *dv;        // (T, HS)
    // packed: keys and values of a head by key, and by channel; what tiles need
    void *k, *v, *k_channels, *v_channels, *tile, *tile_channels, *square;
} Scratch;

// Lays the pieces out from base on; returns their bytes. With base NULL only counts.
static size_t scratch_lay(Scratch *s, char *base, int T, int HS, bool backward, DType dtype) {
    size_t squares = (size_t)TILE * (size_t)T, head = aligned((size_t)T * (size_t)HS * sizeof(float)), used = 0;
    size_t by_key = packed_bytes(RIGHT, T, HS, dtype), by_channel = packed_bytes(RIGHT, HS, T, dtype);
    size_t wide = aligned(squares * sizeof(float)),
           narrow = dtype == F32 ? 0 : aligned(squares * dtype_size(dtype));
    size_t square = packed_bytes(LEFT, TILE, T, dtype), turned = packed_bytes(LEFT, T, TILE, dtype);
    struct {
        void **piece;
        size_t bytes;
        bool wanted;
    } pieces[] = {
        {(void **)&s->scores, wide, true},
        {&s->prob, narrow, true},
        {&s->k, by_key, true},
        {&s->v_channels, by_channel, !backward},
        {&s->tile, packed_bytes(LEFT, TILE, HS, dtype), true},
        {&s->square, square > turned ? square : turned, true},
        {(void **)&s->dprob, wide, backward},
        {&s->dscores, narrow, backward},
        {&s->v, by_key, backward},
        {&s->k_channels, by_channel, backward},
        {&s->tile_channels, packed_bytes(RIGHT, HS, TILE, dtype), backward},
        {(void **)&s->dk, head, backward},
        {(void **)&s->dv, head, backward},
    };
    for (size_t i = 0; i < sizeof pieces / sizeof pieces[0]; i++) {
        if (!pieces[i].wanted) continue;
        if (base) *pieces[i].piece = base + used;
        used += aligned(pieces[i].bytes);
    }
    if (dtype == F32) s->prob = s->scores, s->dscores = s->dprob;
    return used;
}

// One head of a tensor of rows.
typedef struct {
    void *x;       // its first row
    size_t stride; // elements from row to row
    DType dtype;
} Head;

static Head head_of(const void *rows, size_t first, size_t stride, DType dtype) {
    return (Head){.x = at_mutable((void *)rows, first, dtype), .stride = stride, .dtype = dtype};
}

// Rows row … of a head as a factor whose lines are rows, or channels.
static Factor by_row(const Head *h, int row) {
    return (Factor){
        .x = at(h->x, (size_t)row * h->stride, h->dtype), .line = h->stride, .depth = 1, .dtype = h->dtype};
}
static Factor by_channel(const Head *h, int row) {
    return (Factor){
        .x = at(h->x, (size_t)row * h->stride, h->dtype), .line = 1, .depth = h->stride, .dtype = h->dtype};
}
static Target rows_from(const Head *h, int row) {
    return (Target){
        .x = at_mutable(h->x, (size_t)row * h->stride, h->dtype), .stride = h->stride, .dtype = h->dtype};
}

// (rows, keys) of probabilities or their gradient: by query or by key; and fp32 results.
static Factor by_query(const void *square, int keys, DType dtype) {
    return (Factor){.x = square, .line = (size_t)keys, .depth = 1, .dtype = dtype};
}
static Factor by_key(const void *square, int keys, DType dtype) {
    return (Factor){.x = square, .line = 1, .depth = (size_t)keys, .dtype = dtype};
}
static Target sums(float *x, int columns, bool accumulate) {
    return (Target){.x = x, .stride = (size_t)columns, .dtype = F32, .accumulate = accumulate};
}

// Of one product over all tiles, however it lies.
static double product_flops(int T, int HS) {
    double flops = 0;
    for (int begin = 0; begin < T; begin += TILE)
        flops += 2.0 * least(TILE, T - begin) * least(T, begin + TILE) * HS;
    return flops;
}

// Probabilities of one row from its first `valid` scores, into prob (0 from there to keys); returns the row's lse.
static float softmax_row(void *prob, size_t first, float *scores, int valid, int keys, float scale, DType dtype) {
    int n = least(keys, (valid + LANES - 1) / LANES * LANES); // whole vectors: e^-∞ is 0
    for (int j = valid; j < n; j++) scores[j] = -INFINITY;
    float max = row_max(scores, n);
    for (int j = 0; j < n; j++) scores[j] = exp_float(scale * (scores[j] - max));
    float total = row_sum(scores, n), inverse = 1.0f / total;
    for (int j = 0; j < n; j++) scores[j] *= inverse;
    for (int j = n; j < keys; j++) scores[j] = 0;
    row_stored(prob, first, keys, dtype, scores);
    return scale * max + logf(total);
}

static void head_forward(Scratch *s, float *lse, Head out, Head q, Head k, Head v, int T, int HS) {
    float scale = 1.0f / sqrtf((float)HS);
    DType dtype = q.dtype;
    Packed keys_packed = pack(s->k, RIGHT, by_row(&k, 0), T, HS),
           values = pack(s->v_channels, RIGHT, by_channel(&v, 0), HS, T);
    for (int begin = 0; begin < T; begin += TILE) {
        int rows = least(TILE, T - begin), keys = begin + rows;
        packed_product(sums(s->scores, keys, false), pack(s->tile, LEFT, by_row(&q, begin), rows, HS), keys_packed,
                       rows, keys, HS);
        for (int r = 0; r < rows; r++)
            lse[begin + r] = softmax_row(s->prob, (size_t)r * keys, s->scores + (size_t)r * keys, begin + r + 1,
                                         keys, scale, dtype);
        packed_product(rows_from(&out, begin), pack(s->square, LEFT, by_query(s->prob, keys, dtype), rows, keys),
                       values, rows, HS, keys);
    }
}

void attention_forward(Ops *ops, void *out, float *lse, const void *qkv, int B, int T, int C, int NH, DType dtype) {
    int HS = C / NH;
    size_t each = scratch_lay(&(Scratch){0}, NULL, T, HS, false, dtype);
    char *scratch = ops_scratch(ops, (size_t)ops->threads * each);
    ops->flops += 2 * product_flops(T, HS) * B * NH;
    if (ops->rehearsal) return;
    PARALLEL_FOR_DYNAMIC
    for (int head = 0; head < B * NH; head++) {
        Scratch s = {0};
        scratch_lay(&s, scratch + (size_t)omp_get_thread_num() * each, T, HS, false, dtype);
        size_t row = (size_t)(head / NH) * (size_t)T, wide = 3 * (size_t)C,
               first = row * wide + (size_t)(head % NH * HS);
        head_forward(&s, lse + (size_t)head * T,
                     head_of(out, row * (size_t)C + (size_t)(head % NH * HS), (size_t)C, dtype),
                     head_of(qkv, first, wide, dtype), head_of(qkv, first + (size_t)C, wide, dtype),
                     head_of(qkv, first + 2 * (size_t)C, wide, dtype), T, HS);
    }
}

// One row of probabilities and of dS, from scores and dP; zero behind the diagonal.
static void backward_row(void *prob, void *dscores, size_t first, float *scores, float *dprob, int valid, int keys,
                         float scale, float lse, float delta, DType dtype) {
    int n = least(keys, (valid + LANES - 1) / LANES * LANES);
    for (int j = valid; j < n; j++) scores[j] = -INFINITY;
    for (int j = 0; j < n; j++) {
        float probability = exp_float(scale * scores[j] - lse);
        scores[j] = probability;
        dprob[j] = probability * (dprob[j] - delta) * scale;
    }
    for (int j = n; j < keys; j++) scores[j] = dprob[j] = 0;
    row_stored(prob, first, keys, dtype, scores);
    row_stored(dscores, first, keys, dtype, dprob);
}

// D: row sums of dout ∘ out
static float delta_row(const Head *dout, const Head *out, int row, int HS) {
    float dout_buffer[VECTOR_BLOCK], out_buffer[VECTOR_BLOCK], delta = 0;
    for (int c = 0; c < HS; c += VECTOR_BLOCK) {
        int n = least(VECTOR_BLOCK, HS - c);
        delta += row_dot(row_in(dout->x, (size_t)row * dout->stride + (size_t)c, n, dout->dtype, dout_buffer),
                         row_in(out->x, (size_t)row * out->stride + (size_t)c, n, out->dtype, out_buffer), n);
    }
    return delta;
}

// The same from fp32.
static void head_round(const Head *to, const float *from, int T, int HS) {
    for (int t = 0; t < T; t++) {
        const float *row = from + (size_t)t * HS;
        if (to->dtype == F32)
            memcpy((float *)to->x + (size_t)t * to->stride, row, (size_t)HS * sizeof(float));
        else
            row_stored(to->x, (size_t)t * to->stride, HS, to->dtype, row);
    }
}

// All heads of a call's tensors that belong to one head.
typedef struct {
    Head q, k, v, dq, dk, dv, dout, out;
} Heads;

// dQ goes into dqkv tile by tile; dK and dV gather in s. The last tile comes first: its keys are all keys, so it sets
// what the others add to.
static void head_backward(Scratch *s, const Heads *h, const float *lse, int T, int HS) {
    float scale = 1.0f / sqrtf((float)HS);
    DType dtype = h->q.dtype;
    Packed by_keys = pack(s->k, RIGHT, by_row(&h->k, 0), T, HS),
           values = pack(s->v, RIGHT, by_row(&h->v, 0), T, HS);
    Packed k_channels = pack(s->k_channels, RIGHT, by_channel(&h->k, 0), HS, T);
    for (int begin = (T - 1) / TILE * TILE; begin >= 0; begin -= TILE) {
        int rows = least(TILE, T - begin), keys = begin + rows;
        bool more = keys < T;
        packed_product(sums(s->scores, keys, false), pack(s->tile, LEFT, by_row(&h->q, begin), rows, HS), by_keys,
                       rows, keys, HS);
        packed_product(sums(s->dprob, keys, false), pack(s->tile, LEFT, by_row(&h->dout, begin), rows, HS), values,
                       rows, keys, HS);
        for (int r = 0; r < rows; r++) {
            size_t row = (size_t)r * keys;
            backward_row(s->prob, s->dscores, row, s->scores + row, s->dprob + row, begin + r + 1, keys, scale,
                         lse[begin + r], delta_row(&h->dout, &h->out, begin + r, HS), dtype);
        }
        packed_product(sums(s->dv, HS, more), pack(s->square, LEFT, by_key(s->prob, keys, dtype), keys, rows),
                       pack(s->tile_channels, RIGHT, by_channel(&h->dout, begin), HS, rows), keys, HS, rows);
        packed_product(sums(s->dk, HS, more), pack(s->square, LEFT, by_key(s->dscores, keys, dtype), keys, rows),
                       pack(s->tile_channels, RIGHT, by_channel(&h->q, begin), HS, rows), keys, HS, rows);
        packed_product(rows_from(&h->dq, begin),
                       pack(s->square, LEFT, by_query(s->dscores, keys, dtype), rows, keys), k_channels, rows, HS,
                       keys);
    }
    head_round(&h->dk, s->dk, T, HS);
    head_round(&h->dv, s->dv, T, HS);
}

void attention_backward(Ops *ops, void *dqkv, const void *dout, const void *out, const float *lse, const void *qkv,
                        int B, int T, int C, int NH, DType dtype) {
    int HS = C / NH;
    size_t each = scratch_lay(&(Scratch){0}, NULL, T, HS, true, dtype);
    char *scratch = ops_scratch(ops, (size_t)ops->threads * each);
    ops->flops += 5 * product_flops(T, HS) * B * NH;
    if (ops->rehearsal) return;
    PARALLEL_FOR_DYNAMIC
    for (int head = 0; head < B * NH; head++) {
        Scratch s = {0};
        scratch_lay(&s, scratch + (size_t)omp_get_thread_num() * each, T, HS, true, dtype);
        size_t row = (size_t)(head / NH) * (size_t)T, wide = 3 * (size_t)C, narrow = (size_t)C;
        size_t first = row * wide + (size_t)(head % NH * HS), first_out = row * narrow + (size_t)(head % NH * HS);
        Heads h = {.q = head_of(qkv, first, wide, dtype),
                   .k = head_of(qkv, first + narrow, wide, dtype),
                   .v = head_of(qkv, first + 2 * narrow, wide, dtype),
                   .dq = head_of(dqkv, first, wide, dtype),
                   .dk = head_of(dqkv, first + narrow, wide, dtype),
                   .dv = head_of(dqkv, first + 2 * narrow, wide, dtype),
                   .dout = head_of(dout, first_out, narrow, dtype),
                   .out = head_of(out, first_out, narrow, dtype)};
        head_backward(&s, &h, lse + (size_t)head * T, T, HS);
    }
}
