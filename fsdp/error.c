#ifndef _GNU_SOURCE
#define _GNU_SOURCE // nanosleep
#endif
#include "error.h"
#include <stdarg.h> // va_list
#include <stdio.h>  // vsnprintf, fputs
#include <stdlib.h> // exit
#include <time.h>   // nanosleep

static const char *program = "fsdp";
static int own_rank = 0, all_ranks = 1;
static void (*end_all)(int code) = NULL;

void error_program(const char *name) { program = name; }

void error_rank(int rank, int ranks) {
    own_rank = rank;
    all_ranks = ranks;
}

void error_ender(void (*end)(int code)) { end_all = end; }

// One write per message, so that lines of several ranks do not mix.
static void say(const char *hint, const char *format, va_list arguments) {
    char line[2048], tag[32] = "";
    char text[1536];
    vsnprintf(text, sizeof text, format, arguments);
    if (all_ranks > 1) snprintf(tag, sizeof tag, " [rank %d]", own_rank);
    snprintf(line, sizeof line, "%s%s: %s%s%s\n", program, tag, text, hint ? ". HINT: " : "", hint ? hint : "");
    fflush(stdout);
    fputs(line, stderr);
    fflush(stderr);
}

// A fault that all ranks meet is to be said once: each gives those below it time to say it and to end the run.
static void let_others_speak(void) {
    int tenths = own_rank == 0 ? 0 : own_rank < 20 ? 10 + own_rank : 30;
    const struct timespec pause = {tenths / 10, tenths % 10 * 100000000L};
    if (tenths > 0) nanosleep(&pause, NULL);
}

void die(int code, const char *hint, const char *format, ...) {
    va_list arguments;
    let_others_speak();
    va_start(arguments, format);
    say(hint, format, arguments);
    va_end(arguments);
    if (end_all) end_all(code);
    exit(code);
}

void warn(const char *hint, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(hint, format, arguments);
    va_end(arguments);
}
