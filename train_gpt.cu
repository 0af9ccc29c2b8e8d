// train_gpt: pretrains a GPT-2, fully sharded over all ranks, from token shards.
//
// Read from top to bottom: the configuration and the parameters, the activations, a block forward and backward, the
// micro-step (where every collective of FSDP stands as a plain call), the step, validation and samples, model folders,
// the command line, main.
//
// The same file is C for the CPU and CUDA C++ for GPUs: it calls rooms of fsdp/ and holds no kernel, no MPI, no NCCL.
// Names of sizes: B sequences, T tokens each, N = B·T rows, C channels, L blocks, NH heads, V tokens in the vocabulary,
// Vp the same padded to a multiple of 128. A pointer's comment gives its shape.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE // clock_gettime
#endif
#include "fsdp/comm.h"        // comm_start, comm_world, …: processes
#include "fsdp/device.h"      // device_open, …: memory, streams, events
#include "fsdp/error.h"       // die, warn
#include "fsdp/fsdp.h"        // fsdp_gather, fsdp_use, …: sharded units
#include "fsdp/loader.h"      // loader_open, loader_batch
#include "fsdp/log.h"         // log_say, log_train, …
#include "fsdp/ops.h"         // linear_forward, attention_forward, …
#include "fsdp/options.h"     // options_read
#include "fsdp/safetensors.h" // safetensors_open, …
#include "fsdp/tokenizer.h"   // tokenizer_open, …
#include "fsdp/trace.h"       // trace_claim, trace_write
#include <assert.h>           // assert
#include <jansson.h>          // config.json and the data's card
#include <math.h>             // cos, exp, isfinite
#include <stddef.h>           // offsetof
#include <stdio.h>            // snprintf, printf
#include <stdlib.h>           // calloc, free
#include <string.h>           // memcpy, strcmp
#include <sys/stat.h>         // mkdir
#include <time.h>             // clock_gettime

// ---------------------------------------------------------------------------------------------------------------------
// configuration and parameters

// Larger ones are taken for a mistake; they also keep all products of sizes below within an int where an int is used.
enum { MAX_CHANNELS = 1000000, MAX_VOCAB = 10000000, MAX_MICRO_TOKENS = 1 << 24, MAX_MICRO_BATCHES = 1 << 24 };

enum { MAX_PATH = 1024, MAX_FOLDER = MAX_PATH - 64 }; // a folder's name leaves room for those of the files in it

typedef struct {
    int maxT; // positions the model knows
    int V, Vp, L, NH, C;
} GPTConfig;

// The tensors of the root unit and of a block's unit, in the order in which they lie there.
enum { WTE, WPE, LNFW, LNFB, ROOT_TENSORS };
enum { LN1W, LN1B, QKVW, QKVB, ATTPROJW, ATTPROJB, LN2W, LN2B, FCW, FCB, FCPROJW, FCPROJB, BLOCK_TENSORS };

// Unit 0 is the root; the others hold K blocks each, the last one what is left. Block l's tensors follow those of the
// blocks before it in its unit.
static int layer_units(const GPTConfig *config, int K) { return (config->L + K - 1) / K; }
static int block_unit(int l, int K) { return 1 + l / K; }
static int unit_first_block(const GPTConfig *config, int u, int K) {
    return (u - 1) * K < config->L ? (u - 1) * K : config->L;
}

static FsdpTensor tensor_make(const char *name, int rows, int columns, float init_normal, float init_value) {
    FsdpTensor tensor;
    memset(&tensor, 0, sizeof tensor);
    snprintf(tensor.name, sizeof tensor.name, "%s", name);
    tensor.ndim = columns ? 2 : 1;
    tensor.shape[0] = rows;
    tensor.shape[1] = columns;
    tensor.stored = fsdp_tensor_elements(&tensor);
    tensor.init_normal = init_normal;
    tensor.init_value = init_value;
    tensor.decay = columns > 0; // matrices and embeddings, not biases and LayerNorms
    return tensor;
}

// GPT-2's initialisation: N(0, 0.02), residual projections narrower by 1/√(2L). Projections are stored (in, out), as in
// Hugging Face's GPT-2, whose names these are.
static void block_tensors(const GPTConfig *config, int l, FsdpTensor *tensors) {
    const int C = config->C;
    const float residual = 0.02f / sqrtf(2.0f * (float)config->L);
    const struct {
        const char *name;
        int rows, columns;
        float normal, value;
    } table[BLOCK_TENSORS] = {
        {"ln_1.weight", C, 0, 0, 1},
        {"ln_1.bias", C, 0, 0, 0},
        {"attn.c_attn.weight", C, 3 * C, 0.02f, 0},
        {"attn.c_attn.bias", 3 * C, 0, 0, 0},
        {"attn.c_proj.weight", C, C, residual, 0},
        {"attn.c_proj.bias", C, 0, 0, 0},
        {"ln_2.weight", C, 0, 0, 1},
        {"ln_2.bias", C, 0, 0, 0},
        {"mlp.c_fc.weight", C, 4 * C, 0.02f, 0},
        {"mlp.c_fc.bias", 4 * C, 0, 0, 0},
        {"mlp.c_proj.weight", 4 * C, C, residual, 0},
        {"mlp.c_proj.bias", C, 0, 0, 0},
    };
    for (int t = 0; t < BLOCK_TENSORS; t++) {
        char name[48];
        snprintf(name, sizeof name, "h.%d.%s", l, table[t].name);
        tensors[t] = tensor_make(name, table[t].rows, table[t].columns, table[t].normal, table[t].value);
    }
}

static void unit_alloc(FsdpUnit *unit, int count) {
    unit->count = count;
    unit->tensors = (FsdpTensor *)calloc((size_t)count, sizeof(FsdpTensor));
    if (!unit->tensors) die(EXIT_CODE_FAILURE, NULL, "out of memory");
}

static void root_make(const GPTConfig *config, FsdpUnit *unit) {
    unit_alloc(unit, ROOT_TENSORS);
    snprintf(unit->name, sizeof unit->name, "root");
    unit->tensors[WTE] = tensor_make("wte.weight", config->V, config->C, 0.02f, 0);
    unit->tensors[WTE].stored = (int64_t)config->Vp * config->C;
    unit->tensors[WPE] = tensor_make("wpe.weight", config->maxT, config->C, 0.02f, 0);
    unit->tensors[LNFW] = tensor_make("ln_f.weight", config->C, 0, 0, 1);
    unit->tensors[LNFB] = tensor_make("ln_f.bias", config->C, 0, 0, 0);
}

// All units of the model, K blocks in each but the root; freed with units_free.
static FsdpUnit *units_make(const GPTConfig *config, int K) {
    const int layers = layer_units(config, K);
    FsdpUnit *units = (FsdpUnit *)calloc((size_t)layers + 1, sizeof(FsdpUnit));
    uint32_t number = 0;
    if (!units) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    root_make(config, &units[FSDP_ROOT]);
    for (int u = 1; u <= layers; u++) {
        int first = unit_first_block(config, u, K), end = unit_first_block(config, u + 1, K);
        unit_alloc(&units[u], (end - first) * BLOCK_TENSORS);
        snprintf(units[u].name, sizeof units[u].name, end - first > 1 ? "h.%d-%d" : "h.%d", first, end - 1);
        for (int l = first; l < end; l++) block_tensors(config, l, units[u].tensors + (l - first) * BLOCK_TENSORS);
    }
    for (int u = 0; u <= layers; u++)
        for (int t = 0; t < units[u].count; t++) units[u].tensors[t].number = number++;
    return units;
}

static void units_free(FsdpUnit *units, int count) {
    for (int u = 0; u < count; u++) free(units[u].tensors);
    free(units);
}

static int64_t parameters_count(const FsdpUnit *units, int count) {
    int64_t n = 0;
    for (int u = 0; u < count; u++)
        for (int t = 0; t < units[u].count; t++) n += fsdp_tensor_elements(&units[u].tensors[t]);
    return n;
}

// ---------------------------------------------------------------------------------------------------------------------
// activations, for one micro-batch. Of type dtype where the pointer is void.

enum { LOGITS_ROWS = 1024 }; // rows of logits that exist at a time

// What backward computes again instead of keeping it for every block: nothing; the GELU's output; that and attention's
// output; everything but the block's output, which is the next block's input. The same kernels see the same stored
// numbers again, so no mode changes a bit of a result.
enum { RECOMPUTE_NONE, RECOMPUTE_GELU, RECOMPUTE_ATTENTION, RECOMPUTE_BLOCK };

typedef struct {
    void *ln1;       // (N, C)
    float *ln1_mean; // (N)
    float *ln1_rstd; // (N)
    void *qkv;       // (N, 3C)
    float *lse;      // (B, NH, T)
    void *atty;      // (N, C)
    void *residual2; // (N, C)  after attention
    void *ln2;       // (N, C)
    float *ln2_mean; // (N)
    float *ln2_rstd; // (N)
    void *fch;       // (N, 4C)
    void *fch_gelu;  // (N, 4C)
    void *residual3; // (N, C)  after the MLP
} BlockActivations;

typedef struct {
    int *inputs, *targets; // (B, T)
    void *encoded;         // (N, C)
    BlockActivations *blocks;
    void *lnf;          // (N, C)
    float *lnf_mean;    // (N)
    float *lnf_rstd;    // (N)
    void *logits;       // (min(N, LOGITS_ROWS), Vp), then their gradient
    float *losses;      // (N)
    void *branch;       // (N, C)  what a residual branch adds
    float *next_logits; // (Vp)  of one position, for samples
    // backward
    void *dresidual; // (N, C)  gradient of the residual stream
    void *dbranch;   // (N, C)
    void *dqkv;      // (N, 3C)
    void *dfch;      // (N, 4C)
} Activations;

// What a run needs to know to take memory.
typedef struct {
    int B, T;          // micro-batch
    int sample_tokens; // of a sample, prompt included; 0: none
    int threads;
    int recompute;   // RECOMPUTE_…
    int unit_blocks; // K: blocks in a unit
    DType dtype;     // of parameters and activations
    FsdpOptions sharding;
    float clip;
    bool files;   // a model folder will be read or written
    bool tracing; // a timeline too
} GPTRun;

// What a rank spent on a step, in milliseconds.
typedef struct {
    double own;    // without waiting
    double gather; // waiting for parameters
    double waited; // waiting for any communication
} RankTimes;

typedef struct {
    GPTConfig config;
    GPTRun run;
    Device *device;
    Comm *comm;
    Ops *ops;
    FsdpUnit *units; // the root, then `layers` of K blocks
    int layers;
    Fsdp *fsdp;
    Activations acts;
    // in host memory
    int *host_inputs, *host_targets; // (B, T)
    float *host_logits, *sorted;     // (V)  of one position
    int *sample;                     // (sample_tokens)
    float *piece;                    // (PIECE)  of a tensor on its way from or to a file
    RankTimes *times;                // (ranks)
    double *host_sums;               // like sums
    double *sums;  // (micro-batches of a step or of a round of validation, 2) of losses; in the device's memory
    Shared losses; // the same, to the checker of the streams' order
    Event *ready, *agreed;
} GPT;

enum {
    PIECE = 1 << 18,       // elements that travel to rank 0 at a time
    TRACE_SPANS = 1 << 17, // of a timeline: some hundred steps of a model of twelve blocks
};

