#include "fsdp.h"
#include "error.h"
#include <assert.h> // assert
#include <math.h>   // pow
#include <stdio.h>  // snprintf
#include <stdlib.h> // calloc, free
#include <string.h> // memcpy

enum { GRAD_SLOTS = 2, MAX_PARTIALS = 31 };

// Where a gathered unit lies.
typedef struct {
    void *memory;
    int unit; // -1: none
    uint64_t version;
    enum { SLOT_FREE, SLOT_GATHERED, SLOT_USED } state;
    uint64_t touched; // for taking the one that has been free for longest
    Event *gathered, *released;
    Shared shared;
} Slot;

// Where a unit's gradient lies from the first write until it is reduced.
typedef struct {
    float *memory;
    int unit; // -1: none
    int last; // the unit it held last, -1: none
    Event *filled, *reduced;
    Shared shared;
} GradSlot;

// What fsdp adds to a unit.
typedef struct {
    size_t size, slice; // elements; size = ranks · slice
    size_t first;       // of the rank's slice within the arrays over all units
    int reduced;        // micro-steps reduced so far in this step
    char gather_phase[48], reduce_phase[48], fetch_phase[48];
} Place;

struct Fsdp {
    Device *device;
    Ops *ops;
    Comm *comm;
    FsdpUnit *units;
    Place *places;
    int count, rank, ranks;
    FsdpOptions options;
    size_t elements, slice_elements; // of all units

    float *master, *m, *v, *grad; // (slice_elements) each
    void *low;                    // (slice_elements) bf16, or NULL
    float *partials[MAX_PARTIALS];
    int partial_count;
    float *exchange; // ranks · exchange_count
    size_t exchange_count;

    Slot *slots; // slot 0 is the root's; with one rank slot u is unit u's
    int slot_count;
    GradSlot grad_slots[1 + GRAD_SLOTS]; // number 0 is the root's
    int next_grad_slot;
    uint64_t version, clock;
    Event *updated; // the parameters' slices were written
    Shared params, grads, agreement;
    bool normed; // fsdp_norm has prepared the update

