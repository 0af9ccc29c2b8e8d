// fsdp, over the groups of comm and the streams of device.
//
// Memory that streams share is declared to the checker of their order where an access begins, after the wait that allows
// it, and where it ends, before the record that tells of it: so neither a late wait nor an early record goes unnoticed.
#include "fsdp.h"
#include "error.h"
#include <assert.h> // assert
#include <math.h>   // pow
#include <stdio.h>  // snprintf
#include <stdlib.h> // calloc, free
#include <string.h> // memcpy

enum { GRAD_SLOTS = 2, MAX_PARTIALS = 31 };

// What a strategy comes to: all that the rest of this file asks.
typedef struct {
    int ranks;        // F: of a group that shards
    int replicas;     // groups
    bool keep_params; // every unit has its own place and stays gathered until the update
    bool keep_grads;  // gradients are whole until the last micro-step
} Strategy;

// Where a gathered unit lies.
typedef struct {
    void *memory;
    int unit; // -1: none
    uint64_t version;
    enum { SLOT_FREE, SLOT_GATHERED, SLOT_USED } state;
    Event *gathered, *released;
    Shared shared;
} Slot;

// Where a unit's gradient lies from the first write until it is reduced.
typedef struct {
    float *memory;
    int unit; // -1: none
    Event *reduced;
    Shared shared;
} GradSlot;

// What fsdp adds to a unit.
typedef struct {
    size_t size, slice;            // elements; size = F · slice
    float *master, *m, *v;         // (slice)
    void *params;                  // (slice) of dtype: what travels; in fp32 the master itself
    float *whole;                  // (size) the gradient, when gradients are kept; else NULL
    float *grad;                   // (slice) the reduced gradient; within whole, if there is one
    float *partials[MAX_PARTIALS]; // (size or slice, as the gradient)
    Shared params_shared;          // the slices of parameters
    Shared grads;                  // whole or grad, and the partial sums
    Event *updated;                // the parameters' slices were written
    Event *summed;                 // the gradient's slice is that of the whole step
    uint64_t version;              // of the parameters
    bool open;                     // its gradient is being written
    int reduced;                   // micro-steps reduced so far in this step
    bool normed;                   // fsdp_norm has prepared the update
    char gather_phase[48], reduce_phase[48], fetch_phase[48], replicate_phase[64];
} Place;

struct Fsdp {
    Device *device;
    Ops *ops;
    Comm *world, *group, *replicas; // group: world when F is W; replicas: NULL when there is one
    FsdpUnit *units;
    Place *places;
    int count, rank, ranks; // of the group
    FsdpOptions options;
    Strategy strategy;
    size_t elements, slice_elements; // of all units
    int partial_count;

    void *exchange;          // of reduce_dtype, or of fp32 for gradients that were kept
    float *replica_exchange; // between replicas

    Slot *slots; // slot 0 is the root's; slot u is unit u's when parameters are kept
    int slot_count;
    GradSlot grad_slots[1 + GRAD_SLOTS]; // number 0 is the root's
    int next_grad_slot;
    Event *filled;  // the latest gradient was written
    Event *reduced; // all reductions within the group so far are done
    Shared agreement;
    double gather_waited;

    uint32_t *bits; // (count) largest magnitude of each unit's gradient, then [count] of all
    int64_t *sums;  // (2) of squares
    float *scale, *norm;
    uint32_t *host_bits; // (count + 1) what the host sees of it
    int64_t *host_sums;  // (2)
    Event *computed, *agreed;
};

static void refuse(const Fsdp *f, int unit, const char *what) {
    die(EXIT_CODE_FAILURE, "this is a fault of the training loop's order", "unit %s %s", f->units[unit].name, what);
}

static size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

int64_t fsdp_tensor_elements(const FsdpTensor *tensor) {
    return tensor->ndim == 2 ? tensor->shape[0] * tensor->shape[1] : tensor->shape[0];
}

size_t fsdp_elements(const Fsdp *f) { return f->elements; }
size_t fsdp_slice_elements(const Fsdp *f) { return f->slice_elements; }
double fsdp_gather_waited(const Fsdp *f) { return f->gather_waited; }

