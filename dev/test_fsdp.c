// Tests of fully sharded data parallelism:
//
//     mpirun -n N build/test_fsdp     N = 1, 2, 3, 4, 8
//
// A toy model of tensors whose sizes divide by nothing goes through the training loop's calls. Its gradients are known
// leaves, so that masters and norms can be compared with a serial reference. Ranks other than 0 speak only when a test
// fails, which ends all ranks. What a single process can show, misuse above all, is shown at N = 1.
#include <setjmp.h> // cmocka.h needs these four
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "test_ranks.h"
#include "test_death.h"
#include "fsdp.h"
#include "error.h"
#include <math.h>   // ldexpf, sqrtf, sqrtl, fabs
#include <stdlib.h> // malloc, free, setenv

// ---------------------------------------------------------------------------------------------------------------
// The toy. Its elements, without padding, are numbered through: that is how the reference holds them.

enum { UNITS = 5, TENSORS = 11, ELEMENTS = 7560, MOST_LEAVES = 64 };

static const struct {
    int unit, rows, columns, stored_rows;
} shapes[TENSORS] = {
    {0, 131, 24, 192}, {0, 5, 0, 5},                                                                     // root
    {1, 1, 0, 1},      {1, 5, 0, 5}, {1, 63, 0, 63}, {1, 64, 0, 64}, {1, 65, 0, 65}, {1, 1000, 0, 1000}, // h.0
    {2, 5, 0, 5},      // h.1: most ranks own nothing
    {3, 131, 24, 131}, // h.2
    {4, 64, 0, 64},    // h.3
};

typedef struct {
    FsdpUnit units[UNITS];
    FsdpTensor tensors[TENSORS];
    int first[TENSORS]; // number of the tensor's first element
} Toy;

static void toy_make(Toy *toy) {
    static const char *const names[UNITS] = {"root", "h.0", "h.1", "h.2", "h.3"};
    int first = 0;
    memset(toy, 0, sizeof *toy);
    for (int t = 0; t < TENSORS; t++) {
        FsdpTensor *tensor = &toy->tensors[t];
        FsdpUnit *unit = &toy->units[shapes[t].unit];
        snprintf(unit->name, sizeof unit->name, "%s", names[shapes[t].unit]);
        snprintf(tensor->name, sizeof tensor->name, "tensor %d", t);
        tensor->ndim = shapes[t].columns ? 2 : 1;
        tensor->shape[0] = shapes[t].rows;
        tensor->shape[1] = shapes[t].columns;
        tensor->stored = (int64_t)shapes[t].stored_rows * (shapes[t].columns ? shapes[t].columns : 1);
        tensor->decay = tensor->ndim == 2;
        tensor->number = (uint32_t)t;
        toy->first[t] = first;
        first += (int)fsdp_tensor_elements(tensor);
        if (unit->count++ == 0) unit->tensors = tensor;
    }
    if (first != ELEMENTS) die(EXIT_CODE_FAILURE, NULL, "the toy has %d elements", first);
}

static size_t aligned(size_t n) { return (n + FSDP_ALIGN - 1) / FSDP_ALIGN * FSDP_ALIGN; }

// Elements of a unit cut over F ranks, padding included; a slice is also cut evenly between replicas.
static size_t unit_elements_of(const FsdpUnit *unit, int F, int replicas) {
    size_t n = 0, count = (size_t)F, part = FSDP_ALIGN * (size_t)replicas;
    for (int t = 0; t < unit->count; t++) n += aligned((size_t)unit->tensors[t].stored);
    return ((n + count - 1) / count + part - 1) / part * part * count;
}
static size_t unit_elements(const FsdpUnit *unit, int ranks) { return unit_elements_of(unit, ranks, 1); }

static float initial_value(int element) { return float_of(77, 0, (uint64_t)element); }
static float leaf_value(int step, int leaf, int element) {
    return float_of(1 + (uint64_t)step, (uint64_t)leaf, (uint64_t)element);
}

static void toy_source(void *context, const FsdpTensor *tensor, int64_t first, int64_t count, float *out) {
    const Toy *toy = context;
    for (int64_t i = 0; i < count; i++) out[i] = initial_value(toy->first[tensor->number] + (int)(first + i));
}

// ---------------------------------------------------------------------------------------------------------------
// A run of it

typedef struct {
    Device *device;
    Comm *comm;
    Ops *ops;
    Fsdp *fsdp;
    Toy toy;
    FsdpOptions options;
    int rank, ranks, F, replicas;
    bool kept; // gradients are summed up by each rank first
} Run;

static FsdpOptions options_of(DType dtype, int micro_steps, int prefetch) {
    return (FsdpOptions){.dtype = dtype, .micro_steps = micro_steps, .prefetch = prefetch};
}

static Run *run_open(Device *device, Comm *comm, FsdpOptions options) {
    Run *run = calloc(1, sizeof *run);
    if (!run) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    toy_make(&run->toy);
    run->device = device;
    run->comm = comm;
    run->options = options;
    run->rank = comm_rank(comm);
    run->ranks = comm_size(comm);
    run->F = options.shard == FSDP_NONE ? 1 : options.shard_ranks ? options.shard_ranks : run->ranks;
    run->replicas = run->ranks / run->F;
    run->kept = run->F == 1 || (options.micro_steps > 1 && (options.shard == FSDP_OPTIMIZER || options.unsharded));
    run->ops = ops_open(device, 1);
    run->fsdp = fsdp_open(device, run->ops, comm, run->toy.units, UNITS, options);
    return run;
}

