// Tests of the loader: order, permutation, position, evaluation, formats, and every fault a shard can have.
//
// Shards are written to a temporary folder. Unless a test says otherwise the i-th token of a set is i, so that what
// a batch holds also says where it came from.
#include <setjmp.h> // cmocka.h needs these four
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "test_death.h"
#include "loader.h"
#include "error.h"
#include <limits.h>   // PATH_MAX
#include <stdbool.h>  // bool
#include <stdlib.h>   // mkdtemp, system, malloc, free
#include <sys/stat.h> // mkdir

enum { VOCAB = 65536, MAGIC_16 = 20240520, MAGIC_32 = 20240801 };

static char folder[] = "/tmp/test_loader_XXXXXX";

// ---------------------------------------------------------------------------------------------------------------
// Making shards

static const char *path_of(const char *name) {
    static char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

// A file of any header and any bytes after it.
static void file_write(const char *name, const int32_t *header, int ints, const void *data, size_t bytes) {
    FILE *file = fopen(path_of(name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(header, sizeof *header, (size_t)ints, file), ints);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

// A shard of `count` tokens first, first+1, …
static void shard_write(const char *name, int token_bytes, int count, int first) {
    int32_t header[256] = {token_bytes == 2 ? MAGIC_16 : MAGIC_32, token_bytes == 2 ? 1 : 7, count};
    uint16_t *narrow = malloc((size_t)count * 2 + 1);
    uint32_t *wide = malloc((size_t)count * 4 + 1);
    for (int i = 0; i < count; i++) narrow[i] = (uint16_t)(wide[i] = (uint32_t)(first + i));
    file_write(name, header, 256, token_bytes == 2 ? (void *)narrow : (void *)wide, (size_t)(count * token_bytes));
    free(narrow);
    free(wide);
}

static void folder_clear(void) {
    char command[PATH_MAX];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    assert_int_equal(system(command), 0);
    assert_int_equal(mkdir(folder, 0700), 0);
}

// A set of shards x_00.bin … of these sizes (ended by -1), token i of the set being i.
static void set_write(int token_bytes, const int *counts) {
    folder_clear();
    for (int i = 0, first = 0; counts[i] >= 0; first += counts[i++]) {
        char name[32];
        snprintf(name, sizeof name, "x_%02d.bin", i);
        shard_write(name, token_bytes, counts[i], first);
    }
}

static LoaderOptions options_make(int64_t T) {
    static char glob[PATH_MAX];
    snprintf(glob, sizeof glob, "%s/x*.bin", folder);
    return (LoaderOptions){.option = "--train-data", .glob = glob, .T = T, .vocab = VOCAB};
}

static Loader *shuffled_open(int64_t T, uint64_t seed) {
    LoaderOptions options = options_make(T);
    options.shuffle = true;
    options.seed = seed;
    return loader_open(options);
}

static Loader *evaluation_open(int64_t T) {
    LoaderOptions options = options_make(T);
    options.every_target = true;
    return loader_open(options);
}

// ---------------------------------------------------------------------------------------------------------------
// Order

static const int odd_sizes[] = {11, 5, 0, 4, 1, 23, 2, 9, -1};

// The first token of every sequence of T = 4 in odd_sizes: 2 in the shard of 11 tokens, 1 in that of 5, 5 in that
// of 23, 2 in that of 9, none in the others.
static const int odd_starts[] = {0, 4, 11, 21, 25, 29, 33, 37, 46, 50};
enum { ODD_T = 4, ODD_SEQUENCES = 10 };

static void row_check(const int *inputs, const int *targets, int first, int T) {
    for (int i = 0; i < T; i++) {
        assert_int_equal(inputs[i], first + i);
        assert_int_equal(targets[i], first + i + 1);
    }
}

static void order_is_that_of_the_files(void **state) {
    (void)state;
    for (int token_bytes = 2; token_bytes <= 4; token_bytes += 2) {
        set_write(token_bytes, odd_sizes);
        Loader *loader = loader_open(options_make(ODD_T));
        assert_int_equal(loader_shards(loader), 8);
        assert_int_equal(loader_tokens(loader), 55);
        assert_int_equal(loader_sequences(loader), ODD_SEQUENCES);
        assert_int_equal(loader_targets(loader), ODD_SEQUENCES * ODD_T);
        assert_int_equal(loader_leftover(loader), 2 + 0 + 0 + 3 + 0 + 2 + 1 + 0);
        int inputs[ODD_T], targets[ODD_T];
        for (int n = 0; n < 3 * ODD_SEQUENCES; n++) { // three epochs, all the same
            assert_int_equal(loader_sequence_at(loader, n), n % ODD_SEQUENCES);
            assert_int_equal(loader_batch(loader, n, 1, inputs, targets), ODD_T);
            row_check(inputs, targets, odd_starts[n % ODD_SEQUENCES], ODD_T);
        }
        loader_close(loader);
    }
}

static void names_are_sorted_as_bytes(void **state) {
    (void)state;
    folder_clear();
    shard_write("x_b.bin", 2, 3, 200);
    shard_write("x_B.bin", 4, 3, 100); // the two formats may be mixed
    shard_write("x_10.bin", 2, 3, 0);
    shard_write("y.bin", 2, 3, 300); // not matched
    Loader *loader = loader_open(options_make(2));
    int inputs[6], targets[6];
    assert_int_equal(loader_batch(loader, 0, 3, inputs, targets), 6);
    for (int i = 0; i < 3; i++) row_check(inputs + 2 * i, targets + 2 * i, 100 * i, 2);
    loader_close(loader);
}

static void one_sequence_is_enough(void **state) {
    (void)state;
    set_write(2, (int[]){5, -1});
    Loader *loader = shuffled_open(4, 1);
    assert_int_equal(loader_sequences(loader), 1);
    int inputs[12], targets[12];
    assert_int_equal(loader_batch(loader, 1000000007, 3, inputs, targets), 12);
    for (int i = 0; i < 3; i++) row_check(inputs + 4 * i, targets + 4 * i, 0, 4);
    loader_close(loader);
}

static void wide_tokens_are_read_whole(void **state) {
    (void)state;
    folder_clear();
    shard_write("x.bin", 4, 5, 128000);
    LoaderOptions options = options_make(4);
    options.vocab = 128256;
    Loader *loader = loader_open(options);
    int inputs[4], targets[4];
    assert_int_equal(loader_batch(loader, 0, 1, inputs, targets), 4);
    row_check(inputs, targets, 128000, 4);
    loader_close(loader);
}

// ---------------------------------------------------------------------------------------------------------------
// Shuffling

// A set of exactly S sequences of one token each, in two shards where that is possible.
static Loader *sequences_open(int S, uint64_t seed) {
    int first = S > 1 ? S / 3 : 0;
    set_write(2, (int[]){first > 0 ? first + 1 : 0, S - first + 1, -1});
    Loader *loader = shuffled_open(1, seed);
    assert_int_equal(loader_sequences(loader), S);
    return loader;
}

static void epoch_order(const Loader *loader, int64_t epoch, int *order) {
    int64_t S = loader_sequences(loader);
    for (int64_t i = 0; i < S; i++) order[i] = (int)loader_sequence_at(loader, epoch * S + i);
}

static void epochs_visit_every_sequence_once(void **state) {
    (void)state;
    static const int sizes[] = {1, 2, 3, 4, 5, 15, 16, 17, 64, 65, 255, 257, 1000, 4099};
    static int order[4099];
    static char seen[4099];
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        Loader *loader = sequences_open(sizes[k], 42 + k);
        for (int64_t epoch = 0; epoch < 3; epoch++) {
            memset(seen, 0, sizeof seen);
            epoch_order(loader, epoch, order);
            for (int i = 0; i < sizes[k]; i++) {
                assert_in_range(order[i], 0, sizes[k] - 1);
                assert_false(seen[order[i]]);
                seen[order[i]] = 1;
            }
        }
        loader_close(loader);
    }
}

static void orders_differ_by_epoch_and_seed(void **state) {
    (void)state;
    enum { S = 100 };
    int orders[6][S];
    // The last two seeds differ from the first in one bit, in either half of the word.
    static const uint64_t seeds[] = {1337, 1336, 1337 ^ 1ULL << 40};
    for (int k = 0; k < 3; k++) {
        Loader *loader = sequences_open(S, seeds[k]);
        epoch_order(loader, 0, orders[2 * k]);
        epoch_order(loader, 1LL << (32 * (k > 0)), orders[2 * k + 1]);
        loader_close(loader);
    }
    for (int a = 0; a < 6; a++)
        for (int b = 0; b < a; b++) {
            int same = 0;
            for (int i = 0; i < S; i++) same += orders[a][i] == orders[b][i];
            assert_in_range(same, 0, 7); // 1 on average; 8 or more has a chance of one in 100,000
        }
}

// A checkpoint holds a position and nothing else, so this order must never change again.
static void order_is_pinned(void **state) {
    (void)state;
    static const int expected[2][10] = {{5, 6, 7, 4, 3, 8, 1, 2, 9, 0}, {2, 7, 6, 1, 3, 0, 5, 9, 4, 8}};
    int order[10];
    Loader *loader = sequences_open(10, 1337);
    for (int64_t epoch = 0; epoch < 2; epoch++) {
        epoch_order(loader, epoch, order);
        assert_memory_equal(order, expected[epoch], sizeof order);
    }
    loader_close(loader);
}

// Pearson's chi-square of `cells` counts against equal shares may lie six standard deviations above its mean. What
// is drawn is fixed, so no luck is needed.
static void chi_square_check(const int *counts, int cells, int draws) {
    double expected = (double)draws / cells, freedom = cells - 1, square = 0;
    for (int i = 0; i < cells; i++) square += (counts[i] - expected) * (counts[i] - expected) / expected;
    double excess = square - freedom;
    if (excess > 0 && excess * excess > 36 * 2 * freedom)
        fail_msg("chi-square %.1f of %d cells and %d draws, expected about %.0f", square, cells, draws, freedom);
}

// Over many epochs the first, the middle and the last place hold every sequence equally often.
static void places_are_uniform(void **state) {
    (void)state;
    static const int sizes[] = {1, 2, 3, 5, 17, 1000};
    static int counts[3][1000];
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        int S = sizes[k], draws = S < 100 ? 2000 : 20 * S;
        Loader *loader = sequences_open(S, 7);
        memset(counts, 0, sizeof counts);
        for (int64_t epoch = 0; epoch < draws; epoch++) {
            counts[0][loader_sequence_at(loader, epoch * S)]++;
            counts[1][loader_sequence_at(loader, epoch * S + S / 2)]++;
            counts[2][loader_sequence_at(loader, epoch * S + S - 1)]++;
        }
        for (int place = 0; place < 3; place++) chi_square_check(counts[place], S, draws);
        loader_close(loader);
    }
}

// A permutation may have uniform places and yet be a shift or a multiplication. So: all orders of three sequences
// are equally frequent, and neighbours are any distance apart.
static void orders_have_no_structure(void **state) {
    (void)state;
    enum { EPOCHS = 3000, S = 17, DISTANCES = S - 1 };
    int order[S], orders[9] = {0}, possible[6], distances[DISTANCES] = {0};
    Loader *loader = sequences_open(3, 7);
    for (int64_t epoch = 0; epoch < EPOCHS; epoch++) {
        epoch_order(loader, epoch, order);
        orders[3 * order[0] + order[1]]++;
    }
    loader_close(loader);
    for (int i = 0, n = 0; i < 9; i++)
        if (i / 3 != i % 3) possible[n++] = orders[i];
    chi_square_check(possible, 6, EPOCHS);

    loader = sequences_open(S, 7);
    for (int64_t epoch = 0; epoch < EPOCHS; epoch++) {
        epoch_order(loader, epoch, order);
        distances[(order[9] - order[8] + S) % S - 1]++;
    }
    loader_close(loader);
    chi_square_check(distances, DISTANCES, EPOCHS);
}

// ---------------------------------------------------------------------------------------------------------------
// Batches and positions

static void batches_are_the_same_for_any_size(void **state) {
    (void)state;
    enum { ROWS = 3 * ODD_SEQUENCES };
    static int inputs[ROWS * ODD_T], targets[ROWS * ODD_T], one_inputs[ROWS * ODD_T], one_targets[ROWS * ODD_T];
    set_write(2, odd_sizes);
    Loader *loader = shuffled_open(ODD_T, 99);
    for (int n = 0; n < ROWS; n++) loader_batch(loader, n, 1, one_inputs + n * ODD_T, one_targets + n * ODD_T);
    for (int B = 2; B <= ROWS; B++) { // most of these do not divide an epoch: batches span two and more
        for (int n = 0; n + B <= ROWS; n += B)
            assert_int_equal(loader_batch(loader, n, B, inputs + n * ODD_T, targets + n * ODD_T), B * ODD_T);
        size_t bytes = (size_t)(ROWS / B * B * ODD_T) * sizeof(int);
        assert_memory_equal(inputs, one_inputs, bytes);
        assert_memory_equal(targets, one_targets, bytes);
    }
    loader_close(loader);
}

// Any position can be had at once, by a loader that has read nothing before, as by one that came there in order.
static void seek_equals_sequential(void **state) {
    (void)state;
    enum { B = 3, STEPS = 40 };
    static int inputs[STEPS][B * ODD_T], targets[STEPS][B * ODD_T];
    int other_inputs[B * ODD_T], other_targets[B * ODD_T];
    set_write(2, odd_sizes);
    Loader *loader = shuffled_open(ODD_T, 5);
    for (int step = 0; step < STEPS; step++) loader_batch(loader, step * B, B, inputs[step], targets[step]);
    loader_close(loader);
    for (int step = STEPS - 1; step >= 0; step--) {
        loader = shuffled_open(ODD_T, 5);
        loader_batch(loader, step * B, B, other_inputs, other_targets);
        assert_memory_equal(other_inputs, inputs[step], sizeof other_inputs);
        assert_memory_equal(other_targets, targets[step], sizeof other_targets);
        loader_close(loader);
    }
}

// Positions beyond 32 bits are positions like others.
static void positions_are_64_bit(void **state) {
    (void)state;
    set_write(2, odd_sizes);
    Loader *loader = loader_open(options_make(ODD_T));
    int inputs[ODD_T], targets[ODD_T];
    int64_t n = (1LL << 53) * ODD_SEQUENCES + 7;
    assert_int_equal(loader_batch(loader, n, 1, inputs, targets), ODD_T);
    row_check(inputs, targets, odd_starts[7], ODD_T);
    loader_close(loader);
}

// ---------------------------------------------------------------------------------------------------------------
// Evaluation

enum { EVALUATION_TOKENS = 55 }; // in odd_sizes

// Counts how often an epoch in batches of B sequences visits each token as a target.
static void targets_count(const Loader *loader, int T, int B, int *seen) {
    int *inputs = malloc((size_t)(B * T) * sizeof(int)), *targets = malloc((size_t)(B * T) * sizeof(int));
    for (int64_t n = 0; n < loader_sequences(loader); n += B) {
        int64_t found = loader_batch(loader, n, B, inputs, targets);
        for (int i = 0; i < B * T; i++) {
            assert_int_equal(inputs[i], targets[i] == -1 ? 0 : targets[i] - 1);
            if (targets[i] == -1) continue;
            seen[targets[i]]++;
            found--;
        }
        assert_int_equal(found, 0);
    }
    free(inputs);
    free(targets);
}

static void evaluation_takes_every_target_once(void **state) {
    (void)state;
    set_write(2, odd_sizes);
    for (int T = 1; T <= 30; T++)
        for (int B = 1; B <= 5; B += 2) {
            int seen[EVALUATION_TOKENS] = {0}, expected[EVALUATION_TOKENS], token = 0;
            Loader *loader = evaluation_open(T);
            targets_count(loader, T, B, seen);
            assert_int_equal(loader_leftover(loader), 0);
            assert_int_equal(loader_targets(loader), EVALUATION_TOKENS - 7); // 7 shards have a first token
            for (int shard = 0; odd_sizes[shard] >= 0; shard++) // which nothing comes before, so it is no target
                for (int i = 0; i < odd_sizes[shard]; i++) expected[token++] = i > 0;
            assert_memory_equal(seen, expected, sizeof seen);
            loader_close(loader);
        }
}

static void evaluation_ends_with_blank_rows(void **state) {
    (void)state;
    set_write(2, (int[]){7, -1});
    Loader *loader = evaluation_open(4); // targets 1 … 4, then 5 and 6
    static const int expected_inputs[12] = {4, 5},
                     expected_targets[12] = {5, 6, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    int inputs[12], targets[12];
    assert_int_equal(loader_sequences(loader), 2);
    assert_int_equal(loader_batch(loader, 1, 3, inputs, targets), 2);
    assert_memory_equal(inputs, expected_inputs, sizeof inputs);
    assert_memory_equal(targets, expected_targets, sizeof targets);
    assert_int_equal(loader_batch(loader, 50, 3, inputs, targets), 0);
    for (int i = 0; i < 12; i++) assert_int_equal(targets[i], -1);
    loader_close(loader);
}

// ---------------------------------------------------------------------------------------------------------------
// Faults

static void open_set(void *argument) {
    const LoaderOptions *options = argument;
    loader_close(loader_open(*options));
}

static void read_set(void *argument) {
    const LoaderOptions *options = argument;
    Loader *loader = loader_open(*options);
    int inputs[4], targets[4];
    for (int n = 0; n < loader_sequences(loader); n++) loader_batch(loader, n, 1, inputs, targets);
    loader_close(loader);
}

// Opens a good shard and then a bad one, x_bad.bin, of this header and so many bytes after it.
static void fault_check(const char *expected, const int32_t header[3], size_t bytes) {
    static const char zeros[4096];
    int32_t whole[256] = {header[0], header[1], header[2]};
    set_write(2, (int[]){100, -1});
    file_write("x_bad.bin", whole, 256, zeros, bytes);
    LoaderOptions options = options_make(4);
    expect_death(EXIT_CODE_USAGE, expected, open_set, &options);
}

static void bad_headers_are_refused(void **state) {
    (void)state;
    fault_check("x_bad.bin has magic 20240326, expected 20240520 (16 bit) or 20240801 (32 bit)",
                (int32_t[]){20240326, 3, 10}, 20);
    fault_check("x_bad.bin has version 2, expected 1", (int32_t[]){MAGIC_16, 2, 10}, 20);
    fault_check("x_bad.bin has version 1, expected 7", (int32_t[]){MAGIC_32, 1, 10}, 40);
    fault_check("x_bad.bin counts -1 tokens, expected 0 or more", (int32_t[]){MAGIC_16, 1, -1}, 20);
}

static void bad_sizes_are_refused(void **state) {
    (void)state;
    fault_check("x_bad.bin is 1043 bytes, expected 1044 for its 10 tokens", (int32_t[]){MAGIC_16, 1, 10}, 19);
    fault_check("x_bad.bin is 1046 bytes, expected 1044 for its 10 tokens", (int32_t[]){MAGIC_16, 1, 10}, 22);
    fault_check("x_bad.bin is 1044 bytes, expected 1064 for its 10 tokens", (int32_t[]){MAGIC_32, 7, 10}, 20);
    fault_check("x_bad.bin is 1024 bytes, expected 8589935612 for its 2147483647 tokens",
                (int32_t[]){MAGIC_32, 7, INT32_MAX}, 0);
    LoaderOptions options = options_make(4);
    file_write("x_bad.bin", (int32_t[1]){0}, 0, "", 0);
    expect_death(EXIT_CODE_USAGE, "x_bad.bin is 0 bytes, expected at least the 1024", open_set, &options);
    file_write("x_bad.bin", (int32_t[255]){MAGIC_16, 1, 0}, 255, "", 0);
    expect_death(EXIT_CODE_USAGE, "x_bad.bin is 1020 bytes, expected at least the 1024", open_set, &options);
}

static void what_is_no_file_is_refused(void **state) {
    (void)state;
    folder_clear();
    LoaderOptions options = options_make(4);
    expect_death(EXIT_CODE_USAGE, "/x*.bin matches no file, expected at least one token shard", open_set, &options);
    expect_death(EXIT_CODE_USAGE, "--train-data /tmp/", open_set, &options);
    expect_death(EXIT_CODE_USAGE, "HINT: make shards with data/tokenize", open_set, &options);
    options.glob = "/no/such/folder*/x.bin";
    expect_death(EXIT_CODE_USAGE, "--train-data /no/such/folder*/x.bin matches no file", open_set, &options);
    options = options_make(4);
    assert_int_equal(mkdir(path_of("x_folder.bin"), 0700), 0);
    expect_death(EXIT_CODE_USAGE, "x_folder.bin is not a regular file", open_set, &options);
    folder_clear();
    assert_int_equal(symlink("nowhere", path_of("x_link.bin")), 0);
    expect_death(EXIT_CODE_USAGE, "cannot open shard", open_set, &options);
}

static void too_few_tokens_are_refused(void **state) {
    (void)state;
    set_write(2, (int[]){4, 1, 0, 3, -1});
    LoaderOptions options = options_make(4);
    expect_death(EXIT_CODE_USAGE, "x*.bin: the longest of 4 shards has 4 tokens, expected at least 5", open_set,
                 &options);
    options.every_target = true;
    expect_death(EXIT_CODE_DONE, "", open_set, &options);
    set_write(2, (int[]){1, 0, 1, -1});
    expect_death(EXIT_CODE_USAGE, "the longest of 3 shards has 1 tokens, expected at least 2", open_set, &options);
}

static void ids_beyond_the_vocabulary_are_refused(void **state) {
    (void)state;
    set_write(2, (int[]){100, 50, -1}); // token 137 is the 37th of the second shard
    LoaderOptions options = options_make(4);
    options.vocab = 137;
    expect_death(EXIT_CODE_USAGE,
                 "x_01.bin holds token 137 at position 37, expected ids below the vocabulary of 137", read_set,
                 &options);
    options.vocab = 150;
    expect_death(EXIT_CODE_DONE, "", read_set, &options);
    folder_clear();
    shard_write("x.bin", 4, 5, -3); // 32-bit ids beyond int are large, not negative
    expect_death(EXIT_CODE_USAGE, "x.bin holds token 4294967293 at position 0", read_set, &options);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(order_is_that_of_the_files),
        cmocka_unit_test(names_are_sorted_as_bytes),
        cmocka_unit_test(one_sequence_is_enough),
        cmocka_unit_test(wide_tokens_are_read_whole),
        cmocka_unit_test(epochs_visit_every_sequence_once),
        cmocka_unit_test(orders_differ_by_epoch_and_seed),
        cmocka_unit_test(order_is_pinned),
        cmocka_unit_test(places_are_uniform),
        cmocka_unit_test(orders_have_no_structure),
        cmocka_unit_test(batches_are_the_same_for_any_size),
        cmocka_unit_test(seek_equals_sequential),
        cmocka_unit_test(positions_are_64_bit),
        cmocka_unit_test(evaluation_takes_every_target_once),
        cmocka_unit_test(evaluation_ends_with_blank_rows),
        cmocka_unit_test(bad_headers_are_refused),
        cmocka_unit_test(bad_sizes_are_refused),
        cmocka_unit_test(what_is_no_file_is_refused),
        cmocka_unit_test(too_few_tokens_are_refused),
        cmocka_unit_test(ids_beyond_the_vocabulary_are_refused),
    };
    if (!mkdtemp(folder)) return 1;
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    char command[PATH_MAX];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command) || failures;
}
