#include "safetensors.h"
#include "error.h"
#include <assert.h>   // assert
#include <errno.h>    // errno, EINTR, EINVAL
#include <fcntl.h>    // open
#include <jansson.h>  // json_loadb, json_unpack_ex, json_dumps
#include <libgen.h>   // dirname
#include <stdio.h>    // FILE, fopen, fwrite, fflush, fclose, rename, snprintf
#include <stdlib.h>   // calloc, free, qsort
#include <string.h>   // memcpy, strcmp, strdup, strerror
#include <sys/stat.h> // fstat
#include <unistd.h>   // close, fsync, pread, unlink

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "tensors are read and written as they lie, little-endian");

enum {
    HEADER_MAX = 100 * 1000 * 1000, // the reference reader's limit
    HEADER_ALIGNMENT = 8,           // of the data within a file that we write
    PIECE = 16384,                  // elements converted at a time when writing
};

struct Safetensors {
    char *path;
    int fd;
    uint64_t data_begin, data_bytes; // where the data lies in the file
    int count;
    SafetensorsEntry *entries; // in the order of their data
};

// Element sizes in bits: some types are smaller than a byte.
static const struct {
    const char *name;
    SafetensorsType type;
    int bits;
} dtypes[] = {
    {"F32", SAFETENSORS_F32, 32},          {"F16", SAFETENSORS_F16, 16},      {"BF16", SAFETENSORS_BF16, 16},
    {"F64", SAFETENSORS_OTHER, 64},        {"C64", SAFETENSORS_OTHER, 64},    {"I64", SAFETENSORS_OTHER, 64},
    {"U64", SAFETENSORS_OTHER, 64},        {"I32", SAFETENSORS_OTHER, 32},    {"U32", SAFETENSORS_OTHER, 32},
    {"I16", SAFETENSORS_OTHER, 16},        {"U16", SAFETENSORS_OTHER, 16},    {"I8", SAFETENSORS_OTHER, 8},
    {"U8", SAFETENSORS_OTHER, 8},          {"BOOL", SAFETENSORS_OTHER, 8},    {"F8_E4M3", SAFETENSORS_OTHER, 8},
    {"F8_E5M2", SAFETENSORS_OTHER, 8},     {"F8_E8M0", SAFETENSORS_OTHER, 8}, {"F8_E4M3FNUZ", SAFETENSORS_OTHER, 8},
    {"F8_E5M2FNUZ", SAFETENSORS_OTHER, 8}, {"F6_E2M3", SAFETENSORS_OTHER, 6}, {"F6_E3M2", SAFETENSORS_OTHER, 6},
    {"F4", SAFETENSORS_OTHER, 4},
};
enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

static const char *const damaged = "the file is damaged or not safetensors: fetch or write it again";
static const char *const fault = "this is a fault of the program that writes: report it";

static void *memory_get(size_t count, size_t size, const char *path) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory) die(EXIT_CODE_FAILURE, NULL, "no memory for the header of %s", path);
    return memory;
}

static char *string_copy(const char *string, const char *path) {
    char *copy = strdup(string);
    if (!copy) die(EXIT_CODE_FAILURE, NULL, "no memory for the header of %s", path);
    return copy;
}

// ---------------------------------------------------------------------------------------------------------------
// Reading: the header

static void file_read(const Safetensors *file, uint64_t offset, void *out, uint64_t bytes) {
    char *to = out;
    while (bytes > 0) {
        ssize_t got = pread(file->fd, to, bytes, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) die(EXIT_CODE_FAILURE, NULL, "cannot read %s: %s", file->path, strerror(errno));
        if (got == 0)
            die(EXIT_CODE_FAILURE, "something changed it while it was open",
                "%s ends at byte %llu, expected %llu more", file->path, (unsigned long long)offset,
                (unsigned long long)bytes);
        to += got;
        offset += (uint64_t)got;
        bytes -= (uint64_t)got;
    }
}

