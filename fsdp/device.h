// device: memory in named arenas, streams, events, and the checker that proves the streams' order.
//
// MEMORY. Everything the program computes with is obtained here, under the name of an arena ("moments", "slots", …).
// The ledger is the list of arenas with their bytes. A run first builds itself on a planning device, which hands out
// address space that nobody may touch; that ledger is the plan. The real device then takes exactly the plan's arenas
// before the first step, touches every page, and refuses to hand out a byte more. So plan and ledger agree to the byte,
// and memory that is not there is missed at the start, not in week two.
//
// STREAMS. Work on one stream happens in the order it was issued; between streams only events order anything:
//
//     compute stream   ──f0──┐ record(A)   wait(B) ──f1──
//     comm stream            └ wait(A) ──gather── record(B)
//
// On the CPU the compute stream is the main thread itself: an op is done when its call returns. Every other stream is a
// queue served by one thread per process, which polls its tasks with short sleeps, so that a transfer costs compute next
// to nothing. The interface is the one that CUDA streams and events need.
//
// ORDER. Each stream carries a vector clock; an event carries the clock of the stream that recorded it; waiting joins
// the two. Whoever shares memory between streams declares its accesses (stream_reads, stream_writes); an access that no
// event orders after the last conflicting one ends the program with both places named, whether or not it would have
// gone wrong this time. It costs some additions per unit and is always on.
#ifndef FSDP_DEVICE_H
#define FSDP_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The two types that tensors are stored in; sums are fp32 or wider everywhere.
typedef enum { F32 = 0, BF16 = 1 } DType;
static inline size_t dtype_size(DType dtype) { return dtype == BF16 ? 2 : 4; }

// ---------------------------------------------------------------------------------------------------------------------
// memory

typedef struct Device Device;

enum { DEVICE_ALIGN = 64, DEVICE_MAX_ARENAS = 32, DEVICE_MAX_THREADS = 4096 };

typedef struct {
    const char *name; // a string constant
    size_t bytes;     // handed out, each piece rounded up to DEVICE_ALIGN
    size_t planned;   // the plan's bytes; SIZE_MAX on a device without a plan
} Arena;

// A device that hands out untouchable addresses and only counts.
Device *device_plan(void);

// A real device with room for exactly the arenas of plan; NULL: for whatever is asked (tests, tools).
Device *device_open(const Device *plan);

// Gives everything back, ends the streams' thread.
void device_close(Device *device);

bool device_planning(const Device *device);

// bytes of zeroed memory, aligned to DEVICE_ALIGN (to 2 MiB from 4 MiB on), that live until device_close. Dies when the
// machine has no more, or when the arena would outgrow its plan.
void *device_alloc(Device *device, const char *arena, size_t bytes);

// The same in the host's memory, which a device can copy from and to quickly. On a CPU there is no difference.
void *device_alloc_host(Device *device, const char *arena, size_t bytes);

// Copies between host and device memory, after the compute issued so far; the data is there on return.
void device_copy_in(Device *device, void *to, const void *from, size_t bytes);
void device_copy_out(Device *device, void *to, const void *from, size_t bytes);

// An arena that is one piece of scratch of at least `bytes`, contents undefined: grows to the largest ever asked (an
// earlier pointer is then void), which under a plan it already is.
void *device_scratch(Device *device, const char *arena, size_t bytes);

// The ledger: arena number i, or NULL past the last.
const Arena *device_arena(const Device *device, int i);
size_t device_arena_bytes(const Device *device, const char *name); // 0 when there is none of that name
size_t device_bytes(const Device *device);

// True when both ledgers hold the same arenas with the same bytes.
bool device_same_ledger(const Device *a, const Device *b);

// The process's peak resident memory so far, and what of it is now maps of files (its own code, libraries, shards): pages
// that the system can drop at will. In bytes.
size_t device_peak_bytes(void);
size_t device_file_bytes(void);

// ---------------------------------------------------------------------------------------------------------------------
// cores (CPU)

// Gives the process its share of the node's cores: cores local_rank·n/local_ranks … of the n there are, all of them when
// there are fewer cores than ranks. keep: leave a binding that somebody chose. Without keep the launcher's own (default)
// binding is undone first: the node's cores are then those of the nearest ancestor process with more of them. Call before
// the first OpenMP region. *threads > 0 is kept; otherwise it becomes OMP_NUM_THREADS if set, else the share, at least 1.
// text gets a line that says what the rank runs on.
void device_cores(int local_rank, int local_ranks, bool keep, int *threads, char *text, size_t size);

// ---------------------------------------------------------------------------------------------------------------------
// streams and events

typedef struct Stream Stream;
typedef struct Event Event;

enum { DEVICE_MAX_STREAMS = 8 };

Stream *device_compute(Device *device);                // ops run here
Stream *stream_open(Device *device, const char *name); // another one
const char *stream_name(const Stream *stream);

// An event counts as happened until it is first recorded. It is recorded on one and the same stream.
Event *event_create(Device *device, const char *name);
void event_record(Event *event, Stream *stream); // happens when all work issued on stream so far is done
void stream_wait(Stream *stream, Event *event);  // later work on stream happens after event's last record
void event_synchronize(Event *event);            // the host waits

// A task of a stream other than compute: called again and again by the streams' thread until it returns true. `argument`
// (at most STREAM_TASK_BYTES) is copied and may be changed from call to call.
typedef bool (*StreamTask)(void *argument);
enum { STREAM_TASK_BYTES = 384 };
void stream_submit(Stream *stream, StreamTask task, const void *argument, size_t bytes);

// Seconds the main thread has spent waiting in stream_wait(compute, …) and event_synchronize so far.
double device_waited(const Device *device);

// ---------------------------------------------------------------------------------------------------------------------
// timeline

// What a stream did from begin to end, in seconds since the epoch. Names are kept by pointer.
typedef struct {
    const char *stream, *phase, *unit; // unit: NULL where phase says it all
    double begin, end;                 // end 0: not over
} Span;

// From now on keeps the first `most` spans, in the arena "trace": tasks of streams under their label, what the main thread
// waits for, and whatever is put between span_begin and span_end, which may be nested.
void device_trace(Device *device, size_t most);
size_t device_spans(const Device *device, const Span **spans); // once the streams are idle

int64_t span_begin(Stream *stream, const char *phase, const char *unit);
void span_end(Stream *stream, int64_t span);

// The name of the tasks that are submitted from now on.
void stream_label(Stream *stream, const char *label);

// ---------------------------------------------------------------------------------------------------------------------
// order

// Memory that several streams touch, by its latest accesses. Zero is a fresh one.
typedef struct {
    const char *name;
    struct {
        uint64_t clock;
        const char *place;
    } read[DEVICE_MAX_STREAMS], write[DEVICE_MAX_STREAMS];
} Shared;

// Declares that the next work issued on stream reads or writes memory. place names the code for the message.
void stream_reads(Stream *stream, Shared *memory, const char *place);
void stream_writes(Stream *stream, Shared *memory, const char *place);

#ifdef __cplusplus
}
#endif
#endif