FsdpTraffic fsdp_traffic(const Fsdp *f) {
    CommTraffic group = comm_traffic(f->group);
    FsdpTraffic traffic = {group.gathered, group.reduced, 0};
    if (f->replicas) {
        CommTraffic between = comm_traffic(f->replicas);
        traffic.replicated = between.gathered + between.reduced;
    }
    return traffic;
}

// ---------------------------------------------------------------------------------------------------------------------
// strategies

static Strategy strategy_of(const FsdpOptions *options, int world) {
    int ranks = options->shard == FSDP_NONE ? 1 : options->shard_ranks ? options->shard_ranks : world;
    bool late = options->shard >= FSDP_OPTIMIZER || options->unsharded;
    Strategy strategy = {.ranks = ranks,
                         .replicas = world / ranks,
                         .keep_params = options->shard != FSDP_FULL || ranks == 1,
                         .keep_grads = (late && options->micro_steps > 1) || ranks == 1};
    assert(world % ranks == 0);
    return strategy;
}

// Sums that are formed first must be subtrees: over the group and then over micro-steps, or, where a rank adds up its own
// gradients first, the other way round; over replicas last.
int fsdp_leaf(const Fsdp *f, int j) {
    const int J = f->options.micro_steps, rank = comm_rank(f->world), F = f->ranks;
    if (f->strategy.keep_grads) return rank * J + j;
    return (rank / F * J + j) * F + rank % F;
}

static bool unit_kept(const Fsdp *f, int unit) { return unit == FSDP_ROOT || f->strategy.keep_params; }

// ---------------------------------------------------------------------------------------------------------------------
// layout and memory

// A slice is also cut evenly between replicas.
static void units_lay_out(Fsdp *f) {
    for (int u = 0; u < f->count; u++) {
        Place *place = &f->places[u];
        const char *name = f->units[u].name;
        size_t offset = 0;
        for (int t = 0; t < f->units[u].count; t++) {
            f->units[u].tensors[t].offset = offset;
            offset += round_up((size_t)f->units[u].tensors[t].stored, FSDP_ALIGN);
        }
        place->slice =
            round_up((offset + (size_t)f->ranks - 1) / (size_t)f->ranks, FSDP_ALIGN * (size_t)f->strategy.replicas);
        place->size = place->slice * (size_t)f->ranks;
        place->params_shared.name = "parameter slices";
        place->grads.name = "gradient";
        place->updated = event_create(f->device, "updated");
        place->summed = event_create(f->device, "summed");
        place->version = 1;
        f->slice_elements += place->slice;
        f->elements += place->size;
        snprintf(place->gather_phase, sizeof place->gather_phase, "gather of %s", name);
        snprintf(place->fetch_phase, sizeof place->fetch_phase, "fetch from %s", name);
        snprintf(place->reduce_phase, sizeof place->reduce_phase, "reduction of %s", name);
        snprintf(place->replicate_phase, sizeof place->replicate_phase, "reduction of %s between replicas", name);
    }
}

static size_t largest_layer(const Fsdp *f) {
    size_t most = 0;
    for (int u = 1; u < f->count; u++)
        if (f->places[u].size > most) most = f->places[u].size;
    return most;
}

static float *take_floats(const Fsdp *f, const char *arena, size_t n) {
    return (float *)device_alloc(f->device, arena, n * sizeof(float));
}

// Places for gathered units: one for each that stays gathered, prefetch+1 for all others.
static void slots_take(Fsdp *f) {
    const int layers = f->count - 1, ahead = f->options.prefetch + 1;
    const size_t size = dtype_size(f->options.dtype);
    f->slot_count = 1 + (f->strategy.keep_params || ahead > layers ? layers : ahead);
    f->slots = (Slot *)calloc((size_t)f->slot_count, sizeof(Slot));
    if (!f->slots) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    for (int s = 0; s < f->slot_count; s++) {
        Slot *slot = &f->slots[s];
        slot->unit = -1;
        slot->gathered = event_create(f->device, "gathered");
        slot->released = event_create(f->device, "released");
        slot->shared.name = s == FSDP_ROOT ? "root" : "slot";
        if (unit_kept(f, s))
            slot->memory =
                device_alloc(f->device, f->strategy.keep_params ? "parameters" : "root", f->places[s].size * size);
        else
            slot->memory = device_alloc(f->device, "slots", largest_layer(f) * size);
    }
}

