// device on a CPU: memory from the heap, the compute stream as the main thread itself, and one thread that serves all
// other streams.
//
// A stream other than compute is a ring of entries. The main thread pushes at the head; the streams' thread takes from
// the tail. An entry is a task to poll, an event to wait for, or an event to record. When no entry of any stream can go
// on, the thread sleeps some 50 µs: long enough to cost compute nothing, short enough to be lost in a transfer. When
// there is no entry at all it sleeps until one comes.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE // sched_setaffinity, CPU_SET
#endif
#include "device_common.h"
#include "error.h"
#include <assert.h>    // assert
#include <pthread.h>   // threads, mutexes, conditions
#include <sched.h>     // sched_getaffinity, sched_setaffinity
#include <stdatomic.h> // atomic_load_explicit, …
#include <stdio.h>     // snprintf
#include <stdlib.h>    // aligned_alloc, calloc, free, getenv
#include <string.h>    // memset, memcpy
#include <sys/mman.h>  // mmap, madvise
#include <time.h>      // clock_gettime, nanosleep
#include <unistd.h>    // getppid

enum { RING = 256, POLL_NANOSECONDS = 50 * 1000 };

struct Event {
    const char *name;
    Clock clock;               // of the stream that recorded it last
    const Stream *stream;      // that records it: one and the same, or records would happen out of order
    uint64_t recorded;         // how often it was recorded: known to the main thread alone
    _Atomic uint64_t happened; // how many of those have happened
    Device *device;
    Event *next; // of all the device's
};

typedef struct {
    enum { ENTRY_TASK, ENTRY_WAIT, ENTRY_RECORD } kind;
    StreamTask task;
    Event *event;
    uint64_t count; // the record to wait for, or to announce
    const char *label;
    bool begun; // a task's first call was made
    int64_t span;
    _Alignas(16) char argument[STREAM_TASK_BYTES];
} Entry;

struct Stream {
    StreamOrder order;
    Device *device;
    const char *label;     // of tasks to come
    Entry *ring;           // NULL for the compute stream
    _Atomic uint64_t head; // entries pushed
    _Atomic uint64_t tail; // entries done
};

typedef struct Block Block; // one piece of memory, to be given back
struct Block {
    void *address;
    size_t bytes;
    const char *scratch; // the arena's name when the piece is that arena's scratch
    Block *next;
};

struct Device {
    bool planning;
    Ledger ledger;
    Block *blocks;
    Clock host;
    Stream streams[DEVICE_MAX_STREAMS];
    int stream_count;
    Event *events;
    double waited;
    Span *spans; // NULL: no trace
    size_t span_most;
    _Atomic size_t span_count; // asked for; those beyond span_most are lost
    double epoch;              // of the clock that now() reads
    pthread_t thread;
    bool threaded, quit;
    pthread_mutex_t mutex;
    pthread_cond_t pushed, happened; // something to do; something done
};

StreamOrder *stream_order(Stream *stream) { return &stream->order; }
const char *stream_name(const Stream *stream) { return stream->order.name; }
const Ledger *device_ledger(const Device *device) { return &device->ledger; }

