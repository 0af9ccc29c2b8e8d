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

// Elements of a unit cut over so many ranks, padding included.
static size_t unit_elements(const FsdpUnit *unit, int ranks) {
    size_t n = 0, count = (size_t)ranks;
    for (int t = 0; t < unit->count; t++) n += aligned((size_t)unit->tensors[t].stored);
    return aligned((n + count - 1) / count) * count;
}

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
    int rank, ranks;
} Run;

static Run *run_open(Device *device, Comm *comm, FsdpOptions options) {
    Run *run = calloc(1, sizeof *run);
    if (!run) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    toy_make(&run->toy);
    run->device = device;
    run->comm = comm;
    run->options = options;
    run->rank = comm_rank(comm);
    run->ranks = comm_size(comm);
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
    for (int j = 0; j < run->options.micro_steps; j++) micro_step(run, step, j * run->ranks + run->rank);
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
    size_t n = unit_elements(unit, run->ranks);
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

// The tree over ranks within each micro-step, then over the micro-steps.
static float gradient_expected(int step, int micro_steps, int ranks, int element) {
    float micro[MOST_LEAVES], leaves[MOST_LEAVES];
    for (int j = 0; j < micro_steps; j++) {
        for (int r = 0; r < ranks; r++) leaves[r] = leaf_value(step, j * ranks + r, element);
        micro[j] = tree_sum(leaves, ranks);
    }
    return tree_sum(micro, micro_steps);
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
    for (int i = 0; i < ELEMENTS; i++)
        reference->grad[i] = gradient_expected(step, run->options.micro_steps, run->ranks, i);
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
        Run *run = run_open(plan, comm, (FsdpOptions){F32, 1, 1});
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
            Run *run = run_open(device, world, (FsdpOptions){(DType)dtype, 1, prefetch});
            fsdp_fill(run->fsdp, toy_source, &run->toy);
            units_check(run, expected);
            units_check(run, expected);
            run_close(run);
        }
}