// The rank's own: of parameters, moments and gradients.
static void slices_take(Fsdp *f) {
    const size_t size = dtype_size(f->options.dtype);
    const bool low = f->options.dtype == BF16;
    while (1 << f->partial_count < f->options.micro_steps) f->partial_count++;
    assert(f->partial_count <= MAX_PARTIALS);
    for (int u = 0; u < f->count; u++) {
        Place *place = &f->places[u];
        size_t n = place->slice, sums = f->strategy.keep_grads ? place->size : n;
        if (unit_kept(f, u))
            place->params = (char *)f->slots[u].memory + (size_t)f->rank * n * size;
        else if (low)
            place->params = device_alloc(f->device, "bf16 slices", n * size);
        place->master = place->params && !low ? (float *)place->params : take_floats(f, "master", n);
        if (!place->params) place->params = place->master;
        place->m = take_floats(f, "moments", n);
        place->v = take_floats(f, "moments", n);
        if (f->strategy.keep_grads) place->whole = take_floats(f, "gradient", sums);
        place->grad = place->whole ? place->whole + (size_t)f->rank * n : take_floats(f, "gradient", n);
        for (int p = 0; p < f->partial_count; p++) place->partials[p] = take_floats(f, "partial sums", sums);
    }
}

// Places for gradients on their way, and what comes in from other ranks.
static void exchanges_take(Fsdp *f) {
    const DType leaf = f->strategy.keep_grads ? F32 : f->options.reduce_dtype;
    const size_t replicas = (size_t)f->strategy.replicas;
    for (int s = 0; s < 1 + GRAD_SLOTS && !f->strategy.keep_grads; s++) {
        GradSlot *slot = &f->grad_slots[s];
        slot->unit = -1;
        slot->reduced = event_create(f->device, "slot reduced");
        slot->shared.name = s == FSDP_ROOT ? "root gradient" : "gradient slot";
        slot->memory = take_floats(f, s == FSDP_ROOT ? "root gradient" : "gradient slots",
                                   s == FSDP_ROOT ? f->places[FSDP_ROOT].size : largest_layer(f));
    }
    size_t most = 0;
    for (int u = 0; u < f->count; u++)
        if (f->places[u].slice > most) most = f->places[u].slice;
    if (f->ranks > 1)
        f->exchange =
            device_alloc(f->device, "exchange", comm_exchange_elements(f->ranks, most) * dtype_size(leaf));
    if (replicas > 1)
        f->replica_exchange = take_floats(f, "exchange", comm_exchange_elements((int)replicas, most / replicas));
}

// Groups of consecutive ranks, and, across them, those that own the same slices.
static void groups_open(Fsdp *f, Comm *world) {
    const int rank = comm_rank(world), F = f->strategy.ranks;
    f->world = world;
    f->group = f->strategy.replicas == 1 ? world : comm_group(world, rank / F * F, 1, F);
    if (f->strategy.replicas > 1) f->replicas = comm_group(world, rank % F, F, f->strategy.replicas);
    f->rank = comm_rank(f->group);
    f->ranks = comm_size(f->group);
}