static void run_close(Run *run) {
    fsdp_close(run->fsdp);
    ops_close(run->ops);
    free(run);
}

// What a layer's backward pass writes: all its tensors, and nothing between and after them.
static void gradient_write(const Run *run, int u, float *flat, int step, int leaf) {
    const FsdpUnit *unit = &run->toy.units[u];
    if (device_planning(run->device)) return;
    for (int t = 0; t < unit->count; t++) {
        const FsdpTensor *tensor = &unit->tensors[t];
        int64_t n = fsdp_tensor_elements(tensor);
        for (int64_t i = 0; i < tensor->stored; i++)
            flat[tensor->offset + (size_t)i] =
                i < n ? leaf_value(step, leaf, run->toy.first[tensor->number] + (int)i) : 0;
    }
}

// The order of the training loop.
static void micro_step(Run *run, int step, int leaf) {
    Fsdp *f = run->fsdp;
    fsdp_gather(f, FSDP_ROOT);
    fsdp_use(f, FSDP_ROOT);
    float *root_gradient = fsdp_grad(f, FSDP_ROOT);
    fsdp_gather(f, 1);
    for (int u = 1; u < UNITS; u++) {
        fsdp_use(f, u);
        if (u + 1 < UNITS) fsdp_gather(f, u + 1);
        fsdp_release(f, u);
    }
    for (int u = UNITS - 1; u > 0; u--) {
        fsdp_gather(f, u);
        fsdp_use(f, u);
        if (u > 1) fsdp_gather(f, u - 1);
        gradient_write(run, u, fsdp_grad(f, u), step, leaf);
        fsdp_release(f, u);
        fsdp_reduce(f, u);
    }
    gradient_write(run, FSDP_ROOT, root_gradient, step, leaf);
    fsdp_release(f, FSDP_ROOT);
    fsdp_reduce(f, FSDP_ROOT);
}

// Steps count from 1. Returns the norm.
static double run_step(Run *run, int step, float clip, AdamW settings) {
    const char *bad = NULL;
    for (int j = 0; j < run->options.micro_steps; j++) micro_step(run, step, fsdp_leaf(run->fsdp, j));
    double norm = fsdp_norm(run->fsdp, clip, &bad);
    assert_null(bad);
    fsdp_gather(run->fsdp, UNITS - 1); // for nothing: the update waits until it has read the old parameters
    fsdp_update(run->fsdp, settings, step);
    return norm;
}

// The whole master, without padding.
static void master_fetch(Run *run, float *all) {
    for (int t = 0; t < TENSORS; t++) {
        int unit = shapes[t].unit, within = (int)(&run->toy.tensors[t] - run->toy.units[unit].tensors);
        fsdp_fetch(run->fsdp, unit, within, 0, fsdp_tensor_elements(&run->toy.tensors[t]), all + run->toy.first[t]);
    }
}

static uint16_t bf16_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); // to nearest, ties to even
}

static void floats_check(const float *found, const float *expected, size_t count, const char *what) {
    for (size_t i = 0; i < count; i++)
        if (memcmp(&found[i], &expected[i], sizeof(float)) != 0)
            fail_msg("%s: element %zu is %a, expected %a", what, i, (double)found[i], (double)expected[i]);
}

// The flat array of a unit in use: these elements where they belong, and 0 everywhere else.
static void unit_check(const Run *run, int u, const void *flat, const float *elements) {
    const FsdpUnit *unit = &run->toy.units[u];
    size_t n = unit_elements_of(unit, run->F, run->replicas);
    float *expected = calloc(n, sizeof *expected);
    for (int t = 0; t < unit->count; t++)
        memcpy(expected + unit->tensors[t].offset, elements + run->toy.first[unit->tensors[t].number],
               (size_t)fsdp_tensor_elements(&unit->tensors[t]) * sizeof *expected);
    if (run->options.dtype == F32) floats_check(flat, expected, n, unit->name);
    for (size_t i = 0; run->options.dtype == BF16 && i < n; i++)
        assert_int_equal(((const uint16_t *)flat)[i], bf16_of(expected[i]));
    free(expected);
}

// Gathers, uses and releases every unit, each expected to hold these elements.
static void units_check(Run *run, const float *elements) {
    for (int u = 0; u < UNITS; u++) {
        fsdp_gather(run->fsdp, u);
        unit_check(run, u, fsdp_use(run->fsdp, u), elements);
        fsdp_release(run->fsdp, u);
    }
}

static Device *device; // of the test that runs
static Comm *world;
static Event *done;
static float found[ELEMENTS], expected[ELEMENTS];

static int test_begin(void **state) {
    (void)state;
    device = device_open(NULL);
    world = comm_world(device, 60);
    done = event_create(device, "done");
    return 0;
}

static int test_end(void **state) {
    (void)state;
    comm_close(world);
    device_close(device);
    return 0;
}

static void assert_same_on_all_ranks(double x) {
    double *all = malloc((size_t)comm_size(world) * sizeof *all);
    comm_all_gather(world, all, &x, sizeof x);
    event_record(done, comm_stream(world));
    event_synchronize(done);
    for (int r = 0; r < comm_size(world); r++) assert_memory_equal(&all[r], &x, sizeof x);
    free(all);
}

