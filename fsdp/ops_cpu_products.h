// Matrix products for ops on a CPU: oneDNN, one thread at a time. Only ops_cpu*.c include this.
//
// A Product is a description; products_find makes (once) a oneDNN primitive for it that computes in the calling thread
// alone. Parallelism is ours: ops cut their outputs into tiles of fixed size and give each to one thread. So no bit of a
// result can depend on the number of threads, which oneDNN's own division of work does not promise: with 8 threads and
// more it splits long sums in other places than with 2.
//
// All matrices are dense and row-major: a (M, K), or stored (K, M) when a_transposed; b (K, N), or stored (N, K) when
// b_transposed; c (M, N). Strided matrices would take oneDNN to slower code that allocates memory in every call.
#ifndef FSDP_OPS_CPU_PRODUCTS_H
#define FSDP_OPS_CPU_PRODUCTS_H

#include "device.h"

typedef struct {
    int M, N, K;
    bool a_transposed, b_transposed;
    bool bias;       // c += bias (N), of type in
    bool accumulate; // c += what was there
    DType in, out;   // of a, b and bias; of c
} Product;

typedef struct Products Products;

Products *products_open(int threads);
void products_close(Products *products);

// Makes the product ready and returns its number, for product_run.
int products_find(Products *products, Product product);

// Bytes of scratch that product_run needs.
size_t product_scratch(const Products *products, int number);

// c = a · b (+ bias) (+ c) in the calling thread, which is number `thread` of the region.
void product_run(Products *products, int number, int thread, void *c, const void *a, const void *b,
                 const void *bias, void *scratch);

#endif
