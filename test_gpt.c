// test_gpt: the whole model, fully sharded, against PyTorch in float64 and against itself.
//
// Run it as one rank or under mpirun with 2, 3, 4 or 8: each checks what that number of ranks can. It includes the
// trainer's source, so what is tested is what trains. The reference values are made by dev/reference.py.
#define TESTING
#include "train_gpt.cu"

#include "count_allocations.h"
// clang-format off: cmocka wants these before it
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
// clang-format on
#include "test_ranks.h" // ranks_quieten
#include <unistd.h>     // getpid

// The bounds that fp32 must keep to, relative: its own error over ten steps is about a tenth of them, and each mistake
// in `mutants` breaks them at least tenfold (dev/reference.py measures and asserts both).
static const double loss_bound = 2e-6, norm_bound = 2e-5;

static const char *const mutants[] = {
    "erf_gelu",         "wpe_not_decayed",    "layernorm_decayed",     "layernorm_eps_outside",
    "adamw_eps_inside", "attention_unscaled", "norm_counts_tied_twice"};
enum { MUTANTS = sizeof mutants / sizeof mutants[0], MOST_STEPS = 16 };

static char folder[256]; // for shards, the same on all ranks

typedef struct {
    double loss[MOST_STEPS], norm[MOST_STEPS];
} Curve;

// ---------------------------------------------------------------------------------------------------------------------
// shards, and models run on some of the ranks

static void ranks_meet(void) {
    Device *device = device_open(NULL);
    Comm *world = comm_world(device, 120);
    comm_barrier(world);
    comm_close(world);
    device_close(device);
}

// A shard file of 16-bit tokens.
static void shard_write(const char *path, const int *tokens, int count) {
    int32_t header[256] = {20240520, 1, count};
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    fwrite(header, sizeof header, 1, file);
    for (int i = 0; i < count; i++) {
        uint16_t token = (uint16_t)tokens[i];
        fwrite(&token, sizeof token, 1, file);
    }
    assert_int_equal(fclose(file), 0);
}

static Loader *loader_over(const char *pattern, int T, int V, bool every_target, bool shuffle) {
    static char glob[512];
    snprintf(glob, sizeof glob, "%s/%s", folder, pattern);
    return loader_open((LoaderOptions){"--train-data", glob, T, V, every_target, shuffle, 7});
}

// How a test runs the model.
typedef struct {
    GPTConfig config;
    int ranks, sequences, B, steps, threads; // sequences: of a global batch
    DType dtype;
    float lr;
    Safetensors *parameters; // NULL: random ones
    int recompute;
    int prefetch; // 0: 1
} Trial;

// The model on the first trial.ranks ranks; g is NULL on the others, which go on to meet them at bench_close.
typedef struct {
    Device *plan, *device;
    Comm *world, *comm;
    GPT *g;
} Bench;

static GPTRun trial_run(const Trial *trial) {
    GPTRun run;
    memset(&run, 0, sizeof run);
    run.B = trial->B;
    run.T = trial->config.maxT;
    run.micro_steps = trial->sequences / trial->B / trial->ranks;
    run.sample_tokens = 4;
    run.threads = trial->threads;
    run.recompute = trial->recompute;
    run.prefetch = trial->prefetch ? trial->prefetch : 1;
    run.dtype = trial->dtype;
    run.clip = 1;
    return run;
}

static void params_source(void *context, const FsdpTensor *tensor, int64_t first, int64_t count, float *out) {
    char name[96];
    snprintf(name, sizeof name, "params.%s", tensor->name);
    const SafetensorsEntry *entry = safetensors_find((const Safetensors *)context, name);
    assert_non_null(entry);
    safetensors_read((const Safetensors *)context, entry, first, count, out);
}

static Device *plan_make(const Trial *trial, int rank) {
    Device *plan = device_plan();
    Comm *planned = comm_plan(plan, rank, trial->ranks);
    GPT *rehearsed = gpt_open(plan, planned, trial->config, trial_run(trial));
    rehearse(rehearsed);
    gpt_close(rehearsed);
    comm_close(planned);
    return plan;
}

