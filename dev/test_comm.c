// Tests of the processes' communication:
//
//     mpirun -n N build/test_comm              N = 1, 2, 3, 4, 8: all collectives
//     mpirun -n N build/test_comm --timeout    ends with 1 within seconds: rank 1 never joins "gather of h.7"
//     mpirun -n N build/test_comm --fault      ends with 2 and one message: rank 0 finds a fault of the input
//
// Ranks other than 0 speak only when a test fails, which ends all ranks. It builds from comm_mpi.c, device.c,
// device_cpu.c and error.c alone.
#include <setjmp.h> // cmocka.h needs these four
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "test_ranks.h"
#include "comm.h"
#include "error.h"
#include <math.h>   // ldexpf
#include <stdio.h>  // freopen
#include <stdlib.h> // malloc, free, setenv
#include <string.h> // memcmp, memcpy, strcmp
#include <time.h>   // nanosleep, clock_gettime

enum { MIB = 1 << 20, GUARD = 16 };

static Device *device; // of the test that runs
static Comm *world;
static Event *done;
static int rank, ranks;

static int test_begin(void **state) {
    (void)state;
    device = device_open(NULL);
    world = comm_world(device, 60);
    done = event_create(device, "done");
    rank = comm_rank(world);
    ranks = comm_size(world);
    return 0;
}

static int test_end(void **state) {
    (void)state;
    comm_close(world);
    device_close(device);
    return 0;
}

// The host waits for what was issued on the group's stream. An event is recorded on one stream only.
static void await(Comm *comm) {
    Event *event = comm == world ? done : event_create(device, "done in the group");
    event_record(event, comm_stream(comm));
    event_synchronize(event);
}

static void sleep_milliseconds(long milliseconds) {
    const struct timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

static uint64_t nanoseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

// ---------------------------------------------------------------------------------------------------------------
// All-gather

static void bytes_fill(unsigned char *bytes, size_t count, int of_rank, int round) {
    for (size_t i = 0; i < count; i++)
        bytes[i] = (unsigned char)(i * 7 + (i >> 8) + (size_t)(of_rank * 31 + round));
}

static void gathered_check(const unsigned char *all, size_t bytes, int round) {
    unsigned char *expected = malloc(bytes);
    for (int r = 0; r < comm_size(world); r++) {
        bytes_fill(expected, bytes, r, round);
        assert_true(memcmp(all + (size_t)r * bytes, expected, bytes) == 0);
    }
    for (int i = 0; i < GUARD; i++) assert_int_equal(all[(size_t)ranks * bytes + (size_t)i], 0xee);
    free(expected);
}

static void gather_check(size_t bytes, bool in_place, int round) {
    unsigned char *all = malloc((size_t)ranks * bytes + GUARD), *slice = malloc(bytes);
    unsigned char *own = in_place ? all + (size_t)rank * bytes : slice;
    memset(all, 0xee, (size_t)ranks * bytes + GUARD);
    bytes_fill(own, bytes, rank, round);
    comm_all_gather(world, all, own, bytes);
    await(world);
    gathered_check(all, bytes, round);
    free(all);
    free(slice);
}

static void all_gather_of_any_size(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 2, 63, 64, 65, 127, 128, 1000, 4096, 100001, MIB};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int in_place = 0; in_place < 2; in_place++) gather_check(sizes[i], in_place, (int)i + in_place);
    for (int in_place = 0; in_place < 2; in_place++) gather_check(ranks > 4 ? 2 * MIB : 8 * MIB, in_place, 0);
}

// ---------------------------------------------------------------------------------------------------------------
// Reduce-scatter

// The ranks of a group, as comm_group counts them; in the world's numbers.
typedef struct {
    int first, stride, count;
} Members;

static Members everybody(void) { return (Members){0, 1, ranks}; }

