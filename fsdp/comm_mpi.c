// comm over MPI. The streams' thread alone calls MPI once the streams are at work (MPI_THREAD_SERIALIZED): each
// collective is a task that starts a non-blocking operation on its first call and tests it on the later ones, because a
// blocking wait would take a good part of a core from compute.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE // gethostname, nanosleep, sched_getaffinity
#endif
#include "comm.h"
#include "error.h"
#include <assert.h> // assert
#include <mpi.h>    // everything MPI_
#include <sched.h>  // sched_getaffinity
#include <stdio.h>  // snprintf
#include <stdlib.h> // calloc, exit, getenv
#include <string.h> // memcpy
#include <time.h>   // clock_gettime, nanosleep
#include <unistd.h> // gethostname
#ifdef __SSE2__
#include <emmintrin.h> // _mm_stream_ps
#endif

enum { TAG_EXCHANGE = 1, TAG_GROUP, UNIT_BYTES = 64 };

// A reduction's exchange goes in parts, two of them under way. Together the ranks' parts have EXCHANGE elements: enough to
// keep a network busy, few enough to be added up while they are in the cache.
enum { EXCHANGE = 1 << 19, LEAST_PART = 1 << 12, PARTS = 2 };

struct Comm {
    Device *device;
    MPI_Comm mpi;
    int rank, ranks;
    double timeout;
    const char *phase;
    Stream *stream;
    Event *done;           // for the calls that wait
    MPI_Request *requests; // 2 · PARTS · ranks, of the collective at work
    const char **leaves;   // (ranks)  where the parts to be added lie
    CommTraffic traffic;
};

// The process's own.
static int world_rank = 0, world_size = 1, local_rank = 0, local_size = 1;
static char host[256] = "localhost";
static bool started = false, first_alone = false;
static MPI_Datatype unit_type; // UNIT_BYTES bytes, so that counts of large buffers fit an int

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// ---------------------------------------------------------------------------------------------------------------------
// processes

// Waits for one request by sleeping; only while the streams are idle.
static void request_await(MPI_Request *request) {
    const struct timespec pause = {0, 200 * 1000};
    for (int done = 0;;) {
        MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (done) return;
        nanosleep(&pause, NULL);
    }
}

static void finalize(void) {
    MPI_Type_free(&unit_type);
    MPI_Finalize();
    started = false;
}

static void tell_others(int code) {
    MPI_Request request;
    MPI_Ibcast(&code, 1, MPI_INT, 0, MPI_COMM_WORLD, &request);
    request_await(&request);
}

// What die() ends the program with: quietly while the others wait for rank 0 to have looked, else by force. MPI_Abort may
// then meet the streams' thread inside MPI; all it has left to do is to end both.
static void end_all_ranks(int code) {
    if (started && first_alone && world_rank == 0) {
        tell_others(code);
        finalize();
        exit(code);
    }
    if (started && world_size > 1) MPI_Abort(MPI_COMM_WORLD, code);
    if (started) finalize();
    exit(code);
}

// A launcher of another MPI starts N processes that each believe to be alone; they would overwrite each other's files.
static void refuse_strangers(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS",
                                        "MPI_LOCALNRANKS"};
    for (size_t i = 0; world_size == 1 && i < sizeof names / sizeof names[0]; i++) {
        const char *value = getenv(names[i]);
        if (value && atoi(value) > 1)
            die(EXIT_CODE_FAILURE,
                "start it with the mpirun of the MPI it was built with, or under Slurm with srun --mpi=pmix or --mpi=pmi2",
                "%s=%s processes were started on %s, but this one sees only itself", names[i], value, host);
    }
}

void comm_start(int *argc, char ***argv) {
    int provided;
    MPI_Comm node;
    MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided);
    started = true;
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
    MPI_Comm_rank(node, &local_rank);
    MPI_Comm_size(node, &local_size);
    MPI_Comm_free(&node);
    MPI_Type_contiguous(UNIT_BYTES, MPI_BYTE, &unit_type);
    MPI_Type_commit(&unit_type);
    gethostname(host, sizeof host - 1);
    error_rank(world_rank, world_size);
    error_ender(end_all_ranks);
    if (provided < MPI_THREAD_SERIALIZED)
        die(EXIT_CODE_FAILURE, "build MPI with thread support", "this MPI gives thread level %d, needed %d",
            provided, MPI_THREAD_SERIALIZED);
    refuse_strangers();
}