// ---------------------------------------------------------------------------------------------------------------
// The serial reference

// The sum along a binary tree over the leaves' numbers, padded to a power of two with absent ones skipped.
static float tree_sum(const float *leaves, int count) {
    int left = 1;
    if (count == 1) return leaves[0];
    while (2 * left < count) left *= 2;
    return tree_sum(leaves, left) + tree_sum(leaves + left, count - left);
}

static float leaf_rounded(const Run *run, int step, int leaf, int element) {
    float x = leaf_value(step, leaf, element);
    uint32_t bits = (uint32_t)bf16_of(x) << 16;
    if (run->options.reduce_dtype == BF16) memcpy(&x, &bits, sizeof x);
    return x;
}

// What one replica adds up: over its ranks within each micro-step and then over these, or, where gradients are kept, each
// rank its own and then over the ranks. Leaves are numbered so that both are trees over consecutive numbers.
static float replica_expected(const Run *run, int step, int replica, int element) {
    const int J = run->options.micro_steps, F = run->F;
    const int inner = run->kept ? J : F, outer = run->kept ? F : J;
    float inside[MOST_LEAVES], outside[MOST_LEAVES];
    for (int o = 0; o < outer; o++) {
        for (int i = 0; i < inner; i++)
            inside[i] = leaf_rounded(run, step, (replica * outer + o) * inner + i, element);
        outside[o] = tree_sum(inside, inner);
    }
    return tree_sum(outside, outer);
}

static float gradient_expected(const Run *run, int step, int element) {
    float sums[MOST_LEAVES];
    for (int replica = 0; replica < run->replicas; replica++)
        sums[replica] = replica_expected(run, step, replica, element);
    return tree_sum(sums, run->replicas);
}

typedef struct {
    float w[ELEMENTS], m[ELEMENTS], v[ELEMENTS], grad[ELEMENTS];
} Reference;

static void reference_begin(Reference *reference) {
    memset(reference, 0, sizeof *reference);
    for (int i = 0; i < ELEMENTS; i++) reference->w[i] = initial_value(i);
}

static double reference_norm(const Reference *reference) {
    long double sum = 0;
    for (int i = 0; i < ELEMENTS; i++) sum += (long double)reference->grad[i] * (long double)reference->grad[i];
    return (double)sqrtl(sum);
}

// One step, as ops.h has AdamW; returns the norm.
static double reference_step(Reference *reference, const Run *run, int step, float clip, AdamW s) {
    for (int i = 0; i < ELEMENTS; i++) reference->grad[i] = gradient_expected(run, step, i);
    double norm = reference_norm(reference), scale = clip == 0 ? 1 : fmin(1, (double)clip / (norm + 1e-6));
    s.correction1 = (float)(1 - pow((double)s.beta1, step));
    s.correction2 = (float)(1 - pow((double)s.beta2, step));
    for (int t = 0; t < TENSORS; t++)
        for (int i = 0; i < (int)fsdp_tensor_elements(&run->toy.tensors[t]); i++) {
            int e = run->toy.first[t] + i;
            float g = (float)scale * reference->grad[e], *m = &reference->m[e], *v = &reference->v[e];
            float decay = run->toy.tensors[t].decay ? s.decay : 0;
            *m = s.beta1 * *m + (1 - s.beta1) * g;
            *v = s.beta2 * *v + (1 - s.beta2) * g * g;
            reference->w[e] -=
                s.lr * ((*m / s.correction1) / (sqrtf(*v / s.correction2) + s.eps) + decay * reference->w[e]);
        }
    return norm;
}

static const AdamW adamw_settings = {.lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .decay = 0.1f};

// ---------------------------------------------------------------------------------------------------------------
// Layout and values

static void slices_are_equal_and_aligned(void **state) {
    (void)state;
    static const int counts[] = {1, 2, 3, 5, 8, 64, 1000};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        Device *plan = device_plan();
        Comm *comm = comm_plan(plan, 0, counts[i]);
        Run *run = run_open(plan, comm, options_of(F32, 1, 1));
        size_t whole = 0, slice = fsdp_slice_elements(run->fsdp);
        for (int u = 0; u < UNITS; u++) {
            size_t offset = 0;
            for (int t = 0; t < run->toy.units[u].count; t++) {
                assert_int_equal(run->toy.units[u].tensors[t].offset % FSDP_ALIGN, 0);
                assert_int_equal(run->toy.units[u].tensors[t].offset, offset);
                offset += aligned((size_t)run->toy.units[u].tensors[t].stored);
            }
            whole += unit_elements(&run->toy.units[u], counts[i]);
        }
        assert_int_equal(slice % FSDP_ALIGN, 0);
        assert_int_equal(fsdp_elements(run->fsdp), whole);
        assert_int_equal(fsdp_elements(run->fsdp), slice * (size_t)counts[i]);
        run_close(run);
        comm_close(comm);
        device_close(plan);
    }
}

static void units_show_the_source(void **state) {
    (void)state;
    for (int i = 0; i < ELEMENTS; i++) expected[i] = initial_value(i);
    for (int prefetch = 1; prefetch <= 4; prefetch += 3)
        for (int dtype = F32; dtype <= BF16; dtype++) {
            Run *run = run_open(device, world, options_of((DType)dtype, 1, prefetch));
            fsdp_fill(run->fsdp, toy_source, &run->toy);
            units_check(run, expected);
            units_check(run, expected);
            run_close(run);
        }
}

