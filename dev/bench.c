// bench: how fast a step of GPT-2 124M is, and what it is made of.
//
//     build/bench                 one rank, all cores
//     mpirun -n 2 build/bench     fully sharded over two
//     --short                     one shape and fewer rounds
//
// Peaks of oneDNN's matrix product, for squares of 2048, 3072 and 4096, are measured between the steps, so that both see
// the same machine; with several ranks all of them measure at once and their peaks are added. `make bench` prints the
// tables of one and of two ranks.
//
// It includes the trainer's source, so what is measured is what trains, and puts a clock around each op by name.
#define TESTING
#include "fsdp/fsdp.h"
#include "fsdp/ops.h"
#include <stdio.h>
#include <time.h>

enum {
    PRODUCTS_FORWARD,
    PRODUCTS_BACKWARD,
    HEAD_FORWARD,
    HEAD_BACKWARD,
    ATTENTION_FORWARD,
    ATTENTION_BACKWARD,
    GELU,
    NORMALISATION,
    CROSS_ENTROPY,
    EMBEDDING,
    GRADIENT_NORM,
    UPDATE,
    KINDS
};
static const char *const kind_names[KINDS] = {"linear forward",
                                              "linear backward",
                                              "head forward",
                                              "head backward",
                                              "attention forward",
                                              "attention backward",
                                              "GELU",
                                              "LayerNorm, residual",
                                              "cross-entropy",
                                              "embedding, fill",
                                              "norm of gradient",
                                              "AdamW"};
static double kind_seconds[KINDS], kind_begun;

static double clock_seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}
static void kind_begin(void) { kind_begun = clock_seconds(); }
static void kind_end(int kind) { kind_seconds[kind] += clock_seconds() - kind_begun; }

#define TIMED(kind, call)               (kind_begin(), call, kind_end(kind))
#define linear_forward(...)             TIMED(PRODUCTS_FORWARD, linear_forward(__VA_ARGS__))
#define linear_backward(...)            TIMED(PRODUCTS_BACKWARD, linear_backward(__VA_ARGS__))
#define unembed_forward(...)            TIMED(HEAD_FORWARD, unembed_forward(__VA_ARGS__))
#define unembed_backward(...)           TIMED(HEAD_BACKWARD, unembed_backward(__VA_ARGS__))
#define attention_forward(...)          TIMED(ATTENTION_FORWARD, attention_forward(__VA_ARGS__))
#define attention_backward(...)         TIMED(ATTENTION_BACKWARD, attention_backward(__VA_ARGS__))
#define gelu_forward(...)               TIMED(GELU, gelu_forward(__VA_ARGS__))
#define gelu_backward(...)              TIMED(GELU, gelu_backward(__VA_ARGS__))
#define layernorm_forward(...)          TIMED(NORMALISATION, layernorm_forward(__VA_ARGS__))
#define residual_layernorm_forward(...) TIMED(NORMALISATION, residual_layernorm_forward(__VA_ARGS__))
#define layernorm_backward(...)         TIMED(NORMALISATION, layernorm_backward(__VA_ARGS__))
#define residual_forward(...)           TIMED(NORMALISATION, residual_forward(__VA_ARGS__))
#define softmax_cross_entropy(...)      TIMED(CROSS_ENTROPY, softmax_cross_entropy(__VA_ARGS__))
#define embedding_forward(...)          TIMED(EMBEDDING, embedding_forward(__VA_ARGS__))
#define embedding_backward(...)         TIMED(EMBEDDING, embedding_backward(__VA_ARGS__))
#define fill_zero(...)                  TIMED(EMBEDDING, fill_zero(__VA_ARGS__))
#define fsdp_norm(...)                  TIMED(GRADIENT_NORM, fsdp_norm(__VA_ARGS__))
#define fsdp_update(...)                TIMED(UPDATE, fsdp_update(__VA_ARGS__))
#include "train_gpt.cu"
#include "trial.h"
#include "cube.h"

// ---------------------------------------------------------------------------------------------------------------------
// what is measured beside the steps

enum { CUBES = 3, MOST_ROUNDS = 32 };
static const int cube_sizes[CUBES] = {2048, 3072, 4096};

// Everything that the ranks of a benchmark share.
typedef struct {
    Device *device;
    Comm *comm;
    Event *done;
    int threads;
} Machine;

static Machine machine_open(int threads) {
    Machine m = {.device = device_open(NULL), .threads = threads};
    m.comm = comm_world(m.device, 600);
    m.done = event_create(m.device, "done");
    return m;
}

static void machine_close(Machine *m) {
    comm_close(m->comm);
    device_close(m->device);
}

static void comm_await_all(const Machine *m) {
    event_record(m->done, comm_stream(m->comm));
    event_synchronize(m->done);
}

