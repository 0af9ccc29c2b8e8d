// tokenize: text → token shards and their card; checks them; turns them back into text.
//
//     inputs → documents → spool: one unnamed file of all tokens, and one of where each document begins
//                            |
//                            split: which documents are for training, which for validation
//                            ↓
//     NAME_train_000000.bin … NAME_val_000000.bin … and, last, NAME.json
//
// Where validation begins is known only when everything has been read, and standard input cannot be read twice: hence
// the spool. It costs disk space of the size of the shards; memory holds one document and a few buffers. The spool's
// files have no name, so nothing is left of them however the program ends.
//
// End-of-text stands before each document. Shards are filled to the last token, so documents run on from one to the
// next. A document that is cut into a training and a validation part (there was only one) has end-of-text before both.
//
// Each file is written under a temporary name and renamed when it is whole. The card of an earlier run goes first and
// the new one comes last: a card that is there describes shards that are there.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE // asprintf, memmem
#endif
#include <errno.h>            // errno
#include <fts.h>              // fts_open: folders
#include <inttypes.h>         // PRIu64
#include <stdarg.h>           // va_list
#include <stdbool.h>          // bool
#include <stdint.h>           // uint16_t, uint64_t
#include <stdio.h>            // fopen, fwrite
#include <stdlib.h>           // realloc, mkstemp
#include <string.h>           // memmem, strcmp
#include <sys/stat.h>         // fstat
#include <unistd.h>           // unlink, isatty
#include <Random123/philox.h> // philox4x32
#include <jansson.h>          // the card
#include "error.h"            // die
#include "options.h"          // options_read
#include "tokenizer.h"        // bytes ↔ tokens

enum { SHARD_MAGIC = 20240520, SHARD_VERSION = 1, SHARD_HEADER = 256, BLOCK = 1 << 16 };

static const char *const disk_hint = "is the disk full?";

static char *text_make(const char *format, ...) {
    char *text;
    va_list arguments;
    va_start(arguments, format);
    int length = vasprintf(&text, format, arguments);
    va_end(arguments);
    if (length < 0) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    return text;
}

static char *shard_path(const char *name, const char *set, int shard) {
    return text_make("%s_%s_%06d.bin", name, set, shard);
}

// A shard's contents as one number: FNV-1a over its token ids. Start with HASH_EMPTY.
static const uint64_t HASH_EMPTY = 0xcbf29ce484222325;
static uint64_t hash_add(uint64_t hash, uint16_t token) { return (hash ^ token) * 0x100000001b3; }

// ---------------------------------------------------------------------------------------------------------------------
// What is asked for

typedef struct {
    const char *output, *tokenizer, *documents, *verify, *decode; // NULL: not given
    double val_fraction;
    int64_t val_seed; // -1: not given
    int64_t shard_tokens;
    char **inputs; // what is no option
    int input_count;
} Request;

// What ends a document: "" for nothing but the end of a file.
static const char *separator_read(const char *text) {
    if (strcmp(text, "file") == 0) return "";
    if (strcmp(text, "line") == 0) return "\n";
    static const char letters[] = "nrt\\", meanings[] = "\n\r\t\\";
    char *separator = text_make("%s", text), *end = separator;
    for (const char *c = text; *c; c++) {
        const char *letter = *c == '\\' && c[1] ? strchr(letters, c[1]) : NULL;
        if (*c == '\\' && !letter) {
            die(EXIT_CODE_USAGE, "write \\\\ for a backslash",
                "--documents expects \\n, \\r, \\t or \\\\, found '%.2s'", c);
        }
        *end++ = letter ? meanings[letter - letters] : *c;
        c += letter != NULL;
    }
    *end = '\0';
    if (!*separator) die(EXIT_CODE_USAGE, "--documents file", "--documents expects a separator, found ''");
    return separator;
}

// ---------------------------------------------------------------------------------------------------------------------
// The spool