// Opens the file and returns its JSON; sets where the data lies.
static json_t *header_load(Safetensors *file) {
    file->fd = open(file->path, O_RDONLY | O_CLOEXEC);
    if (file->fd < 0)
        die(EXIT_CODE_USAGE, "check the path and its permissions", "cannot open %s: %s", file->path,
            strerror(errno));
    struct stat status;
    if (fstat(file->fd, &status))
        die(EXIT_CODE_FAILURE, NULL, "cannot examine %s: %s", file->path, strerror(errno));
    if (!S_ISREG(status.st_mode))
        die(EXIT_CODE_USAGE, "give the file itself", "%s is not a regular file, expected safetensors", file->path);
    uint64_t size = (uint64_t)status.st_size, header = 0;
    if (size < sizeof header)
        die(EXIT_CODE_USAGE, damaged, "%s is %llu bytes, expected at least 8", file->path,
            (unsigned long long)size);
    file_read(file, 0, &header, sizeof header);
    uint64_t room = size - sizeof header < HEADER_MAX ? size - sizeof header : HEADER_MAX;
    if (header < 2 || header > room)
        die(EXIT_CODE_USAGE, damaged, "%s has a header of %llu bytes, expected 2 to %llu", file->path,
            (unsigned long long)header, (unsigned long long)room);
    file->data_begin = sizeof header + header;
    file->data_bytes = size - file->data_begin;

    char *text = memory_get(header, 1, file->path);
    file_read(file, sizeof header, text, header);
    if (text[0] != '{')
        die(EXIT_CODE_USAGE, damaged, "the header of %s starts with byte %d, expected %d, an opening brace",
            file->path, (unsigned char)text[0], '{');
    json_error_t error;
    json_t *json = json_loadb(text, header, JSON_REJECT_DUPLICATES, &error);
    if (!json)
        die(EXIT_CODE_USAGE, damaged, "the header of %s is not the JSON expected: %s at byte %d", file->path,
            error.text, error.position);
    free(text);
    return json;
}

static void metadata_check(const Safetensors *file, json_t *metadata) {
    const char *key;
    json_t *value;
    if (!json_is_object(metadata))
        die(EXIT_CODE_USAGE, damaged, "%s: __metadata__ is not an object, expected one of strings", file->path);
    json_object_foreach(metadata, key, value) {
        if (!json_is_string(value))
            die(EXIT_CODE_USAGE, damaged, "%s: __metadata__ '%.200s' is not a string, expected one", file->path,
                key);
    }
}

// Sets shape and elements.
static void shape_parse(const Safetensors *file, SafetensorsEntry *entry, const json_t *shape) {
    size_t ndim = json_array_size(shape);
    if (!json_is_array(shape) || ndim > SAFETENSORS_MAX_DIMS)
        die(EXIT_CODE_USAGE, damaged, "%s: tensor '%.200s' has %zu dimensions, expected an array of 0 to %d",
            file->path, entry->name, ndim, SAFETENSORS_MAX_DIMS);
    entry->ndim = (int)ndim;
    entry->elements = 1;
    for (size_t i = 0; i < ndim; i++) {
        const json_t *length = json_array_get(shape, i);
        entry->shape[i] = json_integer_value(length);
        if (!json_is_integer(length) || entry->shape[i] < 0)
            die(EXIT_CODE_USAGE, damaged,
                "%s: tensor '%.200s' has a length in dimension %zu that is no count, expected an integer",
                file->path, entry->name, i);
        if (__builtin_mul_overflow(entry->elements, entry->shape[i], &entry->elements))
            die(EXIT_CODE_USAGE, damaged, "%s: tensor '%.200s' has too many elements, expected at most 2^63-1",
                file->path, entry->name);
    }
}

