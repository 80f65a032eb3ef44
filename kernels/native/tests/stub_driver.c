/* A libcuda.so.1 without a GPU: it records what the launcher asks for. A map it encodes is all ones but for its first byte, which
 * counts the maps. Loads are counted from several threads at once. */
#include "stub_driver.h"

#include <sched.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT stub_record stub = {.context = 1, .major = 9, .minor = 0, .shared_attribute = -1};

static int fails(const char *function) {
  if (!stub.failing || strcmp(stub.failing, function)) return 0;
  stub.failing = NULL;
  return 1;
}

#define MAY_FAIL \
  if (fails(__func__)) return CUDA_ERROR_INVALID_VALUE

EXPORT CUresult cuInit(unsigned flags) {
  (void)flags;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_UNKNOWN";
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
  (void)error;
  *text = "asked for by the test";
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = stub.context ? (CUcontext)&stub : NULL; /* every context has the same address, as when one is freed and another made */
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetId(CUcontext context, unsigned long long *id) {
  (void)context;
  *id = stub.context;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  (void)device;
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? stub.major : stub.minor;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  MAY_FAIL;
  __atomic_fetch_add(&stub.loads, 1, __ATOMIC_SEQ_CST);
  for (int i = 0; i < 10; ++i) sched_yield(); /* another thread's turn */
  stub.image = image;
  *module = (CUmodule)image;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleUnload(CUmodule module) {
  (void)module;
  ++stub.unloads;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  MAY_FAIL;
  strncpy(stub.symbol, name, sizeof stub.symbol - 1);
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  (void)function;
  MAY_FAIL;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  stub.shared_attribute = value;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                       const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box,
                                       const cuuint32_t *step, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  MAY_FAIL;
  if (rank != 2 || (size_t)map % 64) return CUDA_ERROR_INVALID_VALUE;
  stub.maps[stub.encodes % STUB_TENSOR_MAPS] = (stub_tensor_map){
      type, rank, address, {shape[0], shape[1]}, strides[0], {box[0], box[1]}, {step[0], step[1]},
      interleave, swizzle, promotion, fill};
  memset(map, 0xFF, sizeof *map);
  *(unsigned char *)map = (unsigned char)++stub.encodes;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  (void)function;
  MAY_FAIL;
  ++stub.launches;
  stub.config = *config;
  stub.extra = extra;
  for (size_t i = 0; i < stub.count; ++i) memcpy(stub.parameters[i], parameters[i], stub.sizes[i]);
  return CUDA_SUCCESS;
}