static void *act(GPT *g, size_t elements) {
    return device_alloc(g->device, "activations", elements * dtype_size(g->run.dtype));
}
static float *act_f32(GPT *g, size_t elements) {
    return (float *)device_alloc(g->device, "activations", elements * sizeof(float));
}

// Block l's own activations; what is computed again is in one place for all blocks, block 0's.
static void block_activations_take(GPT *g, int l) {
    const size_t N = (size_t)g->run.B * (size_t)g->run.T, C = (size_t)g->config.C;
    const int mode = g->run.recompute;
    BlockActivations *b = &g->acts.blocks[l];
    *b = g->acts.blocks[0];
    if (l == 0 || mode < RECOMPUTE_BLOCK) {
        b->ln1 = act(g, N * C);
        b->ln1_mean = act_f32(g, N);
        b->ln1_rstd = act_f32(g, N);
        b->qkv = act(g, N * 3 * C);
        b->residual2 = act(g, N * C);
        b->ln2 = act(g, N * C);
        b->ln2_mean = act_f32(g, N);
        b->ln2_rstd = act_f32(g, N);
        b->fch = act(g, N * 4 * C);
    }
    if (l == 0 || mode < RECOMPUTE_ATTENTION) {
        b->lse = act_f32(g, N * (size_t)g->config.NH);
        b->atty = act(g, N * C);
    }
    if (l == 0 || mode < RECOMPUTE_GELU) b->fch_gelu = act(g, N * 4 * C);
    b->residual3 = act(g, N * C);
}

static void activations_take(GPT *g) {
    const size_t N = (size_t)g->run.B * (size_t)g->run.T, C = (size_t)g->config.C;
    Activations *a = &g->acts;
    a->inputs = (int *)device_alloc(g->device, "batch", N * sizeof(int));
    a->targets = (int *)device_alloc(g->device, "batch", N * sizeof(int));
    a->encoded = act(g, N * C);
    a->blocks = (BlockActivations *)calloc((size_t)g->config.L, sizeof(BlockActivations));
    if (!a->blocks) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    for (int l = 0; l < g->config.L; l++) block_activations_take(g, l);
    a->lnf = act(g, N * C);
    a->lnf_mean = act_f32(g, N);
    a->lnf_rstd = act_f32(g, N);
    a->logits =
        device_alloc(g->device, "logits",
                     (N < LOGITS_ROWS ? N : (size_t)LOGITS_ROWS) * (size_t)g->config.Vp * dtype_size(g->run.dtype));
    a->losses = act_f32(g, N);
    a->branch = act(g, N * C);
    a->next_logits = act_f32(g, (size_t)g->config.Vp);
    a->dresidual = act(g, N * C);
    a->dbranch = act(g, N * C);
    a->dqkv = act(g, N * 3 * C);
    a->dfch = act(g, N * 4 * C);
}

static GPT *gpt_open(Device *device, Comm *comm, GPTConfig config, GPTRun run) {
    GPT *g = (GPT *)calloc(1, sizeof *g);
    if (!g) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    const size_t N = (size_t)run.B * (size_t)run.T;
    const size_t sums = 2 * (size_t)comm_size(comm) * (size_t)run.sharding.micro_steps;
    g->config = config;
    g->run = run;
    g->device = device;
    g->comm = comm;
    g->ops = ops_open(device, run.threads);
    g->units = units_make(&config, run.unit_blocks);
    g->layers = layer_units(&config, run.unit_blocks);
    g->fsdp = fsdp_open(device, g->ops, comm, g->units, g->layers + 1, run.sharding);
    activations_take(g);
    g->host_inputs = (int *)device_alloc_host(device, "batch", N * sizeof(int));
    g->host_targets = (int *)device_alloc_host(device, "batch", N * sizeof(int));
    g->host_logits = (float *)device_alloc_host(device, "batch", (size_t)config.Vp * sizeof(float));
    g->sorted = (float *)device_alloc_host(device, "batch", (size_t)config.Vp * sizeof(float));
    g->sample = (int *)device_alloc_host(device, "batch", (size_t)run.sample_tokens * sizeof(int));
    if (run.files) g->piece = (float *)device_alloc_host(device, "file piece", PIECE * sizeof(float));
    if (run.tracing) device_trace(device, TRACE_SPANS);
    g->times = (RankTimes *)device_alloc_host(device, "batch", (size_t)comm_size(comm) * sizeof(RankTimes));
    g->sums = (double *)device_alloc(device, "batch", sums * sizeof(double));
    g->host_sums = (double *)device_alloc_host(device, "batch", sums * sizeof(double));
    g->losses.name = "losses";
    g->ready = event_create(device, "ready");
    g->agreed = event_create(device, "losses agreed");
    return g;
}

static void gpt_close(GPT *g) {
    fsdp_close(g->fsdp);
    units_free(g->units, g->layers + 1);
    ops_close(g->ops);
    free(g->acts.blocks);
    free(g);
}

// ---------------------------------------------------------------------------------------------------------------------
// a block

// Pointers to tensors of a unit, count of them from number first on, within its flat array of parameters or of gradients.
static void weights_of(const GPT *g, int unit, int first, int count, const void *flat, const void **w) {
    for (int t = 0; t < count; t++)
        w[t] = (const char *)flat + g->units[unit].tensors[first + t].offset * dtype_size(g->run.dtype);
}
static void grads_of(const GPT *g, int unit, int first, int count, float *flat, float **d) {
    for (int t = 0; t < count; t++) d[t] = flat + g->units[unit].tensors[first + t].offset;
}
static void root_weights(const GPT *g, const void *flat, const void **w) {
    weights_of(g, FSDP_ROOT, 0, ROOT_TENSORS, flat, w);
}
static void block_weights(const GPT *g, int l, const void *flat, const void **w) {
    const int K = g->run.unit_blocks;
    weights_of(g, block_unit(l, K), l % K * BLOCK_TENSORS, BLOCK_TENSORS, flat, w);
}
static void block_grads(const GPT *g, int l, float *flat, float **d) {
    const int K = g->run.unit_blocks;
    grads_of(g, block_unit(l, K), l % K * BLOCK_TENSORS, BLOCK_TENSORS, flat, d);
}

static void *block_input(const GPT *g, int l) { return l == 0 ? g->acts.encoded : g->acts.blocks[l - 1].residual3; }

static int64_t block_span(GPT *g, const char *phase, int l) {
    return span_begin(device_compute(g->device), phase, g->units[block_unit(l, g->run.unit_blocks)].name);
}

static void block_forward(GPT *g, int l, const void *flat, int B, int T) {
    const int N = B * T, C = g->config.C, NH = g->config.NH;
    const DType dtype = g->run.dtype;
    const void *w[BLOCK_TENSORS], *x = block_input(g, l); // (N, C)
    BlockActivations *a = &g->acts.blocks[l];
    void *branch = g->acts.branch;
    Ops *ops = g->ops;
    int64_t span = block_span(g, "forward", l);
    block_weights(g, l, flat, w);
    layernorm_forward(ops, a->ln1, a->ln1_mean, a->ln1_rstd, x, w[LN1W], w[LN1B], N, C, dtype);
    linear_forward(ops, a->qkv, a->ln1, w[QKVW], w[QKVB], N, C, 3 * C, dtype);
    attention_forward(ops, a->atty, a->lse, a->qkv, B, T, C, NH, dtype);
    linear_forward(ops, branch, a->atty, w[ATTPROJW], w[ATTPROJB], N, C, C, dtype);
    residual_layernorm_forward(ops, a->residual2, a->ln2, a->ln2_mean, a->ln2_rstd, x, branch, w[LN2W], w[LN2B], N,
                               C, dtype);
    linear_forward(ops, a->fch, a->ln2, w[FCW], w[FCB], N, C, 4 * C, dtype);
    gelu_forward(ops, a->fch_gelu, a->fch, (size_t)N * 4 * (size_t)C, dtype);
    linear_forward(ops, branch, a->fch_gelu, w[FCPROJW], w[FCPROJB], N, 4 * C, C, dtype);
    residual_forward(ops, a->residual3, a->residual2, branch, (size_t)N * (size_t)C, dtype);
    span_end(device_compute(g->device), span);
}

// Computes again what backward needs and block l does not keep. The last block's is still there.
static void block_recompute(GPT *g, int l, const void *flat) {
    const int B = g->run.B, T = g->run.T, C = g->config.C, mode = g->run.recompute;
    const BlockActivations *a = &g->acts.blocks[l];
    if (l == g->config.L - 1) return;
    if (mode == RECOMPUTE_BLOCK) block_forward(g, l, flat, B, T);
    if (mode == RECOMPUTE_ATTENTION)
        attention_forward(g->ops, a->atty, a->lse, a->qkv, B, T, C, g->config.NH, g->run.dtype);
    if (mode == RECOMPUTE_GELU || mode == RECOMPUTE_ATTENTION)
        gelu_forward(g->ops, a->fch_gelu, a->fch, (size_t)B * (size_t)T * 4 * (size_t)C, g->run.dtype);
}

// dresidual comes in as the gradient of the block's output and leaves as that of its input.
static void block_backward(GPT *g, int l, const void *flat, float *flat_grad) {
    const int B = g->run.B, T = g->run.T, N = B * T, C = g->config.C, NH = g->config.NH;
    const DType dtype = g->run.dtype;
    const void *w[BLOCK_TENSORS];
    float *d[BLOCK_TENSORS];
    const BlockActivations *a = &g->acts.blocks[l];
    void *dresidual = g->acts.dresidual, *dbranch = g->acts.dbranch, *dfch = g->acts.dfch, *dqkv = g->acts.dqkv;
    Ops *ops = g->ops;
    int64_t span = block_span(g, "backward", l);
    block_weights(g, l, flat, w);
    block_grads(g, l, flat_grad, d);
    linear_backward(ops, dfch, d[FCPROJW], d[FCPROJB], dresidual, a->fch_gelu, w[FCPROJW], N, 4 * C, C, dtype);
    gelu_backward(ops, dfch, dfch, a->fch, (size_t)N * 4 * (size_t)C, dtype);
    linear_backward(ops, dbranch, d[FCW], d[FCB], dfch, a->ln2, w[FCW], N, C, 4 * C, dtype);
    layernorm_backward(ops, dresidual, d[LN2W], d[LN2B], dbranch, a->residual2, w[LN2W], a->ln2_mean, a->ln2_rstd,
                       N, C, dtype);
    linear_backward(ops, dbranch, d[ATTPROJW], d[ATTPROJB], dresidual, a->atty, w[ATTPROJW], N, C, C, dtype);
    attention_backward(ops, dqkv, dbranch, a->atty, a->lse, a->qkv, B, T, C, NH, dtype);
    linear_backward(ops, dbranch, d[QKVW], d[QKVB], dqkv, a->ln1, w[QKVW], N, C, 3 * C, dtype);
    layernorm_backward(ops, dresidual, d[LN1W], d[LN1B], dbranch, block_input(g, l), w[LN1W], a->ln1_mean,
                       a->ln1_rstd, N, C, dtype);
    span_end(device_compute(g->device), span);
}