// Element i of the piece for a rank in another's leaf. In bf16 it has eight significant bits. What lies further on is the
// same again; the period has nothing in common with where reductions are cut.
enum { PERIOD = 10007 };
static float leaf_of(int of_rank, int piece, size_t i, DType dtype) {
    uint64_t x = mixed((uint64_t)of_rank, (uint64_t)piece, i % PERIOD);
    if (dtype == F32) return float_of((uint64_t)of_rank, (uint64_t)piece, i % PERIOD);
    return ldexpf((float)((int)(x & 0xff) - 128), -8 - (int)(x >> 32 & 15));
}

static void leaf_set(void *leaf, size_t place, float x, DType dtype) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (dtype == F32)
        ((float *)leaf)[place] = x;
    else
        ((uint16_t *)leaf)[place] = (uint16_t)(bits >> 16);
}

// This rank's leaf: a piece for each of so many, with something else between them.
static void leaf_fill(void *leaf, int pieces, size_t count, size_t stride, DType dtype) {
    const size_t size = dtype_size(dtype);
    for (int p = 0; p < pieces; p++) {
        char *piece = (char *)leaf + (size_t)p * stride * size;
        for (size_t i = 0; i < count && i < PERIOD; i++) leaf_set(piece, i, leaf_of(rank, p, i, dtype), dtype);
        for (size_t i = PERIOD; i < count; i++) memcpy(piece + i * size, piece + (i - PERIOD) * size, size);
        for (size_t i = count; i < stride; i++) leaf_set(piece, i, 12345, dtype);
    }
}

// The sum over the leaves of members begin … begin+width-1 (a power of two), of which those beyond the last are absent;
// false: all are.
static bool tree_sum(float *sum, Members members, int begin, int width, int piece, size_t i, DType dtype) {
    float right;
    if (begin >= members.count) return false;
    if (width == 1) {
        *sum = leaf_of(members.first + begin * members.stride, piece, i, dtype);
        return true;
    }
    tree_sum(sum, members, begin, width / 2, piece, i, dtype);
    if (tree_sum(&right, members, begin + width / 2, width / 2, piece, i, dtype)) *sum = *sum + right;
    return true;
}

static float sum_expected(Members members, int piece, size_t i, DType dtype) {
    float sum = 0;
    tree_sum(&sum, members, 0, 64, piece, i, dtype);
    return sum;
}

static float partial_of(int c, size_t i) { return float_of(1000 + (uint64_t)c, (uint64_t)rank, i % PERIOD); }

static float reduced_expected(int carries, size_t i, DType dtype) {
    float sum = sum_expected(everybody(), rank, i, dtype);
    for (int c = 0; c < carries; c++) sum = partial_of(c, i) + sum;
    return sum;
}

static void assert_same_bits(const float *a, const float *b, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (memcmp(&a[i], &b[i], sizeof(float)) != 0)
            fail_msg("element %zu: %a is not %a", i, (double)a[i], (double)b[i]);
}

// into: the sum lies in this partial sum; -1: in memory of its own.
static void reduce_check_of(size_t count, size_t stride, int carries, int into, DType dtype) {
    size_t leaf_bytes = (size_t)ranks * stride * dtype_size(dtype);
    void *leaf = malloc(leaf_bytes), *copy = malloc(leaf_bytes);
    void *exchange = malloc(comm_exchange_elements(ranks, count) * dtype_size(dtype));
    float *expected = malloc(count * sizeof(float));
    float *sum = calloc(count + GUARD, sizeof(float)), *partials[3];
    CommReduce reduce = {
        .leaf = leaf, .dtype = dtype, .count = count, .stride = stride, .exchange = exchange, .carries = carries};
    leaf_fill(leaf, ranks, count, stride, dtype);
    memcpy(copy, leaf, leaf_bytes);
    for (int c = 0; c < carries; c++) {
        reduce.partials[c] = partials[c] = malloc(count * sizeof(float));
        for (size_t i = 0; i < count; i++) partials[c][i] = i < PERIOD ? partial_of(c, i) : partials[c][i - PERIOD];
    }
    for (size_t i = 0; i < count; i++)
        expected[i] = i < PERIOD ? reduced_expected(carries, i, dtype) : expected[i - PERIOD];
    reduce.sum = into >= 0 ? partials[into] : sum;
    comm_reduce_scatter(world, &reduce);
    memset(&reduce, 0xff, sizeof reduce); // it was copied
    await(world);
    assert_same_bits(into >= 0 ? partials[into] : sum, expected, count);
    for (int i = 0; i < GUARD; i++) assert_true(sum[count + (size_t)i] == 0);
    assert_memory_equal(leaf, copy, leaf_bytes);
    for (int c = 0; c < carries; c++) free(partials[c]);
    free(leaf), free(copy), free(exchange), free(expected), free(sum);
}

