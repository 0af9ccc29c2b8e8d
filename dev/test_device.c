// Tests of the device: the ledger, memory, cores, streams and events, and the checker of the streams' order.
//
// Data handed from stream to stream lies in plain memory, so that a thread sanitizer sees every hand-over that the
// device does not synchronise. It builds from device.c, device_cpu.c and error.c alone.
#include <setjmp.h> // cmocka.h needs these four
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "test_death.h"
#include "device.h"
#include "error.h"
#include <errno.h>     // errno
#include <sched.h>     // sched_getaffinity, CPU_COUNT
#include <signal.h>    // SIGABRT
#include <stdatomic.h> // atomic_int
#include <stdlib.h>    // malloc, free, setenv
#include <time.h>      // nanosleep

enum { MIB = 1 << 20 };

static uint32_t random_state = 1;

// A number in 0 … below-1 (xorshift, Marsaglia 2003).
static uint32_t random_below(uint32_t below) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 17;
    random_state ^= random_state << 5;
    return random_state % below;
}

static void sleep_microseconds(long microseconds) {
    const struct timespec pause = {microseconds / 1000000, microseconds % 1000000 * 1000};
    nanosleep(&pause, NULL);
}

// ---------------------------------------------------------------------------------------------------------------
// The ledger

static void ledger_counts_rounded_bytes(void **state) {
    (void)state;
    Device *device = device_plan();
    assert_true(device_planning(device));
    assert_null(device_arena(device, 0));
    assert_null(device_alloc(device, "nothing", 0));
    assert_null(device_arena(device, 0));
    assert_non_null(device_alloc(device, "moments", 1));
    assert_non_null(device_alloc(device, "slots", 65));
    assert_non_null(device_alloc_host(device, "moments", 64));
    const Arena *moments = device_arena(device, 0), *slots = device_arena(device, 1);
    assert_string_equal(moments->name, "moments");
    assert_string_equal(slots->name, "slots");
    assert_int_equal(moments->bytes, 128);
    assert_int_equal(slots->bytes, 128);
    assert_true(moments->planned == SIZE_MAX);
    assert_null(device_arena(device, 2));
    assert_int_equal(device_bytes(device), 256);
    device_close(device);
}

// What a program takes, on a planning device and then on a real one.
static void program_take(Device *device, size_t slots) {
    device_alloc(device, "moments", 1000);
    device_scratch(device, "workspace", 10);
    device_alloc(device, "slots", slots);
    device_scratch(device, "workspace", 5000);
    device_alloc(device, "moments", 3);
}

static void plan_and_ledger_agree(void **state) {
    (void)state;
    Device *plan = device_plan();
    program_take(plan, 777);
    Device *device = device_open(plan), *other = device_open(NULL);
    assert_false(device_planning(device));
    assert_false(device_same_ledger(plan, device));
    assert_int_equal(device_bytes(device), 0);
    program_take(device, 777);
    assert_true(device_same_ledger(plan, device));
    assert_true(device_same_ledger(device, plan));
    assert_int_equal(device_bytes(device), device_bytes(plan));
    for (int i = 0; device_arena(device, i); i++)
        assert_int_equal(device_arena(device, i)->bytes, device_arena(device, i)->planned);
    program_take(other, 778 + DEVICE_ALIGN);
    assert_false(device_same_ledger(plan, other));
    assert_false(device_same_ledger(other, plan));
    device_close(other);
    device_close(device);
    device_close(plan);
}

// The same bytes in all, under other names, are not the same ledger.
static void ledgers_differ_by_name(void **state) {
    (void)state;
    Device *a = device_plan(), *b = device_plan();
    device_alloc(a, "moments", 64);
    device_alloc(b, "slots", 64);
    assert_false(device_same_ledger(a, b));
    assert_false(device_same_ledger(b, a));
    device_close(a);
    device_close(b);
}

static void take_beyond_plan(void *arena) {
    Device *plan = device_plan();
    program_take(plan, 64);
    Device *device = device_open(plan);
    program_take(device, 64);
    device_alloc(device, (const char *)arena, 64);
}

static void scratch_beyond_plan(void *unused) {
    (void)unused;
    Device *plan = device_plan();
    program_take(plan, 64);
    device_scratch(device_open(plan), "workspace", 5057);
}

static void outgrowing_the_plan_is_fatal(void **state) {
    (void)state;
    static char slots[] = "slots", unknown[] = "a name that no plan has";
    expect_death(EXIT_CODE_FAILURE, "arena 'slots' holds 64 of 64 planned bytes and is asked for 64 more",
                 take_beyond_plan, slots);
    expect_death(EXIT_CODE_FAILURE,
                 "arena 'a name that no plan has' holds 0 of 0 planned bytes and is asked for 64 more",
                 take_beyond_plan, unknown);
    expect_death(EXIT_CODE_FAILURE, "arena 'workspace' holds 0 of 5056 planned bytes and is asked for 5120 more",
                 scratch_beyond_plan, NULL);
}