static void fetch_any_range(void **state) {
    (void)state;
    Run *run = run_open(device, world, options_of(BF16, 1, 1));
    fsdp_fill(run->fsdp, toy_source, &run->toy);
    master_fetch(run, found);
    for (int i = 0; i < ELEMENTS; i++) assert_true(found[i] == initial_value(i));
    for (int round = 0; round < 300; round++) {
        int t = (int)(mixed(1, (uint64_t)round, 0) % TENSORS), unit = shapes[t].unit;
        int elements = (int)fsdp_tensor_elements(&run->toy.tensors[t]);
        int first = (int)(mixed(2, (uint64_t)round, 0) % (uint64_t)elements);
        int count = (int)(mixed(3, (uint64_t)round, 0) % (uint64_t)(elements - first + 1));
        for (int i = 0; i <= count; i++) found[i] = 12345;
        fsdp_fetch(run->fsdp, unit, (int)(&run->toy.tensors[t] - run->toy.units[unit].tensors), first, count,
                   found);
        for (int i = 0; i < count; i++) assert_true(found[i] == initial_value(run->toy.first[t] + first + i));
        assert_true(found[count] == 12345);
    }
    float beyond[61 * 24]; // the rows of tensor 0 that files do not know
    fsdp_fetch(run->fsdp, FSDP_ROOT, 0, 131 * 24, 61 * 24, beyond);
    for (int i = 0; i < 61 * 24; i++) assert_true(beyond[i] == 0);
    run_close(run);
}

// Bytes that this rank receives for a pass through this unit.
static double bytes_moved(Run *run, int u) {
    double before = comm_traffic(run->comm).gathered;
    fsdp_gather(run->fsdp, u);
    unit_check(run, u, fsdp_use(run->fsdp, u), expected);
    fsdp_release(run->fsdp, u);
    return comm_traffic(run->comm).gathered - before;
}

static void what_is_still_there_does_not_travel(void **state) {
    (void)state;
    for (int i = 0; i < ELEMENTS; i++) expected[i] = initial_value(i);
    Run *run = run_open(device, world, options_of(BF16, 1, 1)); // two slots
    double bytes[UNITS];
    for (int u = 0; u < UNITS; u++)
        bytes[u] = 2.0 * (double)unit_elements(&run->toy.units[u], run->ranks) * (run->ranks - 1) / run->ranks;
    fsdp_fill(run->fsdp, toy_source, &run->toy);
    for (int round = 0; round < 2; round++) {
        assert_true(bytes_moved(run, FSDP_ROOT) == bytes[FSDP_ROOT]);
        assert_true(bytes_moved(run, 1) == bytes[1]);
        assert_true(bytes_moved(run, 1) == 0);
        assert_true(bytes_moved(run, 2) == bytes[2]);
        assert_true(bytes_moved(run, 1) == 0);
        assert_true(bytes_moved(run, 3) == bytes[3]); // in the place of 1, which is further away than 2
        assert_true(bytes_moved(run, 2) == 0);
        assert_true(bytes_moved(run, 1) == bytes[1]); // in the place of 3
        assert_true(bytes_moved(run, 2) == 0);
        assert_true(bytes_moved(run, 3) == bytes[3]);
        assert_true(bytes_moved(run, FSDP_ROOT) == 0);
        run_step(run, round + 1, 0, adamw_settings); // and all of it is stale
        master_fetch(run, expected);
    }
    run_close(run);
}

// ---------------------------------------------------------------------------------------------------------------
// Sums and steps

// Without moments, and with an eps that drowns the root, a step from 0 leaves the negated gradient, to the last bit.
static const AdamW negate = {.lr = 0x1p40f, .beta1 = 0, .beta2 = 0, .eps = 0x1p40f, .decay = 0};

static void sums_check(FsdpOptions options) {
    Run *run = run_open(device, world, options);
    run_step(run, 1, 0, negate);
    for (int i = 0; i < ELEMENTS; i++) expected[i] = 0 - gradient_expected(run, 1, i);
    master_fetch(run, found);
    floats_check(found, expected, ELEMENTS, "the master");
    units_check(run, expected); // padding has stayed 0, too
    run_close(run);
}

// On a device of its own: groups are streams, of which a device has few.
static void check_alone(void (*check)(FsdpOptions options), FsdpOptions options) {
    test_end(NULL);
    test_begin(NULL);
    check(options);
}

// Every strategy, over every divisor of the number of ranks.
static void every_strategy(void (*check)(FsdpOptions options), FsdpOptions options) {
    for (options.shard = FSDP_FULL; options.shard <= FSDP_NONE; options.shard++)
        for (int F = 1; F <= comm_size(world); F++) {
            if (comm_size(world) % F != 0 || (options.shard == FSDP_NONE && F > 1)) continue;
            options.shard_ranks = F;
            options.prefetch = 1 + F % 3;
            check_alone(check, options);
            if (options.shard == FSDP_OPTIMIZER || options.shard == FSDP_NONE) continue;
            options.unsharded = true;
            check_alone(check, options);
            options.unsharded = false;
        }
}

