// fsdp: fully sharded data parallelism. Parameters, gradients and moments are cut over the ranks; a unit is put together
// just before a layer needs it and let go right after.
//
// LAYOUT. A model is a list of units: unit 0, the root, holds what is used at both ends and stays gathered through a
// step; the others are layers. A unit's tensors lie in one flat array, each aligned to 64 elements, the whole padded and
// cut into equal slices of a multiple of 64 elements, one a rank of the sharding group:
//
//     unit   | ln_1.weight | ln_1.bias |   c_attn.weight            | … |  pad |
//     ranks  |---- slice of rank 0 ----|---- slice of rank 1 ----|---- … ------|
//
// A rank owns one slice of the fp32 master, of both moments and of the gradient, and in bf16 also one of the rounded
// parameters. What travels is the slice in the type that layers compute with; that of a unit which stays gathered lies in
// its place in the gathered array, where the optimizer writes it. Layers read their weights and write their gradients in
// place in the flat array.
//
// A UNIT'S LIFE, which the caller's training loop spells out, the same for every strategy:
//
//     fsdp_gather(f, u)    all-gather into a slot begins, on the comm stream; nothing happens if the slot still holds it
//     fsdp_use(f, u)       compute waits for it; the flat array of parameters
//     fsdp_release(f, u)   the slot may be overwritten once the compute issued so far is done
//     fsdp_grad(f, u)      memory for the gradient, free to be written; the flat array of gradients
//     fsdp_reduce(f, u)    the gradient is done: what the strategy lets travel begins to
//     fsdp_norm(f)         after all reductions: the gradient's norm, and how it is clipped
//     fsdp_update(f, u)    the optimizer's step over the slice; what was gathered of u is stale then
//
// STRATEGIES. Ranks form groups of F (shard_ranks) consecutive ones that shard, and W/F replicas of such a group:
//
//     shard       parameters            gradients                          optimizer state   is also called
//     FULL        slots, let go         reduced in each micro-step         cut over F        ZeRO-3, hybrid when F < W
//     GRAD        gathered once a step  reduced in each micro-step         cut over F        ZeRO-2
//     OPTIMIZER   gathered once a step  whole, reduced at the end          cut over F        ZeRO-1
//     NONE        every rank's own      whole, reduced at the end          every rank's own  DDP (F = 1)
//
// With replicas the slices of the gradient are summed between them at the end of the step, on a stream of their own:
// exchanged in pieces, added along the tree, gathered. unsharded keeps gradients whole until the end with any of them.
// With one micro-step nothing is gained by that, so then gradients are reduced at once. Where F is 1 nothing is cut: a
// unit is used where it lies, and gathering is only bookkeeping.
//
// Slots: prefetch+1 for parameters that are let go, two for gradients that are reduced in each micro-step, in fixed
// memory: they are the rate limiter. A slot is tagged (unit, version), so the last layer is not gathered again at the
// turn, nor anything between micro-steps that is still there.
//
// ACCUMULATION. Each micro-step's gradient is one leaf, rounded once to reduce_dtype, and all sums are fp32. Micro-steps
// are added like a binary counter counts, which takes ⌈log2 micro-steps⌉ partial sums. What a rank, a group or a replica
// adds up first must be a subtree of one binary tree over the leaves' numbers: fsdp_leaf says which leaf is whose. So the
// sum has the same bits for every strategy and every number of ranks, as long as W and F are powers of two and, where
// gradients stay whole or there are replicas, the number of micro-steps too.
//
// Misuse (use before gather, release twice, gather with no slot free, …) ends the program with the unit's name.
#ifndef FSDP_FSDP_H
#define FSDP_FSDP_H

#include "comm.h"
#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FSDP_ALIGN = 64, FSDP_ROOT = 0, FSDP_MAX_PREFETCH = 16 };