typedef struct {
    FILE *tokens; // uint16_t each: end-of-text and text of each document
    FILE *starts; // uint64_t each: the place in tokens of a document's end-of-text
    uint64_t documents, count;
    const Tokenizer *tokenizer;
    const char *name; // of the output, for messages
} Spool;

// A file without a name, where the output will be.
static FILE *spool_file(const char *name) {
    char *path = text_make("%s.spool.XXXXXX", name);
    int file = mkstemp(path);
    FILE *stream = file < 0 ? NULL : fdopen(file, "w+b");
    if (!stream)
        die(EXIT_CODE_USAGE, "does the folder exist?", "--output %s: cannot create %s: %s", name, path,
            strerror(errno));
    unlink(path);
    free(path);
    return stream;
}

static void spool_write(const Spool *spool, FILE *file, const void *items, size_t size, size_t count) {
    if (fwrite(items, size, count, file) != count) {
        die(EXIT_CODE_FAILURE, disk_hint, "cannot write the spool of --output %s: %s", spool->name,
            strerror(errno));
    }
}

static void spool_read(const Spool *spool, FILE *file, void *items, size_t size, size_t count) {
    if (fread(items, size, count, file) != count) {
        die(EXIT_CODE_FAILURE, NULL, "cannot read the spool of --output %s: %s", spool->name, strerror(errno));
    }
}

// Adds a document. Bytes are tokens whatever stands around them, so the text may be encoded block by block.
static void spool_document(Spool *spool, const char *text, size_t bytes) {
    static int tokens[BLOCK];
    static uint16_t items[BLOCK];
    if (bytes == 0) return;
    items[0] = (uint16_t)tokenizer_eot(spool->tokenizer);
    spool_write(spool, spool->starts, &spool->count, sizeof spool->count, 1);
    spool_write(spool, spool->tokens, items, sizeof *items, 1);
    spool->documents++;
    spool->count++;
    for (size_t at = 0; at < bytes; at += BLOCK) {
        size_t length = bytes - at < BLOCK ? bytes - at : BLOCK;
        size_t count = tokenizer_encode(spool->tokenizer, text + at, length, tokens, BLOCK);
        for (size_t i = 0; i < count; i++) items[i] = (uint16_t)tokens[i];
        spool_write(spool, spool->tokens, items, sizeof *items, count);
        spool->count += count;
    }
}

static void spool_rewind(Spool *spool) {
    if (fflush(spool->tokens) || fflush(spool->starts)) {
        die(EXIT_CODE_FAILURE, disk_hint, "cannot write the spool of --output %s: %s", spool->name,
            strerror(errno));
    }
    rewind(spool->tokens);
    rewind(spool->starts);
}

// ---------------------------------------------------------------------------------------------------------------------
// Inputs → documents

// Reads a file block by block. `text` holds what no separator has ended yet, so at most a document and a block.
static void file_spool(FILE *file, const char *path, const char *separator, Spool *spool) {
    size_t ending = strlen(separator), length = 0, capacity = 0, got;
    char *text = NULL;
    do {
        if (capacity - length < BLOCK && !(text = realloc(text, capacity = 2 * capacity + BLOCK))) {
            die(EXIT_CODE_FAILURE, "split it with --documents", "%s: no memory for a document of over %zu bytes",
                path, length);
        }
        got = fread(text + length, 1, BLOCK, file);
        size_t searched = length < ending ? 0 : length - ending + 1, start = 0; // a separator may span two blocks
        length += got;
        char *end;
        while (ending && (end = memmem(text + searched, length - searched, separator, ending))) {
            spool_document(spool, text + start, (size_t)(end - text) - start);
            searched = start = (size_t)(end - text) + ending;
        }
        length -= start;
        memmove(text, text + start, length);
    } while (got == BLOCK);
    if (ferror(file)) die(EXIT_CODE_USAGE, NULL, "cannot read %s: %s", path, strerror(errno));
    spool_document(spool, text, length);
    free(text);
}