void comm_first(void) {
    if (world_size == 1) return;
    first_alone = true;
    if (world_rank == 0) return;
    int code = 0;
    MPI_Request request;
    MPI_Ibcast(&code, 1, MPI_INT, 0, MPI_COMM_WORLD, &request);
    request_await(&request);
    if (code == 0) return;
    finalize();
    exit(code);
}

void comm_others(void) {
    if (world_size > 1 && world_rank == 0) tell_others(0);
    first_alone = false;
}

void comm_end(void) {
    MPI_Request request;
    MPI_Ibarrier(MPI_COMM_WORLD, &request);
    request_await(&request);
    finalize();
}

int comm_world_rank(void) { return world_rank; }
int comm_world_size(void) { return world_size; }
int comm_local_rank(void) { return local_rank; }
int comm_local_size(void) { return local_size; }
const char *comm_host(void) { return host; }

// Whether Open MPI's launcher was given this setting, with `part` in its value.
static bool launcher_set(const char *setting, const char *part) {
    char name[128];
    snprintf(name, sizeof name, "OMPI_MCA_%s", setting);
    return getenv(name) && strstr(getenv(name), part);
}

bool comm_bound_on_purpose(void) {
    cpu_set_t set;
    if (getenv("OMPI_COMM_WORLD_SIZE"))
        return (launcher_set("hwloc_base_binding_policy", "") &&
                !launcher_set("hwloc_base_binding_policy", "none")) ||
               launcher_set("hwloc_base_cpu_set", "") || launcher_set("rmaps_base_mapping_policy", "PE=") ||
               launcher_set("rmaps_base_mapping_policy", "pe=") || launcher_set("rmaps_rank_file_path", "") ||
               launcher_set("orte_rankfile", "");
    CPU_ZERO(&set);
    return sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) < sysconf(_SC_NPROCESSORS_ONLN);
}

// ---------------------------------------------------------------------------------------------------------------------
// groups

static Comm *comm_new(Device *device, const char *name, int rank, int ranks, double timeout) {
    Comm *comm = (Comm *)calloc(1, sizeof *comm);
    if (!comm) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    comm->device = device;
    comm->rank = rank;
    comm->ranks = ranks;
    comm->timeout = timeout;
    comm->phase = "start";
    comm->stream = stream_open(device, name);
    comm->done = event_create(device, "comm done");
    return comm;
}

static Comm *comm_over(Device *device, const char *name, MPI_Comm mpi, double timeout) {
    int rank, ranks;
    MPI_Comm_rank(mpi, &rank);
    MPI_Comm_size(mpi, &ranks);
    Comm *comm = comm_new(device, name, rank, ranks, timeout);
    comm->mpi = mpi;
    comm->requests = (MPI_Request *)calloc(2 * PARTS * (size_t)ranks, sizeof(MPI_Request));
    comm->leaves = (const char **)calloc((size_t)ranks, sizeof(char *));
    if (!comm->requests || !comm->leaves) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    return comm;
}

Comm *comm_world(Device *device, double timeout) {
    MPI_Comm copy;
    MPI_Comm_dup(MPI_COMM_WORLD, &copy);
    return comm_over(device, "comm", copy, timeout);
}

Comm *comm_plan(Device *device, int rank, int ranks) {
    assert(device_planning(device));
    return comm_new(device, "comm", rank, ranks, 0);
}

static void comm_await(Comm *comm) {
    event_record(comm->done, comm->stream);
    event_synchronize(comm->done);
}

