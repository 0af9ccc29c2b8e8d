// ngram: how far a memory of the last few tokens gets, as a mark that a model has to beat.
//
//     data/ngram --order 5 NAME.json
//
// Trains an interpolated n-gram model with modified Kneser-Ney smoothing (Chen and Goodman 1999) on NAME's training
// shards and measures it on every validation target: each token of a shard but its first. An n-gram never crosses an
// end-of-text, which is the first thing a context can hold. With h the context and h' the context less its oldest token
//
//     p(w | h) = (c(h w) - D(c(h w))) / C(h)  +  (D1 N1(h) + D2 N2(h) + D3 N3(h)) / C(h) · p(w | h')
//
// C(h) is the sum of c(h w) over all w, and Nk(h) the number of w with c(h w) = k (3: or more), which have the discount
// Dk taken off. Below the empty context lies 1 / vocabulary. A context never met passes on p(w | h').
//
// c is the number of occurrences for n-grams of the full order and for those that begin with end-of-text, which cannot
// grow to the left; for all others it is the number of different tokens they were met behind.
//
// All n-grams of one length lie in one hash table. A table's row is some uint32_t counters: c, and for n-grams that are
// contexts of longer ones C, N1, N2 and N3.
#include <errno.h>    // errno
#include <inttypes.h> // PRIu64
#include <math.h>     // log
#include <stdbool.h>  // bool
#include <stdint.h>   // uint64_t
#include <stdio.h>    // fopen, printf
#include <stdlib.h>   // calloc
#include <string.h>   // memcpy
#include <jansson.h>  // the card
#include "error.h"    // die
#include "options.h"  // options_read

enum { SHARD_MAGIC = 20240520, SHARD_VERSION = 1, SHARD_HEADER = 256 };

// ---------------------------------------------------------------------------------------------------------------------
// The hash table

enum { COUNT, TOTAL, ONES, TWOS, MORES, ROW }; // a row's counters; the longest n-grams have COUNT alone

typedef struct {
    uint64_t *keys; // 0: free
    uint32_t *rows; // (slots, width)
    uint64_t slots, used;
    int width;
} Table;

static void table_allocate(Table *table, uint64_t slots) {
    table->slots = slots;
    table->keys = calloc(slots, sizeof *table->keys);
    table->rows = calloc(slots * (uint64_t)table->width, sizeof *table->rows);
    if (!table->keys || !table->rows) {
        die(EXIT_CODE_FAILURE, "use a lower --order or less text", "no memory for %" PRIu64 " n-grams", slots);
    }
}

// Where the key is, or the free slot where it would be.
static uint64_t table_slot(const Table *table, uint64_t key) {
    uint64_t mixed = key * 0x9e3779b97f4a7c15, slot = (mixed ^ mixed >> 32) & (table->slots - 1);
    while (table->keys[slot] && table->keys[slot] != key) slot = (slot + 1) & (table->slots - 1);
    return slot;
}

static uint32_t *table_row(const Table *table, uint64_t slot) {
    return table->rows + slot * (uint64_t)table->width;
}

// The key's row, or NULL.
static const uint32_t *table_find(const Table *table, uint64_t key) {
    uint64_t slot = table_slot(table, key);
    return table->keys[slot] ? table_row(table, slot) : NULL;
}

static void table_grow(Table *table) {
    Table old = *table;
    table_allocate(table, 2 * old.slots);
    for (uint64_t s = 0; s < old.slots; s++) {
        if (!old.keys[s]) continue;
        uint64_t slot = table_slot(table, old.keys[s]);
        table->keys[slot] = old.keys[s];
        memcpy(table_row(table, slot), table_row(&old, s), (size_t)table->width * sizeof *table->rows);
    }
    free(old.keys);
    free(old.rows);
}

// The key's row, new if need be. It moves when the table grows.
static uint32_t *table_take(Table *table, uint64_t key) {
    if (3 * table->used >= 2 * table->slots) table_grow(table);
    uint64_t slot = table_slot(table, key);
    table->used += table->keys[slot] == 0;
    table->keys[slot] = key;
    return table_row(table, slot);
}

// ---------------------------------------------------------------------------------------------------------------------
// The model

enum { ORDER_MAX = 7, TOKEN_BITS = 9, TOKEN_LIMIT = 1 << TOKEN_BITS };

typedef struct {
    int order, vocab, eot;
    Table grams[ORDER_MAX + 1];         // grams[n]: the n-grams; grams[0] holds the empty one, a context
    double discounts[ORDER_MAX + 1][4]; // discounts[n][k]: off the count of an n-gram with count k (3: or more)
} Model;

// The last tokens of a document, as far as the model looks: the newest lowest, TOKEN_BITS each.
typedef struct {
    uint64_t tokens;
    int length;
} Context;

// An n-gram as a table's key: its tokens below a 1, so that no key is 0.
static uint64_t gram_key(uint64_t tokens, int n) {
    uint64_t one = (uint64_t)1 << (n * TOKEN_BITS);
    return one | (tokens & (one - 1));
}

