// Tests of fully sharded data parallelism:
//
//     mpirun -n N build/test_fsdp     N = 1, 2, 3, 4, 8
//
// A toy model of tensors whose sizes divide by nothing goes through the training loop's calls. Its gradients are known
// leaves, so that gradients, masters and norms can be compared with a serial reference, to the bit. Ranks other than 0
// speak only when a test fails, which ends all ranks. What a single process can show, misuse above all, is shown at N = 1.
#include <setjmp.h> // cmocka.h needs these four
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "test_ranks.h"
#include "test_death.h"
#include "fsdp.h"
#include "error.h"
#include <math.h>   // isfinite, pow, NAN
#include <stdlib.h> // calloc, free

// ---------------------------------------------------------------------------------------------------------------
// The toy. Its elements are numbered through, each tensor's from a multiple of 64 on: that is how the reference holds
// them. Numbers in between are nobody's, and there is 0.

enum { UNITS = 5, TENSORS = 11, ELEMENTS = 8000, MOST_LEAVES = 64, STEPS = 2 };

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

static size_t aligned(size_t n) { return (n + FSDP_ALIGN - 1) / FSDP_ALIGN * FSDP_ALIGN; }

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
        first += (int)aligned((size_t)fsdp_tensor_elements(tensor));
        if (unit->count++ == 0) unit->tensors = tensor;
    }
    if (first != ELEMENTS) die(EXIT_CODE_FAILURE, NULL, "the toy has %d elements", first);
}

// Elements of a unit cut over F ranks, padding included; a slice is also cut evenly between replicas.
static size_t unit_elements_of(const FsdpUnit *unit, int F, int replicas) {
    size_t n = 0, count = (size_t)F, part = FSDP_ALIGN * (size_t)replicas;
    for (int t = 0; t < unit->count; t++) n += aligned((size_t)unit->tensors[t].stored);
    return ((n + count - 1) / count + part - 1) / part * part * count;
}
static size_t unit_elements(const FsdpUnit *unit, int ranks) { return unit_elements_of(unit, ranks, 1); }

// Values of all elements that are somebody's.
static void values_make(float *values, uint64_t a, uint64_t b) {
    Toy toy;
    toy_make(&toy);
    for (int t = 0; t < TENSORS; t++)
        for (int e = toy.first[t], end = e + (int)fsdp_tensor_elements(&toy.tensors[t]); e < end; e++)
            values[e] = float_of(a, b, (uint64_t)e);
}

static const float *initial_values(void) {
    static float values[ELEMENTS];
    static bool made = false;
    if (!made) values_make(values, 77, 0);
    made = true;
    return values;
}

// What micro-batch number `leaf` of a step adds to the gradient. Steps count from 1.
static const float *leaf_values(int step, int leaf) {
    static float values[STEPS][MOST_LEAVES][ELEMENTS];
    static bool made[STEPS][MOST_LEAVES];
    float *found = values[step - 1][leaf];
    if (!made[step - 1][leaf]) values_make(found, 1 + (uint64_t)step, (uint64_t)leaf);
    made[step - 1][leaf] = true;
    return found;
}