// The ranks' values added up.
static double ranks_sum(const Machine *m, double value) {
    double all[64], sum = 0;
    comm_all_gather(m->comm, all, &value, sizeof value);
    comm_await_all(m);
    for (int rank = 0; rank < comm_world_size(); rank++) sum += all[rank];
    return sum;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *values, int count) {
    double sorted[MOST_ROUNDS];
    memcpy(sorted, values, (size_t)count * sizeof(double));
    qsort(sorted, (size_t)count, sizeof(double), by_size);
    return sorted[count / 2];
}

// ---------------------------------------------------------------------------------------------------------------------
// steps of GPT-2 124M

typedef struct {
    const char *name;
    DType dtype;
    int B, T; // of all ranks together
    int rounds;
} Case;

static const GPTConfig gpt2 = {.maxT = 1024, .V = 50257, .Vp = 50304, .L = 12, .NH = 12, .C = 768};

typedef struct {
    double seconds, exposed; // medians
    double peak;             // of all ranks' cubes
    double kinds[KINDS];     // seconds a step
} Found;

// Rounds of a cube and a step; the first two warm up.
static Found case_run(const Case *c, const Machine *m) {
    enum { WARM = 2 };
    Found found = {.peak = 0};
    double took[MOST_ROUNDS], waited[MOST_ROUNDS];
    Trial trial = {.config = gpt2,
                   .ranks = comm_world_size(),
                   .sequences = c->B,
                   .B = c->B / comm_world_size(),
                   .threads = m->threads,
                   .dtype = c->dtype,
                   .lr = 1e-4f};
    trial.config.maxT = c->T;
    Loader *loader = random_loader("bench", c->T, gpt2.V);
    Device *memory = device_open(NULL);
    Cube cubes[CUBES];
    for (int i = 0; i < CUBES; i++) cubes[i] = cube_open(memory, cube_sizes[i], c->dtype, m->threads);
    Bench bench = bench_open(&trial);
    for (int round = -WARM; round < c->rounds; round++) {
        if (round == 0) memset(kind_seconds, 0, sizeof kind_seconds);
        comm_barrier(m->comm);
        double peak = ranks_sum(m, cube_run(&cubes[(round + WARM) % CUBES]));
        if (peak > found.peak) found.peak = peak;
        comm_barrier(m->comm);
        double begin = seconds(), waiting = device_waited(bench.device);
        train_step(bench.g, loader, (int64_t)(round + WARM) * c->B, round + WARM + 1, adam_of(&trial));
        if (round < 0) continue;
        took[round] = seconds() - begin;
        waited[round] = device_waited(bench.device) - waiting;
    }
    for (int k = 0; k < KINDS; k++) found.kinds[k] = kind_seconds[k] / c->rounds;
    found.seconds = median(took, c->rounds);
    found.exposed = ranks_sum(m, median(waited, c->rounds)) / comm_world_size();
    bench_close(&bench);
    for (int i = 0; i < CUBES; i++) cube_close(&cubes[i]);
    device_close(memory);
    loader_close(loader);
    return found;
}

static void case_say(const Case *c, const Found *found) {
    const double flops = 6.0 * 124439808 + 6.0 * gpt2.L * gpt2.C * c->T, tokens = (double)c->B * c->T;
    printf(
        "%-6s %2d x %-4d  %8.0f tokens/s  %6.1f %% of %5.0f GFLOP/s  %9.1f ms a step, %5.1f ms (%.1f %%) exposed\n",
        c->name, c->B, c->T, tokens / found->seconds, 100 * flops * tokens / found->seconds / found->peak,
        found->peak / 1e9, 1e3 * found->seconds, 1e3 * found->exposed, 100 * found->exposed / found->seconds);
}

static void kinds_say(const Found *a, const Found *b) {
    double rest[2] = {a->seconds, b->seconds};
    printf("\nof a step of 4 x 1024, on rank 0      fp32 ms      %%      bf16 ms      %%\n");
    for (int k = 0; k < KINDS; k++) {
        printf("  %-28s %12.1f %6.1f %12.1f %6.1f\n", kind_names[k], 1e3 * a->kinds[k],
               100 * a->kinds[k] / a->seconds, 1e3 * b->kinds[k], 100 * b->kinds[k] / b->seconds);
        rest[0] -= a->kinds[k];
        rest[1] -= b->kinds[k];
    }
    printf("  %-28s %12.1f %6.1f %12.1f %6.1f\n", "all else, with waiting", 1e3 * rest[0],
           100 * rest[0] / a->seconds, 1e3 * rest[1], 100 * rest[1] / b->seconds);
}

// ---------------------------------------------------------------------------------------------------------------------
// what moves memory

enum { ELEMENTS = 1 << 24, TIMES = 7 };