static void scratch_grows_to_the_largest(void **state) {
    (void)state;
    Device *device = device_open(NULL);
    char *small = device_scratch(device, "workspace", 100);
    assert_int_equal(device_bytes(device), 128);
    assert_ptr_equal(device_scratch(device, "workspace", 128), small);
    assert_ptr_equal(device_scratch(device, "workspace", 0), small);
    char *large = device_scratch(device, "workspace", 3 * MIB);
    assert_int_equal(device_bytes(device), 3 * MIB);
    memset(large, 1, 3 * MIB);
    assert_ptr_equal(device_scratch(device, "workspace", 100), large);
    assert_int_equal(device_bytes(device), 3 * MIB);
    assert_ptr_not_equal(device_scratch(device, "another", 100), large);
    assert_int_equal(device_bytes(device), 3 * MIB + 128);
    device_close(device);
}

// Under a plan scratch is as large as it will ever be from the start, so that it never moves.
static void planned_scratch_stays_where_it_is(void **state) {
    (void)state;
    Device *plan = device_plan();
    device_scratch(plan, "workspace", 100);
    device_scratch(plan, "workspace", 9000);
    Device *device = device_open(plan);
    void *first = device_scratch(device, "workspace", 100);
    assert_true(device_same_ledger(plan, device));
    assert_ptr_equal(device_scratch(device, "workspace", 9000), first);
    assert_true(device_same_ledger(plan, device));
    device_close(device);
    device_close(plan);
}

// ---------------------------------------------------------------------------------------------------------------
// Memory

// More than the test could take: pointers can be computed, compared and subtracted, but nothing is there.
static void planned_addresses_can_be_computed_with(void **state) {
    (void)state;
    const size_t bytes = (size_t)1 << 36;
    int ends[2];
    Device *device = device_plan();
    char *a = device_alloc(device, "slots", bytes), *b = device_alloc(device, "slots", bytes);
    assert_int_equal(device_bytes(device), 2 * bytes);
    assert_int_equal((uintptr_t)a % DEVICE_ALIGN, 0);
    assert_true(a + bytes <= b || b + bytes <= a);
    assert_int_equal((a + bytes) - a, bytes);
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(write(ends[1], a + bytes / 2, 1), -1);
    assert_int_equal(errno, EFAULT);
    close(ends[0]);
    close(ends[1]);
    device_copy_in(device, a, b, bytes); // does nothing
    device_copy_out(device, b, a, bytes);
    device_close(device);
}

static bool all_zero(const char *memory, size_t bytes) {
    return bytes == 0 || (memory[0] == 0 && memcmp(memory, memory + 1, bytes - 1) == 0);
}

// Three times, dirtying what is given back: so memory that comes around again has been zeroed by the device.
static void memory_is_aligned_and_zero(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 63, 64, 65, 4095, 100000, 4 * MIB - 64, 4 * MIB, 4 * MIB + 1, 9 * MIB};
    for (int round = 0; round < 3; round++) {
        Device *device = device_open(NULL);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            size_t align = sizes[i] >= 4 * MIB ? 2 * MIB : DEVICE_ALIGN;
            char *memory = device_alloc(device, "slots", sizes[i]);
            assert_int_equal((uintptr_t)memory % align, 0);
            assert_true(all_zero(memory, sizes[i]));
            memset(memory, 0xff, sizes[i]);
        }
        char *host = device_alloc_host(device, "batch", 1000);
        assert_true(all_zero(host, 1000));
        assert_true(device_peak_bytes() > 9 * MIB);
        device_close(device);
    }
}

static void copies_copy(void **state) {
    (void)state;
    Device *device = device_open(NULL);
    int *memory = device_alloc(device, "batch", 3 * sizeof(int)), back[3] = {0};
    device_copy_in(device, memory, (int[]){3, 1, 4}, 3 * sizeof(int));
    device_copy_out(device, back, memory, 3 * sizeof(int));
    assert_memory_equal(back, ((int[]){3, 1, 4}), sizeof back);
    device_close(device);
}

// ---------------------------------------------------------------------------------------------------------------
// Cores. Each question is asked in a child process, which then has this one for its launcher.

typedef struct {
    int local_rank, local_ranks;
    bool keep;
    int threads;         // asked for on the command line; 0: not
    const char *setting; // of OMP_NUM_THREADS, or NULL
} CoresQuestion;