Fsdp *fsdp_open(Device *device, Ops *ops, Comm *world, FsdpUnit *units, int count, FsdpOptions options) {
    Fsdp *f = (Fsdp *)calloc(1, sizeof *f);
    Place *places = (Place *)calloc((size_t)count, sizeof *places);
    if (!f || !places) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    assert(options.prefetch >= 1 && options.prefetch <= FSDP_MAX_PREFETCH && options.micro_steps >= 1);
    f->device = device;
    f->ops = ops;
    f->units = units;
    f->places = places;
    f->count = count;
    f->options = options;
    f->strategy = strategy_of(&options, comm_size(world));
    f->next_grad_slot = 1;
    f->agreement.name = "parts of the norm";
    groups_open(f, world);
    units_lay_out(f);
    slots_take(f);
    slices_take(f);
    exchanges_take(f);
    f->filled = event_create(device, "filled");
    f->reduced = event_create(device, "reduced");
    f->computed = event_create(device, "computed");
    f->agreed = event_create(device, "agreed");
    f->bits = (uint32_t *)device_alloc(device, "workspace, small", ((size_t)count + 1) * sizeof(uint32_t));
    f->sums = (int64_t *)device_alloc(device, "workspace, small", 2 * sizeof(int64_t));
    f->scale = take_floats(f, "workspace, small", 1);
    f->norm = take_floats(f, "workspace, small", 1);
    f->host_bits =
        (uint32_t *)device_alloc_host(device, "workspace, small", ((size_t)count + 1) * sizeof(uint32_t));
    f->host_sums = (int64_t *)device_alloc_host(device, "workspace, small", 2 * sizeof(int64_t));
    return f;
}

void fsdp_close(Fsdp *f) {
    if (f->group != f->world) comm_close(f->group);
    if (f->replicas) comm_close(f->replicas);
    free(f->slots);
    free(f->places);
    free(f);
}

// ---------------------------------------------------------------------------------------------------------------------
// pieces: what of a tensor lies in a rank's slice

typedef struct {
    size_t in_tensor, in_slice, count; // count 0: nothing
} Piece;

// Of the tensor's first `elements` elements, those in the slice of `rank`.
static Piece piece_of(const Fsdp *f, int unit, const FsdpTensor *tensor, size_t elements, int rank) {
    size_t begin = f->places[unit].slice * (size_t)rank, end = begin + f->places[unit].slice;
    size_t first = tensor->offset > begin ? tensor->offset : begin;
    size_t last = tensor->offset + elements < end ? tensor->offset + elements : end;
    if (first >= last) return (Piece){0, 0, 0};
    return (Piece){.in_tensor = first - tensor->offset, .in_slice = first - begin, .count = last - first};
}

static Slot *slot_holding(Fsdp *f, int unit) {
    for (int s = 0; s < f->slot_count; s++)
        if (f->slots[s].unit == unit && f->slots[s].version == f->places[unit].version) return &f->slots[s];
    return NULL;
}

static void params_written(Fsdp *f, int unit, const char *place) {
    Stream *compute = device_compute(f->device);
    if (unit_kept(f, unit)) stream_writes(compute, &f->slots[unit].shared, place); // its slice lies there
    stream_writes(compute, &f->places[unit].params_shared, place);
}

// Between these two compute writes the unit's slices. It comes after the gathers that read them, and later gathers come
// after it: what is gathered now is stale then.
static void params_open(Fsdp *f, int unit, const char *place) {
    Slot *slot = slot_holding(f, unit);
    if (slot && slot->state == SLOT_USED) refuse(f, unit, "is written while it is in use");
    if (slot) {
        stream_wait(device_compute(f->device), slot->gathered);
        slot->state = SLOT_FREE;
    }
    params_written(f, unit, place);
}

static void params_close(Fsdp *f, int unit, const char *place) {
    params_written(f, unit, place);
    f->places[unit].version++;
    event_record(f->places[unit].updated, device_compute(f->device));
}

static void fill_unit(Fsdp *f, int u, FsdpSource source, void *context) {
    Place *place = &f->places[u];
    for (int t = 0; t < f->units[u].count; t++) {
        const FsdpTensor *tensor = &f->units[u].tensors[t];
        Piece piece = piece_of(f, u, tensor, (size_t)fsdp_tensor_elements(tensor), f->rank);
        if (piece.count > 0 && !device_planning(f->device))
            source(context, tensor, (int64_t)piece.in_tensor, (int64_t)piece.count, place->master + piece.in_slice);
    }
    if (f->options.dtype == BF16) cast_from_f32(f->ops, place->params, place->master, place->slice, BF16);
}

