// test_gpt: the whole model, fully sharded, against PyTorch in float64 and against itself.
//
// Run it as one rank or under mpirun with 2, 3, 4 or 8: each checks what that number of ranks can. With --grid it runs every
// combination of the grid's options and nothing else. It includes the
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
#include "trial.h"      // Trial, Bench

// The bounds that fp32 must keep to, relative: its own error over ten steps is about a tenth of them, and each mistake
// in `mutants` breaks them at least tenfold (dev/reference.py measures and asserts both).
static const double loss_bound = 2e-6, norm_bound = 2e-5;

static const char *const mutants[] = {
    "erf_gelu",         "wpe_not_decayed",    "layernorm_decayed",     "layernorm_eps_outside",
    "adamw_eps_inside", "attention_unscaled", "norm_counts_tied_twice"};
enum { MUTANTS = sizeof mutants / sizeof mutants[0], MOST_STEPS = 16 };

typedef struct {
    double loss[MOST_STEPS], norm[MOST_STEPS];
} Curve;

static void params_source(void *context, const FsdpTensor *tensor, int64_t first, int64_t count, float *out) {
    char name[96];
    snprintf(name, sizeof name, "params.%s", tensor->name);
    const SafetensorsEntry *entry = safetensors_find((const Safetensors *)context, name);
    assert_non_null(entry);
    safetensors_read((const Safetensors *)context, entry, first, count, out);
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
    trial.source = params_source;
    trial.context = reference->file;
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
        root_weights(g, fsdp_use(g->fsdp, FSDP_ROOT), root);
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

static Loader *tiled_loader(void) { return random_loader("tiled", tiled.maxT, tiled.V); }

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

// ---------------------------------------------------------------------------------------------------------------------
// the grid: every way to shard, accumulate, recompute, cut and prefetch, in every precision, gives the same numbers

enum { SHARDING, MICRO_STEPS, ACCUMULATE, RECOMPUTE, UNIT_BLOCKS, PREFETCH, PRECISION, FACTORS, MOST_LEVELS = 32 };

static const GPTConfig grid_config = {.maxT = 24, .V = 131, .Vp = 256, .L = 3, .NH = 2, .C = 32};
static const int grid_micro_steps[] = {1, 4};
static const struct {
    DType dtype, reduce;
} grid_precisions[] = {{F32, F32}, {F32, BF16}, {BF16, F32}, {BF16, BF16}};

// What is sharded over how many of the ranks there are; hybrids by every divisor.
typedef struct {
    int shard, ranks;
} Sharding;
static Sharding shardings[MOST_LEVELS];
static int levels[FACTORS];
static bool grid_full; // every combination instead of every pair

static void grid_prepare(void) {
    const int world = comm_world_size();
    int n = 0;
    shardings[n++] = (Sharding){FSDP_NONE, 1};
    for (int ranks = 1; ranks <= world; ranks++)
        for (int shard = FSDP_FULL; shard < FSDP_NONE && world % ranks == 0; shard++)
            if (ranks > 1 || shard == FSDP_FULL) shardings[n++] = (Sharding){shard, ranks};
    levels[SHARDING] = n;
    levels[MICRO_STEPS] = 2;
    levels[ACCUMULATE] = 2;
    levels[RECOMPUTE] = 4;
    levels[UNIT_BLOCKS] = 3;
    levels[PREFETCH] = 3;
    levels[PRECISION] = ops_native_bf16() ? 4 : 2;
}

// The combination numbered `number`: a digit a factor.
static void grid_choose(int number, int *choice) {
    for (int f = 0; f < FACTORS; f++) {
        choice[f] = number % levels[f];
        number /= levels[f];
    }
}

static int grid_size(void) {
    int size = 1;
    for (int f = 0; f < FACTORS; f++) size *= levels[f];
    return size;
}

static Trial grid_trial(const int *choice) {
    return (Trial){.config = grid_config,
                   .ranks = comm_world_size(),
                   .sequences = grid_micro_steps[choice[MICRO_STEPS]] * comm_world_size(),
                   .B = 1,
                   .steps = 3,
                   .threads = 1,
                   .dtype = grid_precisions[choice[PRECISION]].dtype,
                   .lr = 3e-3f,
                   .recompute = choice[RECOMPUTE],
                   .prefetch = 1 + choice[PREFETCH],
                   .unit_blocks = 1 + choice[UNIT_BLOCKS],
                   .shard = shardings[choice[SHARDING]].shard,
                   .shard_ranks = shardings[choice[SHARDING]].ranks,
                   .unsharded = choice[ACCUMULATE] == 1,
                   .reduce_dtype = grid_precisions[choice[PRECISION]].reduce};
}

// Pairs of values, one of each of two factors, that no combination so far had.
typedef struct {
    bool seen[FACTORS][MOST_LEVELS][FACTORS][MOST_LEVELS];
} Pairs;

static int pairs_new(Pairs *pairs, const int *choice, bool take) {
    int n = 0;
    for (int f = 0; f < FACTORS; f++)
        for (int g = f + 1; g < FACTORS; g++) {
            bool *seen = &pairs->seen[f][choice[f]][g][choice[g]];
            n += !*seen;
            *seen |= take;
        }
    return n;
}

// The next combination, or -1: one after another, or the one with the most pairs that are new.
static int grid_next(Pairs *pairs, int last) {
    int choice[FACTORS], best = -1, most = 0;
    if (grid_full) return last + 1 < grid_size() ? last + 1 : -1;
    for (int number = 0; number < grid_size(); number++) {
        grid_choose(number, choice);
        int n = pairs_new(pairs, choice, false);
        if (n > most) most = n, best = number;
    }
    if (best >= 0) {
        grid_choose(best, choice);
        pairs_new(pairs, choice, true);
    }
    return best;
}

// The same global batch on a single rank, in the plainest way.
static Curve grid_expected(const Trial *trial, const Loader *loader) {
    Trial plain = {.config = grid_config,
                   .ranks = 1,
                   .sequences = trial->sequences,
                   .B = 1,
                   .steps = trial->steps,
                   .threads = 1,
                   .dtype = trial->dtype,
                   .lr = trial->lr,
                   .reduce_dtype = trial->reduce_dtype};
    return trial_curve(&plain, loader);
}

static void grid_check(const Curve *expected, const Curve *found, const Trial *t) {
    const bool exact = (t->ranks & (t->ranks - 1)) == 0;
    for (int i = 0; i < t->steps; i++)
        if (exact ? found->loss[i] != expected->loss[i] || found->norm[i] != expected->norm[i]
                  : relative(found->loss[i], expected->loss[i]) > 1e-5)
            fail_msg("step %d: loss %.17g, norm %.17g, expected %.17g, %.17g; %d ranks, shard %d over %d, %d "
                     "sequences, unsharded %d, recompute %d, unit-blocks %d, prefetch %d, dtypes %d %d",
                     i + 1, found->loss[i], found->norm[i], expected->loss[i], expected->norm[i], t->ranks,
                     t->shard, t->shard_ranks, t->sequences, t->unsharded, t->recompute, t->unit_blocks,
                     t->prefetch, t->dtype, t->reduce_dtype);
}

static void test_grid(void **state) {
    (void)state;
    static Pairs pairs;
    Curve expected[2][4]; // by micro-steps and precision
    bool known[2][4] = {{false}};
    int choice[FACTORS];
    Loader *loader = random_loader("grid", grid_config.maxT, grid_config.V);
    grid_prepare();
    memset(&pairs, 0, sizeof pairs);
    for (int number = -1; (number = grid_next(&pairs, number)) >= 0;) {
        grid_choose(number, choice);
        Trial trial = grid_trial(choice);
        Curve *curve = &expected[choice[MICRO_STEPS]][choice[PRECISION]];
        bool *have = &known[choice[MICRO_STEPS]][choice[PRECISION]];
        if (!*have) *curve = grid_expected(&trial, loader);
        *have = true;
        Curve found = trial_curve(&trial, loader);
        if (comm_world_rank() == 0) grid_check(curve, &found, &trial);
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
// rank owns 1,771,968; the root, 50304·768 + 1024·768 + 2·768 = 39,421,440, of which 9,855,360. The root's own slice in
// bf16 lies in the gathered root.
static void test_plan_124m(void **state) {
    (void)state;
    static const GPTConfig config = {.maxT = 1024, .V = 50257, .Vp = 50304, .L = 12, .NH = 12, .C = 768};
    Trial trial = {.config = config, .ranks = 4, .sequences = 16, .B = 4, .threads = 1, .dtype = BF16};
    static const Expected expected[] = {
        {"master", 124475904},        // 4 · (9855360 + 12·1771968)
        {"moments", 248951808},       // twice that
        {"gradient", 124475904},      //
        {"bf16 slices", 42527232},    // 2 · 12·1771968
        {"partial sums", 0},          // one micro-step
        {"exchange", 4194304},        // 4 · two parts of 2^19
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
        {"parameters", 13293568}, // 4 · (384·256 + 256·256 + 2·256 + 4·(12·256² + 13·256)), the master itself
        {"master", 0},
        {"moments", 26587136},
        {"gradient", 13293568},
        {"bf16 slices", 0},
        {"partial sums", 13293568},
        {"exchange", 0},
        {"slots", 0},
        {"root", 0},
        {"root gradient", 0},
        {"gradient slots", 0},
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
        {"master", 75776},   // 4 · 2·9472: a third of 28352, rounded up to 64; the root's lies in place
        {"moments", 186880}, // 2·4 · (4416 + 2·9472), 4416 of the root's 13184
        {"gradient", 93440},     {"bf16 slices", 0}, {"partial sums", 280320}, {"exchange", 113664},
        {"slots", 227328},       {"root", 52992},    {"root gradient", 52992}, {"gradient slots", 227328},
        {"logits", 34816}, // 34 · 256 · 4
        {"activations", 291264}, {NULL, 0},
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

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_curves_odd),
        cmocka_unit_test(test_curves_round),
        cmocka_unit_test(test_first_step_odd),
        cmocka_unit_test(test_first_step_round),
        cmocka_unit_test(test_ranks_fp32),
        cmocka_unit_test(test_ranks_bf16),
        cmocka_unit_test(test_threads_fp32),
        cmocka_unit_test(test_threads_bf16),
        cmocka_unit_test(test_recompute_fp32),
        cmocka_unit_test(test_recompute_bf16),
        cmocka_unit_test(test_prefetch),
        cmocka_unit_test(test_grid),
        cmocka_unit_test(test_validation),
        cmocka_unit_test(test_no_allocations),
        cmocka_unit_test(test_allocations_are_seen),
        cmocka_unit_test(test_plan_124m),
        cmocka_unit_test(test_plan_one_rank),
        cmocka_unit_test(test_plan_odd),
        cmocka_unit_test(test_schedules),
        cmocka_unit_test(test_sampling),
    };
    const struct CMUnitTest grid[] = {cmocka_unit_test(test_grid)};
    error_program("test_gpt");
    comm_start(&argc, &argv);
    grid_full = argc > 1 && strcmp(argv[1], "--grid") == 0;
    folder_agree();
    ranks_quieten();
    int failed = grid_full ? cmocka_run_group_tests(grid, NULL, NULL) : cmocka_run_group_tests(tests, NULL, NULL);
    folder_remove();
    comm_end();
    return failed != 0;
}