    uint32_t *bits; // (count) largest magnitude of each unit's gradient, then [count] of all
    int64_t *sums;  // (2)
    float *scale, *norm;
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

// ---------------------------------------------------------------------------------------------------------------------
// layout and memory

static void units_lay_out(Fsdp *f) {
    for (int u = 0; u < f->count; u++) {
        Place *place = &f->places[u];
        size_t offset = 0;
        for (int t = 0; t < f->units[u].count; t++) {
            f->units[u].tensors[t].offset = offset;
            offset += round_up((size_t)f->units[u].tensors[t].stored, FSDP_ALIGN);
        }
        place->slice = round_up((offset + (size_t)f->ranks - 1) / (size_t)f->ranks, FSDP_ALIGN);
        place->size = place->slice * (size_t)f->ranks;
        place->first = f->slice_elements;
        f->slice_elements += place->slice;
        f->elements += place->size;
        snprintf(place->gather_phase, sizeof place->gather_phase, "gather of %s", f->units[u].name);
        snprintf(place->fetch_phase, sizeof place->fetch_phase, "fetch from %s", f->units[u].name);
        snprintf(place->reduce_phase, sizeof place->reduce_phase, "reduction of %s", f->units[u].name);
    }
}

// The largest layer's elements: of the whole, or of a slice.
static size_t largest_layer(const Fsdp *f, bool slice) {
    size_t most = 0;
    for (int u = 1; u < f->count; u++) {
        size_t n = slice ? f->places[u].slice : f->places[u].size;
        if (n > most) most = n;
    }
    return most;
}

static void slices_take(Fsdp *f) {
    size_t n = f->slice_elements;
    f->master = (float *)device_alloc(f->device, "master", n * sizeof(float));
    f->m = (float *)device_alloc(f->device, "moments", n * sizeof(float));
    f->v = (float *)device_alloc(f->device, "moments", n * sizeof(float));
    f->grad = (float *)device_alloc(f->device, "gradient", n * sizeof(float));
    if (f->options.dtype == BF16) f->low = device_alloc(f->device, "bf16 slices", n * dtype_size(BF16));
    while (1 << f->partial_count < f->options.micro_steps) {
        assert(f->partial_count < MAX_PARTIALS);
        f->partials[f->partial_count++] = (float *)device_alloc(f->device, "partial sums", n * sizeof(float));
    }
    f->exchange_count = f->count > 1 ? largest_layer(f, true) : f->places[FSDP_ROOT].slice;
    if (f->ranks > 1)
        f->exchange =
            (float *)device_alloc(f->device, "exchange", f->exchange_count * (size_t)f->ranks * sizeof(float));
}

static void *slice_params(const Fsdp *f, int unit) {
    size_t first = f->places[unit].first;
    return f->low ? (void *)((uint16_t *)f->low + first) : (void *)(f->master + first);
}

static void slots_take(Fsdp *f) {
    bool in_place = f->ranks == 1;
    size_t size = dtype_size(f->options.dtype);
    f->slot_count = in_place ? f->count : 1 + f->options.prefetch + 1;
    f->slots = (Slot *)calloc((size_t)f->slot_count, sizeof(Slot));
    if (!f->slots) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    for (int s = 0; s < f->slot_count; s++) {
        Slot *slot = &f->slots[s];
        slot->unit = -1;
        slot->gathered = event_create(f->device, "gathered");
        slot->released = event_create(f->device, "released");
        slot->shared.name = s == FSDP_ROOT ? "root" : "slot";
        if (in_place)
            slot->memory = slice_params(f, s);
        else if (s == FSDP_ROOT)
            slot->memory = device_alloc(f->device, "root", f->places[FSDP_ROOT].size * size);
        else
            slot->memory = device_alloc(f->device, "slots", largest_layer(f, false) * size);
    }
    for (int s = 0; s < 1 + GRAD_SLOTS; s++) {
        GradSlot *slot = &f->grad_slots[s];
        size_t n = s == FSDP_ROOT ? f->places[FSDP_ROOT].size : largest_layer(f, false);
        slot->unit = slot->last = -1;
        slot->filled = event_create(f->device, "filled");
        slot->reduced = event_create(f->device, "reduced");
        slot->shared.name = s == FSDP_ROOT ? "root gradient" : "gradient slot";
        slot->memory = (float *)device_alloc(f->device, s == FSDP_ROOT ? "root gradient" : "gradient slots",
                                             n * sizeof(float));
    }
}

Fsdp *fsdp_open(Device *device, Ops *ops, Comm *comm, FsdpUnit *units, int count, FsdpOptions options) {
    Fsdp *f = (Fsdp *)calloc(1, sizeof *f);
    Place *places = (Place *)calloc((size_t)count, sizeof *places);
    if (!f || !places) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    assert(options.prefetch >= 1 && options.prefetch <= FSDP_MAX_PREFETCH && options.micro_steps >= 1);
    f->device = device;
    f->ops = ops;
    f->comm = comm;
    f->units = units;
    f->places = places;
    f->count = count;
    f->options = options;
    f->rank = comm_rank(comm);
    f->ranks = comm_size(comm);
    f->version = 1;
    f->next_grad_slot = 1;
    f->params.name = "parameter slices";
    f->grads.name = "gradient slices";
    f->agreement.name = "parts of the norm";
    units_lay_out(f);
    slices_take(f);
    slots_take(f);
    f->updated = event_create(device, "updated");
    f->computed = event_create(device, "computed");
    f->agreed = event_create(device, "agreed");
    f->bits = (uint32_t *)device_alloc(device, "workspace, small", ((size_t)count + 1) * sizeof(uint32_t));
    f->sums = (int64_t *)device_alloc(device, "workspace, small", 2 * sizeof(int64_t));
    f->scale = (float *)device_alloc(device, "workspace, small", sizeof(float));
    f->norm = (float *)device_alloc(device, "workspace, small", sizeof(float));
    return f;
}

void fsdp_close(Fsdp *f) {
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

// From now on what is gathered is stale, and gathers come after the compute issued so far.
static void params_changed(Fsdp *f) {
    f->version++;
    event_record(f->updated, device_compute(f->device));
}

void fsdp_fill(Fsdp *f, FsdpSource source, void *context) {
    if (device_planning(f->device)) return;
    stream_writes(device_compute(f->device), &f->params, "fsdp_fill");
    for (int u = 0; u < f->count; u++)
        for (int t = 0; t < f->units[u].count; t++) {
            const FsdpTensor *tensor = &f->units[u].tensors[t];
            Piece piece = piece_of(f, u, tensor, (size_t)fsdp_tensor_elements(tensor), f->rank);
            if (piece.count == 0) continue;
            source(context, tensor, (int64_t)piece.in_tensor, (int64_t)piece.count,
                   f->master + f->places[u].first + piece.in_slice);
        }
    if (f->low) cast_from_f32(f->ops, f->low, f->master, f->slice_elements, BF16);
    params_changed(f);
}

// Every rank gets a range of a tensor from the slices that hold it: each owner broadcasts its piece.
static void fetch(Fsdp *f, const float *slices, int unit, int t, int64_t first, int64_t count, float *out) {
    Stream *stream = comm_stream(f->comm);
    comm_phase(f->comm, f->places[unit].fetch_phase);
    for (int rank = 0; rank < f->ranks; rank++) {
        Piece piece = piece_of(f, unit, &f->units[unit].tensors[t], (size_t)(first + count), rank);
        size_t skipped = piece.in_tensor < (size_t)first ? (size_t)first - piece.in_tensor : 0;
        if (piece.count <= skipped) continue;
        float *place = out + (piece.in_tensor + skipped - (size_t)first);
        size_t n = piece.count - skipped;
        if (rank == f->rank && !device_planning(f->device))
            memcpy(place, slices + f->places[unit].first + piece.in_slice + skipped, n * sizeof(float));
        comm_broadcast(f->comm, place, n * sizeof(float), rank);
    }
    event_record(f->agreed, stream);
    event_synchronize(f->agreed);
}

void fsdp_fetch(Fsdp *f, int unit, int t, int64_t first, int64_t count, float *out) {
    stream_wait(comm_stream(f->comm), f->updated);
    stream_reads(comm_stream(f->comm), &f->params, "fsdp_fetch");
    fetch(f, f->master, unit, t, first, count, out);
}

void fsdp_fetch_grad(Fsdp *f, int unit, int t, int64_t first, int64_t count, float *out) {
    stream_reads(comm_stream(f->comm), &f->grads, "fsdp_fetch_grad");
    fetch(f, f->grad, unit, t, first, count, out);
}

// ---------------------------------------------------------------------------------------------------------------------
// gather, use, release

static Slot *slot_holding(Fsdp *f, int unit) {
    for (int s = 0; s < f->slot_count; s++)
        if (f->slots[s].unit == unit && f->slots[s].version == f->version) return &f->slots[s];
    return NULL;
}

// The slot for a unit that is in none.
static Slot *slot_for(Fsdp *f, int unit) {
    if (f->ranks == 1 || unit == FSDP_ROOT) return &f->slots[unit];
    Slot *best = NULL;
    for (int s = 1; s < f->slot_count; s++) {
        Slot *slot = &f->slots[s];
        if (slot->state == SLOT_FREE && (!best || slot->touched < best->touched)) best = slot;
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
    if (slot->state == SLOT_USED) refuse(f, unit, "is gathered into a slot that is in use");
    slot->unit = unit;
    slot->version = f->version;
    slot->state = SLOT_GATHERED;
    if (f->ranks == 1) return;
    const Place *place = &f->places[unit];
    Stream *stream = comm_stream(f->comm);
    stream_wait(stream, slot->released);
    stream_wait(stream, f->updated);
    stream_reads(stream, &f->params, "fsdp_gather");
    stream_writes(stream, &slot->shared, "fsdp_gather");
    comm_phase(f->comm, place->gather_phase);
    comm_all_gather(f->comm, slot->memory, slice_params(f, unit), place->slice * dtype_size(f->options.dtype));
    event_record(slot->gathered, stream);
}

const void *fsdp_use(Fsdp *f, int unit) {
    Slot *slot = slot_holding(f, unit);
    if (!slot || slot->state == SLOT_FREE) refuse(f, unit, "is used before it is gathered");
    if (slot->state == SLOT_USED) refuse(f, unit, "is used again before it is released");
    Stream *compute = device_compute(f->device);
    slot->state = SLOT_USED;
    stream_wait(compute, slot->gathered);
    stream_reads(compute, &slot->shared, "fsdp_use");
    return slot->memory;
}

void fsdp_release(Fsdp *f, int unit) {
    Slot *slot = slot_holding(f, unit);
    if (!slot || slot->state != SLOT_USED) refuse(f, unit, "is released without being in use");
    slot->state = SLOT_FREE;
    slot->touched = ++f->clock;
    event_record(slot->released, device_compute(f->device));
}

// ---------------------------------------------------------------------------------------------------------------------
// gradients

static bool same_layout(const FsdpUnit *a, const FsdpUnit *b) {
    if (a->count != b->count) return false;
    for (int t = 0; t < a->count; t++)
        if (a->tensors[t].stored != b->tensors[t].stored) return false;
    return true;
}

// Layers write their tensors and nothing between and after them. That must be 0, and is, unless the slot held a unit of
// another layout before.
float *fsdp_grad(Fsdp *f, int unit) {
    for (int s = 0; s < 1 + GRAD_SLOTS; s++)
        if (f->grad_slots[s].unit == unit) refuse(f, unit, "asks for a gradient slot while it holds one");
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
    if (slot->last >= 0 && !same_layout(&f->units[slot->last], &f->units[unit]))
        fill_zero(f->ops, slot->memory, f->places[unit].size, F32);
    slot->last = unit;
    return slot->memory;
}

// How micro-step j of J is added: all partial sums it joins, and where the result goes. Like adding one to a binary
// counter; the last micro-step joins everything into the gradient.
static void counter_step(Fsdp *f, size_t first, int j, CommReduce *reduce) {
    bool last = j + 1 == f->options.micro_steps;
    int bit = 0;
    for (; j >> bit && (last || j >> bit & 1); bit++)
        if (j >> bit & 1) reduce->partials[reduce->carries++] = f->partials[bit] + first;
    reduce->sum = (last ? f->grad : f->partials[bit]) + first;
}

// In pieces of at most a layer's slice, so that the root needs no larger exchange than a layer.
void fsdp_reduce(Fsdp *f, int unit) {
    Place *place = &f->places[unit];
    GradSlot *slot = NULL;
    for (int s = 0; s < 1 + GRAD_SLOTS; s++)
        if (f->grad_slots[s].unit == unit) slot = &f->grad_slots[s];
    if (!slot) refuse(f, unit, "is reduced without a gradient");
    if (place->reduced == f->options.micro_steps)
        refuse(f, unit, "is reduced more often than there are micro-steps");
    Stream *compute = device_compute(f->device), *stream = comm_stream(f->comm);
    event_record(slot->filled, compute);
    stream_wait(stream, slot->filled);
    stream_reads(stream, &slot->shared, "fsdp_reduce");
    stream_writes(stream, &f->grads, "fsdp_reduce");
    comm_phase(f->comm, place->reduce_phase);
    const size_t most = f->exchange_count;
    for (size_t first = 0; first < place->slice; first += most) {
        size_t left = place->slice - first;
        CommReduce reduce = {.leaf = slot->memory + first,
                             .count = left < most ? left : most,
                             .stride = place->slice,
                             .exchange = f->exchange};
        counter_step(f, place->first + first, place->reduced, &reduce);
        comm_reduce_scatter(f->comm, &reduce);
    }
    event_record(slot->reduced, stream);
    place->reduced++;
    slot->unit = -1;
}

// ---------------------------------------------------------------------------------------------------------------------
// the optimizer's step

// Agrees on small values that compute has written and will read.
static void agree(Fsdp *f, void *values, size_t count, CommOp op) {
    Stream *compute = device_compute(f->device), *stream = comm_stream(f->comm);
    stream_writes(compute, &f->agreement, "fsdp_norm");
    event_record(f->computed, compute);
    stream_wait(stream, f->computed);
    stream_writes(stream, &f->agreement, "all-reduce of the norm");
    comm_phase(f->comm, "agreement on the gradient's norm");
    comm_all_reduce(f->comm, values, count, op);
    event_record(f->agreed, stream);
    stream_wait(compute, f->agreed);
    stream_reads(compute, &f->agreement, "fsdp_norm");
}

double fsdp_norm(Fsdp *f, float clip, const char **unit) {
    Stream *compute = device_compute(f->device);
    for (int u = 0; u < f->count; u++) {
        if (f->places[u].reduced != f->options.micro_steps) refuse(f, u, "was not reduced in every micro-step");
        f->places[u].reduced = 0;
    }
    for (int s = 0; s < 1 + GRAD_SLOTS; s++) stream_wait(compute, f->grad_slots[s].reduced);
    stream_reads(compute, &f->grads, "fsdp_norm");
    f->normed = true;
    if (device_planning(f->device)) return 0;
    for (int u = 0; u <= f->count; u++) f->bits[u] = 0;
    for (int u = 0; u < f->count; u++)
        absmax(f->ops, &f->bits[u], f->grad + f->places[u].first, f->places[u].slice);
    agree(f, f->bits, (size_t)f->count, COMM_U32_MAX);
    event_synchronize(f->agreed);
    uint32_t *most = &f->bits[f->count];
    for (int u = f->count - 1; u >= 0; u--) {
        if (f->bits[u] > *most) *most = f->bits[u];
        if (f->bits[u] >= 0x7f800000) *unit = f->units[u].name;
    }
    f->sums[0] = f->sums[1] = 0;
    sumsq(f->ops, f->sums, f->grad, f->slice_elements, most);
    agree(f, f->sums, 2, COMM_I64_SUM);
    clip_scale(f->ops, f->scale, f->norm, f->sums, most, clip);
    event_synchronize(f->agreed);
    return sumsq_root(f->sums, *most);
}

void fsdp_update(Fsdp *f, AdamW settings, int64_t step) {
    Stream *compute = device_compute(f->device);
    float decay = settings.decay;
    if (!f->normed) refuse(f, FSDP_ROOT, "is updated before its gradient's norm is known");
    f->normed = false;
    settings.correction1 = (float)(1.0 - pow((double)settings.beta1, (double)step));
    settings.correction2 = (float)(1.0 - pow((double)settings.beta2, (double)step));
    for (int s = 0; s < f->slot_count; s++) {
        if (f->slots[s].state == SLOT_USED) refuse(f, f->slots[s].unit, "is in use during the update");
        stream_wait(compute, f->slots[s].gathered);
        f->slots[s].state = SLOT_FREE;
    }
    stream_reads(compute, &f->grads, "fsdp_update");
    stream_writes(compute, &f->params, "fsdp_update");
    for (int u = 0; u < f->count; u++)
        for (int t = 0; t < f->units[u].count; t++) {
            const FsdpTensor *tensor = &f->units[u].tensors[t];
            Piece piece = piece_of(f, u, tensor, round_up((size_t)tensor->stored, FSDP_ALIGN), f->rank);
            size_t first = f->places[u].first + piece.in_slice;
            void *low = f->low ? (uint16_t *)f->low + first : NULL;
            settings.decay = tensor->decay ? decay : 0;
            if (piece.count > 0)
                adamw(f->ops, f->master + first, f->m + first, f->v + first, low, f->grad + first, piece.count,
                      f->scale, settings);
        }
    params_changed(f);
}