// Builds the trial on exactly the planned memory.
static Bench bench_open(const Trial *trial) {
    Bench bench = {.plan = plan_make(trial, 0)};
    bench.device = device_open(bench.plan);
    bench.world = comm_world(bench.device, 120);
    bench.comm = comm_split(bench.world, comm_world_rank() < trial->ranks ? 0 : -1);
    if (!bench.comm) return bench;
    bench.g = gpt_open(bench.device, bench.comm, trial->config, trial_run(trial));
    Init init = {bench.g->ops, 1337};
    if (trial->parameters)
        fsdp_fill(bench.g->fsdp, params_source, trial->parameters);
    else
        fsdp_fill(bench.g->fsdp, init_source, &init);
    return bench;
}

// Ranks that took part check that they used what was planned, to the byte.
static void bench_close(Bench *bench) {
    if (bench->g) {
        assert_true(device_same_ledger(bench->plan, bench->device));
        gpt_close(bench->g);
        comm_close(bench->comm);
    }
    comm_barrier(bench->world);
    comm_close(bench->world);
    device_close(bench->device);
    device_close(bench->plan);
}

static AdamW adam_of(const Trial *trial) {
    return (AdamW){.lr = trial->lr, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .decay = 0.1f};
}

// All steps of the trial on consecutive global batches.
static Curve trial_curve(const Trial *trial, const Loader *loader) {
    Curve curve;
    memset(&curve, 0, sizeof curve);
    Bench bench = bench_open(trial);
    for (int i = 0; bench.g && i < trial->steps; i++) {
        StepResult result = train_step(bench.g, loader, (int64_t)i * trial->sequences, i + 1, adam_of(trial));
        curve.loss[i] = result.loss;
        curve.norm[i] = result.norm;
    }
    bench_close(&bench);
    return curve;
}

// ---------------------------------------------------------------------------------------------------------------------
// against PyTorch

// The reference's configuration, parameters and tokens, these as one shard a sequence (shards hold T+1 tokens).
typedef struct {
    Safetensors *file;
    GPTConfig config;
    int sequences, steps;
    Loader *loader;
} Reference;

static void tensor_read(const Safetensors *file, const char *name, float *out) {
    const SafetensorsEntry *entry = safetensors_find(file, name);
    if (!entry) fail_msg("the reference lacks %s", name);
    safetensors_read(file, entry, 0, entry->elements, out);
}

// What is stored as the sum of two fp32 tensors.
static void doubles_read(const Safetensors *file, const char *name, int n, double *out) {
    char part[160];
    float high[MOST_STEPS], low[MOST_STEPS];
    snprintf(part, sizeof part, "%s_hi", name);
    tensor_read(file, part, high);
    snprintf(part, sizeof part, "%s_lo", name);
    tensor_read(file, part, low);
    for (int i = 0; i < n; i++) out[i] = (double)high[i] + (double)low[i];
}

static Curve curve_read(const Reference *reference, const char *prefix) {
    Curve curve;
    char name[128];
    memset(&curve, 0, sizeof curve);
    snprintf(name, sizeof name, "%slosses", prefix);
    doubles_read(reference->file, name, reference->steps, curve.loss);
    snprintf(name, sizeof name, "%snorms", prefix);
    doubles_read(reference->file, name, reference->steps, curve.norm);
    return curve;
}

static void reference_shards(const Reference *reference, const char *which) {
    const int T = reference->config.maxT, count = reference->steps * reference->sequences;
    float *tokens = (float *)calloc((size_t)count * (size_t)(T + 1), sizeof(float));
    int *row = (int *)calloc((size_t)T + 1, sizeof(int));
    tensor_read(reference->file, "tokens", tokens);
    for (int k = 0; k < count; k++) {
        char path[512];
        for (int t = 0; t <= T; t++) row[t] = (int)tokens[(size_t)k * (size_t)(T + 1) + (size_t)t];
        snprintf(path, sizeof path, "%s/%s_%06d.bin", folder, which, k);
        shard_write(path, row, T + 1);
    }
    free(tokens);
    free(row);
}

