// trace: the spans of all ranks' streams as one file that chrome://tracing and Perfetto (ui.perfetto.dev) show: a process
// a rank, a lane a stream, times in microseconds (Trace Event Format, Google, "X" and "M" events).
#ifndef FSDP_TRACE_H
#define FSDP_TRACE_H

#include "comm.h"

#ifdef __cplusplus
extern "C" {
#endif

// Checks on rank 0, before time is spent, that path can be written, and empties it.
void trace_claim(const char *path);

// Writes what the ranks' devices have kept; rank 0 writes, the others send it theirs piece by piece. Collective, and
// waits. Returns how many spans rank 0 had.
int64_t trace_write(const char *path, Device *device, Comm *comm);

#ifdef __cplusplus
}
#endif
#endif
