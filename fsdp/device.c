// The half of the device room that is the same on every machine: the ledger, and the proof of the streams' order.
#include "device_common.h"
#include "error.h"
#include <assert.h>       // assert
#include <stdio.h>        // snprintf
#include <string.h>       // strcmp
#include <sys/resource.h> // getrusage

// ---------------------------------------------------------------------------------------------------------------------
// ledger

Arena *ledger_book(Ledger *ledger, const char *name, size_t bytes) {
    int i = 0;
    while (i < ledger->count && strcmp(ledger->arenas[i].name, name) != 0) i++;
    assert(i < DEVICE_MAX_ARENAS);
    Arena *arena = &ledger->arenas[i];
    if (i == ledger->count) {
        ledger->count++;
        *arena = (Arena){.name = name, .bytes = 0, .planned = ledger->planned ? 0 : SIZE_MAX};
    }
    if (bytes > arena->planned - arena->bytes)
        die(EXIT_CODE_FAILURE, "this is a fault of the program: please report it with the command line",
            "arena '%s' holds %zu of %zu planned bytes and is asked for %zu more", name, arena->bytes,
            arena->planned, bytes);
    arena->bytes += bytes;
    return arena;
}

const Arena *device_arena(const Device *device, int i) {
    const Ledger *ledger = device_ledger(device);
    return i < ledger->count ? &ledger->arenas[i] : NULL;
}

size_t device_bytes(const Device *device) {
    size_t bytes = 0;
    for (int i = 0; device_arena(device, i); i++) bytes += device_arena(device, i)->bytes;
    return bytes;
}

size_t device_arena_bytes(const Device *device, const char *name) {
    const Arena *arena;
    for (int i = 0; (arena = device_arena(device, i)); i++)
        if (strcmp(arena->name, name) == 0) return arena->bytes;
    return 0;
}

bool device_same_ledger(const Device *a, const Device *b) {
    const Arena *arena;
    for (int i = 0; (arena = device_arena(a, i)); i++)
        if (arena->bytes != device_arena_bytes(b, arena->name)) return false;
    return device_bytes(a) == device_bytes(b);
}

size_t device_peak_bytes(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (size_t)usage.ru_maxrss * 1024; // Linux counts KiB
}

size_t device_file_bytes(void) {
    char line[128];
    size_t kib = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "RssFile: %zu", &kib) == 1) break;
    if (file) fclose(file);
    return kib * 1024;
}

// ---------------------------------------------------------------------------------------------------------------------
// order

void clock_join(Clock *into, const Clock *from) {
    for (int i = 0; i < CLOCKS; i++)
        if (into->at[i] < from->at[i]) into->at[i] = from->at[i];
}

// The next moment of a stream: after all it has waited for and all the host has.
static uint64_t stream_tick(StreamOrder *order) {
    clock_join(&order->clock, order->host);
    return ++order->clock.at[order->id];
}

static void refuse_unordered(const Shared *memory, const StreamOrder *order, const char *place, const char *doing,
                             const char *earlier, const char *earlier_doing) {
    die(EXIT_CODE_FAILURE, "an event must order the two: record it after the first, wait for it before the second",
        "stream order: '%s' is %s on stream %s by %s, but nothing orders that after it was %s by %s", memory->name,
        doing, order->name, place, earlier_doing, earlier);
}

void stream_reads(Stream *stream, Shared *memory, const char *place) {
    StreamOrder *order = stream_order(stream);
    uint64_t now = stream_tick(order);
    for (int s = 0; s < DEVICE_MAX_STREAMS; s++)
        if (s != order->id && memory->write[s].clock > order->clock.at[s])
            refuse_unordered(memory, order, place, "read", memory->write[s].place, "written");
    memory->read[order->id].clock = now;
    memory->read[order->id].place = place;
}

void stream_writes(Stream *stream, Shared *memory, const char *place) {
    StreamOrder *order = stream_order(stream);
    uint64_t now = stream_tick(order);
    for (int s = 0; s < DEVICE_MAX_STREAMS; s++) {
        if (s == order->id) continue;
        if (memory->write[s].clock > order->clock.at[s])
            refuse_unordered(memory, order, place, "written", memory->write[s].place, "written");
        if (memory->read[s].clock > order->clock.at[s])
            refuse_unordered(memory, order, place, "written", memory->read[s].place, "read");
    }
    memory->write[order->id].clock = now;
    memory->write[order->id].place = place;
}
