#ifndef _GNU_SOURCE
#define _GNU_SOURCE // dladdr
#endif
#include "count_allocations.h"
#include <dlfcn.h>       // dladdr
#include <errno.h>       // ENOMEM
#include <stdatomic.h>   // atomic_bool
#include <string.h>      // strstr
#include <sys/mman.h>    // PROT_WRITE
#include <sys/syscall.h> // SYS_mmap
#include <unistd.h>      // syscall

static atomic_bool armed;
static atomic_long own, mpi, files, mpi_bytes;
static _Atomic(void *) last_own;

void allocations_arm(void) {
    own = mpi = files = mpi_bytes = 0;
    last_own = NULL;
    atomic_store(&armed, true);
}

Allocations allocations_disarm(void) {
    atomic_store(&armed, false);
    return (Allocations){
        .own = own, .mpi = mpi, .files = files, .mpi_bytes = (size_t)mpi_bytes, .last_own = last_own};
}

// gcc defines the first two, clang answers the others.
#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || __has_feature(address_sanitizer) ||           \
    __has_feature(thread_sanitizer)
bool allocations_counted(void) { return false; }
#else
bool allocations_counted(void) { return true; }

static bool in_mpi(void *caller) {
    static const char *const names[] = {"libmpi", "libopen-",  "mca_",     "libpmix",
                                        "libuc",  "libfabric", "libevent", "libhwloc"};
    Dl_info info;
    if (!dladdr(caller, &info) || !info.dli_fname) return false;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strstr(info.dli_fname, names[i])) return true;
    return false;
}

static void count(size_t bytes, void *caller) {
    if (!atomic_load(&armed) || bytes < COUNTED_BYTES) return;
    if (in_mpi(caller)) {
        atomic_fetch_add(&mpi, 1);
        atomic_fetch_add(&mpi_bytes, (long)bytes);
    } else {
        atomic_fetch_add(&own, 1);
        atomic_store(&last_own, caller);
    }
}

// The C library's own entry points, which it exports under these names for programs that replace malloc.
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);
void *__libc_memalign(size_t align, size_t bytes);

void *malloc(size_t bytes) {
    count(bytes, __builtin_return_address(0));
    return __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes) {
    count(n * bytes, __builtin_return_address(0));
    return __libc_calloc(n, bytes);
}

void *realloc(void *old, size_t bytes) {
    count(bytes, __builtin_return_address(0));
    return __libc_realloc(old, bytes);
}

void *aligned_alloc(size_t align, size_t bytes) {
    count(bytes, __builtin_return_address(0));
    return __libc_memalign(align, bytes);
}

void *memalign(size_t align, size_t bytes) {
    count(bytes, __builtin_return_address(0));
    return __libc_memalign(align, bytes);
}

int posix_memalign(void **out, size_t align, size_t bytes) {
    count(bytes, __builtin_return_address(0));
    *out = __libc_memalign(align, bytes);
    return *out ? 0 : ENOMEM;
}

void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
    if (file >= 0 && !(protection & PROT_WRITE)) {
        if (atomic_load(&armed) && bytes >= COUNTED_BYTES) atomic_fetch_add(&files, 1);
    } else
        count(bytes, __builtin_return_address(0));
    return (void *)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
}
#endif