static void *take(size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (!memory) die(EXIT_CODE_FAILURE, NULL, "out of memory for %zu bytes", count * size);
    return memory;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// ---------------------------------------------------------------------------------------------------------------------
// device and memory

static Stream *stream_add(Device *device, const char *name) {
    assert(device->stream_count < DEVICE_MAX_STREAMS);
    Stream *stream = &device->streams[device->stream_count];
    stream->order = (StreamOrder){.name = name, .id = device->stream_count, .host = &device->host};
    stream->device = device;
    stream->label = name;
    device->stream_count++;
    return stream;
}

static Device *device_new(bool planning) {
    Device *device = (Device *)take(1, sizeof *device);
    device->planning = planning;
    pthread_mutex_init(&device->mutex, NULL);
    pthread_cond_init(&device->pushed, NULL);
    pthread_cond_init(&device->happened, NULL);
    stream_add(device, "compute");
    return device;
}

Device *device_plan(void) { return device_new(true); }

Device *device_open(const Device *plan) {
    Device *device = device_new(false);
    device->ledger.planned = plan != NULL;
    for (int i = 0; plan && i < plan->ledger.count; i++)
        device->ledger.arenas[device->ledger.count++] =
            (Arena){.name = plan->ledger.arenas[i].name, .bytes = 0, .planned = plan->ledger.arenas[i].bytes};
    return device;
}

bool device_planning(const Device *device) { return device->planning; }

static void block_free(const Device *device, Block *block) {
    if (device->planning)
        munmap(block->address, block->bytes);
    else
        free(block->address);
}

void device_close(Device *device) {
    if (device->threaded) {
        pthread_mutex_lock(&device->mutex);
        device->quit = true;
        pthread_cond_signal(&device->pushed);
        pthread_mutex_unlock(&device->mutex);
        pthread_join(device->thread, NULL);
    }
    for (Block *block = device->blocks, *next; block; block = next) {
        next = block->next;
        block_free(device, block);
        free(block);
    }
    for (int i = 0; i < device->stream_count; i++) free(device->streams[i].ring);
    for (Event *event = device->events, *next; event; event = next) {
        next = event->next;
        free(event);
    }
    pthread_mutex_destroy(&device->mutex);
    pthread_cond_destroy(&device->pushed);
    pthread_cond_destroy(&device->happened);
    free(device);
}

// Address space without memory behind it: pointers into it can be computed with, but not followed.
static void *reserve_addresses(size_t bytes) {
    void *address = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
        die(EXIT_CODE_FAILURE, NULL, "cannot reserve %zu bytes of addresses for the plan", bytes);
    return address;
}

// Zeroing also touches every page, so the memory is really there from now on. Large pieces ask for huge pages, which
// spare matrix products their misses in the page tables.
static void *take_pages(const char *arena, size_t bytes) {
    const size_t huge = (size_t)2 << 20;
    size_t align = bytes >= 2 * huge ? huge : DEVICE_ALIGN;
    void *address = aligned_alloc(align, (bytes + align - 1) / align * align);
    if (!address)
        die(EXIT_CODE_FAILURE,
            "use more ranks, a smaller --micro-batch, or a smaller model; --plan shows what goes where",
            "out of memory: arena '%s' needs %zu bytes", arena, bytes);
    if (align == huge) madvise(address, bytes, MADV_HUGEPAGE);
    memset(address, 0, bytes);
    return address;
}

static Block *block_new(Device *device, const char *arena, size_t bytes) {
    Block *block = (Block *)take(1, sizeof *block);
    block->bytes = bytes;
    block->address = device->planning ? reserve_addresses(bytes) : take_pages(arena, bytes);
    block->next = device->blocks;
    device->blocks = block;
    return block;
}

static size_t rounded(size_t bytes) { return (bytes + DEVICE_ALIGN - 1) / DEVICE_ALIGN * DEVICE_ALIGN; }

void *device_alloc(Device *device, const char *arena, size_t bytes) {
    if (bytes == 0) return NULL;
    bytes = rounded(bytes);
    ledger_book(&device->ledger, arena, bytes);
    return block_new(device, arena, bytes)->address;
}

void *device_alloc_host(Device *device, const char *arena, size_t bytes) {
    return device_alloc(device, arena, bytes);
}

void device_copy_in(Device *device, void *to, const void *from, size_t bytes) {
    if (!device->planning) memcpy(to, from, bytes);
}

void device_copy_out(Device *device, void *to, const void *from, size_t bytes) {
    device_copy_in(device, to, from, bytes);
}

void *device_scratch(Device *device, const char *arena, size_t bytes) {
    Block *block = device->blocks;
    while (block && !(block->scratch && strcmp(block->scratch, arena) == 0)) block = block->next;
    bytes = rounded(bytes ? bytes : 1);
    if (block && block->bytes >= bytes) return block->address;
    const Arena *booked = ledger_book(&device->ledger, arena, 0);
    if (!block) {
        // Under a plan the whole of it at once: so the piece never moves.
        if (booked->planned != SIZE_MAX && booked->planned > bytes) bytes = booked->planned;
        ledger_book(&device->ledger, arena, bytes);
        block = block_new(device, arena, bytes);
        block->scratch = arena;
        return block->address;
    }
    ledger_book(&device->ledger, arena, bytes - block->bytes);
    block_free(device, block);
    block->address = device->planning ? reserve_addresses(bytes) : take_pages(arena, bytes);
    block->bytes = bytes;
    return block->address;
}

// ---------------------------------------------------------------------------------------------------------------------
// cores

// Leaves in set this share of its cores; false, and all of them, when there are fewer cores than shares.
static bool cores_take(cpu_set_t *set, int share, int shares) {
    int cores = CPU_COUNT(set), seen = 0;
    if (cores < shares) return false;
    int first = (int)((int64_t)share * cores / shares), end = (int)((int64_t)(share + 1) * cores / shares);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, set)) continue;
        if (seen < first || seen >= end) CPU_CLR(cpu, set);
        seen++;
    }
    return true;
}

