// The measure of speed: oneDNN's matrix product of two squares, which it divides between the threads itself. For bench and
// bench_ops, the only programs here that use oneDNN.
#ifndef DEV_CUBE_H
#define DEV_CUBE_H

#include "device.h"
#include "error.h"
#include <dnnl.h> // version 2 or 3
#include <omp.h>  // omp_set_num_threads
#include <time.h> // clock_gettime

// A product of two (size, size), made ready to run; cube_close frees it. device holds the memory.
typedef struct {
    int size, threads;
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    dnnl_primitive_t primitive;
    dnnl_memory_t memory[3];
} Cube;

static void cube_check(dnnl_status_t status) {
    if (status != dnnl_success) die(EXIT_CODE_FAILURE, NULL, "oneDNN failed with status %d", (int)status);
}

static dnnl_primitive_desc_t cube_describe(dnnl_memory_desc_t *shape, int size, dnnl_data_type_t type,
                                           dnnl_engine_t engine) {
    dnnl_primitive_desc_t made;
    dnnl_dims_t dims = {size, size}, strides = {size, 1};
#if DNNL_VERSION_MAJOR >= 3
    cube_check(dnnl_memory_desc_create_with_strides(shape, 2, dims, type, strides));
    cube_check(dnnl_matmul_primitive_desc_create(&made, engine, *shape, *shape, NULL, *shape, NULL));
#else
    dnnl_matmul_desc_t matmul;
    cube_check(dnnl_memory_desc_init_by_strides(shape, 2, dims, type, strides));
    cube_check(dnnl_matmul_desc_init(&matmul, shape, shape, NULL, shape));
    cube_check(dnnl_primitive_desc_create(&made, &matmul, NULL, engine, NULL));
#endif
    return made;
}

// The factors are zeros, of which a product takes no less time.
static Cube cube_open(Device *device, int size, DType dtype, int threads) {
    Cube cube = {.size = size, .threads = threads};
    dnnl_memory_desc_t shape;
    omp_set_num_threads(threads); // oneDNN divides the work when it prepares it
    cube_check(dnnl_engine_create(&cube.engine, dnnl_cpu, 0));
    cube_check(dnnl_stream_create(&cube.stream, cube.engine, dnnl_stream_default_flags));
    dnnl_primitive_desc_t made = cube_describe(&shape, size, dtype == BF16 ? dnnl_bf16 : dnnl_f32, cube.engine);
    cube_check(dnnl_primitive_create(&cube.primitive, made));
    dnnl_primitive_desc_destroy(made);
    for (int i = 0; i < 3; i++) {
        void *x = device_alloc(device, "cube", (size_t)size * (size_t)size * dtype_size(dtype));
#if DNNL_VERSION_MAJOR >= 3
        cube_check(dnnl_memory_create(&cube.memory[i], shape, cube.engine, x));
#else
        cube_check(dnnl_memory_create(&cube.memory[i], &shape, cube.engine, x));
#endif
    }
    omp_set_num_threads(1);
    return cube;
}

static void cube_close(Cube *cube) {
    for (int i = 0; i < 3; i++) dnnl_memory_destroy(cube->memory[i]);
    dnnl_primitive_destroy(cube->primitive);
    dnnl_stream_destroy(cube->stream);
    dnnl_engine_destroy(cube->engine);
}

// FLOP/s of one product.
static double cube_run(const Cube *cube) {
    struct timespec begin, end;
    const dnnl_exec_arg_t arguments[] = {
        {DNNL_ARG_SRC, cube->memory[0]}, {DNNL_ARG_WEIGHTS, cube->memory[1]}, {DNNL_ARG_DST, cube->memory[2]}};
    omp_set_num_threads(cube->threads);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    cube_check(dnnl_primitive_execute(cube->primitive, cube->stream, 3, arguments));
    cube_check(dnnl_stream_wait(cube->stream));
    clock_gettime(CLOCK_MONOTONIC, &end);
    omp_set_num_threads(1);
    double took = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    return 2.0 * cube->size * cube->size * cube->size / took;
}

#endif