static void fetch_any_range(void **state) {
    (void)state;
    Run *run = run_open(device, world, (FsdpOptions){BF16, 1, 1});
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
    Run *run = run_open(device, world, (FsdpOptions){BF16, 1, 1}); // two slots
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
        assert_true(bytes_moved(run, 3) == bytes[3]); // in the place of 2, which has been free for longer
        assert_true(bytes_moved(run, 1) == 0);
        assert_true(bytes_moved(run, 2) == bytes[2]); // in the place of 3
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

static void sums_follow_the_tree(void **state) {
    (void)state;
    for (int micro_steps = 1; micro_steps <= 5; micro_steps++) {
        Run *run = run_open(device, world, (FsdpOptions){F32, micro_steps, 1 + micro_steps % 2});
        run_step(run, 1, 0, negate);
        for (int i = 0; i < ELEMENTS; i++) expected[i] = 0 - gradient_expected(1, micro_steps, run->ranks, i);
        master_fetch(run, found);
        floats_check(found, expected, ELEMENTS, "the master");
        units_check(run, expected); // padding has stayed 0, too
        run_close(run);
    }
}

static void steps_check(DType dtype, int micro_steps, float clip) {
    static Reference reference;
    Run *run = run_open(device, world, (FsdpOptions){dtype, micro_steps, 1});
    fsdp_fill(run->fsdp, toy_source, &run->toy);
    reference_begin(&reference);
    for (int step = 1; step <= 3; step++) {
        double norm = run_step(run, step, clip, adamw_settings);
        double wanted = reference_step(&reference, run, step, clip, adamw_settings);
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
    for (int micro_steps = 1; micro_steps <= 5; micro_steps++) {
        steps_check(F32, micro_steps, 0);
        steps_check(BF16, micro_steps, 1);
    }
}

// Some steps with as many leaves as the world has ranks, four times over.
static void group_train(Comm *group, float *master, double *norms) {
    Run *run = run_open(device, group, (FsdpOptions){F32, 4 * comm_size(world) / comm_size(group), 1});
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
        Comm *group = comm_split(world, comm_rank(world) / size);
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
    Run *run = run_open(device, world, (FsdpOptions){F32, 1, 1});
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

// Bytes per rank, of P parameters over W ranks: 16·P/W, 18·P/W in bf16, and 4·P/W for each partial sum.
static void ledger_check(int ranks, DType dtype, int micro_steps, int partials) {
    Device *plan = device_plan();
    Comm *comm = comm_plan(plan, ranks - 1, ranks);
    Run *run = run_open(plan, comm, (FsdpOptions){dtype, micro_steps, 1});
    size_t share = fsdp_elements(run->fsdp) / (size_t)ranks, size = dtype_size(dtype);
    size_t layer = unit_elements(&run->toy.units[3], ranks),
           root = unit_elements(&run->toy.units[FSDP_ROOT], ranks);
    assert_int_equal(device_arena_bytes(plan, "master") + device_arena_bytes(plan, "moments") +
                         device_arena_bytes(plan, "gradient") + device_arena_bytes(plan, "bf16 slices"),
                     (dtype == BF16 ? 18 : 16) * share);
    assert_int_equal(device_arena_bytes(plan, "partial sums"), (size_t)partials * 4 * share);
    assert_int_equal(device_arena_bytes(plan, "slots"), ranks == 1 ? 0 : 2 * layer * size);
    assert_int_equal(device_arena_bytes(plan, "root"), ranks == 1 ? 0 : root * size);
    assert_int_equal(device_arena_bytes(plan, "gradient slots"), 2 * layer * 4);
    assert_int_equal(device_arena_bytes(plan, "root gradient"), root * 4);
    assert_int_equal(device_arena_bytes(plan, "exchange"), ranks == 1 ? 0 : layer * 4);
    run_close(run);
    comm_close(comm);
    device_close(plan);
}

static void memory_is_what_the_formula_says(void **state) {
    (void)state;
    static const int partials[] = {0, 0, 1, 2, 2, 3, 3, 3, 3, 4}; // ⌈log2 micro-steps⌉
    for (int ranks = 1; ranks <= 64; ranks += ranks < 9 ? 1 : 11)
        for (int micro_steps = 1; micro_steps <= 9; micro_steps++) {
            ledger_check(ranks, F32, micro_steps, partials[micro_steps]);
            ledger_check(ranks, BF16, micro_steps, partials[micro_steps]);
        }
}

// Everything a run calls.
static Run *run_rehearse(Device *where, Comm *comm, DType dtype) {
    Run *run = run_open(where, comm, (FsdpOptions){dtype, 3, 2});
    fsdp_fill(run->fsdp, toy_source, &run->toy);
    for (int step = 1; step <= 2; step++) run_step(run, step, 1, adamw_settings);
    master_fetch(run, found);
    return run;
}

static void plan_and_ledger_agree(void **state) {
    (void)state;
    for (int dtype = F32; dtype <= BF16; dtype++) {
        Device *plan = device_plan();
        Comm *planned = comm_plan(plan, comm_rank(world), comm_size(world));
        Run *rehearsal = run_rehearse(plan, planned, (DType)dtype);
        Device *real = device_open(plan);
        Comm *comm = comm_world(real, 60);
        Run *run = run_rehearse(real, comm, (DType)dtype);
        assert_true(device_same_ledger(plan, real));
        assert_true(device_bytes(real) > 0);
        assert_true(comm_traffic(comm).gathered == comm_traffic(planned).gathered);
        assert_true(comm_traffic(comm).reduced == comm_traffic(planned).reduced);
        run_close(run);
        run_close(rehearsal);
        comm_close(comm);
        comm_close(planned);
        device_close(real);
        device_close(plan);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Misuse, in child processes with a planning device: it needs no memory and no other ranks to be found out

static Run *misuse_open(const int *ranks) {
    Device *plan = device_plan();
    return run_open(plan, comm_plan(plan, 0, *ranks), (FsdpOptions){F32, 1, 1});
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
        {third_gradient, "unit h.2 asks for a gradient slot"},
        {gradient_twice, "unit h.1 asks for a gradient slot"},
        {root_gradient_twice, "unit root asks for a gradient slot"},
        {reduce_too_often, "unit h.1 is reduced more often than there are micro-steps"},
        {norm_without_one, "unit h.2 was not reduced in every micro-step"},
        {update_while_in_use, "unit h.1 is in use during the update"},
    };
    for (int ranks = 1; ranks <= 2; ranks++)
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
            expect_death(EXIT_CODE_FAILURE, cases[i].message, cases[i].function, &ranks);
    int two = 2; // a single rank has a place for every unit
    expect_death(EXIT_CODE_FAILURE, "unit h.2 is gathered while every slot is in use", gather_without_slot, &two);
}

// ---------------------------------------------------------------------------------------------------------------
// What the checker of the streams' order sees of all this: fsdp's waits, one after the other left out

enum { LAYERS = 4 };

typedef enum {
    WAIT_NONE,
    WAIT_GATHER_RELEASED,
    WAIT_GATHER_UPDATED,
    WAIT_USE_GATHERED,
    WAIT_GRAD_REDUCED,
    WAIT_REDUCE_FILLED,
    WAIT_NORM_REDUCED,
    WAIT_UPDATE_GATHERED
} Wait;

typedef struct {
    Wait left_out;
    int slots;
    const char *message;
} Mutant;

// Layer l lies in slot l modulo slots, its gradient in gradient slot l modulo 2.
typedef struct {
    const Mutant *mutant;
    Stream *compute, *comm;
    Shared params, grads, slots[LAYERS], grad_slots[2];
    Event *gathered[LAYERS], *released[LAYERS], *filled[2], *reduced[2], *updated;
} Pattern;

static void pattern_wait(const Pattern *p, Wait which, Stream *stream, Event *event) {
    if (p->mutant->left_out != which) stream_wait(stream, event);
}

static void pattern_gather(Pattern *p, int l) {
    int s = l % p->mutant->slots;
    pattern_wait(p, WAIT_GATHER_RELEASED, p->comm, p->released[s]);
    pattern_wait(p, WAIT_GATHER_UPDATED, p->comm, p->updated);
    stream_reads(p->comm, &p->params, "gather");
    stream_writes(p->comm, &p->slots[s], "gather");
    event_record(p->gathered[s], p->comm);
}

static void pattern_use(Pattern *p, int l) {
    int s = l % p->mutant->slots;
    pattern_wait(p, WAIT_USE_GATHERED, p->compute, p->gathered[s]);
    stream_reads(p->compute, &p->slots[s], "use");
}

static void pattern_release(Pattern *p, int l) { event_record(p->released[l % p->mutant->slots], p->compute); }

static void pattern_grad(Pattern *p, int l) {
    pattern_wait(p, WAIT_GRAD_REDUCED, p->compute, p->reduced[l % 2]);
    stream_writes(p->compute, &p->grad_slots[l % 2], "grad");
}

static void pattern_reduce(Pattern *p, int l) {
    event_record(p->filled[l % 2], p->compute);
    pattern_wait(p, WAIT_REDUCE_FILLED, p->comm, p->filled[l % 2]);
    stream_reads(p->comm, &p->grad_slots[l % 2], "reduce");
    stream_writes(p->comm, &p->grads, "reduce");
    event_record(p->reduced[l % 2], p->comm);
}

static void pattern_step(Pattern *p) {
    const int slots = p->mutant->slots;
    pattern_gather(p, 0);
    for (int l = 0; l < LAYERS; l++) {
        pattern_use(p, l);
        if (l + 1 < LAYERS) pattern_gather(p, l + 1);
        pattern_release(p, l);
    }
    for (int l = LAYERS - 1; l >= 0; l--) {
        pattern_use(p, l);
        if (l > 0 && l - 1 < LAYERS - slots) pattern_gather(p, l - 1); // the last ones are still there
        pattern_grad(p, l);
        pattern_release(p, l);
        pattern_reduce(p, l);
    }
    for (int s = 0; s < 2; s++) pattern_wait(p, WAIT_NORM_REDUCED, p->compute, p->reduced[s]);
    stream_reads(p->compute, &p->grads, "norm");
    pattern_gather(p, LAYERS - 1); // for nothing: the update makes it stale
    for (int s = 0; s < slots; s++) pattern_wait(p, WAIT_UPDATE_GATHERED, p->compute, p->gathered[s]);
    stream_reads(p->compute, &p->grads, "update");
    stream_writes(p->compute, &p->params, "update");
    event_record(p->updated, p->compute);
}

static void pattern_run(void *mutant) {
    Device *plan = device_plan();
    Pattern p = {.mutant = mutant, .compute = device_compute(plan), .comm = stream_open(plan, "comm")};
    p.params.name = "parameters";
    p.grads.name = "gradients";
    p.updated = event_create(plan, "updated");
    for (int s = 0; s < LAYERS; s++) {
        p.slots[s].name = "slot";
        p.gathered[s] = event_create(plan, "gathered");
        p.released[s] = event_create(plan, "released");
    }
    for (int s = 0; s < 2; s++) {
        p.grad_slots[s].name = "gradient slot";
        p.filled[s] = event_create(plan, "filled");
        p.reduced[s] = event_create(plan, "reduced");
    }
    for (int step = 0; step < 3; step++) pattern_step(&p);
    device_close(plan);
}

static void no_wait_can_be_left_out(void **state) {
    (void)state;
#define COMPLAINT(memory, doing, stream, by, before, then)                                                         \
    "'" memory "' is " doing " on stream " stream " by " by ", but nothing orders that after it was " before       \
    " by " then
    static Mutant mutants[] = {
        {WAIT_GATHER_RELEASED, 2, COMPLAINT("slot", "written", "comm", "gather", "read", "use")},
        {WAIT_GATHER_UPDATED, 2, COMPLAINT("parameters", "read", "comm", "gather", "written", "update")},
        {WAIT_USE_GATHERED, 2, COMPLAINT("slot", "read", "compute", "use", "written", "gather")},
        {WAIT_GRAD_REDUCED, 4, COMPLAINT("gradient slot", "written", "compute", "grad", "read", "reduce")},
        {WAIT_REDUCE_FILLED, 2, COMPLAINT("gradient slot", "read", "comm", "reduce", "written", "grad")},
        {WAIT_NORM_REDUCED, 2, COMPLAINT("gradients", "read", "compute", "norm", "written", "reduce")},
        {WAIT_UPDATE_GATHERED, 2, COMPLAINT("parameters", "written", "compute", "update", "read", "gather")},
    };
#undef COMPLAINT
    for (int slots = 2; slots <= LAYERS; slots++) {
        Mutant complete = {WAIT_NONE, slots, ""};
        expect_death(EXIT_CODE_DONE, "", pattern_run, &complete);
    }
    for (size_t i = 0; i < sizeof mutants / sizeof *mutants; i++)
        expect_death(EXIT_CODE_FAILURE, mutants[i].message, pattern_run, &mutants[i]);
}

#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, test_begin, test_end)

int main(int argc, char **argv) {
    const struct CMUnitTest alone[] = {
        cmocka_unit_test(slices_are_equal_and_aligned),
        cmocka_unit_test(memory_is_what_the_formula_says),
        cmocka_unit_test(misuse_names_the_unit),
        cmocka_unit_test(no_wait_can_be_left_out),
    };
    const struct CMUnitTest tests[] = {
        WORLD_TEST(units_show_the_source),
        WORLD_TEST(fetch_any_range),
        WORLD_TEST(what_is_still_there_does_not_travel),
        WORLD_TEST(sums_follow_the_tree),
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
