// log: what a run tells its user and leaves behind. Rank 0 alone holds an open log; on other ranks every call does nothing.
//
// The console gets a line per step (at most one a second once the first steps are through) and, on a terminal, a progress
// bar below it. OUTPUT/log.jsonl gets one JSON object per event, flushed; floats with nine significant digits:
//
//     {"event":"config",…}                                                       once, by log_config
//     {"event":"train","step":1,"loss":…,"grad_norm":…,"lr":…,"tokens":…,"ms":…,"tokens_per_s":…,"mfu":…,"skipped":false,
//      "exposed_ms":…,"rank_ms":[min,median,max],"gather_wait_ms":[min,median,max],"slowest_rank":…,"slowest_host":…}
//     {"event":"val","step":…,"loss":…,"tokens":…,"loss_late":…}
//     {"event":"end","step":…,"reason":…}
//
// A line that cannot be written (full disk) ends the run with its file's name.
#ifndef FSDP_LOG_H
#define FSDP_LOG_H

#include <jansson.h> // json_t
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Log Log;

// Makes a folder and those above it, as far as they are missing. option: which names it, for the message.
void folder_make(const char *path, const char *option);

// active: whether this rank logs at all. output: a folder, made when missing; NULL: console only. Dies with
// EXIT_CODE_USAGE when the folder already holds a run, that is, a log with a step, with EXIT_CODE_FAILURE when another
// process is writing there.
Log *log_open(bool active, const char *output);
void log_close(Log *log);

// A line for the user, printf's way; the progress bar moves below it.
#ifdef __GNUC__
__attribute__((format(printf, 2, 3)))
#endif
void log_say(Log *log, const char *format, ...);

// fields: an object, whose reference is taken.
void log_config(Log *log, json_t *fields);

typedef struct {
    int64_t step, steps; // from 1
    double loss;         // nats per token, of the step's global batch before the update
    double grad_norm;    // before clipping
    double lr;
    int64_t tokens; // trained on so far
    double ms;      // this step's
    double tokens_per_s;
    double mfu;          // model FLOPs over the measured peak, 0 … 1
    double seconds_left; // of the run
    // Over the ranks: minimum, median, maximum of this step's
    double rank_ms[3];        // time in which a rank did not wait for communication
    double gather_wait_ms[3]; // time in which compute waited for parameters
    double exposed_ms;        // median time in which compute waited for any communication
    int slowest_rank;         // the one with the most rank_ms
    const char *slowest_host;
} LogTrain;
void log_train(Log *log, const LogTrain *train);

// loss_late: over targets in the second half of their sequence; NaN when there is none.
void log_val(Log *log, int64_t step, double loss, double loss_late, int64_t tokens);
void log_end(Log *log, int64_t step, const char *reason);

#ifdef __cplusplus
}
#endif
#endif