static void reduce_check(size_t count, size_t stride, int carries, int into) {
    reduce_check_of(count, stride, carries, into, BF16);
    reduce_check_of(count, stride, carries, into, F32);
}

static void reduce_scatter_follows_the_tree(void **state) {
    (void)state;
    static const size_t counts[] = {1, 16, 63, 64, 511, 512, 513, 1000, 5000};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (int carries = 0; carries <= 3; carries++) {
            reduce_check(counts[i], counts[i], carries, -1);
            reduce_check(counts[i], counts[i] + 37, carries, carries - 1);
        }
    reduce_check(1000, 1000, 3, 0);
    reduce_check(300000, 300001, 1, -1);
    for (size_t count = 1u << 18; count <= 1u << 20; count += count / 2 + 77) reduce_check(count, count, 1, 0);
}

// A reduction into the own piece of the leaf, then a gather of the pieces: every member gets the sum of all leaves.
static void sum_in_place(Comm *comm, Members members, size_t count) {
    int own = comm_rank(comm);
    float *leaf = malloc((size_t)members.count * count * sizeof(float)), *piece = leaf + (size_t)own * count;
    float *exchange = malloc(comm_exchange_elements(members.count, count) * sizeof(float));
    leaf_fill(leaf, members.count, count, count, F32);
    comm_reduce_scatter(
        comm, &(CommReduce){.sum = piece, .leaf = leaf, .count = count, .stride = count, .exchange = exchange});
    comm_all_gather(comm, leaf, piece, count * sizeof(float));
    await(comm);
    for (int p = 0; p < members.count; p++) {
        const float *found = leaf + (size_t)p * count;
        for (size_t i = 0; i < count; i++)
            assert_true(found[i] == (i < PERIOD ? sum_expected(members, p, i, F32) : found[i - PERIOD]));
    }
    free(leaf), free(exchange);
}

static void leaves_are_summed_in_place(void **state) {
    (void)state;
    static const size_t counts[] = {64, 1000, 700000};
    for (size_t n = 0; n < sizeof counts / sizeof *counts; n++) sum_in_place(world, everybody(), counts[n]);
}

// Or the tests before would prove nothing: other orders give other bits, for the numbers it uses.
static void order_matters(void **state) {
    (void)state;
    int differ[2] = {0};
    for (size_t i = 0; i < 1000; i++) {
        float tree = sum_expected(everybody(), rank, i, F32), up = 0, down = 0;
        for (int r = 0; r < ranks; r++) up += leaf_of(r, rank, i, F32);
        for (int r = ranks - 1; r >= 0; r--) down += leaf_of(r, rank, i, F32);
        differ[0] += up != tree;
        differ[1] += down != tree;
    }
    if (ranks > 3) assert_true(differ[0] > 100); // up to 3 ranks the tree is the plain order
    if (ranks > 2) assert_true(differ[1] > 100);
}

// ---------------------------------------------------------------------------------------------------------------
// The others