typedef struct {
    int threads;
    cpu_set_t set;
    char text[128];
} CoresAnswer;

// The child starts out bound to one core, as a launcher's default might have it.
static CoresAnswer cores_ask(CoresQuestion question, int bound_to) {
    CoresAnswer answer;
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(bound_to, &one);
        memset(&answer, 0, sizeof answer);
        answer.threads = question.threads;
        unsetenv("OMP_NUM_THREADS");
        if (question.setting) setenv("OMP_NUM_THREADS", question.setting, 1);
        bool fine = sched_setaffinity(0, sizeof one, &one) == 0;
        device_cores(question.local_rank, question.local_ranks, question.keep, &answer.threads, answer.text,
                     sizeof answer.text);
        fine &= sched_getaffinity(0, sizeof answer.set, &answer.set) == 0;
        fine &= write(ends[1], &answer, sizeof answer) == (ssize_t)sizeof answer;
        _exit(!fine);
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], &answer, sizeof answer), sizeof answer);
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    return answer;
}

static cpu_set_t all_cores;
static int core[2]; // the two that this process is narrowed to

static int cores_narrow(void **state) {
    (void)state;
    cpu_set_t two;
    int found = 0;
    CPU_ZERO(&two);
    sched_getaffinity(0, sizeof all_cores, &all_cores);
    for (int cpu = 0; cpu < CPU_SETSIZE && found < 2; cpu++)
        if (CPU_ISSET(cpu, &all_cores)) {
            CPU_SET(cpu, &two);
            core[found++] = cpu;
        }
    return found == 2 ? sched_setaffinity(0, sizeof two, &two) : 0;
}

static int cores_restore(void **state) {
    (void)state;
    return sched_setaffinity(0, sizeof all_cores, &all_cores);
}

static void cores_are_shared_out(void **state) {
    (void)state;
    if (CPU_COUNT(&all_cores) < 2) skip();
    char both[32];
    CoresAnswer answer;
    for (int share = 0; share < 2; share++) {
        answer = cores_ask((CoresQuestion){share, 2, false, 0, NULL}, core[0]);
        assert_int_equal(CPU_COUNT(&answer.set), 1);
        assert_true(CPU_ISSET(core[share], &answer.set));
        assert_int_equal(answer.threads, 1);
    }
    // More shares than cores: nobody is bound, and one thread each.
    for (int share = 0; share < 3; share++) {
        answer = cores_ask((CoresQuestion){share, 3, false, 0, NULL}, core[0]);
        assert_int_equal(CPU_COUNT(&answer.set), 2);
        assert_int_equal(answer.threads, 1);
    }
    // A single share is everything, whatever core the launcher chose.
    answer = cores_ask((CoresQuestion){0, 1, false, 0, NULL}, core[0]);
    assert_int_equal(CPU_COUNT(&answer.set), 2);
    assert_int_equal(answer.threads, 2);
    snprintf(both, sizeof both, core[1] == core[0] + 1 ? "cores %d-%d, 2 threads" : "cores %d,%d, 2 threads",
             core[0], core[1]);
    assert_string_equal(answer.text, both);
}

static void cores_are_kept_on_request(void **state) {
    (void)state;
    if (CPU_COUNT(&all_cores) < 2) skip();
    char kept[64];
    for (int share = 0; share < 2; share++) {
        CoresAnswer answer = cores_ask((CoresQuestion){share, 2, true, 0, NULL}, core[1]);
        assert_int_equal(CPU_COUNT(&answer.set), 1);
        assert_true(CPU_ISSET(core[1], &answer.set));
        assert_int_equal(answer.threads, 1);
        snprintf(kept, sizeof kept, "core %d (as bound), 1 thread", core[1]);
        assert_string_equal(answer.text, kept);
    }
}

static void threads_can_be_chosen(void **state) {
    (void)state;
    const int any = core[0];
    assert_int_equal(cores_ask((CoresQuestion){0, 2, false, 0, "5"}, any).threads, 5);
    assert_int_equal(cores_ask((CoresQuestion){0, 3, false, 0, "5"}, any).threads, 5);
    assert_int_equal(cores_ask((CoresQuestion){0, 2, true, 0, "5"}, any).threads, 5);
    assert_int_equal(cores_ask((CoresQuestion){0, 2, false, 7, "5"}, any).threads, 7); // the command line wins
    assert_int_equal(cores_ask((CoresQuestion){0, 2, false, 0, "what"}, any).threads, 1);
    assert_int_equal(cores_ask((CoresQuestion){0, 2, false, 0, "0"}, any).threads, 1);
}

