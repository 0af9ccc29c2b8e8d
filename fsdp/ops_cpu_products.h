// Matrix products for ops on a CPU. Only ops_cpu*.c and attention_cpu.c include this.
//
//     c (M, N) = a (M, K) · b (K, N)
//
// The rows of a and the columns of b are its `lines`: a line is K numbers deep, and c holds the products of every line
// of a with every line of b. Lines are packed first: so many side by side as fit the registers, in the order in which
// they are read, padded with zeros. Then every product is the same loop over packed memory, however a and b lie.
//
//     a, packed          b, packed: ┌──┬──┬──┐          three kernels do the innermost work:
//     ┌────────┐                    │  │  │  │              bf16 on AMX       32 × 32 lines a time
//     ├────────┤ strips             │  │  │  │ panels       fp32              as many as the registers hold
//     ├────────┤                    └──┴──┴──┘              bf16 elsewhere    widened while packing, then as fp32
//     └────────┘
//
// Every element of c is one sum over k = 0 … K-1 in this order, in fp32, in runs of a fixed depth (RUN, see the source).
// Where an element lies, how c is cut and how many threads there are changes no bit of it.
#ifndef FSDP_OPS_CPU_PRODUCTS_H
#define FSDP_OPS_CPU_PRODUCTS_H

#include "device.h"

// One factor: element k of line i is x[i · line + k · depth]. One of the two strides is 1.
typedef struct {
    const void *x;
    size_t line, depth;
    DType dtype;
} Factor;

// Where a product goes: element (i, j) is x[i · stride + j].
typedef struct {
    void *x;
    size_t stride;
    DType dtype;
    const void *bias; // NULL, or added to every row, of type dtype
    bool accumulate;  // added to what is there; fp32 only
} Target;

// Asks the processor and the system what there is. Before any thread multiplies.
void products_open(void);

// c = a · b with all threads. Scratch: product_scratch bytes.
void product(Target c, Factor a, Factor b, int M, int N, int K, int threads, void *scratch);
size_t product_scratch(int M, int N, int K, DType dtype, int threads);

// The same in one thread, in two steps: what is packed can be used again, and from the first lines and depths of it only.
enum Side { LEFT, RIGHT };
typedef struct {
    const void *x;
    int lines, depth;
    enum Side side;
    bool amx;
} Packed;

size_t packed_bytes(enum Side side, int lines, int depth, DType dtype);
Packed pack(void *memory, enum Side side, Factor from, int lines, int depth); // memory: packed_bytes, aligned
void packed_product(Target c, Packed a, Packed b, int M, int N, int K);

#endif