static void all_reduce_of_every_kind(void **state) {
    (void)state;
    enum { COUNT = 1001 };
    static int64_t integers[COUNT];
    static uint32_t magnitudes[COUNT];
    static double reals[COUNT];
    for (int i = 0; i < COUNT; i++) {
        integers[i] = (int64_t)mixed((uint64_t)rank, (uint64_t)i, 1) >> 8;
        magnitudes[i] = (uint32_t)mixed((uint64_t)rank, (uint64_t)i, 2); // also above 2^31
        reals[i] = i % ranks == rank ? 1.0 / (i + 1) : 0;
    }
    comm_all_reduce(world, integers, COUNT, COMM_I64_SUM);
    comm_all_reduce(world, magnitudes, COUNT, COMM_U32_MAX);
    comm_all_reduce(world, reals, COUNT, COMM_F64_SUM);
    await(world);
    for (int i = 0; i < COUNT; i++) {
        int64_t sum = 0;
        uint32_t most = 0;
        for (int r = 0; r < ranks; r++) {
            uint32_t magnitude = (uint32_t)mixed((uint64_t)r, (uint64_t)i, 2);
            sum += (int64_t)mixed((uint64_t)r, (uint64_t)i, 1) >> 8;
            if (magnitude > most) most = magnitude;
        }
        assert_int_equal(integers[i], sum);
        assert_int_equal(magnitudes[i], most);
        assert_true(reals[i] == 1.0 / (i + 1));
    }
}

static void broadcast_from_every_root(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 65, 1000, 300001};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int root = 0; root < ranks; root++) {
            unsigned char *data = malloc(sizes[s] + GUARD), *expected = malloc(sizes[s]);
            memset(data, 0xee, sizes[s] + GUARD);
            bytes_fill(data, sizes[s], rank, 3);
            bytes_fill(expected, sizes[s], root, 3);
            comm_broadcast(world, data, sizes[s], root);
            await(world);
            assert_memory_equal(data, expected, sizes[s]);
            for (int i = 0; i < GUARD; i++) assert_int_equal(data[sizes[s] + (size_t)i], 0xee);
            free(data);
            free(expected);
        }
}

// Nobody leaves before the last one has come. All ranks of the test are on one machine, so their clocks are one.
static void barrier_waits_for_all(void **state) {
    (void)state;
    uint64_t *came = malloc((size_t)ranks * sizeof *came);
    for (int last = 0; last < ranks; last++) {
        sleep_milliseconds(rank == last ? 20 : 0);
        uint64_t here = nanoseconds();
        comm_barrier(world);
        uint64_t left = nanoseconds();
        comm_all_gather(world, came, &here, sizeof here);
        await(world);
        for (int r = 0; r < ranks; r++) assert_true(came[r] <= left);
    }
    free(came);
}

static void processes_know_their_places(void **state) {
    (void)state;
    int32_t *all = malloc((size_t)ranks * 2 * sizeof *all), own[2] = {comm_world_rank(), comm_local_rank()};
    assert_int_equal(rank, comm_world_rank());
    assert_int_equal(ranks, comm_world_size());
    assert_in_range(comm_local_size(), 1, ranks);
    assert_true(comm_host()[0] != '\0');
    comm_all_gather(world, all, own, sizeof own);
    await(world);
    for (int r = 0; r < ranks; r++) {
        assert_int_equal(all[2 * r], r);
        if (comm_local_size() == ranks) assert_int_equal(all[2 * r + 1], r);
    }
    free(all);
}

// ---------------------------------------------------------------------------------------------------------------
// Groups

// All that a group of the world's ranks first, first+step, … can do: no other rank's numbers may come into it.
static void group_check(Comm *group, int first, int step) {
    enum { COUNT = 100 };
    int size = comm_size(group);
    int32_t *all = malloc((size_t)size * sizeof *all), own = rank;
    float *leaf = malloc((size_t)size * COUNT * sizeof *leaf),
          *exchange = malloc((size_t)size * COUNT * sizeof *leaf);
    float sum[COUNT];
    int64_t total = rank;
    int root = -1;
    for (int i = 0; i < size * COUNT; i++) leaf[i] = (float)(rank * 1000 + i);
    comm_all_gather(group, all, &own, sizeof own);
    comm_all_reduce(group, &total, 1, COMM_I64_SUM);
    comm_reduce_scatter(
        group, &(CommReduce){.sum = sum, .leaf = leaf, .count = COUNT, .stride = COUNT, .exchange = exchange});
    if (comm_rank(group) == size - 1) root = rank;
    comm_broadcast(group, &root, sizeof root, size - 1);
    comm_barrier(group);
    int64_t expected_total = 0;
    for (int r = 0; r < size; r++) {
        assert_int_equal(all[r], first + r * step);
        expected_total += first + r * step;
    }
    assert_int_equal(total, expected_total);
    assert_int_equal(root, first + (size - 1) * step);
    for (int i = 0; i < COUNT; i++)
        assert_true(sum[i] == (float)(expected_total * 1000 + (int64_t)size * (comm_rank(group) * COUNT + i)));
    free(all), free(leaf), free(exchange);
}