static void sums_follow_the_tree(void **state) {
    (void)state;
    for (int micro_steps = 1; micro_steps <= 5; micro_steps++)
        for (int reduce = F32; reduce <= BF16; reduce++) {
            FsdpOptions options = options_of(F32, micro_steps, 1);
            options.reduce_dtype = (DType)reduce;
            every_strategy(sums_check, options);
        }
}

// With powers of two all these orders are one: the tree over all leaves' numbers.
static void all_strategies_sum_alike(void **state) {
    (void)state;
    const int ranks = comm_size(world), J = 4;
    float leaves[MOST_LEAVES];
    if (ranks & (ranks - 1)) skip();
    for (int F = 1; F <= ranks; F *= 2)
        for (int kept = 0; kept < 2; kept++) {
            Run run = {.F = F, .replicas = ranks / F, .kept = kept == 1, .options = options_of(F32, J, 1)};
            for (int e = 0; e < ELEMENTS; e += 97) {
                for (int leaf = 0; leaf < J * ranks; leaf++) leaves[leaf] = leaf_value(1, leaf, e);
                assert_true(gradient_expected(&run, 1, e) == tree_sum(leaves, J * ranks));
            }
        }
}

// Every micro-batch of a step is somebody's.
static void leaves_check(FsdpOptions options) {
    enum { MOST = 128 };
    bool taken[MOST] = {false};
    int leaves = options.micro_steps * comm_size(world);
    assert_true(leaves <= MOST);
    for (int rank = 0; rank < comm_size(world); rank++) {
        Device *plan = device_plan();
        Comm *comm = comm_plan(plan, rank, comm_size(world));
        Run *run = run_open(plan, comm, options);
        for (int j = 0; j < options.micro_steps; j++) {
            int leaf = fsdp_leaf(run->fsdp, j);
            assert_true(leaf >= 0 && leaf < leaves && !taken[leaf]);
            taken[leaf] = true;
        }
        run_close(run);
        comm_close(comm);
        device_close(plan);
    }
}

static void every_leaf_is_taken_once(void **state) {
    (void)state;
    for (int micro_steps = 1; micro_steps <= 4; micro_steps++)
        every_strategy(leaves_check, options_of(F32, micro_steps, 1));
}

static float steps_clip;

static void steps_check(FsdpOptions options) {
    static Reference reference;
    Run *run = run_open(device, world, options);
    fsdp_fill(run->fsdp, toy_source, &run->toy);
    reference_begin(&reference);
    for (int step = 1; step <= 3; step++) {
        double norm = run_step(run, step, steps_clip, adamw_settings);
        double wanted = reference_step(&reference, run, step, steps_clip, adamw_settings);
        if (!(fabs(norm - wanted) <= 1e-7 * wanted)) fail_msg("norm %.17g, expected %.17g", norm, wanted);
        assert_same_on_all_ranks(norm);
        master_fetch(run, found);
        for (int i = 0; i < ELEMENTS; i++) {
            float w = reference.w[i], room = 1e-6f * fmaxf(fabsf(w), adamw_settings.lr);
            if (!(fabsf(found[i] - w) <= room))
                fail_msg("step %d, element %d: %.9g, expected %.9g", step, i, (double)found[i], (double)w);
        }
        units_check(run, found);
    }
    run_close(run);
}

static void steps_match_the_reference(void **state) {
    (void)state;
    for (int micro_steps = 1; micro_steps <= 4; micro_steps++) {
        steps_clip = 0;
        every_strategy(steps_check, options_of(F32, micro_steps, 1));
        steps_clip = 1;
        every_strategy(steps_check, options_of(BF16, micro_steps, 1));
    }
}

// How often layer u travels in a step: of the layers there are slots for, the last are still there at the turn and the
// first when the next micro-step begins. run_step gathers the last one once more, for nothing.
static int passes(int u, int micro_steps, int slots) {
    const int layers = UNITS - 1, kept = slots < layers ? slots : layers;
    return 1 + (u <= layers - kept ? micro_steps : 0) + (u > kept ? micro_steps - 1 : 0) +
           (u == layers && kept < layers);
}

// What a step of three micro-steps lets this rank receive.
static void traffic_check(FsdpOptions options) {
    Run *run = run_open(device, world, options);
    const size_t size = dtype_size(options.dtype), reduce = run->kept ? 4 : dtype_size(options.reduce_dtype);
    const int F = run->F, R = run->replicas, J = options.micro_steps;
    const bool stays = options.shard != FSDP_FULL || F == 1;
    double gathered = 0, reduced = 0, replicated = 0;
    for (int u = 0; u < UNITS; u++) {
        double slice = (double)(unit_elements_of(&run->toy.units[u], F, R) / (size_t)F);
        gathered +=
            slice * (double)size * (F - 1) * (stays || u == FSDP_ROOT ? 1 : passes(u, J, options.prefetch + 1));
        reduced += slice * (double)reduce * (F - 1) * (run->kept ? 1 : J);
        replicated += 2 * slice / R * 4 * (R - 1);
    }
    run_step(run, 1, 0, adamw_settings);
    FsdpTraffic before = fsdp_traffic(run->fsdp);
    run_step(run, 2, 0, adamw_settings);
    FsdpTraffic after = fsdp_traffic(run->fsdp);
    assert_true(after.gathered - before.gathered == gathered);
    assert_true(after.reduced - before.reduced == reduced);
    assert_true(after.replicated - before.replicated == replicated);
    run_close(run);
}

