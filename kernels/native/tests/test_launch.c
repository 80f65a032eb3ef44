/* The launcher against the stub driver, with a table written by hand: what reaches the driver is what the table and the values say. */
#define _GNU_SOURCE /* RTLD_NOLOAD, barriers */

#include "expect.h"
#include "stub_driver.h"
#include "table.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

static const drmas_argument scale_arguments[] = {
    {.name = "x", .type = "*fp32", .size = 8, .multiple_of = 16},
    {.name = "length", .type = "i32", .size = 4, .multiple_of = 1},
    {.name = "factor", .type = "fp32", .size = 4, .multiple_of = 1},
    {.name = "stride", .type = "i64", .size = 8, .multiple_of = 16},
};

#define BF16_MATRIX .type = "tensordesc<bf16[128,64]>", .size = sizeof(drmas_matrix), .multiple_of = 1
#define BF16_BOX .element_type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, .element_size = 2, .swizzle = CU_TENSOR_MAP_SWIZZLE_128B, .box = {128, 64}

static const drmas_argument product_arguments[] = {
    {.name = "a", BF16_MATRIX, BF16_BOX},
    {.name = "depth", .type = "i32", .size = 4, .multiple_of = 1},
    {.name = "b", BF16_MATRIX, BF16_BOX},
};

static const unsigned char scale_image[] = "scale", product_image[] = "product", old_image[] = "old";

const drmas_kernel drmas_table[] = {
    {"scale", "sm_80", "scale_symbol", 128, 1024, scale_arguments, 4, old_image, sizeof old_image},
    {"scale", "sm_90", "scale_symbol", 128, 1024, scale_arguments, 4, scale_image, sizeof scale_image},
    {"product", "sm_90", "product_symbol", 256, 131104, product_arguments, 3, product_image, sizeof product_image},
};
const size_t drmas_table_count = 3;

static stub_record *stub;

static int says(const char *words) { return strstr(drmas_message(), words) != NULL; }

static const drmas_kernel *get(const char *name) {
  const drmas_kernel *kernel = NULL;
  EXPECT(drmas_find(name, NULL, &kernel) == DRMAS_OK);
  return kernel;
}

static void expect_parameter(size_t index, const void *value, size_t size) {
  EXPECT(stub->sizes[index] == size && memcmp(stub->parameters[index], value, size) == 0);
}

static void finds(void) {
  const drmas_kernel *kernel = NULL;
  EXPECT(drmas_kernel_count() == 3 && drmas_kernel_at(2) == &drmas_table[2] && drmas_kernel_at(3) == NULL);
  EXPECT(drmas_find("scale", "sm_90", &kernel) == DRMAS_OK && kernel == &drmas_table[1]);
  EXPECT(drmas_find("scale", NULL, &kernel) == DRMAS_OK && kernel == &drmas_table[1]);
  stub->major = 8, stub->minor = 9;
  EXPECT(drmas_find("scale", NULL, &kernel) == DRMAS_OK && kernel == &drmas_table[0]);
  EXPECT(drmas_find("product", NULL, &kernel) == DRMAS_NO_KERNEL && kernel == NULL);
  EXPECT(says("product is not compiled for sm_80, but for sm_90"));
  stub->major = 9, stub->minor = 0;
  EXPECT(drmas_find("nothing", NULL, &kernel) == DRMAS_NO_KERNEL && says("no kernel is named nothing"));
  EXPECT(drmas_find(NULL, NULL, &kernel) == DRMAS_BAD_ARGUMENT && drmas_find("scale", NULL, NULL) == DRMAS_BAD_ARGUMENT);
}

