// For tests that run under mpirun: who speaks, and numbers whose sum depends on the order.
#ifndef DEV_TEST_RANKS_H
#define DEV_TEST_RANKS_H

#include "comm.h"
#include "error.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

// Rank 0 reports. Of the others only what a failed assertion says on stderr is seen (in TAP the summary is on stdout);
// it ends all ranks, which would otherwise wait for one that has given up. Call after comm_start; include after cmocka.
static void ranks_quieten(void) {
    if (comm_world_size() > 1) setenv("CMOCKA_TEST_ABORT", "1", 1);
    if (comm_world_rank() == 0) return;
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (!freopen("/dev/null", "w", stdout)) die(EXIT_CODE_FAILURE, NULL, "cannot open /dev/null");
}

// A number that looks random and depends on its arguments alone (SplitMix64's mixing function).
static inline uint64_t mixed(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t x = a * 0x9e3779b97f4a7c15u + b * 0xd1342543de82ef95u + c * 0xbf58476d1ce4e5b9u;
    for (int i = 0; i < 2; i++) {
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        x ^= x >> 31;
    }
    return x;
}

// Floats of either sign and very different magnitudes, below 1: their sum depends on the order.
static inline float float_of(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t x = mixed(a, b, c);
    return ldexpf((float)(int32_t)(uint32_t)x, -31 - (int)(x >> 32 & 15));
}

#endif