static Reference reference_open(const char *which) {
    char path[256], pattern[64];
    float numbers[7];
    Reference reference;
    snprintf(path, sizeof path, "dev/reference_%s.safetensors", which);
    reference.file = safetensors_open(path);
    tensor_read(reference.file, "configuration", numbers);
    reference.config = (GPTConfig){.maxT = (int)numbers[4],
                                   .V = (int)numbers[0],
                                   .Vp = ((int)numbers[0] + 127) / 128 * 128,
                                   .L = (int)numbers[3],
                                   .NH = (int)numbers[2],
                                   .C = (int)numbers[1]};
    reference.sequences = (int)numbers[5];
    reference.steps = (int)numbers[6];
    if (comm_world_rank() == 0) reference_shards(&reference, which);
    ranks_meet();
    snprintf(pattern, sizeof pattern, "%s_*.bin", which);
    reference.loader = loader_over(pattern, reference.config.maxT, reference.config.V, false, false);
    return reference;
}

static void reference_close(Reference *reference) {
    loader_close(reference->loader);
    safetensors_close(reference->file);
}

static Trial reference_trial(const Reference *reference, int B) {
    Trial trial;
    memset(&trial, 0, sizeof trial);
    trial.config = reference->config;
    trial.ranks = comm_world_size();
    trial.sequences = reference->sequences;
    trial.B = B;
    trial.steps = reference->steps;
    trial.threads = 1;
    trial.lr = 1e-2f;
    trial.parameters = reference->file;
    return trial;
}

static double relative(double a, double b) { return fabs(a - b) / fabs(b); }

// The worst relative errors of a curve, each over its bound.
static double curve_error(const Curve *curve, const Curve *expected, int steps) {
    double worst = 0;
    for (int i = 0; i < steps; i++) {
        worst = fmax(worst, relative(curve->loss[i], expected->loss[i]) / loss_bound);
        worst = fmax(worst, relative(curve->norm[i], expected->norm[i]) / norm_bound);
    }
    return worst;
}

// Ten steps, cut into micro-batches of every size that fits this number of ranks; and the bounds catch every mistake.
static void check_curves(const char *which) {
    Reference reference = reference_open(which);
    Curve expected = curve_read(&reference, "");
    int cuts = 0;
    for (int B = 1; B <= 4; B++) {
        if (reference.sequences % (B * comm_world_size()) != 0) continue;
        Trial trial = reference_trial(&reference, B);
        Curve curve = trial_curve(&trial, reference.loader);
        double error = curve_error(&curve, &expected, trial.steps);
        if (error > 1) fail_msg("micro-batches of %d: %.2f times the bounds away from PyTorch", B, error);
        for (int m = 0; m < (int)MUTANTS; m++) {
            char prefix[96];
            snprintf(prefix, sizeof prefix, "mutant.%s.", mutants[m]);
            Curve mutant = curve_read(&reference, prefix);
            double distance = curve_error(&curve, &mutant, trial.steps);
            if (distance < 5)
                fail_msg("the bounds would hardly catch %s: only %.2f times as far", mutants[m], distance);
        }
        cuts++;
    }
    reference_close(&reference);
    if (cuts == 0) skip();
}

static void test_curves_odd(void **state) {
    (void)state;
    check_curves("odd");
}
static void test_curves_round(void **state) {
    (void)state;
    check_curves("round");
}

// fp32 sums over K terms err by some √K·2^-24 of their scale; the longest chain here is a few hundred terms per layer
// over a dozen layers, which stays below 1e-5 of the tensor's largest element.
static const float tensor_bound = 1e-5f;

static void check_close(const char *name, const float *values, const float *expected, size_t n, float floor) {
    float scale = floor, worst = 0;
    for (size_t i = 0; i < n; i++) scale = fmaxf(scale, fabsf(expected[i]));
    for (size_t i = 0; i < n; i++) worst = fmaxf(worst, fabsf(values[i] - expected[i]));
    if (!(worst <= tensor_bound * scale)) fail_msg("%s is off by %g, largest element %g", name, worst, scale);
}