static void path_spool(const char *path, const char *separator, Spool *spool) {
    FILE *file = fopen(path, "rb");
    if (!file) die(EXIT_CODE_USAGE, NULL, "cannot open %s: %s", path, strerror(errno));
    file_spool(file, path, separator, spool);
    fclose(file);
}

static int entry_compare(const FTSENT **a, const FTSENT **b) { return strcmp((*a)->fts_name, (*b)->fts_name); }

// A file, or all files of a folder, sorted by name.
static void input_spool(char *input, const char *separator, Spool *spool) {
    if (strcmp(input, "-") == 0) {
        file_spool(stdin, "standard input", separator, spool);
        return;
    }
    FTS *walk = fts_open((char *[]){input, NULL}, FTS_LOGICAL | FTS_NOCHDIR, entry_compare);
    if (!walk) die(EXIT_CODE_FAILURE, NULL, "cannot walk through %s: %s", input, strerror(errno));
    for (FTSENT *entry; (entry = fts_read(walk));) {
        if (entry->fts_info == FTS_NS || entry->fts_info == FTS_ERR || entry->fts_info == FTS_DNR ||
            entry->fts_info == FTS_SLNONE) {
            const char *reason = strerror(entry->fts_errno ? entry->fts_errno : ENOENT);
            die(EXIT_CODE_USAGE, NULL, "cannot read %s: %s", entry->fts_path, reason);
        }
        bool pipe_itself = entry->fts_info == FTS_DEFAULT && entry->fts_level == FTS_ROOTLEVEL;
        if (entry->fts_info == FTS_F || pipe_itself) path_spool(entry->fts_path, separator, spool);
    }
    fts_close(walk);
}

// ---------------------------------------------------------------------------------------------------------------------
// Sets of shards

typedef struct {
    const char *name, *set; // NAME, "train" or "val"
    const Tokenizer *tokenizer;
    uint64_t shard_tokens;             // that fit in a shard
    uint64_t documents, tokens, bytes; // written so far
    int shards;                        // begun so far
    FILE *file;                        // the shard being written; NULL: none
    uint64_t in_file, hash;            // its tokens so far
    json_t *hashes;                    // of the shards that are whole
} Set;

static Set set_open(const char *name, const char *set, const Tokenizer *tokenizer, uint64_t shard_tokens) {
    return (Set){
        .name = name, .set = set, .tokenizer = tokenizer, .shard_tokens = shard_tokens, .hashes = json_array()};
}

// Removes the unfinished shard and ends.
static void set_fail(const Set *set, const char *temporary) {
    int reason = errno;
    unlink(temporary);
    die(EXIT_CODE_FAILURE, disk_hint, "cannot write %s_%s_%06d.bin: %s", set->name, set->set, set->shards - 1,
        strerror(reason));
}

// The header is written twice: empty, and with the count when that is known.
static bool shard_header_write(FILE *file, uint64_t count) {
    int32_t header[SHARD_HEADER] = {SHARD_MAGIC, SHARD_VERSION, (int32_t)count};
    return fseeko(file, 0, SEEK_SET) == 0 && fwrite(header, sizeof header, 1, file) == 1;
}

static void set_finish_shard(Set *set) {
    if (!set->file) return;
    char *path = shard_path(set->name, set->set, set->shards - 1), *temporary = text_make("%s.tmp", path), hash[17];
    bool written = shard_header_write(set->file, set->in_file);
    bool closed = fclose(set->file) == 0;
    if (!written || !closed || rename(temporary, path) != 0) set_fail(set, temporary);
    snprintf(hash, sizeof hash, "%016" PRIx64, set->hash);
    json_array_append_new(set->hashes, json_string(hash));
    set->file = NULL;
    free(temporary);
    free(path);
}