// ---------------------------------------------------------------------------------------------------------------
// Streams. Tasks run on the streams' thread, where nothing may be asserted: they leave notes for the test.

typedef struct {
    int *notes, *noted; // this task's number goes to notes[(*noted)++]
    int number, polls;  // polls: how often it is called before it is done
} NoteTask;

static bool note_poll(void *argument) {
    NoteTask *task = argument;
    if (task->polls-- > 0) return false;
    task->notes[(*task->noted)++] = task->number;
    return true;
}

static void note_submit(Stream *stream, int *notes, int *noted, int number, int polls) {
    NoteTask task = {notes, noted, number, polls};
    stream_submit(stream, note_poll, &task, sizeof task);
    memset(&task, 0xff, sizeof task); // it was copied
}

static void streams_have_names(void **state) {
    (void)state;
    Device *device = device_open(NULL);
    assert_string_equal(stream_name(device_compute(device)), "compute");
    assert_string_equal(stream_name(stream_open(device, "comm")), "comm");
    device_close(device);
}

// Each stream in its own order, which waits for slow tasks; what the other streams do does not matter. There are far
// more tasks than a stream holds at a time, so submitting has to wait for room.
static void tasks_run_in_order_until_true(void **state) {
    (void)state;
    enum { STREAMS = 3, TASKS = 2000 };
    static int notes[STREAMS][TASKS];
    int noted[STREAMS] = {0};
    Device *device = device_open(NULL);
    Stream *streams[STREAMS];
    Event *done[STREAMS];
    for (int s = 0; s < STREAMS; s++) {
        streams[s] = stream_open(device, "stream");
        done[s] = event_create(device, "done");
    }
    for (int i = 0; i < TASKS; i++)
        for (int s = 0; s < STREAMS; s++)
            note_submit(streams[s], notes[s], &noted[s], i, random_below(20) == 0 ? (int)random_below(5) : 0);
    for (int s = 0; s < STREAMS; s++) {
        event_record(done[s], streams[s]);
        event_synchronize(done[s]);
        assert_int_equal(noted[s], TASKS);
        for (int i = 0; i < TASKS; i++) assert_int_equal(notes[s][i], i);
    }
    device_close(device);
}

// A task that holds its stream up until the main thread says so.
static bool gate_poll(void *argument) { return atomic_load(*(atomic_int **)argument) != 0; }

static void gate_submit(Stream *stream, atomic_int *gate) { stream_submit(stream, gate_poll, &gate, sizeof gate); }

static bool sleep_poll(void *argument) {
    sleep_microseconds(*(long *)argument);
    return true;
}

static void sleep_submit(Stream *stream, long microseconds) {
    stream_submit(stream, sleep_poll, &microseconds, sizeof microseconds);
}

// More entries than a ring holds, behind a task that takes its time: the one who pushes waits, and nothing is lost.
static void full_rings_make_the_host_wait(void **state) {
    (void)state;
    enum { TASKS = 1000 };
    static int notes[TASKS];
    int noted = 0;
    Device *device = device_open(NULL);
    Stream *stream = stream_open(device, "comm");
    Event *events[3];
    for (int e = 0; e < 3; e++) events[e] = event_create(device, "event");
    sleep_submit(stream, 20000);
    for (int i = 0; i < TASKS; i++) {
        note_submit(stream, notes, &noted, i, 0);
        event_record(events[i % 3], stream);
        stream_wait(stream, events[(i + 1) % 3]);
    }
    event_synchronize(events[(TASKS - 1) % 3]);
    assert_int_equal(noted, TASKS);
    for (int i = 0; i < TASKS; i++) assert_int_equal(notes[i], i);
    device_close(device);
}

// Hand-over: a buffer filled with one number goes from the giver to the taker, who checks and copies it.
enum { CARGO = 64, ROUNDS = 4000 };

typedef struct {
    const int *from; // NULL: nothing to check
    int *to;
    int expected, number, *faults;
    long pause; // microseconds, before
    bool paused;
} CargoTask;

static void cargo_move(const CargoTask *task) {
    for (int i = 0; task->from && i < CARGO; i++) *task->faults += task->from[i] != task->expected;
    for (int i = 0; i < CARGO; i++) task->to[i] = task->number;
}

static bool cargo_poll(void *argument) {
    CargoTask *task = argument;
    if (task->pause && !task->paused) {
        task->paused = true;
        sleep_microseconds(task->pause);
        return false;
    }
    cargo_move(task);
    return true;
}

static long pause_random(void) { return random_below(40) == 0 ? 1 + (long)random_below(200) : 0; }

