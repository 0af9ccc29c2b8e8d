#include "ops_cpu_products.h"
#include "error.h"
#include "ops.h"
#include <assert.h> // assert
#include <dnnl.h>   // oneDNN's C interface, version 2 or 3
#include <omp.h>    // omp_set_num_threads
#include <stdio.h>  // snprintf
#include <stdlib.h> // calloc, realloc, free
#include <string.h> // memcmp

enum { A, B, C, BIAS, SCRATCH, ROLES };

typedef struct {
    Product product;
    dnnl_primitive_t primitive;
    size_t scratch;
    dnnl_memory_t *memory; // (threads, ROLES)
} Prepared;

struct Products {
    int threads, count;
    Prepared *prepared;
    dnnl_engine_t engine;
    dnnl_stream_t *streams; // one a thread
};

static void check(dnnl_status_t status, const char *doing) {
    if (status != dnnl_success)
        die(EXIT_CODE_FAILURE,
            status == dnnl_unimplemented ? "this processor may lack bf16: try --precision fp32" : NULL,
            "oneDNN: %s failed with status %d", doing, (int)status);
}

// ---------------------------------------------------------------------------------------------------------------------
// What differs between versions 2 and 3 of the interface

#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t Shape;
static const_dnnl_memory_desc_t shape_of(const Shape *shape) { return *shape; }
static void shape_free(Shape *shape) { dnnl_memory_desc_destroy(*shape); }
static void shape_make(Shape *shape, dnnl_dims_t dims, dnnl_data_type_t type, dnnl_dims_t strides) {
    check(dnnl_memory_desc_create_with_strides(shape, 2, dims, type, strides), "memory description");
}
static void append_sum(dnnl_post_ops_t post) {
    check(dnnl_post_ops_append_sum(post, 1.0f, 0, dnnl_data_type_undef), "sum");
}
static dnnl_status_t matmul_make(dnnl_primitive_desc_t *made, dnnl_engine_t engine, const Shape shapes[4],
                                 bool bias, dnnl_primitive_attr_t attributes) {
    return dnnl_matmul_primitive_desc_create(made, engine, shapes[A], shapes[B], bias ? shapes[BIAS] : NULL,
                                             shapes[C], attributes);
}
#else
typedef dnnl_memory_desc_t Shape;
static const dnnl_memory_desc_t *shape_of(const Shape *shape) { return shape; }
static void shape_free(Shape *shape) { (void)shape; }
static void shape_make(Shape *shape, dnnl_dims_t dims, dnnl_data_type_t type, dnnl_dims_t strides) {
    check(dnnl_memory_desc_init_by_strides(shape, 2, dims, type, strides), "memory description");
}
static void append_sum(dnnl_post_ops_t post) { check(dnnl_post_ops_append_sum(post, 1.0f), "sum"); }
static dnnl_status_t matmul_make(dnnl_primitive_desc_t *made, dnnl_engine_t engine, const Shape shapes[4],
                                 bool bias, dnnl_primitive_attr_t attributes) {
    dnnl_matmul_desc_t operation;
    check(dnnl_matmul_desc_init(&operation, &shapes[A], &shapes[B], bias ? &shapes[BIAS] : NULL, &shapes[C]),
          "matmul");
    return dnnl_primitive_desc_create(made, &operation, attributes, engine, NULL);
}
#endif

// ---------------------------------------------------------------------------------------------------------------------

Products *products_open(int threads) {
    Products *products = (Products *)calloc(1, sizeof *products);
    dnnl_stream_t *streams = (dnnl_stream_t *)calloc((size_t)threads, sizeof *streams);
    if (!products || !streams) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    products->threads = threads;
    products->streams = streams;
    // oneDNN asks OpenMP how many threads to use: one. Our own regions say their number themselves.
    omp_set_num_threads(1);
    check(dnnl_engine_create(&products->engine, dnnl_cpu, 0), "engine");
    for (int t = 0; t < threads; t++)
        check(dnnl_stream_create(&streams[t], products->engine, dnnl_stream_default_flags), "stream");
    return products;
}

void products_close(Products *products) {
    for (int i = 0; i < products->count; i++) {
        Prepared *prepared = &products->prepared[i];
        for (int m = 0; m < products->threads * ROLES; m++)
            if (prepared->memory[m]) dnnl_memory_destroy(prepared->memory[m]);
        free(prepared->memory);
        dnnl_primitive_destroy(prepared->primitive);
    }
    for (int t = 0; t < products->threads; t++) dnnl_stream_destroy(products->streams[t]);
    dnnl_engine_destroy(products->engine);
    free(products->streams);
    free(products->prepared);
    free(products);
}

// A row-major (rows, columns) matrix, or the transpose of one that is stored (columns, rows).
static void matrix_make(Shape *shape, int rows, int columns, bool transposed, DType dtype) {
    dnnl_dims_t dims = {rows, columns}, strides = {transposed ? 1 : columns, transposed ? rows : 1};
    shape_make(shape, dims, dtype == BF16 ? dnnl_bf16 : dnnl_f32, strides);
}

static dnnl_primitive_attr_t attributes_make(bool accumulate) {
    dnnl_primitive_attr_t attributes;
    check(dnnl_primitive_attr_create(&attributes), "attributes");
    check(dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user), "scratchpad");
    if (!accumulate) return attributes;
    dnnl_post_ops_t post;
    check(dnnl_post_ops_create(&post), "post-operations");
    append_sum(post);
    check(dnnl_primitive_attr_set_post_ops(attributes, post), "post-operations");
    dnnl_post_ops_destroy(post);
    return attributes;
}

