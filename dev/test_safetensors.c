// Tests of safetensors: what is written is read back, every range and every half-precision value, and a corpus of
// malformed files, each of which must be refused by a message that names the file and the fault.
#include <setjmp.h> // cmocka.h needs these four
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "test_death.h"
#include "safetensors.h"
#include "error.h"
#include <limits.h>       // PATH_MAX
#include <math.h>         // isnan, isinf, INFINITY, NAN, ldexpf
#include <signal.h>       // signal, SIGXFSZ
#include <stdlib.h>       // mkdtemp, system, free
#include <sys/resource.h> // setrlimit

static char folder[] = "/tmp/test_safetensors_XXXXXX";

static const char *path_of(const char *name) {
    static char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

// Writes x.safetensors: the header's length, the header, `bytes` of data. Returns its path.
static const char *file_write(uint64_t length, const char *header, const void *data, size_t bytes) {
    const char *path = path_of("x.safetensors");
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(&length, sizeof length, 1, file), 1);
    assert_int_equal(fwrite(header, 1, strlen(header), file), strlen(header));
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
    return path;
}

static Safetensors *header_open(const char *header, const void *data, size_t bytes) {
    return safetensors_open(file_write(strlen(header), header, data, bytes));
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// ---------------------------------------------------------------------------------------------------------------
// Round trips

enum { TENSORS = 5, ROWS = 300, COLUMNS = 701, LONG = ROWS * COLUMNS, ELEMENTS = LONG + 7 + 1 + 0 + 3 };

// The second name needs every kind of escape; the third is a scalar, the fourth has no elements.
static const SafetensorsEntry tensors[TENSORS] = {
    {.name = "wte.weight", .dtype = SAFETENSORS_F32, .ndim = 2, .shape = {ROWS, COLUMNS}},
    {.name = "a \"quoted\" \\ name\n\x01 \u00e9", .dtype = SAFETENSORS_BF16, .ndim = 1, .shape = {7}},
    {.name = "scalar", .dtype = SAFETENSORS_F32, .ndim = 0},
    {.name = "nothing", .dtype = SAFETENSORS_BF16, .ndim = 3, .shape = {4, 0, 2}},
    {.name = "last", .dtype = SAFETENSORS_F32, .ndim = 8, .shape = {1, 1, 1, 1, 1, 1, 1, 3}},
};
static const int elements[TENSORS] = {LONG, 7, 1, 0, 3};

// Small integers and fractions: exact in bf16 as well.
static float value_at(int i) { return (float)(i % 251 - 125) / 64; }

static const char *tensors_write(const char *name, int64_t piece) {
    static float values[ELEMENTS];
    const char *path = path_of(name);
    for (int i = 0; i < ELEMENTS; i++) values[i] = value_at(i);
    SafetensorsWriter *writer = safetensors_create(path, tensors, TENSORS);
    for (int64_t i = 0; i < ELEMENTS; i += piece)
        safetensors_append(writer, values + i, piece < ELEMENTS - i ? piece : ELEMENTS - i);
    safetensors_finish(writer);
    return path;
}

static void what_is_written_is_read(void **state) {
    (void)state;
    static float values[ELEMENTS];
    static const int64_t pieces[] = {ELEMENTS, 1, 7, 4097, 100000}; // pieces need not end where tensors do
    for (int k = 0; k < 5; k++) {
        Safetensors *file = safetensors_open(tensors_write("round.safetensors", pieces[k]));
        assert_int_equal(safetensors_count(file), TENSORS);
        for (int i = 0, first = 0; i < TENSORS; first += elements[i++]) {
            const SafetensorsEntry *entry = safetensors_find(file, tensors[i].name);
            assert_non_null(entry);
            assert_ptr_equal(entry, safetensors_entry(file, i)); // in the order written
            assert_int_equal(entry->dtype, tensors[i].dtype);
            assert_int_equal(entry->ndim, tensors[i].ndim);
            assert_memory_equal(entry->shape, tensors[i].shape, sizeof entry->shape);
            assert_int_equal(entry->elements, elements[i]);
            safetensors_read(file, entry, 0, entry->elements, values);
            for (int e = 0; e < elements[i]; e++)
                assert_int_equal(bits_of(values[e]), bits_of(value_at(first + e)));
        }
        assert_null(safetensors_find(file, "wte"));
        safetensors_close(file);
    }
}

static void files_are_aligned_and_whole(void **state) {
    (void)state;
    const char *path = tensors_write("round.safetensors", ELEMENTS);
    assert_int_equal(access(path_of("round.safetensors.tmp"), F_OK), -1);
    path = path_of("round.safetensors");
    FILE *file = fopen(path, "rb");
    uint64_t length;
    assert_int_equal(fread(&length, sizeof length, 1, file), 1);
    assert_int_equal(length % 8, 0);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    assert_int_equal(ftell(file), 8 + (long)length + 4 * LONG + 2 * 7 + 4 + 0 + 4 * 3);
    fclose(file);
}

static void a_file_may_be_empty_of_tensors(void **state) {
    (void)state;
    safetensors_finish(safetensors_create(path_of("none.safetensors"), NULL, 0));
    Safetensors *file = safetensors_open(path_of("none.safetensors"));
    assert_int_equal(safetensors_count(file), 0);
    safetensors_close(file);
}

static void ranges_are_read_alone(void **state) {
    (void)state;
    float values[64];
    Safetensors *file = safetensors_open(tensors_write("round.safetensors", ELEMENTS));
    const SafetensorsEntry *wide = safetensors_entry(file, 0), *narrow = safetensors_entry(file, 1);
    for (int first = 0; first < LONG; first += 9973) {
        int count = LONG - first < 61 ? LONG - first : 61;
        values[count] = 12345; // nothing beyond the range is touched
        safetensors_read(file, wide, first, count, values);
        for (int i = 0; i < count; i++) assert_int_equal(bits_of(values[i]), bits_of(value_at(first + i)));
        assert_true(values[count] == 12345);
    }
    for (int first = 0; first <= 7; first++)
        for (int count = 0; count <= 7 - first; count++) {
            values[count] = 12345;
            safetensors_read(file, narrow, first, count, values);
            for (int i = 0; i < count; i++) assert_true(values[i] == value_at(LONG + first + i));
            assert_true(values[count] == 12345);
        }
    safetensors_close(file);
}

// ---------------------------------------------------------------------------------------------------------------
// Conversions

enum { HALVES = 65536 };

// All 65,536 values of a 16-bit type, read as fp32; an odd header puts the data at an odd address of the file.
static void halves_read(const char *dtype, float *out) {
    static uint16_t halves[HALVES];
    char header[128];
    for (int i = 0; i < HALVES; i++) halves[i] = (uint16_t)i;
    snprintf(header, sizeof header, "{\"x\":{\"dtype\":\"%s\",\"shape\":[65536],\"data_offsets\":[0,131072]}}",
             dtype);
    if (strlen(header) % 2 == 0) strcat(header, " ");
    Safetensors *file = header_open(header, halves, sizeof halves);
    safetensors_read(file, safetensors_entry(file, 0), 0, HALVES, out);
    safetensors_close(file);
}

// By the definition of the format instead of by its bits.
static float f16_reference(int half) {
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    float size = exponent == 31  ? (mantissa ? NAN : INFINITY)
                 : exponent == 0 ? ldexpf((float)mantissa, -24)
                                 : ldexpf((float)(1024 + mantissa), exponent - 25);
    return half & 0x8000 ? -size : size;
}

static void f16_is_read_exactly(void **state) {
    (void)state;
    static float values[HALVES];
    halves_read("F16", values);
    for (int i = 0; i < HALVES; i++) {
        float expected = f16_reference(i);
        if (isnan(expected))
            assert_true(isnan(values[i]));
        else
            assert_int_equal(bits_of(values[i]), bits_of(expected));
    }
    static const struct {
        uint16_t half;
        float value;
    } known[] = {{0x0000, 0.0f},         {0x8000, -0.0f},    {0x3c00, 1.0f},
                 {0xc000, -2.0f},        {0x7bff, 65504.0f}, {0x0001, 0x1p-24f},
                 {0x03ff, 0x1.ff8p-15f}, {0x0400, 0x1p-14f}, {0x3555, 0.333251953125f},
                 {0x7c00, INFINITY},     {0xfc00, -INFINITY}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        assert_int_equal(bits_of(values[known[i].half]), bits_of(known[i].value));
}

static void bf16_is_read_exactly(void **state) {
    (void)state;
    static float values[HALVES];
    halves_read("BF16", values);
    for (uint32_t i = 0; i < HALVES; i++) assert_int_equal(bits_of(values[i]), i << 16);
}

static void bf16_is_rounded_to_nearest_even(void **state) {
    (void)state;
    static const struct {
        uint32_t from, to;
    } cases[] = {
        {0x3f800000, 0x3f80}, {0x3f807fff, 0x3f80}, {0x3f808000, 0x3f80},
        {0x3f808001, 0x3f81},                                             // 1, below, tie, above
        {0x3f818000, 0x3f82}, {0xbf818000, 0xbf82}, {0x3fffffff, 0x4000}, // tie to even upwards, into the exponent
        {0x7f7fffff, 0x7f80}, {0x7f800000, 0x7f80}, {0xff800000, 0xff80}, // the largest rounds to infinity
        {0x00000001, 0x0000}, {0x00008001, 0x0001}, {0x80000000, 0x8000}, // subnormals, -0
        {0x7f800001, 0x7fc0}, {0xffffffff, 0xffff}, {0x7fc00000, 0x7fc0}, // a NaN remains one
    };
    enum { CASES = sizeof cases / sizeof *cases };
    float values[CASES];
    for (int i = 0; i < CASES; i++) memcpy(&values[i], &cases[i].from, sizeof values[i]);
    SafetensorsEntry entry = {.name = "x", .dtype = SAFETENSORS_BF16, .ndim = 1, .shape = {CASES}};
    SafetensorsWriter *writer = safetensors_create(path_of("bf16.safetensors"), &entry, 1);
    safetensors_append(writer, values, CASES);
    safetensors_finish(writer);
    Safetensors *file = safetensors_open(path_of("bf16.safetensors"));
    safetensors_read(file, safetensors_entry(file, 0), 0, CASES, values);
    for (int i = 0; i < CASES; i++) assert_int_equal(bits_of(values[i]), cases[i].to << 16);
    safetensors_close(file);
}

// ---------------------------------------------------------------------------------------------------------------
// What other writers may do

static void headers_may_be_in_any_order_and_padded(void **state) {
    (void)state;
    static const float data[3] = {1, 2, 3};
    Safetensors *file =
        header_open("{\"b\":{\"data_offsets\":[4,12],\"shape\":[2],\"dtype\":\"F32\"},"
                    "\"__metadata__\":{\"format\":\"pt\"},\"none\":{\"dtype\":\"F32\",\"shape\":[0],"
                    "\"data_offsets\":[4,4]},\n"
                    "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}       ",
                    data, sizeof data);
    assert_int_equal(safetensors_count(file), 3);
    float value[2];
    safetensors_read(file, safetensors_find(file, "b"), 0, 2, value);
    assert_true(value[0] == 2 && value[1] == 3);
    safetensors_read(file, safetensors_find(file, "a"), 0, 1, value);
    assert_true(value[0] == 1);
    assert_int_equal(safetensors_find(file, "none")->elements, 0);
    assert_null(safetensors_find(file, "__metadata__"));
    safetensors_close(file);
}

static void read_first(void *path) {
    float values[16];
    Safetensors *file = safetensors_open(path);
    const SafetensorsEntry *entry = safetensors_entry(file, 0);
    safetensors_read(file, entry, 0, entry->elements, values);
    safetensors_close(file);
}

// Other types are listed, if their size is right, but not read as floats.
static void other_types_are_listed(void **state) {
    (void)state;
    static const struct {
        const char *dtype;
        int elements, bytes;
    } cases[] = {{"I64", 3, 24}, {"U8", 3, 3},      {"BOOL", 3, 3},    {"F64", 1, 8}, {"I16", 2, 4},
                 {"U32", 2, 8},  {"F8_E4M3", 5, 5}, {"F6_E2M3", 4, 3}, {"F4", 6, 3},  {"FROM_THE_FUTURE", 3, 5}};
    static const char data[32];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char header[256];
        snprintf(header, sizeof header, "{\"x\":{\"dtype\":\"%s\",\"shape\":[%d],\"data_offsets\":[0,%d]}}",
                 cases[i].dtype, cases[i].elements, cases[i].bytes);
        Safetensors *file = header_open(header, data, (size_t)cases[i].bytes);
        assert_int_equal(safetensors_find(file, "x")->dtype, SAFETENSORS_OTHER);
        assert_int_equal(safetensors_find(file, "x")->elements, cases[i].elements);
        safetensors_close(file);
        expect_death(EXIT_CODE_USAGE,
                     "x.safetensors: tensor 'x' cannot be read as floats, expected F32, F16 or BF16", read_first,
                     (void *)path_of("x.safetensors"));
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Malformed files

static void open_path(void *path) { safetensors_close(safetensors_open(path)); }

static void refused(const char *expected, uint64_t length, const char *header, size_t bytes) {
    static const char data[1024];
    const char *path = file_write(length, header, data, bytes);
    expect_death(EXIT_CODE_USAGE, "x.safetensors", open_path, (void *)path);
    expect_death(EXIT_CODE_USAGE, expected, open_path, (void *)path);
}

// Refused because of its header, whose length is right, before `bytes` of data.
static void header_refused(const char *expected, size_t bytes, const char *header) {
    refused(expected, strlen(header), header, bytes);
}

// The header of one tensor x with this inside.
static void tensor_refused(const char *expected, size_t bytes, const char *inside) {
    char header[4096];
    snprintf(header, sizeof header, "{\"x\":{%s}}", inside);
    header_refused(expected, bytes, header);
}

static void bad_lengths_are_refused(void **state) {
    (void)state;
    const char *path = path_of("x.safetensors");
    for (int bytes = 0; bytes < 8; bytes += 7) {
        file_write(0, "", "", 0);
        assert_int_equal(truncate(path, bytes), 0);
        char expected[64];
        snprintf(expected, sizeof expected, "x.safetensors is %d bytes, expected at least 8", bytes);
        expect_death(EXIT_CODE_USAGE, expected, open_path, (void *)path);
    }
    refused("x.safetensors has a header of 0 bytes, expected 2 to 2", 0, "{}", 0);
    refused("x.safetensors has a header of 3 bytes, expected 2 to 2", 3, "{}", 0);
    refused("has a header of 9223372036854775807 bytes, expected 2 to 2", INT64_MAX, "{}", 0);
    refused("has a header of 18446744073709551615 bytes, expected 2 to 2", UINT64_MAX, "{}", 0);
    file_write(100000001, "{}", "", 0); // a file of holes that is long enough
    assert_int_equal(truncate(path, 100000009), 0);
    expect_death(EXIT_CODE_USAGE, "has a header of 100000001 bytes, expected 2 to 100000000", open_path,
                 (void *)path);
    expect_death(EXIT_CODE_USAGE, "cannot open", open_path, (void *)path_of("missing.safetensors"));
    expect_death(EXIT_CODE_USAGE, "is not a regular file", open_path, folder);
}

static void bad_json_is_refused(void **state) {
    (void)state;
    header_refused("starts with byte 91, expected 123", 0, "[1,2]");
    header_refused("starts with byte 32, expected 123", 0, " {}");
    header_refused("is not the JSON expected", 0, "{\"x\":");
    header_refused("is not the JSON expected", 0, "{} {}");
    header_refused("is not the JSON expected", 0, "{'x':1}");
    header_refused("is not the JSON expected", 0, "{\"\xff\":1}");
    header_refused("is not the JSON expected", 0, "{\"\\u0000\":1}");
    refused("is not the JSON expected", 4, "{}", 2); // bytes 0 after the object
    header_refused("duplicate object key", 8,
                   "{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                   "\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}");
    header_refused("__metadata__ is not an object", 0, "{\"__metadata__\":[]}");
    header_refused("__metadata__ 'step' is not a string", 0, "{\"__metadata__\":{\"step\":1}}");
}

static void deep_nesting_is_refused(void **state) {
    (void)state;
    enum { DEPTH = 100000 };
    static char header[DEPTH + 8];
    memcpy(header, "{\"x\":", 5);
    memset(header + 5, '[', DEPTH);
    header_refused("is not the JSON expected: maximum parsing depth reached", 0, header);
    tensor_refused("a length in dimension 0 that is no count", 0,
                   "\"dtype\":\"F32\",\"shape\":[[[[1]]]],\"data_offsets\":[0,0]");
}

static void bad_members_are_refused(void **state) {
    (void)state;
    static const char *const fault = "expected dtype, shape and two data_offsets";
    header_refused(fault, 0, "{\"x\":1}");
    tensor_refused(fault, 0, "");
    tensor_refused(fault, 4, "\"dtype\":\"F32\",\"shape\":[1]");
    tensor_refused(fault, 4, "\"dtype\":1,\"shape\":[1],\"data_offsets\":[0,4]");
    tensor_refused(fault, 4, "\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"more\":0");
    tensor_refused(fault, 4, "\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]");
    tensor_refused(fault, 4, "\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]");
    tensor_refused(fault, 4, "\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4.0]");
    tensor_refused(fault, 4, "\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,\"4\"]");
    tensor_refused("too big integer", 4,
                   "\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,18446744073709551620]");
}

static void bad_shapes_are_refused(void **state) {
    (void)state;
    tensor_refused("a length in dimension 1", 4, "\"dtype\":\"F32\",\"shape\":[1,-1],\"data_offsets\":[0,4]");
    tensor_refused("a length in dimension 0", 4, "\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]");
    tensor_refused("a length in dimension 0", 4, "\"dtype\":\"F32\",\"shape\":[null],\"data_offsets\":[0,4]");
    tensor_refused("expected an array of 0 to 8", 4,
                   "\"dtype\":\"F32\",\"shape\":{\"a\":1},\"data_offsets\":[0,4]");
    tensor_refused("has 9 dimensions, expected an array of 0 to 8", 4,
                   "\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]");
    tensor_refused("too many elements", 4,
                   "\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,4]");
    tensor_refused("spans 4 bytes, expected 4611686018427387904 elements of 32 bits", 4,
                   "\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,4]");
    tensor_refused("tensor 'x' spans 8 bytes, expected 3 elements of 32 bits", 8,
                   "\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]");
    tensor_refused("spans 12 bytes, expected 3 elements of 16 bits", 12,
                   "\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[0,12]");
    tensor_refused("spans 2 bytes, expected 3 elements of 4 bits", 2,
                   "\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]");
}

static void bad_extents_are_refused(void **state) {
    (void)state;
    tensor_refused("has data_offsets [0, 8], expected them within 4 bytes of data", 4,
                   "\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]");
    tensor_refused("has data_offsets [-4, 0]", 4, "\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]");
    tensor_refused("has data_offsets [4, 0]", 4, "\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[4,0]");
    tensor_refused("has data_offsets [0, 9223372036854775807]", 4,
                   "\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,9223372036854775807]");
    tensor_refused("x.safetensors has 8 bytes of data, expected 4 for its tensors", 8,
                   "\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]");
    tensor_refused("tensor 'x' begins at data byte 4, expected 0", 8,
                   "\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]");
    header_refused("tensor 'b' begins at data byte 2, expected 4", 6,
                   "{\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]},"
                   "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}");
    header_refused("tensor 'b' begins at data byte 6, expected 4", 10,
                   "{\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[6,10]},"
                   "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}");
    header_refused("x.safetensors has 1 bytes of data, expected 0", 1, "{}");
}

// Cut anywhere, a file is refused; no prefix of it is taken for another file.
static void every_prefix_is_refused(void **state) {
    (void)state;
    static const char header[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}";
    for (off_t bytes = 0; bytes < 8 + (off_t)strlen(header) + 4; bytes++) {
        const char *path = file_write(strlen(header), header, "abcd", 4);
        assert_int_equal(truncate(path, bytes), 0);
        expect_death(EXIT_CODE_USAGE, "x.safetensors", open_path, (void *)path);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Faults while writing

static void write_missing_folder(void *path) { safetensors_create(path, tensors, TENSORS); }

static void write_too_few(void *path) {
    SafetensorsWriter *writer = safetensors_create(path, tensors, TENSORS);
    safetensors_append(writer, (float[10]){0}, 10);
    safetensors_finish(writer);
}

static void write_too_many(void *path) {
    SafetensorsEntry entry = {.name = "x", .dtype = SAFETENSORS_F32, .ndim = 1, .shape = {2}};
    safetensors_append(safetensors_create(path, &entry, 1), (float[3]){0}, 3);
}

// A limit on a file's size stands in for a full disk: writing beyond it fails. `limit` is in bytes.
static void write_limited(const char *path, rlim_t limit, int count) {
    static float values[4096];
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &(struct rlimit){limit, limit});
    SafetensorsEntry entry = {.name = "x", .dtype = SAFETENSORS_F32, .ndim = 1, .shape = {count}};
    SafetensorsWriter *writer = safetensors_create(path, &entry, 1);
    for (int i = 0; i < count; i++) safetensors_append(writer, values, 1);
    safetensors_finish(writer);
}

static void write_full_early(void *path) { write_limited(path, 8192, 4096); }
static void write_full_late(void *path) { write_limited(path, 64, 8); } // what is buffered fails in finish only

static void failed_writes_leave_nothing(void **state) {
    (void)state;
    static char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/failed.safetensors", folder);
    expect_death(EXIT_CODE_FAILURE, "failed.safetensors got 10 values of tensor 0, expected 210300", write_too_few,
                 path);
    expect_death(EXIT_CODE_FAILURE, "failed.safetensors got 1 values more than expected", write_too_many, path);
    expect_death(EXIT_CODE_FAILURE, "failed.safetensors.tmp: File too large", write_full_early, path);
    expect_death(EXIT_CODE_FAILURE, "failed.safetensors.tmp: File too large", write_full_late, path);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(access(path_of("failed.safetensors.tmp"), F_OK), -1);
    expect_death(EXIT_CODE_FAILURE, "cannot create", write_missing_folder,
                 (void *)path_of("no/such/x.safetensors"));
}

static void failed_writes_keep_the_old_file(void **state) {
    (void)state;
    char *path = strdup(tensors_write("kept.safetensors", ELEMENTS));
    expect_death(EXIT_CODE_FAILURE, "kept.safetensors.tmp: File too large", write_full_late, path);
    Safetensors *file = safetensors_open(path);
    assert_int_equal(safetensors_count(file), TENSORS);
    safetensors_close(file);
    free(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_written_is_read),
        cmocka_unit_test(files_are_aligned_and_whole),
        cmocka_unit_test(a_file_may_be_empty_of_tensors),
        cmocka_unit_test(ranges_are_read_alone),
        cmocka_unit_test(f16_is_read_exactly),
        cmocka_unit_test(bf16_is_read_exactly),
        cmocka_unit_test(bf16_is_rounded_to_nearest_even),
        cmocka_unit_test(headers_may_be_in_any_order_and_padded),
        cmocka_unit_test(other_types_are_listed),
        cmocka_unit_test(bad_lengths_are_refused),
        cmocka_unit_test(bad_json_is_refused),
        cmocka_unit_test(deep_nesting_is_refused),
        cmocka_unit_test(bad_members_are_refused),
        cmocka_unit_test(bad_shapes_are_refused),
        cmocka_unit_test(bad_extents_are_refused),
        cmocka_unit_test(every_prefix_is_refused),
        cmocka_unit_test(failed_writes_leave_nothing),
        cmocka_unit_test(failed_writes_keep_the_old_file),
    };
    if (!mkdtemp(folder)) return 1;
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    char command[PATH_MAX];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command) || failures;
}
