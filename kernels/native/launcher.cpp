// The C interface of drmas_kernels.h over the CUDA driver API. The table of kernels is another source: generated from the manifests
// (manifest.py), or written by hand in the tests.
#include "drmas_kernels.h"
#include "table.h"

#include <cuda.h>
#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#if CUDA_VERSION < 12000
#error "cuda.h is of a CUDA older than 12.0, which knows no tensor maps; pass -DDRMAS_CUDA_INCLUDE=<folder of a newer cuda.h>"
#endif

namespace {

thread_local char message[512] = "";

[[gnu::format(printf, 2, 3)]] drmas_status fail(drmas_status status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return status;
}

// Functions of the driver, under the names that cuda.h gives their current versions.
#define DRMAS_DRIVER_FUNCTIONS(X)                                                                                     \
  X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString) X(cuCtxGetCurrent) X(cuCtxGetId)              \
  X(cuCtxGetDevice) X(cuDeviceGetAttribute) X(cuModuleLoadData) X(cuModuleGetFunction) X(cuModuleUnload)              \
  X(cuFuncSetAttribute) X(cuLaunchKernelEx) X(cuTensorMapEncodeTiled)
#define DRMAS_TEXT(name) #name
#define DRMAS_MEMBER(name) decltype(&::name) name = nullptr;
#define DRMAS_RESOLVE(name)                                                                                           \
  name = reinterpret_cast<decltype(name)>(dlsym(library, DRMAS_TEXT(name)));                                          \
  if (!name) {                                                                                                        \
    problem = "libcuda.so.1 has no " DRMAS_TEXT(name) ": the driver is older than CUDA 12";                           \
    return;                                                                                                           \
  }

struct Driver {
  DRMAS_DRIVER_FUNCTIONS(DRMAS_MEMBER)
  int version = 0;
  std::string problem;

  Driver() {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      const char *reason = dlerror();
      problem = std::string("the CUDA driver can't be opened: ") + (reason ? reason : "libcuda.so.1");
      return;
    }
    DRMAS_DRIVER_FUNCTIONS(DRMAS_RESOLVE)
    if (const CUresult result = cuInit(0)) {
      problem = "the CUDA driver finds no usable device: cuInit gives " + describe(result);
      return;
    }
    cuDriverGetVersion(&version);
  }

  std::string describe(CUresult result) const {
    const char *name = nullptr, *text = nullptr;
    cuGetErrorName(result, &name);
    cuGetErrorString(result, &text);
    return std::string(name ? name : "an unknown error") + (text ? std::string(" (") + text + ")" : "");
  }
};

// Opened by the first call that needs it, and never closed: other code of the process may use it at its end.
const Driver &driver() {
  static const Driver &opened = *new Driver;
  return opened;
}

drmas_status fail_driver(const char *subject, const char *call, CUresult result) {
  return fail(DRMAS_DRIVER_ERROR, "%s: %s gives %s", subject, call, driver().describe(result).c_str());
}

// The context that is current in this thread, by an id that is never used again, unlike its address.
drmas_status current_context(unsigned long long &id) {
  const Driver &cuda = driver();
  if (!cuda.problem.empty()) return fail(DRMAS_NO_DRIVER, "%s", cuda.problem.c_str());
  CUcontext context = nullptr;
  if (const CUresult result = cuda.cuCtxGetCurrent(&context)) return fail_driver("context", "cuCtxGetCurrent", result);
  if (!context) return fail(DRMAS_NO_CONTEXT, "no CUDA context is current in this thread; make one so: cuCtxSetCurrent, cudaSetDevice");
  if (const CUresult result = cuda.cuCtxGetId(context, &id)) return fail_driver("context", "cuCtxGetId", result);
  return DRMAS_OK;
}

// The architecture to take for the current context's device: kernels of sm_80 run on every 8.x, later ones on their own only.
drmas_status current_arch(std::string &arch) {
  unsigned long long id = 0;
  if (const drmas_status status = current_context(id)) return status;
  CUdevice device = 0;
  int major = 0, minor = 0;
  const Driver &cuda = driver();
  if (const CUresult result = cuda.cuCtxGetDevice(&device)) return fail_driver("device", "cuCtxGetDevice", result);
  for (const auto &[attribute, value] : {std::pair{CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &major},
                                         std::pair{CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &minor}})
    if (const CUresult result = cuda.cuDeviceGetAttribute(value, attribute, device))
      return fail_driver("device", "cuDeviceGetAttribute", result);
  arch = major == 8 ? "sm_80" : "sm_" + std::to_string(major) + std::to_string(minor);
  return DRMAS_OK;
}