void fsdp_fill(Fsdp *f, FsdpSource source, void *context) {
    for (int u = 0; u < f->count; u++) {
        params_open(f, u, "fsdp_fill");
        fill_unit(f, u, source, context);
        params_close(f, u, "fsdp_fill");
    }
}

// Every rank gets a range of a tensor from the slices that hold it: each owner broadcasts its piece.
static void fetch(Fsdp *f, const float *slice, int unit, int t, int64_t first, int64_t count, float *out) {
    Stream *stream = comm_stream(f->group);
    comm_phase(f->group, f->places[unit].fetch_phase);
    for (int rank = 0; rank < f->ranks; rank++) {
        Piece piece = piece_of(f, unit, &f->units[unit].tensors[t], (size_t)(first + count), rank);
        size_t skipped = piece.in_tensor < (size_t)first ? (size_t)first - piece.in_tensor : 0;
        if (piece.count <= skipped) continue;
        float *place = out + (piece.in_tensor + skipped - (size_t)first);
        size_t n = piece.count - skipped;
        if (rank == f->rank) device_copy_out(f->device, place, slice + piece.in_slice + skipped, n * sizeof(float));
        comm_broadcast(f->group, place, n * sizeof(float), rank);
    }
    event_record(f->agreed, stream);
    event_synchronize(f->agreed);
}

void fsdp_fetch(Fsdp *f, int unit, int t, int64_t first, int64_t count, float *out) {
    Stream *stream = comm_stream(f->group);
    stream_wait(stream, f->places[unit].updated);
    stream_reads(stream, &f->places[unit].params_shared, "fsdp_fetch");
    fetch(f, f->places[unit].master, unit, t, first, count, out);
}

void fsdp_fetch_grad(Fsdp *f, int unit, int t, int64_t first, int64_t count, float *out) {
    stream_reads(comm_stream(f->group), &f->places[unit].grads, "fsdp_fetch_grad");
    stream_reads(device_compute(f->device), &f->places[unit].grads, "fsdp_fetch_grad"); // the host copies
    fetch(f, f->places[unit].grad, unit, t, first, count, out);
}

// ---------------------------------------------------------------------------------------------------------------------
// gather, use, release

// How long a slot's unit can be done without while units are used in the order of their numbers, up or down.
static int slot_distance(const Fsdp *f, const Slot *slot, int unit) {
    if (slot->unit < 0 || slot->version != f->places[slot->unit].version) return f->count; // holds nothing
    return slot->unit < unit ? unit - slot->unit : slot->unit - unit;
}

// The slot for a unit that is in none: the free one that will be missed last.
static Slot *slot_for(Fsdp *f, int unit) {
    if (unit_kept(f, unit)) return &f->slots[unit];
    Slot *best = NULL;
    for (int s = 1; s < f->slot_count; s++) {
        Slot *slot = &f->slots[s];
        if (slot->state == SLOT_FREE && (!best || slot_distance(f, slot, unit) > slot_distance(f, best, unit)))
            best = slot;
    }
    if (!best) refuse(f, unit, "is gathered while every slot is in use");
    return best;
}

void fsdp_gather(Fsdp *f, int unit) {
    Slot *slot = slot_holding(f, unit);
    if (slot) {
        if (slot->state == SLOT_FREE) slot->state = SLOT_GATHERED;
        return;
    }
    slot = slot_for(f, unit);
    Place *place = &f->places[unit];
    Stream *stream = comm_stream(f->group);
    slot->unit = unit;
    slot->version = place->version;
    slot->state = SLOT_GATHERED;
    if (f->ranks == 1) return;
    stream_wait(stream, slot->released);
    stream_wait(stream, place->updated);
    stream_reads(stream, &place->params_shared, "fsdp_gather");
    stream_writes(stream, &slot->shared, "fsdp_gather");
    comm_phase(f->group, place->gather_phase);
    comm_all_gather(f->group, slot->memory, place->params, place->slice * dtype_size(f->options.dtype));
    event_record(slot->gathered, stream);
}