// compute → comm → compute, through two buffers, with either side the slower one by turns.
static void compute_and_another_hand_over(void **state) {
    (void)state;
    static int there[CARGO], back[CARGO];
    int faults = 0;
    Device *device = device_open(NULL);
    Stream *compute = device_compute(device), *comm = stream_open(device, "comm");
    Event *filled = event_create(device, "filled"), *moved = event_create(device, "moved");
    Shared there_order = {.name = "there"}, back_order = {.name = "back"};
    for (int round = 0; round < ROUNDS; round++) {
        long pause = pause_random();
        if (pause) sleep_microseconds(pause);
        stream_writes(compute, &there_order, "compute");
        for (int i = 0; i < CARGO; i++) there[i] = round;
        event_record(filled, compute);

        stream_wait(comm, filled);
        stream_reads(comm, &there_order, "comm");
        stream_writes(comm, &back_order, "comm");
        CargoTask task = {there, back, round, round + 1, &faults, pause_random(), false};
        stream_submit(comm, cargo_poll, &task, sizeof task);
        event_record(moved, comm);

        stream_wait(compute, moved);
        stream_reads(compute, &back_order, "compute");
        for (int i = 0; i < CARGO; i++) assert_int_equal(back[i], round + 1);
    }
    assert_int_equal(faults, 0);
    device_close(device);
}

// a → b → a without the host: all rounds are queued, as far as they fit, before the first is over.
static void two_others_hand_over(void **state) {
    (void)state;
    static int there[CARGO], back[CARGO];
    int faults = 0;
    Device *device = device_open(NULL);
    Stream *a = stream_open(device, "a"), *b = stream_open(device, "b");
    Event *filled = event_create(device, "filled"), *moved = event_create(device, "moved");
    Shared there_order = {.name = "there"}, back_order = {.name = "back"};
    for (int round = 0; round < ROUNDS; round++) {
        CargoTask fill = {round ? back : NULL, there, round, round, &faults, pause_random(), false};
        stream_wait(a, moved);
        stream_reads(a, &back_order, "a");
        stream_writes(a, &there_order, "a");
        stream_submit(a, cargo_poll, &fill, sizeof fill);
        event_record(filled, a);

        CargoTask move = {there, back, round, round + 1, &faults, pause_random(), false};
        stream_wait(b, filled);
        stream_reads(b, &there_order, "b");
        stream_writes(b, &back_order, "b");
        stream_submit(b, cargo_poll, &move, sizeof move);
        event_record(moved, b);
    }
    event_synchronize(moved);
    assert_int_equal(faults, 0);
    for (int i = 0; i < CARGO; i++) assert_int_equal(back[i], ROUNDS);
    device_close(device);
}

// Two streams fill three buffers ahead of compute, which empties them in turn.
static void buffers_go_around(void **state) {
    (void)state;
    enum { BUFFERS = 3 };
    static int cargo[BUFFERS][CARGO];
    int faults = 0;
    Device *device = device_open(NULL);
    Stream *compute = device_compute(device), *streams[] = {stream_open(device, "a"), stream_open(device, "b")};
    Event *given[BUFFERS], *taken[BUFFERS];
    for (int i = 0; i < BUFFERS; i++) {
        given[i] = event_create(device, "given");
        taken[i] = event_create(device, "taken");
    }
    for (int round = 0; round < ROUNDS; round++) {
        int slot = round % BUFFERS;
        if (round >= BUFFERS) {
            stream_wait(compute, given[slot]);
            for (int i = 0; i < CARGO; i++) assert_int_equal(cargo[slot][i], round - BUFFERS);
            for (int i = 0; i < CARGO; i++) cargo[slot][i] = -1;
            event_record(taken[slot], compute);
        }
        Stream *stream = streams[slot % 2];
        CargoTask give = {
            round < BUFFERS ? NULL : cargo[slot], cargo[slot], -1, round, &faults, pause_random(), false};
        stream_wait(stream, taken[slot]);
        stream_submit(stream, cargo_poll, &give, sizeof give);
        event_record(given[slot], stream);
    }
    for (int i = 0; i < BUFFERS; i++) event_synchronize(given[i]);
    assert_int_equal(faults, 0);
    device_close(device);
}

// ---------------------------------------------------------------------------------------------------------------
// Events

static void unrecorded_events_have_happened(void **state) {
    (void)state;
    int note, noted = 0;
    Device *device = device_open(NULL);
    Stream *stream = stream_open(device, "comm");
    Event *never = event_create(device, "never"), *done = event_create(device, "done");
    event_synchronize(never);
    stream_wait(device_compute(device), never);
    stream_wait(stream, never);
    note_submit(stream, &note, &noted, 7, 0);
    event_record(done, stream);
    event_synchronize(done);
    assert_int_equal(note, 7);
    device_close(device);
}