static void set_begin_shard(Set *set) {
    char *temporary = text_make("%s_%s_%06d.bin.tmp", set->name, set->set, set->shards++);
    set->file = fopen(temporary, "wb");
    if (!set->file || !shard_header_write(set->file, 0)) set_fail(set, temporary);
    set->in_file = 0;
    set->hash = HASH_EMPTY;
    free(temporary);
}

static void set_write(Set *set, const uint16_t *tokens, size_t count) {
    while (count > 0) {
        if (set->file && set->in_file == set->shard_tokens) set_finish_shard(set);
        if (!set->file) set_begin_shard(set);
        uint64_t room = set->shard_tokens - set->in_file;
        size_t now = count < room ? count : (size_t)room, bytes;
        if (fwrite(tokens, sizeof *tokens, now, set->file) != now) {
            set_fail(set, text_make("%s_%s_%06d.bin.tmp", set->name, set->set, set->shards - 1));
        }
        for (size_t i = 0; i < now; i++) {
            tokenizer_decode(set->tokenizer, tokens[i], &bytes);
            set->bytes += bytes;
            set->hash = hash_add(set->hash, tokens[i]);
        }
        set->in_file += now;
        set->tokens += now;
        tokens += now;
        count -= now;
    }
}

// Ends the last shard, and removes what an earlier run with more shards has left.
static void set_close(Set *set) {
    set_finish_shard(set);
    char *stale = NULL;
    for (int shard = set->shards; unlink(stale = shard_path(set->name, set->set, shard)) == 0; shard++) free(stale);
    free(stale);
}

// ---------------------------------------------------------------------------------------------------------------------
// The split

// Validation is the documents from `first` on or, if drawn, `wanted` of the `left` that are still to come; or it is the
// only document's last `cut` tokens.
typedef struct {
    uint64_t first, cut;
    bool drawn;
    uint64_t seed, left, wanted;
} Split;

// The last document that begins early enough for it and all behind it to hold `fraction` of the tokens.
static uint64_t split_last(Spool *spool, double fraction) {
    uint64_t first = 1, start;
    for (uint64_t i = 0; i < spool->documents; i++) {
        spool_read(spool, spool->starts, &start, sizeof start, 1);
        if ((double)(spool->count - start) < fraction * (double)spool->count) break;
        if (i > 0) first = i; // the first document is always for training
    }
    rewind(spool->starts);
    return first;
}

// Both sets get something, however small the fraction or the input.
static Split split_plan(Spool *spool, const Request *request) {
    double fraction = request->val_fraction;
    uint64_t documents = spool->documents, text = spool->count - 1;
    Split split = {.first = documents, .seed = (uint64_t)request->val_seed};
    bool drawn = request->val_seed >= 0;
    if (fraction == 0) return split;
    if (documents == 1) {
        if (drawn)
            die(EXIT_CODE_USAGE, "leave --val-seed out, or split with --documents",
                "--val-seed draws documents, found only one");
        if (text < 2)
            die(EXIT_CODE_USAGE, NULL, "--val-fraction expects two tokens at least, found %" PRIu64, text);
        split.cut = (uint64_t)(fraction * (double)text);
        if (split.cut == 0) split.cut = 1;
    } else if (drawn) {
        split.drawn = true;
        split.left = documents;
        split.wanted = (uint64_t)(fraction * (double)documents + 0.5);
        if (split.wanted == 0) split.wanted = 1;
        if (split.wanted == documents) split.wanted--;
    } else {
        split.first = split_last(spool, fraction);
    }
    return split;
}

// Whether document i is for validation. Asked once for each, in order: of those left, the wanted ones are drawn with
// equal chances (Knuth, The Art of Computer Programming 2, 3.4.2, algorithm S).
static bool split_takes(Split *split, uint64_t i) {
    if (!split->drawn) return i >= split->first;
    philox4x32_key_t key = {{(uint32_t)split->seed, (uint32_t)(split->seed >> 32)}};
    philox4x32_ctr_t counter = {{(uint32_t)i, (uint32_t)(i >> 32), 0, 0}};
    philox4x32_ctr_t random = philox4x32(counter, key);
    double chance = (double)(((uint64_t)random.v[0] << 32 | random.v[1]) >> 11) * 0x1p-53; // in 0 … 1, less than 1
    bool taken = chance * (double)split->left < (double)split->wanted;
    split->left--;
    split->wanted -= taken;
    return taken;
}