// The set as "0-3,8".
static void cores_text(const cpu_set_t *set, char *text, size_t size) {
    size_t used = 0;
    text[0] = '\0';
    for (int cpu = 0; cpu < CPU_SETSIZE && used + 16 < size; cpu++) {
        if (!CPU_ISSET(cpu, set)) continue;
        int last = cpu;
        while (last + 1 < CPU_SETSIZE && CPU_ISSET(last + 1, set)) last++;
        used +=
            (size_t)snprintf(text + used, size - used, last > cpu ? "%s%d-%d" : "%s%d", used ? "," : "", cpu, last);
        cpu = last;
    }
}

// The parent of a process; 1 when unknown.
static pid_t parent_of(pid_t process) {
    char path[64], line[128];
    int parent = 1;
    snprintf(path, sizeof path, "/proc/%d/status", (int)process);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "PPid: %d", &parent) == 1) break;
    if (file) fclose(file);
    return parent;
}

// The cores there were before a launcher narrowed this process down: those of the nearest ancestor that has more, since
// a script may stand between launcher and program. Without one, the process's own.
static void cores_unbound(cpu_set_t *set) {
    cpu_set_t above;
    for (pid_t process = getppid(); process > 1; process = parent_of(process)) {
        CPU_ZERO(&above);
        if (sched_getaffinity(process, sizeof above, &above) != 0) return;
        if (CPU_COUNT(&above) <= CPU_COUNT(set)) continue;
        *set = above;
        return;
    }
}

static int threads_asked(void) {
    const char *asked = getenv("OMP_NUM_THREADS");
    int threads = asked ? atoi(asked) : 0;
    if (threads > DEVICE_MAX_THREADS)
        die(EXIT_CODE_USAGE, NULL, "OMP_NUM_THREADS=%s: expected at most %d", asked, DEVICE_MAX_THREADS);
    return threads;
}

void device_cores(int local_rank, int local_ranks, bool keep, int *threads, char *text, size_t size) {
    cpu_set_t set;
    char list[256];
    bool own = true; // the cores in set are this rank's alone
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) != 0) CPU_SET(0, &set);
    if (!keep) {
        cores_unbound(&set);
        own = cores_take(&set, local_rank, local_ranks);
        if (sched_setaffinity(0, sizeof set, &set) != 0) sched_getaffinity(0, sizeof set, &set);
    }
    int cores = CPU_COUNT(&set);
    if (*threads <= 0) *threads = threads_asked();
    if (*threads <= 0) *threads = own ? cores : 1;
    cores_text(&set, list, sizeof list);
    snprintf(text, size, "core%s %s%s, %d thread%s", cores == 1 ? "" : "s", list, keep ? " (as bound)" : "",
             *threads, *threads == 1 ? "" : "s");
}

