/* The library as it is installed: its table holds cubins and says how to call them, and without a driver it says so.
 *
 *     test_table no-driver      libcuda.so.1 can't be opened
 *     test_table stub           libcuda.so.1 is the stub: every kernel loads, and launches with values of the sizes it asks for */
#include "expect.h"

#include <string.h>

static void lists(void) {
  EXPECT(drmas_kernel_count() > 0);
  for (size_t i = 0; i < drmas_kernel_count(); ++i) {
    const drmas_kernel *kernel = drmas_kernel_at(i), *found = NULL;
    printf("%s %s: %zu arguments, %u threads, %u bytes shared, %zu bytes of code\n", kernel->name, kernel->arch,
           kernel->argument_count, kernel->threads, kernel->shared_bytes, kernel->image_bytes);
    EXPECT(drmas_find(kernel->name, kernel->arch, &found) == DRMAS_OK && found == kernel);
    EXPECT(kernel->image_bytes > 64 && memcmp(kernel->image, "\177ELF", 4) == 0);
    EXPECT(kernel->threads >= 32 && kernel->threads <= 1024 && kernel->threads % 32 == 0);
  }
  EXPECT(drmas_kernel_at(drmas_kernel_count()) == NULL);
}

static void reports_no_driver(void) {
  const drmas_kernel *kernel = NULL;
  EXPECT(drmas_load(drmas_kernel_at(0)) == DRMAS_NO_DRIVER);
  EXPECT(strstr(drmas_message(), "the CUDA driver can't be opened: ") == drmas_message());
  EXPECT(drmas_find(drmas_kernel_at(0)->name, NULL, &kernel) == DRMAS_NO_DRIVER && kernel == NULL);
}

static void launches_all(void) {
  const uint64_t zero = 0;
  const drmas_matrix matrix = {.address = 4096, .rows = 256, .columns = 256, .row_stride = 256};
  for (size_t i = 0; i < drmas_kernel_count(); ++i) {
    const drmas_kernel *kernel = drmas_kernel_at(i);
    drmas_value values[64];
    EXPECT(kernel->argument_count <= 64);
    for (size_t j = 0; j < kernel->argument_count; ++j) {
      values[j].size = kernel->arguments[j].size;
      values[j].data = values[j].size > sizeof zero ? (const void *)&matrix : &zero;
    }
    EXPECT(drmas_launch(kernel, 1, 1, 1, NULL, values, kernel->argument_count) == DRMAS_OK);
  }
}

int main(int count, char **words) {
  EXPECT(count == 2);
  lists();
  if (strcmp(words[1], "stub") == 0) {
    launches_all();
  } else {
    EXPECT(strcmp(words[1], "no-driver") == 0);
    reports_no_driver();
  }
  return 0;
}