// Moves the next `count` tokens of the spool to the set.
static void tokens_copy(Spool *spool, uint64_t count, Set *set) {
    static uint16_t tokens[BLOCK];
    while (count > 0) {
        size_t now = count < BLOCK ? (size_t)count : BLOCK;
        spool_read(spool, spool->tokens, tokens, sizeof *tokens, now);
        set_write(set, tokens, now);
        count -= now;
    }
}

static void documents_copy(Spool *spool, Split split, Set *train, Set *val) {
    uint64_t start, next;
    spool_read(spool, spool->starts, &start, sizeof start, 1);
    for (uint64_t i = 0; i < spool->documents; i++, start = next) {
        next = spool->count;
        if (i + 1 < spool->documents) spool_read(spool, spool->starts, &next, sizeof next, 1);
        Set *set = split_takes(&split, i) ? val : train;
        tokens_copy(spool, next - start - split.cut, set);
        set->documents++;
    }
    if (split.cut) {
        uint16_t eot = (uint16_t)tokenizer_eot(spool->tokenizer);
        set_write(val, &eot, 1);
        tokens_copy(spool, split.cut, val);
        val->documents++;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The card

static json_t *set_describe(const Set *set) {
    return json_pack("{s:i, s:I, s:I, s:I, s:O}", "shards", set->shards, "documents", (json_int_t)set->documents,
                     "tokens", (json_int_t)set->tokens, "bytes", (json_int_t)set->bytes, "hashes", set->hashes);
}

static void card_write(const char *path, const Request *request, const Spool *spool, const Set *train,
                       const Set *val) {
    json_t *source = json_array();
    for (int i = 0; i < request->input_count; i++) {
        json_t *input = json_string(request->inputs[i]);
        if (!input) die(EXIT_CODE_USAGE, "rename it", "%s: expected a name in UTF-8", request->inputs[i]);
        json_array_append_new(source, input);
    }
    json_t *card =
        json_pack("{s:i, s:s, s:i, s:I, s:I, s:I, s:o, s:o, s:o}", "vocab_size", tokenizer_vocab(spool->tokenizer),
                  "tokenizer", request->tokenizer, "eot", tokenizer_eot(spool->tokenizer), "documents",
                  (json_int_t)spool->documents, "tokens", (json_int_t)(train->tokens + val->tokens), "bytes",
                  (json_int_t)(train->bytes + val->bytes), "source", source, "train", set_describe(train), "val",
                  set_describe(val));
    char *temporary = text_make("%s.tmp", path);
    FILE *file = fopen(temporary, "w");
    bool written = card && file && json_dumpf(card, file, JSON_INDENT(2)) == 0 && fputc('\n', file) != EOF;
    if (!file || fclose(file) != 0 || !written || rename(temporary, path) != 0) {
        int reason = errno;
        unlink(temporary);
        die(EXIT_CODE_FAILURE, disk_hint, "cannot write %s: %s", path, strerror(reason));
    }
    json_decref(card);
    free(temporary);
}

static void inputs_tokenize(const Request *request) {
    const char *name = request->output, *separator = separator_read(request->documents);
    uint64_t shard_tokens = (uint64_t)request->shard_tokens;
    if (request->val_seed >= 0 && request->val_fraction == 0) {
        die(EXIT_CODE_USAGE, "add --val-fraction 0.1", "--val-seed expects --val-fraction, found none");
    }
    Tokenizer *tokenizer = tokenizer_open(request->tokenizer);
    Spool spool = {.tokens = spool_file(name), .starts = spool_file(name), .tokenizer = tokenizer, .name = name};
    for (int i = 0; i < request->input_count; i++) input_spool(request->inputs[i], separator, &spool);
    if (spool.documents == 0) {
        die(EXIT_CODE_USAGE, "is this the right input?", "%s: expected text, found none", request->inputs[0]);
    }
    spool_rewind(&spool);
    Split split = split_plan(&spool, request);

    char *card = text_make("%s.json", name);
    unlink(card);
    Set train = set_open(name, "train", tokenizer, shard_tokens),
        val = set_open(name, "val", tokenizer, shard_tokens);
    documents_copy(&spool, split, &train, &val);
    set_close(&train);
    set_close(&val);
    card_write(card, request, &spool, &train, &val);
    printf("%s: %" PRIu64 " documents, %" PRIu64 " bytes, %" PRIu64 " tokens to train on in %d shards, %" PRIu64
           " to validate on in %d\n",
           card, spool.documents, train.bytes + val.bytes, train.tokens, train.shards, val.tokens, val.shards);
}

// ---------------------------------------------------------------------------------------------------------------------
// --verify and --decode

// Opens a shard and checks header and size; what follows is `count` tokens.
static FILE *shard_open(const char *path, int code, uint64_t *count) {
    int32_t header[SHARD_HEADER];
    struct stat status;
    FILE *file = fopen(path, "rb");
    if (!file || fstat(fileno(file), &status) != 0) die(code, NULL, "cannot open %s: %s", path, strerror(errno));
    if (fread(header, sizeof header, 1, file) != 1)
        die(code, NULL, "%s: expected a header of %zu bytes, found %jd bytes in all", path, sizeof header,
            (intmax_t)status.st_size);
    if (header[0] != SHARD_MAGIC || header[1] != SHARD_VERSION || header[2] < 0) {
        die(code, "is this a shard of 16-bit tokens?", "%s: expected magic %d, version %d, found %d, %d", path,
            SHARD_MAGIC, SHARD_VERSION, header[0], header[1]);
    }
    *count = (uint64_t)header[2];
    intmax_t expected = (intmax_t)(sizeof header + *count * sizeof(uint16_t));
    if (status.st_size != expected)
        die(code, "write it again", "%s: expected %jd bytes for %" PRIu64 " tokens, found %jd", path, expected,
            *count, (intmax_t)status.st_size);
    return file;
}

// Reads up to BLOCK of the tokens that are left.
static size_t shard_read(FILE *file, const char *path, uint16_t *tokens, uint64_t left) {
    size_t now = left < BLOCK ? (size_t)left : BLOCK;
    if (fread(tokens, sizeof *tokens, now, file) != now)
        die(EXIT_CODE_FAILURE, NULL, "cannot read %s: %s", path, strerror(errno));
    return now;
}

static json_int_t card_number(const json_t *card, const char *path, const char *key) {
    json_t *number = json_object_get(card, key);
    if (!json_is_integer(number))
        die(EXIT_CODE_USAGE, "is this a card of data/tokenize?", "%s: expected a number '%s', found none", path,
            key);
    return json_integer_value(number);
}

static void claim_check(const char *card, const char *set, const char *what, json_int_t expected, uint64_t found) {
    if ((uint64_t)expected != found) {
        die(EXIT_CODE_FAILURE, "write the shards again",
            "%s: %s: expected %" JSON_INTEGER_FORMAT " %s, found %" PRIu64, card, set, expected, what, found);
    }
}

// Adds up one shard into `found`; dies if its tokens are not those that were written.
static void shard_verify(const char *path, const char *hash, json_int_t vocab, json_int_t eot, Set *found) {
    static uint16_t tokens[BLOCK];
    uint64_t count;
    FILE *file = shard_open(path, EXIT_CODE_FAILURE, &count);
    found->hash = HASH_EMPTY;
    for (uint64_t at = 0; at < count;) {
        size_t now = shard_read(file, path, tokens, count - at);
        for (size_t i = 0; i < now; i++, at++) {
            if (tokens[i] >= vocab)
                die(EXIT_CODE_FAILURE, NULL,
                    "%s: expected tokens below %" JSON_INTEGER_FORMAT ", found %d at %" PRIu64, path, vocab,
                    tokens[i], at);
            if (found->tokens == 0 && at == 0 && tokens[i] != eot)
                die(EXIT_CODE_FAILURE, NULL, "%s: expected end-of-text first, found %d", path, tokens[i]);
            found->documents += tokens[i] == eot;
            found->hash = hash_add(found->hash, tokens[i]);
        }
    }
    fclose(file);
    found->tokens += count;
    if (!hash || strtoull(hash, NULL, 16) != found->hash) {
        die(EXIT_CODE_FAILURE, "write the shards again", "%s: expected hash %s, found %016" PRIx64, path,
            hash ? hash : "in the card", found->hash);
    }
}

static uint64_t set_verify(const json_t *card, const char *card_path, const char *name, const char *set) {
    json_t *claims = json_object_get(card, set);
    json_int_t shards = card_number(claims, card_path, "shards"),
               vocab = card_number(card, card_path, "vocab_size"), eot = card_number(card, card_path, "eot");
    Set found = {.name = name, .set = set};
    for (int i = 0; i < shards; i++) {
        char *path = shard_path(name, set, i);
        shard_verify(path, json_string_value(json_array_get(json_object_get(claims, "hashes"), (size_t)i)), vocab,
                     eot, &found);
        free(path);
    }
    char *further = shard_path(name, set, (int)shards);
    if (access(further, F_OK) == 0)
        die(EXIT_CODE_FAILURE, "remove it", "%s: expected %" JSON_INTEGER_FORMAT " shards, found %s too", card_path,
            shards, further);
    claim_check(card_path, set, "documents", card_number(claims, card_path, "documents"), found.documents);
    claim_check(card_path, set, "tokens", card_number(claims, card_path, "tokens"), found.tokens);
    free(further);
    return found.tokens;
}

static void card_verify(const char *path) {
    size_t length = strlen(path);
    if (length < 6 || strcmp(path + length - 5, ".json") != 0)
        die(EXIT_CODE_USAGE, "name the card", "--verify expects NAME.json, found '%s'", path);
    char *name = text_make("%.*s", (int)length - 5, path);
    json_error_t error;
    json_t *card = json_load_file(path, 0, &error);
    if (!card) die(EXIT_CODE_USAGE, NULL, "cannot read %s: line %d: %s", path, error.line, error.text);
    uint64_t tokens = set_verify(card, path, name, "train") + set_verify(card, path, name, "val");
    claim_check(path, "train and val", "tokens", card_number(card, path, "tokens"), tokens);
    printf("%s: %" PRIu64 " tokens, as the card says\n", path, tokens);
    json_decref(card);
    free(name);
}

static void shard_decode(const char *path, const char *tokenizer_name) {
    static uint16_t tokens[BLOCK];
    Tokenizer *tokenizer = tokenizer_open(tokenizer_name);
    uint64_t count;
    FILE *file = shard_open(path, EXIT_CODE_USAGE, &count);
    for (uint64_t left = count; left > 0;) {
        size_t now = shard_read(file, path, tokens, left), bytes;
        for (size_t i = 0; i < now; i++) {
            if (tokens[i] >= tokenizer_vocab(tokenizer)) {
                die(EXIT_CODE_USAGE, "was it written with another tokenizer?",
                    "%s: expected tokens below %d, found %d at %" PRIu64, path, tokenizer_vocab(tokenizer),
                    tokens[i], count - left + i);
            }
            const char *text = tokenizer_decode(tokenizer, tokens[i], &bytes);
            fwrite(text, 1, bytes, stdout); // a failure stays in ferror
        }
        left -= now;
    }
    fclose(file);
    tokenizer_close(tokenizer);
}

static const char *const usage =
    "usage: data/tokenize --output NAME [options] [FILE|FOLDER|-]...\n"
    "       data/tokenize --verify NAME.json\n"
    "       data/tokenize --decode SHARD\n"
    "\n"
    "Writes NAME_train_000000.bin, ..., NAME_val_000000.bin, ... and the card NAME.json. A folder stands for the\n"
    "files in it and in its folders, sorted by name; - and no input at all stand for standard input.\n"
    "\n";

static const char *const help_end =
    "\n"
    "--documents SEPARATOR: this text ends a document and belongs to none; \\n, \\r, \\t and \\\\ are understood. Empty\n"
    "documents are left out. --val-fraction takes the fewest last documents that hold X of the tokens, or the last\n"
    "part of the document if there is only one.\n";

// --verify and --decode stand alone, but for the tokenizer to decode with.
static void request_run(Request *request) {
    static char standard_input[] = "-";
    static char *nothing_but_it[] = {standard_input};
    bool other = request->verify || request->decode;
    if ((request->verify && request->decode) || (other && (request->output || request->input_count > 0))) {
        die(EXIT_CODE_USAGE, "see --help", "--verify and --decode stand alone, found more");
    }
    if (request->verify) {
        card_verify(request->verify);
    } else if (request->decode) {
        shard_decode(request->decode, request->tokenizer);
    } else if (request->output) {
        if (request->input_count == 0) {
            if (isatty(STDIN_FILENO)) die(EXIT_CODE_USAGE, "see --help", "expected files or folders, found none");
            request->inputs = nothing_but_it;
            request->input_count = 1;
        }
        inputs_tokenize(request);
    } else {
        die(EXIT_CODE_USAGE, "see --help", "--output NAME is missing");
    }
}

int main(int argc, char **argv) {
    Request r = {.tokenizer = "bytes", .documents = "file", .val_seed = -1, .shard_tokens = 100000000};
    bool help = false;
    Option options[] = {
        {0, "output", OPTION_TEXT, &r.output, 0, 0, NULL, "NAME where to", false},
        {0, "tokenizer", OPTION_TEXT, &r.tokenizer, 0, 0, NULL, "bytes token i is byte i, 256 end-of-text", false},
        {0, "documents", OPTION_TEXT, &r.documents, 0, 0, NULL, "file|line|SEPARATOR what a document is (file)",
         false},
        {0, "val-fraction", OPTION_NUMBER, &r.val_fraction, 0, 0.99, NULL, "X the last X is for validation (0)",
         false},
        {0, "val-seed", OPTION_COUNT, &r.val_seed, 0, 1e15, NULL, "N draw X of the documents instead", false},
        {0, "shard-tokens", OPTION_COUNT, &r.shard_tokens, 1, INT32_MAX, NULL, "N tokens in a shard (100M)", false},
        {0, "verify", OPTION_TEXT, &r.verify, 0, 0, NULL, "NAME.json check the shards against their card", false},
        {0, "decode", OPTION_TEXT, &r.decode, 0, 0, NULL, "SHARD print its text", false},
        {0, "help", OPTION_FLAG, &help, 0, 0, NULL, "print this", false},
    };
    enum { OPTIONS = sizeof options / sizeof *options };
    error_program("tokenize");
    r.input_count = options_read(options, OPTIONS, argc, argv, true);
    r.inputs = argv + 1;
    if (help) {
        fputs(usage, stdout);
        options_help(options, OPTIONS);
        fputs(help_end, stdout);
    } else {
        request_run(&r);
    }
    if (ferror(stdout) || fflush(stdout) != 0) {
        die(EXIT_CODE_FAILURE, disk_hint, "cannot write to standard output: %s", strerror(errno));
    }
    return EXIT_CODE_DONE;
}