// Loads a module into the current context. Modules live as long as their context.
drmas_status load(const drmas_kernel &kernel, CUfunction &function) {
  const Driver &cuda = driver();
  CUmodule module = nullptr;
  if (const CUresult result = cuda.cuModuleLoadData(&module, kernel.image))
    return fail_driver(kernel.name, ("cuModuleLoadData of " + std::string(kernel.arch)).c_str(), result);
  const char *call = "cuModuleGetFunction";
  CUresult result = cuda.cuModuleGetFunction(&function, module, kernel.symbol);
  if (!result && kernel.shared_bytes > 48 * 1024) {  // more than any block may have unasked
    call = "cuFuncSetAttribute of the shared memory";
    result = cuda.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(kernel.shared_bytes));
  }
  if (!result) return DRMAS_OK;
  cuda.cuModuleUnload(module);
  return fail_driver(kernel.name, call, result);
}

// The kernel's function in the current context, loaded once.
drmas_status function_of(const drmas_kernel &kernel, CUfunction &function) {
  static std::mutex &mutex = *new std::mutex;
  static auto &loaded = *new std::map<std::pair<unsigned long long, const drmas_kernel *>, CUfunction>;
  unsigned long long id = 0;
  if (const drmas_status status = current_context(id)) return status;
  const std::lock_guard lock(mutex);
  const auto [entry, fresh] = loaded.try_emplace({id, &kernel}, nullptr);
  if (fresh)
    if (const drmas_status status = load(kernel, entry->second)) {
      loaded.erase(entry);
      return status;
    }
  function = entry->second;
  return DRMAS_OK;
}

bool is_matrix(const drmas_argument &argument) { return std::strncmp(argument.type, "tensordesc", 10) == 0; }

drmas_status check_matrix(const char *kernel, const drmas_argument &argument, const drmas_matrix &matrix) {
  const auto bad = [&](const char *what, long long is, const char *expected) {
    return fail(DRMAS_BAD_ARGUMENT, "%s: %s of %s is %lld; expected %s", kernel, what, argument.name, is, expected);
  };
  if (matrix.address % 16) return bad("the address", static_cast<long long>(matrix.address), "a multiple of 16");
  if (matrix.rows < 1 || matrix.rows > INT32_MAX) return bad("rows", matrix.rows, "1 to 2^31 - 1");
  if (matrix.columns < 1 || matrix.columns > INT32_MAX) return bad("columns", matrix.columns, "1 to 2^31 - 1");
  if (matrix.row_stride < matrix.columns) return bad("row_stride", matrix.row_stride, "at least the columns");
  if (matrix.row_stride > INT64_MAX / argument.element_size || matrix.row_stride * argument.element_size % 16)
    return bad("row_stride", matrix.row_stride, "a multiple of 16 bytes");
  return DRMAS_OK;
}

// Count, sizes, and the multiples that the machine code relies on.
drmas_status check(const drmas_kernel &kernel, const drmas_value *values, size_t count) {
  if (count != kernel.argument_count || (count && !values))
    return fail(DRMAS_BAD_ARGUMENT, "%s: %zu values; expected %zu", kernel.name, values ? count : 0, kernel.argument_count);
  for (size_t i = 0; i < count; ++i) {
    const drmas_argument &argument = kernel.arguments[i];
    if (!values[i].data || values[i].size != argument.size)
      return fail(DRMAS_BAD_ARGUMENT, "%s: %s has %zu bytes; expected %zu, it is %s", kernel.name, argument.name,
                  values[i].data ? values[i].size : 0, argument.size, argument.type);
    if (is_matrix(argument)) continue;
    uint64_t number = 0;  // the low bytes come first on every host that CUDA has
    std::memcpy(&number, values[i].data, argument.size);
    if (number % argument.multiple_of)
      return fail(DRMAS_BAD_ARGUMENT, "%s: %s is %llu; expected a multiple of %u", kernel.name, argument.name,
                  static_cast<unsigned long long>(number), argument.multiple_of);
  }
  return DRMAS_OK;
}

// What a tensordesc becomes: five parameters of the kernel.
struct Descriptor {
  CUtensorMap map;
  int32_t shape[2];
  int64_t strides[2];
};