static void groups_are_among_themselves(void **state) {
    (void)state;
    Comm *parity = comm_group(world, rank % 2, 2, (ranks + 1 - rank % 2) / 2);
    Comm *pair = rank < 2 ? comm_group(world, 0, 1, ranks < 2 ? ranks : 2) : NULL;
    assert_int_equal(comm_rank(parity), rank / 2);
    assert_int_equal(comm_size(parity), (ranks + 1 - rank % 2) / 2);
    for (int round = 0; round < 3; round++) {
        group_check(parity, rank % 2, 2);
        if (pair) group_check(pair, 0, 1);
        group_check(world, 0, 1);
    }
    if (rank < 2) {
        assert_int_equal(comm_size(pair), ranks < 2 ? ranks : 2);
        comm_close(pair);
    }
    comm_close(parity);
}

// How sharding in groups cuts the world: into blocks of F ranks, and across them. A group of a group counts among the
// ranks of that.
static void groups_cut_the_world(void **state) {
    (void)state;
    for (int F = 1; F <= ranks; F++) {
        if (ranks % F != 0) continue;
        test_end(NULL), test_begin(NULL); // a device has few streams
        Members within = {rank / F * F, 1, F}, across = {rank % F, F, ranks / F};
        Comm *block = comm_group(world, within.first, within.stride, within.count);
        Comm *others = comm_group(world, across.first, across.stride, across.count);
        assert_int_equal(comm_rank(block), rank % F);
        assert_int_equal(comm_rank(others), rank / F);
        group_check(block, within.first, within.stride);
        group_check(others, across.first, across.stride);
        for (size_t count = 64; count < 1000000; count *= 100) {
            sum_in_place(block, within, count);
            sum_in_place(others, across, count);
        }
        int i = comm_rank(block) % 2;
        Comm *half = comm_group(block, i, 2, (F + 1 - i) / 2);
        group_check(half, within.first + i, 2);
        comm_close(half), comm_close(others), comm_close(block);
    }
}

// Sums over numbers of ranks that are no power of two: the first so many, and the others among themselves.
static void groups_of_any_size_follow_the_tree(void **state) {
    (void)state;
    for (int size = 1; size < ranks; size++) {
        test_end(NULL), test_begin(NULL);
        Members members = rank < size ? (Members){0, 1, size} : (Members){size, 1, ranks - size};
        Comm *group = comm_group(world, members.first, members.stride, members.count);
        sum_in_place(group, members, 1000);
        comm_close(group);
    }
}

// Two groups at work at once, each in its own order, one waiting for the other by an event alone.
static void groups_work_side_by_side(void **state) {
    (void)state;
    enum { ROUNDS = 100 };
    static int64_t here[ROUNDS], there[ROUNDS];
    Comm *parity = comm_group(world, rank % 2, 2, (ranks + 1 - rank % 2) / 2);
    Event *summed = event_create(device, "summed");
    for (int i = 0; i < ROUNDS; i++) {
        here[i] = there[i] = 1 + i;
        comm_all_reduce(world, &here[i], 1, COMM_I64_SUM);
        comm_all_reduce(parity, &there[i], 1, COMM_I64_SUM);
        event_record(summed, comm_stream(parity));
        stream_wait(comm_stream(world), summed);
        comm_all_reduce(world, &there[i], 1, COMM_I64_SUM); // each group's sum, once for each of its ranks
    }
    await(world);
    int64_t even = (ranks + 1) / 2, odd = ranks / 2;
    for (int i = 0; i < ROUNDS; i++) {
        assert_int_equal(here[i], ranks * (1 + i));
        assert_int_equal(there[i], (even * even + odd * odd) * (1 + i));
    }
    comm_close(parity);
}