// The best of several of `call`, in GB/s of this many bytes.
#define BEST_RATE(bytes, call)                                                                                     \
    ({                                                                                                             \
        double best_ = 0;                                                                                          \
        for (int i_ = 0; i_ < TIMES; i_++) {                                                                       \
            comm_barrier(m->comm);                                                                                 \
            double begin_ = seconds();                                                                             \
            call;                                                                                                  \
            best_ = fmax(best_, (double)(bytes) / (seconds() - begin_) / 1e9);                                     \
        }                                                                                                          \
        best_;                                                                                                     \
    })

// AdamW reads w, m, v and the gradient and writes w, m, v and the bf16 copy; a copy reads and writes.
static void optimizer_say(const Machine *m) {
    Ops *ops = ops_open(m->device, m->threads);
    float *x[4], scale = 1;
    for (int i = 0; i < 4; i++) x[i] = (float *)device_alloc(m->device, "bench", ELEMENTS * sizeof(float));
    void *low = device_alloc(m->device, "bench", ELEMENTS * sizeof(uint16_t));
    AdamW settings = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f};
    for (size_t i = 0; i < ELEMENTS; i++) x[3][i] = 1e-3f;
    double copy = BEST_RATE(8.0 * ELEMENTS, cast_from_f32(ops, x[1], x[3], ELEMENTS, F32));
    double plain = BEST_RATE(28.0 * ELEMENTS, adamw(ops, x[0], x[1], x[2], NULL, x[3], ELEMENTS, &scale, settings));
    double both = BEST_RATE(30.0 * ELEMENTS, adamw(ops, x[0], x[1], x[2], low, x[3], ELEMENTS, &scale, settings));
    copy = ranks_sum(m, copy), plain = ranks_sum(m, plain), both = ranks_sum(m, both);
    if (comm_world_rank() == 0)
        printf("\nAdamW %.1f GB/s, with the bf16 copy %.1f GB/s; a copy %.1f GB/s\n", plain, both, copy);
    ops_close(ops);
}

// Bytes that a rank receives, of 64 MiB in all.
static void collectives_say(const Machine *m) {
    const int ranks = comm_world_size();
    const size_t slice = ELEMENTS / (size_t)ranks / FSDP_ALIGN * FSDP_ALIGN;
    const double bytes = (double)(ranks - 1) * (double)slice * sizeof(float);
    float *all = (float *)device_alloc(m->device, "bench", ELEMENTS * sizeof(float));
    float *exchange = (float *)device_alloc(m->device, "bench", ELEMENTS * sizeof(float));
    float *own = (float *)device_alloc(m->device, "bench", slice * sizeof(float));
    CommReduce fp32 = {
        .sum = own, .leaf = all, .dtype = F32, .count = slice, .stride = slice, .exchange = exchange};
    CommReduce bf16 = fp32;
    bf16.dtype = BF16;
    double gather =
        BEST_RATE(bytes, (comm_all_gather(m->comm, all, own, slice * sizeof(float)), comm_await_all(m)));
    double reduce = BEST_RATE(bytes, (comm_reduce_scatter(m->comm, &fp32), comm_await_all(m)));
    double low = BEST_RATE(bytes / 2, (comm_reduce_scatter(m->comm, &bf16), comm_await_all(m)));
    if (comm_world_rank() == 0)
        printf("received per rank: all-gather %.2f GB/s, reduce-scatter %.2f GB/s, of bf16 leaves %.2f GB/s\n",
               gather, reduce, low);
}

int main(int argc, char **argv) {
    const bool brief = argc > 1 && strcmp(argv[1], "--short") == 0;
    static const Case cases[] = {{"fp32", F32, 4, 1024, 7},
                                 {"bf16", BF16, 4, 1024, 9},
                                 {"bf16", BF16, 1, 1024, 9},
                                 {"bf16", BF16, 4, 64, 15}};
    Found found[4];
    char cores[256];
    int threads = 0;
    error_program("bench");
    comm_start(&argc, &argv);
    folder_agree();
    device_cores(comm_local_rank(), comm_local_size(), comm_bound_on_purpose(), &threads, cores, sizeof cores);
    Machine machine = machine_open(threads);
    if (comm_world_rank() == 0)
        printf("GPT-2 124M, %d rank%s, rank 0 on %s; %s\n", comm_world_size(), comm_world_size() == 1 ? "" : "s",
               cores, ops_description());
    for (int i = 0; i < (comm_world_size() > 1 || brief ? 2 : 4); i++) {
        found[i] = case_run(&cases[i], &machine);
        if (comm_world_rank() == 0) case_say(&cases[i], &found[i]);
        fflush(stdout);
    }
    if (comm_world_rank() == 0) kinds_say(&found[0], &found[1]);
    optimizer_say(&machine);
    if (comm_world_size() > 1) collectives_say(&machine);
    machine_close(&machine);
    folder_remove();
    comm_end();
    return 0;
}