// Who waits after the second record waits for both. Who waited after the first waits for that one alone: or this
// would never end, because the work before the second record waits for what comes after that wait.
static void events_can_be_recorded_again(void **state) {
    (void)state;
    int notes[4], noted = 0;
    atomic_int gate = 0;
    Device *device = device_open(NULL);
    Stream *a = stream_open(device, "a"), *b = stream_open(device, "b");
    Event *event = event_create(device, "event"), *between = event_create(device, "between");
    note_submit(a, notes, &noted, 1, 3);
    event_record(event, a);
    stream_wait(b, event);
    note_submit(b, notes, &noted, 2, 3);
    event_record(between, b);
    stream_wait(a, between);
    gate_submit(a, &gate);
    note_submit(a, notes, &noted, 3, 3);
    event_record(event, a);
    event_synchronize(between);
    assert_int_equal(noted, 2);
    atomic_store(&gate, 1);
    stream_wait(device_compute(device), event);
    assert_int_equal(noted, 3);
    for (int i = 0; i < 3; i++) assert_int_equal(notes[i], i + 1);
    device_close(device);
}

// An event counts its records, and two streams would count them in an order that nothing decides.
static void record_on_two_streams(void *unused) {
    (void)unused;
    Device *device = device_plan();
    Event *event = event_create(device, "event");
    event_record(event, device_compute(device));
    event_record(event, stream_open(device, "comm"));
}

static void events_belong_to_one_stream(void **state) {
    (void)state;
    expect_death(128 + SIGABRT, "event->stream", record_on_two_streams, NULL);
}

static void submit_to_compute(void *unused) {
    (void)unused;
    int number = 0;
    Device *device = device_open(NULL);
    stream_submit(device_compute(device), sleep_poll, &number, sizeof number);
}

// The compute stream is the main thread: a task for it would never be called.
static void compute_takes_no_tasks(void **state) {
    (void)state;
    expect_death(128 + SIGABRT, "device_compute", submit_to_compute, NULL);
}

static void waiting_is_counted(void **state) {
    (void)state;
    Device *device = device_open(NULL);
    Stream *stream = stream_open(device, "comm");
    Event *done = event_create(device, "done");
    assert_true(device_waited(device) == 0);
    for (int i = 1; i <= 2; i++) {
        sleep_submit(stream, 20000);
        event_record(done, stream);
        if (i == 1)
            event_synchronize(done);
        else
            stream_wait(device_compute(device), done);
        assert_true(device_waited(device) > i * 0.015);
        assert_true(device_waited(device) < i * 2.0);
    }
    double waited = device_waited(device);
    stream_wait(stream, done); // not the main thread's time
    event_synchronize(done);
    assert_true(device_waited(device) == waited);
    device_close(device);
}

// Tasks under their label, what the main thread waits for, and nested spans of its own; what does not fit is lost.
static void spans_are_kept(void **state) {
    (void)state;
    enum { MOST = 5 };
    Device *device = device_open(NULL);
    Stream *other = stream_open(device, "comm"), *compute = device_compute(device);
    Event *slept = event_create(device, "slept");
    const Span *spans;
    device_trace(device, MOST);
    int64_t outer = span_begin(compute, "forward", "h.3"), inner = span_begin(compute, "norm", NULL);
    span_end(compute, inner);
    stream_label(other, "gather of h.4");
    sleep_submit(other, 20000);
    event_record(slept, other);
    stream_wait(compute, slept);
    span_end(compute, outer);
    assert_int_equal(device_spans(device, &spans), 4);
    assert_string_equal(spans[0].unit, "h.3");
    assert_true(spans[0].begin <= spans[1].begin && spans[1].end <= spans[0].end);
    for (int i = 0; i < 4; i++) assert_true(spans[i].begin > 1e9 && spans[i].begin <= spans[i].end);
    for (int i = 2; i < 4; i++) { // in either order
        bool task = strcmp(spans[i].stream, "comm") == 0;
        assert_string_equal(spans[i].phase, task ? "gather of h.4" : "wait");
        assert_true(spans[i].end - spans[i].begin > (task ? 0.02 : 0.01) && spans[i].end <= spans[0].end);
    }
    assert_true(span_begin(compute, "update", NULL) == 4);
    assert_true(span_begin(compute, "one too many", NULL) == -1);
    assert_int_equal(device_spans(device, &spans), MOST);
    assert_int_equal(device_arena_bytes(device, "trace"),
                     MOST * sizeof(Span) / 64 * 64 + (MOST * sizeof(Span) % 64 ? 64 : 0));
    device_close(device);
}

