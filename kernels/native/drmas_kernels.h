/* The kernels of drmas without Python and without a compiler at run time: machine code made by `cmake --build`, launched through
 * the CUDA driver, which is opened when it is first needed (a machine without one can link and load this library).
 *
 *     const drmas_kernel *kernel;
 *     if (drmas_find("slot_squares", NULL, &kernel) != DRMAS_OK) puts(drmas_message());
 *     CUdeviceptr partial = ..., slot_tiles = ..., squared = ...;
 *     const drmas_value values[] = {DRMAS_VALUE(partial), DRMAS_VALUE(slot_tiles), DRMAS_VALUE(squared)};
 *     if (drmas_launch(kernel, slots, 1, 1, stream, values, 3) != DRMAS_OK) puts(drmas_message());
 *
 * Every function may be called from any thread and never ends the process. What a kernel computes, and with which grid, is said
 * by the Python module that holds it; argument names and order are the same. */
#ifndef DRMAS_KERNELS_H
#define DRMAS_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DRMAS_API __attribute__((visibility("default")))

typedef enum drmas_status {
  DRMAS_OK = 0,
  DRMAS_NO_DRIVER = 1,     /* libcuda.so.1 can't be opened, is too old, or finds no device */
  DRMAS_NO_CONTEXT = 2,    /* no CUDA context is current in this thread */
  DRMAS_NO_KERNEL = 3,     /* no kernel of this name, or none for this architecture */
  DRMAS_BAD_ARGUMENT = 4,  /* a NULL, or the count, size, alignment or shape of a kernel's arguments */
  DRMAS_DRIVER_ERROR = 5,  /* a call of the driver failed */
  DRMAS_NO_MEMORY = 6
} drmas_status;

/* An argument of a kernel. */
typedef struct drmas_argument {
  const char *name;
  const char *type;      /* "*bf16" and other pointers, "i32", "i64", "fp32", "tensordesc<bf16[128,64]>" */
  size_t size;           /* bytes of the value to pass; sizeof(drmas_matrix) for a tensordesc */
  unsigned multiple_of;  /* the pointer or integer is a multiple of it: 16 or 1 */
  unsigned element_type; /* from here on for a tensordesc: CUtensorMapDataType, */
  unsigned element_size; /* bytes of an element, */
  unsigned swizzle;      /* CUtensorMapSwizzle, */
  unsigned box[2];       /* rows and columns of what one instruction copies */
} drmas_argument;

/* A kernel compiled for an architecture. */
typedef struct drmas_kernel {
  const char *name;
  const char *arch; /* "sm_90" */
  const char *symbol;
  unsigned threads;      /* of a block */
  unsigned shared_bytes; /* of a block, all of it dynamic */
  const drmas_argument *arguments;
  size_t argument_count;
  const unsigned char *image; /* the cubin */
  size_t image_bytes;
} drmas_kernel;

/* A value to launch with, in host memory, of the argument's size. A device pointer is a value of eight bytes. */
typedef struct drmas_value {
  const void *data;
  size_t size;
} drmas_value;

#define DRMAS_VALUE(variable) {&(variable), sizeof(variable)}

/* The value of a tensordesc: a matrix in device memory, columns side by side. Address and row stride are multiples of 16 bytes. */
typedef struct drmas_matrix {
  uint64_t address;
  int64_t rows;
  int64_t columns;
  int64_t row_stride; /* in elements */
} drmas_matrix;

/* The kernels of this library. NULL where index is not below the count. */
DRMAS_API size_t drmas_kernel_count(void);
DRMAS_API const drmas_kernel *drmas_kernel_at(size_t index);

/* Find a kernel. arch NULL: the one for the device of the current context. */
DRMAS_API drmas_status drmas_find(const char *name, const char *arch, const drmas_kernel **kernel);

/* Load a kernel into the current context, which its first launch there does otherwise: do it before capturing a graph. */
DRMAS_API drmas_status drmas_load(const drmas_kernel *kernel);

/* Launch on a stream (a CUstream or cudaStream_t, NULL: the default one) of the current context, with one value for each argument,
 * in order. The values are read before it returns. An empty grid is no launch. */
DRMAS_API drmas_status drmas_launch(const drmas_kernel *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, void *stream,
                                    const drmas_value *values, size_t count);

/* The last failure in this thread, in words; "" where there was none. Valid until the thread's next failure. */
DRMAS_API const char *drmas_message(void);

#ifdef __cplusplus
}
#endif

#endif
