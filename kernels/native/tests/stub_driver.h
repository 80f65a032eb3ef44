/* What the stub driver was asked to do. The tests get at it with dlsym("stub"), after the launcher has opened the same library. */
#ifndef DRMAS_STUB_DRIVER_H
#define DRMAS_STUB_DRIVER_H

#include <cuda.h>

enum { STUB_PARAMETERS = 64, STUB_TENSOR_MAPS = 4 };

typedef struct stub_tensor_map {
  CUtensorMapDataType type;
  cuuint32_t rank;
  void *address;
  cuuint64_t shape[2], stride;
  cuuint32_t box[2], step[2];
  CUtensorMapInterleave interleave;
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion promotion;
  CUtensorMapFloatOOBfill fill;
} stub_tensor_map;

typedef struct stub_record {
  /* set by the test */
  unsigned long long context; /* the id of the current context; 0: there is none */
  int major, minor;           /* of the device */
  const char *failing;        /* the function whose next call fails */
  size_t sizes[STUB_PARAMETERS]; /* of the parameters to read at a launch */
  size_t count;
  /* set by the stub */
  int loads, unloads, launches, encodes;
  const void *image;
  char symbol[256];
  int shared_attribute; /* -1: never set */
  CUlaunchConfig config;
  void *extra;
  unsigned char parameters[STUB_PARAMETERS][sizeof(CUtensorMap)];
  stub_tensor_map maps[STUB_TENSOR_MAPS];
} stub_record;

#endif