// The logits of the first global batch's sequences, B at a time.
static void check_logits(GPT *g, const Reference *reference) {
    const int B = g->run.B, T = g->run.T, V = g->config.V, Vp = g->config.Vp;
    const void *root[ROOT_TENSORS];
    float *expected = (float *)calloc((size_t)reference->sequences * (size_t)T * (size_t)V, sizeof(float));
    tensor_read(reference->file, "logits", expected);
    for (int first = 0; first < reference->sequences; first += B) {
        batch_load(g, reference->loader, first);
        fsdp_gather(g->fsdp, FSDP_ROOT);
        weights_of(g, FSDP_ROOT, fsdp_use(g->fsdp, FSDP_ROOT), root);
        forward(g, root, B, T);
        unembed_forward(g->ops, g->acts.logits, g->acts.lnf, root[WTE], B * T, g->config.C, Vp, F32);
        fsdp_release(g->fsdp, FSDP_ROOT);
        for (int row = 0; row < B * T; row++)
            check_close("logits", (float *)g->acts.logits + (size_t)row * (size_t)Vp,
                        expected + ((size_t)first * (size_t)T + (size_t)row) * (size_t)V, (size_t)V, 0);
    }
    free(expected);
}

// Every gradient of the first step. The floor is for gradients that are zero but for rounding: a key's bias moves all
// scores of a row alike.
static void check_gradients(GPT *g, const Reference *reference) {
    const FsdpTensor *wte = &g->units[FSDP_ROOT].tensors[WTE];
    size_t most = (size_t)wte->stored + (size_t)(4 * g->config.C * g->config.C);
    float *values = (float *)calloc(most, sizeof(float)), *expected = (float *)calloc(most, sizeof(float)),
          floor = 0;
    for (int u = 0; u <= g->config.L; u++)
        for (int t = 0; t < g->units[u].count; t++) {
            char name[96];
            const FsdpTensor *tensor = &g->units[u].tensors[t];
            size_t n = (size_t)fsdp_tensor_elements(tensor);
            snprintf(name, sizeof name, "grads.%s", tensor->name);
            tensor_read(reference->file, name, expected);
            fsdp_fetch_grad(g->fsdp, u, t, 0, (int64_t)n, values);
            if (u == FSDP_ROOT && t == WTE)
                for (size_t i = 0; i < n; i++) floor = fmaxf(floor, 0.01f * fabsf(expected[i]));
            check_close(name, values, expected, n, floor);
        }
    // Padded rows of the vocabulary take no gradient.
    fsdp_fetch_grad(g->fsdp, FSDP_ROOT, WTE, fsdp_tensor_elements(wte), wte->stored - fsdp_tensor_elements(wte),
                    values);
    for (int64_t i = 0; i < wte->stored - fsdp_tensor_elements(wte); i++) assert_true(values[i] == 0);
    free(values);
    free(expected);
}

static void check_first_step(const char *which) {
    Reference reference = reference_open(which);
    Trial trial = reference_trial(&reference, 1);
    if (reference.sequences % trial.ranks == 0) {
        Bench bench = bench_open(&trial);
        check_logits(bench.g, &reference);
        train_step(bench.g, reference.loader, 0, 1, adam_of(&trial));
        check_gradients(bench.g, &reference);
        bench_close(&bench);
    }
    reference_close(&reference);
    if (reference.sequences % trial.ranks != 0) skip();
}

static void test_first_step_odd(void **state) {
    (void)state;
    check_first_step("odd");
}
static void test_first_step_round(void **state) {
    (void)state;
    check_first_step("round");
}

// ---------------------------------------------------------------------------------------------------------------------
// numbers that do not move

// A model whose rows, columns and keys cross the borders of tiles, on random tokens.
static const GPTConfig tiled = {.maxT = 96, .V = 131, .Vp = 256, .L = 3, .NH = 3, .C = 72};

static Loader *tiled_loader(void) {
    enum { TOKENS = 96 * 100 + 40 }; // 100 sequences and a rest
    if (comm_world_rank() == 0) {
        static int tokens[TOKENS];
        char path[512];
        for (int i = 0; i < TOKENS; i++)
            tokens[i] = (int)(random_unit(3, 0, (uint64_t)i) * random_unit(4, 0, (uint64_t)i) * 131);
        snprintf(path, sizeof path, "%s/tiled_000000.bin", folder);
        shard_write(path, tokens, TOKENS);
    }
    ranks_meet();
    return loader_over("tiled_*.bin", 96, 131, false, true);
}