// ---------------------------------------------------------------------------------------------------------------------
// timeline

void device_trace(Device *device, size_t most) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    device->epoch = (double)time.tv_sec + 1e-9 * (double)time.tv_nsec - now();
    device->spans = (Span *)device_alloc(device, "trace", most * sizeof(Span));
    device->span_most = device->planning ? 0 : most;
}

size_t device_spans(const Device *device, const Span **spans) {
    size_t count = atomic_load(&device->span_count);
    *spans = device->spans;
    return count < device->span_most ? count : device->span_most;
}

int64_t span_begin(Stream *stream, const char *phase, const char *unit) {
    Device *device = stream->device;
    if (device->span_most == 0) return -1;
    size_t number = atomic_fetch_add(&device->span_count, 1);
    if (number >= device->span_most) return -1;
    device->spans[number] =
        (Span){.stream = stream->order.name, .phase = phase, .unit = unit, .begin = device->epoch + now()};
    return (int64_t)number;
}

void span_end(Stream *stream, int64_t span) {
    if (span >= 0) stream->device->spans[span].end = stream->device->epoch + now();
}

void stream_label(Stream *stream, const char *label) { stream->label = label; }

// ---------------------------------------------------------------------------------------------------------------------
// the streams' thread

static void event_happen(Device *device, Event *event, uint64_t count) {
    pthread_mutex_lock(&device->mutex);
    atomic_store_explicit(&event->happened, count, memory_order_release);
    pthread_cond_broadcast(&device->happened);
    pthread_mutex_unlock(&device->mutex);
}

static bool task_done(Stream *stream, Entry *entry) {
    if (!entry->begun) entry->span = span_begin(stream, entry->label, NULL);
    entry->begun = true;
    if (!entry->task(entry->argument)) return false;
    span_end(stream, entry->span);
    return true;
}

static bool entry_done(Stream *stream, Entry *entry) {
    Device *device = stream->device;
    switch (entry->kind) {
    case ENTRY_TASK:
        return task_done(stream, entry);
    case ENTRY_WAIT:
        return atomic_load_explicit(&entry->event->happened, memory_order_acquire) >= entry->count;
    case ENTRY_RECORD:
        event_happen(device, entry->event, entry->count);
        return true;
    }
    return true;
}

// Goes on with a stream as far as it will; returns whether anything got done. *left: whether something is left to do.
static bool stream_advance(Stream *stream, bool *left) {
    bool progress = false;
    uint64_t tail = atomic_load_explicit(&stream->tail, memory_order_relaxed);
    while (tail < atomic_load_explicit(&stream->head, memory_order_acquire)) {
        if (!entry_done(stream, &stream->ring[tail % RING])) {
            *left = true;
            break;
        }
        atomic_store_explicit(&stream->tail, ++tail, memory_order_release);
        progress = true;
    }
    return progress;
}

static bool nothing_pushed(const Device *device) {
    for (int i = 1; i < device->stream_count; i++)
        if (atomic_load(&device->streams[i].head) > atomic_load(&device->streams[i].tail)) return false;
    return true;
}

static void *serve_streams(void *argument) {
    Device *device = (Device *)argument;
    const struct timespec pause = {0, POLL_NANOSECONDS};
    for (;;) {
        bool progress = false, left = false;
        pthread_mutex_lock(&device->mutex);
        while (!device->quit && nothing_pushed(device)) pthread_cond_wait(&device->pushed, &device->mutex);
        int count = device->stream_count;
        bool quit = device->quit && nothing_pushed(device);
        pthread_mutex_unlock(&device->mutex);
        if (quit) return NULL;
        for (int i = 1; i < count; i++) progress |= stream_advance(&device->streams[i], &left);
        if (left && !progress) nanosleep(&pause, NULL);
    }
}

