// fsdp: fully sharded data parallelism. Parameters, gradients and moments are cut over the ranks; a unit is put together
// just before a layer needs it and let go right after.
//
// LAYOUT. A model is a list of units: unit 0, the root, holds what is used at both ends and stays gathered through a
// step; the others are layers. A unit's tensors lie in one flat array, each aligned to 64 elements, the whole padded and
// cut into equal slices of a multiple of 64 elements, one a rank:
//
//     unit   | ln_1.weight | ln_1.bias |   c_attn.weight            | … |  pad |
//     ranks  |---- slice of rank 0 ----|---- slice of rank 1 ----|---- … ------|
//
// A rank owns one slice of the fp32 master, of both moments and of the gradient, and in bf16 also one of the rounded
// parameters, which is what travels. Layers read their weights and write their gradients in place in the flat array.
//
// A UNIT'S LIFE, which the caller's training loop spells out:
//
//     fsdp_gather(f, u)    all-gather into a slot begins, on the comm stream; nothing happens if the slot still holds it
//     fsdp_use(f, u)       compute waits for it; the flat array of parameters
//     fsdp_release(f, u)   the slot may be overwritten once the compute issued so far is done
//     fsdp_grad(f, u)      a gradient slot, free to be written; the flat array of gradients
//     fsdp_reduce(f, u)    reduce-scatter of it begins, into the rank's slice; the slot is given back
//     fsdp_norm, fsdp_update   the optimizer's step over the slices; whatever was gathered is stale then
//
// There are prefetch+1 slots and two gradient slots for the layers, in fixed memory: they are the rate limiter. A slot is
// tagged (unit, version), so the last layer is not gathered again at the turn, nor anything between micro-steps that is
// still there. With a single rank nothing is cut: a unit is used where it lies, and gathering is only bookkeeping.
//
// ACCUMULATION. Each micro-step's gradient is one leaf, summed over ranks by comm's tree; micro-steps are then added like
// a binary counter counts, which takes ⌈log2 micro-steps⌉ partial sums. So leaf number (micro-step · ranks + rank) has
// the same place in one binary tree for every number of ranks that is a power of two.
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

typedef struct {
    DType dtype;     // of gathered parameters
    int micro_steps; // leaves a rank adds up per step
    int prefetch;    // layers gathered ahead, 1 … FSDP_MAX_PREFETCH
} FsdpOptions;

typedef struct Fsdp Fsdp;

int64_t fsdp_tensor_elements(const FsdpTensor *tensor); // product of its shape

// Takes all memory; keeps units by pointer and sets their tensors' offsets. Parameters are 0 until fsdp_fill.
Fsdp *fsdp_open(Device *device, Ops *ops, Comm *comm, FsdpUnit *units, int count, FsdpOptions options);
void fsdp_close(Fsdp *f);

// Sets the rank's slice of the master by asking source for each piece it owns: elements first … first+count-1 of tensor.
typedef void (*FsdpSource)(void *context, const FsdpTensor *tensor, int64_t first, int64_t count, float *out);
void fsdp_fill(Fsdp *f, FsdpSource source, void *context);

// Every rank gets elements first … first+count-1 of the unit's tensor number t from the master. Collective, and waits.
void fsdp_fetch(Fsdp *f, int unit, int t, int64_t first, int64_t count, float *out);

// The same of the gradient, between fsdp_norm and the next reduction.
void fsdp_fetch_grad(Fsdp *f, int unit, int t, int64_t first, int64_t count, float *out);

void fsdp_gather(Fsdp *f, int unit);
const void *fsdp_use(Fsdp *f, int unit);
void fsdp_release(Fsdp *f, int unit);
float *fsdp_grad(Fsdp *f, int unit);
void fsdp_reduce(Fsdp *f, int unit);

// Waits for all reductions. Returns the Euclidean norm of the whole gradient, the same bits on every rank; not finite if
// any element is not, and then *unit names the first unit that has one. Padding is 0 and counts nothing.
double fsdp_norm(Fsdp *f, float clip, const char **unit);

// AdamW on the slices, with the gradient scaled by min(1, clip / (norm + 1e-6)) from fsdp_norm. settings.decay goes to
// tensors that decay; its corrections are set here from step, counted from 1.
void fsdp_update(Fsdp *f, AdamW settings, int64_t step);

size_t fsdp_elements(const Fsdp *f);       // of all units, padding included
size_t fsdp_slice_elements(const Fsdp *f); // of all units' slices: the rank's share

#ifdef __cplusplus
}
#endif
#endif