static void assert_same_curve(const Curve *a, const Curve *b, int steps, const char *what, int value) {
    for (int i = 0; i < steps; i++)
        if (a->loss[i] != b->loss[i] || a->norm[i] != b->norm[i])
            fail_msg("step %d with %d %s: loss %.17g, norm %.17g; expected %.17g, %.17g", i + 1, value, what,
                     b->loss[i], b->norm[i], a->loss[i], a->norm[i]);
}

// The same global batch on 1, 2, 4 and 8 ranks, as far as there are so many, to the last bit.
static void check_ranks(DType dtype) {
    Loader *loader = tiled_loader();
    Curve first;
    memset(&first, 0, sizeof first);
    for (int ranks = 1; ranks <= comm_world_size(); ranks *= 2) {
        Trial trial = {.config = tiled,
                       .ranks = ranks,
                       .sequences = 16,
                       .B = 2,
                       .steps = 5,
                       .threads = 1,
                       .dtype = dtype,
                       .lr = 1e-2f};
        Curve curve = trial_curve(&trial, loader);
        if (ranks == 1)
            first = curve;
        else if (comm_world_rank() == 0)
            assert_same_curve(&first, &curve, trial.steps, "ranks", ranks);
    }
    assert_true(comm_world_rank() != 0 || first.loss[4] < first.loss[0]);
    loader_close(loader);
}

static void test_ranks_fp32(void **state) {
    (void)state;
    check_ranks(F32);
}
static void test_ranks_bf16(void **state) {
    (void)state;
    if (!ops_native_bf16()) skip();
    check_ranks(BF16);
}

// Any number of threads per rank, likewise.
static void check_threads(DType dtype) {
    static const int threads[] = {1, 2, 3, 16};
    Loader *loader = tiled_loader();
    Curve first;
    memset(&first, 0, sizeof first);
    for (int i = 0; i < 4; i++) {
        Trial trial = {.config = tiled,
                       .ranks = 1,
                       .sequences = 8,
                       .B = 4,
                       .steps = 3,
                       .threads = threads[i],
                       .dtype = dtype,
                       .lr = 1e-2f};
        Curve curve = trial_curve(&trial, loader);
        if (i == 0)
            first = curve;
        else
            assert_same_curve(&first, &curve, trial.steps, "threads", threads[i]);
    }
    loader_close(loader);
}

static void test_threads_fp32(void **state) {
    (void)state;
    if (comm_world_size() > 1) skip();
    check_threads(F32);
}
static void test_threads_bf16(void **state) {
    (void)state;
    if (comm_world_size() > 1 || !ops_native_bf16()) skip();
    check_threads(BF16);
}

// Recomputing saves memory and changes no bit.
static void check_recompute(DType dtype) {
    Loader *loader = tiled_loader();
    Curve first;
    size_t bytes = SIZE_MAX;
    memset(&first, 0, sizeof first);
    for (int mode = RECOMPUTE_NONE; mode <= RECOMPUTE_BLOCK; mode++) {
        Trial trial = {.config = tiled,
                       .ranks = comm_world_size(),
                       .sequences = 4 * comm_world_size(),
                       .B = 2,
                       .steps = 3,
                       .threads = 1,
                       .dtype = dtype,
                       .lr = 1e-2f,
                       .recompute = mode};
        Device *plan = plan_make(&trial, 0);
        assert_true(device_arena_bytes(plan, "activations") < bytes);
        bytes = device_arena_bytes(plan, "activations");
        device_close(plan);
        Curve curve = trial_curve(&trial, loader);
        if (mode == RECOMPUTE_NONE)
            first = curve;
        else
            assert_same_curve(&first, &curve, trial.steps, "as --recompute", mode);
    }
    loader_close(loader);
}

static void test_recompute_fp32(void **state) {
    (void)state;
    check_recompute(F32);
}
static void test_recompute_bf16(void **state) {
    (void)state;
    if (!ops_native_bf16()) skip();
    check_recompute(BF16);
}

