#include "loader.h"
#include "error.h"
#include <Random123/philox.h> // philox4x32: the round function of the permutation
#include <assert.h>           // assert
#include <errno.h>            // errno, ENOENT, ENOTDIR
#include <fcntl.h>            // open
#include <glob.h>             // glob, globfree
#include <limits.h>           // INT_MAX
#include <stdlib.h>           // calloc, free, qsort
#include <string.h>           // strcmp, strerror
#include <sys/mman.h>         // mmap, munmap, madvise
#include <sys/stat.h>         // fstat
#include <unistd.h>           // close, sysconf

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "shards are read as they lie, little-endian");

enum {
    HEADER_INTS = 256,
    HEADER_BYTES = HEADER_INTS * 4,
    MAGIC_16 = 20240520,
    VERSION_16 = 1,
    MAGIC_32 = 20240801,
    VERSION_32 = 7,
    FEISTEL_ROUNDS = 8,          // 4 would do for large sets; the rest is for sets of a handful of sequences
    FEISTEL_DOMAIN = 0x6c6f6164, // "load": keeps these draws apart from others made with the same seed
};

typedef struct {
    const char *path;
    char *map; // the whole file: header, then tokens
    size_t bytes;
    int token_bytes;   // 2 or 4
    int64_t count;     // tokens
    int64_t sequences; // those that begin here, 0 if there are not enough tokens for one
    int64_t first;     // number of the first of them in the set
} Shard;

struct Loader {
    LoaderOptions options;
    glob_t names; // owns the shards' paths
    Shard *shards;
    int shard_count;
    int64_t sequences, tokens, targets, leftover; // over all shards
    int half_bits; // sequence numbers are permuted among 0 … 2^(2·half_bits) - 1, the first such range that holds S
};

// ---------------------------------------------------------------------------------------------------------------
// Finding and opening shards

// A folder that is not there only means no match; one that cannot be read must not thin out the data silently.
static int folder_failed(const char *path, int error) {
    if (error == ENOENT || error == ENOTDIR) return 0;
    die(EXIT_CODE_FAILURE, "check its permissions", "cannot read folder %s: %s", path, strerror(error));
}