static void closing_finishes_the_work(void **state) {
    (void)state;
    enum { TASKS = 100 };
    static int notes[2][TASKS];
    int noted[2] = {0};
    Device *device = device_open(NULL);
    Stream *streams[] = {stream_open(device, "a"), stream_open(device, "b")};
    Event *half = event_create(device, "half");
    for (int i = 0; i < TASKS; i++) {
        note_submit(streams[0], notes[0], &noted[0], i, i % 10 == 0);
        if (i == TASKS / 2) event_record(half, streams[0]);
    }
    stream_wait(streams[1], half);
    for (int i = 0; i < TASKS; i++) note_submit(streams[1], notes[1], &noted[1], i, 0);
    device_close(device);
    for (int s = 0; s < 2; s++) {
        assert_int_equal(noted[s], TASKS);
        for (int i = 0; i < TASKS; i++) assert_int_equal(notes[s][i], i);
    }
}

// Devices are independent of each other, and one without streams has no thread.
static void devices_come_and_go(void **state) {
    (void)state;
    for (int i = 0; i < 50; i++) {
        int notes[2], noted = 0, plain;
        Device *device = device_open(NULL), *other = device_open(NULL), *plan = device_plan();
        note_submit(stream_open(device, "a"), &notes[0], &noted, 1, 1);
        note_submit(stream_open(plan, "a"), &plain, NULL, 2, 1); // a plan does no work
        device_close(plan);
        device_close(other);
        device_close(device);
        assert_int_equal(noted, 1);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Order. A script is a list of steps, each two or three characters, on compute (C) or the streams A and B:
//
//     Aw, Ar    A writes, or reads, the memory           A>x    records event x on A
//     A<x       A waits for x                            H<x    the host waits for x
//
// The memory is called "memory", and an access gives the number of its step, from 1, for its place.

typedef struct {
    const char *steps, *message; // message NULL: nothing to complain about
} OrderCase;

static void script_run(void *steps) {
    static const char *const places[] = {"step 1", "step 2", "step 3", "step 4",  "step 5",  "step 6",
                                         "step 7", "step 8", "step 9", "step 10", "step 11", "step 12"};
    Device *device = device_plan();
    Stream *streams[] = {stream_open(device, "A"), stream_open(device, "B"), device_compute(device)};
    Event *events[] = {event_create(device, "x"), event_create(device, "y"), event_create(device, "z")};
    Shared memory = {.name = "memory"};
    int number = 0;
    for (const char *step = steps; *step; number++) {
        Stream *stream = streams[step[0] == 'H' ? 0 : step[0] - 'A'];
        Event *event = step[1] == '<' || step[1] == '>' ? events[step[2] - 'x'] : NULL;
        if (step[1] == 'w')
            stream_writes(stream, &memory, places[number]);
        else if (step[1] == 'r')
            stream_reads(stream, &memory, places[number]);
        else if (step[1] == '>')
            event_record(event, stream);
        else if (step[0] == 'H')
            event_synchronize(event);
        else
            stream_wait(stream, event);
        step += event ? 3 : 2;
        step += *step == ' ';
    }
    device_close(device);
}

static void ordered_accesses_pass(void **state) {
    (void)state;
    static const char *const scripts[] = {
        "Aw Ar Aw Ar",                         // one stream
        "Ar Br Cr Ar",                         // reads do not conflict
        "Aw A>x B<x Br",                       // write → read
        "Aw A>x B<x Bw",                       // write → write
        "Ar A>x B<x Bw",                       // read → write
        "Cw C>x B<x Br",                       // compute is a stream like others
        "Bw B>x C<x Cr",                       //
        "Aw A>x B<x B>y C<y Cr",               // through a third stream
        "Aw A>x B<x B>y C<y Cw",               //
        "Ar A>x B<x B>y C<y Cw",               //
        "Aw A>x H<x Br",                       // through the host
        "Aw A>x H<x Bw Br",                    //
        "Ar A>x H<x Cw",                       //
        "Aw A>x H<x B>y C<y Cr",               // through the host, then a stream that did nothing itself
        "A>x Aw A>x B<x Br",                   // recorded again, after the access
        "Aw Ar Aw A>x B<x Br",                 // an event covers all that came before
        "Aw A>x Ar B<x Br",                    //
        "Ar A>x Br B>y C<x C<y Cw",            // two readers, both waited for
        "Aw A>x B<x Br B>y A<y Aw A>x B<x Br", // round and round
        "Aw A>x A>y B<y Br",                   // any event that comes later will do
    };
    for (size_t i = 0; i < sizeof scripts / sizeof *scripts; i++)
        expect_death(EXIT_CODE_DONE, "", script_run, (void *)scripts[i]);
}

static void unordered_accesses_are_fatal(void **state) {
    (void)state;
#define COMPLAINT(now, by, at, before, then)                                                                       \
    "stream order: 'memory' is " now " on stream " by " by step " at                                               \
    ", but nothing orders that after it was " before " by step " then ". HINT"
    static const OrderCase cases[] = {
        {"Aw Br", COMPLAINT("read", "B", "2", "written", "1")},
        {"Aw Bw", COMPLAINT("written", "B", "2", "written", "1")},
        {"Ar Bw", COMPLAINT("written", "B", "2", "read", "1")},
        {"Cw Ar", COMPLAINT("read", "A", "2", "written", "1")},
        {"Aw Cr", COMPLAINT("read", "compute", "2", "written", "1")},
        {"Cr Aw", COMPLAINT("written", "A", "2", "read", "1")},
        {"A>x Aw B<x Br", COMPLAINT("read", "B", "4", "written", "2")}, // recorded before the access
        {"A>x Ar B<x Bw", COMPLAINT("written", "B", "4", "read", "2")},
        {"Aw A>x Aw B<x Br", COMPLAINT("read", "B", "5", "written", "3")},
        {"Aw B<x A>x Br", COMPLAINT("read", "B", "4", "written", "1")}, // waited before the record
        {"Aw A>x Br B<x", COMPLAINT("read", "B", "3", "written", "1")}, // waited after the access
        {"Aw A>x Br H<x", COMPLAINT("read", "B", "3", "written", "1")},
        {"A>x Aw H<x Br", COMPLAINT("read", "B", "4", "written", "2")},
        {"Aw A>y B<x Br", COMPLAINT("read", "B", "4", "written", "1")}, // another event
        {"Aw A>x B<x Cr", COMPLAINT("read", "compute", "4", "written", "1")},
        {"Aw B>x C<x Cr", COMPLAINT("read", "compute", "4", "written", "1")}, // of another stream
        {"Aw B>y A>x B<x C<y Cr",
         COMPLAINT("read", "compute", "6", "written", "1")},               // the third stream was too early
        {"Aw A>x B<x Br Aw", COMPLAINT("written", "A", "5", "read", "4")}, // there, but not back
        {"Aw A>x B<x Bw Ar", COMPLAINT("read", "A", "5", "written", "4")},
        {"Ar Br A>x C<x Cw", COMPLAINT("written", "compute", "5", "read", "2")}, // one reader of two
        {"Ar Br B>x C<x Cw", COMPLAINT("written", "compute", "5", "read", "1")},
        {"Aw A>x C<x Br", COMPLAINT("read", "B", "4", "written", "1")}, // compute waits, but not the host
    };
#undef COMPLAINT
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_death(EXIT_CODE_FAILURE, cases[i].message, script_run, (void *)cases[i].steps);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ledger_counts_rounded_bytes),
        cmocka_unit_test(plan_and_ledger_agree),
        cmocka_unit_test(ledgers_differ_by_name),
        cmocka_unit_test(outgrowing_the_plan_is_fatal),
        cmocka_unit_test(scratch_grows_to_the_largest),
        cmocka_unit_test(planned_scratch_stays_where_it_is),
        cmocka_unit_test(planned_addresses_can_be_computed_with),
        cmocka_unit_test(memory_is_aligned_and_zero),
        cmocka_unit_test(copies_copy),
        cmocka_unit_test_setup_teardown(cores_are_shared_out, cores_narrow, cores_restore),
        cmocka_unit_test_setup_teardown(cores_are_kept_on_request, cores_narrow, cores_restore),
        cmocka_unit_test_setup_teardown(threads_can_be_chosen, cores_narrow, cores_restore),
        cmocka_unit_test(streams_have_names),
        cmocka_unit_test(tasks_run_in_order_until_true),
        cmocka_unit_test(full_rings_make_the_host_wait),
        cmocka_unit_test(compute_and_another_hand_over),
        cmocka_unit_test(two_others_hand_over),
        cmocka_unit_test(buffers_go_around),
        cmocka_unit_test(unrecorded_events_have_happened),
        cmocka_unit_test(events_can_be_recorded_again),
        cmocka_unit_test(events_belong_to_one_stream),
        cmocka_unit_test(compute_takes_no_tasks),
        cmocka_unit_test(waiting_is_counted),
        cmocka_unit_test(spans_are_kept),
        cmocka_unit_test(closing_finishes_the_work),
        cmocka_unit_test(devices_come_and_go),
        cmocka_unit_test(ordered_accesses_pass),
        cmocka_unit_test(unordered_accesses_are_fatal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