// Gathering further ahead takes slots and changes no bit; also further than there are blocks.
static void test_prefetch(void **state) {
    (void)state;
    Loader *loader = tiled_loader();
    Curve first;
    memset(&first, 0, sizeof first);
    for (int prefetch = 1; prefetch <= 5; prefetch++) {
        Trial trial = {.config = tiled,
                       .ranks = comm_world_size(),
                       .sequences = 4 * comm_world_size(),
                       .B = 2,
                       .steps = 3,
                       .threads = 1,
                       .lr = 1e-2f,
                       .prefetch = prefetch};
        Curve curve = trial_curve(&trial, loader);
        if (prefetch == 1)
            first = curve;
        else
            assert_same_curve(&first, &curve, trial.steps, "blocks gathered ahead", prefetch);
    }
    loader_close(loader);
}

// Validation takes every target once, those of the last, short sequence too, and gives the same bits on every number of
// ranks.
static void test_validation(void **state) {
    (void)state;
    Loader *train = tiled_loader(), *all = loader_over("tiled_*.bin", 96, 131, true, false);
    Validation first = {0, 0, 0};
    int batches = (int)((loader_sequences(all) + 1) / 2);
    assert_int_equal(loader_targets(all), loader_tokens(all) - 1);
    for (int ranks = 1; ranks <= comm_world_size(); ranks++) {
        Trial trial = {.config = tiled, .ranks = ranks, .sequences = 2 * ranks, .B = 2, .threads = 1};
        Bench bench = bench_open(&trial);
        Validation result = {0, 0, 0};
        if (bench.g) result = validate(bench.g, all, batches);
        if (ranks == 1) first = result;
        bench_close(&bench);
        if (comm_world_rank() != 0) continue;
        assert_int_equal(result.tokens, loader_targets(all));
        assert_true(result.loss == first.loss && result.loss_late == first.loss_late);
        assert_true(fabs(result.loss - log(131)) < 0.2);
    }
    loader_close(train);
    loader_close(all);
}

// ---------------------------------------------------------------------------------------------------------------------
// memory

// Steps after the first, a validation and a token of a sample take no memory: neither from the ledger (bench_close) nor
// from the C library or the system.
static void test_no_allocations(void **state) {
    (void)state;
    Loader *loader = tiled_loader();
    Trial trial = {.config = tiled,
                   .ranks = comm_world_size(),
                   .sequences = 4 * comm_world_size(),
                   .B = 2,
                   .threads = 2,
                   .lr = 1e-3f};
    Bench bench = bench_open(&trial);
    static const int tokens[3] = {1, 2, 3};
    train_step(bench.g, loader, 0, 1, adam_of(&trial));
    allocations_arm();
    for (int i = 1; i < 4; i++) train_step(bench.g, loader, (int64_t)i * trial.sequences, i + 1, adam_of(&trial));
    validate(bench.g, loader, 1);
    logits_after(bench.g, tokens, 3);
    Allocations found = allocations_disarm();
    bench_close(&bench);
    loader_close(loader);
    if (!allocations_counted()) skip();
    if (found.own > 0)
        fail_msg("%ld large allocations after the first step, the last by %p", found.own, found.last_own);
    assert_int_equal(found.files, 0);
    assert_true(found.mpi_bytes < 64u << 20); // MPI's own buffers settle within some tens of MiB
}

// The counter does see one.
static void test_allocations_are_seen(void **state) {
    (void)state;
    if (!allocations_counted()) skip();
    allocations_arm();
    void *volatile large = malloc(COUNTED_BYTES);
    free(large);
    assert_int_equal(allocations_disarm().own, 1);
}

// Bytes per arena worked out by hand, from the sizes alone. `workspace` belongs to oneDNN and differs by version.
typedef struct {
    const char *arena;
    size_t bytes;
} Expected;

static void check_plan(const Trial *trial, const Expected *expected) {
    Device *plan = plan_make(trial, 0);
    for (; expected->arena; expected++) {
        size_t found = device_arena_bytes(plan, expected->arena);
        if (found != expected->bytes)
            fail_msg("%s: %zu bytes planned, %zu worked out", expected->arena, found, expected->bytes);
    }
    device_close(plan);
}