// ---------------------------------------------------------------------------------------------------------------------
// the micro-step: one micro-batch forward and backward, and every collective of FSDP

// Unit u's blocks are first_block(u) … first_block(u + 1) - 1.
static int first_block(const GPT *g, int u) { return unit_first_block(&g->config, u, g->run.unit_blocks); }

// From tokens to the final LayerNorm. The root must be in use: root are its tensors.
static void forward(GPT *g, const void *const *root, int B, int T) {
    const int N = B * T, C = g->config.C, L = g->config.L, U = g->layers, ahead = g->run.sharding.prefetch;
    Activations *a = &g->acts;
    Fsdp *f = g->fsdp;
    for (int u = 1; u <= ahead && u <= U; u++) fsdp_gather(f, u);
    embedding_forward(g->ops, a->encoded, a->inputs, root[WTE], root[WPE], B, T, C, g->run.dtype);
    for (int u = 1; u <= U; u++) {
        const void *flat = fsdp_use(f, u);
        if (u + ahead <= U) fsdp_gather(f, u + ahead); // travels while u computes
        for (int l = first_block(g, u); l < first_block(g, u + 1); l++) block_forward(g, l, flat, B, T);
        fsdp_release(f, u);
    }
    layernorm_forward(g->ops, a->lnf, a->lnf_mean, a->lnf_rstd, block_input(g, L), root[LNFW], root[LNFB], N, C,
                      g->run.dtype);
}

// The tied head, some rows at a time: losses of all positions and, where scale is not 0, the gradient of lnf (into
// dbranch) and of wte. scale: 1 / targets of the global batch.
static void head(GPT *g, const void *const *root, float *dwte, float scale) {
    const int N = g->run.B * g->run.T, C = g->config.C, V = g->config.V, Vp = g->config.Vp;
    const DType dtype = g->run.dtype;
    const size_t size = dtype_size(dtype);
    Activations *a = &g->acts;
    int64_t span = span_begin(device_compute(g->device), "head", NULL);
    for (int row = 0; row < N; row += LOGITS_ROWS) {
        int n = N - row < LOGITS_ROWS ? N - row : LOGITS_ROWS;
        const char *x = (const char *)a->lnf + (size_t)row * (size_t)C * size; // (n, C)
        char *dx = (char *)a->dbranch + (size_t)row * (size_t)C * size;        // (n, C)
        unembed_forward(g->ops, a->logits, x, root[WTE], n, C, Vp, dtype);
        softmax_cross_entropy(g->ops, a->losses + row, a->logits, a->targets + row, n, V, Vp, scale, dtype);
        if (scale != 0) unembed_backward(g->ops, dx, dwte, a->logits, x, root[WTE], n, C, Vp, row > 0, dtype);
    }
    span_end(device_compute(g->device), span);
}

// A unit's parameters are gathered while a unit before computes; its gradients leave while the next one computes.
static void micro_step(GPT *g, float scale) {
    const int B = g->run.B, T = g->run.T, N = B * T, C = g->config.C, L = g->config.L, U = g->layers;
    const int ahead = g->run.sharding.prefetch;
    const DType dtype = g->run.dtype;
    const void *root[ROOT_TENSORS];
    float *droot[ROOT_TENSORS];
    Activations *a = &g->acts;
    Fsdp *f = g->fsdp;

    fsdp_gather(f, FSDP_ROOT);
    root_weights(g, fsdp_use(f, FSDP_ROOT), root);
    grads_of(g, FSDP_ROOT, 0, ROOT_TENSORS, fsdp_grad(f, FSDP_ROOT), droot);

    forward(g, root, B, T);
    head(g, root, droot[WTE], scale);

    fill_zero(g->ops, a->dresidual, (size_t)N * (size_t)C, dtype);
    layernorm_backward(g->ops, a->dresidual, droot[LNFW], droot[LNFB], a->dbranch, block_input(g, L), root[LNFW],
                       a->lnf_mean, a->lnf_rstd, N, C, dtype);
    for (int u = U; u >= 1; u--) {
        fsdp_gather(f, u); // still there for the last units; under way for the others
        const void *flat = fsdp_use(f, u);
        if (u > ahead) fsdp_gather(f, u - ahead); // before reduce(u), or it would queue behind it
        float *flat_grad = fsdp_grad(f, u);
        for (int l = first_block(g, u + 1) - 1; l >= first_block(g, u); l--) {
            block_recompute(g, l, flat); // what --recompute did not keep
            block_backward(g, l, flat, flat_grad);
        }
        fsdp_release(f, u);
        fsdp_reduce(f, u); // travels while u-1 computes
    }
    embedding_backward(g->ops, droot[WTE], droot[WPE], a->inputs, a->dresidual, B, T, C, dtype);
    fsdp_release(f, FSDP_ROOT);
    fsdp_reduce(f, FSDP_ROOT);
}

// ---------------------------------------------------------------------------------------------------------------------
// the step

static double seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// Sequences n … n+B-1 of the loader become the micro-batch; returns their targets.
static int64_t batch_load(GPT *g, const Loader *loader, int64_t n) {
    const size_t bytes = (size_t)g->run.B * (size_t)g->run.T * sizeof(int);
    int64_t targets = loader_batch(loader, n, g->run.B, g->host_inputs, g->host_targets);
    device_copy_in(g->device, g->acts.inputs, g->host_inputs, bytes);
    device_copy_in(g->device, g->acts.targets, g->host_targets, bytes);
    return targets;
}

// The losses of the micro-batch become its sums, those of all others 0.
static void sums_set(GPT *g, int batch) {
    losses_sum(g->ops, &g->sums[2 * batch], g->acts.losses, g->run.B, g->run.T);
}

// Makes the sums of all micro-batches known to all ranks: each was written by one rank and is 0 on the others.
static void sums_send(GPT *g, int batches) {
    Stream *compute = device_compute(g->device), *stream = comm_stream(g->comm);
    stream_writes(compute, &g->losses, "sums of losses");
    event_record(g->ready, compute);
    stream_wait(stream, g->ready);
    stream_writes(stream, &g->losses, "agreement on the losses");
    comm_phase(g->comm, "agreement on the losses");
    comm_all_reduce(g->comm, g->sums, 2 * (size_t)batches, COMM_F64_SUM);
    event_record(g->agreed, stream);
}

// From here on compute finds the sums of all.
static void sums_await(GPT *g) {
    stream_wait(device_compute(g->device), g->agreed);
    stream_reads(device_compute(g->device), &g->losses, "mean loss");
}

static void sums_read(GPT *g, int batches) {
    device_copy_out(g->device, g->host_sums, g->sums, 2 * (size_t)batches * sizeof(double));
}

// Where loss or norm is not finite nothing was updated.
typedef struct {
    double loss, norm;
    const char *bad_unit; // whose gradient is not finite; NULL: none
} StepResult;

// One update from the global batch whose first sequence is at position n of the loader (NULL: rehearsal). What decides
// whether and how far to update stays on the device; the host waits only once it has issued all of it.
static StepResult train_step(GPT *g, const Loader *loader, int64_t n, int64_t step, AdamW settings) {
    const int J = g->run.sharding.micro_steps, B = g->run.B;
    const int batches = J * comm_size(g->comm); // at most MAX_MICRO_BATCHES
    const double targets = (double)batches * B * g->run.T;
    StepResult result = {0, 0, NULL};
    fill_zero(g->ops, g->sums, 2 * (size_t)batches * sizeof(double) / sizeof(float), F32);
    for (int j = 0; j < J; j++) {
        int batch = fsdp_leaf(g->fsdp, j); // this rank's: so that sums are formed in one and the same order
        if (loader) batch_load(g, loader, n + (int64_t)batch * B);
        micro_step(g, (float)(1.0 / targets));
        sums_set(g, batch);
    }
    sums_send(g, batches);
    fsdp_norm(g->fsdp, g->run.clip);
    sums_await(g);
    scale_guard(g->ops, fsdp_scale(g->fsdp), g->sums, 2 * (size_t)batches);
    for (int u = 0; u <= g->layers; u++) {
        fsdp_update(g->fsdp, u, settings, step);
        if (u <= g->run.sharding.prefetch) fsdp_gather(g->fsdp, u); // travels while the others are updated
    }
    result.norm = fsdp_norm_read(g->fsdp, &result.bad_unit);
    sums_read(g, batches);
    for (int i = 0; loader && i < batches; i++) result.loss += g->host_sums[2 * i];
    result.loss /= targets;
    return result;
}

// Tells every rank all ranks' times of the step that has just ended.
static void times_agree(GPT *g, RankTimes own) {
    comm_phase(g->comm, "exchange of the step's times");
    comm_all_gather(g->comm, g->times, &own, sizeof own);
    event_record(g->agreed, comm_stream(g->comm));
    event_synchronize(g->agreed);
}

enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD };

typedef struct {
    double lr, final;
    int64_t steps, warmup;
    int kind;
} Schedule;

// Learning rate of step k of `steps`, k from 1: warmup, then the schedule down to final · lr.
static double schedule_lr(const Schedule *s, int64_t k) {
    if (k <= s->warmup) return s->lr * (double)k / (double)s->warmup;
    double length = (double)(s->steps - s->warmup), p = (double)(k - 1 - s->warmup) / length, last = 0.2;
    switch (s->kind) {
    case SCHEDULE_COSINE:
        return s->lr * (s->final + (1 - s->final) * (1 + cos(M_PI * p)) / 2);
    case SCHEDULE_LINEAR:
        return s->lr * (1 - (1 - s->final) * p);
    case SCHEDULE_CONSTANT:
        return s->lr;
    case SCHEDULE_WSD: {
        double begin = (double)s->steps * (1 - last), q = ((double)(k - 1) - begin) / ((double)s->steps * last);
        return q <= 0 ? s->lr : s->lr * (1 - (1 - s->final) * sqrt(q));
    }
    }
    return s->lr;
}

// ---------------------------------------------------------------------------------------------------------------------
// validation and samples

typedef struct {
    double loss, loss_late; // means; NaN without targets
    int64_t tokens;
} Validation;

// Mean loss over the first `batches` micro-batches of the loader (NULL: rehearsal). Round by round each rank takes one, or
// one without targets when none is left, since gathering takes everyone; losses are added in the micro-batches' order,
// so the result is the same for every number of ranks.
static Validation validate(GPT *g, const Loader *loader, int batches) {
    const int ranks = comm_size(g->comm), rank = comm_rank(g->comm), B = g->run.B, T = g->run.T;
    const void *root[ROOT_TENSORS];
    int64_t counts[2] = {0, 0};
    Validation result = {0, 0, 0};
    fsdp_gather(g->fsdp, FSDP_ROOT);
    root_weights(g, fsdp_use(g->fsdp, FSDP_ROOT), root);
    for (int first = 0; first < batches; first += ranks) {
        int batch = first + rank;
        fill_zero(g->ops, g->sums, 2 * (size_t)ranks * sizeof(double) / sizeof(float), F32);
        if (loader) {
            counts[0] += batch_load(g, loader, batch < batches ? (int64_t)batch * B : loader_sequences(loader));
            for (int i = 0; i < B * T; i++) counts[1] += g->host_targets[i] >= 0 && i % T >= T / 2;
        }
        forward(g, root, B, T);
        head(g, root, NULL, 0);
        sums_set(g, rank);
        sums_send(g, ranks);
        sums_await(g);
        sums_read(g, ranks);
        for (int i = 0; loader && i < ranks; i++) {
            result.loss += g->host_sums[2 * i];
            result.loss_late += g->host_sums[2 * i + 1];
        }
    }
    fsdp_release(g->fsdp, FSDP_ROOT);
    if (!loader) return result;
    comm_all_reduce(g->comm, counts, 2, COMM_I64_SUM);
    event_record(g->agreed, comm_stream(g->comm));
    event_synchronize(g->agreed);
    result.loss /= (double)counts[0];
    result.loss_late /= (double)counts[1];
    result.tokens = counts[0];
    return result;
}