// ---------------------------------------------------------------------------------------------------------------
// Order

// Each gather sends on what the gather before it received, from the next rank: after k of them a rank holds what was
// k ranks ahead. Far more are queued than a stream holds, and the compute stream looks in now and then.
static void collectives_happen_in_order(void **state) {
    (void)state;
    enum { COUNT = 600, BYTES = 65 };
    size_t size = (size_t)ranks * BYTES;
    unsigned char *all = malloc(COUNT * size), slice[BYTES], expected[BYTES];
    bytes_fill(slice, BYTES, rank, 0);
    for (int k = 0; k < COUNT; k++) {
        const unsigned char *from = k ? all + (size_t)(k - 1) * size + (size_t)((rank + 1) % ranks) * BYTES : slice;
        comm_all_gather(world, all + (size_t)k * size, from, BYTES);
        if (k % 100 != 99 && k + 1 < COUNT) continue;
        event_record(done, comm_stream(world));
        stream_wait(device_compute(device), done);
        for (int r = 0; r < ranks; r++) {
            bytes_fill(expected, BYTES, (r + k) % ranks, 0);
            assert_memory_equal(all + (size_t)k * size + (size_t)r * BYTES, expected, BYTES);
        }
    }
    free(all);
}

// Compute writes, the ranks exchange, compute reads: with no wait but those on events.
static void events_order_compute_and_collectives(void **state) {
    (void)state;
    enum { ROUNDS = 500 };
    Stream *compute = device_compute(device), *stream = comm_stream(world);
    Event *filled = event_create(device, "filled");
    float *leaf = malloc((size_t)ranks * 64 * sizeof *leaf), *exchange = malloc((size_t)ranks * 64 * sizeof *leaf);
    float sum[64];
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < ranks * 64; i++) leaf[i] = (float)(round + rank + i);
        event_record(filled, compute);
        stream_wait(stream, filled);
        comm_reduce_scatter(
            world, &(CommReduce){.sum = sum, .leaf = leaf, .count = 64, .stride = 64, .exchange = exchange});
        event_record(done, stream);
        stream_wait(compute, done);
        for (int i = 0; i < 64; i++)
            assert_true(sum[i] == (float)(ranks * (round + rank * 64 + i) + ranks * (ranks - 1) / 2));
    }
    free(leaf), free(exchange);
}

// ---------------------------------------------------------------------------------------------------------------
// Planning

// Some traffic in memory of the device, real or not.
static void traffic_make(Device *where, Comm *comm) {
    size_t n = (size_t)comm_size(comm);
    char *all = device_alloc(where, "all", n * 1000);
    float *leaf = device_alloc(where, "leaf", n * 64 * sizeof(float)),
          *sum = device_alloc(where, "sum", 64 * sizeof(float));
    float *exchange = device_alloc(where, "exchange", n * 64 * sizeof(float));
    int64_t *values = device_alloc(where, "values", 3 * sizeof(int64_t));
    comm_phase(comm, "traffic");
    comm_all_gather(comm, all, all + (size_t)comm_rank(comm) * 1000, 1000);
    comm_all_gather(comm, all, all + (size_t)comm_rank(comm) * 64, 64);
    comm_reduce_scatter(comm,
                        &(CommReduce){.sum = sum, .leaf = leaf, .count = 64, .stride = 64, .exchange = exchange});
    comm_reduce_scatter(
        comm,
        &(CommReduce){.sum = sum, .leaf = leaf, .dtype = BF16, .count = 64, .stride = 64, .exchange = exchange});
    comm_all_reduce(comm, values, 3, COMM_I64_SUM);
    comm_broadcast(comm, all, 100, 0);
    comm_barrier(comm);
}

