// Counts large allocations of a test program while armed: so that "no memory is taken after the first step" is measured
// and not believed. Linked into test_gpt alone; it stands in front of the C library's malloc and mmap.
#ifndef DEV_COUNT_ALLOCATIONS_H
#define DEV_COUNT_ALLOCATIONS_H

#include <stdbool.h>
#include <stddef.h>

enum { COUNTED_BYTES = 64 << 10 }; // what is smaller does not count

typedef struct {
    long own;         // by our code or a library we compute with
    long mpi;         // by MPI's libraries
    long files;       // read-only file maps
    size_t mpi_bytes; // of those by MPI
    void *last_own;   // the code address of the last one, for the message
} Allocations;

bool allocations_counted(void); // false in builds whose sanitizer owns malloc
void allocations_arm(void);
Allocations allocations_disarm(void);

#endif