Comm *comm_group(Comm *comm, int first, int stride, int count) {
    assert(comm->rank >= first && (comm->rank - first) % stride == 0 && (comm->rank - first) / stride < count);
    const char *name = stride == 1 ? "comm, group" : "comm, across groups";
    if (device_planning(comm->device))
        return comm_new(comm->device, name, (comm->rank - first) / stride, count, comm->timeout);
    int range[1][3] = {{first, first + (count - 1) * stride, stride}};
    MPI_Group all, some;
    MPI_Comm part;
    comm_await(comm);
    MPI_Comm_group(comm->mpi, &all);
    MPI_Group_range_incl(all, 1, range, &some);
    MPI_Comm_create_group(comm->mpi, some, TAG_GROUP, &part);
    MPI_Group_free(&some);
    MPI_Group_free(&all);
    return comm_over(comm->device, name, part, comm->timeout);
}

void comm_close(Comm *comm) {
    if (!device_planning(comm->device)) {
        comm_await(comm);
        MPI_Comm_free(&comm->mpi);
    }
    free(comm->requests);
    free(comm->leaves);
    free(comm);
}

int comm_rank(const Comm *comm) { return comm->rank; }
int comm_size(const Comm *comm) { return comm->ranks; }
Stream *comm_stream(const Comm *comm) { return comm->stream; }
void comm_phase(Comm *comm, const char *phase) {
    comm->phase = phase;
    stream_label(comm->stream, phase);
}

CommTraffic comm_traffic(const Comm *comm) { return comm->traffic; }

// ---------------------------------------------------------------------------------------------------------------------
// collectives: a task each

typedef struct {
    Comm *comm;
    const char *phase;
    double begun; // 0: not yet
    int first;    // of the requests to be tested
    int requests; // started and not yet done
} Task;

static Task task_of(Comm *comm) { return (Task){.comm = comm, .phase = comm->phase}; }

// True on the first call of a task.
static bool task_begins(Task *task) {
    if (task->begun > 0) return false;
    task->begun = now();
    return true;
}

// Tests the operation at work, and minds the time.
static bool task_tested(Task *task) {
    int done = 1;
    if (task->requests == 0) return true;
    MPI_Testall(task->requests, task->comm->requests + task->first, &done, MPI_STATUSES_IGNORE);
    if (!done && now() - task->begun > task->comm->timeout)
        die(EXIT_CODE_FAILURE, "look for a rank that died or hangs; a slow network needs a larger --comm-timeout",
            "%s has not ended after %g s (rank %d on %s)", task->phase, task->comm->timeout, world_rank, host);
    return done;
}

typedef struct {
    Task task;
    void *all;
    const void *slice;
    size_t bytes;
} GatherTask;

static bool gather_poll(void *argument) {
    GatherTask *gather = (GatherTask *)argument;
    Comm *comm = gather->task.comm;
    if (task_begins(&gather->task)) {
        char *own = (char *)gather->all + (size_t)comm->rank * gather->bytes;
        if (comm->ranks == 1) {
            if (own != gather->slice) memcpy(own, gather->slice, gather->bytes);
            return true;
        }
        bool units = gather->bytes % UNIT_BYTES == 0;
        MPI_Datatype type = units ? unit_type : MPI_BYTE;
        int count = (int)(units ? gather->bytes / UNIT_BYTES : gather->bytes);
        MPI_Iallgather(own == gather->slice ? MPI_IN_PLACE : gather->slice, count, type, gather->all, count, type,
                       comm->mpi, &comm->requests[0]);
        gather->task.requests = 1;
    }
    return task_tested(&gather->task);
}

void comm_all_gather(Comm *comm, void *all, const void *slice, size_t bytes) {
    GatherTask gather = {.task = task_of(comm), .all = all, .slice = slice, .bytes = bytes};
    assert(bytes % UNIT_BYTES == 0 || bytes < 1u << 31);
    comm->traffic.gathered += (double)(comm->ranks - 1) * (double)bytes;
    stream_submit(comm->stream, gather_poll, &gather, sizeof gather);
}

typedef struct {
    Task task;
    CommReduce reduce;
    size_t part;            // elements
    size_t started, summed; // parts
} ReduceTask;

static size_t part_most(int ranks, size_t count) {
    size_t part = EXCHANGE / (size_t)ranks > LEAST_PART ? EXCHANGE / (size_t)ranks : (size_t)LEAST_PART;
    return count < part ? count : part;
}

