#include "ops_cpu_products.h"
#include "ops.h"
#include "ops_cpu_common.h"
#include <assert.h>      // assert
#include <omp.h>         // omp_get_thread_num
#include <stdio.h>       // snprintf
#include <string.h>      // memcpy, memset
#include <sys/syscall.h> // SYS_arch_prctl
#include <unistd.h>      // syscall
#ifdef __x86_64__
#include <immintrin.h>
#endif

#if defined __AMX_BF16__ && defined __AVX512BW__
#define HAVE_AMX 1
#else
#define HAVE_AMX 0
#endif

// ---------------------------------------------------------------------------------------------------------------------
// fp32: STRIP rows times two vectors of columns, all of it in registers

#if defined __AVX512F__
enum { WIDTH = 16, STRIP = 14 };
typedef __m512 Vector;
static inline Vector vector_fused(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined __AVX2__ && defined __FMA__
enum { WIDTH = 8, STRIP = 6 };
typedef __m256 Vector;
static inline Vector vector_fused(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
#else
enum { WIDTH = 4, STRIP = 4 };
typedef float Vector __attribute__((vector_size(16)));
static inline Vector vector_fused(Vector a, Vector b, Vector c) { return a * b + c; }
#endif
enum { PANEL = 2 * WIDTH };

typedef float VectorAnywhere __attribute__((vector_size(WIDTH * sizeof(float)), aligned(4), may_alias));

// sums (STRIP, PANEL), rows `row` apart, = , or += when more, a (depth, STRIP)ᵀ · b (depth, PANEL)
static void multiply_fp32(float *sums, size_t row, const float *a, const float *b, int depth, bool more) {
    Vector sum[STRIP][2];
#pragma GCC unroll 16
    for (int i = 0; i < STRIP; i++) {
        sum[i][0] = more ? *(VectorAnywhere *)(sums + i * row) : (VectorAnywhere){0};
        sum[i][1] = more ? *(VectorAnywhere *)(sums + i * row + WIDTH) : (VectorAnywhere){0};
    }
    for (int k = 0; k < depth; k++, a += STRIP, b += PANEL) {
        Vector b0 = *(const VectorAnywhere *)b, b1 = *(const VectorAnywhere *)(b + WIDTH);
#pragma GCC unroll 16
        for (int i = 0; i < STRIP; i++) {
            Vector x = a[i] - (Vector){0};
            sum[i][0] = vector_fused(x, b0, sum[i][0]);
            sum[i][1] = vector_fused(x, b1, sum[i][1]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < STRIP; i++) {
        *(VectorAnywhere *)(sums + i * row) = sum[i][0];
        *(VectorAnywhere *)(sums + i * row + WIDTH) = sum[i][1];
    }
}

#ifdef __AVX512F__

// The transpose of 16 × 16 numbers of 32 bits: rows of 1, 2, 4 and 8 numbers change places, a power of two at a time.
static inline void transpose16(__m512i r[16]) {
    __m512i s[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        s[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        s[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(s[i + j], s[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(s[i + j], s[i + j + 2]);
        }
#pragma GCC unroll 2
    for (int i = 0; i < 16; i += 8)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            s[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
            s[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
        }
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        r[j] = _mm512_shuffle_i32x4(s[j], s[j + 8], 0x88);
        r[j + 8] = _mm512_shuffle_i32x4(s[j], s[j + 8], 0xdd);
    }
}

// 16 numbers of a row of which `there` exist, widened, the rest zeros
static inline __m512i row16(const Factor *from, size_t first, int there) {
    __mmask16 mask = there >= 16 ? 0xffff : there <= 0 ? 0 : (__mmask16)((1u << there) - 1);
    if (from->dtype == F32) return _mm512_maskz_loadu_epi32(mask, (const float *)from->x + first);
    _Alignas(32) uint16_t narrow[16] = {0};
    memcpy(narrow, (const uint16_t *)from->x + first, (size_t)least(16, there < 0 ? 0 : there) * sizeof(uint16_t));
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i *)narrow)), 16);
}

// packed (depth, width) = lines of a factor, widened; zeros where there are no more lines
static void pack_fp32(float *packed, int width, const Factor *from, int lines, int depth) {
    for (int line = 0; line < width; line += 16) {
        __mmask16 mask = width - line >= 16 ? 0xffff : (__mmask16)((1u << (width - line)) - 1);
        if (from->line == 1) {
            for (int k = 0; k < depth; k++)
                _mm512_mask_storeu_epi32(packed + k * width + line, mask,
                                         row16(from, (size_t)line + (size_t)k * from->depth, lines - line));
            continue;
        }
        for (int k = 0; k < depth; k += 16) {
            __m512i r[16];
            for (int i = 0; i < 16; i++)
                r[i] = row16(from, (size_t)(line + i) * from->line + (size_t)k, line + i < lines ? depth - k : 0);
            transpose16(r);
            for (int i = 0; i < least(16, depth - k); i++)
                _mm512_mask_storeu_epi32(packed + (k + i) * width + line, mask, r[i]);
        }
    }
}
#else
static inline float element(const Factor *from, int line, int k) {
    size_t i = (size_t)line * from->line + (size_t)k * from->depth;
    return from->dtype == F32 ? ((const float *)from->x)[i] : float_of_bf16(((const uint16_t *)from->x)[i]);
}

static void pack_fp32(float *packed, int width, const Factor *from, int lines, int depth) {
    if (lines < width) memset(packed, 0, (size_t)depth * (size_t)width * sizeof(float));
    if (from->line == 1) {
        for (int k = 0; k < depth; k++)
            for (int i = 0; i < lines; i++) packed[k * width + i] = element(from, i, k);
    } else {
        for (int i = 0; i < lines; i++)
            for (int k = 0; k < depth; k++) packed[k * width + i] = element(from, i, k);
    }
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// bf16 on AMX. A tile register holds 16 rows of 64 bytes. One instruction adds to 16 × 16 sums the products of 16 lines
// of a with 16 lines of b, 32 deep. It wants a tile of a as (lines, depth), one of b as (depth / 2, lines, 2). A strip
// and a panel are 32 lines each: two tiles of either give four of sums, a load for every product.

enum { TILE_LINES = 16, TILE_DEPTH = 32, TILE_BYTES = 1024, TILE_BLOCK = 2 * TILE_LINES };

#if HAVE_AMX

static void amx_begin(void) {
    struct {
        uint8_t palette, start, zero[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } layout = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) layout.row_bytes[tile] = 64, layout.rows[tile] = 16;
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig(&layout);
}

static void amx_end(void) { _tile_release(); }

// sums (32, 32), rows `row` apart, = , or += when more, 32 lines of a times 32 of b, both (depth / 32, 2, a tile)
static void multiply_amx(float *sums, size_t row, const char *a, const char *b, int depth, bool more) {
    float *lower = sums + TILE_LINES * row;
    row *= sizeof(float);
    __asm__ volatile("" ::: "memory"); // the intrinsics do not tell the compiler what they read
    if (more) {
        _tile_loadd(0, sums, row);
        _tile_loadd(1, sums + TILE_LINES, row);
        _tile_loadd(2, lower, row);
        _tile_loadd(3, lower + TILE_LINES, row);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < depth; k += TILE_DEPTH, a += 2 * TILE_BYTES, b += 2 * TILE_BYTES) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_loadd(5, a + TILE_BYTES, 64);
        _tile_loadd(7, b + TILE_BYTES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, row);
    _tile_stored(1, sums + TILE_LINES, row);
    _tile_stored(2, lower, row);
    _tile_stored(3, lower + TILE_LINES, row);
}

// 32 numbers of a row of which `there` exist, the rest zeros
static inline __m512i row32(const uint16_t *x, int there) {
    return there >= 32  ? _mm512_loadu_si512(x)
           : there <= 0 ? _mm512_setzero_si512()
                        : _mm512_maskz_loadu_epi16((1u << there) - 1, x);
}

// Packs at most 32 lines, 32 deep, into two tiles.
static void pack_tiles(char *packed, enum Side side, const Factor *from, int lines, int depth) {
    const uint16_t *x = (const uint16_t *)from->x;
    __m512i tiles[2][16];
    bool along = from->line != 1; // rows of memory are lines
    if (along) {
        for (int i = 0; i < 32; i++)
            tiles[i / 16][i % 16] = i < lines ? row32(x + (size_t)i * from->line, depth) : _mm512_setzero_si512();
    } else {
        // Two rows of memory, each one place of all lines, become 32 pairs: what a tile of b is made of.
        const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7,
                                             38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0),
                      high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        for (int i = 0; i < 16; i++) {
            const uint16_t *row = x + (size_t)(2 * i) * from->depth;
            __m512i even = row32(row, 2 * i < depth ? lines : 0),
                    odd = row32(row + from->depth, 2 * i + 1 < depth ? lines : 0);
            tiles[0][i] = _mm512_permutex2var_epi16(even, low, odd);
            tiles[1][i] = _mm512_permutex2var_epi16(even, high, odd);
        }
    }
    if (along == (side == RIGHT)) {
        transpose16(tiles[0]);
        transpose16(tiles[1]);
    }
    for (int i = 0; i < 32; i++) _mm512_store_si512(packed + i * 64, tiles[i / 16][i % 16]);
}
#else
static void amx_begin(void) {}
static void amx_end(void) {}
static void multiply_amx(float *sums, size_t row, const char *a, const char *b, int depth, bool more) {
    (void)sums, (void)row, (void)a, (void)b, (void)depth, (void)more;
}
static void pack_tiles(char *packed, enum Side side, const Factor *from, int lines, int depth) {
    (void)packed, (void)side, (void)from, (void)lines, (void)depth;
}
#endif

// Linux lets a process use the tile registers when it asks: they make the state saved at a switch of context larger.
static bool amx_usable(void) {
#if HAVE_AMX
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    static int usable = -1;
    if (usable < 0) usable = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return usable;
#else
    return false;
#endif
}

static bool on_amx(DType dtype) { return dtype == BF16 && amx_usable(); }

void products_open(void) { amx_usable(); }

// ---------------------------------------------------------------------------------------------------------------------
// The same for every kernel

enum {
    RUN = 256,     // depth of a strip and a panel that fit the first cache together
    DEPTH = 768,   // of b that is packed at a time …
    COLUMNS = 512, // … and lines of it: they stay in the second cache
    ROWS = 1024,   // of a and c that one thread takes at a time
    STRIPS = 4,    // of a that are packed at a time
    LEAST_ROWS = 128,
};

static int rounded_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
// n in equal parts of at most `most`, each but the last a multiple
static int part_of(int n, int most, int multiple) {
    return least(n, rounded_up(blocks_of((size_t)n, blocks_of((size_t)n, most)), multiple));
}

static int block_lines(enum Side side, bool amx) { return amx ? TILE_BLOCK : side == LEFT ? STRIP : PANEL; }

// Bytes of a strip or panel, `depth` deep.
static size_t block_bytes(enum Side side, bool amx, int depth) {
    return amx ? (size_t)rounded_up(depth, TILE_DEPTH) * TILE_BLOCK * sizeof(uint16_t)
               : (size_t)depth * (size_t)block_lines(side, amx) * sizeof(float);
}

static size_t lines_bytes(enum Side side, bool amx, int lines, int depth) {
    return (size_t)blocks_of((size_t)lines, block_lines(side, amx)) * block_bytes(side, amx, depth);
}

// Sums of a strip, panel by panel.
static size_t sums_count(bool amx, int columns) {
    return (size_t)block_lines(LEFT, amx) * (size_t)rounded_up(columns, block_lines(RIGHT, amx));
}

// The factor from this line and depth on.
static Factor factor_from(Factor f, int line, int k) {
    f.x = at(f.x, (size_t)line * f.line + (size_t)k * f.depth, f.dtype);
    return f;
}

// Packs lines in runs: (runs, blocks, a run's depth). Memory is read along its rows: those are lines, one after the
// other, or hold all lines at one depth.
Packed pack(void *memory, enum Side side, Factor from, int lines, int depth) {
    bool amx = on_amx(from.dtype), along = from.line != 1;
    int width = block_lines(side, amx), blocks = blocks_of((size_t)lines, width);
    char *packed = (char *)memory;
    for (int done = 0; done < depth; done += RUN) {
        int run = least(RUN, depth - done), pieces = blocks_of((size_t)run, TILE_DEPTH);
        size_t block = block_bytes(side, amx, run), piece = block_bytes(side, amx, TILE_DEPTH);
        for (int i = 0; i < blocks * pieces; i++) {
            int line = along ? i / pieces : i % blocks, d = along ? i % pieces : i / blocks;
            Factor part = factor_from(from, line * width, done + d * TILE_DEPTH);
            int count = least(width, lines - line * width), deep = least(TILE_DEPTH, run - d * TILE_DEPTH);
            char *to = packed + (size_t)line * block + (size_t)d * piece;
            if (amx)
                pack_tiles(to, side, &part, count, deep);
            else
                pack_fp32((float *)to, width, &part, count, deep);
        }
        packed += (size_t)blocks * block;
    }
    return (Packed){.x = memory, .lines = lines, .depth = depth, .side = side, .amx = amx};
}

// The run that begins at depth `done` of block number `block`.
static const char *packed_at(const Packed *p, int block, int done) {
    int blocks = blocks_of((size_t)p->lines, block_lines(p->side, p->amx));
    return (const char *)p->x + (size_t)blocks * block_bytes(p->side, p->amx, done) +
           (size_t)block * block_bytes(p->side, p->amx, least(RUN, p->depth - done));
}

// Sums of a strip: from row to row, from panel to panel.
typedef struct {
    float *x;
    size_t row, panel;
} Sums;

static Sums sums_dense(float *x, bool amx) {
    int strip = block_lines(LEFT, amx), panel = block_lines(RIGHT, amx);
    return (Sums){.x = x, .row = (size_t)panel, .panel = (size_t)(strip * panel)};
}

// One strip of a times some panels of b, run by run, into, or added to, sums.
static void strip_multiply(Sums sums, const Packed *a, int strip, const Packed *b, int panel, int panels, int depth,
                           bool more) {
    for (int done = 0; done < depth; done += RUN) {
        int run = least(RUN, depth - done);
        const char *x = packed_at(a, strip, done), *y = packed_at(b, panel, done);
        size_t next = block_bytes(RIGHT, a->amx, least(RUN, b->depth - done));
        for (int j = 0; j < panels; j++, y += next) {
            if (a->amx)
                multiply_amx(sums.x + (size_t)j * sums.panel, sums.row, x, y, run, more || done > 0);
            else
                multiply_fp32(sums.x + (size_t)j * sums.panel, sums.row, (const float *)x, (const float *)y, run,
                              more || done > 0);
        }
    }
}

// Past the caches, which would have to read what is overwritten: outputs are much larger than they are.
static inline void store_streaming(float *out, const float *sums, int columns) {
#ifdef __AVX512F__
    if (((uintptr_t)out & 63) == 0 && columns % 16 == 0) {
        for (int j = 0; j < columns; j += 16) _mm512_stream_ps(out + j, _mm512_loadu_ps(sums + j));
        return;
    }
#endif
    memcpy(out, sums, (size_t)columns * sizeof(float));
}

// (rows, columns) of sums that lie `width` apart to their place.
static inline void store_rows(const Target *c, size_t row, size_t column, const float *sums, int width, int rows,
                              int columns) {
    float bias[TILE_BLOCK], sum[TILE_BLOCK];
    const float *added = c->bias ? row_in(c->bias, column, columns, c->dtype, bias) : NULL;
    for (int i = 0; i < rows; i++, sums += width) {
        size_t first = (row + (size_t)i) * c->stride + column;
        if (c->accumulate) added = (const float *)c->x + first;
        if (added)
            for (int j = 0; j < columns; j++) sum[j] = sums[j] + added[j];
        else
            memcpy(sum, sums, (size_t)columns * sizeof(float));
        if (c->dtype == F32)
            store_streaming((float *)c->x + first, sum, columns);
        else
            row_stored(c->x, first, columns, BF16, sum);
    }
}

static void strip_store(const Target *c, int row, int column, const float *sums, int rows, int columns, bool amx) {
    int width = block_lines(RIGHT, amx), area = block_lines(LEFT, amx) * width;
    for (int j = 0; j < columns; j += width, sums += area) {
        if (columns - j >= width && width == TILE_BLOCK) // as a constant, it makes faster loops
            store_rows(c, (size_t)row, (size_t)(column + j), sums, TILE_BLOCK, rows, TILE_BLOCK);
        else
            store_rows(c, (size_t)row, (size_t)(column + j), sums, width, rows, least(width, columns - j));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// packed, in one thread

size_t packed_bytes(enum Side side, int lines, int depth, DType dtype) {
    return lines_bytes(side, on_amx(dtype), lines, depth);
}

void packed_product(Target c, Packed a, Packed b, int M, int N, int K) {
    int strip = block_lines(LEFT, a.amx), panel = block_lines(RIGHT, a.amx);
    _Alignas(64) float edge[TILE_BLOCK * TILE_BLOCK];
    assert(M <= a.lines && N <= b.lines && K <= a.depth && K <= b.depth && a.amx == b.amx);
    if (a.amx) amx_begin();
    for (int i = 0; i < M; i += strip)
        for (int j = 0; j < N; j += panel) {
            if (c.dtype == F32 && !c.bias && M - i >= strip && N - j >= panel) { // where it belongs
                Sums there = {.x = (float *)c.x + (size_t)i * c.stride + j, .row = c.stride};
                strip_multiply(there, &a, i / strip, &b, j / panel, 1, K, c.accumulate);
            } else {
                strip_multiply(sums_dense(edge, a.amx), &a, i / strip, &b, j / panel, 1, K, false);
                strip_store(&c, i, j, edge, least(strip, M - i), least(panel, N - j), a.amx);
            }
        }
    if (a.amx) amx_end();
}

// ---------------------------------------------------------------------------------------------------------------------
// by all threads

// How a product is cut into tasks. None of it changes a result, so it may look at the number of threads.
typedef struct {
    bool amx;
    int rows, columns, depth; // of a task; of what is packed at a time
    int down, across;         // tasks
    size_t a, b, sums;        // bytes of a thread's scratch
} Cut;

static Cut cut_find(int M, int N, int K, DType dtype, int threads) {
    Cut cut = {.amx = on_amx(dtype), .depth = part_of(K, on_amx(dtype) ? DEPTH : DEPTH / 2, TILE_DEPTH)};
    int strip = block_lines(LEFT, cut.amx);
    cut.columns = part_of(N, COLUMNS, block_lines(RIGHT, cut.amx));
    cut.across = blocks_of((size_t)N, cut.columns);
    // Threads should come out even, within a tenth.
    for (int rows = ROWS;; rows /= 2) {
        cut.rows = part_of(M, rows, strip);
        cut.down = blocks_of((size_t)M, cut.rows);
        int tasks = cut.down * cut.across, rounds = blocks_of((size_t)tasks, threads);
        if (rows <= LEAST_ROWS || rounds * threads * 10 <= tasks * 11) break;
    }
    cut.a = aligned(lines_bytes(LEFT, cut.amx, STRIPS * strip, cut.depth));
    cut.b = aligned(lines_bytes(RIGHT, cut.amx, cut.columns, cut.depth));
    int strips = cut.depth < K ? blocks_of((size_t)cut.rows, strip) : 1; // of sums that wait for more depth
    cut.sums = aligned((size_t)strips * sums_count(cut.amx, cut.columns) * sizeof(float));
    return cut;
}

static void task_run(const Cut *cut, const Target *c, const Factor *a, const Factor *b, int row, int rows,
                     int column, int columns, int K, char *scratch) {
    int strip = block_lines(LEFT, cut->amx), panels = blocks_of((size_t)columns, block_lines(RIGHT, cut->amx));
    if (cut->amx) amx_begin();
    for (int k = 0; k < K; k += cut->depth) {
        int depth = least(cut->depth, K - k);
        float *sums = (float *)(scratch + cut->a + cut->b);
        Packed packed_a = {0}, packed_b = pack(scratch + cut->a, RIGHT, factor_from(*b, column, k), columns, depth);
        for (int i = 0; i < rows; i += strip) {
            int nth = i / strip % STRIPS;
            if (nth == 0)
                packed_a = pack(scratch, LEFT, factor_from(*a, row + i, k), least(STRIPS * strip, rows - i), depth);
            strip_multiply(sums_dense(sums, cut->amx), &packed_a, nth, &packed_b, 0, panels, depth, k > 0);
            if (k + depth == K) strip_store(c, row + i, column, sums, least(strip, rows - i), columns, cut->amx);
            if (cut->depth < K) sums += sums_count(cut->amx, cut->columns);
        }
    }
    if (cut->amx) amx_end();
}

size_t product_scratch(int M, int N, int K, DType dtype, int threads) {
    Cut cut = cut_find(M, N, K, dtype, threads);
    return (size_t)threads * (cut.a + cut.b + cut.sums);
}

void product(Target c, Factor a, Factor b, int M, int N, int K, int threads, void *scratch) {
    Cut cut = cut_find(M, N, K, a.dtype, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int task = 0; task < cut.down * cut.across; task++) {
        int row = task % cut.down * cut.rows, column = task / cut.down * cut.columns;
        task_run(&cut, &c, &a, &b, row, least(cut.rows, M - row), column, least(cut.columns, N - column), K,
                 (char *)scratch + (size_t)omp_get_thread_num() * (cut.a + cut.b + cut.sums));
    }
}

// ---------------------------------------------------------------------------------------------------------------------

bool ops_native_bf16(void) { return amx_usable(); }

const char *ops_description(void) {
    return amx_usable() ? "AVX-512 with AMX" : WIDTH == 16 ? "AVX-512" : WIDTH == 8 ? "AVX2" : "plain C";
}