// A number in [0, 1) that depends on its arguments alone (SplitMix64's mixing function, Steele et al., OOPSLA 2014).
static double random_unit(uint64_t seed, uint64_t step, uint64_t position) {
    uint64_t x = seed + step * UINT64_C(0x9e3779b97f4a7c15) + position * UINT64_C(0xd1342543de82ef95);
    for (int i = 0; i < 2; i++) {
        x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
        x ^= x >> 31;
    }
    return (double)(x >> 11) * 0x1p-53;
}

static int compare_down(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

typedef struct {
    const char *prompt;
    int64_t tokens; // to be written
    double temperature;
    int64_t top_k;
    uint64_t seed;
} Sampling;

// Draws from softmax(logits / temperature) over the top_k likeliest (0: all); temperature 0 takes the likeliest.
// sorted (V): scratch.
static int sample_from(const float *logits, float *sorted, int V, double temperature, int64_t top_k, double coin) {
    int best = 0;
    for (int i = 1; i < V; i++)
        if (logits[i] > logits[best]) best = i;
    if (temperature == 0) return best;
    float least = -INFINITY;
    if (top_k > 0 && top_k < V) {
        memcpy(sorted, logits, (size_t)V * sizeof(float));
        qsort(sorted, (size_t)V, sizeof(float), compare_down);
        least = sorted[top_k - 1];
    }
    double total = 0, passed = 0;
    for (int i = 0; i < V; i++)
        if (logits[i] >= least) total += exp(((double)logits[i] - (double)logits[best]) / temperature);
    for (int i = 0; i < V; i++) {
        if (logits[i] < least) continue;
        passed += exp(((double)logits[i] - (double)logits[best]) / temperature);
        if (passed > coin * total) return i;
    }
    return best;
}

enum { SAMPLE_ROUND = 64 }; // contexts are padded to a multiple of this, so that few shapes occur

// The logits of the token after tokens[0 … count-1], in host_logits. Causal attention makes the padding harmless.
static void logits_after(GPT *g, const int *tokens, int count) {
    const int C = g->config.C, Vp = g->config.Vp;
    const DType dtype = g->run.dtype;
    int T = (count + SAMPLE_ROUND - 1) / SAMPLE_ROUND * SAMPLE_ROUND;
    const void *root[ROOT_TENSORS];
    Activations *a = &g->acts;
    if (T > g->run.T) T = g->run.T;
    if (tokens) {
        memset(g->host_inputs, 0, (size_t)T * sizeof(int));
        memcpy(g->host_inputs, tokens, (size_t)count * sizeof(int));
    }
    device_copy_in(g->device, a->inputs, g->host_inputs, (size_t)T * sizeof(int));
    fsdp_gather(g->fsdp, FSDP_ROOT);
    root_weights(g, fsdp_use(g->fsdp, FSDP_ROOT), root);
    forward(g, root, 1, T);
    const char *x = (const char *)a->lnf + (size_t)(count - 1) * (size_t)C * dtype_size(dtype);
    unembed_forward(g->ops, a->logits, x, root[WTE], 1, C, Vp, dtype);
    cast_to_f32(g->ops, a->next_logits, a->logits, (size_t)Vp, dtype);
    device_copy_out(g->device, g->host_logits, a->next_logits, (size_t)g->config.V * sizeof(float));
    fsdp_release(g->fsdp, FSDP_ROOT);
}

// Tokens as text for a person: documents parted by an empty line, what a terminal would act on as '?'.
static void text_say(Log *log, const Tokenizer *tokenizer, const int *tokens, int count, int64_t step) {
    size_t size = 1, used = 0, bytes;
    for (int i = 0; i < count; i++) {
        tokenizer_decode(tokenizer, tokens[i], &bytes);
        size += bytes + 2;
    }
    char *text = (char *)calloc(size, 1);
    if (!text) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    for (int i = 0; i < count; i++) {
        const char *piece = tokenizer_decode(tokenizer, tokens[i], &bytes);
        if (i > 0 && tokens[i] == tokenizer_eot(tokenizer)) piece = "\n\n", bytes = 2;
        for (size_t k = 0; k < bytes; k++)
            text[used++] = (unsigned char)piece[k] < ' ' && piece[k] != '\n' && piece[k] != '\t' ? '?' : piece[k];
    }
    log_say(log, "--- sample at step %lld ---\n%s\n---", (long long)step, text);
    free(text);
}

// Writes a sample after step `step`. Every rank takes part and draws the same; rank 0's log shows it.
static void sample_say(GPT *g, Log *log, const Tokenizer *tokenizer, const Sampling *sampling, int64_t step) {
    const int V = g->config.V, most = g->run.sample_tokens;
    int count = 0;
    if (tokenizer_eot(tokenizer) < V) g->sample[count++] = tokenizer_eot(tokenizer);
    count += (int)tokenizer_encode(tokenizer, sampling->prompt, strlen(sampling->prompt), g->sample + count,
                                   (size_t)(most - count));
    for (int prompt = count; count < most; count++) {
        int seen = count < g->run.T ? count : g->run.T;
        logits_after(g, g->sample + count - seen, seen);
        double coin = random_unit(sampling->seed, (uint64_t)step, (uint64_t)(count - prompt));
        g->sample[count] = sample_from(g->host_logits, g->sorted, V, sampling->temperature, sampling->top_k, coin);
    }
    if (log) text_say(log, tokenizer, g->sample, count, step);
}

// ---------------------------------------------------------------------------------------------------------------------
// model folders: config.json and model.safetensors, as Hugging Face's GPT-2 has them

static json_t *json_read(const char *path) {
    json_error_t error;
    json_t *json = json_load_file(path, 0, &error);
    if (!json) die(EXIT_CODE_USAGE, NULL, "%s: %s (line %d)", path, error.text, error.line);
    return json;
}

// A whole number of config.json, or missing when it is absent or null; missing < 0: it must be there.
static int config_number(const json_t *json, const char *path, const char *key, int missing) {
    const json_t *value = json_object_get(json, key);
    if ((!value || json_is_null(value)) && missing >= 0) return missing;
    if (!json_is_integer(value) || json_integer_value(value) < 1 || json_integer_value(value) > MAX_VOCAB)
        die(EXIT_CODE_USAGE, "is it the folder of a GPT-2?", "%s: \"%s\" is missing or not 1 to %d", path, key,
            MAX_VOCAB);
    return (int)json_integer_value(value);
}

// Refuses a configuration that this program would compute otherwise.
static void config_expect(bool fine, const char *path, const char *key, const char *expected) {
    if (!fine)
        die(EXIT_CODE_USAGE, "this program computes GPT-2 as published", "%s: \"%s\" is not %s", path, key,
            expected);
}

static GPTConfig config_read(const char *folder) {
    char path[MAX_PATH];
    GPTConfig config;
    snprintf(path, sizeof path, "%s/config.json", folder);
    json_t *json = json_read(path);
    const char *type = json_string_value(json_object_get(json, "model_type"));
    const char *activation = json_string_value(json_object_get(json, "activation_function"));
    const json_t *eps = json_object_get(json, "layer_norm_epsilon"),
                 *tied = json_object_get(json, "tie_word_embeddings");
    config.maxT = config_number(json, path, "n_positions", -1);
    config.V = config_number(json, path, "vocab_size", -1);
    config.Vp = (config.V + 127) / 128 * 128;
    config.L = config_number(json, path, "n_layer", -1);
    config.NH = config_number(json, path, "n_head", -1);
    config.C = config_number(json, path, "n_embd", -1);
    config_expect(!type || strcmp(type, "gpt2") == 0, path, "model_type", "gpt2");
    config_expect(!activation || strcmp(activation, "gelu_new") == 0, path, "activation_function", "gelu_new");
    config_expect(!eps || fabs(json_number_value(eps) - 1e-5) < 1e-12, path, "layer_norm_epsilon", "1e-5");
    config_expect(!tied || json_is_true(tied), path, "tie_word_embeddings", "true");
    config_expect(config.C <= MAX_CHANNELS, path, "n_embd", "at most a million");
    config_expect(config_number(json, path, "n_inner", 4 * config.C) == 4 * config.C, path, "n_inner", "4 n_embd");
    config_expect(!json_is_true(json_object_get(json, "scale_attn_by_inverse_layer_idx")), path,
                  "scale_attn_by_inverse_layer_idx", "false");
    config_expect(!json_is_false(json_object_get(json, "scale_attn_weights")), path, "scale_attn_weights", "true");
    config_expect(!json_is_true(json_object_get(json, "add_cross_attention")), path, "add_cross_attention",
                  "false");
    config_expect(config.C % config.NH == 0, path, "n_embd", "a multiple of n_head");
    json_decref(json);
    return config;
}

// The file's tensor for one of ours, with or without the prefix some files have.
static const SafetensorsEntry *entry_of(const Safetensors *file, const char *name) {
    char prefixed[96];
    const SafetensorsEntry *entry = safetensors_find(file, name);
    snprintf(prefixed, sizeof prefixed, "transformer.%s", name);
    return entry ? entry : safetensors_find(file, prefixed);
}

// A model's parameters as they come from a file.
typedef struct {
    GPT *g;
    const Safetensors *file;
} Folder;

static void folder_source(void *context, const FsdpTensor *tensor, int64_t first, int64_t count, float *out) {
    const Folder *folder = (const Folder *)context;
    const SafetensorsEntry *entry = entry_of(folder->file, tensor->name);
    for (int64_t done = 0; done < count; done += PIECE) {
        int64_t n = count - done < PIECE ? count - done : (int64_t)PIECE;
        safetensors_read(folder->file, entry, first + done, n, folder->g->piece);
        device_copy_in(folder->g->device, out + done, folder->g->piece, (size_t)n * sizeof(float));
    }
}

// True for what a GPT-2 file may hold beside the parameters: constant masks, and the head when it repeats wte.
static bool entry_extra(const char *name) {
    size_t length = strlen(name);
    static const char *const endings[] = {".attn.bias", ".attn.masked_bias", "lm_head.weight"};
    for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++) {
        size_t n = strlen(endings[i]);
        if (length >= n && strcmp(name + length - n, endings[i]) == 0) return true;
    }
    return false;
}

