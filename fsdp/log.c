#ifndef _GNU_SOURCE
#define _GNU_SOURCE // clock_gettime, fileno
#endif
#include "log.h"
#include "error.h"
#include <errno.h>    // errno
#include <math.h>     // isfinite
#include <stdarg.h>   // va_list
#include <stdio.h>    // fopen, fprintf
#include <stdlib.h>   // calloc, free
#include <string.h>   // strerror
#include <sys/file.h> // flock
#include <sys/stat.h> // mkdir
#include <time.h>     // clock_gettime
#include <unistd.h>   // isatty, readlink

struct Log {
    FILE *file;
    char path[1024];
    bool terminal, bar_shown;
    double last_line; // when a train line was last printed
};

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

void folder_make(const char *path, const char *option) {
    char part[1024];
    snprintf(part, sizeof part, "%s", path);
    for (char *slash = part + 1;; slash++) {
        if (*slash != '/' && *slash != '\0') continue;
        char kept = *slash;
        *slash = '\0';
        if (mkdir(part, 0777) != 0 && errno != EEXIST)
            die(EXIT_CODE_FAILURE, "choose a folder that can be written to", "%s %s: cannot make folder %s: %s",
                option, path, part, strerror(errno));
        *slash = kept;
        if (kept == '\0') return;
    }
}

// Whether a person watches. mpirun gives rank 0 a terminal of its own wherever its output goes, so the parent's output,
// where the system tells (Linux), must be one too.
static bool watched(void) {
    char link[64], target[256];
    if (!isatty(STDOUT_FILENO)) return false;
    snprintf(link, sizeof link, "/proc/%d/fd/1", (int)getppid());
    ssize_t length = readlink(link, target, sizeof target - 1);
    if (length < 0) return true;
    target[length] = '\0';
    return strncmp(target, "/dev/pts/", 9) == 0 || strncmp(target, "/dev/tty", 8) == 0 ||
           strcmp(target, "/dev/console") == 0;
}

// Whether a run got as far as a step. One that did not, because its input was faulty say, may be run again.
static bool holds_run(FILE *file) {
    char text[256];
    bool found = false;
    while (!found && fgets(text, sizeof text, file)) found = strstr(text, "{\"event\":\"train\"") != NULL;
    return found;
}