static dnnl_memory_t memory_make(const Products *products, const Shape *shape) {
    dnnl_memory_t memory;
    check(dnnl_memory_create(&memory, shape_of(shape), products->engine, DNNL_MEMORY_NONE), "memory");
    return memory;
}

static Prepared prepare(const Products *products, Product product) {
    Shape shapes[4];
    dnnl_primitive_desc_t made;
    Prepared prepared = {.product = product};
    matrix_make(&shapes[A], product.M, product.K, product.a_transposed, product.in);
    matrix_make(&shapes[B], product.K, product.N, product.b_transposed, product.in);
    matrix_make(&shapes[C], product.M, product.N, false, product.out);
    matrix_make(&shapes[BIAS], 1, product.N, false, product.in);
    dnnl_primitive_attr_t attributes = attributes_make(product.accumulate);
    check(matmul_make(&made, products->engine, shapes, product.bias, attributes), "matrix product");
    check(dnnl_primitive_create(&prepared.primitive, made), "primitive");
    dnnl_primitive_attr_destroy(attributes);
    prepared.memory = (dnnl_memory_t *)calloc((size_t)products->threads * ROLES, sizeof(dnnl_memory_t));
    if (!prepared.memory) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    for (int t = 0; t < products->threads; t++) {
        dnnl_memory_t *memory = prepared.memory + t * ROLES;
        for (int role = A; role <= C; role++) memory[role] = memory_make(products, &shapes[role]);
        if (product.bias) memory[BIAS] = memory_make(products, &shapes[BIAS]);
        check(dnnl_memory_create(&memory[SCRATCH], dnnl_primitive_desc_query_md(made, dnnl_query_scratchpad_md, 0),
                                 products->engine, DNNL_MEMORY_NONE),
              "scratchpad");
    }
    prepared.scratch = dnnl_memory_desc_get_size(dnnl_primitive_desc_query_md(made, dnnl_query_scratchpad_md, 0));
    prepared.scratch = (prepared.scratch + DEVICE_ALIGN - 1) / DEVICE_ALIGN * DEVICE_ALIGN;
    dnnl_primitive_desc_destroy(made);
    for (int s = 0; s < 4; s++) shape_free(&shapes[s]);
    return prepared;
}

static bool same(const Product *p, const Product *q) {
    return p->M == q->M && p->N == q->N && p->K == q->K && p->a_transposed == q->a_transposed &&
           p->b_transposed == q->b_transposed && p->bias == q->bias && p->accumulate == q->accumulate &&
           p->in == q->in && p->out == q->out;
}

int products_find(Products *products, Product product) {
    for (int i = 0; i < products->count; i++)
        if (same(&products->prepared[i].product, &product)) return i;
    Prepared *grown = (Prepared *)realloc(products->prepared, (size_t)(products->count + 1) * sizeof *grown);
    if (!grown) die(EXIT_CODE_FAILURE, NULL, "out of memory");
    products->prepared = grown;
    products->prepared[products->count] = prepare(products, product);
    return products->count++;
}

size_t product_scratch(const Products *products, int number) { return products->prepared[number].scratch; }

void product_run(Products *products, int number, int thread, void *c, const void *a, const void *b,
                 const void *bias, void *scratch) {
    const Prepared *prepared = &products->prepared[number];
    dnnl_memory_t *memory = prepared->memory + thread * ROLES;
    assert(thread < products->threads);
    dnnl_exec_arg_t arguments[ROLES] = {{DNNL_ARG_SRC, memory[A]},
                                        {DNNL_ARG_WEIGHTS, memory[B]},
                                        {DNNL_ARG_DST, memory[C]},
                                        {DNNL_ARG_SCRATCHPAD, memory[SCRATCH]},
                                        {DNNL_ARG_BIAS, memory[BIAS]}};
    dnnl_memory_set_data_handle(memory[A], (void *)a);
    dnnl_memory_set_data_handle(memory[B], (void *)b);
    dnnl_memory_set_data_handle(memory[C], c);
    dnnl_memory_set_data_handle(memory[SCRATCH], scratch);
    if (prepared->product.bias) dnnl_memory_set_data_handle(memory[BIAS], (void *)bias);
    check(dnnl_primitive_execute(prepared->primitive, products->streams[thread], prepared->product.bias ? 5 : 4,
                                 arguments),
          "matrix product");
}

// ---------------------------------------------------------------------------------------------------------------------

bool ops_native_bf16(void) {
    int isa = (int)dnnl_get_effective_cpu_isa(), bf16 = (int)dnnl_cpu_isa_avx512_core_bf16;
    return (isa & bf16) == bf16;
}

const char *ops_description(void) {
    static char text[96];
    static const struct {
        int isa;
        const char *name;
    } names[] = {{dnnl_cpu_isa_avx512_core_amx, "AMX"},
                 {dnnl_cpu_isa_avx512_core_bf16, "AVX-512 with bf16"},
                 {dnnl_cpu_isa_avx512_core, "AVX-512"},
                 {dnnl_cpu_isa_avx2, "AVX2"},
                 {0, "a processor before AVX2"}};
    const dnnl_version_t *version = dnnl_version();
    int isa = (int)dnnl_get_effective_cpu_isa(), i = 0;
    while ((isa & names[i].isa) != names[i].isa) i++;
    snprintf(text, sizeof text, "oneDNN %d.%d.%d on %s", version->major, version->minor, version->patch,
             names[i].name);
    return text;
}