Stream *device_compute(Device *device) { return &device->streams[0]; }

Stream *stream_open(Device *device, const char *name) {
    pthread_mutex_lock(&device->mutex);
    Stream *stream = stream_add(device, name);
    if (!device->planning) stream->ring = (Entry *)take(RING, sizeof(Entry));
    pthread_mutex_unlock(&device->mutex);
    if (!device->planning && !device->threaded) {
        if (pthread_create(&device->thread, NULL, serve_streams, device) != 0)
            die(EXIT_CODE_FAILURE, "raise the limit on processes (ulimit -u)", "cannot start the streams' thread");
        device->threaded = true;
    }
    return stream;
}

// A slot of the ring for one more entry; waits for room.
static Entry *entry_begin(Stream *stream) {
    const struct timespec pause = {0, POLL_NANOSECONDS};
    uint64_t head = atomic_load_explicit(&stream->head, memory_order_relaxed);
    while (head - atomic_load_explicit(&stream->tail, memory_order_acquire) >= RING) nanosleep(&pause, NULL);
    return &stream->ring[head % RING];
}

static void entry_push(Stream *stream) {
    Device *device = stream->device;
    pthread_mutex_lock(&device->mutex);
    atomic_fetch_add_explicit(&stream->head, 1, memory_order_release);
    pthread_cond_signal(&device->pushed);
    pthread_mutex_unlock(&device->mutex);
}

void stream_submit(Stream *stream, StreamTask task, const void *argument, size_t bytes) {
    assert(bytes <= STREAM_TASK_BYTES && stream != device_compute(stream->device));
    if (!stream->ring) return; // planning: nothing to be done
    Entry *entry = entry_begin(stream);
    entry->kind = ENTRY_TASK;
    entry->task = task;
    entry->label = stream->label;
    entry->begun = false;
    memcpy(entry->argument, argument, bytes);
    entry_push(stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// events

Event *event_create(Device *device, const char *name) {
    Event *event = (Event *)take(1, sizeof *event);
    event->name = name;
    event->device = device;
    event->next = device->events;
    device->events = event;
    return event;
}

void event_record(Event *event, Stream *stream) {
    assert(event->stream == NULL || event->stream == stream);
    event->stream = stream;
    clock_join(&stream->order.clock, stream->order.host);
    event->clock = stream->order.clock;
    event->recorded++;
    if (!stream->ring) {
        event_happen(stream->device, event, event->recorded);
        return;
    }
    Entry *entry = entry_begin(stream);
    entry->kind = ENTRY_RECORD;
    entry->event = event;
    entry->count = event->recorded;
    entry_push(stream);
}

// The main thread sleeps until the event's last record has happened.
static void event_await(Event *event) {
    Device *device = event->device;
    if (atomic_load_explicit(&event->happened, memory_order_acquire) >= event->recorded) return;
    double begin = now();
    int64_t span = span_begin(device_compute(device), "wait", event->name);
    pthread_mutex_lock(&device->mutex);
    while (atomic_load_explicit(&event->happened, memory_order_acquire) < event->recorded)
        pthread_cond_wait(&device->happened, &device->mutex);
    pthread_mutex_unlock(&device->mutex);
    span_end(device_compute(device), span);
    device->waited += now() - begin;
}

void stream_wait(Stream *stream, Event *event) {
    clock_join(&stream->order.clock, &event->clock);
    if (!stream->ring) {
        event_await(event);
        return;
    }
    Entry *entry = entry_begin(stream);
    entry->kind = ENTRY_WAIT;
    entry->event = event;
    entry->count = event->recorded;
    entry_push(stream);
}

void event_synchronize(Event *event) {
    clock_join(&event->device->host, &event->clock);
    event_await(event);
}

double device_waited(const Device *device) { return device->waited; }