typedef struct {
    char name[48];
    int ndim;
    int64_t shape[2];  // as files know it
    int64_t stored;    // elements in memory, at least the product of shape; those beyond it are and stay 0
    float init_normal; // initial values: this standard deviation,
    float init_value;  // or, when that is 0, this constant
    bool decay;        // takes part in weight decay
    uint32_t number;   // within the model, whatever unit it is in; keys its initial values
    size_t offset;     // within the unit; set by fsdp_open
} FsdpTensor;

typedef struct {
    char name[32];
    FsdpTensor *tensors;
    int count;
} FsdpUnit;

enum { FSDP_FULL, FSDP_GRAD, FSDP_OPTIMIZER, FSDP_NONE };

typedef struct {
    DType dtype;        // of gathered parameters
    DType reduce_dtype; // of leaves; F32 or BF16
    int micro_steps;    // leaves a rank adds up per step
    int prefetch;       // layers gathered ahead, 1 … FSDP_MAX_PREFETCH
    int shard;          // FSDP_FULL …
    int shard_ranks;    // F, a divisor of the number of ranks; 0: all of them
    bool unsharded;     // keep gradients whole until the step's end
} FsdpOptions;

typedef struct Fsdp Fsdp;

int64_t fsdp_tensor_elements(const FsdpTensor *tensor); // product of its shape

// Takes all memory; keeps units by pointer and sets their tensors' offsets. Parameters are 0 until fsdp_fill. world: all
// ranks. Collective, and waits.
Fsdp *fsdp_open(Device *device, Ops *ops, Comm *world, FsdpUnit *units, int count, FsdpOptions options);
void fsdp_close(Fsdp *f);

// Sets the rank's slice of the master by asking source for each piece it owns: elements first … first+count-1 of tensor.
typedef void (*FsdpSource)(void *context, const FsdpTensor *tensor, int64_t first, int64_t count, float *out);
void fsdp_fill(Fsdp *f, FsdpSource source, void *context);

// Every rank gets elements first … first+count-1 of the unit's tensor number t from the master. Collective, and waits.
void fsdp_fetch(Fsdp *f, int unit, int t, int64_t first, int64_t count, float *out);

// The same of the gradient, between fsdp_norm and the next fsdp_grad.
void fsdp_fetch_grad(Fsdp *f, int unit, int t, int64_t first, int64_t count, float *out);

// The number, among those of a step, of the leaf that this rank contributes in micro-step j.
int fsdp_leaf(const Fsdp *f, int j);

void fsdp_gather(Fsdp *f, int unit);
const void *fsdp_use(Fsdp *f, int unit);
void fsdp_release(Fsdp *f, int unit);
float *fsdp_grad(Fsdp *f, int unit);
void fsdp_reduce(Fsdp *f, int unit);

// After all reductions: finds the Euclidean norm of the whole gradient, the same bits on every rank, and the scale that
// clips it, min(1, clip / (norm + 1e-6)), which stays on the device; not-a-number if any element is not finite, and then
// updates change nothing. Padding is 0 and counts nothing.
void fsdp_norm(Fsdp *f, float clip);
float *fsdp_scale(Fsdp *f); // in the device's memory: whoever knows another reason against updates may spoil it

// Waits for that norm. Not finite if any element is not, and then *unit names the first unit that has one.
double fsdp_norm_read(Fsdp *f, const char **unit);

// AdamW on the unit's slices, with the gradient scaled as fsdp_norm says. settings.decay goes
// to tensors that decay; its corrections are set here from step, counted from 1. In any order of units; one that has been
// updated may be gathered while others are.
void fsdp_update(Fsdp *f, int unit, AdamW settings, int64_t step);

size_t fsdp_elements(const Fsdp *f);       // of all units, padding included
size_t fsdp_slice_elements(const Fsdp *f); // of all units' slices: the rank's share

// Bytes this rank has received so far: of parameters, of gradients within its group, and between replicas.
typedef struct {
    double gathered, reduced, replicated;
} FsdpTraffic;
FsdpTraffic fsdp_traffic(const Fsdp *f);

// Seconds that compute has waited in fsdp_use so far.
double fsdp_gather_waited(const Fsdp *f);

#ifdef __cplusplus
}
#endif
#endif