// Sets dtype, and checks that the extent fits it. A dtype that we do not know has no size to check: it may be
// listed, but not read.
static void dtype_parse(const Safetensors *file, SafetensorsEntry *entry, const char *name) {
    entry->dtype = SAFETENSORS_OTHER;
    for (int i = 0; i < DTYPES; i++) {
        if (strcmp(dtypes[i].name, name) != 0) continue;
        entry->dtype = dtypes[i].type;
        int64_t bits;
        bool overflow = __builtin_mul_overflow(entry->elements, dtypes[i].bits, &bits);
        if (overflow || bits % 8 || (uint64_t)bits / 8 != entry->end - entry->begin)
            die(EXIT_CODE_USAGE, damaged, "%s: tensor '%.200s' spans %llu bytes, expected %lld elements of %d bits",
                file->path, entry->name, (unsigned long long)(entry->end - entry->begin),
                (long long)entry->elements, dtypes[i].bits);
        return;
    }
}

static void entry_parse(const Safetensors *file, SafetensorsEntry *entry, const char *name, json_t *value) {
    const char *dtype;
    json_t *shape;
    json_int_t begin, end;
    json_error_t error;
    entry->name = string_copy(name, file->path);
    if (json_unpack_ex(value, &error, JSON_STRICT, "{s:s, s:o, s:[I, I]}", "dtype", &dtype, "shape", &shape,
                       "data_offsets", &begin, &end))
        die(EXIT_CODE_USAGE, damaged, "%s: tensor '%.200s': %s; expected dtype, shape and two data_offsets",
            file->path, name, error.text);
    if (begin < 0 || end < begin || (uint64_t)end > file->data_bytes)
        die(EXIT_CODE_USAGE, damaged,
            "%s: tensor '%.200s' has data_offsets [%lld, %lld], expected them within %llu bytes of data",
            file->path, name, (long long)begin, (long long)end, (unsigned long long)file->data_bytes);
    entry->begin = (uint64_t)begin;
    entry->end = (uint64_t)end;
    shape_parse(file, entry, shape);
    dtype_parse(file, entry, dtype);
}