static void traffic_check(Device *plan, Comm *planned, Comm *comm) {
    assert_int_equal(comm_rank(planned), comm_rank(comm));
    assert_int_equal(comm_size(planned), comm_size(comm));
    assert_true(comm_traffic(comm).gathered == 0 && comm_traffic(comm).reduced == 0);
    traffic_make(plan, planned);
    traffic_make(device, comm);
    CommTraffic real = comm_traffic(comm), counted = comm_traffic(planned);
    assert_true(counted.gathered == real.gathered && counted.reduced == real.reduced);
    assert_true(real.gathered == (comm_size(comm) - 1) * 1064.0);
    assert_true(real.reduced == (comm_size(comm) - 1) * (64 * 4.0 + 64 * 2.0));
    assert_true(device_same_ledger(plan, device));
}

static void plans_count_the_same_traffic(void **state) {
    (void)state;
    Device *plan = device_plan();
    Comm *planned = comm_plan(plan, rank, ranks);
    traffic_check(plan, planned, world);
    for (int stride = 1; stride <= 2; stride++) { // two ranks next to each other, then every second one
        int first = stride == 1 ? rank / 2 * 2 : rank % 2;
        int count = stride == 2 ? (ranks + 1 - first) / 2 : ranks - first < 2 ? ranks - first : 2;
        Comm *planned_group = comm_group(planned, first, stride, count);
        Comm *group = comm_group(world, first, stride, count);
        traffic_check(plan, planned_group, group);
        comm_close(group), comm_close(planned_group);
    }
    comm_close(planned);
    device_close(plan);
}

// ---------------------------------------------------------------------------------------------------------------
// How it ends. Both of these end the whole job when all is well.

static int never_joined(void) {
    char all[64 * 16], slice[64] = {0};
    device = device_open(NULL);
    world = comm_world(device, 0.5);
    done = event_create(device, "done");
    comm_barrier(world);
    comm_phase(world, "gather of h.7");
    if (comm_rank(world) == 1)
        sleep_milliseconds(20000);
    else {
        if (comm_size(world) > 16) die(EXIT_CODE_FAILURE, "use fewer", "more than 16 ranks");
        comm_all_gather(world, all, slice, sizeof slice);
        await(world);
    }
    printf("rank 1 never joined, and nobody minded\n");
    return EXIT_CODE_DONE;
}

static int fault_of_input(void) {
    comm_first();
    if (comm_world_rank() == 0) die(EXIT_CODE_USAGE, "write one", "there is no configuration");
    comm_others();
    printf("rank 0 died, and nobody minded\n");
    comm_end();
    return EXIT_CODE_DONE;
}

#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, test_begin, test_end)

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        WORLD_TEST(processes_know_their_places),
        WORLD_TEST(all_gather_of_any_size),
        WORLD_TEST(reduce_scatter_follows_the_tree),
        WORLD_TEST(leaves_are_summed_in_place),
        WORLD_TEST(order_matters),
        WORLD_TEST(all_reduce_of_every_kind),
        WORLD_TEST(broadcast_from_every_root),
        WORLD_TEST(barrier_waits_for_all),
        WORLD_TEST(groups_are_among_themselves),
        WORLD_TEST(groups_cut_the_world),
        WORLD_TEST(groups_of_any_size_follow_the_tree),
        WORLD_TEST(groups_work_side_by_side),
        WORLD_TEST(collectives_happen_in_order),
        WORLD_TEST(events_order_compute_and_collectives),
        WORLD_TEST(plans_count_the_same_traffic),
    };
    error_program("test_comm");
    comm_start(&argc, &argv);
    if (argc > 1 && strcmp(argv[1], "--timeout") == 0) return never_joined();
    if (argc > 1 && strcmp(argv[1], "--fault") == 0) return fault_of_input();
    ranks_quieten();
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    comm_end();
    return failures != 0;
}