// The head is tied here, so a file's own head must be wte.
static void head_check(const Safetensors *file, const char *path) {
    enum { MOST = 4096 };
    float a[MOST], b[MOST];
    const SafetensorsEntry *wte = entry_of(file, "wte.weight"), *own = safetensors_find(file, "lm_head.weight");
    if (!own) return;
    bool same = own->elements == wte->elements;
    for (int64_t first = 0; same && first < own->elements; first += MOST) {
        int64_t n = own->elements - first < MOST ? own->elements - first : (int64_t)MOST;
        safetensors_read(file, wte, first, n, a);
        safetensors_read(file, own, first, n, b);
        same = memcmp(a, b, (size_t)n * sizeof(float)) == 0;
    }
    if (!same)
        die(EXIT_CODE_USAGE, "this program ties the head to wte", "%s: lm_head.weight differs from wte.weight",
            path);
}

// Every parameter must be there with its shape, and nothing unknown.
static Safetensors *folder_open(const char *folder, const FsdpUnit *units, int count) {
    char path[MAX_PATH];
    int found = 0, extra = 0;
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    Safetensors *file = safetensors_open(path);
    for (int u = 0; u < count; u++)
        for (int t = 0; t < units[u].count; t++, found++) {
            const FsdpTensor *tensor = &units[u].tensors[t];
            const SafetensorsEntry *entry = entry_of(file, tensor->name);
            if (!entry)
                die(EXIT_CODE_USAGE, "is it the folder of a GPT-2?", "%s: %s is missing", path, tensor->name);
            if (entry->ndim != tensor->ndim || entry->shape[0] != tensor->shape[0] ||
                (tensor->ndim == 2 && entry->shape[1] != tensor->shape[1]))
                die(EXIT_CODE_USAGE, "config.json and model.safetensors do not belong together",
                    "%s: %s has shape (%lld, %lld), expected (%lld, %lld)", path, tensor->name,
                    (long long)entry->shape[0], entry->ndim > 1 ? (long long)entry->shape[1] : 0,
                    (long long)tensor->shape[0], (long long)tensor->shape[1]);
        }
    for (int i = 0; i < safetensors_count(file); i++) extra += entry_extra(safetensors_entry(file, i)->name);
    for (int i = 0; found + extra != safetensors_count(file) && i < safetensors_count(file); i++) {
        const char *name = safetensors_entry(file, i)->name;
        const char *bare = strncmp(name, "transformer.", 12) == 0 ? name + 12 : name;
        bool known = entry_extra(name);
        for (int u = 0; u < count; u++)
            for (int t = 0; t < units[u].count; t++) known |= strcmp(units[u].tensors[t].name, bare) == 0;
        if (!known) die(EXIT_CODE_USAGE, "is it the folder of a GPT-2?", "%s: unknown tensor %s", path, name);
    }
    head_check(file, path);
    return file;
}

static void config_write(const GPTConfig *config, const char *folder) {
    char path[MAX_PATH];
    snprintf(path, sizeof path, "%s/config.json", folder);
    json_t *json = json_pack("{s:[s], s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:f, s:b}", "architectures",
                             "GPT2LMHeadModel", "model_type", "gpt2", "activation_function", "gelu_new", "n_layer",
                             config->L, "n_head", config->NH, "n_embd", config->C, "vocab_size", config->V,
                             "n_positions", config->maxT, "layer_norm_epsilon", 1e-5, "tie_word_embeddings", 1);
    if (!json || json_dump_file(json, path, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) != 0)
        die(EXIT_CODE_FAILURE, "is the disk full?", "cannot write %s", path);
    json_decref(json);
}

// Tensor by tensor through one small buffer. Collective.
static void folder_write(GPT *g, const char *folder, SafetensorsType dtype) {
    const bool writes = comm_rank(g->comm) == 0;
    const int count = g->config.L * BLOCK_TENSORS + ROOT_TENSORS;
    SafetensorsEntry *entries = (SafetensorsEntry *)calloc((size_t)count, sizeof(SafetensorsEntry));
    SafetensorsWriter *writer = NULL;
    char path[MAX_PATH];
    int n = 0;
    if (!entries) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    for (int u = 0; u <= g->layers; u++)
        for (int t = 0; t < g->units[u].count; t++, n++) {
            FsdpTensor *tensor = &g->units[u].tensors[t];
            entries[n].name = tensor->name;
            entries[n].dtype = dtype;
            entries[n].ndim = tensor->ndim;
            memcpy(entries[n].shape, tensor->shape, sizeof tensor->shape);
        }
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    if (writes) writer = safetensors_create(path, entries, count);
    for (int u = 0; u <= g->layers; u++)
        for (int t = 0; t < g->units[u].count; t++) {
            int64_t elements = fsdp_tensor_elements(&g->units[u].tensors[t]);
            for (int64_t first = 0; first < elements; first += PIECE) {
                int64_t piece = elements - first < PIECE ? elements - first : (int64_t)PIECE;
                fsdp_fetch(g->fsdp, u, t, first, piece, g->piece);
                if (writes) safetensors_append(writer, g->piece, piece);
            }
        }
    if (writes) {
        safetensors_finish(writer);
        config_write(&g->config, folder);
    }
    free(entries);
}

// ---------------------------------------------------------------------------------------------------------------------
// the command line

enum { MAX_OPTIONS = 64 };

typedef struct {
    const char *train_data, *val_data, *output, *model, *tokenizer, *export_folder, *trace;
    int64_t vocab, B, T, total_batch, threads, steps, warmup, seed, shuffle, val_every, val_batches, sample_every,
        ranks, prefetch, unit_blocks, shard_ranks;
    double lr, final_lr, decay, beta1, beta2, eps, clip, comm_timeout;
    int schedule, precision, reduce_dtype, shard, accumulate, reduction, recompute, comm, export_dtype;
    bool plan, help, version;
    Sampling sampling;
    Option options[MAX_OPTIONS];
    int option_count;
} Settings;

enum { PRECISION_AUTO, PRECISION_FP32, PRECISION_BF16 };

static void settings_default(Settings *s) {
    memset(s, 0, sizeof *s);
    s->train_data = "data/corpus/stories_train_*.bin";
    s->model = "d12";
    s->B = 4;
    s->T = 1024;
    s->lr = 3e-4;
    s->decay = 0.1;
    s->beta1 = 0.9;
    s->beta2 = 0.95;
    s->eps = 1e-8;
    s->clip = 1.0;
    s->seed = 1337;
    s->shuffle = 1;
    s->comm_timeout = 600;
    s->prefetch = 1;
    s->sampling.prompt = "";
    s->sampling.tokens = 64;
    s->sampling.temperature = 1.0;
}

static void option_add(Settings *s, char letter, const char *name, OptionKind kind, void *value, double least,
                       double most, const char *choices, const char *help) {
    Option option = {letter, name, kind, value, least, most, choices, help, false};
    assert(s->option_count < MAX_OPTIONS);
    s->options[s->option_count++] = option;
}
static void option_text(Settings *s, char letter, const char *name, const char **value, const char *help) {
    option_add(s, letter, name, OPTION_TEXT, value, 0, 0, NULL, help);
}
static void option_count(Settings *s, char letter, const char *name, int64_t *value, double least, double most,
                         const char *help) {
    option_add(s, letter, name, OPTION_COUNT, value, least, most, NULL, help);
}
static void option_number(Settings *s, char letter, const char *name, double *value, double least, double most,
                          const char *help) {
    option_add(s, letter, name, OPTION_NUMBER, value, least, most, NULL, help);
}
static void option_choice(Settings *s, char letter, const char *name, int *value, const char *choices,
                          const char *help) {
    option_add(s, letter, name, OPTION_CHOICE, value, 0, 0, choices, help);
}
static void option_flag(Settings *s, char letter, const char *name, bool *value, const char *help) {
    option_add(s, letter, name, OPTION_FLAG, value, 0, 0, NULL, help);
}

static void settings_table(Settings *s) {
    const double most = 9e15; // whole numbers up to here are exact
    option_text(s, 'i', "train-data", &s->train_data, "GLOB training shards (the stories that make run writes)");
    option_text(s, 'j', "val-data", &s->val_data, "GLOB validation shards (none)");
    option_text(s, 'o', "output", &s->output, "DIR where log.jsonl goes (none: console only)");
    option_text(s, 'e', "model", &s->model, "SPEC d12, gpt2-medium, gpt3:768, 4x4x256, or a model folder (d12)");
    option_count(s, 0, "vocab-size", &s->vocab, 2, MAX_VOCAB,
                 "N tokens in the vocabulary (the model's, the data's, or 50257)");
    option_text(s, 0, "tokenizer", &s->tokenizer, "NAME for prompts and samples (the data's)");
    option_count(s, 'b', "micro-batch", &s->B, 1, 1e6, "N sequences per rank and micro-step (4)");
    option_count(s, 't', "seq-len", &s->T, 1, 1e6,
                 "N tokens per sequence (1024, or the model's context if shorter)");
    option_count(s, 'd', "total-batch", &s->total_batch, 1, most,
                 "N tokens per step of all ranks (micro-batch x seq-len x ranks)");
    option_count(s, 0, "threads", &s->threads, 1, 4096,
                 "N per rank (OMP_NUM_THREADS, or the node's cores / its ranks)");
    option_count(s, 'x', "steps", &s->steps, 0, most, "N updates in all (one epoch)");
    option_number(s, 'l', "lr", &s->lr, 0, 1e6, "X peak learning rate (3e-4)");
    option_choice(s, 'k', "lr-schedule", &s->schedule, "cosine,linear,constant,wsd",
                  "KIND cosine, linear, constant or wsd (cosine)");
    option_count(s, 'u', "warmup", &s->warmup, 0, most, "N steps of linear warmup (0)");
    option_number(s, 'q', "final-lr", &s->final_lr, 0, 1, "X fraction of lr at the end (0)");
    option_number(s, 'c', "weight-decay", &s->decay, 0, 1e3, "X of matrices and embeddings (0.1)");
    option_number(s, 0, "beta1", &s->beta1, 0, 0.999999, "X of AdamW (0.9)");
    option_number(s, 0, "beta2", &s->beta2, 0, 0.999999, "X of AdamW (0.95)");
    option_number(s, 0, "eps", &s->eps, 0, 1, "X of AdamW (1e-8)");
    option_number(s, 0, "grad-clip", &s->clip, 0, 1e30, "X largest gradient norm, 0 for none (1.0)");
    option_count(s, 0, "seed", &s->seed, 0, most, "N of parameters, data order and samples (1337)");
    option_count(s, 0, "shuffle", &s->shuffle, 0, 1, "0|1 visit sequences in a random order, new each epoch (1)");
    option_choice(s, 0, "precision", &s->precision, "auto,fp32,bf16",
                  "TYPE of gathered parameters and activations: fp32, bf16 or auto (auto)");
    option_choice(s, 0, "reduce-dtype", &s->reduce_dtype, "fp32,bf16",
                  "TYPE each micro-batch's gradient is rounded to and travels in; sums are fp32 (fp32)");
    option_choice(s, 'z', "shard", &s->shard, "full,grad,optimizer,none,3,2,1,0",
                  "WHAT is sharded: full (3), grad (2), optimizer (1) or none (0) (full)");
    option_count(s, 0, "shard-ranks", &s->shard_ranks, 1, 1e6,
                 "F ranks that shard; groups of so many are replicas of each other (all ranks)");
    option_choice(s, 0, "accumulate", &s->accumulate, "sharded,unsharded",
                  "HOW micro-steps add up: sharded reduces each, unsharded keeps whole gradients (sharded)");
    option_choice(s, 0, "reduction", &s->reduction, "tree", "HOW gradients are summed: tree (tree)");
    option_add(s, 0, "unit-blocks", OPTION_COUNT_AUTO, &s->unit_blocks, 1, 10000, NULL,
               "K blocks gathered and reduced together, or auto (auto)");
    option_count(s, 0, "prefetch", &s->prefetch, 1, FSDP_MAX_PREFETCH,
                 "K units gathered ahead of the one that computes (1)");
    option_choice(s, 'r', "recompute", &s->recompute, "none,gelu,attention,block",
                  "WHAT backward computes again to save memory: none, gelu, attention or block (none)");
    option_choice(s, 0, "comm", &s->comm, "mpi", "LIBRARY that carries collectives: mpi (mpi)");
    option_number(s, 0, "comm-timeout", &s->comm_timeout, 0.001, 1e9,
                  "SECONDS after which a stuck collective ends the job (600)");
    option_count(s, 'v', "val-every", &s->val_every, 0, most,
                 "N steps between validations, 0: at the end only (0)");
    option_count(s, 'm', "val-batches", &s->val_batches, 0, 1e9, "N micro-batches of a validation, 0: all (0)");
    option_count(s, 's', "sample-every", &s->sample_every, 0, most, "N steps between samples, 0: none (0)");
    option_count(s, 'g', "sample-tokens", &s->sampling.tokens, 1, 1e6, "N tokens of a sample (64)");
    option_text(s, 0, "prompt", &s->sampling.prompt, "TEXT that samples begin with; with --steps 0 one is written");
    option_number(s, 0, "temperature", &s->sampling.temperature, 0, 100,
                  "X of samples, 0: the likeliest token (1.0)");
    option_count(s, 0, "top-k", &s->sampling.top_k, 0, 1e7,
                 "N likeliest tokens that samples draw from, 0: all (0)");
    option_text(s, 0, "export", &s->export_folder, "DIR for config.json and model.safetensors at the end (none)");
    option_choice(s, 0, "export-dtype", &s->export_dtype, "fp32,bf16", "TYPE fp32 or bf16 (fp32)");
    option_text(s, 0, "trace", &s->trace, "FILE timeline of all streams, for chrome://tracing or Perfetto (none)");
    option_flag(s, 0, "plan", &s->plan, "print memory and traffic per rank, and exit");
    option_count(s, 0, "ranks", &s->ranks, 1, 1e6, "N for --plan: as if there were N ranks");
    option_flag(s, 'h', "help", &s->help, "print this, and exit");
    option_flag(s, 0, "version", &s->version, "print the version, and exit");
}

