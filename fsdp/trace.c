#include "trace.h"
#include "error.h"
#include <errno.h>  // errno
#include <stdio.h>  // fopen, fprintf
#include <string.h> // memset, strerror

enum { NAME = 64, PIECE = 128 };

// A span as it travels.
typedef struct {
    char name[NAME], stream[NAME];
    double begin, end;
} Record;

static FILE *file_open(const char *path) {
    FILE *file = fopen(path, "w");
    if (!file) die(EXIT_CODE_FAILURE, "choose another --trace", "cannot write %s: %s", path, strerror(errno));
    return file;
}

void trace_claim(const char *path) { fclose(file_open(path)); }

static void records_make(Record *records, const Span *spans, int64_t count) {
    memset(records, 0, PIECE * sizeof *records);
    for (int64_t i = 0; i < count; i++) {
        const Span *span = &spans[i];
        snprintf(records[i].name, NAME, span->unit ? "%s %s" : "%s", span->phase, span->unit);
        snprintf(records[i].stream, NAME, "%s", span->stream);
        records[i].begin = span->begin;
        records[i].end = span->end;
    }
}

// Lanes are numbered in the order in which their streams are seen, so each gets its name with its first span.
typedef struct {
    char names[DEVICE_MAX_STREAMS][NAME];
    int count;
} Lanes;

static int lane_of(FILE *file, Lanes *lanes, int rank, const char *stream) {
    int lane = 0;
    while (lane < lanes->count && strcmp(lanes->names[lane], stream) != 0) lane++;
    if (lane < lanes->count || lane == DEVICE_MAX_STREAMS) return lane;
    snprintf(lanes->names[lanes->count++], NAME, "%s", stream);
    fprintf(file, ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}}",
            rank, lane, stream);
    return lane;
}

// What is not over at the end of the run is left out.
static void records_write(FILE *file, Lanes *lanes, int rank, const Record *records, int64_t count, double start) {
    for (int64_t i = 0; i < count; i++) {
        const Record *r = &records[i];
        if (r->end == 0) continue;
        int lane = lane_of(file, lanes, rank, r->stream);
        fprintf(file, ",\n{\"ph\":\"X\",\"name\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f}", r->name,
                rank, lane, 1e6 * (r->begin - start), 1e6 * (r->end - r->begin));
    }
}

static void share(Comm *comm, Event *sent, void *data, size_t bytes, int root) {
    comm_broadcast(comm, data, bytes, root);
    event_record(sent, comm_stream(comm));
    event_synchronize(sent);
}

// One rank's spans go to rank 0's file.
static void rank_write(FILE *file, int rank, const Span *spans, int64_t count, double start, Comm *comm,
                       Event *sent) {
    static Record records[PIECE];
    char host[NAME];
    Lanes lanes = {.count = 0};
    snprintf(host, sizeof host, "%s", comm_host());
    share(comm, sent, &count, sizeof count, rank);
    share(comm, sent, host, sizeof host, rank);
    if (file)
        fprintf(file,
                "%s\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":\"rank %d on %s\"}}",
                rank ? "," : "", rank, rank, host);
    for (int64_t first = 0; first < count; first += PIECE) {
        int64_t n = count - first < PIECE ? count - first : (int64_t)PIECE;
        if (rank == comm_rank(comm)) records_make(records, spans + first, n);
        share(comm, sent, records, sizeof records, rank);
        if (file) records_write(file, &lanes, rank, records, n, start);
    }
}

int64_t trace_write(const char *path, Device *device, Comm *comm) {
    const Span *spans;
    int64_t count = (int64_t)device_spans(device, &spans);
    FILE *file = comm_rank(comm) == 0 ? file_open(path) : NULL;
    Event *sent = event_create(device, "trace sent");
    double start = count > 0 ? spans[0].begin : 0;
    comm_phase(comm, "writing of the trace");
    share(comm, sent, &start, sizeof start, 0);
    if (file) fprintf(file, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
    for (int rank = 0; rank < comm_size(comm); rank++) rank_write(file, rank, spans, count, start, comm, sent);
    if (!file) return count;
    fprintf(file, "\n]}\n");
    if (ferror(file) | (fclose(file) != 0))
        die(EXIT_CODE_FAILURE, "is the disk full?", "cannot write %s: %s", path, strerror(errno));
    return count;
}
