// For tests that run under mpirun: who speaks.
#ifndef DEV_TEST_RANKS_H
#define DEV_TEST_RANKS_H

#include "comm.h"
#include "error.h"
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

#endif