static void context_add(Context *context, const Model *model, int token) {
    if (token == model->eot) *context = (Context){0, 0};
    context->tokens = context->tokens << TOKEN_BITS | (uint64_t)token;
    if (context->length < model->order - 1) context->length++;
}

static Model model_new(int order, int vocab, int eot) {
    Model model = {.order = order, .vocab = vocab, .eot = eot};
    for (int n = 0; n <= order; n++) {
        model.grams[n].width = n < order ? ROW : 1;
        table_allocate(&model.grams[n], 1024);
    }
    return model;
}

// Counts a token behind its context, at the greatest length alone.
static void model_count(Model *model, Context context, int token) {
    int n = context.length + 1;
    uint64_t key = gram_key(context.tokens << TOKEN_BITS | (uint64_t)token, n);
    table_take(&model->grams[n], key)[COUNT]++;
}

// Each different n-gram is one more token met before the n-gram less its oldest token.
static void model_count_shorter(Model *model) {
    for (int n = model->order; n > 1; n--) {
        const Table *grams = &model->grams[n];
        for (uint64_t s = 0; s < grams->slots; s++) {
            if (grams->keys[s]) table_take(&model->grams[n - 1], gram_key(grams->keys[s], n - 1))[COUNT]++;
        }
    }
}

// Adds up C, N1, N2 and N3 of every context.
static void model_sum_contexts(Model *model) {
    for (int n = 1; n <= model->order; n++) {
        const Table *grams = &model->grams[n];
        for (uint64_t s = 0; s < grams->slots; s++) {
            uint32_t count = table_row(grams, s)[COUNT];
            if (!count) continue;
            uint64_t tokens = grams->keys[s] >> TOKEN_BITS; // with the key's 1, which gram_key puts back
            uint32_t *context = table_take(&model->grams[n - 1], gram_key(tokens, n - 1));
            context[TOTAL] += count;
            context[count == 1 ? ONES : count == 2 ? TWOS : MORES]++;
        }
    }
}

// Dk = k - (k+1) · n1 / (n1 + 2 n2) · n(k+1) / nk, with nk the number of n-grams with count k. Where there are too few
// of them to say, k/2.
static void model_discount(Model *model) {
    for (int n = 1; n <= model->order; n++) {
        double with[5] = {0};
        const Table *grams = &model->grams[n];
        for (uint64_t s = 0; s < grams->slots; s++) {
            uint32_t count = table_row(grams, s)[COUNT];
            if (count <= 4) with[count]++;
        }
        for (int k = 1; k <= 3; k++) {
            double discount = k - (k + 1) * with[1] / (with[1] + 2 * with[2]) * with[k + 1] / with[k];
            model->discounts[n][k] = discount > 0 && discount < k ? discount : k / 2.0;
        }
    }
}

static void model_finish(Model *model) {
    model_count_shorter(model);
    model_sum_contexts(model);
    model_discount(model);
}

// p(token | context), from the empty context upwards.
static double model_probability(const Model *model, Context context, int token) {
    double p = 1.0 / model->vocab;
    for (int n = 1; n <= context.length + 1; n++) {
        const double *discounts = model->discounts[n];
        const uint32_t *row = table_find(&model->grams[n - 1], gram_key(context.tokens, n - 1));
        if (!row || row[TOTAL] == 0) break; // never met; then no longer one was
        const uint32_t *gram =
            table_find(&model->grams[n], gram_key(context.tokens << TOKEN_BITS | (uint64_t)token, n));
        double count = gram ? gram[COUNT] : 0;
        double kept = count > 0 ? count - discounts[count < 3 ? (int)count : 3] : 0;
        double left = discounts[1] * row[ONES] + discounts[2] * row[TWOS] + discounts[3] * row[MORES];
        p = (kept + left * p) / row[TOTAL];
    }
    return p;
}

// ---------------------------------------------------------------------------------------------------------------------
// Shards

typedef struct {
    uint16_t *tokens;
    uint64_t count;
} Shard;

// Reads shard `number` of a set whole and checks it.
static Shard shard_read(const char *card, const char *set, int number, const Model *model) {
    char path[4096];
    int32_t header[SHARD_HEADER];
    snprintf(path, sizeof path, "%.*s_%s_%06d.bin", (int)strlen(card) - 5, card, set, number);
    FILE *file = fopen(path, "rb");
    if (!file) die(EXIT_CODE_USAGE, "data/tokenize --verify", "cannot open %s: %s", path, strerror(errno));
    if (fread(header, sizeof header, 1, file) != 1 || header[0] != SHARD_MAGIC || header[1] != SHARD_VERSION ||
        header[2] < 1) {
        die(EXIT_CODE_USAGE, "data/tokenize --verify",
            "%s: expected a shard of 16-bit tokens, found something else", path);
    }
    Shard shard = {.count = (uint64_t)header[2]};
    shard.tokens = malloc(shard.count * sizeof *shard.tokens);
    if (!shard.tokens) die(EXIT_CODE_FAILURE, NULL, "no memory for %s", path);
    size_t got = fread(shard.tokens, sizeof *shard.tokens, shard.count, file);
    if (got != shard.count)
        die(EXIT_CODE_USAGE, "data/tokenize --verify", "%s: expected %" PRIu64 " tokens, found %zu", path,
            shard.count, got);
    for (uint64_t i = 0; i < shard.count; i++) {
        if (shard.tokens[i] >= model->vocab)
            die(EXIT_CODE_USAGE, "data/tokenize --verify", "%s: expected tokens below %d, found %d at %" PRIu64,
                path, model->vocab, shard.tokens[i], i);
    }
    fclose(file);
    return shard;
}