static void traffic_is_what_the_strategy_says(void **state) {
    (void)state;
    for (int dtype = F32; dtype <= BF16; dtype++) {
        FsdpOptions options = options_of((DType)dtype, 3, 1);
        options.reduce_dtype = dtype == F32 ? BF16 : F32;
        every_strategy(traffic_check, options);
    }
}

// Some steps with as many leaves as the world has ranks, four times over.
static void group_train(Comm *group, float *master, double *norms) {
    Run *run = run_open(device, group, options_of(F32, 4 * comm_size(world) / comm_size(group), 1));
    fsdp_fill(run->fsdp, toy_source, &run->toy);
    for (int step = 1; step <= 3; step++) norms[step - 1] = run_step(run, step, 1, adamw_settings);
    master_fetch(run, master);
    run_close(run);
}

// The same leaves on 1, 2, 4 … ranks, in groups that work side by side, give the same bits.
static void numbers_do_not_depend_on_ranks(void **state) {
    (void)state;
    double norms[3], first_norms[3];
    int ranks = comm_size(world);
    if (ranks & (ranks - 1)) skip();
    for (int size = 1; size <= ranks; size *= 2) {
        Comm *group = comm_group(world, comm_rank(world) / size * size, 1, size);
        group_train(group, size == 1 ? expected : found, size == 1 ? first_norms : norms);
        if (size > 1) floats_check(found, expected, ELEMENTS, "the master");
        if (size > 1) assert_memory_equal(norms, first_norms, sizeof norms);
        comm_barrier(world);
        comm_close(group);
    }
    for (int step = 0; step < 3; step++) assert_same_on_all_ranks(first_norms[step]);
}

// ---------------------------------------------------------------------------------------------------------------
// Gradients that are no numbers

// One step whose gradients are 0 but for these values, each in one unit's last element, written by one rank.
static double poisoned_norm(Run *run, const float *poison, const char **bad) {
    Fsdp *f = run->fsdp;
    for (int u = UNITS - 1; u >= 0; u--) {
        const FsdpTensor *last = &run->toy.units[u].tensors[run->toy.units[u].count - 1];
        size_t n = unit_elements(&run->toy.units[u], run->ranks);
        float *flat = fsdp_grad(f, u);
        memset(flat, 0, n * sizeof *flat);
        if (run->rank == u % run->ranks) flat[last->offset + (size_t)fsdp_tensor_elements(last) - 1] = poison[u];
        fsdp_reduce(f, u);
    }
    *bad = NULL;
    return fsdp_norm(f, 1, bad);
}

static void faulty_units_are_named(void **state) {
    (void)state;
    static const struct {
        float poison[UNITS];
        const char *unit; // expected
    } cases[] = {
        {{0, 0, 0, NAN, 0}, "h.2"},          {{0, 0, 0, 0, -INFINITY}, "h.3"}, {{INFINITY, 0, 0, 0, 0}, "root"},
        {{0, 1, NAN, NAN, INFINITY}, "h.1"}, {{3, 0, 0, 4, 0}, NULL},          {{0, 0, 0, 0, 0}, NULL},
        {{0, -NAN, 0, 0, 1}, "h.0"},         {{0x1p100f, 0, 0, 0, 1}, NULL},
    };
    const char *bad;
    Run *run = run_open(device, world, options_of(F32, 1, 1));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double norm = poisoned_norm(run, cases[i].poison, &bad);
        assert_same_on_all_ranks(isfinite(norm) ? norm : 0);
        assert_int_equal(isfinite(norm), cases[i].unit == NULL);
        if (cases[i].unit)
            assert_string_equal(bad, cases[i].unit);
        else
            assert_null(bad);
    }
    assert_true(poisoned_norm(run, (float[UNITS]){3, 0, 0, 4, 0}, &bad) == 5);
    assert_true(poisoned_norm(run, (float[UNITS]){0}, &bad) == 0);
    run_close(run);
}

// ---------------------------------------------------------------------------------------------------------------
// Memory

