// A GPT built from a short description and run on exactly the planned memory, on the first of the ranks there are, with
// random tokens from a shard: for test_gpt and bench. Include after train_gpt.cu.
#ifndef DEV_TRIAL_H
#define DEV_TRIAL_H

#include <unistd.h> // getpid

static char folder[256]; // for shards, the same on all ranks

static void ranks_meet(void) {
    Device *device = device_open(NULL);
    Comm *world = comm_world(device, 120);
    comm_barrier(world);
    comm_close(world);
    device_close(device);
}

// Files under one name on all ranks of this node: rank 0's process number comes with the barrier.
static void folder_agree(void) {
    int64_t number = comm_world_rank() == 0 ? (int64_t)getpid() : 0;
    Device *device = device_open(NULL);
    Comm *world = comm_world(device, 120);
    Event *agreed = event_create(device, "agreed");
    comm_all_reduce(world, &number, 1, COMM_I64_SUM);
    event_record(agreed, comm_stream(world));
    event_synchronize(agreed);
    snprintf(folder, sizeof folder, "/tmp/fsdp_trial_%lld", (long long)number);
    if (comm_world_rank() == 0) mkdir(folder, 0777);
    comm_barrier(world);
    comm_close(world);
    device_close(device);
}

static void folder_remove(void) {
    char command[512];
    ranks_meet();
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (comm_world_rank() == 0 && system(command) != 0) perror(folder);
}

// ---------------------------------------------------------------------------------------------------------------------
// shards, and models run on some of the ranks

// A shard file of 16-bit tokens.
static void shard_write(const char *path, const int *tokens, int count) {
    int32_t header[256] = {20240520, 1, count};
    FILE *file = fopen(path, "wb");
    if (!file) die(EXIT_CODE_FAILURE, NULL, "cannot write %s", path);
    fwrite(header, sizeof header, 1, file);
    for (int i = 0; i < count; i++) {
        uint16_t token = (uint16_t)tokens[i];
        fwrite(&token, sizeof token, 1, file);
    }
    if (fclose(file) != 0) die(EXIT_CODE_FAILURE, NULL, "cannot write %s", path);
}

static Loader *loader_over(const char *pattern, int T, int V, bool every_target, bool shuffle) {
    static char glob[512];
    snprintf(glob, sizeof glob, "%s/%s", folder, pattern);
    return loader_open((LoaderOptions){"--train-data", glob, T, V, every_target, shuffle, 7});
}

// How the model is run.
typedef struct {
    GPTConfig config;
    int ranks, sequences, B, steps, threads; // sequences: of a global batch
    DType dtype;
    float lr;
    FsdpSource source; // NULL: random parameters
    void *context;
    int recompute;
    int prefetch, unit_blocks; // 0: 1
    int shard, shard_ranks;
    bool unsharded;
    DType reduce_dtype;
} Trial;

// The model on the first trial.ranks ranks; g is NULL on the others, which go on to meet them at bench_close.
typedef struct {
    Device *plan, *device;
    Comm *world, *comm;
    GPT *g;
} Bench;

static GPTRun trial_run(const Trial *trial) {
    GPTRun run;
    memset(&run, 0, sizeof run);
    run.B = trial->B;
    run.T = trial->config.maxT;
    run.sample_tokens = 4;
    run.threads = trial->threads;
    run.recompute = trial->recompute;
    run.unit_blocks = trial->unit_blocks ? trial->unit_blocks : 1;
    run.dtype = trial->dtype;
    run.sharding = (FsdpOptions){.dtype = trial->dtype,
                                 .reduce_dtype = trial->reduce_dtype,
                                 .micro_steps = trial->sequences / trial->B / trial->ranks,
                                 .prefetch = trial->prefetch ? trial->prefetch : 1,
                                 .shard = trial->shard,
                                 .shard_ranks = trial->shard_ranks,
                                 .unsharded = trial->unsharded};
    run.clip = 1;
    return run;
}

static Device *plan_make(const Trial *trial, int rank) {
    Device *plan = device_plan();
    Comm *planned = comm_plan(plan, rank, trial->ranks);
    GPT *rehearsed = gpt_open(plan, planned, trial->config, trial_run(trial));
    rehearse(rehearsed);
    gpt_close(rehearsed);
    comm_close(planned);
    return plan;
}

// Builds the trial on exactly the planned memory.
static Bench bench_open(const Trial *trial) {
    Bench bench = {.plan = plan_make(trial, 0)};
    bench.device = device_open(bench.plan);
    bench.world = comm_world(bench.device, 120);
    if (comm_world_rank() >= trial->ranks) return bench;
    bench.comm = comm_group(bench.world, 0, 1, trial->ranks);
    bench.g = gpt_open(bench.device, bench.comm, trial->config, trial_run(trial));
    Init init = {bench.g->ops, 1337};
    if (trial->source)
        fsdp_fill(bench.g->fsdp, trial->source, trial->context);
    else
        fsdp_fill(bench.g->fsdp, init_source, &init);
    return bench;
}

// Ranks that took part check that they used what was planned, to the byte.
static void bench_close(Bench *bench) {
    if (bench->g) {
        if (!device_same_ledger(bench->plan, bench->device))
            die(EXIT_CODE_FAILURE, NULL, "the ledger is not what was planned");
        gpt_close(bench->g);
        comm_close(bench->comm);
    }
    comm_barrier(bench->world);
    comm_close(bench->world);
    device_close(bench->device);
    device_close(bench->plan);
}

static AdamW adam_of(const Trial *trial) {
    return (AdamW){.lr = trial->lr, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .decay = 0.1f};
}

// 100 sequences and a rest, of tokens that are not all alike often.
static Loader *random_loader(const char *name, int T, int V) {
    const int count = T * 100 + T / 2;
    char path[512], pattern[64];
    if (comm_world_rank() == 0) {
        int *tokens = (int *)calloc((size_t)count, sizeof(int));
        for (int i = 0; i < count; i++)
            tokens[i] = (int)(random_unit(3, 0, (uint64_t)i) * random_unit(4, 0, (uint64_t)i) * V);
        snprintf(path, sizeof path, "%s/%s_000000.bin", folder, name);
        shard_write(path, tokens, count);
        free(tokens);
    }
    ranks_meet();
    snprintf(pattern, sizeof pattern, "%s_*.bin", name);
    return loader_over(pattern, T, V, false, true);
}

#endif