static void launches(void) {
  const drmas_kernel *kernel = get("scale");
  uint64_t x = 0x7f0000000100;
  int32_t length = -5;
  float factor = 2.5F;
  int64_t stride = 1LL << 40;
  const drmas_value values[] = {DRMAS_VALUE(x), DRMAS_VALUE(length), DRMAS_VALUE(factor), DRMAS_VALUE(stride)};
  const size_t sizes[] = {8, 4, 4, 8, 8, 8};
  const uint64_t none = 0;
  memcpy(stub->sizes, sizes, sizeof sizes);
  stub->count = 6;
  int here = 0;
  EXPECT(drmas_launch(kernel, 7, 3, 2, &here, values, 4) == DRMAS_OK);
  EXPECT(stub->launches == 1 && stub->image == scale_image && strcmp(stub->symbol, "scale_symbol") == 0);
  EXPECT(stub->config.gridDimX == 7 && stub->config.gridDimY == 3 && stub->config.gridDimZ == 2);
  EXPECT(stub->config.blockDimX == 128 && stub->config.blockDimY == 1 && stub->config.blockDimZ == 1);
  EXPECT(stub->config.sharedMemBytes == 1024 && stub->shared_attribute == -1); /* no need to ask for 1 KiB */
  EXPECT(stub->config.hStream == (CUstream)&here && stub->config.numAttrs == 0 && stub->extra == NULL);
  expect_parameter(0, &x, 8);
  expect_parameter(1, &length, 4);
  expect_parameter(2, &factor, 4);
  expect_parameter(3, &stride, 8);
  expect_parameter(4, &none, 8);
  expect_parameter(5, &none, 8);
  EXPECT(drmas_launch(kernel, 0, 3, 2, NULL, values, 4) == DRMAS_OK && stub->launches == 1); /* an empty grid */

  EXPECT(drmas_launch(kernel, 1, 1, 1, NULL, values, 3) == DRMAS_BAD_ARGUMENT && says("scale: 3 values; expected 4"));
  EXPECT(drmas_launch(kernel, 1, 1, 1, NULL, NULL, 4) == DRMAS_BAD_ARGUMENT && says("0 values; expected 4"));
  double wide = 2.5;
  drmas_value wrong[] = {DRMAS_VALUE(x), DRMAS_VALUE(length), DRMAS_VALUE(wide), DRMAS_VALUE(stride)};
  EXPECT(drmas_launch(kernel, 1, 1, 1, NULL, wrong, 4) == DRMAS_BAD_ARGUMENT);
  EXPECT(says("factor has 8 bytes; expected 4, it is fp32"));
  x += 8;
  EXPECT(drmas_launch(kernel, 0, 1, 1, NULL, values, 4) == DRMAS_BAD_ARGUMENT && says("x is 139637976727816; expected a multiple of 16"));
  x -= 8, stride += 1;
  EXPECT(drmas_launch(kernel, 1, 1, 1, NULL, values, 4) == DRMAS_BAD_ARGUMENT && says("stride is"));
  EXPECT(drmas_launch(NULL, 1, 1, 1, NULL, values, 4) == DRMAS_BAD_ARGUMENT && says("kernel is NULL") && stub->launches == 1);
}