const void *fsdp_use(Fsdp *f, int unit) {
    Slot *slot = slot_holding(f, unit);
    if (!slot || slot->state == SLOT_FREE) refuse(f, unit, "is used before it is gathered");
    if (slot->state == SLOT_USED) refuse(f, unit, "is used again before it is released");
    Stream *compute = device_compute(f->device);
    double waited = device_waited(f->device);
    slot->state = SLOT_USED;
    stream_wait(compute, slot->gathered);
    f->gather_waited += device_waited(f->device) - waited;
    stream_reads(compute, &slot->shared, "fsdp_use");
    return slot->memory;
}

void fsdp_release(Fsdp *f, int unit) {
    Slot *slot = slot_holding(f, unit);
    if (!slot || slot->state != SLOT_USED) refuse(f, unit, "is released without being in use");
    slot->state = SLOT_FREE;
    stream_reads(device_compute(f->device), &slot->shared, "fsdp_release");
    event_record(slot->released, device_compute(f->device));
}

// ---------------------------------------------------------------------------------------------------------------------
// gradients

// Layers write their tensors and nothing between and after them. That must be 0, whatever the slot held before.
static void gaps_clear(const Fsdp *f, int unit, float *memory) {
    const FsdpUnit *u = &f->units[unit];
    for (int t = 0; t < u->count; t++) {
        size_t end = u->tensors[t].offset + (size_t)u->tensors[t].stored;
        size_t next = t + 1 < u->count ? u->tensors[t + 1].offset : f->places[unit].size;
        if (next > end) fill_zero(f->ops, memory + end, next - end, F32);
    }
}

static float *grad_slot_take(Fsdp *f, int unit) {
    int number = FSDP_ROOT;
    if (unit != FSDP_ROOT) {
        number = f->next_grad_slot;
        if (f->grad_slots[number].unit >= 0) number = number % GRAD_SLOTS + 1;
        f->next_grad_slot = number % GRAD_SLOTS + 1;
    }
    GradSlot *slot = &f->grad_slots[number];
    if (slot->unit >= 0)
        refuse(f, unit, "asks for a gradient slot while both hold gradients that were not reduced");
    slot->unit = unit;
    stream_wait(device_compute(f->device), slot->reduced);
    stream_writes(device_compute(f->device), &slot->shared, "fsdp_grad");
    gaps_clear(f, unit, slot->memory);
    return slot->memory;
}

// How micro-step j of J is added: which partial sums it joins, and where the result goes. Like adding one to a binary
// counter; the last micro-step joins everything into the gradient.
typedef struct {
    float *sum;
    const float *partials[MAX_PARTIALS];
    int carries;
} CounterStep;

static CounterStep counter_step(const Fsdp *f, const Place *place) {
    CounterStep step = {.carries = 0};
    const int j = place->reduced;
    bool last = j + 1 == f->options.micro_steps;
    int bit = 0;
    for (; j >> bit && (last || j >> bit & 1); bit++)
        if (j >> bit & 1) step.partials[step.carries++] = place->partials[bit];
    step.sum = last ? (place->whole ? place->whole : place->grad) : place->partials[bit];
    return step;
}

// A gradient that is kept is written where its sum will be.
float *fsdp_grad(Fsdp *f, int unit) {
    Place *place = &f->places[unit];
    if (place->open) refuse(f, unit, "asks for a gradient slot while it holds one");
    if (place->reduced == f->options.micro_steps)
        refuse(f, unit, "is reduced more often than there are micro-steps");
    place->open = true;
    if (!place->whole) return grad_slot_take(f, unit);
    stream_writes(device_compute(f->device), &place->grads, "fsdp_grad");
    return counter_step(f, place).sum;
}

