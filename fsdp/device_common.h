// What the device room's sources share: the ledger and the clocks. Nobody else includes this.
#ifndef FSDP_DEVICE_COMMON_H
#define FSDP_DEVICE_COMMON_H

#include "device.h"

enum { CLOCK_HOST = DEVICE_MAX_STREAMS, CLOCKS };

// at[s]: how far stream s had got, as far as the holder knows. The host is one more place of knowledge.
typedef struct {
    uint64_t at[CLOCKS];
} Clock;

void clock_join(Clock *into, const Clock *from);

typedef struct {
    Arena arenas[DEVICE_MAX_ARENAS];
    int count;
    bool planned; // there is a plan: what it does not name gets nothing
} Ledger;

// Books bytes for the arena, opening it if it is new; dies when that outgrows the plan.
Arena *ledger_book(Ledger *ledger, const char *name, size_t bytes);

// What the machine-independent half needs to know of a stream.
typedef struct {
    const char *name;
    int id;
    Clock clock;
    const Clock *host; // whatever the host has waited for, all work it issues later comes after
} StreamOrder;

StreamOrder *stream_order(Stream *stream);
const Ledger *device_ledger(const Device *device);

#endif