// The log of a new run: locked as long as this process lives, so that no other run writes into it, and empty.
static FILE *file_claim(const char *path, const char *output) {
    FILE *file = fopen(path, "a+");
    if (!file)
        die(EXIT_CODE_FAILURE, "choose an --output that can be written to", "cannot write %s: %s", path,
            strerror(errno));
    if (flock(fileno(file), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        die(EXIT_CODE_FAILURE, "wait for it, or choose another --output", "--output %s: another run is using it",
            output);
    if (holds_run(file))
        die(EXIT_CODE_USAGE, "choose another --output (--resume auto, to go on, will come with checkpoints)",
            "--output %s already holds a run (log.jsonl)", output);
    if (ftruncate(fileno(file), 0) != 0)
        die(EXIT_CODE_FAILURE, "choose an --output that can be written to", "cannot write %s: %s", path,
            strerror(errno));
    return file;
}

Log *log_open(bool active, const char *output) {
    if (!active) return NULL;
    Log *log = (Log *)calloc(1, sizeof *log);
    if (!log) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    log->terminal = watched();
    if (!output) return log;
    folder_make(output, "--output");
    snprintf(log->path, sizeof log->path, "%s/log.jsonl", output);
    log->file = file_claim(log->path, output);
    return log;
}

void log_close(Log *log) {
    if (!log) return;
    if (log->file && fclose(log->file) != 0)
        die(EXIT_CODE_FAILURE, "is the disk full?", "cannot write %s: %s", log->path, strerror(errno));
    if (log->bar_shown) printf("\n");
    free(log);
}

// ---------------------------------------------------------------------------------------------------------------------
// console

// 0:07, 3:25, 2:14:09
static const char *duration(double seconds, char *text, int size) {
    long s = seconds > 0 && seconds < 1e9 ? (long)(seconds + 0.5) : 0;
    if (s >= 3600)
        snprintf(text, (size_t)size, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
    else
        snprintf(text, (size_t)size, "%ld:%02ld", s / 60, s % 60);
    return text;
}

static void bar_clear(Log *log) {
    if (log->bar_shown) printf("\r\033[K");
    log->bar_shown = false;
}

static void bar_draw(Log *log, const LogTrain *train) {
    enum { WIDTH = 40 };
    char bar[WIDTH + 1], left[32];
    double done = (double)train->step / (double)train->steps;
    for (int i = 0; i < WIDTH; i++) bar[i] = i < (int)(done * WIDTH) ? '=' : ' ';
    bar[WIDTH] = '\0';
    printf("\r[%s] %3.0f %%  loss %.4f  %s left\033[K", bar, 100 * done, train->loss,
           duration(train->seconds_left, left, sizeof left));
    log->bar_shown = true;
}

void log_say(Log *log, const char *format, ...) {
    if (!log) return;
    va_list arguments;
    bar_clear(log);
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
    fflush(stdout);
}

// ---------------------------------------------------------------------------------------------------------------------
// log.jsonl

// A number as JSON: what is not finite becomes null.
static const char *number(double x, char *text, int size) {
    if (isfinite(x))
        snprintf(text, (size_t)size, "%.9g", x);
    else
        snprintf(text, (size_t)size, "null");
    return text;
}

__attribute__((format(printf, 2, 3))) static void line(Log *log, const char *format, ...) {
    if (!log || !log->file) return;
    va_list arguments;
    va_start(arguments, format);
    int written = vfprintf(log->file, format, arguments);
    va_end(arguments);
    if (written < 0 || fputc('\n', log->file) == EOF || fflush(log->file) != 0)
        die(EXIT_CODE_FAILURE, "is the disk full?", "cannot write %s: %s", log->path, strerror(errno));
}

void log_config(Log *log, json_t *fields) {
    json_t *event = json_pack("{s:s}", "event", "config");
    json_object_update(event, fields);
    char *text = json_dumps(event, JSON_COMPACT | JSON_REAL_PRECISION(9));
    line(log, "%s", text ? text : "{}");
    free(text);
    json_decref(event);
    json_decref(fields);
}

// The console's line, and whom to look for when one rank holds up the others.
static void train_say(Log *log, const LogTrain *t) {
    char left[32], exposed[48] = "", slow[160] = "";
    if (t->rank_ms[2] > 1.1 * t->rank_ms[1])
        snprintf(slow, sizeof slow, " | rank %d on %.64s is %.0f%% slower", t->slowest_rank, t->slowest_host,
                 100 * (t->rank_ms[2] / t->rank_ms[1] - 1));
    if (t->exposed_ms > 0) snprintf(exposed, sizeof exposed, " | exposed %6.2f ms", t->exposed_ms);
    log_say(
        log,
        "step %6lld/%lld | loss %.6f | norm %8.4f | lr %.2e | %8.2f ms%s | %7.0f tok/s | mfu %4.1f%% | %s left%s",
        (long long)t->step, (long long)t->steps, t->loss, t->grad_norm, t->lr, t->ms, exposed, t->tokens_per_s,
        100 * t->mfu, duration(t->seconds_left, left, sizeof left), slow);
}

// [minimum,median,maximum]
static const char *three(const double *x, char *text, int size) {
    char a[32], b[32], c[32];
    snprintf(text, (size_t)size, "[%s,%s,%s]", number(x[0], a, sizeof a), number(x[1], b, sizeof b),
             number(x[2], c, sizeof c));
    return text;
}

void log_train(Log *log, const LogTrain *train) {
    if (!log) return;
    char loss[32], norm[32], lr[32], ms[32], speed[32], mfu[32], exposed[32], rank[112], gather[112];
    double time = now();
    if (train->step <= 10 || train->step == train->steps || time - log->last_line >= 1) {
        train_say(log, train);
        log->last_line = time;
    }
    if (log->terminal) {
        bar_draw(log, train);
        fflush(stdout);
    }
    line(log,
         "{\"event\":\"train\",\"step\":%lld,\"loss\":%s,\"grad_norm\":%s,\"lr\":%s,\"tokens\":%lld,\"ms\":%s,"
         "\"tokens_per_s\":%s,\"mfu\":%s,\"skipped\":false,\"exposed_ms\":%s,\"rank_ms\":%s,\"gather_wait_ms\":%s,"
         "\"slowest_rank\":%d,\"slowest_host\":\"%s\"}",
         (long long)train->step, number(train->loss, loss, sizeof loss),
         number(train->grad_norm, norm, sizeof norm), number(train->lr, lr, sizeof lr), (long long)train->tokens,
         number(train->ms, ms, sizeof ms), number(train->tokens_per_s, speed, sizeof speed),
         number(train->mfu, mfu, sizeof mfu), number(train->exposed_ms, exposed, sizeof exposed),
         three(train->rank_ms, rank, sizeof rank), three(train->gather_wait_ms, gather, sizeof gather),
         train->slowest_rank, train->slowest_host);
}

void log_val(Log *log, int64_t step, double loss, double loss_late, int64_t tokens) {
    char text[32], late[32];
    log_say(log, "validation at step %lld: loss %.6f over %lld tokens (second half of the context %.6f)",
            (long long)step, loss, (long long)tokens, loss_late);
    line(log, "{\"event\":\"val\",\"step\":%lld,\"loss\":%s,\"tokens\":%lld,\"loss_late\":%s}", (long long)step,
         number(loss, text, sizeof text), (long long)tokens, number(loss_late, late, sizeof late));
}

void log_end(Log *log, int64_t step, const char *reason) {
    line(log, "{\"event\":\"end\",\"step\":%lld,\"reason\":\"%s\"}", (long long)step, reason);
}