static int entry_compare(const void *a, const void *b) {
    const SafetensorsEntry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

// Tensors in the order of their data must meet end to begin, from the first byte to the last.
static void entries_check(const Safetensors *file) {
    uint64_t end = 0;
    for (int i = 0; i < file->count; i++) {
        const SafetensorsEntry *entry = &file->entries[i];
        if (entry->begin != end)
            die(EXIT_CODE_USAGE, damaged,
                "%s: tensor '%.200s' begins at data byte %llu, expected %llu where the last one ends", file->path,
                entry->name, (unsigned long long)entry->begin, (unsigned long long)end);
        end = entry->end;
    }
    if (end != file->data_bytes)
        die(EXIT_CODE_USAGE, damaged, "%s has %llu bytes of data, expected %llu for its tensors", file->path,
            (unsigned long long)file->data_bytes, (unsigned long long)end);
}

Safetensors *safetensors_open(const char *path) {
    Safetensors *file = memory_get(1, sizeof *file, path);
    file->path = string_copy(path, path);
    json_t *json = header_load(file);
    file->entries = memory_get(json_object_size(json), sizeof *file->entries, path);
    const char *name;
    json_t *value;
    json_object_foreach(json, name, value) {
        if (strcmp(name, "__metadata__") == 0)
            metadata_check(file, value);
        else
            entry_parse(file, &file->entries[file->count++], name, value);
    }
    json_decref(json);
    qsort(file->entries, (size_t)file->count, sizeof *file->entries, entry_compare);
    entries_check(file);
    return file;
}

void safetensors_close(Safetensors *file) {
    if (!file) return;
    close(file->fd);
    for (int i = 0; i < file->count; i++) free(file->entries[i].name);
    free(file->entries);
    free(file->path);
    free(file);
}

int safetensors_count(const Safetensors *file) { return file->count; }

const SafetensorsEntry *safetensors_entry(const Safetensors *file, int index) {
    assert(index >= 0 && index < file->count);
    return &file->entries[index];
}

const SafetensorsEntry *safetensors_find(const Safetensors *file, const char *name) {
    for (int i = 0; i < file->count; i++)
        if (strcmp(file->entries[i].name, name) == 0) return &file->entries[i];
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------
// Reading: the data

static float f32_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float f32_from_bf16(uint16_t half) { return f32_from_bits((uint32_t)half << 16); }

// 1 sign, 5 exponent and 10 mantissa bits → 1, 8 and 23; the exponents' biases differ by 127 - 15.
static float f32_from_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    if (exponent == 31) return f32_from_bits(sign | 0x7f800000 | mantissa << 13); // infinity, NaN
    if (exponent > 0) return f32_from_bits(sign | (exponent + 127 - 15) << 23 | mantissa << 13);
    float subnormal = (float)mantissa * 0x1p-24f; // exact; also the zeros
    return sign ? -subnormal : subnormal;
}

void safetensors_read(const Safetensors *file, const SafetensorsEntry *entry, int64_t first, int64_t count,
                      float *out) {
    assert(first >= 0 && count >= 0 && first <= entry->elements - count);
    if (entry->dtype == SAFETENSORS_OTHER)
        die(EXIT_CODE_USAGE, "convert the file to one of these",
            "%s: tensor '%.200s' cannot be read as floats, "
            "expected F32, F16 or BF16",
            file->path, entry->name);
    uint64_t width = entry->dtype == SAFETENSORS_F32 ? 4 : 2, bytes = (uint64_t)count * width;
    uint64_t offset = file->data_begin + entry->begin + (uint64_t)first * width;
    // 16-bit values are read into the back of out and widened in place from the front: the write of element i never
    // reaches beyond the read of element i.
    char *raw = (char *)out + (uint64_t)count * sizeof *out - bytes;
    file_read(file, offset, raw, bytes);
    if (entry->dtype == SAFETENSORS_F32) return;
    for (int64_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, raw + 2 * i, sizeof half);
        out[i] = entry->dtype == SAFETENSORS_F16 ? f32_from_f16(half) : f32_from_bf16(half);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Writing

struct SafetensorsWriter {
    char *path, *temporary; // the data goes to temporary, which becomes path when it is whole
    FILE *stream;
    int count, current;        // tensors; the one being written
    SafetensorsEntry *entries; // dtype, elements, begin and end
    int64_t written;           // elements of the current one
};

// A file that could not be written is of no use to anybody, least of all on a full disk.
static void writer_fail(const SafetensorsWriter *file, const char *what) {
    int error = errno;
    unlink(file->temporary);
    die(EXIT_CODE_FAILURE, "check free space, quota and permissions there", "cannot %s %s: %s", what,
        file->temporary, strerror(error));
}

static void writer_put(SafetensorsWriter *file, const void *from, size_t bytes) {
    if (bytes && fwrite(from, 1, bytes, file->stream) != bytes) writer_fail(file, "write");
}

static SafetensorsEntry *writer_tensor(SafetensorsWriter *file) {
    // A tensor without elements is complete as soon as it is its turn.
    while (file->current < file->count && file->written == file->entries[file->current].elements) {
        file->current++;
        file->written = 0;
    }
    return file->current < file->count ? &file->entries[file->current] : NULL;
}

// The header's member for one tensor, which goes to `entry->begin`; sets the rest of what we keep of it.
static json_t *entry_describe(SafetensorsEntry *entry, const SafetensorsEntry *from) {
    assert(from->dtype == SAFETENSORS_F32 || from->dtype == SAFETENSORS_BF16);
    assert(from->ndim >= 0 && from->ndim <= SAFETENSORS_MAX_DIMS);
    bool is_f32 = from->dtype == SAFETENSORS_F32;
    json_t *shape = json_array();
    entry->dtype = from->dtype;
    entry->elements = 1;
    for (int i = 0; i < from->ndim; i++) {
        entry->elements *= from->shape[i];
        json_array_append_new(shape, json_integer(from->shape[i]));
    }
    entry->end = entry->begin + (uint64_t)entry->elements * (is_f32 ? 4 : 2);
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", is_f32 ? "F32" : "BF16", "shape", shape, "data_offsets",
                     (json_int_t)entry->begin, (json_int_t)entry->end);
}

static void header_write(SafetensorsWriter *file, const SafetensorsEntry *entries) {
    // Some of Hugging Face's readers refuse a file that does not say so.
    json_t *json = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    uint64_t begin = 0;
    for (int i = 0; i < file->count; i++) {
        assert(!json_object_get(json, entries[i].name)); // names are unique
        file->entries[i].begin = begin;
        if (json_object_set_new(json, entries[i].name, entry_describe(&file->entries[i], &entries[i])))
            die(EXIT_CODE_FAILURE, NULL, "%s: cannot describe tensor '%.200s'", file->path, entries[i].name);
        begin = file->entries[i].end;
    }
    char *text = json_dumps(json, JSON_COMPACT);
    if (!text) die(EXIT_CODE_FAILURE, NULL, "no memory for the header of %s", file->path);
    json_decref(json);

    size_t length = strlen(text), padding = (HEADER_ALIGNMENT - length % HEADER_ALIGNMENT) % HEADER_ALIGNMENT;
    uint64_t header = length + padding;
    assert(header <= HEADER_MAX);
    writer_put(file, &header, sizeof header);
    writer_put(file, text, length);
    writer_put(file, "        ", padding);
    free(text);
}

SafetensorsWriter *safetensors_create(const char *path, const SafetensorsEntry *entries, int count) {
    SafetensorsWriter *file = memory_get(1, sizeof *file, path);
    size_t length = strlen(path) + sizeof ".tmp";
    file->path = string_copy(path, path);
    file->temporary = memory_get(length, 1, path);
    snprintf(file->temporary, length, "%s.tmp", path);
    file->count = count;
    file->entries = memory_get((size_t)count, sizeof *file->entries, path);
    file->stream = fopen(file->temporary, "wb");
    if (!file->stream) writer_fail(file, "create");
    header_write(file, entries);
    return file;
}

// Rounds to nearest, ties to even. A NaN stays one, made quiet: cut off, its mantissa could become infinity's 0.
static uint16_t bf16_from_f32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void safetensors_append(SafetensorsWriter *file, const float *values, int64_t count) {
    uint16_t halves[PIECE];
    while (count > 0) {
        SafetensorsEntry *entry = writer_tensor(file);
        if (!entry) {
            unlink(file->temporary);
            die(EXIT_CODE_FAILURE, fault, "%s got %lld values more than expected", file->path, (long long)count);
        }
        int64_t left = entry->elements - file->written, piece = count < left ? count : left;
        if (entry->dtype == SAFETENSORS_F32) {
            writer_put(file, values, (size_t)piece * sizeof *values);
        } else {
            if (piece > PIECE) piece = PIECE;
            for (int64_t i = 0; i < piece; i++) halves[i] = bf16_from_f32(values[i]);
            writer_put(file, halves, (size_t)piece * sizeof *halves);
        }
        file->written += piece;
        values += piece;
        count -= piece;
    }
}

// A rename is on disk only once its folder is. Some network file systems cannot do that and need not.
static void folder_sync(const char *path) {
    char *copy = string_copy(path, path), *folder = dirname(copy);
    int fd = open(folder, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || (fsync(fd) && errno != EINVAL))
        die(EXIT_CODE_FAILURE, NULL, "cannot flush folder %s of %s: %s", folder, path, strerror(errno));
    close(fd);
    free(copy);
}

void safetensors_finish(SafetensorsWriter *file) {
    const SafetensorsEntry *entry = writer_tensor(file);
    if (entry) {
        unlink(file->temporary);
        die(EXIT_CODE_FAILURE, fault, "%s got %lld values of tensor %d, expected %lld", file->path,
            (long long)file->written, file->current, (long long)entry->elements);
    }
    if (fflush(file->stream) || fsync(fileno(file->stream))) writer_fail(file, "write");
    if (fclose(file->stream)) writer_fail(file, "close");
    if (rename(file->temporary, file->path)) writer_fail(file, "rename");
    folder_sync(file->path);
    free(file->entries);
    free(file->temporary);
    free(file->path);
    free(file);
}