// GPT-2 124M, bf16, 4 ranks. Per block, tensors rounded up to 64: 12·768² + 13·768 = 7,087,872 elements, of which a
// rank owns 1,771,968; the root, 50304·768 + 1024·768 + 2·768 = 39,421,440, of which 9,855,360.
static void test_plan_124m(void **state) {
    (void)state;
    static const GPTConfig config = {.maxT = 1024, .V = 50257, .Vp = 50304, .L = 12, .NH = 12, .C = 768};
    Trial trial = {.config = config, .ranks = 4, .sequences = 16, .B = 4, .threads = 1, .dtype = BF16};
    static const Expected expected[] = {
        {"master", 124475904},        // 4 · (9855360 + 12·1771968)
        {"moments", 248951808},       // twice that
        {"gradient", 124475904},      //
        {"bf16 slices", 62237952},    // half of it
        {"partial sums", 0},          // one micro-step
        {"exchange", 28351488},       // 4 · 4·1771968
        {"slots", 28351488},          // 2 · 2·7087872
        {"root", 78842880},           // 2 · 39421440
        {"root gradient", 157685760}, // 4 · 39421440
        {"gradient slots", 56702976}, // 2 · 4·7087872
        {"logits", 103022592},        // 1024 · 50304 · 2
        {"activations", 1286853120},  // N = 4096: 12 blocks of 16·N·C bf16, 4·N + N·NH fp32; 5 + 9 more N·C
        {NULL, 0},
    };
    if (!ops_native_bf16()) skip();
    check_plan(&trial, expected);
    // Recomputing blocks: 12 outputs and one block's 15 N·C bf16 and 4·N + 12·N fp32; the rest as before.
    static const Expected recomputed[] = {{"activations", 245879296}, {NULL, 0}};
    trial.recompute = RECOMPUTE_BLOCK;
    check_plan(&trial, recomputed);
}

// 4 blocks of 256 channels in fp32 on one rank, two micro-steps: nothing is gathered or exchanged, one partial sum.
static void test_plan_one_rank(void **state) {
    (void)state;
    static const GPTConfig config = {.maxT = 256, .V = 257, .Vp = 384, .L = 4, .NH = 4, .C = 256};
    Trial trial = {.config = config, .ranks = 1, .sequences = 32, .B = 16, .threads = 1, .dtype = F32};
    static const Expected expected[] = {
        {"master", 13293568}, // 4 · (384·256 + 256·256 + 2·256 + 4·(12·256² + 13·256))
        {"moments", 26587136},
        {"gradient", 13293568},
        {"bf16 slices", 0},
        {"partial sums", 13293568},
        {"exchange", 0},
        {"slots", 0},
        {"root", 0},
        {"root gradient", 657408},
        {"gradient slots", 6318080},
        {"logits", 1572864}, // 1024 · 384 · 4
        {"activations", 319342080},
        {NULL, 0},
    };
    check_plan(&trial, expected);
}

// Sizes that divide by nothing: 3 ranks, 5 micro-steps, so three partial sums.
static void test_plan_odd(void **state) {
    (void)state;
    static const GPTConfig config = {.maxT = 17, .V = 131, .Vp = 256, .L = 2, .NH = 3, .C = 48};
    Trial trial = {.config = config, .ranks = 3, .sequences = 30, .B = 2, .threads = 1, .dtype = F32};
    static const Expected expected[] = {
        {"master", 93440}, // 4 · (4416 + 2·9472): a third of 13184 and of 28352, rounded up to 64
        {"moments", 186880},        {"gradient", 93440}, {"bf16 slices", 0}, {"partial sums", 280320},
        {"exchange", 113664},       {"slots", 227328},   {"root", 52992},    {"root gradient", 52992},
        {"gradient slots", 227328}, {"logits", 34816}, // 34 · 256 · 4
        {"activations", 291264},    {NULL, 0},
    };
    check_plan(&trial, expected);
}

// ---------------------------------------------------------------------------------------------------------------------
// what needs no ranks