static void toy_source(void *context, const FsdpTensor *tensor, int64_t first, int64_t count, float *out) {
    const Toy *toy = context;
    memcpy(out, initial_values() + toy->first[tensor->number] + first, (size_t)count * sizeof *out);
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

// On a device that only plans, as this rank of so many.
static Run *plan_open(int rank, int ranks, FsdpOptions options) {
    Device *plan = device_plan();
    return run_open(plan, comm_plan(plan, rank, ranks), options);
}

static void plan_close(Run *run) {
    Device *plan = run->device;
    Comm *comm = run->comm;
    run_close(run);
    comm_close(comm);
    device_close(plan);
}

// These options with every strategy there is for so many ranks, over each of their divisors. Returns how many.
enum { MOST_STRATEGIES = 64 };
static int strategies_of(int ranks, FsdpOptions *all, FsdpOptions options) {
    int count = 0;
    for (options.shard = FSDP_FULL; options.shard <= FSDP_NONE; options.shard++)
        for (options.shard_ranks = 1; options.shard_ranks <= ranks; options.shard_ranks++)
            for (int unsharded = 0; unsharded < 2; unsharded++) {
                if (ranks % options.shard_ranks != 0) continue;
                if (options.shard == FSDP_NONE && options.shard_ranks > 1) continue;
                if (options.shard >= FSDP_OPTIMIZER && unsharded) continue; // as it is
                options.unsharded = unsharded == 1;
                assert_true(count < MOST_STRATEGIES);
                all[count++] = options;
            }
    return count;
}

// What a layer's backward pass writes: all its tensors, and nothing between and after them.
static void gradient_write(const Run *run, int u, float *flat, int step, int leaf) {
    const FsdpUnit *unit = &run->toy.units[u];
    if (device_planning(run->device)) return;
    for (int t = 0; t < unit->count; t++) {
        const FsdpTensor *tensor = &unit->tensors[t];
        size_t n = (size_t)fsdp_tensor_elements(tensor);
        float *out = flat + tensor->offset;
        memcpy(out, leaf_values(step, leaf) + run->toy.first[tensor->number], n * sizeof *out);
        memset(out + n, 0, ((size_t)tensor->stored - n) * sizeof *out);
    }
}

// The order of the training loop.
static void micro_step(Run *run, int step, int leaf) {
    const int ahead = run->options.prefetch;
    Fsdp *f = run->fsdp;
    fsdp_gather(f, FSDP_ROOT);
    fsdp_use(f, FSDP_ROOT);
    float *root_gradient = fsdp_grad(f, FSDP_ROOT);
    for (int u = 1; u <= ahead && u < UNITS; u++) fsdp_gather(f, u);
    for (int u = 1; u < UNITS; u++) {
        fsdp_use(f, u);
        if (u + ahead < UNITS) fsdp_gather(f, u + ahead);
        fsdp_release(f, u);
    }
    for (int u = UNITS - 1; u > 0; u--) {
        fsdp_gather(f, u);
        fsdp_use(f, u);
        if (u > ahead) fsdp_gather(f, u - ahead);
        gradient_write(run, u, fsdp_grad(f, u), step, leaf);
        fsdp_release(f, u);
        fsdp_reduce(f, u);
    }
    gradient_write(run, FSDP_ROOT, root_gradient, step, leaf);
    fsdp_release(f, FSDP_ROOT);
    fsdp_reduce(f, FSDP_ROOT);
}

// A step as far as the norm, which it returns.
static double gradient_make(Run *run, int step, float clip) {
    const char *bad = NULL;
    for (int j = 0; j < run->options.micro_steps; j++) micro_step(run, step, fsdp_leaf(run->fsdp, j));
    fsdp_norm(run->fsdp, clip);
    double norm = fsdp_norm_read(run->fsdp, &bad);
    assert_null(bad);
    return norm;
}

static const AdamW adamw_settings = {.lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .decay = 0.1f};

static void parameters_update(Run *run, int step) {
    fsdp_gather(run->fsdp, UNITS - 1); // for nothing: the update waits until it has read the old parameters
    for (int u = 0; u < UNITS; u++) {
        fsdp_update(run->fsdp, u, adamw_settings, step);
        if (u <= run->options.prefetch) fsdp_gather(run->fsdp, u);
    }
}

static void run_step(Run *run, int step) {
    gradient_make(run, step, 1);
    parameters_update(run, step);
}

// The whole of the master or, with fsdp_fetch_grad, of the gradient.
typedef void (*Fetch)(Fsdp *f, int unit, int t, int64_t first, int64_t count, float *out);
static void elements_fetch(Run *run, Fetch fetch, float *all) {
    for (int t = 0; t < TENSORS; t++) {
        int unit = shapes[t].unit, within = (int)(&run->toy.tensors[t] - run->toy.units[unit].tensors);
        fetch(run->fsdp, unit, within, 0, fsdp_tensor_elements(&run->toy.tensors[t]), all + run->toy.first[t]);
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
static const float zeros[ELEMENTS];

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
    float x = leaf_values(step, leaf)[element];
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
    float scale;
} Reference;

static void reference_begin(Reference *reference) {
    memset(reference, 0, sizeof *reference);
    memcpy(reference->w, initial_values(), sizeof reference->w);
}

// The norm, by the ops that fsdp uses: they have tests of their own, and do not mind what is cut.
static double reference_gradient(Reference *reference, const Run *run, int step, float clip) {
    uint32_t bits = 0;
    int64_t sums[2] = {0, 0};
    float norm;
    for (int i = 0; i < ELEMENTS; i++) reference->grad[i] = gradient_expected(run, step, i);
    absmax(run->ops, &bits, reference->grad, ELEMENTS);
    sumsq(run->ops, sums, reference->grad, ELEMENTS, &bits);
    clip_scale(run->ops, &reference->scale, &norm, sums, &bits, clip);
    return sumsq_root(sums, bits);
}

static void reference_update(Reference *r, const Run *run, int step) {
    AdamW settings = adamw_settings;
    settings.correction1 = (float)(1 - pow((double)settings.beta1, step));
    settings.correction2 = (float)(1 - pow((double)settings.beta2, step));
    for (int t = 0; t < TENSORS; t++) {
        const FsdpTensor *tensor = &run->toy.tensors[t];
        int e = run->toy.first[t];
        settings.decay = tensor->decay ? adamw_settings.decay : 0;
        adamw(run->ops, r->w + e, r->m + e, r->v + e, NULL, r->grad + e,
              aligned((size_t)fsdp_tensor_elements(tensor)), &r->scale, settings);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Layout and values

static void slices_are_equal_and_aligned(void **state) {
    (void)state;
    static const int counts[] = {1, 2, 3, 5, 8, 64, 1000};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        Run *run = plan_open(0, counts[i], options_of(F32, 1, 1));
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
        plan_close(run);
    }
}

static void zero_source(void *context, const FsdpTensor *tensor, int64_t first, int64_t count, float *out) {
    (void)context, (void)tensor, (void)first;
    memset(out, 0, (size_t)count * sizeof *out);
}

static void units_show_the_source(void **state) {
    (void)state;
    for (int prefetch = 1; prefetch <= 4; prefetch += 3)
        for (int dtype = F32; dtype <= BF16; dtype++) {
            Run *run = run_open(device, world, options_of((DType)dtype, 1, prefetch));
            fsdp_fill(run->fsdp, zero_source, NULL);
            units_check(run, zeros);
            fsdp_fill(run->fsdp, toy_source, &run->toy); // what was gathered is stale
            units_check(run, initial_values());
            units_check(run, initial_values());
            run_close(run);
        }
}

static void fetch_any_range(void **state) {
    (void)state;
    float piece[131 * 24 + 1], beyond[61 * 24]; // the largest tensor; its rows that files do not know
    Run *run = run_open(device, world, options_of(BF16, 1, 1));
    fsdp_fill(run->fsdp, toy_source, &run->toy);
    elements_fetch(run, fsdp_fetch, found);
    floats_check(found, initial_values(), ELEMENTS, "the master");
    for (int round = 0; round < 300; round++) {
        int t = (int)(mixed(1, (uint64_t)round, 0) % TENSORS), unit = shapes[t].unit;
        int elements = (int)fsdp_tensor_elements(&run->toy.tensors[t]);
        int first = (int)(mixed(2, (uint64_t)round, 0) % (uint64_t)elements);
        int count = (int)(mixed(3, (uint64_t)round, 0) % (uint64_t)(elements - first + 1));
        for (int i = 0; i <= count; i++) piece[i] = 12345;
        fsdp_fetch(run->fsdp, unit, (int)(&run->toy.tensors[t] - run->toy.units[unit].tensors), first, count,
                   piece);
        floats_check(piece, initial_values() + run->toy.first[t] + first, (size_t)count, "the piece");
        assert_true(piece[count] == 12345);
    }
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
    memcpy(expected, initial_values(), sizeof expected);
    Run *run = run_open(device, world, options_of(BF16, 1, 1)); // two slots
    double bytes[UNITS];
    for (int u = 0; u < UNITS; u++)
        bytes[u] = 2.0 * (double)unit_elements(&run->toy.units[u], run->ranks) * (run->ranks - 1) / run->ranks;
    fsdp_fill(run->fsdp, toy_source, &run->toy);
    for (int round = 0; round < 2; round++) {
        bool updated = round > 0; // when what comes first travelled with the update
        assert_true(bytes_moved(run, FSDP_ROOT) == (updated ? 0 : bytes[FSDP_ROOT]));
        assert_true(bytes_moved(run, 1) == (updated ? 0 : bytes[1]));
        assert_true(bytes_moved(run, 1) == 0);
        assert_true(bytes_moved(run, 2) == bytes[2]);
        assert_true(bytes_moved(run, 1) == 0);
        assert_true(bytes_moved(run, 3) == bytes[3]); // in the place of 1, which is further away than 2
        assert_true(bytes_moved(run, 2) == 0);
        assert_true(bytes_moved(run, 1) == bytes[1]); // in the place of 3
        assert_true(bytes_moved(run, 2) == 0);
        assert_true(bytes_moved(run, 3) == bytes[3]);
        assert_true(bytes_moved(run, FSDP_ROOT) == 0);
        run_step(run, round + 1); // and all of it is stale
        elements_fetch(run, fsdp_fetch, expected);
    }
    run_close(run);
}

// While one gradient travels the next is written elsewhere, and one that is not done yet is passed by.
static void gradient_slots_take_turns(void **state) {
    (void)state;
    Run *run = plan_open(0, 2, options_of(F32, 1, 1));
    Fsdp *f = run->fsdp;
    const float *first = fsdp_grad(f, 4);
    fsdp_reduce(f, 4);
    const float *second = fsdp_grad(f, 3);
    assert_true(second != first);
    assert_true(fsdp_grad(f, 2) == first);
    fsdp_reduce(f, 2);
    assert_true(fsdp_grad(f, 1) == first); // h.2 holds the other one
    fsdp_reduce(f, 1), fsdp_reduce(f, 3);
    plan_close(run);
}

// ---------------------------------------------------------------------------------------------------------------
// Sums and steps

// With every strategy, each on a device of its own: groups are streams, of which a device has few. How far ahead is
// gathered varies along with the rest.
static void every_strategy(void (*check)(FsdpOptions options), FsdpOptions options) {
    FsdpOptions all[MOST_STRATEGIES];
    for (int i = 0, count = strategies_of(comm_size(world), all, options); i < count; i++) {
        test_end(NULL);
        test_begin(NULL);
        all[i].prefetch = 1 + (options.prefetch + i) % 3;
        check(all[i]);
    }
}

// Gradients, norms, what layers see and in the end the masters.
static void steps_check(FsdpOptions options) {
    static Reference reference;
    const float clip = options.micro_steps % 2 == 1 ? 0 : 1;
    Run *run = run_open(device, world, options);
    fsdp_fill(run->fsdp, toy_source, &run->toy);
    reference_begin(&reference);
    for (int step = 1; step <= STEPS; step++) {
        double norm = gradient_make(run, step, clip), wanted = reference_gradient(&reference, run, step, clip);
        if (norm != wanted) fail_msg("step %d: norm %a, expected %a", step, norm, wanted);
        if (step == STEPS - 1) {
            elements_fetch(run, fsdp_fetch_grad, found);
            floats_check(found, reference.grad, ELEMENTS, "the gradient");
        }
        parameters_update(run, step);
        reference_update(&reference, run, step);
        units_check(run, reference.w);
    }
    if (options.dtype == BF16) { // in fp32 layers have seen it
        elements_fetch(run, fsdp_fetch, found);
        floats_check(found, reference.w, ELEMENTS, "the master");
    }
    run_close(run);
}

static void steps_match_the_reference_to_the_bit(void **state) {
    (void)state;
    for (int micro_steps = 1; micro_steps <= 4; micro_steps++)
        for (int reduce = F32; reduce <= BF16; reduce++) {
            if (micro_steps == 3 && comm_size(world) > 4) continue; // fewer ranks show that
            FsdpOptions options =
                options_of((DType)((micro_steps + reduce) & 1), micro_steps, micro_steps + reduce);
            options.reduce_dtype = (DType)reduce;
            every_strategy(steps_check, options);
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
                for (int leaf = 0; leaf < J * ranks; leaf++) leaves[leaf] = leaf_values(1, leaf)[e];
                assert_true(gradient_expected(&run, 1, e) == tree_sum(leaves, J * ranks));
            }
        }
}

// Every micro-batch of a step is somebody's.
static void leaves_check(FsdpOptions options, int ranks) {
    bool taken[MOST_LEAVES] = {false};
    for (int rank = 0; rank < ranks; rank++) {
        Run *run = plan_open(rank, ranks, options);
        for (int j = 0; j < options.micro_steps; j++) {
            int leaf = fsdp_leaf(run->fsdp, j);
            assert_true(leaf >= 0 && leaf < options.micro_steps * ranks && !taken[leaf]);
            taken[leaf] = true;
        }
        plan_close(run);
    }
}

static void every_leaf_is_taken_once(void **state) {
    (void)state;
    FsdpOptions all[MOST_STRATEGIES];
    for (int ranks = 1; ranks <= 8; ranks++)
        for (int micro_steps = 1; micro_steps <= 5; micro_steps++)
            for (int i = 0, count = strategies_of(ranks, all, options_of(F32, micro_steps, 1)); i < count; i++)
                leaves_check(all[i], ranks);
}

// ---------------------------------------------------------------------------------------------------------------
// Traffic. Planning devices count it, and plan_and_ledger_agree shows that they count right.

// How often layer u travels in a step: of the layers there are slots for, the last are still there at the turn and the
// first when the next micro-step begins. run_step gathers the last one once more, for nothing.
static int passes(int u, int micro_steps, int slots) {
    const int layers = UNITS - 1, kept = slots < layers ? slots : layers;
    return 1 + (u <= layers - kept ? micro_steps : 0) + (u > kept ? micro_steps - 1 : 0) +
           (u == layers && kept < layers);
}

// What a step lets a rank receive. Of each unit, with s bytes in its slice:
//     (F-1)·s each time that it is gathered: FULL, for what does not stay; once otherwise, never when F is 1
//     (F-1)·s of gradient in reduce_dtype in each micro-step, or once in fp32 where it is kept
//     2·(R-1)/R·s of gradient in fp32 from R-1 other replicas: pieces to be added, then their sums
static void traffic_check(FsdpOptions options, int ranks) {
    Run *run = plan_open(ranks - 1, ranks, options);
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
    run_step(run, 1);
    FsdpTraffic before = fsdp_traffic(run->fsdp);
    run_step(run, 2);
    FsdpTraffic after = fsdp_traffic(run->fsdp);
    assert_true(after.gathered - before.gathered == gathered);
    assert_true(after.reduced - before.reduced == reduced);
    assert_true(after.replicated - before.replicated == replicated);
    plan_close(run);
}

static void traffic_is_what_the_strategy_says(void **state) {
    (void)state;
    FsdpOptions all[MOST_STRATEGIES];
    for (int ranks = 1; ranks <= 16; ranks += ranks < 4 ? 1 : 4)
        for (int i = 0; i < 2 * 4 * UNITS; i++) {
            FsdpOptions options = options_of((DType)(i & 1), 1 + (i >> 1 & 3), 1 + (i >> 3));
            options.reduce_dtype = options.dtype == F32 ? BF16 : F32;
            for (int k = 0, count = strategies_of(ranks, all, options); k < count; k++)
                traffic_check(all[k], ranks);
        }
}

// ---------------------------------------------------------------------------------------------------------------
// Ranks

// Some steps with as many leaves as the world has ranks, four times over.
static void group_train(Comm *group, float *master, double *norms) {
    Run *run = run_open(device, group, options_of(F32, 4 * comm_size(world) / comm_size(group), 1));
    fsdp_fill(run->fsdp, toy_source, &run->toy);
    for (int step = 1; step <= STEPS; step++) {
        norms[step - 1] = gradient_make(run, step, 1);
        parameters_update(run, step);
    }
    elements_fetch(run, fsdp_fetch, master);
    run_close(run);
}

// The same leaves on 1, 2, 4 … ranks, in groups that work side by side, give the same bits.
static void numbers_do_not_depend_on_ranks(void **state) {
    (void)state;
    double norms[STEPS], first_norms[STEPS];
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
    for (int step = 0; step < STEPS; step++) assert_same_on_all_ranks(first_norms[step]);
}

// ---------------------------------------------------------------------------------------------------------------
// Gradients that are no numbers

// One step whose gradients are 0 but for these values, each in one unit's last element, written by one rank.
static double poisoned_norm(Run *run, const float *poison, const char **bad) {
    Fsdp *f = run->fsdp;
    for (int u = UNITS - 1; u >= 0; u--) {
        const FsdpTensor *last = &run->toy.units[u].tensors[run->toy.units[u].count - 1];
        size_t n = unit_elements_of(&run->toy.units[u], run->F, run->replicas);
        float *flat = fsdp_grad(f, u);
        memset(flat, 0, n * sizeof *flat);
        if (run->rank == u % run->ranks) flat[last->offset + (size_t)fsdp_tensor_elements(last) - 1] = poison[u];
        fsdp_reduce(f, u);
    }
    *bad = NULL;
    fsdp_norm(f, 1);
    return fsdp_norm_read(f, bad);
}

static void faults_check(FsdpOptions options) {
    static const struct {
        float poison[UNITS];
        const char *unit; // expected
    } cases[] = {
        {{0, 0, 0, NAN, 0}, "h.2"},          {{0, 0, 0, 0, -INFINITY}, "h.3"}, {{INFINITY, 0, 0, 0, 0}, "root"},
        {{0, 1, NAN, NAN, INFINITY}, "h.1"}, {{3, 0, 0, 4, 0}, NULL},          {{0, 0, 0, 0, 0}, NULL},
        {{0, -NAN, 0, 0, 1}, "h.0"},         {{0x1p100f, 0, 0, 0, 1}, NULL},
    };
    const char *bad;
    Run *run = run_open(device, world, options);
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

static void faulty_units_are_named(void **state) {
    (void)state;
    every_strategy(faults_check, options_of(F32, 1, 1));
}

// ---------------------------------------------------------------------------------------------------------------
// Memory

// What a rank takes. Of a unit: s elements of its slice, n = F·s of the whole, b bytes each as layers see them.
//
//                      FULL                                  GRAD, OPTIMIZER, NONE; F = 1
//     parameters       root n·b; slots of the largest        n·b of every unit
//                      layer: K+1, at most one a layer
//     travelling       bf16 s·b, fp32 none: the master;      in place
//                      the root's in place
//     master           4·s, but fp32's root in place         bf16 4·s, fp32 in place
//     moments          8·s                                   8·s
//
//                      reduced in each micro-step: FULL,     kept whole: OPTIMIZER, and unsharded with any, with
//                      GRAD, or only one micro-step          several micro-steps; F = 1
//     gradient         4·s                                   4·n
//     partial sums     ⌈log2 micro-steps⌉ times the gradient, with either
//     on their way     root 4·n; two slots of the largest    none
//     exchange         in reduce_dtype, unless F = 1         in fp32, unless F = 1
//     and between replicas another one, in fp32
typedef struct {
    size_t staying, master, travelling; // bytes
    size_t share, root, layer, slice;   // elements: of all slices, the root, the largest layer, the largest slice
} Sizes;

static Sizes sizes_expected(const Run *run, bool all_stay) {
    const size_t b = dtype_size(run->options.dtype);
    const bool low = run->options.dtype == BF16;
    Sizes sizes = {0};
    for (int u = 0; u < UNITS; u++) {
        size_t n = unit_elements_of(&run->toy.units[u], run->F, run->replicas), s = n / (size_t)run->F;
        bool stays = all_stay || u == FSDP_ROOT;
        if (u == FSDP_ROOT) sizes.root = n;
        if (u != FSDP_ROOT && n > sizes.layer) sizes.layer = n;
        if (s > sizes.slice) sizes.slice = s;
        sizes.share += s;
        sizes.staying += stays ? n * b : 0;
        sizes.travelling += !stays && low ? s * b : 0;
        sizes.master += low || !stays ? 4 * s : 0;
    }
    return sizes;
}

static size_t exchange_expected(const Run *run, size_t slice) {
    const size_t leaf = run->kept ? 4 : dtype_size(run->options.reduce_dtype);
    size_t bytes = 0;
    if (run->F > 1) bytes += comm_exchange_elements(run->F, slice) * leaf;
    if (run->replicas > 1) bytes += comm_exchange_elements(run->replicas, slice / (size_t)run->replicas) * 4;
    return bytes;
}

static void ledger_check(FsdpOptions options, int ranks) {
    static const size_t partials[] = {0, 0, 1, 2, 2, 3, 3, 3, 3, 4};
    Run *run = plan_open(ranks - 1, ranks, options);
    const bool all_stay = options.shard != FSDP_FULL || run->F == 1;
    const Sizes sizes = sizes_expected(run, all_stay);
    const size_t b = dtype_size(options.dtype), F = (size_t)run->F,
                 gradient = 4 * sizes.share * (run->kept ? F : 1);
    const int slots = options.prefetch + 1 < UNITS - 1 ? options.prefetch + 1 : UNITS - 1;
    const struct {
        const char *arena;
        size_t bytes;
    } arenas[] = {{all_stay ? "parameters" : "root", sizes.staying},
                  {"slots", all_stay ? 0 : (size_t)slots * sizes.layer * b},
                  {"bf16 slices", sizes.travelling},
                  {"master", sizes.master},
                  {"moments", 8 * sizes.share},
                  {"gradient", gradient},
                  {"partial sums", gradient * partials[options.micro_steps]},
                  {"gradient slots", run->kept ? 0 : 2 * 4 * sizes.layer},
                  {"root gradient", run->kept ? 0 : 4 * sizes.root},
                  {"exchange", exchange_expected(run, sizes.slice)},
                  {"workspace, small", 6 * DEVICE_ALIGN}};
    size_t all = device_arena_bytes(run->device, "workspace"); // of the ops
    for (size_t i = 0; i < sizeof arenas / sizeof *arenas; i++) {
        size_t bytes = device_arena_bytes(run->device, arenas[i].arena);
        if (bytes != arenas[i].bytes)
            fail_msg("%d ranks, shard %d over %d, %d micro-steps: %s has %zu bytes, expected %zu", ranks,
                     options.shard, run->F, options.micro_steps, arenas[i].arena, bytes, arenas[i].bytes);
        all += bytes;
    }
    assert_int_equal(device_bytes(run->device), all); // nothing else
    // What is promised: 16·P/W, or 18·P/W in bf16, where the root's own slice needs no place of its own.
    if (!all_stay && !run->kept)
        assert_int_equal(sizes.master + sizes.travelling + 8 * sizes.share + gradient,
                         (options.dtype == BF16 ? 18 : 16) * sizes.share - sizes.root / F * b);
    plan_close(run);
}

static void memory_is_what_the_formula_says(void **state) {
    (void)state;
    FsdpOptions all[MOST_STRATEGIES];
    for (int ranks = 1; ranks <= 64; ranks += ranks < 9 ? 1 : 11)
        for (int i = 0; i < 2 * 2 * 9; i++) {
            FsdpOptions options = options_of((DType)(i & 1), 1 + (i >> 2), 1 + (ranks + i / 4) % UNITS);
            options.reduce_dtype = (DType)(i >> 1 & 1);
            for (int k = 0, count = strategies_of(ranks, all, options); k < count; k++) ledger_check(all[k], ranks);
        }
}

// Everything a run calls.
static Run *run_rehearse(Device *where, Comm *comm, FsdpOptions options) {
    Run *run = run_open(where, comm, options);
    fsdp_fill(run->fsdp, toy_source, &run->toy);
    for (int step = 1; step <= 2; step++) run_step(run, step);
    elements_fetch(run, fsdp_fetch, found);
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
    every_strategy(plan_check, options_of(BF16, 3, 2));
}

// ---------------------------------------------------------------------------------------------------------------
// Misuse, in child processes. Planning devices will do: it needs no memory and no other ranks to be found out.

static Fsdp *fsdp_of(void *run) { return ((Run *)run)->fsdp; }

static void use_before_gather(void *run) { fsdp_use(fsdp_of(run), 2); }

static void use_after_release(void *run) {
    Fsdp *f = fsdp_of(run);
    fsdp_gather(f, 2), fsdp_use(f, 2), fsdp_release(f, 2), fsdp_use(f, 2);
}

static void use_twice(void *run) {
    Fsdp *f = fsdp_of(run);
    fsdp_gather(f, 2), fsdp_use(f, 2), fsdp_use(f, 2);
}

static void use_what_is_stale(void *run) {
    Fsdp *f = fsdp_of(run);
    gradient_make(run, 1, 0);
    fsdp_gather(f, 2), fsdp_update(f, 2, adamw_settings, 1), fsdp_use(f, 2);
}

static void release_twice(void *run) {
    Fsdp *f = fsdp_of(run);
    fsdp_gather(f, 2), fsdp_use(f, 2), fsdp_release(f, 2), fsdp_release(f, 2);
}

static void release_unused(void *run) { fsdp_gather(fsdp_of(run), 2), fsdp_release(fsdp_of(run), 2); }

static void gather_without_slot(void *run) {
    Fsdp *f = fsdp_of(run);
    fsdp_gather(f, 1), fsdp_use(f, 1), fsdp_gather(f, 2), fsdp_gather(f, 3);
}

static void fill_while_in_use(void *run) {
    Fsdp *f = fsdp_of(run);
    fsdp_gather(f, 2), fsdp_use(f, 2), fsdp_fill(f, zero_source, NULL);
}

static void reduce_without_gradient(void *run) { fsdp_reduce(fsdp_of(run), 2); }

static void third_gradient(void *run) {
    Fsdp *f = fsdp_of(run);
    fsdp_grad(f, 1), fsdp_grad(f, 2), fsdp_grad(f, 3);
}

static void gradient_twice(void *run) { fsdp_grad(fsdp_of(run), 2), fsdp_grad(fsdp_of(run), 2); }

static void root_gradient_twice(void *run) {
    fsdp_grad(fsdp_of(run), FSDP_ROOT), fsdp_grad(fsdp_of(run), FSDP_ROOT);
}

static void reduce_too_often(void *run) {
    Fsdp *f = fsdp_of(run);
    fsdp_grad(f, 2), fsdp_reduce(f, 2), fsdp_grad(f, 2), fsdp_reduce(f, 2);
}

static void norm_without_one(void *run) {
    Fsdp *f = fsdp_of(run);
    for (int u = 0; u < UNITS; u++)
        if (u != 3) fsdp_grad(f, u), fsdp_reduce(f, u);
    fsdp_norm(f, 0);
}

static void update_while_in_use(void *run) {
    Fsdp *f = fsdp_of(run);
    gradient_make(run, 1, 0);
    fsdp_gather(f, 2), fsdp_use(f, 2), fsdp_update(f, 2, adamw_settings, 1);
}

static void update_without_norm(void *run) {
    micro_step(run, 1, 0);
    fsdp_update(fsdp_of(run), FSDP_ROOT, adamw_settings, 1);
}

static void update_twice(void *run) {
    run_step(run, 1);
    fsdp_update(fsdp_of(run), FSDP_ROOT, adamw_settings, 1);
}

// What was gathered and not used does not keep its slot when it becomes stale.
static void gather_after_fill(void *run) {
    Fsdp *f = fsdp_of(run);
    fsdp_gather(f, 1), fsdp_gather(f, 2), fsdp_fill(f, zero_source, NULL), fsdp_gather(f, 3), fsdp_gather(f, 4);
}

static void misuse_check(Run *run) {
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
        {gradient_twice, "unit h.1 asks for a gradient slot while it holds one"},
        {root_gradient_twice, "unit root asks for a gradient slot while it holds one"},
        {reduce_too_often, "unit h.1 is reduced more often than there are micro-steps"},
        {norm_without_one, "unit h.2 was not reduced in every micro-step"},
        {fill_while_in_use, "unit h.1 is written while it is in use"},
        {update_while_in_use, "unit h.1 is written while it is in use"},
        {update_without_norm, "unit root is updated before its gradient's norm is known"},
        {update_twice, "unit root is updated before its gradient's norm is known"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_death(EXIT_CODE_FAILURE, cases[i].message, cases[i].function, run);
    expect_death(EXIT_CODE_DONE, "", gather_after_fill, run);
}

// Slots can run out where there are fewer than units: for gradients unless they are kept, for parameters in FULL.
static void misuse_of_slots_check(Run *run) {
    if (run->kept)
        expect_death(EXIT_CODE_DONE, "", third_gradient, run);
    else
        expect_death(EXIT_CODE_FAILURE, "unit h.2 asks for a gradient slot while both hold gradients",
                     third_gradient, run);
    if (run->options.shard == FSDP_FULL && run->F > 1)
        expect_death(EXIT_CODE_FAILURE, "unit h.2 is gathered while every slot is in use", gather_without_slot,
                     run);
    else
        expect_death(EXIT_CODE_DONE, "", gather_without_slot, run);
}

static void misuse_names_the_unit(void **state) {
    (void)state;
    static const struct {
        int ranks, shard, shard_ranks;
    } cases[] = {{1, FSDP_FULL, 1}, {2, FSDP_FULL, 2}, {4, FSDP_GRAD, 2}, {2, FSDP_NONE, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        FsdpOptions options = options_of(F32, 1, 1);
        options.shard = cases[i].shard;
        options.shard_ranks = cases[i].shard_ranks;
        Run *run = plan_open(0, cases[i].ranks, options);
        misuse_check(run);
        misuse_of_slots_check(run);
        plan_close(run);
    }
}

#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, test_begin, test_end)

int main(int argc, char **argv) {
    const struct CMUnitTest alone[] = {
        cmocka_unit_test(slices_are_equal_and_aligned),    cmocka_unit_test(gradient_slots_take_turns),
        cmocka_unit_test(every_leaf_is_taken_once),        cmocka_unit_test(traffic_is_what_the_strategy_says),
        cmocka_unit_test(memory_is_what_the_formula_says), cmocka_unit_test(misuse_names_the_unit),
    };
    const struct CMUnitTest tests[] = {
        WORLD_TEST(units_show_the_source),
        WORLD_TEST(fetch_any_range),
        WORLD_TEST(what_is_still_there_does_not_travel),
        WORLD_TEST(steps_match_the_reference_to_the_bit),
        WORLD_TEST(all_strategies_sum_alike),
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
