// The checker of the streams' order against fsdp itself: with every event in its place it stays silent, and there is no
// wait and no record that can be left out, and no record that can come before the access it tells of, without its
// noticing. Planning devices are enough: no memory, no other ranks, no luck of timing.
#include <setjmp.h> // cmocka.h needs these four
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "test_death.h"
#include "device.h"

// fsdp's own source, with its waits and records by the lines that they stand in. COUNTED: how often it spells one.
typedef void (*Declare)(Stream *stream, Shared *memory, const char *place);
static void wait_at(Stream *stream, Event *event, int line);
static void record_at(Event *event, Stream *stream, int line);
static void declare_late(Declare declare, Stream *stream, Shared *memory, const char *place);
static void declare_now(void);
#define stream_wait(stream, event)           wait_at(stream, event, __LINE__ + 0 * __COUNTER__)
#define event_record(event, stream)          record_at(event, stream, __LINE__ + 0 * __COUNTER__)
#define event_synchronize(event)             (declare_now(), event_synchronize(event))
#define stream_reads(stream, memory, place)  declare_late(stream_reads, stream, memory, place)
#define stream_writes(stream, memory, place) declare_late(stream_writes, stream, memory, place)
enum { BEFORE = __COUNTER__ };
#include "fsdp.c"
enum { COUNTED = __COUNTER__ - BEFORE - 1 };
#undef stream_wait
#undef event_record
#undef event_synchronize
#undef stream_reads
#undef stream_writes

enum { RECORDS = 11, MOST_LINES = 64, UNITS = 6, ELEMENTS = 1000, RANKS = 4 };

// The waits and records that were met, by line.
typedef struct {
    int line;
    bool tells; // a record that directly follows the declaration of an access
} Met;
static Met met[MOST_LINES];
static int met_count;

// What is changed: one line is left out, or one record comes before the access that it tells of. 0: none.
typedef struct {
    int left_out, early;
} Change;
static Change change;

static Met *met_at(int line) {
    int i = 0;
    while (i < met_count && met[i].line != line) i++;
    assert(i < MOST_LINES);
    if (i == met_count) met[met_count++].line = line;
    return &met[i];
}

// The latest declaration is held back until the next call, so that a record can overtake it.
static struct {
    Declare declare; // NULL: none
    Stream *stream;
    Shared *memory;
    const char *place;
} late;

static void declare_now(void) {
    Declare declare = late.declare;
    late.declare = NULL;
    if (declare) declare(late.stream, late.memory, late.place);
}

static void declare_late(Declare declare, Stream *stream, Shared *memory, const char *place) {
    declare_now();
    late.declare = declare;
    late.stream = stream;
    late.memory = memory;
    late.place = place;
}

static void wait_at(Stream *stream, Event *event, int line) {
    declare_now();
    met_at(line);
    if (line != change.left_out) stream_wait(stream, event);
}

static void record_at(Event *event, Stream *stream, int line) {
    if (late.declare && late.stream == stream) met_at(line)->tells = true;
    met_at(line);
    if (line != change.early) declare_now();
    if (line != change.left_out) event_record(event, stream);
    declare_now();
}

// A root and layers of one tensor each.
static FsdpUnit units[UNITS];
static FsdpTensor tensors[UNITS];

static void units_prepare(void) {
    for (int u = 0; u < UNITS; u++) {
        snprintf(units[u].name, sizeof units[u].name, u ? "h.%d" : "root", u - 1);
        tensors[u] = (FsdpTensor){.ndim = 1, .shape = {ELEMENTS}, .stored = ELEMENTS};
        units[u].tensors = &tensors[u];
        units[u].count = 1;
    }
}

// The training loop's order.
static void micro_step(Fsdp *f, int ahead) {
    fsdp_gather(f, FSDP_ROOT);
    fsdp_use(f, FSDP_ROOT);
    fsdp_grad(f, FSDP_ROOT);
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
        fsdp_grad(f, u);
        fsdp_release(f, u);
        fsdp_reduce(f, u);
    }
    fsdp_release(f, FSDP_ROOT);
    fsdp_reduce(f, FSDP_ROOT);
}

// Three steps of a strategy, the second with all that may come between: fetches, which let the host wait, and a fill.
static void strategy_run(FsdpOptions options) {
    Device *plan = device_plan();
    Comm *world = comm_plan(plan, 1, RANKS);
    Ops *ops = ops_open(plan, 1);
    Fsdp *f = fsdp_open(plan, ops, world, units, UNITS, options);
    float out[ELEMENTS];
    const char *bad;
    AdamW settings = {.lr = 0};
    for (int step = 1; step <= 3; step++) {
        for (int j = 0; j < options.micro_steps; j++) micro_step(f, options.prefetch);
        fsdp_norm(f, 1);
        fsdp_norm_read(f, &bad);
        if (step == 2) fsdp_fetch_grad(f, 1, 0, 0, ELEMENTS, out);
        fsdp_gather(f, UNITS - 1); // the update makes it stale
        for (int u = 0; u < UNITS; u++) {
            fsdp_update(f, u, settings, step);
            if (u <= options.prefetch) fsdp_gather(f, u);
        }
        if (step == 2) fsdp_fetch(f, 1, 0, 0, ELEMENTS, out);
        if (step == 2) fsdp_fill(f, NULL, NULL);
    }
    declare_now();
    fsdp_close(f);
    ops_close(ops);
    comm_close(world);
    device_close(plan);
}

static void strategies_run(void *with) {
    change = *(Change *)with;
    for (int shard = FSDP_FULL; shard <= FSDP_NONE; shard++)
        for (int F = 1; F <= RANKS; F *= 2)
            for (int micro_steps = 1; micro_steps <= 3; micro_steps += 2)
                for (int prefetch = 1; prefetch <= 3; prefetch += 2) {
                    FsdpOptions options = {.micro_steps = micro_steps,
                                           .prefetch = prefetch,
                                           .shard = shard,
                                           .shard_ranks = F,
                                           .dtype = BF16};
                    if (shard != FSDP_NONE || F == 1) strategy_run(options);
                    options.unsharded = true;
                    if (shard != FSDP_NONE || F == 1) strategy_run(options);
                }
    if (change.left_out) fprintf(stderr, "line %d of fsdp.c is not missed", change.left_out);
    if (change.early) fprintf(stderr, "line %d of fsdp.c may come too early", change.early);
}

// And every wait and record that fsdp spells is met on the way, in a line of its own.
static void with_all_events_nothing_is_found(void **state) {
    (void)state;
    Change none = {0, 0};
    strategies_run(&none);
    assert_int_equal(met_count, COUNTED);
}

static void no_event_can_be_left_out(void **state) {
    (void)state;
    for (int i = 0; i < met_count; i++) {
        Change without = {.left_out = met[i].line};
        expect_death(EXIT_CODE_FAILURE, "stream order:", strategies_run, &without);
    }
}

// All but one follow an access: that of a gradient slot comes right after that of the whole reduction.
static void no_record_can_come_early(void **state) {
    (void)state;
    int records = 0;
    for (int i = 0; i < met_count; i++) {
        Change early = {.early = met[i].line};
        if (met[i].tells) expect_death(EXIT_CODE_FAILURE, "stream order:", strategies_run, &early);
        records += met[i].tells;
    }
    assert_int_equal(records, RECORDS - 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(with_all_events_nothing_is_found),
        cmocka_unit_test(no_event_can_be_left_out),
        cmocka_unit_test(no_record_can_come_early),
    };
    error_program("test_order");
    units_prepare();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