static void encodes(void) {
  const drmas_kernel *kernel = get("product");
  drmas_matrix a = {.address = 0x1000, .rows = 300, .columns = 72, .row_stride = 80};
  drmas_matrix b = {.address = 0x2000, .rows = 70000, .columns = 72, .row_stride = 1 << 20};
  int32_t depth = 72;
  const drmas_value values[] = {DRMAS_VALUE(a), DRMAS_VALUE(depth), DRMAS_VALUE(b)};
  const size_t sizes[] = {128, 4, 4, 8, 8, 4, 128, 4, 4, 8, 8, 8, 8};
  const int64_t one = 1;
  memcpy(stub->sizes, sizes, sizeof sizes);
  stub->count = 13;
  EXPECT(drmas_launch(kernel, 3, 547, 1, NULL, values, 3) == DRMAS_OK);
  EXPECT(stub->encodes == 2 && stub->config.blockDimX == 256);
  EXPECT(stub->config.sharedMemBytes == 131104 && stub->shared_attribute == 131104);
  const stub_tensor_map *map = &stub->maps[1];
  EXPECT(map->type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 && map->address == (void *)0x2000);
  EXPECT(map->shape[0] == 72 && map->shape[1] == 70000 && map->stride == 2 << 20); /* innermost first, bytes */
  EXPECT(map->box[0] == 64 && map->box[1] == 128 && map->step[0] == 1 && map->step[1] == 1);
  EXPECT(map->interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && map->swizzle == CU_TENSOR_MAP_SWIZZLE_128B);
  EXPECT(map->promotion == CU_TENSOR_MAP_L2_PROMOTION_L2_128B && map->fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  unsigned char expected[128];
  memset(expected, 0xFF, sizeof expected);
  expected[0] = 2;
  expect_parameter(6, expected, 128);
  expected[0] = 1, expected[10] = 0xDF; /* bit 21 of the second word: a is below 128 KiB */
  expect_parameter(0, expected, 128);
  const int32_t rows = 300, columns = 72;
  const int64_t stride = 1 << 20;
  expect_parameter(1, &rows, 4);
  expect_parameter(2, &columns, 4);
  expect_parameter(5, &depth, 4);
  expect_parameter(9, &stride, 8);
  expect_parameter(10, &one, 8);

  const drmas_matrix good = a;
  a.address = 0x1008;
  EXPECT(drmas_launch(kernel, 1, 1, 1, NULL, values, 3) == DRMAS_BAD_ARGUMENT && says("the address of a is 4104; expected a multiple of 16"));
  a = good, a.row_stride = 76;
  EXPECT(drmas_launch(kernel, 1, 1, 1, NULL, values, 3) == DRMAS_BAD_ARGUMENT && says("row_stride of a is 76"));
  a = good, a.row_stride = 64;
  EXPECT(drmas_launch(kernel, 1, 1, 1, NULL, values, 3) == DRMAS_BAD_ARGUMENT && says("expected at least the columns"));
  a = good, a.rows = 0;
  EXPECT(drmas_launch(kernel, 1, 1, 1, NULL, values, 3) == DRMAS_BAD_ARGUMENT && says("rows of a is 0"));
  a = good, a.rows = 1LL << 31;
  EXPECT(drmas_launch(kernel, 1, 1, 1, NULL, values, 3) == DRMAS_BAD_ARGUMENT && says("rows of a is 2147483648"));
  a = good, stub->failing = "cuTensorMapEncodeTiled";
  EXPECT(drmas_launch(kernel, 1, 1, 1, NULL, values, 3) == DRMAS_DRIVER_ERROR);
  EXPECT(says("product: cuTensorMapEncodeTiled of a gives CUDA_ERROR_INVALID_VALUE (asked for by the test)"));
}

static void loads(void) {
  const drmas_kernel *kernel = get("product");
  const int before = stub->loads;
  EXPECT(drmas_load(kernel) == DRMAS_OK && stub->loads == before); /* this context has it */
  EXPECT(drmas_load(NULL) == DRMAS_BAD_ARGUMENT && says("kernel is NULL"));
  stub->context = 2;
  EXPECT(drmas_load(kernel) == DRMAS_OK && stub->loads == before + 1);
  stub->context = 1;
  EXPECT(drmas_load(kernel) == DRMAS_OK && stub->loads == before + 1);
  stub->context = 0;
  EXPECT(drmas_load(kernel) == DRMAS_NO_CONTEXT && says("no CUDA context"));
  stub->context = 3;
  const char *calls[] = {"cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"};
  for (int i = 0; i < 3; ++i) {
    stub->failing = calls[i];
    EXPECT(drmas_load(kernel) == DRMAS_DRIVER_ERROR && says(calls[i]));
    EXPECT(stub->unloads == i); /* what was loaded is unloaded again */
  }
  const int failed = stub->loads;
  EXPECT(drmas_load(kernel) == DRMAS_OK && stub->loads == failed + 1); /* a failure isn't kept */
  stub->failing = "cuLaunchKernelEx";
  uint64_t x = 16, stride = 16;
  int32_t length = 1;
  const drmas_value values[] = {DRMAS_VALUE(x), DRMAS_VALUE(length), DRMAS_VALUE(length), DRMAS_VALUE(stride)};
  stub->count = 0;
  EXPECT(drmas_launch(get("scale"), 1, 1, 1, NULL, values, 4) == DRMAS_DRIVER_ERROR && says("scale: cuLaunchKernelEx gives"));
}

enum { THREADS = 8, ROUNDS = 50 };

static void *load_both(void *barrier) {
  pthread_barrier_wait((pthread_barrier_t *)barrier);
  EXPECT(drmas_load(&drmas_table[1]) == DRMAS_OK && drmas_load(&drmas_table[2]) == DRMAS_OK);
  return NULL;
}

static void loads_once_for_all_threads(void) {
  const int before = stub->loads;
  for (int round = 0; round < ROUNDS; ++round) {
    pthread_t threads[THREADS];
    pthread_barrier_t barrier;
    stub->context = 100 + (unsigned long long)round;
    EXPECT(pthread_barrier_init(&barrier, NULL, THREADS) == 0);
    for (int i = 0; i < THREADS; ++i) EXPECT(pthread_create(&threads[i], NULL, load_both, &barrier) == 0);
    for (int i = 0; i < THREADS; ++i) EXPECT(pthread_join(threads[i], NULL) == 0);
    pthread_barrier_destroy(&barrier);
  }
  EXPECT(stub->loads == before + 2 * ROUNDS);
}

int main(void) {
  const drmas_kernel *kernel = NULL;
  EXPECT(strcmp(drmas_message(), "") == 0);
  EXPECT(drmas_find("scale", NULL, &kernel) == DRMAS_OK); /* opens the driver */
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  stub = library ? (stub_record *)dlsym(library, "stub") : NULL;
  EXPECT(stub != NULL);
  finds();
  launches();
  encodes();
  loads();
  loads_once_for_all_threads();
  return 0;
}