static void test_schedules(void **state) {
    (void)state;
    Schedule s = {.lr = 2, .final = 0.1, .steps = 110, .warmup = 10, .kind = SCHEDULE_COSINE};
    assert_float_equal(schedule_lr(&s, 1), 0.2, 1e-12);
    assert_float_equal(schedule_lr(&s, 10), 2, 1e-12);
    assert_float_equal(schedule_lr(&s, 11), 2, 1e-12);
    assert_float_equal(schedule_lr(&s, 61), 2 * (0.1 + 0.9 * 0.5), 1e-12); // p = 1/2
    assert_float_equal(schedule_lr(&s, 110), 2 * (0.1 + 0.9 * (1 + cos(M_PI * 0.99)) / 2), 1e-12);
    s.kind = SCHEDULE_LINEAR;
    assert_float_equal(schedule_lr(&s, 61), 2 * (1 - 0.9 * 0.5), 1e-12);
    s.kind = SCHEDULE_CONSTANT;
    assert_float_equal(schedule_lr(&s, 110), 2, 1e-12);
    s.kind = SCHEDULE_WSD; // the last 22 of 110 steps
    assert_float_equal(schedule_lr(&s, 88), 2, 1e-12);
    assert_float_equal(schedule_lr(&s, 100), 2 * (1 - 0.9 * sqrt(11.0 / 22)), 1e-12);
}

static void test_sampling(void **state) {
    (void)state;
    const float logits[5] = {0, 3, 1, 2, -1};
    float sorted[5];
    int seen[5] = {0};
    assert_int_equal(sample_from(logits, sorted, 5, 0, 0, 0.99), 1);
    for (int i = 0; i < 20000; i++) seen[sample_from(logits, sorted, 5, 1, 2, random_unit(1, 2, (uint64_t)i))]++;
    assert_true(seen[0] + seen[2] + seen[4] == 0); // top 2
    assert_float_equal(seen[1] / 20000.0, 1 / (1 + exp(-1)), 0.01);
    memset(seen, 0, sizeof seen);
    double total = exp(0) + exp(3) + exp(1) + exp(2) + exp(-1);
    for (int i = 0; i < 20000; i++) seen[sample_from(logits, sorted, 5, 1, 0, random_unit(9, 2, (uint64_t)i))]++;
    for (int i = 0; i < 5; i++) assert_float_equal(seen[i] / 20000.0, exp((double)logits[i]) / total, 0.015);
}

// ---------------------------------------------------------------------------------------------------------------------

// Files of the tests, under one name on all ranks of this node: rank 0's process number comes with the barrier.
static void folder_agree(void) {
    int64_t number = comm_world_rank() == 0 ? (int64_t)getpid() : 0;
    Device *device = device_open(NULL);
    Comm *world = comm_world(device, 120);
    Event *agreed = event_create(device, "agreed");
    comm_all_reduce(world, &number, 1, COMM_I64_SUM);
    event_record(agreed, comm_stream(world));
    event_synchronize(agreed);
    snprintf(folder, sizeof folder, "/tmp/test_gpt_%lld", (long long)number);
    if (comm_world_rank() == 0) mkdir(folder, 0777);
    comm_barrier(world);
    comm_close(world);
    device_close(device);
}

static void folder_remove(void) {
    char command[512];
    ranks_meet();
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (comm_world_rank() == 0 && system(command) != 0) perror(folder);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_curves_odd),     cmocka_unit_test(test_curves_round),
        cmocka_unit_test(test_first_step_odd), cmocka_unit_test(test_first_step_round),
        cmocka_unit_test(test_ranks_fp32),     cmocka_unit_test(test_ranks_bf16),
        cmocka_unit_test(test_threads_fp32),   cmocka_unit_test(test_threads_bf16),
        cmocka_unit_test(test_recompute_fp32), cmocka_unit_test(test_recompute_bf16),
        cmocka_unit_test(test_prefetch),       cmocka_unit_test(test_validation),
        cmocka_unit_test(test_no_allocations), cmocka_unit_test(test_allocations_are_seen),
        cmocka_unit_test(test_plan_124m),      cmocka_unit_test(test_plan_one_rank),
        cmocka_unit_test(test_plan_odd),       cmocka_unit_test(test_schedules),
        cmocka_unit_test(test_sampling),
    };
    error_program("test_gpt");
    comm_start(&argc, &argv);
    folder_agree();
    ranks_quieten();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    folder_remove();
    comm_end();
    return failed != 0;
}