drmas_status encode(const char *kernel, const drmas_argument &argument, const drmas_matrix &matrix, Descriptor &descriptor) {
  if (const drmas_status status = check_matrix(kernel, argument, matrix)) return status;
  descriptor.shape[0] = static_cast<int32_t>(matrix.rows);
  descriptor.shape[1] = static_cast<int32_t>(matrix.columns);
  descriptor.strides[0] = matrix.row_stride;
  descriptor.strides[1] = 1;
  // The driver counts dimensions from the innermost on.
  const cuuint64_t shape[] = {static_cast<cuuint64_t>(matrix.columns), static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t stride[] = {static_cast<cuuint64_t>(matrix.row_stride) * argument.element_size};
  const cuuint32_t box[] = {argument.box[1], argument.box[0]}, step[] = {1, 1};
  const Driver &cuda = driver();
  const CUresult result = cuda.cuTensorMapEncodeTiled(
      &descriptor.map, static_cast<CUtensorMapDataType>(argument.element_type), 2, reinterpret_cast<void *>(matrix.address), shape,
      stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(argument.swizzle),
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result) return fail_driver(kernel, ("cuTensorMapEncodeTiled of " + std::string(argument.name)).c_str(), result);
  // Drivers up to 13.1 set a bit too many for matrices below 128 KiB; CUTLASS (commit b7ecaa6) and Triton clear it.
  const cuuint64_t bytes = stride[0] * (shape[1] - 1) + shape[0] * argument.element_size;
  if (cuda.version <= 13010 && bytes < 128 * 1024) descriptor.map.opaque[1] &= ~(cuuint64_t{1} << 21);
  return DRMAS_OK;
}

drmas_status launch(const drmas_kernel &kernel, const unsigned (&grid)[3], void *stream, const drmas_value *values, size_t count) {
  if (const drmas_status status = check(kernel, values, count)) return status;
  if (!grid[0] || !grid[1] || !grid[2]) return DRMAS_OK;
  CUfunction function = nullptr;
  if (const drmas_status status = function_of(kernel, function)) return status;
  std::vector<Descriptor> descriptors(count);
  std::vector<void *> parameters;
  for (size_t i = 0; i < count; ++i) {
    if (!is_matrix(kernel.arguments[i])) {
      parameters.push_back(const_cast<void *>(values[i].data));
      continue;
    }
    drmas_matrix matrix;
    std::memcpy(&matrix, values[i].data, sizeof matrix);
    Descriptor &one = descriptors[i];
    if (const drmas_status status = encode(kernel.name, kernel.arguments[i], matrix, one)) return status;
    for (void *part : {static_cast<void *>(&one.map), static_cast<void *>(&one.shape[0]), static_cast<void *>(&one.shape[1]),
                       static_cast<void *>(&one.strides[0]), static_cast<void *>(&one.strides[1])})
      parameters.push_back(part);
  }
  CUdeviceptr none = 0;  // Triton's last two parameters: scratch memory, which no kernel of the table takes
  parameters.insert(parameters.end(), 2, &none);
  CUlaunchConfig config = {};
  config.gridDimX = grid[0], config.gridDimY = grid[1], config.gridDimZ = grid[2];
  config.blockDimX = kernel.threads, config.blockDimY = 1, config.blockDimZ = 1;
  config.sharedMemBytes = kernel.shared_bytes;
  config.hStream = static_cast<CUstream>(stream);
  if (const CUresult result = driver().cuLaunchKernelEx(&config, function, parameters.data(), nullptr))
    return fail_driver(kernel.name, "cuLaunchKernelEx", result);
  return DRMAS_OK;
}

drmas_status find(const char *name, const char *arch, const drmas_kernel *&kernel) {
  std::string wanted = arch ? arch : "";
  if (!arch)
    if (const drmas_status status = current_arch(wanted)) return status;
  std::string others;
  for (size_t i = 0; i < drmas_table_count; ++i) {
    if (std::strcmp(drmas_table[i].name, name)) continue;
    if (wanted == drmas_table[i].arch) {
      kernel = &drmas_table[i];
      return DRMAS_OK;
    }
    others += std::string(" ") + drmas_table[i].arch;
  }
  if (others.empty()) return fail(DRMAS_NO_KERNEL, "no kernel is named %s", name);
  return fail(DRMAS_NO_KERNEL, "%s is not compiled for %s, but for%s", name, wanted.c_str(), others.c_str());
}

// No exception leaves the library.
template <typename Call>
drmas_status guarded(Call call) noexcept {
  try {
    return call();
  } catch (const std::bad_alloc &) {
    return fail(DRMAS_NO_MEMORY, "out of host memory");
  } catch (const std::exception &error) {
    return fail(DRMAS_DRIVER_ERROR, "%s", error.what());
  }
}

}  // namespace

size_t drmas_kernel_count(void) { return drmas_table_count; }

const drmas_kernel *drmas_kernel_at(size_t index) { return index < drmas_table_count ? &drmas_table[index] : nullptr; }

const char *drmas_message(void) { return message; }

drmas_status drmas_find(const char *name, const char *arch, const drmas_kernel **kernel) {
  if (!name || !kernel) return fail(DRMAS_BAD_ARGUMENT, "drmas_find: name or kernel is NULL");
  *kernel = nullptr;
  return guarded([&] { return find(name, arch, *kernel); });
}

drmas_status drmas_load(const drmas_kernel *kernel) {
  if (!kernel) return fail(DRMAS_BAD_ARGUMENT, "drmas_load: kernel is NULL");
  CUfunction function = nullptr;
  return guarded([&] { return function_of(*kernel, function); });
}

drmas_status drmas_launch(const drmas_kernel *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, void *stream,
                          const drmas_value *values, size_t count) {
  if (!kernel) return fail(DRMAS_BAD_ARGUMENT, "drmas_launch: kernel is NULL");
  return guarded([&] { return launch(*kernel, {grid_x, grid_y, grid_z}, stream, values, count); });
}