// A document may run on from one shard to the next: so does the context.
static void set_train(Model *model, const char *card, int shards) {
    Context context = {0, 0};
    for (int i = 0; i < shards; i++) {
        Shard shard = shard_read(card, "train", i, model);
        for (uint64_t t = 0; t < shard.count; t++) {
            if (i > 0 || t > 0) model_count(model, context, shard.tokens[t]);
            context_add(&context, model, shard.tokens[t]);
        }
        free(shard.tokens);
    }
    model_finish(model);
}

typedef struct {
    double nats;
    uint64_t targets;
} Score;

// The probabilities of all tokens must sum to one. Dies if they do not.
static void probabilities_check(const Model *model, Context context) {
    double sum = 0;
    for (int token = 0; token < model->vocab; token++) sum += model_probability(model, context, token);
    if (fabs(sum - 1) > 1e-9)
        die(EXIT_CODE_FAILURE, NULL, "the probabilities after a context sum to %.12f, expected 1", sum);
}

// Every 1000th context is checked on the way.
static Score set_measure(const Model *model, const char *card, int shards) {
    Score score = {0, 0};
    for (int i = 0; i < shards; i++) {
        Shard shard = shard_read(card, "val", i, model);
        Context context = {0, 0};
        context_add(&context, model, shard.tokens[0]);
        for (uint64_t t = 1; t < shard.count; t++) {
            if (t % 1000 == 1) probabilities_check(model, context);
            score.nats -= log(model_probability(model, context, shard.tokens[t]));
            context_add(&context, model, shard.tokens[t]);
        }
        score.targets += shard.count - 1;
        free(shard.tokens);
    }
    return score;
}

// ---------------------------------------------------------------------------------------------------------------------
// The command line

static int card_number(const json_t *card, const char *path, const char *set, const char *key) {
    json_t *number = json_object_get(set ? json_object_get(card, set) : card, key);
    if (!json_is_integer(number)) {
        die(EXIT_CODE_USAGE, "is this a card of data/tokenize?", "%s: expected a number '%s', found none", path,
            key);
    }
    return (int)json_integer_value(number);
}

static void card_measure(const char *path, int order) {
    json_error_t error;
    size_t length = strlen(path);
    if (length < 6 || length > 4000 || strcmp(path + length - 5, ".json") != 0) {
        die(EXIT_CODE_USAGE, "name the card", "expected NAME.json, found '%s'", path);
    }
    json_t *card = json_load_file(path, 0, &error);
    if (!card) die(EXIT_CODE_USAGE, NULL, "cannot read %s: line %d: %s", path, error.line, error.text);
    Model model =
        model_new(order, card_number(card, path, NULL, "vocab_size"), card_number(card, path, NULL, "eot"));
    if (model.vocab > TOKEN_LIMIT) {
        die(EXIT_CODE_USAGE, "use --tokenizer bytes", "%s: expected at most %d tokens, found %d", path, TOKEN_LIMIT,
            model.vocab);
    }
    set_train(&model, path, card_number(card, path, "train", "shards"));
    Score score = set_measure(&model, path, card_number(card, path, "val", "shards"));
    if (score.targets == 0)
        die(EXIT_CODE_USAGE, "data/tokenize --val-fraction 0.1", "%s: expected validation shards, found none",
            path);
    double nats = score.nats / (double)score.targets;
    printf("order %d: %.6f nats/token, %.6f bits/token over %" PRIu64 " targets\n", order, nats, nats / log(2),
           score.targets);
    json_decref(card);
}

int main(int argc, char **argv) {
    int64_t order = 5;
    bool help = false;
    Option options[] = {
        {0, "order", OPTION_COUNT, &order, 1, ORDER_MAX, NULL, "N tokens in an n-gram, context and target (5)",
         false},
        {0, "help", OPTION_FLAG, &help, 0, 0, NULL, "print this", false},
    };
    enum { OPTIONS = sizeof options / sizeof *options };
    error_program("ngram");
    int cards = options_read(options, OPTIONS, argc, argv, true);
    if (help) {
        printf(
            "usage: data/ngram [options] NAME.json\n\nTrains an n-gram model (modified Kneser-Ney) on NAME's training "
            "shards and prints its loss\non every target of the validation shards.\n\n");
        options_help(options, OPTIONS);
    } else {
        if (cards != 1) die(EXIT_CODE_USAGE, "see --help", "expected one card, found %d", cards);
        card_measure(argv[1], (int)order);
    }
    if (ferror(stdout) || fflush(stdout) != 0) {
        die(EXIT_CODE_FAILURE, "is the disk full?", "cannot write to standard output: %s", strerror(errno));
    }
    return EXIT_CODE_DONE;
}
