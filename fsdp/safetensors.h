// safetensors: the file format in which weights travel between programs.
//
//     uint64 n | n bytes of JSON: {"name": {"dtype", "shape", "data_offsets": [begin, end)}, …} | data
//
// little-endian; the JSON may end in spaces; offsets count from the start of the data. The reader is strict:
// offsets in range, no overlap, no gap, sizes equal to shape × dtype, names unique, header at most 100 MB. Every
// violation ends in die() with EXIT_CODE_USAGE and the file's name. Only the size of a dtype that we have never
// heard of cannot be checked; such a tensor is listed like other integers and booleans, and refused when it is
// read. Reading is by element range, so that a rank can read just its slice; nothing is loaded whole.
#ifndef FSDP_SAFETENSORS_H
#define FSDP_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { SAFETENSORS_MAX_DIMS = 8 };

typedef enum { SAFETENSORS_F32, SAFETENSORS_F16, SAFETENSORS_BF16, SAFETENSORS_OTHER } SafetensorsType;

typedef struct {
    char *name;
    SafetensorsType dtype;
    int ndim;
    int64_t shape[SAFETENSORS_MAX_DIMS];
    int64_t elements;    // product of the shape
    uint64_t begin, end; // bytes within the data
} SafetensorsEntry;

typedef struct Safetensors Safetensors;

Safetensors *safetensors_open(const char *path);
void safetensors_close(Safetensors *file);
int safetensors_count(const Safetensors *file);
const SafetensorsEntry *safetensors_entry(const Safetensors *file, int index);       // in the order of their data
const SafetensorsEntry *safetensors_find(const Safetensors *file, const char *name); // NULL when absent

// Elements first … first+count-1 of an F32, F16 or BF16 tensor as fp32.
void safetensors_read(const Safetensors *file, const SafetensorsEntry *entry, int64_t first, int64_t count,
                      float *out);

// Writing: the header is fixed first from name, dtype (F32 or BF16) and shape of every tensor in order, the other
// fields being ignored; then the data is appended front to back, in any number of pieces of fp32 that are converted
// on the way (bf16: round to nearest even). finish checks that exactly everything was written, flushes to disk and
// renames PATH.tmp to PATH; when a write fails, PATH.tmp is removed and PATH is what it was. The data begins
// 8-byte aligned.
typedef struct SafetensorsWriter SafetensorsWriter;
SafetensorsWriter *safetensors_create(const char *path, const SafetensorsEntry *entries, int count);
void safetensors_append(SafetensorsWriter *file, const float *values, int64_t count);
void safetensors_finish(SafetensorsWriter *file);

#ifdef __cplusplus
}
#endif
#endif
