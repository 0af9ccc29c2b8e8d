// comm: processes and what they tell each other, issued on a stream.
//
// A Comm is a group of ranks. Collectives are called by every rank of the group in the same order, return at once, and
// happen on the group's stream; whoever needs the result orders itself after it with an event. Buffers must stay as they
// are until then.
//
// The tree. comm_reduce_scatter adds up one binary tree over the ranks' numbers, padded to a power of two with absent
// ranks skipped: ((0+1)+(2+3))+((4+5)+…). The order never depends on timing, and a power of two of ranks sums what a
// single rank with the same leaves in the same tree would. It is built from an exchange of slices and a local sum.
//
// Opening and closing groups waits, and calls MPI itself: no group may have work under way then.
//
// A collective that takes longer than the timeout ends the job: the message names rank, host and what was being done.
#ifndef FSDP_COMM_H
#define FSDP_COMM_H

#include "device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Comm Comm;

typedef enum { COMM_I64_SUM, COMM_U32_MAX, COMM_F64_SUM } CommOp;

// Starts the processes' communication; call first thing in main. From here on die() ends every rank. Dies when a
// launcher started several copies that do not see each other.
void comm_start(int *argc, char ***argv);

// Rank 0 alone between comm_first and comm_others, all others wait there: so that a fault of the input is reported by
// one rank, once. A die() of rank 0 in between ends the others with the same exit code, quietly.
void comm_first(void);
void comm_others(void);

// Waits for all ranks and ends communication.
void comm_end(void);

int comm_world_rank(void), comm_world_size(void);
int comm_local_rank(void), comm_local_size(void); // among the ranks on this node
const char *comm_host(void);
// Whether somebody chose the cores this rank is bound to. Open MPI's default binds one or two ranks to a core each, which
// its environment shows as a binding without a policy; that does not count. Under other launchers any binding does.
bool comm_bound_on_purpose(void);

// The group of all ranks on a stream of its own. timeout in seconds.
Comm *comm_world(Device *device, double timeout);

// A group that only counts, for planning: rank `rank` of `ranks`.
Comm *comm_plan(Device *device, int rank, int ranks);

// The group of count ranks of comm that begins with rank `first` and goes on in steps of `stride`, on a stream of its own.
// Called by its members alone, all of which take part, and waits.
Comm *comm_group(Comm *comm, int first, int stride, int count);
void comm_close(Comm *comm);

int comm_rank(const Comm *comm), comm_size(const Comm *comm);
Stream *comm_stream(const Comm *comm);

// Names what is going on ("gather h.3"), for the timeout's message and traces; kept by pointer.
void comm_phase(Comm *comm, const char *phase);

// all (ranks × bytes): every rank's slice (bytes) in rank order.
void comm_all_gather(Comm *comm, void *all, const void *slice, size_t bytes);

// Each rank's leaf, of dtype, holds a piece of count elements for every rank p, at p · stride. sum (count), in fp32: the
// sum along the tree, over all ranks, of the pieces for this one. exchange: scratch of comm_exchange_elements, into which the
// others' pieces come, a part at a time. partials[0 … carries-1], if any, are then added as a binary counter carries:
// sum = partials[carries-1] + ( … + (partials[0] + tree)). sum may be one of the partials, or this rank's own piece of an
// fp32 leaf.
typedef struct {
    float *sum;
    const void *leaf;
    DType dtype;
    size_t count, stride;
    void *exchange;
    const float *partials[32];
    int carries;
} CommReduce;
size_t comm_exchange_elements(int ranks, size_t count); // that it needs for a count up to this
void comm_reduce_scatter(Comm *comm, const CommReduce *reduce);

// In place over count elements; exact and independent of order for each CommOp (F64_SUM only when at most one rank's
// element is not zero).
void comm_all_reduce(Comm *comm, void *values, size_t count, CommOp op);

void comm_broadcast(Comm *comm, void *data, size_t bytes, int root);
void comm_barrier(Comm *comm); // waits, by sleeping

// Bytes this rank received since the group began, by kind, for the report.
typedef struct {
    double gathered, reduced;
} CommTraffic;
CommTraffic comm_traffic(const Comm *comm);

#ifdef __cplusplus
}
#endif
#endif