size_t comm_exchange_elements(int ranks, size_t count) {
    size_t part = part_most(ranks, count);
    return (size_t)ranks * part * (count > part ? PARTS : 1);
}

static const char *element(const void *array, size_t i, DType dtype) {
    return (const char *)array + i * dtype_size(dtype);
}

static size_t part_count(const ReduceTask *task, size_t part) {
    size_t left = task->reduce.count - part * task->part;
    return left < task->part ? left : task->part;
}

// Where rank r's leaf for this rank comes in.
static char *part_place(const ReduceTask *task, size_t part, int r) {
    size_t place = (part % PARTS) * (size_t)task->task.comm->ranks + (size_t)r;
    return (char *)task->reduce.exchange + place * task->part * dtype_size(task->reduce.dtype);
}

// Sums a block of all ranks' leaves along the tree, like a binary counter that counts the ranks: adding leaf r carries
// as often as r has ones at its end. A last pass joins what an absent rank would have been added to.
enum { BLOCK = 512, LEVELS = 32 };

static void add_block(float *sum, const float *left, size_t count) {
    for (size_t i = 0; i < count; i++) sum[i] = left[i] + sum[i];
}

// As fp32.
static void read_block(float *block, const char *leaf, size_t count, DType dtype) {
    if (dtype == F32) {
        memcpy(block, leaf, count * sizeof(float));
        return;
    }
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)((const uint16_t *)leaf)[i] << 16;
        memcpy(&block[i], &bits, sizeof bits);
    }
}

// Past the caches: a sum is read again only when all of them are there, and what is overwritten need not be read.
static void store_block(float *sum, const float *block, size_t count) {
#ifdef __SSE2__
    if ((uintptr_t)sum % 16 == 0 && count % 4 == 0) {
        for (size_t i = 0; i < count; i += 4) _mm_stream_ps(sum + i, _mm_loadu_ps(block + i));
        return;
    }
#endif
    memcpy(sum, block, count * sizeof(float));
}

// leaves: where each rank's part begins, which is element `begin` of the sum; first: of the block within it.
static void tree_sum_block(const CommReduce *reduce, const char **leaves, int ranks, size_t begin, size_t first,
                           size_t count) {
    float level[LEVELS][BLOCK], sum[BLOCK];
    for (int r = 0; r < ranks; r++) {
        int l = 0;
        read_block(sum, element(leaves[r], first, reduce->dtype), count, reduce->dtype);
        for (; r >> l & 1; l++) add_block(sum, level[l], count);
        if (r + 1 < ranks)
            memcpy(level[l], sum, count * sizeof(float));
        else
            for (; l < LEVELS && r >> l; l++)
                if (r >> l & 1) add_block(sum, level[l], count);
    }
    for (int c = 0; c < reduce->carries; c++) add_block(sum, reduce->partials[c] + begin + first, count);
    store_block(reduce->sum + begin + first, sum, count);
}

static void part_sum(const ReduceTask *task, size_t part) {
    const CommReduce *reduce = &task->reduce;
    const int rank = task->task.comm->rank, ranks = task->task.comm->ranks;
    const char **leaves = task->task.comm->leaves;
    size_t begin = part * task->part, count = part_count(task, part);
    for (int r = 0; r < ranks; r++) leaves[r] = part_place(task, part, r);
    leaves[rank] = element(reduce->leaf, (size_t)rank * reduce->stride + begin, reduce->dtype);
    for (size_t first = 0; first < count; first += BLOCK)
        tree_sum_block(reduce, leaves, ranks, begin, first, count - first < BLOCK ? count - first : (size_t)BLOCK);
#ifdef __SSE2__
    _mm_sfence(); // whoever is told that the sum is done sees it
#endif
}