// What a rank takes, unit by unit. With s elements of its slice and n = F·s of the whole, in types of b bytes:
//     what stays gathered     n·b, and the travelling slice lies in it
//     other units             s·b as a travelling slice, which in fp32 is the master; two slots of the largest
//     master, unless that     4·s
//     moments                 8·s
//     gradient, and each of ⌈log2 micro-steps⌉ partial sums     4·s, or 4·n where gradients are kept
//     otherwise               two gradient slots of the largest layer and the root's gradient, in fp32
static void ledger_check(FsdpOptions options, int ranks) {
    static const int partials[] = {0, 0, 1, 2, 2, 3, 3, 3, 3, 4};
    Device *plan = device_plan();
    Comm *comm = comm_plan(plan, ranks - 1, ranks);
    Run *run = run_open(plan, comm, options);
    const size_t b = dtype_size(options.dtype), F = (size_t)run->F, R = (size_t)run->replicas;
    const bool all_stay = options.shard != FSDP_FULL || F == 1, low = options.dtype == BF16;
    size_t staying = 0, travelling = 0, master = 0, share = 0, layer = 0, root = 0, most = 0;
    for (int u = 0; u < UNITS; u++) {
        size_t n = unit_elements_of(&run->toy.units[u], run->F, run->replicas), s = n / F;
        bool stays = all_stay || u == FSDP_ROOT;
        if (u == FSDP_ROOT) root = n;
        if (u != FSDP_ROOT && n > layer) layer = n;
        if (s > most) most = s;
        share += s;
        staying += stays ? n * b : 0;
        travelling += !stays && low ? s * b : 0;
        master += low || !stays ? 4 * s : 0;
    }
    const size_t gradient = 4 * share * (run->kept ? F : 1);
    const size_t leaf = run->kept ? 4 : dtype_size(options.reduce_dtype);
    const struct {
        const char *arena;
        size_t bytes;
    } arenas[] = {{all_stay ? "parameters" : "root", staying},
                  {all_stay ? "root" : "parameters", 0},
                  {"bf16 slices", travelling},
                  {"master", master},
                  {"moments", 8 * share},
                  {"gradient", gradient},
                  {"partial sums", gradient * (size_t)partials[options.micro_steps]},
                  {"slots", all_stay ? 0 : 2 * layer * b},
                  {"gradient slots", run->kept ? 0 : 2 * 4 * layer},
                  {"root gradient", run->kept ? 0 : 4 * root},
                  {"exchange", (F > 1 ? comm_exchange_elements(run->F, most) * leaf : 0) +
                                   (R > 1 ? comm_exchange_elements(run->replicas, most / R) * 4 : 0)}};
    for (size_t i = 0; i < sizeof arenas / sizeof *arenas; i++)
        if (device_arena_bytes(plan, arenas[i].arena) != arenas[i].bytes)
            fail_msg("%d ranks, shard %d over %d, %d micro-steps: %s has %zu bytes, expected %zu", ranks,
                     options.shard, run->F, options.micro_steps, arenas[i].arena,
                     device_arena_bytes(plan, arenas[i].arena), arenas[i].bytes);
    // What is promised: 16·P/W, or 18·P/W in bf16, where the root's own slice needs no place of its own.
    if (options.shard == FSDP_FULL && F > 1 && !run->kept)
        assert_int_equal(master + 8 * share + gradient + travelling, (low ? 18 : 16) * share - root / F * b);
    run_close(run);
    comm_close(comm);
    device_close(plan);
}

static void memory_is_what_the_formula_says(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 64; ranks += ranks < 9 ? 1 : 11)
        for (int F = 1; F <= ranks; F++)
            for (int i = 0; i < 2 * 2 * 2 * 4 * 9 && ranks % F == 0; i++) {
                FsdpOptions options = {.dtype = (DType)(i & 1),
                                       .reduce_dtype = (DType)(i >> 1 & 1),
                                       .unsharded = i >> 2 & 1,
                                       .shard = i >> 3 & 3,
                                       .micro_steps = 1 + (i >> 5),
                                       .prefetch = 1,
                                       .shard_ranks = F};
                if (options.shard != FSDP_NONE || F == 1) ledger_check(options, ranks);
            }
}

// Everything a run calls.
static Run *run_rehearse(Device *where, Comm *comm, FsdpOptions options) {
    Run *run = run_open(where, comm, options);
    fsdp_fill(run->fsdp, toy_source, &run->toy);
    for (int step = 1; step <= 2; step++) run_step(run, step, 1, adamw_settings);
    master_fetch(run, found);
    return run;
}

static void plan_check(FsdpOptions options) {
    Device *plan = device_plan();
    Comm *planned = comm_plan(plan, comm_rank(world), comm_size(world));
    Run *rehearsal = run_rehearse(plan, planned, options);
    Device *real = device_open(plan);
    Comm *comm = comm_world(real, 60);
    Run *run = run_rehearse(real, comm, options);
    FsdpTraffic foretold = fsdp_traffic(rehearsal->fsdp), traffic = fsdp_traffic(run->fsdp);
    assert_true(device_same_ledger(plan, real));
    assert_true(device_bytes(real) > 0);
    assert_memory_equal(&foretold, &traffic, sizeof traffic);
    run_close(run);
    run_close(rehearsal);
    comm_close(comm);
    comm_close(planned);
    device_close(real);
    device_close(plan);
}

static void plan_and_ledger_agree(void **state) {
    (void)state;
    for (int dtype = F32; dtype <= BF16; dtype++) every_strategy(plan_check, options_of((DType)dtype, 3, 2));
}

// ---------------------------------------------------------------------------------------------------------------
// Misuse, in child processes with a planning device: it needs no memory and no other ranks to be found out

static Run *misuse_open(const int *ranks) {
    Device *plan = device_plan();
    return run_open(plan, comm_plan(plan, 0, *ranks), options_of(F32, 1, 1));
}

static void use_before_gather(void *ranks) { fsdp_use(misuse_open(ranks)->fsdp, 2); }

static void use_after_release(void *ranks) {
    Fsdp *f = misuse_open(ranks)->fsdp;
    fsdp_gather(f, 2), fsdp_use(f, 2), fsdp_release(f, 2), fsdp_use(f, 2);
}

static void use_twice(void *ranks) {
    Fsdp *f = misuse_open(ranks)->fsdp;
    fsdp_gather(f, 2), fsdp_use(f, 2), fsdp_use(f, 2);
}