static const char *const version_text = "fsdp.c 0.1";

static void settings_read(Settings *s, int argc, char **argv) {
    settings_default(s);
    settings_table(s);
    options_read(s->options, s->option_count, argc, argv, false);
}

static void help_print(const Settings *s) {
    printf("train_gpt: pretrains a GPT-2 from token shards, fully sharded over all ranks\n\n"
           "  ./train_gpt [options]                  one rank\n"
           "  mpirun -n N ./train_gpt [options]      N ranks\n\n");
    options_help(s->options, s->option_count);
}

// The models that have a name. NH 0: heads of 64 channels.
static bool model_named(const char *spec, GPTConfig *config) {
    static const struct {
        const char *name;
        int L, C, NH, maxT;
    } table[] = {
        {"d6", 6, 384, 6, 1024},
        {"d12", 12, 768, 12, 1024},
        {"d24", 24, 1024, 16, 1024},
        {"d36", 36, 1280, 20, 1024},
        {"d48", 48, 1600, 25, 1024},
        {"d60", 60, 1920, 30, 1024},
        {"d72", 72, 2880, 30, 1024},
        {"d84", 84, 3456, 36, 1024},
        {"gpt2", 12, 768, 12, 1024},
        {"gpt2-medium", 24, 1024, 16, 1024},
        {"gpt2-large", 36, 1280, 20, 1024},
        {"gpt2-xl", 48, 1600, 25, 1024},
        {"gpt3:384", 6, 384, 6, 2048},
        {"gpt3:768", 12, 768, 12, 2048},
        {"gpt3:1024", 24, 1024, 16, 2048},
        {"gpt3:1536", 24, 1536, 16, 2048},
        {"gpt3:2048", 24, 2048, 16, 2048},
        {"gpt3:2560", 32, 2560, 32, 2048},
        {"gpt3:4096", 32, 4096, 32, 2048},
        {"gpt3:12288", 96, 12288, 96, 2048},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (strcmp(table[i].name, spec) == 0) {
            config->L = table[i].L;
            config->C = table[i].C;
            config->NH = table[i].NH;
            config->maxT = table[i].maxT;
            return true;
        }
    return false;
}

// What --model says, with `vocab` tokens. *folder is set when it is one.
static GPTConfig model_config(const Settings *s, int64_t vocab, const char **folder) {
    GPTConfig config = {(int)s->T, 0, 0, 0, 0, 0};
    struct stat status;
    char rest;
    *folder = NULL;
    if (stat(s->model, &status) == 0 && S_ISDIR(status.st_mode)) {
        *folder = s->model;
        return config_read(s->model);
    }
    if (!model_named(s->model, &config) &&
        (sscanf(s->model, "%dx%dx%d%c", &config.L, &config.NH, &config.C, &rest) != 3 || config.L < 1 ||
         config.NH < 1 || config.C < 1 || config.L > 10000 || config.C > MAX_CHANNELS || config.C % config.NH != 0))
        die(EXIT_CODE_USAGE,
            "give d6 d12 d24 d36 d48 …, gpt2 … gpt2-xl, gpt3:768 …, LxHxC with C a multiple of H, or a model folder",
            "--model %s: no such model or folder", s->model);
    config.V = (int)vocab;
    config.Vp = (config.V + 127) / 128 * 128;
    return config;
}

// NAME.json for shards NAME_train…, when there is one: *vocab and *tokenizer of the data. The card stays open.
static json_t *card_read(const char *glob, int64_t *vocab, const char **tokenizer) {
    char path[MAX_PATH];
    struct stat status;
    const char *name = strrchr(glob, '/'), *mark = NULL;
    for (const char *at = name ? name : glob; (at = strstr(at, "_train")) != NULL; at++) mark = at;
    if (!mark) return NULL;
    snprintf(path, sizeof path, "%.*s.json", (int)(mark - glob), glob);
    if (stat(path, &status) != 0) return NULL;
    json_t *card = json_read(path);
    *vocab = json_integer_value(json_object_get(card, "vocab_size"));
    *tokenizer = json_string_value(json_object_get(card, "tokenizer"));
    if (*vocab < 2 || *vocab > MAX_VOCAB)
        die(EXIT_CODE_USAGE, "make the data again", "%s: \"vocab_size\" is missing or not 2 to %d", path,
            MAX_VOCAB);
    return card;
}

// ---------------------------------------------------------------------------------------------------------------------
// a run

typedef struct {
    Settings settings;
    GPTConfig config;
    GPTRun run;
    Schedule schedule;
    const char *folder; // the model's, or NULL
    Safetensors *weights;
    json_t *card;
    Loader *train, *val;
    Tokenizer *tokenizer;
    Log *log;
    int64_t sequences; // per step
    int val_batches;   // micro-batches of a validation, of all ranks together; 0: none
    int ranks;
    char cores[512];
    char *hosts;    // (ranks, HOST_NAME)
    double *sorted; // (ranks)
} Run;

enum { HOST_NAME = 64 };

// A sample is written every so many steps, or, without training, because there is a prompt.
static bool samples_wanted(const Settings *s) {
    return s->sample_every > 0 || (s->steps == 0 && options_given(s->options, s->option_count, "prompt"));
}

static void tokenizer_choose(Run *r) {
    Settings *s = &r->settings;
    if (!s->tokenizer && r->config.V == TOKENIZER_BYTES_VOCAB) s->tokenizer = "bytes";
    if (samples_wanted(s) && !s->tokenizer)
        die(EXIT_CODE_USAGE, "give --tokenizer bytes, or train on shards with a card",
            "--sample-every and --prompt need a tokenizer");
    if (!s->tokenizer) return;
    r->tokenizer = tokenizer_open(s->tokenizer);
    if (tokenizer_vocab(r->tokenizer) > r->config.V)
        die(EXIT_CODE_USAGE, "give the tokenizer that the data was made with",
            "--tokenizer %s has %d tokens, the model %d", s->tokenizer, tokenizer_vocab(r->tokenizer), r->config.V);
}

// The model's sizes, and the data that this run needs: a plan needs none, and without steps there is no training.
static void run_read_data(Run *r) {
    Settings *s = &r->settings;
    const bool trains = !s->plan && (s->steps > 0 || !options_given(s->options, s->option_count, "steps"));
    int64_t card_vocab = 0, vocab;
    const char *card_tokenizer = NULL;
    if (trains || options_given(s->options, s->option_count, "train-data"))
        r->card = card_read(s->train_data, &card_vocab, &card_tokenizer);
    vocab = s->vocab ? s->vocab : card_vocab ? card_vocab : 50257;
    r->config = model_config(s, vocab, &r->folder);
    if (r->folder && s->vocab && s->vocab != r->config.V)
        die(EXIT_CODE_USAGE, "leave --vocab-size out", "--vocab-size %lld: %s has %d", (long long)s->vocab,
            r->folder, r->config.V);
    if (!options_given(s->options, s->option_count, "seq-len") && s->T > r->config.maxT) s->T = r->config.maxT;
    if (s->T > r->config.maxT)
        die(EXIT_CODE_USAGE, "give a shorter --seq-len, or a model with a longer context",
            "--seq-len %lld is longer than the model's context of %d", (long long)s->T, r->config.maxT);
    if (!s->tokenizer) s->tokenizer = card_tokenizer;
    if (s->plan) return;
    LoaderOptions train = {"--train-data",  s->train_data,    s->T, r->config.V, false,
                           s->shuffle != 0, (uint64_t)s->seed};
    LoaderOptions val = {"--val-data", s->val_data, s->T, r->config.V, true, false, 0};
    if (trains) r->train = loader_open(train);
    if (s->val_data) r->val = loader_open(val);
    tokenizer_choose(r);
}

// The batch must come out even for this number of ranks.
static void batch_check(Settings *s, int ranks) {
    const int64_t micro = s->B * s->T, all = micro * ranks;
    if (micro > MAX_MICRO_TOKENS)
        die(EXIT_CODE_USAGE, "give a smaller --micro-batch or --seq-len",
            "--micro-batch %lld x --seq-len %lld: %lld tokens, expected at most %d", (long long)s->B,
            (long long)s->T, (long long)micro, MAX_MICRO_TOKENS);
    if (s->total_batch == 0) s->total_batch = all;
    if (s->total_batch % all != 0)
        die(EXIT_CODE_USAGE, "change --total-batch, --micro-batch or the number of ranks",
            "--total-batch %lld is no multiple of micro-batch %lld x seq-len %lld x ranks %d = %lld tokens",
            (long long)s->total_batch, (long long)s->B, (long long)s->T, ranks, (long long)all);
    if (s->total_batch / micro > MAX_MICRO_BATCHES)
        die(EXIT_CODE_USAGE, "give a smaller --total-batch",
            "--total-batch %lld takes %lld micro-batches of %lld tokens, expected at most %d",
            (long long)s->total_batch, (long long)(s->total_batch / micro), (long long)micro, MAX_MICRO_BATCHES);
}

// Groups must come out even, too. Sets how many ranks shard.
static void sharding_check(Settings *s, int ranks) {
    s->shard %= 4; // the choices name each strategy twice
    const bool none = s->shard == FSDP_NONE;
    if (none && s->shard_ranks > 1)
        die(EXIT_CODE_USAGE, "leave one of them out", "--shard none and --shard-ranks %lld contradict each other",
            (long long)s->shard_ranks);
    if (s->shard_ranks == 0) s->shard_ranks = none ? 1 : ranks;
    if (ranks % s->shard_ranks != 0)
        die(EXIT_CODE_USAGE, "give a divisor of the number of ranks", "--shard-ranks %lld does not divide %d ranks",
            (long long)s->shard_ranks, ranks);
}

// Blocks that make a unit of which each of F ranks sends at least a million elements, since networks reach their
// bandwidth with messages of some MB (Zhao et al., arXiv 2304.11277, figure 2); but at least four units, so that there is
// something to hide the traffic behind. A block has some 12·C² parameters.
static int64_t unit_blocks_auto(const GPTConfig *config, int64_t F) {
    const int64_t block = 12 * (int64_t)config->C * config->C, most = config->L / 4 > 1 ? config->L / 4 : 1;
    int64_t wanted = (1000000 * F + block - 1) / block;
    if (F == 1) return 1;
    return wanted < most ? wanted : most;
}

// Sizes that depend on the number of ranks.
static void run_size(Run *r) {
    Settings *s = &r->settings;
    batch_check(s, r->ranks);
    sharding_check(s, r->ranks);
    r->sequences = s->total_batch / s->T;
    if (r->train && !options_given(s->options, s->option_count, "steps")) {
        s->steps = loader_sequences(r->train) / r->sequences;
        if (s->steps == 0) s->steps = 1;
    }
    if (s->steps > 0 && s->warmup >= s->steps && s->warmup > 0)
        die(EXIT_CODE_USAGE, "warm up for fewer steps",
            "--warmup %lld of --steps %lld leaves no step to train at full rate", (long long)s->warmup,
            (long long)s->steps);
    int64_t val = r->val ? (loader_sequences(r->val) + s->B - 1) / s->B : 0;
    r->val_batches = (int)(s->val_batches > 0 && s->val_batches < val ? s->val_batches : val);
    bool bf16 = s->precision == PRECISION_BF16 || (s->precision == PRECISION_AUTO && ops_native_bf16());
    r->run.B = (int)s->B;
    r->run.T = (int)s->T;
    r->run.sample_tokens =
        samples_wanted(s) ? (int)(s->sampling.tokens + (int64_t)strlen(s->sampling.prompt) + 1) : 0;
    r->run.threads = (int)s->threads;
    r->run.recompute = s->recompute;
    r->run.dtype = bf16 ? BF16 : F32;
    FsdpOptions sharding = {r->run.dtype,
                            s->reduce_dtype == 0 ? F32 : BF16,
                            (int)(s->total_batch / (s->B * s->T * r->ranks)),
                            (int)s->prefetch,
                            s->shard,
                            (int)s->shard_ranks,
                            s->accumulate == 1};
    r->run.sharding = sharding;
    if (s->unit_blocks == 0) s->unit_blocks = unit_blocks_auto(&r->config, s->shard_ranks);
    r->run.unit_blocks = (int)s->unit_blocks;
    r->run.clip = (float)s->clip;
    r->run.files = s->export_folder != NULL || r->folder != NULL;
    r->run.tracing = s->trace != NULL;
    Schedule schedule = {s->lr, s->final_lr, s->steps, s->warmup, s->schedule};
    r->schedule = schedule;
    s->sampling.seed = (uint64_t)s->seed;
}

// Everything a run will do, done once on a device that only counts: so its ledger is the plan. Returns the traffic of a
// step.
static FsdpTraffic rehearse(GPT *g) {
    AdamW settings = {0, 0, 0, 0, 0, 0, 0};
    train_step(g, NULL, 0, 1, settings);
    FsdpTraffic first = fsdp_traffic(g->fsdp);
    train_step(g, NULL, 0, 2, settings); // finds gathered what the first gathered at its end
    FsdpTraffic step = fsdp_traffic(g->fsdp);
    step.gathered -= first.gathered;
    step.reduced -= first.reduced;
    step.replicated -= first.replicated;
    validate(g, NULL, 1);
    for (int count = SAMPLE_ROUND; g->run.sample_tokens > 0; count += SAMPLE_ROUND) {
        logits_after(g, NULL, count < g->run.T ? count : g->run.T);
        if (count >= g->run.T || count >= g->run.sample_tokens) break;
    }
    return step;
}

static double mebibytes(double bytes) { return bytes / 1048576; }

// What is planned for one rank.
static void plan_say(Log *log, const Device *device, FsdpTraffic traffic, double flops, int ranks) {
    const Arena *arena;
    log_say(log, "memory per rank, of %d", ranks);
    for (int i = 0; (arena = device_arena(device, i)) != NULL; i++)
        log_say(log, "  %-18s %12.2f MiB %16zu bytes", arena->name, mebibytes((double)arena->bytes), arena->bytes);
    log_say(log, "  %-18s %12.2f MiB %16zu bytes", "all", mebibytes((double)device_bytes(device)),
            device_bytes(device));
    log_say(log, "received per rank and step: %.2f MiB gathered, %.2f MiB for reduction, %.2f MiB between replicas",
            mebibytes(traffic.gathered), mebibytes(traffic.reduced), mebibytes(traffic.replicated));
    log_say(log, "%.1f MFLOP per token", flops / 1e6);
}

// The initial value of any element depends on the seed and its place alone.
typedef struct {
    Ops *ops;
    uint64_t seed;
} Init;

static void init_source(void *context, const FsdpTensor *tensor, int64_t first, int64_t count, float *out) {
    const Init *init = (const Init *)context;
    if (tensor->init_normal > 0)
        fill_normal(init->ops, out, init->seed, tensor->number, (size_t)first, (size_t)count, tensor->init_normal);
    else
        fill_constant(init->ops, out, tensor->init_value, (size_t)count);
}

// Floating-point operations a second of this rank's threads in a matrix product of 1024 cubed, the best of five: what
// "mfu" is a fraction of.
static double peak_measure(const GPTRun *run) {
    enum { SIZE = 1024 };
    Device *device = device_open(NULL);
    Ops *ops = ops_open(device, run->threads);
    const size_t bytes = (size_t)SIZE * SIZE * dtype_size(run->dtype);
    void *x = device_alloc(device, "peak", bytes), *w = device_alloc(device, "peak", bytes);
    void *y = device_alloc(device, "peak", bytes), *b = device_alloc(device, "peak", SIZE * sizeof(float));
    double best = 0;
    for (int i = 0; i < 6; i++) { // the first one warms up
        double begin = seconds();
        linear_forward(ops, y, x, w, b, SIZE, SIZE, SIZE, run->dtype);
        double rate = 2.0 * SIZE * SIZE * SIZE / (seconds() - begin);
        if (i > 0 && rate > best) best = rate;
    }
    ops_close(ops);
    device_close(device);
    return best;
}

// Every rank gets all ranks' texts of `size` bytes.
static char *texts_gather(Comm *comm, Event *told, const char *text, size_t size) {
    char *all = (char *)calloc((size_t)comm_size(comm), size);
    if (!all) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    comm_phase(comm, "exchange of host names");
    comm_all_gather(comm, all, text, size);
    event_record(told, comm_stream(comm));
    event_synchronize(told);
    return all;
}

// What the ranks run on, one line each, on rank 0.
static void cores_say(Run *r, Comm *comm, Device *device) {
    enum { MOST = 16, CORES = sizeof r->cores };
    char host[HOST_NAME];
    Event *told = event_create(device, "told");
    snprintf(host, sizeof host, "%s", comm_host());
    r->hosts = texts_gather(comm, told, host, HOST_NAME);
    r->sorted = (double *)calloc((size_t)r->ranks, sizeof(double));
    if (!r->sorted) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    char *cores = texts_gather(comm, told, r->cores, CORES);
    for (int rank = 0; rank < r->ranks && rank < MOST; rank++)
        log_say(r->log, "rank %d: %s, %s", rank, r->hosts + (size_t)rank * HOST_NAME, cores + (size_t)rank * CORES);
    if (r->ranks > MOST) log_say(r->log, "… and %d more ranks", r->ranks - MOST);
    free(cores);
}

static void sharding_say(const Run *r) {
    static const char *const names[] = {"full", "grad", "optimizer", "none"};
    const FsdpOptions *f = &r->run.sharding;
    int replicas = r->ranks / f->shard_ranks;
    log_say(r->log, "shard %s over %d rank%s%s; units of %d block%s, prefetch %d; accumulate %s, reduce-dtype %s",
            names[f->shard], f->shard_ranks, f->shard_ranks == 1 ? "" : "s", replicas > 1 ? ", in replicas" : "",
            r->run.unit_blocks, r->run.unit_blocks == 1 ? "" : "s", f->prefetch,
            f->unsharded ? "unsharded" : "sharded", f->reduce_dtype == BF16 ? "bf16" : "fp32");
}

static void run_say(const Run *r, int64_t parameters) {
    const Settings *s = &r->settings;
    const GPTConfig *c = &r->config;
    log_say(r->log, "%s: %s, %s", version_text, ops_description(), r->run.dtype == BF16 ? "bf16" : "fp32");
    log_say(r->log,
            "model %s: %d blocks, %d heads, %d channels, context %d, vocabulary %d (in memory %d), %lld parameters",
            s->model, c->L, c->NH, c->C, c->maxT, c->V, c->Vp, (long long)parameters);
    if (r->train)
        log_say(r->log,
                "training on %s: %d shard%s, %lld tokens, %lld sequences of %d an epoch, %lld targets left over",
                s->train_data, loader_shards(r->train), loader_shards(r->train) == 1 ? "" : "s",
                (long long)loader_tokens(r->train), (long long)loader_sequences(r->train), r->run.T,
                (long long)loader_leftover(r->train));
    if (r->val)
        log_say(r->log, "validating on %s: %lld targets, %d micro-batches", s->val_data,
                (long long)loader_targets(r->val), r->val_batches);
    if (s->steps > 0) log_say(r->log, "%lld steps", (long long)s->steps);
    log_say(r->log, "a step is %lld tokens: %d rank%s x %d micro-step%s x %d sequences of %d",
            (long long)s->total_batch, r->ranks, r->ranks == 1 ? "" : "s", r->run.sharding.micro_steps,
            r->run.sharding.micro_steps == 1 ? "" : "s", r->run.B, r->run.T);
    sharding_say(r);
}

static void config_log(Run *r, int64_t parameters, size_t planned) {
    json_t *fields = options_json(r->settings.options, r->settings.option_count);
    json_object_set_new(fields, "ranks", json_integer(r->ranks));
    json_object_set_new(fields, "micro_steps", json_integer(r->run.sharding.micro_steps));
    json_object_set_new(fields, "threads", json_integer(r->run.threads));
    json_object_set_new(fields, "precision", json_string(r->run.dtype == BF16 ? "bf16" : "fp32"));
    json_object_set_new(fields, "layers", json_integer(r->config.L));
    json_object_set_new(fields, "heads", json_integer(r->config.NH));
    json_object_set_new(fields, "channels", json_integer(r->config.C));
    json_object_set_new(fields, "vocab_size", json_integer(r->config.V));
    json_object_set_new(fields, "parameters", json_integer(parameters));
    json_object_set_new(fields, "planned_bytes", json_integer((json_int_t)planned));
    json_object_set_new(fields, "version", json_string(version_text));
    log_config(r->log, fields);
}

// Model FLOPs per token as llm.c counts them: six per parameter, and attention's two products over the whole context.
static double flops_per_token(const Run *r, int64_t parameters) {
    return 6.0 * (double)parameters + 6.0 * r->config.L * (double)r->config.C * r->run.T;
}

static void validation_say(Run *r, GPT *g, int64_t step) {
    Validation result = validate(g, r->val, r->val_batches);
    log_val(r->log, step, result.loss, result.loss_late, result.tokens);
}

// What a model can do without training: a validation and a sample, where asked for.
static void run_evaluate(Run *r, GPT *g) {
    if (r->val) validation_say(r, g, 0);
    if (samples_wanted(&r->settings)) sample_say(g, r->log, r->tokenizer, &r->settings.sampling, 0);
    log_end(r->log, 0, "done");
}

static int compare_up(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Minimum, median and maximum over the ranks of one of their times, at `offset` of RankTimes.
static void times_spread(const Run *r, const GPT *g, size_t offset, double three[3]) {
    for (int i = 0; i < r->ranks; i++) memcpy(&r->sorted[i], (const char *)&g->times[i] + offset, sizeof(double));
    qsort(r->sorted, (size_t)r->ranks, sizeof(double), compare_up);
    three[0] = r->sorted[0];
    three[1] = (r->sorted[(r->ranks - 1) / 2] + r->sorted[r->ranks / 2]) / 2;
    three[2] = r->sorted[r->ranks - 1];
}

static void times_fill(const Run *r, const GPT *g, LogTrain *line) {
    double waited[3];
    times_spread(r, g, offsetof(RankTimes, own), line->rank_ms);
    times_spread(r, g, offsetof(RankTimes, gather), line->gather_wait_ms);
    times_spread(r, g, offsetof(RankTimes, waited), waited);
    line->exposed_ms = waited[1];
    for (int i = 1; i < r->ranks; i++)
        if (g->times[i].own > g->times[line->slowest_rank].own) line->slowest_rank = i;
    line->slowest_host = r->hosts + (size_t)line->slowest_rank * HOST_NAME;
}

// The training loop. Returns the exit code.
static int run_train(Run *r, GPT *g, double peak) {
    const Settings *s = &r->settings;
    const double model_flops = flops_per_token(r, parameters_count(g->units, g->layers + 1));
    const double begin = seconds();
    AdamW adam = {0, (float)s->beta1, (float)s->beta2, (float)s->eps, (float)s->decay, 0, 0};
    for (int64_t step = 1; step <= s->steps; step++) {
        double lr = schedule_lr(&r->schedule, step), start = seconds();
        double waited = device_waited(g->device), gather = fsdp_gather_waited(g->fsdp);
        adam.lr = (float)lr;
        StepResult result = train_step(g, r->train, (step - 1) * r->sequences, step, adam);
        if (!isfinite(result.loss) || !isfinite(result.norm)) {
            log_end(r->log, step, "nonfinite");
            if (r->log)
                warn("lower --lr, warm up for longer, or look at the data around this step",
                     "step %lld stopped before its update: loss %g, gradient norm %g, first seen in unit %s",
                     (long long)step, result.loss, result.norm, result.bad_unit ? result.bad_unit : "none");
            return EXIT_CODE_NONFINITE;
        }
        double now = seconds(), took = now - start;
        waited = r->ranks > 1 ? device_waited(g->device) - waited : 0; // alone there is nobody to wait for
        gather = fsdp_gather_waited(g->fsdp) - gather;
        RankTimes times = {1e3 * (took - waited), 1e3 * gather, 1e3 * waited};
        times_agree(g, times);
        LogTrain line = {step,
                         s->steps,
                         result.loss,
                         result.norm,
                         lr,
                         step * s->total_batch,
                         1e3 * took,
                         (double)s->total_batch / took,
                         model_flops * (double)s->total_batch / took / (peak * r->ranks),
                         (now - begin) / (double)step * (double)(s->steps - step),
                         {0, 0, 0},
                         {0, 0, 0},
                         0,
                         0,
                         NULL};
        times_fill(r, g, &line);
        log_train(r->log, &line);
        bool last = step == s->steps;
        if (r->val && (last || (s->val_every && step % s->val_every == 0))) validation_say(r, g, step);
        if (s->sample_every && (last || step % s->sample_every == 0))
            sample_say(g, r->log, r->tokenizer, &s->sampling, step);
    }
    log_end(r->log, s->steps, "done");
    return EXIT_CODE_DONE;
}

static void memory_say(const Run *r, const Device *plan, const Device *device) {
    double peak = (double)device_peak_bytes(), ledger = (double)device_bytes(device),
           files = (double)device_file_bytes();
    if (!device_same_ledger(plan, device))
        die(EXIT_CODE_FAILURE, "please report this with the command line", "the ledger is not what was planned");
    log_say(r->log,
            "peak memory of rank 0: %.2f MiB = ledger %.2f MiB, as planned + file maps %.2f MiB + other %.2f MiB",
            mebibytes(peak), mebibytes(ledger), mebibytes(files), mebibytes(peak - ledger - files));
}

// Folders are checked before hours are spent on what goes there.
static void export_claim(const char *folder) {
    char path[MAX_PATH];
    struct stat status;
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    if (stat(path, &status) == 0)
        die(EXIT_CODE_USAGE, "choose another --export, or remove it", "--export %s already holds a model", folder);
    folder_make(folder, "--export");
}

static void path_check(const char *option, const char *path) {
    if (path && strlen(path) > MAX_FOLDER)
        die(EXIT_CODE_USAGE, "give a shorter path", "--%s: %zu characters, expected at most %d", option,
            strlen(path), MAX_FOLDER);
}

// Reads and checks all that is read from outside; rank 0 does so first, so that a fault is reported once.
static void run_open(Run *r, int argc, char **argv) {
    Settings *s = &r->settings;
    memset(r, 0, sizeof *r);
    comm_first();
    settings_read(s, argc, argv);
    if (s->help || s->version) {
        if (comm_world_rank() == 0 && s->help) help_print(s);
        if (comm_world_rank() == 0 && !s->help) printf("%s\n", version_text);
        if (fflush(stdout) != 0) die(EXIT_CODE_FAILURE, "is the disk full?", "cannot write to standard output");
        comm_others();
        comm_end();
        exit(EXIT_CODE_DONE);
    }
    if (s->ranks && !s->plan) die(EXIT_CODE_USAGE, "start ranks with mpirun -n", "--ranks belongs to --plan");
    path_check("train-data", s->train_data);
    path_check("model", s->model);
    path_check("output", s->output);
    path_check("export", s->export_folder);
    path_check("trace", s->trace);
    r->ranks = s->ranks ? (int)s->ranks : comm_world_size();
    int threads = (int)s->threads;
    device_cores(comm_local_rank(), comm_local_size(), comm_bound_on_purpose(), &threads, r->cores,
                 sizeof r->cores);
    s->threads = threads;
    run_read_data(r);
    run_size(r);
    if (r->folder && !s->plan) {
        FsdpUnit *units = units_make(&r->config, 1);
        r->weights = folder_open(r->folder, units, r->config.L + 1);
        units_free(units, r->config.L + 1);
    }
    if (s->export_folder && !s->plan && comm_world_rank() == 0) export_claim(s->export_folder);
    r->log = log_open(comm_world_rank() == 0, s->plan ? NULL : s->output);
    if (s->trace && !s->plan && comm_world_rank() == 0) trace_claim(s->trace); // perhaps in the output's folder
    comm_others();
}

static void run_close(Run *r) {
    if (r->train) loader_close(r->train);
    if (r->val) loader_close(r->val);
    if (r->tokenizer) tokenizer_close(r->tokenizer);
    if (r->weights) safetensors_close(r->weights);
    json_decref(r->card);
    free(r->hosts);
    free(r->sorted);
    log_close(r->log);
}

// The run itself, once its plan is made.
static int run_go(Run *r, const Device *plan, int64_t parameters) {
    const Settings *s = &r->settings;
    double peak = s->steps > 0 ? peak_measure(&r->run) : 0;
    Device *device = device_open(plan);
    Comm *comm = comm_world(device, s->comm_timeout);
    GPT *g = gpt_open(device, comm, r->config, r->run);
    Init init = {g->ops, (uint64_t)s->seed};
    Folder folder = {g, r->weights};
    int code = EXIT_CODE_DONE;
    config_log(r, parameters, device_bytes(plan));
    cores_say(r, comm, device);
    if (r->weights)
        fsdp_fill(g->fsdp, folder_source, &folder);
    else
        fsdp_fill(g->fsdp, init_source, &init);
    if (s->steps > 0) {
        log_say(r->log, "peak of a matrix product: %.0f GFLOP/s per rank; mfu is the model's FLOPs over it",
                peak / 1e9);
        code = run_train(r, g, peak);
    } else
        run_evaluate(r, g);
    memory_say(r, plan, device);
    if (code == EXIT_CODE_DONE && s->export_folder) {
        folder_write(g, s->export_folder, s->export_dtype == 0 ? SAFETENSORS_F32 : SAFETENSORS_BF16);
        log_say(r->log, "exported to %s, without tokenizer files: %s", s->export_folder,
                r->tokenizer ? "bytes have none" : "no tokenizer is known");
    }
    if (s->trace && trace_write(s->trace, device, comm) == TRACE_SPANS)
        log_say(r->log, "the trace holds the first %d spans of each rank, which is not all of the run",
                (int)TRACE_SPANS);
    gpt_close(g);
    comm_close(comm);
    device_close(device);
    return code;
}

#ifndef TESTING
int main(int argc, char **argv) {
    static Run run;
    error_program("train_gpt");
    comm_start(&argc, &argv);
    run_open(&run, argc, argv);

    Device *plan = device_plan();
    Comm *planned = comm_plan(plan, 0, run.ranks);
    GPT *rehearsed = gpt_open(plan, planned, run.config, run.run);
    int64_t parameters = parameters_count(rehearsed->units, rehearsed->layers + 1);
    FsdpTraffic traffic = rehearse(rehearsed);
    run_say(&run, parameters);
    plan_say(run.log, plan, traffic, flops_per_token(&run, parameters), run.ranks);
    gpt_close(rehearsed);
    comm_close(planned);

    int code = run.settings.plan ? EXIT_CODE_DONE : run_go(&run, plan, parameters);
    device_close(plan);
    run_close(&run);
    if (fflush(stdout) != 0 || ferror(stdout))
        die(EXIT_CODE_FAILURE, "is the disk full?", "cannot write to standard output");
    comm_end();
    return code;
}
#endif