// Sends every other rank its part and receives theirs for this one.
static void part_start(const ReduceTask *task, size_t part) {
    Comm *comm = task->task.comm;
    const CommReduce *reduce = &task->reduce;
    MPI_Request *requests = comm->requests + (part % PARTS) * 2 * (size_t)comm->ranks;
    int bytes = (int)(part_count(task, part) * dtype_size(reduce->dtype));
    for (int i = 1; i < comm->ranks; i++) {
        int from = (comm->rank + comm->ranks - i) % comm->ranks, to = (comm->rank + i) % comm->ranks;
        MPI_Irecv(part_place(task, part, from), bytes, MPI_BYTE, from, TAG_EXCHANGE, comm->mpi, requests++);
        MPI_Isend(element(reduce->leaf, (size_t)to * reduce->stride + part * task->part, reduce->dtype), bytes,
                  MPI_BYTE, to, TAG_EXCHANGE, comm->mpi, requests++);
    }
}

static bool reduce_poll(void *argument) {
    ReduceTask *task = (ReduceTask *)argument;
    const size_t parts = (task->reduce.count + task->part - 1) / task->part;
    const int ranks = task->task.comm->ranks;
    task_begins(&task->task);
    task->task.requests = 2 * (ranks - 1);
    while (task->summed < parts) {
        for (; task->started < parts && task->started < task->summed + PARTS; task->started++)
            part_start(task, task->started);
        task->task.first = (int)(task->summed % PARTS) * 2 * ranks;
        if (!task_tested(&task->task)) return false;
        part_sum(task, task->summed++);
    }
    return true;
}

void comm_reduce_scatter(Comm *comm, const CommReduce *reduce) {
    ReduceTask task = {.task = task_of(comm), .reduce = *reduce, .part = part_most(comm->ranks, reduce->count)};
    comm->traffic.reduced += (double)(comm->ranks - 1) * (double)(reduce->count * dtype_size(reduce->dtype));
    stream_submit(comm->stream, reduce_poll, &task, sizeof task);
}

typedef struct {
    Task task;
    void *values;
    size_t count;
    CommOp op;
} AllReduceTask;

static bool all_reduce_poll(void *argument) {
    AllReduceTask *task = (AllReduceTask *)argument;
    if (task->task.comm->ranks == 1) return true;
    if (task_begins(&task->task)) {
        MPI_Datatype type = task->op == COMM_I64_SUM   ? MPI_INT64_T
                            : task->op == COMM_U32_MAX ? MPI_UINT32_T
                                                       : MPI_DOUBLE;
        MPI_Iallreduce(MPI_IN_PLACE, task->values, (int)task->count, type,
                       task->op == COMM_U32_MAX ? MPI_MAX : MPI_SUM, task->task.comm->mpi,
                       &task->task.comm->requests[0]);
        task->task.requests = 1;
    }
    return task_tested(&task->task);
}

void comm_all_reduce(Comm *comm, void *values, size_t count, CommOp op) {
    AllReduceTask task = {.task = task_of(comm), .values = values, .count = count, .op = op};
    assert(count < 1u << 31);
    stream_submit(comm->stream, all_reduce_poll, &task, sizeof task);
}

typedef struct {
    Task task;
    void *data;
    size_t bytes;
    int root;
} BroadcastTask;

static bool broadcast_poll(void *argument) {
    BroadcastTask *task = (BroadcastTask *)argument;
    if (task->task.comm->ranks == 1) return true;
    if (task_begins(&task->task)) {
        MPI_Ibcast(task->data, (int)task->bytes, MPI_BYTE, task->root, task->task.comm->mpi,
                   &task->task.comm->requests[0]);
        task->task.requests = 1;
    }
    return task_tested(&task->task);
}

void comm_broadcast(Comm *comm, void *data, size_t bytes, int root) {
    BroadcastTask task = {.task = task_of(comm), .data = data, .bytes = bytes, .root = root};
    assert(bytes < 1u << 31);
    stream_submit(comm->stream, broadcast_poll, &task, sizeof task);
}

static bool barrier_poll(void *argument) {
    Task *task = (Task *)argument;
    if (task->comm->ranks == 1) return true;
    if (task_begins(task)) {
        MPI_Ibarrier(task->comm->mpi, &task->comm->requests[0]);
        task->requests = 1;
    }
    return task_tested(task);
}

void comm_barrier(Comm *comm) {
    Task task = task_of(comm);
    stream_submit(comm->stream, barrier_poll, &task, sizeof task);
    comm_await(comm);
}