static void use_what_is_stale(void *ranks) {
    Run *run = misuse_open(ranks);
    micro_step(run, 1, 0);
    fsdp_norm(run->fsdp, 0, NULL);
    fsdp_gather(run->fsdp, 2);
    fsdp_update(run->fsdp, adamw_settings, 1);
    fsdp_use(run->fsdp, 2);
}

static void release_twice(void *ranks) {
    Fsdp *f = misuse_open(ranks)->fsdp;
    fsdp_gather(f, 2), fsdp_use(f, 2), fsdp_release(f, 2), fsdp_release(f, 2);
}

static void release_unused(void *ranks) {
    Fsdp *f = misuse_open(ranks)->fsdp;
    fsdp_gather(f, 2), fsdp_release(f, 2);
}

static void gather_without_slot(void *ranks) {
    Fsdp *f = misuse_open(ranks)->fsdp;
    fsdp_gather(f, 1), fsdp_use(f, 1), fsdp_gather(f, 2), fsdp_gather(f, 3);
}

static void reduce_without_gradient(void *ranks) { fsdp_reduce(misuse_open(ranks)->fsdp, 2); }

static void third_gradient(void *ranks) {
    Fsdp *f = misuse_open(ranks)->fsdp;
    fsdp_grad(f, 1), fsdp_grad(f, 2), fsdp_grad(f, 3);
}

static void gradient_twice(void *ranks) {
    Fsdp *f = misuse_open(ranks)->fsdp;
    fsdp_grad(f, 2), fsdp_grad(f, 2);
}

static void root_gradient_twice(void *ranks) {
    Fsdp *f = misuse_open(ranks)->fsdp;
    fsdp_grad(f, FSDP_ROOT), fsdp_grad(f, FSDP_ROOT);
}

static void reduce_too_often(void *ranks) {
    Fsdp *f = misuse_open(ranks)->fsdp;
    fsdp_grad(f, 2), fsdp_reduce(f, 2), fsdp_grad(f, 2), fsdp_reduce(f, 2);
}

static void norm_without_one(void *ranks) {
    Fsdp *f = misuse_open(ranks)->fsdp;
    for (int u = 0; u < UNITS; u++)
        if (u != 3) fsdp_grad(f, u), fsdp_reduce(f, u);
    fsdp_norm(f, 0, NULL);
}

static void update_while_in_use(void *ranks) {
    Run *run = misuse_open(ranks);
    micro_step(run, 1, 0);
    fsdp_norm(run->fsdp, 0, NULL);
    fsdp_gather(run->fsdp, 2), fsdp_use(run->fsdp, 2);
    fsdp_update(run->fsdp, adamw_settings, 1);
}

static void misuse_names_the_unit(void **state) {
    (void)state;
    static const struct {
        void (*function)(void *);
        const char *message;
    } cases[] = {
        {use_before_gather, "unit h.1 is used before it is gathered"},
        {use_after_release, "unit h.1 is used before it is gathered"},
        {use_twice, "unit h.1 is used again before it is released"},
        {use_what_is_stale, "unit h.1 is used before it is gathered"},
        {release_twice, "unit h.1 is released without being in use"},
        {release_unused, "unit h.1 is released without being in use"},
        {reduce_without_gradient, "unit h.1 is reduced without a gradient"},
        {gradient_twice, "unit h.1 asks for a gradient slot"},
        {root_gradient_twice, "unit root asks for a gradient slot"},
        {reduce_too_often, "unit h.1 is reduced more often than there are micro-steps"},
        {norm_without_one, "unit h.2 was not reduced in every micro-step"},
        {update_while_in_use, "unit h.1 is in use during the update"},
    };
    for (int ranks = 1; ranks <= 2; ranks++)
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
            expect_death(EXIT_CODE_FAILURE, cases[i].message, cases[i].function, &ranks);
    int two = 2; // a single rank has a place for every unit and its gradient
    expect_death(EXIT_CODE_FAILURE, "unit h.2 asks for a gradient slot", third_gradient, &two);
    expect_death(EXIT_CODE_FAILURE, "unit h.2 is gathered while every slot is in use", gather_without_slot, &two);
}

#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, test_begin, test_end)

int main(int argc, char **argv) {
    const struct CMUnitTest alone[] = {
        cmocka_unit_test(slices_are_equal_and_aligned),
        cmocka_unit_test(memory_is_what_the_formula_says),
        cmocka_unit_test(misuse_names_the_unit),
    };
    const struct CMUnitTest tests[] = {
        WORLD_TEST(units_show_the_source),
        WORLD_TEST(fetch_any_range),
        WORLD_TEST(what_is_still_there_does_not_travel),
        WORLD_TEST(sums_follow_the_tree),
        WORLD_TEST(all_strategies_sum_alike),
        WORLD_TEST(every_leaf_is_taken_once),
        WORLD_TEST(traffic_is_what_the_strategy_says),
        WORLD_TEST(steps_match_the_reference),
        WORLD_TEST(numbers_do_not_depend_on_ranks),
        WORLD_TEST(faulty_units_are_named),
        WORLD_TEST(plan_and_ledger_agree),
    };
    error_program("test_fsdp");
    comm_start(&argc, &argv);
    ranks_quieten();
    int failures = comm_world_size() == 1 ? cmocka_run_group_tests(alone, NULL, NULL) : 0;
    failures += cmocka_run_group_tests(tests, NULL, NULL);
    comm_end();
    return failures != 0;
}