static int name_compare(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static void shards_find(Loader *loader) {
    const LoaderOptions *options = &loader->options;
    int failure = glob(options->glob, GLOB_NOSORT, folder_failed, &loader->names);
    if (failure == GLOB_NOMATCH)
        die(EXIT_CODE_USAGE, "make shards with data/tokenize; quote a pattern, or the shell expands it",
            "%s %s matches no file, expected at least one token shard", options->option, options->glob);
    if (failure)
        die(EXIT_CODE_FAILURE, NULL, "%s %s: glob failed with code %d", options->option, options->glob, failure);

    // glob would sort by the user's locale; the order of the data must be the same everywhere.
    qsort(loader->names.gl_pathv, loader->names.gl_pathc, sizeof(char *), name_compare);
    loader->shard_count = (int)loader->names.gl_pathc;
    loader->shards = calloc((size_t)loader->shard_count, sizeof(Shard));
    if (!loader->shards) die(EXIT_CODE_FAILURE, NULL, "no memory for the list of %d shards", loader->shard_count);
}

static void shard_map(Shard *shard) {
    int fd = open(shard->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        die(EXIT_CODE_USAGE, "check its permissions", "cannot open shard %s: %s", shard->path, strerror(errno));
    struct stat status;
    if (fstat(fd, &status))
        die(EXIT_CODE_FAILURE, NULL, "cannot examine shard %s: %s", shard->path, strerror(errno));
    if (!S_ISREG(status.st_mode))
        die(EXIT_CODE_USAGE, "narrow the pattern", "%s is not a regular file, expected a token shard", shard->path);
    if (status.st_size < HEADER_BYTES)
        die(EXIT_CODE_USAGE, "write it again with data/tokenize",
            "shard %s is %lld bytes, expected at least the %d of a header", shard->path, (long long)status.st_size,
            HEADER_BYTES);
    shard->bytes = (size_t)status.st_size;
    shard->map = mmap(NULL, shard->bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (shard->map == MAP_FAILED)
        die(EXIT_CODE_FAILURE, NULL, "cannot map shard %s: %s", shard->path, strerror(errno));
    close(fd);
}

static void shard_check(Shard *shard) {
    const int32_t *header = (const int32_t *)shard->map;
    if (header[0] != MAGIC_16 && header[0] != MAGIC_32)
        die(EXIT_CODE_USAGE, "only token shards may match the pattern; make them with data/tokenize",
            "shard %s has magic %d, expected %d (16 bit) or %d (32 bit)", shard->path, header[0], MAGIC_16,
            MAGIC_32);
    int version = header[0] == MAGIC_16 ? VERSION_16 : VERSION_32;
    if (header[1] != version)
        die(EXIT_CODE_USAGE, "write it again with data/tokenize", "shard %s has version %d, expected %d",
            shard->path, header[1], version);
    if (header[2] < 0)
        die(EXIT_CODE_USAGE, "write it again with data/tokenize", "shard %s counts %d tokens, expected 0 or more",
            shard->path, header[2]);
    shard->token_bytes = header[0] == MAGIC_16 ? 2 : 4;
    shard->count = header[2];
    int64_t expected = HEADER_BYTES + shard->count * shard->token_bytes;
    if ((int64_t)shard->bytes != expected)
        die(EXIT_CODE_USAGE, "the copy or download was cut short or appended to: fetch or write it again",
            "shard %s is %lld bytes, expected %lld for its %lld tokens", shard->path, (long long)shard->bytes,
            (long long)expected, (long long)shard->count);
}

// Numbers the shard's sequences and adds it to the totals.
static void shard_add(Loader *loader, Shard *shard) {
    int64_t targets = shard->count > 0 ? shard->count - 1 : 0;
    int64_t whole = targets / loader->options.T, rest = targets % loader->options.T;
    bool take_rest = loader->options.every_target && rest > 0;
    int64_t left_out = take_rest ? 0 : rest;
    shard->sequences = whole + (take_rest ? 1 : 0);
    shard->first = loader->sequences;
    loader->sequences += shard->sequences;
    loader->tokens += shard->count;
    loader->targets += targets - left_out;
    loader->leftover += left_out;
}

Loader *loader_open(LoaderOptions options) {
    assert(options.T > 0 && options.vocab > 0 && options.vocab <= INT_MAX);
    Loader *loader = calloc(1, sizeof *loader);
    if (!loader) die(EXIT_CODE_FAILURE, NULL, "no memory for the loader of %s", options.option);
    loader->options = options;
    shards_find(loader);
    int64_t longest = 0;
    for (int i = 0; i < loader->shard_count; i++) {
        Shard *shard = &loader->shards[i];
        shard->path = loader->names.gl_pathv[i];
        shard_map(shard);
        shard_check(shard);
        shard_add(loader, shard);
        if (shard->count > longest) longest = shard->count;
    }
    if (loader->sequences == 0)
        die(EXIT_CODE_USAGE, options.every_target ? "give more data" : "give more data or a smaller --seq-len",
            "%s %s: the longest of %d shards has %lld tokens, expected at least %lld", options.option, options.glob,
            loader->shard_count, (long long)longest, options.every_target ? 2LL : (long long)options.T + 1);
    while (loader->half_bits < 31 && (loader->sequences - 1) >> (2 * loader->half_bits)) loader->half_bits++;
    return loader;
}

void loader_close(Loader *loader) {
    if (!loader) return;
    for (int i = 0; i < loader->shard_count; i++) munmap(loader->shards[i].map, loader->shards[i].bytes);
    free(loader->shards);
    globfree(&loader->names);
    free(loader);
}

int64_t loader_sequences(const Loader *loader) { return loader->sequences; }
int64_t loader_tokens(const Loader *loader) { return loader->tokens; }
int64_t loader_targets(const Loader *loader) { return loader->targets; }
int64_t loader_leftover(const Loader *loader) { return loader->leftover; }
int loader_shards(const Loader *loader) { return loader->shard_count; }

// ---------------------------------------------------------------------------------------------------------------
// The order

static uint32_t feistel_round(uint64_t seed, uint64_t epoch, uint32_t round, uint32_t half) {
    philox4x32_ctr_t counter = {{half, FEISTEL_DOMAIN + round, (uint32_t)epoch, (uint32_t)(epoch >> 32)}};
    philox4x32_key_t key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
    return philox4x32(counter, key).v[0];
}

// Where `place` of 0 … S-1 goes in this epoch. The network permutes 0 … 2^(2·half_bits) - 1, which is less than 4·S
// numbers; walking on along the cycle until it is back below S permutes 0 … S-1, in fewer than 4 steps on average.
static int64_t sequence_permute(const Loader *loader, uint64_t epoch, int64_t place) {
    uint64_t x = (uint64_t)place;
    int bits = loader->half_bits;
    uint64_t mask = (1ULL << bits) - 1;
    do {
        uint64_t left = x >> bits, right = x & mask;
        for (uint32_t round = 0; round < FEISTEL_ROUNDS; round++) {
            uint64_t mixed = left ^ (feistel_round(loader->options.seed, epoch, round, (uint32_t)right) & mask);
            left = right;
            right = mixed;
        }
        x = left << bits | right;
    } while (x >= (uint64_t)loader->sequences);
    return (int64_t)x;
}

int64_t loader_sequence_at(const Loader *loader, int64_t n) {
    assert(n >= 0);
    int64_t epoch = n / loader->sequences, place = n % loader->sequences;
    return loader->options.shuffle ? sequence_permute(loader, (uint64_t)epoch, place) : place;
}

// ---------------------------------------------------------------------------------------------------------------
// Batches

// The tokens that one sequence reads: `targets` + 1 of them, from `start` of the shard on.
typedef struct {
    const Shard *shard;
    int64_t start, targets;
} Span;

// The sequence lies in the last shard that begins at or before it: one without sequences begins where the next
// does.
static Span sequence_span(const Loader *loader, int64_t sequence) {
    int low = 0, high = loader->shard_count - 1;
    while (low < high) {
        int middle = low + (high - low + 1) / 2;
        if (loader->shards[middle].first <= sequence)
            low = middle;
        else
            high = middle - 1;
    }
    const Shard *shard = &loader->shards[low];
    int64_t T = loader->options.T;
    int64_t start = (sequence - shard->first) * T;
    int64_t left = shard->count - 1 - start;
    return (Span){shard, start, left < T ? left : T};
}

// Tells the system that the span will be read soon. Only a hint: the result is the same if it is refused.
static void span_prefetch(Span span) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), token = (size_t)span.shard->token_bytes;
    size_t begin = HEADER_BYTES + (size_t)span.start * token;
    size_t end = begin + (size_t)(span.targets + 1) * token;
    begin -= begin % page;
    madvise(span.shard->map + begin, end - begin, MADV_WILLNEED);
}

static int token_read(const Loader *loader, const Shard *shard, int64_t position) {
    const char *tokens = shard->map + HEADER_BYTES;
    int64_t id =
        shard->token_bytes == 2 ? ((const uint16_t *)tokens)[position] : ((const uint32_t *)tokens)[position];
    if (id >= loader->options.vocab)
        die(EXIT_CODE_USAGE, "these shards were made with another tokenizer, or --vocab-size is too small",
            "shard %s holds token %lld at position %lld, expected ids below the vocabulary of %lld", shard->path,
            (long long)id, (long long)position, (long long)loader->options.vocab);
    return (int)id;
}

static void row_fill(const Loader *loader, Span span, int *inputs, int *targets) {
    int token = token_read(loader, span.shard, span.start);
    for (int64_t i = 0; i < span.targets; i++) {
        inputs[i] = token;
        token = token_read(loader, span.shard, span.start + i + 1);
        targets[i] = token;
    }
}

static void row_blank(int64_t from, int64_t T, int *inputs, int *targets) {
    for (int64_t i = from; i < T; i++) {
        inputs[i] = 0;
        targets[i] = -1;
    }
}

int64_t loader_batch(const Loader *loader, int64_t n, int B, int *inputs, int *targets) {
    int64_t T = loader->options.T;
    int64_t rows = B; // those that exist: evaluation ends with its epoch, training never does
    if (loader->options.every_target && n > loader->sequences - B)
        rows = n < loader->sequences ? loader->sequences - n : 0;

    // All rows are asked for before the first is read, so that a cold disk fetches them together.
    for (int64_t row = 0; row < rows; row++)
        span_prefetch(sequence_span(loader, loader_sequence_at(loader, n + row)));

    int64_t found = 0;
    for (int64_t row = 0; row < B; row++) {
        Span span = {0};
        if (row < rows) {
            span = sequence_span(loader, loader_sequence_at(loader, n + row));
            row_fill(loader, span, inputs + row * T, targets + row * T);
        }
        row_blank(span.targets, T, inputs + row * T, targets + row * T);
        found += span.targets;
    }
    return found;
}