// Cuts the gradient over the group. step: the partial sums to be added.
static void reduce_group(Fsdp *f, Place *place, const void *leaf, DType dtype, const CounterStep *step) {
    CommReduce reduce = {.sum = step->sum,
                         .leaf = leaf,
                         .dtype = dtype,
                         .count = place->slice,
                         .stride = place->slice,
                         .exchange = f->exchange,
                         .carries = step->carries};
    for (int c = 0; c < step->carries; c++) reduce.partials[c] = step->partials[c];
    comm_phase(f->group, place->reduce_phase);
    comm_reduce_scatter(f->group, &reduce);
    event_record(f->reduced, comm_stream(f->group));
}

// A leaf in a slot goes to the group at once.
static void reduce_slot(Fsdp *f, int unit, Place *place) {
    Stream *compute = device_compute(f->device), *stream = comm_stream(f->group);
    const DType dtype = f->options.reduce_dtype;
    GradSlot *slot = f->grad_slots;
    while (slot->unit != unit) slot++;
    CounterStep step = counter_step(f, place);
    if (dtype == BF16) pack_to_bf16(f->ops, slot->memory, place->size);
    stream_writes(compute, &slot->shared, "fsdp_reduce");
    event_record(f->filled, compute);
    stream_wait(stream, f->filled);
    stream_reads(stream, &slot->shared, "fsdp_reduce");
    stream_writes(stream, &place->grads, "fsdp_reduce");
    reduce_group(f, place, slot->memory, dtype, &step);
    event_record(slot->reduced, stream);
    slot->unit = -1;
}

// A gradient that is kept waits for the last micro-step.
static void reduce_kept(Fsdp *f, Place *place, bool last) {
    Stream *compute = device_compute(f->device), *stream = comm_stream(f->group);
    CounterStep step = counter_step(f, place), sum = {.sum = place->grad, .carries = 0};
    if (f->options.reduce_dtype == BF16) round_to_bf16(f->ops, step.sum, place->size);
    if (step.carries) accumulate(f->ops, step.sum, step.partials, step.carries, place->size);
    if (!last) return;
    stream_writes(compute, &place->grads, "fsdp_reduce");
    event_record(f->filled, compute);
    if (f->ranks == 1) return;
    stream_wait(stream, f->filled);
    stream_writes(stream, &place->grads, "fsdp_reduce");
    reduce_group(f, place, place->whole, F32, &sum);
}

// All replicas get the sum of their slices: each adds up a piece of it, then the pieces are gathered.
static void reduce_replicas(Fsdp *f, Place *place) {
    Stream *stream = comm_stream(f->replicas);
    const size_t piece = place->slice / (size_t)f->strategy.replicas;
    float *own = place->grad + (size_t)comm_rank(f->replicas) * piece;
    stream_wait(stream, f->ranks == 1 ? f->filled : f->reduced);
    stream_writes(stream, &place->grads, "reduction between replicas");
    comm_phase(f->replicas, place->replicate_phase);
    CommReduce reduce = {.sum = own,
                         .leaf = place->grad,
                         .dtype = F32,
                         .count = piece,
                         .stride = piece,
                         .exchange = f->replica_exchange};
    comm_reduce_scatter(f->replicas, &reduce);
    comm_all_gather(f->replicas, place->grad, own, piece * sizeof(float));
}

void fsdp_reduce(Fsdp *f, int unit) {
    Place *place = &f->places[unit];
    bool last = place->reduced + 1 == f->options.micro_steps;
    if (!place->open) refuse(f, unit, "is reduced without a gradient");
    if (place->whole)
        reduce_kept(f, place, last);
    else
        reduce_slot(f, unit, place);
    if (last && f->replicas) reduce_replicas(f, place);
    if (last && comm_size(f->world) > 1)
        event_record(place->summed, comm_stream(f->replicas ? f->replicas : f->group));
    place->open = false;
    place->reduced++;
}

// ---------------------------------------------------------------------------------------------------------------------
// the optimizer's step

// Agrees on small values that compute has written and will read.
static void agree(Fsdp *f, void *values, size_t count, CommOp op) {
    Stream *compute = device_compute(f->device), *stream = comm_stream(f->group);
    stream_writes(compute, &f->agreement, "fsdp_norm");
    event_record(f->computed, compute);
    stream_wait(stream, f->computed);
    stream_writes(stream, &f->agreement, "all-reduce of the norm");
    comm_phase(f->group, "agreement on the gradient's norm");
    comm_all_reduce(f->group, values, count, op);
    event_record(f->agreed, stream);
    stream_wait(compute, f->agreed);
    stream_reads(compute, &f->agreement, "fsdp_norm");
}

// The largest magnitudes, each as soon as its unit is summed: the root, which is so last, hides behind the others.
static void units_measure(Fsdp *f) {
    Stream *compute = device_compute(f->device);
    fill_zero(f->ops, f->bits, (size_t)f->count, F32);
    for (int u = f->count - 1; u >= 0; u--) {
        Place *place = &f->places[u];
        if (place->reduced != f->options.micro_steps) refuse(f, u, "was not reduced in every micro-step");
        place->reduced = 0;
        place->normed = true;
        stream_wait(compute, place->summed);
        stream_reads(compute, &place->grads, "fsdp_norm");
        absmax(f->ops, &f->bits[u], place->grad, place->slice);
    }
}

void fsdp_norm(Fsdp *f, float clip) {
    Stream *compute = device_compute(f->device);
    uint32_t *most = &f->bits[f->count];
    int64_t span = span_begin(compute, "norm", NULL);
    units_measure(f);
    agree(f, f->bits, (size_t)f->count, COMM_U32_MAX);
    largest(f->ops, most, f->bits, f->count);
    fill_zero(f->ops, f->sums, 2 * sizeof(int64_t) / sizeof(float), F32);
    for (int u = 0; u < f->count; u++) sumsq(f->ops, f->sums, f->places[u].grad, f->places[u].slice, most);
    agree(f, f->sums, 2, COMM_I64_SUM);
    clip_scale(f->ops, f->scale, f->norm, f->sums, most, clip);
    span_end(compute, span);
}

float *fsdp_scale(Fsdp *f) { return f->scale; }

double fsdp_norm_read(Fsdp *f, const char **unit) {
    device_copy_out(f->device, f->host_bits, f->bits, ((size_t)f->count + 1) * sizeof(uint32_t));
    device_copy_out(f->device, f->host_sums, f->sums, 2 * sizeof(int64_t));
    if (device_planning(f->device)) return 0;
    for (int u = f->count - 1; u >= 0; u--)
        if (f->host_bits[u] >= 0x7f800000) *unit = f->units[u].name;
    return sumsq_root(f->host_sums, f->host_bits[f->count]);
}

// The pieces of a unit's tensors that lie in the rank's slice.
static void update_unit(Fsdp *f, int u, AdamW settings) {
    const Place *place = &f->places[u];
    const float decay = settings.decay;
    for (int t = 0; t < f->units[u].count; t++) {
        const FsdpTensor *tensor = &f->units[u].tensors[t];
        Piece piece = piece_of(f, u, tensor, round_up((size_t)tensor->stored, FSDP_ALIGN), f->rank);
        size_t first = piece.in_slice;
        void *low = f->options.dtype == BF16 ? (uint16_t *)place->params + first : NULL;
        settings.decay = tensor->decay ? decay : 0;
        if (piece.count > 0)
            adamw(f->ops, place->master + first, place->m + first, place->v + first, low, place->grad + first,
                  piece.count, f->scale, settings);
    }
}

void fsdp_update(Fsdp *f, int unit, AdamW settings, int64_t step) {
    Place *place = &f->places[unit];
    Stream *compute = device_compute(f->device);
    if (!place->normed) refuse(f, unit, "is updated before its gradient's norm is known");
    place->normed = false;
    settings.correction1 = (float)(1.0 - pow((double)settings.beta1, (double)step));
    settings.correction2 = (float)(1.0 - pow((double)settings.beta2, (double)step));
    params_open(f, unit, "fsdp_update");
    stream_reads(compute, &place->grads, "fsdp_update");
    int64_t span = span_begin(compute, "update", f->units[unit].name);
    update_unit(f, unit, settings);
    span_end(compute, span);
    params_close(f, unit, "fsdp_update");
}
